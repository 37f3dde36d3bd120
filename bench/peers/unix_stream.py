"""Messages over a Unix stream socket, and the peers that send everything inline so, or the name of a segment.

A message is a u32 length and a body, written to an asyncio transport on uvloop, with the transport's flow control. The
receiving end cuts the stream: what is small in a scratch buffer, the rest of a large body straight into memory of its own,
uninitialised, so that no byte of it is copied once more.

**Inline msgpack**: the tensor's bytes inside a msgpack message by msgspec. How its users use it: the simplest transport that is
safe, and what a server has before it has shared memory. A client keeps a future for each request, by its number. Done well, to
be worth comparing with: the sender's bytes are copied once (into the message) before the kernel takes them, the tensor is a
view of what was received, and consumer and engine do their work within the callback that brought the last bytes.

**A segment per tensor**: ``multiprocessing.shared_memory``, and its name through the socket. How its users use it: SGLang does
this (``ShmPointerMMData`` in ``managers/mm_utils.py``). The producer creates a segment, copies the tensor into it, closes it
and sends its name; the consumer opens it by name, makes a tensor of it, closes it when it needs it no more, and unlinks it.
Both do so on their event loops. Two choices are kind to it: the consumer reads the segment in place, where SGLang by default
clones the tensor out of it, and names go as msgpack over a Unix stream socket, which is cheaper than SGLang's pickle over ZMQ.
Each process tells multiprocessing's resource tracker of every segment that it creates, opens or unlinks: the standard library
does so unless it is worked around, and it is what removes segments after a crash. The tracker's CPU time is spent in a process
of its own, and is in no column of the table. (Without it each side would save 5 of 30 microseconds at 4 KB.)
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import os
import secrets
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from multiprocessing.context import SpawnContext
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import torch

from bench.messages import Answer, Ask, Cell, Header, Source
from bench.peers.in_flight import Intake, Pending, Send, WindowedPeer
from bench.peers.peer import Description, RequestPeer, encode
from bench.questions import Desk
from shmring.memory.slab import SHM_DIRECTORY

_PREFIX = struct.Struct("<I")
_SCRATCH_NBYTES = 256 << 10  # what uvloop, too, reads at a time


class Messages(asyncio.BufferedProtocol):
    """An end of a connection: writes messages, and cuts what comes into messages.

    Args:
        received: called with each message that has come. What it raises is said to ``failed``.
        failed: called when something on the connection was wrong, or when it has ended.
        may_end: whether the other end may go, which is no failure then.
    """

    transport: asyncio.Transport

    def __init__(
        self,
        received: Callable[[memoryview], object],
        failed: Callable[[BaseException], object] = lambda error: None,
        *,
        may_end: bool = False,
    ) -> None:
        self._writable = asyncio.Event()
        self._writable.set()
        self._received = received
        self._failed = failed
        self._may_end = may_end
        self._scratch = memoryview(bytearray(_SCRATCH_NBYTES))
        self._kept = 0  # bytes at the start of scratch
        self._body: memoryview | None = None
        self._filled = 0

    def send(self, body: bytes) -> None:
        self.transport.writelines((_PREFIX.pack(len(body)), body))

    def send_paced(self, body: bytes) -> Awaitable[object] | None:
        """Writes a message; returns what to await before more is written, if the transport's buffer has no room."""
        self.send(body)
        return None if self._writable.is_set() else self._writable.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._writable.set()
        if not self._may_end:
            self._failed(exc or ConnectionError("the other end closed the connection"))

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

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

    ``take`` gets each message that has come, and the end that it came to; it returns whether it was the last one.
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
            if hasattr(accepted, "transport"):  # else it was accepted just now, and its loop ends before it is connected
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
        async with dialled(cell.path(f"{self.name}.sock"), end):
            yield lambda: end.send_paced(self.encode(cell, own, source))

    async def receive(self, cell: Cell, own: Any, intake: Intake, listening: Callable[[], None]) -> None:
        def take(_: Messages, body: memoryview) -> bool:
            header, last = self.take(body, intake)
            intake.acknowledge(header)
            return last

        await served(cell.path(f"{self.name}.sock"), take, listening)


# -- inline msgpack ----------------------------------------------------------------------------------------------------


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

    async def serve(self, cell: Cell, desk: Desk, listening: Callable[[], None]) -> None:
        def take(end: Messages, body: memoryview) -> bool:
            """Does not wait for a client to read: a client has no more replies to come than it has asked for."""
            message = _decoder.decode(body)
            end.send(_encoded(message.header, desk.answer(message.header, message.tensor(message.content))))
            return False

        await served(cell.path(f"{self.name}.sock"), take, listening)

    @contextlib.asynccontextmanager
    async def connect(self, cell: Cell) -> AsyncIterator[Ask]:
        def received(body: memoryview) -> None:
            message = _decoder.decode(body)
            pending.settle(Answer(message.header, message.tensor(message.content)))

        pending = Pending(lambda header, tensor: end.send_paced(_encoded(header, tensor)))
        end = Messages(received, pending.fail)
        async with dialled(cell.path(f"{self.name}.sock"), end):
            yield pending.ask


def _encoded(header: Header, tensor: torch.Tensor) -> bytes:
    return encode(_Message(header, _REQUEST_DTYPE, tuple(tensor.shape), tensor.numpy().data.cast("B")))


# -- a segment per tensor ----------------------------------------------------------------------------------------------


class _Named(Description):
    segment: str


_named_decoder = msgspec.msgpack.Decoder(_Named)


class SharedMemorySegments(SocketPeer):
    name = "shared-memory"
    title = "a segment per tensor (SGLang)"

    def create_own(self, context: SpawnContext) -> str:
        return f"bench-{os.getpid()}-{secrets.token_hex(4)}"  # what the segments' names begin with

    def close_own(self, own: str) -> None:
        for path in SHM_DIRECTORY.glob(f"{own}-*"):  # of a run that was ended in the middle
            segment = SharedMemory(path.name)
            segment.close()
            segment.unlink()

    def encode(self, cell: Cell, own: str, source: Source) -> bytes:
        header = source.stamp()
        content = source.tensor.view(torch.uint8)
        segment = SharedMemory(f"{own}-{header.producer}-{header.sequence}", create=True, size=content.nbytes)
        try:
            torch.frombuffer(segment.buf, dtype=torch.uint8).copy_(content)
        finally:
            segment.close()
        return encode(_Named(header, cell.dtype, cell.shape, segment.name))

    def take(self, body: memoryview, intake: Intake) -> tuple[Header, bool]:
        message = _named_decoder.decode(body)
        segment = SharedMemory(message.segment)
        try:  # the tensor is gone before the segment is: nothing but us knows that it needs it
            return message.header, intake.take(message.header, message.tensor(segment.buf))
        finally:
            segment.close()
            segment.unlink()
