"""Loops without asyncio as processes: an engine's core and its ranks. Whoever is killed or stopped, the others hear of it."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import shmring
from shmring import threads
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def start(launch: Any, socket_dir: Path) -> Any:
    """``start("rank", 0)``: a process of ``programs/step.py``."""

    def run(role: str, number: int) -> Any:
        return launch("step", role, "steps", str(socket_dir), str(number))

    return run


async def last_words(process: Any) -> list[str]:
    """What it says at its end."""
    while (said := await process.said())[0] in ("ready", "step"):
        pass
    await process.died()
    return list(said)


@pytest.mark.usefixtures("no_new_segments")
@pytest.mark.parametrize("victim", ["core", "rank"])
@pytest.mark.parametrize("steps", [1, 3])
async def test_a_death_in_the_middle_of_steps_ends_the_others_at_once_and_leaves_nothing(
    start: Any, victim: str, steps: int
) -> None:
    core, ranks = start("core", 2), [start("rank", number) for number in range(2)]
    for number in range(1, steps + 1):
        assert await core.said() == ["step", str(10 * number)]
    (core if victim == "core" else ranks[1]).signal(signal.SIGKILL)
    if victim == "core":
        for rank in ranks:
            assert await last_words(rank) == ["EngineDeadError", "steps"]
    else:
        said = await last_words(core)
        assert said in (["EngineDeadError", "steps-1"], ["lost"])
        assert await last_words(ranks[0]) == ["EngineDeadError", "steps"]  # the core has gone without a word


@pytest.mark.usefixtures("no_new_segments")
async def test_a_core_whose_rank_is_stopped_knows_it_and_goes_on_with_it(start: Any) -> None:
    core, ranks = start("core", 2), [start("rank", number) for number in range(2)]
    assert await core.said() == ["step", "10"]
    ranks[0].signal(signal.SIGSTOP)
    while (said := await core.said())[0] == "step":
        pass
    assert said == ["stopped", "steps-0"]
    ranks[0].signal(signal.SIGCONT)
    assert (await core.said())[0] == "step"


@pytest.mark.parametrize("served_by", ["callers", "both"])
async def test_a_worker_process_that_is_killed_or_stopped_is_named(launch: Any, socket_dir: Path, served_by: Any) -> None:
    with threads.serve(
        "test", slab_nbytes="1MiB", broadcast_nbytes="256KiB", served_by=served_by, socket_dir=str(socket_dir)
    ) as ring:
        stopped, victim = [launch("worker", "serve", "test", str(socket_dir), str(rank)) for rank in range(2)]
        ring.wait_workers(2, timeout=20)
        assert ring.gather({}, timeout=20, busy_poll_s=0.001) == [0, 1]
        stopped.signal(signal.SIGSTOP)
        await stopped.stopped()
        with pytest.raises(shmring.WorkersBehindError) as behind:
            ring.gather({}, timeout=0.05)
        assert (behind.value.ranks, behind.value.sent) == ((0,), True)
        assert [worker.is_stopped for worker in ring.statistics().workers] == [True, False]
        victim.signal(signal.SIGSTOP)  # so that it does not reply
        await victim.stopped()
        victim.signal(signal.SIGKILL)
        with pytest.raises(shmring.WorkerLostError, check=lambda error: error.ranks == (1,)):
            ring.gather({}, to=[1], timeout=20)
        stopped.signal(signal.SIGCONT)
        assert ring.gather({}, timeout=20) == [0]
        assert ring.statistics().late_answers == 1
        await eventually(lambda: len(ring.statistics().workers) == 1)  # its process may end later than its connection
        [worker] = ring.statistics().workers
        assert (worker.is_stopped, worker.unacknowledged) == (False, 0)


# -- a scheduler that serves frontends ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_new_segments")
async def test_a_scheduler_takes_requests_in_its_own_loop_and_shares_them(launch: Any, connect: Any, socket_dir: Path) -> None:
    scheduler, rank = (launch("scheduler", role, "test", str(socket_dir)) for role in ("looks", "rank"))
    assert await scheduler.said() == ["ready"]
    client = await connect(lease_nbytes="64KiB")
    for number in range(1, 41):
        reply = await client.request({"x": torch.full((30_000,), number % 7, dtype=torch.uint8)})
        assert reply == {"sum": 30_000 * (number % 7)}
        assert await rank.said() == ["got", str(number), str(30_000 * (number % 7))]
    await eventually(lambda: client.statistics().slots_in_use == 0)  # the ranks have left them, and nobody else
    waiting = [asyncio.ensure_future(client.request({"x": torch.ones(30_000)})) for _ in range(20)]
    await waiting[0]
    scheduler.signal(signal.SIGKILL)
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(reply == {"sum": 30_000} or isinstance(reply, shmring.EngineDeadError) for reply in ended)
    await rank.died()


@pytest.mark.usefixtures("no_new_segments")
async def test_whoever_comes_and_wants_a_lease_is_served_though_nobody_calls(
    launch: Any, connect: Any, socket_dir: Path
) -> None:
    scheduler = launch("scheduler", "away", "test", str(socket_dir))
    assert await scheduler.said() == ["ready"]
    client = await connect(lease_nbytes="64KiB")
    async with client.slot(1 << 20) as slot:  # which needs a further lease
        slot.tensor((1 << 20,), torch.uint8).fill_(1)
    other = await connect(lease_nbytes="64KiB")
    assert other.client_id != client.client_id
