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
from typing import Any, cast

import numpy as np

from bench.messages import Cell, Header, Source
from bench.peers.in_flight import Intake, Send, WindowedPeer

__all__ = ["Messages", "SocketPeer", "dialled", "served"]

_PREFIX = struct.Struct("<I")
_SCRATCH_NBYTES = 256 << 10  # what uvloop, too, reads at a time


class Messages(asyncio.BufferedProtocol):
    """An end of a connection: writes messages, and cuts what comes into messages.

    Args:
        received: called with each message that has come. What it raises is said to ``failed``.
        failed: called when something on the connection was wrong, or when it has ended.
        may_end: whether the other end may go, which is no failure then.

    Attributes:
        writable: set while the transport's buffer has room; to be awaited by who writes much.
        transport: there as soon as there is a connection.
    """

    transport: asyncio.Transport

    def __init__(
        self,
        received: Callable[[memoryview], object],
        failed: Callable[[BaseException], object] = lambda error: None,
        *,
        may_end: bool = False,
    ) -> None:
        self.writable = asyncio.Event()
        self.writable.set()
        self._received = received
        self._failed = failed
        self._may_end = may_end
        self._scratch = memoryview(bytearray(_SCRATCH_NBYTES))
        self._kept = 0  # bytes at the start of scratch
        self._body: memoryview | None = None
        self._filled = 0

    def send(self, body: bytes) -> None:
        """Writes a message."""
        self.transport.writelines((_PREFIX.pack(len(body)), body))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.writable.set()
        if not self._may_end:
            self._failed(exc or ConnectionError("the other end closed the connection"))

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
                self._received(body)
        except Exception as error:  # noqa: BLE001 # above us is only the loop; whoever waits for us hears of it
            self._failed(error)

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
            self._received(body)
        self._kept = end - position
        self._scratch[: self._kept] = self._scratch[position:end]


@contextlib.asynccontextmanager
async def dialled(path: Path, end: Messages) -> AsyncIterator[None]:
    """Connects an end to whoever serves at a path, for the time of a ``with``."""
    transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: end, str(path))
    try:
        yield
    finally:
        transport.close()


async def served(path: Path, take: Callable[[Messages, memoryview], bool], listening: Callable[[], None]) -> None:
    """Accepts connections at a path, whose clients may come and go, until the last message; the path is gone when this returns.

    Args:
        take: called with each message that has come, and the end that it came to; returns whether it was the last one.
        listening: called when there can be connections.
    """
    loop = asyncio.get_running_loop()
    finished: asyncio.Future[None] = loop.create_future()
    ends: list[Messages] = []

    def failed(error: BaseException) -> None:
        if not finished.done():
            finished.set_exception(error)

    def accept() -> Messages:
        def received(body: memoryview) -> None:
            if take(end, body):
                finished.set_result(None)

        end = Messages(received, failed, may_end=True)
        ends.append(end)
        return end

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
        end = Messages(lambda body: None)  # of which none comes
        async with dialled(self._path(cell), end):

            def send() -> Awaitable[object] | None:
                end.send(self.encode(cell, own, source))
                return None if end.writable.is_set() else end.writable.wait()

            yield send

    async def receive(self, cell: Cell, own: Any, intake: Intake, listening: Callable[[], None]) -> None:
        def take(_: Messages, body: memoryview) -> bool:
            header, last = self.take(body, intake)
            intake.acknowledge(header)
            return last

        await served(self._path(cell), take, listening)

    def _path(self, cell: Cell) -> Path:
        return Path(cell.directory, f"{self.name}.sock")
