"""``bench transport``: one-way messages from a producer process to a consumer process, by every peer, in one run.

Method: all processes are started first. Then, size by size, repetitions are interleaved (A B C D A B C D ...): whatever
else the machine does hits all peers alike, and the ratio to shmring is taken within each repetition. Medians over the
repetitions are reported, with the spread beside them; latencies are pooled. Each repetition warms up first, is timed at
the consumer, from the first timed message checked to the last, and checks every message (:mod:`bench.messages`). A copy
of as many bytes into a warm buffer is timed in each repetition, too: the physical limit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import tempfile
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from bench.machine import Machine, copies_per_s
from bench.messages import Cell, Measurement
from bench.peers import PEERS
from bench.processes import Pair

__all__ = ["BASELINE", "Limit", "Plan", "Result", "Results", "Spread", "run", "steps"]

#: What the others are compared with.
BASELINE = next(iter(PEERS))

_MEMCPY_S = 0.05  # in each repetition


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure.

    Attributes:
        peers: keys of :data:`bench.peers.PEERS`; the baseline is among them.
        sizes: of a message's tensor in bytes, multiples of 4.
        repetitions: of each peer and size.
        timed_s, warm_up_s: of each repetition.
        window: messages in flight.
        limit_s: after which a repetition has failed.
    """

    peers: Sequence[str]
    sizes: Sequence[int]
    repetitions: int
    timed_s: float
    warm_up_s: float
    window: int
    limit_s: float = 30.0


class Spread(msgspec.Struct, frozen=True):
    """A number over the repetitions."""

    median: float
    minimum: float
    maximum: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Spread:
        return cls(statistics.median(numbers), min(numbers), max(numbers))


class Result(msgspec.Struct, frozen=True):
    """A peer at a size.

    Attributes:
        shmring_ratio: messages a second of the baseline over those of this peer, in the same repetition.
        latency_p50_us, latency_p99_us: one-way, with ``window`` messages in flight; over all repetitions.
    """

    peer: str
    nbytes: int
    messages: int
    messages_per_s: Spread
    shmring_ratio: Spread
    latency_p50_us: float
    latency_p99_us: float


class Limit(msgspec.Struct, frozen=True):
    """What a copy alone allows at a size."""

    nbytes: int
    copies_per_s: Spread
    shmring_ratio: Spread


class Results(msgspec.Struct, frozen=True):
    """A run."""

    machine: Machine
    window: int
    repetitions: int
    timed_s: float
    results: list[Result]
    limits: list[Limit]


def run(plan: Plan, progress: Callable[[str], None]) -> Results:
    """Measures what a plan says. When this returns or raises, no process and no file of it is left.

    Args:
        plan: what to measure.
        progress: called with a line before each step; :func:`steps` says how many there are.

    Raises:
        BenchError: a message was not what was sent, or a process died or took too long.
    """
    results: list[Result] = []
    limits: list[Limit] = []
    with tempfile.TemporaryDirectory(prefix="shmring-bench-") as directory, contextlib.ExitStack() as stack:
        progress(f"starting {2 * len(plan.peers)} processes")
        pairs = {name: stack.enter_context(Pair(name)) for name in plan.peers}
        for pair in pairs.values():
            pair.start()
        for nbytes in plan.sizes:
            cell = Cell(
                nbytes=nbytes,
                window=plan.window,
                warm_up_s=plan.warm_up_s,
                timed_s=plan.timed_s,
                limit_s=plan.limit_s,
                directory=directory,
            )
            measurements: dict[str, list[Measurement]] = {name: [] for name in plan.peers}
            copies: list[float] = []
            for repetition in range(plan.repetitions):
                for name, pair in pairs.items():
                    progress(f"{nbytes:,} bytes, repetition {repetition + 1} of {plan.repetitions}: {PEERS[name].title}")
                    measurements[name].append(pair.run(cell))
                copies.append(copies_per_s(nbytes, _MEMCPY_S))
            baseline = [measurement.messages_per_s for measurement in measurements[BASELINE]]
            results += [_result(name, nbytes, measurements[name], baseline) for name in plan.peers]
            limits.append(Limit(nbytes, Spread.of(copies), _ratio(baseline, copies)))
    return Results(Machine.here(), plan.window, plan.repetitions, plan.timed_s, results, limits)


def steps(plan: Plan) -> int:
    """Returns how often :func:`run` reports progress."""
    return 1 + len(plan.sizes) * plan.repetitions * len(plan.peers)


def _result(name: str, nbytes: int, measurements: list[Measurement], baseline: list[float]) -> Result:
    speeds = [measurement.messages_per_s for measurement in measurements]
    p50, p99 = np.percentile(np.concatenate([measurement.latencies_ns for measurement in measurements]), [50, 99]) / 1e3
    return Result(
        peer=name,
        nbytes=nbytes,
        messages=sum(measurement.messages for measurement in measurements),
        messages_per_s=Spread.of(speeds),
        shmring_ratio=_ratio(baseline, speeds),
        latency_p50_us=float(p50),
        latency_p99_us=float(p99),
    )


def _ratio(baseline: list[float], speeds: list[float]) -> Spread:
    return Spread.of([ours / theirs for ours, theirs in zip(baseline, speeds, strict=True)])
