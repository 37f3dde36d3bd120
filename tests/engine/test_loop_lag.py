"""How late a loop is."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from shmring.engine.loop_lag import LoopLag

BLOCKED_S = 0.4


@pytest.mark.both_loops
async def test_what_blocks_a_loop_is_seen() -> None:
    lag = LoopLag()
    watching = asyncio.create_task(lag.watch())
    await asyncio.sleep(0)
    assert lag.seconds == 0
    time.sleep(BLOCKED_S)  # this is what is measured
    async with asyncio.timeout(20):
        while lag.seconds < BLOCKED_S - 0.1:
            await asyncio.sleep(0)
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching


def test_a_delay_is_shown_for_as_long_as_two_scrapes_may_be_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    lag = LoopLag()
    for at_s, delay_s in ((1000.0, 0.001), (1008.0, 0.5), (1009.0, 0.002), (1017.0, 0.003)):
        lag.note(delay_s, at_s)
    for now_s, shown_s in ((1017.0, 0.5), (1023.0, 0.5), (1033.0, 0.003), (1100.0, 0.0)):
        assert lag.seconds == shown_s, now_s
