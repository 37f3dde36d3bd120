"""``multiprocessing.Queue``: a tensor's bytes pickled through a pipe.

How its users use it: who stays with the standard library puts arrays into a queue. The queue's feeder thread pickles each and
writes it to a pipe, under a lock that all producers share; the consumer has a thread that blocks in ``get``, so that its loop
does not. The message is checked on that thread, which spares this peer the hop to the loop.

What is put is the tensor's ``tobytes``: the feeder thread gets to it when the tensor has been stamped anew. That costs the
producer what an array would, which is copied into bytes when it is pickled, and spares the consumer a copy: its tensor is a
view of the bytes that were unpickled, and nothing writes to it. ``get`` has no timeout, which would cost a ``poll`` for each
message. The window is counted back through a pipe for each producer that its loop reads.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable
from multiprocessing.context import SpawnContext
from typing import Any, NamedTuple

import torch

from bench.messages import DTYPES, Cell, Header, Sink, Source
from bench.peers.memory import memory_shortage
from bench.peers.peer import Peer
from bench.peers.window import Acknowledgements

__all__ = ["MultiprocessingQueue"]

_COPIES = 3  # of one message beyond the window: the pickle, what comes out of the pipe, and the bytes unpickled from it


class _Shared(NamedTuple):
    queue: Any  # multiprocessing.Queue, whose class exists only in a context
    acknowledgements: Acknowledgements


class MultiprocessingQueue(Peer):
    """See the head of this file."""

    name = "multiprocessing-queue"
    title = "multiprocessing.Queue"

    def limits(self, cell: Cell) -> str | None:
        return memory_shortage(cell.producers * (cell.window + _COPIES) * cell.nbytes)

    def create_shared(self, context: SpawnContext, producers: int) -> _Shared:
        return _Shared(context.Queue(), Acknowledgements.create(context, producers))

    def close_shared(self, shared: _Shared) -> None:
        shared.queue.close()
        shared.acknowledgements.close()

    async def produce(self, cell: Cell, shared: _Shared, source: Source) -> None:
        with shared.acknowledgements.counted(source.producer, cell.window) as window:
            while not source.finished:
                await window.take()
                header = source.stamp()
                shared.queue.put((tuple(header), cell.dtype, cell.shape, source.array.tobytes()))
            await window.drain()

    async def consume(self, cell: Cell, shared: _Shared, sink: Sink, listening: Callable[[], None]) -> None:
        # Tensors are read only, like the bytes; torch would say once that it can't enforce that.
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        listening()
        try:
            await asyncio.to_thread(_receive, shared, sink)
        except asyncio.CancelledError:
            shared.queue.put(None)  # the thread may be waiting, and nobody else will wake it
            raise


def _receive(shared: _Shared, sink: Sink) -> None:
    give = shared.acknowledgements.givers()
    finished = False
    while not finished:
        if (message := shared.queue.get()) is None:
            return
        fields, dtype, shape, content = message
        header = Header(*fields)
        finished = sink.take(header, torch.frombuffer(content, dtype=DTYPES[dtype]).view(shape))
        give[header.producer]()
