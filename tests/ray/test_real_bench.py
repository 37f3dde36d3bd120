"""The programs of ``bench ray`` measure each way."""

from __future__ import annotations

import os
import sys

import pytest

from bench.programs import Program
from bench.ray import serving
from bench.ray.cluster import Measurement, Order

pytest.importorskip("ray")

WAYS = {"same": ("shmring", "in place", "numpy", "torch", "connecting"), "other": ("shmring", "numpy", "torch", "connecting")}


@pytest.mark.timeout(300)
def test_each_way_is_measured() -> None:
    with Program([sys.executable, "-m", "bench.ray.cluster"], os.environ, 120.0) as cluster:
        for place, ways in WAYS.items():
            for way in ways:
                measurement = cluster.order(Order(place, way, 1 << 16, 2, 0.0, 0.05), Measurement)
                assert measurement.per_s > 0
                assert measurement.cpu_ms > 0


@pytest.mark.timeout(300)
def test_both_servers_are_measured() -> None:
    with Program([sys.executable, "-m", "bench.ray.serving"], os.environ, 120.0) as program:
        for way in (serving.ON_RAY, serving.ALONE):
            for has_picture in (False, True):
                measurement = program.order(serving.Order(way, has_picture, 2, 8), serving.Measurement)
                assert measurement.per_s > 0
                assert 0 < measurement.added_ms <= measurement.cpu_ms
