"""An engine's numbers in its node's metrics, which Ray serves to Prometheus beside its own.

Theory of operation: every few seconds, the engine tells Ray its gauges, and how much its counters have grown. No request pays
for it, and an engine that does nothing pays for its gauges only: Ray forgets one that it was not told within two of its
intervals. Names and meanings are those of :data:`~shmring.engine.counted.OF_ENGINES`; labels are ``node`` and ``engine``. Ray
puts ``ray_`` before each name.

A histogram of Ray's takes values, and an engine has counts of them (:class:`~shmring.service.distributions.Distribution`). So
it is given the middle of a bucket as often as a value has come that lies there. Ray itself passes on no more than that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import ray
from ray.util.metrics import Counter, Gauge, Histogram

from shmring.engine.counted import OF_ENGINES, EngineNumbers
from shmring.service.distributions import TIMES_S, Distribution
from shmring.service.numbers import Counted

__all__ = ["Reporter", "keep_reporting"]

_LEAST_S = 0.5  # between two times: Ray passes numbers on at most every second, and every ten unless it is told otherwise

# Of the buckets; of the last one, which has no upper bound, a value above it.
_MIDDLES = [*((low + high) / 2 for low, high in pairwise((0.0, *TIMES_S))), 2 * TIMES_S[-1]]


class Reporter:
    """Tells Ray an engine's numbers.

    Args:
        labels: of all numbers.
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = dict(labels)
        self._metrics: dict[str, Any] = {}
        self._told: dict[str, Any] = {}

    def news(self, numbers: EngineNumbers) -> list[tuple[Counted, Any, Any]]:
        """Returns what Ray is to be told: all gauges, and what else has changed; as it was told last (None: never), and as it
        is. From here on, all of it counts as told."""
        news = []
        for counted in OF_ENGINES:
            value = numbers.of(counted) if not counted.labels else None
            now = tuple(value.counts) if isinstance(value, Distribution) else value
            before = self._told.get(counted.name)
            if now is not None and (now != before or counted.kind == "gauge"):
                self._told[counted.name] = now
                news.append((counted, before, now))
        return news

    def tell(self, news: list[tuple[Counted, Any, Any]]) -> None:
        """Tells Ray. Takes its locks: not for a loop."""
        for counted, before, now in news:
            metric = self._metrics.get(counted.name)
            if metric is None:
                metric = self._metrics[counted.name] = self._made(counted)
            if counted.kind == "gauge":
                metric.set(now)
            elif counted.kind == "counter":
                if now > (before or 0):
                    metric.inc(now - (before or 0))
            else:
                for new, old, middle in zip(now, before or (0,) * len(now), _MIDDLES, strict=True):
                    for _ in range(new - old):
                        metric.observe(middle)

    def _made(self, counted: Counted) -> Any:
        tags = tuple(self._labels)
        if counted.kind == "histogram":
            metric: Any = Histogram(counted.name, counted.help, boundaries=list(TIMES_S), tag_keys=tags)
        else:
            metric = (Counter if counted.kind == "counter" else Gauge)(counted.name, counted.help, tag_keys=tags)
        metric.set_default_tags(self._labels)
        return metric


async def keep_reporting(labels: Mapping[str, str], numbers: Callable[[], EngineNumbers]) -> None:
    """Tells Ray an engine's numbers for as long as it runs.

    Args:
        labels: of all numbers.
        numbers: returns them.
    """
    reporter = Reporter(labels)
    every_s = max(_LEAST_S, ray._config.metrics_report_interval_ms() / 2000)
    while True:
        await asyncio.to_thread(reporter.tell, reporter.news(numbers()))
        await asyncio.sleep(every_s)
