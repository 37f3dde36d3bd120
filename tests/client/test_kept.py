"""Kept content: given to the engine once, found by every frontend, sent again from where it lies, and in nobody's way."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import threading
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import shmring
from shmring import Client, Ring
from shmring.core.messages import MAX_FINDS, Find, Keep
from shmring.core.states import ClientSlot
from tests.sessions import let_die, session_of
from tests.tables import for_each
from tests.waiting import eventually, hold, turns

SIZE = 50_000


def key(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def pixels(number: int, size: int = SIZE) -> torch.Tensor:
    return torch.full((size,), number, dtype=torch.uint8)


async def total(claim: shmring.Claim) -> None:
    await claim.reply({name: int(value.sum()) for name, value in claim.payload.items()})


pytestmark = [pytest.mark.both_loops, pytest.mark.filterwarnings("error::ResourceWarning"), pytest.mark.ring(handler=total)]


async def give(client: Client, *numbers: int) -> None:
    """Has the engine keep contents, and leaves them."""
    for number in numbers:
        (await client.keep(key(number), {"x": pixels(number)})).close()


def kept_pinned(ring: Ring) -> int:
    return ring.statistics().kept_pinned


# -- keeping, finding, sending again ---------------------------------------------------------------------------------------


async def test_what_is_kept_in_a_slot_is_found_by_others_and_never_copied(ring: Ring, connect: Any) -> None:
    first, other = await connect(), await connect()
    assert await first.find(key(1)) is None
    async with first.slot(SIZE) as slot:
        view = slot.tensor((SIZE,), torch.uint8)
        view.fill_(3)
        address = view.data_ptr()
        kept = await first.keep(key(1), {"size": [SIZE], "pixels": view})
        assert await first.request({"x": view}) == {"x": 3 * SIZE}  # from the slot, as before
        del view
    with kept:
        assert kept.payload["size"] == [SIZE]
        assert kept.payload["pixels"].data_ptr() == address
        assert await first.request({"x": kept.payload["pixels"], "y": kept.payload["pixels"][:10]}) == {"x": 3 * SIZE, "y": 30}
    found = await other.find(key(1))
    assert found is not None
    with found:
        assert await other.request({"x": found.payload["pixels"]}) == {"x": 3 * SIZE}
    for client in (first, other):
        assert client.statistics().copies == 0
    await eventually(lambda: kept_pinned(ring) == 0)
    counts = ring.statistics()
    assert (counts.kept, counts.kept_hits, counts.kept_misses, counts.kept_evictions) == (1, 1, 1, 0)
    assert counts.kept_nbytes == 53_248
    assert counts.free_nbytes + counts.leased_nbytes + counts.kept_nbytes == counts.leasable_nbytes


@pytest.mark.first_row_on_both_loops
@pytest.mark.parametrize("where", ["nowhere", "partly in a slot", "in two slots", "in a slot that the engine keeps"])
async def test_what_does_not_lie_in_one_slot_is_copied_to_one(client: Client, where: str) -> None:
    tensors = {"a": pixels(1, 5000), "b": torch.arange(900).view(3, 300)}
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    async with client.slot(20_000) as slot, client.slot(20_000) as second:
        if where != "nowhere":
            tensors["a"] = slot.tensor((5000,), torch.uint8).copy_(tensors["a"])
        if where == "in two slots":
            tensors["b"] = second.tensor((3, 300), torch.int64).copy_(tensors["b"])
        if where == "in a slot that the engine keeps":
            tensors["b"] = slot.tensor((3, 300), torch.int64).copy_(tensors["b"])
            (await client.keep(key(9), tensors)).close()
        with await client.keep(key(1), tensors) as kept:
            for name, tensor in kept.payload.items():
                assert torch.equal(tensor, expected[name])
                assert tensor.data_ptr() != tensors[name].data_ptr()
            del tensor
        tensors.clear()
    assert (await client.request({"x": pixels(1)}))["x"] == SIZE  # the slots are as good as before


async def test_of_two_with_one_key_the_first_is_kept_and_both_have_it(ring: Ring, connect: Any) -> None:
    clients = [await connect(), await connect()]
    both = await asyncio.gather(*(client.keep(key(1), {"x": pixels(7)}) for client in clients))
    for client, kept in zip(clients, both, strict=True):
        with kept:
            assert await client.request(kept.payload) == {"x": 7 * SIZE}
    assert ring.statistics().kept == 1
    await eventually(lambda: all(client.statistics().slots_in_use == 0 for client in clients))


async def test_one_pin_serves_all_callers_of_a_client(ring: Ring, client: Client) -> None:
    (await client.keep(key(1), {"x": pixels(2)})).close()
    await eventually(lambda: kept_pinned(ring) == 0)
    found = await asyncio.gather(*(client.find(key(1)) for _ in range(200)))
    assert client.statistics().kept_pins == 1
    hits = ring.statistics().kept_hits
    again = await client.find(key(1))
    assert ring.statistics().kept_hits == hits, "what is pinned already is found without asking"
    again.close()
    for kept in found[1:]:
        kept.close()
    assert (client.statistics().kept_pins, kept_pinned(ring)) == (1, 1)
    assert await client.request(found[0].payload) == {"x": 2 * SIZE}
    found[0].close()
    found[0].close()
    await eventually(lambda: kept_pinned(ring) == 0)
    assert client.statistics().kept_pins == 0


@pytest.mark.one_loop
async def test_a_payload_has_its_type_and_arrays_are_read_only(ring: Ring, connect: Any) -> None:
    class Picture(msgspec.Struct):
        pixels: np.ndarray[Any, Any]
        taken: str

    client = await connect()
    with await client.keep(key(1), Picture(np.arange(2000), "today")):
        kept = await client.find(key(1), payload_type=Picture)
        with kept:
            assert isinstance(kept.payload, Picture)
            assert (kept.payload.taken, int(kept.payload.pixels.sum())) == ("today", 1999 * 1000)
            with pytest.raises(ValueError, match="read-only"):
                kept.payload.pixels[0] = 1
        with await client.find(key(1), payload_type=int) as wrong, pytest.raises(shmring.RemoteError, match="payload_type"):
            _ = wrong.payload


@pytest.mark.one_loop
async def test_content_that_was_left_gives_no_views(client: Client) -> None:
    with await client.keep(key(1), {"x": pixels(1)}) as kept:
        assert "pinned" in repr(kept)
    assert "left" in repr(kept)
    with pytest.raises(shmring.ClosedError, match="was left"):
        _ = kept.payload


@pytest.mark.one_loop
@for_each(("wrong", "error"), [("text", TypeError), (b"short", ValueError), (bytes(33), ValueError), (None, TypeError)])
async def test_what_is_no_key_is_refused(client: Client, wrong: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="key"):
        await client.find(wrong)
    with pytest.raises(error, match="key"):
        await client.keep(wrong, {"x": pixels(1)})


@pytest.mark.one_loop
@pytest.mark.ring(kept_nbytes="128KiB")
async def test_what_can_not_be_kept_is_an_error_and_takes_nothing(ring: Ring, client: Client) -> None:
    with pytest.raises(ValueError, match="has a tensor"):
        await client.keep(key(1), {"x": 1})
    with pytest.raises(TypeError):
        await client.keep(key(1), {"x": object(), "y": pixels(1)})
    with pytest.raises(shmring.CapacityError, match="beside tensors"):
        await client.keep(key(1), {"x": pixels(1), "text": "x" * 5000})
    with pytest.raises(shmring.CapacityError, match="more than the 131072 that the engine keeps"):
        await client.keep(key(1), {"x": pixels(1, 200_000)})
    async with client.slot(200_000) as slot:
        view = slot.tensor((200_000,), torch.uint8).fill_(1)
        with pytest.raises(shmring.CapacityError):
            await client.keep(key(1), {"x": view})
        assert await client.request({"x": view}) == {"x": 200_000}  # it is the caller's again
        del view
    assert client.statistics().slots_in_use == 0
    assert ring.statistics().kept == 0


@pytest.mark.one_loop
@pytest.mark.ring(kept_nbytes=0)
async def test_with_kept_nbytes_0_nothing_is_kept(client: Client) -> None:
    assert client.kept_nbytes == 0
    with pytest.raises(shmring.CapacityError, match="raise its kept_nbytes"):
        await client.keep(key(1), {"x": pixels(1)})
    assert await client.find(key(1)) is None


# -- pins ------------------------------------------------------------------------------------------------------------------


async def test_views_that_outlive_the_block_keep_the_pin(ring: Ring, connect: Any) -> None:
    client, other = await connect(), await connect()
    with await client.keep(key(1), {"x": pixels(5)}) as kept:
        view = kept.payload["x"][10:]
    await give(other, *range(2, 40))  # many times what is kept
    assert kept_pinned(ring) >= 1
    assert int(view.sum()) == 5 * (SIZE - 10)
    assert await client.request({"x": view}) == {"x": 5 * (SIZE - 10)}
    copies = client.statistics().copies
    with await client.find(key(1)):
        assert await client.request({"x": view}) == {"x": 5 * (SIZE - 10)}
    assert client.statistics().copies == copies
    del view
    await eventually(lambda: client.statistics().kept_pins == 0)
    await eventually(lambda: kept_pinned(ring) == 0)


async def test_a_slot_that_was_kept_is_pinned_until_it_is_left(ring: Ring, connect: Any) -> None:
    """Its caller could still write to it: what replaces it there would be harmed."""
    client, other = await connect(), await connect()
    async with client.slot(SIZE, drain=True) as slot:
        view = slot.tensor((SIZE,), torch.uint8).fill_(1)
        (await client.keep(key(1), {"x": view})).close()
        async with other.slot(900_000 - 65536, timeout=5) as large:
            del large
        assert kept_pinned(ring) == 1
    assert client.statistics().kept_pins == 1, "a view that drains may be written to"
    del view
    await eventually(lambda: kept_pinned(ring) == 0)


@pytest.mark.ring(handler=None)
async def test_a_request_keeps_what_it_has_after_everybody_left_it(ring: Ring, client: Client) -> None:
    with await client.keep(key(1), {"x": pixels(9)}) as kept:
        submission = await client.submit(kept.payload)
    await eventually(lambda: client.statistics().kept_pins == 0)
    claim = await ring.claim()
    await give(client, *range(2, 40))
    with claim:
        view = claim.payload["x"]
        await claim.done({"sum": int(view.sum())})
    assert await submission.result() == {"sum": 9 * SIZE}
    await eventually(lambda: kept_pinned(ring) == 1)  # the engine's view keeps it
    await give(client, *range(40, 80))
    assert int(view.sum()) == 9 * SIZE
    del view
    await eventually(lambda: kept_pinned(ring) == 0)


@pytest.mark.ring(handler=None)
async def test_an_aborted_request_gives_its_pin_back(ring: Ring, client: Client) -> None:
    with await client.keep(key(1), {"x": pixels(9)}) as kept:
        submissions = [await client.submit(kept.payload) for _ in range(3)]
    for submission in submissions:
        submission.abort()
    await eventually(lambda: kept_pinned(ring) == 0)
    await client.close()


async def test_a_claim_with_one_content_twice_and_a_copy_beside(ring: Ring, client: Client) -> None:
    with await client.keep(key(1), {"x": pixels(1)}) as one, await client.keep(key(2), {"x": pixels(2)}) as two:
        parts = {"a": one.payload["x"], "b": two.payload["x"], "c": one.payload["x"][:10], "d": pixels(3)}
        assert await client.request(parts) == {"a": SIZE, "b": 2 * SIZE, "c": 10, "d": 3 * SIZE}
        parts.clear()
    await eventually(lambda: kept_pinned(ring) == 0)


@pytest.mark.ring(MAX_PINS=2)
async def test_too_many_pins_are_an_error(ring: Ring, connect: Any) -> None:
    client, other = await connect(), await connect()
    with await client.keep(key(1), {"x": pixels(1)}), await client.keep(key(2), {"x": pixels(2)}):
        with pytest.raises(shmring.WouldBlock, match="as much kept content"):
            await client.keep(key(3), {"x": pixels(3)})
        await give(other, 3)
        with pytest.raises(shmring.WouldBlock, match="as much kept content"):
            await client.find(key(3))
        with await client.find(key(1)):  # which it has already
            pass
    with await client.find(key(3)):
        pass
    assert ring.statistics().protocol_errors == 0


@pytest.mark.one_loop
@pytest.mark.ring(client_pinned_nbytes="32KiB")
async def test_content_that_no_client_may_pin_is_said_to_be_too_large(ring: Ring, client: Client) -> None:
    with pytest.raises(shmring.CapacityError, match="raise its client_pinned_nbytes") as caught:
        await client.keep(key(1), {"x": pixels(1)})
    assert (caught.value.needed, caught.value.capacity) == (SIZE, 32 << 10)
    assert (ring.statistics().kept, client.statistics().slots_in_use) == (0, 0)


async def test_what_is_dropped_comes_back_with_a_warning(ring: Ring, client: Client, dropped: Any) -> None:
    with dropped("kept content of 50000 bytes was dropped before it was left"):
        await client.keep(key(1), {"x": pixels(1)})
        gc.collect()
        await eventually(lambda: kept_pinned(ring) == 0)


@pytest.mark.parametrize("turns_before", range(12))
async def test_cancelling_at_any_moment_leaves_nothing_pinned(ring: Ring, connect: Any, turns_before: int) -> None:
    client, other = await connect(), await connect()
    await give(other, 1)
    for attempt in (client.find(key(1)), client.keep(key(1), {"x": pixels(1)}), client.keep(key(2), {"x": pixels(2)})):
        task = asyncio.create_task(attempt)
        await turns(turns_before)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            (await task).close()
        await turns()
        await eventually(lambda: kept_pinned(ring) == 0)
        await eventually(lambda: client.statistics().slots_in_use == 0)
    ring._shell._book.check()
    assert client.connected
    session_of(client).host_slots.book.check()


@pytest.fixture
async def asking(ring: Ring, connect: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client that may ask for one content at a time and does, the task that asks, and what lets the engine answer."""
    monkeypatch.setattr("shmring.client.kept.MAX_FINDS", 1)
    client = await connect()
    go_on = hold(next(iter(ring._shell._frontends.values())).link)
    first = asyncio.create_task(client.find(key(1)))
    await turns()
    return client, first, go_on


async def test_who_has_left_before_the_answer_keeps_nobody_from_asking(asking: Any) -> None:
    client, first, go_on = asking
    first.cancel()
    await turns()
    go_on()
    assert await client.find(key(2), timeout=20) is None


async def test_who_is_cancelled_before_it_may_ask_holds_nothing(asking: Any) -> None:
    client, first, go_on = asking
    keeping = asyncio.create_task(client.keep(key(2), {"x": pixels(2)}))
    await turns()
    book = session_of(client).host_slots.book
    assert book.count(ClientSlot.WRITING) == 1, "what it has copied"
    keeping.cancel()
    await turns()
    assert book.count(ClientSlot.WRITING) == 0
    go_on()
    assert await first is None


async def test_who_waits_to_ask_hears_of_the_end(ring: Ring, asking: Any) -> None:
    client, first, go_on = asking
    waiting = asyncio.create_task(client.find(key(2), timeout=20))
    await turns()
    session_of(client).link.abort()
    for task in (first, waiting):
        with pytest.raises(shmring.EngineDeadError):
            await task
    go_on()
    let_die(ring)


@pytest.mark.first_row_on_both_loops
@pytest.mark.parametrize("what", ["find", "keep a copy", "keep a slot"])
async def test_what_can_not_be_sent_leaves_nothing_behind(
    ring: Ring, client: Client, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    session = session_of(client)
    send = session.link.send

    def fail(message: Any) -> None:
        if isinstance(message, Find | Keep):
            raise MemoryError("there is none for the record")
        send(message)

    async with client.slot(SIZE) as slot:
        view = slot.tensor((SIZE,), torch.uint8).fill_(3)
        payloads = {"keep a copy": {"x": pixels(1)}, "keep a slot": {"x": view}}
        with monkeypatch.context() as patch:
            patch.setattr(session.link, "send", fail)
            for _ in range(MAX_FINDS + 1):  # more than may ask at a time
                with pytest.raises(MemoryError):
                    await asyncio.wait_for(client.keep(key(1), payloads[what]) if what in payloads else client.find(key(1)), 60)
            with pytest.raises(MemoryError):
                await asyncio.wait_for(client.wait_kept(key(7)), 60)
        assert client.statistics().slots_in_use == 1
        assert not session.kept._line
        assert not session.kept._answers
        assert session.kept._waits == session.kept._waited == {}
        (await client.keep(key(1), {"x": view})).close()  # the slot is still its caller's
        payloads.clear()
        del view
    await eventually(lambda: client.statistics().slots_in_use == 0)
    session.host_slots.book.check()
    ring._shell._book.check()
    assert ring.statistics().protocol_errors == 0


# -- many at once, and without asking ----------------------------------------------------------------------------------------


async def test_many_are_found_in_one_round_trip_each_in_its_place(ring: Ring, connect: Any) -> None:
    first, other = await connect(), await connect()
    await give(first, *range(8))
    held = await other.find(key(3))
    link = session_of(other).link
    go_on = hold(link)  # no answer is read before all is sent
    finding = asyncio.create_task(other.find_many([*map(key, range(8)), key(99), key(5)]))
    await eventually(lambda: ring.statistics().kept_hits == 1 + 7)
    assert ring.statistics().kept_misses == 1
    assert not finding.done()
    go_on()
    found = await finding
    assert [kept and kept.key for kept in found] == [*map(key, range(8)), None, key(5)]
    assert found[5] is not found[9]
    for number, kept in enumerate(found[:8]):
        assert int(kept.payload["x"].sum()) == number * SIZE
    counts = other.statistics()
    assert (counts.kept_pins, counts.kept_hits, counts.kept_misses) == (8, 1 + 8 + 1, 1)
    found[5].close()
    assert int(found[9].payload["x"][0]) == 5, "what is named twice is left twice"
    for kept in (held, *found):
        if kept is not None:
            kept.close()
    await eventually(lambda: kept_pinned(ring) == 0)


@pytest.mark.one_loop
async def test_more_than_may_ask_at_a_time_are_found_as_well(ring: Ring, connect: Any) -> None:
    first, other = await connect(), await connect()
    await give(first, 7)
    keys = [key(number) for number in range(100, 100 + 2 * MAX_FINDS)]
    both = await asyncio.gather(other.find_many([*keys, key(7)]), other.find_many([key(7), *reversed(keys)]))
    assert [sum(kept is not None for kept in found) for found in both] == [1, 1]
    for found in both:
        next(filter(None, found)).close()
    await eventually(lambda: kept_pinned(ring) == 0)
    assert await other.find_many([]) == []


@pytest.mark.one_loop
@pytest.mark.ring(MAX_PINS=2)
async def test_if_not_all_of_many_can_be_pinned_none_is(ring: Ring, connect: Any) -> None:
    first, other = await connect(), await connect()
    await give(first, 1, 2, 3)
    with pytest.raises(shmring.WouldBlock, match="as much kept content"):
        await other.find_many([key(1), key(2), key(3)])
    await eventually(lambda: kept_pinned(ring) == 0)
    assert other.statistics().kept_pins == 0
    assert ring.statistics().kept_refusals == 1


@pytest.mark.parametrize("turns_before", range(10))
async def test_who_is_cancelled_while_it_looks_for_many_leaves_nothing_pinned(
    ring: Ring, connect: Any, turns_before: int
) -> None:
    client, other = await connect(), await connect()
    await give(other, 1, 2)
    task = asyncio.create_task(client.find_many([key(1), key(9), key(2)]))
    await turns(turns_before)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        for kept in filter(None, await task):
            kept.close()
    await turns()
    await eventually(lambda: kept_pinned(ring) == 0)
    assert session_of(client).kept._line == {}
    ring._shell._book.check()


@pytest.mark.one_loop
async def test_what_is_pinned_here_is_found_without_asking(ring: Ring, connect: Any) -> None:
    client, other = await connect(), await connect()
    await give(other, 1)
    with pytest.raises(shmring.WouldBlock, match="find\\(\\) asks the engine"):
        client.find_nowait(key(1))
    with await client.find(key(1)):
        asked = ring.statistics().kept_hits
        again = client.find_nowait(key(1), payload_type=dict[str, torch.Tensor])
        assert ring.statistics().kept_hits == asked
    assert int(again.payload["x"][0]) == 1, "it is pinned by itself"
    assert client.find_nowait(key(1), engine="test").close() is None
    again.close()
    with pytest.raises(shmring.WouldBlock):
        client.find_nowait(key(1))
    assert client.statistics().kept_hits == 3
    with pytest.raises(TypeError, match="key"):
        client.find_nowait("text")
    with pytest.raises(ValueError, match="no engine"):
        client.find_nowait(key(1), engine="other")


async def test_what_another_thread_found_is_left_in_the_loop(ring: Ring, connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    client, other = await connect(), await connect()
    await give(other, 1)
    kept = await client.find(key(1))
    link, here = session_of(client).link, threading.get_ident()
    writers: list[int] = []
    send_listed = link.send_listed
    monkeypatch.setattr(link, "send_listed", lambda *listed: writers.append(threading.get_ident()) or send_listed(*listed))

    def find_and_leave() -> None:
        with client.find_nowait(key(1)):
            assert left.wait(60)  # the loop leaves its own meanwhile

    left = threading.Event()
    thread = asyncio.create_task(asyncio.to_thread(find_and_leave))
    await eventually(lambda: client.statistics().kept_hits == 2)
    kept.close()
    left.set()
    await thread
    await eventually(lambda: kept_pinned(ring) == 0)
    assert writers == [here]
    assert ring.statistics().protocol_errors == 0


@pytest.mark.one_loop
@for_each(("wrong", "error"), [("text", TypeError), (b"x" * 32, TypeError), ([b"short"], ValueError), (7, TypeError)])
async def test_what_is_no_list_of_keys_is_refused(client: Client, wrong: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="key"):
        await client.find_many(wrong)


# -- waiting for what is not there yet ---------------------------------------------------------------------------------------


async def test_who_waits_for_a_key_is_woken_when_it_comes(ring: Ring, connect: Any) -> None:
    first, other = await connect(), await connect()
    waiting = [asyncio.create_task(other.wait_kept(key(1))) for _ in range(1000)]
    elsewhere = asyncio.create_task(other.wait_kept(key(2)))
    await eventually(lambda: ring.statistics().kept_waits == 2)
    records = ring.statistics().kept_misses
    await give(first, 1)
    found = await asyncio.gather(*waiting)
    assert not elsewhere.done()
    assert (kept_pinned(ring), other.statistics().kept_pins) == (1, 1)
    assert (ring.statistics().kept_hits, ring.statistics().kept_misses) == (1, records), "the engine was asked once"
    for kept in found:
        assert int(kept.payload["x"][0]) == 1
        kept.close()
    with await other.wait_kept(key(1)) as again:  # which is there
        assert int(again.payload["x"][0]) == 1
    elsewhere.cancel()
    await eventually(lambda: kept_pinned(ring) == ring.statistics().kept_waits == 0)
    assert ring.statistics().kept_misses == records + 1


async def test_what_was_waited_for_is_there_though_its_memory_is_wanted_at_once(ring: Ring, connect: Any) -> None:
    """It comes while this client reads nothing, and its giver asks for all the memory before that goes on."""
    first, other = await connect(), await connect()
    waiting = asyncio.create_task(other.wait_kept(key(1)))
    await eventually(lambda: ring.statistics().kept_waits == 1)
    go_on = hold(session_of(other).link)
    await give(first, 1)
    with pytest.raises(TimeoutError):
        await first.slot(ring.statistics().leasable_nbytes - 64, timeout=0.2)
    assert not waiting.done()
    go_on()
    with await waiting as kept:
        assert int(kept.payload["x"].sum()) == SIZE


async def test_who_waits_too_long_waits_no_more(ring: Ring, connect: Any) -> None:
    first, other = await connect(), await connect()
    patient = asyncio.create_task(other.wait_kept(key(1)))
    await eventually(lambda: ring.statistics().kept_waits == 1)
    with pytest.raises(TimeoutError, match="content to come to 'test' under the key"):
        await other.wait_kept(key(1), timeout=0.01)
    await turns()
    assert (ring.statistics().kept_waits, ring.statistics().kept_misses) == (1, 0), "another caller waits"
    patient.cancel()
    await eventually(lambda: ring.statistics().kept_waits == 0)
    assert session_of(other).kept._waits == {}
    await give(first, 1)
    await eventually(lambda: kept_pinned(ring) == 0)
    assert other.statistics().kept_pins == 0
    ring._shell._book.check()


async def test_who_begins_to_wait_while_the_last_one_leaves_is_woken(ring: Ring, connect: Any) -> None:
    first, other = await connect(), await connect()
    leaving = asyncio.create_task(other.wait_kept(key(1)))
    await eventually(lambda: ring.statistics().kept_waits == 1)
    go_on = hold(session_of(other).link)
    leaving.cancel()
    await eventually(lambda: ring.statistics().kept_waits == 0)  # the answer is on its way
    coming = asyncio.create_task(other.wait_kept(key(1)))
    await turns()
    go_on()
    await eventually(lambda: ring.statistics().kept_waits == 1)
    await give(first, 1)
    (await coming).close()


async def test_what_comes_while_the_last_one_leaves_is_left(ring: Ring, connect: Any) -> None:
    first, other = await connect(), await connect()
    leaving = asyncio.create_task(other.wait_kept(key(1)))
    await eventually(lambda: ring.statistics().kept_waits == 1)
    go_on = hold(session_of(other).link)
    await give(first, 1)
    await eventually(lambda: kept_pinned(ring) == 1)  # for who waits
    leaving.cancel()
    await turns()
    go_on()
    await eventually(lambda: kept_pinned(ring) == 0)
    assert ring.statistics().protocol_errors == 0
    assert other.connected


@pytest.mark.parametrize("turns_before", range(8))
async def test_who_is_cancelled_while_it_waits_leaves_nothing(ring: Ring, connect: Any, turns_before: int) -> None:
    client, other = await connect(), await connect()
    waiting = asyncio.create_task(client.wait_kept(key(1)))
    giving = asyncio.create_task(give(other, 1))
    await turns(turns_before)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        (await waiting).close()
    await giving
    await eventually(lambda: kept_pinned(ring) == ring.statistics().kept_waits == 0)
    assert session_of(client).kept._waits == session_of(client).kept._waited == {}
    ring._shell._book.check()


@pytest.mark.one_loop
@pytest.mark.ring(MAX_PINS=1)
async def test_who_waits_and_may_pin_nothing_more_is_told_so(ring: Ring, connect: Any) -> None:
    first, other = await connect(), await connect()
    await give(first, 1)
    with await other.find(key(1)):
        waiting = asyncio.create_task(other.wait_kept(key(2)))
        await eventually(lambda: ring.statistics().kept_waits == 1)
        await give(first, 2)
        with pytest.raises(shmring.WouldBlock, match="as much kept content"):
            await waiting


@pytest.mark.one_loop
async def test_a_client_waits_for_a_bounded_number_of_keys(ring: Ring, connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shmring.client.kept.MAX_WAITS", 2)
    client = await connect()
    waiting = [asyncio.create_task(client.wait_kept(key(number))) for number in (1, 2, 1)]
    await eventually(lambda: ring.statistics().kept_waits == 2)
    with pytest.raises(shmring.WouldBlock, match="wait for 2 keys"):
        await client.wait_kept(key(3))
    waiting[1].cancel()
    await eventually(lambda: ring.statistics().kept_waits == 1)
    third = asyncio.create_task(client.wait_kept(key(3)))
    await eventually(lambda: ring.statistics().kept_waits == 2)
    for task in (*waiting, third):
        task.cancel()
    await eventually(lambda: ring.statistics().kept_waits == 0)


@pytest.mark.client(reconnect=True)
async def test_who_waits_hears_of_the_end_and_may_wait_for_the_next_engine(ring: Ring, client: Client, serve: Any) -> None:
    waiting = asyncio.create_task(client.wait_kept(key(1)))
    await eventually(lambda: ring.statistics().kept_waits == 1)
    await ring.close()
    with pytest.raises(shmring.EngineDeadError):
        await waiting
    again = asyncio.create_task(client.wait_kept(key(1)))
    await turns()
    next_ring = await serve(total)
    await eventually(lambda: next_ring.statistics().kept_waits == 1)
    (await client.keep(key(1), {"x": pixels(1)})).close()
    (await again).close()


@pytest.mark.one_loop
async def test_of_several_engines_one_is_named(serve: Any, connect: Any) -> None:
    rings = [await serve(total, name=name) for name in ("a", "b")]
    client = await connect(["a", "b"])
    await eventually(lambda: all(ring.statistics().clients == 1 for ring in rings))
    with pytest.raises(ValueError, match="content to wait for"):
        await client.wait_kept(key(1))
    waiting = asyncio.create_task(client.wait_kept(key(1), engine="b"))
    await eventually(lambda: rings[1].statistics().kept_waits == 1)
    (await client.keep(key(2), {"x": pixels(2)}, engine="a")).close()
    (await client.keep(key(1), {"x": pixels(1)}, engine="b")).close()
    (await waiting).close()
    found = await client.find_many([key(1), key(2), key(3)])
    assert [kept and int(kept.payload["x"][0]) for kept in found] == [1, 2, None]
    with client.find_nowait(key(1)) as again:
        assert int(again.payload["x"][0]) == 1
    for kept in filter(None, found):
        kept.close()


# -- a slot that is handed over ----------------------------------------------------------------------------------------------


async def test_a_slot_is_handed_over_without_waiting_and_its_caller_has_left_it(ring: Ring, connect: Any) -> None:
    client, other = await connect(), await connect()
    waiting = asyncio.create_task(other.wait_kept(key(1)))
    async with client.slot(SIZE) as slot:
        view = slot.tensor((SIZE,), torch.uint8).fill_(7)
        keeping = client.keep_nowait(key(1), {"x": view}, slot)
        with pytest.raises(shmring.ClosedError):
            slot.tensor((1,), torch.uint8)
        assert not keeping.ended
        del view
    with await waiting as kept:
        assert int(kept.payload["x"].sum()) == 7 * SIZE
    await keeping.wait()
    assert (keeping.ended, keeping.error) == (True, None)
    await eventually(lambda: kept_pinned(ring) == 0)
    assert client.statistics().slots_in_use == client.statistics().copies == 0


@pytest.mark.parametrize("first_turns", [0, 1, 50])
async def test_a_client_that_closes_has_published_what_it_handed_over(
    ring: Ring, connect: Any, monkeypatch: pytest.MonkeyPatch, first_turns: int
) -> None:
    monkeypatch.setattr("shmring.client.session._GOODBYE_TIMEOUT_S", 60.0)
    client, other = await connect(), await connect()
    slot = await client.slot(SIZE)
    keeping = client.keep_nowait(key(1), {"x": slot.tensor((SIZE,), torch.uint8).fill_(7)}, slot)
    await turns(first_turns)
    await client.close()
    assert (keeping.ended, keeping.error) == (True, None)
    with await other.find(key(1)) as kept:
        assert int(kept.payload["x"].sum()) == 7 * SIZE


async def test_a_client_that_closes_waits_no_longer_than_that_for_what_it_handed_over(
    ring: Ring, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shmring.client.session._GOODBYE_TIMEOUT_S", 0.01)
    slot = await client.slot(SIZE)
    hold(session_of(client).link)
    keeping = client.keep_nowait(key(1), {"x": slot.tensor((SIZE,), torch.uint8)}, slot)
    await client.close()
    with pytest.raises(shmring.ClosedError):
        await keeping.wait()


@pytest.mark.ring(kept_nbytes="56KiB")
async def test_what_is_not_kept_after_all_says_why_and_its_slot_is_free(ring: Ring, connect: Any) -> None:
    client, other = await connect(), await connect()
    with await other.keep(key(1), {"x": pixels(1)}):
        slot = await client.slot(SIZE)
        keeping = client.keep_nowait(key(2), {"x": slot.tensor((SIZE,), torch.uint8)}, slot)
        with pytest.raises(shmring.WouldBlock, match="no room to keep more"):
            await keeping.wait()
        assert isinstance(keeping.error, shmring.WouldBlock)
        assert "not kept" in repr(keeping)
        await eventually(lambda: client.statistics().slots_in_use == 0)


@pytest.mark.one_loop
async def test_what_can_not_be_handed_over_stays_with_its_caller(ring: Ring, connect: Any) -> None:
    client, other = await connect(), await connect()
    async with client.slot(SIZE) as slot, client.slot(SIZE) as second, other.slot(SIZE) as foreign:
        view = slot.tensor((SIZE,), torch.uint8).fill_(1)
        for payload in ({"x": pixels(1)}, {"x": view, "y": pixels(2)}, {"x": second.tensor((10,), torch.uint8)}, {"x": 1}):
            with pytest.raises(ValueError, match="lies in the slot that is given"):
                client.keep_nowait(key(1), payload, slot)
        with pytest.raises(shmring.CapacityError, match="beside tensors"):
            client.keep_nowait(key(1), {"x": view, "text": "x" * 5000}, slot)
        with pytest.raises(shmring.ClosedError, match="another client"):
            client.keep_nowait(key(1), {"x": view}, foreign)
        with pytest.raises(TypeError, match="a slot of this client"):
            client.keep_nowait(key(1), {"x": view}, "slot")
        assert await client.request({"x": view}) == {"x": SIZE}  # it is the caller's
        await ring.drain(0)
        with pytest.raises(shmring.WouldBlock, match="about to end"):
            client.keep_nowait(key(1), {"x": view}, slot)
        with pytest.raises(shmring.WouldBlock, match="about to end"):
            await client.keep(key(1), {"x": view})
        payload.clear()
        del view
    with pytest.raises(shmring.ClosedError):
        client.keep_nowait(key(1), {}, slot)


@pytest.mark.one_loop
async def test_what_was_on_its_way_when_the_engine_drained_is_not_kept(ring: Ring, client: Client) -> None:
    session_of(client).kept._load = None  # it had looked before
    await ring.drain(0)
    with pytest.raises(shmring.WouldBlock, match="about to end"):
        await client.keep(key(1), {"x": pixels(1)})
    assert (ring.statistics().kept, client.statistics().slots_in_use) == (0, 0)


@pytest.mark.one_loop
@pytest.mark.client(reconnect=True)
async def test_a_slot_of_an_earlier_engine_is_not_handed_to_the_next(ring: Ring, client: Client, serve: Any) -> None:
    slot = await client.slot(SIZE)
    view = slot.tensor((SIZE,), torch.uint8)
    await ring.close()
    await serve(total)
    await client.wait_connected(timeout=60)
    with pytest.raises(shmring.EngineDeadError):
        client.keep_nowait(key(1), {"x": view}, slot)
    slot.close()


@pytest.mark.client(reconnect=True)
async def test_a_slot_that_is_handed_over_goes_with_its_engine(ring: Ring, client: Client) -> None:
    slot = await client.slot(SIZE)
    hold(session_of(client).link)
    keeping = client.keep_nowait(key(1), {"x": slot.tensor((SIZE,), torch.uint8)}, slot)
    await eventually(lambda: ring.statistics().kept == 1)
    session_of(client).link.abort()
    with pytest.raises(shmring.EngineDeadError):
        await keeping.wait()
    let_die(ring)


# -- who wants the memory ----------------------------------------------------------------------------------------------------


async def test_what_is_kept_gives_way_by_least_recent_use_and_nobody_waits(ring: Ring, client: Client) -> None:
    await give(client, *range(9))
    (await client.find(key(0))).close()  # used just now
    await eventually(lambda: kept_pinned(ring) == 0)
    await give(client, 9)
    assert [await has(client, number) for number in range(10)] == [True, False, *[True] * 8]
    async with client.slot(ring.statistics().leasable_nbytes - 64, timeout=5):
        assert ring.statistics().kept == 0
    assert not await has(client, 0)


async def has(client: Client, number: int) -> bool:
    kept = await client.find(key(number))
    if kept is not None:
        kept.close()
    return kept is not None


async def test_a_window_waits_for_what_is_pinned_and_for_nothing_else(ring: Ring, connect: Any) -> None:
    client, other = await connect(), await connect()
    kept = [await client.keep(key(number), {"x": pixels(number)}) for number in range(4)]
    for content in kept[1:]:
        content.close()
    async with client.slot(10) as slot:
        view = slot.tensor((10,), torch.uint8).fill_(1)
        nbytes = ring.statistics().leasable_nbytes - 4096
        waiting = asyncio.create_task(other.request({"x": torch.ones(nbytes, dtype=torch.uint8)}))
        await eventually(lambda: ring.statistics().lease_requests_waiting == 1)
        await eventually(lambda: ring.statistics().kept == 1)
        assert await client.request(kept[0].payload) == {"x": 0}
        with pytest.raises(shmring.WouldBlock, match="somebody waits for this memory"):
            await client.keep(key(5), {"x": view})
        assert await client.request({"x": view}) == {"x": 10}
        del view
    kept[0].close()
    await asyncio.wait_for(waiting, 5)
    assert ring.statistics().kept_evictions == 4


@pytest.mark.ring(slab_nbytes="2MiB", client_quota_nbytes="512KiB", kept_nbytes="1MiB")
async def test_what_a_client_pins_counts_as_if_it_held_it(ring: Ring, connect: Any) -> None:
    greedy, other = await connect(), await connect()
    kept = [await greedy.keep(key(number), {"x": pixels(number)}) for number in range(9)]
    async with greedy.slot(10):  # in its base lease; with no lease at all it would get one
        waiting = asyncio.create_task(greedy.request({"x": torch.ones(120_000, dtype=torch.uint8)}))
        await eventually(lambda: ring.statistics().lease_requests_waiting == 1)
        assert await other.request({"x": torch.ones(120_000, dtype=torch.uint8)}) == {"x": 120_000}
        assert not waiting.done()
        for content in kept:
            content.close()
        assert await asyncio.wait_for(waiting, 5) == {"x": 120_000}


async def test_a_client_whose_leases_are_full_of_what_is_kept_gets_others(ring: Ring, client: Client) -> None:
    for number in range(60):
        async with client.slot(20_000, timeout=5) as slot:
            view = slot.tensor((20_000,), torch.uint8).fill_(number)
            with await client.keep(key(number), {"x": view}) as kept:
                assert await client.request({"x": kept.payload["x"]}, timeout=5) == {"x": 20_000 * number}
            del view
    assert client.statistics().copies == 0
    await client.close()
    await eventually(lambda: ring.statistics().clients == 0)
    counts = ring.statistics()
    assert counts.free_nbytes + counts.kept_nbytes == counts.leasable_nbytes
    ring._shell._book.check()


async def test_several_slots_are_acquired_at_once(client: Client) -> None:
    slots = await client.slots([5000, 1, 20_000], timeout=5)
    assert [slot.nbytes for slot in slots] == [5000, 1, 20_000]
    views = [slot.tensor((slot.nbytes,), torch.uint8).fill_(number) for number, slot in enumerate(slots)]
    assert await client.request({"a": views[0], "b": views[1], "c": views[2]}) == {"a": 0, "b": 1, "c": 40_000}
    assert client.statistics().copies == 0
    with await client.keep(key(1), {"x": views[2]}):
        slots[0].close()
        slots[1].close()
    views.clear()
    slots[2].close()
    assert client.statistics().slots_in_use == 0
    with pytest.raises(ValueError, match="at least one"):
        await client.slots([])
    with pytest.raises(shmring.CapacityError):
        await client.slots([900_000, 900_000])


# -- ends --------------------------------------------------------------------------------------------------------------------


async def test_what_is_kept_outlives_who_gave_it(ring: Ring, connect: Any) -> None:
    first = await connect()
    kept = await first.keep(key(1), {"x": pixels(4)})
    view = kept.payload["x"]
    await first.close()
    await eventually(lambda: ring.statistics().clients == 0)
    assert kept_pinned(ring) == 1, "its process may still view it"
    assert ring.statistics().departed_clients == 1
    second = await connect()
    with await second.find(key(1)) as found:
        assert await second.request(found.payload) == {"x": 4 * SIZE}
    with pytest.raises(shmring.ClosedError):
        _ = kept.payload
    kept.close()
    del view


async def test_a_slot_that_is_given_while_its_client_closes_stays_pinned(ring: Ring, client: Client) -> None:
    """The engine keeps it before it reads the goodbye, and the client has not heard of that: its caller may still write."""
    slot = await client.slot(SIZE)
    view = slot.tensor((SIZE,), torch.uint8).fill_(1)
    hold(session_of(client).link)
    keeping = asyncio.create_task(client.keep(key(1), {"x": view}))
    await eventually(lambda: ring.statistics().kept == 1)
    await client.close()
    with pytest.raises(shmring.ClosedError):
        await keeping
    await eventually(lambda: ring.statistics().clients == 0)
    assert kept_pinned(ring) == 1
    assert ring.statistics().protocol_errors == 0
    view.fill_(2)
    slot.close()


@pytest.mark.client(reconnect=True)
async def test_the_next_engine_has_nothing(ring: Ring, client: Client, serve: Any) -> None:
    kept = await client.keep(key(1), {"x": pixels(1)})
    finding = asyncio.gather(*(client.find(key(2)) for _ in range(100)), return_exceptions=True)
    await ring.close()
    await serve(total)  # searches that were not sent before wait for it
    assert {type(result) for result in await finding} <= {type(None), shmring.EngineDeadError}
    assert await client.find(key(1)) is None
    with pytest.raises(shmring.EngineDeadError):
        _ = kept.payload
    kept.close()


@pytest.mark.one_loop
@pytest.mark.client(map_leased_only=True, lease_idle_s=0.0)
async def test_map_leased_only_lets_what_is_kept_be_read(client: Client) -> None:
    """And what is lent to this client where something of its own was kept stays writable when the rest goes back."""
    for number in range(30):
        async with client.slot(20_000, timeout=5) as slot:
            view = slot.tensor((20_000,), torch.uint8).fill_(number)
            with await client.keep(key(number), {"x": view}) as kept:
                assert int(kept.payload["x"].sum()) == 20_000 * number
            del view
    async with client.slot(700_000, timeout=5) as slot:
        assert int(slot.tensor((700_000,), torch.uint8).fill_(1).sum()) == 700_000
