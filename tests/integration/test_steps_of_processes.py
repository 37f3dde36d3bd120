"""Loops without asyncio as processes: an engine's core and its ranks. Whoever is killed or stopped, the others hear of it."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

import shmring
from shmring import threads

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
async def test_a_worker_process_that_is_killed_or_stopped_is_named(
    launch: Any, socket_dir: Path, eventually: Any, served_by: Any
) -> None:
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
        with pytest.raises(shmring.WorkerLostError) as lost:
            ring.gather({}, to=[1], timeout=20)
        assert lost.value.ranks == (1,)
        stopped.signal(signal.SIGCONT)
        assert ring.gather({}, timeout=20) == [0]
        assert ring.statistics().late_answers == 1
        await eventually(lambda: len(ring.statistics().workers) == 1)  # its process may end later than its connection
        [worker] = ring.statistics().workers
        assert (worker.is_stopped, worker.unacknowledged) == (False, 0)
