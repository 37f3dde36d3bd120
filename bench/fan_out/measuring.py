"""The measurements of one cell: in the engine's process, with each worker in a process of its own.

A *flood* is messages as fast as they are taken, timed until the last worker has the last one. In a *pace* there is a message
each 2 ms, and what counts is when the last worker has it, by the clock that all processes share. Each message has its number
and one tensor, whose first item a worker reads before it leaves the message; a worker that misses one, or gets one out of
turn, fails the cell.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from multiprocessing.context import ForkProcess
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch
import uvloop
from numpy.typing import NDArray

from bench.meter import cpu_s_of

PATIENCE_S = 60.0  # for workers to join, or to have what was sent
END = -1  # the number of a cell's last message

_GAP_S = 0.002
_MOST = 1 << 18  # messages of a cell
_WARM_UP = 16  # so that memory which is used in turn was touched
_ITEM = 7  # the first of each tensor
_REST_S = 1.0
_SPUN_S = 0.3  # beyond which nobody still looks whom the last message has kept awake for a second


class Cell(msgspec.Struct, frozen=True):
    """One repetition of a case, of one of :data:`bench.fan_out.ways.WAYS`.

    Attributes:
        seconds: of the flood, and of the gathers.
        steps: messages of the pace.
        gathers: whether replies are measured, too.
        rests: whether it is measured what workers take when nothing comes.
    """

    subject: str
    workers: int
    nbytes: int
    seconds: float
    steps: int
    gathers: bool = False
    rests: bool = False


class Run(msgspec.Struct, frozen=True):
    """What was measured in a cell; None: that was not asked for.

    Attributes:
        per_s: messages a second of a flood, until the last worker has the last one.
        last_us: the median time from sending to the last worker, a message each 2 ms.
        engine_us, worker_us: CPU time of the engine, and of one worker, for each of those; the engine's pauses left out.
        gathers_per_s: how often in a second all replied, one gather after the other.
        gather_us, gather_engine_us: the median time of one, and CPU time of the engine for it.
        awake_percent, idle_percent: CPU of all workers in the second after a message, and in the one after that, of one core.
    """

    per_s: float
    last_us: float
    engine_us: float
    worker_us: float
    gathers_per_s: float | None = None
    gather_us: float | None = None
    gather_engine_us: float | None = None
    awake_percent: float | None = None
    idle_percent: float | None = None


class Stamps:
    """When each of so many workers has had each message: memory that engine and workers share."""

    def __init__(self, workers: int) -> None:
        memory = mmap.mmap(-1, 8 * workers * _MOST)
        self.times: NDArray[np.int64] = np.frombuffer(memory, np.int64).reshape(workers, _MOST)
        self._last = [0] * workers

    def note(self, rank: int, number: int, item: int) -> bool:
        """A worker has a message; returns whether it was the last of all, or raises RuntimeError if another one was due."""
        now_ns = time.monotonic_ns()
        if number == END:
            return True
        if number != self._last[rank] + 1 or item != _ITEM:
            raise RuntimeError(f"worker {rank} got {number}, {item} after {self._last[rank]}")
        self._last[rank] = number
        self.times[rank, number] = now_ns
        return False


class Way:
    """How messages get to workers; one object, which is made before the workers are forked, for all processes of a cell.

    It has a directory of its own.

    Attributes:
        title: in words.
        of_vllm: whether it runs in vLLM's environment.
        gathers: whether it brings replies back.
    """

    title: ClassVar[str]
    of_vllm: ClassVar[bool] = False
    gathers: ClassVar[bool] = False

    def __init__(self, cell: Cell, directory: str, stamps: Stamps) -> None:
        self.cell, self.directory, self.stamps = cell, directory, stamps
        self.tensor: Any = torch.zeros(cell.nbytes, dtype=torch.uint8)
        self.tensor[0] = _ITEM

    def work(self, rank: int) -> None:
        """A worker, until its last message."""
        raise NotImplementedError

    def serving(self) -> AbstractAsyncContextManager[None]:
        """The engine, for as long as it is measured; workers have joined when it is entered."""
        raise NotImplementedError

    async def send(self, number: int) -> None:
        """Sends a message to all workers."""
        raise NotImplementedError

    async def gather(self, number: int) -> Sequence[Any]:
        """Sends one, and returns all replies, in order of rank."""
        raise NotImplementedError

    async def pause(self, seconds: float) -> None:
        """Waits as programs of this kind do."""
        time.sleep(seconds)  # noqa: ASYNC251 # nothing else is in the loop of a blocking peer

    def close(self) -> None:
        """All has ended, in the engine's process."""


class _Measurement:
    def __init__(self, way: Way, workers: Sequence[ForkProcess]) -> None:
        self._way, self._cell, self._times, self._workers = way, way.cell, way.stamps.times, workers
        self._sent = 0

    async def run(self) -> Run:
        cell = self._cell
        for _ in range(_WARM_UP):
            await self._send()
        self._settle()
        asked = {self._gather: cell.gathers, self._rest: cell.rests}
        numbers: dict[str, float] = {}
        for measure in (self._flood, self._pace, *(measure for measure, is_asked in asked.items() if is_asked)):
            numbers |= await measure()
        return Run(**numbers)

    async def _send(self) -> int:
        """Returns when it began to."""
        self._sent += 1
        began_ns = time.monotonic_ns()
        await self._way.send(self._sent)
        return began_ns

    def _settle(self) -> int:
        """Waits until all workers have the last message; returns when the last of them had it."""
        until_s = time.monotonic() + PATIENCE_S
        while not (arrived := self._times[:, self._sent]).all():
            if time.monotonic() > until_s:
                raise TimeoutError(f"message {self._sent} did not come to all workers")
            if not all(worker.is_alive() for worker in self._workers):
                raise RuntimeError("a worker has died")
            time.sleep(0.0003)
        return int(arrived.max())

    async def _flood(self) -> dict[str, float]:
        first, began_ns = self._sent, time.monotonic_ns()
        until_ns = began_ns + int(self._cell.seconds * 1e9)
        while time.monotonic_ns() < until_ns and self._sent < _MOST // 2:
            await self._send()
        return {"per_s": (self._sent - first) / (self._settle() - began_ns) * 1e9}

    async def _pace(self) -> dict[str, float]:
        steps = self._cell.steps
        began_s = time.process_time()
        for _ in range(steps):
            await self._way.pause(_GAP_S)
        pauses_s = time.process_time() - began_s
        began_s, workers_s = time.process_time(), self._workers_s()
        late_us = []
        in_between_s = 0.0
        for _ in range(steps):
            await self._way.pause(_GAP_S)
            began_ns = await self._send()
            paused_s = time.process_time()
            late_us.append((began_ns, self._sent))
            if self._cell.nbytes >= 1 << 24:
                self._settle()
            in_between_s += time.process_time() - paused_s
        engine_s = time.process_time() - began_s - pauses_s - in_between_s
        self._settle()
        workers_s = self._workers_s() - workers_s
        last_us = statistics.median((int(self._times[:, number].max()) - began_ns) / 1e3 for began_ns, number in late_us)
        worker_us = workers_s / steps / self._cell.workers * 1e6
        return {"last_us": last_us, "engine_us": max(0.0, engine_s) / steps * 1e6, "worker_us": worker_us}

    async def _gather(self) -> dict[str, float]:
        began_s = now_s = time.perf_counter()
        engine_s = time.process_time()
        taken_s = []
        while now_s - began_s < self._cell.seconds and self._sent < _MOST - 4096:
            self._sent += 1
            replies = await self._way.gather(self._sent)
            if [reply["number"] for reply in replies] != [self._sent] * self._cell.workers:
                raise RuntimeError(f"the replies to {self._sent} were {replies}")
            before_s, now_s = now_s, time.perf_counter()
            taken_s.append(now_s - before_s)
        engine_us = (time.process_time() - engine_s) / len(taken_s) * 1e6
        gather_us = statistics.median(taken_s) * 1e6
        return {"gathers_per_s": len(taken_s) / (now_s - began_s), "gather_us": gather_us, "gather_engine_us": engine_us}

    def _workers_s(self) -> float:
        return cpu_s_of(worker.pid for worker in self._workers if worker.pid is not None)

    async def _rest(self) -> dict[str, float]:
        async def percent() -> float:
            before_s, began_s = self._workers_s(), time.monotonic()
            await self._way.pause(_REST_S)
            return (self._workers_s() - before_s) / (time.monotonic() - began_s) * 100

        await self._way.pause(_REST_S)
        await self._send()
        awake_percent = await percent()
        await self._way.pause(_SPUN_S)
        return {"awake_percent": awake_percent, "idle_percent": await percent()}


@contextlib.contextmanager
def _workers(way: Way) -> Iterator[list[ForkProcess]]:
    """Yields worker processes, which have ended afterwards."""
    workers = [ForkProcess(target=way.work, args=(rank,)) for rank in range(way.cell.workers)]
    try:
        for worker in workers:
            worker.start()
        yield workers
        until_s = time.monotonic() + PATIENCE_S
        for worker in workers:
            worker.join(max(0.0, until_s - time.monotonic()))
            if worker.is_alive():
                raise TimeoutError("a worker did not end")
    finally:
        for left in multiprocessing.active_children():
            left.kill()
            left.join()


def measure(way: Way) -> Run:
    """Measures a cell."""

    async def in_engine() -> Run:
        async with way.serving():
            found = await _Measurement(way, workers).run()
            await way.send(END)
            return found

    with _workers(way) as workers:
        return uvloop.run(in_engine())
