"""What the timed phase of a cell costs a process: CPU time, resident memory, and how late its event loop runs.

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
from collections.abc import Iterable, Iterator
from pathlib import Path

_TICK_S = 0.005  # often enough to meet every stall that a person or a heartbeat would notice; 0.1 % of a core


@dataclasses.dataclass(frozen=True)
class Cost:
    """What the timed phase took of one process.

    Attributes:
        messages: handled in the phase.
        cpu_s: user and system time of all its threads.
        resident_nbytes: at the end of the phase, shared memory and the benchmark's own buffers aside.
        stall_ms: how late a callback of its event loop ran at most that was due every 5 ms, without the time in which the
            loop's thread waited for a core: what a crowded machine adds. None where no loop is meant to stay responsive.
            uvloop's timers alone make a callback up to 1 ms late.
        connect_s: how long it took to connect, where a peer says so.
        idle_share: of a core, that it took while connected with nothing to do after the phase, where a peer has looked.
    """

    messages: int
    cpu_s: float
    resident_nbytes: int
    stall_ms: float | None
    connect_s: float | None = None
    idle_share: float | None = None


def process_cpu_s(pid: int) -> float:
    """Returns the CPU time of a process so far, to the nanosecond; ``/proc`` counts in ticks of 10 ms."""
    return time.clock_gettime(~pid << 3 | 2)  # as clock_getcpuclockid makes it of a pid


def cpu_s_of(pids: Iterable[int]) -> float:
    """Returns that of several processes together."""
    return sum(map(process_cpu_s, pids))


def resident_nbytes() -> int:
    """Returns what this process has resident, shared memory aside: anonymous pages, and files' pages that it has touched."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssFile"))


class Meter:
    """Measures one phase. :meth:`start` and :meth:`stop` may be called on any thread, each once.

    The benchmark's own buffers in this process do not count.

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
            stall_ms=None if self._ticker is None else self._ticker.stall_ms(),
            connect_s=self.connect_s,
        )

    async def watch_idling(self, seconds: float) -> None:
        """Looks for so long at what this process takes when the phase is over and nothing comes; its loop is not watched."""
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
        self._late_s = 0.0  # at most
        self._arm()

    def reset(self) -> None:
        """Forgets what was before."""
        self._started_s = time.perf_counter()
        self._late_s = 0.0

    def stall_ms(self) -> float:
        """Returns how late it was so far, at most; a tick that should have come by now counts, too: the loop is held up."""
        now, waited_s = self._now()
        overdue_s = self._lateness(now, waited_s) if now > self._due_s >= self._started_s else 0.0
        return max(self._late_s, overdue_s) * 1e3

    def close(self) -> None:
        self._handle.cancel()
        os.close(self._schedstat)

    def _tick(self) -> None:
        now, waited_s = self._now()
        if self._due_s >= self._started_s:
            self._late_s = max(self._late_s, self._lateness(now, waited_s))
        self._waited_s = waited_s
        self._arm()

    def _arm(self) -> None:
        self._due_s = time.perf_counter() + _TICK_S  # not the loop's clock: uvloop's counts milliseconds, and stands still
        self._handle = self._loop.call_later(_TICK_S, self._tick)

    def _lateness(self, now: float, waited_s: float) -> float:
        """Seconds that were not spent waiting for a core."""
        return max(0.0, now - self._due_s - (waited_s - self._waited_s))

    def _now(self) -> tuple[float, float]:
        """The time, and what the thread had waited for a core by then: not what it waits between two looks."""
        while True:
            waited_s, now = self._waited(), time.perf_counter()
            if self._waited() == waited_s:
                return now, waited_s

    def _waited(self) -> float:
        """Seconds for which the loop's thread has waited for a core in its life."""
        return int(os.pread(self._schedstat, 64, 0).split()[1]) / 1e9
