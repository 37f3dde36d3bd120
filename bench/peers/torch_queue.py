"""``torch.multiprocessing.Queue``: a segment for each tensor, and a handle of it through the queue.

How its users use it: vLLM's ``torch_shm`` transport (``v1/engine/tensor_ipc.py``) does what is done here. The frontend
calls ``tensor.share_memory_()``, which copies the tensor into a new segment, and ``queue.put(..., timeout=10)``, from its
event loop; the queue's feeder thread pickles it. The engine has a thread that blocks in ``queue.get(timeout=10)``, so that
its own loop does not; the message is checked on that thread, which spares this peer the hop to the loop that vLLM makes.
The window is counted back through a pipe for each producer that its loop reads.

Both of torch's sharing strategies are measured. ``file_descriptor``, the default on Linux: the consumer fetches each
descriptor from a thread of the producer. ``file_system``, which servers change to when they run out of descriptors: segments
have names, the consumer opens them by name, and a daemon of torch's removes what a crash left.

``share_memory_`` moves a tensor's own storage, and each of vLLM's is a new one. Here each is a new storage over the same
memory (``torch.from_numpy``), which is moved for the price of one copy and leaves the source where it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from multiprocessing.context import SpawnContext
from multiprocessing.util import get_temp_dir
from typing import Any, ClassVar, NamedTuple

import torch
import torch.multiprocessing

from bench.messages import Cell, Header, Sink, Source
from bench.peers.peer import Peer
from bench.peers.window import Acknowledgements

__all__ = ["TorchQueueByDescriptor", "TorchQueueByName"]

_torch_multiprocessing: Any = torch.multiprocessing  # it is not annotated

_QUEUE_TIMEOUT_S = 10.0  # as in vLLM


class _Shared(NamedTuple):
    queue: Any  # torch.multiprocessing.Queue, whose class exists only in a context
    acknowledgements: Acknowledgements


class _TorchQueue(Peer):
    """See the head of this file."""

    strategy: ClassVar[str]

    def create_shared(self, context: SpawnContext, producers: int) -> _Shared:
        get_temp_dir()  # made by the parent, children inherit it: one that is killed leaves none of its own behind
        queue = _torch_multiprocessing.get_context("spawn").Queue()
        return _Shared(queue, Acknowledgements.create(context, producers))

    def close_shared(self, shared: _Shared) -> None:
        shared.acknowledgements.close()

    async def produce(self, cell: Cell, shared: _Shared, source: Source) -> None:
        _torch_multiprocessing.set_sharing_strategy(self.strategy)
        with shared.acknowledgements.counted(source.producer, cell.window) as window:
            while not source.finished:
                await window.take()
                header = source.stamp()
                tensor: Any = torch.from_numpy(source.array).view(cell.torch_dtype)
                shared.queue.put((header, tensor.share_memory_()), timeout=_QUEUE_TIMEOUT_S)
            await window.drain()

    async def consume(self, cell: Cell, shared: _Shared, sink: Sink, listening: Callable[[], None]) -> None:
        _torch_multiprocessing.set_sharing_strategy(self.strategy)
        listening()
        await asyncio.to_thread(_receive, shared, sink)


class TorchQueueByDescriptor(_TorchQueue):
    """See the head of this file."""

    name = "torch-queue"
    title = "torch.multiprocessing.Queue"
    strategy = "file_descriptor"


class TorchQueueByName(_TorchQueue):
    """See the head of this file."""

    name = "torch-queue-by-name"
    title = "torch.multiprocessing.Queue, file_system"
    strategy = "file_system"


def _receive(shared: _Shared, sink: Sink) -> None:
    give = shared.acknowledgements.givers()
    finished = False
    while not finished:
        header, tensor = shared.queue.get(timeout=_QUEUE_TIMEOUT_S)
        header = Header(*header)
        finished = sink.take(header, tensor)
        del tensor  # its segment goes with it
        give[header.producer]()
