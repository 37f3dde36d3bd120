"""How often values came that were at most so large: plain counts that cost a quarter of a microsecond a value.

A frontend or an engine counts here, and :mod:`shmring.frontend.operator.metrics` makes Prometheus' histograms of the counts
when it is asked for them. So no request pays for a statistic.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

__all__ = ["TIMES_S", "Distribution"]

#: Bounds for seconds: from one fingerprint (a millisecond) to the longest request (``--request-timeout``, ten minutes).
TIMES_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Distribution:
    """Counts of values.

    Attributes:
        counts: of values up to each bound of :data:`TIMES_S` and above the one before; the last count has no bound.
        total: the sum of the values.
    """

    __slots__ = ("counts", "total")

    def __init__(self, counts: Sequence[int] = (0,) * (len(TIMES_S) + 1), total: float = 0.0) -> None:
        self.counts = list(counts)
        self.total = total

    def add(self, value: float, times: int = 1) -> None:
        """Counts a value."""
        self.counts[bisect_left(TIMES_S, value)] += times
        self.total += value * times
