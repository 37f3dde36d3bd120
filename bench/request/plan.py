"""What ``bench request`` measures, and measuring it.

Method: for each number of clients, all processes are started first. Then, cell by cell, repetitions are interleaved (A B C
A B C ...): whatever else the machine does hits all peers alike, and the ratio to shmring is taken within each repetition.
Medians over the repetitions are reported, with the spread beside them; latencies are pooled. In each repetition all
clients start at one moment and warm up, every process measures itself between two moments, and every request and every
reply is checked (:mod:`bench.request.questions`). A peer that can't be measured is a result, too: it says why.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import numpy as np

from bench.coverage import Coverage, Key, Planned, Status
from bench.machine import Machine
from bench.peers import RequestPeer
from bench.peers.memory import available_nbytes
from bench.request.processes import Group, Measurement
from bench.request.questions import Cell, checks_us
from bench.results import Spread, format_nbytes

__all__ = ["Checks", "Plan", "Repetition", "Result", "Results", "planned", "run", "steps"]

_COPIES_IN_FLIGHT = 3  # of all questions at a time: at their client, on their way, at the engine


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure: every combination of these.

    Attributes:
        groups: of peers; the first of each is what the others of the group are compared with.
        sizes: of a question's tensor in bytes, multiples of 4.
        in_flight: requests of each client.
        clients: processes that ask.
        reply_nbytes: size of a reply's tensor, a multiple of 4.
        repetitions: of each peer and cell.
        timed_s, warm_up_s: of each repetition.
        limit_s: after which a repetition has failed.
    """

    groups: Sequence[Sequence[RequestPeer]]
    sizes: Sequence[int]
    in_flight: Sequence[int]
    clients: Sequence[int]
    reply_nbytes: int
    repetitions: int
    timed_s: float
    warm_up_s: float
    limit_s: float = 120.0

    @property
    def peers(self) -> list[RequestPeer]:
        """Of all groups."""
        return list(itertools.chain.from_iterable(self.groups))

    def cells(self, clients: int, directory: str) -> Iterator[Cell]:
        """The cells of a number of clients, in the order in which they are measured."""
        for in_flight in self.in_flight:
            for nbytes in self.sizes:
                yield Cell(
                    nbytes=nbytes,
                    reply_nbytes=self.reply_nbytes,
                    in_flight=in_flight,
                    clients=clients,
                    warm_up_s=self.warm_up_s,
                    timed_s=self.timed_s,
                    limit_s=self.limit_s,
                    directory=directory,
                )


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


def planned(plan: Plan) -> list[Planned]:
    """Returns the cases of a plan."""
    return [
        Planned(title(nbytes, in_flight, clients), [peer.name for peer in plan.peers], plan.repetitions)
        for clients in plan.clients
        for in_flight in plan.in_flight
        for nbytes in plan.sizes
    ]


def title(nbytes: int, in_flight: int, clients: int) -> str:
    """Returns a case in words."""
    return f"{format_nbytes(nbytes)}, {in_flight} in flight of {clients} client{'s' * (clients > 1)}"


def run(plan: Plan, progress: Callable[[str], None], keep: Callable[[Results], object] | None = None) -> Results:
    """Measures what a plan says. When this returns or raises, no process and no file of it is left.

    Args:
        plan: what to measure.
        progress: called with a line before each step; :func:`steps` says how many there are at most.
        keep: called after each cell with what there is so far, so that a long run that is ended early was not for nothing.

    Raises:
        BenchError: a request or a reply was not what was sent, or a process died or took too long.
    """
    reasons: dict[Key, tuple[Status, str]] = {}  # why something is not measured
    for case, peer in itertools.product(planned(plan), plan.peers):
        if (missing := peer.missing()) is not None:
            reasons[case.case, peer.name] = Status.EXCLUDED, missing
    peers = [peer for peer in plan.peers if peer.missing() is None]
    versions = {peer.name: found for peer in peers if (found := peer.version()) is not None}
    results: list[Result] = []
    checks: dict[int, Checks] = {}
    machine = Machine.here()

    def so_far() -> Results:
        there = {(title(result.nbytes, result.in_flight, result.clients), result.peer): plan.repetitions for result in results}
        coverage = Coverage.of(planned(plan), there, reasons)
        return Results(machine, plan.reply_nbytes, plan.timed_s, versions, [*results], [*checks.values()], coverage)

    for clients in plan.clients:
        with tempfile.TemporaryDirectory(prefix="shmring-bench-") as directory:
            progress(f"starting {(clients + 1) * len(peers)} processes")
            with started(peers, clients) as groups:
                for cell in plan.cells(clients, directory):
                    if cell.nbytes not in checks:
                        checks[cell.nbytes] = _checks(cell)
                    case_title = title(cell.nbytes, cell.in_flight, clients)
                    for peer in peers:
                        if (reason := _reason(peer, cell)) is not None:
                            reasons[case_title, peer.name] = Status.EXCLUDED, reason
                    able = {peer: group for peer, group in groups.items() if (case_title, peer.name) not in reasons}
                    results += _results(plan, cell, _measured(able, cell, plan.repetitions, progress))
                    if keep is not None:
                        keep(so_far())
    return so_far()


def steps(plan: Plan) -> int:
    """Returns how often :func:`run` reports progress, at most."""
    return len(plan.clients) * (1 + len(plan.sizes) * len(plan.in_flight) * plan.repetitions * len(plan.peers))


@contextlib.contextmanager
def started(peers: Sequence[RequestPeer], clients: int) -> Iterator[dict[RequestPeer, Group]]:
    """The processes of these peers, all started at the same time; they end when this is left."""
    with contextlib.ExitStack() as stack:
        groups = {peer: stack.enter_context(Group(peer, clients)) for peer in peers}
        for group in groups.values():
            group.start()
        yield groups


def _measured(
    groups: dict[RequestPeer, Group], cell: Cell, repetitions: int, progress: Callable[[str], None]
) -> dict[RequestPeer, list[Measurement]]:
    """Runs a cell on all groups in turn, again and again."""
    measurements: dict[RequestPeer, list[Measurement]] = {peer: [] for peer in groups}
    for repetition in range(repetitions):
        for peer, group in groups.items():
            progress(
                f"{cell.nbytes:,} bytes, {cell.in_flight} in flight, clients: {cell.clients}, "
                f"repetition {repetition + 1} of {repetitions}: {peer.title}"
            )
            measurements[peer].append(group.run(cell))
    return measurements


def _checks(cell: Cell) -> Checks:
    client_us, engine_us = checks_us(cell)
    return Checks(cell.nbytes, engine_us, client_us)


def _reason(peer: RequestPeer, cell: Cell) -> str | None:
    """Why a cell can't be measured with a peer."""
    needed, available = _COPIES_IN_FLIGHT * cell.total_nbytes, available_nbytes()
    if needed > available:
        return f"it takes {needed / 2**30:.1f} GiB of memory, {available / 2**30:.1f} are available"
    return peer.limits(cell)


def _results(plan: Plan, cell: Cell, measurements: Mapping[RequestPeer, list[Measurement]]) -> Iterator[Result]:
    for first, *others in plan.groups:
        for peer in (first, *others):
            if peer in measurements:
                yield _result(cell, peer, measurements[peer], first, measurements[first])


def _result(cell: Cell, peer: RequestPeer, ours: list[Measurement], first: RequestPeer, theirs: list[Measurement]) -> Result:
    latencies_us = np.concatenate([measurement.latencies_ns for measurement in ours]) / 1e3
    p50, p99, p999 = np.percentile(latencies_us, [50, 99, 99.9])
    pairs = list(zip(ours, theirs, strict=True))
    return Result(
        peer=peer.name,
        baseline=first.name,
        nbytes=cell.nbytes,
        reply_nbytes=cell.reply_nbytes,
        in_flight=cell.in_flight,
        clients=cell.clients,
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
