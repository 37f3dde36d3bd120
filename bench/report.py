"""Results as a table to read and as JSON to keep."""

from __future__ import annotations

from pathlib import Path

import msgspec
from rich.table import Table

from bench.peers import PEERS
from bench.transport import Result, Results, Spread

__all__ = ["format_nbytes", "transport_table", "write_json"]


def format_nbytes(nbytes: int) -> str:
    """Returns a size as ``64 KB`` (of 1024 bytes), or in bytes if it is not a whole number of those."""
    for unit, name in ((1 << 20, "MB"), (1 << 10, "KB")):
        if nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def transport_table(results: Results) -> Table:
    """Returns the table of a transport benchmark: a section for each size, the limit of the machine below it."""
    machine = results.machine
    commit = f", commit {machine.commit}" if machine.commit else ""
    table = Table(
        title=f"one-way, every message checked, window {results.window}: medians of {results.repetitions} interleaved runs",
        caption=f"{machine.cpu}, {machine.cores} cores, Linux {machine.kernel}, Python {machine.python}\n"
        f"torch {machine.torch}, shmring {machine.shmring}{commit}\n"
        "spread: slowest and fastest run; latency: from send to receipt, behind up to a window of messages",
    )
    for column in ("tensor", "transport"):
        table.add_column(column, no_wrap=True)
    for column in ("messages/s", "spread", "GB/s", "p50 us", "p99 us", "shmring is"):
        table.add_column(column, justify="right", no_wrap=True)
    for limit in results.limits:
        for result in results.results:
            if result.nbytes == limit.nbytes:
                table.add_row(*_row(result))
        table.add_row(
            format_nbytes(limit.nbytes),
            "memcpy, warm buffer",
            *_speed(limit.copies_per_s, limit.nbytes),
            "",
            "",
            _times(limit.shmring_ratio),
            style="dim",
            end_section=True,
        )
    return table


def _row(result: Result) -> tuple[str, ...]:
    return (
        format_nbytes(result.nbytes),
        PEERS[result.peer].title,
        *_speed(result.messages_per_s, result.nbytes),
        f"{result.latency_p50_us:,.0f}",
        f"{result.latency_p99_us:,.0f}",
        _times(result.shmring_ratio),
    )


def _speed(speed: Spread, nbytes: int) -> tuple[str, str, str]:
    return (
        f"{speed.median:,.0f}",
        f"{speed.minimum:,.0f} .. {speed.maximum:,.0f}",
        f"{speed.median * nbytes / 1e9:.2f}",
    )


def _times(ratio: Spread) -> str:
    return f"{ratio.median:.2f} x" if ratio.median < 10 else f"{ratio.median:.0f} x"


def write_json(results: Results, path: Path) -> None:
    """Writes results with all that they depend on."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results)) + b"\n")
