"""``timeout=``: one heap and one timer for all callers, and an error that says what was waited for."""

from __future__ import annotations

import asyncio
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import shmring
from shmring import Client, Ring
from shmring.client.deadlines import Deadlines
from tests.tables import for_each
from tests.waiting import cancel


@pytest.fixture
async def deadlines() -> Deadlines:
    return Deadlines()


def nothing() -> str:
    return "nothing"


async def test_each_is_over_in_its_own_time(deadlines: Deadlines) -> None:
    loop = asyncio.get_running_loop()
    ended: list[float] = []

    async def wait(timeout: float) -> None:
        started_s = loop.time()
        late = rf"longer than the {timeout:g} s it was given: nothing"
        with pytest.raises(TimeoutError, match=late), deadlines.within(timeout, nothing):
            await asyncio.Event().wait()
        ended.append(timeout)
        assert loop.time() - started_s >= timeout - 0.002

    timeouts = [0.05 * number for number in range(1, 6)]
    await asyncio.gather(*(wait(timeout) for timeout in random.Random(1).sample(timeouts, 5)))
    assert ended == timeouts
    assert not deadlines._heap


@for_each("timeout", [0, -1.0])
async def test_time_that_is_over_already_ends_the_first_wait(timeout: float) -> None:
    with pytest.raises(TimeoutError), Deadlines().within(timeout, nothing):
        await asyncio.Event().wait()


@pytest.mark.both_loops
async def test_one_whose_time_is_over_already_harms_no_other(deadlines: Deadlines) -> None:
    async def wait_long_enough() -> None:
        with deadlines.within(5, nothing):
            await asyncio.sleep(0)

    other = asyncio.create_task(wait_long_enough())
    with pytest.raises(TimeoutError), deadlines.within(-1.0, nothing):
        await asyncio.Event().wait()
    await other


async def test_who_needs_no_wait_is_not_late(deadlines: Deadlines) -> None:
    with deadlines.within(5, nothing):
        pass
    with deadlines.within(None, nothing):
        await asyncio.sleep(0)
    assert asyncio.current_task().cancelling() == 0


async def test_a_cancellation_from_outside_stays_one(deadlines: Deadlines) -> None:
    async def wait() -> None:
        with deadlines.within(5, nothing):
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    assert await cancel(task)


async def test_the_inner_of_two_does_not_end_the_outer(deadlines: Deadlines) -> None:
    with deadlines.within(5, nothing):
        with pytest.raises(TimeoutError, match=r"0\.01 s"), deadlines.within(0.01, nothing):
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        assert deadlines._timer is not None, "for the outer one"


async def test_all_have_one_timer_which_goes_off_for_the_earliest() -> None:
    """Others are set by nobody: an entry of the loop's for each request is what this saves."""
    deadlines, loop = Deadlines(), asyncio.get_running_loop()
    before = scheduled(loop)
    with deadlines.within(500, nothing), deadlines.within(400, nothing):
        with deadlines.within(600, nothing), deadlines.within(700, nothing):
            assert scheduled(loop) - before == 1
        assert deadlines._timer is not None
        assert deadlines._timer.when() - loop.time() == pytest.approx(400, abs=30)


def scheduled(loop: Any) -> int:
    """How many timers of a loop will go off."""
    return sum(not timer.cancelled() for timer in loop._scheduled)


async def test_what_is_over_is_counted_until_it_has_gone(deadlines: Deadlines) -> None:
    with deadlines.within(1000, nothing):
        for _ in range(500):
            with deadlines.within(500, nothing):
                pass
            assert deadlines._over == len(deadlines._heap) - 1
    with deadlines.within(-1.0, nothing):
        pass
    with pytest.raises(TimeoutError), deadlines.within(0.0, nothing):
        await asyncio.Event().wait()
    assert (deadlines._over, deadlines._heap) == (0, [])


async def test_an_entry_that_is_over_keeps_nothing_of_its_caller(deadlines: Deadlines) -> None:
    class Caller:
        def waits_for(self) -> str:
            return "a reply"

    caller = Caller()
    gone = weakref.ref(caller)
    with deadlines.within(1000, caller.waits_for):
        pass
    del caller
    assert deadlines._heap
    assert gone() is None


async def test_a_timer_that_goes_off_a_little_early_is_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops round the time: there would be another timer of no length, and so on."""
    deadlines, loop = Deadlines(), asyncio.get_running_loop()
    until_s = loop.time() + 5

    async def wait() -> None:
        with deadlines.within(5, nothing, until_s=until_s):
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "time", lambda: until_s - 0.0005)
        deadlines._expire()
    assert deadlines._heap == []
    with pytest.raises(TimeoutError):
        await task


async def test_a_cancellation_that_comes_with_the_end_of_the_time_stays_one(deadlines: Deadlines) -> None:
    async def wait() -> None:
        with deadlines.within(1000, nothing):
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    deadlines._heap[0][2].expire()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelling() == 1


async def test_what_is_over_is_not_kept_until_its_time(deadlines: Deadlines) -> None:
    with deadlines.within(1000, nothing):
        for _ in range(1000):
            with deadlines.within(500, nothing):
                pass
        assert len(deadlines._heap) < 200
    with pytest.raises(TimeoutError), deadlines.within(0.01, nothing):
        await asyncio.Event().wait()


@pytest.mark.ring(slab_nbytes="1MiB")
async def test_a_request_that_waits_for_space_says_so(client: Client) -> None:
    async with client.slot(600_000):
        with pytest.raises(TimeoutError, match=r"0\.05 s it was given: space: \d+ of the \d+ bytes .* callers hold 1 slots"):
            await client.request(torch.zeros(600_000, dtype=torch.uint8), timeout=0.05)
        with pytest.raises(TimeoutError, match="space"):
            async with client.slot(600_000, timeout=0.05):
                pass
    async with client.slot(600_000, drain=True) as slot:
        view = slot.tensor((600_000,), torch.uint8)
    with pytest.raises(TimeoutError, match=r"\d+ bytes of slots that were left are kept by living views"):
        await client.request(torch.zeros(600_000, dtype=torch.uint8), timeout=0.05)
    del view


@pytest.mark.ring(slab_nbytes="4MiB", kept_nbytes="2MiB", reply_nbytes="64KiB")
async def test_who_waits_for_space_that_kept_contents_have_is_told_what_to_leave(client: Client) -> None:
    pinned = [await client.keep(bytes([number]) * 32, torch.zeros(600_000, dtype=torch.uint8)) for number in range(3)]
    with pytest.raises(TimeoutError, match=r"free, 3 kept contents are pinned \(leave what find\(\) and keep\(\)") as caught:
        await client.slot(3_000_000, timeout=0.05)
    assert "callers hold" not in str(caught.value)
    async with client.slot(600_000):
        with pytest.raises(TimeoutError, match=r"callers hold 1 slots, 3 kept contents are pinned"):
            await client.slot(3_000_000, timeout=0.05)
    for kept in pinned:
        kept.close()
    async with client.slot(3_000_000, timeout=5):
        pass


async def test_a_timeout_is_a_number_and_that_is_said_before_anything_happens(ring: Ring, client: Client) -> None:
    wrong: Any = "5s"
    attempts: list[Callable[[], Any]] = [
        lambda: client.request(1, timeout=wrong),
        lambda: client.slot(1000, timeout=wrong),
        lambda: ring.broadcast(1, timeout=wrong),
        lambda: ring.gather(1, timeout=wrong),
    ]
    for attempt in attempts:
        with pytest.raises(TypeError, match="timeout is a number of seconds, or None, not '5s'"):
            await attempt()
    assert ring.statistics().submitted == 0
    async with client.slot(1000, timeout=np.float32(5)):  # no float, and a number
        pass


@pytest.mark.ring(max_inflight=2)
async def test_a_request_that_waits_for_its_turn_says_so(client: Client) -> None:
    for _ in range(2):
        await client.submit("in flight")
    with pytest.raises(TimeoutError, match="its turn: 2 requests are in flight"):
        await client.request("one more", timeout=0.05)


async def test_a_request_that_waits_for_its_reply_says_so_and_what_earlier_ones_keep(serve: Any, connect: Any) -> None:
    async def answer(claim: shmring.Claim) -> None:
        if claim.payload == "hang":
            await asyncio.Event().wait()
        await claim.reply(torch.zeros(5_000))

    await serve(answer)
    client = await connect()
    reply = await client.request("large", timeout=5)
    with pytest.raises(TimeoutError, match=r"the engine's reply; 1 requests .* views of 1 earlier replies are alive"):
        await client.request("hang", timeout=0.05)
    assert reply.numel() == 5_000


async def test_a_request_without_an_engine_says_so(serve: Any, connect: Any) -> None:
    ring = await serve(name="goes")
    client = await connect("goes", reconnect=True)
    await ring.close()
    with pytest.raises(TimeoutError, match="an engine 'goes' to be attached"):
        await client.request("late", timeout=0.1)
