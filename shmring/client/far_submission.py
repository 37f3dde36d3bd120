"""A request at an engine on another host, for its caller: what :class:`shmring.Submission` is on the same host."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from shmring.errors import AbortedError, LocalProtocolError, RemoteError, fresh
from shmring.memory.bundles import Bundle

__all__ = ["FarSubmission"]


class FarSubmission:
    """A request that was sent. Read it to its end, or abort it. If it is dropped, the request goes on.

    Args:
        engine, request_id, name: see below.
        give_up: called when it is aborted.
        taken: called when its caller takes a reply, with that reply's bytes.

    Attributes:
        engine: the name of the engine that has it.
        request_id: its number at this client's connection.
        name: the caller's own name for it; may be empty.
        ended: whether nothing more will come.
        has_replied: whether a reply has come, taken or not.
    """

    def __init__(
        self,
        engine: str,
        request_id: int,
        name: str,
        give_up: Callable[[FarSubmission], object],
        taken: Callable[[FarSubmission, int], object] | None = None,
    ) -> None:
        self.engine = engine
        self.request_id = request_id
        self.name = name
        self.ended = False
        self.has_replied = False
        self._give_up = give_up
        self._taken = taken
        self._replies: deque[Bundle] = deque()
        self._error: Exception | None = None
        self._news = asyncio.Event()

    async def next(self, reply_type: Any = Any) -> Any:
        """Waits for the next reply; see :meth:`shmring.Submission.next`.

        Raises:
            StopAsyncIteration: the request is finished.
            RemoteError, AbortedError, EngineDeadError, ClosedError: how it ended otherwise.
        """
        while not self._need_not_wait():
            self._news.clear()
            await self._news.wait()
        if not self._replies:
            if self._error is not None:
                raise fresh(self._error)
            raise StopAsyncIteration
        reply = self._replies.popleft()
        if self._taken is not None:
            self._taken(self, len(reply.payload) + reply.nbytes)
        return _opened(reply, reply_type)

    async def wait(self) -> None:
        """Waits for the end: for requests that get no reply."""
        while not self.ended:
            self._news.clear()
            await self._news.wait()
        if self._error is not None:
            raise fresh(self._error)

    async def result(self, reply_type: Any = Any) -> Any:
        """Waits for the one reply and the end; see :meth:`shmring.Submission.result`."""
        try:
            reply = await self.next(reply_type)
        except StopAsyncIteration:
            raise RemoteError(
                "NoReply", f"the engine finished request {self.request_id} without a reply; use stream() if that is meant"
            ) from None
        try:
            await self.next(reply_type)
        except StopAsyncIteration:
            return reply
        except BaseException:
            del reply  # if the error is kept, so is this frame, which would keep memory of the object store
            raise
        del reply
        self.abort()
        raise LocalProtocolError(f"request {self.request_id} has more than one reply; use stream() for such requests")

    def abort(self) -> None:
        """Gives the request up; a task that waits for it gets :class:`AbortedError`. A second call does nothing."""
        if not self.ended:
            self.end(AbortedError(f"request {self.request_id} was aborted", request_id=self.name or self.request_id))
            self._give_up(self)
        self._replies.clear()

    @property
    def _on_gpu(self) -> bool:
        """Whether tensors were sent from a GPU, which another host can't do."""
        return False

    def _need_not_wait(self) -> bool:
        """Whether a reply or the end has come, so that :meth:`next` returns or raises at once."""
        return bool(self._replies) or self.ended

    def _why_no_reply(self) -> str:
        """For the client: says for what this request is waiting."""
        return f"at {self.engine!r}, on another host: the engine's reply"

    # -- for the client ------------------------------------------------------------------------------------------------

    def replied(self, replies: list[Bundle]) -> None:
        """Replies have come."""
        if replies and not self.ended:
            self._replies.extend(replies)
            self.has_replied = True
            self._news.set()

    def end(self, error: Exception | None) -> None:
        """Nothing more will come. Replies that are there can still be read."""
        if not self.ended:
            self.ended, self._error = True, error
            self._news.set()


def _opened(reply: Bundle, reply_type: Any) -> Any:
    try:
        return reply.open(reply_type)
    except msgspec.ValidationError as error:
        raise RemoteError("UnexpectedReply", f"the reply is not of reply_type: {error}") from error
