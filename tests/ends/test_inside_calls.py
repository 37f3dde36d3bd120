"""What happens inside a call: the call hears of the end of its session, or runs code of its caller that changes things.

A call looks at messages that have come, and one of them may end the session. It also runs code of its caller: a property that
is encoded, a generator that yields a shape. After each of these it must read again what it had read before.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shmring
from shmring import Client, Ring
from shmring.core.messages import Refused, encode_message
from tests.sessions import let_die, session_of

pytestmark = pytest.mark.both_loops


def refuse(ring: Ring) -> None:
    """The engine says to its only client that it is closing. The client has not heard it yet."""
    [frontend] = ring._shell._frontends.values()
    assert frontend.link.writer.write(encode_message(Refused("closing")))


def calling(action: Callable[[], object], **members: Any) -> Any:
    """A payload that does something when it is encoded: after its first member, and before its last."""

    @dataclasses.dataclass
    class Payload:
        first: Any = None

        @property
        def acted(self) -> bool:
            action()
            return True

        acted: bool = dataclasses.field(init=False, default=acted)  # type: ignore[no-redef]
        last: Any = None

    return Payload(**members)


def bytes_of(nbytes: int) -> torch.Tensor:
    return torch.ones(nbytes, dtype=torch.uint8)


# -- a frontend ----------------------------------------------------------------------------------------------------------------

LARGE: dict[str, Any] = {"slab_nbytes": "64MiB", "max_lease_nbytes": "32MiB"}
SIZES = [100, 1 << 16, 1 << 20, 20_000_000]


@pytest.mark.first_row_on_both_loops
@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("call", ["request", "stream", "submit", "submit_nowait", "slot", "keep"])
@pytest.mark.ring(**LARGE)
async def test_a_call_that_hears_of_the_end_says_so(ring: Ring, connect: Any, call: str, nbytes: int) -> None:
    client, payload = await connect(), {"x": bytes_of(nbytes)}  # whose link is awake

    async def make() -> None:
        if call == "stream":
            async for _ in client.stream(payload):
                pass
        elif call == "keep":
            await client.keep(bytes(32), payload)
        elif call == "slot":
            await client.slot(nbytes)
        elif call == "submit_nowait":
            client.submit_nowait(payload)
        else:
            await (client.request(payload, timeout=20) if call == "request" else client.submit(payload))

    async def make_twice() -> None:
        await make()  # what is there needs no look at messages
        await asyncio.sleep(0)
        await make()

    refuse(ring)
    with pytest.raises(shmring.EngineDeadError):
        await make_twice()
    let_die(ring)


@pytest.mark.first_row_on_both_loops
@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.ring(max_inflight=1, **LARGE)
async def test_a_call_that_waits_for_its_turn_hears_of_the_end(ring: Ring, client: Client, nbytes: int) -> None:
    """Where as many requests are in flight as may be, a call looks for the end of one of them first."""
    await client.submit(1)
    refuse(ring)
    with pytest.raises(shmring.EngineDeadError):
        await client.submit({"x": bytes_of(nbytes)})
    let_die(ring)


@pytest.mark.first_row_on_both_loops
@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("call", ["submit", "submit_nowait", "keep"])
@pytest.mark.ring(**LARGE)
async def test_code_that_runs_while_a_payload_is_encoded_may_end_the_session(
    ring: Ring, client: Client, call: str, nbytes: int
) -> None:
    def end() -> None:
        refuse(ring)
        session_of(client).link.poll()
        assert not client.connected

    async def make() -> None:
        payload = calling(end, first=bytes_of(nbytes), last=bytes_of(50))
        if call == "submit_nowait":
            client.submit_nowait(payload)
        else:
            await (client.submit(payload) if call == "submit" else client.keep(bytes(32), payload))

    with pytest.raises((shmring.EngineDeadError, shmring.ClosedError)):
        await make()
    let_die(ring)


async def test_code_that_runs_while_a_payload_is_encoded_may_send_another_one(ring: Ring, client: Client) -> None:
    """Each payload has its own list of slots that it lies in."""
    slots = [client.slot_nowait(64) for _ in range(3)]
    views = [slot.tensor((64,), torch.uint8).fill_(number) for number, slot in enumerate(slots)]
    inner: list[shmring.Submission] = []
    outer = await client.submit(
        calling(
            lambda: inner.append(client.submit_nowait({"x": views[1]})), first=views[0], last=[views[2], torch.full((9,), 9)]
        )
    )
    claims = [await ring.claim() for _ in range(2)]
    assert [claim.request_id for claim in claims] == [inner[0].request_id, outer.request_id]
    assert claims[0].payload["x"].tolist() == [1] * 64
    assert claims[1].payload["first"].tolist() == [0] * 64
    assert [tensor.tolist() for tensor in claims[1].payload["last"]] == [[2] * 64, [9] * 9]
    for claim in claims:
        claim.done()
    for slot in slots:
        slot.close()


async def test_code_that_runs_while_a_payload_is_encoded_may_leave_a_slot_of_it(ring: Ring, client: Client) -> None:
    slot = client.slot_nowait(4096)
    view = slot.tensor((4096,), torch.uint8).fill_(7)
    submission = await client.submit(calling(slot.close, first=view))
    with await ring.claim() as claim:
        assert claim.payload["acted"] is True
    await submission.wait()
    assert client.statistics().in_place == 0, "the slot was not its caller's any more"


def shape_that(action: Callable[[], object]) -> Iterator[int]:
    yield 10
    action()
    yield 10


class Extent:
    """A number that does something when it is asked for."""

    def __init__(self, action: Callable[[], object]) -> None:
        self.action = action

    def __index__(self) -> int:
        self.action()
        return 10

    __int__ = __index__


@pytest.mark.first_row_on_both_loops
@pytest.mark.parametrize("shape", [shape_that, lambda action: (10, Extent(action))], ids=["generator", "index"])
@pytest.mark.parametrize("what", ["leaves", "ends"])
@pytest.mark.parametrize("make", ["tensor", "array"])
async def test_a_shape_may_leave_its_slot_or_end_the_session(
    ring: Ring, client: Client, shape: Callable[[Callable[[], object]], Any], what: str, make: str
) -> None:
    slot = client.slot_nowait(4096)

    def end() -> None:
        if client.connected:
            refuse(ring)
            session_of(client).link.poll()

    with pytest.raises((shmring.ClosedError, shmring.EngineDeadError)):
        getattr(slot, make)(shape(slot.close if what == "leaves" else end), torch.uint8 if make == "tensor" else "u1")
    let_die(ring)


@pytest.mark.one_loop
async def test_a_shape_is_read_once(client: Client) -> None:
    """Also where the tensor is not of the common kind: without content, or of too many bytes."""
    with client.slot_nowait(4096) as slot:
        assert slot.tensor((extent for extent in (0, 3)), torch.uint8).shape == (0, 3)
        assert slot.tensor(iter([4, 0, 5]), torch.float32).shape == (4, 0, 5)
        with pytest.raises(shmring.CapacityError, match=r"\(64, 65\)"):
            slot.tensor(iter([64, 65]), torch.uint8)
        assert slot.tensor(iter([64, 64]), torch.uint8).shape == (64, 64)


# -- an engine -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def shared(serve: Any, connect: Any, socket_dir: Path) -> Any:
    """A claim with a tensor in a slot, its ring, and a worker."""
    ring = await serve(broadcast_nbytes="256KiB")
    client = await connect()
    worker = await shmring.join("test", 0, socket_dir=str(socket_dir))
    await ring.wait_workers(1)
    submission = await client.submit({"x": bytes_of(100_000)})
    yield await ring.claim(), ring, worker
    await worker.close()
    del submission


@pytest.mark.first_row_on_both_loops
@pytest.mark.parametrize("call", ["share", "share_nowait", "broadcast", "gather"])
async def test_code_that_runs_while_a_message_is_encoded_may_leave_the_claim_that_is_shared(shared: Any, call: str) -> None:
    claim, ring, _ = shared
    pixels = claim.payload["x"]

    async def make() -> None:
        if call == "share_nowait":
            claim.share_nowait(calling(claim.done))
        elif call == "share":
            await claim.share(calling(claim.done))
        else:
            await getattr(ring, call)(calling(claim.done, first=pixels))

    with pytest.raises(shmring.LocalProtocolError, match="was released while"):
        await make()
    assert ring.statistics().broadcasts_outstanding == 0


@pytest.mark.first_row_on_both_loops
@pytest.mark.parametrize("nbytes", [10, 100_000])
@pytest.mark.parametrize("call", ["share", "broadcast", "gather"])
async def test_code_that_runs_while_a_message_is_encoded_may_close_the_ring(shared: Any, call: str, nbytes: int) -> None:
    claim, ring, _ = shared
    closing: list[asyncio.Task[None]] = []

    def close() -> None:
        ring._shell.workers.close("closing")
        closing.append(asyncio.create_task(ring.close()))

    payload = calling(close, last=bytes_of(nbytes))
    with pytest.raises(shmring.ClosedError):
        await (claim.share(payload) if call == "share" else getattr(ring, call)(payload))
    await closing[0]


@pytest.mark.one_loop
async def test_a_message_that_can_not_be_copied_gives_its_memory_back(shared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    claim, ring, _ = shared
    strided = torch.ones(300, 300)[:, ::2]
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *_: math.sqrt(-1))
    free_nbytes = ring.statistics().broadcast_free_nbytes
    with pytest.raises(ValueError, match="math domain"):
        await ring.broadcast({"x": strided})
    assert ring.statistics().broadcast_free_nbytes == free_nbytes
    claim.done()
