"""A run of transports: what each peer did in each case, what it cost, what the machine allows, what is missing; as tables.

Records are written to JSON as they are, with the machine and the versions they come from, and read back by ``bench report``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np

from bench.machine import Machine
from bench.messages import Case, Measurement
from bench.meter import Cost
from bench.peers import BASELINE, FORMER, PEERS
from bench.results import Coverage, Gap, Spread, Status, Table, format_rate, format_times

_COLUMNS = [
    "transport", "messages/s", "slowest, fastest", "GB/s", "p50 us", "p99 us", "p99.9 us", "CPU us/message", "CPU s/GB",
    "resident MB", "descriptors", "lag ms", "shmring is",
]  # fmt: skip


class Side(msgspec.Struct, frozen=True):
    """What the timed phase cost the consumer, or the producers.

    Attributes:
        cpu_us_per_message, cpu_s_per_gb: CPU time of all threads, user and system, of all producers together.
        resident_nbytes: the largest of the processes, shared memory and the benchmark's buffers aside.
        descriptors: open; of the process with most.
        lag_max_on_core_ms: of the event loop, waits for a core left out; None where it has no other work to do.
        connect_ms: how long a producer took to connect; None where the peer does not say.
        idle_percent: of a core, taken while connected with nothing to do; None where the peer has not looked.
    """

    cpu_us_per_message: Spread
    cpu_s_per_gb: float
    resident_nbytes: int
    descriptors: int
    lag_max_on_core_ms: Spread | None
    connect_ms: Spread | None = None
    idle_percent: Spread | None = None

    @classmethod
    def of(cls, repetitions: Sequence[Sequence[Cost]], nbytes: int) -> Side:
        """Sums up what each repetition cost each process of this side, in which messages of ``nbytes`` were moved."""
        cpu = Spread.of(sum(c.cpu_s for c in costs) / sum(c.messages for c in costs) * 1e6 for costs in repetitions)
        every = [cost for costs in repetitions for cost in costs]
        lags = [[cost.lag for cost in costs if cost.lag is not None] for costs in repetitions]
        connects = [cost.connect_s * 1e3 for cost in every if cost.connect_s is not None]
        idling = [cost.idle_share * 100 for cost in every if cost.idle_share is not None]
        return cls(
            cpu_us_per_message=cpu,
            cpu_s_per_gb=cpu.median / 1e6 / (nbytes / 1e9),
            resident_nbytes=max(cost.resident_nbytes for cost in every),
            descriptors=max(cost.descriptors for cost in every),
            lag_max_on_core_ms=Spread.of(max(lag.max_on_core_ms for lag in run) for run in lags) if all(lags) else None,
            connect_ms=Spread.of(connects) if connects else None,
            idle_percent=Spread.of(idling) if idling else None,
        )


class Result(msgspec.Struct, frozen=True):
    """A peer in a case.

    Attributes:
        runs: messages a second in each repetition; those of one case and index were measured beside each other.
        shmring_ratio: messages a second of the baseline over those of this peer, in the same repetition.
        baseline: the peer that it is compared with.
        consumer_us_runs, producer_us_runs: CPU microseconds of each message, in each repetition.
        latency_p50_us: one-way, behind up to a window of messages: the median of each repetition.
        latency_p99_us, latency_p999_us: the same over all repetitions.
    """

    peer: str
    case: Case
    messages_per_s: Spread
    runs: list[float]
    gb_per_s: float
    shmring_ratio: Spread
    latency_p50_us: Spread
    latency_p99_us: float
    latency_p999_us: float
    consumer: Side
    producer: Side
    baseline: str = "shmring"
    consumer_us_runs: list[float] = []
    producer_us_runs: list[float] = []

    @property
    def cpu_us(self) -> float:
        """CPU microseconds of a message at both sides."""
        return self.producer.cpu_us_per_message.median + self.consumer.cpu_us_per_message.median

    @classmethod
    def of(
        cls, peer: str, case: Case, measurements: Sequence[Measurement], beside: Sequence[Measurement], baseline: str
    ) -> Result:
        """Sums up a peer's repetitions beside the baseline's."""
        runs = [measurement.messages_per_s for measurement in measurements]
        latencies_us = [measurement.latencies_ns / 1e3 for measurement in measurements]
        p99, p999 = np.percentile(np.concatenate(latencies_us), [99, 99.9])
        speed = Spread.of(runs)
        return cls(
            peer=peer,
            case=case,
            messages_per_s=speed,
            runs=runs,
            gb_per_s=speed.median * case.nbytes / 1e9,
            shmring_ratio=Spread.of(base.messages_per_s / per_s for base, per_s in zip(beside, runs, strict=True)),
            latency_p50_us=Spread.of(float(np.median(latencies)) for latencies in latencies_us),
            latency_p99_us=float(p99),
            latency_p999_us=float(p999),
            consumer=Side.of([[m.consumer] for m in measurements if m.consumer is not None], case.nbytes),
            producer=Side.of([m.producers for m in measurements], case.nbytes),
            baseline=baseline,
            consumer_us_runs=[m.consumer_us for m in measurements],
            producer_us_runs=[m.producer_us for m in measurements],
        )


class Limit(msgspec.Struct, frozen=True):
    """What the machine's memory allows at a size: copies and reads a second.

    Attributes:
        copies_cold_per_s: memcpy to another place each time, through more memory than the last-level cache holds.
        copies_hot_per_s: memcpy to the same place each time.
        reads_per_s: a read of another place each time.
        copies_cold_runs: of each repetition, beside those of the results of that size and one producer.
    """

    nbytes: int
    copies_cold_per_s: Spread
    copies_hot_per_s: Spread
    reads_per_s: Spread
    copies_cold_runs: list[float]


class Results(msgspec.Struct, frozen=True):
    """A run.

    Attributes:
        load_before: processes that wanted a core in the minute before the run.
        torch_resident_nbytes: what a process holds that has only imported torch.
        command: what was typed; empty where it was not kept.
        versions: of what the peers are made of, by peer.
        coverage: what was planned, and what is missing of it; None in results that are older than the record.
    """

    mode: str
    started: str
    machine: Machine
    versions: dict[str, str]
    load_before: float
    torch_resident_nbytes: int
    repetitions: int
    timed_s: float
    results: list[Result]
    limits: list[Limit]
    command: str = ""
    coverage: Coverage | None = None

    @property
    def failed(self) -> list[Gap]:
        """What was tried and went wrong."""
        return [gap for gap in self.coverage.gaps if gap.status is Status.FAILED] if self.coverage is not None else []

    def find(self, peer: str, case: Case) -> Result | None:
        """Returns a peer's result in a case, if there is one."""
        return next((result for result in self.results if result.peer == peer and result.case == case), None)

    def base(self, peer: str, nbytes: int, window: int = 16) -> Result | None:
        """Returns a peer's result of one producer and float32, with so many messages in flight, or as many as memory allows."""
        return self.find(peer, Case(nbytes, window=window).bounded())


# -- as tables -----------------------------------------------------------------------------------------------------------


def peer_title(name: str) -> str:
    """Returns a peer as tables spell it; its name, if nothing is known of it."""
    return PEERS[name].title if name in PEERS else FORMER.get(name, name)


def transport_tables(results: Results) -> Iterator[Table]:
    """Yields a table for each case, the limits of the machine below the first of its size."""
    limits = {limit.nbytes: limit for limit in results.limits}
    for case in dict.fromkeys(result.case for result in results.results):
        rows = [result for result in results.results if result.case == case]
        limit = limits.pop(case.nbytes, None) if case.producers == 1 else None
        yield _case_table(case, rows, limit)


def _case_table(case: Case, results: Sequence[Result], limit: Limit | None) -> Table:
    rows = [
        [
            peer_title(result.peer),
            *_speed(result.messages_per_s, case.nbytes),
            *(f"{us:,.0f}" for us in (result.latency_p50_us.median, result.latency_p99_us, result.latency_p999_us)),
            _both(result, lambda side: f"{side.cpu_us_per_message.median:,.0f}"),
            _both(result, lambda side: f"{side.cpu_s_per_gb:.3g}"),
            _both(result, lambda side: str(side.resident_nbytes >> 20)),
            _both(result, lambda side: str(side.descriptors)),
            _both(result, lambda side: "-" if side.lag_max_on_core_ms is None else f"{side.lag_max_on_core_ms.median:.1f}"),
            format_times(result.shmring_ratio.median),
        ]
        for result in results
    ]
    if limit is not None:
        ours = next((result.messages_per_s.median for result in results if result.peer == BASELINE), None)
        for name, speed in (
            ("memcpy to the next place, cold", limit.copies_cold_per_s),
            ("memcpy to the same place, hot", limit.copies_hot_per_s),
            ("read of the next place", limit.reads_per_s),
        ):
            times = format_times(ours / speed.median) if ours else ""
            rows.append([name, *_speed(speed, case.nbytes), *[""] * (len(_COLUMNS) - 5), times])
    return Table(case.title, _COLUMNS, rows)


def _both(result: Result, text: Callable[[Side], str]) -> str:
    return f"{text(result.producer)}, {text(result.consumer)}"


def _speed(speed: Spread, nbytes: int) -> tuple[str, str, str]:
    return (
        format_rate(speed.median),
        f"{format_rate(speed.minimum)} .. {format_rate(speed.maximum)}",
        f"{speed.median * nbytes / 1e9:.2f}",
    )
