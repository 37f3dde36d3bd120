"""``python -m bench ray``: progress goes to stderr, tables go to stdout."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from bench import columns
from bench.columns import compare
from bench.command_line import benchmark, environment_of, versions
from bench.plan import Plan, Runs, Timing
from bench.programs import Program
from bench.ray import cluster
from bench.ray.cluster import STORE_NBYTES
from bench.repetitions import Measured
from bench.results import Table, format_nbytes
from bench.targets import Target, medians, ratios

_COPY, _IN_PLACE, _NUMPY, _TORCH, _CONNECTING = "shmring", "in place", "numpy", "torch", "connecting"
_ZERO_COPY, _STORE = "torch zero copy", "object store"
#: By the caller's node. A far client writes into memory of its own, so there is no second way.
WAYS: Mapping[str, tuple[str, ...]] = {
    "same": (_COPY, _IN_PLACE, _NUMPY, _TORCH, _ZERO_COPY),
    "other": (_COPY, _STORE, _NUMPY, _TORCH, _ZERO_COPY),
}

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
        return f"{format_nbytes(self.nbytes)}, {self.window} in flight" if self.nbytes else f"from the {self.place} node"


_WINDOWS = {nbytes: (1, min(_WINDOW, _MOST_NBYTES // nbytes)) for nbytes in _SIZES}
#: What is measured in each case.
CASES: Mapping[Case, tuple[str, ...]] = {
    **{Case(place, nbytes, window): WAYS[place] for place in WAYS for nbytes in _SIZES for window in _WINDOWS[nbytes]},
    **{Case(place, 0): (_CONNECTING,) for place in WAYS},
}


def _connect_ms(run: cluster.Measurement) -> float:
    return 1e3 / run.per_s


def _beside(
    place: str, ours: str, theirs: str, sizes: slice, limit: float, number: str = "per_s", *, at_least: bool = True
) -> Target:
    what = f"Ray, {place} node, {'in place' if ours == _IN_PLACE else 'one copy'}: "
    what += f"{'requests/s' if number == 'per_s' else 'CPU'} of calls with {theirs}"
    cases = {case.title: case for nbytes in _SIZES[sizes] for case in CASES if case[:2] == (place, nbytes)}
    at = " to ".join(format_nbytes(nbytes) for nbytes in dict.fromkeys((_SIZES[sizes][0], _SIZES[sizes][-1])))
    return Target(what, at, limit, "x", ratios(ours, theirs, number, cases), at_least=at_least)


TARGETS = (
    _beside("same", _COPY, _NUMPY, slice(0, 1), 6),
    _beside("same", _COPY, _NUMPY, slice(1, 2), 8),
    _beside("same", _COPY, _NUMPY, slice(2, 3), 2),
    _beside("same", _COPY, _NUMPY, slice(3, 4), 1.15, "cpu_ms", at_least=False),
    _beside("same", _IN_PLACE, _NUMPY, slice(0, 3), 6),
    _beside("same", _IN_PLACE, _NUMPY, slice(3, 4), 10),
    _beside("other", _COPY, _STORE, slice(0, 4), 1),
    _beside("other", _COPY, _STORE, slice(1, 4), 0.35, "cpu_ms", at_least=False),
    _beside("other", _COPY, _NUMPY, slice(0, 4), 1, "cpu_ms", at_least=False),
    Target(
        "Ray, connecting", "either node", 50, "ms",
        medians(_CONNECTING, _connect_ms, {f"{place} node": Case(place, 0) for place in WAYS}), at_least=False,
    ),
)  # fmt: skip

_COLUMNS = (
    columns.median("requests/s", "per_s", 1),
    columns.spread("spread", "per_s"),
    columns.median("CPU ms", "cpu_ms", 2),
    columns.ratio("shmring is", _COPY, "per_s"),
    columns.ratio("its CPU", _COPY, "cpu_ms"),
    columns.ratio("in place is", _IN_PLACE, "per_s"),
)


def _tables(measured: Measured) -> Iterator[Table]:
    def of(place: str, *, connecting: bool = False) -> Measured:
        return {case: runs for case, runs in measured.items() if case.place == place and bool(case.nbytes) is not connecting}

    for place in WAYS:
        if cases := of(place):
            yield compare(f"Requests of the {place} node", ("tensor", "way"), cases, _COLUMNS)
    if cases := {case: runs for place in WAYS for case, runs in of(place, connecting=True).items()}:
        shown = columns.median("ms", _connect_ms, 1), columns.median("CPU ms", "cpu_ms", 1)
        yield compare("Connecting", ("caller", "way"), cases, shown)


PLAN = Plan(
    mode="ray",
    cases=CASES,
    timing=Timing(7, 0.4, 0.05),
    tables=_tables,
    targets=TARGETS,
    title=lambda case: f"{case.place} node, {case.title}",
    notes=[
        f"A Ray cluster of two nodes on this machine, with object stores of {format_nbytes(STORE_NBYTES)}. An engine and a "
        "plain async actor run on one of them. A caller on each node asks both, with the same tensor. shmring: a tensor of the "
        "caller's, copied once; from the other node, over a connection. object store: an engine that does not listen. in place:"
        " a slot of the slab, of which one number is written. numpy, torch: the actor is called with a numpy array, which Ray "
        "does not pickle, or with the tensor. torch zero copy: with the tensor, by a caller with "
        "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS=1. Handler and actor read one number, and answer with it.",
        "All of it runs at the same time. CPU is that of all processes of the cluster, for each request: raylets, the head's, "
        "and all workers.",
    ],
)


@benchmark(PLAN)
def ray_command(runs: Runs) -> None:
    """Engines in a Ray cluster, beside calls of an actor with a tensor."""
    environment, timing = environment_of("ray", "Ray"), runs.plan.timing
    command = [str(environment / "bin" / "python"), "-m", cluster.__name__]
    with Program(command, os.environ, _ORDER_LIMIT_S) as nodes:

        def measure(case: Case, way: str) -> cluster.Measurement:
            order = cluster.Order(case.place, way, case.nbytes, case.window, timing.warm_up_s, timing.timed_s)
            return nodes.order(order, cluster.Measurement)

        runs.measure(measure)
    runs.notes.append(versions(environment, "ray", "torch", "numpy"))
