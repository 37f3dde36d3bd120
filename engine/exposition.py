"""The numbers of engines, for Prometheus: in the answer of a frontend, which has those of several, and of a store."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from shmring.engine.counted import OF_ENGINES, EngineNumbers
from shmring.service.distributions import TIMES_S, Distribution

__all__ = ["EngineCollector", "labels_of"]

_BOUNDS = (*map(str, TIMES_S), "+Inf")


class EngineCollector(Collector):
    """The engines' numbers.

    Args:
        numbers: of each engine, by its name; None: it does not answer.
        keys: names of the owners of keys, whose numbers are shown.
    """

    def __init__(self, numbers: Mapping[str, EngineNumbers | None], keys: Collection[str]) -> None:
        self._numbers = numbers
        self._keys = keys

    def collect(self) -> Iterator[Any]:
        names = labels_of(self._numbers)
        families = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
        for counted in OF_ENGINES:
            family: Any = families[counted.kind](counted.name, counted.help, labels=[*names, *counted.labels])
            for engine, numbers in self._numbers.items():
                labels = [engine] if names else []
                value = numbers.of(counted) if numbers is not None else None if counted.source else 0.0
                if isinstance(value, Distribution):
                    counts = itertools.accumulate(value.counts)
                    family.add_metric(labels, list(zip(_BOUNDS, counts, strict=True)), value.total)
                elif isinstance(value, dict):
                    for label, each in value.items():
                        if counted.labels != ("key",) or label in self._keys:  # others are addresses: any number of them
                            family.add_metric([*labels, label], each)
                elif value is not None:
                    family.add_metric(labels, value)
            if family.samples:
                yield family


def labels_of(engines: Collection[str]) -> list[str]:
    """Returns the label that tells engines apart, where there are several."""
    return ["engine"] if len(engines) > 1 else []
