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
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import torch

from bench import messages
from bench.messages import DTYPES, Sink, Source
from bench.peers.in_flight import Acknowledgements, Pending
from bench.peers.memory import memory_shortage
from bench.peers.peer import Ask, Peer, RequestPeer
from bench.request import questions
from bench.request.questions import Answer, Desk

__all__ = ["PyzmqMultipart", "PyzmqRequest"]

_IO_THREADS = 2  # of requests
_REQUEST_DTYPE = "float32"

_Header = TypeVar("_Header", messages.Header, questions.Header)


class _Description(msgspec.Struct, Generic[_Header], array_like=True):
    """The first frame; the second is the tensor."""

    header: _Header
    dtype: str
    shape: tuple[int, ...]


_encoder = msgspec.msgpack.Encoder()


def _configure(socket: Any) -> None:
    socket.set_hwm(0)  # what is in flight is the limit
    socket.linger = 0  # all has arrived when a socket is closed, or nothing matters any more


def _unpack(decoder: msgspec.msgpack.Decoder[_Description[_Header]], frames: list[Any]) -> tuple[_Header, torch.Tensor]:
    head, content = frames
    description = decoder.decode(head.buffer)
    return description.header, torch.frombuffer(content.buffer, dtype=DTYPES[description.dtype]).view(description.shape)


# -- streams -------------------------------------------------------------------------------------------------------------


class PyzmqMultipart(Peer):
    """See the head of this file."""

    name = "pyzmq"
    title = "pyzmq multipart (vLLM direct_rpc)"
    requires = "pyzmq"

    def limits(self, cell: messages.Cell) -> str | None:
        # All of the window is in the producer's tensors, and may at the same time be in the consumer's ZMQ.
        return memory_shortage(2 * cell.producers * cell.window * cell.nbytes)

    def create_shared(self, context: SpawnContext, producers: int) -> Acknowledgements:
        return Acknowledgements.create(context, producers)

    def close_shared(self, shared: Acknowledgements) -> None:
        shared.close()

    async def produce(self, cell: messages.Cell, shared: Acknowledgements, source: Source) -> None:
        import zmq

        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            _configure(socket)
            socket.connect(f"ipc://{_path(cell)}")
            contents = itertools.cycle(_contents(cell, source, socket.copy_threshold))
            with shared.counted(source.producer, cell.window) as window:
                while not source.finished:
                    await window.take()
                    tensor, frame = next(contents)
                    header = source.stamp(tensor)
                    socket.send_multipart((_encoder.encode(_Description(header, cell.dtype, cell.shape)), frame), copy=False)
                await window.drain()

    async def consume(self, cell: messages.Cell, shared: Acknowledgements, sink: Sink, listening: Callable[[], None]) -> None:
        import zmq

        loop = asyncio.get_running_loop()
        context = zmq.Context()
        try:
            await asyncio.to_thread(_receive, context, cell, shared, sink, lambda: loop.call_soon_threadsafe(listening))
        finally:
            context.term()  # a thread that still receives gets an error, and closes its socket; this waits for that
            _path(cell).unlink(missing_ok=True)


def _path(cell: messages.Cell | questions.Cell) -> Path:
    return Path(cell.directory, "pyzmq.sock")


def _contents(cell: messages.Cell, source: Source, copy_threshold: int) -> list[tuple[torch.Tensor | None, memoryview]]:
    """What to stamp and what to send, message by message, over and over: the source's own tensor if ZMQ copies it anyway."""
    if cell.nbytes < copy_threshold:
        return [(None, source.array.data)]
    tensors = [source.tensor.clone() for _ in range(cell.window)]
    return [(tensor, tensor.view(torch.uint8).numpy().data) for tensor in tensors]


def _receive(
    context: Any, cell: messages.Cell, acknowledgements: Acknowledgements, sink: Sink, listening: Callable[[], object]
) -> None:
    import zmq

    give = acknowledgements.givers()
    decoder = msgspec.msgpack.Decoder(_Description[messages.Header])
    finished = False
    with context.socket(zmq.PULL) as socket:
        _configure(socket)
        socket.bind(f"ipc://{_path(cell)}")
        listening()
        while not finished:
            header, tensor = _unpack(decoder, socket.recv_multipart(copy=False))
            finished = sink.take(header, tensor)
            give[header.producer]()


# -- requests ------------------------------------------------------------------------------------------------------------


class PyzmqRequest(RequestPeer):
    """See the head of this file."""

    name = "pyzmq"
    title = "pyzmq DEALER/ROUTER"
    requires = "pyzmq"

    async def serve(self, cell: questions.Cell, shared: Any, desk: Desk, listening: Callable[[], None]) -> None:
        decoder = msgspec.msgpack.Decoder(_Description[questions.Header])
        with _awaitable_socket("ROUTER") as router:
            try:
                router.bind(f"ipc://{_path(cell)}")
                listening()
                while True:
                    identity, *frames = await router.recv_multipart(copy=False)
                    header, tensor = _unpack(decoder, frames)
                    reply = desk.answer(header, tensor)
                    del tensor, frames
                    await router.send_multipart([identity, *_pack(header, reply)], copy=False)
            finally:
                _path(cell).unlink(missing_ok=True)

    @contextlib.asynccontextmanager
    async def connect(self, cell: questions.Cell, shared: Any, client: int) -> AsyncIterator[Ask]:
        with _awaitable_socket("DEALER") as dealer:
            dealer.connect(f"ipc://{_path(cell)}")
            pending = Pending()
            reading = asyncio.create_task(_read(dealer, pending))

            async def ask(header: questions.Header, tensor: torch.Tensor) -> Answer:
                reply = pending.open(header.sequence)
                await dealer.send_multipart(_pack(header, tensor), copy=False)
                return await reply

            try:
                yield ask
            finally:
                reading.cancel()
                await asyncio.wait([reading])


async def _read(dealer: Any, pending: Pending) -> None:
    decoder = msgspec.msgpack.Decoder(_Description[questions.Header])
    try:
        while True:
            pending.settle(Answer(*_unpack(decoder, await dealer.recv_multipart(copy=False))))
    except Exception as error:  # noqa: BLE001 # whoever waits for a reply hears of it
        pending.fail(error)


def _pack(header: questions.Header, tensor: torch.Tensor) -> list[Any]:
    return [_encoder.encode(_Description(header, _REQUEST_DTYPE, tuple(tensor.shape))), tensor.numpy().data]


@contextlib.contextmanager
def _awaitable_socket(kind: str) -> Iterator[Any]:
    """A socket in a context of its own; both are closed again, and what was not sent is dropped."""
    zmq: Any = importlib.import_module("zmq")
    context = importlib.import_module("zmq.asyncio").Context(io_threads=_IO_THREADS)
    socket = context.socket(getattr(zmq, kind))
    _configure(socket)
    try:
        yield socket
    finally:
        socket.close()
        context.term()
