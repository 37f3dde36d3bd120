"""``torch.multiprocessing.Queue``: a segment for each tensor, and its descriptor through the queue.

How its users use it: vLLM's ``torch_shm`` transport (``v1/engine/tensor_ipc.py``) does what is done here. The frontend
calls ``tensor.share_memory_()``, which copies the tensor into a new segment, and ``queue.put(..., timeout=10)``, from its
event loop; the queue's feeder thread pickles it. The engine has a thread that blocks in ``queue.get(timeout=10)``, so that
its own loop does not; the message is checked on that thread, which spares this peer the hop to the loop that vLLM makes.
Sharing is by ``file_descriptor``, torch's default on Linux: the consumer fetches each descriptor from a thread of the
producer. The window is counted back through a pipe that the producer's loop reads.

``share_memory_`` moves a tensor's own storage, and each of vLLM's is a new one. Here each is a new storage over the same
memory (``torch.from_numpy``), which is moved for the price of one copy and leaves the source where it was.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from multiprocessing.util import get_temp_dir
from typing import Any, NamedTuple

import torch
import torch.multiprocessing

from bench.messages import Cell, Header, Sink, Source
from bench.peers.peer import Peer
from bench.peers.window import Window

__all__ = ["TorchQueue"]

_torch_multiprocessing: Any = torch.multiprocessing  # it is not annotated

_STRATEGY = "file_descriptor"
_QUEUE_TIMEOUT_S = 10.0  # as in vLLM
_ACKS_NBYTES = 4096  # at a time; a byte each


class _Shared(NamedTuple):
    queue: Any  # torch.multiprocessing.Queue, whose class exists only in a context
    acks_reader: Connection
    acks_writer: Connection


class TorchQueue(Peer):
    """See the head of this file."""

    name = "torch-queue"
    title = "torch.multiprocessing.Queue"

    def create_shared(self, context: SpawnContext) -> _Shared:
        get_temp_dir()  # made by the parent, children inherit it: one that is killed leaves none of its own behind
        return _Shared(_torch_multiprocessing.get_context("spawn").Queue(), *context.Pipe(duplex=False))

    async def produce(self, cell: Cell, shared: _Shared, source: Source) -> None:
        _torch_multiprocessing.set_sharing_strategy(_STRATEGY)
        loop = asyncio.get_running_loop()
        window = Window(cell.window)
        acks = shared.acks_reader.fileno()
        loop.add_reader(acks, lambda: window.give(len(os.read(acks, _ACKS_NBYTES))))
        try:
            while not source.finished:
                await window.take()
                header = source.stamp()
                tensor: Any = torch.from_numpy(source.array)
                shared.queue.put((header, tensor.share_memory_()), timeout=_QUEUE_TIMEOUT_S)
            await window.drain()
        finally:
            loop.remove_reader(acks)

    async def consume(self, cell: Cell, shared: _Shared, sink: Sink, listening: Callable[[], None]) -> None:
        _torch_multiprocessing.set_sharing_strategy(_STRATEGY)
        listening()
        await asyncio.to_thread(_receive, shared, sink)


def _receive(shared: _Shared, sink: Sink) -> None:
    acks = shared.acks_writer.fileno()
    finished = False
    while not finished:
        header, tensor = shared.queue.get(timeout=_QUEUE_TIMEOUT_S)
        finished = sink.take(Header(*header), tensor)
        del tensor  # its segment goes with it
        os.write(acks, b"\0")
