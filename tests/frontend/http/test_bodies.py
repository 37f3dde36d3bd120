"""Reading bodies: memory that all share, and who is too slow."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shmring.frontend.errors import ApiError
from shmring.frontend.http import bodies
from shmring.frontend.http.bodies import BodyMemory, BodyReader, BodyShare, HungUp, _Pace
from shmring.frontend.http.body_scan import MAX_VALUES
from shmring.frontend.http.watch import Watch
from shmring.frontend.settings import FrontendSettings
from tests.waiting import eventually, pass_time


class Reading:
    """A body that is being read, and its caller, who sends a piece at each call of a method."""

    def __init__(self, reader: BodyReader, *pieces: bytes) -> None:
        self.receives = 0
        self.share = BodyShare(reader.memory)
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.send(*pieces)
        self.task = asyncio.create_task(reader.read(self._receive, self.share, 0, Watch()))

    def send(self, *pieces: bytes, more: bool = True) -> None:
        for piece in pieces:
            self._messages.put_nowait({"type": "http.request", "body": piece, "more_body": more})

    async def hang_up(self) -> None:
        self._messages.put_nowait({"type": "http.disconnect"})
        with pytest.raises(HungUp):
            await self.task

    async def cancel(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])

    async def _receive(self) -> Any:
        self.receives += 1
        return await self._messages.get()


@pytest.fixture(autouse=True)
def nothing_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_FREE_NBYTES", 0)


def reader_of(**settings: Any) -> BodyReader:
    return BodyReader(FrontendSettings(**settings))


async def refusal(reading: Reading) -> ApiError:
    with pytest.raises(ApiError) as raised:
        await asyncio.wait_for(reading.task, 5)
    return raised.value


async def test_pieces_are_joined_and_count_until_they_are_released() -> None:
    reader = reader_of()
    reading = Reading(reader, b"one ", b"two ")
    reading.send(b"three", more=False)
    assert (await reading.task).content == b"one two three"
    assert reader.memory.nbytes == 13
    for _ in range(2):
        reading.share.release()
    assert reader.memory.nbytes == 0


async def test_a_small_body_is_read_even_when_the_memory_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = reader_of(max_bodies_nbytes=10)
    full, overdrawing = Reading(reader, b"x" * 10), Reading(reader, b"x" * 10)
    while reader.memory.nbytes < 20:
        await asyncio.sleep(0)
    monkeypatch.setattr(bodies, "_FREE_NBYTES", 10)
    small = Reading(reader)
    small.send(b"x" * 10, more=False)
    await asyncio.wait_for(small.task, 1)
    await full.hang_up()
    await overdrawing.hang_up()


@pytest.mark.parametrize("values", [1, MAX_VALUES])
async def test_a_short_body_that_is_there_is_read_at_once_unless_it_has_too_many_values(
    monkeypatch: pytest.MonkeyPatch, values: int
) -> None:
    monkeypatch.setattr(bodies, "_FREE_NBYTES", 64 << 10)
    monkeypatch.setattr(bodies, "_Pace", None)  # nobody needs one
    body = b"[" + b"," * values
    watch = Watch()
    watch.has_all = True

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    reader = reader_of()
    share = BodyShare(reader.memory)
    if values == 1:
        assert await reader.read(receive, share, len(body), watch) == (body, {})
    else:
        with pytest.raises(ApiError) as raised:
            await reader.read(receive, share, len(body), watch)
        assert (raised.value.status, raised.value.code) == (413, "too_many_values")
    assert share.nbytes == 0


async def test_while_memory_is_full_one_body_goes_on_and_the_others_wait_in_order() -> None:
    reader = reader_of(max_bodies_nbytes=30)
    readings = [Reading(reader, b"x" * 10) for _ in range(6)]
    first, second, third, fourth, fifth, sixth = readings
    await eventually(lambda: fourth.receives == 2)  # the fourth overdraws
    assert [reading.receives for reading in readings] == [2, 2, 2, 2, 1, 1]
    first.send(b"x" * 10)  # it has to wait behind those
    fourth.send(b"x" * 100, more=False)
    await fourth.task
    assert reader.memory.nbytes == 140
    await second.cancel()
    second.share.release()
    assert fifth.receives == 1, "only what makes room lets others in"
    fourth.share.release()
    await eventually(lambda: (fifth.receives, sixth.receives) == (2, 2))
    assert first.receives == 2
    for reading in (third, fifth, sixth):
        await reading.hang_up()
        reading.share.release()
    await eventually(lambda: first.receives == 3)
    first.send(b"", more=False)
    assert len((await first.task).content) == 20
    first.share.release()
    assert reader.memory.nbytes == 0


async def test_a_body_that_gives_up_waiting_for_memory_leaves_the_line() -> None:
    reader = reader_of(max_bodies_nbytes=10)
    full, overdrawing, leaving, waiting = (Reading(reader, b"x" * 10) for _ in range(4))
    await eventually(lambda: overdrawing.receives == 2)
    leaving.task.cancel()
    overdrawing.task.cancel()
    await asyncio.wait([leaving.task, overdrawing.task])
    for reading in (leaving, overdrawing):
        reading.share.release()
    await eventually(lambda: waiting.receives == 2)
    assert reader.memory.nbytes == 20
    await full.cancel()
    await waiting.cancel()


async def test_memory_that_does_not_come_free_is_a_503() -> None:
    reader = reader_of(max_bodies_nbytes=10, queue_timeout_s=0.02)
    *others, last = [Reading(reader, b"x" * 10) for _ in range(3)]
    error = await refusal(last)
    assert (error.status, error.code, error.retry_after_s) == (503, "overloaded", 1)
    for reading in others:
        await reading.cancel()


async def test_a_body_that_is_refused_midway_takes_no_memory_while_its_rest_is_read() -> None:
    reader = reader_of(max_body_nbytes=10)
    reading = Reading(reader, b"12345678", b"and more")
    await eventually(lambda: reading.receives == 3)
    assert reader.memory.nbytes == 0
    reading.send(b"", more=False)
    assert (await refusal(reading)).status == 413


@pytest.mark.adjustable_clock
async def test_a_body_that_stands_still_is_a_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_IDLE_S", 600.0)
    reading = Reading(reader_of(body_timeout_s=6000))
    for _ in range(2):
        reading.send(bytes(2000 * bodies._LEAST_BYTES_PER_S))
        await pass_time(400.0)
    assert not reading.task.done()
    await pass_time(300.0)
    error = await refusal(reading)
    assert (error.status, error.code, error.headers) == (408, "body_timeout", {"connection": "close"})


@pytest.mark.adjustable_clock
async def test_a_body_has_a_least_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_IDLE_S", 6000.0)
    monkeypatch.setattr(bodies, "_GRACE_S", 600.0)
    monkeypatch.setattr(bodies, "_LEAST_BYTES_PER_S", 10)
    reader = reader_of(body_timeout_s=6000)
    slow, fast = Reading(reader), Reading(reader)
    for minute in range(30):
        # At a little less than half of the least rate, what is lacking is more than the grace after twice as long as that.
        assert slow.task.done() == (minute >= 20)
        slow.send(bytes(290))
        fast.send(bytes(1200))
        await pass_time(60.0)
    assert (await refusal(slow)).code == "body_timeout"
    assert not fast.task.done()
    fast.task.cancel()


@pytest.mark.adjustable_clock
async def test_who_overdraws_must_be_quick_and_who_waits_for_memory_need_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_IDLE_S", 6000.0)
    monkeypatch.setattr(bodies, "_GRACE_S", 6000.0)
    monkeypatch.setattr(bodies, "_OVERDRAWING_GRACE_S", 570.0)
    reader = reader_of(max_bodies_nbytes=10, body_timeout_s=6000, queue_timeout_s=6000)
    full, slow, waiting = (Reading(reader, b"x" * 10) for _ in range(3))
    for minute in range(12):
        assert slow.task.done() == (minute >= 10)
        slow.send(b"x")
        await pass_time(60.0)
    assert (await refusal(slow)).code == "body_timeout"
    assert not full.task.done()
    assert not waiting.task.done()
    slow.share.release()
    waiting.send(b"x", more=False)
    await asyncio.wait_for(waiting.task, 1)
    full.task.cancel()


async def test_who_was_cancelled_just_now_is_passed_over() -> None:
    memory = BodyMemory(10)
    first, second, third, fourth = (BodyShare(memory) for _ in range(4))
    await first.grow(10)
    await second.grow(5)  # the one that may, although there is no room
    waiting = [asyncio.create_task(share.grow(5)) for share in (third, fourth)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    second.release()
    await asyncio.wait(waiting)
    assert [task.cancelled() for task in waiting] == [True, False]
    assert (third.nbytes, fourth.nbytes, memory.nbytes) == (0, 5, 15)
    first.release()
    fourth.release()
    assert memory.nbytes == 0


@pytest.mark.adjustable_clock
async def test_the_time_that_a_body_waits_for_memory_is_not_its_senders() -> None:
    pace, loop = _Pace(10), asyncio.get_running_loop()
    with pace.paused():
        await pass_time(1000)
    pace.advance(1, overdraws=False)
    assert pace.deadline(overdraws=False) > loop.time()
