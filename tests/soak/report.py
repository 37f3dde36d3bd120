"""What a run has shown: as tables."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence

from bench.machine import Machine
from bench.results import Findings, Table, Verdict
from tests.soak.driver import ENGINE, Observations, Sample
from tests.soak.plan import Phase, Plan
from tests.soak.verdict import Check

_MIB = 1 << 20


def findings(plan: Plan, seen: Observations, checks: Sequence[Check]) -> Findings:
    """Lays a run out as the report reads it."""
    passed = all(check.passed for check in checks)
    minutes = seen.samples[-1].at_s / 60
    title = f"soak: {minutes:.1f} minutes, {plan.cycles} cycles, {plan.frontends} frontends: {'passed' if passed else 'FAILED'}"
    rows = [[check.what, check.found, check.limit, "passed" if check.passed else "FAILED"] for check in checks]
    return Findings(
        mode="soak",
        machine=Machine.here(),
        tables=[Table(title, ["what", "found", "limit", ""], rows), _phases_table(plan, seen)],
        notes=[
            "Private memory is anonymous memory. The rest is the slab and files, which all processes share.",
            "Flat: the medians of equal phases, of the last quarter of the cycles beside the first, without the warm-up.",
            "Loop lag is the longest delay of a timer of 5 ms between two looks. Waiting for a core counts, too.",
        ],
        targets=[_target(checks)],
        command="python -m tests.soak",
    )


def _target(checks: Sequence[Check]) -> Verdict:
    memory = [check for check in checks if check.is_memory]
    grown = "; ".join(f"{check.what}: {check.found}" for check in memory)
    flat = all(check.passed for check in memory)
    return Verdict("resident memory over the run", "each process", "flat", "flat" if flat else "it grows", flat, grown)


@dataclasses.dataclass(frozen=True)
class _Rate:
    phase: Phase
    requests: float
    nbytes: float
    aborted: float


def _phases_table(plan: Plan, seen: Observations) -> Table:
    rows = []
    for phase in Phase:
        inside = [sample for sample in seen.samples if sample.phase is phase]
        rates = [rate for rate in _rates(seen.samples) if rate.phase is phase]
        lags = [sample.processes[ENGINE].seen.lag_s * 1e3 for sample in inside]
        frontend_lags = [
            max(process.seen.lag_s for title, process in sample.processes.items() if title != ENGINE) * 1e3 for sample in inside
        ]
        rows.append(
            [
                phase.value,
                f"{_median([rate.requests for rate in rates]):,.0f}",
                f"{_median([rate.nbytes for rate in rates]) / 1e9:.2f}",
                f"{_median([rate.aborted for rate in rates]):,.0f}",
                f"{_median(lags):.1f} / {max(lags, default=0):.1f}",
                f"{_median(frontend_lags):.1f} / {max(frontend_lags, default=0):.1f}",
                f"{_median([sample.processes[ENGINE].footprint.private_nbytes for sample in inside]) / _MIB:.0f}",
            ]
        )
    return Table(
        f"soak: what happened in the phases, of {plan.phase_s:.3g} s each",
        ["phase", "requests/s", "GB/s", "aborts/s", "engine's lag, ms", "frontends' lag, ms", "engine, MiB private"],
        rows,
    )


def _median(numbers: Sequence[float]) -> float:
    return statistics.median(numbers) if numbers else 0.0


def _rates(samples: Sequence[Sample]) -> list[_Rate]:
    """What was done a second between each two samples of the same phase: what is between phases belongs to neither."""
    rates = []
    for before, after in itertools.pairwise(samples):
        if (before.cycle, before.phase) == (after.cycle, after.phase):
            seconds = after.at_s - before.at_s
            done = [(new - old) / seconds for new, old in zip(_counts(after), _counts(before), strict=True)]
            rates.append(_Rate(after.phase, *done))
    return rates


def _counts(sample: Sample) -> tuple[int, int, int]:
    seen = [process.seen for title, process in sample.processes.items() if title != ENGINE]
    return (
        sum(counts.requests for counts in seen),
        sum(counts.nbytes for counts in seen),
        sum(counts.aborted for counts in seen),
    )
