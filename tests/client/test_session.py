"""Sessions: what crosses on the wire while leases come and go."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import shmring
from shmring import Client, Ring
from shmring.core.messages import (
    CallResult,
    EngineMessage,
    Failed,
    Found,
    Goodbye,
    LeaseGrant,
    LeaseRecall,
    NotKept,
    Refused,
    Release,
    SlotRef,
    Welcome,
    encode_message,
)
from tests.claiming import claimed
from tests.records import done_of, reply_of, slot_extension, slot_header, tensor_extension
from tests.sessions import let_die, session_of
from tests.waiting import eventually


async def test_frontends_pass_a_slab_that_holds_one_request_back_and_forth(socket_dir: Path) -> None:
    """A lease may be recalled in the same breath in which it is granted; a recall that is lost would stall the other
    frontend until the lease is returned as idle, which here takes longer than the requests may.
    """
    options = {"socket_dir": str(socket_dir)}
    large = torch.ones(1_200_000, dtype=torch.uint8)
    async with shmring.serve("passed", slab_nbytes="2MiB", **options) as ring:

        async def count(claim: shmring.Claim) -> None:
            await claim.reply(claim.payload["x"].numel())

        running = asyncio.create_task(ring.run(count))
        clients = [await shmring.connect("passed", lease_idle_s=600.0, **options) for _ in range(3)]
        requests = [client.request({"x": large}, timeout=20) for client in clients for _ in range(10)]
        assert await asyncio.gather(*requests) == [1_200_000] * 30
        for client in clients:
            await client.close()
    await running


async def test_a_large_request_of_one_frontend_is_not_held_up_by_small_ones_of_another(socket_dir: Path) -> None:
    options = {"socket_dir": str(socket_dir)}
    large, small = torch.ones(1_800_000, dtype=torch.uint8), torch.ones(50_000, dtype=torch.uint8)
    async with shmring.serve("mixed", slab_nbytes="2MiB", **options) as ring:

        async def count(claim: shmring.Claim) -> None:
            await claim.reply(claim.payload["x"].numel())

        running = asyncio.create_task(ring.run(count))
        async with shmring.connect("mixed", **options) as busy, shmring.connect("mixed", **options) as client:
            stop = asyncio.Event()

            async def keep_asking() -> None:
                while not stop.is_set():
                    assert await busy.request({"x": small}, timeout=20) == 50_000

            askers = [asyncio.create_task(keep_asking()) for _ in range(8)]
            for _ in range(5):
                assert await client.request({"x": large}, timeout=20) == 1_800_000
            stop.set()
            await asyncio.gather(*askers)
    await running


# -- what crosses at the end ----------------------------------------------------------------------------------------------


def records(*messages: EngineMessage) -> list[bytes]:
    return [encode_message(message) for message in messages]


def tell(ring: Ring, client: Client, said: list[bytes]) -> None:
    """Has the engine say so to its only client, and that hear it at once."""
    [frontend] = ring._shell._frontends.values()
    for record in said:
        assert frontend.link.writer.write(record)
    session_of(client).link.poll()


async def take_slot(client: Client, nbytes: int) -> None:
    async with client.slot(nbytes):
        await asyncio.Event().wait()


@pytest.fixture
async def narrow(serve: Any, connect: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Ring, Client]:
    """A client with one lease for ever: what becomes free in it goes to the next waiter at once."""
    monkeypatch.setattr("shmring.ring.limits.MAX_LEASES", 1)
    ring = await serve(max_lease_nbytes="512KiB")
    return ring, await connect(lease_nbytes="256KiB")


@pytest.mark.both_loops
@pytest.mark.parametrize("waiter", ["slot", "request"])
async def test_space_that_comes_in_the_same_breath_as_the_end_is_no_space(narrow: Any, waiter: str) -> None:
    """The engine releases a slot and closes: whoever waited is told of the end, and touches the unmapped slab no more."""
    ring, client = narrow
    data = torch.ones(200_000, dtype=torch.uint8)
    _, claim = await claimed(ring, client, {"x": data})
    waiting = asyncio.create_task(take_slot(client, 200_000) if waiter == "slot" else client.request({"x": data}))
    await eventually(lambda: client.statistics().waiting == 1)
    [generation] = [slot.generation for slot in claim._submit.content.slots]
    tell(ring, client, records(Release((generation,))))
    assert client.statistics().waiting == 0, "it has its space, and has not run yet"
    tell(ring, client, records(Refused("closing")))
    with pytest.raises(shmring.EngineDeadError, match="closing"):
        await waiting
    claim.done()


# -- an engine that lies --------------------------------------------------------------------------------------------------


#: Where replies lie in the slab that these tests serve: behind what is leased out.
REPLIES_AT, REPLIES_NBYTES = 240 * 4096, 16 * 4096


def reply_in(offset: int, nbytes: int, tensor: msgspec.msgpack.Ext) -> bytes:
    """A reply with a tensor in a slot."""
    return reply_of(tensor, SlotRef(0, offset, nbytes, 77))


def reply_at(offset: int, nbytes: int, slot_nbytes: int = 100, payload: object = None) -> bytes:
    """A reply whose payload lies in a slot."""
    return reply_of(payload, SlotRef(0, REPLIES_AT, slot_nbytes, 77), lies_at=(offset, nbytes))


HUNDRED = tensor_extension(0, 0, 100, "uint8", (100,))
SLOT = slot_extension(0, REPLIES_AT, 100, 77)

LIES = {
    "a reply to nothing": [reply_of(None, request_id=99)],
    "an end of nothing": [done_of(request_id=99)],
    "a failure of nothing": records(Failed(99, "error", "X", "y")),
    "a result of nothing": records(CallResult(99, b"\xc0")),
    "a second end": [done_of(), done_of()],
    "a reply after the end": [done_of(), reply_of(None)],
    "a last reply after the end": [done_of(), msgspec.msgpack.encode([104, 1, [], None, None])],
    "a reply beyond the slab": [reply_in(1 << 20, 100, HUNDRED)],
    "a reply that ends beyond the slab": [reply_in((1 << 20) - 4096, 8192, HUNDRED)],
    "a last reply beyond the slab": [msgspec.msgpack.encode([104, 1, [], slot_extension(0, 1 << 20, 100, 77), HUNDRED])],
    "a reply where requests lie": [reply_in(REPLIES_AT - 4096, 100, HUNDRED)],
    "a reply at no block": [reply_in(REPLIES_AT + 64, 100, HUNDRED)],
    "a tensor beyond its slot": [reply_in(REPLIES_AT, 100, tensor_extension(0, 50, 100, "uint8", (100,)))],
    "a tensor of no dtype": [reply_in(REPLIES_AT, 100, tensor_extension(0, 0, 100, 0, (100,), b"void"))],
    "a tensor of no dtype's number": [reply_in(REPLIES_AT, 100, tensor_extension(0, 0, 100, 200, (100,)))],
    "a tensor in no slot": [reply_in(REPLIES_AT, 100, tensor_extension(1, 0, 100, "uint8", (100,)))],
    "a tensor in a reply without a slot": [reply_of(HUNDRED)],
    "a slot that is none": [reply_of(HUNDRED, msgspec.msgpack.Ext(82, bytes(SLOT.data)[:-1]))],
    "a slot and an event": [msgspec.msgpack.encode([103, 1, bytes(64), SLOT, None])],
    "a lease beyond the slab": records(LeaseGrant(1, 9, 1 << 20, 4096)),
    "a lease where replies lie": records(LeaseGrant(1, 9, REPLIES_AT, 4096)),
    "a lease that reaches to where replies lie": records(LeaseGrant(1, 9, REPLIES_AT - 4096, 8192)),
    "a lease twice": records(LeaseGrant(0, 1, 4096, 4096)),
    "what is lent already": records(LeaseGrant(1, 9, 4096, 4096)),
    "a lease of device memory where there is none": records(LeaseGrant(1, 9, REPLIES_AT + REPLIES_NBYTES, 4096)),
    "a lease of nothing": records(LeaseGrant(1, 9, 4096, 0)),
    "a lease of the header": records(LeaseGrant(1, 9, 0, 4096)),
    "a second welcome": records(
        Welcome(1, 1, 1, 1 << 20, 4096, 4096, 1, 1, 1, 1 << 16, 1 << 14, 4096, 4096, 1, 1, None)
    ),
    "a frontend's message": [encode_message(Goodbye())],
    "more inline than agreed upon": [reply_of(None, bytes(1025))],
    "a payload that counts more than agreed upon": [reply_of(dict.fromkeys(range(8200), 0))],
    "a payload in no slot": [reply_of(None, lies_at=(0, 100))],
    "a payload beyond its slot": [reply_at(64, 100)],
    "a payload larger than it may be": [reply_at(0, 100_000, 100_000)],
    "two payloads": [reply_at(0, 100, payload=1)],
    "more ids than a message has": [msgspec.msgpack.encode([106, [1] * 1025])],
    "more ids than an end has": [done_of([1] * 1025)],
    "rubbish": [b"\xff" * 100],
}  # fmt: skip


@pytest.mark.first_row_on_both_loops
@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
@pytest.mark.ring(max_payload_nbytes="64KiB")
async def test_an_engine_that_breaks_the_protocol_counts_as_dead(ring: Ring, client: Client, lie: list[bytes]) -> None:
    submission = await client.submit("x")
    other = asyncio.create_task((await client.submit("y")).result())
    await eventually(lambda: ring.statistics().waiting == 2)
    assert submission.request_id == 1
    tell(ring, client, lie)
    with pytest.raises(shmring.EngineDeadError, match="broke the protocol"):
        await asyncio.wait_for(other, 5)
    assert not client.connected
    await eventually(lambda: ring.statistics().clients == 0)
    let_die(ring)


async def test_an_engine_that_says_what_can_not_be_is_not_joined(
    ring: Ring, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shmring.ring.handshakes.Welcome", lambda **said: Welcome(**said | {"max_tensors": 0}))
    with pytest.raises(shmring.RemoteProtocolError, match="what can't be: max_tensors is 0"):
        await connect()


ELSEWHERE = 100 * 4096  # what is leased out, and not to this client
PAYLOAD = msgspec.msgpack.encode({"x": HUNDRED})
GENERATION = (1 << 40) + 1  # of the slot that is given to keep


def found(token: int = 1, generation: int = 77, offset: int = ELSEWHERE, nbytes: int = 100) -> Found:
    return Found(token, generation, offset, nbytes, True, PAYLOAD)


async def find(client: Client, number: int = 1) -> None:
    await client.find(bytes([number]) * 32)


async def keep(client: Client) -> None:
    await client.keep(bytes(32), {"x": torch.ones(100, dtype=torch.uint8)})


async def call(client: Client) -> None:
    await client.call("method")


#: What is asked, and what that is answered.
ANSWERS: dict[str, tuple[list[Any], list[EngineMessage]]] = {
    "nothing is found, for it is too large": ([find], [NotKept(1, "large")]),
    "nothing is found, for there is no room": ([find], [NotKept(1, "full")]),
    "nothing is kept, for it is not there": ([keep], [NotKept(1, "absent")]),
    "a reason that is none": ([find], [msgspec.Raw(msgspec.msgpack.encode([113, 1, "lost\x1b"]))]),
    "found in the header": ([find], [found(offset=0)]),
    "found in a lease of this client": ([find], [found(offset=8192)]),
    "found where replies lie": ([find], [found(offset=REPLIES_AT)]),
    "found up to where replies lie": ([find], [found(offset=REPLIES_AT - 4096, nbytes=4096)]),
    "found at no block": ([find], [found(offset=ELSEWHERE + 64)]),
    "found beyond everything": ([find], [found(offset=2**62, nbytes=2**62)]),
    "two contents in one place": ([find, lambda client: find(client, 2)], [found(), found(2, 78)]),
    "two contents of which one lies in the other": (
        [find, lambda client: find(client, 2)],
        [found(nbytes=9000), found(2, 78, ELSEWHERE + 4096)],
    ),
    "two contents under one key": ([find, find], [found(), found(2, 78, ELSEWHERE + 4096)]),
    "one content under two keys": ([find, lambda client: find(client, 2)], [found(), found(2)]),
    "one content in two places": ([find, find], [found(), found(2, offset=ELSEWHERE + 4096)]),
    "kept elsewhere": ([keep], [found(1, GENERATION)]),
    "more kept than was given": ([keep], [found(1, GENERATION, 4096, 200)]),
    "a result that is no msgpack": ([call], [CallResult(1, b"\xc1")]),
    "a result that something follows": ([call], [CallResult(1, b"\xc0\xc0")]),
}


@pytest.mark.first_row_on_both_loops
@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
async def test_an_engine_with_an_impossible_answer_counts_as_dead(
    ring: Ring, client: Client, answer: tuple[list[Any], list[EngineMessage]]
) -> None:
    [frontend] = ring._shell._frontends.values()
    asked: list[bytes] = []
    frontend.handle_message = asked.append  # it answers nothing by itself
    calls, answers = answer
    waiting = [asyncio.create_task(each(client)) for each in calls]
    await eventually(lambda: len(asked) == len(calls))
    session = session_of(client)
    tell(ring, client, records(*answers))
    errors = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 5)
    assert isinstance(errors[-1], shmring.EngineDeadError)
    assert "broke the protocol" in str(errors[-1])
    assert str(errors[-1]).isprintable()
    assert session.error is not None
    assert not client.connected
    let_die(ring)


@pytest.mark.both_loops
async def test_what_an_engine_says_can_be_printed(ring: Ring, client: Client) -> None:
    failing, late, other = [await client.submit("x") for _ in range(3)]
    await eventually(lambda: ring.statistics().waiting == 3)
    tell(ring, client, records(Failed(1, "error", "Err\x1b", "one\n\x1b[31mtwo"), Failed(2, "timed_out", "", "late\x07")))
    with pytest.raises(shmring.RemoteError) as failed:
        await failing.next()
    assert str(failed.value) == "Err\\x1b: one\n\\x1b[31mtwo"
    with pytest.raises(TimeoutError, match=r"late\\x07$"):
        await late.next()
    tell(ring, client, records(Refused("enough\x1b\nERROR: not a line of ours")))
    with pytest.raises(shmring.EngineDeadError, match=r"enough\\x1b\\nERROR"):
        await other.next()
    let_die(ring)


@pytest.mark.first_row_on_both_loops
@pytest.mark.parametrize("lies_in_slot", [False, True])
@pytest.mark.parametrize("header", [b"", slot_header(78, 100), slot_header(77, 99), b"S" + slot_header(77, 100)[1:]])
async def test_a_reply_slot_that_holds_something_else_is_stale(
    ring: Ring, client: Client, header: bytes, lies_in_slot: bool
) -> None:
    submission = await client.submit("x")
    ring._shell._slab.bytes_at(REPLIES_AT, len(header))[:] = list(header)
    lie = reply_at(0, 100) if lies_in_slot else reply_in(REPLIES_AT, 100, HUNDRED)
    tell(ring, client, [lie, reply_of(7)])
    with pytest.raises(shmring.StaleDescriptorError):
        await submission.next()
    assert await submission.next() == 7
    let_die(ring)  # which lent no such slot


async def test_headers_say_of_slots_what_the_protocol_promises(ring: Ring, client: Client) -> None:
    """Of a request's slot, and of a reply's."""
    submission = await client.submit({"x": torch.zeros(1250)})
    with await ring.claim() as claim:
        [slot] = claim._submit.content.slots
        assert slot.generation == (claim.client_id << 40) + 1
        assert ring._shell._slab.bytes_at(slot.offset, 24).tobytes() == slot_header(slot.generation, 5000)
        await claim.reply(torch.zeros(5001, dtype=torch.uint8))
    [frontend] = ring._shell._book.clients.values()
    [generation] = frontend.replies
    start = ring._shell._slab.nbytes - ring.statistics().reply_nbytes
    assert ring._shell._slab.bytes_at(start, 24).tobytes() == slot_header(generation, 5001)
    await submission.result()


@pytest.mark.one_loop
async def test_stale_releases_are_counted_and_change_nothing(ring: Ring, client: Client) -> None:
    tell(ring, client, records(Release((1, 2, 3)), LeaseRecall((55,))))
    assert client.statistics().stale_releases == 3
    assert client.connected
