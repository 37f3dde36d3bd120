"""The model that is served: its names, and its tasks.

The frontend asks the engine when a request needs to know it, and never at the start. So a slow engine does not keep a frontend
from starting, and an engine that replaces another may have another model.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple

import shmring
from shmring.engine.client import EngineClient
from shmring.engine.protocol import ModelDescription
from shmring.frontend.errors import ApiError, ErrorCode

__all__ = ["Served", "ServedModel"]

_DESCRIBE_TIMEOUT_S = 10.0  # an engine answers between two events of its loop, whatever its executor does
_SHOWN_CHARACTERS = 64  # of a name that does not exist

_TASK_NAMES = {"encode": "embeddings", "generate": "chat completions", "complete": "completions", "tokenize": "tokenizing"}
_TASK_NAMES |= {"transcribe": "transcriptions", "translate": "translations"}


class Served(NamedTuple):
    """What is served: the names that requests may use, since when (a Unix time), and what the model can do."""

    names: Sequence[str]
    created: int
    description: ModelDescription


class ServedModel:
    """The model that requests may name.

    Args:
        engine: describes the model.
        names: the names that requests may use; none: the engine's name for it.
    """

    def __init__(self, engine: EngineClient, names: Sequence[str]) -> None:
        self._engine = engine
        self._names = names
        self._created = int(time.time())
        self._asking = asyncio.Lock()  # a thousand requests to a new engine are one question
        self._last: ModelDescription | None = None

    async def describe(self) -> ModelDescription:
        """Returns the engine's description of its executor; the engine is asked once in its life.

        Raises:
            shmring.ShmringError, TimeoutError: it does not answer.
        """
        if (description := self._engine.description) is None:
            async with self._asking:
                description = await self._engine.describe(_DESCRIBE_TIMEOUT_S)
        self._last = description
        return description

    async def check(self, name: str, task: str) -> ModelDescription:
        """Returns the description of the model that a request names, if the model can do the task.

        Args:
            name: what the request calls it.
            task: one of :attr:`ModelDescription.tasks`.

        Raises:
            ApiError: the model has another name, or can't do the task.
            shmring.ShmringError, TimeoutError: the engine does not answer.
        """
        return self.checked(await self.describe(), name, task)

    def checked(self, description: ModelDescription, name: str, task: str) -> ModelDescription:
        """Returns a description, if its model is the one that a request names, and can do the task. Raises as :meth:`check`."""
        served = self._names or [description.model]
        if name not in served:
            raise _unknown(name, served)
        if task not in description.tasks:
            tasks = " and ".join(_TASK_NAMES.get(name, name) for name in description.tasks)
            message = f"the model {name!r} does not do {_TASK_NAMES[task]}, it does {tasks or 'nothing'}"
            raise ApiError(ErrorCode.UNSUPPORTED_TASK, message, param="model")
        return description

    async def served(self, name: str | None = None) -> Served:
        """Returns what is served. Without an engine, it is what the last engine had.

        Args:
            name: one that the model may have; None: all names.

        Raises:
            ApiError: it has no such name.
            shmring.ShmringError, TimeoutError: there is no engine, and there never was one.
        """
        try:
            description = await self.describe()
        except (shmring.ShmringError, TimeoutError):
            if self._last is None:
                raise
            description = self._last
        names = self._names or [description.model]
        if name is not None and name not in names:
            raise _unknown(name, names)
        return Served(names if name is None else [name], self._created, description)


def _unknown(name: str, served: Sequence[str]) -> ApiError:
    message = f"the model {name[:_SHOWN_CHARACTERS]!r} does not exist; this server has {', '.join(map(repr, served))}"
    return ApiError(ErrorCode.MODEL_NOT_FOUND, message, param="model")
