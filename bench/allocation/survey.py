"""One run of ``bench allocator``: everything measured, and laid out as tables beside the targets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from bench.allocation import bandwidth, speed
from bench.allocation.bandwidth import Bandwidth, Extremes
from bench.allocation.fill import Fill, PolicyFactory, evicting, fills
from bench.allocation.leased import Leased
from bench.allocation.policies import POLICIES, Compacting, Contender
from bench.allocation.speed import SUBJECTS, Cost
from bench.allocation.traces import LIFETIMES, SIZES
from bench.coverage import Coverage, Planned
from bench.machine import Machine
from bench.results import Findings, Table, Verdict

__all__ = ["FILLED", "Plan", "coverage", "planned", "run", "steps"]

OURS = "shmring"
LIMIT = "limit"
#: The fill and the time that an allocator is to have; the share of the slab and microseconds.
MEAN_FILL, MINIMUM_FILL, OPERATION_US = 0.90, 0.75, 5.0
MANY_LIVE = 10_000

_BY_SLAB = [OURS, "first-fit", LIMIT]  # what is measured at several sizes of the slab
_NOT_EVICTING = "leases-3"  # there a place that one frontend has freed may not be the next one's
_EVICTING = "fill: by Mooncake's method"
_EXTREMES = "one slot, and around the slab"

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

    def copied_at_light_load(self, in_flight: int) -> list[int]:
        """The sizes of which so many take a quarter of the memory at most, so that they fit however a policy rounds them."""
        return [nbytes for nbytes in self.copied_sizes if in_flight * nbytes <= self.copy_slab_nbytes // 4]

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


class _Filled(msgspec.Struct, frozen=True):
    policy: str
    sizes: str
    lifetime: str
    slab_nbytes: int
    fill: Fill


class _Evicting(msgspec.Struct, frozen=True):
    policy: str
    fill: Fill


def steps(plan: Plan) -> int:
    """Returns how often :func:`run` reports progress."""
    fill = len(SIZES) * len(FILLED) + len(plan.slab_sizes) + len(FILLED)
    return fill + len(plan.live) * len(SUBJECTS) + 1 + len(plan.in_flight)


def planned(plan: Plan) -> list[Planned]:
    """Returns the cases of a plan; in each, a policy is measured once."""
    fills_ = [(sizes, plan.slab_nbytes, list(FILLED)) for sizes in SIZES]
    fills_ += [("log-uniform", slab_nbytes, _BY_SLAB) for slab_nbytes in plan.slab_sizes]
    cases = [(_fill_case(sizes, lifetime, slab), names) for sizes, slab, names in fills_ for lifetime in LIFETIMES]
    cases.append((_EVICTING, [name for name in FILLED if name != _NOT_EVICTING]))
    cases += [(_cost_case(live), list(SUBJECTS)) for live in plan.live]
    cases += [(_copy_case(nbytes, 0), [_EXTREMES]) for nbytes in plan.copied_sizes]
    for in_flight in plan.in_flight:
        cases += [(_copy_case(nbytes, in_flight), list(POLICIES)) for nbytes in plan.copied_at_light_load(in_flight)]
    return [Planned(case, names, 1) for case, names in dict(cases).items()]


def coverage(cases: Sequence[Planned], results: Sequence[Mapping[str, Any]]) -> Coverage:
    """Returns what there is of planned cases.

    Args:
        cases: of a plan.
        results: as they are stored.
    """
    return Coverage.of(cases, dict.fromkeys(map(_key, results), 1))


def _key(result: Mapping[str, Any]) -> tuple[str, str]:
    match result["kind"]:
        case "filled":
            return _fill_case(result["sizes"], result["lifetime"], result["slab_nbytes"]), result["policy"]
        case "evicting":
            return _EVICTING, result["policy"]
        case "cost":
            return _cost_case(result["live"]), result["subject"]
        case "extremes":
            return _copy_case(result["nbytes"], 0), _EXTREMES
        case kind:
            assert kind == "bandwidth"
            return _copy_case(result["nbytes"], result["in_flight"]), result["policy"]


def _fill_case(sizes: str, lifetime: str, slab_nbytes: int) -> str:
    return f"fill: {SIZES[sizes].title}, {LIFETIMES[lifetime].title}, slab of {_gib(slab_nbytes)}"


def _cost_case(live: int) -> str:
    return f"time: {live:,} slots live"


def _copy_case(nbytes: int, in_flight: int) -> str:
    return f"copies of {_size(nbytes)}{f', {in_flight} in flight' * bool(in_flight)}"


def run(plan: Plan, progress: Callable[[str], None]) -> Findings:
    """Measures what a plan says.

    Args:
        plan: what to measure.
        progress: called with a line before each step; :func:`steps` says how many there are.
    """
    filled = _fill(plan, progress)
    by_slab = _fill_by_slab(plan, progress)
    evicted = _evict(plan, progress)
    costs = [cost for live in plan.live for cost in speed.costs(list(SUBJECTS), live, plan.batches, progress)]
    progress("copies into one slot, and around the slab")
    ends = bandwidth.extremes(plan.copied_sizes, plan.copy_slab_nbytes, plan.repetitions, plan.copy_s)
    copied = []
    for in_flight in plan.in_flight:
        progress(f"copies with {in_flight} in flight")
        for nbytes in plan.copied_at_light_load(in_flight):
            copied += bandwidth.bandwidths(
                list(POLICIES), nbytes, in_flight, plan.copy_slab_nbytes, plan.repetitions, plan.copy_s
            )
    targets = list(_targets(filled, by_slab, costs))
    structs: list[msgspec.Struct] = [*filled, *by_slab, *evicted, *costs, *ends, *copied]
    raw = [_raw(struct) for struct in structs]
    return Findings(
        mode="allocator",
        machine=Machine.here(),
        tables=[
            *(_fill_table(plan, filled, sizes) for sizes in SIZES),
            _slabs_table(by_slab),
            _evicting_table(evicted),
            _costs_table(plan, costs),
            _extremes_table(ends),
            *(_bandwidth_table(copied, in_flight) for in_flight in plan.in_flight),
        ],
        notes=_notes(plan),
        results=raw,
        targets=targets,
        coverage=coverage(planned(plan), raw),
    )


# -- measuring ---------------------------------------------------------------------------------------------------------


def _fill(plan: Plan, progress: Callable[[str], None]) -> list[_Filled]:
    measured = []
    for sizes_name, sizes in SIZES.items():
        for name, (title, create) in FILLED.items():
            progress(f"fill: {sizes.title}, {title}")
            for lifetime_name, lifetime in LIFETIMES.items():
                fill = fills(create, sizes, lifetime, plan.slab_nbytes, range(plan.seeds))
                measured.append(_Filled(name, sizes_name, lifetime_name, plan.slab_nbytes, fill))
    return measured


def _fill_by_slab(plan: Plan, progress: Callable[[str], None]) -> list[_Filled]:
    measured = []
    for slab_nbytes in plan.slab_sizes:
        progress(f"fill: a slab of {_gib(slab_nbytes)}")
        # Traces are as much longer as the slab is larger; as few large ones take as long as many small ones.
        seeds = range(max(10, min(plan.seeds, plan.seeds * plan.slab_nbytes // slab_nbytes)))
        for name in _BY_SLAB:
            for lifetime_name, lifetime in LIFETIMES.items():
                fill = fills(FILLED[name][1], SIZES["log-uniform"], lifetime, slab_nbytes, seeds)
                measured.append(_Filled(name, "log-uniform", lifetime_name, slab_nbytes, fill))
    return measured


def _evict(plan: Plan, progress: Callable[[str], None]) -> list[_Evicting]:
    measured = []
    for name, (title, create) in FILLED.items():
        progress(f"fill by Mooncake's method: {title}")
        if name != _NOT_EVICTING:
            measured.append(_Evicting(name, evicting(create, plan.placements, seed=1)))
    return measured


# -- tables --------------------------------------------------------------------------------------------------------------


def _targets(filled: Sequence[_Filled], by_slab: Sequence[_Filled], costs: Sequence[Cost]) -> Iterator[Verdict]:
    ours = [result for result in filled if result.policy == OURS and result.sizes == "log-uniform"]
    largest = max((result.slab_nbytes for result in by_slab), default=0)
    ours += [result for result in by_slab if result.policy == OURS and result.slab_nbytes == largest]
    for result in ours:
        at = f"log-uniform, {LIFETIMES[result.lifetime].title}, slab of {_gib(result.slab_nbytes)}"
        for part, share, target in (("mean", result.fill.mean, MEAN_FILL), ("minimum", result.fill.minimum, MINIMUM_FILL)):
            yield Verdict(f"{part} fill at the first failure", at, f">= {target:.0%}", _share(share), share >= target)
    for cost in costs:
        if cost.subject in (OURS, "book") and cost.live == MANY_LIVE:
            at, met = f"{MANY_LIVE:,} slots live", cost.median_us <= OPERATION_US
            what = f"time per operation: {SUBJECTS[cost.subject].title}"
            yield Verdict(what, at, f"<= {OPERATION_US:g} us", f"{cost.median_us:.2f} us", met)


def _fill_table(plan: Plan, filled: Sequence[_Filled], sizes: str) -> Table:
    rows = []
    for name, (title, _) in FILLED.items():
        measured = [result for result in filled if result.policy == name and result.sizes == sizes]
        rows.append([title, *(_fill_text(result.fill) for result in measured)])
    return Table(
        f"fill at the first failure, mean / p1 / min: {SIZES[sizes].title}, slab of {_gib(plan.slab_nbytes)}, "
        f"{plan.seeds} traces each",
        ["policy", *(lifetime.title for lifetime in LIFETIMES.values())],
        rows,
    )


def _slabs_table(by_slab: Sequence[_Filled]) -> Table:
    rows = []
    for slab_nbytes in dict.fromkeys(result.slab_nbytes for result in by_slab):
        for name in dict.fromkeys(result.policy for result in by_slab):
            measured = [result for result in by_slab if (result.slab_nbytes, result.policy) == (slab_nbytes, name)]
            rows.append([f"{_gib(slab_nbytes)}, {FILLED[name][0]}", *(_fill_text(result.fill) for result in measured)])
    return Table(
        f"fill at the first failure by the size of the slab, mean / p1 / min: {SIZES['log-uniform'].title}",
        ["slab", *(lifetime.title for lifetime in LIFETIMES.values())],
        rows,
    )


def _evicting_table(evicted: Sequence[_Evicting]) -> Table:
    return Table(
        "fill by Mooncake's method (2 GiB, 1 KiB..64 MiB uniform, random ones thrown out), mean / p1 / min",
        ["policy", "fill"],
        [[FILLED[result.policy][0], _fill_text(result.fill)] for result in evicted],
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


def _extremes_table(ends: Sequence[Extremes]) -> Table:
    rows = [
        [
            _size(result.nbytes),
            f"{result.same_slot_gb_per_s:.1f}",
            f"{result.rotating_gb_per_s:.1f}",
            f"{result.same_slot_gb_per_s / result.rotating_gb_per_s:.2f} x",
        ]
        for result in ends
    ]
    return Table("copies into the slab, GB/s", ["size", "the same slot", "round the slab", "ratio"], rows)


def _bandwidth_table(copied: Sequence[Bandwidth], in_flight: int) -> Table:
    copied = [result for result in copied if result.in_flight == in_flight]
    sizes = list(dict.fromkeys(result.nbytes for result in copied))
    rows = []
    for name, contender in POLICIES.items():
        measured = [result for result in copied if result.policy == name]
        rows.append([contender.title, *(f"{result.gb_per_s:.1f} ({_size(result.touched_nbytes)})" for result in measured)])
    return Table(
        f"copies into the places of a policy, {in_flight} in flight, GB/s (memory touched in all)",
        ["policy", *(_size(nbytes) for nbytes in sizes)],
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


def _raw(result: msgspec.Struct) -> dict[str, Any]:
    kind = type(result).__name__.lstrip("_").lower()
    return {"kind": kind, **msgspec.to_builtins(result)}


def _fill_text(fill: Fill) -> str:
    return f"{fill.mean:.1%} / {fill.p1:.1%} / {fill.minimum:.1%}"


def _share(share: float) -> str:
    return f"{share:.1%}"


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):g} GiB"


def _size(nbytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}"
    return f"{nbytes} B"
