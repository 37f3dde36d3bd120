"""Processes that are killed, stopped, or only seem to be gone. The processes are real, and so is SIGKILL."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shmring
from shmring import Client
from tests.segments import own_name, segments_of
from tests.waiting import eventually

Start = Callable[..., Any]

NAME = own_name("victim")


@pytest.fixture
def start(launch: Callable[..., Any], socket_dir: Path) -> Start:
    """``start("frontend", "write")``: runs a program until the test ends."""

    def run(program: str, *arguments: str) -> Any:
        order = [NAME, str(socket_dir)]
        return launch(program, *([*arguments, *order] if program == "frontend" else [*order, *arguments]))

    return run


@pytest.fixture
async def engine(start: Start) -> Any:
    process = start("engine", "8MiB")
    assert (await process.said())[0] == "ready"
    return process


@pytest.fixture
async def observer(engine: Any, socket_dir: Path) -> AsyncIterator[Client]:
    """A client of this process, beside the victims."""
    async with shmring.connect(NAME, socket_dir=str(socket_dir), lease_nbytes="64KiB") as client:
        yield client


async def statistics(observer: Client) -> dict[str, int]:
    counts: dict[str, int] = await observer.call("statistics", timeout=10)
    return counts


async def until(observer: Client, condition: Callable[[dict[str, int]], bool], timeout: float = 10.0) -> None:
    """Waits until the engine's statistics are as they should be."""
    started = time.monotonic()
    while not condition(counts := await statistics(observer)):
        assert time.monotonic() - started < timeout, counts


def only_the_observer_is_left(counts: dict[str, int]) -> bool:
    held = counts["slots_published"] + counts["slots_claimed"] + counts["slots_draining"] + counts["quarantined_nbytes"]
    replies_are_back = counts["reply_free_nbytes"] == counts["reply_nbytes"]
    return held == 0 and counts["clients"] == 1 and counts["departed_clients"] == 0 and replies_are_back


async def works(client: Client) -> bool:
    data = torch.arange(50_000).to(torch.uint8)
    answer = await client.request({"mode": "answer", "x": data}, timeout=10)
    return torch.equal(answer["x"], data)


async def test_the_other_frontend_notices_nothing(observer: Client, start: Start) -> None:
    victims = [start("frontend", mode) for mode in ("load", "stream", "submit", "write")]
    survivor = start("frontend", "load")
    for process in [*victims, survivor]:
        await process.said()
    for victim in victims:
        victim.signal(signal.SIGKILL)
        await survivor.said()  # more checked answers
    for _ in range(5):
        await survivor.said()
    assert not survivor.is_dead
    survivor.signal(signal.SIGKILL)
    await until(observer, only_the_observer_is_left)


async def test_a_client_attaches_to_the_next_engine_of_the_name(engine: Any, start: Start, socket_dir: Path) -> None:
    async with shmring.connect(NAME, socket_dir=str(socket_dir), reconnect=True) as client:
        assert await works(client)
        before = client.statistics()
        async with client.slot(1000) as old_slot:
            old = old_slot.tensor((1000,), torch.uint8)
            engine.signal(signal.SIGKILL)
            await engine.died()
            await eventually(lambda: not client.connected)
            successor = start("engine", "8MiB")
            assert await works(client)  # waits for it
            assert (await successor.said())[0] == "ready"
            with pytest.raises(shmring.EngineDeadError):
                old_slot.tensor((1,), torch.uint8)
            # The old slot's memory is no slot of this engine: its content is copied.
            old.fill_(3)
            answer = await client.request({"mode": "answer", "x": old}, timeout=10)
            assert answer["sum"] == 3000
        after = client.statistics()
        assert after.reconnections == 1
        assert after.epoch != before.epoch


async def test_a_frontend_that_is_disconnected_but_lives_keeps_its_memory(observer: Client, start: Start) -> None:
    frontend = start("frontend", "disconnect")
    assert await frontend.said() == ["disconnected"]
    await until(observer, lambda counts: counts["clients"] == 1 and counts["departed_clients"] == 1)
    quarantined = (await statistics(observer))["quarantined_nbytes"]
    assert quarantined > 0
    for _ in range(20):  # more memory goes round than there is, and none of it is the quarantined
        assert await works(observer)
    assert (await statistics(observer))["quarantined_nbytes"] == quarantined
    frontend.signal(signal.SIGKILL)
    await until(observer, only_the_observer_is_left)


async def test_a_forked_child_with_the_socket_does_not_keep_the_memory(observer: Client, start: Start) -> None:
    frontend = start("frontend", "fork")
    word, child = await frontend.said()
    assert word == "forked"
    frontend.signal(signal.SIGKILL)
    try:
        await until(observer, only_the_observer_is_left)
    finally:
        os.kill(int(child), signal.SIGKILL)


async def test_nothing_of_a_stopped_frontend_is_reused(observer: Client, start: Start) -> None:
    frontend = start("frontend", "load")
    await frontend.said()
    frontend.signal(signal.SIGSTOP)
    await until(observer, lambda counts: counts["waiting"] == 0)
    leased = (await statistics(observer))["leased_nbytes"]
    for _ in range(20):
        assert await works(observer)
    counts = await statistics(observer)
    assert counts["clients"] == 2
    assert counts["leased_nbytes"] >= leased - 65536
    frontend.signal(signal.SIGCONT)
    for _ in range(5):
        await frontend.said()  # it goes on, and its answers are right
    frontend.signal(signal.SIGKILL)
    await until(observer, only_the_observer_is_left)


# -- message rings ----------------------------------------------------------------------------------------------------------


async def test_a_message_that_a_killed_frontend_had_half_written_is_none(observer: Client, start: Start) -> None:
    frontend = start("frontend", "torn")
    assert await frontend.said() == ["torn"]
    await until(observer, lambda counts: counts["submitted"] == 1)
    frontend.signal(signal.SIGKILL)
    await until(observer, only_the_observer_is_left)
    counts = await statistics(observer)
    assert counts["protocol_errors"] == 0
    assert await works(observer)


async def test_a_frontend_that_is_killed_with_a_full_ring_leaves_nothing(engine: Any, observer: Client, start: Start) -> None:
    frontend = start("frontend", "flood")
    assert await frontend.said() == ["ready"]
    await frontend.stopped()
    engine.signal(signal.SIGSTOP)
    frontend.signal(signal.SIGCONT)
    word, in_flight = await frontend.said()
    assert word == "full"
    assert int(in_flight) > 20
    frontend.signal(signal.SIGKILL)
    engine.signal(signal.SIGCONT)
    await until(observer, only_the_observer_is_left)
    counts = await statistics(observer)
    assert counts["protocol_errors"] == 0
    assert counts["waiting"] == counts["running"] == 0
    assert await works(observer)


async def test_an_engine_that_is_killed_with_a_full_ring_is_dead_for_its_frontend(
    engine: Any, observer: Client, start: Start
) -> None:
    frontend = start("frontend", "flood")
    assert await frontend.said() == ["ready"]
    await frontend.stopped()
    engine.signal(signal.SIGSTOP)
    frontend.signal(signal.SIGCONT)
    assert (await frontend.said())[0] == "full"
    engine.signal(signal.SIGKILL)
    with pytest.raises(shmring.EngineDeadError):
        await observer.request({"mode": "answer", "x": torch.ones(3)}, timeout=5)
    frontend.signal(signal.SIGKILL)
    await frontend.died()


@pytest.mark.parametrize("then", ["killed", "continued"])
async def test_a_frontend_that_is_stopped_with_a_full_ring_costs_nothing(observer: Client, start: Start, then: str) -> None:
    frontend = start("frontend", "texts")
    await frontend.said()
    frontend.signal(signal.SIGSTOP)
    before = -1
    while (replies := (await statistics(observer))["replies"]) != before + 1:  # the ring to it fills, and its stream waits
        before = replies
        assert await works(observer)  # which takes one reply
    assert (await statistics(observer))["protocol_errors"] == 0
    if then == "continued":
        frontend.signal(signal.SIGCONT)
        for _ in range(3):
            await frontend.said()
    frontend.signal(signal.SIGKILL)
    await until(observer, only_the_observer_is_left)


async def test_whoever_sleeps_is_always_woken(observer: Client, start: Start) -> None:
    """A bell that is lost once in a thousand sleeps would be a request without an answer."""
    frontends = [start("frontend", "pauses") for _ in range(2)]
    bells = [int((await frontend.said(60))[1]) for frontend in frontends]
    assert min(bells) > 100, "it was about sleeping"
    for frontend in frontends:
        await frontend.died()


async def test_when_everything_is_killed_nothing_is_left(engine: Any, start: Start) -> None:
    frontends = [start("frontend", mode) for mode in ("load", "stream", "write")]
    for frontend in frontends:
        await frontend.said()
    for process in [*frontends, engine]:
        process.signal(signal.SIGKILL)
    for process in [*frontends, engine]:
        await process.died()
    assert segments_of(NAME) == []
