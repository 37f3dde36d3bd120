"""Payloads that take long to claim: who sends them waits for the loop's turns, and nobody waits for them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec
import pytest
import torch

import shmring
import shmring.threads
from shmring import Client, Ring
from shmring.config import RingConfig
from shmring.core.messages import Call, Keep, Refused
from tests.integration.test_forged import Forger
from tests.waiting import eventually, settled

pytestmark = [
    pytest.mark.both_loops,
    pytest.mark.filterwarnings("error::ResourceWarning"),
    pytest.mark.ring(slab_nbytes="8MiB", reply_nbytes="2MiB"),
]

MAX_VALUES = RingConfig().max_values
COSTLY = [[]] * 5000  # counts 20,004 in a record of 5 KB; 16,384 would not be costly
HEAVY = [[]] * 20_000  # counts more than all that may be claimed in a turn
LARGEST = [0] * (MAX_VALUES - 4)


def end_all(claims: list[shmring.Claim]) -> None:
    for claim in claims:
        claim.done()


async def arrived(ring: Ring, count: int) -> None:
    """Waits until so many requests wait."""
    async with asyncio.timeout(5):
        while ring.statistics().waiting < count:
            await asyncio.sleep(0)


async def claims_of_a_turn(ring: Ring) -> list[shmring.Claim]:
    """What may be claimed before the loop has its next turn."""
    claims = []
    await asyncio.sleep(0)
    with contextlib.suppress(shmring.WouldBlock):
        while True:
            claims.append(ring.claim_nowait())
    return claims


def names(claims: list[shmring.Claim]) -> list[str]:
    return [claim.name for claim in claims]


async def test_quick_requests_do_not_wait_for_costly_ones(ring: Ring, connect: Any) -> None:
    """Of which there are more than the loop could decode in half a second."""
    greedy, innocent = await connect(), await connect()
    costly = [await greedy.submit(HEAVY, request_id="costly") for _ in range(8)]
    await arrived(ring, 8)
    quick = [await innocent.submit("x", request_id="quick") for _ in range(3)]
    await arrived(ring, 11)
    claims = await claims_of_a_turn(ring)
    assert names(claims) == ["quick"] * 3 + ["costly"]
    rest = await claims_of_a_turn(ring)
    assert names(rest) == ["costly"], "one of them in a turn"
    claims += rest
    while len(claims) < 11:
        claims.append(await ring.claim())
    end_all(claims)
    for submission in costly + quick:
        await submission.wait()


async def test_frontends_with_costly_requests_take_turns(ring: Ring, connect: Any) -> None:
    first, other = await connect(), await connect()
    submissions = [await first.submit(COSTLY, request_id=f"first {number}") for number in range(5)]
    await arrived(ring, 5)
    submissions += [await other.submit(COSTLY, request_id=f"other {number}") for number in range(2)]
    await arrived(ring, 7)
    claims = [await ring.claim() for _ in submissions]
    assert names(claims) == ["first 0", "other 0", "first 1", "other 1", "first 2", "first 3", "first 4"]
    end_all(claims)
    for submission in submissions:
        await submission.wait()


async def test_a_costly_request_is_overtaken_so_often_and_no_more(ring: Ring, client: Client) -> None:
    submissions = [await client.submit(COSTLY, request_id="costly")]
    submissions += [await client.submit(number) for number in range(80)]
    await arrived(ring, 81)
    claims = [await ring.claim() for _ in submissions]
    assert names(claims).index("costly") == 64
    end_all(claims)
    for submission in submissions:
        await submission.wait()


async def test_many_quick_requests_let_the_loop_have_its_turn_too(ring: Ring, client: Client) -> None:
    """Each may count nearly as much as a costly one."""
    submissions = [await client.submit([0] * 16_000) for _ in range(6)]
    await arrived(ring, 6)
    claims = await claims_of_a_turn(ring)
    assert len(claims) == 5, "the fifth ends a turn of 65,536"
    claims.append(await ring.claim())
    end_all(claims)
    for submission in submissions:
        await submission.wait()


async def test_a_batch_ends_with_the_turn(ring: Ring, client: Client) -> None:
    submissions = [await client.submit(HEAVY) for _ in range(3)]
    await arrived(ring, 3)
    for submission in submissions:
        [claim] = await ring.claim_many(3)
        claim.done()
        await submission.wait()


async def test_who_waits_for_a_claim_gets_one_though_the_turn_was_over(ring: Ring, client: Client) -> None:
    waiting = [asyncio.ensure_future(ring.claim()) for _ in range(4)]
    await asyncio.sleep(0)
    submissions = [await client.submit(HEAVY) for _ in range(4)]
    async with asyncio.timeout(5):
        end_all(await asyncio.gather(*waiting))
    for submission in submissions:
        await submission.wait()


async def test_costly_requests_whose_frontend_goes_are_nobodys(ring: Ring, connect: Any) -> None:
    greedy, other = await connect(), await connect()
    for _ in range(3):
        await greedy.submit(HEAVY)
    submission = await other.submit(COSTLY, request_id="other")
    await arrived(ring, 4)
    await greedy.close()
    await eventually(lambda: ring.statistics().waiting == 1)
    with await ring.claim() as claim:
        assert claim.name == "other"
    await submission.wait()
    await other.close()
    await settled(ring)


async def test_a_costly_request_is_aborted_while_it_waits(ring: Ring, client: Client) -> None:
    submissions = [await client.submit(COSTLY, request_id=str(number)) for number in range(4)]
    await arrived(ring, 4)
    for place in (1, 2):  # which stand side by side
        submissions[place].abort()
    await eventually(lambda: ring.statistics().waiting == 2)
    claims = [await ring.claim(), await ring.claim()]
    assert names(claims) == ["0", "3"]
    end_all(claims)
    for place in (0, 3):
        await submissions[place].wait()


async def test_a_handler_gets_all_of_them(serve: Any, connect: Any) -> None:
    async def count(claim: shmring.Claim) -> None:
        await claim.reply(len(claim.payload))

    await serve(count)
    client = await connect()
    payloads = [HEAVY, "four", COSTLY, HEAVY, [1, 2], HEAVY]
    replies = await asyncio.gather(*[client.request(payload, timeout=5) for payload in payloads])
    assert replies == [len(payload) for payload in payloads]


async def test_a_blocking_ring_gets_all_of_them(socket_dir: Any) -> None:
    with shmring.threads.serve("test", slab_nbytes="1MiB", socket_dir=str(socket_dir)) as ring:
        async with await shmring.connect("test", lease_nbytes="64KiB", socket_dir=str(socket_dir)) as client:
            submissions = [await client.submit(HEAVY) for _ in range(5)]
            for _ in submissions:
                with await asyncio.to_thread(ring.claim, timeout=5) as claim:
                    assert len(claim.payload) == len(HEAVY)
            for submission in submissions:
                await submission.wait()


async def test_looking_for_requests_takes_in_fewer_that_are_long(serve: Any, connect: Any) -> None:
    """What it takes to check them is not bounded by their number."""
    ring = await serve(busy_poll_s=0.1, message_ring_nbytes="4MiB")  # so that it is awake, and looks by itself
    client = await connect()
    submissions = [await client.submit("first")]
    (await ring.claim()).done()
    submissions += [await client.submit("x" * 60_000) for _ in range(20)]
    ring.claim_nowait().done()
    assert ring.statistics().waiting == 4, "each counts as 14 of 64"
    for _ in submissions[2:]:
        (await ring.claim()).done()
    for submission in submissions:
        await submission.wait()


# -- what is too much --------------------------------------------------------------------------------------------------


@pytest.mark.one_loop
@pytest.mark.client(lease_nbytes="4MiB")
async def test_as_much_as_may_be_crosses_both_ways_and_more_is_an_error(ring: Ring, client: Client) -> None:
    submission = await client.submit(LARGEST)
    with await ring.claim() as claim:
        assert claim.payload == LARGEST
        with pytest.raises(shmring.CapacityError, match="max_values") as caught:
            await claim.reply([*LARGEST, 0])
        assert (caught.value.needed, caught.value.capacity) == (MAX_VALUES + 1, MAX_VALUES)
        await claim.reply(LARGEST)
    assert await submission.result() == LARGEST
    with pytest.raises(shmring.CapacityError, match="max_values") as caught:
        await client.submit([*LARGEST, 0])
    assert (caught.value.needed, caught.value.capacity) == (MAX_VALUES + 1, MAX_VALUES)
    with pytest.raises(shmring.CapacityError, match="max_values"):
        client.submit_nowait([*LARGEST, 0])
    assert ring.statistics().submitted == 1, "nothing was sent"
    assert client.connected


async def test_workers_are_sent_no_more_and_send_no_more(serve: Any, socket_dir: Any) -> None:
    ring = await serve(max_values=1024)
    worker = await shmring.join("test", 0, socket_dir=str(socket_dir))
    with pytest.raises(shmring.CapacityError, match="max_values"):
        await ring.broadcast([0] * 1024)
    gathering = asyncio.ensure_future(ring.gather([0] * 1020))
    with await worker.receive() as message:
        assert message.payload == [0] * 1020
        await message.reply([1] * 1020)
    assert await gathering == [[1] * 1020]
    gathering = asyncio.ensure_future(ring.gather("more"))
    with pytest.raises(shmring.CapacityError, match="max_values"), await worker.receive() as message:
        await message.reply([0] * 1021)
    with pytest.raises(shmring.WorkerFailedError):
        await gathering
    await worker.close()


@pytest.mark.one_loop
async def test_calls_take_no_more_and_return_no_more(serve: Any, connect: Any) -> None:
    async def many(count: int) -> list[int]:
        return [0] * count

    ring = await serve(calls={"many": many}, max_values=1024)
    client = await connect()
    assert await client.call("many", 1020, timeout=5) == [0] * 1020
    with pytest.raises(shmring.CapacityError, match="max_values") as caught:
        await client.call("many", [0] * 1020, timeout=5)
    assert (caught.value.needed, caught.value.capacity) == (1028, 1024)
    with pytest.raises(shmring.RemoteError, match="max_values", check=lambda error: error.type_name == "CapacityError"):
        await client.call("many", 1021, timeout=5)
    assert ring.statistics().protocol_errors == 0


@pytest.mark.one_loop
async def test_kept_content_counts_no_more(serve: Any, connect: Any) -> None:
    ring = await serve(max_values=1024)
    client = await connect()
    with pytest.raises(shmring.CapacityError, match="max_values"):
        await client.keep(bytes(32), {"pixels": torch.zeros(5000), "sizes": [0] * 1024})
    assert ring.statistics().kept == 0


@pytest.fixture
async def forger(serve: Any, socket_dir: Any) -> Any:
    async def first(values: list[Any]) -> Any:
        return values[0]

    ring = await serve(name="honest", max_values=1024, calls={"first": first})
    forger = await Forger.attach(socket_dir)
    yield ring, forger
    forger.close()


async def test_a_record_that_counts_more_ends_its_connection(forger: Any) -> None:
    ring, liar = forger
    await liar.send(liar.say([[]] * 256))
    *_, last = await liar.messages()
    assert isinstance(last, Refused)
    assert "max_values (1024)" in last.reason
    assert ring.statistics().protocol_errors == 1


@pytest.mark.one_loop
async def test_a_payload_in_a_slot_that_counts_more_fails_its_request_and_nothing_else(forger: Any) -> None:
    ring, liar = forger
    payload = msgspec.msgpack.encode([[]] * 256)
    slot = liar.slot(nbytes=len(payload))
    liar.slab.bytes_at(liar.lease.offset + 64, len(payload))[:] = list(payload)
    await liar.send(liar.say(copied=slot, lies_at=(0, len(payload))))
    await arrived(ring, 1)
    with pytest.raises(shmring.WouldBlock):
        ring.claim_nowait()
    assert (ring.statistics().failed, ring.statistics().protocol_errors) == (1, 0)


@pytest.mark.one_loop
async def test_kept_content_that_counts_more_ends_its_connection(forger: Any) -> None:
    _ring, liar = forger
    slot = liar.slot()
    payload = msgspec.msgpack.encode([[]] * 256)
    await liar.send(Keep(1, bytes(32), slot.lease_id, slot.offset, slot.nbytes, slot.generation, True, payload))
    *_, last = await liar.messages()
    assert isinstance(last, Refused)
    assert "max_values" in last.reason


@pytest.mark.one_loop
async def test_the_arguments_of_a_call_that_count_more_fail_that_call(forger: Any) -> None:
    ring, liar = forger
    await liar.send(Call(1, "first", msgspec.msgpack.encode([[[]] * 256])), Call(2, "first", msgspec.msgpack.encode({"a": 1})))
    await liar.send(Call(3, "first", msgspec.msgpack.encode([[7]])))
    results = []
    while len(results) < 3:
        await asyncio.sleep(0)
        while (record := liar.reader.read()) is not None:
            results.append(msgspec.msgpack.decode(record))
    [first, second, third] = sorted(results, key=lambda result: result[1])
    assert "max_values" in first[3][1]
    assert "array" in second[3][1]
    assert third[2] == msgspec.msgpack.encode(7)
    assert ring.statistics().protocol_errors == 0
