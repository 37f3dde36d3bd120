"""Engines that work in batches, and engines that stop in good order."""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch

import shmring
from shmring import Client, Ring
from tests.claiming import claimed
from tests.waiting import cancel, eventually, turns

pytestmark = pytest.mark.both_loops

Handler = Callable[[list[shmring.Claim]], Awaitable[Sequence[object]]]


@pytest.fixture
async def batches(serve: Any) -> AsyncIterator[Callable[..., Awaitable[Ring]]]:
    """``await batches(handler, most, **options)``: a ring with a task that runs it in batches."""
    tasks: list[asyncio.Task[None]] = []

    async def start(handler: Handler, most: int = 4, *, linger_s: float = 0.0, **options: Any) -> Ring:
        ring: Ring = await serve(**options)
        tasks.append(asyncio.create_task(ring.run_batches(handler, most, linger_s=linger_s)))
        return ring

    yield start
    await cancel(*tasks)


# -- batches ---------------------------------------------------------------------------------------------------------------


async def test_what_has_come_is_one_batch(batches: Any, connect: Any) -> None:
    sizes = []

    async def double(claims: list[shmring.Claim]) -> list[object]:
        sizes.append(len(claims))
        return [claim.payload * 2 for claim in claims]

    await batches(double, 4)
    client = await connect()
    assert await asyncio.gather(*[client.request(number, timeout=10) for number in range(9)]) == [2 * n for n in range(9)]
    assert sum(sizes) == 9
    assert max(sizes) == 4


async def test_tensors_go_both_ways_and_every_slot_comes_back(batches: Any, connect: Any) -> None:
    async def scale(claims: list[shmring.Claim]) -> list[object]:
        return list(torch.stack([claim.payload for claim in claims]) * 3)

    ring = await batches(scale, 8)
    client = await connect()
    replies = await asyncio.gather(*[client.request(torch.full((1000,), float(n)), timeout=10) for n in range(6)])
    assert [reply[0].item() for reply in replies] == [0.0, 3.0, 6.0, 9.0, 12.0, 15.0]
    del replies
    await eventually(lambda: ring.statistics().slots_in_use == 0)
    assert ring.statistics().finished == 6


async def test_a_batch_that_was_answered_is_forgotten_before_the_next_one_comes(batches: Any, connect: Any) -> None:
    gone: list[weakref.ref[torch.Tensor]] = []

    async def answer(claims: list[shmring.Claim]) -> list[object]:
        replies = [torch.ones(10) for _ in claims]
        gone.extend(map(weakref.ref, replies))
        return list(replies)

    await batches(answer)
    client = await connect()
    await client.request(1, timeout=20)
    await turns()
    assert [reference() for reference in gone] == [None]


async def test_a_handler_that_raises_fails_its_batch_and_nothing_else(batches: Any, connect: Any, caplog: Any) -> None:
    async def refuse(claims: list[shmring.Claim]) -> list[object]:
        if any(claim.payload == 13 for claim in claims):
            raise ValueError("13 is not for me")
        return [claim.payload for claim in claims]

    await batches(refuse, 1)
    client = await connect()
    with pytest.raises(shmring.RemoteError, match="13 is not for me"):
        await client.request(13, timeout=10)
    assert await client.request(14, timeout=10) == 14
    assert "13 is not for me" in caplog.text


@pytest.mark.one_loop
async def test_as_many_replies_as_claims_are_returned(batches: Any, connect: Any) -> None:
    async def forget_one(claims: list[shmring.Claim]) -> list[object]:
        return [claim.payload for claim in claims][1:]

    await batches(forget_one)
    client = await connect()
    with pytest.raises(shmring.RemoteError, match="ValueError"):
        await client.request(1, timeout=10)


async def test_what_is_aborted_in_a_batch_costs_the_others_nothing(batches: Any, connect: Any, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    go_on = asyncio.Event()
    aborted = []

    async def wait(claims: list[shmring.Claim]) -> list[object]:
        await go_on.wait()
        aborted.append([claim.aborted for claim in claims])
        return [claim.payload for claim in claims]

    ring = await batches(wait, 4, linger_s=10.0)
    client = await connect()
    requests = [asyncio.create_task(client.request(number, timeout=10, request_id=str(number))) for number in range(4)]
    await eventually(lambda: ring.statistics().running == 4)
    client.abort("2")
    with pytest.raises(shmring.AbortedError):
        await requests.pop(2)
    await eventually(lambda: ring.statistics().aborted == 1)
    go_on.set()
    assert await asyncio.gather(*requests) == [0, 1, 3]
    assert aborted == [[False, False, True, False]]
    assert "failed" not in caplog.text


async def test_a_reply_that_can_not_be_sent_fails_its_own_request(batches: Any, connect: Any) -> None:
    async def answer(claims: list[shmring.Claim]) -> list[object]:
        return [object() if claim.payload == 1 else claim.payload for claim in claims]

    await batches(answer, 2, linger_s=10.0)
    client = await connect()
    failed, answered = await asyncio.gather(*[client.request(n, timeout=10) for n in (1, 2)], return_exceptions=True)
    assert isinstance(failed, shmring.RemoteError)
    assert answered == 2


async def test_a_frontend_that_does_not_read_keeps_no_batch_from_others(batches: Any, connect: Any) -> None:
    async def fill(claims: list[shmring.Claim]) -> list[object]:
        return [torch.ones(100_000, dtype=torch.uint8) for _ in claims]

    await batches(fill, 1, reply_nbytes="256KiB")
    greedy, patient = await connect(), await connect()
    held = await greedy.request(0, timeout=10)
    waiting = [await greedy.submit(n) for n in range(3)]  # for their replies there is no space in slots while that one is held
    assert (await patient.request(0, timeout=10)).numel() == held.numel() == 100_000
    for submission in reversed(waiting):  # they were copied out
        assert (await submission.result()).numel() == 100_000


async def test_a_reply_that_was_not_begun_when_the_loop_ends_fails_its_request(ring: Ring, client: Client) -> None:
    answered, ending = await client.submit("answer"), await client.submit("end")

    async def answer(claims: list[shmring.Claim]) -> list[object]:
        if claims[0].payload == "end":
            raise asyncio.CancelledError
        return ["too late"]

    with pytest.raises(asyncio.CancelledError):
        await ring.run_batches(answer, 1)
    with pytest.raises(shmring.RemoteError, match="the engine stopped"):
        await answered.result()
    with pytest.raises(shmring.RemoteError, match="CancelledError"):
        await ending.result()


# -- lingering -------------------------------------------------------------------------------------------------------------


async def test_a_batch_waits_for_more_and_goes_when_it_is_full(ring: Ring, client: Client) -> None:
    taking = asyncio.ensure_future(ring.claim_many(3, linger_s=60.0))
    for number in range(4):
        await client.submit(number)
        await asyncio.sleep(0.01)
    claims = await taking
    assert [claim.payload for claim in claims] == [0, 1, 2]
    for claim in (*claims, await ring.claim()):
        claim.done()


async def test_lingering_ends_with_what_has_come(ring: Ring, client: Client) -> None:
    await client.submit(1)
    started = time.monotonic()
    [claim] = await ring.claim_many(3, linger_s=0.05)
    assert time.monotonic() - started >= 0.04
    claim.done()
    submission = await client.submit(2)
    taking = asyncio.ensure_future(ring.claim_many(3, linger_s=60.0))
    await eventually(lambda: ring.statistics().running == 1)
    await ring.close()
    [claim] = await taking  # the end of the ring is told by the next call
    assert claim.aborted
    with pytest.raises(shmring.ClosedError):
        await ring.claim_many(3, linger_s=60.0)
    with pytest.raises(shmring.EngineDeadError):
        await submission.result()


async def test_who_is_cancelled_while_it_lingers_fails_what_it_has(ring: Ring, client: Client) -> None:
    submission = await client.submit(torch.ones(5000))
    taking = asyncio.ensure_future(ring.claim_many(3, linger_s=60.0))
    await eventually(lambda: ring.statistics().running == 1)
    assert await cancel(taking)
    with pytest.raises(shmring.RemoteError, match="cancelled"):
        await submission.result()
    await eventually(lambda: ring.statistics().slots_in_use == 0)


# -- stopping in good order ------------------------------------------------------------------------------------------------


class Waiting(NamedTuple):
    """A ring with a request whose handler waits."""

    ring: Any
    client: Any
    go_on: asyncio.Event
    running: asyncio.Task[None]
    first: asyncio.Task[Any]


@pytest.fixture
async def waiting(serve: Any, connect: Any) -> Waiting:
    go_on = asyncio.Event()

    async def wait(claim: shmring.Claim) -> None:
        await go_on.wait()
        await claim.reply(claim.payload)

    ring = await serve()
    running = asyncio.create_task(ring.run(wait))
    client = await connect()
    first = asyncio.create_task(client.request(1, timeout=10))
    await eventually(lambda: ring.statistics().running == 1)
    return Waiting(ring, client, go_on, running, first)


async def test_an_engine_that_drains_answers_what_it_has_and_takes_nothing_more(waiting: Waiting) -> None:
    ring, client, go_on, running, first = waiting
    draining = asyncio.create_task(ring.drain())
    await asyncio.sleep(0)
    late = await client.submit(2)
    await eventually(lambda: ring.statistics().waiting == 1)
    assert ring.statistics().running == 1
    with pytest.raises(shmring.ClosedError, match="draining"):
        ring.claim_nowait()
    assert [claim async for claim in ring] == []
    go_on.set()
    assert await draining
    await running  # its handlers have ended
    assert await first == 1
    await ring.close()
    with pytest.raises(shmring.EngineDeadError):
        await late.result()


async def test_draining_ends_in_time(ring: Ring, client: Client) -> None:
    _, claim = await claimed(ring, client, 1)
    assert not await ring.drain(timeout=0.02)
    claim.done()
    assert await ring.drain(timeout=0.0)
    await ring.close()
    with pytest.raises(shmring.ClosedError):
        await ring.drain()


async def test_an_engine_may_go_on_claiming_until_nothing_comes(waiting: Waiting) -> None:
    ring, client, go_on, running, first = waiting
    draining = asyncio.create_task(ring.drain(claiming=True))
    await asyncio.sleep(0)
    late = asyncio.create_task(client.request(2, timeout=10))
    await eventually(lambda: ring.statistics().running == 2)
    assert not draining.done()
    go_on.set()
    assert await draining
    assert [await first, await late] == [1, 2]
    await running  # nothing more is claimed
    too_late = await client.submit(3)
    await eventually(lambda: ring.statistics().waiting == 1)
    await ring.close()
    with pytest.raises(shmring.EngineDeadError):
        await too_late.result()


async def test_the_last_replies_in_slots_are_read_before_an_engine_has_drained(ring: Ring, client: Client) -> None:
    submission, claim = await claimed(ring, client, 1)
    await claim.done(torch.ones(4096))
    draining = asyncio.create_task(ring.drain(claiming=True))
    await turns(20)
    assert not draining.done()
    reply = await submission.result()
    assert float(reply.sum()) == 4096
    del reply
    assert await draining


async def test_a_reply_that_came_in_a_message_can_be_read_when_its_engine_has_gone(ring: Ring, client: Client) -> None:
    inline, slot = [await client.submit(number) for number in range(2)]
    await (await ring.claim()).done({"text": "whole", "x": torch.ones(3)})
    await (await ring.claim()).done(torch.ones(4096))
    await eventually(lambda: inline.ended and slot.ended)
    await ring.close()
    await eventually(lambda: not client.connected)
    reply = await inline.result()
    assert (reply["text"], reply["x"].tolist()) == ("whole", [1, 1, 1])
    with pytest.raises(shmring.EngineDeadError):
        await slot.result()


async def test_who_waits_to_claim_hears_that_the_engine_drains(ring: Ring) -> None:
    waiting = [asyncio.ensure_future(ring.claim()), asyncio.ensure_future(ring.claim_many(2))]
    iterating = asyncio.create_task(anext(aiter(ring), None))
    await asyncio.sleep(0)
    assert await ring.drain()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(result) for result in results] == [shmring.ClosedError] * 2
    assert await iterating is None


# -- one of a batch --------------------------------------------------------------------------------------------------------


async def test_each_request_of_a_batch_ends_as_its_handler_says(batches: Any, connect: Any, caplog: Any) -> None:
    """An exception in the place of a reply fails that request alone, and who was ended already needs no reply."""

    async def handle(claims: list[shmring.Claim]) -> list[object]:
        asked = [claim.payload for claim in claims]
        for claim, which in zip(claims, asked, strict=True):
            if which == "fail":
                claim.fail(ValueError("not this one"))
            elif which == "finish":
                await claim.done("mine")
        return [ValueError("is odd") if which == "odd" else "from the list" for which in asked]

    await batches(handle, 8)
    client = await connect()
    requests = [client.request(which, timeout=60) for which in ("even", "odd", "fail", "finish", "else")]
    even, odd, failed, finished, other = await asyncio.gather(*requests, return_exceptions=True)
    assert (even, finished, other) == ("from the list", "mine", "from the list")
    assert [(error.type_name, str(error)) for error in (odd, failed)] == [
        ("ValueError", "ValueError: is odd"),
        ("ValueError", "ValueError: not this one"),
    ]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
