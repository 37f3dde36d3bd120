"""What the environment says to a plug-in: variables that begin with its prefix, read and checked when its server starts.

A server that runs with another setting than was meant is worse than one that does not start. So a value that can't be used is
an error, and so is a variable that nobody reads.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from shmring.door import parse_nbytes, validate_name

__all__ = ["Reader", "SettingError", "choice", "name_the_run", "ring_name", "run_variable", "seconds"]


class SettingError(ValueError):
    """A variable of the environment has a value that can't be used.

    Attributes:
        name: the variable.
        value: its value.
    """

    def __init__(self, name: str, value: str, problem: str, switch: str) -> None:
        super().__init__(f"{name}={value!r} can't be used: {problem}. Correct it, or unset {switch} to run without shmring.")
        self.name = name
        self.value = value


class Reader:
    """Reads the variables of a plug-in.

    Args:
        environment: where they are.
        prefix: what their names begin with. The variable that is called so switches the plug-in on.
        names: what may stand behind the prefix and "_".

    Raises:
        SettingError: the switch is neither on nor off, or a variable has another name.
    """

    def __init__(self, environment: Mapping[str, str], prefix: str, names: Sequence[str]) -> None:
        self._environment = environment
        self._prefix = prefix
        for variable in environment:
            if variable.startswith(f"{prefix}_") and variable.removeprefix(f"{prefix}_") not in names:
                known = ", ".join(f"{prefix}_{name}" for name in names)
                raise SettingError(variable, environment[variable], f"there is no such setting, but {known}", prefix)
        self.value("", "1", choice("0", "1"), "0 (off) or 1 (on)")

    def value(self, name: str, default: Any, parse: Callable[[str], Any], expected: str) -> Any:
        """Returns what a variable says; an empty one says nothing.

        Raises:
            SettingError: it can't be used.
        """
        variable = f"{self._prefix}_{name}" if name else self._prefix
        text = self._environment.get(variable, "").strip()
        if not text:
            return default
        try:
            return parse(text)
        except ValueError:
            raise SettingError(variable, text, f"it has to be {expected}", self._prefix) from None

    def nbytes(self, name: str, default: int, least: int, expected: str) -> int:
        """Returns a size; otherwise as :meth:`value`."""

        def parse(text: str) -> int:
            nbytes = parse_nbytes(text)
            if nbytes < least:
                raise ValueError
            return nbytes

        nbytes: int = self.value(name, default, parse, expected)
        return nbytes


def choice(*values: str) -> Callable[[str], str]:
    """Returns what takes one of these values."""

    def parse(text: str) -> str:
        if text not in values:
            raise ValueError
        return text

    return parse


def seconds(least: float, most: float) -> Callable[[str], float]:
    """Returns what takes seconds between these."""

    def parse(text: str) -> float:
        seconds = float(text)
        if not least <= seconds <= most:  # which a NaN is not, either
            raise ValueError
        return seconds

    return parse


def ring_name(text: str) -> str:
    """Takes what rings are called, with room for "-" and the number of a ring: at most 56 characters."""
    return validate_name(f"{text}-1234567")[:-8]


def run_variable(prefix: str) -> str:
    """What the first process of a server tells the others by: what its rings are called."""
    return f"_{prefix}_RUN"


def name_the_run(prefix: str, server: str, environment: MutableMapping[str, str] | None = None) -> bool:
    """Gives a server's rings a name, once, in the first of its processes; all that it starts inherit it.

    Args:
        prefix: of the plug-in's variables.
        server: what the name begins with.
        environment: of this process.

    Returns:
        Whether this is that process.
    """
    environment = os.environ if environment is None else environment
    variable = run_variable(prefix)
    if variable in environment:
        return False
    environment[variable] = f"{server}-{os.getpid()}-{secrets.token_hex(3)}"
    return True
