"""Many requests of four frontends, nine in ten aborted at a random moment: nothing leaks, the rest are right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tables import slow

Launch = Callable[..., Any]

FRONTENDS = 4


async def storm(launch: Launch, socket_dir: Path, name: str, requests: int, aborted_percent: int) -> dict[str, float]:
    """What became of all requests together, and of the engine."""
    engine = launch("storm", "engine", name, str(socket_dir), str(FRONTENDS))
    assert await engine.said() == ["ready"]
    frontends = [
        launch("storm", "frontend", name, str(socket_dir), str(seed), str(requests), str(aborted_percent))
        for seed in range(FRONTENDS)
    ]
    outcomes = dict.fromkeys(("answered", "aborted", "seconds"), 0.0)
    for frontend in frontends:
        words = await frontend.said(120)
        for key, value in zip(words[::2], words[1::2], strict=True):
            outcomes[key] = max(outcomes[key], float(value)) if key == "seconds" else outcomes[key] + float(value)
    words = await engine.said()
    engine_report = dict(zip(words[::2], words[1::2], strict=True))
    assert (engine_report["errors"], engine_report["whole"]) == ("0", "True")
    assert int(engine_report["steps"]) > 1
    return {**outcomes, "aborted in the engine": float(engine_report["aborted"])}


@pytest.mark.parametrize("requests", [500, slow(2_500)], ids="{} of each".format)
async def test_an_abort_storm_leaks_nothing_and_the_rest_are_right(
    requests: int, launch: Launch, socket_dir: Path, record_property: Callable[[str, object], None]
) -> None:
    calm = await storm(launch, socket_dir, "calm", requests // 5, 0)
    assert (calm["answered"], calm["aborted"]) == (FRONTENDS * requests // 5, 0)
    stormy = await storm(launch, socket_dir, "storm", requests, 90)
    assert stormy["answered"] + stormy["aborted"] == FRONTENDS * requests
    assert stormy["answered"] >= 0.07 * FRONTENDS * requests
    assert stormy["aborted"] > 0.5 * FRONTENDS * requests  # the answer was faster than some aborts
    assert stormy["aborted in the engine"] > 0
    # How many requests come to their end in a second, of which kind ever. Not asserted: that would time a test.
    rates = [(run["answered"] + run["aborted"]) / run["seconds"] for run in (calm, stormy)]
    record_property("ends per second: calm, storm", rates)
