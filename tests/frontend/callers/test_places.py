"""Places that callers share: how many one of them may have."""

from __future__ import annotations

import asyncio

from shmring.frontend.callers.places import Places


async def test_one_caller_has_no_more_than_its_share_and_others_need_not_wait() -> None:
    places = Places(4, 100, 60.0, most=2)
    for _ in range(2):
        await places.take("greedy")
    waiting = [asyncio.create_task(places.take("greedy")) for _ in range(3)]
    await asyncio.sleep(0)
    for who in ("one", "other"):
        await asyncio.wait_for(places.take(who), 20)  # though two of the greedy one's stand in line
    assert not any(task.done() for task in waiting)
    places.give_back("one")
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting), "this place is for others"
    places.give_back("greedy")
    await asyncio.wait_for(waiting[0], 20)
    assert not waiting[1].done()
    waiting[1].cancel()
    await asyncio.wait([waiting[1]])
    places.give_back("greedy")
    await asyncio.wait_for(waiting[2], 20)
    for who in ("greedy", "greedy", "other"):
        places.give_back(who)
    for number in range(4):
        await asyncio.wait_for(places.take(str(number)), 20)
    assert not places._waiting
