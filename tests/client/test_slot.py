"""Slots: memory of the slab to write into in place, submitted without a copy, and not reused while anybody looks."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shmring
from shmring import Client, Ring
from shmring.core.geometry import BLOCK_NBYTES, Geometry
from shmring.core.messages import TORCH_ITEM_NBYTES, LeaseGrant
from tests.garbage import uncollected
from tests.sessions import session_of
from tests.waiting import eventually, pass_time


async def total(claim: shmring.Claim) -> None:
    payload = claim.payload
    await claim.reply({key: float(value.float().sum()) for key, value in payload.items() if isinstance(value, torch.Tensor)})


pytestmark = [pytest.mark.both_loops, pytest.mark.filterwarnings("error::ResourceWarning"), pytest.mark.ring(handler=total)]


# -- views --------------------------------------------------------------------------------------------------------------


@pytest.mark.one_loop
async def test_tensors_lie_one_behind_the_other_on_cache_lines(client: Client) -> None:
    shapes = [
        ((3, 5), torch.bfloat16),
        ((), torch.float64),
        ((7,), torch.uint8),
        ((0, 4), torch.float32),
        ((2,), torch.complex64),
    ]
    async with client.slot(shmring.nbytes_for(*shapes)) as slot:
        views = [slot.tensor(shape, dtype) for shape, dtype in shapes]
        assert [(tuple(view.shape), view.dtype) for view in views] == shapes
        start = views[0].data_ptr()
        assert [view.data_ptr() - start for view in views if view.numel()] == [0, 64, 128, 192]
        with pytest.raises(shmring.CapacityError, check=lambda error: error.capacity == slot.nbytes):
            slot.tensor((1,), torch.uint8)
        del views


@pytest.mark.one_loop
async def test_every_dtype_has_a_place(client: Client) -> None:
    async with client.slot(64 * 64) as slot:
        for name in TORCH_ITEM_NBYTES:
            if hasattr(torch, name):
                assert slot.tensor([2], getattr(torch, name)).dtype == getattr(torch, name)
        for dtype in ("<f4", ">i2", "S5", "U3", "M8[ns]", bool, np.float32, np.dtype("complex64")):
            array = slot.array((2,), dtype)
            assert (array.dtype, array.flags.writeable) == (np.dtype(dtype), True)


@pytest.mark.one_loop
async def test_what_cannot_be_placed_is_refused_and_takes_nothing(client: Client) -> None:
    async with client.slot(128) as slot:
        with pytest.raises(TypeError, match="can't be sent"):
            slot.tensor((1,), torch.quint8)
        with pytest.raises(TypeError, match="can't be sent"):
            slot.array((1,), object)
        with pytest.raises(ValueError, match="an extent of shape must be from 0 to"):
            slot.tensor((-1,), torch.uint8)
        with pytest.raises(shmring.CapacityError):
            slot.tensor((129,), torch.uint8)
        with pytest.raises(shmring.CapacityError):
            slot.tensor((2**32, 2**32), torch.uint8)  # 2**64 bytes are none, in 64 bits
        assert slot.tensor((128,), torch.uint8).numel() == 128
        assert "128 used" in repr(slot)


@pytest.mark.one_loop
async def test_a_slot_may_be_empty(client: Client) -> None:
    async with client.slot(0) as slot:
        assert slot.tensor((0,), torch.uint8).numel() == 0
        with pytest.raises(shmring.CapacityError):
            slot.tensor((1,), torch.uint8)


@pytest.mark.one_loop
async def test_sizes_may_be_text_as_in_configurations(client: Client) -> None:
    async with client.slot("1KiB") as slot:
        assert slot.nbytes == 1024
    with client.slot_nowait("1KB") as slot:
        assert slot.nbytes == 1000
    slots = await client.slots(["2KiB", 64])
    assert [slot.nbytes for slot in slots] == [2048, 64]
    for slot in slots:
        slot.close()
    client.check_capacity("1KiB", 64)
    with pytest.raises(shmring.CapacityError):
        client.check_capacity("1GiB")


@pytest.mark.one_loop
async def test_sizes_are_checked_before_anything_is_asked_for(client: Client) -> None:
    for nbytes, error in [(-1, ValueError), (1.5, TypeError), (True, TypeError), ("1 MiBi", ValueError)]:
        with pytest.raises(error):
            client.slot(nbytes)
        with pytest.raises(error):
            client.slot_nowait(nbytes)
    with pytest.raises(shmring.CapacityError) as caught:
        await client.slot(10 << 20)
    assert caught.value.needed == 10 << 20
    assert caught.value.capacity < 1 << 20
    with pytest.raises(shmring.CapacityError):
        client.slot_nowait(10 << 20)
    async with client.slot(caught.value.capacity, timeout=5) as slot:
        assert slot.nbytes == caught.value.capacity, "what is said to be the capacity can be had"


# -- leaving ------------------------------------------------------------------------------------------------------------


async def test_a_slot_is_free_when_it_is_left(client: Client) -> None:
    async with client.slot(5000) as slot:
        assert client.statistics().slots_writing == 1
        assert "WRITING" in repr(slot)
    assert client.statistics().slots_in_use == 0
    slot.close()
    assert "closed" in repr(slot)
    with pytest.raises(shmring.ClosedError, match="was left"):
        slot.tensor((1,), torch.uint8)
    with client.slot_nowait(5000):
        assert client.statistics().slots_writing == 1
    assert client.statistics().slots_in_use == 0
    slot = await client.slot(5000)
    async with slot:
        pass
    assert client.statistics().slots_in_use == 0


async def test_an_exception_in_the_block_frees_it_too(client: Client) -> None:
    with pytest.raises(ValueError, match="broken"):
        async with client.slot(5000):
            raise ValueError("broken")
    assert client.statistics().slots_in_use == 0


@pytest.mark.one_loop
async def test_a_slot_ends_with_its_block_whatever_still_holds_a_view(client: Client) -> None:
    """The frames of an exception that somebody keeps hold views, too: waiting for them could stand still for ever."""
    async with client.slot(900_000) as slot:
        kept = slot.tensor((900_000,), torch.uint8)
    assert client.statistics().slots_in_use == 0
    async with client.slot(900_000, timeout=5):
        assert kept.numel() == 900_000


async def test_a_slot_that_is_still_viewed_drains_and_is_not_lent_again(client: Client) -> None:
    """A decoder's thread that was cancelled may go on writing: what it writes must never show up in another's slot."""
    async with client.slot(5000, drain=True) as slot:
        late = slot.tensor((5000,), torch.uint8).reshape(50, 100)[3:]
    assert client.statistics().slots_draining == 1
    for value in range(50):
        async with client.slot(5000) as slot:
            view = slot.tensor((5000,), torch.uint8)
            view.fill_(value % 7)
            late.fill_(99)
            assert set(view.tolist()) == {value % 7}
            del view
    assert client.statistics().slots_draining == 1
    with uncollected():
        del late
        await eventually(lambda: client.statistics().slots_in_use == 0)


async def test_waiting_for_space_that_views_keep_is_logged(
    serve: Any, connect: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shmring.memory.slots._DRAIN_WARNING_S", 0.01)
    await serve()
    client = await connect()
    async with client.slot(900_000, drain=True) as slot:
        kept = slot.tensor((900_000,), torch.uint8)
    with caplog.at_level(logging.WARNING, "shmring.client"):
        waiting = asyncio.create_task(_slot(client, 900_000))
        await eventually(lambda: "kept by living views" in caplog.text)
    del kept
    await waiting


@pytest.mark.adjustable_clock
@pytest.mark.ring(handler=None)
async def test_who_waits_no_longer_for_space_that_views_keep_is_not_told(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    async with client.slot(900_000, drain=True) as slot:
        kept = slot.tensor((900_000,), torch.uint8)
    waiting = asyncio.create_task(_slot(client, 900_000))
    await pass_time(0.5)
    waiting.cancel()
    await pass_time(5)
    assert "kept by living views" not in caplog.text
    del kept


async def _slot(client: Client, nbytes: int) -> None:
    async with client.slot(nbytes, timeout=5):
        pass


# -- submitting in place ------------------------------------------------------------------------------------------------


async def test_tensors_of_a_slot_are_sent_without_a_copy(client: Client) -> None:
    async with client.slot(40_000) as slot:
        first, second = slot.tensor((10_000,), torch.uint8), slot.array((5000,), np.float32)
        first.fill_(2)
        second.fill(0.5)
        tail = first[5000:]
        answer = await client.request({"first": first, "second": torch.from_numpy(second), "tail": tail}, timeout=5)
        assert answer == {"first": 20_000, "second": 2500, "tail": 10_000}
        now = client.statistics()
        assert (now.copies, now.copied_nbytes, now.in_place) == (0, 0, 3)
        assert now.in_place_nbytes == 10_000 + 20_000 + 5000
        assert now.slot_nbytes_submitted == 40_000, "one slot, however many tensors of it"
        del first, second, tail


@pytest.mark.one_loop
async def test_what_is_not_contiguous_in_a_slot_is_copied_as_it_looks(client: Client) -> None:
    async with client.slot(20_000) as slot:
        view = slot.tensor((100, 200), torch.uint8)
        view.copy_(torch.arange(200, dtype=torch.uint8).expand(100, 200))
        answer = await client.request({"t": view.T, "column": view[:, 1], "whole": view}, timeout=5)
        assert answer == {"t": 100 * 19_900, "column": 100, "whole": 100 * 19_900}
        assert (client.statistics().copies, client.statistics().in_place) == (2, 1)
        del view


@pytest.mark.one_loop
async def test_a_payload_may_lie_in_several_slots_and_beside_them(client: Client) -> None:
    async with client.slot(5000) as first, client.slot(6000) as second:
        a, b = first.tensor((5000,), torch.uint8), second.tensor((6000,), torch.uint8)
        a.fill_(1)
        b.fill_(2)
        for beside in (torch.full((3000,), 3, dtype=torch.uint8), torch.full((30,), 3, dtype=torch.uint8)):
            answer = await client.request({"beside": beside, "b": b, "a": a}, timeout=5)
            assert answer == {"beside": 3 * beside.numel(), "b": 12_000, "a": 5000}
        assert client.statistics().in_place == 4
        del a, b


async def test_a_slot_can_be_submitted_again_and_again(client: Client) -> None:
    """Once the engine has released it, it is CACHED: its content is intact, and it goes again without a copy."""
    async with client.slot(10_000) as slot:
        view = slot.tensor((10_000,), torch.uint8)
        for value in range(5):
            view.fill_(value)
            assert await client.request({"x": view}, timeout=5) == {"x": 10_000 * value}
            await eventually(lambda: client.statistics().slots_cached == 1)
            assert "CACHED" in repr(slot)
        assert (client.statistics().copies, client.statistics().in_place) == (0, 5)
        del view
    assert client.statistics().slots_in_use == 0


@pytest.mark.ring(handler=None)
async def test_a_slot_that_the_engine_has_is_copied_for_a_second_request(ring: Ring, client: Client) -> None:
    async with client.slot(10_000) as slot:
        view = slot.tensor((10_000,), torch.uint8).fill_(4)
        first = await client.submit({"x": view})
        second = await client.submit({"x": view})
        assert (client.statistics().in_place, client.statistics().copies) == (1, 1)
        claims = [await ring.claim(), await ring.claim()]
        assert [int(claim.payload["x"].sum()) for claim in claims] == [40_000, 40_000]
        for claim in claims:
            await claim.reply("done")
            claim.done()
        assert [await first.result(), await second.result()] == ["done", "done"]
        del view


async def test_two_requests_with_one_slot_at_the_same_moment_are_both_answered(client: Client) -> None:
    async with client.slot(10_000) as slot:
        view = slot.tensor((10_000,), torch.uint8).fill_(1)
        answers = await asyncio.gather(*(client.request({"x": view, "y": torch.ones(2000)}, timeout=5) for _ in range(20)))
        assert answers == [{"x": 10_000, "y": 2000}] * 20
        assert client.statistics().in_place >= 1
        del view


async def test_a_slot_that_is_left_before_its_request_has_space_is_copied(client: Client) -> None:
    """The payload was packed as in place, and then its slot was closed while the rest of it waited for space."""
    blocker = await client.slot(900_000)
    slot = await client.slot(5000)
    view = slot.tensor((5000,), torch.uint8).fill_(3)
    request = asyncio.create_task(client.request({"x": view, "y": torch.ones(20_000)}, timeout=5))
    await eventually(lambda: client.statistics().waiting == 1)
    slot.close()
    blocker.close()
    assert await request == {"x": 15_000, "y": 20_000}
    assert client.statistics().in_place == 0


@pytest.mark.one_loop
async def test_a_view_of_a_slot_that_was_left_is_copied(client: Client) -> None:
    async with client.slot(5000) as slot:
        view = slot.tensor((5000,), torch.uint8).fill_(3)
    assert await client.request({"x": view}, timeout=5) == {"x": 15_000}
    assert (client.statistics().in_place, client.statistics().copies) == (0, 1)
    del view


@pytest.mark.one_loop
async def test_bytes_that_reach_beyond_a_slot_are_copied(client: Client) -> None:
    """A view made by other means over the slab may span two slots: it must not be described as lying in one."""
    async with client.slot(5000) as first, client.slot(5000) as second:
        a, b = first.tensor((5000,), torch.uint8).fill_(1), second.tensor((5000,), torch.uint8).fill_(2)
        low, high = sorted((a, b), key=lambda view: view.data_ptr())
        session = session_of(client)
        offset = session._slab.find(low.data_ptr())
        assert offset is not None
        span = high.data_ptr() + 5000 - low.data_ptr()
        across = torch.from_numpy(session._slab.bytes_at(offset, span))
        assert (await client.request({"x": across}, timeout=5))["x"] >= 15_000
        assert client.statistics().in_place == 0
        del a, b, low, high, across


@pytest.mark.ring(handler=None)
async def test_a_slot_may_be_left_while_its_request_is_under_way(ring: Ring, client: Client) -> None:
    async with client.slot(5000) as slot:
        submission = await client.submit({"x": slot.tensor((5000,), torch.uint8).fill_(6)})
    assert client.statistics().slots_submitted == 1
    claim = await ring.claim()
    with claim:
        assert int(claim.payload["x"].sum()) == 30_000
        await claim.reply("ok")
    assert await submission.result() == "ok"
    await eventually(lambda: client.statistics().slots_in_use == 0)


async def test_a_failed_request_keeps_no_view_alive(serve: Any, connect: Any) -> None:
    """The caller's frame holds a view, the error's traceback that frame: the error must not outlive its handling."""

    async def fail(claim: shmring.Claim) -> None:
        raise ValueError("broken")

    ring = await serve(fail)
    client = await connect()

    async def attempt(kind: str) -> None:
        async with client.slot(5000) as slot:
            view = slot.tensor((5000,), torch.uint8)
            payload = {"x": view, "bad": object()} if kind == "type" else {"x": view}
            if kind == "abort":
                asyncio.get_running_loop().call_soon(lambda: client.abort("mine"))
            await client.request(payload, timeout=5, request_id="mine")

    with uncollected():
        for kind, error in [
            ("remote", shmring.RemoteError),
            ("type", TypeError),
            ("abort", (shmring.AbortedError, shmring.RemoteError)),
        ]:
            with pytest.raises(error):
                await attempt(kind)
            await eventually(lambda: client.statistics().slots_in_use == 0)
        await eventually(lambda: ring.statistics().slots_in_use == 0)


@pytest.mark.ring(handler=None)
async def test_a_payload_that_waits_keeps_its_own_list_of_slots(client: Client) -> None:
    """What was packed may wait for its turn while others pack."""
    end = session_of(client).end
    first = end.pack("in no slot")
    async with client.slot(30_000) as slot:
        second = end.pack(slot.tensor((30_000,), torch.uint8))
        assert (len(first.slots), len(second.slots)) == (0, 1)


@pytest.mark.parametrize("change", ["it is left", "another request has it"])
@pytest.mark.ring(handler=None)
async def test_a_slot_that_changed_hands_since_its_payload_was_packed_is_not_sent(
    ring: Ring, client: Client, change: str
) -> None:
    """What was packed waits for its turn, for space or for a copy; who sends it then looks at its slots again."""
    end = session_of(client).end
    async with client.slot(30_000) as slot:
        view = slot.tensor((30_000,), torch.uint8).fill_(1)
        packed = end.pack({"x": view})
        if change == "it is left":
            slot.close()
        else:
            await client.submit({"x": view})
        before = client.statistics()
        assert end.send(packed, None, None) is None
        assert not end.found_full
        assert client.statistics() == before, "nothing was sent, and no slot changed its state"
        del view


@pytest.mark.ring(handler=None)
async def test_an_end_whose_session_has_ended_holds_no_slot(client: Client) -> None:
    """Its leases are the engine's again, and the slab is not mapped any more."""
    end = session_of(client).end
    client_slot = end.hold_now(1000, False)
    assert client_slot is not None
    client_slot.close()
    await client.close()
    assert end.hold_now(1000, False) is None


@pytest.mark.ring(handler=None)
@pytest.mark.client(lease_idle_s=600)
async def test_a_session_that_has_ended_has_no_timer_of_its_leases(client: Client) -> None:
    async with client.slot(300_000):  # a lease beside the first
        pass
    timer = session_of(client).host_slots._expiry
    assert not timer.cancelled()
    await client.close()
    assert timer.cancelled()


@pytest.mark.ring(handler=None)
async def test_a_lease_that_is_returned_leaves_another_one_writable_that_lies_in_it(ring: Ring, connect: Any) -> None:
    """It lies there where a slot was kept by the engine, and has been dropped since."""
    session = session_of(await connect(map_leased_only=True))
    start = Geometry.LEASABLE_START * BLOCK_NBYTES + 512 * 1024

    def writable() -> list[bool]:
        lines = [line.split(maxsplit=2)[:2] for line in Path("/proc/self/maps").read_text().splitlines()]
        addresses = [session._slab.mapping.address + start + block * BLOCK_NBYTES for block in range(4)]
        ranges = [(*(int(end, 16) for end in range_.split("-")), kind) for range_, kind in lines]
        return ["w" in kind for address in addresses for first, last, kind in ranges if first <= address < last]

    slots = session.host_slots
    assert writable() == [False] * 4
    slots._lease_came(LeaseGrant(0, 1001, start, 4 * BLOCK_NBYTES))
    slots._lease_came(LeaseGrant(0, 1002, start + BLOCK_NBYTES, 2 * BLOCK_NBYTES))
    slots._leases_left({1001})
    assert writable() == [False, True, True, False]
    slots._leases_left({1002})
    assert writable() == [False] * 4
