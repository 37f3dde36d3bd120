"""Queues between processes: faster-fifo's, ``torch.multiprocessing``'s and ``multiprocessing``'s, for streams and requests.

None of them can be awaited. Producers and clients ``put`` from their event loops; whoever receives has a thread that blocks in
``get``, so that its loop stays free. Messages of a stream are checked on that thread, which spares these peers the hop to the
loop. The engine answers requests on that thread, too; replies, which are small, are numpy arrays by a queue for each client,
whose thread hands each to its loop.

``faster-fifo`` is a ring of bytes in shared memory with a mutex and condition variables, made before the processes are, as
Sample Factory does. Instead of the default pickle, ``dumps`` joins a packed header and the tensor's bytes and ``loads`` is a
view of the received ones, so a message is copied three times. Small messages are received many at a time, which is what its
authors recommend. The window is smaller than asked for where the ring can't hold it, so that no ``put`` blocks a loop.

``torch.multiprocessing.Queue`` is used as by vLLM's ``torch_shm`` transport (``v1/engine/tensor_ipc.py``):
``tensor.share_memory_()`` copies the tensor into a new segment and ``put`` sends its handle. ``share_memory_`` moves a tensor's
own storage, and each of vLLM's is a new one; here each is a new storage over the same memory (``torch.from_numpy``), for the
price of one copy. Two sharing strategies are measured: ``file_descriptor``, the default on Linux, in which the consumer fetches
each descriptor from a thread of the producer, and ``file_system``, in which segments have names, for servers that run out of
descriptors.

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
from collections.abc import AsyncIterator, Callable
from multiprocessing.context import SpawnContext
from multiprocessing.util import get_temp_dir
from typing import Any, ClassVar, NamedTuple

import torch
import torch.multiprocessing

from bench.messages import DTYPES, Answer, Ask, Cell, Header, Source
from bench.peers.in_flight import Intake, Pending, Send, WindowedPeer
from bench.peers.peer import RequestPeer, allow_read_only_tensors, memory_shortage
from bench.request.questions import Desk

__all__ = [
    "FasterFifoQueue", "MultiprocessingQueue", "MultiprocessingRequest", "TorchQueueByDescriptor", "TorchQueueByName",
    "TorchRequest",
]  # fmt: skip

_torch_multiprocessing: Any = torch.multiprocessing  # it is not annotated

_TIMEOUT_S = 10.0  # of torch's queue as in vLLM; faster-fifo's default
_PICKLE_COPIES = 3  # of one message beyond the window: the pickle, what comes out of the pipe, the bytes unpickled from it

_RING_NBYTES = 320 << 20  # the largest message and a quarter; both sides copy under the same lock, more would gain nothing
_BATCH_NBYTES = 1 << 20  # received at a time, so that what is read is still in the cache; at least one message
_LENGTH_NBYTES = 8  # that faster-fifo puts before each message
_HEADER = struct.Struct("<4QB23x")  # with the queue's length it makes 64 bytes, which keeps the tensor's bytes aligned
_DTYPES = tuple(DTYPES)

_Message = tuple[Header, torch.Tensor]


class _Plain:
    """``multiprocessing``'s queues."""

    def prepare(self) -> None:
        """What each process does before it uses a queue."""
        allow_read_only_tensors()

    def create_queue(self, context: SpawnContext) -> Any:
        """Makes a queue, in the parent; its class exists only in a context."""
        return context.Queue()


class _Torch(_Plain):
    """``torch.multiprocessing``'s."""

    strategy: ClassVar[str] = "file_descriptor"

    def prepare(self) -> None:
        _torch_multiprocessing.set_sharing_strategy(self.strategy)

    def create_queue(self, context: SpawnContext) -> Any:
        get_temp_dir()  # made by the parent, children inherit it: one that is killed leaves none of its own behind
        return _torch_multiprocessing.get_context("spawn").Queue()

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy of a tensor in a segment of its own, whose handle a queue sends."""
        again: Any = torch.from_numpy(tensor.view(torch.uint8).numpy()).view(tensor.dtype)
        return again.share_memory_()  # type: ignore[no-any-return] # it is not annotated


# -- streams -------------------------------------------------------------------------------------------------------------


class _QueueStream(_Plain, WindowedPeer):
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

    def create_own(self, context: SpawnContext, producers: int) -> Any:
        return self.create_queue(context)

    def close_own(self, own: Any) -> None:
        own.close()

    @contextlib.asynccontextmanager
    async def sending(self, cell: Cell, own: Any, source: Source) -> AsyncIterator[Send]:
        self.prepare()
        yield lambda: self.put(own, source.stamp(), source, cell)

    async def receive(self, cell: Cell, own: Any, intake: Intake, listening: Callable[[], None]) -> None:
        self.prepare()
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
        if _in_ring_nbytes(cell) <= _RING_NBYTES:
            return None
        return f"a message does not fit into its ring of {_RING_NBYTES >> 20} MiB"

    def window(self, cell: Cell) -> int:
        return max(1, min(cell.window, _RING_NBYTES // (cell.producers * _in_ring_nbytes(cell))))

    def create_queue(self, context: SpawnContext) -> Any:
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

    def limits(self, cell: Cell) -> str | None:
        return memory_shortage(cell.producers * (cell.window + _PICKLE_COPIES) * cell.nbytes)

    def put(self, queue: Any, header: Header, source: Source, cell: Cell) -> None:
        queue.put((tuple(header), cell.dtype, cell.shape, source.array.tobytes()))

    def get(self, queue: Any, cell: Cell) -> list[_Message]:
        if (message := queue.get()) is None:
            return []
        fields, dtype, shape, content = message
        return [(Header(*fields), torch.frombuffer(content, dtype=DTYPES[dtype]).view(shape))]


class TorchQueueByDescriptor(_Torch, _QueueStream):
    name = "torch-queue"
    title = "torch.multiprocessing.Queue"

    def put(self, queue: Any, header: Header, source: Source, cell: Cell) -> None:
        queue.put((header, self.pack(source.tensor)), timeout=_TIMEOUT_S)

    def get(self, queue: Any, cell: Cell) -> list[_Message]:
        message = queue.get(timeout=_TIMEOUT_S)
        return [] if message is None else [(Header(*message[0]), message[1])]


class TorchQueueByName(TorchQueueByDescriptor):
    name = "torch-queue-by-name"
    title = "torch.multiprocessing.Queue, file_system"
    strategy = "file_system"


# -- requests ------------------------------------------------------------------------------------------------------------


class _SharedByRequests(NamedTuple):
    requests: Any
    replies: list[Any]


class MultiprocessingRequest(_Plain, RequestPeer):
    """None in a queue ends the thread that reads it."""

    name = "multiprocessing-queue"
    title = "multiprocessing.Queue"

    def pack(self, tensor: torch.Tensor) -> Any:
        """Returns what to put into the queue for a tensor."""
        return tensor.numpy()

    def create_shared(self, context: SpawnContext, ends: int) -> _SharedByRequests:
        return _SharedByRequests(self.create_queue(context), [context.Queue() for _ in range(ends)])

    async def serve(self, cell: Cell, shared: _SharedByRequests, desk: Desk, listening: Callable[[], None]) -> None:
        self.prepare()
        answering = asyncio.get_running_loop().run_in_executor(None, _answer_all, shared, desk)
        listening()
        try:
            await asyncio.shield(answering)
        finally:
            if not answering.done():
                shared.requests.put(None)
                await answering

    @contextlib.asynccontextmanager
    async def connect(self, cell: Cell, shared: _SharedByRequests, client: int) -> AsyncIterator[Ask]:
        self.prepare()
        loop, replies = asyncio.get_running_loop(), shared.replies[client]
        pending = Pending(lambda header, tensor: shared.requests.put((tuple(header), self.pack(tensor))))
        receiving = loop.run_in_executor(None, _receive_all, replies, loop, pending)
        try:
            yield pending.ask
        finally:
            replies.put(None)
            await asyncio.wait([receiving])


def _answer_all(shared: _SharedByRequests, desk: Desk) -> None:
    while (request := shared.requests.get()) is not None:
        header, content = Header(*request[0]), request[1]
        reply = desk.answer(header, torch.as_tensor(content))  # a view of a numpy array, or a tensor as it is
        del request, content  # the tensor's memory goes with them
        shared.replies[header.producer].put((tuple(header), reply.numpy()))


def _receive_all(replies: Any, loop: asyncio.AbstractEventLoop, pending: Pending) -> None:
    try:
        while (reply := replies.get()) is not None:
            loop.call_soon_threadsafe(pending.settle, Answer(Header(*reply[0]), torch.from_numpy(reply[1])))
    except Exception as error:  # noqa: BLE001 # whoever waits for a reply hears of it
        loop.call_soon_threadsafe(pending.fail, error)


class TorchRequest(_Torch, MultiprocessingRequest):
    name = "torch-queue"
    title = "torch.multiprocessing.Queue"
