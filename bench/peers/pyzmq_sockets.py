"""pyzmq: messages of two parts over ``ipc://``, the header as msgpack and the tensor as a zero-copy frame.

How its users use it: vLLM's and SGLang's API servers talk to their engines in this way (vLLM's ``direct_rpc``):
``send_multipart([msgpack, tensor], copy=False)`` without a high-water mark; the tensor's own memory is the frame, which ZMQ's
I/O thread hands to the kernel, and the receiver's tensor is a view of where libzmq has put it. pyzmq copies frames below its
``copy_threshold`` (64 KiB) in any case, which is faster.

Streams: PUSH and PULL. The consumer has a thread that blocks in ``recv_multipart``, so that its loop stays free, and checks
messages there, which spares this peer the hop to the loop that vLLM makes. Where there was a choice, the faster was taken: not
ROUTER and DEALER, which carry identities, not ``zmq.asyncio`` (half as fast at 4 KB) nor ``copy=True`` (half as fast from 1 MB
on). A large frame belongs to ZMQ until it has been sent, so each message of the window has a tensor of its own, as each of
vLLM's requests has; they count as the producer's memory. The window is counted back through a pipe for each producer.

Requests: DEALER to ROUTER with ``zmq.asyncio`` and two I/O threads, as in vLLM's client. A client keeps a future for each
request, by its number, and one task that reads. No tracker of sent frames is needed, which spares their cost: a reply proves
that its request was sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec
import torch

from bench.messages import Answer, Ask, Cell, Header, Source
from bench.peers.in_flight import Intake, Pending, Send, WindowedPeer
from bench.peers.peer import Description, RequestPeer, encode
from bench.questions import Desk

_REQUEST_THREADS = 2  # of ZMQ
_REQUEST_DTYPE = "float32"
_SOCKET = "pyzmq.sock"

_decoder = msgspec.msgpack.Decoder(Description)


@contextlib.contextmanager
def _socket(context: Any, kind: str) -> Iterator[Any]:
    """A socket; all has arrived when it is closed, or nothing matters any more."""
    with context.socket(getattr(importlib.import_module("zmq"), kind)) as socket:
        socket.set_hwm(0)  # what is in flight is the limit
        socket.linger = 0
        yield socket


def _unpack(head: Any, content: Any) -> tuple[Header, torch.Tensor]:
    description = _decoder.decode(head.buffer)
    return description.header, description.tensor(content.buffer)


# -- streams -------------------------------------------------------------------------------------------------------------


class PyzmqMultipart(WindowedPeer):
    name = "pyzmq"
    title = "pyzmq multipart (vLLM direct_rpc)"
    requires = "pyzmq"

    @contextlib.asynccontextmanager
    async def sending(self, cell: Cell, own: Any, source: Source) -> AsyncIterator[Send]:
        with importlib.import_module("zmq").Context() as context, _socket(context, "PUSH") as socket:
            socket.connect(f"ipc://{cell.path(_SOCKET)}")
            contents = itertools.cycle(_contents(cell, source, socket.copy_threshold))

            def send() -> None:
                tensor, frame = next(contents)
                description = Description(source.stamp(tensor), cell.dtype, cell.shape)
                socket.send_multipart((encode(description), frame), copy=False)

            yield send

    async def receive(self, cell: Cell, own: Any, intake: Intake, listening: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        context = importlib.import_module("zmq").Context()
        try:
            await asyncio.to_thread(_receive, context, cell, intake, lambda: loop.call_soon_threadsafe(listening))
        finally:
            context.term()  # a thread that still receives gets an error, and closes its socket; this waits for that
            cell.path(_SOCKET).unlink(missing_ok=True)


def _contents(cell: Cell, source: Source, copy_threshold: int) -> list[tuple[torch.Tensor | None, memoryview]]:
    """What to stamp and what to send, message by message, over and over: the source's own tensor if ZMQ copies it anyway."""
    if cell.nbytes < copy_threshold:
        return [(None, source.array.data)]
    tensors = [source.tensor.clone() for _ in range(cell.window)]
    return [(tensor, tensor.view(torch.uint8).numpy().data) for tensor in tensors]


def _receive(context: Any, cell: Cell, intake: Intake, listening: Callable[[], object]) -> None:
    with _socket(context, "PULL") as socket:
        socket.bind(f"ipc://{cell.path(_SOCKET)}")
        listening()
        last = False
        while not last:
            header, tensor = _unpack(*socket.recv_multipart(copy=False))
            last = intake.take(header, tensor)
            intake.acknowledge(header)


# -- requests ------------------------------------------------------------------------------------------------------------


class PyzmqRequest(RequestPeer):
    name = "pyzmq"
    title = "pyzmq DEALER/ROUTER"
    requires = "pyzmq"

    async def serve(self, cell: Cell, desk: Desk, listening: Callable[[], None]) -> None:
        with _awaitable_socket("ROUTER") as router:
            try:
                router.bind(f"ipc://{cell.path(_SOCKET)}")
                listening()
                while True:
                    identity, *frames = await router.recv_multipart(copy=False)
                    header, tensor = _unpack(*frames)
                    reply = desk.answer(header, tensor)
                    del tensor, frames
                    await router.send_multipart([identity, *_pack(header, reply)], copy=False)
            finally:
                cell.path(_SOCKET).unlink(missing_ok=True)

    @contextlib.asynccontextmanager
    async def connect(self, cell: Cell) -> AsyncIterator[Ask]:
        with _awaitable_socket("DEALER") as dealer:
            dealer.connect(f"ipc://{cell.path(_SOCKET)}")
            pending = Pending(lambda header, tensor: dealer.send_multipart(_pack(header, tensor), copy=False))
            reading = asyncio.create_task(_read(dealer, pending))
            try:
                yield pending.ask
            finally:
                reading.cancel()
                await asyncio.wait([reading])


async def _read(dealer: Any, pending: Pending) -> None:
    try:
        while True:
            pending.settle(Answer(*_unpack(*await dealer.recv_multipart(copy=False))))
    except Exception as error:  # noqa: BLE001 # whoever waits for a reply hears of it
        pending.fail(error)


def _pack(header: Header, tensor: torch.Tensor) -> list[Any]:
    return [encode(Description(header, _REQUEST_DTYPE, tuple(tensor.shape))), tensor.numpy().data]


@contextlib.contextmanager
def _awaitable_socket(kind: str) -> Iterator[Any]:
    """A socket for a loop, in a context of its own."""
    context = importlib.import_module("zmq.asyncio").Context(io_threads=_REQUEST_THREADS)
    with context, _socket(context, kind) as socket:
        yield socket
