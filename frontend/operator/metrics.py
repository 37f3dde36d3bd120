"""The numbers of a server, for Prometheus: those of its frontends, and those of its engines.

A request is counted in plain records (:class:`HttpStatistics` and others), which costs a quarter of a microsecond a value. Five
times a second, and for each scrape, :class:`FrontendMetrics` takes over what has come since. ``prometheus_client`` itself
would take ten microseconds of each request.

Several frontends share one port, so a scrape may reach any of them. Under the supervisor, ``prometheus_client`` therefore
runs in its multi-process mode (:mod:`shmring.frontend.operator.number_files`), and each frontend answers for all. For each
scrape, the engines' numbers are fetched. Of several engines, all of this has the label ``engine``.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import operator
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.multiprocess import MultiProcessCollector

import shmring
from shmring.engine.counted import OF_ENGINES, EngineNumbers
from shmring.engine.exposition import EngineCollector, labels_of
from shmring.frontend.callers.key_usage import KeyStatistics
from shmring.frontend.intake import IntakeStatistics
from shmring.frontend.operator.number_files import DIRECTORY_VARIABLE
from shmring.service.distributions import TIMES_S, Distribution
from shmring.service.logs import dropped_lines
from shmring.service.numbers import Count, Counted, CountsByLabel, Number, numbers_of

__all__ = ["COUNTED", "AnswerStatistics", "EngineNumbers", "FrontendMetrics", "HttpStatistics", "ProcessStatistics"]


@dataclasses.dataclass(slots=True)
class HttpStatistics:
    """A frontend's requests.

    Attributes:
        in_flight: requests being answered, those that wait for their turn included.
        requests: requests answered, by ``route`` and ``status``; 499 are those that hung up.
        seconds: time to answer, by ``route``; a stream counts until its end.
        aborted: requests hung up, or stopped reading, before their answer was complete.
        broken_streams: streams ended with an error after they had begun, by its ``code``; their status was 200 by then.
        failures: requests that failed, broken streams included, by ``route`` and ``reason``: the ``code`` of the error.
        key_requests: requests of keys that have an owner ([limits](operations.md#keys-and-their-limits)), by ``key``, its name,
            and ``status``.
    """

    in_flight: Annotated[int, Number("shmring_http_in_flight")] = 0
    requests: Annotated[CountsByLabel, Number("shmring_http_requests", ("route", "status"))] = dataclasses.field(
        default_factory=collections.Counter
    )
    seconds: Annotated[dict[tuple[str, ...], Distribution], Number("shmring_http_request_seconds", ("route",))] = (
        dataclasses.field(default_factory=lambda: collections.defaultdict(Distribution))
    )
    aborted: Annotated[Count, Number("shmring_http_aborted")] = 0
    broken_streams: Annotated[CountsByLabel, Number("shmring_http_broken_streams", ("code",))] = dataclasses.field(
        default_factory=collections.Counter
    )
    failures: Annotated[CountsByLabel, Number("shmring_request_failure", ("route", "reason"))] = dataclasses.field(
        default_factory=collections.Counter
    )
    key_requests: Annotated[CountsByLabel, Number("shmring_key_requests", ("key", "status"))] = dataclasses.field(
        default_factory=collections.Counter
    )


@dataclasses.dataclass(slots=True)
class AnswerStatistics:
    """A frontend's answers and embeddings; times in seconds.

    Attributes:
        first_token: from the end of a request's body to the first part of its answer.
        inter_token: between two tokens of an answer; of tokens that came together, the mean.
        whole: from the end of a request's body to the last part of its answer, of requests that succeeded.
        success: requests for answers and embeddings that succeeded, by ``finished_reason``: ``stop``, ``length``; embeddings
            count as ``stop``.
    """

    first_token: Annotated[Distribution, Number("shmring_time_to_first_token_seconds")] = dataclasses.field(
        default_factory=Distribution
    )
    inter_token: Annotated[Distribution, Number("shmring_inter_token_latency_seconds")] = dataclasses.field(
        default_factory=Distribution
    )
    whole: Annotated[Distribution, Number("shmring_e2e_request_latency_seconds")] = dataclasses.field(
        default_factory=Distribution
    )
    success: Annotated[CountsByLabel, Number("shmring_request_success", ("finished_reason",))] = dataclasses.field(
        default_factory=collections.Counter
    )


@dataclasses.dataclass(slots=True)
class ProcessStatistics:
    """A frontend's process.

    Attributes:
        log_lines_dropped: lines of frontends' logs that nobody read, or that could not be written.
        loop_lag_seconds: how late the loop of a frontend was at most in the last 15 to 30 s; of several frontends, the longest
            time.
    """

    log_lines_dropped: Annotated[Count, Number("shmring_log_lines_dropped")] = 0
    loop_lag_seconds: Annotated[float, Number("shmring_frontend_loop_lag_seconds", across_frontends="livemax")] = 0.0


# Of a frontend's end of a ring: what is shown, by the field of the record.
_OF_CLIENTS = {
    "slot_nbytes_submitted": "shmring_frontend_slab_bytes",
    "copies": "shmring_frontend_copies",
    "copied_nbytes": "shmring_frontend_copied_bytes",
    "in_place": "shmring_frontend_in_place",
    "reconnections": "shmring_frontend_reconnections",
    "kept_hits": "shmring_frontend_kept_hits",
    "kept_misses": "shmring_frontend_kept_misses",
    "kept_pins": "shmring_frontend_kept_pins",
    "slots_in_use": "shmring_frontend_slots_in_use",
    "slots_draining": "shmring_frontend_slots_draining",
    "leased_nbytes": "shmring_frontend_leased_bytes",
    "waiting": "shmring_frontend_slot_waiters",
}

#: All numbers of a server.
COUNTED = (
    *numbers_of(HttpStatistics, "http"),
    *numbers_of(AnswerStatistics, "answers"),
    *numbers_of(KeyStatistics, "keys"),
    *numbers_of(ProcessStatistics, "process"),
    *numbers_of(IntakeStatistics, "intake"),
    *numbers_of(shmring.ClientStatistics, "client", _OF_CLIENTS.get),
    *OF_ENGINES,
)


class _AddedHistogram(Histogram):
    """A histogram that is given counts, not values."""

    def add(self, counts: Sequence[int], total: float) -> None:
        """Adds counts of values, and their sum. What the base class keeps for each bound is the same."""
        for bucket, count in zip(self._buckets, counts, strict=True):
            if count:
                bucket.inc(count)
        self._sum.inc(total)


class FrontendMetrics:
    """A frontend's numbers.

    Args:
        engines: their names. If there are several, numbers of the clients of each have the name as a label.
        keys: names of the owners of keys.

    Attributes:
        http: its requests.
        answers: its answers.
        keys: what the owners of keys use.
        process: its process.
    """

    def __init__(self, engines: Collection[str], keys: Collection[str] = ()) -> None:
        self._keys = frozenset(keys)
        self.http = HttpStatistics()
        self.answers = AnswerStatistics()
        self.keys = KeyStatistics()
        self.process = ProcessStatistics()
        self._labels = labels_of(engines)
        self._seen: dict[tuple[str, ...], Any] = {}
        self.registry = CollectorRegistry()
        self._metrics = {counted.name: self._made(counted) for counted in COUNTED if counted not in OF_ENGINES}

    def _made(self, counted: Counted) -> Any:
        labels = self._labels if counted.source.startswith("client.") else counted.labels
        if counted.kind == "histogram":
            return _AddedHistogram(counted.name, counted.help, labels, buckets=TIMES_S, registry=self.registry)
        if counted.kind == "counter":
            return Counter(counted.name, counted.help, labels, registry=self.registry)
        mode = counted.across_frontends
        return Gauge(counted.name, counted.help, labels, registry=self.registry, multiprocess_mode=mode)

    def take_over(self, engine: str, statistics: shmring.ClientStatistics) -> None:
        """Updates the numbers of the client of an engine."""
        self._take_over("client", statistics, (engine,) if self._labels else (), engine)

    def take_over_own(self, media: IntakeStatistics | None = None) -> None:
        """Updates the numbers of requests, answers, media and the process."""
        self.process.log_lines_dropped = dropped_lines()
        self._take_over("process", self.process)
        self._take_over("http", self.http)
        self._take_over("answers", self.answers)
        self._take_over("keys", self.keys)
        if media is not None:
            self._take_over("intake", media)

    def _take_over(self, source: str, statistics: object, labels: tuple[str, ...] = (), engine: str = "") -> None:
        for counted in COUNTED:
            whose, _, field = counted.source.partition(".")
            if whose != source:
                continue
            value = operator.attrgetter(field)(statistics)
            for key, part in value.items() if counted.labels else [(labels, value)]:
                self._update(counted, key, part, (counted.name, engine, *key))

    def _update(self, counted: Counted, labels: tuple[str, ...], value: Any, seen: tuple[str, ...]) -> None:
        metric = self._metrics[counted.name]
        if counted.kind == "gauge":
            (metric.labels(*labels) if labels else metric).set(value)
            return
        now = (*value.counts, value.total) if isinstance(value, Distribution) else (value,)
        before = self._seen.get(seen)
        if now == before:
            return  # most have not changed, and looking a metric up takes longer than this
        self._seen[seen] = now
        *counts, total = map(operator.sub, now, before) if before else now
        metric = metric.labels(*labels) if labels else metric
        if isinstance(value, Distribution):
            metric.add(counts, total)
        else:
            metric.inc(total)

    async def render(self, engine_numbers: Mapping[str, EngineNumbers | None]) -> bytes:
        """Returns all numbers as Prometheus reads them.

        Args:
            engine_numbers: the numbers of each engine; None for one that does not answer.
        """
        return await asyncio.to_thread(self._render, engine_numbers)  # it reads files

    def _render(self, engine_numbers: Mapping[str, EngineNumbers | None]) -> bytes:
        registry = self.registry
        if DIRECTORY_VARIABLE in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]  # it ships no annotation for this
        engine = CollectorRegistry()
        engine.register(EngineCollector(engine_numbers, self._keys))
        return prometheus_client.generate_latest(registry) + prometheus_client.generate_latest(engine)
