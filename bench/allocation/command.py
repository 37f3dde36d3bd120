"""``python -m bench allocator``: how full the slab gets, and what placing a slot costs.

A fill depends on nothing but the seeds and the code: who stores it anew sees by ``git diff`` whether it is another one.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from typing import NamedTuple

from bench import columns
from bench.allocation.measures import FILLED, LEASED, OURS, Timed, first_failure
from bench.allocation.traces import LIFETIMES
from bench.columns import Column, compare, cross
from bench.command_line import benchmark
from bench.plan import Plan, Runs, Timing
from bench.repetitions import Measured
from bench.results import Table
from bench.targets import Known, Numbers, Target, medians

_SEEDS, _BATCHES = 300, 15
_SLAB_NBYTES, _LARGE_SLAB_NBYTES = 4 << 30, 32 << 30
_MANY_LIVE = 10_000


class Filled(NamedTuple):
    """How slots come and go, and the slab's size."""

    lifetime: str
    slab_nbytes: int

    @property
    def title(self) -> str:
        return f"{LIFETIMES[self.lifetime].title}, slab of {self.slab_nbytes >> 30} GiB"


class Live(NamedTuple):
    """How many slots are live where time is taken."""

    slots: int

    @property
    def title(self) -> str:
        return f"{self.slots:,} slots live"


class Fill(NamedTuple):
    """How full slabs got, as shares of them."""

    mean: float
    p1: float
    minimum: float


def measure(case: Filled | Live, name: str) -> Fill | float:
    """Returns a fill, or the microseconds of processor time of an operation."""
    if isinstance(case, Live):
        timed = Timed(case.slots)
        return statistics.median(timed.batch_us() for _ in range(_BATCHES))
    # Traces are as much longer as the slab is larger; as few large ones take as long as many small ones.
    seeds = max(10, min(_SEEDS, _SEEDS * _SLAB_NBYTES // case.slab_nbytes))
    place = FILLED[name].create, LIFETIMES[case.lifetime], case.slab_nbytes
    shares = sorted(first_failure(*place, seed) for seed in range(seeds))
    return Fill(sum(shares) / seeds, shares[seeds // 100], shares[0])


# -- as people read it -----------------------------------------------------------------------------------------------------

_TITLES = {name: subject.title for name, subject in FILLED.items()}
_FILL = Column("", lambda row: "{0.mean:.1%} / {0.p1:.1%} / {0.minimum:.1%}".format(*row.runs))


def _tables(measured: Measured) -> Iterator[Table]:
    fills, times = ({case: of for case, of in measured.items() if type(case) is kind} for kind in (Filled, Live))
    yield cross("fill at the first failure, mean / p1 / min", "who places", fills, _FILL, _TITLES)
    shown = [columns.median("median us", float, 2)]
    yield compare("processor time of an operation", ("slots live", "who places"), times, shown, _TITLES)


def _fill_target(slab_nbytes: int, part: str, percent: float, known: Known | None = None) -> Target:
    """Of the fill of a slab, whatever the order in which slots go."""

    def numbers(fills: Measured) -> Numbers:
        for lifetime in LIFETIMES:
            for run in fills.get(Filled(lifetime, slab_nbytes), {}).get(OURS, ()):
                yield LIFETIMES[lifetime].title, 100 * getattr(run, part)

    return Target(f"{part} fill at the first failure", f"slab of {slab_nbytes >> 30} GiB", percent, "%", numbers, known=known)


#: A slab of 4 GiB is too small beside its largest slots: no policy that leaves slots where they are fills it so.
FILL_TARGETS = (
    _fill_target(_SLAB_NBYTES, "mean", 90, Known(8, 80)),
    _fill_target(_SLAB_NBYTES, "minimum", 75, Known(8, 65)),
    _fill_target(_LARGE_SLAB_NBYTES, "mean", 90),
    _fill_target(_LARGE_SLAB_NBYTES, "minimum", 75),
)


def _cases() -> Iterator[tuple[Filled | Live, list[str]]]:
    for nbytes, lifetime in itertools.product((_SLAB_NBYTES, _LARGE_SLAB_NBYTES), LIFETIMES):
        yield Filled(lifetime, nbytes), [name for name in FILLED if nbytes == _SLAB_NBYTES or name not in LEASED]
    for slots in (10, 1_000, _MANY_LIVE):
        yield Live(slots), [OURS]


#: Of an operation.
COST_TARGET = Target(
    f"time per operation: {_TITLES[OURS]}", Live(_MANY_LIVE).title, 0.5, "us",
    medians(OURS, float, {"median": Live(_MANY_LIVE)}), at_least=False,
)  # fmt: skip

PLAN = Plan(
    mode="allocator",
    cases=dict(_cases()),
    timing=Timing(1),
    titles=_TITLES,
    tables=_tables,
    targets=[*FILL_TARGETS, COST_TARGET],
    notes=[
        "Fill: the bytes that were asked for, divided by the slab. Sizes are log-uniform, from 64 KB to 200 MB. In a trace, "
        "the slots that exist at the same time grow from half of the slab to more than it holds. Meanwhile its content is "
        "replaced four or five times, and a tenth of the slots is aborted at once.",
        "The limit is a slab whose content is moved together all the time. It does not reach 100 %, because the slot that did "
        "not fit was large.",
        "Leases: the ledger, and the lease books of frontends that ask in turn. A failure there is a slot that has to wait. "
        "Memory that a frontend has and does not use counts as empty.",
        "docs/decisions/0008-allocation-policy.md says how other policies, sizes and slabs did.",
    ],
)


@benchmark(PLAN)
def allocator_command(runs: Runs) -> None:
    """How full the slab gets, and what placing a slot costs."""
    runs.measure(measure)
