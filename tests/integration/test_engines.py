"""Several engines as processes, one of which is killed or stopped while requests are in flight at all of them."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shmring
from tests.waiting import eventually

pytestmark = pytest.mark.both_loops

NAMES = ["vision-0", "vision-1"]
CALLERS = 12


class Engines:
    """Engine processes, by name."""

    def __init__(self, launch: Callable[..., Any], socket_dir: Path) -> None:
        self._launch = launch
        self._socket_dir = socket_dir
        self.processes: dict[str, Any] = {}

    async def start(self, *names: str) -> None:
        for name in names:
            self.processes[name] = self._launch("engine", name, str(self._socket_dir), "8MiB")
        for name in names:
            assert (await self.processes[name].said())[0] == "ready"

    async def kill(self, *names: str) -> None:
        for name in names:
            self.processes[name].signal(signal.SIGKILL)
        for name in names:
            await self.processes[name].died()


@pytest.fixture
async def engines(launch: Callable[..., Any], socket_dir: Path) -> Engines:
    engines = Engines(launch, socket_dir)
    await engines.start(*NAMES)
    return engines


@pytest.fixture
async def client(engines: Engines, socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[shmring.Client]:
    monkeypatch.setattr("shmring.client.pauses.LONGEST_S", 0.05)
    options: dict[str, Any] = {"lease_nbytes": "64KiB", "connect_timeout_s": 30.0}
    async with shmring.connect(NAMES, socket_dir=str(socket_dir), **options) as client:
        yield client


def content(nbytes: int, number: int) -> torch.Tensor:
    return (torch.arange(nbytes) * (number + 1)).to(torch.uint8)


class Callers:
    """Callers that send one request after the other, and note what became of each."""

    def __init__(self, client: shmring.Client, **options: Any) -> None:
        self._client = client
        self._options = options
        self._stopping = False
        self.answered: Counter[int] = Counter()  # by the pid of the engine
        self.errors: list[shmring.EngineDeadError] = []
        self._tasks = [asyncio.create_task(self._call(number)) for number in range(CALLERS)]

    async def _call(self, number: int) -> None:
        chance = random.Random(number)
        while not self._stopping:
            x = content(chance.choice([100, 3000, 20_000]), number)
            key = f"session-{number}" if number % 3 == 0 else None
            try:
                if number % 2:
                    answer = await self._client.request({"mode": "answer", "x": x}, key=key, timeout=30, **self._options)
                else:
                    async with self._client.slot(x.numel(), key=key, timeout=30) as slot:
                        view = slot.tensor(x.shape, torch.uint8).copy_(x)
                        answer = await self._client.request({"mode": "answer", "x": view}, timeout=30, **self._options)
            except shmring.EngineDeadError as error:
                self.errors.append(error)
                continue
            assert torch.equal(answer["x"], x)
            assert answer["sum"] == int(x.sum())
            self.answered[answer["pid"]] += 1

    async def have(self, pid: int, more: int = 50) -> None:
        """Waits until an engine has answered so many more requests."""
        wanted = self.answered[pid] + more
        async with asyncio.timeout(60):
            while self.answered[pid] < wanted:
                for task in self._tasks:
                    assert not task.done(), f"a caller has failed: {task.exception()!r}"
                await asyncio.sleep(0.001)

    async def stop(self) -> None:
        self._stopping = True
        await asyncio.gather(*self._tasks)


@pytest.mark.parametrize("retry", [0, 1])
async def test_an_engine_that_is_killed_takes_its_own_requests_and_no_others(
    client: shmring.Client, engines: Engines, retry: int
) -> None:
    first, second = (engines.processes[name].pid for name in NAMES)
    callers = Callers(client, retry=retry)
    await callers.have(first)
    await callers.have(second)
    in_flight = await client.submit({"mode": "hold", "x": content(10, 0)}, engine="vision-0")
    kept = await client.submit({"mode": "hold", "x": content(10, 0)}, engine="vision-1")
    time.sleep(0.01)  # holds this loop: the engine answers
    killing = asyncio.ensure_future(engines.kill("vision-0"))
    killing.get_loop().call_soon(time.sleep, 0.05)  # and is dead before anybody has read its answers
    await killing
    with pytest.raises(shmring.EngineDeadError, match="vision-0", check=lambda error: error.engine == "vision-0"):
        await in_flight.result()
    await callers.have(second, 200)
    assert not kept.ended
    await engines.start("vision-0")
    await callers.have(engines.processes["vision-0"].pid)  # it is used again
    await callers.stop()
    kept.abort()
    assert {error.engine for error in callers.errors} <= {"vision-0"}
    assert len(callers.errors) <= CALLERS, "each caller had one request there"
    if retry:
        assert callers.errors == []
    assert client.engines["vision-1"].statistics().failed == 0
    assert client.engines["vision-1"].statistics().reconnections == 0
    for name in NAMES:
        counts = await _settled(client, name)
        assert counts["protocol_errors"] == 0


async def _settled(client: shmring.Client, name: str) -> dict[str, int]:
    """The counts of an engine that has nothing to do any more; its book was checked."""
    async with asyncio.timeout(60):
        while True:
            counts: dict[str, int] = await client.call("statistics", engine=name)
            if counts["slots_published"] + counts["slots_claimed"] + counts["slots_draining"] == 0:
                return counts
            await asyncio.sleep(0.002)


async def test_what_lay_in_a_slot_of_a_killed_engine_is_still_there(client: shmring.Client, engines: Engines) -> None:
    x = content(50_000, 3)
    async with client.slot(x.numel(), engine="vision-0") as slot:
        view = slot.tensor(x.shape, torch.uint8).copy_(x)
        held = asyncio.create_task(client.request({"mode": "hold", "x": view}, retry=1, timeout=30))
        while client.engines["vision-0"].statistics().in_flight == 0:
            await asyncio.sleep(0)
        await engines.kill("vision-0")
        while client.engines["vision-1"].statistics().in_flight == 0:
            await asyncio.sleep(0)
        held.cancel()
        answer = await client.request({"mode": "answer", "x": view}, timeout=30)
        assert answer["pid"] == engines.processes["vision-1"].pid
        assert torch.equal(answer["x"], x)
    await asyncio.wait([held])
    assert client.resent == 1


async def test_an_engine_that_is_stopped_gets_nothing_new_until_it_goes_on(client: shmring.Client, engines: Engines) -> None:
    stopped = engines.processes["vision-0"]
    stopped.signal(signal.SIGSTOP)
    await stopped.stopped()
    waiting = await client.submit({"mode": "answer", "x": content(100, 1)}, engine="vision-0")
    await eventually(lambda: not client.loads()["vision-0"].responds)
    for number in range(30):
        answer = await client.request({"mode": "answer", "x": content(5000, number)}, timeout=30)
        assert answer["pid"] == engines.processes["vision-1"].pid
    burst = [await client.submit({"mode": "answer", "x": content(100, number)}) for number in range(20)]
    assert {submission.engine for submission in burst} == {"vision-1"}
    for submission in burst:
        await submission.result()
    assert not waiting.ended
    stopped.signal(signal.SIGCONT)
    assert (await waiting.result())["pid"] == stopped.pid
    await eventually(lambda: client.loads()["vision-0"].responds)
    burst = [await client.submit({"mode": "answer", "x": content(100, number)}) for number in range(20)]
    for submission in burst:
        await submission.result()
    assert {submission.engine for submission in burst} == set(NAMES)


async def test_what_is_not_sent_to_an_engine_that_stops_goes_to_another(client: shmring.Client, engines: Engines) -> None:
    """A choice that was not fulfilled is made again: for a search, for slots, and for payloads that wait for space."""
    stopped, other = (engines.processes[name] for name in NAMES)
    with await client.keep(bytes(32), {"x": content(100, 0)}, engine="vision-1"):
        pass
    held = [await client.slot(60 << 10, engine=name) for name in NAMES]  # the leases that they have are full
    stopped.signal(signal.SIGSTOP)
    await stopped.stopped()
    found = await client.find(bytes(32), timeout=30)
    assert found is not None
    assert found.payload["x"].tolist() == content(100, 0).tolist()
    found.close()
    slots = await asyncio.gather(*(client.slot(20 << 10, timeout=30) for _ in range(4)))
    assert {slot.engine for slot in slots} == {"vision-1"}
    waiting = client.slot(20 << 10, timeout=0.5, engine="vision-0")
    with pytest.raises(TimeoutError):  # who names it waits for it
        await waiting
    answers = await asyncio.gather(*(client.request({"mode": "answer", "x": content(20_000, 1)}, timeout=30) for _ in range(4)))
    assert {answer["pid"] for answer in answers} == {other.pid}
    for slot in (*held, *slots):
        slot.close()
    stopped.signal(signal.SIGCONT)
    async with client.slot(20 << 10, timeout=30, engine="vision-0"):
        pass


async def test_when_all_are_killed_requests_fail_and_later_ones_wait_for_the_next(
    client: shmring.Client, engines: Engines
) -> None:
    pending = [await client.submit({"mode": "hold", "x": content(10, 0)}) for _ in range(6)]
    await engines.kill(*NAMES)
    for submission in pending:
        with pytest.raises(shmring.EngineDeadError, match=submission.engine):
            await submission.result()
    waiting = asyncio.create_task(client.request({"mode": "answer", "x": content(100, 1)}, timeout=30, retry=1))
    await engines.start("vision-1")
    assert (await waiting)["pid"] == engines.processes["vision-1"].pid


@pytest.mark.one_loop
async def test_nobody_but_the_engine_can_write_its_load(client: shmring.Client, engines: Engines) -> None:
    """Whoever may open all that an engine has open can't write this."""
    pid = engines.processes["vision-0"].pid
    [page] = [path for path in Path(f"/proc/{pid}/fd").iterdir() if "shmring-load" in str(path.readlink())]
    for flags in ("r+b", "wb"):
        with pytest.raises(PermissionError), page.open(flags, buffering=0) as file:
            file.write(b"\xff" * 16)
    assert client.loads()["vision-0"].in_flight == 0
