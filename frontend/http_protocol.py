"""uvicorn's HTTP protocol, with the bounds that it leaves to a proxy.

Without them, one connection that has shown no key can take a process' memory: by a header, URL, chunk extension or trailer
that does not end, or by requests sent one behind the other whose answers it does not read. And a thousand that send nothing,
or read nothing, keep as many descriptors and answers for ever.

uvicorn stops reading while requests are queued behind the one that is being answered, and tells the last one alone when a
connection ends. Here reading goes on, as their number is bounded, and all are told: nobody computes for who has gone.

What a parser is fed is counted from the last piece of progress: a head that is complete, a part of a body, the end of a
message.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from frontend.errors import ApiError

__all__ = ["BoundedHttpProtocol"]

_MAX_OVERHEAD_NBYTES = 64 << 10  # of a head, a chunk's extension or a trailer; a head takes 1 to 8 KB, with large cookies 16
_READ_NBYTES = 256 << 10  # what uvloop reads at a time; progress may lie at the front of it
_MAX_PIPELINED = 16  # requests behind the one that is being answered; clients that do this at all send a few
_HEAD_TIMEOUT_S = 30.0  # for a head to arrive, on a slow mobile network too
_STALL_TIMEOUT_S = 30.0  # without a byte of an answer being taken, though more than the kernel keeps is there to be taken
_LINGER_S = 5.0  # for the last of an answer to be taken after the connection was given up


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection; see the head of this file."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._overhead_nbytes = 0
        self._lost = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None  # uvicorn's `cycle` is the newest, which may be queued

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as its base has it
        """Begins to wait for the first head."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tells whoever answers, and lets go of what was not answered: only the collector would find it."""
        self._lost = True
        self._head_came()
        self.resume_writing()
        running, self._running = self._running, None
        super().connection_lost(exc)
        self.pipeline.clear()
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Feeds the parser, unless the peer has overdone it."""
        if self.transport.is_closing():
            return
        self._overhead_nbytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._overhead_nbytes > _MAX_OVERHEAD_NBYTES + _READ_NBYTES:
            self._refuse(431, f"a request's head takes more than {_MAX_OVERHEAD_NBYTES} bytes", "head_too_large")
        elif len(self.pipeline) > _MAX_PIPELINED:
            self._end()
        elif self._head_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._await_head()  # uvicorn waits for nothing any more, whatever it was that came

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._head_came()
        self._await_head()

    def on_headers_complete(self) -> None:
        """Its head is complete."""
        self._overhead_nbytes = 0
        self._head_came()
        super().on_headers_complete()
        if not self.pipeline:
            self._running = self.cycle
        else:
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        """A part of its body came."""
        self._overhead_nbytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """All of it came."""
        self._overhead_nbytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """A request was answered; the next one's turn has come."""
        self._running = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()

    def timeout_keep_alive_handler(self) -> None:
        """Nothing came for a while after an answer."""
        super().timeout_keep_alive_handler()
        self._linger()

    def pause_writing(self) -> None:
        """The peer takes an answer more slowly than it is made."""
        super().pause_writing()
        self._watch_for_a_stall(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """It has taken it."""
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Says what is wrong in OpenAI's envelope, and ends the connection."""
        self._refuse(400, msg, "invalid_http")

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(_HEAD_TIMEOUT_S, self._end)

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _watch_for_a_stall(self, nbytes: int) -> None:
        self._stall_timer = self.loop.call_later(_STALL_TIMEOUT_S, self._check_for_a_stall, nbytes)

    def _check_for_a_stall(self, before_nbytes: int) -> None:
        """Ends a connection that took nothing since; a slow one is watched on."""
        nbytes = self.transport.get_write_buffer_size()
        if nbytes >= before_nbytes:
            self._abort()
        else:
            self._watch_for_a_stall(nbytes)

    def _refuse(self, status: int, message: str, code: str) -> None:
        body = msgspec.json.encode(ApiError(status, message, code=code).envelope())
        reason = {400: "Bad Request", 431: "Request Header Fields Too Large"}[status]
        lines = (
            f"HTTP/1.1 {status} {reason}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            "connection: close",
        )
        self.transport.write("\r\n".join((*lines, "", "")).encode("ascii") + body)
        self._end()

    def _end(self) -> None:
        self._head_came()
        self.pipeline.clear()
        self.transport.close()
        self._linger()

    def _linger(self) -> None:
        """Ends a connection that was closed for good: uvloop waits for ever for what the peer does not take."""
        if self.transport.is_closing():
            self.loop.call_later(_LINGER_S, self._abort)

    def _abort(self) -> None:
        if not self._lost:  # asyncio's transport reports its end once more
            self.transport.abort()
