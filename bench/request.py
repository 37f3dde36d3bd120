"""``python -m bench request``: requests with payloads, each with its reply, many in flight, by shmring and by its peers.

And by shmring alone, whether a request costs more of 32 clients in one process, of which one asks or all in turn. With all,
requests that one connection would have carried in one write and one read take a write and a read each.
"""

from __future__ import annotations

import itertools

from bench import columns
from bench.command_line import benchmark
from bench.groups import Groups
from bench.peers import BASELINE, REQUEST_PEERS, SEVERAL_CLIENTS
from bench.plan import Plan, Runs, Timing
from bench.questions import Case
from bench.targets import Target, medians, ratios

_PEERS = REQUEST_PEERS | SEVERAL_CLIENTS
_TITLES = {name: peer.title for name, peer in _PEERS.items()}
_SPEED = "messages_per_s"
_COLUMNS = (
    columns.median("requests/s", _SPEED),
    columns.spread("spread", _SPEED),
    columns.ratio("shmring is", BASELINE, _SPEED),
    columns.median("p50 us", "p50_us"),
    columns.median("p99 us", "p99_us"),
    columns.median("engine us", "consumer_us", 1),
    columns.median("client us", "producer_us", 1),
)

_SCALED = Case(4 << 10, window=32, reply_nbytes=64)  # one of each client, where all of them ask
_SIZES, _IN_FLIGHT, _CLIENTS = (4 << 10, 64 << 10, 1 << 20, 8 << 20), (1, 16, 64), (1, 4)

#: Who is measured in which cases, in an order in which no process is started twice.
CASES = {
    Case(nbytes, clients, in_flight, reply_nbytes=64): list(REQUEST_PEERS)
    for clients, in_flight, nbytes in itertools.product(_CLIENTS, _IN_FLIGHT, _SIZES)
} | {_SCALED: [BASELINE, *SEVERAL_CLIENTS]}

_CASE = {"64 KB": Case(64 << 10, reply_nbytes=64)}
_WHAT = "request/reply, 16 in flight, one client"
TARGETS = (
    Target(_WHAT, "64 KB", 20_000, "/s", medians(BASELINE, _SPEED, _CASE)),
    Target(f"{_WHAT}: of pyzmq's", "64 KB", 5, "x", ratios(BASELINE, "pyzmq", _SPEED, _CASE)),
    *(
        Target(
            f"CPU time per request with {peer.title}", "4 KB", 1.2, "x",
            ratios(name, BASELINE, "both_us", {_SCALED.title: _SCALED}), at_least=False,
        )
        for name, peer in SEVERAL_CLIENTS.items()
    ),
)  # fmt: skip


PLAN = Plan(
    mode="request",
    cases=CASES,
    timing=Timing(5, 0.3, 0.25),
    titles=_TITLES,
    tables=columns.shown_as("requests of a tensor, replies of 64 B", ("request", "transport"), _COLUMNS, _TITLES),
    targets=TARGETS,
    notes=[
        "Every request and every reply is checked. engine, client: microseconds of CPU for each request, with copies and the "
        "benchmark's own checks. Round trips begin before the request is handed over and end when its reply is there: medians "
        "of each repetition's percentiles.",
        *(f"{peer.requires} {peer.version()}" for peer in REQUEST_PEERS.values() if peer.version() is not None),
    ],
)


@benchmark(PLAN)
def request_command(runs: Runs) -> None:
    """Requests with a payload, each with its reply, many in flight; all of them checked."""
    with Groups(_PEERS, runs.plan.timing) as groups:
        for case in runs.cases:
            groups.prepare(runs, [case])
            runs.measure(groups.run, [case])
