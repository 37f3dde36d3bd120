"""Claims: one end each, views that keep their slot, replies with back pressure, aborts at every moment."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import warnings
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import torch

import shmring
from shmring import Claim, Client, Ring, Submission
from shmring.core.compiled import RECORDS_IN_TURN
from shmring.core.messages import Abort
from tests.claiming import claimed
from tests.garbage import uncollected
from tests.sessions import session_of
from tests.waiting import cancel, eventually, hold, turns

pytestmark = [
    pytest.mark.both_loops,
    pytest.mark.filterwarnings("error::ResourceWarning"),
    pytest.mark.ring(reply_nbytes="64KiB"),
]


def tensor(nbytes: int, value: int = 1) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


@pytest.fixture
async def submission(client: Client) -> Submission:
    return await client.submit("x")


@pytest.fixture
async def claim(ring: Ring, submission: Submission) -> AsyncIterator[Claim]:
    """Of the submission ``x``; it ends with the test."""
    claim = await ring.claim()
    yield claim
    claim.done()


# -- its end ------------------------------------------------------------------------------------------------------------


async def test_leaving_the_block_finishes_the_request(ring: Ring, client: Client) -> None:
    submission, claim = await claimed(ring, client, {"x": tensor(5000)})
    assert (claim.nbytes, claim.aborted, claim.released) == (5000, False, False)
    assert "running" in repr(claim)
    with claim:
        await claim.reply("one")
        await claim.reply("two")
    assert claim.released
    assert "ended" in repr(claim)
    assert await submission.next() == "one"
    assert await submission.next() == "two"
    with pytest.raises(StopAsyncIteration):
        await submission.next()
    with pytest.raises(StopAsyncIteration):
        await submission.next()


async def test_an_exception_fails_the_request_and_goes_on(ring: Ring, client: Client) -> None:
    submission, claim = await claimed(ring, client, {"x": tensor(5000)})
    with pytest.raises(ValueError, match="broken"), claim:
        raise ValueError("broken")
    for _ in range(2):
        with pytest.raises(shmring.RemoteError) as caught:
            await submission.next()
        assert (caught.value.type_name, caught.value.message) == ("ValueError", "broken")


@pytest.mark.one_loop
async def test_only_the_first_end_counts(ring: Ring, client: Client) -> None:
    submission, claim = await claimed(ring, client, {"x": tensor(5000)})
    await claim.reply("answer")
    claim.done()
    claim.done()
    claim.fail(ValueError("late"))
    with claim:
        pass
    assert await submission.result() == "answer"
    assert (ring.statistics().finished, ring.statistics().failed) == (1, 0)


async def test_an_ended_claim_answers_no_more(claim: Claim) -> None:
    claim.done()
    with pytest.raises(shmring.LocalProtocolError, match="has ended"):
        await claim.reply("late")
    with pytest.raises(shmring.LocalProtocolError, match="has ended"):
        claim.reply_nowait("late")


@pytest.mark.parametrize("nbytes", [0, 20_000], ids=["inline", "in a slot"])
async def test_a_reply_that_is_still_on_its_way_when_the_claim_is_left_harms_nobody(
    submission: Submission, claim: Claim, ring: Ring, client: Client, nbytes: int
) -> None:
    """A handler that forgets to await: the frontend must not see a reply after the end, nor lose its connection."""
    other, _ = await claimed(ring, client, "y")
    ring._shell._copier.offload_nbytes = 1
    replying = [asyncio.create_task(claim.reply({"x": tensor(nbytes)})) for _ in range(3)]
    with claim:
        await asyncio.sleep(0)
    results = await asyncio.gather(*replying, return_exceptions=True)
    assert all(result is None or isinstance(result, shmring.LocalProtocolError) for result in results)
    with contextlib.suppress(StopAsyncIteration):
        while True:
            await submission.next()
    assert not other.ended
    assert client.connected
    other.abort()


@pytest.mark.parametrize("then", ["the client goes", "the engine closes"])
async def test_a_reply_that_waits_for_space_when_the_claim_ends_does_not_wait_any_longer(
    ring: Ring, client: Client, then: str
) -> None:
    submission = await client.submit("x")
    claim = await ring.claim()
    await claim.reply({"x": tensor(25_000)})
    kept = await submission.next()  # or closing would give its slot to the one that waits
    late = asyncio.create_task(claim.reply({"x": tensor(50_000)}))
    await eventually(lambda: ring.statistics().replies_waiting == 1)
    claim.done()
    if then == "the client goes":
        await client.close()
    else:
        await ring.close()
    with pytest.raises(shmring.LocalProtocolError, match="has ended"):
        await asyncio.wait_for(late, 1)
    assert ring.statistics().replies_waiting == 0
    del kept


# -- its payload --------------------------------------------------------------------------------------------------------


@pytest.mark.one_loop
async def test_its_tensors_are_views_into_the_slab(ring: Ring, client: Client) -> None:
    _, claim = await claimed(ring, client, {"t": torch.arange(5000), "a": np.arange(3000), "small": 1})
    with claim:
        slab = ring._shell._slab
        assert slab.find(claim.payload["t"].data_ptr()) is not None
        assert slab.find(claim.payload["a"].ctypes.data) is not None
        with pytest.raises(ValueError, match="read-only"):
            claim.payload["a"][0] = 1
    with pytest.raises(shmring.LocalProtocolError, match="was released"):
        _ = claim.payload


async def test_releasing_early_gives_the_memory_back_while_the_request_goes_on(ring: Ring, client: Client) -> None:
    submission, claim = await claimed(ring, client, {"x": tensor(5000, 7)})
    with claim:
        total = int(claim.payload["x"].sum())
        claim.release()
        claim.release()
        await eventually(lambda: client.statistics().slots_in_use == 0)
        assert ring.statistics().slots_in_use == 0
        await claim.reply(total)
    assert await submission.result() == 35_000


async def test_a_view_keeps_its_slot_after_the_claim_and_its_bytes_stay(ring: Ring, client: Client) -> None:
    """Poison: later requests write other patterns over and over; the old view must never show one of them."""
    submission, claim = await claimed(ring, client, {"x": tensor(50_000, 1), "y": tensor(50_000, 2)})
    with claim:
        kept = claim.payload["x"][100:200].reshape(10, 10).T
    await asyncio.wait_for(_end_of(submission), 5)
    assert ring.statistics().slots_draining == 1
    for value in range(3, 60):
        _, other = await claimed(ring, client, {"x": tensor(100_000, value)})
        other.done()
    assert set(kept.reshape(-1).tolist()) == {1}
    assert ring.statistics().slots_draining == 1
    del kept
    await eventually(lambda: ring.statistics().slots_draining == 0)
    await eventually(lambda: client.statistics().slots_in_use == 0)


async def test_without_views_later_requests_do_reuse_the_memory(ring: Ring, client: Client) -> None:
    """The other half of the poison test: it would see a reuse if there was one."""
    addresses = set()
    for value in range(5):
        submission, claim = await claimed(ring, client, {"x": tensor(50_000, value)})
        with claim:
            addresses.add(claim.payload["x"].data_ptr())
        await _end_of(submission)
        await eventually(lambda: client.statistics().slots_in_use == 0)
    assert len(addresses) < 5


async def test_a_draining_slot_comes_back_without_the_collector(ring: Ring, client: Client) -> None:
    with uncollected():
        for _ in range(5):
            submission, claim = await claimed(ring, client, {"x": tensor(5000), "list": [tensor(3000)]})
            with contextlib.suppress(ValueError), claim:
                first, second = claim.payload["x"], claim.payload["list"][0]
                raise ValueError("with views in this frame")
            del first, second, claim
            with pytest.raises(shmring.RemoteError):
                await submission.result()
        await eventually(lambda: ring.statistics().slots_in_use == 0)


class Cycle:
    """Something that only the collector can find."""

    def __init__(self, view: torch.Tensor) -> None:
        self.view = view
        self.itself = self


def failure(view: torch.Tensor) -> ValueError:
    """An error whose traceback has a frame with a view."""
    try:
        raise ValueError(f"a view of {view.numel()} bytes")
    except ValueError as error:
        return error


def _collect_what_others_have_frozen() -> None:
    """After each test, what is alive is frozen; what of that was left since would be reported here, where it is collected."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.unfreeze()
        gc.collect()


@pytest.mark.first_row_on_both_loops
@pytest.mark.parametrize("keep", [Cycle, failure])
@pytest.mark.parametrize("frozen", [False, True], ids=["collected", "frozen"])
async def test_a_view_that_something_hides_keeps_its_slot_until_that_is_gone(
    ring: Ring, client: Client, keep: Callable[[torch.Tensor], Any], frozen: bool
) -> None:
    """In a reference cycle or in a traceback; what was frozen meanwhile is looked through by nobody, so it goes on waiting."""
    thaws = frozen and keep is Cycle  # which walks through all that was ever imported: some tenths of a second
    if thaws:
        _collect_what_others_have_frozen()
    submission, claim = await claimed(ring, client, {"x": tensor(50_000, 1)})
    with uncollected():
        with claim:
            hidden: Any = keep(claim.payload["x"])
        await asyncio.wait_for(_end_of(submission), 5)
        if frozen:
            gc.freeze()
        view = hidden.view if isinstance(hidden, Cycle) else hidden.__traceback__.tb_frame.f_locals["view"]
        for value in range(2, 20):
            _, other = await claimed(ring, client, {"x": tensor(60_000, value)})
            other.done()
        assert set(view.tolist()) == {1}
        del hidden, view
        gc.collect()
        if thaws:
            assert ring.statistics().slots_draining == 1
            gc.unfreeze()
            gc.collect()
        await eventually(lambda: ring.statistics().slots_draining == 0)
        await eventually(lambda: client.statistics().slots_in_use == 0)


async def _end_of(submission: Submission) -> None:
    with contextlib.suppress(StopAsyncIteration):
        while True:
            await submission.next()


# -- replies ------------------------------------------------------------------------------------------------------------


async def test_replies_carry_tensors_inline_and_in_slots(
    submission: Submission, claim: Claim, ring: Ring, client: Client
) -> None:
    with claim:
        await claim.reply({"small": torch.arange(10), "large": None})
        large = torch.arange(4000, dtype=torch.int32)
        await claim.reply({"small": torch.arange(10), "large": large, "bf": torch.ones(9).bfloat16()})
    first, second = await submission.next(), await submission.next()
    assert first["small"].tolist() == second["small"].tolist() == list(range(10))
    assert second["large"].tolist() == list(range(4000))
    assert second["bf"].dtype == torch.bfloat16
    slab = session_of(client)._slab
    assert slab.find(second["large"].data_ptr()) is not None, "in place"
    assert slab.find(first["small"].data_ptr()) is None
    assert client.statistics().reply_slots_held == 1
    assert ring.statistics().reply_free_nbytes < ring.statistics().reply_nbytes
    del second
    await eventually(lambda: ring.statistics().reply_free_nbytes == ring.statistics().reply_nbytes)
    assert client.statistics().reply_slots_held == 0


@pytest.mark.one_loop
async def test_a_reply_may_send_the_payloads_own_views(ring: Ring, client: Client) -> None:
    submission, claim = await claimed(ring, client, {"x": tensor(5000, 9)})
    with claim:
        await claim.reply({"x": claim.payload["x"][::2]})
    answer = await submission.result()
    assert set(answer["x"].tolist()) == {9}
    assert len(answer["x"]) == 2500


async def test_a_reply_that_cannot_be_sent_is_an_error_and_holds_nothing(
    submission: Submission, claim: Claim, ring: Ring
) -> None:
    with claim:
        with pytest.raises(TypeError, match=r"^payload\.items\[1\]\.mask can't be sent"):
            await claim.reply({"items": [tensor(5000), {"mask": object()}]})
        with pytest.raises(shmring.CapacityError, match="reply_nbytes"):
            await claim.reply({"x": tensor(70_000)})
        with pytest.raises(shmring.CapacityError, match="max_payload_nbytes"):
            await claim.reply("x" * (17 << 20))
        with pytest.raises(shmring.CapacityError):
            claim.reply_nowait({"x": tensor(70_000)})
        assert ring.statistics().reply_free_nbytes == ring.statistics().reply_nbytes
        await claim.reply("fine")
    assert await submission.result() == "fine"


async def test_replies_wait_for_space_in_order(submission: Submission, claim: Claim, ring: Ring) -> None:
    sent: list[int] = []

    async def reply(number: int) -> None:
        await claim.reply({"n": number, "x": tensor(30_000, number)})
        sent.append(number)

    replying = [asyncio.create_task(reply(number)) for number in range(6)]
    await eventually(lambda: ring.statistics().replies_waiting == 3)
    assert sent == [0, 1, 2], "one stays in its slot, and two are copied out of it"
    with pytest.raises(shmring.WouldBlock):
        claim.reply_nowait({"x": tensor(2000)})
    for number in range(6):
        answer = await submission.next()
        assert answer["n"] == number
        assert set(answer["x"].tolist()) == {number}
        del answer
    await asyncio.gather(*replying)
    assert sent == list(range(6))


@pytest.mark.one_loop
async def test_a_view_of_a_reply_is_never_overwritten(submission: Submission, claim: Claim) -> None:
    await claim.reply({"x": tensor(20_000, 1)})
    kept = (await submission.next())["x"][5:10]
    for value in range(2, 30):
        await claim.reply({"x": tensor(20_000, value)})
        assert set((await submission.next())["x"].tolist()) == {value}
    assert kept.tolist() == [1] * 5


@pytest.mark.parametrize("moment", ["queued", "granted"])
async def test_cancelling_a_reply_that_waits_for_space_passes_its_turn_on(
    submission: Submission, claim: Claim, ring: Ring, moment: str
) -> None:
    for _ in range(2):  # which are copied out
        await claim.reply({"x": tensor(60_000)})
    first, second = (asyncio.create_task(claim.reply({"n": n, "x": tensor(60_000)})) for n in (1, 2))
    await eventually(lambda: ring.statistics().replies_waiting == 2)
    if moment == "queued":
        first.cancel()
        await asyncio.sleep(0)
        assert ring.statistics().replies_waiting == 1
    del (await submission.next())["x"]
    if moment == "granted":
        while ring.statistics().replies_waiting == 2:
            await asyncio.sleep(0)
        first.cancel()
    del (await submission.next())["x"]
    with contextlib.suppress(asyncio.CancelledError):
        await first
        answer = await submission.next()
        assert answer["n"] == 1
        del answer
    answer = await asyncio.wait_for(submission.next(), 5)
    assert answer["n"] == 2
    await second
    del answer


async def test_space_that_comes_to_a_reply_that_was_cancelled_just_now_is_free(
    submission: Submission, claim: Claim, ring: Ring
) -> None:
    for _ in range(2):  # which are copied out
        await claim.reply({"x": tensor(60_000)})
    waiting = asyncio.create_task(claim.reply({"x": tensor(60_000)}))
    await turns()
    link = next(iter(ring._shell._frontends.values())).link
    read_on = hold(link)
    await submission.next()  # then another one may come, which the engine does not hear
    await turns()
    assert not waiting.done()
    waiting.cancel()
    read_on()
    link.poll()
    await asyncio.wait([waiting])
    now = ring.statistics()
    assert now.reply_free_nbytes == now.reply_nbytes


async def test_who_replies_without_waiting_gives_the_loop_a_turn_now_and_then(ring: Ring, client: Client) -> None:
    submission = await client.submit("x")
    with await ring.claim() as claim:
        others: list[int] = []
        asyncio.get_running_loop().call_soon(others.append, 1)
        sent = 0
        while not others:
            assert sent < 200
            sent += 1
            await claim.reply(sent)
        assert sent > 1
    await submission.wait()


async def test_a_reply_that_could_not_be_sent_at_once_gives_its_space_back(
    submission: Submission, claim: Claim, ring: Ring, client: Client
) -> None:
    read_on = hold(session_of(client).link)
    for text in ("x" * 900, ""):  # until there is no room for the shortest, either
        with contextlib.suppress(shmring.WouldBlock):
            while True:
                claim.reply_nowait(text)
    with pytest.raises(shmring.WouldBlock, match="slowly"):
        claim.reply_nowait({"x": tensor(5000)})
    now = ring.statistics()
    assert now.reply_free_nbytes == now.reply_nbytes
    submission.abort()
    read_on()
    await turns()


async def test_a_frontend_that_reads_slowly_is_waited_for(ring: Ring, client: Client) -> None:
    submission = await client.submit("x")
    claim = await ring.claim()
    read_on = hold(session_of(client).link)
    sent = 0

    async def reply_for_ever() -> None:
        nonlocal sent
        while sent < 200:
            await claim.reply("x" * 10_000)
            sent += 1

    replying = asyncio.create_task(reply_for_ever())
    seen = -1
    while seen != sent:  # until it stands still
        seen = sent
        await turns()
    assert sent < 200
    with pytest.raises(shmring.WouldBlock, match="slowly"):
        claim.reply_nowait("x")
    assert ring.statistics().protocol_errors == 0
    read_on()
    for _ in range(200):
        assert await asyncio.wait_for(submission.next(), 5) == "x" * 10_000
    await replying
    claim.done()
    assert ring.statistics().clients == 1


async def test_large_replies_of_many_claims_at_once_do_not_end_the_connection(
    serve: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is within the limits; together they must wait, not count as a frontend that does not read."""

    async def reply(claim: Claim) -> None:
        await claim.reply("x" * 50_000)

    ring = await serve(reply)
    monkeypatch.setattr("shmring.ring.frontend._OTHER_UNREAD_NBYTES", 128 << 10)
    monkeypatch.setattr("shmring.ring.frontend._FAILED_NBYTES", 0)
    client = await connect()
    answers = await asyncio.gather(*(client.request(number, timeout=20) for number in range(50)))
    assert all(answer == "x" * 50_000 for answer in answers)
    assert ring.statistics().protocol_errors == 0


# -- aborts -------------------------------------------------------------------------------------------------------------


async def test_an_abort_before_the_claim_takes_the_request_away(ring: Ring, client: Client) -> None:
    submission = await client.submit({"x": tensor(5000)})
    submission.abort()
    submission.abort()
    with pytest.raises(shmring.AbortedError):
        await submission.result()
    await eventually(lambda: ring.statistics().aborted == 1)
    with pytest.raises(shmring.WouldBlock):
        ring.claim_nowait()
    await eventually(lambda: client.statistics().slots_in_use == 0)


async def test_aborts_in_a_line_of_waiting_requests_leave_the_others_in_order(ring: Ring, client: Client) -> None:
    """In every order: who leaves the line has somebody on both sides, on one, or on none, who has left before or not."""
    for aborted in itertools.permutations(range(4)):
        submissions = [await client.submit(number) for number in range(5)]
        await eventually(lambda: ring.statistics().waiting == 5)
        left = [submission.request_id for submission in submissions]
        for number in aborted:
            submissions[number].abort()
            left.remove(submissions[number].request_id)
            await eventually(lambda left=left: ring.statistics().waiting == len(left))
            assert [request_id for _, request_id in ring._shell.end.waiting] == left
        with await ring.claim() as claim:
            assert claim.payload == 4


async def test_an_abort_after_the_claim_marks_it_and_its_slot_waits_for_its_end(ring: Ring, client: Client) -> None:
    submission, claim = await claimed(ring, client, {"x": tensor(5000, 5)})
    called: list[int] = []
    claim.on_abort(lambda: called.append(1))
    submission.abort()
    await eventually(lambda: claim.aborted)
    await eventually(lambda: called == [1])
    claim.on_abort(lambda: called.append(2))
    assert called == [1, 2], "at once, as it is aborted already"
    assert "aborted" in repr(claim)
    assert int(claim.payload["x"].sum()) == 25_000, "somebody may be reading it"
    assert ring.statistics().slots_claimed == 1
    assert client.statistics().slots_submitted == 1
    with pytest.raises(shmring.AbortedError, check=lambda error: error.request_id == claim.request_id):
        await claim.reply("late")
    with pytest.raises(shmring.AbortedError):
        claim.reply_nowait("late")
    claim.done()
    await eventually(lambda: client.statistics().slots_in_use == 0)
    assert (ring.statistics().aborted, ring.statistics().finished) == (1, 0)


async def test_the_block_swallows_its_own_abort_and_nothing_else(
    submission: Submission, claim: Claim, ring: Ring, client: Client
) -> None:
    submission.abort()
    await eventually(lambda: claim.aborted)
    with claim:
        await claim.reply("late")
        pytest.fail("the reply should have raised")
    other_submission, other = await claimed(ring, client, "y")
    with pytest.raises(shmring.AbortedError), other:
        raise shmring.AbortedError("another's", request_id=claim.request_id)
    with pytest.raises(shmring.RemoteError):
        await other_submission.result()


async def test_an_abort_wakes_a_reply_that_waits_for_space_and_keeps_nothing(ring: Ring, client: Client) -> None:
    """Its error must not keep the views of the frames it went through: there is no collector here."""
    with uncollected():
        keeper, keeping = await claimed(ring, client, "x")
        await keeping.reply({"x": tensor(25_000)})
        kept = await keeper.next()
        submission, claim = await claimed(ring, client, {"x": tensor(5000)})

        async def handle(claim: Claim) -> None:
            with claim:
                view = claim.payload["x"]
                await claim.reply({"x": tensor(50_000), "y": view})

        handling = asyncio.create_task(handle(claim))
        await eventually(lambda: ring.statistics().replies_waiting == 1)
        submission.abort()
        await handling
        del handling, claim
        await eventually(lambda: ring.statistics().slots_in_use == 0)
        assert ring.statistics().replies_waiting == 0
        del kept
        keeping.done()


async def test_many_waits_of_one_claim_leave_nothing_behind(
    submission: Submission, claim: Claim, ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(20):
        await claim.reply({"x": tensor(60_000)})
        waiting = asyncio.create_task(claim.reply({"x": tensor(60_000)}))
        await asyncio.sleep(0)
        for _ in range(2):
            answer = await submission.next()
            del answer
        await waiting
    called: list[Any] = []
    monkeypatch.setattr(ring._shell, "call_soon", called.extend)
    ring._shell.end.mark_ended(claim)
    assert called == [], "what is to be called when it ends"
    claim.release()
    submission.abort()


@pytest.mark.parametrize("copied_on_a_thread", [False, True])
async def test_an_abort_at_any_moment_of_a_reply_leaks_nothing(ring: Ring, client: Client, copied_on_a_thread: bool) -> None:
    ring._shell._copier.offload_nbytes = 0 if copied_on_a_thread else 1 << 30
    end: Callable[[Submission], None]
    for steps in range(12):
        for end in (lambda submission: submission.abort(), lambda submission: None):
            submission, claim = await claimed(ring, client, {"x": tensor(5000)})
            replying = asyncio.create_task(claim.reply({"x": tensor(30_000)}))
            end(submission)
            await turns(steps)
            await cancel(replying)
            claim.done()
            submission.abort()
    await eventually(lambda: ring.statistics().slots_in_use == 0)
    await eventually(lambda: ring.statistics().reply_free_nbytes == ring.statistics().reply_nbytes)


async def test_a_frontend_that_goes_aborts_its_claims(ring: Ring, client: Client) -> None:
    await client.submit({"x": tensor(5000)})
    await client.submit({"x": tensor(5000)})
    claim = await ring.claim()
    await client.close()
    await eventually(lambda: claim.aborted)
    assert ring.statistics().waiting == 0
    assert ring.statistics().free_nbytes < ring.statistics().leasable_nbytes, "the claim may still be reading"
    with claim, pytest.raises(shmring.AbortedError):
        await claim.reply("late")


async def test_who_answers_after_the_ring_was_closed_is_told_so(ring: Ring, client: Client) -> None:
    _, claim = await claimed(ring, client, {"x": tensor(5000)})
    await ring.close()
    with claim, pytest.raises(shmring.AbortedError, match="aborted by the end of its ring"):
        await claim.reply("late")


@pytest.mark.ring(busy_poll_s=0.1)
async def test_looking_for_requests_takes_in_no_more_than_a_turn_does(ring: Ring, client: Client) -> None:
    submissions = [await client.submit("first")]
    (await ring.claim()).done()
    submissions += [await client.submit(number) for number in range(3 * RECORDS_IN_TURN)]
    ring.claim_nowait().done()
    assert ring.statistics().waiting < RECORDS_IN_TURN
    for _ in submissions[2:]:
        (await ring.claim()).done()
    for submission in submissions:
        with pytest.raises(StopAsyncIteration):
            await submission.next()


async def test_each_slot_of_a_claim_drains_for_its_own_views(ring: Ring, client: Client) -> None:
    slots = await client.slots([5000, 5000])
    _, claim = await claimed(
        ring, client, [slot.tensor((5000,), torch.uint8).fill_(number) for number, slot in enumerate(slots)]
    )
    with claim:
        first, second = claim.payload
        del first
    for slot in slots:
        slot.close()
    assert ring.statistics().slots_draining == 1
    assert second.eq(1).all()
    del second
    await eventually(lambda: not ring.statistics().slots_in_use)


async def test_who_hears_replies_before_its_turn_rings_for_the_room_that_it_makes(
    submission: Submission, claim: Claim, ring: Ring, client: Client
) -> None:
    link = session_of(client).link
    go_on = hold(link)
    replying = [asyncio.create_task(claim.reply(bytes(10_000))) for _ in range(100)]
    await turns()
    assert not all(task.done() for task in replying), "the ring is full"
    go_on()
    bells = link.reader.bells
    await submission.next()
    assert link.reader.bells == bells + 1
    for _ in range(99):
        await submission.next()
    claim.done()
    await asyncio.gather(*replying)


@pytest.mark.ring(reply_nbytes="256KiB")
async def test_a_reply_without_tensors_that_lies_in_a_slot_gives_it_back_when_it_was_read(
    submission: Submission, claim: Claim, ring: Ring
) -> None:
    with claim:
        await claim.reply(bytes(100_000))
        assert ring.statistics().reply_free_nbytes < ring.statistics().reply_nbytes
        assert await submission.next() == bytes(100_000)
        await eventually(lambda: ring.statistics().reply_free_nbytes == ring.statistics().reply_nbytes)


async def test_what_has_come_is_there_without_a_turn_of_the_loop(submission: Submission, claim: Claim) -> None:
    for number in range(3):
        claim.reply_nowait(number)
        with pytest.raises(StopIteration) as there:
            submission.next().send(None)
        assert there.value.value == number


async def test_a_request_that_has_come_is_there_without_a_turn_of_the_loop(ring: Ring, client: Client) -> None:
    """Also where the link to its frontend sleeps."""
    [frontend] = ring._shell._frontends.values()
    await eventually(lambda: not frontend.link.awake)
    client.submit_nowait("x")
    with pytest.raises(StopIteration) as there:
        ring.claim().send(None)
    with there.value.value as claim:
        assert claim.payload == "x"


async def test_who_sends_at_once_does_not_overtake_what_waits_for_room(ring: Ring, client: Client) -> None:
    session = session_of(client)
    while session.link.can_write:
        session.link.send(Abort(1))  # a request that there is not
    [frontend] = ring._shell._frontends.values()
    for _ in range(100):
        frontend.link.poll()
    submitting = client.submit("y")
    submitting.send(None)  # it waits, else it would be over
    submitting.close()
    await turns()
    client.submit_nowait("x")
    with await ring.claim() as claim:
        assert claim.payload == "x"


async def test_five_slots_in_one_request(ring: Ring, client: Client) -> None:
    slots = await client.slots([5000] * 5)
    views = [slot.tensor((5000,), torch.uint8).fill_(number) for number, slot in enumerate(slots)]
    submission, claim = await claimed(ring, client, views)
    with claim:
        assert [int(view[0]) for view in claim.payload] == [0, 1, 2, 3, 4]
        await claim.reply("seen")
    assert await submission.result() == "seen"
    del views
    for slot in slots:
        slot.close()


@pytest.mark.one_loop
async def test_a_reply_that_is_copied_out_stays_what_it_was(submission: Submission, claim: Claim, client: Client) -> None:
    """Where reply space is short its slot goes back at once, and the next reply is written there."""
    with claim:
        replies = []
        for number in range(3):
            await claim.reply({"x": tensor(50_000, number)})
            replies.append(await submission.next())
    assert client.statistics().reply_copies > 0
    for number, reply in enumerate(replies):
        assert reply["x"].eq(number).all()
