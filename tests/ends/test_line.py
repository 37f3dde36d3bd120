"""Who waits is given things in order, and what comes to somebody who is cancelled in that turn of the loop is not lost."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from shmring.line import Place, WaitingLine, give
from tests.garbage import uncollected
from tests.tables import for_each

pytestmark = pytest.mark.both_loops


class Waiters:
    """A line of tasks, and what became of each."""

    def __init__(self, count: int) -> None:
        self.unused: list[str] = []
        self.left: list[Place[str]] = []
        self.seen: list[bool] = []  # whether the place was in the line when somebody was told
        self.line: WaitingLine[str] = WaitingLine()
        self.places: list[Place[str]] = []
        self.tasks = [asyncio.create_task(self._wait(index)) for index in range(count)]

    async def _wait(self, index: int) -> str:
        place = self.line.enter(index)
        self.places.append(place)
        return await self.line.stay(place, self._unused, self._left)

    def _unused(self, thing: str) -> None:
        self.unused.append(thing)
        self.seen.append(any(place.done() for place in self.line))

    def _left(self, place: Place[str]) -> None:
        self.left.append(place)
        self.seen.append(place in list(self.line))

    async def outcomes(self) -> list[Any]:
        return await asyncio.gather(*self.tasks, return_exceptions=True)


@pytest.fixture
async def three() -> Waiters:
    waiters = Waiters(3)
    await asyncio.sleep(0)
    return waiters


async def test_things_are_given_in_order(three: Waiters) -> None:
    assert [wants for _, wants in three.line.waiting()] == [0, 1, 2]
    assert [three.line.give_first(thing) for thing in "abcd"] == [True, True, True, False]
    assert await three.outcomes() == ["a", "b", "c"]
    assert not three.line
    assert three.unused == three.left == []


async def test_who_was_given_something_is_in_the_line_until_it_runs(three: Waiters) -> None:
    three.line.give_first("a")
    assert len(three.line) == 3
    assert [wants for _, wants in three.line.waiting()] == [1, 2]
    three.line.give_all("b")
    assert len(three.line) == 3
    assert not three.line.is_waited_in
    await three.outcomes()
    assert len(three.line) == 0


async def test_who_is_cancelled_is_passed_over(three: Waiters) -> None:
    three.tasks[0].cancel()  # which has not run yet
    assert [three.line.give_first(thing) for thing in "abc"] == [True, True, False]
    first, *others = await three.outcomes()
    assert isinstance(first, asyncio.CancelledError)
    assert others == ["a", "b"]
    assert three.seen == [False]


async def test_what_comes_to_one_who_is_cancelled_goes_to_unused(three: Waiters) -> None:
    assert give(three.places[1], "a")
    three.tasks[1].cancel()
    await asyncio.sleep(0)
    assert three.unused == ["a"]
    assert three.left == []
    assert three.seen == [False], "by then it is not in the line"
    assert [wants for _, wants in three.line.waiting()] == [0, 2]
    three.line.give_all("b")
    await three.outcomes()


async def test_who_leaves_with_nothing_is_told_to_left(three: Waiters) -> None:
    three.tasks[0].cancel()
    three.places[2].set_exception(KeyError("the end"))
    assert not give(three.places[2], "a")
    await asyncio.sleep(0)
    assert set(three.left) == {three.places[0], three.places[2]}
    assert three.unused == []
    assert three.seen == [False, False]
    three.line.give_all("b")
    first, second, third = await three.outcomes()
    assert isinstance(first, asyncio.CancelledError)
    assert (second, str(third)) == ("b", "'the end'")


async def test_a_place_that_was_left_by_another_exception_takes_nothing() -> None:
    """Who awaits by hand can throw anything into a call; nothing cancels what it awaits then."""
    line: WaitingLine[str] = WaitingLine()
    unused: list[str] = []
    place = line.enter()
    staying = line.stay(place, unused.append)
    staying.send(None)
    with pytest.raises(KeyError):
        staying.throw(KeyError("thrown in"))
    assert not give(place, "a")
    assert not line
    assert unused == []


async def test_a_turn_that_is_handed_on_reaches_everybody_whoever_is_cancelled() -> None:
    taken = []
    line: WaitingLine[None] = WaitingLine()

    async def take(index: int) -> None:
        await line.wait(lambda _: line.give_first(None))
        taken.append(index)
        line.give_first(None)

    tasks = [asyncio.create_task(take(index)) for index in range(10)]
    await asyncio.sleep(0)
    line.give_first(None)
    for index in (0, 1, 5):  # the first has the turn already
        tasks[index].cancel()
    await asyncio.wait(tasks, timeout=5)
    assert taken == [2, 3, 4, 6, 7, 8, 9]
    assert not line


@for_each("ending", [lambda place: place.set_exception(KeyError()), lambda place: place.cancel()])
async def test_an_error_holds_no_frames_with_it(ending: Callable[[Place[str]], object]) -> None:
    """Nothing is left for the collector, which would keep a caller's tensors until it comes."""

    class Tensor:
        pass

    line: WaitingLine[str] = WaitingLine()
    died = []

    async def send(tensor: Tensor) -> None:
        await line.wait(lambda _: None)

    async def begin() -> Awaitable[None]:
        tensor = Tensor()
        weakref.finalize(tensor, died.append, True)
        return asyncio.create_task(send(tensor))

    with uncollected():
        task = await begin()
        await asyncio.sleep(0)
        ending(next(iter(line)))
        with pytest.raises((KeyError, asyncio.CancelledError)) as raised:
            await task
        del task, raised
        await asyncio.sleep(0)
        assert died == [True]
