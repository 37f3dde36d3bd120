"""Queues between processes: faster-fifo's, ``torch.multiprocessing``'s and ``multiprocessing``'s, for streams.

None of them can be awaited. Producers ``put`` from their event loops; the consumer has a thread that blocks in ``get``, so that
its loop stays free. Messages are checked on that thread, which spares these peers the hop to the loop.

``faster-fifo`` is a ring of bytes in shared memory with a mutex and condition variables, made before the processes are, as
Sample Factory does. Instead of the default pickle, ``dumps`` joins a packed header and the tensor's bytes and ``loads`` is a
view of the received ones, so a message is copied three times. Small messages are received many at a time, which is what its
authors recommend. The window is smaller than asked for where the ring can't hold it, so that no ``put`` blocks a loop.

``torch.multiprocessing.Queue`` is used as by vLLM's ``torch_shm`` transport (``v1/engine/tensor_ipc.py``):
``tensor.share_memory_()`` copies the tensor into a new segment and ``put`` sends its handle. ``share_memory_`` moves a tensor's
own storage, and each of vLLM's is a new one; here each is a new storage over the same memory (``torch.from_numpy``), for the
price of one copy. The sharing strategy is ``file_descriptor``, the default on Linux, in which the consumer fetches each
descriptor from a thread of the producer.

``multiprocessing.Queue`` is for who stays with the standard library: a feeder thread pickles and writes to a pipe under a lock
that all producers share. A stream puts the tensor's ``tobytes``, since the feeder gets to it when the tensor has been stamped
anew; that costs what pickling an array would, and the consumer views the bytes without a copy. Its ``get`` has no timeout,
which would cost a ``poll`` for each message.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import importlib
import struct
import warnings
from collections.abc import AsyncIterator, Callable
from multiprocessing.context import SpawnContext
from multiprocessing.util import get_temp_dir
from typing import Any

import torch
import torch.multiprocessing

from bench.messages import DTYPES, Cell, Header, Source
from bench.peers.in_flight import Intake, Send, WindowedPeer

_torch_multiprocessing: Any = torch.multiprocessing  # it is not annotated

_TIMEOUT_S = 10.0  # of torch's queue as in vLLM; faster-fifo's default

_RING_NBYTES = 320 << 20  # the largest message and a quarter; both sides copy under the same lock, more would gain nothing
_BATCH_NBYTES = 1 << 20  # received at a time, so that what is read is still in the cache; at least one message
_LENGTH_NBYTES = 8  # that faster-fifo puts before each message
_HEADER = struct.Struct("<4QB23x")  # with the queue's length it makes 64 bytes, which keeps the tensor's bytes aligned
_DTYPES = tuple(DTYPES)

_Message = tuple[Header, torch.Tensor]


class _QueueStream(WindowedPeer):
    """What streams by queues have in common; what differs is how each puts and gets."""

    @abc.abstractmethod
    def put(self, queue: Any, header: Header, source: Source, cell: Cell) -> None:
        """Sends the source's tensor."""

    @abc.abstractmethod
    def get(self, queue: Any, cell: Cell) -> list[_Message]:
        """Waits for messages and returns them; none if :meth:`wake` was called."""

    def wake(self, queue: Any) -> None:
        """Ends the wait of a consumer that is cancelled."""
        queue.put(None)

    def create_own(self, context: SpawnContext) -> Any:
        return context.Queue()  # its class exists only in a context

    def close_own(self, own: Any) -> None:
        own.close()

    @contextlib.asynccontextmanager
    async def sending(self, cell: Cell, own: Any, source: Source) -> AsyncIterator[Send]:
        yield lambda: self.put(own, source.stamp(), source, cell)

    async def receive(self, cell: Cell, own: Any, intake: Intake, listening: Callable[[], None]) -> None:
        # Nobody writes to a tensor that views what was received. torch warns that it can't see to that.
        warnings.filterwarnings("ignore", "The given (buffer|NumPy array) is not writable", UserWarning)
        listening()
        try:
            await asyncio.to_thread(self._receive, cell, own, intake)
        except asyncio.CancelledError:
            self.wake(own)
            raise

    def _receive(self, cell: Cell, queue: Any, intake: Intake) -> None:
        last = False
        while not last and (received := self.get(queue, cell)):
            while received:
                header, tensor = received.pop(0)
                last = intake.take(header, tensor)
                del tensor  # a segment goes with it
                intake.acknowledge(header)


class FasterFifoQueue(_QueueStream):
    name = "faster-fifo"
    title = "faster-fifo"
    requires = "faster-fifo"

    def limits(self, cell: Cell) -> str | None:
        if _in_ring_nbytes(cell) > _RING_NBYTES:
            return f"a message does not fit into its ring of {_RING_NBYTES >> 20} MiB"
        return super().limits(cell)

    def window(self, cell: Cell) -> int:
        return max(1, min(cell.window, _RING_NBYTES // (cell.producers * _in_ring_nbytes(cell))))

    def create_own(self, context: SpawnContext) -> Any:
        return importlib.import_module("faster_fifo").Queue(_RING_NBYTES, loads=_loads, dumps=_dumps)

    def close_own(self, own: Any) -> None:
        own.shared_memory = None  # the ring's memory, which the queue has no method to give back

    def wake(self, queue: Any) -> None:
        """Its wait ends by the timeout."""

    def put(self, queue: Any, header: Header, source: Source, cell: Cell) -> None:
        queue.put((header, source.tensor), timeout=_TIMEOUT_S)

    def get(self, queue: Any, cell: Cell) -> list[_Message]:
        batch = max(1, _BATCH_NBYTES // cell.nbytes)
        received: list[_Message] = queue.get_many(timeout=_TIMEOUT_S, max_messages_to_get=batch)
        return received


def _in_ring_nbytes(cell: Cell) -> int:
    """Returns what a message takes of faster-fifo's ring."""
    return _LENGTH_NBYTES + _HEADER.size + cell.nbytes


def _dumps(message: _Message) -> bytes:
    header, tensor = message
    content = tensor.view(torch.uint8).numpy().data
    return b"".join((_HEADER.pack(*header, _DTYPES.index(str(tensor.dtype).removeprefix("torch."))), content))


def _loads(content: memoryview) -> _Message:
    *fields, dtype = _HEADER.unpack_from(content)
    return Header(*fields), torch.frombuffer(content, dtype=DTYPES[_DTYPES[dtype]], offset=_HEADER.size)


class MultiprocessingQueue(_QueueStream):
    name = "multiprocessing-queue"
    title = "multiprocessing.Queue"

    def put(self, queue: Any, header: Header, source: Source, cell: Cell) -> None:
        queue.put((tuple(header), cell.dtype, cell.shape, source.array.tobytes()))

    def get(self, queue: Any, cell: Cell) -> list[_Message]:
        if (message := queue.get()) is None:
            return []
        fields, dtype, shape, content = message
        return [(Header(*fields), torch.frombuffer(content, dtype=DTYPES[dtype]).view(shape))]


class TorchQueue(_QueueStream):
    name = "torch-queue"
    title = "torch.multiprocessing.Queue"

    def create_own(self, context: SpawnContext) -> Any:
        get_temp_dir()  # made by the parent, children inherit it: one that is killed leaves none of its own behind
        return _torch_multiprocessing.get_context("spawn").Queue()

    def put(self, queue: Any, header: Header, source: Source, cell: Cell) -> None:
        again: Any = torch.from_numpy(source.tensor.view(torch.uint8).numpy()).view(source.tensor.dtype)
        queue.put((header, again.share_memory_()), timeout=_TIMEOUT_S)

    def get(self, queue: Any, cell: Cell) -> list[_Message]:
        message = queue.get(timeout=_TIMEOUT_S)
        return [] if message is None else [(Header(*message[0]), message[1])]
