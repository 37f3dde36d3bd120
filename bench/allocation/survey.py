"""One run of ``bench allocator``: everything measured, and laid out as tables beside the targets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from bench.allocation import bandwidth, speed
from bench.allocation.bandwidth import Bandwidth
from bench.allocation.fill import Fill, PolicyFactory, evicting, fills
from bench.allocation.leased import Leased
from bench.allocation.policies import POLICIES, Compacting, Contender
from bench.allocation.speed import SUBJECTS, Cost
from bench.allocation.traces import LIFETIMES, SIZES
from bench.coverage import Coverage, Planned
from bench.machine import Machine
from bench.results import Findings, Table, Verdict

__all__ = ["FILLED", "Plan", "run", "steps"]

OURS = "shmring"
LIMIT = "limit"
#: The fill and the time that an allocator is to have; the share of the slab and microseconds.
MEAN_FILL, MINIMUM_FILL, OPERATION_US = 0.90, 0.75, 5.0
MANY_LIVE = 10_000

_BY_SLAB = [OURS, "first-fit", LIMIT]  # what is measured at several sizes of the slab
_NOT_EVICTING = "leases-3"  # there a place that one frontend has freed may not be the next one's
_EVICTING = "fill: by Mooncake's method"

_FIRST = 1  # the first leasable block; the header is before it


def _factory(contender: Contender) -> PolicyFactory:
    return lambda length, largest: contender.create(_FIRST, length, largest)


FILLED: Mapping[str, tuple[str, PolicyFactory]] = {
    **{name: (contender.title, _factory(contender)) for name, contender in POLICIES.items()},
    "leases-1": ("shmring, leases of 1 frontend", lambda length, largest: Leased(length, 1)),
    "leases-3": ("shmring, leases of 3 frontends", lambda length, largest: Leased(length, 3)),
    LIMIT: ("limit: moved together", lambda length, largest: Compacting(_FIRST, length)),
}
"""What slabs are filled with, by name: a title and how one is made."""


# -- what is measured ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure.

    Attributes:
        seeds: traces of each kind.
        slab_nbytes: of the slab in which policies are compared.
        slab_sizes: in which shmring's own is looked at, too; in bytes.
        placements: by Mooncake's method.
        live: numbers of live slots at which time is measured.
        batches: of each timed subject.
        copied_sizes: of copies, in bytes.
        in_flight: slots live at a time while copying.
        copy_slab_nbytes: of the memory copied into; several times the last-level cache.
        repetitions, copy_s: of each copying cell.
    """

    seeds: int = 300
    slab_nbytes: int = 4 << 30
    slab_sizes: Sequence[int] = (1 << 30, 2 << 30, 4 << 30, 8 << 30, 16 << 30, 32 << 30)
    placements: int = 200_000
    live: Sequence[int] = (10, 1_000, MANY_LIVE)
    batches: int = 15
    copied_sizes: Sequence[int] = (64 << 10, 1 << 20, 8 << 20, 64 << 20)
    in_flight: Sequence[int] = (1, 4, 16)
    copy_slab_nbytes: int = 1 << 30
    repetitions: int = 5
    copy_s: float = 0.1

    @classmethod
    def quick(cls) -> Plan:
        """The same in half a minute of processor time, with larger spreads."""
        return cls(
            seeds=15,
            slab_sizes=(1 << 30, 4 << 30, 16 << 30),
            placements=10_000,
            live=(10, MANY_LIVE),
            batches=5,
            copied_sizes=(64 << 10, 1 << 20, 8 << 20),
            in_flight=(4,),
            copy_slab_nbytes=256 << 20,
            repetitions=3,
            copy_s=0.03,
        )

    def fills(self) -> Iterator[tuple[str, int, int, str]]:
        """Yields the sizes of a trace, the slab's, the number of traces, and what fills it; each once."""
        for sizes in SIZES:
            for name in FILLED:
                yield sizes, self.slab_nbytes, self.seeds, name
        for slab_nbytes in self.slab_sizes:
            # Traces are as much longer as the slab is larger; as few large ones take as long as many small ones.
            seeds = max(10, min(self.seeds, self.seeds * self.slab_nbytes // slab_nbytes))
            for name in _BY_SLAB if slab_nbytes != self.slab_nbytes else ():
                yield "log-uniform", slab_nbytes, seeds, name

    def copied_at_light_load(self, in_flight: int) -> list[int]:
        """The sizes of which so many take a quarter of the memory at most, so that they fit however a policy rounds them."""
        return [nbytes for nbytes in self.copied_sizes if in_flight * nbytes <= self.copy_slab_nbytes // 4]


class Filled(msgspec.Struct, frozen=True, tag_field="kind", tag="filled"):
    """How full a slab gets with a policy, until the first slot that finds no place."""

    policy: str
    sizes: str
    lifetime: str
    slab_nbytes: int
    fill: Fill


class Evicted(msgspec.Struct, frozen=True, tag_field="kind", tag="evicting"):
    """How full a slab stays with a policy by Mooncake's method."""

    policy: str
    fill: Fill


def steps(plan: Plan) -> int:
    """Returns how often :func:`run` reports progress."""
    return len(list(plan.fills())) + len(FILLED) - 1 + len(plan.live) * len(SUBJECTS) + len(plan.in_flight)


def _planned(plan: Plan) -> list[Planned]:
    """Returns the cases of a plan; in each, a policy is measured once."""
    cases: dict[str, list[str]] = {}
    for sizes, slab_nbytes, _, name in plan.fills():
        for lifetime in LIFETIMES:
            cases.setdefault(_fill_case(sizes, lifetime, slab_nbytes), []).append(name)
    cases[_EVICTING] = [name for name in FILLED if name != _NOT_EVICTING]
    cases |= {_cost_case(live): list(SUBJECTS) for live in plan.live}
    for in_flight in plan.in_flight:
        cases |= {_copy_case(nbytes, in_flight): list(POLICIES) for nbytes in plan.copied_at_light_load(in_flight)}
    return [Planned(case, names, 1) for case, names in cases.items()]


def _key(result: Filled | Evicted | Cost | Bandwidth) -> tuple[str, str]:
    """The case of a result, and what was measured in it."""
    match result:
        case Filled():
            return _fill_case(result.sizes, result.lifetime, result.slab_nbytes), result.policy
        case Evicted():
            return _EVICTING, result.policy
        case Cost():
            return _cost_case(result.live), result.subject
        case Bandwidth():
            return _copy_case(result.nbytes, result.in_flight), result.policy


def _fill_case(sizes: str, lifetime: str, slab_nbytes: int) -> str:
    return f"fill: {SIZES[sizes].title}, {LIFETIMES[lifetime].title}, slab of {_size(slab_nbytes)}"


def _cost_case(live: int) -> str:
    return f"time: {live:,} slots live"


def _copy_case(nbytes: int, in_flight: int) -> str:
    return f"copies of {_size(nbytes)}, {in_flight} in flight"


def run(plan: Plan, progress: Callable[[str], None]) -> Findings:
    """Measures what a plan says.

    Args:
        plan: what to measure.
        progress: called with a line before each step; :func:`steps` says how many there are.
    """
    filled = []
    for sizes, slab_nbytes, seeds, name in plan.fills():
        title, create = FILLED[name]
        progress(f"fill: {SIZES[sizes].title}, {title}, a slab of {_size(slab_nbytes)}")
        for lifetime in LIFETIMES:
            fill = fills(create, SIZES[sizes], LIFETIMES[lifetime], slab_nbytes, range(seeds))
            filled.append(Filled(name, sizes, lifetime, slab_nbytes, fill))
    evicted = []
    for name, (title, create) in FILLED.items():
        if name != _NOT_EVICTING:
            progress(f"fill by Mooncake's method: {title}")
            evicted.append(Evicted(name, evicting(create, plan.placements, seed=1)))
    costs = [cost for live in plan.live for cost in speed.costs(list(SUBJECTS), live, plan.batches, progress)]
    copied = []
    for in_flight in plan.in_flight:
        progress(f"copies with {in_flight} in flight")
        for nbytes in plan.copied_at_light_load(in_flight):
            copied += bandwidth.bandwidths(
                list(POLICIES), nbytes, in_flight, plan.copy_slab_nbytes, plan.repetitions, plan.copy_s
            )
    results: list[Filled | Evicted | Cost | Bandwidth] = [*filled, *evicted, *costs, *copied]
    return Findings(
        mode="allocator",
        machine=Machine.here(),
        tables=[
            *(_fill_table(plan, filled, sizes) for sizes in SIZES),
            _slabs_table(filled),
            _evicted_table(evicted),
            _costs_table(plan, costs),
            *(_bandwidth_table(copied, in_flight) for in_flight in plan.in_flight),
        ],
        notes=_notes(plan),
        results=results,
        targets=list(_targets(plan, filled, costs)),
        coverage=Coverage.of(_planned(plan), dict.fromkeys(map(_key, results), 1)),
    )


# -- how it is shown -----------------------------------------------------------------------------------------------------


def _targets(plan: Plan, filled: Sequence[Filled], costs: Sequence[Cost]) -> Iterator[Verdict]:
    slabs = (plan.slab_nbytes, max(result.slab_nbytes for result in filled))
    for result in filled:
        if (result.policy, result.sizes) != (OURS, "log-uniform") or result.slab_nbytes not in slabs:
            continue
        at = f"log-uniform, {LIFETIMES[result.lifetime].title}, slab of {_size(result.slab_nbytes)}"
        for part, share, target in (("mean", result.fill.mean, MEAN_FILL), ("minimum", result.fill.minimum, MINIMUM_FILL)):
            what = f"{part} fill at the first failure"
            yield Verdict(what, at, f">= {target:.0%}", f"{share:.1%}", share >= target)
    for cost in costs:
        if cost.subject in (OURS, "book") and cost.live == MANY_LIVE:
            at, met = f"{MANY_LIVE:,} slots live", cost.median_us <= OPERATION_US
            what = f"time per operation: {SUBJECTS[cost.subject].title}"
            yield Verdict(what, at, f"<= {OPERATION_US:g} us", f"{cost.median_us:.2f} us", met)


def _fill_table(plan: Plan, filled: Sequence[Filled], sizes: str) -> Table:
    measured = [result for result in filled if (result.sizes, result.slab_nbytes) == (sizes, plan.slab_nbytes)]
    return Table(
        f"fill at the first failure, mean / p1 / min: {SIZES[sizes].title}, slab of {_size(plan.slab_nbytes)}, "
        f"{plan.seeds} traces each",
        ["policy", *(lifetime.title for lifetime in LIFETIMES.values())],
        [[title, *(str(result.fill) for result in measured if result.policy == name)] for name, (title, _) in FILLED.items()],
    )


def _slabs_table(filled: Sequence[Filled]) -> Table:
    rows: dict[tuple[int, str], list[str]] = {}
    for result in filled:
        if result.sizes == "log-uniform" and result.policy in _BY_SLAB:
            rows.setdefault((result.slab_nbytes, result.policy), []).append(str(result.fill))
    return Table(
        f"fill at the first failure by the size of the slab, mean / p1 / min: {SIZES['log-uniform'].title}",
        ["slab", *(lifetime.title for lifetime in LIFETIMES.values())],
        [
            [f"{_size(slab_nbytes)}, {FILLED[name][0]}", *rows[slab_nbytes, name]]
            for slab_nbytes, name in sorted(rows, key=lambda row: row[0])
        ],
    )


def _evicted_table(evicted: Sequence[Evicted]) -> Table:
    return Table(
        "fill by Mooncake's method (2 GiB, 1 KiB..64 MiB uniform, random ones thrown out), mean / p1 / min",
        ["policy", "fill"],
        [[FILLED[result.policy][0], str(result.fill)] for result in evicted],
    )


def _costs_table(plan: Plan, costs: Sequence[Cost]) -> Table:
    rows = []
    for name, contender in SUBJECTS.items():
        measured = [cost for cost in costs if cost.subject == name]
        rows.append([contender.title, *(f"{result.median_us:.2f} ({result.minimum_us:.2f})" for result in measured)])
    return Table(
        "microseconds of processor time per operation, median (minimum), by slots live",
        ["policy", *(f"{live:,}" for live in plan.live)],
        rows,
    )


def _bandwidth_table(copied: Sequence[Bandwidth], in_flight: int) -> Table:
    copied = [result for result in copied if result.in_flight == in_flight]
    rows = []
    for name, contender in POLICIES.items():
        measured = [result for result in copied if result.policy == name]
        rows.append([contender.title, *(f"{result.gb_per_s:.1f} ({_size(result.touched_nbytes)})" for result in measured)])
    return Table(
        f"copies into the places of a policy, {in_flight} in flight, GB/s (memory touched in all)",
        ["policy", *map(_size, dict.fromkeys(result.nbytes for result in copied))],
        rows,
    )


def _notes(plan: Plan) -> list[str]:
    return [
        "Fill is what was asked for over the slab. In a trace the slots that are there at once grow from half of the slab to "
        "more than it holds while its content comes and goes four or five times; a tenth of the slots is aborted at once.",
        "The limit is a slab whose content is moved together all the time: what is missing there to 100 % is that the slot "
        "that did not fit was large.",
        "Leases: the ledger and the lease books of frontends that ask in turn; a failure there is a slot that has to be "
        "waited for, and what a frontend holds without using it counts as empty.",
        "Mooncake publishes 84.2 % mean, 71.3 % p1 and 54.4 % min (of a million) for its allocator by its method.",
        "The other policies are written in Python for their behaviour; their time is not that of their originals.",
        f"Copies go into {_size(plan.copy_slab_nbytes)} of touched shared memory, from a buffer of the slot's size, "
        "and what is in flight is a quarter of it at most. Under a policy its own time is in them, which tells at 64 KiB.",
    ]


def _size(nbytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}"
    return f"{nbytes} B"
