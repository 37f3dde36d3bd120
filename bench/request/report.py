"""Results of ``bench request`` as tables and verdicts."""

from __future__ import annotations

import operator
import statistics
from collections.abc import Callable, Iterable, Iterator

from bench.peers import BASELINE, REQUEST_PEERS
from bench.records import Result, Results
from bench.request.questions import checks_us
from bench.request.scaling import VARIANTS
from bench.results import Findings, Table, Verdict, deviation, format_nbytes, format_rate, format_times

__all__ = ["report", "scaling_report"]

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
        f"Every request and every reply checked. Medians of interleaved repetitions of {results.timed_s:g} s; spread: slowest "
        "and fastest against the median; shmring is: its requests/s over the row's in the same repetition.",
        "Round trips: from before the request is handed over until its reply is there, of all repetitions. engine, client: "
        "microseconds of CPU of the whole process for each request, copies included.",
    ]
    for nbytes in dict.fromkeys(result.case.nbytes for result in results.results):
        client_us, engine_us = checks_us(nbytes, reply_nbytes)
        notes.append(
            f"Of them, stamps and checks of this benchmark take, at {format_nbytes(nbytes)}: engine {engine_us:.1f}, "
            f"client {client_us:.1f}."
        )
    notes += [f"{REQUEST_PEERS[name].requires} {version}" for name, version in results.versions.items()]
    return Findings(
        mode="request",
        machine=results.machine,
        tables=tables,
        notes=notes,
        targets=_targets(results),
        results=results.results,
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
        "CPU microseconds of each request, checks and copies included; engine, client, both: ratio to 1 client, or to 10 slots "
        "in use, in the same repetition.",
        "With all of 32 clients asking, each request has a write and a read of its own at both ends, where one connection's "
        "share them.",
    ]
    return Findings(
        mode="request-scaling",
        machine=results.machine,
        tables=[Table(title, _SCALING_COLUMNS, rows, _TEXT_COLUMNS)],
        notes=notes,
        targets=[*_scaling_targets(results)],
        results=results.results,
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
        return statistics.median(ours / theirs for ours, theirs in zip(cpu_us(result), cpu_us(base), strict=True))

    return (
        ratio(lambda run: run.consumer_us_runs),
        ratio(lambda run: run.producer_us_runs),
        ratio(lambda run: map(operator.add, run.consumer_us_runs, run.producer_us_runs)),
    )


def _targets(results: Results) -> list[Verdict]:
    """What this run says of the targets, if it measured them: 64 KB, 16 in flight, one client."""
    cells = {
        result.peer: result
        for result in results.results
        if (result.case.nbytes, result.case.window, result.case.producers) == (_TARGET_NBYTES, _TARGET_IN_FLIGHT, 1)
    }
    if (ours := cells.get(BASELINE)) is None:
        return []
    what, at, speed = "request/reply, 16 in flight, one client", format_nbytes(_TARGET_NBYTES), ours.messages_per_s
    engine_us, client_us = ours.consumer.cpu_us_per_message.median, ours.producer.cpu_us_per_message.median
    detail = (
        f"{speed.minimum:,.0f} to {speed.maximum:,.0f}; round trip p50 {ours.latency_p50_us.median:,.0f} us; CPU of a request: "
        f"engine {engine_us:.1f} us, client {client_us:.1f} us"
    )
    asked, met = f">= {_TARGET_REQUESTS_PER_S:,.0f}/s", speed.median >= _TARGET_REQUESTS_PER_S
    verdicts = [Verdict(what, at, asked, f"{speed.median:,.0f}/s", met, detail)]
    if (pyzmq := cells.get("pyzmq")) is not None:
        ratio = pyzmq.shmring_ratio
        asked, met = f">= {_TARGET_PYZMQ_RATIO:g} x", ratio.median >= _TARGET_PYZMQ_RATIO
        detail = f"{format_times(ratio.minimum)} to {format_times(ratio.maximum)}"
        verdicts.append(Verdict(f"{what}: of pyzmq's", at, asked, format_times(ratio.median), met, detail))
    return verdicts


def _scaling_targets(results: Results) -> Iterator[Verdict]:
    for result in results.results:
        if result.peer != result.baseline:
            engine, client, both = _ratios(results, result)
            yield Verdict(
                f"CPU time per request with {VARIANTS[result.peer].title}",
                format_nbytes(result.case.nbytes),
                f"<= {_TARGET_SCALING_RATIO} x",
                format_times(both),
                both <= _TARGET_SCALING_RATIO,
                f"engine {format_times(engine)}, client {format_times(client)}",
            )


def _clients(clients: int) -> str:
    return "1 client" if clients == 1 else f"each of {clients} clients"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
