"""What a run has shown, as a table to read, as JSON to keep, and as a plot to look at.

The plot needs matplotlib, which only this needs: it is imported when a plot is asked for, and asked for before the run, so
that nobody learns ten minutes later that it is missing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from bench.command_line import check_plotter
from tests.chaos.account import Findings, Latencies
from tests.chaos.plan import Fault

__all__ = ["table", "write_json", "write_plot"]

_ABORT_TARGET_MS = 5.0
_DEATH_TARGET_MS = 50.0
_ENGINE_DEATH_TARGET_MS = 100.0
_MARKED = {Fault.KILL_ENGINE: "tab:red", Fault.KILL_FRONTEND: "tab:orange", Fault.STOP_ENGINE: "tab:purple"}


def table(findings: Findings) -> Table:
    """Returns the table of a run: what was done, what became of it, what must be 0, and how fast memory came back."""
    machine = findings.machine
    commit = f", commit {machine.commit}" if machine.commit else ""
    result = Table(
        title=f"chaos: {findings.seconds:.0f} s, seed {findings.plan.seed}, {findings.plan.frontends} frontends, "
        f"{findings.phases} phases: {'passed' if findings.passed else 'FAILED'}",
        caption=f"{machine.cpu}, {machine.cores} cores, Linux {machine.kernel}, Python {machine.python}\n"
        f"torch {machine.torch}, shmring {machine.shmring}{commit}\n"
        "latencies: beyond the step that was running; p50 / p99 / max",
        show_header=False,
    )
    result.add_column(no_wrap=True)
    result.add_column(justify="right", no_wrap=True)
    for name, count in findings.faults.items():
        result.add_row(name, f"{count:,}")
    result.add_row("processes killed", f"{findings.kills:,}", end_section=True)
    result.add_row("requests", f"{findings.requests:,}")
    result.add_row("answered", f"{findings.answered:,}")
    result.add_row("aborted", f"{findings.aborted:,}")
    for name, count in findings.failed.items():
        result.add_row(f"failed: {name}", f"{count:,}")
    result.add_row("died with their frontend", f"{findings.died_with_their_frontend:,}", end_section=True)
    for name, count in findings.must_be_zero.items():
        result.add_row(name, f"{count:,}", style="bold red" if count else None)
    result.add_section()
    result.add_row("abort to reusable", _latencies(findings.abort_to_reusable, _ABORT_TARGET_MS))
    result.add_row("  without waits for a core", _latencies(findings.abort_to_reusable_on_core, _ABORT_TARGET_MS))
    result.add_row("SIGKILL to the kernel's word of the death", _latencies(findings.kill_to_word))
    result.add_row("death to reclaimed", _latencies(findings.death_to_reclaimed, _DEATH_TARGET_MS))
    result.add_row("  without waits for a core", _latencies(findings.death_to_reclaimed_on_core, _DEATH_TARGET_MS))
    result.add_row("engine's death to error", _latencies(findings.engine_death_to_error, _ENGINE_DEATH_TARGET_MS))
    return result


def _latencies(found: Latencies, target_ms: float | None = None) -> str:
    if found.p50_ms is None or found.p99_ms is None or found.max_ms is None:
        return "none"
    text = f"{found.p50_ms:.2f} / {found.p99_ms:.2f} / {found.max_ms:.2f} ms of {found.count:,}"
    return text if target_ms is None else f"{text}; p99 < {target_ms:g}: {'met' if found.p99_ms < target_ms else 'missed'}"


def write_json(findings: Findings, path: Path) -> None:
    """Writes everything that was found."""
    kept = msgspec.to_builtins(findings) | {"passed": findings.passed, "must_be_zero": findings.must_be_zero}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(kept)) + b"\n")


def write_plot(findings: Findings, path: Path) -> None:
    """Draws the run, as SVG or PNG as the name of the file says: requests and faults, the slab, and how fast memory came back.

    Raises:
        MissingPlotter: matplotlib is not installed.
    """
    check_plotter()
    from matplotlib.figure import Figure  # no pyplot: it keeps figures, and looks for a display

    figure = Figure(figsize=(12, 9), layout="constrained")
    requests, slab, latencies = figure.subplots(3, 1, height_ratios=(2, 2, 1.5))
    _draw_requests(requests, findings)
    _draw_slab(slab, findings)
    _draw_latencies(latencies, findings)
    verdict = "nothing lost, corrupted or leaked" if findings.passed else "FAILED"
    figure.suptitle(f"{findings.requests:,} requests, {findings.kills} processes killed, seed {findings.plan.seed}: {verdict}")
    figure.savefig(path)


def _draw_requests(axes: Any, findings: Findings) -> None:
    counts = findings.ended_per_second
    axes.stackplot(
        range(len(counts["answered"])), *counts.values(), labels=list(counts), colors=["#a8d5a2", "#c9c9c9", "#e8a0a0"]
    )
    for fault, colour in _MARKED.items():
        times = [(event.began_ns - findings.began_ns) / 1e9 for event in findings.happened if event.fault is fault]
        axes.vlines(times, 0, 1, transform=axes.get_xaxis_transform(), color=colour, linewidth=0.6, label=fault.value)
    axes.set(ylabel="requests ended per second", xlim=(0, findings.seconds))
    axes.legend(loc="upper right", fontsize="small")


def _draw_slab(axes: Any, findings: Findings) -> None:
    times = [(sample.at_ns - findings.began_ns) / 1e9 for sample in findings.samples]
    parts = {
        "free": [sample.free_nbytes / (1 << 20) for sample in findings.samples],
        "leased": [sample.leased_nbytes / (1 << 20) for sample in findings.samples],
        "quarantined": [sample.quarantined_nbytes / (1 << 20) for sample in findings.samples],
    }
    axes.stackplot(times, *parts.values(), labels=list(parts), colors=["#dfe8f2", "#7ba3cf", "#d98e73"], step="post")
    axes.set(ylabel="slab, MiB", xlabel="seconds", xlim=(0, findings.seconds))
    axes.legend(loc="upper right", fontsize="small")


def _draw_latencies(axes: Any, findings: Findings) -> None:
    series = {
        "abort to reusable": findings.abort_to_reusable.all_ms,
        "abort to reusable, without waits for a core": findings.abort_to_reusable_on_core.all_ms,
        "death to reclaimed": findings.death_to_reclaimed.all_ms,
        "death to reclaimed, without waits for a core": findings.death_to_reclaimed_on_core.all_ms,
        "engine's death to error": findings.engine_death_to_error.all_ms,
    }
    for name, all_ms in series.items():
        if all_ms:
            shares = [(index + 1) / len(all_ms) for index in range(len(all_ms))]
            axes.step([max(ms, 0.01) for ms in all_ms], shares, where="post", label=f"{name} ({len(all_ms):,})")
    axes.set(xscale="log", xlabel="milliseconds beyond the running step", ylabel="share", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    if any(series.values()):
        axes.legend(loc="lower right", fontsize="small")
