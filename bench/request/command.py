"""``python -m bench request``: requests with payloads, each with its reply, many in flight, by shmring and by its peers.

Progress goes to stderr, tables go to stdout.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from bench import command_line
from bench.command_line import show
from bench.interleaving import Plan, Round, carry_out
from bench.modes import MODES
from bench.peers import BASELINE, REQUEST_PEERS
from bench.records import Result, Results
from bench.repetitions import median_ratio
from bench.request.questions import MAX_CLIENTS, Case, checks_us
from bench.request.scaling import MAX_SCALING_NBYTES, VARIANT_GROUPS, VARIANTS
from bench.results import Findings, Table, Verdict, deviation, format_nbytes, format_rate, format_times
from bench.stamps import ITEM_NBYTES
from bench.targets import judge

# -- tables and targets ------------------------------------------------------------------------------------------------


# The targets that these measurements speak about.
_TARGET_NBYTES, _TARGET_IN_FLIGHT = 64 << 10, 16
_TARGET_REQUESTS_PER_S = 20_000.0
_TARGET_PYZMQ_RATIO = 5.0
_TARGET_SCALING_RATIO = 1.2

_COLUMNS = ["request", "transport", "requests/s", "spread", "shmring is"]
_COLUMNS += ["p50 us", "p99 us", "p99.9 us", "engine us", "client us"]
_SCALING_COLUMNS = ["request", "in flight", "variant", "requests/s", "engine us", "client us", "engine", "client", "both"]
_TEXT_COLUMNS = ("transport", "variant")  # to the left


def report(results: Results, reply_nbytes: int) -> Findings:
    """Returns the report of a run: a table for each number of clients and of requests in flight."""
    tables = []
    for clients, in_flight in dict.fromkeys((result.case.producers, result.case.window) for result in results.results):
        rows = [
            _row(result) for result in results.results if (result.case.producers, result.case.window) == (clients, in_flight)
        ]
        replies = f"replies of {format_nbytes(reply_nbytes)}"
        title = f"requests of a tensor, {in_flight} in flight of {_clients(clients)}, {replies}"
        tables.append(Table(title, _COLUMNS, rows, _TEXT_COLUMNS, grouped=True))
    notes = [
        f"Every request and every reply is checked. Medians of interleaved repetitions of {results.timed_s:g} s. spread: the "
        "slowest and the fastest, compared with the median. shmring is: shmring's requests/s, divided by those of the row in "
        "the same repetition.",
        "Round trips begin before the request is handed over and end when its reply is there; of all repetitions. engine, "
        "client: microseconds of CPU of the whole process for each request, copies included.",
    ]
    for nbytes in dict.fromkeys(result.case.nbytes for result in results.results):
        client_us, engine_us = checks_us(nbytes, reply_nbytes)
        notes.append(
            f"The benchmark's own stamps and checks are part of this CPU. At {format_nbytes(nbytes)}: engine {engine_us:.1f}, "
            f"client {client_us:.1f}."
        )
    notes += [f"{REQUEST_PEERS[name].requires} {version}" for name, version in results.versions.items()]
    return Findings(
        mode="request",
        machine=results.machine,
        tables=tables,
        notes=notes,
        targets=[*_targets(results)],
        coverage=results.coverage,
    )


def scaling_report(results: Results) -> Findings:
    """Returns the report of a run of ``--scaling``."""
    rows = [
        [
            format_nbytes(result.case.nbytes),
            str(result.case.window),
            VARIANTS[result.peer].title,
            format_rate(result.messages_per_s.median),
            f"{result.consumer.cpu_us_per_message.median:.1f}",
            f"{result.producer.cpu_us_per_message.median:.1f}",
            *(f"{ratio:.2f} x" for ratio in _ratios(results, result)),
        ]
        for result in results.results
    ]
    title = f"cost of a request by what else there is, medians of interleaved repetitions of {results.timed_s:g} s"
    notes = [
        "CPU microseconds of each request, checks and copies included. engine, client, both: the ratio to 1 client, or to 10 "
        "slots in use, in the same repetition.",
        "If all of 32 clients ask, each request needs a write and a read of its own on both sides. The requests of one "
        "connection share them.",
    ]
    return Findings(
        mode="request-scaling",
        machine=results.machine,
        tables=[Table(title, _SCALING_COLUMNS, rows, _TEXT_COLUMNS)],
        notes=notes,
        targets=[*_scaling_targets(results)],
        coverage=results.coverage,
    )


def _row(result: Result) -> list[str]:
    speed = result.messages_per_s
    return [
        format_nbytes(result.case.nbytes),
        REQUEST_PEERS[result.peer].title,
        _number(speed.median),
        deviation(speed),
        format_times(result.shmring_ratio.median),
        _number(result.latency_p50_us.median),
        _number(result.latency_p99_us),
        _number(result.latency_p999_us),
        f"{result.consumer.cpu_us_per_message.median:,.1f}",
        f"{result.producer.cpu_us_per_message.median:,.1f}",
    ]


def _ratios(results: Results, result: Result) -> tuple[float, float, float]:
    """CPU of a request in the engine, in its client, and in both, to that of the baseline in the same repetition: medians."""
    base = results.find(result.baseline, result.case)
    assert base is not None, "without its baseline, a case has no results"

    def ratio(cpu_us: Callable[[Result], Iterable[float]]) -> float:
        return median_ratio(cpu_us(result), cpu_us(base)) or 0.0

    return (
        ratio(lambda run: run.consumer_us_runs),
        ratio(lambda run: run.producer_us_runs),
        ratio(lambda run: map(operator.add, run.consumer_us_runs, run.producer_us_runs)),
    )


def _targets(results: Results) -> Iterator[Verdict]:
    """What this run says of the targets, if it measured them: 64 KB, 16 in flight, one client."""
    cells = {
        result.peer: result
        for result in results.results
        if (result.case.nbytes, result.case.window, result.case.producers) == (_TARGET_NBYTES, _TARGET_IN_FLIGHT, 1)
    }
    if (ours := cells.get(BASELINE)) is None:
        return
    what, at, speed = "request/reply, 16 in flight, one client", format_nbytes(_TARGET_NBYTES), ours.messages_per_s
    engine_us, client_us = ours.consumer.cpu_us_per_message.median, ours.producer.cpu_us_per_message.median
    detail = (
        f"{speed.minimum:,.0f} to {speed.maximum:,.0f}; round trip p50 {ours.latency_p50_us.median:,.0f} us; CPU of a request: "
        f"engine {engine_us:.1f} us, client {client_us:.1f} us"
    )
    met = speed.median >= _TARGET_REQUESTS_PER_S
    yield Verdict(what, at, f">= {_TARGET_REQUESTS_PER_S:,.0f}/s", f"{speed.median:,.0f}/s", met, detail)
    if (pyzmq := cells.get("pyzmq")) is not None:
        yield judge(f"{what}: of pyzmq's", at, _TARGET_PYZMQ_RATIO, "x", [("pyzmq", pyzmq.shmring_ratio.median)])


def _scaling_targets(results: Results) -> Iterator[Verdict]:
    for result in results.results:
        if result.peer != result.baseline:
            what, at = f"CPU time per request with {VARIANTS[result.peer].title}", format_nbytes(result.case.nbytes)
            engine, client, both = _ratios(results, result)
            verdict = judge(what, at, _TARGET_SCALING_RATIO, "x", [("both", both)], at_least=False)
            yield msgspec.structs.replace(verdict, detail=f"engine {format_times(engine)}, client {format_times(client)}")


def _clients(clients: int) -> str:
    return "1 client" if clients == 1 else f"each of {clients} clients"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# -- the command -------------------------------------------------------------------------------------------------------


_SIZES = (4 << 10, 64 << 10, 1 << 20, 8 << 20)
_FULL = {"sizes": _SIZES, "in_flight": (1, 16, 64), "clients": (1, 4)}
_QUICK = {"sizes": _SIZES[:3], "in_flight": (16,), "clients": (1,)}
_SCALING = {"sizes": _SIZES[:1], "in_flight": (32,), "clients": (1,)}  # one of each client, where all of them ask
_MODE = MODES["request"]
_LIMIT_S = 120.0  # of a repetition

_size_option = functools.partial(command_line.size_option, item_nbytes=ITEM_NBYTES, item="a float32")


@click.command("request", context_settings=command_line.SETTINGS)
@_size_option("--size", "sizes", text="Of a tensor; repeatable.  [default: 4KiB, 64KiB, 1MiB, 8MiB]")
@click.option(
    "--in-flight", multiple=True, type=click.IntRange(1, 1024), help="Of each client; repeatable.  [default: 1, 16, 64]"
)
@click.option("--clients", multiple=True, type=click.IntRange(1, MAX_CLIENTS), help="Processes; repeatable.  [default: 1, 4]")
@_size_option("--reply-size", "reply_nbytes", text="Of a reply's tensor.", default="64")
@command_line.peer_option(REQUEST_PEERS)
@command_line.repetitions_option("Interleaved.", _MODE)
@command_line.seconds_option(_MODE)
@click.option("--quick", is_flag=True, help="Up to 1 MiB, 16 in flight, 1 client, 5 repetitions of 0.2 s.")
@click.option("--scaling", is_flag=True, help="Instead: what a request costs at 1 and 32 clients, 10 and 10,000 slots in use.")
@command_line.json_option
def request_command(json_path: Path | None, **choices: Any) -> None:
    """Requests with a payload, each with its reply, many in flight; all of them checked."""
    plan = request_plan(**choices)

    def summarize(results: Results) -> Findings:
        return scaling_report(results) if choices["scaling"] else report(results, choices["reply_nbytes"])

    results, findings = carry_out(plan, json_path, summarize, mode="request", peers=REQUEST_PEERS | VARIANTS)
    show(findings)
    command_line.conclude(len(results.failed), [])


def request_plan(
    reply_nbytes: int,
    peers: tuple[str, ...],
    repetitions: int | None,
    seconds: float | None,
    quick: bool,
    scaling: bool,
    **dimensions: tuple[int, ...],
) -> Plan:
    """Returns what the options of ``bench request`` mean, of which the dimensions are sizes, requests in flight and clients."""
    groups = [[name for name in REQUEST_PEERS if not peers or name in peers or name == BASELINE]]
    if scaling:
        _check_scaling(dimensions["sizes"], peers, dimensions["clients"])
        groups = VARIANT_GROUPS
    values = command_line.chosen(_SCALING if scaling else _QUICK if quick else _FULL, **dimensions)
    return Plan(
        # In an order in which no process is started twice.
        rounds=[
            Round((Case(nbytes, producers=number, window=requests, reply_nbytes=reply_nbytes),), tuple(group))
            for group in groups
            for number in values["clients"]
            for requests in values["in_flight"]
            for nbytes in values["sizes"]
        ],
        limit_s=_LIMIT_S,
        **_MODE.timing(quick, repetitions, seconds)._asdict(),
    )


def _check_scaling(sizes: tuple[int, ...], peers: tuple[str, ...], clients: tuple[int, ...]) -> None:
    if peers or clients:
        raise click.UsageError("--scaling measures shmring alone, and sets the clients itself: no --peer, no --clients")
    if max(sizes, default=0) > MAX_SCALING_NBYTES:
        raise click.UsageError(f"--scaling takes sizes up to {MAX_SCALING_NBYTES:,} bytes, of which 20,000 slots fit its slab")
