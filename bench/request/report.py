"""Results of ``bench request`` as tables to read and as JSON to keep: both from the same cells of text."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.table import Table

from bench.cases import format_nbytes
from bench.coverage import Coverage
from bench.machine import Machine
from bench.request.peers import BASELINE, PEERS
from bench.request.plan import Result, Results, Unmeasured
from bench.request.scaling import ScalingResult, ScalingResults
from bench.tables import format_times
from bench.targets import Verdict

__all__ = ["Report", "TextTable", "lines", "report", "rich_table", "scaling_report", "write_json"]

# The targets that these measurements speak about.
_TARGET_NBYTES, _TARGET_IN_FLIGHT = 64 << 10, 16
_TARGET_REQUESTS_PER_S = 20_000.0
_TARGET_PYZMQ_RATIO = 5.0
_TARGET_SCALING_RATIO = 1.2

_COLUMNS = ["request", "transport", "requests/s", "spread", "shmring is"]
_COLUMNS += ["p50 us", "p99 us", "p99.9 us", "engine us", "client us"]
_SCALING_COLUMNS = ["request", "in flight", "variant", "requests/s", "engine us", "client us", "engine", "client", "both"]
_TEXT_COLUMNS = {"request", "transport", "variant"}  # to the left


class TextTable(msgspec.Struct, frozen=True):
    """A table as it is shown."""

    title: str
    columns: list[str]
    rows: list[list[str]]


class Report(msgspec.Struct, frozen=True):
    """A run, as it is stored.

    Attributes:
        mode: "request", or "request-scaling".
        tables, notes: as shown to people.
        targets: what the run says of those that it measured.
        results: the numbers behind them.
        unmeasured: what was not measured, and why.
        command: what was typed.
        coverage: what was planned, and what is missing of it.
    """

    mode: str
    machine: Machine
    tables: list[TextTable]
    notes: list[str]
    targets: list[Verdict]
    results: list[Result] | list[ScalingResult]
    unmeasured: list[Unmeasured] = []
    command: str = ""
    coverage: Coverage | None = None


def report(results: Results) -> Report:
    """Returns the report of a run: a table for each number of clients and of requests in flight."""
    tables = []
    for clients, in_flight in _kinds(results):
        rows = [_row(result) for result in results.results if (result.clients, result.in_flight) == (clients, in_flight)]
        rows += [
            _unmeasured_row(one)
            for one in results.unmeasured
            if one.nbytes is None or (one.clients, one.in_flight) == (clients, in_flight)
        ]
        replies = f"replies of {format_nbytes(results.reply_nbytes)}"
        title = f"requests of a tensor, {in_flight} in flight of {_clients(clients)}, {replies}"
        tables.append(TextTable(title, _COLUMNS, rows))
    notes = [
        f"Every request and every reply checked. Medians of interleaved repetitions of {results.timed_s:g} s; spread: slowest "
        "and fastest against the median; shmring is: its requests/s over the row's in the same repetition.",
        "Round trips: from before the request is handed over until its reply is there, of all repetitions. engine, client: "
        "microseconds of CPU of the whole process for each request, copies included.",
    ]
    notes += [
        f"Of them, this benchmark's own stamps and checks take, at {format_nbytes(one.nbytes)}: engine {one.engine_us:.1f}, "
        f"client {one.client_us:.1f}."
        for one in results.checks
    ]
    notes += [f"{PEERS[name].requires} {version}" for name, version in results.versions.items()]
    notes += [f"{PEERS[one.peer].title}: {one.reason}" for one in results.unmeasured if one.nbytes is None]
    return Report(
        "request",
        results.machine,
        tables,
        notes,
        _targets(results),
        results.results,
        results.unmeasured,
        coverage=results.coverage,
    )


def scaling_report(results: ScalingResults) -> Report:
    """Returns the report of a run of ``--scaling``."""
    rows = [
        [
            format_nbytes(result.nbytes),
            str(result.in_flight),
            result.title,
            _number(result.requests_per_s.median),
            f"{result.engine_us.median:.1f}",
            f"{result.client_us.median:.1f}",
            *(f"{ratio.median:.2f} x" for ratio in (result.engine_ratio, result.client_ratio, result.ratio)),
        ]
        for result in results.results
    ]
    title = f"cost of a request by what else there is, medians of {results.repetitions} interleaved runs"
    notes = [
        "CPU microseconds of each request, checks and copies included; engine, client, both: ratio to 1 client, or to 10 slots "
        "in use, in the same repetition.",
        "With all of 32 clients asking, each request has a write and a read of its own at both ends, where one connection's "
        "share them.",
    ]
    targets = [*_scaling_targets(results)]
    return Report(
        "request-scaling",
        results.machine,
        [TextTable(title, _SCALING_COLUMNS, rows)],
        notes,
        targets,
        results.results,
        coverage=results.coverage,
    )


def lines(report: Report) -> list[str]:
    """Returns what is said below the tables."""
    return [*report.notes, *map(_told, report.targets)]


def rich_table(table: TextTable, machine: Machine) -> Table:
    """Returns a table for a terminal; a line below each size."""
    commit = f", commit {machine.commit}" if machine.commit else ""
    rich = Table(
        title=table.title,
        caption=f"{machine.cpu}, {machine.cores} cores, Linux {machine.kernel}, Python {machine.python}\n"
        f"torch {machine.torch}, shmring {machine.shmring}{commit}",
    )
    for column in table.columns:
        rich.add_column(column, no_wrap=True, justify="left" if column in _TEXT_COLUMNS else "right")
    for row, after in itertools.zip_longest(table.rows, table.rows[1:]):
        rich.add_row(*row, end_section=after is None or row[0] != after[0])
    return rich


def write_json(report: Report, path: Path) -> None:
    """Writes a run with all that it depends on."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


def _kinds(results: Results) -> list[tuple[int, int]]:
    found = [(result.clients, result.in_flight) for result in results.results]
    found += [(one.clients, one.in_flight) for one in results.unmeasured if one.clients and one.in_flight]
    return list(dict.fromkeys(found))


def _row(result: Result) -> list[str]:
    speed = result.requests_per_s
    return [
        format_nbytes(result.nbytes),
        PEERS[result.peer].title,
        _number(speed.median),
        f"{speed.minimum / speed.median - 1:+.0%} {speed.maximum / speed.median - 1:+.0%}",
        format_times(result.shmring_ratio.median),
        _number(result.round_trip_p50_us),
        _number(result.round_trip_p99_us),
        _number(result.round_trip_p999_us),
        f"{result.engine_us.median:,.1f}",
        f"{result.client_us.median:,.1f}",
    ]


def _unmeasured_row(one: Unmeasured) -> list[str]:
    size = "all" if one.nbytes is None else format_nbytes(one.nbytes)
    reason = "missing" if one.nbytes is None else "not measured"
    return [size, PEERS[one.peer].title, reason, *[""] * (len(_COLUMNS) - 3)]


def _targets(results: Results) -> list[Verdict]:
    """What this run says of the targets, if it measured them: 64 KB, 16 in flight, one client."""
    cells = {
        result.peer: result
        for result in results.results
        if (result.nbytes, result.in_flight, result.clients) == (_TARGET_NBYTES, _TARGET_IN_FLIGHT, 1)
    }
    if (ours := cells.get(BASELINE)) is None:
        return []
    what, at, speed = "request/reply, 16 in flight, one client", format_nbytes(_TARGET_NBYTES), ours.requests_per_s
    verdicts = [
        Verdict(
            what,
            at,
            f">= {_TARGET_REQUESTS_PER_S:,.0f}/s",
            f"{speed.median:,.0f}/s",
            speed.median >= _TARGET_REQUESTS_PER_S,
            f"{speed.minimum:,.0f} to {speed.maximum:,.0f}; round trip p50 {ours.round_trip_p50_us:,.0f} us; CPU of a request: "
            f"engine {ours.engine_us.median:.1f} us, client {ours.client_us.median:.1f} us",
        )
    ]
    if (pyzmq := cells.get("pyzmq")) is not None:
        ratio = pyzmq.shmring_ratio
        verdicts.append(
            Verdict(
                f"{what}: of pyzmq's",
                at,
                f">= {_TARGET_PYZMQ_RATIO:g} x",
                format_times(ratio.median),
                ratio.median >= _TARGET_PYZMQ_RATIO,
                f"{format_times(ratio.minimum)} to {format_times(ratio.maximum)}",
            )
        )
    return verdicts


def _scaling_targets(results: ScalingResults) -> Iterator[Verdict]:
    for result in results.results:
        if result.variant != result.baseline:
            yield Verdict(
                f"CPU time per request with {result.title}",
                format_nbytes(result.nbytes),
                f"<= {_TARGET_SCALING_RATIO} x",
                format_times(result.ratio.median),
                result.ratio.median <= _TARGET_SCALING_RATIO,
                f"engine {format_times(result.engine_ratio.median)}, client {format_times(result.client_ratio.median)}",
            )


def _told(verdict: Verdict) -> str:
    return f"{verdict.what}, {verdict.at}: {verdict.measured} (target: {verdict.asked}, {verdict.word}; {verdict.detail})"


def _clients(clients: int) -> str:
    return "1 client" if clients == 1 else f"each of {clients} clients"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
