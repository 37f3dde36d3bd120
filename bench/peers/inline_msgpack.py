"""Inline msgpack: the tensor's bytes inside a msgpack message, over the same kind of Unix stream socket.

How its users use it: the simplest transport that is safe, and what a server has before it has shared memory. A message is
a u32 length and msgpack by msgspec, written to an asyncio transport on uvloop, with the transport's flow control. The consumer
of a stream acknowledges each with a byte; a client keeps a future for each request, by its number. Done well, to be worth
comparing with: the sender's bytes are copied once (into the message) before the kernel takes them, large messages are received
straight into memory of their own, uninitialised, the tensor is a view of that, and the engine answers within the callback that
brought the last bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import torch

from bench import messages
from bench.messages import DTYPES, Sink, Source
from bench.peers.in_flight import Pending, Window
from bench.peers.peer import Ask, Peer, RequestPeer
from bench.peers.unix_stream import Messages, connected, consumed, dialled, served
from bench.request import questions
from bench.request.questions import Answer, Desk

__all__ = ["InlineMsgpack", "InlineRequest"]

_MAX_NBYTES = (1 << 32) - 4096  # what the prefix can say, less what is around the tensor
_REQUEST_DTYPE = "float32"

_Header = TypeVar("_Header", messages.Header, questions.Header)


class _Message(msgspec.Struct, Generic[_Header], array_like=True):
    header: _Header
    dtype: str
    shape: tuple[int, ...]
    content: memoryview  # decoded without a copy

    def tensor(self) -> torch.Tensor:
        """Returns a view of the content."""
        return torch.frombuffer(self.content, dtype=DTYPES[self.dtype]).view(self.shape)


_encoder = msgspec.msgpack.Encoder()


def _path(cell: messages.Cell | questions.Cell) -> Path:
    return Path(cell.directory, "inline-msgpack.sock")


class InlineMsgpack(Peer):
    """See the head of this file."""

    name = "inline-msgpack"
    title = "inline msgpack, same socket"

    async def produce(self, cell: messages.Cell, shared: Any, source: Source) -> None:
        window = Window(cell.window)
        content = source.array.data
        async with connected(_path(cell), window) as sender:
            while not source.finished:
                await window.take()
                header = source.stamp()
                sender.send(_encoder.encode(_Message(header, cell.dtype, cell.shape, content)))
                await sender.writable.wait()
            await window.drain()

    async def consume(self, cell: messages.Cell, shared: Any, sink: Sink, listening: Callable[[], None]) -> None:
        decoder = msgspec.msgpack.Decoder(_Message[messages.Header])

        def take(body: memoryview) -> messages.Header:
            message = decoder.decode(body)
            sink.take(message.header, message.tensor())
            return message.header

        await consumed(_path(cell), cell.producers, take, listening)


class InlineRequest(RequestPeer):
    """See the head of this file."""

    name = "inline-msgpack"
    title = "inline msgpack, same socket"

    def limits(self, cell: questions.Cell) -> str | None:
        if max(cell.nbytes, cell.reply_nbytes) > _MAX_NBYTES:
            return "its length prefix ends at 4 GiB"
        return None

    async def serve(self, cell: questions.Cell, shared: Any, desk: Desk, listening: Callable[[], None]) -> None:
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await served(_path(cell), lambda: _Answering(desk, failed), failed, listening)

    @contextlib.asynccontextmanager
    async def connect(self, cell: questions.Cell, shared: Any, client: int) -> AsyncIterator[Ask]:
        async with dialled(_path(cell), _Asking) as asking:
            yield asking.ask


class _Tensors(Messages):
    """Both ends of requests: a tensor in each message."""

    def __init__(self) -> None:
        super().__init__()
        self._decoder = msgspec.msgpack.Decoder(_Message[questions.Header])

    def take(self, header: questions.Header, tensor: torch.Tensor) -> None:
        """A message has come."""
        raise NotImplementedError

    def write(self, header: questions.Header, tensor: torch.Tensor) -> None:
        """Sends a message; the tensor may be written again at once."""
        content = tensor.numpy().data.cast("B")
        self.send(_encoder.encode(_Message(header, _REQUEST_DTYPE, tuple(tensor.shape), content)))

    def received(self, body: memoryview) -> None:
        message = self._decoder.decode(body)
        self.take(message.header, message.tensor())


class _Answering(_Tensors):
    """The engine's end. It does not wait for a client to read: a client has no more replies to come than it has asked for."""

    def __init__(self, desk: Desk, failed: asyncio.Future[None]) -> None:
        super().__init__()
        self._desk = desk
        self._failed = failed

    def take(self, header: questions.Header, tensor: torch.Tensor) -> None:
        self.write(header, self._desk.answer(header, tensor))

    def connection_lost(self, exc: Exception | None) -> None:
        """A client has gone: all of them do, in the end."""

    def failed(self, error: BaseException) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)


class _Asking(_Tensors):
    """A client's end."""

    def __init__(self) -> None:
        super().__init__()
        self._pending = Pending()

    async def ask(self, header: questions.Header, tensor: torch.Tensor) -> Answer:
        await self.writable.wait()
        reply = self._pending.open(header.sequence)
        self.write(header, tensor)
        return await reply

    def take(self, header: questions.Header, tensor: torch.Tensor) -> None:
        self._pending.settle(Answer(header, tensor))

    def failed(self, error: BaseException) -> None:
        self._pending.fail(error)
