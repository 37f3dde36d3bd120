"""pyzmq: DEALER to ROUTER over ``ipc://``, ``zmq.asyncio``, multipart messages whose tensors are frames of their own.

How its users use it: vLLM's and SGLang's API servers talk to their engines in this way (vLLM's ``direct_rpc`` for tensors):
sockets of ``zmq.asyncio``, ``send_multipart([msgpack, tensor], copy=False)``, ``recv_multipart(copy=False)``, no high-water
marks, two I/O threads in a context. Frames of 64 KiB and more are sent from the tensor's own memory (pyzmq copies smaller
ones, which is faster), and read where libzmq has put them. A client keeps a future for each request, by its number, and one
task that reads. No tracker of sent frames is needed here, which spares their cost: a reply proves that its request was sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from bench.request.peers.peer import Ask, Peer
from bench.request.peers.pending import Pending
from bench.request.questions import Answer, Cell, Desk, Header

__all__ = ["PyzmqRequest"]

_IO_THREADS = 2  # as in vLLM's client


class _Description(msgspec.Struct, array_like=True):
    """The first frame; the second is the tensor."""

    header: Header
    dtype: str
    shape: tuple[int, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Description)


class PyzmqRequest(Peer):
    """See the head of this file."""

    name = "pyzmq"
    title = "pyzmq DEALER/ROUTER"
    requires = "pyzmq"

    async def serve(self, cell: Cell, shared: Any, desk: Desk, listening: Callable[[], None]) -> None:
        path = _socket_path(cell)
        with _socket("ROUTER") as router:
            try:
                router.bind(f"ipc://{path}")
                listening()
                while True:
                    identity, *frames = await router.recv_multipart(copy=False)
                    header, tensor = _unpack(frames)
                    reply = desk.answer(header, tensor)
                    del tensor, frames
                    await router.send_multipart([identity, *_pack(header, reply)], copy=False)
            finally:
                path.unlink(missing_ok=True)

    @contextlib.asynccontextmanager
    async def connect(self, cell: Cell, shared: Any, client: int) -> AsyncIterator[Ask]:
        with _socket("DEALER") as dealer:
            dealer.connect(f"ipc://{_socket_path(cell)}")
            pending = Pending()
            reading = asyncio.create_task(_read(dealer, pending))

            async def ask(header: Header, tensor: torch.Tensor) -> Answer:
                reply = pending.open(header.sequence)
                await dealer.send_multipart(_pack(header, tensor), copy=False)
                return await reply

            try:
                yield ask
            finally:
                reading.cancel()
                await asyncio.wait([reading])


async def _read(dealer: Any, pending: Pending) -> None:
    try:
        while True:
            pending.settle(Answer(*_unpack(await dealer.recv_multipart(copy=False))))
    except Exception as error:  # noqa: BLE001 # whoever waits for a reply hears of it
        pending.fail(error)


def _pack(header: Header, tensor: torch.Tensor) -> list[Any]:
    array = tensor.numpy()
    return [_encoder.encode(_Description(header, array.dtype.str, array.shape)), array.data]


def _unpack(frames: list[Any]) -> tuple[Header, torch.Tensor]:
    description, content = frames
    described = _decoder.decode(description.buffer)
    array = np.frombuffer(content.buffer, np.dtype(described.dtype))
    return described.header, torch.from_numpy(array).view(described.shape)


@contextlib.contextmanager
def _socket(kind: str) -> Iterator[Any]:
    """A socket in a context of its own; both are closed again, and what was not sent is dropped."""
    zmq: Any = importlib.import_module("zmq.asyncio")
    context = zmq.Context(io_threads=_IO_THREADS)
    constants: Any = importlib.import_module("zmq")
    socket = context.socket(getattr(constants, kind))
    socket.set_hwm(0)
    try:
        yield socket
    finally:
        socket.close(linger=0)
        context.term()


def _socket_path(cell: Cell) -> Path:
    return Path(cell.directory, "pyzmq-request.sock")
