"""How shmring and vLLM hand messages to workers, done as their users do it.

- shmring: blocking workers, as the ranks of a model are; with ``busy_poll_s`` longer than the gaps of the pace; and with a
  tensor that lies in a claim's slot already.
- vLLM's MessageQueue, as its executor has it: one from the engine to all workers, and one back from each; 10 chunks of 16 MiB.
  What is larger goes through a ZMQ socket, as it does for vLLM's users, or through the queue's arena, which is off by default.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import os
import pickle
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from multiprocessing.context import ForkProcess
from typing import Any, ClassVar

import shmring
from bench.children import BenchError, settle
from bench.fan_out.measuring import PATIENCE_S, Cell, Run, Stamps, Way, measure
from bench.programs import orders

_NAME = "fan-out"
_POLL_S = 0.005  # longer than a gap of the pace
_MEMORY_NBYTES = 64 << 20
_QUEUE_CHUNK_NBYTES, _QUEUE_CHUNKS = 16 << 20, 10


class _Shmring(Way):
    title = "shmring"
    gathers = True
    busy_poll_s: ClassVar[float] = 0.0
    _ring: shmring.Ring

    def work(self, rank: int) -> None:
        options: dict[str, Any] = {"connect_timeout_s": PATIENCE_S, "busy_poll_s": self.busy_poll_s}
        with shmring.threads.join(_NAME, rank, socket_dir=self.directory, **options) as worker:
            for message in worker:
                with message:
                    payload = message.payload
                    if self.stamps.note(rank, payload["n"], int(payload["t"][0])):
                        return
                    if message.wants_reply:
                        message.reply({"number": payload["n"], "tokens": [1, 2, 3]})

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        memory_nbytes = max(_MEMORY_NBYTES, 3 * self.cell.nbytes)
        async with shmring.serve(
            _NAME,
            slab_nbytes=memory_nbytes,
            broadcast_nbytes=memory_nbytes,
            socket_dir=self.directory,
            busy_poll_s=self.busy_poll_s,
        ) as self._ring:
            await self._ring.wait_workers(self.cell.workers, timeout=PATIENCE_S)
            yield

    async def send(self, number: int) -> None:
        await self._ring.broadcast({"n": number, "t": self.tensor})

    async def gather(self, number: int) -> Sequence[Any]:
        return await self._ring.gather({"n": number, "t": self.tensor})

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class _Polling(_Shmring):
    title = "shmring, busy_poll_s"
    busy_poll_s = _POLL_S


class _InPlace(_Shmring):
    title = "shmring, in a slot already"
    gathers = False

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async with super().serving(), shmring.connect(_NAME, socket_dir=self.directory) as client:
            submission = await client.submit({"t": self.tensor})
            with await self._ring.claim() as claim:
                self.tensor = claim.payload["t"]
                try:
                    yield
                finally:
                    self.tensor = None
            submission.abort()


class _MessageQueue(Way):
    title = "vLLM MessageQueue"
    of_vllm = True
    gathers = True
    has_arena: ClassVar[bool] = False

    def __init__(self, cell: Cell, directory: str, stamps: Stamps) -> None:
        super().__init__(cell, directory, stamps)
        self._queues: Any = importlib.import_module("vllm.distributed.device_communicators.shm_broadcast").MessageQueue
        workers = cell.workers
        self._queue = self._queues(
            workers,
            workers,
            max_chunk_bytes=_QUEUE_CHUNK_NBYTES,
            max_chunks=_QUEUE_CHUNKS,
            enable_shm_tensor_arena=self.has_arena,
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
    title = "vLLM MessageQueue, its arena"
    gathers = False
    has_arena = True


OURS, POLLING, IN_PLACE = "shmring", "shmring-polling", "shmring-in-place"
MESSAGE_QUEUE, ARENA = "message-queue", "message-queue-arena"

#: By subject, in the order of tables.
WAYS: dict[str, type[Way]] = {
    OURS: _Shmring,
    POLLING: _Polling,
    IN_PLACE: _InPlace,
    MESSAGE_QUEUE: _MessageQueue,
    ARENA: _Arena,
}


# -- the host: a program, whose orders are cells ---------------------------------------------------------------------------


def _play(cell: Cell, directory: str, answer: Callable[[object], None]) -> None:
    """In the engine's process."""
    way = WAYS[cell.subject](cell, directory, Stamps(cell.workers))
    found: Run | Exception
    try:
        found = measure(way)
    except Exception as error:  # noqa: BLE001 # it has its place among the results
        found = error
    finally:
        way.close()
    answer(found)


def _main() -> None:
    with contextlib.suppress(ImportError):  # or each engine would, and each worker
        importlib.import_module("vllm.distributed.device_communicators.shm_broadcast")
    settle()
    for cell, answer in orders(Cell):
        with tempfile.TemporaryDirectory(prefix="shmring-bench-") as directory:
            engine = ForkProcess(target=_play, args=(cell, directory, answer))
            engine.start()
            engine.join()
            if engine.exitcode:
                answer(BenchError(f"the engine ended with {engine.exitcode}"))


if __name__ == "__main__":
    _main()
