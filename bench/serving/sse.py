"""Server-sent events as a browser reads them, piece by piece as they come from a socket.

Lines end with CR, LF or CRLF, also where a piece ends between the two; a field is ``name: value`` with at most one space to
be dropped; several ``data`` fields are the lines of one text; a line that begins with a colon is a comment; an empty line ends
the event, and an event without data is none; what the stream's end cuts off is dropped. ``id`` and ``retry`` are for
reconnecting, which a load generator does not do.

Source: the WHATWG HTML standard, section 9.2, "Server-sent events".
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["EventParser", "ServerSentEvent", "StreamFormatError"]

_LINE_END = re.compile(rb"\r\n|\n|\r")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_MAX_EVENT_NBYTES = 1 << 20  # an event of a chat has 200 bytes; a server that sends something else for ever is stopped


class StreamFormatError(Exception):
    """What came is no stream of events."""


class ServerSentEvent(NamedTuple):
    """An event.

    Attributes:
        data: its text, as UTF-8.
        kind: of event; ``message`` if it does not say.
    """

    data: bytes
    kind: str = "message"


class EventParser:
    """Takes pieces of a stream, returns the events that they complete. One for each stream."""

    def __init__(self) -> None:
        self._rest = b""
        self._after_cr = False
        self._at_start = True
        self._data: list[bytes] = []
        self._data_nbytes = 0
        self._kind = ""

    def feed(self, piece: bytes) -> list[ServerSentEvent]:
        """Returns the events that a piece completes, in order.

        Raises:
            StreamFormatError: an event is larger than any server means one to be.
        """
        if not piece:
            return []
        if self._after_cr and piece.startswith(b"\n"):
            piece = piece[1:]
        self._after_cr = piece.endswith(b"\r")
        *lines, self._rest = _LINE_END.split(self._rest + piece)
        events = [event for line in lines if (event := self._take(line)) is not None]
        if len(self._rest) + self._data_nbytes > _MAX_EVENT_NBYTES:
            raise StreamFormatError(f"an event is larger than {_MAX_EVENT_NBYTES} bytes")
        return events

    def _take(self, line: bytes) -> ServerSentEvent | None:
        if self._at_start:
            self._at_start = False
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if not line:
            return self._end_event()
        name, _, value = line.partition(b":")
        if name == b"data":
            value = value.removeprefix(b" ")
            self._data.append(value)
            self._data_nbytes += len(value)
        elif name == b"event":
            self._kind = value.removeprefix(b" ").decode("utf-8", "replace")
        return None

    def _end_event(self) -> ServerSentEvent | None:
        data, kind = self._data, self._kind
        self._data, self._data_nbytes, self._kind = [], 0, ""
        return ServerSentEvent(b"\n".join(data), kind or "message") if data else None
