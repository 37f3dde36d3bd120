"""Inline msgpack: the tensor's bytes inside a msgpack message, over the same kind of Unix stream socket.

How its users use it: the simplest transport that is safe, and what a server has before it has shared memory. A message is
a u32 length and msgpack by msgspec, written to an asyncio transport on uvloop, with the transport's flow control; the
consumer acknowledges each with a byte. Done well, to be worth comparing with: the sender's bytes are copied once (into the
message) before the kernel takes them, large messages are received straight into memory of their own, uninitialised, and
the tensor is a view of that.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import torch

from bench.messages import DTYPES, Cell, Header, Phase, Sink, Source
from bench.peers.peer import Peer
from bench.peers.window import Window

__all__ = ["InlineMsgpack"]

_PREFIX = struct.Struct("<I")
_SCRATCH_NBYTES = 256 << 10  # what uvloop, too, reads at a time


class _Message(msgspec.Struct, array_like=True):
    header: Header
    dtype: str
    shape: tuple[int, ...]
    content: memoryview  # decoded without a copy


class InlineMsgpack(Peer):
    """See the head of this file."""

    name = "inline-msgpack"
    title = "inline msgpack, same socket"

    async def produce(self, cell: Cell, shared: Any, source: Source) -> None:
        window = Window(cell.window)
        encoder = msgspec.msgpack.Encoder()
        content = source.array.data
        loop = asyncio.get_running_loop()
        transport, sender = await loop.create_unix_connection(lambda: _Sender(window), str(_socket_path(cell)))
        try:
            while not source.finished:
                await window.take()
                header = source.stamp()
                body = encoder.encode(_Message(header, cell.dtype, cell.shape, content))
                transport.writelines((_PREFIX.pack(len(body)), body))
                await sender.writable.wait()
            await window.drain()
        finally:
            transport.close()

    async def consume(self, cell: Cell, shared: Any, sink: Sink, listening: Callable[[], None]) -> None:
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
    return Path(cell.directory, "inline-msgpack.sock")


class _Sender(asyncio.Protocol):
    def __init__(self, window: Window) -> None:
        self.writable = asyncio.Event()
        self.writable.set()
        self._window = window

    def data_received(self, data: bytes) -> None:
        self._window.give(len(data))

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.writable.set()
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


class _Receiver(asyncio.BufferedProtocol):
    """Cuts the stream into messages: small ones in a scratch buffer, the rest of a large one into its own memory."""

    def __init__(self, consumption: _Consumption) -> None:
        self._consumption = consumption
        self._decoder = msgspec.msgpack.Decoder(_Message)
        self._transport: asyncio.Transport | None = None
        self._scratch = memoryview(bytearray(_SCRATCH_NBYTES))
        self._kept = 0  # bytes at the start of scratch
        self._body: memoryview | None = None
        self._filled = 0
        self._complete = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

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
                self._take(body)
        except Exception as error:  # noqa: BLE001 # above us is only the loop; whoever waits for us hears of it
            self._consumption.fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._complete:  # and the producer has read the last acknowledgement
            self._consumption.finish_one()
        else:
            self._consumption.fail(exc or ConnectionError("the producer closed the connection"))

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
            self._take(body)
        self._kept = end - position
        self._scratch[: self._kept] = self._scratch[position:end]

    def _take(self, body: memoryview) -> None:
        assert self._transport is not None
        message = self._decoder.decode(body)
        content = torch.from_numpy(np.frombuffer(message.content, np.uint8))
        self._consumption.sink.take(message.header, content.view(DTYPES[message.dtype]).view(message.shape))
        self._complete = message.header.phase == Phase.LAST
        self._transport.write(b"\0")
