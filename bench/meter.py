"""What the timed phase of a cell costs a process: CPU time, resident memory, descriptors, and how late its event loop runs.

The phase begins and ends with messages, so whoever stamps or takes them holds a :class:`Meter` and tells it; the ticker that
looks at the loop runs from before until after. CPU time is that of all threads of the process, what a library does on
threads of its own included, and of no other process: what a broker or a daemon spends is not in it.

Resident memory is what the process holds for itself, anonymous or mapped from files, without shared memory: the slab, a ring
or a segment of any peer is left out, and so are the buffers that belong to the benchmark.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

_TICK_S = 0.005  # often enough to meet every stall that a person or a heartbeat would notice; 0.1 % of a core


@dataclasses.dataclass(frozen=True)
class Lag:
    """How late a loop's callbacks ran that were due every 5 ms. uvloop's timers alone make them up to 1 ms late.

    Attributes:
        p99_ms: the 99th percentile.
        max_on_core_ms: the largest without the time in which the loop's thread waited for a core: what a crowded machine adds.
    """

    p99_ms: float
    max_on_core_ms: float


@dataclasses.dataclass(frozen=True)
class Cost:
    """What the timed phase took of one process.

    Attributes:
        messages: handled in the phase.
        cpu_s: user and system time of all its threads.
        resident_nbytes: at the end of the phase, shared memory and the benchmark's own buffers aside.
        descriptors: open at the end of the phase.
        lag: of its event loop; None where it has none that is meant to stay responsive.
        connect_s: how long it took to connect, where a peer says so.
        idle_share: of a core, that it took while connected with nothing to do after the phase, where a peer has looked.
    """

    messages: int
    cpu_s: float
    resident_nbytes: int
    descriptors: int
    lag: Lag | None
    connect_s: float | None = None
    idle_share: float | None = None


def process_cpu_s(pid: int) -> float:
    """Returns the CPU time of a process so far, in seconds, to the nanosecond: ``/proc`` counts in ticks of 10 ms.

    Raises:
        OSError: there is no such process.
    """
    return time.clock_gettime(~pid << 3 | 2)  # as clock_getcpuclockid makes it of a pid


def resident_nbytes() -> int:
    """Returns what this process has resident, shared memory aside: anonymous pages, and files' pages that it has touched."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssFile"))


class Meter:
    """Measures one phase. :meth:`start` and :meth:`stop` may be called on any thread, each once.

    Args:
        own_nbytes: the benchmark's buffers in this process.

    Attributes:
        cost: what the phase took, when it is over.
        connect_s: for peers to set that can say how long connecting took.
    """

    def __init__(self, own_nbytes: int) -> None:
        self.cost: Cost | None = None
        self.connect_s: float | None = None
        self._own_nbytes = own_nbytes
        self._started_cpu_s = 0.0
        self._ticker: LoopLag | None = None

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Has the running loop's lag measured, too, for the time of a ``with``."""
        self._ticker = LoopLag(asyncio.get_running_loop())
        try:
            yield
        finally:
            self._rest()

    def start(self) -> None:
        """The phase begins."""
        if self._ticker is not None:
            self._ticker.reset()
        self._started_cpu_s = time.process_time()

    def stop(self, messages: int) -> None:
        """The phase is over, in which so many messages were handled. Sets :attr:`cost`."""
        cpu_s = time.process_time() - self._started_cpu_s  # before anything else is looked at
        self.cost = Cost(
            messages=messages,
            cpu_s=cpu_s,
            resident_nbytes=resident_nbytes() - self._own_nbytes,
            descriptors=len(os.listdir("/proc/self/fd")) - 1,  # one is the listing itself
            lag=None if self._ticker is None else self._ticker.lag(),
            connect_s=self.connect_s,
        )

    async def watch_idling(self, seconds: float) -> None:
        """Looks at what this process takes when the phase is over and nothing comes; the loop's lag is watched no more.

        Args:
            seconds: for how long.
        """
        assert self.cost is not None, "the phase is over"
        self._rest()  # ticks are none
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        await asyncio.sleep(seconds)
        self.cost = dataclasses.replace(self.cost, idle_share=(time.process_time() - cpu_s) / (time.perf_counter() - wall_s))

    def _rest(self) -> None:
        if self._ticker is not None:
            self._ticker.close()
            self._ticker = None


class LoopLag:
    """Watches a loop: a callback that is due every 5 ms, and how late it came. Made and closed on the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        # Of the loop's thread, which need not be the main one; whoever asks may be on another.
        self._schedstat = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        self._waited_s = self._waited()  # before the tick that is due next was armed
        self._started_s = time.perf_counter()
        self._late: list[tuple[float, float]] = []  # seconds: in all, and of those not spent waiting for a core
        self._arm()

    def reset(self) -> None:
        """Forgets what was before."""
        self._started_s = time.perf_counter()
        self._late = []

    def lag(self) -> Lag:
        """Returns how late it was so far."""
        late = self._late + self._overdue()
        if not late:
            return Lag(0.0, 0.0)  # the phase was shorter than a tick
        return Lag(
            p99_ms=float(np.percentile([total for total, _ in late], 99)) * 1e3,
            max_on_core_ms=max(on_core for _, on_core in late) * 1e3,
        )

    def close(self) -> None:
        self._handle.cancel()
        os.close(self._schedstat)

    def _tick(self) -> None:
        now = time.perf_counter()
        waited_s = self._waited()
        if self._due_s >= self._started_s:
            self._late.append(self._lateness(now, waited_s))
        self._waited_s = waited_s
        self._arm()

    def _arm(self) -> None:
        self._due_s = time.perf_counter() + _TICK_S  # not the loop's clock: uvloop's counts milliseconds, and stands still
        self._handle = self._loop.call_later(_TICK_S, self._tick)

    def _overdue(self) -> list[tuple[float, float]]:
        """A tick that should have come by now and has not: the loop is being held up."""
        now = time.perf_counter()
        return [self._lateness(now, self._waited())] if now > self._due_s >= self._started_s else []

    def _lateness(self, now: float, waited_s: float) -> tuple[float, float]:
        late_s = max(0.0, now - self._due_s)
        return late_s, max(0.0, late_s - (waited_s - self._waited_s))

    def _waited(self) -> float:
        """Seconds for which the loop's thread has waited for a core in its life."""
        return int(os.pread(self._schedstat, 64, 0).split()[1]) / 1e9
