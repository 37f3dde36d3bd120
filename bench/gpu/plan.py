"""What ``bench gpu`` measures, and measuring it.

Method: repetitions are interleaved (each size by way after way, then all of it again), so that whatever else the machine does
hits all alike; ratios are taken within a repetition, and medians are reported with the spread beside them. What can't be
opened, or fails, is a result, too: it says why, and the rest goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from bench.children import BenchError
from bench.coverage import Coverage, Planned, Status
from bench.gpu import copies, handovers
from bench.gpu.copies import BANDWIDTH, STALLS, WAYS
from bench.gpu.device import Accelerator
from bench.gpu.handovers import HAND_OVERS, ROUTES
from bench.gpu.processes import Process, Refused
from bench.machine import Machine
from bench.results import format_nbytes

__all__ = ["SIZES", "Measured", "Plan", "Results", "run", "steps", "title_of"]

SIZES = (64 << 10, 256 << 10, 1 << 20, 8 << 20, 64 << 20, 256 << 20)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure.

    Attributes:
        sizes: of a request's tensor, in bytes.
        ways, routes: from host memory to the GPU, and between processes.
        timed_s, stalls, messages: in each repetition: of copying, requests brought while the loop is looked at, hand-overs.
    """

    sizes: Sequence[int] = SIZES
    ways: Sequence[str] = tuple(WAYS)
    routes: Sequence[str] = tuple(ROUTES)
    repetitions: int = 7
    timed_s: float = 0.1
    stalls: int = 10
    messages: int = 50

    @classmethod
    def quick(cls) -> Plan:
        """The sizes that targets are about, in a minute."""
        return cls(sizes=(64 << 10, 8 << 20, 64 << 20), repetitions=3, timed_s=0.05, stalls=5, messages=20)


class Measured(msgspec.Struct, frozen=True):
    """What a way or a route did at a size.

    Attributes:
        what: was measured, as commands are called.
        runs: what the command returned in each repetition: numbers, by what they are.
    """

    what: str
    name: str
    nbytes: int
    runs: list[dict[str, list[float]]]

    def medians(self, number: str) -> list[float]:
        """Returns the median of each repetition."""
        return [statistics.median(run[number]) for run in self.runs]

    def every(self, number: str) -> list[float]:
        """Returns what all repetitions have."""
        return [value for run in self.runs for value in run[number]]


class Results(msgspec.Struct, frozen=True):
    """A run."""

    machine: Machine
    gpu: Accelerator
    repetitions: int
    timed_s: float
    measured: list[Measured]
    coverage: Coverage | None = None

    def of(self, what: str) -> dict[tuple[int, str], Measured]:
        """Returns what was measured of something, by size and name."""
        return {(measured.nbytes, measured.name): measured for measured in self.measured if measured.what == what}


_Progress = Callable[[str], None]


def steps(plan: Plan) -> int:
    """Returns how often :func:`run` reports progress."""
    return 2 + plan.repetitions * len(plan.sizes) * (2 * len(plan.ways) + len(plan.routes))


def run(plan: Plan, progress: _Progress) -> Results:
    """Measures what a plan says, with a line before each step.

    Raises:
        BenchError: the process that copies did not start; what fails later is among the results.
    """
    rates = _Part(BANDWIDTH, plan, plan.ways, plan.timed_s)
    stalls = _Part(STALLS, plan, plan.ways, plan.stalls)
    times = _Part(HAND_OVERS, plan, plan.routes, plan.messages)
    with tempfile.TemporaryDirectory(prefix="shmring-bench-") as directory:
        progress("starting: copies")
        with Process("copies", functools.partial(copies.copying, directory, plan.sizes, plan.ways)) as process:
            gpu, absent = process.open()
            for part in (rates, stalls):
                part.lacks(absent)
                part.measure(process, progress)
            with stalls.going():
                process.finish()
        progress("starting: engine and frontend")
        with times.going():
            _hand_over(times, directory, progress)
    parts = (rates, stalls, times)
    measured = [measured for part in parts for measured in part.measured()]
    return Results(Machine.here(), gpu, plan.repetitions, plan.timed_s, measured, _coverage(parts))


class _Part:
    """A part of a run: what commands have returned, by cell. A cell that failed has nothing, and is not tried again."""

    def __init__(self, title: str, plan: Plan, names: Sequence[str], amount: float) -> None:
        self.title = title
        self.plan = plan
        self.names = list(names)
        self.amount = amount
        self.runs: dict[tuple[str, int], list[dict[str, list[float]]]] = {}  # by name and size
        self.reasons: dict[tuple[str, int], str] = {}

    def lacks(self, absent: Mapping[str, str]) -> None:
        """Notes what could not be opened, by name."""
        self.reasons |= {(name, nbytes): reason for name, reason in absent.items() for nbytes in self.plan.sizes}

    @contextlib.contextmanager
    def going(self) -> Iterator[None]:
        """A process that ends or hangs here takes nothing with it that was measured before."""
        try:
            yield
        except BenchError as error:
            for cell in itertools.product(self.names, self.plan.sizes):
                self.reasons.setdefault(cell, f"broken off: {error}")

    def measure(self, process: Process, progress: _Progress) -> None:
        """Measures A B C at each size, then all of it again."""
        plan = self.plan
        with self.going():
            for repetition, nbytes, name in itertools.product(range(1, plan.repetitions + 1), plan.sizes, self.names):
                progress(f"{self.title}: {title_of(name)}, {nbytes:,} bytes, {repetition} of {plan.repetitions}")
                if (name, nbytes) in self.reasons:
                    continue
                answer = process.carry_out(self.title, name, nbytes, self.amount)
                if isinstance(answer, Refused):
                    self.reasons[name, nbytes] = answer.error
                    self.runs.pop((name, nbytes), None)
                else:
                    self.runs.setdefault((name, nbytes), []).append(answer)

    def measured(self) -> list[Measured]:
        """Returns what was measured, by size."""
        return [Measured(self.title, *cell, runs) for cell, runs in sorted(self.runs.items(), key=lambda run: run[0][1])]


def title_of(name: str) -> str:
    """Returns the title of a way or a route."""
    return WAYS[name].title if name in WAYS else ROUTES[name].title


def _hand_over(times: _Part, directory: str, progress: _Progress) -> None:
    shared = {name: ROUTES[name].create_shared() for name in times.names}
    largest_nbytes = max(times.plan.sizes)
    with Process("engine", functools.partial(handovers.answering, directory, largest_nbytes, shared)) as engine:
        _, absent = engine.open()
        times.lacks(absent)
        answered = {name: value for name, value in shared.items() if name not in absent}
        with Process("frontend", functools.partial(handovers.asking, directory, largest_nbytes, answered)) as frontend:
            times.lacks(frontend.open()[1])
            times.measure(frontend, progress)
            frontend.finish()
        engine.finish()


def _coverage(parts: Sequence[_Part]) -> Coverage:
    planned: list[Planned] = []
    measured: dict[tuple[str, str], int] = {}
    reasons: dict[tuple[str, str], tuple[Status, str]] = {}
    for part in parts:
        cases = {nbytes: f"{part.title}, {format_nbytes(nbytes)}" for nbytes in part.plan.sizes}
        planned += [Planned(case, part.names, part.plan.repetitions) for case in cases.values()]
        measured |= {(cases[nbytes], name): len(runs) for (name, nbytes), runs in part.runs.items()}
        reasons |= {(cases[nbytes], name): (Status.FAILED, reason) for (name, nbytes), reason in part.reasons.items()}
    return Coverage.of(planned, measured, reasons)
