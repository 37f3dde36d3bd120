"""What callers await passes for a coroutine: it happens when it is awaited, once, and loses nothing when it is cancelled."""

from __future__ import annotations

import asyncio
import collections.abc
import gc
import inspect
import warnings
import weakref
from typing import Any

import pytest
import torch

from shmring.errors import AbortedError, ClosedError, LocalProtocolError, RemoteError

_LARGER_THAN_INLINE = torch.zeros(64 << 10, dtype=torch.uint8)


async def test_tasks_take_what_is_awaited(serve: Any, connect: Any) -> None:
    ring, client = await serve(), await connect()
    async with asyncio.TaskGroup() as group:
        claiming = group.create_task(ring.claim())
        submitting = group.create_task(client.submit([1]))
    with claiming.result() as claim:
        assert claim.payload == [1]
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(submitting.result().next(), 5)


async def test_asyncio_takes_it_for_a_coroutine(serve: Any, connect: Any) -> None:
    ring, client = await serve(), await connect()
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


async def test_nothing_happens_before_it_is_awaited(serve: Any, connect: Any) -> None:
    ring, client = await serve(), await connect()
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


async def test_who_forgets_to_await_is_warned(serve: Any, connect: Any) -> None:
    await serve()
    client = await connect()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        client.submit([1])
        client.slot(64)
        gc.collect()
    assert [warning.category for warning in caught] == [RuntimeWarning] * 2
    assert all("was never awaited" in str(warning.message) for warning in caught)


async def test_an_object_that_is_used_again_has_nothing_of_what_it_was(serve: Any, connect: Any) -> None:
    """More than are kept, at a time and one after the other."""
    await serve()
    client = await connect()
    named = [client.submit([number], request_id=f"request {number}") for number in range(40)]
    assert [(await submitting).name for submitting in named] == [f"request {number}" for number in range(40)]
    del named
    for number in range(20):
        assert (await client.submit([number])).name == ""


async def test_it_happens_once(serve: Any, connect: Any) -> None:
    ring, client = await serve(), await connect()
    submitting = client.submit([1])
    await submitting
    with pytest.raises(RuntimeError, match="was awaited already"):
        await submitting
    with await ring.claim() as claim:
        assert claim.payload == [1]
    assert client.statistics().submitted == 1


async def test_what_is_cancelled_before_its_first_step_has_taken_nothing(serve: Any, connect: Any) -> None:
    ring, client = await serve(), await connect()
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


async def test_what_is_cancelled_while_it_waits_takes_nothing(serve: Any, connect: Any, eventually: Any) -> None:
    ring, client = await serve(), await connect()
    claiming = asyncio.ensure_future(ring.claim())
    await asyncio.sleep(0)
    claiming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await claiming
    submission = await client.submit([1])
    reading = asyncio.ensure_future(submission.next())
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    with await ring.claim() as claim:
        await claim.reply("here")
    assert await submission.next() == "here"


async def test_two_tasks_can_not_wait_for_one_request(serve: Any, connect: Any) -> None:
    ring, client = await serve(), await connect()
    submission = await client.submit([1])
    first = asyncio.ensure_future(submission.next())
    await asyncio.sleep(0)
    with pytest.raises(Exception, match="is waited for by two tasks"):
        await submission.next()
    with await ring.claim() as claim:
        await claim.reply("here")
    assert await first == "here"


async def test_who_waits_for_the_end_gets_no_reply_of_it(serve: Any, connect: Any) -> None:
    ring, client = await serve(), await connect()
    submission = await client.submit([1])
    waiting = asyncio.ensure_future(submission.wait())
    with await ring.claim() as claim:
        await claim.reply("here")
        while not submission._has_reply:
            await asyncio.sleep(0)
        assert not waiting.done()
    assert await waiting is None
    assert submission.ended
    assert await submission.wait() is None
    assert await submission.next() == "here"


async def test_who_waits_for_the_end_hears_how_it_came(serve: Any, connect: Any) -> None:
    ring, client = await serve(), await connect()
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


async def test_an_error_that_ends_the_waiting_reaches_who_waits(serve: Any, connect: Any) -> None:
    ring = await serve()
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


async def test_an_error_in_a_slots_block_leaves_the_slot(serve: Any, connect: Any) -> None:
    await serve()
    client = await connect()
    with pytest.raises(ZeroDivisionError):
        async with client.slot(64 << 10):
            _ = 1 / 0
    assert client.statistics().slots_writing == 0


async def test_claims_are_taken_together(serve: Any, connect: Any) -> None:
    ring, client = await serve(), await connect()
    for number in range(5):
        await client.submit([number, _LARGER_THAN_INLINE])
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


async def test_claim_many_does_not_overtake_an_earlier_claim(serve: Any, connect: Any) -> None:
    ring, client = await serve(), await connect()
    first, second = asyncio.ensure_future(ring.claim()), asyncio.ensure_future(ring.claim_many(9))
    await asyncio.sleep(0)
    for number in range(3):
        await client.submit([number])
    with await first as claim:
        assert claim.payload == [0]
    claims = await second
    assert [claim.payload for claim in claims] == [[1], [2]]
    for claim in claims:
        claim.done()


async def test_who_was_cancelled_waits_no_more(serve: Any, connect: Any) -> None:
    ring, client = await serve(), await connect()
    submission = await client.submit([1])
    for wait in (submission.next, submission.wait):
        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    with await ring.claim() as claim:
        await claim.reply([2])
    assert await submission.next() == [2]


async def test_what_was_waited_for_is_nobodys_but_its_callers(serve: Any, connect: Any, turns: Any) -> None:
    ring, client = await serve(), await connect()
    claiming = asyncio.create_task(ring.claim())
    await turns()
    assert not claiming.done()
    await client.submit([1])
    with await claiming as claim:
        gone = weakref.ref(claim)
    del claiming, claim
    await turns()
    assert gone() is None


async def test_a_submission_keeps_nothing_of_its_payload(serve: Any, connect: Any) -> None:
    await serve()
    client = await connect()
    tensor = torch.zeros(64 << 10, dtype=torch.uint8)
    submitting = client.submit([tensor])
    await submitting
    gone = weakref.ref(tensor)
    del tensor
    assert gone() is None
    with pytest.raises(RuntimeError, match="was awaited already"):
        await submitting
