"""The line of one client for slots: a caller whose memory does not come keeps the others waiting for a bounded time only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

import shmring
from shmring import Client, Ring
from shmring.memory.slots import Slots
from tests.sessions import session_of
from tests.waiting import cancel, eventually

pytestmark = [pytest.mark.both_loops, pytest.mark.filterwarnings("error::ResourceWarning")]

LIMIT_S = 60  # which only a hang reaches
LEASE_NBYTES = 128 << 10
#: Room for three leases, and for nothing of LARGE_NBYTES on one side of the one in the middle.
CUT: dict[str, Any] = {
    "slab_nbytes": 3 * LEASE_NBYTES + (32 << 10),
    "reply_nbytes": 4096,
    "max_lease_nbytes": LEASE_NBYTES,
    "client_quota_nbytes": "1MiB",
}
SLOT_NBYTES = 100 << 10
LARGE_NBYTES = 200 << 10


@pytest.fixture
def short_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shmring.memory.slots._MOMENT_S", 0.01)


@asynccontextmanager
async def cut_slab(connect: Any) -> AsyncIterator[tuple[Client, shmring.Slot]]:
    """Yields a client of a slab whose middle is kept by a slot of another, and that slot."""
    _, keeping, client = [await connect(lease_nbytes=LEASE_NBYTES) for _ in range(3)]
    with await keeping.slot(SLOT_NBYTES) as kept:
        yield client, kept


def line_of(client: Client) -> Slots:
    return session_of(client).host_slots


def begin(client: Client, nbytes: int) -> asyncio.Task[shmring.Slot]:
    async def hold() -> shmring.Slot:
        return await client.slot(nbytes)

    return asyncio.create_task(hold())


async def until_it_rests(client: Client) -> None:
    waiters = line_of(client).book._waiters
    await eventually(lambda: any(waiter.rest_moments for waiter in waiters.values()))


@pytest.mark.ring(**CUT)
async def test_small_slots_are_had_beside_a_large_one_that_waits_for_another_client(ring: Ring, connect: Any) -> None:
    async with cut_slab(connect) as (client, kept):
        large = begin(client, LARGE_NBYTES)
        small = [begin(client, nbytes) for nbytes in (10, SLOT_NBYTES, 5_000)]
        for each in small:
            (await asyncio.wait_for(each, LIMIT_S)).close()
        assert not large.done()
        kept.close()
        (await asyncio.wait_for(large, LIMIT_S)).close()


@pytest.mark.ring(handler=lambda claim: claim.reply("done"), **CUT)
async def test_small_requests_are_answered_beside_a_large_one_that_waits_for_another_client(ring: Ring, connect: Any) -> None:
    async with cut_slab(connect) as (client, kept):
        large = asyncio.create_task(client.request(torch.zeros(LARGE_NBYTES, dtype=torch.uint8)))
        await asyncio.sleep(0)
        for _ in range(3):
            answer = client.request(torch.zeros(SLOT_NBYTES, dtype=torch.uint8), timeout=LIMIT_S)
            assert await answer == "done"
        assert not large.done()
        kept.close()
        assert await asyncio.wait_for(large, LIMIT_S) == "done"


@pytest.mark.usefixtures("short_moments")
@pytest.mark.ring(**CUT)
@pytest.mark.client(lease_nbytes=LEASE_NBYTES)
async def test_small_ones_that_keep_coming_do_not_overtake_a_large_one_for_ever(client: Client) -> None:
    """Three of the five have a slot, and the others wait for one: if they always came first, there would always be one."""
    had_one = asyncio.Event()

    async def hold_again_and_again() -> None:
        while True:
            async with client.slot(SLOT_NBYTES, timeout=LIMIT_S):
                had_one.set()
                await asyncio.sleep(0.03)

    small = [asyncio.create_task(hold_again_and_again()) for _ in range(5)]
    await had_one.wait()
    (await asyncio.wait_for(begin(client, 3 * SLOT_NBYTES), LIMIT_S)).close()
    await cancel(*small)


@pytest.mark.usefixtures("short_moments")
@pytest.mark.ring(**CUT)
async def test_who_rests_may_be_cancelled(ring: Ring, connect: Any) -> None:
    async with cut_slab(connect) as (client, kept):
        large, second = begin(client, LARGE_NBYTES), begin(client, LARGE_NBYTES)
        (await asyncio.wait_for(begin(client, 10), LIMIT_S)).close()
        await until_it_rests(client)
        assert await cancel(large)
        (await asyncio.wait_for(begin(client, 10), LIMIT_S)).close()  # the second waits, and lets it pass
        assert not second.done()
        kept.close()
        (await asyncio.wait_for(second, LIMIT_S)).close()


@pytest.mark.usefixtures("short_moments")
@pytest.mark.ring(**CUT)
async def test_who_asks_while_others_rest_may_be_cancelled(ring: Ring, connect: Any) -> None:
    """Both want more than there is beside the kept slot; the smaller one has the turn while the larger one rests."""
    async with cut_slab(connect) as (client, kept):
        large, less = begin(client, LARGE_NBYTES), begin(client, LARGE_NBYTES - 8192)
        await until_it_rests(client)
        less.cancel()
        await asyncio.wait([less])
        (await asyncio.wait_for(begin(client, 10), LIMIT_S)).close()
        kept.close()
        (await asyncio.wait_for(large, LIMIT_S)).close()


@pytest.mark.usefixtures("short_moments")
@pytest.mark.ring(**CUT)
async def test_a_session_that_ends_ends_the_waits_of_those_that_rest(ring: Ring, connect: Any) -> None:
    async with cut_slab(connect) as (client, kept):
        waiting = [begin(client, LARGE_NBYTES), begin(client, LARGE_NBYTES - 8192)]
        await until_it_rests(client)
        line = line_of(client)
        timer = line._moment
        await ring.close()
        done, _ = await asyncio.wait(waiting, timeout=LIMIT_S)
        assert done == {*waiting}
        assert [type(task.exception()) for task in waiting] == [shmring.EngineDeadError] * 2
        assert timer is not None
        assert timer.cancelled()
        kept.close()


@pytest.mark.ring(**CUT)
@pytest.mark.client(lease_nbytes=LEASE_NBYTES)
async def test_a_client_in_which_nobody_waits_has_no_timer(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    line = line_of(client)
    with await client.slot(SLOT_NBYTES) as slot:
        assert line._moment is None
        monkeypatch.setattr("shmring.memory.slots._MOMENT_S", 0.01)
        waiting = begin(client, 3 * SLOT_NBYTES)
        await eventually(lambda: line.book.waiting == 1)
        assert line._moment is not None
        slot.close()
        (await asyncio.wait_for(waiting, LIMIT_S)).close()
    await eventually(lambda: line._moment is None)


@pytest.mark.ring(**CUT)
async def test_a_moment_lasts_a_second(ring: Ring, connect: Any) -> None:
    """Of which two are waited for at first."""
    async with cut_slab(connect) as (client, _):
        loop = asyncio.get_running_loop()
        before_s = loop.time()
        large = begin(client, LARGE_NBYTES)
        await eventually(lambda: line_of(client).book.waiting == 1)
        timer = line_of(client)._moment
        assert timer is not None
        assert before_s + 0.99 <= timer.when() <= loop.time() + 1.01
        large.cancel()
        await asyncio.wait([large])
