"""What a run has shown: as tables, as JSON to keep, and as a plot to look at."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.machine import Machine
from bench.results import Findings, Table, Verdict
from tests.soak.driver import ENGINE, Observations, Sample
from tests.soak.plan import Phase, Plan
from tests.soak.verdict import Check

__all__ = ["draw", "findings"]

_MIB = 1 << 20
_POINTS = 500  # of a line
_COLOURS = {
    Phase.SMALL: "#cfe2f3",
    Phase.LARGE: "#f9e0c7",
    Phase.STREAMS: "#d9ead3",
    Phase.ABORTS: "#f4cccc",
    Phase.RECONNECTS: "#e4d7f0",
    Phase.IDLE: "#ffffff",
}


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
    at_s: float
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
            rates.append(_Rate(after.at_s, after.phase, *done))
    return rates


def _counts(sample: Sample) -> tuple[int, int, int]:
    seen = [process.seen for title, process in sample.processes.items() if title != ENGINE]
    return (
        sum(counts.requests for counts in seen),
        sum(counts.nbytes for counts in seen),
        sum(counts.aborted for counts in seen),
    )


def draw(samples: Sequence[Sample], passed: bool, path: Path) -> None:
    """Draws a run, as SVG or PNG as the name of the file says. Needs matplotlib (:func:`bench.command_line.check_plotter`)."""
    from matplotlib.figure import Figure  # no pyplot: it keeps figures, and looks for a display
    from matplotlib.patches import Patch

    figure = Figure(figsize=(12, 13), layout="constrained")
    axes = figure.subplots(6, 1, sharex=True)
    step = max(1, len(samples) // _POINTS)
    lags = [samples[start : start + step] for start in range(0, len(samples), step)]
    samples = samples[::step]
    times = [sample.at_s / 60 for sample in samples]
    for process in samples[0].processes:
        mine = [sample.processes[process] for sample in samples]
        axes[0].plot(times, [sample.footprint.private_nbytes / _MIB for sample in mine], label=process, linewidth=1)
        axes[1].plot(times, [sample.footprint.shared_nbytes / _MIB for sample in mine], label=process, linewidth=1)
        axes[2].plot(times, [sample.footprint.descriptors for sample in mine], label=process, linewidth=1)
        longest = [max(sample.processes[process].seen.lag_s for sample in together) for together in lags]
        axes[4].plot(times, [max(lag_s * 1e3, 0.1) for lag_s in longest], label=process, linewidth=0.8)
    engine = [sample.processes[ENGINE].seen for sample in samples]
    axes[3].plot(times, [report.leased_nbytes / _MIB for report in engine], label="leased", linewidth=1)
    axes[3].plot(times, [report.reply_slots_nbytes / _MIB for report in engine], label="replies", linewidth=1)
    axes[3].plot(times, [report.quarantined_nbytes / _MIB for report in engine], label="quarantined", linewidth=1)
    rates = _rates(samples)
    rated = [rate.at_s / 60 for rate in rates]
    axes[5].plot(rated, [max(rate.requests, 1) for rate in rates], label="requests/s", linewidth=1)
    axes[5].plot(rated, [max(rate.nbytes / 1e6, 1) for rate in rates], label="MB/s", linewidth=1)
    labels = ("private memory, MiB", "shared memory, MiB", "descriptors", "slab, MiB", "loop lag, ms", "throughput")
    for axis, label in zip(axes, labels, strict=True):
        _shade(axis, samples)
        axis.set(ylabel=label, xlim=(0, times[-1]))
        axis.legend(loc="upper right", fontsize="x-small", ncols=4)
        axis.grid(axis="y", alpha=0.3)
    for axis in axes[:4]:
        axis.set_ylim(bottom=0, top=axis.get_ylim()[1] * 1.2)  # room for the legend
    axes[0].add_artist(axes[0].get_legend())  # or the next one would replace it
    patches = [Patch(color=colour, label=phase.value) for phase, colour in _COLOURS.items() if phase is not Phase.IDLE]
    axes[0].legend(handles=patches, loc="lower right", fontsize="x-small", ncols=len(patches))
    axes[4].set_yscale("log")
    axes[5].set(yscale="log", xlabel="minutes")
    cycles = len({sample.cycle for sample in samples})
    figure.suptitle(
        f"{cycles} cycles of {', '.join(phase.value for phase in Phase)}: {'nothing grows' if passed else 'FAILED'}"
    )
    figure.savefig(path)


def _shade(axis: Any, samples: Sequence[Sample]) -> None:
    """Marks the phases by their colours, behind everything."""
    began, phase = 0.0, samples[0].phase
    for sample, following in zip(samples, [*samples[1:], None], strict=True):
        if following is None or following.phase is not phase:
            axis.axvspan(began / 60, sample.at_s / 60, color=_COLOURS[phase], zorder=0, linewidth=0)
            began = sample.at_s
            phase = following.phase if following is not None else phase
