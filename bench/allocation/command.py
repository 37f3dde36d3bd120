"""``python -m bench allocator``: a run, and what it has found as tables beside the targets and beside the stored run.

A fill depends on nothing but the seeds and the code, so it may not be less than the stored run says, without any tolerance.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from bench import columns
from bench.allocation.measures import FILLED, LEASED, OURS, TIMED, Timed, first_failure
from bench.allocation.traces import LIFETIMES
from bench.columns import Column, compare, cross
from bench.command_line import benchmark
from bench.machine import ROOT
from bench.repetitions import Measured, Repetitions
from bench.results import Findings
from bench.targets import Known, Numbers, Target, medians

_MANY_LIVE = 10_000
_SLAB_NBYTES, _LARGE_SLAB_NBYTES = 4 << 30, 32 << 30

#: The run that the others are held against.
STORED = ROOT / "bench" / "results" / "allocator.json"

_TITLES = {name: subject.title for name, subject in (FILLED | TIMED).items()}


class Plan(NamedTuple):
    """What to measure: traces of each kind, in slabs of which sizes; how many slots are live where time is taken; how often."""

    seeds: int = 300
    slabs: Sequence[int] = (_SLAB_NBYTES, _LARGE_SLAB_NBYTES)
    live: Sequence[int] = (10, 1_000, _MANY_LIVE)
    batches: int = 15

    def fills(self) -> dict[Filled, list[str]]:
        """Returns who fills which slabs, in which order slots go."""
        return {
            Filled(lifetime, nbytes): [name for name in FILLED if nbytes == _SLAB_NBYTES or name not in LEASED]
            for nbytes, lifetime in itertools.product(self.slabs, LIFETIMES)
        }


PLAN = Plan()


class Filled(NamedTuple):
    """How slots come and go, and the slab's size."""

    lifetime: str
    slab_nbytes: int

    @property
    def title(self) -> str:
        return f"{LIFETIMES[self.lifetime].title}, slab of {self.slab_nbytes >> 30} GiB"


class Fill(msgspec.Struct, frozen=True):
    """How full slabs got, as shares of them, in so many traces."""

    mean: float
    p1: float
    minimum: float
    samples: int


class Stored(msgspec.Struct, frozen=True):
    """A fill as it is stored, for later runs to be compared with."""

    subject: str
    filled: Filled
    fill: Fill


def measure(plan: Plan, stored: Sequence[Stored] = ()) -> Findings:
    """Measures what a plan says, and compares it with a stored run."""
    fills = Repetitions[Filled, Fill](plan.fills(), 1)

    def fill(filled: Filled, name: str) -> Fill:
        # Traces are as much longer as the slab is larger; as few large ones take as long as many small ones.
        seeds = max(10, min(plan.seeds, plan.seeds * _SLAB_NBYTES // filled.slab_nbytes))
        place = FILLED[name], LIFETIMES[filled.lifetime], filled.slab_nbytes
        shares = sorted(first_failure(*place, seed) for seed in range(seeds))
        return Fill(sum(shares) / seeds, shares[seeds // 100], shares[0], seeds)

    fills.measure(list(fills.subjects), fill, _TITLES)
    costs = Repetitions[int, float](dict.fromkeys(plan.live, tuple(TIMED)), plan.batches, _live)
    for live in plan.live:
        timed = {name: Timed(subject, live) for name, subject in TIMED.items()}

        def cost(live: int, name: str, timed: dict[str, Timed] = timed) -> float:
            return timed[name].batch_us()

        costs.measure([live], cost, _TITLES)
    return Findings(
        mode="allocator",
        tables=[
            cross("fill at the first failure, mean / p1 / min", "who places", fills.measured, _FILL, _TITLES),
            compare("processor time of an operation", ("slots live", "who places"), costs.measured, _COST, _TITLES, _live),
        ],
        notes=_NOTES,
        targets=[
            *(target.judge(fills.measured) for target in FILL_TARGETS),
            *(target.judge(costs.measured) for target in COST_TARGETS),
            *(target.judge(fills.measured) for target in beside_stored(stored)),
        ],
        results=[Stored(name, filled, run) for filled, of in fills.measured.items() for name, (run,) in of.items()],
        coverage=fills.coverage() + costs.coverage(),
    )


# -- as people read it -----------------------------------------------------------------------------------------------------


def _live(live: int) -> str:
    return f"{live:,}"


_FILL = Column("", lambda row: "{0.mean:.1%} / {0.p1:.1%} / {0.minimum:.1%}".format(*row.runs))
_COST = (columns.median("median us", float, 2), columns.spread("least, most", float))


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


def beside_stored(stored: Sequence[Stored]) -> Iterator[Target]:
    """Yields that each slab gets as full as in a stored run: a target of the means, and one of the minimums.

    Only the same traces have the same mean. A run of fewer has no lower minimum, since its traces are the first of the others.
    """

    def more(fills: Measured, part: str) -> Numbers:
        for before in stored:
            for run in fills.get(before.filled, {}).get(before.subject, ()):
                if run.samples == before.fill.samples or (part == "minimum" and run.samples < before.fill.samples):
                    difference = getattr(run, part) - getattr(before.fill, part)
                    yield f"{_TITLES[before.subject]}, {before.filled.title}", 100 * difference

    for part in ("mean", "minimum"):
        what = f"{part} fill, beside the stored run"
        yield Target(what, "all that fill", 0, "% of the slab", functools.partial(more, part=part))


def _operation(name: str, known: Known | None = None) -> Target:
    what, at = f"time per operation: {_TITLES[name]}", f"{_MANY_LIVE:,} slots live"
    return Target(what, at, 0.5, "us", medians(name, float, {"median": _MANY_LIVE}), at_least=False, known=known)


#: What an operation of the lease book takes, of which one of the allocator is a part.
COST_TARGETS = (_operation(OURS), _operation("book", Known(8, 0.6)))

_NOTES = [
    "Fill: the bytes that were asked for, divided by the slab. Sizes are log-uniform, from 64 KB to 200 MB. In a trace, the "
    "slots that exist at the same time grow from half of the slab to more than it holds. Meanwhile its content is replaced "
    "four or five times, and a tenth of the slots is aborted at once.",
    "The limit is a slab whose content is moved together all the time. It does not reach 100 %, because the slot that did not "
    "fit was large.",
    "Leases: the ledger, and the lease books of frontends that ask in turn. A failure there is a slot that has to wait. Memory "
    "that a frontend has and does not use counts as empty.",
    "docs/decisions/0008-allocation-policy.md says how other policies, sizes and slabs did.",
]


@benchmark("allocator")
def allocator_command() -> Findings:
    """How full the slab gets, also beside the stored run (bench/results/allocator.json), and what placing a slot costs."""
    stored = msgspec.json.decode(STORED.read_bytes(), type=Findings).results
    return measure(PLAN, msgspec.convert(stored, list[Stored]))
