"""A frontend's counters, for Prometheus. :mod:`shmring.frontend.observation` counts requests.

Several frontends share one port, so a scrape may reach any of them. Under the supervisor, ``prometheus_client`` therefore
runs in its multi-process mode (files in ``PROMETHEUS_MULTIPROC_DIR``), and each frontend answers for all. For each scrape,
the engine's own numbers are fetched, as ``shmring_engine_*``. Of several engines, all of this has the label ``engine``.
"""

from __future__ import annotations

import asyncio
import operator
import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

import shmring
from shmring.frontend.counted import COUNTED, Counted
from shmring.frontend.intake import IntakeStatistics

__all__ = ["FrontendMetrics"]

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
[_UP] = (counted for counted in COUNTED if counted.name == "shmring_engine_up")


class _EngineCollector(Collector):
    """The engines' numbers, as gauges."""

    def __init__(self, numbers: Mapping[str, Mapping[str, float] | None]) -> None:
        self._numbers = numbers

    def collect(self) -> Iterator[GaugeMetricFamily]:
        up = {engine: {"up": 0.0 if numbers is None else 1.0} for engine, numbers in self._numbers.items()}
        yield from self._families(up, _UP.help)
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
        engines: their names. If there are several, numbers of the clients of each have the name as a label.

    Attributes:
        in_flight: requests being answered, those that wait for their turn included.
        requests: requests by route and status; 499 are those that hung up.
        seconds: how long they took.
        aborted: requests that hung up, or stopped reading, before their answer was complete.
        broken_streams: answers that ended with an error after they had begun, by its code. Their status was 200 by then.
    """

    def __init__(self, engines: Collection[str]) -> None:
        self._labels = _labels(engines)
        self._seen: dict[tuple[str, str], float] = {}
        self.registry = CollectorRegistry()
        self._metrics = {counted.name: self._made(counted) for counted in COUNTED if counted.name != _UP.name}
        self.in_flight: Gauge = self._metrics["shmring_http_in_flight"]
        self.requests: Counter = self._metrics["shmring_http_requests"]
        self.seconds: Histogram = self._metrics["shmring_http_request_seconds"]
        self.aborted: Counter = self._metrics["shmring_http_aborted"]
        self.broken_streams: Counter = self._metrics["shmring_http_broken_streams"]

    def _made(self, counted: Counted) -> Any:
        labels = self._labels if counted.source.startswith("client.") else counted.labels
        if counted.kind == "histogram":
            return Histogram(counted.name, counted.help, labels, buckets=_BUCKETS, registry=self.registry)
        if counted.kind == "counter":
            return Counter(counted.name, counted.help, labels, registry=self.registry)
        mode = counted.across_frontends
        return Gauge(counted.name, counted.help, labels, registry=self.registry, multiprocess_mode=mode)

    def take_over(self, engine: str, statistics: shmring.ClientStatistics) -> None:
        """Updates the numbers of the client of an engine."""
        self._take_over("client", statistics, engine)

    def take_over_media(self, statistics: IntakeStatistics) -> None:
        """Updates the numbers of decoders and of decoded media."""
        self._take_over("intake", statistics, "")

    def _take_over(self, source: str, statistics: object, engine: str) -> None:
        for counted in COUNTED:
            whose, _, field = counted.source.partition(".")
            if whose != source:
                continue
            metric, value = self._metrics[counted.name], operator.attrgetter(field)(statistics)
            if engine and self._labels:
                metric = metric.labels(engine)
            if counted.kind == "gauge":
                metric.set(value)
            else:
                metric.inc(value - self._seen.get((counted.name, engine), 0))
                self._seen[counted.name, engine] = value

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
