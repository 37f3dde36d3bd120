"""Executors: what computes. Chosen by name."""

from __future__ import annotations

from collections.abc import Callable

from engine.executors.features import FeaturesExecutor
from engine.protocol import Executor

__all__ = ["EXECUTORS", "create_executor"]

EXECUTORS: dict[str, Callable[[], Executor]] = {"features": FeaturesExecutor}


def create_executor(name: str) -> Executor:
    """Makes the executor of a name.

    Raises:
        ValueError: there is none of that name.
    """
    factory = EXECUTORS.get(name)
    if factory is None:
        raise ValueError(f"there is no executor {name!r}; choose one of {', '.join(sorted(EXECUTORS))}")
    return factory()
