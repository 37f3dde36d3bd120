"""The memory for decoded media: bounded, given out in order, and never held by somebody who has gone."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmring.frontend.errors import ApiError
from shmring.frontend.media.decoded_memory import DecodedMemory
from tests.tables import for_each

LIMIT = 400  # 300 for slow requests, 100 for quick ones


def open_memory(timeout_s: float = 60.0) -> DecodedMemory:
    return DecodedMemory(LIMIT, timeout_s)


async def who_has_memory(*requests: Request) -> list[bool]:
    """Of each, when all tasks have run until they wait for memory or for their end, and for nothing else."""
    for _ in range(5):
        await asyncio.sleep(0)
    return [request.has_memory for request in requests]


async def end(*requests: Request) -> None:
    for request in requests:
        await request.end()


class Request:
    """A request that takes memory in a task of its own and holds it until :meth:`end` or :meth:`cancel`."""

    def __init__(self, memory: DecodedMemory, nbytes: int, *, is_quick: bool = False) -> None:
        self.nbytes = nbytes
        self.is_quick = is_quick
        self.has_memory = False
        self._end = asyncio.Event()
        self.task = asyncio.create_task(self._run(memory))

    async def _run(self, memory: DecodedMemory) -> None:
        async with memory.take(self.nbytes, is_quick=self.is_quick):
            self.has_memory = True
            try:
                await self._end.wait()
            finally:
                self.has_memory = False

    async def end(self) -> None:
        self._end.set()
        await self.task

    async def cancel(self) -> None:
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task


async def test_what_does_not_fit_waits_and_nobody_overtakes_it() -> None:
    memory = open_memory()
    first, second, third = (Request(memory, nbytes) for nbytes in (200, 150, 50))
    assert await who_has_memory(first, second, third) == [True, False, False]
    assert memory.nbytes == 200
    await end(first)
    assert await who_has_memory(second, third) == [True, True]
    await end(second, third)
    assert memory.nbytes == 0


async def test_a_request_larger_than_everything_is_decoded_alone() -> None:
    memory = open_memory()
    small, large, behind = Request(memory, 1), Request(memory, 10 * LIMIT), Request(memory, 1)
    assert await who_has_memory(small, large, behind) == [True, False, False]
    await end(small)
    assert await who_has_memory(large, behind) == [True, False]
    await end(large, behind)


async def test_what_is_decoded_quickly_does_not_wait_for_what_is_not() -> None:
    memory = open_memory()
    slow = [Request(memory, 150) for _ in range(4)]
    quick = [Request(memory, 40, is_quick=True) for _ in range(3)]
    assert await who_has_memory(*slow, *quick) == [True, True, False, False, True, True, False]
    await end(*slow, *quick)


async def test_memory_that_does_not_come_free_is_a_503() -> None:
    memory = open_memory(timeout_s=0.01)
    holder = Request(memory, 300)
    await who_has_memory()
    with pytest.raises(ApiError, match=r"no memory for 7 bytes of decoded media came free within 0\.01 s") as raised:
        async with memory.take(7, is_quick=False):
            raise AssertionError("there was no room")
    assert (raised.value.status, raised.value.code, raised.value.retry_after_s) == (503, "overloaded", 1)
    await holder.end()
    assert memory.nbytes == 0


async def test_a_cancelled_waiter_takes_nothing_and_lets_the_next_one_go() -> None:
    memory = open_memory()
    holder, large, small = Request(memory, 200), Request(memory, 300), Request(memory, 100)
    assert await who_has_memory(holder, large, small) == [True, False, False]
    await large.cancel()
    assert await who_has_memory(small) == [True]
    await end(holder, small)
    assert memory.nbytes == 0


@for_each("holder_ends_first", [False, True])
async def test_a_waiter_that_is_cancelled_when_its_turn_comes_gives_it_back(holder_ends_first: bool) -> None:
    """Both happen in one round of the loop: its memory was granted, but the waiter has not run yet, or the other way round."""
    memory = open_memory()
    async with AsyncExitStack() as holder:
        await holder.enter_async_context(memory.take(300, is_quick=False))
        waiting, behind = Request(memory, 300), Request(memory, 300)
        await who_has_memory()
        if holder_ends_first:
            await holder.aclose()
            waiting.task.cancel()
        else:
            waiting.task.cancel()
            await holder.aclose()
        await who_has_memory()
    assert waiting.task.cancelled()
    assert behind.has_memory
    await behind.end()
    assert memory.nbytes == 0


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(1, 2 * LIMIT), st.booleans()),
        st.tuples(st.sampled_from(["end", "cancel"]), st.integers(0, 20), st.just(value=False)),
    ),
    max_size=40,
)


@given(steps=STEPS)
def test_the_bound_holds_and_everybody_gets_memory_in_the_end(steps: list[tuple[str, int, bool]]) -> None:
    async def run() -> None:
        memory = open_memory()
        requests: list[Request] = []
        for action, number, is_quick in steps:
            if action == "take":
                requests.append(Request(memory, number, is_quick=is_quick))
            elif requests:
                request = requests[number % len(requests)]
                if action == "cancel":
                    requests.remove(request)
                    await request.cancel()
                elif request.has_memory:
                    requests.remove(request)
                    await request.end()
            await who_has_memory()
            check(memory, requests)
        while requests:
            request = next(request for request in requests if request.has_memory)
            requests.remove(request)
            await request.end()
            await who_has_memory()
        assert memory.nbytes == 0

    def check(memory: DecodedMemory, requests: list[Request]) -> None:
        held = {
            is_quick: [request.nbytes for request in requests if request.has_memory and request.is_quick == is_quick]
            for is_quick in (False, True)
        }
        assert memory.nbytes == sum(map(sum, held.values()))
        for is_quick, limit in ((False, 300), (True, 100)):
            assert sum(held[is_quick]) <= limit or len(held[is_quick]) == 1
            waiting = [request.nbytes for request in requests if not request.has_memory and request.is_quick == is_quick]
            assert not waiting or (held[is_quick] and sum(held[is_quick]) + waiting[0] > limit)

    asyncio.run(run())
