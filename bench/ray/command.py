"""``python -m bench ray``: progress goes to stderr, tables go to stdout."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from bench import command_line
from bench.modes import Timing
from bench.programs import Program
from bench.ray.cluster import STORE_NBYTES, Measurement, Order
from bench.repetitions import (
    Measured,
    Number,
    Repetitions,
    compare,
    median_column,
    medians,
    ratio_column,
    ratios,
    spread_column,
)
from bench.results import Coverage, Findings, format_nbytes
from bench.targets import Target

_COPY, _IN_PLACE, _NUMPY, _TORCH, _CONNECTING = "shmring", "in place", "numpy", "torch", "connecting"
#: By the caller's node. A far client writes into memory of its own, so there is no second way.
WAYS: Mapping[str, tuple[str, ...]] = {"same": (_COPY, _IN_PLACE, _NUMPY, _TORCH), "other": (_COPY, _NUMPY, _TORCH)}

_SIZES: tuple[int, ...] = (64 << 10, 1 << 20, 8 << 20, 64 << 20)
_WINDOW, _MOST_NBYTES = 16, 192 << 20  # in flight; pickled tensors are copied several times
_ORDER_LIMIT_S = 120.0  # ten times what the slowest one takes


class Case(NamedTuple):
    """Tensors of a size, so many in flight, from the engine's node or the ``other`` one. Of 0 bytes: connecting from there."""

    place: str
    nbytes: int
    window: int = 1

    @property
    def title(self) -> str:
        """It in words."""
        return f"{format_nbytes(self.nbytes)}, {self.window} in flight" if self.nbytes else f"from the {self.place} node"


def _windows(nbytes: int) -> tuple[int, int]:
    return 1, min(_WINDOW, _MOST_NBYTES // nbytes)


#: What is measured in each case.
CASES: Mapping[Case, tuple[str, ...]] = {
    **{Case(place, nbytes, window): WAYS[place] for place in WAYS for nbytes in _SIZES for window in _windows(nbytes)},
    **{Case(place, 0): (_CONNECTING,) for place in WAYS},
}


def _speed(run: Measurement) -> float:
    return run.per_s


def _cpu_ms(run: Measurement) -> float:
    return run.cpu_ms


def _connect_ms(run: Measurement) -> float:
    return 1e3 / run.per_s


def _beside(
    place: str, ours: str, theirs: str, sizes: slice, limit: float, number: Number = _speed, *, at_least: bool = True
) -> Target:
    what = f"Ray, {place} node, {'in place' if ours == _IN_PLACE else 'one copy'}: "
    what += f"{'requests/s' if number is _speed else 'CPU'} of calls with {theirs}"
    cases = {case.title: case for nbytes in _SIZES[sizes] for case in CASES if case[:2] == (place, nbytes)}
    at = " to ".join(format_nbytes(nbytes) for nbytes in dict.fromkeys((_SIZES[sizes][0], _SIZES[sizes][-1])))
    return Target(what, at, limit, "x", ratios(ours, theirs, number, cases), at_least=at_least)


TARGETS = (
    _beside("same", _COPY, _NUMPY, slice(0, 1), 6),
    _beside("same", _COPY, _NUMPY, slice(1, 2), 8),
    _beside("same", _COPY, _NUMPY, slice(2, 3), 2),
    _beside("same", _COPY, _NUMPY, slice(3, 4), 1.15, _cpu_ms, at_least=False),
    _beside("same", _IN_PLACE, _NUMPY, slice(0, 3), 6),
    _beside("same", _IN_PLACE, _NUMPY, slice(3, 4), 10),
    _beside("other", _COPY, _TORCH, slice(0, 2), 0.9),
    _beside("other", _COPY, _TORCH, slice(2, 3), 1.2),
    _beside("other", _COPY, _TORCH, slice(3, 4), 3),
    _beside("other", _COPY, _TORCH, slice(0, 4), 1, _cpu_ms, at_least=False),
    _beside("other", _COPY, _NUMPY, slice(0, 2), 1.25, _cpu_ms, at_least=False),
    _beside("other", _COPY, _NUMPY, slice(2, 4), 1.15, _cpu_ms, at_least=False),
    Target(
        "Ray, connecting", "either node", 50, "ms",
        medians(_CONNECTING, _connect_ms, {f"{place} node": Case(place, 0) for place in WAYS}), at_least=False,
    ),
)  # fmt: skip

_COLUMNS = (
    median_column("requests/s", _speed, 1),
    spread_column("spread", _speed),
    median_column("CPU ms", _cpu_ms, 2),
    ratio_column("shmring is", _COPY, _speed),
    ratio_column("its CPU", _COPY, _cpu_ms),
    ratio_column("in place is", _IN_PLACE, _speed),
)


def report(measured: Measured, coverage: Coverage, versions: str) -> Findings:
    """Returns the report of a run: a table for each node, one of connecting, and the verdicts on the targets."""

    def of(place: str, *, connecting: bool = False) -> Measured:
        return {case: runs for case, runs in measured.items() if case.place == place and bool(case.nbytes) is not connecting}

    tables = [
        compare(f"Requests of the {place} node", ("tensor", "way"), cases, _COLUMNS, lambda case: str(case.title))
        for place in WAYS
        if (cases := of(place))
    ]
    if cases := {case: runs for place in WAYS for case, runs in of(place, connecting=True).items()}:
        columns = (median_column("ms", _connect_ms, 1), median_column("CPU ms", _cpu_ms, 1))
        tables.append(compare("Connecting", ("caller", "way"), cases, columns, lambda case: str(case.title)))
    notes = [
        f"A Ray cluster of two nodes on this machine, with object stores of {format_nbytes(STORE_NBYTES)}. An engine and a "
        "plain async actor run on one of them. A caller on each node asks both, with the same tensor. shmring: a tensor of the "
        "caller's, copied once. in place: a slot of the slab, of which one number is written. numpy, torch: the actor is "
        "called with a numpy array, which Ray does not pickle, or with the tensor. Handler and actor read one number, and "
        "answer with it.",
        "All of it runs at the same time, and the ways are measured in turn, in alternating order. Medians of the repetitions. "
        "CPU is that of all processes of the cluster, for each request: raylets, the head's, and all workers. shmring is, in "
        "place is: requests/s, divided by those of the row in the same repetition; its CPU likewise.",
        versions,
    ]
    verdicts = [target.judge(measured) for target in TARGETS]
    return Findings(mode="ray", tables=tables, notes=notes, targets=verdicts, coverage=coverage)


@command_line.benchmark("ray", repetitions="Of each case and way, in alternating order.")
@command_line.environment_option("ray", "Ray")
def ray_command(timing: Timing, environment: Path) -> Findings:
    """Engines in a Ray cluster, beside calls of an actor with a tensor; fails if a measured target is missed."""
    runs = Repetitions[Case, Measurement](CASES, timing.repetitions, lambda case: f"{case.place} node, {case.title}")
    command = [str(environment / "bin" / "python"), "-m", "bench.ray.cluster"]
    with command_line.measuring(runs.steps) as progress, Program(command, os.environ, _ORDER_LIMIT_S) as cluster:

        def measure(case: Case, way: str) -> Measurement:
            order = Order(case.place, way, case.nbytes, case.window, timing.warm_up_s, timing.timed_s)
            return cluster.order(order, Measurement)

        runs.measure(list(CASES), measure, progress)
    return report(runs.measured, runs.coverage(), command_line.versions(environment, "ray", "torch", "numpy"))
