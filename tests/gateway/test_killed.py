"""Either side is killed or stopped at any moment: no byte lands in a slot that is used again, no slot is lost, and each request
has one answer or one typed error. The processes are real, and so are the signals.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

import shmring
from shmring.transport.streams import Pace
from tests.gateway.test_far_clients import TOKEN, gateway_of
from tests.nursery import Forked, Nursery
from tests.tables import slow
from tests.waiting import cancel, eventually

PROGRAMS = Path(__file__).parent / "programs"
FEW, MANY = 4, 200

pytestmark = pytest.mark.timeout(3000)
times = pytest.mark.parametrize("times", [FEW, slow(MANY)])


class Watching:
    """An engine of this process that looks at each tensor twice, before and after others have had their turns."""

    def __init__(self, ring: shmring.Ring) -> None:
        self.ring = ring
        self.wrong: list[str] = []
        self.handled = 0

    async def handle(self, claim: shmring.Claim) -> None:
        x, value = claim.payload["x"], claim.payload["value"]
        for _ in range(3):
            if not int(x.min()) == int(x.max()) == value:
                self.wrong.append(f"{int(x.min())} to {int(x.max())} where {value} was sent")
            await asyncio.sleep(0)
        del x
        self.handled += 1
        await claim.done(value)

    async def is_whole_again(self) -> None:
        """Nobody has a slot; whoever was in the midst of something has lost it."""
        gateway, here = gateway_of(self.ring), gateway_of(self.ring)._client.statistics
        await eventually(lambda: gateway._filling.requests == 0 and self.ring.statistics().running == 0, 60)
        await eventually(lambda: here().slots_writing == here().slots_submitted == here().slots_draining == 0, 60)
        assert self.wrong == []


@pytest.fixture
async def watching(socket_dir: Path) -> AsyncIterator[Watching]:
    options = {"slab_nbytes": "16MiB", "socket_dir": str(socket_dir), "listen": "127.0.0.1:0", "token": TOKEN}
    async with shmring.serve("far", **options) as ring:  # type: ignore[call-overload]
        watching = Watching(ring)
        running = asyncio.create_task(ring.run(watching.handle))
        yield watching
        await ring.close()
        await cancel(running)


def sender_of(nursery: Nursery, output: Path, ring: shmring.Ring) -> Forked:
    return nursery.start(output, PROGRAMS / "far_sender.py", ring.address, TOKEN)


async def says(sender: Forked, word: str) -> None:
    while (await sender.said(60))[0] != word:
        pass


@times
async def test_a_sender_is_killed(watching: Watching, nursery: Nursery, tmp_path: Path, times: int) -> None:
    """Another one sends all the time, into slots that the dead have left."""
    beside = sender_of(nursery, tmp_path / "beside", watching.ring)
    moments = random.Random(times)
    for number in range(times):
        sender = sender_of(nursery, tmp_path / f"{number}", watching.ring)
        await says(sender, "attached")
        await asyncio.sleep(moments.uniform(0, 0.05))
        sender.signal(signal.SIGKILL)
        await sender.died()
        await says(beside, "answered")
    beside.signal(signal.SIGKILL)
    await beside.died()
    await eventually(lambda: not gateway_of(watching.ring)._peers, 60)
    await watching.is_whole_again()
    assert watching.handled > times


@times
async def test_a_sender_is_stopped(watching: Watching, nursery: Nursery, tmp_path: Path, times: int) -> None:
    """Who is stopped for longer than the gateway's patience loses its connection if it was sending, and then attaches again."""
    gateway_of(watching.ring)._pace = Pace(patience=3, tick_s=0.02)
    sender = sender_of(nursery, tmp_path / "sender", watching.ring)
    await says(sender, "attached")
    moments = random.Random(times)
    for _ in range(times):
        await asyncio.sleep(moments.uniform(0, 0.05))
        sender.signal(signal.SIGSTOP)
        await sender.stopped()
        await watching.is_whole_again()
        sender.signal(signal.SIGCONT)
        await says(sender, "answered")
    sender.signal(signal.SIGKILL)
    await sender.died()
    await watching.is_whole_again()


async def asked(client: shmring.Client, value: int) -> None:
    """One answer, or one typed error."""
    x = torch.full((1_000_000,), value, dtype=torch.uint8)
    with contextlib.suppress(shmring.EngineDeadError):
        reply = await client.request({"x": x})
        assert reply["value"] == value
        assert torch.equal(reply["x"], x + 1)


@times
async def test_an_engine_is_killed(nursery: Nursery, socket_dir: Path, tmp_path: Path, times: int) -> None:
    place, client = "127.0.0.1:0", None
    moments = random.Random(times)
    for number in range(times):
        engine = nursery.start(tmp_path / f"{number}", PROGRAMS / "far_engine.py", place, TOKEN, str(socket_dir))
        _, address = await engine.said(60)
        place = address.split("/")[2]
        if client is None:
            client = await shmring.connect(address, token=TOKEN, reconnect=True)
        await client.wait_connected(60)
        asking = [asyncio.create_task(asked(client, value)) for value in range(4)]
        await asyncio.sleep(moments.uniform(0, 0.05))
        engine.signal(signal.SIGKILL)
        await asyncio.gather(*asking)
        await engine.died()
    assert client is not None
    await client.close()


@times
async def test_an_engine_is_stopped(nursery: Nursery, socket_dir: Path, tmp_path: Path, times: int) -> None:
    """It goes on, and so do its clients."""
    engine = nursery.start(tmp_path / "engine", PROGRAMS / "far_engine.py", "127.0.0.1:0", TOKEN, str(socket_dir))
    _, address = await engine.said(60)
    moments = random.Random(times)
    async with shmring.connect(address, token=TOKEN) as client:
        for _ in range(times):
            asking = [asyncio.create_task(asked(client, value)) for value in range(4)]
            await asyncio.sleep(moments.uniform(0, 0.03))
            engine.signal(signal.SIGSTOP)
            await engine.stopped()
            await asyncio.sleep(moments.uniform(0, 0.03))
            engine.signal(signal.SIGCONT)
            await asyncio.gather(*asking)
        assert client.statistics().finished == 4 * times
    engine.signal(signal.SIGKILL)
    await engine.died()
