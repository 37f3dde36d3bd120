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


def steps(plan: Plan) -> int:
    """Returns how often :func:`run` reports progress."""
    return 2 + plan.repetitions * len(plan.sizes) * (2 * len(plan.ways) + len(plan.routes))


def title_of(name: str) -> str:
    """Returns the title of a way or a route."""
    return WAYS[name].title if name in WAYS else ROUTES[name].title


def run(plan: Plan, progress: Callable[[str], None]) -> Results:
    """Measures what a plan says, with a line before each step.

    Raises:
        BenchError: the process that copies did not start; what fails later is among the results.
    """
    running = _Run(plan, progress)
    with tempfile.TemporaryDirectory(prefix="shmring-bench-") as directory:
        progress("starting: copies")
        with Process("copies", functools.partial(copies.copying, directory, plan.sizes, plan.ways)) as process:
            gpu, absent = process.open()
            running.measure(BANDWIDTH, process, plan.timed_s, absent)
            running.measure(STALLS, process, plan.stalls, absent)
            with running.going(STALLS):
                process.finish()
        progress("starting: engine and frontend")
        shared = {name: ROUTES[name].create_shared() for name in plan.routes}
        largest_nbytes = max(plan.sizes)
        with (
            running.going(HAND_OVERS),
            Process("engine", functools.partial(handovers.answering, directory, largest_nbytes, shared)) as engine,
        ):
            _, absent = engine.open()
            answered = {name: value for name, value in shared.items() if name not in absent}
            with Process("frontend", functools.partial(handovers.asking, directory, largest_nbytes, answered)) as frontend:
                running.measure(HAND_OVERS, frontend, plan.messages, frontend.open()[1] | absent)
                frontend.finish()
            engine.finish()
    measured = [Measured(what, name, nbytes, runs) for (what, nbytes, name), runs in running.ordered()]
    return Results(Machine.here(), gpu, plan.repetitions, plan.timed_s, measured, running.coverage())


class _Run:
    """What commands have returned so far, by what was measured, size and name. What failed is not tried again."""

    def __init__(self, plan: Plan, progress: Callable[[str], None]) -> None:
        self._plan = plan
        self._progress = progress
        names = {BANDWIDTH: plan.ways, STALLS: plan.ways, HAND_OVERS: plan.routes}
        self._cells = {what: list(itertools.product((what,), plan.sizes, names[what])) for what in names}
        self._runs: dict[tuple[str, int, str], list[dict[str, list[float]]]] = {}
        self._reasons: dict[tuple[str, int, str], str] = {}

    @contextlib.contextmanager
    def going(self, what: str) -> Iterator[None]:
        """A process that ends or hangs here takes nothing with it that was measured before."""
        try:
            yield
        except BenchError as error:
            for cell in self._cells[what]:
                self._reasons.setdefault(cell, f"broken off: {error}")

    def measure(self, what: str, process: Process, amount: float, absent: Mapping[str, str]) -> None:
        """Measures A B C at each size, then all of it again; what could not be opened is absent, by name."""
        self._reasons |= {cell: absent[cell[2]] for cell in self._cells[what] if cell[2] in absent}
        repetitions = self._plan.repetitions
        with self.going(what):
            for repetition, cell in itertools.product(range(1, repetitions + 1), self._cells[what]):
                _, nbytes, name = cell
                self._progress(f"{what}: {title_of(name)}, {nbytes:,} bytes, {repetition} of {repetitions}")
                if cell in self._reasons:
                    continue
                answer = process.carry_out(what, name, nbytes, amount)
                if isinstance(answer, Refused):
                    self._reasons[cell] = answer.error
                    self._runs.pop(cell, None)
                else:
                    self._runs.setdefault(cell, []).append(answer)

    def ordered(self) -> Iterator[tuple[tuple[str, int, str], list[dict[str, list[float]]]]]:
        """Yields what was measured, as it was planned."""
        return ((cell, self._runs[cell]) for cell in itertools.chain(*self._cells.values()) if cell in self._runs)

    def coverage(self) -> Coverage:
        """What was planned, and what of it is missing."""
        keys = {cell: (f"{cell[0]}, {format_nbytes(cell[1])}", cell[2]) for cell in itertools.chain(*self._cells.values())}
        planned = [Planned(case, [name], self._plan.repetitions) for case, name in keys.values()]
        measured = {keys[cell]: len(runs) for cell, runs in self._runs.items()}
        return Coverage.of(planned, measured, {keys[cell]: (Status.FAILED, why) for cell, why in self._reasons.items()})
