"""What callers await passes for a coroutine: it happens when it is awaited, once, and loses nothing when it is cancelled."""

from __future__ import annotations

import asyncio
import collections.abc
import gc
import inspect
import sys
import warnings
import weakref
from typing import Any

import pytest
import torch

from shmring import Client, Ring
from shmring.errors import AbortedError, ClosedError, LocalProtocolError, RemoteError
from tests.model.inside import has_reply
from tests.waiting import cancel, eventually, turns

_LARGER_THAN_INLINE = torch.zeros(64 << 10, dtype=torch.uint8)


async def test_tasks_take_what_is_awaited(ring: Ring, client: Client) -> None:
    async with asyncio.TaskGroup() as group:
        claiming = group.create_task(ring.claim())
        submitting = group.create_task(client.submit([1]))
    with claiming.result() as claim:
        assert claim.payload == [1]
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(submitting.result().next(), 5)


async def test_asyncio_takes_it_for_a_coroutine(ring: Ring, client: Client) -> None:
    submission = await client.submit([1])
    for awaited in (
        ring.claim(),
        ring.claim_many(2),
        client.submit([2]),
        client.slot(64),
        submission.next(),
        submission.wait(),
    ):
        assert isinstance(awaited, collections.abc.Coroutine)
        assert inspect.isawaitable(awaited)
        awaited.close()
        with pytest.raises(RuntimeError, match="was awaited already"):
            await awaited
    assert client.statistics().submitted == 1


async def test_nothing_happens_before_it_is_awaited(ring: Ring, client: Client) -> None:
    submitting = client.submit([1])
    acquiring = client.slot(64 << 10)
    assert client.statistics().submitted == 0
    assert client.statistics().slots_writing == 0
    await submitting
    async with acquiring:
        assert client.statistics().slots_writing == 1
    claiming = ring.claim()
    assert ring.statistics().running == 0
    with await claiming:
        assert ring.statistics().running == 1


async def test_who_forgets_to_await_is_warned(client: Client) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        client.submit([1])
        client.slot(64)
        gc.collect()
    assert [warning.category for warning in caught] == [RuntimeWarning] * 2
    assert all("was never awaited" in str(warning.message) for warning in caught)


async def test_an_object_that_is_used_again_has_nothing_of_what_it_was(client: Client) -> None:
    """More than are kept, at a time and one after the other."""
    named = [client.submit([number], request_id=f"request {number}") for number in range(40)]
    assert [(await submitting).name for submitting in named] == [f"request {number}" for number in range(40)]
    del named
    for number in range(20):
        assert (await client.submit([number])).name == ""


async def test_what_is_cancelled_before_its_first_step_has_taken_nothing(ring: Ring, client: Client) -> None:
    await client.submit([1])
    slots = client.statistics().slots_writing
    tasks = [asyncio.ensure_future(each) for each in (ring.claim(), client.slot(64 << 10), client.submit([2]))]
    for task in tasks:
        task.cancel()
    assert all(isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*tasks, return_exceptions=True))
    assert client.statistics().submitted == 1
    assert client.statistics().slots_writing == slots
    with await ring.claim() as claim:
        assert claim.payload == [1]


async def test_what_is_cancelled_while_it_waits_takes_nothing(ring: Ring, client: Client) -> None:
    claiming = asyncio.ensure_future(ring.claim())
    await asyncio.sleep(0)
    assert await cancel(claiming)
    submission = await client.submit([1])
    for wait in (submission.next, submission.wait):
        waiting = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        assert await cancel(waiting)
    with await ring.claim() as claim:
        await claim.reply("here")
    assert await submission.next() == "here"


async def test_who_waits_for_the_end_gets_no_reply_of_it(ring: Ring, client: Client) -> None:
    submission = await client.submit([1])
    waiting = asyncio.ensure_future(submission.wait())
    with await ring.claim() as claim:
        await claim.reply("here")
        while not has_reply(submission):
            await asyncio.sleep(0)
        assert not waiting.done()
    assert await waiting is None
    assert submission.ended
    assert await submission.wait() is None
    assert await submission.next() == "here"


async def test_who_waits_for_the_end_hears_how_it_came(ring: Ring, client: Client) -> None:
    failing, aborted, given_up = [await client.submit([number]) for number in range(3)]
    waiting = [asyncio.ensure_future(submission.wait()) for submission in (failing, aborted, given_up)]
    await asyncio.sleep(0)
    with pytest.raises(LocalProtocolError, match="is waited for by two tasks"):
        await aborted.next()
    with pytest.raises(LocalProtocolError, match="is waited for by two tasks"):
        await failing.wait()
    waiting[2].cancel()
    aborted.abort()
    with pytest.raises(ValueError, match="broken"), await ring.claim():
        raise ValueError("broken")
    with pytest.raises(RemoteError, match="broken"):
        await waiting[0]
    with pytest.raises(AbortedError):
        await waiting[1]
    with pytest.raises(asyncio.CancelledError):
        await waiting[2]
    with await ring.claim():
        pass  # what was aborted was not claimed any more
    await asyncio.wait_for(given_up.wait(), 5)


async def test_an_error_that_ends_the_waiting_reaches_who_waits(ring: Ring, connect: Any) -> None:
    claiming = asyncio.ensure_future(ring.claim())
    iterating = asyncio.ensure_future(anext(ring))
    await asyncio.sleep(0)
    await ring.close()
    with pytest.raises(ClosedError):
        await claiming
    with pytest.raises(StopAsyncIteration):
        await iterating
    with pytest.raises(ClosedError):
        await ring.claim()
    with pytest.raises(StopAsyncIteration):
        await anext(ring)


async def test_an_error_in_a_slots_block_leaves_the_slot(client: Client) -> None:
    with pytest.raises(ZeroDivisionError):
        async with client.slot(64 << 10):
            _ = 1 / 0
    assert client.statistics().slots_writing == 0


async def test_claims_are_taken_together(ring: Ring, client: Client) -> None:
    for number in range(5):
        await client.submit([number, _LARGER_THAN_INLINE])
    await eventually(lambda: ring.statistics().waiting == 5)
    taken = []
    for most in (2, 16):
        claims = await ring.claim_many(most)
        taken.append([claim.payload[0] for claim in claims])
        for claim in claims:
            claim.done()
        del claims, claim
    assert taken == [[0, 1], [2, 3, 4]]
    waiting = asyncio.ensure_future(ring.claim_many(3))
    await asyncio.sleep(0)
    await client.submit([5])
    [claim] = await waiting
    assert claim.payload == [5]
    claim.done()
    with pytest.raises(ValueError, match="at least 1"):
        ring.claim_many(0)


async def test_claim_many_does_not_overtake_an_earlier_claim(ring: Ring, client: Client) -> None:
    first, second = asyncio.ensure_future(ring.claim()), asyncio.ensure_future(ring.claim_many(9))
    await asyncio.sleep(0)
    for number in range(3):
        await client.submit([number])
    with await first as claim:
        assert claim.payload == [0]
    claims = await second
    if len(claims) < 2:  # what comes in another turn of a busy machine comes later
        claims += await ring.claim_many(9)
    assert [claim.payload for claim in claims] == [[1], [2]]
    for claim in claims:
        claim.done()


@pytest.mark.ring(slab_nbytes="256KiB")
async def test_what_was_waited_for_is_nobodys_but_its_callers(ring: Ring, client: Client) -> None:
    async def references() -> int:
        with await client.slot(64 << 10) as slot:
            return sys.getrefcount(slot)

    await references()  # it waits for a lease
    at_once = await references()
    with await client.slot(ring.statistics().leasable_nbytes - 64):
        waiting = asyncio.create_task(references())
        await turns()
        assert not waiting.done()
    assert await waiting == at_once


async def test_an_error_of_what_was_waited_in_reaches_who_waits(client: Client) -> None:
    with pytest.raises(ValueError, match="there is no engine 'nobody'"):
        await client.slot(64, engine="nobody")


async def test_a_submission_happens_once_and_keeps_nothing_of_its_payload(client: Client) -> None:
    tensor = torch.zeros(64 << 10, dtype=torch.uint8)
    submitting = client.submit([tensor])
    await submitting
    gone = weakref.ref(tensor)
    del tensor
    assert gone() is None
    with pytest.raises(RuntimeError, match="was awaited already"):
        await submitting
    assert client.statistics().submitted == 1
