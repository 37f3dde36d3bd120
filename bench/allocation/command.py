"""``python -m bench allocator``: a run, and what it has found as tables beside the targets and beside the stored run.

A fill depends on nothing but the seeds and the code, so it may not be less than the stored run says, without any tolerance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from bench.allocation.measures import LIMIT, OURS, POLICIES, costs, evicting, first_failures
from bench.allocation.traces import LIFETIMES, SIZES
from bench.command_line import SETTINGS, conclude, deliver, json_option, shown_progress
from bench.machine import ROOT
from bench.results import Coverage, Findings, Planned, Table, Verdict
from bench.targets import Known, judge

#: The fill and the time that an allocator is to have; the share of the slab and microseconds.
MEAN_FILL, MINIMUM_FILL, OPERATION_US = 0.90, 0.75, 0.5
MANY_LIVE = 10_000
#: What an operation of the lease book takes, of which one of the allocator is a part.
_BOOK = Known(decision=8, limit=0.6)

#: The run that the others are held against.
STORED = ROOT / "bench" / "results" / "allocator.json"

_LOG_UNIFORM = "log-uniform"
_TITLES = {name: policy.title for name, policy in POLICIES.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure.

    Attributes:
        seeds: traces of each kind.
        slab_nbytes: of the slab in which all are compared.
        slab_sizes: in which shmring's own is looked at, too; in bytes.
        placements: by Mooncake's method.
        live: numbers of live slots at which time is measured.
        batches: of each timed subject.
    """

    seeds: int = 300
    slab_nbytes: int = 4 << 30
    slab_sizes: Sequence[int] = (1 << 30, 2 << 30, 4 << 30, 8 << 30, 16 << 30, 32 << 30)
    placements: int = 200_000
    live: Sequence[int] = (10, 1_000, MANY_LIVE)
    batches: int = 15

    @classmethod
    def quick(cls) -> Plan:
        """The same in half a minute of processor time."""
        return cls(seeds=15, slab_sizes=(1 << 30, 4 << 30, 16 << 30), placements=10_000, live=(10, MANY_LIVE), batches=5)

    def fills(self) -> Iterator[tuple[str, int, int, str]]:
        """Yields the sizes of a trace, the slab's, the number of traces, and who fills it; each once."""
        for sizes in SIZES:
            for name, policy in POLICIES.items():
                if policy.fills:
                    yield sizes, self.slab_nbytes, self.seeds, name
        for slab_nbytes in self.slab_sizes:
            # Traces are as much longer as the slab is larger; as few large ones take as long as many small ones.
            seeds = max(10, min(self.seeds, self.seeds * self.slab_nbytes // slab_nbytes))
            for name in (OURS, LIMIT) if slab_nbytes != self.slab_nbytes else ():
                yield _LOG_UNIFORM, slab_nbytes, seeds, name


class Result(msgspec.Struct, frozen=True):
    """What was found of a subject.

    Attributes:
        kind: ``filled``, ``evicting`` or ``cost``: see :mod:`bench.allocation.measures`.
        at: where, by what it depends on.
        numbers: what was found.
    """

    kind: str
    subject: str
    at: dict[str, Any]
    numbers: dict[str, float]


class _Stored(msgspec.Struct, frozen=True):
    """What is read of a stored run."""

    results: list[Result]


#: A result, and where it stands: the title of its table, its column, and what it says there.
_Shown = tuple[Result, str, str, str]


def measure(plan: Plan, progress: Callable[[str], None], stored: Sequence[Result] = ()) -> tuple[Findings, list[Verdict]]:
    """Measures what a plan says, with a line before each step.

    Returns:
        What was found; and of its targets those of :func:`beside_stored`.
    """
    shown = list(_shown(plan, progress))
    results = [result for result, *_ in shown]
    tables: dict[str, list[tuple[str, str, str]]] = {}
    cases: dict[str, list[str]] = {}
    for result, title, column, cell in shown:
        tables.setdefault(title, []).append((_TITLES[result.subject], column, cell))
        cases.setdefault(f"{title}, {column}", []).append(result.subject)
    planned = [Planned(case, subjects, 1) for case, subjects in cases.items()]  # a run that was ended before stores nothing
    measured = {(case, subject): 1 for case, subjects in cases.items() for subject in subjects}
    compared = beside_stored(results, stored)
    findings = Findings(
        mode="allocator",
        tables=[Table.crossed(title, "who places", cells) for title, cells in tables.items()],
        notes=_NOTES,
        results=results,
        targets=[*_targets(plan, results), *compared],
        coverage=Coverage.of(planned, measured),
    )
    return findings, compared


def beside_stored(results: Sequence[Result], stored: Sequence[Result]) -> list[Verdict]:
    """Returns whether each slab got as full as in a stored run: one verdict of the means, and one of the minimums.

    Only the same traces have the same mean. A run of fewer has no lower minimum, since its traces are the first of the others.
    """
    before = {(result.kind, result.subject, *sorted(result.at.items())): result.numbers for result in stored}
    differences: dict[str, list[tuple[float, str]]] = {"mean": [], "minimum": []}
    for result in results:
        numbers = before.get((result.kind, result.subject, *sorted(result.at.items())))
        if result.kind not in ("filled", "evicting") or numbers is None:
            continue
        where = ", ".join([_TITLES[result.subject], *map(str, result.at.values())])
        if result.numbers["samples"] == numbers["samples"]:
            differences["mean"].append((result.numbers["mean"] - numbers["mean"], where))
            differences["minimum"].append((result.numbers["minimum"] - numbers["minimum"], where))
        elif result.kind == "filled" and result.numbers["samples"] < numbers["samples"]:
            differences["minimum"].append((result.numbers["minimum"] - numbers["minimum"], where))
    return [_as_full(part, sorted(places)) for part, places in differences.items()]


def _as_full(part: str, places: Sequence[tuple[float, str]]) -> Verdict:
    what, asked = f"{part} fill, beside the stored run", "no less"
    if not places:
        return Verdict(what, "all that fill", asked, detail="the stored run has no such traces, or not as many")
    worst, where = places[0]
    measured = "the same or more" if worst >= 0 else f"{-worst:.3%} less"
    return Verdict(what, f"{len(places)} slabs and lifetimes", asked, measured, worst >= 0, "" if worst >= 0 else where)


def _shown(plan: Plan, progress: Callable[[str], None]) -> Iterator[_Shown]:
    for sizes, slab_nbytes, seeds, name in plan.fills():
        progress(f"fill: {SIZES[sizes].title}, {_TITLES[name]}, a slab of {_size(slab_nbytes)}")
        title = f"fill at the first failure, mean / p1 / min: {SIZES[sizes].title}, slab of {_size(slab_nbytes)}"
        for lifetime in LIFETIMES:
            at = {"sizes": sizes, "lifetime": lifetime, "slab_nbytes": slab_nbytes}
            fill = first_failures(POLICIES[name], SIZES[sizes], LIFETIMES[lifetime], slab_nbytes, range(seeds))
            yield Result("filled", name, at, fill), title, LIFETIMES[lifetime].title, _fill(fill)
    title = "fill by Mooncake's method (2 GiB, 1 KiB..64 MiB uniform, random ones thrown out), mean / p1 / min"
    for name, policy in POLICIES.items():
        if policy.evicts:
            progress(f"fill by Mooncake's method: {policy.title}")
            fill = evicting(policy, plan.placements, seed=1)
            yield Result("evicting", name, {}, fill), title, "fill", _fill(fill)
    title = "microseconds of processor time per operation, median (minimum), by slots live"
    timed = {name: policy for name, policy in POLICIES.items() if policy.timed}
    for live in plan.live:
        progress(f"time: {live:,} slots live")
        all_costs = costs(list(timed.values()), SIZES[_LOG_UNIFORM], live, plan.batches)
        for name, cost in zip(timed, all_costs, strict=True):
            cell = f"{cost['median_us']:.2f} ({cost['minimum_us']:.2f})"
            yield Result("cost", name, {"live": live}, cost), title, f"{live:,}", cell


# -- as people read it -----------------------------------------------------------------------------------------------------


def _fill(numbers: dict[str, float]) -> str:
    return " / ".join(f"{numbers[part]:.1%}" for part in ("mean", "p1", "minimum"))


def _targets(plan: Plan, results: Sequence[Result]) -> Iterator[Verdict]:
    slabs = (plan.slab_nbytes, *sorted(plan.slab_sizes)[-1:])
    for result in results:
        at, numbers = result.at, result.numbers
        if (result.kind, result.subject) == ("filled", OURS):
            if at["sizes"] == _LOG_UNIFORM and at["slab_nbytes"] in slabs:
                where = f"log-uniform, {LIFETIMES[at['lifetime']].title}, slab of {_size(at['slab_nbytes'])}"
                for part, target in (("mean", MEAN_FILL), ("minimum", MINIMUM_FILL)):
                    what = f"{part} fill at the first failure"
                    yield Verdict(what, where, f">= {target:.0%}", f"{numbers[part]:.1%}", numbers[part] >= target)
        elif result.kind == "cost" and result.subject in (OURS, "book") and at["live"] == MANY_LIVE:
            what, where = f"time per operation: {_TITLES[result.subject]}", f"{MANY_LIVE:,} slots live"
            known = _BOOK if result.subject == "book" else None
            yield judge(what, where, OPERATION_US, "us", [("median", numbers["median_us"])], at_least=False, known=known)


_NOTES = [
    "Fill: the bytes that were asked for, divided by the slab. In a trace, the slots that exist at the same time grow from "
    "half of the slab to more than it holds. Meanwhile its content is replaced four or five times, and a tenth of the slots "
    "is aborted at once.",
    "The limit is a slab whose content is moved together all the time. It does not reach 100 %, because the slot that did not "
    "fit was large.",
    "Leases: the ledger, and the lease books of frontends that ask in turn. A failure there is a slot that has to wait. Memory "
    "that a frontend has and does not use counts as empty.",
    "For its allocator, with its own method, Mooncake publishes a mean of 84.2 %, a p1 of 71.3 % and a minimum of 54.4 % (of a "
    "million). docs/decisions/0008-allocation-policy.md says how other policies did.",
]


def _size(nbytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}"
    return f"{nbytes} B"


@click.command("allocator", context_settings=SETTINGS)
@click.option("--quick", is_flag=True, help="Fewer traces: half a minute on an idle machine.")
@json_option
def allocator_command(quick: bool, json_path: Path | None) -> None:
    """How full the slab gets, and what placing a slot costs.

    Ends with 1 if a slab gets less full than in the stored run, bench/results/allocator.json.
    """
    plan = Plan.quick() if quick else Plan()
    evicted = sum(policy.evicts for policy in POLICIES.values())
    with shown_progress(len(list(plan.fills())) + evicted + len(plan.live)) as progress:
        findings, compared = measure(plan, progress, msgspec.json.decode(STORED.read_bytes(), type=_Stored).results)
    deliver(findings, json_path)
    conclude(findings.failures, compared)
