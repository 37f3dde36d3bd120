"""Deliveries of a store: each goes to one taker, who is woken by it; the later of two stands; none is lost or stays."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

import shmring
from shmring import Ring
from shmring.client.deliveries import DELIVER, TAKE
from shmring.client.deliveries import Deliveries as OfClient
from shmring.engine.store.deliveries import _ALONE_S, _UNTAKEN_S, Deliveries
from tests.tables import for_each
from tests.waiting import cancel, eventually, turns

SIZE = 50_000
LIMIT_S = 30.0

pytestmark = pytest.mark.filterwarnings("error::ResourceWarning")


def name(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def frame(number: int, size: int = SIZE) -> dict[str, Any]:
    return {"frame": torch.full((size,), number, dtype=torch.uint8)}


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def store(ring: Ring, clock: Clock) -> AsyncIterator[Deliveries]:
    deliveries = Deliveries(clock)

    async def answer() -> None:
        async for claim in ring:
            deliveries.answer(claim)

    answering = asyncio.create_task(answer())
    yield deliveries
    clock.now_s += 2 * _UNTAKEN_S
    deliveries.drop_old()
    await cancel(answering)


@pytest.fixture
async def ends(store: Deliveries, connect: Any) -> list[OfClient]:
    """Of a sender and two takers."""
    return [OfClient(await connect()) for _ in range(3)]


async def taken(taking: Any) -> int:
    """What number was delivered to a taker."""
    async with asyncio.timeout(LIMIT_S):
        with await taking as kept:
            return int(kept.payload["frame"][-1])


async def test_a_delivery_goes_to_one_taker_whether_it_came_before_or_after(
    ring: Ring, store: Deliveries, ends: list[OfClient]
) -> None:
    sender, first, second = ends
    await sender.deliver(name("a"), frame(1), timeout=LIMIT_S)
    assert list(sender.untaken) == [name("a")]
    assert await taken(first.take(name("a"))) == 1
    await eventually(lambda: not sender.untaken)
    absent: list[str] = []
    waiting = [
        asyncio.create_task(taken(taker.take(name("a"), absent=lambda text=text: absent.append(text))))
        for taker, text in ((first, "first"), (second, "second"))
    ]
    await eventually(lambda: len(absent) == 2)
    assert store.describe() == {"untaken": 0, "untaken_nbytes": 0, "waiting": 2, "taken": 1, "withdrawn": 0, "dropped": 0}
    await sender.deliver(name("a"), frame(2), timeout=LIMIT_S)
    await sender.deliver(name("b"), frame(3), timeout=LIMIT_S)
    assert await waiting[0] == 2, "who has asked first gets it"
    assert not waiting[1].done(), "what is taken is not there any more, although its content may be kept for a while"
    await sender.deliver(name("a"), frame(4), timeout=LIMIT_S)
    assert await waiting[1] == 4
    assert await taken(second.take(name("b"))) == 3
    await eventually(lambda: not sender.untaken)
    await eventually(lambda: ring.statistics().kept_pinned == 0)


async def test_a_small_delivery_comes_in_the_answer(ring: Ring, store: Deliveries, ends: list[OfClient]) -> None:
    sender, first, second = ends
    for number, size in enumerate((1, 100, 2000, 20_000), 1):
        await sender.deliver(
            name("a"), {"frame": torch.full((size + 1,), number, dtype=torch.uint8)}, timeout=LIMIT_S, small=True
        )
        assert await taken(first.take(name("a"))) == number
    waiting = [asyncio.create_task(taken(taker.take(name("a")))) for taker in (first, second)]
    await eventually(lambda: store.describe()["waiting"] == 2)
    for number in (5, 6):
        await sender.deliver(name("a"), frame(number, 3000), timeout=LIMIT_S, small=True)
    assert [await each for each in waiting] == [5, 6]
    await sender.deliver(name("b"), {"nothing": "but text"}, timeout=LIMIT_S, small=True)
    with await first.take(name("b")) as came:
        assert came.payload == {"nothing": "but text"}
    assert (store.describe()["taken"], ring.statistics().kept) == (7, 0)
    await eventually(lambda: not sender.untaken)
    await eventually(lambda: sender._client.statistics().slots_submitted == 0)


@pytest.mark.ring(reply_nbytes="64KiB")
async def test_many_small_ones_at_once_wait_for_room_in_the_answers(store: Deliveries, ends: list[OfClient]) -> None:
    sender, *takers = ends
    names = [name(str(number)) for number in range(12)]
    waiting = [asyncio.create_task(taken(takers[place % 2].take(each))) for place, each in enumerate(names)]
    await eventually(lambda: store.describe()["waiting"] == len(names))
    await asyncio.gather(
        *(sender.deliver(each, frame(place, 30_000), timeout=LIMIT_S, small=True) for place, each in enumerate(names))
    )
    assert [await each for each in waiting] == list(range(len(names)))


@pytest.mark.ring(reply_nbytes="64KiB")
async def test_a_taker_that_goes_before_there_was_room_for_its_answer_leaves_it_to_others(
    store: Deliveries, ends: list[OfClient]
) -> None:
    sender, first, second = ends

    async def deliver(text: str, number: int, size: int = 50_000) -> None:
        await sender.deliver(name(text), frame(number, size), timeout=LIMIT_S, small=True)

    await deliver("room", 1, 20_000)
    held = await first.take(name("room"))
    for later in (None, 3):
        waiting = asyncio.create_task(first.take(name("a")))
        await eventually(lambda: store.describe()["waiting"] == 1)
        await deliver("a", 2)
        assert (store.describe()["untaken"], store.describe()["waiting"]) == (0, 0), "it is to be sent when there is room"
        if later:
            await deliver("a", later)
        await cancel(waiting)
        await eventually(lambda: not store._answering)
        assert store.describe()["untaken"] == 1
        if later:
            held.close()
            assert await taken(second.take(name("a"))) == later
        else:
            await sender.withdraw(name("a"))
    await eventually(lambda: not sender.untaken)


@pytest.mark.ring(reply_nbytes="64KiB")
async def test_one_that_no_answer_can_have_is_an_error_of_both_sides_alone(
    store: Deliveries, ends: list[OfClient], caplog: pytest.LogCaptureFixture
) -> None:
    sender, taker, _ = ends
    await sender.deliver(name("a"), frame(1, 100_000), timeout=LIMIT_S, small=True)
    with pytest.raises(shmring.RemoteError, match="CapacityError"):
        await taken(taker.take(name("a")))
    await eventually(lambda: not sender.untaken)
    await sender.deliver(name("b"), frame(2), timeout=LIMIT_S)
    assert "what was delivered was dropped: CapacityError" in caplog.text
    assert await taken(taker.take(name("b"))) == 2


async def test_a_slot_that_something_is_delivered_from_is_left(ring: Ring, store: Deliveries, ends: list[OfClient]) -> None:
    sender, taker, _ = ends
    for number, small in enumerate((True, False), 1):
        slot = await sender._client.slot(SIZE)
        view = slot.tensor((SIZE,), torch.uint8)
        view.fill_(number)
        await sender.deliver(name("a"), {"frame": view}, timeout=LIMIT_S, small=small, slot=slot)
        with pytest.raises(shmring.ClosedError):
            slot.tensor((1,), torch.uint8)
        assert await taken(taker.take(name("a"))) == number
    await eventually(lambda: ring.statistics().kept_pinned == 0)
    await eventually(lambda: sender._client.statistics().slots_submitted == 0)


async def test_the_later_of_two_with_one_name_stands(store: Deliveries, ends: list[OfClient]) -> None:
    sender, other, taker = ends
    await sender.deliver(name("a"), frame(1), timeout=LIMIT_S)
    await other.deliver(name("a"), frame(2), timeout=LIMIT_S)
    await eventually(lambda: not sender.untaken)
    await other.deliver(name("a"), frame(3), timeout=LIMIT_S)
    assert list(other.untaken) == [name("a")]
    assert await taken(taker.take(name("a"))) == 3
    await eventually(lambda: not other.untaken)


async def test_what_was_not_taken_can_be_withdrawn_by_its_sender_alone(store: Deliveries, ends: list[OfClient]) -> None:
    sender, other, taker = ends
    for text in ("a", "b"):
        await sender.deliver(name(text), frame(1), timeout=LIMIT_S)
    assert await taken(taker.take(name("b"))) == 1
    await other._withdraw([name("a")])
    await eventually(lambda: list(sender.untaken) == [name("a")])
    await sender.withdraw(name("a"), name("b"), name("c"))
    assert store.describe() == {"untaken": 0, "untaken_nbytes": 0, "waiting": 0, "taken": 1, "withdrawn": 1, "dropped": 0}
    await eventually(lambda: not sender.untaken)


async def test_who_waits_no_more_is_not_in_line(store: Deliveries, ends: list[OfClient]) -> None:
    sender, first, second = ends
    waiting = [asyncio.create_task(taken(taker.take(name("a")))) for taker in (first, second)]
    await eventually(lambda: store.describe()["waiting"] == 2)
    await cancel(waiting[0])
    await eventually(lambda: store.describe()["waiting"] == 1)
    await sender.deliver(name("a"), frame(5), timeout=LIMIT_S)
    assert await waiting[1] == 5


async def test_what_the_dead_have_delivered_can_be_taken_for_a_while(
    ring: Ring, store: Deliveries, ends: list[OfClient], connect: Any, clock: Clock
) -> None:
    _, _, taker = ends
    dying = await connect()
    sender = OfClient(dying)
    for text in ("a", "b"):
        await sender.deliver(name(text), frame(6), timeout=LIMIT_S)
    ring._shell._frontends[dying.client_id].died()
    await turns()
    clock.now_s = _ALONE_S - 1
    store.drop_old()
    assert await taken(taker.take(name("a"))) == 6
    clock.now_s = 3 * _ALONE_S
    store.drop_old()
    assert (store.describe()["untaken"], store.describe()["dropped"]) == (0, 1)


async def test_what_nobody_takes_is_dropped_in_the_end(
    store: Deliveries, ends: list[OfClient], clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    sender, *_ = ends
    await sender.deliver(name("a"), frame(1), timeout=LIMIT_S)
    clock.now_s = _UNTAKEN_S - 1
    store.drop_old()
    assert store.describe()["untaken_nbytes"] == SIZE
    clock.now_s = _UNTAKEN_S
    store.drop_old()
    await eventually(lambda: not sender.untaken)
    await sender.deliver(name("b"), frame(1), timeout=LIMIT_S)  # it looks what became of the one before
    assert "what was delivered was dropped: " in caplog.text
    assert f"nobody has taken these {SIZE} bytes in time" in caplog.text


@pytest.mark.ring(kept_nbytes="256KiB")
async def test_who_delivers_waits_for_room_and_no_longer_than_it_may(store: Deliveries, ends: list[OfClient]) -> None:
    sender, other, taker = ends
    for number in range(4):
        await sender.deliver(name(str(number)), frame(number, 60_000), timeout=LIMIT_S)
    with pytest.raises(TimeoutError):
        await other.deliver(name("a"), frame(9, 60_000), timeout=0.1)
    assert not other.untaken
    delivering = asyncio.create_task(other.deliver(name("a"), frame(9, 60_000), timeout=LIMIT_S))
    await turns()
    assert not delivering.done()
    assert await taken(taker.take(name("2"))) == 2
    await delivering
    assert await taken(taker.take(name("a"))) == 9
    with pytest.raises(shmring.CapacityError):
        await sender.deliver(name("large"), frame(1, 300_000), timeout=LIMIT_S)


async def test_views_that_a_taker_has_are_not_overwritten(ring: Ring, store: Deliveries, ends: list[OfClient]) -> None:
    sender, taker, _ = ends
    views = []
    for number in range(1, 4):
        await sender.deliver(name("a"), frame(number), timeout=LIMIT_S)
        with await taker.take(name("a")) as kept:
            views.append(kept.payload["frame"])
    for number in range(20):
        await sender.deliver(name("b"), frame(100), timeout=LIMIT_S)
        assert await taken(taker.take(name("b"))) == 100, number
    assert [int(view.sum()) for view in views] == [SIZE, 2 * SIZE, 3 * SIZE]
    views.clear()
    await eventually(lambda: ring.statistics().kept_pinned == 0)


@for_each(
    "payload",
    [
        {"x": torch.ones(10)},
        [TAKE, b"short", True],
        [TAKE, "text", True],
        [TAKE, bytes(32)],
        [DELIVER, bytes(32), bytes(31), torch.ones(10)],
        [DELIVER, bytes(31), b"", torch.ones(10)],
        ["another word", bytes(32)],
        [],
        7,
    ],
)
async def test_other_requests_end_at_once(store: Deliveries, ends: list[OfClient], payload: Any) -> None:
    with pytest.raises(shmring.RemoteError, match="answers no requests"):
        await ends[0]._client.request(payload, timeout=LIMIT_S)


async def test_a_sender_that_names_what_it_has_not_kept_is_its_takers_error(store: Deliveries, ends: list[OfClient]) -> None:
    sender, taker, _ = ends
    lying = await sender._client.submit([DELIVER, name("a"), bytes(32), torch.ones(1000)])
    with pytest.raises(shmring.RemoteProtocolError, match="a key that it had not kept"):
        await taken(taker.take(name("a")))
    await lying.wait()


async def test_an_engine_that_hands_nothing_out_says_so(serve: Any, connect: Any) -> None:
    async def refuse(claim: shmring.Claim[Any]) -> None:
        claim.fail(NotImplementedError("no such requests here"))

    await serve(refuse)
    with pytest.raises(shmring.RemoteError, match="no such requests here"):
        await OfClient(await connect()).check()
