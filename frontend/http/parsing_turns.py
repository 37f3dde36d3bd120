"""Whose bytes are parsed in which turn of the loop.

A read may bring 256 KiB, and in them some forty thousand chunks of one byte: 33 ms in which nobody else is served. What has few
lines is parsed as it comes, as usual requests have, and bodies of a known length too. The others share what a turn of the loop
has for them: one slice after the other, connection by connection, until that is used up. The rest comes in later turns, and
what else there is to do comes between.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

from uvicorn.protocols.http.flow_control import FlowControl

__all__ = ["SLICE_NBYTES", "Flow", "ParsingTurns", "has_few_lines"]

# Lines in a read that is parsed as it comes. Chunks and headers have lines, so this bounds both; a head has ten to thirty.
_FEW_LINES = 128
#: What is parsed at a time of what has more: 170 chunks of one byte, an eighth of a millisecond.
SLICE_NBYTES = 1 << 10

_PRICE_PER_TURN = 256  # slices, chunks, headers and requests of all connections together: a quarter of a millisecond


def has_few_lines(data: bytes) -> bool:
    """Whether a read is parsed as it comes. (A file in it is passed over fifty times as fast as counting lines would be.)"""
    if len(data) <= SLICE_NBYTES:
        return data.count(b"\n") <= _FEW_LINES
    end = -1
    for _ in range(_FEW_LINES + 1):
        end = data.find(b"\n", end + 1)
        if end < 0:
            return True
    return False


class Behind(Protocol):
    """A connection of which not all bytes were parsed."""

    def parse_slice(self) -> int:
        """Parses the next bytes. Returns their price: how many parts of requests began in them, and one for the slice."""

    @property
    def is_behind(self) -> bool:
        """Whether there are more."""


class ParsingTurns:
    """The connections of a loop that have sent more than is parsed at once. See the head of this file."""

    def __init__(self) -> None:
        self._connections: deque[Behind] = deque()

    def join(self, connection: Behind) -> None:
        """Has a connection's bytes parsed in its turn, from the next turn of the loop on."""
        if not self._connections:
            asyncio.get_running_loop().call_soon(self._take_turns)
        self._connections.append(connection)

    def _take_turns(self) -> None:
        left = _PRICE_PER_TURN
        try:
            while left > 0 and self._connections:
                connection = self._connections.popleft()
                left -= connection.parse_slice()
                if connection.is_behind:
                    self._connections.append(connection)
        finally:  # a bug that one of them meets holds up none of the others
            if self._connections:
                asyncio.get_running_loop().call_soon(self._take_turns)


class Flow(FlowControl):
    """uvicorn's, which reads nothing more of a connection while what it has sent was not all parsed."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._is_behind = False
        self._reads = True  # what would hold if everything were parsed

    def fall_behind(self) -> None:
        """Stops reading until :meth:`catch_up`."""
        self._is_behind = True
        self._reads = not self.read_paused
        super().pause_reading()

    def catch_up(self) -> None:
        """Goes on as it would have without :meth:`fall_behind`."""
        self._is_behind = False
        if self._reads:
            super().resume_reading()

    def pause_reading(self) -> None:
        """Stops reading."""
        self._reads = False
        super().pause_reading()

    def resume_reading(self) -> None:
        """Reads on, or will when everything is parsed."""
        self._reads = True
        if not self._is_behind:
            super().resume_reading()
