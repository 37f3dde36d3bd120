"""The program of ``bench ray`` measures each way."""

from __future__ import annotations

import os
import sys

import pytest

from bench.programs import Program
from bench.ray.cluster import Measurement, Order

pytest.importorskip("ray")

WAYS = {
    "same": ("shmring", "in place", "numpy", "torch", "connecting"),
    "other": ("shmring", "object store", "numpy", "torch", "connecting"),
}


@pytest.mark.timeout(300)
def test_each_way_is_measured() -> None:
    with Program([sys.executable, "-m", "bench.ray.cluster"], os.environ, 120.0) as cluster:
        for place, ways in WAYS.items():
            for way in ways:
                measurement = cluster.order(Order(place, way, 1 << 16, 2, 0.0, 0.05), Measurement)
                assert measurement.per_s > 0
                assert measurement.cpu_ms > 0
