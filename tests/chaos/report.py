"""What a run has shown, as a table to read, and as JSON to keep."""

from __future__ import annotations

from pathlib import Path

import msgspec
from rich.table import Table

from tests.chaos.account import Findings, Latencies

_ABORT_TARGET_MS = 5.0
_DEATH_TARGET_MS = 50.0
_ENGINE_DEATH_TARGET_MS = 100.0


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
