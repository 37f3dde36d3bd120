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
from bench.gpu.processes import Numbers, Process, Refused
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
    runs: list[Numbers]

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
        ways = functools.partial(copies.openers, directory, plan.sizes, plan.ways)
        with Process("copies", ways, copies.COMMANDS) as process:
            gpu, absent = process.open()
            running.measure(BANDWIDTH, process, plan.timed_s, absent)
            running.measure(STALLS, process, plan.stalls, absent)
            with running.going(STALLS):
                process.finish()
        progress("starting: engine and frontend")
        shared = {name: ROUTES[name].create_shared() for name in plan.routes}
        answering = functools.partial(handovers.openers, "answering", directory, max(plan.sizes), shared)
        with running.going(HAND_OVERS), Process("engine", answering, {}) as engine:
            _, absent = engine.open()
            answered = {name: value for name, value in shared.items() if name not in absent}
            asking = functools.partial(handovers.openers, "asking", directory, max(plan.sizes), answered)
            with Process("frontend", asking, handovers.COMMANDS) as frontend:
                running.measure(HAND_OVERS, frontend, plan.messages, frontend.open()[1] | absent)
                frontend.finish()
            engine.finish()
    measured = [Measured(*cell, runs) for cell, runs in running.runs.items() if runs]
    return Results(Machine.here(), gpu, plan.repetitions, plan.timed_s, measured, running.coverage())


#: What is measured, of which way or route, at which size.
_Cell = tuple[str, str, int]


class _Run:
    """What commands have returned so far. What failed is not tried again."""

    def __init__(self, plan: Plan, progress: Callable[[str], None]) -> None:
        self._repetitions = plan.repetitions
        self._progress = progress
        names = {BANDWIDTH: plan.ways, STALLS: plan.ways, HAND_OVERS: plan.routes}
        self.runs: dict[_Cell, list[Numbers]] = {
            (what, name, nbytes): [] for what in names for nbytes in plan.sizes for name in names[what]
        }
        self._reasons: dict[_Cell, str] = {}

    @contextlib.contextmanager
    def going(self, what: str) -> Iterator[None]:
        """A process that ends or hangs here takes nothing with it that was measured before."""
        try:
            yield
        except BenchError as error:
            for cell in self._cells(what):
                self._reasons.setdefault(cell, f"broken off: {error}")

    def measure(self, what: str, process: Process, amount: float, absent: Mapping[str, str]) -> None:
        """Measures A B C at each size, then all of it again; what could not be opened is absent, by name."""
        cells = self._cells(what)
        self._reasons |= {cell: absent[cell[1]] for cell in cells if cell[1] in absent}
        with self.going(what):
            for repetition, cell in itertools.product(range(self._repetitions), cells):
                _, name, nbytes = cell
                self._progress(f"{what}: {title_of(name)}, {nbytes:,} bytes, {repetition + 1} of {self._repetitions}")
                if cell in self._reasons:
                    continue
                answer = process.carry_out(what, name, nbytes, amount)
                if isinstance(answer, Refused):
                    self._reasons[cell] = answer.error
                    self.runs[cell].clear()
                else:
                    self.runs[cell].append(answer)

    def coverage(self) -> Coverage:
        """What was planned, and what of it is missing."""
        keys = {cell: (f"{cell[0]}, {format_nbytes(cell[2])}", cell[1]) for cell in self.runs}
        planned = [Planned(case, [name], self._repetitions) for case, name in keys.values()]
        measured = {keys[cell]: len(runs) for cell, runs in self.runs.items()}
        return Coverage.of(planned, measured, {keys[cell]: (Status.FAILED, why) for cell, why in self._reasons.items()})

    def _cells(self, what: str) -> list[_Cell]:
        return [cell for cell in self.runs if cell[0] == what]
