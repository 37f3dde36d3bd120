"""A client's load, and the phases of each process.

Theory of operation: a client has as many tasks as requests in flight; each asks, waits for its reply, checks it, and asks
again, as the handlers of a server do. The load lasts until every process has measured, so that nobody measures beside a
client that has stopped. Each process looks twice at its own clocks and count, when the warm-up is over and
when the timed phase is; rates and costs are differences between the two. A phase also lasts until as many requests have
ended as a client has in flight, however slow the transport.

Latencies are of the requests whose replies came within the timed phase. CPU seconds are those of the whole process, all
of its threads included, in user and system mode.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable

from bench.meter import Cost, Meter
from bench.peers import Ask
from bench.request.questions import Cell, Header, Question

__all__ = ["Load", "Phases", "come_to_rest"]

_RECHECK_S = 0.005  # how often a phase that has too few requests looks again
_REST_S = 0.01  # in which a process at rest takes less than a twentieth of a core
_RESTS = 3  # one after the other, lest a busy machine be taken for rest
_MAX_REST_S = 5.0  # after which something of the transport is busy for good, which then belongs to its cost


class Phases:
    """Has this process measured in the timed phase of a cell.

    Args:
        cell: says how long the phases last.
        count: returns how many requests this process has ended.

    Attributes:
        timing: whether the timed phase is on.
    """

    def __init__(self, cell: Cell, count: Callable[[], int]) -> None:
        self._cell = cell
        self._count = count
        self.timing = False

    async def measure(self, start_ns: int) -> Cost:
        """Waits through both phases.

        Args:
            start_ns: when the warm-up began, of ``time.perf_counter_ns``, which all processes share on Linux.
        """
        cell = self._cell
        await self._phase(start_ns + int(cell.warm_up_s * 1e9), cell.in_flight)
        self.timing = True
        count, began_ns = self._count(), time.perf_counter_ns()
        meter = Meter(own_nbytes=0)
        meter.start()
        await self._phase(began_ns + int(cell.timed_s * 1e9), count + cell.in_flight)
        self.timing = False
        meter.stop(self._count() - count)
        assert meter.cost is not None, "a meter that was stopped has a cost"
        return meter.cost

    async def _phase(self, until_ns: int, count: int) -> None:
        await asyncio.sleep(max(0.0, (until_ns - time.perf_counter_ns()) / 1e9))
        while self._count() < count:  # noqa: ASYNC110 # not an event, since some peers count on a thread
            await asyncio.sleep(_RECHECK_S)


async def come_to_rest() -> None:
    """Waits until this process does nothing: what a transport goes on with after connecting is no cost of a request.

    shmring maps the pages of its slab on a thread; so does libzmq start its threads.
    """
    deadline_ns = time.perf_counter_ns() + int(_MAX_REST_S * 1e9)
    rests = 0
    while rests < _RESTS and time.perf_counter_ns() < deadline_ns:
        cpu_ns = time.process_time_ns()
        await asyncio.sleep(_REST_S)
        rests = rests + 1 if time.process_time_ns() - cpu_ns < _REST_S * 1e9 / 20 else 0


class Load:
    """The requests of one client.

    Args:
        cell: what to ask.
        client: its index.

    Attributes:
        phases: of this process.
        answered: requests whose replies were checked.
        latencies_ns: round trips of those of the timed phase, from before the request was handed to the transport until
            its reply was in the hands of whoever asked.
    """

    def __init__(self, cell: Cell, client: int) -> None:
        self._questions = [Question(cell) for _ in range(cell.in_flight)]
        self._client = client
        self._sequences = itertools.count()
        self._stopped = False
        self.phases = Phases(cell, lambda: self.answered)
        self.answered = 0
        self.latencies_ns: list[int] = []

    def start(self, tasks: asyncio.TaskGroup, ask: Ask) -> None:
        """Starts asking; one that fails ends them all."""
        for question in self._questions:
            tasks.create_task(self._ask(question, ask))

    def stop(self) -> None:
        """Lets what is in flight end; nothing new is asked."""
        self._stopped = True

    async def _ask(self, question: Question, ask: Ask) -> None:
        while not self._stopped:
            header = Header(self._client, next(self._sequences))
            question.stamp(header)
            asked_ns = time.perf_counter_ns()
            answer = await ask(header, question.tensor)
            answered_ns = time.perf_counter_ns()
            question.check(header, answer)
            del answer  # it may be a view of the transport's memory
            self.answered += 1
            if self.phases.timing:
                self.latencies_ns.append(answered_ns - asked_ns)
