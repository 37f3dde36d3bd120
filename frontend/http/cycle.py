"""One request of a connection, and its answer.

uvicorn's looks at each header for itself, and writes a short answer in two pieces. Here an answer that says how long it is has
its head sent with its first bytes. An answer of unknown length is sent in chunks, but to a caller of HTTP/1.0 as it is: it ends
with the connection.

uvicorn says that a caller has hung up only to who waits for it. Here it is a call (:mod:`shmring.frontend.http.watch`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Awaitable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from shmring.core.compiled import done
from shmring.frontend.http.watch import EXTENSION, Watch

__all__ = ["Cycle"]

_NOT_IN_A_HEADER = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


class Cycle(RequestResponseCycle):
    """See the head of this file. :class:`~shmring.frontend.http.protocol.BoundedHttpProtocol` makes them."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.watch = Watch()
        self.scope["extensions"] = {EXTENSION: {"watch": self.watch}}
        self._head = b""  # of an answer whose body has not begun
        self._is_open = False  # the answer ends with the connection

    def hang_up(self) -> None:
        """The caller has gone."""
        self.disconnected = True
        self.message_event.set()
        self.watch.hang_up()

    def send(self, message: Any) -> Awaitable[None]:  # type: ignore[override]  # mostly, there is nothing to wait for
        """Sends the head of the answer, or a part of its body.

        Returns:
            What waits, if the caller reads slowly.

        Raises:
            RuntimeError: the application has a bug.
        """
        if self.flow.write_paused and not self.disconnected:
            return self._send_when_read(message)
        self._send(message)
        return done

    async def _send_when_read(self, message: Any) -> None:
        await self.flow.drain()
        self._send(message)

    def _send(self, message: Any) -> None:
        if self.disconnected:
            return
        if self.response_complete or (message["type"] == "http.response.start") is self.response_started:
            raise RuntimeError(f"unexpected message {message['type']!r}")
        if self.response_started:
            self._send_body(message.get("body", b""), has_more=message.get("more_body", False))
        else:
            self._send_head(message["status"], [*self.default_headers, *message["headers"]])

    def _send_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        if _NOT_IN_A_HEADER.search(b"".join(itertools.chain.from_iterable(headers))):
            raise RuntimeError("a header has a control character")
        named = dict(headers)
        closes = b"close" in named.get(b"connection", b"")
        self.keep_alive = self.keep_alive and not closes
        lines = list(map(b": ".join, headers))
        if not self.keep_alive and not closes:
            lines.append(b"connection: close")
        self.chunked_encoding = False
        if b"content-length" in named:
            self.expected_content_length = int(named[b"content-length"])
        elif self.scope["http_version"] == "1.0":
            self._is_open = True
        elif self.scope["method"] != "HEAD" and status not in (204, 304):
            self.chunked_encoding = True
            if b"transfer-encoding" not in named:
                lines.append(b"transfer-encoding: chunked")
        lines.append(b"\r\n")
        self.response_started = True
        self.waiting_for_100_continue = False
        head = STATUS_LINE[status] + b"\r\n".join(lines)
        if b"content-length" in named:
            self._head = head
        else:
            self.transport.write(head)

    def _send_body(self, body: bytes, *, has_more: bool) -> None:
        pieces = [self._head, body]
        self._head = b""
        if self.scope["method"] == "HEAD":
            self.expected_content_length = 0
            del pieces[1]
        elif self.chunked_encoding:
            pieces = [b"%x\r\n" % len(body), body, b"\r\n"] if body else []
            if not has_more:
                pieces.append(b"0\r\n\r\n")
        elif not self._is_open:
            self.expected_content_length -= len(body)
        if self.expected_content_length < 0 or (self.expected_content_length and not has_more):
            raise RuntimeError("the answer is not as long as its Content-Length")
        self.transport.writelines(pieces)
        if not has_more:
            self.response_complete = True
            self.message_event.set()
            if not self.keep_alive:
                self.transport.close()
            self.on_response()
