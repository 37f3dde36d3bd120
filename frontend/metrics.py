"""A frontend's counters, for Prometheus. :mod:`shmring.frontend.observation` counts requests.

Several frontends share one port, so a scrape may reach any of them. Under the supervisor, ``prometheus_client`` therefore
runs in its multi-process mode (files in ``PROMETHEUS_MULTIPROC_DIR``), and each frontend answers for all. For each scrape,
the engine's own numbers are fetched, as ``shmring_engine_*``. Of several engines, all of this has the label ``engine``.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

import shmring
from shmring.frontend.multimodal import IntakeStatistics

__all__ = ["FrontendMetrics"]

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class _EngineCollector(Collector):
    """The engines' numbers, as gauges."""

    def __init__(self, numbers: Mapping[str, Mapping[str, float] | None]) -> None:
        self._numbers = numbers

    def collect(self) -> Iterator[GaugeMetricFamily]:
        up = {engine: {"up": 0.0 if numbers is None else 1.0} for engine, numbers in self._numbers.items()}
        yield from self._families(up, "Whether the engine answers.")
        answers = {engine: numbers for engine, numbers in self._numbers.items() if numbers is not None}
        yield from self._families(answers, "The engine's {}.")

    def _families(self, numbers: Mapping[str, Mapping[str, float]], text: str) -> Iterator[GaugeMetricFamily]:
        labels = _labels(self._numbers)
        for name in dict.fromkeys(name for each in numbers.values() for name in each):
            family = GaugeMetricFamily(f"shmring_engine_{name}", text.format(name), labels=labels)
            for engine, each in numbers.items():
                if name in each:
                    family.add_metric([engine] if labels else [], each[name])
            yield family


def _labels(engines: Collection[str]) -> list[str]:
    """The label that tells engines apart, where there are several."""
    return ["engine"] if len(engines) > 1 else []


class FrontendMetrics:
    """A frontend's counters.

    Args:
        engines: their names. What is counted of the client of each has them as a label, if there are several.

    Attributes:
        in_flight: requests being answered, those that wait for their turn included.
        requests: requests by route and status; 499 are those that hung up.
        seconds: how long they took.
        aborted: requests that hung up, or stopped reading, before their answer was complete.
        broken_streams: answers that ended with an error after they had begun, by its code. Their status was 200 by then.
    """

    def __init__(self, engines: Collection[str]) -> None:
        self._labels = _labels(engines)
        self.registry = CollectorRegistry()
        self.in_flight = self._gauge("shmring_http_in_flight", "Requests being answered.")
        self.requests = Counter("shmring_http_requests", "Requests.", ["route", "status"], registry=self.registry)
        self.seconds = Histogram(
            "shmring_http_request_seconds", "Time to answer.", ["route"], buckets=_BUCKETS, registry=self.registry
        )
        self.aborted = Counter("shmring_http_aborted", "Requests that hung up.", registry=self.registry)
        self.broken_streams = Counter(
            "shmring_http_broken_streams", "Streams that ended with an error.", ["code"], registry=self.registry
        )
        self._counters = {
            field: Counter(name, documentation, self._labels, registry=self.registry)
            for field, name, documentation in (
                ("slot_nbytes_submitted", "shmring_frontend_slab_bytes", "Bytes of slots handed to the engine."),
                ("copies", "shmring_frontend_copies", "Tensors copied for sending."),
                ("copied_nbytes", "shmring_frontend_copied_bytes", "Bytes of tensors copied for sending."),
                ("in_place", "shmring_frontend_in_place", "Tensors sent from where they were in the slab."),
                ("reconnections", "shmring_frontend_reconnections", "Engines attached to after the first."),
                ("kept_hits", "shmring_frontend_kept_hits", "Lookups of prepared media that found them."),
                ("kept_misses", "shmring_frontend_kept_misses", "Lookups of prepared media that did not."),
            )
        }
        self._gauges = {
            field: self._gauge(name, documentation, self._labels)
            for field, name, documentation in (
                ("slots_in_use", "shmring_frontend_slots_in_use", "Slots in any state but free."),
                ("slots_draining", "shmring_frontend_slots_draining", "Slots left, of which views live."),
                ("leased_nbytes", "shmring_frontend_leased_bytes", "Bytes of the slab leased."),
                ("kept_pins", "shmring_frontend_kept_pins", "Prepared media in use that the engine keeps."),
                ("waiting", "shmring_frontend_slot_waiters", "Requests that wait for space in the slab."),
            )
        }
        self._decoded = Counter("shmring_frontend_media_decoded", "Media that were decoded.", registry=self.registry)
        self._passed_over = Counter(
            "shmring_frontend_media_passed_over",
            "Media that were decoded and not kept, since that was in vain lately.",
            registry=self.registry,
        )
        self._decoded_seen = self._passed_over_seen = 0
        self._seen = {engine: dict.fromkeys(self._counters, 0) for engine in engines}
        self._decoders = self._gauge("shmring_frontend_decoders", "Processes that frontends may have for decoding media.")
        self._decoders_free = self._gauge("shmring_frontend_decoders_free", "Of these, those that nobody uses.")
        self._decoder_waiters = self._gauge("shmring_frontend_decoder_waiters", "Media that wait for a decoder.")
        self._decoder_waiting_seconds = self._gauge(
            "shmring_frontend_decoder_waiting_seconds", "How long the first of them has waited.", across_frontends="livemax"
        )
        self._decoded_bytes = self._gauge(
            "shmring_frontend_decoded_bytes", "Bytes of media that are decoded and not in the slab yet."
        )
        self._decoded_waiters = self._gauge("shmring_frontend_decoded_waiters", "Requests that wait for such memory.")

    def _gauge(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str] = (),
        across_frontends: Literal["livesum", "livemax"] = "livesum",
    ) -> Gauge:
        return Gauge(name, documentation, labels, registry=self.registry, multiprocess_mode=across_frontends)

    def take_over(self, engine: str, statistics: shmring.ClientStatistics) -> None:
        """Updates the counters of the client of an engine."""
        seen = self._seen[engine]
        for field, counter in self._counters.items():
            value = getattr(statistics, field)
            (counter.labels(engine) if self._labels else counter).inc(value - seen[field])
            seen[field] = value
        for field, gauge in self._gauges.items():
            (gauge.labels(engine) if self._labels else gauge).set(getattr(statistics, field))

    def take_over_media(self, statistics: IntakeStatistics) -> None:
        """Updates the gauges of decoders and of decoded media."""
        self._decoded.inc(statistics.decoded - self._decoded_seen)
        self._decoded_seen = statistics.decoded
        self._passed_over.inc(statistics.passed_over - self._passed_over_seen)
        self._passed_over_seen = statistics.passed_over
        decoders = statistics.decoders
        self._decoders.set(decoders.total)
        self._decoders_free.set(decoders.free)
        self._decoder_waiters.set(decoders.waiting)
        self._decoder_waiting_seconds.set(decoders.waiting_s)
        self._decoded_bytes.set(statistics.decoded_nbytes)
        self._decoded_waiters.set(statistics.decoded_waiting)

    async def render(self, engine_numbers: Mapping[str, Mapping[str, float] | None]) -> bytes:
        """Returns all numbers as Prometheus reads them.

        Args:
            engine_numbers: the numbers of each engine; None for one that does not answer.
        """
        return await asyncio.to_thread(self._render, engine_numbers)  # it reads files

    def _render(self, engine_numbers: Mapping[str, Mapping[str, float] | None]) -> bytes:
        registry = self.registry
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]  # it ships no annotation for this
        engine = CollectorRegistry()
        engine.register(_EngineCollector(engine_numbers))
        return prometheus_client.generate_latest(registry) + prometheus_client.generate_latest(engine)
