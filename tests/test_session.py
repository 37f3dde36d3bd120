"""Sessions: what crosses on the wire while leases come and go."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import shmring
from shmring.client.session import Session
from shmring.core.messages import (
    BodyRef,
    CallResult,
    Content,
    Done,
    EngineMessage,
    Failed,
    Goodbye,
    LeaseGrant,
    LeaseRecall,
    Refused,
    Release,
    Reply,
    SlotRef,
    TensorRef,
    Welcome,
    encode_message,
)


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


def tell(ring: shmring.Ring, client: shmring.RingClient, said: list[bytes]) -> None:
    """Has the engine say so to its only client, and that hear it at once."""
    [frontend] = ring._frontends.values()
    for record in said:
        assert frontend.link._writer.write(record)
    session_of(client).link.poll()


def session_of(client: shmring.RingClient) -> Session:
    assert client._session is not None
    return client._session


async def take_slot(client: shmring.RingClient, nbytes: int) -> None:
    async with client.slot(nbytes):
        await asyncio.Event().wait()


@pytest.fixture
async def narrow(serve: Any, connect: Any) -> tuple[shmring.Ring, shmring.RingClient]:
    """A client with one lease for ever: what becomes free in it goes to the next waiter at once."""
    ring = await serve(max_leases=1, max_lease_nbytes="512KiB")
    return ring, await connect(lease_nbytes="256KiB")


@pytest.mark.both_loops
@pytest.mark.parametrize("waiter", ["slot", "request"])
async def test_space_that_comes_in_the_same_breath_as_the_end_is_no_space(narrow: Any, eventually: Any, waiter: str) -> None:
    """The engine releases a slot and closes: whoever waited is told of the end, and touches the unmapped slab no more."""
    ring, client = narrow
    data = torch.ones(200_000, dtype=torch.uint8)
    await client.submit({"x": data})
    claim = await ring.claim()
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


def reply_in(offset: int, nbytes: int, tensor: TensorRef) -> Reply:
    payload = msgspec.msgpack.encode(msgspec.msgpack.Ext(83, b"\0\0\0\0"))
    return Reply(1, Content(payload, (tensor,), b"", (SlotRef(0, offset, nbytes, 77),)))


def reply_of(body: BodyRef, nbytes: int = 100, payload: bytes = b"") -> Reply:
    return Reply(1, Content(payload, (), b"", (SlotRef(0, 4096, nbytes, 77),), b"", body))


LIES = {
    "a reply to nothing": records(Reply(99, Content(b"\xc0"))),
    "an end of nothing": records(Done(99)),
    "a failure of nothing": records(Failed(99, "error", "X", "y")),
    "a result of nothing": records(CallResult(99, b"\xc0")),
    "a second end": records(Done(1), Done(1)),
    "a reply after the end": records(Done(1), Reply(1, Content(b"\xc0"))),
    "a reply beyond the slab": records(reply_in(1 << 20, 100, TensorRef(1, 0, 100, "uint8", (100,)))),
    "a reply that ends beyond the slab": records(reply_in((1 << 20) - 4096, 8192, TensorRef(1, 0, 100, "uint8", (100,)))),
    "a tensor beyond its slot": records(reply_in(4096, 100, TensorRef(1, 50, 100, "uint8", (100,)))),
    "a tensor of no dtype": records(reply_in(4096, 100, TensorRef(1, 0, 100, "void", (100,)))),
    "a tensor in no slot": records(reply_in(4096, 100, TensorRef(2, 0, 100, "uint8", (100,)))),
    "a lease beyond the slab": records(LeaseGrant(1, 9, 1 << 20, 4096)),
    "a lease of nothing": records(LeaseGrant(1, 9, 4096, 0)),
    "a lease of the header": records(LeaseGrant(1, 9, 0, 4096)),
    "a second welcome": records(
        Welcome(1, 1, 1, 1 << 20, 4096, 4096, 1, 1, 1, 1 << 16, 1 << 14, 4096, 4096, 1, None)
    ),
    "a frontend's message": [encode_message(Goodbye())],
    "more inline than agreed upon": records(Reply(1, Content(b"\xc0", (), bytes(1025)))),
    "a payload in no slot": records(Reply(1, Content(b"", body=BodyRef(0, 100)))),
    "a payload beyond its slot": records(reply_of(BodyRef(64, 100))),
    "a payload larger than it may be": records(reply_of(BodyRef(0, 2**40), 2**41)),
    "two payloads": records(reply_of(BodyRef(0, 100), payload=b"\xc0")),
    "more ids than a message has": [msgspec.msgpack.encode([106, [1] * 1025])],
    "rubbish": [b"\xff" * 100],
}  # fmt: skip


@pytest.mark.both_loops
@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
async def test_an_engine_that_breaks_the_protocol_is_as_good_as_dead(
    serve: Any, connect: Any, eventually: Any, lie: list[bytes]
) -> None:
    ring, client = await serve(), await connect()
    submission = await client.submit("x")
    other = asyncio.create_task((await client.submit("y")).result())
    await eventually(lambda: ring.statistics().waiting == 2)
    assert submission.request_id == 1
    tell(ring, client, lie)
    with pytest.raises(shmring.EngineDeadError, match="broke the protocol"):
        await other
    assert not client.connected
    await eventually(lambda: ring.statistics().clients == 0)


@pytest.mark.both_loops
async def test_a_reply_slot_that_holds_something_else_is_stale(serve: Any, connect: Any) -> None:
    ring, client = await serve(), await connect()
    submission = await client.submit("x")
    lie = reply_in(4096, 100, TensorRef(1, 0, 100, "uint8", (100,)))
    tell(ring, client, records(lie, Reply(1, Content(b"\x07"))))
    with pytest.raises(shmring.StaleDescriptorError):
        await submission.next()
    assert await submission.next() == 7


@pytest.mark.both_loops
async def test_releases_that_are_none_are_counted_and_harm_nobody(serve: Any, connect: Any) -> None:
    ring, client = await serve(), await connect()
    tell(ring, client, records(Release((1, 2, 3)), LeaseRecall((55,))))
    assert client.statistics().stale_releases == 3
    assert client.connected
