"""The engine's numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

from shmring.engine.metrics import EngineMetrics


async def test_they_are_the_counters_of_core_and_ring_by_name(serve: Any) -> None:
    ring = await serve()
    numbers = EngineMetrics(steps=3, step_requests=5, step_seconds=0.5).collect(ring.statistics())
    assert (numbers["steps"], numbers["step_requests"], numbers["step_seconds"]) == (3, 5, 0.5)
    assert numbers["ring_leasable_nbytes"] == numbers["ring_free_nbytes"] > 0
    assert numbers["ring_slots_in_use"] == 0
    ring_numbers = {f"ring_{field.name}" for field in dataclasses.fields(ring.statistics())} - {"ring_epoch"}
    assert ring_numbers < numbers.keys()
    assert all(isinstance(value, int | float) for value in numbers.values())
