"""``python -m bench transport``, and ``quick``: streams of messages by every peer.

A case is a size, a number of producers, and how many messages each has in flight. The processes of all peers for the cases of
one size live at the same time, and their repetitions take turns. A peer that is not installed, can't do a case or fails in it
is reported as such. Beside shmring, copies of as many bytes are timed, too: a shared machine's memory is not equally fast for
long.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import click
import msgspec
import numpy as np

from bench import columns
from bench.columns import Column, cross
from bench.command_line import benchmark, repeatable, size_option
from bench.groups import Groups
from bench.machine import Copies
from bench.messages import Case, Measurement
from bench.peers import BASELINE, MEMCPY, PEERS
from bench.repetitions import Measured, Number, Repetitions, Timing, median, ratio
from bench.results import Coverage, Findings, Table, format_nbytes, format_rate, format_times
from bench.stamps import ITEM_NBYTES
from bench.targets import TARGETS, Target

#: Who is measured in a case.
Plan = dict[Case, Sequence[str]]

_SIZES = (4 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20)
_WINDOWS, _PRODUCERS = (16, 1), (1, 8)
_SEVERAL = (BASELINE, "iceoryx2")  # whose producers are several, unless peers were chosen
_QUICK_LARGE = ("shmring", MEMCPY, "shmring-in-place", "iceoryx2", "iceoryx2-loaned", "spinning-arena", "pyzmq")
_LONGER = Timing(5, 0.5, 0.15)  # of what has missed a target
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


def plan(
    sizes: Sequence[int] = (), producers: Sequence[int] = (), windows: Sequence[int] = (), peers: Sequence[str] = ()
) -> Plan:
    """Returns the cases of what the options of ``bench transport`` mean, by size."""
    names = [name for name in PEERS if not peers or name in peers or name == BASELINE]
    with_copies = [BASELINE, MEMCPY, *names[1:]]
    cases: Plan = {}
    for nbytes, number in itertools.product(sizes or _SIZES, producers or _PRODUCERS):
        for window in (windows or _WINDOWS) if number == 1 else _WINDOWS[:1]:
            cases[Case(nbytes, number, window)] = names
        if number > 1 and not peers:
            cases[Case(nbytes, number)] = _SEVERAL
        elif (base := Case(nbytes)) in cases:
            cases[base] = with_copies
    return cases


def quick_plan() -> Plan:
    """Returns the cases that tell whether targets are met: where peers take seconds, only those that a target is about."""
    cases = plan(_SIZES[:4], (1,)) | {Case(_SIZES[4]): _QUICK_LARGE, Case(64 << 10, 8): [BASELINE]}
    return cases | {Case(8 << 20, window=1): ["shmring", "shmring-in-place"]}


def measure(cases: Plan, timing: Timing, peers: Mapping[str, Any] = PEERS) -> Iterator[tuple[Measured, Coverage]]:
    """Measures cases, a size after the other; yields what there is after each, lest a run that is ended was for nothing."""
    runs = Repetitions[Case, Measurement](cases, timing.repetitions)
    with Groups(peers, timing) as groups:
        for nbytes in dict.fromkeys(case.nbytes for case in cases):
            of_size = [case for case in cases if case.nbytes == nbytes]
            groups.prepare(runs, of_size)
            copies = functools.cache(Copies)

            def once(case: Case, name: str, copies: Callable[[int], Copies] = copies) -> Measurement:
                if name == MEMCPY:
                    return Measurement(*copies(case.nbytes).measure(_COPIES_S), np.empty(0, np.int64))
                return groups.run(case, name)

            runs.measure(of_size, once, _TITLES)
            yield runs.measured, runs.coverage()


def decisive(measured: Measured, missed: Sequence[Target]) -> Plan:
    """Returns the cases and peers without which those targets would miss something else."""

    def misses(measured: Measured) -> list[list[tuple[str, float]]]:
        return [target.misses(measured) for target in missed]

    all_of_it = misses(measured)

    def decides(case: Case, *names: str) -> bool:
        left = {name: runs for name, runs in measured[case].items() if name not in names}
        return misses({**measured, case: left}) != all_of_it

    return {
        case: [name for name in of_case if name == BASELINE or decides(case, name)]
        for case, of_case in measured.items()
        if decides(case, *of_case)
    }


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


def report(measured: Measured, coverage: Coverage, timing: Timing) -> Findings:
    tables = []
    for producers, window in dict.fromkeys((case.producers, case.window) for case in measured):
        group = {case: of for case, of in measured.items() if (case.producers, case.window) == (producers, window)}
        what = f"{producers} producer{'s' * (producers > 1)}, {window} in flight" + " of each" * (producers > 1)
        for title, column in (_IN_FLIGHT if window > 1 else _ONE_BY_ONE).items():
            table = cross(f"{title}, {what}", "transport", group, column, _TITLES, lambda case: format_nbytes(case.nbytes))
            tables.append(table)
    versions = sorted({f"{peer.requires} {peer.version()}" for peer in PEERS.values() if peer.version() is not None})
    return Findings(
        mode="transport",
        tables=[*tables, *_not_best(measured)],
        notes=[
            f"{timing.repetitions} repetitions of {timing.timed_s:g} s. Load {os.getloadavg()[0]:.1f} at the end of the run. "
            f"{', '.join(versions)}."
        ],
        targets=[target.judge(measured) for target in TARGETS],
        results=[
            Stored(case, name, median(runs, _SPEED) or 0.0, p50_us, ratio(measured, case, BASELINE, name, _SPEED) or 0.0)
            for case, of_case in measured.items()
            for name, runs in of_case.items()
            if (p50_us := median(runs, "p50_us")) is not None
        ],
        coverage=coverage,
    )


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


@benchmark("transport", Timing(5, 0.2, 0.15))
@size_option("4KiB, 64KiB, 1MiB, 8MiB, 64MiB", ITEM_NBYTES)
@repeatable("--producers", "producers", click.IntRange(1, 127), "Processes", "1, 8")
@repeatable("--window", "windows", click.IntRange(1, 1024), "Messages in flight of one producer", "16, 1")
@repeatable("--peer", "peers", PEERS, "Beside shmring")
def transport_command(timing: Timing, **choices: Any) -> Generator[Findings, None, None]:
    """One-way messages from producer processes to a consumer process, every one checked."""
    for measured, coverage in measure(plan(**choices), timing):
        yield report(measured, coverage, timing)


@benchmark("quick", Timing(3, 0.15, 0.05))
def quick_command(timing: Timing) -> Generator[Findings, None, None]:
    """Transports in about 5 minutes, and more where a target is missed, to measure again, longer, what misses it."""
    for measured, coverage in measure(quick_plan(), timing):
        yield (findings := report(measured, coverage, timing))
    missed = {target: verdict for target, verdict in zip(TARGETS, findings.targets, strict=True) if verdict.fails}
    if not missed or findings.failures:
        return
    first = dict(measured)
    for newer, _ in measure(decisive(measured, list(missed)), _LONGER):
        measured = {case: {**first[case], **newer.get(case, {})} for case in first}
    verdicts = []
    for target, verdict in zip(TARGETS, findings.targets, strict=True):
        if target in missed:
            again = target.judge(measured)
            detail = f"{again.detail}; measured again, longer: at first {verdict.measured}"
            verdict = msgspec.structs.replace(again, detail=detail)
        verdicts.append(verdict)
    yield msgspec.structs.replace(report(measured, coverage, timing), targets=verdicts)
