"""What a plug-in relies on in its server, checked before anything is changed there.

None of it is a public interface. The plug-in checks the code, and not the version's number. If something is different, the
server goes on without the plug-in, and says so in one line of its log.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from shmring.core.loggers import Logger

__all__ = ["broken", "names_in", "not_compiled", "parameters_differ", "stay_off", "uses_are_missing"]

_Hooks = TypeVar("_Hooks")


def broken(find_hooks: Callable[[], _Hooks], checks: Iterable[Callable[[_Hooks], Iterable[str]]]) -> list[str]:
    """Says what in a server is otherwise than a plug-in needs it; nothing where it can be switched on.

    Args:
        find_hooks: imports what is changed, or used.
        checks: what is asked about it.
    """
    try:
        hooks = find_hooks()
    except Exception as error:  # noqa: BLE001 - another server may raise anything here, and that is the finding
        return [f"{type(error).__name__}: {error}"]
    findings: list[str] = []
    for check in checks:
        try:
            findings += check(hooks)
        except Exception as error:  # noqa: BLE001 - as above
            findings.append(f"{check.__name__.strip('_')}: {type(error).__name__}: {error}")
    return findings


def parameters_differ(expected: Iterable[tuple[Callable[..., Any], Sequence[str]]]) -> Iterator[str]:
    """Says which functions do not begin with the parameters that they are called with."""
    for function, names in expected:
        parameters = list(inspect.signature(function).parameters)
        if parameters[: len(names)] != [*names]:
            yield f"{function.__qualname__} takes {', '.join(parameters)}, and not {', '.join(names)}"


def uses_are_missing(expected: Iterable[tuple[Callable[..., Any], Sequence[str]]]) -> Iterator[str]:
    """Says which functions do not use the names that they have to go through."""
    for function, names in expected:
        used = names_in(function)
        if missing := [name for name in names if name not in used]:
            yield f"{function.__qualname__} does not use {', '.join(missing)}"


def names_in(function: Callable[..., Any]) -> set[str]:
    """Returns the names that a function uses, and those of functions within it."""
    return _names_in(inspect.unwrap(function).__code__)


def _names_in(code: Any) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if inspect.iscode(constant):
            names |= _names_in(constant)
    return names


def not_compiled() -> str:
    """Says that the package that was imported can't work, and what to do; empty: it can.

    A server that is started by ``python -m`` imports from the working directory first. In a clone of the repository, it finds
    the package's sources there, and not the package that was installed.
    """
    if importlib.util.find_spec("shmring.core.compiled") is not None:
        return ""
    return f"it was imported from {Path(__file__).parents[2]}, where it is not compiled. Start the server in another directory"


def stay_off(logger: Logger, server: str, reason: str) -> None:
    """Says why a plug-in is off."""
    logger.warning("shmring stays off, and %s runs as without it: %s", server, reason)
