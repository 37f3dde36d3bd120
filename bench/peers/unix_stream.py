"""Messages over a Unix stream socket: what the peers have in common that send everything, or the name of a segment, inline.

A message is a u32 length and a body, written to an asyncio transport on uvloop. The receiving end cuts the stream: what is
small in a scratch buffer, the rest of a large body straight into memory of its own, uninitialised, so that no byte of it is
copied once more. A one-way stream (:func:`connected`, :func:`consumed`) has a byte in the other direction for each message
that has been taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar, cast

import numpy as np

from bench.messages import Header, Phase
from bench.peers.in_flight import Window

__all__ = ["Messages", "Sender", "connected", "consumed", "dialled", "served"]

_PREFIX = struct.Struct("<I")
_SCRATCH_NBYTES = 256 << 10  # what uvloop, too, reads at a time


class _Writing(asyncio.BaseProtocol):
    """An end of a connection that writes messages.

    Attributes:
        writable: set while the transport's buffer has room; to be awaited by who writes much.
    """

    def __init__(self) -> None:
        self.writable = asyncio.Event()
        self.writable.set()
        self._transport: asyncio.Transport | None = None

    @property
    def transport(self) -> asyncio.Transport:
        assert self._transport is not None, "nobody writes before there is a connection"
        return self._transport

    def send(self, body: bytes) -> None:
        """Writes a message."""
        self.transport.writelines((_PREFIX.pack(len(body)), body))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.writable.set()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()


class Messages(_Writing, asyncio.BufferedProtocol):
    """An end that writes messages, and cuts what comes into messages."""

    def __init__(self) -> None:
        super().__init__()
        self._scratch = memoryview(bytearray(_SCRATCH_NBYTES))
        self._kept = 0  # bytes at the start of scratch
        self._body: memoryview | None = None
        self._filled = 0

    def received(self, body: memoryview) -> None:
        """A message has come. What this raises is said to :meth:`failed`."""
        raise NotImplementedError

    def failed(self, error: BaseException) -> None:
        """The connection has ended, or what came on it was wrong."""
        raise NotImplementedError

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.failed(exc or ConnectionError("the other end closed the connection"))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._scratch[self._kept :] if self._body is None else self._body[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        try:
            if self._body is None:
                self._cut(self._kept + nbytes)
                return
            self._filled += nbytes
            if self._filled == len(self._body):
                body, self._body = self._body, None
                self.received(body)
        except Exception as error:  # noqa: BLE001 # above us is only the loop; whoever waits for us hears of it
            self.failed(error)

    def _cut(self, end: int) -> None:
        position = 0
        while end - position >= _PREFIX.size:
            (length,) = _PREFIX.unpack_from(self._scratch, position)
            position += _PREFIX.size
            body = np.empty(length, np.uint8).data
            self._filled = min(length, end - position)
            body[: self._filled] = self._scratch[position : position + self._filled]
            position += self._filled
            if self._filled < length:
                self._body = body
                break
            self.received(body)
        self._kept = end - position
        self._scratch[: self._kept] = self._scratch[position:end]


# -- one-way streams -----------------------------------------------------------------------------------------------------


_Protocol = TypeVar("_Protocol", bound=asyncio.BaseProtocol)


@contextlib.asynccontextmanager
async def dialled(path: Path, end: Callable[[], _Protocol]) -> AsyncIterator[_Protocol]:
    """A connection to whoever serves at a path, for the time of a ``with``."""
    transport, protocol = await asyncio.get_running_loop().create_unix_connection(end, str(path))
    try:
        yield protocol
    finally:
        transport.close()


async def served(
    path: Path, end: Callable[[], asyncio.BaseProtocol], finished: asyncio.Future[None], listening: Callable[[], None]
) -> None:
    """Accepts connections at a path until ``finished`` is done; the path is there no more when this returns."""
    server = await asyncio.get_running_loop().create_unix_server(end, str(path))
    try:
        listening()
        await finished
    finally:
        server.close()
        path.unlink(missing_ok=True)  # noqa: ASYNC240 # a name in a directory of our own is gone at once


def connected(path: Path, window: Window) -> contextlib.AbstractAsyncContextManager[Sender]:
    """A producer's end for the time of a ``with``; what is acknowledged is given back to the window."""
    return dialled(path, lambda: Sender(window))


async def consumed(path: Path, producers: int, take: Callable[[memoryview], Header], listening: Callable[[], None]) -> None:
    """The consumer: returns when so many producers have sent their last message and have gone.

    Args:
        path: of the socket.
        producers: how many connect.
        take: called with each body; returns the message's header.
        listening: called when producers may connect.
    """
    consumption = _Consumption(producers, take)
    await served(path, lambda: _Receiver(consumption), consumption.finished, listening)


class Sender(_Writing, asyncio.Protocol):
    """A producer's end; what comes back are acknowledgements."""

    def __init__(self, window: Window) -> None:
        super().__init__()
        self._window = window

    def data_received(self, data: bytes) -> None:
        self._window.give(len(data))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._window.fail(exc or ConnectionError("the consumer closed the connection"))


class _Consumption:
    """What the connections of one cell share."""

    def __init__(self, producers: int, take: Callable[[memoryview], Header]) -> None:
        self.take = take
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unfinished = producers

    def finish_one(self) -> None:
        """A producer has read its last acknowledgement."""
        self._unfinished -= 1
        if not self._unfinished and not self.finished.done():
            self.finished.set_result(None)

    def fail(self, error: BaseException) -> None:
        if not self.finished.done():
            self.finished.set_exception(error)


class _Receiver(Messages):
    """The consumer's end of a connection."""

    def __init__(self, consumption: _Consumption) -> None:
        super().__init__()
        self._consumption = consumption
        self._complete = False

    def received(self, body: memoryview) -> None:
        self._complete = self._consumption.take(body).phase == Phase.LAST
        self.transport.write(b"\0")

    def failed(self, error: BaseException) -> None:
        self._consumption.fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._complete:  # and the producer has read the last acknowledgement
            self._consumption.finish_one()
        else:
            super().connection_lost(exc)
