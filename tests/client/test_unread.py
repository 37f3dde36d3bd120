"""Replies that nobody reads: whom they keep waiting, and whom not.

Stopped processes are in ``integration/test_unread_replies.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shmring
from shmring import Client, Ring
from shmring.ring import waits
from shmring.ring.places import Place, Places
from tests.claiming import claimed
from tests.model.inside import has_reply
from tests.waiting import cancel, eventually, turns

pytestmark = [pytest.mark.both_loops, pytest.mark.filterwarnings("error::ResourceWarning")]

LARGE_NBYTES = 200_000  # five of them fill the reserve
RESERVE = {"slab_nbytes": "8MiB", "reply_nbytes": "1MiB"}


def large(value: int) -> torch.Tensor:
    return torch.full((LARGE_NBYTES,), value % 251, dtype=torch.uint8)


async def answer(claim: shmring.Claim) -> None:
    """As many large replies as the request asks for, or a tiny one."""
    if isinstance(claim.payload, int):
        for number in range(claim.payload):
            await claim.reply({"n": number, "x": large(number)})
    elif claim.payload == "large":
        await claim.done({"n": 1, "x": large(1)})
    else:
        await claim.done("tiny")


def is_intact(reply: Any) -> bool:
    return bool((reply["x"] == reply["n"] % 251).all())


# -- one client -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("neighbours", [0, 2])
@pytest.mark.ring(handler=answer, **RESERVE)
async def test_replies_are_read_in_any_order(ring: Ring, connect: Any, neighbours: int) -> None:
    """Those that were not read, and those that are kept, hold a share of the reserve; the rest is copied out of it."""
    client, others = await connect(), [await connect() for _ in range(neighbours)]
    submissions = [await client.submit(1) for _ in range(30)]
    replies = [await asyncio.wait_for(submission.result(), 60) for submission in reversed(submissions)]
    assert all(map(is_intact, replies)), "... while they are all kept"
    assert client.statistics().reply_copies >= 20
    for other in others:
        assert is_intact(await other.request("large", timeout=60))
    del replies
    for one in (client, *others):
        await one.close()


@pytest.mark.ring(handler=answer, **RESERVE)
async def test_a_stream_that_nobody_reads_keeps_no_other_reply_from_its_client(ring: Ring, client: Client) -> None:
    """It holds its own handler up, so that what its client copies is bounded; then it goes on, and nothing is lost."""
    streams = [await client.submit(20) for _ in range(8)]
    await eventually(lambda: ring.statistics().replies_waiting == len(streams))
    for _ in range(10):
        assert is_intact(await client.request("large", timeout=60))
    statistics = ring.statistics()
    assert statistics.replies - 10 <= 3 * len(streams), "two that are copied out, and what stays in its slot"
    for stream in streams:
        numbers = []
        with contextlib.suppress(StopAsyncIteration):
            while True:
                reply = await asyncio.wait_for(stream.next(), 60)
                assert is_intact(reply)
                numbers.append(reply["n"])
                del reply
        assert numbers == list(range(20))


@pytest.mark.ring(handler=answer, **RESERVE)
async def test_cancelled_tasks_that_keep_their_submissions_keep_nothing_from_later_requests(ring: Ring, client: Client) -> None:
    """As ``gather(return_exceptions=True)`` keeps them: with their errors, the frames of these, and what lies in those."""

    async def ask(count: int) -> None:
        submission = await client.submit(count)
        await asyncio.Event().wait()
        await submission.result()

    tasks = [asyncio.create_task(ask(count % 3)) for count in range(60)]
    await eventually(lambda: ring.statistics().submitted == 60 and client.statistics().reply_copies)
    for task in tasks:
        task.cancel()
    kept = await asyncio.gather(*tasks, return_exceptions=True)
    for _ in range(10):
        assert is_intact(await client.request("large", timeout=60))
    del kept, tasks
    await client.close()


async def test_who_is_cancelled_while_it_waits_for_the_result_aborts_the_request(ring: Ring, client: Client) -> None:
    submission, claim = await claimed(ring, client, "x")
    result = asyncio.create_task(submission.result())
    await asyncio.sleep(0)
    assert await cancel(result)
    assert submission.ended
    await eventually(lambda: claim.aborted)
    claim.release()
    with pytest.raises(shmring.AbortedError):
        await submission.result()


async def test_who_is_cancelled_between_the_reply_and_the_end_aborts_the_request(ring: Ring, client: Client) -> None:
    submission = await client.submit("x")
    with await ring.claim() as claim:
        await claim.reply("almost")
        result = asyncio.create_task(submission.result())
        await eventually(lambda: submission.has_replied and not has_reply(submission))
        result.cancel()
        await asyncio.wait([result])
        await eventually(lambda: claim.aborted)


async def test_a_request_that_fails_after_its_reply_has_failed(ring: Ring, client: Client) -> None:
    submission = await client.submit("x")
    result = asyncio.create_task(submission.result())
    claim = await ring.claim()
    await claim.reply("almost")
    await eventually(lambda: submission.has_replied and not has_reply(submission))
    claim.fail(ValueError("it broke"))
    with pytest.raises(shmring.RemoteError, match="it broke"):
        await result


# -- places ---------------------------------------------------------------------------------------------------------------


async def test_handlers_that_wait_for_a_slow_reader_keep_no_place_from_others(serve: Any, connect: Any) -> None:
    """And when they go on, no more of them work at a time than may."""
    working = most = 0

    async def handle(claim: shmring.Claim) -> None:
        nonlocal working, most
        for number in range(claim.payload):
            working += 1
            most = max(most, working)
            await asyncio.sleep(0)
            working -= 1
            await claim.reply({"n": number, "x": large(number)})

    ring = await serve(**RESERVE)
    running = asyncio.create_task(ring.run(handle, max_concurrency=2))
    careless, other = await connect(), await connect()
    streams = [await careless.submit(10) for _ in range(12)]
    await eventually(lambda: ring.statistics().replies_waiting == len(streams))
    assert is_intact(await other.request(1, timeout=60))

    async def read(stream: shmring.Submission) -> int:
        count = 0
        with contextlib.suppress(StopAsyncIteration):
            while True:
                assert is_intact(await stream.next())
                count += 1
        return count

    assert await asyncio.wait_for(asyncio.gather(*map(read, streams)), 60) == [10] * 12
    assert most <= 2
    await cancel(running)


async def test_a_handler_that_gave_up_waiting_to_reply_takes_a_place_with_its_next_reply(serve: Any, connect: Any) -> None:
    gave_up, goes_on, is_back = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def handle(claim: shmring.Claim) -> None:
        if claim.payload == "other":
            await goes_on.wait()
            return
        with contextlib.suppress(TimeoutError):
            while True:
                async with asyncio.timeout(0.05):
                    await claim.reply({"x": large(1)})
        gave_up.set()
        await claim.reply("tiny")
        is_back.set()

    ring = await serve(**RESERVE)
    running = asyncio.create_task(ring.run(handle, max_concurrency=1))
    careless, other = await connect(), await connect()
    stream = await careless.submit("careless")
    await other.submit("other")
    await eventually(lambda: ring.statistics().running == 2 and gave_up.is_set())
    await turns(20)
    assert not is_back.is_set(), "the other one has the only place"
    goes_on.set()
    await asyncio.wait_for(is_back.wait(), 60)
    stream.abort()
    await cancel(running)


async def test_those_that_return_take_a_place_before_those_that_come() -> None:
    places = Places(1)
    await places.take()
    order: list[str] = []
    place = Place(places)
    place.give_up()
    place.give_up()
    await places.take()  # by another one

    async def come() -> None:
        await places.take()
        order.append("new")

    async def return_() -> None:
        await place.take_again()
        order.append("again")

    tasks = [asyncio.create_task(come()), asyncio.create_task(return_())]
    await asyncio.sleep(0)
    places.give_back()
    await tasks[1]
    assert order == ["again"]
    assert place.is_held
    place.leave()
    await tasks[0]
    await place.take_again()  # its handler has ended: nothing is taken
    places.give_back()
    await asyncio.wait_for(places.take(), 60)


async def test_two_tasks_of_a_handler_have_one_place_together() -> None:
    places = Places(1)
    await places.take()
    place = Place(places)
    place.give_up()
    await places.take()
    tasks = [asyncio.create_task(place.take_again()) for _ in range(2)]
    await asyncio.sleep(0)
    places.give_back()
    await asyncio.wait_for(asyncio.gather(*tasks), 60)
    place.leave()
    await asyncio.wait_for(places.take(), 60)


async def test_a_place_that_comes_to_a_handler_that_was_cancelled_just_now_is_another_ones() -> None:
    places = Places(1)
    await places.take()
    waiting = asyncio.create_task(places.take())
    await asyncio.sleep(0)
    places.give_back()
    await cancel(waiting)
    assert places._free == 1


async def test_a_place_that_comes_when_its_handler_has_ended_is_another_ones() -> None:
    places = Places(1)
    await places.take()
    place = Place(places)
    place.give_up()
    await places.take()  # by another one
    returning = asyncio.create_task(place.take_again())
    await asyncio.sleep(0)
    place.leave()
    places.give_back()
    await returning
    assert not place.is_held
    assert places._free == 1


# -- what is said ---------------------------------------------------------------------------------------------------------


async def test_the_log_says_which_client_takes_no_replies_and_not_all_the_time(
    serve: Any, connect: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waits, "_SILENCE_S", 0.0)
    monkeypatch.setattr(waits, "_LOOK_S", 0.001)
    ring = await serve(answer, **RESERVE)
    client = await connect(description="careless")
    stream = await client.submit(20)

    def said() -> list[str]:
        return [record.getMessage() for record in caplog.records if "takes no replies" in record.getMessage()]

    with caplog.at_level(logging.WARNING, "shmring.ring"):
        await eventually(lambda: len(said()) == 1)
        [line] = said()
        assert line.startswith(f"client {client.client_id} (careless, pid ")
        assert "takes no replies, and keeps 1 waiting, the first one for 0 s, to its request 1; it has" in line
        await asyncio.sleep(0.1)
        assert len(said()) == 1, "once a minute"
    stream.abort()
    await eventually(lambda: not ring.statistics().replies_waiting)
    await eventually(lambda: ring._shell.replies._waits._timer is None)


class Clock:
    """A loop with one timer, whose time passes when it is told to."""

    def __init__(self) -> None:
        self.now_s, self._due_s = 0.0, math.inf
        self._callback: Callable[[], object] = int

    def time(self) -> float:
        return self.now_s

    def call_later(self, seconds: float, callback: Callable[[], object]) -> Clock:
        self._due_s, self._callback = self.now_s + seconds, callback
        return self

    def cancel(self) -> None:
        self._due_s = math.inf

    def pass_until(self, end_s: float) -> None:
        while self._due_s <= end_s:
            self.now_s, self._due_s = self._due_s, math.inf
            self._callback()


class Life:
    """Of an engine that goes on."""

    def __init__(self) -> None:
        self.loop = Clock()
        self.home = SimpleNamespace(is_closed=False)


def waiting_reply() -> Any:
    """The claim of a reply that waits."""
    return SimpleNamespace(client_id=1, request_id=2, name="", _end=SimpleNamespace(frontend_of=lambda _: "client 1"))


def test_who_takes_no_reply_for_5_s_is_named_and_then_once_a_minute() -> None:
    said_s: list[float] = []
    life = Life()

    def describe(client_id: int) -> str:
        said_s.append(life.loop.now_s)
        return "all of it"

    watching = waits.Waits(life, describe, lambda _: None)
    with watching.of(waiting_reply()):
        life.loop.pass_until(130.0)
    assert len(said_s) == 3
    assert said_s[0] == pytest.approx(5.5, abs=0.6), "it looks once a second"
    assert said_s[2] - said_s[1] == pytest.approx(60.5, abs=0.6)


async def test_a_reply_that_waits_comes_first_again_after_a_rest() -> None:
    told: list[bool] = []
    watching = waits.Waits(Life(), str, told.append)
    for _ in range(2):
        with watching.of(object()):
            assert watching._timer is not None
            watching._timer.cancel()
            watching._look()
        assert watching._timer is None
    assert told == [True, False] * 2


def test_a_reply_that_waits_lets_others_pass_but_for_a_moment_now_and_then() -> None:
    """Whether others may pass, and since when: it comes first for 50 ms of each second."""
    told: list[tuple[float, bool]] = []
    life = Life()
    watching = waits.Waits(life, str, lambda may: told.append((life.loop.now_s, may)))
    with watching.of(waiting_reply()):
        life.loop.pass_until(2.06)
    seconds, may_pass = zip(*told, strict=True)
    assert may_pass == ((True,) * 19 + (False,)) * 2 + (True, False), "and when none waits, the next one comes first"
    assert seconds[:-1] == pytest.approx([0.05 * number for number in range(1, 42)])
