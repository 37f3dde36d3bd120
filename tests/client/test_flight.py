"""What a far client may have in flight: requests and bytes, in order, and nothing is lost by who is cancelled."""

from __future__ import annotations

import asyncio
import random

import pytest

from shmring.client.flight import Flight
from shmring.errors import ClosedError
from tests.tables import for_each


async def started(flight: Flight, nbytes: int) -> asyncio.Task[None]:
    task = asyncio.create_task(flight.begin(nbytes))
    await asyncio.sleep(0)
    return task


async def test_bytes_are_bounded_in_order() -> None:
    flight = Flight(10, 100)
    await flight.begin(60)
    large = await started(flight, 50)
    small = await started(flight, 10)  # would fit, and comes after the other one
    assert not large.done()
    assert not small.done()
    assert flight.waiting == 2
    flight.end(60)
    await asyncio.gather(large, small)
    assert (flight.requests, flight.nbytes, flight.waiting) == (2, 60, 0)


async def test_what_fits_does_not_overtake_what_does_not() -> None:
    flight = Flight(10, 100)
    await flight.begin(60)
    await flight.begin(30)
    large, small = await started(flight, 80), await started(flight, 5)
    flight.end(30)
    await asyncio.sleep(0)
    assert (large.done(), small.done(), flight.waiting) == (False, False, 2)
    flight.end(60)
    await asyncio.gather(large, small)


async def test_closing_ends_the_waiting_and_nothing_begins_any_more() -> None:
    flight = Flight(1, 100)
    await flight.begin(1)
    waiting = [await started(flight, 1) for _ in range(2)]
    flight.close(ClosedError("this client was closed"))
    await asyncio.wait(waiting, timeout=30)
    for task in (*waiting, await started(flight, 1)):
        with pytest.raises(ClosedError, match="this client was closed"):
            await task
    flight.end(1)
    assert (flight.requests, flight.nbytes, flight.waiting) == (0, 0, 0)


async def test_requests_are_bounded() -> None:
    flight = Flight(2, 100)
    await flight.begin(0)
    await flight.begin(0)
    third = await started(flight, 0)
    assert not third.done()
    flight.end(0)
    await third


async def test_one_that_is_larger_than_the_bound_goes_alone() -> None:
    flight = Flight(10, 100)
    await flight.begin(1)
    large, after = await started(flight, 1000), await started(flight, 1)
    assert not large.done()
    flight.end(1)
    await large
    assert not after.done()
    flight.end(1000)
    await after


async def test_a_cancelled_waiter_delays_nobody() -> None:
    flight = Flight(10, 100)
    await flight.begin(60)
    large, small = await started(flight, 50), await started(flight, 10)
    large.cancel()
    await asyncio.wait([large, small])
    assert large.cancelled()
    assert (flight.requests, flight.nbytes, flight.waiting) == (2, 70, 0)


async def test_who_is_cancelled_just_when_its_turn_comes_passes_it_on() -> None:
    flight = Flight(1, 100)
    await flight.begin(0)
    second, third = await started(flight, 0), await started(flight, 0)
    flight.end(0)
    second.cancel()
    await asyncio.wait([second, third])
    assert second.cancelled()
    assert third.done()
    assert (flight.requests, flight.waiting) == (1, 0)


@for_each("seed", range(20))
async def test_whatever_happens_the_books_agree(seed: int) -> None:
    chance = random.Random(seed)
    flight = Flight(4, 100)
    running: list[tuple[asyncio.Task[None], int]] = []
    for _ in range(300):
        match chance.randrange(3):
            case 0:
                nbytes = chance.choice([0, 1, 30, 99, 100, 500])
                running.append((asyncio.create_task(flight.begin(nbytes)), nbytes))
            case 1 if running:
                chance.choice(running)[0].cancel()
            case 2:
                done = [each for each in running if each[0].done() and not each[0].cancelled()]
                if done:
                    each = chance.choice(done)
                    running.remove(each)
                    flight.end(each[1])
        if chance.random() < 0.5:
            await asyncio.sleep(0)
        running = [each for each in running if not each[0].cancelled()]
        assert flight.requests <= 4
        assert flight.nbytes <= 100 or flight.nbytes == 500  # one that is larger than the bound goes alone
    for task, _ in running:
        task.cancel()
    await asyncio.gather(*(task for task, _ in running), return_exceptions=True)
    for task, nbytes in running:
        if not task.cancelled():
            flight.end(nbytes)
    assert (flight.requests, flight.nbytes, flight.waiting) == (0, 0, 0)
