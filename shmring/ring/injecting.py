"""Requests of the engine's own process: submissions without a slot.

Theory of operation: an :class:`Injector` is a frontend that is a part of this process. It has no rings, no leases and no slots;
in every other respect the book, the lines of requests and the scheduler treat it as a frontend: its requests stand in order of
arrival among all others, count toward ``max_inflight`` and in the statistics, and are aborted when it closes. The payload of a
request is a :class:`~shmring.memory.bundles.Bundle`, whose tensors a handler views where they lie. Replies are bundles, too:
copies, as other frontends get them. This is how requests come in that another transport has brought to this process.

Replies that were not read are bounded for each request by the size of the reply reserve; a handler that replies then waits, as
it does for a frontend that does not read. A request that nobody reads keeps none of the others waiting.

Invariants: after its end, a request gets nothing more; its unread bytes are those of the replies that lie in it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, Unpack

from shmring.core.compiled import BaseFrontend, EngineEnd, ForEngine, Packed
from shmring.core.effects import EngineEffect
from shmring.core.messages import Failed
from shmring.errors import AbortedError, ClosedError, RemoteError, WouldBlock
from shmring.memory.bundles import Bundle, copied_bundle
from shmring.request_options import EngineOptions
from shmring.ring.frontend import fit_text
from shmring.ring.life import RingLife

__all__ = ["Injected", "Injector"]


class Unread:
    """The replies to a request that were not read, in place of a frontend's link: it says whether there is room for more."""

    def __init__(self, limit_nbytes: int) -> None:
        self._limit_nbytes = limit_nbytes
        self._nbytes = 0
        self._room = asyncio.Event()
        self._room.set()

    @property
    def can_write(self) -> bool:
        return self._nbytes < self._limit_nbytes

    def count(self, nbytes: int) -> None:
        """So many bytes have come, or (below 0) have gone."""
        self._nbytes += nbytes
        if self.can_write:
            self._room.set()
        else:
            self._room.clear()

    async def drain(self) -> None:
        """Waits until there is room."""
        while not self.can_write:
            await self._room.wait()

    def expect_space(self) -> None:
        """Whoever waits for room is told without this."""

    def close(self) -> None:
        """Nobody waits for room any more."""
        self._limit_nbytes = 1 << 63
        self._room.set()


class _NoLink:
    """In place of a frontend's link: messages about memory do not come, since an injector has none."""

    def send(self, *_: object) -> None:
        raise AssertionError("an injector has no memory")

    send_listed = send


class Injected:
    """A request of this process's own. Read it to its end, or abort it.

    Attributes:
        request_id: its number.
        name: the caller's own name for it; may be empty.
        ended: whether nothing more will come.
        unread: its replies that were not read.
    """

    def __init__(self, injector: Injector, request_id: int, name: str, limit_nbytes: int) -> None:
        self.request_id = request_id
        self.name = name
        self.ended = False
        self.unread = Unread(limit_nbytes)
        self._injector = injector
        self._replies: list[Bundle] = []
        self._error: Exception | None = None
        self._news = asyncio.Event()

    async def read(self) -> list[Bundle]:
        """Waits for replies, and returns all that are there, in order; an empty list: the request has finished.

        Raises:
            RemoteError: the engine failed with it.
            TimeoutError: the engine says that its time is over.
            AbortedError: it was aborted.
            ClosedError: the ring is closed.
        """
        if not self._replies and not self.ended:
            await self._news.wait()
        self._news.clear()
        replies, self._replies = self._replies, []
        self.unread.count(-sum(map(_size, replies)))
        if not replies and self._error is not None:
            raise self._error
        return replies

    def abort(self) -> None:
        """Gives the request up, and drops the replies that were not read. A second call, or one after its end, does no
        more than that."""
        if not self.ended:
            self._injector.abort(self)
        self.unread.count(-sum(map(_size, self._replies)))
        self._replies = []

    def replied(self, reply: Bundle) -> None:
        """For the injector."""
        self._replies.append(reply)
        self.unread.count(_size(reply))
        self._news.set()

    def end(self, error: Exception | None) -> None:
        """For the injector: nothing more comes."""
        self.ended, self._error = True, error
        self._news.set()
        self.unread.close()


def _size(reply: Bundle) -> int:
    return len(reply.payload) + reply.nbytes


class Injector(BaseFrontend):
    """A frontend that is a part of this process. Made by :meth:`Ring.injector`; close it.

    Args:
        life, end: of its engine.
        carry_out: carries effects of the book out.
        limit_nbytes: of the replies to a request that were not read.
        client_id: in the book, which knows it already.
        name: what the engine's log calls it.

    Attributes:
        name: as given.
        connected: whether it is neither closed nor its ring.
    """

    def __init__(
        self,
        life: RingLife,
        end: EngineEnd,
        carry_out: Callable[[list[EngineEffect]], None],
        limit_nbytes: int,
        client_id: int,
        name: str,
    ) -> None:
        super().__init__(end, client_id, is_local=True)
        self.name = name
        self.pid = os.getpid()
        self.connected = True
        self.link = _NoLink()
        self._limit_nbytes = limit_nbytes
        self._life = life
        self._carry_out = carry_out
        self._requests: dict[int, Injected] = {}
        self._last_request_id = 0
        self._why_closed = ""
        self.attach(None)

    def __str__(self) -> str:
        return f"client {self.client_id} ({self.name or 'unnamed'}, of this process)"

    # -- for callers ---------------------------------------------------------------------------------------------------

    @property
    def engine_load(self) -> tuple[int, int]:
        """Requests of all clients that have not ended, and those of them that are not claimed. Statistics count slots, too."""
        return self.end.running_count + self.end.waiting_count, self.end.waiting_count

    def inject(self, payload: Bundle, **options: Unpack[EngineOptions]) -> Injected:
        """Submits a request behind all that have come. Its tensors are viewed where they lie.

        Args:
            payload: its payload; the memory of its tensors must not change before the request has released it.
            options: ``request_id``, the caller's own name for it.

        Raises:
            WouldBlock: ``max_inflight`` requests of this injector have not ended.
            RemoteProtocolError: the payload breaks a bound of this engine. Nothing was submitted.
            ClosedError: this injector, or its ring, is closed.
        """
        if not self.connected:
            raise ClosedError(f"{self} is closed")
        self._life.home.enter()
        if len(self._requests) >= self._life.config.max_inflight:
            raise WouldBlock(f"{len(self._requests)} requests are in flight, the engine takes no more (max_inflight)")
        self._last_request_id += 1
        for_engine = ForEngine(**options)
        request = Injected(self, self._last_request_id, for_engine.request_id, self._limit_nbytes)
        self._requests[request.request_id] = request
        try:
            self.end.inject(self, request.request_id, for_engine, payload)
        except BaseException:
            del self._requests[request.request_id]
            raise
        return request

    def abort(self, request: Injected) -> None:
        """See :meth:`Injected.abort`."""
        if request.request_id in self._requests:
            self._carry_out(self.end.book.abort(self.client_id, request.request_id))

    def close(self) -> None:
        """Aborts its requests. A second call does nothing."""
        if self.connected:
            self._end("its injector is closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- for its requests, and for the shell ---------------------------------------------------------------------------

    def unread_of(self, request_id: int) -> Unread:
        """Returns the unread replies to a request; none, if it has ended."""
        request = self._requests.get(request_id)
        return Unread(1) if request is None else request.unread

    def replied(self, request_id: int, packed: Packed) -> None:
        """For the end: a request has a reply."""
        if (request := self._requests.get(request_id)) is not None:
            request.replied(copied_bundle(packed, packed.content))

    def finished(self, request_id: int, packed: Packed | None) -> None:
        """For the end: a request has finished, perhaps with a last reply."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            if packed is not None:
                request.replied(copied_bundle(packed, packed.content))
            request.end(None)

    def send(self, message: Any) -> None:
        """For the shell. Messages about memory do not come: it has none."""
        assert isinstance(message, Failed), message
        request = self._requests.pop(message.request_id, None)
        if request is not None:
            request.end(self._error(message))

    def _error(self, failed: Failed) -> Exception:
        if failed.kind == "aborted":
            if self._life.home.is_closed:
                return ClosedError(f"ring {self._life.name!r} is closed: {self._why_closed}")
            return AbortedError(f"request {failed.request_id} was aborted", request_id=failed.request_id)
        return TimeoutError(failed.message) if failed.kind == "timed_out" else RemoteError(failed.type_name, failed.message)

    def describe(self, error: BaseException) -> tuple[str, str]:
        """Returns an error's type and text, as a frontend gets them."""
        return type(error).__name__[:256], fit_text(str(error), self._life.record_nbytes)

    def dismiss(self, reason: str) -> None:
        """The ring is closed: its requests end."""
        self._end(reason)

    def forget(self) -> None:
        """Nothing is left of it in the book."""

    def _end(self, why: str) -> None:
        self.connected = False
        self._why_closed = why
        self._carry_out(self.end.book.goodbye(self.client_id, (), ()))
