"""What is dropped instead of being left comes back, with a warning."""

from __future__ import annotations

import asyncio
import gc
import threading
import tracemalloc
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import shmring
from shmring import Client, Ring
from shmring.client.session import Session
from shmring.core.dropped import give_back_soon
from tests.claiming import claimed
from tests.sessions import session_of
from tests.waiting import eventually


@pytest.fixture
def warned() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        yield caught


async def what_was_dropped_came_back() -> None:
    """Waits until what was dropped later than anything before this call has come back."""
    came_back = asyncio.Event()
    give_back_soon(asyncio.get_running_loop(), came_back.set)
    await came_back.wait()


async def test_a_slot_that_is_dropped_comes_back(client: Client, dropped: Any) -> None:
    with dropped("a slot of 65536 bytes was dropped before it was left"):
        await client.slot(65536)
        gc.collect()
        await eventually(lambda: client.statistics().slots_in_use == 0)


@pytest.mark.ring(slab_nbytes="1MiB")
async def test_a_slot_that_is_dropped_is_kept_as_long_as_it_is_viewed(client: Client, dropped: Any) -> None:
    with dropped("a slot of .* was dropped"):
        view = (await client.slot(600_000)).tensor((600_000,), torch.uint8)
        gc.collect()
        await eventually(lambda: client.statistics().slots_draining == 1)
    view.fill_(7)
    with pytest.raises(shmring.WouldBlock):
        client.slot_nowait(600_000)
    del view
    await eventually(lambda: client.statistics().slots_in_use == 0)


async def test_a_slot_that_another_thread_drops_comes_back(client: Client, dropped: Any) -> None:
    slots = [await client.slot(65536)]
    with dropped("a slot of .* was dropped"):
        dropping = threading.Thread(target=slots.clear)
        dropping.start()
        dropping.join()
        await eventually(lambda: client.statistics().slots_in_use == 0)


async def test_a_claim_that_is_dropped_fails_its_request(ring: Ring, client: Client, dropped: Any) -> None:
    submission = await client.submit({"x": torch.zeros(20_000)})
    with dropped("request 1 was dropped before its claim was left"):
        assert (await ring.claim()).payload["x"].numel() == 20_000
        gc.collect()
        with pytest.raises(shmring.RemoteError, match="dropped the request without an answer"):
            await submission.result()
    await eventually(lambda: ring.statistics().slots_in_use == ring.statistics().running == 0)


async def test_a_claim_that_was_aborted_and_is_dropped_gives_its_slots_back(ring: Ring, client: Client, dropped: Any) -> None:
    submission, claim = await claimed(ring, client, {"x": torch.zeros(20_000)})
    submission.abort()
    await eventually(lambda: ring.statistics().aborted == 1)
    assert claim.aborted
    with dropped("request 1 was dropped"):
        del claim
        gc.collect()
        await eventually(lambda: ring.statistics().slots_in_use == 0)
    assert ring.statistics().failed == 0


async def test_replies_that_nobody_reads_come_back(serve: Any, connect: Any, dropped: Any) -> None:
    async def answer(claim: shmring.Claim) -> None:
        await claim.reply(torch.zeros(5_000))

    ring = await serve(answer)
    client = await connect()
    with dropped("request 1 was dropped with unread replies"):
        await client.submit("x")
        await eventually(lambda: client.statistics().finished == 1)
        gc.collect()
        await eventually(lambda: ring.statistics().reply_free_nbytes == ring.statistics().reply_nbytes)


@pytest.mark.parametrize(
    ("handled", "text"),
    [
        ("reply in the message", "request 1 was dropped with unread replies"),
        ("reply in a slot", "request 1 was dropped with unread replies"),
        ("fail", r"request 1 was dropped, and nobody saw how it failed \(RemoteError: KeyError: 'a model'\); wait for it"),
    ],
)
async def test_a_request_that_is_dropped_says_what_was_missed(
    handled: str, text: str, ring: Ring, client: Client, dropped: Any
) -> None:
    with dropped(text):
        await client.submit("x")
        with await ring.claim() as claim:
            if handled == "fail":
                claim.fail(KeyError("a model"))
            else:
                await claim.done(torch.zeros(5_000 if handled == "reply in a slot" else 5))
        await eventually(lambda: client.statistics().in_flight == 0)
        await what_was_dropped_came_back()
    await eventually(lambda: ring.statistics().reply_free_nbytes == ring.statistics().reply_nbytes)


async def test_a_request_that_was_sent_for_what_the_engine_does_goes_on_without_a_word(
    serve: Any, connect: Any, warned: list[warnings.WarningMessage]
) -> None:
    done: list[str] = []
    ring, client = await serve(), await connect()
    await client.submit("x")
    gc.collect()
    with await ring.claim() as claim:
        done.append(claim.payload)
    await eventually(lambda: client.statistics().finished == 1)
    await what_was_dropped_came_back()
    assert done == ["x"]
    assert warned == []


@pytest.mark.parametrize("left", ["result", "next", "wait", "stream", "abort"])
async def test_a_request_whose_end_was_seen_warns_of_nothing(
    left: str, serve: Any, connect: Any, warned: list[warnings.WarningMessage]
) -> None:
    async def fail(claim: shmring.Claim) -> None:
        raise KeyError("a model")

    ring = await serve(fail)
    client = await connect()
    if left == "stream":
        with pytest.raises(shmring.RemoteError):
            async for _ in client.stream("x"):
                pass
    else:
        submission = await client.submit("x")
        if left == "abort":
            submission.abort()
        else:
            with pytest.raises(shmring.RemoteError):
                await getattr(submission, left)()
        del submission
    await eventually(lambda: client.statistics().in_flight == 0)
    gc.collect()
    await what_was_dropped_came_back()
    assert warned == []
    assert ring.statistics().running == 0


@pytest.mark.parametrize("when", ["sent", "replied to"])
async def test_a_request_that_is_dropped_in_flight_ends(when: str, serve: Any, connect: Any, dropped: Any) -> None:
    """Its replies would keep the reserve, for which the engine waits before it can end the request."""

    async def answer(claim: shmring.Claim) -> None:
        for _ in range(10):
            await claim.reply(torch.zeros(30_000))

    ring = await serve(answer, reply_nbytes="256KiB")
    client = await connect()
    with dropped("request 1 was dropped with unread replies"):
        submission = await client.submit("x")
        if when == "replied to":
            await eventually(lambda: ring.statistics().replies_waiting)
        del submission
        gc.collect()
        replies = [reply async for reply in client.stream("y", timeout=10)]
        await eventually(lambda: client.statistics().aborted == 1)
    assert len(replies) == 10
    await eventually(lambda: ring.statistics().running == 0)


async def test_a_request_that_is_read_late_is_not_taken_for_dropped(
    serve: Any, connect: Any, warned: list[warnings.WarningMessage], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(claim: shmring.Claim) -> None:
        await claim.reply(torch.ones(30_000))
        await released.wait()

    looked, released = asyncio.Event(), asyncio.Event()
    original = Session._give_dropped_back

    def give_dropped_back(session: Session) -> None:
        original(session)
        looked.set()

    monkeypatch.setattr(Session, "_give_dropped_back", give_dropped_back)
    await serve(answer, reply_nbytes="512KiB")
    client = await connect()
    late, unread = await client.submit("x"), await client.submit("y")
    for _ in range(2):  # it is looked after again as long as there are any
        looked.clear()
        await asyncio.wait_for(looked.wait(), 10)
    assert (await late.next()).sum() == 30_000
    assert "and 1 replies were not read, which keep their space" in session_of(client).why_no_reply()
    unread.abort()
    released.set()
    with pytest.raises(StopAsyncIteration):
        await late.next()
    assert warned == []


async def test_the_warning_says_where_it_was_made(client: Client) -> None:
    tracemalloc.start()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            await client.slot(65536)
            gc.collect()
            await eventually(lambda: client.statistics().slots_in_use == 0)
        [warning] = caught
        assert __file__ in warnings._formatwarnmsg(warning)
    finally:
        tracemalloc.stop()


async def test_a_finaliser_that_leaves_what_was_dropped_with_it_is_in_time(
    serve: Any, connect: Any, warned: list[warnings.WarningMessage]
) -> None:
    """In a cycle, the collector may run the claim's own finaliser first."""

    class Holder:
        def __init__(self, claim: shmring.Claim) -> None:
            self.claim = claim
            self.me = self

        def __del__(self) -> None:
            self.claim.done()

    ring, client = await serve(), await connect()
    submission = await client.submit({"x": torch.zeros(20_000)})
    Holder(await ring.claim())
    gc.collect()
    with pytest.raises(StopAsyncIteration):
        await submission.next()
    await what_was_dropped_came_back()
    assert warned == []
    assert ring.statistics().slots_in_use == 0


async def test_what_is_left_properly_warns_of_nothing(serve: Any, connect: Any, warned: list[warnings.WarningMessage]) -> None:
    async def answer(claim: shmring.Claim) -> None:
        await claim.reply(claim.payload)

    ring = await serve(answer)
    client = await connect()
    for _ in range(3):
        async with client.slot(30_000) as slot:
            tensor = slot.tensor((30_000,), torch.uint8)
            await client.request(tensor, timeout=5)
        client.slot_nowait(64).close()
    submission = await client.submit(torch.zeros(5_000))
    submission.abort()
    del submission
    kept = await client.submit(torch.zeros(5_000))
    await client.close()
    await ring.close()
    del kept
    gc.collect()
    await what_was_dropped_came_back()
    assert warned == []
