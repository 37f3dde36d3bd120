"""A frontend's end: requests, streams, aborts, timeouts, replies in place, and how each of them ends."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import shmring
from shmring import Client, Ring
from shmring.request_options import ForEngine
from tests.claiming import claimed
from tests.garbage import uncollected
from tests.sessions import session_of
from tests.tables import for_each
from tests.waiting import cancel, eventually, hold, settled, turns


def tensor(nbytes: int, value: int = 1) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


async def handle(claim: shmring.Claim) -> None:
    """Does what the payload's ``do`` says."""
    payload = claim.payload
    do = payload["do"]
    if do == "echo":
        await claim.reply(payload)
    elif do == "count":
        for number in range(payload["to"]):
            await claim.reply({"n": number, "x": tensor(payload.get("nbytes", 0), number % 251)})
    elif do == "hang":
        del payload
        await asyncio.Event().wait()
    elif do == "fail":
        raise ValueError("as told")
    elif do == "fail after one":
        await claim.reply("one")
        raise ValueError("as told")


pytestmark = [pytest.mark.both_loops, pytest.mark.filterwarnings("error::ResourceWarning"), pytest.mark.ring(handler=handle)]


# -- requests -----------------------------------------------------------------------------------------------------------


async def test_a_payload_goes_there_and_back(client: Client) -> None:
    payload = {
        "do": "echo", "text": "ä", "n": [1, None, 2.5, b"x"], "t": torch.arange(5000), "a": np.arange(6, dtype=">i2"),
        "h": torch.ones(3000).bfloat16(), "e": torch.empty(0, 3), "s": torch.tensor(7.5),
    }  # fmt: skip
    answer = await client.request(payload, timeout=5)
    assert answer.keys() == payload.keys()
    for key in ("text", "n"):
        assert answer[key] == payload[key]
    for key in ("t", "h", "e", "s"):
        assert torch.equal(answer[key], payload[key])
        assert answer[key].dtype == payload[key].dtype
    assert answer["a"].dtype.str == ">i2"
    assert answer["a"].tolist() == list(range(6))


@pytest.mark.one_loop
async def test_small_payloads_travel_in_the_message_and_large_ones_in_one_slot(client: Client) -> None:
    await client.request({"do": "echo", "x": tensor(1000)}, timeout=5)
    now = client.statistics()
    assert (now.inline_payloads, now.slot_nbytes_submitted, now.copies, now.copied_nbytes) == (1, 0, 1, 1000)
    await client.request({"do": "echo", "x": tensor(1000), "y": tensor(1000)}, timeout=5)
    now = client.statistics()
    assert (now.inline_payloads, now.slot_nbytes_submitted, now.copies, now.copied_nbytes) == (1, 2024, 3, 3000)
    [connection] = client.engines.values()
    assert connection.copies == 3


@pytest.mark.one_loop
async def test_a_view_of_a_large_tensor_costs_what_it_shows(client: Client) -> None:
    base = torch.zeros(100 << 20, dtype=torch.uint8)
    await client.request({"do": "echo", "x": base[1 << 20 : (1 << 20) + 2048]}, timeout=5)
    assert client.statistics().slot_nbytes_submitted == 2048


@pytest.mark.one_loop
async def test_what_cannot_be_sent_names_its_path_and_holds_nothing(client: Client) -> None:
    bad = {"do": "echo", "items": [1, 2, tensor(50_000), {"mask": object()}]}
    for attempt in (client.request(bad), client.submit(bad), _first(client.stream(bad))):
        with pytest.raises(TypeError, match=r"^payload\.items\[3\]\.mask can't be sent"):
            await attempt
    with pytest.raises(TypeError, match="payload"):
        client.submit_nowait(bad)
    now = client.statistics()
    assert (now.submitted, now.slots_in_use, now.in_flight) == (0, 0, 0)


async def _first(stream: Any) -> Any:
    return await anext(stream)


@pytest.mark.one_loop
async def test_what_can_never_fit_is_an_error_at_once(client: Client, ring: Ring) -> None:
    for payload, capacity in [
        ({"do": "echo", "x": tensor(1 << 20)}, ring.statistics().leasable_nbytes),
        ({"do": "echo", "x": "x" * (17 << 20)}, 16 << 20),
        ({"do": "echo", "x": [tensor(0)] * 5000}, 4096),
    ]:
        with pytest.raises(shmring.CapacityError) as caught:
            await client.request(payload, timeout=5)
        assert caught.value.needed > caught.value.capacity
        assert caught.value.capacity <= capacity
        with pytest.raises(shmring.CapacityError):
            client.submit_nowait(payload)
    for ask in (client.slot, client.slot_nowait, client.check_capacity, lambda nbytes: client.slots([1, nbytes])):
        for nbytes in (1 << 30, 1 << 64, 1 << 200):
            with pytest.raises(shmring.CapacityError) as caught:
                await ask(nbytes)
            assert caught.value.needed >= nbytes
    assert client.statistics().slots_in_use == 0


@pytest.mark.one_loop
async def test_capacity_is_what_a_slot_can_have_and_checking_it_takes_nothing(client: Client, ring: Ring) -> None:
    with pytest.raises(shmring.CapacityError) as caught:
        client.check_capacity(1 << 30)
    capacity = caught.value.capacity
    client.check_capacity(capacity)
    assert client.statistics().slots_in_use == 0
    async with client.slot(capacity, timeout=5):
        client.check_capacity(capacity)  # it does not say that there is room now
    with pytest.raises(shmring.CapacityError):
        client.check_capacity(capacity + 1)
    with pytest.raises(ValueError, match="-1"):
        client.check_capacity(-1)
    await client.close()
    with pytest.raises(shmring.ClosedError):
        client.check_capacity(1)


@pytest.mark.one_loop
@pytest.mark.parametrize("name", ["\U0001f600" * 256, "x" * 256])
@pytest.mark.ring(message_ring_nbytes="32KiB")
async def test_a_message_just_within_the_limit_is_sent_whatever_its_name(client: Client, name: str) -> None:
    in_messages = 0
    for length in range(4000, 8300, 37):
        slots_nbytes = client.statistics().slot_nbytes_submitted
        await client.request({"do": "count", "to": 1, "x": "x" * length}, timeout=5, request_id=name)
        in_messages += client.statistics().slot_nbytes_submitted == slots_nbytes
    assert 50 < in_messages < 110, "short ones in the message, long ones in a slot"
    assert client.statistics().slots_in_use == client.statistics().in_flight == 0


@pytest.mark.one_loop
async def test_names_are_checked_before_anything_is_sent(client: Client) -> None:
    for name, text in [("x" * 257, "256 characters"), ("\ud800", "surrogates")]:
        with pytest.raises(ValueError, match=text):
            await client.request(1, request_id=name)
        for attempt in (client.submit, client.submit_nowait):
            with pytest.raises(ValueError, match=text):
                attempt(1, request_id=name)
    assert client.statistics().submitted == 0


async def test_an_error_of_the_engine_arrives_with_its_type_and_text(client: Client) -> None:
    with pytest.raises(shmring.RemoteError) as caught:
        await client.request({"do": "fail"}, timeout=5)
    assert (caught.value.type_name, caught.value.message) == ("ValueError", "as told")
    with pytest.raises(shmring.RemoteError, match="as told"):
        await client.request({"do": "fail after one"}, timeout=5)


async def test_many_requests_are_in_flight_at_once(client: Client) -> None:
    async def echo(number: int) -> None:
        nbytes = (0, 100, 3000, 20_000)[number % 4]
        answer = await client.request({"do": "echo", "n": number, "x": tensor(nbytes, number % 251)}, timeout=20)
        assert answer["n"] == number
        assert answer["x"].tolist() == [number % 251] * nbytes

    await asyncio.gather(*(echo(number) for number in range(300)))


@pytest.mark.ring(handler=None, max_inflight=4)
async def test_more_than_max_inflight_wait_for_their_turn(ring: Ring, client: Client) -> None:
    requests = [asyncio.create_task(client.request(number)) for number in range(20)]
    await eventually(lambda: ring.statistics().waiting == 4)
    with pytest.raises(shmring.WouldBlock, match="max_inflight"):
        client.submit_nowait("x")

    async def echo(claim: shmring.Claim) -> None:
        await claim.reply(claim.payload)

    running = asyncio.create_task(ring.run(echo))
    assert await asyncio.gather(*requests) == list(range(20)), "in order"
    assert ring.statistics().protocol_errors == 0
    await ring.close()
    await running


async def test_who_waits_for_space_leaves_its_turn_to_others(serve: Any, connect: Any) -> None:
    """One of them may have the space that it waits for."""
    ring = await serve(name="narrow", slab_nbytes="256KiB", max_inflight=1)

    async def echo(claim: shmring.Claim) -> None:
        await claim.reply(claim.payload["n"])

    running = asyncio.create_task(ring.run(echo))
    client = await connect("narrow")
    whole_nbytes = ring.statistics().leasable_nbytes - 64  # what the largest of all slots can hold
    async with client.slot(4000) as slot:
        x = slot.tensor((1000,), torch.float32)
        waiting = [asyncio.create_task(client.request({"n": n, "x": tensor(whole_nbytes, n)}, timeout=20)) for n in range(3)]
        await asyncio.sleep(0)
        assert await client.request({"n": 9, "x": x}, timeout=5) == 9
        del x
    assert await asyncio.gather(*waiting) == [0, 1, 2]
    assert ring.statistics().protocol_errors == 0
    await ring.close()
    await running


@pytest.mark.ring(handler=None, slab_nbytes="256KiB", max_inflight=1)
async def test_who_is_cancelled_when_it_has_space_and_waits_for_its_turn_gives_it_back(ring: Ring, client: Client) -> None:
    whole_nbytes = ring.statistics().leasable_nbytes - 64
    async with client.slot(whole_nbytes):
        waiting = asyncio.create_task(client.submit({"x": tensor(whole_nbytes, 1)}))
        await asyncio.sleep(0)
        client.submit_nowait("the only one that may be in flight")
    await asyncio.sleep(0)
    with pytest.raises(shmring.WouldBlock):
        client.slot_nowait(whole_nbytes)  # it has all the space
    assert await cancel(waiting)
    async with client.slot(whole_nbytes, timeout=5):
        pass
    second = asyncio.create_task(client.submit("next"))
    claim = await ring.claim()
    claim.done()
    await second
    assert client.statistics().in_flight == 1


@pytest.mark.ring(handler=None, slab_nbytes="256KiB", max_inflight=1)
async def test_who_has_space_has_the_next_turn(ring: Ring, client: Client) -> None:
    whole_nbytes = ring.statistics().leasable_nbytes - 64
    async with client.slot(whole_nbytes):
        waiting = [asyncio.create_task(client.submit({"n": 1, "x": tensor(whole_nbytes, 1)}))]
        await asyncio.sleep(0)  # it leaves its turn to others
        client.submit_nowait({"n": 0})
        waiting.append(asyncio.create_task(client.submit({"n": 2})))
        await asyncio.sleep(0)
    await turns()
    for n in range(3):
        with await ring.claim() as claim:
            assert claim.payload["n"] == n
    await asyncio.gather(*waiting)


@pytest.mark.ring(handler=None, max_inflight=1)
async def test_a_turn_that_came_as_its_request_was_cancelled_goes_to_the_next(ring: Ring, client: Client) -> None:
    client.submit_nowait(0)
    waiting = [asyncio.create_task(client.submit(n)) for n in (1, 2)]
    await turns()
    (await ring.claim()).done()
    session_of(client).link.poll()  # hears of the end, and gives the turn to the first
    waiting[0].cancel()
    await asyncio.wait(waiting, timeout=30)
    assert [task.cancelled() for task in waiting] == [True, False]
    with await ring.claim() as claim:
        assert claim.payload == 2
    await turns()
    assert session_of(client).end.in_flight == 0


@pytest.mark.parametrize("by_a_thread", [False, True])
@pytest.mark.ring(handler=None)
@pytest.mark.client(lease_nbytes="512KiB", copy_offload_nbytes=20_000)
async def test_who_is_cancelled_in_its_turn_is_not_in_flight(client: Client, by_a_thread: bool) -> None:
    session = session_of(client)
    if by_a_thread:
        sending: Any = session.sending.submit_unless_full({"x": tensor(100_000, 1)}, ForEngine(), ask=True)
    else:
        sending = session.sending.submit_in_turn({"x": tensor(100_000, 1)}, ForEngine())
    copying = asyncio.create_task(sending)
    await asyncio.sleep(0)
    assert session.end.in_flight == 1
    assert await cancel(copying)
    assert session.end.in_flight == 0


@pytest.mark.ring(handler=None)
async def test_what_the_engine_is_too_slow_for_is_not_in_flight(ring: Ring, client: Client) -> None:
    end = session_of(client).end
    read_on = hold(next(iter(ring._shell._frontends.values())).link)
    sent = []
    with contextlib.suppress(shmring.WouldBlock):
        while True:
            sent.append(client.submit_nowait(bytes(1000)))
    for _ in range(3):
        with pytest.raises(shmring.WouldBlock, match="reads more slowly"):
            client.submit_nowait(bytes(1000))
        assert end.in_flight == len(sent)
    read_on()
    for submission in sent:
        submission.abort()


# -- typed replies ------------------------------------------------------------------------------------------------------


class Answer(msgspec.Struct):
    n: int
    x: torch.Tensor


async def test_replies_are_decoded_into_a_type(client: Client) -> None:
    answer = await client.request({"do": "count", "to": 1, "nbytes": 5000}, reply_type=Answer, timeout=5)
    assert isinstance(answer, Answer)
    assert answer.x.numel() == 5000
    async for part in client.stream({"do": "count", "to": 3, "nbytes": 5000}, reply_type=Answer, timeout=5):
        assert isinstance(part, Answer)
    del part, answer
    # Nothing that the engine raised.
    with pytest.raises(
        shmring.RemoteError, match="not of reply_type", check=lambda error: error.type_name == "UnexpectedReply"
    ):
        await client.request({"do": "count", "to": 1, "nbytes": 5000}, reply_type=list[int], timeout=5)
    await eventually(lambda: client.statistics().reply_slots_held == 0)


@pytest.mark.ring(slab_nbytes="4MiB", reply_nbytes="1MiB")
async def test_a_caller_that_keeps_its_replies_does_not_wait_for_itself(ring: Ring, client: Client) -> None:
    """Views of replies hold half of the reserve at most; what comes then is copied out of it, and counted."""
    question = {"do": "count", "to": 1, "nbytes": 200_000}
    replies = await asyncio.gather(*(client.request(question, timeout=20) for _ in range(20)))
    assert [reply["n"] for reply in replies] == [0] * 20
    assert all(bool((reply["x"] == reply["x"][0]).all()) for reply in replies)
    now = client.statistics()
    assert 1 <= now.reply_slots_held <= 2, "as many as fit half of it"
    assert now.reply_copies == 20 - now.reply_slots_held
    assert now.reply_copied_nbytes >= now.reply_copies * 200_000
    del replies
    await eventually(lambda: ring.statistics().reply_free_nbytes == ring.statistics().reply_nbytes)


@pytest.mark.ring(reply_nbytes=8192)
async def test_replies_of_the_wrong_type_give_their_space_back(ring: Ring, client: Client) -> None:
    for _ in range(5):
        with pytest.raises(shmring.RemoteError):
            await client.request({"do": "count", "to": 1, "nbytes": 8000}, reply_type=int, timeout=5)
        with pytest.raises(shmring.RemoteError):
            await client.request({"do": "count", "to": 1, "nbytes": 8000}, reply_type=dict[str, int], timeout=5)
    await eventually(lambda: ring.statistics().reply_free_nbytes == 8192)


# -- streams ------------------------------------------------------------------------------------------------------------


async def test_a_stream_yields_every_reply_in_order_and_a_request_has_one(client: Client) -> None:
    numbers = [part["n"] async for part in client.stream({"do": "count", "to": 100, "nbytes": 2000}, timeout=10)]
    assert numbers == list(range(100))
    with pytest.raises(shmring.LocalProtocolError, match="use stream"):
        await client.request({"do": "count", "to": 2}, timeout=5)


ENDLESS = {"do": "count", "to": 10**9, "nbytes": 2000}


async def leave_by_break(client: Client) -> None:
    async for part in client.stream(ENDLESS):
        if part["n"] == 5:
            break


async def leave_by_error(client: Client) -> None:
    async for part in client.stream(ENDLESS):
        if part["n"] == 5:
            raise ValueError("enough")


async def leave_by_cancellation(client: Client) -> None:
    async for part in client.stream(ENDLESS):
        if part["n"] == 5:
            asyncio.current_task().cancel()


async def leave_by_aclose(client: Client) -> None:
    stream = client.stream(ENDLESS)
    await anext(stream)
    await stream.aclose()
    await asyncio.Event().wait()


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_error, leave_by_cancellation, leave_by_aclose])
async def test_leaving_a_stream_early_aborts_it(client: Client, ring: Ring, leave: Any) -> None:
    leaving = asyncio.create_task(leave(client))
    await eventually(lambda: ring.statistics().aborted == 1)
    await eventually(lambda: ring.statistics().running == 0)
    assert client.statistics().aborted == 1
    await cancel(leaving)


async def test_a_part_that_the_caller_drops_goes_back_before_the_next_is_asked_for(client: Client) -> None:
    async for part in client.stream({"do": "count", "to": 1, "nbytes": 5000}, timeout=5):
        assert client.statistics().reply_slots_held == 1
        del part
        await eventually(lambda: client.statistics().reply_slots_held == 0)


async def test_a_streams_timeout_bounds_the_waiting(client: Client, ring: Ring) -> None:
    with pytest.raises(TimeoutError):
        async for _ in client.stream({"do": "hang"}, timeout=0.05):
            pass
    await eventually(lambda: ring.statistics().aborted == 1)


@for_each("count", [10, 11])
async def test_as_many_replies_as_may_be_are_kept_unread(client: Client, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr("shmring.core.compiled.MAX_UNREAD_REPLIES", 10)
    submission = await client.submit({"do": "count", "to": count})
    await eventually(lambda: submission.ended)
    if count == 10:
        assert [(await submission.next())["n"] for _ in range(10)] == list(range(10))
    else:
        with pytest.raises(shmring.CapacityError, match="unread replies"):
            await submission.next()


# -- the slab's pages ----------------------------------------------------------------------------------------------------


def resident_kib(address: int) -> int:
    match = re.search(rf"^0*{address:x}-.*?^Rss: +([0-9]+) kB", Path("/proc/self/smaps").read_text(), re.MULTILINE | re.DOTALL)
    assert match is not None
    return int(match[1])


async def test_wait_prefaulted_ends_when_every_page_is_mapped(serve: Any, connect: Any) -> None:
    await serve(handle, name="pages", slab_nbytes="96MiB")
    client, without = await connect("pages"), await connect("pages", prefault=False)
    await client.wait_prefaulted(timeout=30)
    await without.wait_prefaulted(timeout=30)
    resident = [resident_kib(session_of(client)._slab.address + start) for start, _ in session_of(client)._slab.parts]
    assert resident == [90 << 10, 6 << 10]
    assert resident_kib(session_of(without)._slab.address) < 1024


async def test_wait_prefaulted_says_when_the_engine_has_gone_meanwhile(
    serve: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped = threading.Event()
    monkeypatch.setattr("shmring.memory.slab.Slab.prefault", lambda *_: mapped.wait(10))
    ring = await serve(handle, name="pages", prefault=False)
    client = await connect("pages")
    with pytest.raises(TimeoutError):
        await client.wait_prefaulted(timeout=0.02)
    waiting = asyncio.create_task(client.wait_prefaulted())
    await asyncio.sleep(0)
    await ring.close()
    await eventually(lambda: not client.connected)
    mapped.set()
    with pytest.raises(shmring.EngineDeadError):
        await waiting


# -- submissions --------------------------------------------------------------------------------------------------------


async def test_submit_hands_over_and_returns(client: Client) -> None:
    submission = await client.submit({"do": "echo", "x": tensor(5000)}, request_id="mine")
    assert (submission.name, submission.ended) == ("mine", False)
    assert submission.request_id >= 1
    assert (await submission.result())["x"].numel() == 5000
    assert submission.ended


@pytest.mark.parametrize(("nbytes", "copies"), [(100_000, 20), (1 << 20, 12), (4 << 20, 3), (6 << 20, 2)])
@pytest.mark.ring(slab_nbytes="256MiB")
@pytest.mark.client(lease_nbytes="48MiB")
async def test_after_12_mib_of_large_copies_the_loop_has_a_turn_before_the_next(
    client: Client, nbytes: int, copies: int
) -> None:
    payload = {"do": "count", "to": 0, "x": torch.ones(nbytes, dtype=torch.uint8)}
    turned: list[bool] = []
    asyncio.get_running_loop().call_soon(turned.append, True)
    submissions = [await client.submit(payload) for _ in range(copies)]
    assert not turned, "there was a turn"
    submissions.append(await client.submit(payload))
    assert bool(turned) is (nbytes >= 1 << 20)
    await asyncio.sleep(0)
    turned.clear()
    asyncio.get_running_loop().call_soon(turned.append, True)
    submissions.append(await client.submit(payload))
    assert not turned, "there was a turn"
    assert client.statistics().leases == 1, "nobody waited for a lease"
    for submission in submissions:
        with pytest.raises(StopAsyncIteration):
            await submission.next()


@pytest.mark.ring(slab_nbytes="128MiB")
@pytest.mark.client(lease_nbytes="64MiB", copy_offload_nbytes="2MiB")
async def test_many_large_requests_at_a_time_are_sent_in_the_order_in_which_they_were_made(client: Client) -> None:
    payload = {"do": "count", "to": 0, "x": torch.ones(1 << 20, dtype=torch.uint8)}
    made, sent = itertools.count(), []

    async def ask_again_and_again() -> None:
        for _ in range(6):
            number = next(made)
            submission = await client.submit(payload)
            sent.append(number)
            with pytest.raises(StopAsyncIteration):
                await submission.next()

    await asyncio.gather(*[ask_again_and_again() for _ in range(20)])
    late = max(place - number for place, number in enumerate(sent))
    assert late <= 2, f"{late} later ones were sent before it"


@pytest.mark.ring(handler=None, slab_nbytes="256KiB")
async def test_submit_nowait_copies_in_the_loop_or_would_block(ring: Ring, client: Client) -> None:
    first = client.submit_nowait({"x": tensor(20_000)})
    small = client.submit_nowait({"x": tensor(500)})
    with pytest.raises(shmring.WouldBlock):
        _ = [client.submit_nowait({"x": tensor(50_000)}) for _ in range(20)]
    assert client.statistics().waiting == 0
    (await ring.claim()).done()
    (await ring.claim()).done()
    with pytest.raises(StopAsyncIteration):
        await first.next()
    with pytest.raises(StopAsyncIteration):
        await small.next()


class WatchedArray(np.ndarray[Any, Any]):
    """An array that calls ``before_copy`` when it is copied; strided, so that numpy copies it."""

    before_copy: Callable[[], object]

    def __array_function__(self, *arguments: Any) -> Any:
        self.before_copy()
        return super().__array_function__(*arguments)

    @classmethod
    def of(cls, nbytes: int, before_copy: Callable[[], object]) -> WatchedArray:
        array = np.zeros((nbytes, 2), np.uint8)[:, 0].view(cls)
        array.before_copy = before_copy
        return array


async def test_a_copy_that_fails_gives_its_slot_back(client: Client) -> None:
    def fail() -> None:
        raise RuntimeError("the device is gone")

    for nbytes in (5000, 500):
        payload = {"do": "echo", "x": tensor(nbytes), "y": WatchedArray.of(nbytes, fail)}
        with pytest.raises(RuntimeError, match="device"):
            await client.request(payload, timeout=5)
        with pytest.raises(RuntimeError, match="device"):
            client.submit_nowait(payload)
        assert client.statistics().slots_in_use == client.statistics().in_flight == 0
    await client.request({"do": "echo", "x": tensor(5000)}, timeout=5)


async def test_two_tasks_cannot_wait_for_one_submission(client: Client) -> None:
    submission = await client.submit({"do": "hang"})
    first = asyncio.create_task(submission.next())
    await asyncio.sleep(0)
    with pytest.raises(shmring.LocalProtocolError, match="two tasks"):
        await submission.next()
    submission.abort()
    with pytest.raises(shmring.AbortedError):
        await first


@pytest.mark.one_loop
async def test_an_error_is_a_new_one_each_time(client: Client) -> None:
    submission = await client.submit({"do": "fail"})
    errors = []
    for _ in range(2):
        with pytest.raises(shmring.RemoteError) as caught:
            await submission.next()
        errors.append(caught.value)
    assert errors[0] is not errors[1]
    assert vars(errors[0]) == vars(errors[1])
    assert str(errors[0]) == str(errors[1]) == "ValueError: as told"


# -- aborts and timeouts ------------------------------------------------------------------------------------------------


async def test_abort_by_name(client: Client, ring: Ring) -> None:
    requests = {name: asyncio.create_task(client.request({"do": "hang", "x": tensor(5000)}, request_id=name)) for name in "abc"}
    await eventually(lambda: ring.statistics().running == 3)
    assert client.abort("unknown") == 0
    assert client.abort("a") == 1
    assert client.abort(["a", "b", "unknown"]) == 1
    for name in "ab":
        with pytest.raises(shmring.AbortedError) as caught:
            await requests[name]
        assert caught.value.request_id == name
    await eventually(lambda: ring.statistics().running == 1)
    assert not requests["c"].done()
    assert client.abort("c") == 1
    with pytest.raises(shmring.AbortedError):
        await requests["c"]


async def test_an_abort_by_name_reaches_a_request_that_still_waits_for_space(client: Client) -> None:
    async with client.slot(900_000):
        waiting = asyncio.create_task(client.request({"do": "echo", "x": tensor(500_000)}, request_id="early"))
        await eventually(lambda: client.statistics().waiting == 1)
        assert client.abort("early") == 1
        with pytest.raises(shmring.AbortedError):
            await waiting
        assert client.statistics().waiting == 0


@pytest.mark.parametrize("state", ["waiting for space", "waiting to be claimed", "running"])
async def test_a_request_that_takes_too_long_is_aborted(serve: Any, connect: Any, state: str) -> None:
    ring = await serve(handle if state == "running" else None, name="narrow")
    client = await connect("narrow")
    blocker = await client.slot(900_000) if state == "waiting for space" else None
    with pytest.raises(TimeoutError, match=r"longer than the 0\.05 s"):
        await client.request({"do": "hang", "x": tensor(200_000)}, timeout=0.05)
    if blocker is not None:
        assert client.statistics().submitted == 0
        blocker.close()
    await eventually(lambda: ring.statistics().waiting == ring.statistics().running == 0)
    await eventually(lambda: client.statistics().slots_in_use == 0)
    await client.close()
    await settled(ring)


async def test_a_slot_that_takes_too_long_is_not_waited_for(client: Client) -> None:
    async with client.slot(900_000):
        with pytest.raises(TimeoutError, match=r"0\.02 s"):
            await client.slot(500_000, timeout=0.02)
        assert client.statistics().waiting == 0
    async with client.slot(500_000, timeout=5):
        pass


# -- replies in place ---------------------------------------------------------------------------------------------------


async def test_reply_slots_go_back_with_their_last_view(client: Client, ring: Ring) -> None:
    with uncollected():
        answer = await client.request({"do": "echo", "x": tensor(5000), "y": tensor(3000)}, timeout=5)
        kept = answer["y"][10:20].view(2, 5)
        del answer
        assert client.statistics().reply_slots_held == 1
        before = ring.statistics().reply_free_nbytes
        del kept
        await eventually(lambda: ring.statistics().reply_free_nbytes > before)
        assert client.statistics().reply_slots_held == 0


async def test_a_reply_that_nobody_takes_gives_its_space_back(client: Client, ring: Ring) -> None:
    submission = await client.submit({"do": "count", "to": 5, "nbytes": 5000})
    await eventually(lambda: submission.ended)
    assert client.statistics().replies == 5
    submission.abort()
    await eventually(lambda: ring.statistics().reply_free_nbytes == ring.statistics().reply_nbytes)


@pytest.mark.ring(handler=None)
async def test_a_reply_that_comes_after_its_abort_gives_its_space_back(ring: Ring, client: Client) -> None:
    submission, claim = await claimed(ring, client, "x")
    claim.reply_nowait({"x": tensor(5000)})
    submission.abort()
    await eventually(lambda: claim.aborted)
    await eventually(lambda: ring.statistics().reply_free_nbytes == ring.statistics().reply_nbytes)
    assert client.statistics().replies == 1
    assert client.statistics().reply_slots_held == 0


# -- the end ------------------------------------------------------------------------------------------------------------


async def test_a_closed_client_says_so(ring: Ring, client: Client, refuses_everything: Any) -> None:
    pending = [
        asyncio.create_task(client.request({"do": "hang"})),
        asyncio.create_task(_first(client.stream({"do": "hang"}))),
        asyncio.create_task(client.call("missing")),
        asyncio.create_task(_slot(client, 900_000)),
        asyncio.create_task(_slot(client, 900_000)),
    ]
    await eventually(lambda: ring.statistics().running == 2 and client.statistics().waiting == 1)
    pending[2].cancel()
    await client.close()
    await client.close()
    assert not client.connected
    for task in (*pending[:2], *pending[4:]):
        with pytest.raises(shmring.ClosedError):
            await task
    await refuses_everything(client, shmring.ClosedError)
    assert client.abort("x") == 0
    assert client.statistics().leases == 0
    await cancel(*pending)


async def _slot(client: Client, nbytes: int) -> None:
    async with client.slot(nbytes):
        await asyncio.Event().wait()


async def test_what_is_still_used_when_a_client_closes_stays_its_own(ring: Ring, client: Client, connect: Any) -> None:
    """This process lives on and may write to what it holds: only what is given up in so many words can be reused."""
    answer = await client.request({"do": "echo", "x": tensor(5000, 4)}, timeout=5)
    slot = await client.slot(5000)
    view = slot.tensor((5000,), torch.uint8)
    await client.close()
    await eventually(lambda: ring.statistics().clients == 0)
    now = ring.statistics()
    assert now.quarantined_nbytes > 0
    assert now.reply_free_nbytes < now.reply_nbytes
    other = await connect()
    for value in range(5, 30):
        await other.request({"do": "echo", "x": tensor(20_000, value)}, timeout=5)
        view.fill_(99)
    assert set(answer["x"].tolist()) == {4}
    slot.close()


async def test_a_goodbye_counts_though_the_engine_had_more_to_say(serve: Any, connect: Any) -> None:
    """The client has gone, the engine has not read why, and can't write to it any more: this process lives on."""
    go_on = asyncio.Event()

    async def handle(claim: shmring.Claim) -> None:
        await go_on.wait()

    ring = await serve(handle)
    client = await connect()
    await client.submit({"x": tensor(100_000)})
    await eventually(lambda: ring.statistics().running == 1)
    read_on = hold(next(iter(ring._shell._frontends.values())).link)
    await client.close()
    read_on()
    go_on.set()
    await settled(ring)


@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.client(copy_offload_nbytes=20_000)
async def test_what_is_being_copied_when_a_client_closes_goes_back_when_that_is_over(
    ring: Ring, client: Client, cancelled: bool
) -> None:
    """Also if nobody waits for that."""
    session, go_on = session_of(client), threading.Event()
    slow = WatchedArray.of(100_000, lambda: go_on.wait(5))
    request = asyncio.create_task(client.request({"do": "echo", "x": slow}))
    await eventually(lambda: client.statistics().slots_writing == 1)
    closing = asyncio.create_task(client.close())
    await turns()
    assert not closing.done()
    if cancelled:
        assert await cancel(closing)
        assert not client.connected
    go_on.set()
    with pytest.raises(shmring.ClosedError):
        await request
    if not cancelled:
        await closing
    assert not session.sending.copies


@pytest.mark.ring(message_ring_nbytes="128KiB")
async def test_what_was_copied_when_a_client_closes_goes_back_though_the_engine_reads_slowly(
    ring: Ring, client: Client
) -> None:
    read_on = hold(next(iter(ring._shell._frontends.values())).link)
    requests = [asyncio.create_task(client.request({"do": "hang", "t": "x" * 30_000})) for _ in range(40)]
    await eventually(lambda: not session_of(client).link.can_write)
    requests.append(asyncio.create_task(client.request({"do": "hang", "x": tensor(50_000)})))
    await eventually(lambda: client.statistics().slots_writing == 1)
    closing = asyncio.create_task(client.close())
    await turns()
    read_on()
    await closing
    results = await asyncio.gather(*requests, return_exceptions=True)
    assert all(isinstance(result, shmring.ClosedError) for result in results)


async def test_a_slot_that_is_granted_as_a_client_closes_goes_back(
    ring: Ring, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocker = await client.slot(900_000)
    waiting = asyncio.create_task(_slot(client, 100_000))
    await eventually(lambda: client.statistics().waiting == 1)
    session = session_of(client)
    granted = session.host_slots.granted
    closing: list[asyncio.Task[None]] = []

    def close_and_add_lease(grant: Any) -> None:
        closing.append(asyncio.create_task(client.close()))
        granted(grant)

    monkeypatch.setattr(session.host_slots, "granted", close_and_add_lease)
    blocker.close()
    with pytest.raises(shmring.ClosedError):
        await asyncio.wait_for(waiting, 5)
    await asyncio.gather(*closing)


@pytest.mark.one_loop
async def test_a_tensor_that_is_negated_by_a_flag_is_not_taken_for_the_one_made_in_its_slot(client: Client) -> None:
    async with client.slot(64 << 10) as slot:
        made = slot.tensor((128,), torch.float32)
        made.copy_(torch.arange(128))
        # In its memory and of its form: only a flag of torch's says that each item is to be negated when it is read.
        negated = torch.view_as_complex(made.view(64, 2)).conj().imag.as_strided((128,), (1,), 0)
        assert negated.is_neg()
        assert negated.data_ptr() == made.data_ptr()
        reply = await client.request({"do": "echo", "made": made, "negated": negated}, timeout=5)
        assert torch.equal(reply["made"], torch.arange(128.0))
        assert torch.equal(reply["negated"], -torch.arange(128.0))
        assert client.statistics().in_place == 1


@pytest.mark.one_loop
async def test_a_slot_is_not_handed_over_with_what_can_not_be_copied(client: Client) -> None:
    def fail() -> None:
        raise RuntimeError("it can't be read")

    async with client.slot(20_000) as slot:
        view = slot.tensor((20_000,), torch.uint8).fill_(1)
        with pytest.raises(RuntimeError, match="can't be read"):
            await client.request({"do": "echo", "x": view, "y": WatchedArray.of(10, fail)})
        await client.request({"do": "echo", "x": view, "y": tensor(10)}, timeout=5)
        del view
    assert client.statistics().slots_in_use == 0


@pytest.mark.client(lease_nbytes=70_000)
async def test_a_lease_size_that_is_no_whole_number_of_blocks(client: Client) -> None:
    async with client.slot(60_000):
        (await asyncio.wait_for(client.slot(20_000), 2)).close()


@pytest.mark.parametrize("drain", [False, True])
@pytest.mark.ring(handler=None)
async def test_a_slot_may_be_left_while_its_client_says_goodbye(client: Client, drain: bool) -> None:
    async with client.slot(4096, drain=drain) as slot:
        slot.tensor((4096,), torch.uint8).fill_(1)
        closing = asyncio.create_task(client.close())
        await asyncio.sleep(0)
        assert not closing.done()
    await closing
    assert client.closed


async def test_closing_is_an_end_even_if_it_is_cancelled(ring: Ring, connect: Any) -> None:
    for steps in range(1, 12):
        client = await connect()
        pending = asyncio.create_task(client.request({"do": "hang", "x": tensor(5000)}))
        await eventually(lambda: ring.statistics().running == 1)
        closing = asyncio.create_task(client.close())
        await turns(steps)
        await cancel(closing)
        assert not client.connected
        with pytest.raises(shmring.ClosedError):
            await asyncio.wait_for(pending, 5)
        await settled(ring)


async def test_a_connect_that_is_cancelled_at_any_moment_keeps_nothing(ring: Ring, connect: Any) -> None:
    """One step further each time, until it is connected. The process lives on, so only its own word frees its lease."""
    for steps in range(100):
        connecting = asyncio.create_task(connect())
        await turns(steps)
        arrived = connecting.done()
        connecting.cancel()
        result = (await asyncio.gather(connecting, return_exceptions=True))[0]
        if isinstance(result, Client):
            await result.close()
        await eventually(lambda: not ring._shell._handshakes._running)
        await settled(ring)
        if arrived:
            return
    pytest.fail("connecting never came to its end")


async def test_nobody_there_is_an_engine_that_is_dead(connect: Any) -> None:
    with pytest.raises(shmring.EngineDeadError, match="no engine listens"):
        await connect("nobody", connect_timeout_s=0.05)


async def test_connecting_waits_for_an_engine_that_is_starting(serve: Any, connect: Any) -> None:
    connecting = asyncio.create_task(connect(connect_timeout_s=10))
    await turns()
    assert not connecting.done()
    await serve(handle)
    assert (await connecting).connected


async def test_an_engine_that_listens_and_does_not_answer_is_an_error_in_time(socket_dir: Any, connect: Any) -> None:
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(socket_dir / "mute.sock"))
        mute.listen(1)
        with pytest.raises(shmring.EngineDeadError, match=r"did not answer within 0\.05 s \(connect_timeout_s\)"):
            await connect("mute", connect_timeout_s=0.05)
