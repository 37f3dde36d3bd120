"""The results of ``bench transport`` as tables for a terminal: of each case its speed and what it cost; what is absent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from bench.cases import BASELINE, Case
from bench.peers import PEERS
from bench.records import Absence, Limit, Result, Results, Side, Spread
from bench.targets import Verdict

__all__ = ["TABLE_WIDTH", "format_rate", "format_times", "peer_title", "targets_table", "transport_tables"]

#: Columns that a table needs, which go into a file or a pipe whatever the terminal.
TABLE_WIDTH = 132

_SPEED_COLUMNS = ("messages/s", "spread", "GB/s", "p50 us", "p99 us", "p99.9 us", "shmring is")
_COST_COLUMNS = ("CPU us/message", "CPU s/GB", "resident MB", "descriptors", "lag ms")


def peer_title(name: str) -> str:
    """Returns a peer as tables spell it; its name, if the results are of a peer that is no more."""
    return PEERS[name].title if name in PEERS else name


def transport_tables(results: Results) -> Iterator[Table]:
    """Yields two tables for each case, the limits of the machine below the first; then one of what is absent, if anything."""
    limits = {limit.nbytes: limit for limit in results.limits}
    for case in dict.fromkeys(result.case for result in results.results):
        found = [result for result in results.results if result.case == case]
        yield _speed_table(results, case, found, limits.get(case.nbytes) if case.producers == 1 else None)
        yield _cost_table(results, found)
    if results.absences:
        yield _absences_table(results.absences)


def _speed_table(results: Results, case: Case, found: list[Result], limit: Limit | None) -> Table:
    table = _table(f"{case.title}: medians of {results.repetitions} interleaved runs, every message checked", _SPEED_COLUMNS)
    table.caption = "one-way latency: from send to receipt, behind up to a window of messages"
    for result in found:
        table.add_row(
            peer_title(result.peer),
            *_speed(result.messages_per_s, result.case.nbytes),
            f"{result.latency_p50_us.median:,.0f}",
            f"{result.latency_p99_us:,.0f}",
            f"{result.latency_p999_us:,.0f}",
            format_times(result.shmring_ratio.median),
        )
    if limit is not None:
        table.add_section()
        ours = next((result.messages_per_s.median for result in found if result.peer == BASELINE), None)
        for name, speed in (
            ("memcpy to the next place, cold", limit.copies_cold_per_s),
            ("memcpy to the same place, hot", limit.copies_hot_per_s),
            ("read of the next place", limit.reads_per_s),
        ):
            times = format_times(ours / speed.median) if ours else ""
            table.add_row(name, *_speed(speed, case.nbytes), "", "", "", times, style="dim")
    return table


def _cost_table(results: Results, found: list[Result]) -> Table:
    machine = results.machine
    commit = f", commit {machine.commit}" if machine.commit else ""
    table = _table("what it cost: producers | consumer", _COST_COLUMNS)
    table.caption = (
        "lag: longest of each event loop, waits for a core aside\n"
        f"{machine.cpu}, {machine.cores} cores, Linux {machine.kernel}, Python {machine.python}, torch {machine.torch}\n"
        f"shmring {machine.shmring}{commit}; load {results.load_before:.1f} before the run"
    )
    for result in found:
        sides = (result.producer, result.consumer)
        table.add_row(
            peer_title(result.peer),
            " | ".join(f"{side.cpu_us_per_message.median:,.0f}" for side in sides),
            " | ".join(_per_gb(side) for side in sides),
            " | ".join(str(side.resident_nbytes >> 20) for side in sides),
            " | ".join(str(side.descriptors) for side in sides),
            " | ".join(_lag(side) for side in sides),
        )
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title)
    table.add_column("transport", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _lag(side: Side) -> str:
    return "-" if side.lag_max_on_core_ms is None else f"{side.lag_max_on_core_ms.median:.1f}"


def _per_gb(side: Side) -> str:
    return f"{side.cpu_s_per_gb:.3f}" if side.cpu_s_per_gb < 1 else f"{side.cpu_s_per_gb:.1f}"


def _speed(speed: Spread, nbytes: int) -> tuple[str, str, str]:
    return (
        format_rate(speed.median),
        f"{format_rate(speed.minimum)} .. {format_rate(speed.maximum)}",
        f"{speed.median * nbytes / 1e9:.2f}",
    )


def format_rate(per_s: float) -> str:
    """Returns a rate with as many digits as it has meaning."""
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.1f}"


def format_times(ratio: float) -> str:
    """Returns a ratio as ``1.25 x``."""
    return f"{ratio:.2f} x" if ratio < 10 else f"{ratio:.0f} x"


def _absences_table(absences: list[Absence]) -> Table:
    table = Table(title="not measured")
    for column in ("transport", "case", "reason"):
        table.add_column(column)
    for absence in absences:
        case = "all" if absence.case is None else absence.case.title
        table.add_row(peer_title(absence.peer), case, f"{absence.reason.value}: {absence.text}")
    return table


def targets_table(verdicts: list[Verdict]) -> Table:
    """Returns the table of targets, of those that were measured and those that were not."""
    table = Table(title="targets")
    for column in ("target", "at", "asked", "measured", "", "detail"):
        table.add_column(column)
    for verdict in verdicts:
        style = {True: None, False: "bold red", None: "dim"}[verdict.met]
        table.add_row(verdict.what, verdict.at, verdict.asked, verdict.measured, verdict.word, verdict.detail, style=style)
    return table
