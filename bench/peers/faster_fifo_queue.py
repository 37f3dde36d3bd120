"""faster-fifo: a queue of bytes in shared memory, with a mutex and condition variables between the processes.

How its users use it: one queue of a fixed size, made before the processes are, as Sample Factory does; ``put`` from any
producer, from its event loop, and ``get_many`` in the consumer. There is no descriptor to wait for: a thread of the consumer
blocks in ``get_many(timeout=10)``, with the GIL released, so that its loop stays free, and the messages are checked on that
thread, which spares this peer the hop to the loop.

Done well, to be worth comparing with: instead of the default pickle, ``dumps`` joins a packed header and the tensor's bytes and
``loads`` is a view of the received ones (both are arguments of the queue), so a message is copied three times: into ``bytes``,
into the ring, out of it. The ring's pages are touched when it is made. Small messages are received many at a time, which is
what its authors recommend. The window is counted back through a pipe for each producer that its loop reads; it is smaller than
asked for where the ring can't hold it, so that no ``put`` blocks a loop, unless there is not even room for one message of each
producer.
"""

from __future__ import annotations

import asyncio
import importlib
import struct
from collections.abc import Callable
from multiprocessing.context import SpawnContext
from typing import Any, NamedTuple

import torch

from bench.messages import DTYPES, Cell, Header, Sink, Source
from bench.peers.peer import Peer
from bench.peers.window import Acknowledgements

__all__ = ["FasterFifoQueue"]

_QUEUE_NBYTES = 320 << 20  # the largest message and a quarter; both sides copy under the same lock, more would gain nothing
_TIMEOUT_S = 10.0  # the package's default
_BATCH_NBYTES = 1 << 20  # received at a time, so that what is read is still in the cache; at least one message
_LENGTH_NBYTES = 8  # that the queue puts before each message
_HEADER = struct.Struct("<4QB23x")  # with the queue's length it makes 64 bytes, which keeps the tensor's bytes aligned
_DTYPES = tuple(DTYPES)

_Message = tuple[Header, torch.Tensor]


class _Shared(NamedTuple):
    queue: Any
    acknowledgements: Acknowledgements


class FasterFifoQueue(Peer):
    """See the head of this file."""

    name = "faster-fifo"
    title = "faster-fifo"
    requires = "faster-fifo"

    def limits(self, cell: Cell) -> str | None:
        if _message_nbytes(cell) <= _QUEUE_NBYTES:
            return None
        return f"a message does not fit into its ring of {_QUEUE_NBYTES >> 20} MiB"

    def create_shared(self, context: SpawnContext, producers: int) -> _Shared:
        queue = importlib.import_module("faster_fifo").Queue(_QUEUE_NBYTES, loads=_loads, dumps=_dumps)
        return _Shared(queue, Acknowledgements.create(context, producers))

    def close_shared(self, shared: _Shared) -> None:
        shared.queue.shared_memory = None  # the ring's memory, which the queue has no method to give back
        shared.acknowledgements.close()

    async def produce(self, cell: Cell, shared: _Shared, source: Source) -> None:
        size = max(1, min(cell.window, _QUEUE_NBYTES // (cell.producers * _message_nbytes(cell))))
        with shared.acknowledgements.counted(source.producer, size) as window:
            while not source.finished:
                await window.take()
                header = source.stamp()
                shared.queue.put((header, source.tensor), timeout=_TIMEOUT_S)
            await window.drain()

    async def consume(self, cell: Cell, shared: _Shared, sink: Sink, listening: Callable[[], None]) -> None:
        listening()
        await asyncio.to_thread(_receive, cell, shared, sink)


def _receive(cell: Cell, shared: _Shared, sink: Sink) -> None:
    give = shared.acknowledgements.givers()
    batch = max(1, _BATCH_NBYTES // cell.nbytes)
    finished = False
    while not finished:
        for header, tensor in shared.queue.get_many(timeout=_TIMEOUT_S, max_messages_to_get=batch):
            finished = sink.take(header, tensor)
            give[header.producer]()


def _message_nbytes(cell: Cell) -> int:
    """Returns what a message takes of the ring."""
    return _LENGTH_NBYTES + _HEADER.size + cell.nbytes


def _dumps(message: _Message) -> bytes:
    header, tensor = message
    content = tensor.view(torch.uint8).numpy().data
    return b"".join((_HEADER.pack(*header, _DTYPES.index(str(tensor.dtype).removeprefix("torch."))), content))


def _loads(content: memoryview) -> _Message:
    *fields, dtype = _HEADER.unpack_from(content)
    return Header(*fields), torch.frombuffer(content, dtype=DTYPES[_DTYPES[dtype]], offset=_HEADER.size)
