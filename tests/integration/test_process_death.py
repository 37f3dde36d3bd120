"""Processes that are killed, stopped, or only seem to be gone. The processes are real, and so is SIGKILL."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import torch

import shmring

PROGRAMS = Path(__file__).parent / "programs"
ROOT = Path(__file__).resolve().parents[2]

Start = Callable[..., Awaitable[asyncio.subprocess.Process]]


@pytest.fixture
async def start(socket_dir: Path) -> AsyncIterator[Start]:
    """``await start("frontend", "write")``: runs a program until the test ends."""
    processes: list[asyncio.subprocess.Process] = []

    async def run(program: str, *arguments: str) -> asyncio.subprocess.Process:
        order = ["victim", str(socket_dir)]
        options = [*arguments, *order] if program == "frontend" else [*order, *arguments]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(PROGRAMS / f"{program}.py"),
            *options,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=asyncio.subprocess.PIPE,
        )
        processes.append(process)
        return process

    yield run
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()  # to the end of its output: its pipe is closed then, too


async def said(process: asyncio.subprocess.Process) -> list[str]:
    """The next line that a program prints."""
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), 60)
    assert line, f"the program ended with {await process.wait()}"
    return line.decode().split()


@pytest.fixture
async def engine(start: Start) -> asyncio.subprocess.Process:
    process = await start("engine", "8MiB")
    assert (await said(process))[0] == "ready"
    return process


@pytest.fixture
async def observer(engine: asyncio.subprocess.Process, socket_dir: Path) -> AsyncIterator[shmring.RingClient]:
    """A client of this process, beside the victims."""
    async with shmring.connect("victim", socket_dir=str(socket_dir), lease_nbytes="64KiB") as client:
        yield client


async def statistics(observer: shmring.RingClient) -> dict[str, int]:
    counts: dict[str, int] = await observer.call("statistics", timeout=10)
    return counts


async def until(observer: shmring.RingClient, condition: Callable[[dict[str, int]], bool], timeout: float = 10.0) -> float:
    """Waits until the engine's statistics are as they should be; returns the seconds it took."""
    started = time.monotonic()
    while not condition(counts := await statistics(observer)):
        assert time.monotonic() - started < timeout, counts
    return time.monotonic() - started


def only_the_observer_is_left(counts: dict[str, int]) -> bool:
    held = counts["slots_published"] + counts["slots_claimed"] + counts["slots_draining"] + counts["quarantined_nbytes"]
    replies_are_back = counts["reply_free_nbytes"] == counts["reply_nbytes"]
    return held == 0 and counts["clients"] == 1 and counts["departed_clients"] == 0 and replies_are_back


async def works(client: shmring.RingClient) -> bool:
    data = torch.arange(50_000).to(torch.uint8)
    answer = await client.request({"mode": "answer", "x": data}, timeout=10)
    return torch.equal(answer["x"], data)


SIGNS = {"write": "writing", "submit": "submitted", "stream": "streaming", "load": "20"}


@pytest.mark.parametrize(("mode", "sign"), SIGNS.items())
async def test_the_memory_of_a_killed_frontend_comes_back(
    observer: shmring.RingClient, start: Start, mode: str, sign: str
) -> None:
    frontend = await start("frontend", mode)
    assert await said(frontend) == [sign]
    if mode == "submit":
        await until(observer, lambda counts: counts["slots_claimed"] == 1)
    frontend.kill()
    took = await until(observer, only_the_observer_is_left)
    assert took < 2, "reclaiming took longer than any machine's noise explains"
    assert await works(observer)
    counts = await statistics(observer)
    assert counts["reclaimed_nbytes"] > 0
    assert counts["protocol_errors"] == 0


async def test_the_other_frontend_notices_nothing(observer: shmring.RingClient, start: Start) -> None:
    victims = [await start("frontend", mode) for mode in ("load", "stream", "submit", "write")]
    survivor = await start("frontend", "load")
    for process in [*victims, survivor]:
        await said(process)
    for victim in victims:
        victim.kill()
        await said(survivor)  # more checked answers
    for _ in range(5):
        await said(survivor)
    assert survivor.returncode is None
    survivor.kill()
    await until(observer, only_the_observer_is_left)


async def test_the_death_of_the_engine_fails_every_pending_call_at_once(
    engine: asyncio.subprocess.Process, observer: shmring.RingClient, socket_dir: Path
) -> None:
    data = torch.ones(100_000, dtype=torch.uint8)

    async def take(mode: str) -> None:
        async for _ in observer.stream({"mode": mode, "x": data}):
            pass

    calls = [asyncio.create_task(observer.request({"mode": "hold", "x": data})) for _ in range(20)]
    calls += [asyncio.create_task(take("stream")), asyncio.create_task(observer.slot(5 << 20).__aenter__())]
    await until(observer, lambda counts: counts["slots_claimed"] >= 20 and counts["replies"] > 10)
    killed = time.monotonic()
    engine.kill()
    results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 5)
    took = time.monotonic() - killed
    assert [type(result) for result in results] == [shmring.EngineDeadError] * len(calls)
    assert took < 1, f"{took:.3f} s; it is a few milliseconds where nothing else runs"
    with pytest.raises(shmring.EngineDeadError):
        await observer.request({"mode": "answer", "x": data})


async def test_a_client_attaches_to_the_next_engine_of_the_name(
    engine: asyncio.subprocess.Process, start: Start, socket_dir: Path
) -> None:
    async with shmring.connect("victim", socket_dir=str(socket_dir), reconnect=True) as client:
        assert await works(client)
        before = client.statistics()
        async with client.slot(1000) as old_slot:
            old = old_slot.tensor((1000,), torch.uint8)
            engine.kill()
            await engine.wait()
            successor = await start("engine", "8MiB")
            assert await works(client)  # waits for it
            assert (await said(successor))[0] == "ready"
            with pytest.raises(shmring.EngineDeadError):
                old_slot.tensor((1,), torch.uint8)
            # The old slot's memory is no slot of this engine: its content is copied.
            old.fill_(3)
            answer = await client.request({"mode": "answer", "x": old}, timeout=10)
            assert answer["sum"] == 3000
        after = client.statistics()
        assert after.reconnections == 1
        assert after.epoch != before.epoch


async def test_a_frontend_that_is_disconnected_but_lives_keeps_its_memory(observer: shmring.RingClient, start: Start) -> None:
    frontend = await start("frontend", "disconnect")
    assert await said(frontend) == ["disconnected"]
    await until(observer, lambda counts: counts["clients"] == 1 and counts["departed_clients"] == 1)
    quarantined = (await statistics(observer))["quarantined_nbytes"]
    assert quarantined > 0
    for _ in range(20):  # more memory goes round than there is, and none of it is the quarantined
        assert await works(observer)
    assert (await statistics(observer))["quarantined_nbytes"] == quarantined
    frontend.kill()
    await until(observer, only_the_observer_is_left)


async def test_a_forked_child_with_the_socket_does_not_keep_the_memory(observer: shmring.RingClient, start: Start) -> None:
    frontend = await start("frontend", "fork")
    word, child = await said(frontend)
    assert word == "forked"
    frontend.kill()
    try:
        await until(observer, only_the_observer_is_left)
    finally:
        os.kill(int(child), signal.SIGKILL)


async def test_nothing_of_a_stopped_frontend_is_reused(observer: shmring.RingClient, start: Start) -> None:
    frontend = await start("frontend", "load")
    await said(frontend)
    frontend.send_signal(signal.SIGSTOP)
    await until(observer, lambda counts: counts["waiting"] == 0)
    leased = (await statistics(observer))["leased_nbytes"]
    for _ in range(20):
        assert await works(observer)
    counts = await statistics(observer)
    assert counts["clients"] == 2
    assert counts["leased_nbytes"] >= leased - 65536
    frontend.send_signal(signal.SIGCONT)
    for _ in range(5):
        await said(frontend)  # it goes on, and its answers are right
    frontend.kill()
    await until(observer, only_the_observer_is_left)


async def test_when_everything_is_killed_nothing_is_left(engine: asyncio.subprocess.Process, start: Start) -> None:
    frontends = [await start("frontend", mode) for mode in ("load", "stream", "write")]
    for frontend in frontends:
        await said(frontend)
    for process in [*frontends, engine]:
        process.kill()
    for process in [*frontends, engine]:
        await process.wait()
    assert list(Path("/dev/shm").glob(f"shmring-{os.getuid()}-*")) == []
