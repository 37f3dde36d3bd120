"""A frontend that lies: every forged message closes its own connection with a reason, and changes nothing else.

The forger shakes hands like a frontend, and then writes what it likes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import shmring
from shmring.core.framing import PREFIX, encode_frame
from shmring.core.messages import (
    Call,
    Content,
    EngineMessage,
    Goodbye,
    Hello,
    LeaseRequest,
    LeaseReturn,
    Refused,
    ReplyRelease,
    SlotRef,
    Submit,
    TensorRef,
    decode_engine_message,
    encode_message,
)
from shmring.memory.slab import Slab
from shmring.transport.endpoint import attach_engine, socket_path

PAYLOAD = msgspec.msgpack.encode({"x": msgspec.msgpack.Ext(83, b"\0\0\0\0")})


class Forger:
    """A connection that speaks the protocol as it likes."""

    def __init__(self, engine: Any, slab: Slab) -> None:
        self.welcome = engine.welcome
        self.slab = slab
        self._socket = engine.socket
        self._pidfd = engine.pidfd

    @classmethod
    async def attach(cls, socket_dir: Path) -> Forger:
        path = socket_path("honest", str(socket_dir))
        engine = await attach_engine(path, Hello(1, 65536, "forger"), frozenset({os.getuid()}))
        return cls(engine, Slab.attach(engine.slab_fd, engine.welcome.slab_nbytes, engine.welcome.epoch))

    @property
    def lease(self) -> Any:
        return self.welcome.base_lease

    def generation(self, number: int = 1) -> int:
        return (self.welcome.client_id << 40) + number

    def slot(self, nbytes: int = 100, number: int = 1, **changed: int) -> SlotRef:
        """An honest slot at the start of the base lease, header written, but for what is changed."""
        fields = {"lease_id": self.lease.lease_id, "offset": self.lease.offset, "nbytes": nbytes}
        ref = SlotRef(**{**fields, "generation": self.generation(number), **changed})
        self.slab.write_slot_header(self.lease.offset, ref.generation, min(ref.nbytes, 2**62))
        return ref

    def submit(self, *slots: SlotRef, tensor: TensorRef | None = None, request_id: int = 1, **changed: Any) -> Submit:
        """An honest submission of a 100-byte tensor in the first slot, but for what is changed."""
        tensors = (tensor or TensorRef(1, 0, 100, "uint8", (100,)),)
        fields = {"epoch": self.welcome.epoch, "request_id": request_id, "content": Content(PAYLOAD, tensors, b"", slots)}
        return Submit(**{**fields, **changed})

    async def send(self, *messages: Any) -> None:
        await self.send_bytes(b"".join(encode_frame(encode_message(message), 1 << 30) for message in messages))

    async def send_bytes(self, data: bytes) -> None:
        # The engine may have closed the connection before it has read everything.
        with contextlib.suppress(ConnectionError):
            await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def messages(self) -> list[EngineMessage]:
        """Everything that the engine says until it closes the connection."""
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while data := await asyncio.get_running_loop().sock_recv(self._socket, 65536):
                received += data
        messages = []
        while received:
            (length,) = PREFIX.unpack_from(received)
            messages.append(decode_engine_message(received[4 : 4 + length]))
            received = received[4 + length :]
        return messages

    def close(self) -> None:
        self._socket.close()
        os.close(self._pidfd)
        self.slab.close()


@pytest.fixture
async def ring(serve: Any) -> shmring.Ring:
    async def answer(claim: shmring.Claim) -> None:
        await claim.reply(int(claim.payload["x"].sum()))

    ring: shmring.Ring = await serve(answer, name="honest", max_calls=2, max_inflight=8, max_frame_nbytes=65536)
    return ring


@pytest.fixture
async def forger(ring: shmring.Ring, socket_dir: Path) -> AsyncIterator[Forger]:
    forger = await Forger.attach(socket_dir)
    yield forger
    forger.close()


def other_lease(forger: Forger, ring: shmring.Ring) -> dict[str, int]:
    """A lease of the honest client."""
    [lease] = [
        lease
        for client in ring._book.clients.values()
        if client.client_id != forger.welcome.client_id
        for lease in client.leases.values()
    ]
    return {"lease_id": lease.lease_id, "offset": lease.start * 4096}


Forgery = Callable[[Forger, shmring.Ring], list[Any]]

FORGERIES: dict[str, tuple[Forgery, str]] = {
    "a slot before its lease": (lambda f, r: [f.submit(f.slot(offset=f.lease.offset - 4096))], "not inside lease"),
    "a slot beyond its lease": (lambda f, r: [f.submit(f.slot(nbytes=f.lease.nbytes))], "not inside lease"),
    "a slot whose end overflows": (lambda f, r: [f.submit(f.slot(nbytes=2**62))], "not inside lease"),
    "a slot off the blocks": (lambda f, r: [f.submit(f.slot(offset=f.lease.offset + 64))], "not inside lease"),
    "a slot in the slab's header": (lambda f, r: [f.submit(f.slot(offset=0))], "not inside lease"),
    "a slot in no lease": (lambda f, r: [f.submit(f.slot(lease_id=999))], "does not hold"),
    "a slot in another's lease": (lambda f, r: [f.submit(f.slot(**other_lease(f, r)))], "does not hold"),
    "two slots that overlap": (lambda f, r: [f.submit(f.slot(), f.slot(number=2))], "overlaps a live slot"),
    "a generation of another": (lambda f, r: [f.submit(f.slot(generation=(99 << 40) + 1))], "not a new one"),
    "a generation twice": (
        lambda f, r: [f.submit(f.slot()), f.submit(f.slot(offset=f.lease.offset + 4096), request_id=2)],
        "not a new one",
    ),
    "another epoch": (lambda f, r: [f.submit(f.slot(), epoch=f.welcome.epoch ^ 1)], "epoch"),
    "a request number twice": (lambda f, r: [f.submit(), f.submit()], "region|after request"),
    "a dtype that disagrees": (
        lambda f, r: [f.submit(f.slot(), tensor=TensorRef(1, 0, 100, "float32", (100,)))],
        "does not have 100 bytes",
    ),
    "a shape that is huge": (
        lambda f, r: [f.submit(f.slot(), tensor=TensorRef(1, 0, 100, "uint8", (2**40, 2**40)))],
        "larger than any memory",
    ),
    "a shape that is huge and empty": (
        lambda f, r: [f.submit(f.slot(), tensor=TensorRef(1, 0, 0, "uint8", (2**61, 2**61, 0)))],
        "larger than any memory",
    ),
    "a tensor beyond its slot": (
        lambda f, r: [f.submit(f.slot(), tensor=TensorRef(1, 64, 100, "uint8", (100,)))],
        "exceeds its region",
    ),
    "an unknown dtype": (lambda f, r: [f.submit(f.slot(), tensor=TensorRef(1, 0, 100, "object", (100,)))], "dtype"),
    "a numpy object": (lambda f, r: [f.submit(f.slot(), tensor=TensorRef(1, 0, 96, "|O8", (12,)))], "dtype"),
    "a region that is not there": (
        lambda f, r: [f.submit(f.slot(), tensor=TensorRef(2, 0, 100, "uint8", (100,)))],
        "region 2 of 1",
    ),
    "a payload that names no tensor": (
        lambda f, r: [f.submit(f.slot(), content=Content(PAYLOAD, (), b"", (f.slot(),)))],
        "tensor 0 of 0",
    ),
    "a payload that is not msgpack": (lambda f, r: [f.submit(content=Content(b"\xc1"))], "not msgpack"),
    "too many in flight": (
        lambda f, r: [f.submit(content=Content(b"\xc0"), request_id=number) for number in range(1, 40)],
        "max_inflight",
    ),
    "too many calls": (lambda f, r: [Call(number, "nothing", b"\x90") for number in range(9)], "max_calls"),
    "a lease it does not hold": (lambda f, r: [LeaseReturn((999,))], "does not hold it"),
    "a lease in use": (lambda f, r: [f.submit(f.slot()), LeaseReturn((f.lease.lease_id,))], "slot in use"),
    "a lease larger than the slab": (lambda f, r: [LeaseRequest(1, 2**40)], "lease of"),
    "a reply slot it does not hold": (lambda f, r: [ReplyRelease((1,))], "does not hold it"),
    "a second hello": (lambda f, r: [Hello(1, 0)], "hello once"),
}


@pytest.mark.both_loops
@pytest.mark.parametrize("forgery", FORGERIES)
async def test_a_forged_message_ends_its_connection_and_nothing_else(
    ring: shmring.Ring, connect: Any, socket_dir: Path, forgery: str, eventually: Any
) -> None:
    client = await connect("honest")
    forger = await Forger.attach(socket_dir)
    forge, reason = FORGERIES[forgery]
    await forger.send(*forge(forger, ring))
    *_, last = await forger.messages()
    assert isinstance(last, Refused)
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(last.reason)
    assert ring.statistics().protocol_errors == 1
    assert await client.request({"x": torch.ones(5000, dtype=torch.uint8)}, timeout=5) == 5000
    await eventually(lambda: ring.statistics().slots_in_use == 0)
    ring._book.check()
    # Its process (this one) lives, so what it leased is kept from everybody.
    assert ring.statistics().quarantined_nbytes == forger.lease.nbytes
    forger.close()


@pytest.mark.parametrize("damage", ["generation", "nbytes", "magic"])
async def test_a_header_that_differs_from_its_descriptor_is_stale(ring: shmring.Ring, forger: Forger, damage: str) -> None:
    submit = forger.submit(forger.slot())
    if damage == "magic":
        forger.slab.anchor(forger.lease.offset, 8)[:] = 0
    else:
        generation, nbytes = forger.generation(), 100
        changed = {"generation": (generation + 1, nbytes), "nbytes": (generation, nbytes + 1)}[damage]
        forger.slab.write_slot_header(forger.lease.offset, *changed)
    await forger.send(submit)
    *_, last = await forger.messages()
    assert isinstance(last, Refused)
    assert "holds generation" in last.reason
    assert ring.statistics().slots_in_use == 0


@pytest.mark.parametrize(
    "data",
    [
        PREFIX.pack(65537),
        PREFIX.pack(2**32 - 1) + b"x" * 100,
        encode_frame(b"\xc1", 100),
        encode_frame(b"", 100),
        encode_frame(msgspec.msgpack.encode([99]), 100),
        encode_frame(msgspec.msgpack.encode([3, 1, "extra"]), 100),
        encode_frame(msgspec.msgpack.encode([3, -1]), 100),
        encode_frame(msgspec.msgpack.encode([3, 2**63]), 100),
        encode_frame(b"\x91" * 60000, 65536),
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
    ids=["oversized", "huge", "not msgpack", "empty", "unknown tag", "extra", "negative", "large", "deep", "http"],
)
async def test_what_is_no_message_ends_its_connection(ring: shmring.Ring, forger: Forger, data: bytes) -> None:
    await forger.send_bytes(data)
    *_, last = await forger.messages()
    assert isinstance(last, Refused)
    assert ring.statistics().protocol_errors == 1
    ring._book.check()


async def test_a_frame_may_come_byte_by_byte(ring: shmring.Ring, forger: Forger) -> None:
    for byte in encode_frame(encode_message(Goodbye()), 100):
        await forger.send_bytes(bytes([byte]))
    assert await forger.messages() == []
    assert ring.statistics().protocol_errors == 0
    assert ring.statistics().quarantined_nbytes == 0


async def test_a_frontend_that_never_reads_is_disconnected(serve: Any, socket_dir: Path, eventually: Any) -> None:
    async def fail(claim: shmring.Claim) -> None:
        raise ValueError("x" * 4096)

    ring = await serve(fail, name="honest", max_write_buffer_nbytes="64KiB", write_buffer_nbytes=4096)
    forger = await Forger.attach(socket_dir)
    sent = 0
    while ring.statistics().protocol_errors == 0:
        # A hundred at a time, so that it is never above max_inflight: what it does not read are the answers.
        requests = [forger.submit(content=Content(b"\xc0"), request_id=sent + number) for number in range(1, 101)]
        sent += len(requests)
        await asyncio.wait_for(forger.send(*requests), 5)
        await eventually(lambda: ring.statistics().failed >= sent or ring.statistics().protocol_errors)  # noqa: B023
        assert sent < 10_000, "what is not read is kept without bound"
    assert ring.statistics().clients == 0
    forger.close()


async def test_a_truncated_frame_is_the_end_of_a_connection_and_no_error(
    ring: shmring.Ring, socket_dir: Path, eventually: Any
) -> None:
    forger = await Forger.attach(socket_dir)
    await forger.send_bytes(PREFIX.pack(100) + b"half")
    forger.close()
    await eventually(lambda: ring.statistics().clients == 0)
    assert ring.statistics().protocol_errors == 0
