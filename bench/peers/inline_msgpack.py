"""Inline msgpack: the tensor's bytes inside a msgpack message, over the same kind of Unix stream socket.

How its users use it: the simplest transport that is safe, and what a server has before it has shared memory. A message is
a u32 length and msgpack by msgspec, written to an asyncio transport on uvloop, with the transport's flow control; the
consumer acknowledges each with a byte. Done well, to be worth comparing with: the sender's bytes are copied once (into the
message) before the kernel takes them, large messages are received straight into memory of their own, uninitialised, and
the tensor is a view of that.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from bench.messages import DTYPES, Cell, Header, Sink, Source
from bench.peers.peer import Peer
from bench.peers.unix_stream import connected, consumed
from bench.peers.window import Window

__all__ = ["InlineMsgpack"]


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
        async with connected(_socket_path(cell), window) as sender:
            while not source.finished:
                await window.take()
                header = source.stamp()
                sender.send(encoder.encode(_Message(header, cell.dtype, cell.shape, content)))
                await sender.writable.wait()
            await window.drain()

    async def consume(self, cell: Cell, shared: Any, sink: Sink, listening: Callable[[], None]) -> None:
        decoder = msgspec.msgpack.Decoder(_Message)

        def take(body: memoryview) -> Header:
            message = decoder.decode(body)
            content = torch.from_numpy(np.frombuffer(message.content, np.uint8))
            sink.take(message.header, content.view(DTYPES[message.dtype]).view(message.shape))
            return message.header

        await consumed(_socket_path(cell), cell.producers, take, listening)


def _socket_path(cell: Cell) -> Path:
    return Path(cell.directory, "inline-msgpack.sock")
