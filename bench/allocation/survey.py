"""One run of ``bench allocator``: everything measured, and laid out as tables beside the targets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import msgspec

from bench.allocation import bandwidth, speed
from bench.allocation.bandwidth import Bandwidth
from bench.allocation.fill import Fill, evicting, fills
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
LOG_UNIFORM = "log-uniform"
#: The fill and the time that an allocator is to have; the share of the slab and microseconds.
MEAN_FILL, MINIMUM_FILL, OPERATION_US = 0.90, 0.75, 0.5
MANY_LIVE = 10_000

_BY_SLAB = [OURS, "first-fit", LIMIT]  # what is measured at several sizes of the slab
_NOT_EVICTING = "leases-3"  # there a place that one frontend has freed may not be the next one's

FILLED: Mapping[str, Contender] = {
    **POLICIES,
    "leases-1": Contender("shmring, leases of 1 frontend", lambda start, length, largest: Leased(length, 1)),
    "leases-3": Contender("shmring, leases of 3 frontends", lambda start, length, largest: Leased(length, 3)),
    LIMIT: Contender("limit: moved together", lambda start, length, largest: Compacting(start, length)),
}
"""What slabs are filled with, by name."""


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
                yield LOG_UNIFORM, slab_nbytes, seeds, name

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


_Result: TypeAlias = Filled | Evicted | Cost | Bandwidth


def steps(plan: Plan) -> int:
    """Returns how often :func:`run` reports progress."""
    return len(list(plan.fills())) + len(FILLED) - 1 + len(plan.live) * len(SUBJECTS) + len(plan.in_flight)


def run(plan: Plan, progress: Callable[[str], None]) -> Findings:
    """Measures what a plan says, with a line before each step."""
    filled = []
    for sizes, slab_nbytes, seeds, name in plan.fills():
        progress(f"fill: {SIZES[sizes].title}, {FILLED[name].title}, a slab of {_size(slab_nbytes)}")
        for lifetime in LIFETIMES:
            fill = fills(FILLED[name], SIZES[sizes], LIFETIMES[lifetime], slab_nbytes, range(seeds))
            filled.append(Filled(name, sizes, lifetime, slab_nbytes, fill))
    evicted = []
    for name, contender in FILLED.items():
        if name != _NOT_EVICTING:
            progress(f"fill by Mooncake's method: {contender.title}")
            evicted.append(Evicted(name, evicting(contender, plan.placements, seed=1)))
    costs = [cost for live in plan.live for cost in speed.costs(list(SUBJECTS), live, plan.batches, progress)]
    copied = []
    for in_flight in plan.in_flight:
        progress(f"copies with {in_flight} in flight")
        for nbytes in plan.copied_at_light_load(in_flight):
            copied += bandwidth.bandwidths(
                list(POLICIES), nbytes, in_flight, plan.copy_slab_nbytes, plan.repetitions, plan.copy_s
            )
    results: list[_Result] = [*filled, *evicted, *costs, *copied]
    return Findings(
        mode="allocator",
        machine=Machine.here(),
        tables=list(_tables(plan, filled, evicted, costs, copied)),
        notes=_notes(plan),
        results=results,
        targets=list(_targets(plan, filled, costs)),
        coverage=_coverage(results),
    )


def _coverage(results: Sequence[_Result]) -> Coverage:
    """All of the plan: a run that was ended before stores nothing."""
    cases: dict[str, list[str]] = {}
    for result in results:
        match result:
            case Filled(policy, sizes, lifetime, slab_nbytes):
                title = f"fill: {SIZES[sizes].title}, {LIFETIMES[lifetime].title}, slab of {_size(slab_nbytes)}"
            case Evicted(policy):
                title = "fill: by Mooncake's method"
            case Cost(policy, live):
                title = f"time: {live:,} slots live"
            case Bandwidth(policy, nbytes, in_flight):
                title = f"copies of {_size(nbytes)}, {in_flight} in flight"
        cases.setdefault(title, []).append(policy)
    return Coverage([Planned(case, policies, 1) for case, policies in cases.items()], [])


# -- how it is shown -----------------------------------------------------------------------------------------------------


def _tables(
    plan: Plan, filled: Sequence[Filled], evicted: Sequence[Evicted], costs: Sequence[Cost], copied: Sequence[Bandwidth]
) -> Iterator[Table]:
    lifetimes = {name: lifetime.title for name, lifetime in LIFETIMES.items()}
    for sizes in SIZES:
        yield Table.crossed(
            f"fill at the first failure, mean / p1 / min: {SIZES[sizes].title}, slab of {_size(plan.slab_nbytes)}, "
            f"{plan.seeds} traces each",
            "policy",
            (
                (FILLED[result.policy].title, lifetimes[result.lifetime], str(result.fill))
                for result in filled
                if (result.sizes, result.slab_nbytes) == (sizes, plan.slab_nbytes)
            ),
        )
    yield Table.crossed(
        f"fill at the first failure by the size of the slab, mean / p1 / min: {SIZES[LOG_UNIFORM].title}",
        "slab",
        (
            (f"{_size(result.slab_nbytes)}, {FILLED[result.policy].title}", lifetimes[result.lifetime], str(result.fill))
            for result in sorted(filled, key=lambda result: result.slab_nbytes)
            if result.sizes == LOG_UNIFORM and result.policy in _BY_SLAB
        ),
    )
    yield Table.crossed(
        "fill by Mooncake's method (2 GiB, 1 KiB..64 MiB uniform, random ones thrown out), mean / p1 / min",
        "policy",
        ((FILLED[result.policy].title, "fill", str(result.fill)) for result in evicted),
    )
    yield Table.crossed(
        "microseconds of processor time per operation, median (minimum), by slots live",
        "policy",
        ((SUBJECTS[cost.subject].title, f"{cost.live:,}", f"{cost.median_us:.2f} ({cost.minimum_us:.2f})") for cost in costs),
    )
    for in_flight in plan.in_flight:
        yield Table.crossed(
            f"copies into the places of a policy, {in_flight} in flight, GB/s (memory touched in all)",
            "policy",
            (
                (POLICIES[copy.policy].title, _size(copy.nbytes), f"{copy.gb_per_s:.1f} ({_size(copy.touched_nbytes)})")
                for copy in copied
                if copy.in_flight == in_flight
            ),
        )


def _targets(plan: Plan, filled: Sequence[Filled], costs: Sequence[Cost]) -> Iterator[Verdict]:
    slabs = (plan.slab_nbytes, max(result.slab_nbytes for result in filled))
    for result in filled:
        if (result.policy, result.sizes) != (OURS, LOG_UNIFORM) or result.slab_nbytes not in slabs:
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
