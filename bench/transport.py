"""``python -m bench transport``, and ``quick``: streams of messages by every peer.

A case is a size, a number of producers, and how many messages each has in flight. The processes of all peers for the cases of
one size live at the same time, and their repetitions take turns. A peer that is not installed, can't do a case or fails in it
is reported as such. Beside shmring, copies of as many bytes are timed, too: a shared machine's memory is not equally fast for
long.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from bench import columns
from bench.columns import Column, cross
from bench.command_line import benchmark
from bench.groups import Groups
from bench.machine import Copies
from bench.messages import Case, Measurement
from bench.peers import BASELINE, MEMCPY, PEERS
from bench.plan import Cases, Plan, Runs, Timing
from bench.repetitions import Measured, Number, median, ratio
from bench.results import Table, format_nbytes, format_rate, format_times
from bench.transport_targets import TARGETS

_SIZES = (4 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20)
_SEVERAL = (BASELINE, "iceoryx2")  # whose producers are several
_QUICK_LARGE = ("shmring", MEMCPY, "shmring-in-place", "iceoryx2", "iceoryx2-loaned", "spinning-arena", "pyzmq")
_COPIES_S = 0.1  # in each repetition
_BETTER = 1.05  # by how much a peer must be better to be called that; less is within the spread of most cases
_TITLES = {name: peer.title for name, peer in PEERS.items()} | {MEMCPY: "memcpy, cold"}


class Stored(msgspec.Struct, frozen=True):
    """Medians of a peer in a case, as they are stored, drawn, and quoted by the README."""

    case: Case
    peer: str
    messages_per_s: float
    p50_us: float
    shmring_ratio: float


def _stored(measured: Measured) -> list[Stored]:
    return [
        Stored(case, name, median(runs, _SPEED) or 0.0, p50_us, ratio(measured, case, BASELINE, name, _SPEED) or 0.0)
        for case, of_case in measured.items()
        for name, runs in of_case.items()
        if (p50_us := median(runs, "p50_us")) is not None
    ]


# -- as it is read ---------------------------------------------------------------------------------------------------------

_SPEED: Number = "messages_per_s"
_IN_FLIGHT: Mapping[str, Column] = {
    "messages per second": Column("", lambda row: format_rate(median(row.runs, _SPEED) or 0.0)),
    "shmring with one copy, as multiples of the peer's messages per second": Column(
        "", lambda row: format_times(ratio(row.measured, row.case, BASELINE, row.subject, _SPEED))
    ),
    "CPU microseconds per message, both sides": columns.median("", "both_us"),
}
_ONE_BY_ONE: Mapping[str, Column] = {
    "median one-way latency in microseconds": columns.median("", "p50_us"),
    "99th percentile of it": columns.median("", "p99_us"),
}


def _tables(measured: Measured) -> Iterator[Table]:
    for producers, window in dict.fromkeys((case.producers, case.window) for case in measured):
        group = {case: of for case, of in measured.items() if (case.producers, case.window) == (producers, window)}
        what = f"{producers} producer{'s' * (producers > 1)}, {window} in flight" + " of each" * (producers > 1)
        for title, column in (_IN_FLIGHT if window > 1 else _ONE_BY_ONE).items():
            yield cross(f"{title}, {what}", "transport", group, column, _TITLES, lambda case: format_nbytes(case.nbytes))
    yield from _not_best(measured)


_MEASURES: Mapping[str, Number] = {
    "messages/s": lambda run: 1 / run.messages_per_s,
    "median latency": "p50_us",
    "CPU per message": "both_us",
}


def _not_best(measured: Measured) -> Iterator[Table]:
    """Each case in which a peer was better: the best one, and how many times better. Who copies is compared with who copies."""
    for ours in ("shmring", "shmring-in-place"):
        peers = [name for name, peer in PEERS.items() if peer.in_place == PEERS[ours].in_place and "shmring" not in name]
        rows = []
        for case, of_case in measured.items():
            numbers = ({name: median(of_case.get(name, ()), of) for name in (ours, *peers)} for of in _MEASURES.values())
            if any(cells := [_best_other(of_peers, ours) for of_peers in numbers]):
                rows.append([case.title, *cells])
        if rows:
            yield Table(f"where {PEERS[ours].title}, is not the best choice", ["case", *_MEASURES], rows, tuple(_MEASURES))


def _best_other(numbers: Mapping[str, float | None], ours: str) -> str:
    others = {name: number for name, number in numbers.items() if number is not None and name != ours}
    mine, best = numbers[ours], min(others, key=others.__getitem__, default="")
    if mine is None or not best or mine / others[best] <= _BETTER:
        return ""
    return f"{PEERS[best].title}{'' if PEERS[best].event_driven else ' (spins)'}: {format_times(mine / others[best])}"


# -- commands --------------------------------------------------------------------------------------------------------------


def _cases() -> Iterator[tuple[Case, list[str]]]:
    for nbytes in _SIZES:
        yield Case(nbytes), [BASELINE, MEMCPY, *(name for name in PEERS if name != BASELINE)]
        yield Case(nbytes, window=1), list(PEERS)
        yield Case(nbytes, producers=8), list(_SEVERAL)


PLAN = Plan(
    mode="transport",
    cases=dict(_cases()),
    timing=Timing(5, 0.2, 0.15),
    titles=_TITLES,
    tables=_tables,
    targets=TARGETS,
    results=_stored,
)

#: What tells whether targets are met: where peers take seconds, only what a target is about.
_QUICK: Cases = {
    **{case: peers for case, peers in PLAN.cases.items() if case.producers == 1 and case.nbytes < _SIZES[-1]},
    Case(_SIZES[-1]): _QUICK_LARGE,
    Case(64 << 10, 8): [BASELINE],
    Case(8 << 20, window=1): ["shmring", "shmring-in-place"],
}
QUICK_PLAN = dataclasses.replace(PLAN, mode="quick", cases=_QUICK, timing=Timing(3, 0.15, 0.05))


def measure(runs: Runs, peers: Mapping[str, Any] = PEERS) -> None:
    """Measures a size after the other."""
    copies = functools.lru_cache(1)(Copies)

    def once(case: Case, name: str) -> Measurement:
        if name == MEMCPY:
            return Measurement(*copies(case.nbytes).measure(_COPIES_S), np.empty(0, np.int64))
        return groups.run(case, name)

    with Groups(peers, runs.plan.timing) as groups:
        for nbytes in dict.fromkeys(case.nbytes for case in runs.cases):
            of_size = [case for case in runs.cases if case.nbytes == nbytes]
            groups.prepare(runs, of_size)
            runs.measure(once, of_size)
    versions = {f"{peer.requires} {peer.version()}" for peer in peers.values() if peer.version() is not None}
    runs.notes.append(f"Load {os.getloadavg()[0]:.1f} at the end of the run. {', '.join(sorted(versions))}.")


@benchmark(PLAN)
def transport_command(runs: Runs) -> None:
    """One-way messages from producer processes to a consumer process, every one checked."""
    measure(runs)


@benchmark(QUICK_PLAN)
def quick_command(runs: Runs) -> None:
    """Transports in about five minutes: what a target is about, and for a shorter time."""
    measure(runs)
