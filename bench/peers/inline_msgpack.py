"""Inline msgpack: the tensor's bytes inside a msgpack message, over the same kind of Unix stream socket.

How its users use it: the simplest transport that is safe, and what a server has before it has shared memory. A message is
a u32 length and msgpack by msgspec, written to an asyncio transport on uvloop, with the transport's flow control. A client
keeps a future for each request, by its number. Done well, to be worth comparing with: the sender's bytes are copied once (into
the message) before the kernel takes them, large messages are received straight into memory of their own, uninitialised, the
tensor is a view of that, and consumer and engine do their work within the callback that brought the last bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from bench.messages import Answer, Ask, Cell, Header, Source
from bench.peers.in_flight import Intake, Pending
from bench.peers.peer import Description, RequestPeer, encode
from bench.peers.unix_stream import Messages, SocketPeer, dialled, served
from bench.request.questions import Desk

__all__ = ["InlineMsgpack", "InlineRequest"]

_MAX_NBYTES = (1 << 32) - 4096  # what the prefix can say, less what is around the tensor
_REQUEST_DTYPE = "float32"


class _Message(Description):
    content: memoryview  # decoded without a copy


_decoder = msgspec.msgpack.Decoder(_Message)


class InlineMsgpack(SocketPeer):
    name = "inline-msgpack"
    title = "inline msgpack, same socket"

    def encode(self, cell: Cell, own: Any, source: Source) -> bytes:
        return encode(_Message(source.stamp(), cell.dtype, cell.shape, source.array.data))

    def take(self, body: memoryview, intake: Intake) -> tuple[Header, bool]:
        message = _decoder.decode(body)
        return message.header, intake.take(message.header, message.tensor(message.content))


class InlineRequest(RequestPeer):
    name = "inline-msgpack"
    title = "inline msgpack, same socket"

    def limits(self, cell: Cell) -> str | None:
        if max(cell.nbytes, cell.reply_nbytes) > _MAX_NBYTES:
            return "its length prefix ends at 4 GiB"
        return super().limits(cell)

    async def serve(self, cell: Cell, shared: Any, desk: Desk, listening: Callable[[], None]) -> None:
        def take(end: Messages, body: memoryview) -> bool:
            """Does not wait for a client to read: a client has no more replies to come than it has asked for."""
            message = _decoder.decode(body)
            end.send(_encoded(message.header, desk.answer(message.header, message.tensor(message.content))))
            return False

        await served(_path(cell), take, listening)

    @contextlib.asynccontextmanager
    async def connect(self, cell: Cell, shared: Any, client: int) -> AsyncIterator[Ask]:
        def send(header: Header, tensor: torch.Tensor) -> Awaitable[object] | None:
            end.send(_encoded(header, tensor))
            return None if end.writable.is_set() else end.writable.wait()

        def received(body: memoryview) -> None:
            message = _decoder.decode(body)
            pending.settle(Answer(message.header, message.tensor(message.content)))

        pending = Pending(send)
        end = Messages(received, pending.fail)
        async with dialled(_path(cell), end):
            yield pending.ask


def _path(cell: Cell) -> Path:
    return Path(cell.directory, "inline-msgpack.sock")


def _encoded(header: Header, tensor: torch.Tensor) -> bytes:
    return encode(_Message(header, _REQUEST_DTYPE, tuple(tensor.shape), tensor.numpy().data.cast("B")))
