"""Large bodies take turns, and leave time to the requests of other callers."""

from __future__ import annotations

import asyncio

import pytest

from shmring.frontend.http import large_bodies as module
from shmring.frontend.http.large_bodies import LargeBodies
from tests.waiting import AdjustableLoop, pass_time, turns

TOOK_S = 100.0


def parse_three(done: list[int], *, has_others: bool) -> asyncio.Future[list[None]]:
    """Three bodies that come at once, each of which takes so long to parse."""
    bodies, loop = LargeBodies(), asyncio.get_running_loop()
    assert isinstance(loop, AdjustableLoop)

    async def parse(number: int) -> None:
        await bodies.take_turn(lambda: has_others)
        loop.advance(TOOK_S)
        done.append(number)

    return asyncio.gather(*map(parse, range(3)))


@pytest.mark.adjustable_clock
async def test_after_a_large_body_the_loop_is_for_other_callers_as_long_as_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_PAUSE_S", 10 * TOOK_S)
    done: list[int] = []
    parsing = parse_three(done, has_others=True)
    await turns()
    for count in (1, 2):
        assert len(done) == count
        await pass_time(0.6 * TOOK_S)
        assert len(done) == count
        await pass_time(0.6 * TOOK_S)
    await parsing
    assert done == [0, 1, 2]


@pytest.mark.adjustable_clock
async def test_a_turn_that_took_very_long_is_not_waited_for_as_long() -> None:
    done: list[int] = []
    parsing = parse_three(done, has_others=True)
    await turns()
    assert done == [0]
    await pass_time(1.0)
    assert done == [0, 1]
    await pass_time(1.0)
    await parsing


@pytest.mark.adjustable_clock
async def test_a_caller_alone_has_one_body_in_each_turn_and_waits_for_nothing() -> None:
    done: list[int] = []
    parsing = parse_three(done, has_others=False)
    seen = []
    while not parsing.done():
        seen.append(len(done))
        await asyncio.sleep(0)
    assert set(seen) >= {0, 1, 2}
