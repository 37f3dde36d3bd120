"""Inline msgpack: the tensor's bytes inside a msgpack message, over the same kind of Unix stream socket.

How its users use it: the simplest transport that is safe, and what a server has before it has shared memory. A message is
a u32 length and msgpack by msgspec, written to an asyncio transport on uvloop, with the transport's flow control; a client
keeps a future for each request, by its number. Done well, to be worth comparing with: the sender's bytes are copied once
(into the message) before the kernel takes them, large messages are received straight into memory of their own,
uninitialised, the tensor is a view of that, and the engine answers within the callback that brought the last bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from bench.peers.unix_stream import Messages
from bench.request.peers.peer import Ask, Peer
from bench.request.peers.pending import Pending
from bench.request.questions import Answer, Cell, Desk, Header

__all__ = ["InlineRequest"]

_MAX_NBYTES = (1 << 32) - 4096  # what the prefix can say, less what is around the tensor


class _Message(msgspec.Struct, array_like=True):
    """A question or a reply."""

    header: Header
    dtype: str
    shape: tuple[int, ...]
    content: memoryview  # decoded without a copy


class InlineRequest(Peer):
    """See the head of this file."""

    name = "inline-msgpack"
    title = "inline msgpack, same socket"

    def limits(self, cell: Cell) -> str | None:
        if max(cell.nbytes, cell.reply_nbytes) > _MAX_NBYTES:
            return "its length prefix ends at 4 GiB"
        return None

    async def serve(self, cell: Cell, shared: Any, desk: Desk, listening: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        failed: asyncio.Future[None] = loop.create_future()
        path = _socket_path(cell)
        server = await loop.create_unix_server(lambda: _Answering(desk, failed), str(path))
        try:
            listening()
            await failed
        finally:
            server.close()
            path.unlink(missing_ok=True)

    @contextlib.asynccontextmanager
    async def connect(self, cell: Cell, shared: Any, client: int) -> AsyncIterator[Ask]:
        loop = asyncio.get_running_loop()
        transport, asking = await loop.create_unix_connection(_Asking, str(_socket_path(cell)))
        try:
            yield asking.ask
        finally:
            transport.close()


def _socket_path(cell: Cell) -> Path:
    return Path(cell.directory, "inline-request.sock")


class _Tensors(Messages):
    """Both ends: a tensor in each message."""

    def __init__(self) -> None:
        super().__init__()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(_Message)

    def take(self, header: Header, tensor: torch.Tensor) -> None:
        """A message has come."""
        raise NotImplementedError

    def write(self, header: Header, tensor: torch.Tensor) -> None:
        """Sends a message; the tensor may be written again at once."""
        array = tensor.numpy()
        self.send(self._encoder.encode(_Message(header, array.dtype.str, array.shape, array.data.cast("B"))))

    def received(self, body: memoryview) -> None:
        message = self._decoder.decode(body)
        array = np.frombuffer(message.content, np.dtype(message.dtype))
        self.take(message.header, torch.from_numpy(array).view(message.shape))


class _Answering(_Tensors):
    """The engine's end. It does not wait for a client to read: a client has no more replies to come than it has asked for."""

    def __init__(self, desk: Desk, failed: asyncio.Future[None]) -> None:
        super().__init__()
        self._desk = desk
        self._failed = failed

    def take(self, header: Header, tensor: torch.Tensor) -> None:
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

    async def ask(self, header: Header, tensor: torch.Tensor) -> Answer:
        await self.writable.wait()
        reply = self._pending.open(header.sequence)
        self.write(header, tensor)
        return await reply

    def take(self, header: Header, tensor: torch.Tensor) -> None:
        self._pending.settle(Answer(header, tensor))

    def failed(self, error: BaseException) -> None:
        self._pending.fail(error)
