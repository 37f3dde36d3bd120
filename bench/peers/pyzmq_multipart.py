"""pyzmq: a message of two parts, the header as msgpack and the tensor as a zero-copy frame.

How its users use it: this is vLLM's default (``direct_rpc``), the way of ``v1/engine/core_client.py`` and ``core.py``. The
frontend calls ``send_multipart(..., copy=False)`` on its event loop, over ``ipc://`` and without a high-water mark; the
tensor's own memory is the frame, which ZMQ's I/O thread hands to the kernel. The engine has a thread that blocks in
``recv_multipart(copy=False)``, so that its own loop does not, and its tensor is a view of the frame. The message is checked on
that thread, which spares this peer the hop to the loop that vLLM makes.

Where there was a choice, the faster was taken: PUSH and PULL, which carry no identities, and not ROUTER and DEALER; the
thread, and not ``zmq.asyncio`` (half as fast at 4 KB) or the socket's descriptor in the loop; ``copy=False``, and not
``copy=True`` (half as fast from 1 MB on). Larger socket buffers and a second I/O thread made no difference. pyzmq copies frames
below its ``copy_threshold`` (64 KiB) in any case. A larger one belongs to ZMQ until it has been sent, so each message of the
window has a tensor of its own, as each of vLLM's requests has; they count as the producer's memory. The window is counted back
through a pipe for each producer that its loop reads.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any

import msgspec
import torch

from bench.messages import DTYPES, Cell, Header, Sink, Source
from bench.peers.memory import memory_shortage
from bench.peers.peer import Peer
from bench.peers.window import Acknowledgements

__all__ = ["PyzmqMultipart"]


class _Description(msgspec.Struct, array_like=True):
    header: Header
    dtype: str
    shape: tuple[int, ...]


class PyzmqMultipart(Peer):
    """See the head of this file."""

    name = "pyzmq"
    title = "pyzmq multipart (vLLM direct_rpc)"
    requires = "pyzmq"

    def limits(self, cell: Cell) -> str | None:
        # All of the window is in the producer's tensors, and may at the same time be in the consumer's ZMQ.
        return memory_shortage(2 * cell.producers * cell.window * cell.nbytes)

    def create_shared(self, context: SpawnContext, producers: int) -> Acknowledgements:
        return Acknowledgements.create(context, producers)

    def close_shared(self, shared: Acknowledgements) -> None:
        shared.close()

    async def produce(self, cell: Cell, shared: Acknowledgements, source: Source) -> None:
        import zmq

        encoder = msgspec.msgpack.Encoder()
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            _configure(socket)
            socket.connect(_address(cell))
            contents = itertools.cycle(_contents(cell, source, socket.copy_threshold))
            with shared.counted(source.producer, cell.window) as window:
                while not source.finished:
                    await window.take()
                    tensor, frame = next(contents)
                    header = source.stamp(tensor)
                    description = encoder.encode(_Description(header, cell.dtype, cell.shape))
                    socket.send_multipart((description, frame), copy=False)
                await window.drain()

    async def consume(self, cell: Cell, shared: Acknowledgements, sink: Sink, listening: Callable[[], None]) -> None:
        import zmq

        loop = asyncio.get_running_loop()
        context = zmq.Context()
        try:
            await asyncio.to_thread(_receive, context, cell, shared, sink, lambda: loop.call_soon_threadsafe(listening))
        finally:
            context.term()  # a thread that still receives gets an error, and closes its socket; this waits for that
            _path(cell).unlink(missing_ok=True)


def _configure(socket: Any) -> None:
    import zmq

    for option in (zmq.SNDHWM, zmq.RCVHWM):
        socket.setsockopt(option, 0)  # the window is the limit
    socket.setsockopt(zmq.LINGER, 0)  # all has been consumed when a socket is closed, or nothing matters any more


def _path(cell: Cell) -> Path:
    return Path(cell.directory, "pyzmq.sock")


def _address(cell: Cell) -> str:
    return f"ipc://{_path(cell)}"


def _contents(cell: Cell, source: Source, copy_threshold: int) -> list[tuple[torch.Tensor | None, memoryview]]:
    """What to stamp and what to send, message by message, over and over: the source's own tensor if ZMQ copies it anyway."""
    if cell.nbytes < copy_threshold:
        return [(None, source.array.data)]
    tensors = [source.tensor.clone() for _ in range(cell.window)]
    return [(tensor, tensor.view(torch.uint8).numpy().data) for tensor in tensors]


def _receive(context: Any, cell: Cell, acknowledgements: Acknowledgements, sink: Sink, listening: Callable[[], object]) -> None:
    import zmq

    give = acknowledgements.givers()
    decoder = msgspec.msgpack.Decoder(_Description)
    finished = False
    with context.socket(zmq.PULL) as socket:
        _configure(socket)
        socket.bind(_address(cell))
        listening()
        while not finished:
            head, content = socket.recv_multipart(copy=False)
            description = decoder.decode(head.buffer)
            tensor = torch.frombuffer(content.buffer, dtype=DTYPES[description.dtype]).view(description.shape)
            finished = sink.take(description.header, tensor)
            give[description.header.producer]()
