"""vLLM's MessageQueue, and a ring of its kind for where vLLM is missing. What this imports is in vLLM's environment, too.

The MessageQueue as vLLM's executor has it: one from the engine to all workers, and one back from each; 10 chunks of 16 MiB.
What is larger goes through a ZMQ socket, as it does for vLLM's users, or through the queue's arena, which is off by default.
The spinning ring does the same in shared memory of its own: flags of a byte, pickle, and ``sched_yield`` for a second before it
naps.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import mmap
import os
import pickle
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch

from bench.fan_out.measuring import PATIENCE_S, Stamps, Way, wait_until_ready
from bench.fan_out.plan import ARENA, LARGE, MESSAGE_QUEUE, SPINNING_RING, Cell

__all__ = ["WAYS"]

_CHUNK_NBYTES = 16 << 20
_CHUNKS = 10
_SPIN_S = 1.0
_NAP_S = 0.1
_LENGTH_NBYTES = 8


class _MessageQueue(Way):
    name = MESSAGE_QUEUE
    has_arena: ClassVar[bool] = False

    def __init__(self, cell: Cell, directory: str, stamps: Stamps) -> None:
        super().__init__(cell, directory, stamps)
        self._queues: Any = importlib.import_module("vllm.distributed.device_communicators.shm_broadcast").MessageQueue
        workers = cell.workers
        self._queue = self._queues(
            workers, workers, max_chunk_bytes=_CHUNK_NBYTES, max_chunks=_CHUNKS, enable_shm_tensor_arena=self.has_arena
        )
        self._handle = self._queue.export_handle()
        self._pipes = [os.pipe() for _ in range(workers)]
        self._replies: list[Any] = []

    def work(self, rank: int) -> None:
        inherited = self._queue  # kept, or it would take the engine's memory with it
        queue = self._queues.create_from_handle(self._handle, rank)
        queue.wait_until_ready()
        reply = self._queues(1, 1)
        os.write(self._pipes[rank][1], pickle.dumps(reply.export_handle()))
        reply.wait_until_ready()
        is_last = False
        while not is_last:
            _, (number, tensor, wants_reply), _, _ = queue.dequeue(indefinite=True)
            is_last = self.stamps.note(rank, number, int(tensor[0]))
            if wants_reply:
                reply.enqueue((0, {"number": number, "tokens": [1, 2, 3]}))
        del reply, queue, tensor
        gc.collect()
        assert inherited is not None

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        self._queue.wait_until_ready()
        for rank in range(self.cell.workers):
            handle = pickle.loads(os.read(self._pipes[rank][0], 65536))  # noqa: S301 # it comes from a process of ours
            self._replies.append(self._queues.create_from_handle(handle, 0))
            self._replies[-1].wait_until_ready()
        try:
            yield
        finally:
            self._replies.clear()

    async def send(self, number: int) -> None:
        self._queue.enqueue(("execute_model", (number, self.tensor, False), {}, None))

    async def gather(self, number: int) -> Sequence[Any]:
        self._queue.enqueue(("execute_model", (number, self.tensor, True), {}, None))
        return [reply.dequeue(timeout=PATIENCE_S)[1] for reply in self._replies]

    def close(self) -> None:
        del self._queue
        gc.collect()  # which unlinks its memory


class _Arena(_MessageQueue):
    name = ARENA
    has_arena = True


class _Ring:
    """One writer, some readers: chunks with a flag that they are written, and one of each reader that it has read."""

    def __init__(self, readers: int, chunk_nbytes: int, chunks: int) -> None:
        self._chunks, self._chunk_nbytes, self._readers = chunks, chunk_nbytes, readers
        self._memory = mmap.mmap(-1, chunks * (64 + chunk_nbytes))
        self._place = 0  # of whoever uses this object: it is forked
        self._active_s = time.monotonic()

    def _flags(self) -> memoryview:
        return memoryview(self._memory)[self._place * 64 : self._place * 64 + 1 + self._readers]

    @contextlib.contextmanager
    def _taken(self, is_there: Callable[[memoryview], bool]) -> Iterator[tuple[memoryview, memoryview]]:
        flags = self._flags()
        while not is_there(flags):
            if time.monotonic() < self._active_s + _SPIN_S:
                os.sched_yield()
            else:
                time.sleep(_NAP_S)
        start = self._chunks * 64 + self._place * self._chunk_nbytes
        yield flags, memoryview(self._memory)[start : start + self._chunk_nbytes]
        self._place = (self._place + 1) % self._chunks
        self._active_s = time.monotonic()

    def write(self, message: object, tensor: torch.Tensor | None) -> None:
        head = pickle.dumps((message, None if tensor is None else len(tensor)))
        with self._taken(lambda flags: not flags[0] or all(flags[1:])) as (flags, chunk):
            flags[0] = 0
            end = _LENGTH_NBYTES + len(head)
            chunk[:_LENGTH_NBYTES] = len(head).to_bytes(_LENGTH_NBYTES, "little")
            chunk[_LENGTH_NBYTES:end] = head
            if tensor is not None:
                chunk[end : end + len(tensor)] = memoryview(tensor.numpy().data)
            flags[1:] = bytes(self._readers)
            flags[0] = 1

    def read(self, reader: int) -> tuple[Any, torch.Tensor | None]:
        with self._taken(lambda flags: bool(flags[0] and not flags[1 + reader])) as (flags, chunk):
            end = _LENGTH_NBYTES + int.from_bytes(chunk[:_LENGTH_NBYTES], "little")
            message, nbytes = pickle.loads(chunk[_LENGTH_NBYTES:end])  # noqa: S301 # it comes from a process of ours
            content = None if nbytes is None else torch.frombuffer(bytearray(chunk[end : end + nbytes]), dtype=torch.uint8)
            flags[1 + reader] = 1
        return message, content


class _SpinningRing(Way):
    name = SPINNING_RING

    def __init__(self, cell: Cell, directory: str, stamps: Stamps) -> None:
        super().__init__(cell, directory, stamps)
        self._ring = _Ring(cell.workers, 4096 + cell.nbytes, _CHUNKS if cell.nbytes < LARGE else 4)
        self._replies = [_Ring(1, 4096, _CHUNKS) for _ in range(cell.workers)]

    def work(self, rank: int) -> None:
        self.stamps.is_ready(rank)
        is_last = False
        while not is_last:
            (number, wants_reply), tensor = self._ring.read(rank)
            assert tensor is not None
            is_last = self.stamps.note(rank, number, int(tensor[0]))
            if wants_reply:
                self._replies[rank].write({"number": number, "tokens": [1, 2, 3]}, None)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        wait_until_ready(self.stamps)
        yield

    async def send(self, number: int) -> None:
        self._ring.write((number, False), self.tensor)

    async def gather(self, number: int) -> Sequence[Any]:
        self._ring.write((number, True), self.tensor)
        return [ring.read(0)[0] for ring in self._replies]


#: By subject.
WAYS: dict[str, type[Way]] = {way.name: way for way in (_MessageQueue, _Arena, _SpinningRing)}
