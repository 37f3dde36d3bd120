"""What the environment says: vLLM is configured so, and its processes inherit it.

Each variable is a field of :class:`Settings`, checked when vLLM starts: a server that runs with another setting than was
meant is worse than one that does not start. ``docs/vllm.md`` has a table of them, which a test compares with this file.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Literal

from shmring.config import parse_nbytes, validate_name

__all__ = ["NAMES", "PREFIX", "SettingError", "Settings", "name_the_run"]

PREFIX = "SHMRING_VLLM"
NAMES = ("SLAB", "MIN_NBYTES", "WAIT_S", "KEEP", "TAKE_TIMEOUT_S", "PIN", "CHECK", "NAME")  # each behind the prefix and "_"
_RUN = f"_{PREFIX}_RUN"  # set by the first process of a server for the others: what its rings are called

_MIN_SLAB_NBYTES = 16 << 20  # a slab of a few pictures; less is a typing error
_LEAST_MIN_NBYTES = 16 << 10  # below that a tensor travels in shmring's message anyway, and vLLM's carries it as well
_LONGEST_WAIT_S = 10.0  # a request that waits longer for space had better gone inline
_LONGEST_TAKE_S = 60.0  # no other request is decoded meanwhile


class SettingError(ValueError):
    """A variable of the environment has a value that can't be used.

    Attributes:
        name: the variable.
        value: its value.
    """

    def __init__(self, name: str, value: str, problem: str) -> None:
        super().__init__(f"{name}={value!r} can't be used: {problem}. Correct it, or unset {PREFIX} to run without shmring.")
        self.name = name
        self.value = value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The plug-in's settings. Sizes in bytes.

    Attributes:
        slab_nbytes: ``SHMRING_VLLM_SLAB``, the slab of each engine core.
        min_nbytes: ``SHMRING_VLLM_MIN_NBYTES``, smaller tensors stay in vLLM's message.
        wait_s: ``SHMRING_VLLM_WAIT_S``, how long a request may wait for space before its tensor goes inline.
        keep_nbytes: ``SHMRING_VLLM_KEEP``, what each slab may hold of tensors that vLLM's processor cache would send again.
        take_timeout_s: ``SHMRING_VLLM_TAKE_TIMEOUT_S``, how long an engine core waits for a tensor that a request names.
        pin: ``SHMRING_VLLM_PIN``, whether the slab is registered with CUDA; as ``RingConfig.pin``.
        check: ``SHMRING_VLLM_CHECK``, whether each tensor's checksum is compared at the other end, for finding errors.
        name: ``SHMRING_VLLM_NAME``, what rings are called, followed by the engine core's number.
    """

    slab_nbytes: int = 1 << 30
    min_nbytes: int = 2 << 20  # about a megabyte costs as much in waking both ends as it saves
    wait_s: float = 0.05
    keep_nbytes: int = 1 << 29
    take_timeout_s: float = 5.0
    pin: Literal["auto", "on", "off"] = "auto"
    check: bool = False
    name: str = "vllm"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Reads and checks all of them.

        Raises:
            SettingError: one can't be used.
        """
        read = _Reader(os.environ if environment is None else environment)
        read.refuse_unknown()
        read.value("", "1", _choice("0", "1"), "0 (off) or 1 (on)")
        slab_nbytes = read.nbytes("SLAB", cls.slab_nbytes, _MIN_SLAB_NBYTES, "a size of 16MiB or more, such as 4GiB")
        return cls(
            slab_nbytes=slab_nbytes,
            min_nbytes=read.nbytes("MIN_NBYTES", cls.min_nbytes, _LEAST_MIN_NBYTES, "a size of 16KiB or more, such as 64KiB"),
            wait_s=read.value("WAIT_S", cls.wait_s, _seconds(0, _LONGEST_WAIT_S), "seconds from 0 to 10"),
            keep_nbytes=read.nbytes("KEEP", slab_nbytes // 2, 0, "a size, such as 512MiB, or 0 to keep nothing"),
            take_timeout_s=read.value(
                "TAKE_TIMEOUT_S", cls.take_timeout_s, _seconds(0.01, _LONGEST_TAKE_S), "seconds from 0.01 to 60"
            ),
            pin=read.value("PIN", cls.pin, _choice("auto", "on", "off"), "auto, on or off"),
            check=read.value("CHECK", "0", _choice("0", "1"), "0 or 1") == "1",
            name=read.value(
                "NAME", read.environment.get(_RUN, cls.name), _ring_name, "letters, digits, '.', '_' and '-', at most 56"
            ),
        )

    def ring_name(self, engine_index: int) -> str:
        """What an engine core's ring is called."""
        return f"{self.name}-{engine_index}"


def name_the_run(environment: MutableMapping[str, str] | None = None) -> bool:
    """Gives this server's rings a name, once, in the first of its processes; all that it starts inherit it.

    Returns:
        Whether this is that process.
    """
    environment = os.environ if environment is None else environment
    if _RUN in environment:
        return False
    environment[_RUN] = f"vllm-{os.getpid()}-{secrets.token_hex(3)}"
    return True


class _Reader:
    """Reads variables that begin with the prefix."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment

    def refuse_unknown(self) -> None:
        """A variable that nobody reads is a typing error."""
        for variable in self.environment:
            if variable.startswith(f"{PREFIX}_") and variable.removeprefix(f"{PREFIX}_") not in NAMES:
                known = ", ".join(f"{PREFIX}_{name}" for name in NAMES)
                raise SettingError(variable, self.environment[variable], f"there is no such setting, but {known}")

    def value(self, name: str, default: Any, parse: Callable[[str], Any], expected: str) -> Any:
        """Returns what a variable says; an empty one says nothing."""
        variable = f"{PREFIX}_{name}" if name else PREFIX
        text = self.environment.get(variable, "").strip()
        if not text:
            return default
        try:
            return parse(text)
        except ValueError:
            raise SettingError(variable, text, f"it has to be {expected}") from None

    def nbytes(self, name: str, default: int, least: int, expected: str) -> int:
        """Returns a size."""

        def parse(text: str) -> int:
            nbytes = parse_nbytes(text)
            if nbytes < least:
                raise ValueError
            return nbytes

        nbytes: int = self.value(name, default, parse, expected)
        return nbytes


def _choice(*values: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in values:
            raise ValueError
        return text

    return parse


def _seconds(least: float, most: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        seconds = float(text)
        if not least <= seconds <= most:  # which a NaN is not, either
            raise ValueError
        return seconds

    return parse


def _ring_name(text: str) -> str:
    return validate_name(f"{text}-1234567")[:-8]  # with room for the number of an engine core
