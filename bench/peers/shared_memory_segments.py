"""``multiprocessing.shared_memory``: a named segment for each tensor, and its name through a socket.

How its users use it: SGLang does this (``ShmPointerMMData`` in ``managers/mm_utils.py``). The producer creates a segment,
copies the tensor into it, closes it and sends its name; the consumer opens it by name, makes a tensor of it, closes it when it
needs it no more, and unlinks it. Both do so on their event loops. Two choices are kind to it: the consumer reads the segment
in place, where SGLang by default clones the tensor out of it, and names go as msgpack over a Unix stream socket, which is
cheaper than SGLang's pickle over ZMQ. An acknowledgement is a byte on the same socket.

Each process tells multiprocessing's resource tracker of every segment that it creates, opens or unlinks: the standard library
does so unless it is worked around, and it is what removes segments after a crash. The tracker's CPU time is spent in a process
of its own, and is in no column of the table. (Without it each side would save 5 of 30 microseconds at 4 KB.)
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import struct
from collections.abc import Callable
from multiprocessing.context import SpawnContext
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import cast

import msgspec
import torch

from bench.messages import DTYPES, Cell, Header, Phase, Sink, Source
from bench.peers.peer import Peer
from bench.peers.window import Window
from shmring.memory.slab import SHM_DIRECTORY

__all__ = ["SharedMemorySegments"]

_PREFIX = struct.Struct("<H")  # the length of a message, which takes less than 100 bytes


class _Message(msgspec.Struct, array_like=True):
    header: Header
    segment: str
    dtype: str
    shape: tuple[int, ...]


class SharedMemorySegments(Peer):
    """See the head of this file."""

    name = "shared-memory"
    title = "a segment per tensor (SGLang)"

    def limits(self, cell: Cell) -> str | None:
        needed, free = cell.producers * cell.window * cell.nbytes, shutil.disk_usage(SHM_DIRECTORY).free
        if needed <= free:  # else a SIGBUS would end it
            return None
        return f"{needed / 2**30:.1f} GiB would be in flight, and {free / 2**30:.1f} GiB of {SHM_DIRECTORY} are free"

    def create_shared(self, context: SpawnContext, producers: int) -> str:
        return f"bench-{os.getpid()}-{secrets.token_hex(4)}"  # what the segments' names begin with

    def close_shared(self, shared: str) -> None:
        for path in SHM_DIRECTORY.glob(f"{shared}-*"):  # of a run that was ended in the middle
            segment = SharedMemory(path.name)
            segment.close()
            segment.unlink()

    async def produce(self, cell: Cell, shared: str, source: Source) -> None:
        window = Window(cell.window)
        encoder = msgspec.msgpack.Encoder()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_unix_connection(lambda: _Sender(window), str(_socket_path(cell)))
        try:
            while not source.finished:
                await window.take()
                header = source.stamp()
                name = f"{shared}-{header.producer}-{header.sequence}"
                _fill_segment(name, source.tensor)
                body = encoder.encode(_Message(header, name, cell.dtype, cell.shape))
                transport.write(_PREFIX.pack(len(body)) + body)
            await window.drain()
        finally:
            transport.close()

    async def consume(self, cell: Cell, shared: str, sink: Sink, listening: Callable[[], None]) -> None:
        consumption = _Consumption(sink, cell.producers)
        path = _socket_path(cell)
        server = await asyncio.get_running_loop().create_unix_server(lambda: _Receiver(consumption), str(path))
        try:
            listening()
            await consumption.finished
        finally:
            server.close()
            path.unlink(missing_ok=True)


def _socket_path(cell: Cell) -> Path:
    return Path(cell.directory, "shared-memory.sock")


def _fill_segment(name: str, tensor: torch.Tensor) -> None:
    """Makes a segment with the content of a tensor."""
    content = tensor.view(torch.uint8)
    segment = SharedMemory(name, create=True, size=content.nbytes)
    try:
        torch.frombuffer(segment.buf, dtype=torch.uint8).copy_(content)
    finally:
        segment.close()


class _Sender(asyncio.Protocol):
    def __init__(self, window: Window) -> None:
        self._window = window

    def data_received(self, data: bytes) -> None:
        self._window.give(len(data))

    def connection_lost(self, exc: Exception | None) -> None:
        self._window.fail(exc or ConnectionError("the consumer closed the connection"))


class _Consumption:
    """What the connections of one cell share."""

    def __init__(self, sink: Sink, producers: int) -> None:
        self.sink = sink
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unfinished = producers

    def finish_one(self) -> None:
        """A producer has read its last acknowledgement."""
        self._unfinished -= 1
        if not self._unfinished and not self.finished.done():
            self.finished.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self.finished.done():
            self.finished.set_exception(error)


class _Receiver(asyncio.Protocol):
    def __init__(self, consumption: _Consumption) -> None:
        self._consumption = consumption
        self._decoder = msgspec.msgpack.Decoder(_Message)
        self._transport: asyncio.Transport | None = None
        self._kept = bytearray()
        self._complete = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._kept += data
        try:
            self._cut()
        except Exception as error:  # noqa: BLE001 # above us is only the loop; whoever waits for us hears of it
            self._consumption.fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._complete:
            self._consumption.finish_one()
        else:
            self._consumption.fail(exc or ConnectionError("the producer closed the connection"))

    def _cut(self) -> None:
        while len(self._kept) >= _PREFIX.size:
            end = _PREFIX.size + _PREFIX.unpack_from(self._kept)[0]
            if len(self._kept) < end:
                return
            message = self._decoder.decode(self._kept[_PREFIX.size : end])
            del self._kept[:end]
            self._take(message)

    def _take(self, message: _Message) -> None:
        assert self._transport is not None
        segment = SharedMemory(message.segment)
        try:
            tensor = torch.frombuffer(segment.buf, dtype=DTYPES[message.dtype]).view(message.shape)
            self._consumption.sink.take(message.header, tensor)
            del tensor  # nothing but us knows that it needs the segment
        finally:
            segment.close()
            segment.unlink()
        self._complete = message.header.phase == Phase.LAST
        self._transport.write(b"\0")
