"""What ``bench gpu`` measures, and measuring it.

Method: repetitions are interleaved (each size by way after way, then all of it again), so that whatever else the machine does
hits all alike; ratios are taken within a repetition, and medians are reported with the spread beside them. What can't be
opened, or fails, is a result, too: it says why, and the rest goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from bench.children import BenchError
from bench.coverage import Coverage, Planned, Status
from bench.gpu import copies, handovers
from bench.gpu.device import Accelerator
from bench.gpu.processes import Process, Refused, Setting, spawning
from bench.gpu.routes import ROUTES
from bench.gpu.ways import CEILING, WAYS
from bench.machine import Machine
from bench.results import Spread, format_nbytes

__all__ = ["SIZES", "Absence", "HandedOver", "Plan", "Results", "Stalled", "Transferred", "run", "steps"]

SIZES = (64 << 10, 256 << 10, 1 << 20, 8 << 20, 64 << 20, 256 << 20)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure.

    Attributes:
        sizes: of a request's tensor, in bytes.
        ways, routes: from host memory to the GPU, and between processes.
        repetitions: of everything.
        timed_s: of copying, in each repetition.
        stalls: requests that are brought, in each repetition, while the loop is looked at.
        messages: hand-overs timed in each repetition.
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


class Transferred(msgspec.Struct, frozen=True):
    """What a way brings to the GPU.

    Attributes:
        of_ceiling: as a part of what memory of ``pin_memory()`` gives in the same repetition; None where that was not measured.
        runs: GB/s of each repetition.
    """

    way: str
    nbytes: int
    gb_per_s: Spread
    of_ceiling: Spread | None
    runs: list[float]


class Stalled(msgspec.Struct, frozen=True):
    """How long a way holds the loop up: the longest time between two turns, over all requests; an idle loop's beside it."""

    way: str
    nbytes: int
    brought_us: Spread
    idle_us: Spread


class HandedOver(msgspec.Struct, frozen=True):
    """How long a route takes.

    Attributes:
        p50_us: the median of each repetition.
        p99_us: of all repetitions.
        messages: timed, in all repetitions.
    """

    route: str
    nbytes: int
    messages: int
    p50_us: Spread
    p99_us: float


class Absence(msgspec.Struct, frozen=True):
    """What has no result, and why.

    Attributes:
        what: a way's or a route's name; or a part of the run.
        nbytes: None stands for all sizes.
    """

    what: str
    nbytes: int | None
    reason: str


class Results(msgspec.Struct, frozen=True):
    """A run."""

    machine: Machine
    gpu: Accelerator
    repetitions: int
    timed_s: float
    transfers: list[Transferred]
    stalls: list[Stalled]
    handovers: list[HandedOver]
    absences: list[Absence]
    coverage: Coverage | None = None


_Progress = Callable[[str], None]
_Cell = tuple[str, int]  # a way or a route, and a size
_Found = TypeVar("_Found")


def steps(plan: Plan) -> int:
    """Returns how often :func:`run` reports progress."""
    return 2 + plan.repetitions * len(plan.sizes) * (2 * len(plan.ways) + len(plan.routes))


def run(plan: Plan, progress: _Progress) -> Results:
    """Measures what a plan says.

    Args:
        plan: what to measure.
        progress: called with a line before each step; :func:`steps` says how many there are.

    Raises:
        BenchError: the process that copies did not start; what fails later is among the results.
    """
    with tempfile.TemporaryDirectory(prefix="shmring-bench-") as directory:
        setting = Setting(directory, tuple(plan.sizes), tuple(plan.ways), tuple(plan.routes))
        gpu, rates, stalls = _copy(plan, setting, progress)
        times = _hand_over(plan, setting, progress)
    parts: dict[str, tuple[Sequence[str], _Gathered[Any]]] = {
        "bandwidth": (plan.ways, rates),
        "stalls": (plan.ways, stalls),
        "hand-overs": (plan.routes, times),
    }
    return Results(
        machine=Machine.here(),
        gpu=gpu,
        repetitions=plan.repetitions,
        timed_s=plan.timed_s,
        transfers=[_transferred(rates.found, *cell) for cell in rates.cells],
        stalls=[_stalled(stalls.found[cell], *cell) for cell in stalls.cells],
        handovers=[_handed_over(times.found[cell], *cell) for cell in times.cells],
        absences=list(dict.fromkeys([*rates.absences, *stalls.absences, *times.absences])),
        coverage=_coverage(plan, parts),
    )


def _coverage(plan: Plan, parts: Mapping[str, tuple[Sequence[str], _Gathered[Any]]]) -> Coverage:
    planned: list[Planned] = []
    measured: dict[tuple[str, str], int] = {}
    reasons: dict[tuple[str, str], tuple[Status, str]] = {}
    for part, (names, gathered) in parts.items():
        cases = {nbytes: f"{part}, {format_nbytes(nbytes)}" for nbytes in plan.sizes}
        planned += [Planned(case, list(names), plan.repetitions) for case in cases.values()]
        measured |= {(cases[nbytes], name): len(runs) for (name, nbytes), runs in gathered.found.items()}
        for absence in gathered.absences:
            subjects = names if absence.what == part else (absence.what,)
            sizes = plan.sizes if absence.nbytes is None else (absence.nbytes,)
            keys = itertools.product((cases[nbytes] for nbytes in sizes), subjects)
            reasons |= dict.fromkeys(keys, (Status.FAILED, absence.reason))
    return Coverage.of(planned, measured, reasons)


class _Gathered(Generic[_Found]):
    """What commands have returned, by cell; a cell that failed has nothing, and is not tried again."""

    def __init__(self) -> None:
        self.found: dict[_Cell, list[_Found]] = {}
        self._absent: dict[str, str] = {}
        self._failed: dict[_Cell, str] = {}

    def open(self, absent: dict[str, str]) -> None:
        """Notes what could not be opened."""
        self._absent |= absent

    def ask(self, process: Process, cell: _Cell, command: object) -> None:
        """Has a command carried out, unless it is known to fail."""
        if cell[0] in self._absent or cell in self._failed:
            return
        answer = process.carry_out(command)
        if isinstance(answer, Refused):
            self._failed[cell] = answer.error
            self.found.pop(cell, None)
        else:
            self.found.setdefault(cell, []).append(answer)

    @contextlib.contextmanager
    def going(self, part: str) -> Iterator[None]:
        """A part of the run; a process that ends or hangs in it takes nothing with it that was measured before."""
        try:
            yield
        except BenchError as error:
            self._absent[part] = f"broken off: {error}"

    @property
    def cells(self) -> list[_Cell]:
        """Those that were measured, by size."""
        return sorted(self.found, key=lambda cell: cell[1])

    @property
    def absences(self) -> list[Absence]:
        """All others."""
        all_sizes = [Absence(name, None, reason) for name, reason in self._absent.items()]
        return all_sizes + [Absence(name, nbytes, reason) for (name, nbytes), reason in self._failed.items()]


def _copy(plan: Plan, setting: Setting, progress: _Progress) -> tuple[Accelerator, _Gathered[float], _Gathered[copies.Stalls]]:
    rates, stalls = _Gathered[float](), _Gathered[copies.Stalls]()
    progress("starting: copies")
    with Process("copies", copies.copying, setting) as process:
        ready = process.open()
        rates.open(ready.absent)
        stalls.open(ready.absent)
        with rates.going("bandwidth"):
            for repetition, nbytes, way in _interleaved(plan, plan.ways):
                progress(f"bandwidth: {WAYS[way].title}, {nbytes:,} bytes, {repetition} of {plan.repetitions}")
                rates.ask(process, (way, nbytes), copies.Transfer(way, nbytes, plan.timed_s))
        with stalls.going("stalls"):
            for repetition, nbytes, way in _interleaved(plan, plan.ways):
                progress(f"stalls: {WAYS[way].title}, {nbytes:,} bytes, {repetition} of {plan.repetitions}")
                stalls.ask(process, (way, nbytes), copies.Stall(way, nbytes, plan.stalls))
            process.finish()
    return ready.gpu, rates, stalls


def _hand_over(plan: Plan, setting: Setting, progress: _Progress) -> _Gathered[list[int]]:
    times = _Gathered[list[int]]()
    progress("starting: engine and frontend")
    shared = {name: ROUTES[name].create_shared(spawning()) for name in plan.routes}
    setting = dataclasses.replace(setting, shared=shared)
    with times.going("hand-overs"), contextlib.ExitStack() as stack:
        engine = stack.enter_context(Process("engine", handovers.answering, setting))
        absent = engine.open().absent
        times.open(absent)
        answered = tuple(name for name in plan.routes if name not in absent)
        frontend = stack.enter_context(Process("frontend", handovers.asking, dataclasses.replace(setting, routes=answered)))
        times.open(frontend.open().absent)
        for repetition, nbytes, route in _interleaved(plan, plan.routes):
            progress(f"hand-over: {ROUTES[route].title}, {nbytes:,} bytes, {repetition} of {plan.repetitions}")
            times.ask(frontend, (route, nbytes), handovers.HandOver(route, nbytes, plan.messages))
        frontend.finish()
        engine.finish()
    return times


def _interleaved(plan: Plan, names: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    """Yields the number of a repetition, a size, and a name: A B C at each size, then all of it again."""
    return itertools.product(range(1, plan.repetitions + 1), plan.sizes, names)


def _transferred(measured_runs: Mapping[_Cell, list[float]], way: str, nbytes: int) -> Transferred:
    runs, ceiling = measured_runs[way, nbytes], measured_runs.get((CEILING, nbytes))
    # Of the repetitions that both were measured in: the last of a run that was broken off may have one of them only.
    of_ceiling = Spread.of(ours / most for ours, most in zip(runs, ceiling, strict=False)) if ceiling else None
    return Transferred(way, nbytes, Spread.of(runs), of_ceiling, runs)


def _stalled(measured_runs: Sequence[copies.Stalls], way: str, nbytes: int) -> Stalled:
    brought = Spread.of(seconds * 1e6 for stalls in measured_runs for seconds in stalls.brought_s)
    idle = Spread.of(seconds * 1e6 for stalls in measured_runs for seconds in stalls.idle_s)
    return Stalled(way, nbytes, brought, idle)


def _handed_over(measured_runs: Sequence[Sequence[int]], route: str, nbytes: int) -> HandedOver:
    every = np.concatenate([np.asarray(times, np.float64) for times in measured_runs]) / 1e3
    p50_us = Spread.of(statistics.median(times) / 1e3 for times in measured_runs)
    return HandedOver(route, nbytes, len(every), p50_us, float(np.percentile(every, 99)))
