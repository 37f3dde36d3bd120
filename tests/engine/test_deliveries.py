"""Deliveries: each goes to one taker, who is woken by it; the later of two stands; none is lost or stays."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import pytest
import torch

import shmring
from engine.store.process import _drain
from shmring import Ring
from shmring.client.deliveries import Deliveries
from shmring.ring.untaken import _ALONE_S, _UNTAKEN_S
from shmring.service.supervision import Stop
from tests.sessions import session_of
from tests.waiting import cancel, eventually, turns

SIZE = 50_000
LIMIT_S = 30.0

pytestmark = pytest.mark.filterwarnings("error::ResourceWarning")


def name(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def frame(number: int, size: int = SIZE) -> dict[str, Any]:
    return {"frame": torch.full((size,), number, dtype=torch.uint8)}


def counts(ring: Ring) -> tuple[int, int, int, int]:
    """What is untaken, was taken, was withdrawn, and how many wait."""
    now = ring.statistics()
    return now.deliveries_untaken, now.deliveries_taken, now.deliveries_withdrawn, now.kept_waits


@pytest.fixture
async def ends(ring: Ring, connect: Any) -> list[Deliveries]:
    """Of a sender and two takers."""
    return [Deliveries(await connect()) for _ in range(3)]


async def taken(taking: Any) -> int:
    """What number was delivered to a taker."""
    async with asyncio.timeout(LIMIT_S):
        with await taking as kept:
            return int(kept.payload["frame"][-1])


async def nothing_is_left(ring: Ring) -> None:
    await eventually(lambda: (ring.statistics().kept, ring.statistics().kept_waits) == (0, 0))
    ring._shell._book.check()


async def test_a_delivery_goes_to_one_taker_whether_it_came_before_or_after(ring: Ring, ends: list[Deliveries]) -> None:
    sender, first, second = ends
    await sender.deliver(name("a"), frame(1), timeout=LIMIT_S)
    assert counts(ring) == (1, 0, 0, 0)
    assert await taken(first.take(name("a"))) == 1
    absent: list[str] = []
    waiting = [
        asyncio.create_task(taken(taker.take(name("a"), absent=lambda text=text: absent.append(text))))
        for taker, text in ((first, "first"), (second, "second"))
    ]
    await eventually(lambda: sorted(absent) == ["first", "second"])
    assert counts(ring) == (0, 1, 0, 2)
    await sender.deliver(name("a"), frame(2), timeout=LIMIT_S)
    await sender.deliver(name("b"), frame(3), timeout=LIMIT_S)
    assert await waiting[0] == 2, "who has asked first gets it"
    assert not waiting[1].done(), "what is taken is not there any more"
    await sender.deliver(name("a"), frame(4), timeout=LIMIT_S)
    assert await waiting[1] == 4
    assert await taken(second.take(name("b"), absent=lambda: absent.append("never"))) == 3
    assert absent[2:] == []
    await nothing_is_left(ring)


@pytest.mark.parametrize("others", [1, 2])
async def test_what_came_for_who_is_cancelled_is_the_next_callers(
    ring: Ring, ends: list[Deliveries], others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, taker, other_taker = ends
    waiting = [asyncio.create_task(taken(taker.take(name("a")))) for _ in range(1 + others)]
    await eventually(lambda: counts(ring)[3] == 1)
    contents = session_of(taker._client).kept
    came = contents._came

    def came_and_cancelled(*answer: Any) -> None:
        came(*answer)
        waiting[0].cancel()

    monkeypatch.setattr(contents, "_came", came_and_cancelled)
    await sender.deliver(name("a"), frame(1), timeout=LIMIT_S)
    assert await waiting[1] == 1, "it is gone"
    assert waiting[0].cancelled()
    for task in waiting[2:]:
        assert not task.done()
        await cancel(task)
    await eventually(lambda: counts(ring)[3] == 0)
    await sender.deliver(name("a"), frame(2), timeout=LIMIT_S)
    assert await taken(other_taker.take(name("a"))) == 2, "nobody waits for it any more"
    await nothing_is_left(ring)


async def test_of_two_callers_of_one_client_one_has_it_and_the_other_the_next(ring: Ring, ends: list[Deliveries]) -> None:
    sender, taker, _ = ends
    waiting = [asyncio.create_task(taken(taker.take(name("a")))) for _ in range(2)]
    await eventually(lambda: counts(ring)[3] == 1)
    for number in (1, 2):
        await sender.deliver(name("a"), frame(number), timeout=LIMIT_S)
        assert await waiting[number - 1] == number
    await nothing_is_left(ring)


async def test_content_under_a_key_that_equals_the_name_is_another_one(ring: Ring, ends: list[Deliveries]) -> None:
    sender, taker, _ = ends
    waiting = asyncio.create_task(taken(taker.take(name("a"))))
    await eventually(lambda: counts(ring)[3] == 1)
    with await sender._client.keep(name("a"), frame(1)):
        await sender.deliver(name("a"), frame(2), timeout=LIMIT_S)
        assert await waiting == 2
        found = await taker._client.find(name("a"))
        assert found is not None
        with found:
            assert int(found.payload["frame"][-1]) == 1


@pytest.mark.parametrize("given", [True, False], ids=["in its slot", "copied"])
async def test_a_slot_that_something_is_delivered_from_is_left_and_nothing_else(
    ring: Ring, ends: list[Deliveries], given: bool
) -> None:
    sender, taker, _ = ends
    client = sender._client
    for number in range(1, 4):
        slot = await client.slot(SIZE)
        view = slot.tensor((SIZE,), torch.uint8)
        view.fill_(number)
        address = view.data_ptr() - session_of(client).kept._slab.mapping.address
        await sender.deliver(name("a"), {"frame": view}, timeout=LIMIT_S, slot=slot if given else None)
        if given:
            with pytest.raises(shmring.ClosedError):
                slot.tensor((1,), torch.uint8)
        with await taker.take(name("a")) as kept:
            came = kept.payload["frame"]
            assert int(came.sum()) == SIZE * number
            assert (came.data_ptr() - session_of(taker._client).kept._slab.mapping.address == address) is given
        del came, view
        slot.close()
    await nothing_is_left(ring)
    assert client.statistics().slots_in_use == 0
    session_of(client).host_slots.book.check()


async def test_a_process_takes_what_it_has_delivered(ring: Ring, ends: list[Deliveries]) -> None:
    """Both answers come in one turn; the slot is the sender's no more when it is its own as a taker."""
    sender, *_ = ends
    for number in range(1, 4):
        waiting = asyncio.create_task(taken(sender.take(name("a"))))
        await eventually(lambda: counts(ring)[3] == 1)
        slot = await sender._client.slot(SIZE)
        view = slot.tensor((SIZE,), torch.uint8)
        view.fill_(number)
        await sender.deliver(name("a"), {"frame": view}, timeout=LIMIT_S, slot=slot)
        assert await waiting == number
    await nothing_is_left(ring)


async def test_views_of_a_slot_that_drains_outlive_its_delivery(ring: Ring, ends: list[Deliveries]) -> None:
    sender, taker, _ = ends
    slot = await sender._client.slot(SIZE, drain=True)
    view = slot.tensor((SIZE,), torch.uint8)
    view.fill_(1)
    await sender.deliver(name("a"), {"frame": view}, timeout=LIMIT_S, slot=slot)
    with pytest.raises(shmring.ClosedError):
        slot.tensor((1,), torch.uint8)
    with await taker.take(name("a")) as kept:
        view.fill_(9)
        assert int(kept.payload["frame"].sum()) == SIZE, "who may go on writing writes into what was taken"
    await nothing_is_left(ring)
    assert sender._client.statistics().slots_in_use == 1
    del view
    await eventually(lambda: sender._client.statistics().slots_in_use == 0)
    await sender.deliver(name("a"), frame(2), timeout=LIMIT_S)
    assert await taken(taker.take(name("a"))) == 2
    assert sender._client.connected


async def test_the_later_of_two_with_one_name_stands(ring: Ring, ends: list[Deliveries]) -> None:
    sender, other, taker = ends
    await sender.deliver(name("a"), frame(1), timeout=LIMIT_S)
    await other.deliver(name("a"), frame(2), timeout=LIMIT_S)
    await other.deliver(name("a"), frame(3), timeout=LIMIT_S)
    assert counts(ring)[0] == 1
    assert ring.statistics().deliveries_dropped == 2
    assert await taken(taker.take(name("a"))) == 3
    await nothing_is_left(ring)


async def test_what_was_not_taken_can_be_withdrawn_by_its_sender_alone(ring: Ring, ends: list[Deliveries]) -> None:
    sender, other, taker = ends
    for text in ("a", "b", "c"):
        await sender.deliver(name(text), frame(1), timeout=LIMIT_S)
    assert await taken(taker.take(name("b"))) == 1
    await other.withdraw(name("a"))
    await other.withdraw()
    await sender.withdraw(name("a"), name("b"), name("d"))
    await eventually(lambda: counts(ring) == (1, 1, 1, 0))
    await sender.withdraw()
    await eventually(lambda: counts(ring) == (0, 1, 2, 0))
    for number in range(100):  # more than one message may name
        await sender.deliver(name(str(number)), frame(1, 100), timeout=LIMIT_S)
    await sender.withdraw(*(name(str(number)) for number in range(100)))
    await eventually(lambda: counts(ring) == (0, 1, 102, 0))
    await nothing_is_left(ring)


async def test_who_waits_no_more_is_not_in_line(ring: Ring, ends: list[Deliveries]) -> None:
    sender, first, second = ends
    waiting = [asyncio.create_task(taken(taker.take(name("a")))) for taker in (first, second)]
    await eventually(lambda: counts(ring)[3] == 2)
    await cancel(waiting[0])
    await eventually(lambda: counts(ring)[3] == 1)
    await sender.deliver(name("a"), frame(5), timeout=LIMIT_S)
    assert await waiting[1] == 5


@pytest.mark.parametrize("turns_before", range(10))
async def test_cancelling_at_any_moment_leaves_nothing(ring: Ring, ends: list[Deliveries], turns_before: int) -> None:
    sender, taker, _ = ends
    for attempt in (taker.take(name("a")), sender.deliver(name("a"), frame(1), timeout=LIMIT_S), taker.take(name("a"))):
        task = asyncio.create_task(attempt)
        await turns(turns_before)
        task.cancel()
        result = (await asyncio.gather(task, return_exceptions=True))[0]
        if isinstance(result, shmring.Kept):
            result.close()
    await sender.withdraw()
    await nothing_is_left(ring)
    assert sender._client.statistics().slots_in_use == 0
    session_of(sender._client).host_slots.book.check()


async def test_what_the_dead_have_delivered_can_be_taken_for_a_while(
    ring: Ring, ends: list[Deliveries], connect: Any, caplog: pytest.LogCaptureFixture
) -> None:
    _, _, taker = ends
    dying = await connect()
    sender = Deliveries(dying)
    for text in ("a", "b"):
        await sender.deliver(name(text), frame(6), timeout=LIMIT_S)
    untaken = ring._shell.untaken
    untaken.drop_old(-_ALONE_S)  # they lie there for as long as that before their sender dies
    ring._shell._frontends[dying.client_id].died()
    await turns()
    untaken.drop_old(0.0)
    untaken.drop_old(_ALONE_S - 1)
    assert await taken(taker.take(name("a"))) == 6
    assert counts(ring)[0] == 1
    untaken.drop_old(_ALONE_S)
    assert "that nobody has taken in time were dropped: 1" in caplog.text
    await nothing_is_left(ring)


async def test_what_nobody_takes_is_dropped_in_the_end(
    ring: Ring, ends: list[Deliveries], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shmring.ring.untaken._LOOK_S", 0.0)
    sender, *_ = ends
    untaken = ring._shell.untaken
    await sender.deliver(name("a"), frame(1), timeout=LIMIT_S)
    await eventually(lambda: bool(untaken._since_s))
    began_s = min(untaken._since_s.values())
    untaken.drop_old(began_s + _UNTAKEN_S - 1)
    assert counts(ring)[0] == 1
    untaken.drop_old(began_s + _UNTAKEN_S)
    assert ring.statistics().deliveries_dropped == 1
    await nothing_is_left(ring)
    await eventually(lambda: untaken._timer is None)


async def test_what_is_dropped_has_gone_when_the_log_says_so_and_others_are_looked_at(
    ring: Ring, ends: list[Deliveries], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, taker, _ = ends
    untaken, book = ring._shell.untaken, ring._shell._book
    for text in ("a", "b"):
        await sender.deliver(name(text), frame(1), timeout=LIMIT_S)
        untaken.drop_old(asyncio.get_running_loop().time() - _UNTAKEN_S / 2)
    there_when_said: list[int] = []
    monkeypatch.setattr("shmring.ring.untaken.logger.warning", lambda *_: there_when_said.append(len(book.untaken())))
    untaken.drop_old(asyncio.get_running_loop().time() + _UNTAKEN_S / 2)
    assert there_when_said == [0]

    def fail(effects: object) -> None:
        raise MemoryError

    await sender.deliver(name("a"), frame(1), timeout=LIMIT_S)
    untaken.drop_old(asyncio.get_running_loop().time() - _UNTAKEN_S)
    await sender.deliver(name("b"), frame(2), timeout=LIMIT_S)
    assert untaken._timer is not None
    untaken._timer.cancel()
    with monkeypatch.context() as patch:
        patch.setattr(untaken, "_carry_out", fail)
        with pytest.raises(MemoryError):
            untaken._look()
    assert untaken._timer is not None, "nobody looks again"
    assert await taken(taker.take(name("b"))) == 2
    await nothing_is_left(ring)


async def test_what_is_delivered_is_looked_at_until_it_has_gone(
    ring: Ring, ends: list[Deliveries], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shmring.ring.untaken._LOOK_S", 0.0)
    looks: list[float] = []
    untaken = ring._shell.untaken
    drop_old = untaken.drop_old
    monkeypatch.setattr(untaken, "drop_old", lambda now_s: (looks.append(now_s), drop_old(now_s)))
    sender, taker, _ = ends
    await sender.deliver(name("a"), frame(1), timeout=LIMIT_S)
    await eventually(lambda: len(looks) > 2)
    assert await taken(taker.take(name("a"))) == 1
    await eventually(lambda: untaken._timer is None)


async def test_what_was_delivered_is_sent_from_there_no_more(ring: Ring, ends: list[Deliveries]) -> None:
    """A sender that still has its tensor sends a copy of what is there: its taker's content is no slot of its own."""
    sender, taker, _ = ends
    slot = await sender._client.slot(SIZE)
    view = slot.tensor((SIZE,), torch.uint8)
    view.fill_(7)
    packed = session_of(sender._client).end.pack({"frame": view})
    record = packed.slots[0]
    await sender.deliver(name("a"), {"frame": view}, timeout=LIMIT_S, slot=slot)
    assert not record.is_submittable()
    assert await taken(taker.take(name("a"))) == 7
    del view, packed, record


@pytest.mark.ring(kept_nbytes="256KiB")
async def test_who_delivers_waits_for_room_and_no_longer_than_it_may(ring: Ring, ends: list[Deliveries]) -> None:
    sender, other, taker = ends
    for number in range(4):
        await sender.deliver(name(str(number)), frame(number, 60_000), timeout=LIMIT_S)
    with pytest.raises(TimeoutError):
        await other.deliver(name("a"), frame(9, 60_000), timeout=0.1)
    delivering = asyncio.create_task(other.deliver(name("a"), frame(9, 60_000), timeout=LIMIT_S))
    await turns()
    assert not delivering.done()
    assert await taken(taker.take(name("2"))) == 2
    await delivering
    assert await taken(taker.take(name("a"))) == 9
    with pytest.raises(shmring.CapacityError):
        await sender.deliver(name("large"), frame(1, 300_000), timeout=LIMIT_S)
    await sender.withdraw()
    await nothing_is_left(ring)
    assert sender._client.statistics().slots_in_use == 0


@pytest.mark.ring(client_pinned_nbytes="64KiB")
async def test_a_taker_that_uses_as_much_as_it_may_waits_for_its_own_views(ring: Ring, ends: list[Deliveries]) -> None:
    sender, taker, other = ends
    await sender.deliver(name("1"), frame(1), timeout=LIMIT_S)
    await other.deliver(name("2"), frame(2), timeout=LIMIT_S)
    with pytest.raises(TimeoutError):
        await sender.deliver(name("3"), frame(3), timeout=0.1)  # what nobody has taken counts for its sender
    held = await taker.take(name("1"))
    absent: list[str] = []
    waiting = asyncio.create_task(taken(taker.take(name("2"), absent=lambda: absent.append("2"))))
    refused = ring.statistics().kept_refusals
    await eventually(lambda: ring.statistics().kept_refusals > refused)
    assert not waiting.done()
    held.close()
    assert await waiting == 2
    assert absent == [], "it was there"
    waiting = asyncio.create_task(taken(taker.take(name("3"), absent=lambda: absent.append("3"))))
    await eventually(lambda: absent == ["3"])
    with await taker._client.keep(name("own"), frame(9)):
        for number in (3, 4):
            refused = ring.statistics().kept_refusals
            await sender.deliver(name("3"), frame(number), timeout=LIMIT_S)
            await eventually(lambda refused=refused: ring.statistics().kept_refusals > refused)
            await sender.withdraw()
            await eventually(lambda: (counts(ring)[0], counts(ring)[3]) == (0, 1))
            with pytest.raises(shmring.WouldBlock):
                await taker._client.keep(name("more"), frame(9))  # the answer comes behind what it has asked before
    assert absent == ["3"]
    await sender.deliver(name("3"), frame(5), timeout=LIMIT_S)
    assert await waiting == 5
    await eventually(lambda: (ring.statistics().kept_pinned, counts(ring)[3]) == (0, 0))


ASKING: dict[str, Any] = {
    "the next delivery": lambda taker: taker.take(name("never")),
    "content": lambda taker: taker._client.find(name("nothing")),
    "content to be kept": lambda taker: taker._client.keep(name("own"), frame(2)),
}


@pytest.mark.parametrize("question", ASKING)
async def test_an_engine_hears_that_one_was_left_with_the_next_question(
    ring: Ring, ends: list[Deliveries], monkeypatch: pytest.MonkeyPatch, question: str
) -> None:
    monkeypatch.setattr("shmring.client.kept._TOLD_S", 1000.0)
    sender, taker, _ = ends
    book = ring._shell._book.kept
    for _ in range(2):
        await sender.deliver(name("a"), frame(1), timeout=LIMIT_S)
        [left] = [kept.generation for kept in ring._shell._book.untaken()]
        assert await taken(taker.take(name("a"))) == 1
        await turns()
        assert left in book.by_generation
        asking = asyncio.create_task(ASKING[question](taker))
        await eventually(lambda left=left: left not in book.by_generation)
        await cancel(asking)


async def test_an_engine_hears_soon_that_one_was_left_if_nothing_is_asked(ring: Ring, ends: list[Deliveries]) -> None:
    sender, taker, _ = ends
    for number in (1, 2):
        await sender.deliver(name("a"), frame(number), timeout=LIMIT_S)
        assert await taken(taker.take(name("a"))) == number
        await nothing_is_left(ring)


async def test_views_that_a_taker_has_are_not_overwritten(ring: Ring, ends: list[Deliveries]) -> None:
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
    await nothing_is_left(ring)


@pytest.mark.parametrize("knows", [True, False], ids=["which says so", "which has said nothing yet"])
async def test_who_delivers_to_an_engine_that_drains_hears_of_it_at_once(
    ring: Ring, ends: list[Deliveries], knows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, taker, _ = ends
    await sender.deliver(name("a"), frame(1), timeout=LIMIT_S)
    await ring.drain(0)
    if not knows:
        monkeypatch.setattr(session_of(sender._client).kept, "_load", None)
    for _ in range(2):
        with pytest.raises(shmring.WouldBlock, match="about to end"):
            await sender.deliver(name("a"), frame(2), timeout=LIMIT_S)
    assert await taken(taker.take(name("a"))) == 1, "what is there can be taken"
    await nothing_is_left(ring)


@pytest.mark.ring(kept_nbytes="64KiB")
async def test_who_waits_for_room_copies_once(ring: Ring, ends: list[Deliveries], monkeypatch: pytest.MonkeyPatch) -> None:
    sender, other, taker = ends
    await other.deliver(name("a"), frame(1), timeout=LIMIT_S)
    sending = session_of(sender._client).kept._sending
    copies: list[object] = []
    copy = sending.copy
    monkeypatch.setattr(sending, "copy", lambda *what: (copies.append(what[0]), copy(*what))[1])
    delivering = asyncio.create_task(sender.deliver(name("b"), frame(2), timeout=LIMIT_S))
    await eventually(lambda: ring.statistics().kept_refusals >= 3)
    assert await taken(taker.take(name("a"))) == 1
    await delivering
    assert len(copies) == 1
    copies.clear()
    with await taker.take(name("b")) as kept:
        assert kept.key == name("b")
        assert name("b").hex()[:16] in repr(kept)
        assert int(kept.payload["frame"].sum()) == 2 * SIZE
    await nothing_is_left(ring)
    assert sender._client.statistics().slots_in_use == 0


async def test_who_delivers_or_waits_hears_of_the_engines_end(ring: Ring, ends: list[Deliveries]) -> None:
    sender, taker, _ = ends
    waiting = asyncio.create_task(taken(taker.take(name("a"))))
    await eventually(lambda: counts(ring)[3] == 1)
    await ring.close()
    with pytest.raises(shmring.EngineDeadError):
        await waiting
    with pytest.raises(shmring.EngineDeadError):
        await sender.deliver(name("a"), frame(1), timeout=LIMIT_S)


async def test_an_operator_sees_deliveries_and_what_a_store_leaves_of_them(
    ring: Ring, ends: list[Deliveries], caplog: pytest.LogCaptureFixture
) -> None:
    sender, taker, _ = ends
    for text in ("a", "b"):
        await sender.deliver(name(text), frame(1), timeout=LIMIT_S)
    with await taker.take(name("b")), await sender._client.keep(name("c"), frame(2)):
        seen = {kept.key: (kept.for_one, kept.pins) for kept in ring.inspect().kept}
        assert seen == {name("a").hex(): (True, 1), name("b").hex(): (True, 1), name("c").hex(): (False, 1)}
        await _drain(ring, Stop(), 0)
        assert "still in use after 0 s go: 2, and 1 that nobody has taken" in caplog.text
    await sender.withdraw()
    await eventually(lambda: (ring.statistics().kept, ring.statistics().kept_pinned) == (1, 0))
