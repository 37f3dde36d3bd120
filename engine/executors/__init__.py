"""Executors, which compute. Chosen by name, or as ``module:Class`` for your own.

Modules are imported when they are chosen: some need packages that the others do not.
"""

from __future__ import annotations

import importlib

from shmring.engine.executors.interface import (
    ContextLengthError,
    Executor,
    ExecutorDeadError,
    ExecutorOptions,
    OverloadedError,
    StepInput,
    StepOutput,
)
from shmring.engine.settings import EXECUTORS

__all__ = [
    "create_executor",
    "ContextLengthError",
    "Executor",
    "ExecutorDeadError",
    "ExecutorOptions",
    "OverloadedError",
    "StepInput",
    "StepOutput",
]


def create_executor(name: str, options: ExecutorOptions | None = None) -> Executor:
    """Makes an executor.

    Args:
        name: one of :data:`~shmring.engine.settings.EXECUTORS`, or ``module:Class`` of one's own, which is called with the
            options.
        options: its arguments.

    Raises:
        ValueError: there is no executor of that name, or it refuses the options.
        ImportError: it needs a package that is not installed.
        TypeError: the named object is no executor.
    """
    place = EXECUTORS.get(name, name)
    module_name, colon, attribute = place.partition(":")
    if not colon:
        raise ValueError(f"there is no executor {name!r}; choose one of {', '.join(sorted(EXECUTORS))}, or write module:Class")
    factory = getattr(importlib.import_module(module_name), attribute, None)
    if factory is None:
        raise ValueError(f"the module {module_name} has no {attribute}")
    executor = factory(options or ExecutorOptions())
    if not isinstance(executor, Executor):
        raise TypeError(f"{place} is no executor: it must have describe, execute, forget and close")
    return executor
