"""Messages over a Unix stream socket: what the peers have in common that send everything, or the name of a segment, inline.

A message is a u32 length and a body, written to an asyncio transport on uvloop. The receiving end cuts the stream: what is
small in a scratch buffer, the rest of a large body straight into memory of its own, uninitialised, so that no byte of it is
copied once more. :class:`SocketPeer` is a stream of such messages.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from bench.messages import Cell, Header, Source
from bench.peers.in_flight import Intake, Send, WindowedPeer

__all__ = ["Messages", "Served", "SocketPeer", "dialled", "served"]

_PREFIX = struct.Struct("<I")
_SCRATCH_NBYTES = 256 << 10  # what uvloop, too, reads at a time


class Messages(asyncio.BufferedProtocol):
    """An end of a connection: writes messages, and cuts what comes into messages.

    Attributes:
        writable: set while the transport's buffer has room; to be awaited by who writes much.
        transport: there as soon as there is a connection.
    """

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.writable = asyncio.Event()
        self.writable.set()
        self._scratch = memoryview(bytearray(_SCRATCH_NBYTES))
        self._kept = 0  # bytes at the start of scratch
        self._body: memoryview | None = None
        self._filled = 0

    def send(self, body: bytes) -> None:
        """Writes a message."""
        self.transport.writelines((_PREFIX.pack(len(body)), body))

    def received(self, body: memoryview) -> None:
        """A message has come. What this raises is said to :meth:`failed`."""
        raise NotImplementedError

    def failed(self, error: BaseException) -> None:
        """The connection has ended, or what came on it was wrong; to be overridden where somebody waits for more."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.writable.set()
        self.failed(exc or ConnectionError("the other end closed the connection"))

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

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


_End = TypeVar("_End", bound=Messages)


@contextlib.asynccontextmanager
async def dialled(path: Path, end: Callable[[], _End]) -> AsyncIterator[_End]:
    """A connection to whoever serves at a path, for the time of a ``with``."""
    transport, protocol = await asyncio.get_running_loop().create_unix_connection(end, str(path))
    try:
        yield protocol
    finally:
        transport.close()


class Served(Messages):
    """An end of whoever serves at a path. A client that goes is no failure: all of them do in the end.

    Args:
        finished: set when no more is to be served, or as soon as something has failed.
    """

    def __init__(self, finished: asyncio.Future[None]) -> None:
        super().__init__()
        self.finished = finished

    def failed(self, error: BaseException) -> None:
        if not self.finished.done():
            self.finished.set_exception(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self.writable.set()


async def served(path: Path, end: Callable[[asyncio.Future[None]], Served], listening: Callable[[], None]) -> None:
    """Accepts connections at a path until one of their ends has finished; the path is gone when this returns."""
    loop = asyncio.get_running_loop()
    finished: asyncio.Future[None] = loop.create_future()
    ends: list[Served] = []

    def accept() -> Served:
        ends.append(end(finished))
        return ends[-1]

    server = await loop.create_unix_server(accept, str(path))
    try:
        listening()
        await finished
    finally:
        server.close()
        for accepted in ends:
            accepted.transport.close()
        path.unlink(missing_ok=True)  # noqa: ASYNC240 # a name in a directory of our own is gone at once


# -- streams -------------------------------------------------------------------------------------------------------------


class SocketPeer(WindowedPeer):
    """A stream whose messages, or what describes them, go through a socket."""

    @abc.abstractmethod
    def encode(self, cell: Cell, own: Any, source: Source) -> bytes:
        """Stamps the next message and returns what to send for it."""

    @abc.abstractmethod
    def take(self, body: memoryview, intake: Intake) -> tuple[Header, bool]:
        """Takes a message that has come; returns its header, and whether it is the last one."""

    @contextlib.asynccontextmanager
    async def sending(self, cell: Cell, own: Any, source: Source) -> AsyncIterator[Send]:
        async with dialled(self._path(cell), Messages) as end:

            def send() -> Awaitable[object] | None:
                end.send(self.encode(cell, own, source))
                return None if end.writable.is_set() else end.writable.wait()

            yield send

    async def receive(self, cell: Cell, own: Any, intake: Intake, listening: Callable[[], None]) -> None:
        await served(self._path(cell), lambda finished: _Receiver(finished, self, intake), listening)

    def _path(self, cell: Cell) -> Path:
        return Path(cell.directory, f"{self.name}.sock")


class _Receiver(Served):
    """The consumer's end of a producer's connection."""

    def __init__(self, finished: asyncio.Future[None], peer: SocketPeer, intake: Intake) -> None:
        super().__init__(finished)
        self._peer = peer
        self._intake = intake

    def received(self, body: memoryview) -> None:
        header, last = self._peer.take(body, self._intake)
        self._intake.acknowledge(header)
        if last:
            self.finished.set_result(None)
