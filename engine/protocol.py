"""What frontends and the engine say to each other through the ring, and what an executor is.

These are the payloads of requests and replies; how they travel is shmring's business. Frontends import this module and
:mod:`engine.client`, and nothing else of the engine.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec
import torch

__all__ = [
    "CALL_DESCRIBE",
    "CALL_HEALTH",
    "CALL_STATISTICS",
    "EncodeOutput",
    "EncodeReply",
    "EncodeRequest",
    "EngineClientProtocol",
    "Executor",
    "ModelDescription",
    "Picture",
]

#: Control calls of the engine.
CALL_HEALTH = "health"  # -> None, or raises
CALL_DESCRIBE = "describe"  # -> ModelDescription, as a dict
CALL_STATISTICS = "statistics"  # -> dict of numbers by name


class Picture(msgspec.Struct):
    """A decoded picture: ``pixels`` of shape (height, width, 3), uint8, RGB."""

    pixels: torch.Tensor


class EncodeRequest(msgspec.Struct):
    """Asks for one embedding per picture."""

    pictures: list[Picture]


class EncodeReply(msgspec.Struct):
    """The embeddings: shape (pictures, embedding size), float32, each of length 1, in the order of the request."""

    embeddings: torch.Tensor


class ModelDescription(msgspec.Struct):
    """What the engine's executor does.

    Attributes:
        executor: its name.
        tasks: what it can be asked for, such as ``"encode"``.
        embedding_size: dimensions of an embedding.
        max_batch_size: requests it takes in one step.
    """

    executor: str
    tasks: list[str]
    embedding_size: int
    max_batch_size: int


class EncodeOutput(msgspec.Struct):
    """What :meth:`EngineClientProtocol.encode` yields.

    Attributes:
        request_id: the caller's name of the request.
        embeddings: shape (pictures, embedding size), float32; the caller's own, not a view of the slab.
        finished: whether it is the last.
    """

    request_id: str
    embeddings: torch.Tensor
    finished: bool


@runtime_checkable
class Executor(Protocol):
    """What computes. It is called from one thread, one step at a time, never from the event loop.

    The tensors of a request are views of the slab that end with the step: it may read them, and must copy what it keeps.
    """

    def describe(self) -> ModelDescription:
        """Says what it does."""

    def execute(self, batch: Sequence[EncodeRequest]) -> Sequence[EncodeReply | Exception]:
        """Executes one step.

        Returns:
            For each request its reply, or the error with which it alone fails. An exception that is raised instead fails
            the whole batch.
        """

    def close(self) -> None:
        """Frees what it holds."""


class EngineClientProtocol(Protocol):
    """What a frontend needs of an engine; the shape of vLLM's ``EngineClient``."""

    def encode(self, request: Any, *, request_id: str = "", timeout: float | None = None) -> AsyncGenerator[EncodeOutput, None]:
        """Yields the embeddings of a request."""

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Gives requests up."""

    async def check_health(self) -> None:
        """Raises if the engine is not well."""
