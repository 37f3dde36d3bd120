"""A request in flight, as its frontend sees it: replies that have come, and how it ended."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

from shmring.core.client_book import ClientSlotRecord
from shmring.core.messages import Content
from shmring.errors import CapacityError, LocalProtocolError, fresh
from shmring.memory.payload import PayloadDecoder

if TYPE_CHECKING:
    from shmring.client.session import Session

__all__ = ["Pending"]

_MAX_UNREAD_REPLIES = 65536  # of one stream, before it fails: its consumer has stopped


class Pending:
    """A request in flight: replies that came and were not taken yet, and how it ended.

    Attributes:
        request_id: as the wire numbers it.
        name: the caller's own name for it.
        slots: those it was sent in; in the hands of the engine until that releases them.
    """

    __slots__ = ("_ended", "_error", "_replies", "_waiter", "name", "request_id", "session", "slots")

    def __init__(self, session: Session, request_id: int, name: str, slots: list[ClientSlotRecord]) -> None:
        self.session = session
        self.request_id = request_id
        self.name = name
        self.slots = slots
        self._replies: deque[Content] = deque()
        self._ended = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing more will come (what came may still be taken)."""
        return self._ended

    async def next(self, decoder: PayloadDecoder) -> Any:
        """Waits for the next reply and decodes it.

        Raises:
            StopAsyncIteration: the request is finished.
            ShmringError: how it ended otherwise.
        """
        if not self._replies and not self._ended:
            self.session.link.poll()  # it may be there, and nobody has looked yet
        while not self._replies:
            if self._ended:
                if self._error is not None:
                    raise fresh(self._error)
                raise StopAsyncIteration
            if self._waiter is not None:
                raise LocalProtocolError(f"request {self.request_id} is waited for by two tasks; let one of them do it")
            self._waiter = self.session.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.session.decode_reply(self._replies.popleft(), decoder)

    def deliver(self, content: Content) -> bool:
        """Keeps a reply for its caller; False if the caller will not take it."""
        if self._ended:
            return False
        if len(self._replies) >= _MAX_UNREAD_REPLIES:
            self.session.abort(
                self,
                CapacityError(
                    f"request {self.request_id} has {_MAX_UNREAD_REPLIES} unread replies; read them, or abort it",
                    needed=_MAX_UNREAD_REPLIES + 1,
                    capacity=_MAX_UNREAD_REPLIES,
                ),
            )
            return False
        self._replies.append(content)
        self._wake()
        return True

    def end(self, error: Exception | None) -> None:
        """Nothing more will come. An error drops what was not taken."""
        if self._ended:
            return
        self._ended = True
        self._error = error
        if error is not None:
            self.drop_replies()
        self._wake()

    def drop_replies(self) -> None:
        """Gives back what came and will not be taken."""
        while self._replies:
            self.session.release_reply_slots(self._replies.popleft().slots)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
