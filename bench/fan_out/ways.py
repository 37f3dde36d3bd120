"""How each peer hands messages to workers, done as its users do it.

- shmring: blocking workers, as the ranks of a model are; with ``busy_poll_s`` longer than the gaps of the pace; and with a
  tensor that lies in a claim's slot already.
- shmring without an event loop, for steps: a ring that is served by its callers, whose workers reply; and, as the MessageQueue
  is used, one to the workers and one back from each. Who waits for a step looks for 2 ms before it sleeps.
- vLLM's MessageQueue, as its executor has it: one from the engine to all workers, and one back from each; 10 chunks of 16 MiB.
  What is larger goes through a ZMQ socket, as it does for vLLM's users, or through the queue's arena, which is off by default.
- torch.multiprocessing: a queue for each worker. A message is a tensor of its own, which the first queue moves to shared
  memory; the others send the same descriptor.
- pyzmq: PUB that drops nothing (XPUB_NODROP), the tensor as a frame of its own, which is not copied before it is sent.
- iceoryx2: publish-subscribe with loans, and an event service that wakes the workers; one copy into the loan. Nothing
  overflows: who publishes waits for the slowest.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import importlib
import os
import pickle
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import torch.multiprocessing

import shmring
from bench.fan_out.measuring import PATIENCE_S, Cell, Stamps, Way, wait_until_ready
from bench.peers.iceoryx2_slices import Services, open_publisher, open_services

_NAME = "fan-out"
_POLL_S = 0.005  # longer than a gap of the pace
_STEP_S = 0.002  # what a rank looks for the next step
_MEMORY_NBYTES = 64 << 20
_QUEUE_CHUNK_NBYTES, _QUEUE_CHUNKS = 16 << 20, 10


class _Shmring(Way):
    title = "shmring"
    gathers = True
    busy_poll_s: ClassVar[float] = 0.0
    _ring: shmring.Ring

    def _join(self, name: str, rank: int) -> shmring.threads.Worker:
        return shmring.threads.join(
            name, rank, socket_dir=self.directory, connect_timeout_s=PATIENCE_S, busy_poll_s=self.busy_poll_s
        )

    def work(self, rank: int) -> None:
        with self._join(_NAME, rank) as worker:
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


class _Callers(_Shmring):
    title = "shmring, served by callers"
    only_steps = True
    busy_poll_s = _STEP_S
    _blocking: shmring.threads.Ring

    def _serve(self, name: str) -> shmring.threads.Ring:
        return shmring.threads.serve(
            name,
            slab_nbytes=1 << 20,
            broadcast_nbytes=_MEMORY_NBYTES,
            socket_dir=self.directory,
            served_by="callers",
            busy_poll_s=self.busy_poll_s,
        )

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        with self._serve(_NAME) as self._blocking:
            self._blocking.wait_workers(self.cell.workers, timeout=PATIENCE_S)
            yield

    async def send(self, number: int) -> None:
        self._blocking.broadcast({"n": number, "t": self.tensor})

    async def gather(self, number: int) -> Sequence[Any]:
        return self._blocking.gather({"n": number, "t": self.tensor})


class _Backs(_Callers):
    title = "shmring, a ring back from each"

    def work(self, rank: int) -> None:
        with self._join(_NAME, rank) as worker, self._serve(f"{_NAME}-{rank}") as back:
            back.wait_workers(1, timeout=PATIENCE_S)
            for message in worker:
                with message:
                    payload = message.payload
                    if self.stamps.note(rank, payload["n"], int(payload["t"][0])):
                        return
                    if payload["replies"]:
                        back.broadcast({"number": payload["n"], "tokens": [1, 2, 3]})

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async with super().serving():
            with contextlib.ExitStack() as joined:
                self._backs = [joined.enter_context(self._join(f"{_NAME}-{rank}", 0)) for rank in range(self.cell.workers)]
                yield

    async def send(self, number: int) -> None:
        self._blocking.broadcast({"n": number, "t": self.tensor, "replies": False})

    async def gather(self, number: int) -> Sequence[Any]:
        self._blocking.broadcast({"n": number, "t": self.tensor, "replies": True})
        replies = []
        for back in self._backs:
            with back.receive(PATIENCE_S) as message:
                replies.append(message.payload)
        return replies


class _Queues(Way):
    title = "torch.multiprocessing queues"
    most_unread = 64  # each of them has a descriptor

    def __init__(self, cell: Cell, directory: str, stamps: Stamps) -> None:
        super().__init__(cell, directory, stamps)
        context = torch.multiprocessing.get_context("fork")
        self._queues = [context.Queue() for _ in range(cell.workers)]

    def work(self, rank: int) -> None:
        self.stamps.is_ready(rank)
        is_last = False
        while not is_last:
            number, tensor = self._queues[rank].get()
            is_last = self.stamps.note(rank, number, int(tensor[0]))

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        wait_until_ready(self.stamps)
        yield
        for queue in self._queues:
            queue.close()
            queue.join_thread()

    async def send(self, number: int) -> None:
        tensor = self.tensor.clone()
        for queue in self._queues:
            queue.put((number, tensor))


class _Published(Way):
    title = "pyzmq PUB/SUB"
    needs = "zmq"
    _publisher: Any

    @property
    def _address(self) -> str:
        return f"ipc://{self.directory}/zmq"

    @property
    def _most_queued(self) -> int:
        return max(2, min(64, (256 << 20) // self.cell.nbytes))

    def work(self, rank: int) -> None:
        zmq: Any = importlib.import_module("zmq")
        with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
            subscriber.set_hwm(self._most_queued)
            subscriber.setsockopt(zmq.SUBSCRIBE, b"")
            subscriber.connect(self._address)
            is_last = False
            while not is_last:
                header, body = subscriber.recv_multipart(copy=False)
                tensor = torch.frombuffer(body.buffer, dtype=torch.uint8)
                is_last = self.stamps.note(rank, msgspec.msgpack.decode(header.buffer), int(tensor[0]))

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        zmq: Any = importlib.import_module("zmq")
        with zmq.Context() as context, context.socket(zmq.XPUB) as self._publisher:
            self._publisher.set_hwm(self._most_queued)
            self._publisher.setsockopt(zmq.XPUB_NODROP, 1)
            self._publisher.setsockopt(zmq.XPUB_VERBOSE, 1)
            self._publisher.setsockopt(zmq.RCVTIMEO, round(PATIENCE_S * 1e3))
            self._publisher.bind(self._address)
            for _ in range(self.cell.workers):
                self._publisher.recv()  # that one has subscribed
            yield

    async def send(self, number: int) -> None:
        body = memoryview(self.tensor.numpy())
        self._publisher.send_multipart([msgspec.msgpack.encode(number), body], copy=self.cell.nbytes < 65536)


class _Iceoryx2(Way):
    title = "iceoryx2"
    needs = "iceoryx2"

    @property
    def _depth(self) -> int:
        return 64 if self.cell.nbytes < _MEMORY_NBYTES else 3

    def _open(self) -> tuple[Any, Services]:
        prefix = f"{Path(self.directory).name}_"
        subscribers = self.cell.workers
        return open_services(self.directory, prefix, ctypes.c_int64, publishers=1, subscribers=subscribers, depth=self._depth)

    def work(self, rank: int) -> None:
        iceoryx2, (_, tensors, arrivals) = self._open()
        subscriber = tensors.subscriber_builder().buffer_size(self._depth).create()
        listener = arrivals.listener_builder().create()
        self.stamps.is_ready(rank)
        is_last = False
        while not is_last:
            listener.timed_wait(iceoryx2.Duration.from_millis(200))
            while not is_last and (sample := subscriber.receive()) is not None:
                number = ctypes.c_int64.from_address(sample.user_header_ptr).value
                content = (ctypes.c_uint8 * self.cell.nbytes).from_address(sample.payload_ptr)
                is_last = self.stamps.note(rank, number, int(torch.frombuffer(content, dtype=torch.uint8)[0]))
                sample.delete()
        listener.delete()
        subscriber.delete()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        iceoryx2, services = self._open()
        self._publisher, self._notifier = open_publisher(iceoryx2, services, self.cell.nbytes)
        wait_until_ready(self.stamps)
        try:
            yield
            await asyncio.sleep(0.3)  # who is in the middle of the last message still opens what is deleted now
        finally:
            self._notifier.delete()
            self._publisher.delete()

    async def send(self, number: int) -> None:
        loan = self._publisher.loan_slice_uninit(self.cell.nbytes)
        ctypes.memmove(loan.payload_ptr, self.tensor.data_ptr(), self.cell.nbytes)
        ctypes.c_int64.from_address(loan.user_header_ptr).value = number
        loan.assume_init().send()
        self._notifier.notify()


class _MessageQueue(Way):
    title = "vLLM MessageQueue"
    needs = "vllm"
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


OURS, POLLING, IN_PLACE, CALLERS, BACKS = (
    "shmring", "shmring-polling", "shmring-in-place", "shmring-callers", "shmring-rings-back",
)  # fmt: skip
MESSAGE_QUEUE, ARENA, PUBLISHED = "message-queue", "message-queue-arena", "pyzmq-pub-sub"

#: By subject, in the order of tables.
WAYS: dict[str, type[Way]] = {
    OURS: _Shmring,
    POLLING: _Polling,
    IN_PLACE: _InPlace,
    CALLERS: _Callers,
    BACKS: _Backs,
    MESSAGE_QUEUE: _MessageQueue,
    ARENA: _Arena,
    "torch-queues": _Queues,
    PUBLISHED: _Published,
    "iceoryx2": _Iceoryx2,
}
