"""The results of ``bench transport`` as tables: of each case its speed and what it cost; and the tables of targets and gaps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
from rich.table import Table as RichTable

from bench.command_line import conclude, console, typed
from bench.machine import Machine
from bench.messages import Case
from bench.peers import BASELINE, PEERS
from bench.records import Limit, Result, Results, Side
from bench.results import Coverage, Findings, Spread, Table, Verdict, format_nbytes, format_rate, format_times, write_json

__all__ = [
    "deliver",
    "finish",
    "gaps_table",
    "machine_line",
    "peer_title",
    "show",
    "transport_tables",
]

_COLUMNS = [
    "transport", "messages/s", "slowest, fastest", "GB/s", "p50 us", "p99 us", "p99.9 us", "CPU us/message", "CPU s/GB",
    "resident MB", "descriptors", "lag ms", "shmring is",
]  # fmt: skip


def peer_title(name: str) -> str:
    """Returns a peer as tables spell it; its name, if the results are of a peer that is no more."""
    return PEERS[name].title if name in PEERS else name


def transport_tables(results: Results) -> Iterator[Table]:
    """Yields a table for each case, the limits of the machine below the first of its size."""
    limits = {limit.nbytes: limit for limit in results.limits}
    for case in dict.fromkeys(result.case for result in results.results):
        rows = [result for result in results.results if result.case == case]
        limit = limits.pop(case.nbytes, None) if case.producers == 1 else None
        yield _case_table(case, rows, limit)


def _case_table(case: Case, results: Sequence[Result], limit: Limit | None) -> Table:
    rows = [
        [
            peer_title(result.peer),
            *_speed(result.messages_per_s, case.nbytes),
            *(f"{us:,.0f}" for us in (result.latency_p50_us.median, result.latency_p99_us, result.latency_p999_us)),
            _both(result, lambda side: f"{side.cpu_us_per_message.median:,.0f}"),
            _both(result, lambda side: f"{side.cpu_s_per_gb:.3g}"),
            _both(result, lambda side: str(side.resident_nbytes >> 20)),
            _both(result, lambda side: str(side.descriptors)),
            _both(result, lambda side: "-" if side.lag_max_on_core_ms is None else f"{side.lag_max_on_core_ms.median:.1f}"),
            format_times(result.shmring_ratio.median),
        ]
        for result in results
    ]
    if limit is not None:
        ours = next((result.messages_per_s.median for result in results if result.peer == BASELINE), None)
        for name, speed in (
            ("memcpy to the next place, cold", limit.copies_cold_per_s),
            ("memcpy to the same place, hot", limit.copies_hot_per_s),
            ("read of the next place", limit.reads_per_s),
        ):
            times = format_times(ours / speed.median) if ours else ""
            rows.append([name, *_speed(speed, case.nbytes), *[""] * (len(_COLUMNS) - 5), times])
    return Table(case.title, _COLUMNS, rows)


def _both(result: Result, text: Callable[[Side], str]) -> str:
    return f"{text(result.producer)}, {text(result.consumer)}"


def _speed(speed: Spread, nbytes: int) -> tuple[str, str, str]:
    return (
        format_rate(speed.median),
        f"{format_rate(speed.minimum)} .. {format_rate(speed.maximum)}",
        f"{speed.median * nbytes / 1e9:.2f}",
    )


def _targets_table(verdicts: Iterable[Verdict]) -> RichTable:
    """The table of targets for a terminal, of those that were measured and those that were not."""
    table = RichTable(title="targets")
    for column in ("target", "at", "asked", "measured", "", "detail"):
        table.add_column(column)
    for verdict in verdicts:
        style = {True: None, False: "bold red", None: "dim"}[verdict.met]
        table.add_row(verdict.what, verdict.at, verdict.asked, verdict.measured, verdict.word, verdict.detail, style=style)
    return table


def machine_line(machine: Machine) -> str:
    """Returns a machine and its versions in a line."""
    commit = f", commit {machine.commit}" if machine.commit else ""
    return (
        f"{machine.cpu}, {machine.cores} cores, {machine.memory_nbytes / 2**30:.0f} GiB of memory, last-level cache "
        f"{format_nbytes(machine.cache_nbytes)}; Linux {machine.kernel}, {machine.libc}, Python {machine.python}, torch "
        f"{machine.torch}, numpy {machine.numpy}, msgspec {machine.msgspec}, uvloop {machine.uvloop}; shmring "
        f"{machine.shmring}{commit}"
    )


def deliver(findings: Findings, json_path: Path | None) -> None:
    """Writes a run, with the command that was typed, to where that asked for it; and prints it."""
    if json_path is not None:
        write_json(msgspec.structs.replace(findings, command=typed()), json_path)
    show(findings)


def finish(
    findings: Findings,
    json_path: Path | None,
    plot_stem: Path | None = None,
    draw: Callable[[Findings, Path], object] | None = None,
) -> None:
    """Delivers a run, draws it if that was asked for, and ends the command as :func:`bench.command_line.conclude` says."""
    deliver(findings, json_path)
    if plot_stem is not None and draw is not None:
        draw(findings, plot_stem)
    conclude(findings.failures, findings.targets)


def show(findings: Findings) -> None:
    """Prints a run: its tables, what is to be known of them, its targets, what is missing, and where it was measured."""
    stdout = console()
    for table in findings.tables:
        stdout.print(table.rich())
    for note in findings.notes:
        stdout.print(note, highlight=False)
    if findings.targets:
        stdout.print(_targets_table(findings.targets))
    if findings.coverage is not None:
        if not findings.coverage.complete:
            stdout.print(gaps_table(findings.coverage).rich())
        stdout.print(f"{findings.coverage.summary()}.", highlight=False)
    if findings.machine is not None:
        stdout.print(machine_line(findings.machine), highlight=False)


def gaps_table(coverage: Coverage) -> Table:
    """Returns a table of what a run lacks of its plan."""
    columns = ["case", "without", "what became of it"]
    return Table("missing", columns, list(coverage.lines()), texts=tuple(columns))
