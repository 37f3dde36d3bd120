"""Busy polling: a loop that does not sleep for a while after a message, and then does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shmring
from shmring.transport import polling
from shmring.transport.polling import BusyPolling


class Loop:
    """Runs what is due when it is told to; an iteration with nothing due is sleep."""

    def __init__(self) -> None:
        self.due: list[Callable[[], None]] = []

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.due.append(callback)

    def iterate(self) -> bool:
        """One iteration; returns whether there will be another without sleeping."""
        due, self.due = self.due, []
        for callback in due:
            callback()
        return bool(self.due)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(polling.time, "perf_counter", lambda: now[0])
    return now


def test_it_keeps_awake_for_as_long_as_it_says_after_the_last_message(clock: list[float]) -> None:
    loop = Loop()
    busy = BusyPolling(loop, 0.001)  # type: ignore[arg-type]
    assert not loop.due
    busy.extend()
    busy.extend()
    assert len(loop.due) == 1
    assert loop.iterate()
    clock[0] += 0.0009
    busy.extend()
    clock[0] += 0.0009
    assert loop.iterate()
    clock[0] += 0.0002
    assert not loop.iterate()
    busy.extend()
    assert loop.iterate()


@pytest.mark.both_loops
async def test_both_ends_poll_and_sleep_again(
    serve: Any, connect: Any, eventually: Any, turns: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0

    def look_again(busy: BusyPolling) -> None:
        nonlocal looks
        looks += 1
        original(busy)

    original = BusyPolling._look_again
    monkeypatch.setattr(BusyPolling, "_look_again", look_again)

    async def handle(claim: shmring.Claim) -> None:
        await claim.reply(int(claim.payload["x"].sum()))

    ring = await serve(busy_poll_s=0.002)
    client = await connect(busy_poll_s=0.002)
    running = asyncio.create_task(ring.run(handle))
    for value in range(20):
        assert await client.request({"x": torch.full((1000,), value)}) == 1000 * value
    assert ring.polling._armed
    assert client._session.connection._polling._armed
    await eventually(lambda: not ring.polling._armed and not client._session.connection._polling._armed)
    looks_before = looks
    await turns()
    assert looks == looks_before > 0
    running.cancel()


async def test_without_it_nothing_polls(serve: Any, connect: Any) -> None:
    ring = await serve()
    client = await connect()
    assert ring.polling is None
    assert client._session.connection._polling is None


@pytest.mark.parametrize("seconds", [-0.001, 0.2])
def test_a_time_that_makes_no_sense_is_refused(seconds: float) -> None:
    for kind in (shmring.RingConfig, shmring.ClientConfig):
        with pytest.raises(ValueError, match="busy_poll_s must be between 0 and"):
            kind(busy_poll_s=seconds)
