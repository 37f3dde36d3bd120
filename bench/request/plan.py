"""What ``bench request`` measures, and measuring it.

Method: that of :mod:`bench.interleaving`. Medians over the repetitions are reported, with the spread beside them; latencies are
pooled. In each repetition all clients start at one moment and warm up, every process measures itself between two moments, and
every request and every reply is checked (:mod:`bench.request.questions`). A peer that can't be measured is a result, too: it
says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from bench.coverage import Coverage
from bench.interleaving import Plan, Round, Run
from bench.machine import Machine
from bench.peers import RequestPeer
from bench.request.processes import Measurement, RequestGroup
from bench.request.questions import Case, checks_us
from bench.results import Spread

__all__ = ["Checks", "Repetition", "Result", "Results", "rounds", "run"]


def rounds(
    groups: Sequence[Sequence[str]], sizes: Sequence[int], in_flight: Sequence[int], clients: Sequence[int], reply_nbytes: int
) -> list[Round[Case]]:
    """Returns every combination, in an order in which no process is started twice.

    Args:
        groups: names of peers; the first of each is what the others of the group are compared with.
    """
    return [
        Round((Case(nbytes, requests, number, reply_nbytes),), tuple(group))
        for group in groups
        for number in clients
        for requests in in_flight
        for nbytes in sizes
    ]


class Repetition(msgspec.Struct, frozen=True):
    """One repetition, as measured."""

    requests_per_s: float
    engine_us: float
    client_us: float


class Result(msgspec.Struct, frozen=True):
    """A peer in a cell.

    Attributes:
        baseline: the peer that it is compared with, in the same repetition.
        shmring_ratio: requests a second of the baseline over those of this peer.
        round_trip_p50_us, round_trip_p99_us, round_trip_p999_us: from before the request was handed over until its reply
            was there, with ``in_flight`` requests of each client on the way; over all repetitions.
        engine_us, client_us: microseconds of CPU for each request in the engine's process and in its client's, copies and
            the checks of the benchmark included.
        engine_ratio, client_ratio, cpu_ratio: of them, and of both together, to those of the baseline.
    """

    peer: str
    baseline: str
    nbytes: int
    reply_nbytes: int
    in_flight: int
    clients: int
    requests: int
    requests_per_s: Spread
    shmring_ratio: Spread
    round_trip_p50_us: float
    round_trip_p99_us: float
    round_trip_p999_us: float
    engine_us: Spread
    client_us: Spread
    engine_ratio: Spread
    client_ratio: Spread
    cpu_ratio: Spread
    repetitions: list[Repetition]


class Checks(msgspec.Struct, frozen=True):
    """What stamping and checking take of each request's CPU, in microseconds, whatever the transport."""

    nbytes: int
    engine_us: float
    client_us: float


class Results(msgspec.Struct, frozen=True):
    """A run."""

    machine: Machine
    reply_nbytes: int
    timed_s: float
    versions: dict[str, str]
    results: list[Result]
    checks: list[Checks]
    coverage: Coverage


def run(
    plan: Plan[Case],
    peers: Mapping[str, RequestPeer],
    progress: Callable[[str], None],
    keep: Callable[[Results], object],
) -> Results:
    """Measures what a plan says. When this returns or raises, no process and no file of it is left.

    Args:
        plan: what to measure.
        peers: by name.
        progress: called with a line before each step; ``plan.steps()`` says how many there are.
        keep: called after each round with what there is so far, so that a long run that is ended early was not for nothing.
    """
    checks: dict[int, Checks] = {}
    machine = Machine.here()
    versions = {name: version for name in plan.peers if (version := peers[name].version()) is not None}
    baselines = {name: part.peers[0] for part in plan.rounds for name in part.peers}

    def results() -> Results:
        there = [_result(case, name, baselines[name], pairs) for (case, name), pairs in running.measured.items()]
        reply_nbytes = plan.rounds[0].cases[0].reply_nbytes
        return Results(machine, reply_nbytes, plan.timed_s, versions, there, [*checks.values()], running.coverage())

    with Run(plan, peers, RequestGroup, progress) as running:
        for part in plan.rounds:
            running.play(part)
            for case in part.cases:
                if case.nbytes not in checks:
                    checks[case.nbytes] = _checks(case)
            keep(results())
    return results()


def _checks(case: Case) -> Checks:
    client_us, engine_us = checks_us(case.cell(warm_up_s=0.0, timed_s=0.0, limit_s=0.0, directory=""))
    return Checks(case.nbytes, engine_us, client_us)


def _result(case: Case, peer: str, baseline: str, pairs: list[tuple[Measurement, Measurement]]) -> Result:
    ours = [measurement for measurement, _ in pairs]
    latencies_us = np.concatenate([measurement.latencies_ns for measurement in ours]) / 1e3
    p50, p99, p999 = np.percentile(latencies_us, [50, 99, 99.9])
    return Result(
        peer=peer,
        baseline=baseline,
        **msgspec.structs.asdict(case),
        requests=sum(measurement.requests for measurement in ours),
        requests_per_s=Spread.of(measurement.requests_per_s for measurement in ours),
        shmring_ratio=Spread.of(base.requests_per_s / measurement.requests_per_s for measurement, base in pairs),
        round_trip_p50_us=float(p50),
        round_trip_p99_us=float(p99),
        round_trip_p999_us=float(p999),
        engine_us=Spread.of(measurement.engine_us for measurement in ours),
        client_us=Spread.of(measurement.client_us for measurement in ours),
        engine_ratio=Spread.of(measurement.engine_us / base.engine_us for measurement, base in pairs),
        client_ratio=Spread.of(measurement.client_us / base.client_us for measurement, base in pairs),
        cpu_ratio=Spread.of(measurement.cpu_us / base.cpu_us for measurement, base in pairs),
        repetitions=[
            Repetition(measurement.requests_per_s, measurement.engine_us, measurement.client_us) for measurement in ours
        ],
    )
