"""An engine's numbers, wherever they are shown: in ``GET /metrics``, on docs/reference.md, in a Ray cluster.

Where a number has vLLM's meaning, it has vLLM's name with our prefix. The bounds of histograms are our own: many answers take a
few milliseconds here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from shmring.engine.metrics import EngineMetrics, EngineTimes
from shmring.engine.spending import MEANINGS
from shmring.service.distributions import Distribution
from shmring.service.numbers import Counted, numbers_of
from shmring.statistics import RingStatistics

__all__ = ["OF_ENGINES", "EngineNumbers"]


@dataclasses.dataclass(frozen=True, slots=True)
class EngineNumbers:
    """What an engine says of itself at one moment.

    Attributes:
        counts: its counts by name; those of its ring begin with ``ring_``. A colon and the value of a label
            may follow.
        times: how long the parts of requests took, by name.
    """

    counts: Mapping[str, float]
    times: Mapping[str, Distribution]

    def of(self, counted: Counted) -> float | Distribution | dict[str, float] | None:
        """Returns a number, by label if it has one; None if the engine does not say it."""
        source, _, field = counted.source.partition(".")
        if counted.labels:
            names = (name.partition(":") for name in self.counts)
            values = {label: self.counts[f"{name}:{label}"] for name, colon, label in names if colon and name == field}
            return values or None
        if source == "times":
            return self.times.get(field)
        return self.counts.get(f"ring_{field}" if source == "ring" else field) if source else 1.0


_PARTS = ", ".join(f"`{part}` ({what})" for part, what in MEANINGS.items())

#: The numbers of an engine.
OF_ENGINES = (
    Counted("shmring_engine_up", "gauge", "0 or 1", "whether the engine answers; the numbers below are there only if it does"),
    *numbers_of(EngineTimes, "times"),
    Counted(
        "shmring_engine_spent_seconds",
        "counter",
        "s",
        f"that steps, and what is done beside them, took by `part`: {_PARTS}",
        "engine.spent_seconds",
        labels=("part",),
    ),
    Counted(
        "shmring_engine_caller_seconds",
        "counter",
        "s",
        "that requests took, of steps and beside them, by `key`, the name of its owner; of keys that have one",
        "engine.caller_seconds",
        labels=("key",),
    ),
    *numbers_of(EngineMetrics, "engine", "shmring_engine_{}".format),
    *numbers_of(RingStatistics, "ring", "shmring_engine_ring_{}".format),
)
