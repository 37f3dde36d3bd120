"""Answers as events that have types: what the APIs have in common whose whole answer is what the events of a stream build."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Any

import msgspec

from shmring.engine.protocol import FinishReason, GenerateReply
from shmring.frontend.answer import Answer
from shmring.frontend.errors import ApiError
from shmring.frontend.http.sse import event

__all__ = ["TypedEventsWriter"]


class TypedEventsWriter(ABC):
    """Writes one answer as events. Each shows what there is when it is yielded: encode it before the next one.

    Attributes:
        answer: the whole answer, so far.
        keep: is awaited when the answer is complete, before its last event; None: nothing is.
    """

    answer: msgspec.Struct
    keep: Callable[[], Awaitable[None]] | None = None
    fail: Callable[[ApiError], bytes] | None = None  # errors of streams are as everywhere

    async def whole(self, answer: Answer) -> msgspec.Struct:
        """Returns the whole answer."""
        async for _ in self._written(answer):
            pass
        return self.answer

    async def events(self, answer: Answer) -> AsyncGenerator[bytes, None]:
        """Yields the answer as events."""
        async for made in self._written(answer):
            yield event(made, made.type)

    async def _written(self, answer: Answer) -> AsyncGenerator[Any, None]:
        last: GenerateReply | None = None
        async for piece in answer:
            if last is None:
                for begun in self._begin(piece):
                    yield begun
            last = piece
            for added in self._add(piece):
                yield added
        assert last is not None, "an answer has a piece"
        assert last.finish_reason is not None, "and at its end it says why"
        for finished in self._finish(last, last.finish_reason):
            yield finished
        if self.keep is not None:
            await self.keep()
        yield self._end()

    @abstractmethod
    def _begin(self, first: GenerateReply) -> Iterator[Any]:
        """Yields the first events, before those of the first piece."""

    @abstractmethod
    def _add(self, piece: GenerateReply) -> Iterator[Any]:
        """Yields the events of a piece."""

    @abstractmethod
    def _finish(self, last: GenerateReply, reason: FinishReason) -> Iterator[Any]:
        """Yields the events behind those of the last piece, but for the last one; the answer is complete then."""

    @abstractmethod
    def _end(self) -> Any:
        """Returns the last event."""
