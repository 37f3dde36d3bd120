"""``python -m bench request``: requests with payloads, each with its reply, many in flight, by shmring and by its peers."""

from __future__ import annotations

import itertools
from collections.abc import Generator
from typing import Any

import click

from bench import columns
from bench.columns import compare
from bench.command_line import benchmark, chosen, repeatable, size_option
from bench.groups import Groups
from bench.messages import Measurement
from bench.peers import BASELINE, REQUEST_PEERS
from bench.repetitions import Measured, Repetitions, Timing
from bench.request.questions import MAX_CLIENTS, Case
from bench.request.scaling import BASES, VARIANTS
from bench.results import Coverage, Findings
from bench.stamps import ITEM_NBYTES
from bench.targets import Target, medians, ratios

_SIZES = (4 << 10, 64 << 10, 1 << 20, 8 << 20)
_CASES = {"sizes": _SIZES, "in_flight": (1, 16, 64), "clients": (1, 4)}
SCALED = Case(_SIZES[0], window=32, reply_nbytes=64)  # one of each client, where all of them ask

_TITLES = {name: peer.title for name, peer in (REQUEST_PEERS | VARIANTS).items()}
_SPEED = "messages_per_s"
_COSTS = (columns.median("engine us", "consumer_us", 1), columns.median("client us", "producer_us", 1))
_COLUMNS = (
    columns.median("requests/s", _SPEED),
    columns.spread("spread", _SPEED),
    columns.ratio("shmring is", BASELINE, _SPEED),
    columns.median("p50 us", "p50_us"),
    columns.median("p99 us", "p99_us"),
    *_COSTS,
)


_SCALING_COLUMNS = (
    columns.median("requests/s", _SPEED),
    *_COSTS,
    columns.over("engine", BASES.__getitem__, "consumer_us"),
    columns.over("client", BASES.__getitem__, "producer_us"),
    columns.over("both", BASES.__getitem__, "both_us"),
)

_CASE = {"64 KB": Case(64 << 10, reply_nbytes=64)}
_WHAT = "request/reply, 16 in flight, one client"
TARGETS = (
    Target(_WHAT, "64 KB", 20_000, "/s", medians(BASELINE, _SPEED, _CASE)),
    Target(f"{_WHAT}: of pyzmq's", "64 KB", 5, "x", ratios(BASELINE, "pyzmq", _SPEED, _CASE)),
)


SCALING_TARGETS = tuple(
    Target(
        f"CPU time per request with {_TITLES[variant]}", "4 KB", 1.2, "x",
        ratios(variant, base, "both_us", {SCALED.title: SCALED}), at_least=False,
    )
    for variant, base in BASES.items()
    if variant != base
)  # fmt: skip


def report(measured: Measured, coverage: Coverage, timing: Timing, scaling: bool = False) -> Findings:
    notes = [
        f"Every request and every reply is checked. Medians of interleaved repetitions of {timing.timed_s:g} s. engine, "
        "client: microseconds of CPU of the whole process for each request, with copies and the benchmark's own checks."
    ]
    if scaling:
        notes += [
            "engine, client, both: the ratio to 1 client, or to 10 slots in use, in the same repetition. If all of 32 clients "
            "ask, each request needs a write and a read of its own on both sides. The requests of one connection share them."
        ]
    else:
        notes += [
            "spread: the slowest and the fastest, compared with the median. shmring is: shmring's requests/s, divided by those "
            "of the row in the same repetition. Round trips begin before the request is handed over and end when its reply is "
            "there: medians of each repetition's percentiles."
        ]
        notes += [f"{peer.requires} {peer.version()}" for peer in REQUEST_PEERS.values() if peer.version() is not None]
    title = "what a request costs, by what else there is" if scaling else "requests of a tensor, replies of 64 B"
    shown = _SCALING_COLUMNS if scaling else _COLUMNS
    return Findings(
        mode="request-scaling" if scaling else "request",
        tables=[compare(title, ("request", "transport"), measured, shown, _TITLES)],
        notes=notes,
        targets=[target.judge(measured) for target in (SCALING_TARGETS if scaling else TARGETS)],
        coverage=coverage,
    )


def plan(scaling: bool, peers: tuple[str, ...], **dimensions: tuple[int, ...]) -> dict[Case, list[str]]:
    """Returns who is measured in which cases, in an order in which no process is started twice."""
    if scaling:
        if peers or any(dimensions.values()):
            raise click.UsageError("--scaling measures shmring alone, in a case of its own: no choice of cases or peers")
        return {SCALED: list(VARIANTS)}
    names = [name for name in REQUEST_PEERS if not peers or name in peers or name == BASELINE]
    values = chosen(_CASES, **dimensions)
    cases = itertools.product(values["clients"], values["in_flight"], values["sizes"])
    return {Case(nbytes, number, in_flight, reply_nbytes=64): names for number, in_flight, nbytes in cases}


@benchmark("request", Timing(5, 0.3, 0.25))
@size_option("4KiB, 64KiB, 1MiB, 8MiB", ITEM_NBYTES)
@repeatable("--in-flight", "in_flight", click.IntRange(1, 1024), "Of each client", "1, 16, 64")
@repeatable("--clients", "clients", click.IntRange(1, MAX_CLIENTS), "Processes", "1, 4")
@repeatable("--peer", "peers", REQUEST_PEERS, "Beside shmring")
@click.option("--scaling", is_flag=True, help="Instead: what a request costs at 1 and 32 clients, 10 and 10,000 slots in use.")
def request_command(timing: Timing, scaling: bool, **choices: Any) -> Generator[Findings, None, None]:
    """Requests with a payload, each with its reply, many in flight; all of them checked."""
    cases = plan(scaling=scaling, **choices)
    runs = Repetitions[Case, Measurement](cases, timing.repetitions)
    with Groups(REQUEST_PEERS | VARIANTS, timing) as groups:
        for case in cases:
            groups.prepare(runs, [case])
            runs.measure([case], groups.run, _TITLES)
            yield report(runs.measured, runs.coverage(), timing, scaling)
