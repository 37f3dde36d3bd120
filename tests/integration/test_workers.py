"""Workers as processes: whoever is killed or stopped at any point harms nobody, and what it had comes back."""

from __future__ import annotations

import asyncio
import select
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import shmring
from shmring import Ring
from tests.waiting import eventually

OPTIONS: dict[str, Any] = {"broadcast_nbytes": "256KiB", "worker_backlog": 8}


def is_whole(ring: Ring) -> bool:
    now = ring.statistics()
    ring._shell.workers.book.check()
    return not now.broadcasts_outstanding and now.broadcast_free_nbytes == now.broadcast_nbytes and not now.slots_in_use


@pytest.fixture
async def ring(serve: Any) -> Ring:
    return await serve(**OPTIONS)


@pytest.fixture
def start(launch: Any, socket_dir: Path) -> Any:
    """``start(mode, rank)``: a worker process."""

    def run(mode: str, rank: int, name: str = "test") -> Any:
        return launch("worker", mode, name, str(socket_dir), str(rank))

    return run


@pytest.mark.parametrize("mode", ["serve", "asyncio"])
async def test_processes_get_the_same_in_the_same_order_and_reply(ring: Ring, start: Any, mode: str) -> None:
    workers = [start(mode, rank) for rank in range(2)]
    assert await ring.wait_workers(2, timeout=20) == (0, 1)
    for number in range(1, 6):
        await ring.broadcast({"x": torch.full((20_000,), number, dtype=torch.int32)}, timeout=10)
    assert await ring.gather({"last": True}, timeout=10) == [0, 1]
    for worker in workers:
        await worker.said()
        for number in range(1, 6):
            assert await worker.said() == ["got", str(number), str(20_000 * number)]
    await ring.close()
    for worker in workers:
        assert await worker.said() == ["got", "6", "0"]
        assert await worker.said() == ["over"]


async def test_a_killed_worker_is_struck_off_and_what_it_had_comes_back(
    ring: Ring, serve: Any, connect: Any, start: Any
) -> None:
    victim, other = start("hold", 0), start("serve", 1)
    await ring.wait_workers(2, timeout=20)
    client = await connect()
    submission = await client.submit({"x": torch.ones(40_000)})
    with await ring.claim() as claim:
        await claim.share({"beside": 1})
    for _ in range(2):
        await ring.broadcast({"x": torch.zeros(50_000, dtype=torch.uint8)})
    for number in range(1, 4):
        if number == 1:
            await victim.said()
        assert await victim.said() == ["held", str(number)]
    assert ring.statistics().slots_draining == 1
    gathering = asyncio.ensure_future(ring.gather({}, timeout=20))
    victim.signal(signal.SIGKILL)
    with pytest.raises(shmring.WorkerLostError, check=lambda error: error.ranks == (0,)):
        await gathering
    await eventually(lambda: ring.ranks == (1,) and is_whole(ring))
    assert await ring.gather({}, timeout=10) == [1]
    assert submission.request_id == 1
    assert not other.is_dead


async def test_a_death_is_heard_of_by_its_pidfd_and_not_by_looking_now_and_then(
    serve: Any, connect: Any, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shmring.ring.workers._KEPT_S", 3600.0)
    monkeypatch.setattr("shmring.ring.workers._GONE_S", 3600.0)
    ring = await serve(**OPTIONS)
    victim = start("hold", 0)
    await ring.wait_workers(1, timeout=20)
    client = await connect()
    submission = await client.submit({"x": torch.ones(40_000)})
    with await ring.claim() as claim:
        await claim.share({"beside": 1})
    await ring.broadcast({"x": torch.zeros(50_000, dtype=torch.uint8)})
    await victim.said()
    for number in ("1", "2"):
        assert await victim.said() == ["held", number]
    assert ring._shell.workers.book.outstanding == 2
    victim.signal(signal.SIGKILL)
    await eventually(lambda: not ring._shell.workers.book.outstanding)  # no statistics: they look
    await eventually(lambda: is_whole(ring))
    assert submission.request_id == 1


async def test_a_worker_that_is_killed_in_a_gather_has_died_and_has_not_left(ring: Ring, start: Any) -> None:
    """Its connection ends first: then the kernel is asked, and does not only tell when the loop gets round to it."""
    victim = start("hold", 0)
    await ring.wait_workers(1, timeout=20)
    gathering = asyncio.ensure_future(ring.gather({}, timeout=20))
    await victim.said()
    assert await victim.said() == ["held", "1"]
    [worker] = ring._shell.workers._workers.values()
    pidfd, death = worker.watch._pidfd, select.poll()
    asyncio.get_running_loop().remove_reader(pidfd)
    death.register(pidfd, select.POLLIN)
    victim.signal(signal.SIGKILL)
    assert death.poll(20_000)
    with pytest.raises(shmring.WorkerLostError, match="worker 0 has died before it replied"):
        await gathering


async def test_a_stopped_worker_holds_up_others_at_the_bound_and_no_sooner(ring: Ring, serve: Any, start: Any) -> None:
    stopped, other = start("serve", 0), start("serve", 1)
    await ring.wait_workers(2, timeout=20)
    for worker in (stopped, other):
        await worker.said()
    stopped.signal(signal.SIGSTOP)
    for number in range(1, 9):
        await ring.broadcast({"x": torch.zeros(8_000, dtype=torch.uint8)}, timeout=10)
        assert (await other.said())[:2] == ["got", str(number)]
    with pytest.raises(shmring.WorkersBehindError, check=lambda error: error.ranks == (0,)):
        await ring.broadcast({}, timeout=0.05)
    assert [worker.unacknowledged for worker in ring.statistics().workers] == [8, 0]
    waiting = asyncio.ensure_future(ring.broadcast({}, timeout=20))
    stopped.signal(signal.SIGCONT)
    assert await waiting == (0, 1)
    await eventually(lambda: is_whole(ring))


async def test_a_dropped_worker_that_lives_keeps_its_memory_until_it_is_dead(ring: Ring, start: Any) -> None:
    worker = start("hold", 0)
    await ring.wait_workers(1, timeout=20)
    await ring.broadcast({"x": torch.zeros(50_000, dtype=torch.uint8)})
    await worker.said()
    assert await worker.said() == ["held", "1"]
    worker.signal(signal.SIGSTOP)
    ring.drop_worker(0)
    assert ring.ranks == ()
    [departed] = ring.statistics().workers
    assert (departed.is_member, departed.unacknowledged) == (False, 1)
    await ring.broadcast("nobody gets this")
    assert not is_whole(ring)
    worker.signal(signal.SIGKILL)
    await eventually(lambda: ring.statistics().workers == () and is_whole(ring))


@pytest.mark.parametrize("how", ["copied", "in place"])
async def test_a_worker_that_writes_ends_itself_and_nobody_else(
    ring: Ring, serve: Any, connect: Any, start: Any, how: str
) -> None:
    writer, other, client = start("write", 0), start("serve", 1), await connect()
    await ring.wait_workers(2, timeout=20)
    content = torch.full((40_000,), 7, dtype=torch.uint8)
    await client.submit({"x": content})
    with await ring.claim() as claim:
        await ring.broadcast({"x": content} if how == "copied" else claim.payload)
        await writer.died()
        assert "written" not in writer.output.read_text()
        assert claim.payload["x"].eq(7).all()
    await other.said()
    assert await other.said() == ["got", "1", "280000"]
    await eventually(lambda: ring.ranks == (1,) and is_whole(ring))


@pytest.mark.parametrize("backing", ["/dev/shm", "memfd"])
async def test_the_kernel_refuses_a_worker_to_write(serve: Any, connect: Any, start: Any, backing: str) -> None:
    """Of what frontends write, too: the worker's descriptor was opened to be read."""
    ring = await serve(**{**OPTIONS, "backing": backing})
    worker, client = start("protect", 0), await connect()
    await ring.wait_workers(1, timeout=20)
    await client.submit({"x": torch.zeros(40_000)})
    with await ring.claim() as claim:
        await claim.share()
    await worker.said()
    assert (await worker.said())[0] == "refused"


async def test_a_forked_child_acknowledges_nothing(ring: Ring, start: Any) -> None:
    worker = start("fork", 0)
    await ring.wait_workers(1, timeout=20)
    await ring.broadcast({"x": torch.zeros(50_000)})
    await worker.said()
    assert await worker.said() == ["child", "refused"]
    assert await worker.said() == ["child", "gone"]
    assert ring.statistics().broadcasts_outstanding == 1
    await ring.broadcast({})
    assert await worker.said() == ["next"]
    await eventually(lambda: is_whole(ring))


async def test_workers_learn_of_the_engines_death(launch: Any, start: Any, socket_dir: Path) -> None:
    engine = launch("worker_engine", "test", str(socket_dir))
    worker = start("serve", 0)
    assert await engine.said() == ["workers", "1"]
    await worker.said()
    assert (await worker.said())[:2] == ["got", "1"]
    engine.signal(signal.SIGKILL)
    while (said := await worker.said())[0] == "got":
        pass
    assert said == ["engine", "dead"]


async def test_an_engine_that_is_stopped_loses_no_worker(launch: Any, start: Any, socket_dir: Path) -> None:
    engine = launch("worker_engine", "test", str(socket_dir))
    worker = start("serve", 0)
    assert await engine.said() == ["workers", "1"]
    engine.signal(signal.SIGSTOP)
    await worker.said()
    engine.signal(signal.SIGCONT)
    for number in range(1, 30):
        assert (await worker.said())[:2] == ["got", str(number)]
