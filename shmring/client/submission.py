"""A request in flight, in its caller's hands: its replies, and its end."""

from __future__ import annotations

from typing import Any

from shmring.core.compiled import SubmissionEnd
from shmring.errors import AbortedError, LocalProtocolError, RemoteError

__all__ = ["Submission"]


class Submission(SubmissionEnd):
    """A request that was sent: its replies, and its end. From :meth:`~shmring.RingClient.submit`.

    Whoever takes one must see it to its end or abort it; ``request`` and ``stream`` do that by themselves.
    One that is dropped goes on, since it may have been sent for what the engine does. What it holds comes back when it ends,
    with a ``ResourceWarning`` if a reply or an error was not seen. With unread replies in slots it is aborted a moment later.

    Attributes:
        request_id: its number on this connection.
        name: the caller's own name for it; may be empty.
        ended: whether nothing more will come.
    """

    __slots__ = ()

    @property
    def engine(self) -> str:
        """The name of the engine that has it."""
        name: str = self.end.shell.engine_name
        return name

    async def result(self, reply_type: Any = Any) -> Any:
        """Waits for the one reply and the end.

        Raises:
            RemoteError: the engine failed, or finished without a reply.
            LocalProtocolError: there was more than one reply; use :meth:`next` or ``stream``.
            AbortedError, EngineDeadError: how it ended otherwise.
        """
        try:
            reply = await self.next(reply_type)
        except StopAsyncIteration:
            # An engine that finishes without a word is its bug, not an answer of None.
            raise RemoteError(
                "NoReply", f"the engine finished request {self.request_id} without a reply; use stream() if that is meant"
            ) from None
        try:
            if self.ended and not self.has_reply:
                self.raise_error()
                return reply
            await self.next(reply_type)
        except StopAsyncIteration:
            return reply
        except BaseException:
            del reply  # whoever keeps the error keeps this frame, which would keep the reply's slot
            raise
        del reply
        self.abort()
        raise LocalProtocolError(f"request {self.request_id} has more than one reply; use stream() for such requests")

    def abort(self) -> None:
        """Gives the request up; a task that waits for it gets :class:`AbortedError`. A second call does nothing."""
        error = AbortedError(f"request {self.request_id} was aborted", request_id=self.name or self.request_id)
        self.was_left = True
        self.end.shell.abort(self, error)
        self.drop_replies()
