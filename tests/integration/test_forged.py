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
from shmring import Ring
from shmring.core.compiled import GIVING_UP, RecordReader, RecordWriter
from shmring.core.messages import (
    PROTOCOL_VERSION,
    Call,
    EngineMessage,
    Failed,
    Goodbye,
    Hello,
    LeaseRequest,
    LeaseReturn,
    Refused,
    ReplyRelease,
    SlotRef,
    decode_engine_message,
    encode_message,
)
from shmring.memory.slab import Slab
from shmring.transport.endpoint import attach_engine
from shmring.transport.listener import socket_path
from shmring.transport.rings import map_rings
from tests.records import slot_extension, slot_header, submit_of, tensor_extension
from tests.waiting import eventually

TENSOR = tensor_extension(0, 0, 100, "uint8", (100,))


class Forger:
    """A connection that speaks the protocol as it likes: a socket, two rings, and the slab."""

    def __init__(self, engine: Any, slab: Slab) -> None:
        self.welcome = engine.welcome
        self.slab = slab
        self.socket = engine.socket
        self._pidfd = engine.pidfd
        self.incoming, self.outgoing = map_rings(engine.ring_fds, self.welcome.message_ring_nbytes)
        for fd in (*engine.ring_fds, engine.load_fd):
            os.close(fd)
        self.reader = RecordReader(self.incoming, self.socket.fileno())
        self.writer = RecordWriter(self.outgoing, self.socket.fileno())

    @classmethod
    async def attach(cls, socket_dir: Path) -> Forger:
        path = socket_path("honest", str(socket_dir))
        return cls.of(await attach_engine(path, Hello(PROTOCOL_VERSION, 65536, "forger"), frozenset({os.getuid()})))

    @classmethod
    def of(cls, engine: Any) -> Forger:
        welcome = engine.welcome
        reply_nbytes = welcome.slab_nbytes - welcome.block_nbytes - welcome.leasable_nbytes
        return cls(engine, Slab.attach(engine.slab_fds, welcome.slab_nbytes, reply_nbytes, welcome.epoch))

    @property
    def lease(self) -> Any:
        return self.welcome.base_lease

    def generation(self, number: int = 1) -> int:
        return (self.welcome.client_id << 40) + number

    def slot(self, nbytes: int = 100, number: int = 1, **changed: int) -> SlotRef:
        """An honest slot at the start of the base lease, header written, but for what is changed."""
        fields = {"lease_id": self.lease.lease_id, "offset": self.lease.offset, "nbytes": nbytes}
        ref = SlotRef(**{**fields, "generation": self.generation(number), **changed})
        self.write_header(ref.generation, ref.nbytes)
        return ref

    def write_header(self, generation: int, nbytes: int) -> None:
        """Writes what stands before the content of a slot at the start of the base lease."""
        header = slot_header(generation, nbytes)
        self.slab.bytes_at(self.lease.offset, len(header))[:] = list(header)

    def submit(
        self, copied: SlotRef | bytes | None = None, tensor: Any = TENSOR, *slots: SlotRef, request_id: int = 1, **changed: Any
    ) -> bytes:
        """An honest submission of a 100-byte tensor in the slot that it was copied to, but for what is changed."""
        fields = {"epoch": self.welcome.epoch, "request_id": request_id, "payload": {"x": tensor}, **changed}
        return submit_of(copied=copied, slots=slots, **fields)

    def say(self, payload: object = None, **changed: Any) -> bytes:
        """A submission of this payload, and no slots."""
        return self.submit(payload=payload, **changed)

    async def send(self, *messages: Any) -> None:
        for message in messages:
            await self.send_record(message if isinstance(message, bytes) else encode_message(message))

    async def send_record(self, record: bytes) -> None:
        """Publishes what is a message or none; goes on when the engine has closed the connection instead of reading."""
        while not self.writer.write(record):
            self.reader.sleep()
            if self.writer.wait_for_space(len(record)) and not await self._bell():
                return
        self.writer.ring_bell()

    def ring(self, bytes_sent: bytes = b"\0") -> None:
        """Sends a bell, or what is none."""
        with contextlib.suppress(ConnectionError):
            self.socket.send(bytes_sent)

    async def _bell(self) -> bool:
        """Waits for bells; False when the connection has ended."""
        with contextlib.suppress(ConnectionResetError):
            return bool(await asyncio.get_running_loop().sock_recv(self.socket, 65536))
        return False

    async def messages(self) -> list[EngineMessage]:
        """Everything that the engine says until it closes the connection."""
        messages: list[EngineMessage] = []
        is_open = True
        while is_open:
            if self.reader.sleep():
                is_open = await self._bell()
            while (record := self.reader.read()) is not None:
                messages.append(decode_engine_message(record))
            self.reader.ring_bell()
        return messages

    def outgoing_at(self, at: int) -> bytes:
        """A count of the ring to the engine, as it stands in memory."""
        return bytes(memoryview(self.outgoing)[at : at + 8])

    def close(self) -> None:
        self.socket.close()
        os.close(self._pidfd)
        self.slab.close()


@pytest.fixture
async def ring(serve: Any, monkeypatch: pytest.MonkeyPatch) -> Ring:
    async def answer(claim: shmring.Claim) -> None:
        await claim.reply(int(claim.payload["x"].sum()))

    monkeypatch.setattr("shmring.ring.limits.MAX_CALLS", 2)
    ring: Ring = await serve(answer, name="honest", max_inflight=8)
    return ring


@pytest.fixture
async def forger(ring: Ring, socket_dir: Path) -> AsyncIterator[Forger]:
    forger = await Forger.attach(socket_dir)
    yield forger
    forger.close()


def other_lease(forger: Forger, ring: Ring) -> dict[str, int]:
    """A lease of the honest client."""
    [lease] = [
        lease
        for client in ring._shell._book.clients.values()
        if client.client_id != forger.welcome.client_id
        for lease in client.leases.values()
    ]
    return {"lease_id": lease.lease_id, "offset": lease.start * 4096}


Forgery = Callable[[Forger, Ring], list[Any]]

FORGERIES: dict[str, tuple[Forgery, str]] = {
    "a slot before its lease": (lambda f, r: [f.submit(f.slot(offset=f.lease.offset - 4096))], "not inside lease"),
    "a slot beyond its lease": (lambda f, r: [f.submit(f.slot(nbytes=f.lease.nbytes))], "not inside lease"),
    "a slot whose end overflows": (lambda f, r: [f.submit(f.slot(nbytes=2**62))], "not inside lease"),
    "a slot off the blocks": (lambda f, r: [f.submit(f.slot(offset=f.lease.offset + 64))], "not inside lease"),
    "a slot in the slab's header": (lambda f, r: [f.submit(f.slot(offset=0))], "not inside lease"),
    "a slot in no lease": (lambda f, r: [f.submit(f.slot(lease_id=999))], "does not hold"),
    "a slot in another's lease": (lambda f, r: [f.submit(f.slot(**other_lease(f, r)))], "does not hold"),
    "a slot in place beyond its lease": (
        lambda f, r: [f.submit(None, TENSOR, f.slot(nbytes=f.lease.nbytes), payload=None)],
        "not inside lease",
    ),
    "a slot in place in another's lease": (
        lambda f, r: [f.submit(None, TENSOR, f.slot(**other_lease(f, r)), payload=None)],
        "does not hold",
    ),
    "two slots that overlap": (lambda f, r: [f.submit(f.slot(number=2), TENSOR, f.slot())], "overlaps a live slot"),
    "slots of two requests that overlap": (
        lambda f, r: [f.submit(f.slot()), f.submit(f.slot(number=2), request_id=2)],
        "overlaps a live slot",
    ),
    "a generation of another": (lambda f, r: [f.submit(f.slot(generation=(99 << 40) + 1))], "not a new one"),
    "a generation twice": (
        lambda f, r: [f.submit(f.slot()), f.submit(f.slot(offset=f.lease.offset + 4096), request_id=2)],
        "not a new one",
    ),
    "a slot a thousand times": (lambda f, r: [f.submit(None, TENSOR, *[f.slot()] * 1000, payload=None)], "not a new one"),
    "another epoch": (lambda f, r: [f.submit(f.slot(), epoch=f.welcome.epoch ^ 1)], "epoch"),
    "a request number twice": (lambda f, r: [f.say(), f.say()], "after request"),
    "a request number that is smaller": (lambda f, r: [f.say(request_id=5), f.say(request_id=4)], "after request"),
    "a dtype that disagrees": (
        lambda f, r: [f.submit(f.slot(), tensor_extension(0, 0, 100, "float32", (100,)))],
        "does not have 100 bytes",
    ),
    "a shape that is huge": (
        lambda f, r: [f.submit(f.slot(), tensor_extension(0, 0, 100, "uint8", (2**40, 2**40)))],
        "larger than any memory",
    ),
    "a shape that is huge and empty": (
        lambda f, r: [f.submit(f.slot(), tensor_extension(0, 0, 0, "uint8", (2**61, 2**61, 0)))],
        "larger than any memory",
    ),
    "a tensor beyond its slot": (
        lambda f, r: [f.submit(f.slot(), tensor_extension(0, 64, 100, "uint8", (100,)))],
        "exceeds its region",
    ),
    "a tensor beyond its slot in place": (
        lambda f, r: [f.submit(None, tensor_extension(1, 64, 100, "uint8", (100,)), f.slot())],
        "exceeds its region",
    ),
    "a tensor that is nowhere": (lambda f, r: [f.submit()], "exceeds its region of 0 bytes"),
    "an unknown dtype": (lambda f, r: [f.submit(f.slot(), tensor_extension(0, 0, 100, 0, (100,), b"object"))], "dtype"),
    "a dtype of an unknown number": (lambda f, r: [f.submit(f.slot(), tensor_extension(0, 0, 100, 200, (100,)))], "dtype"),
    "a numpy object": (lambda f, r: [f.submit(f.slot(), tensor_extension(0, 0, 96, 0, (12,), b"|O8"))], "dtype"),
    "a region that is not there": (
        lambda f, r: [f.submit(f.slot(), tensor_extension(1, 0, 100, "uint8", (100,)))],
        "region 1 of 0",
    ),
    "a region in place that is not there": (
        lambda f, r: [f.submit(None, tensor_extension(2, 0, 100, "uint8", (100,)), f.slot())],
        "region 2 of 1",
    ),
    "a payload whose tensor is none": (
        lambda f, r: [f.submit(f.slot(), msgspec.msgpack.Ext(83, b"\0\0\0\0"))],
        "not as long as it says",
    ),
    "a payload that is not msgpack": (lambda f, r: [f.say(msgspec.Raw(b"\xc1"))], "not msgpack"),
    "a payload that is cut off": (lambda f, r: [f.say(msgspec.Raw(b"\x92\xc0"))], "cut off"),
    "a payload that something follows": (lambda f, r: [f.say(msgspec.Raw(b"\xc0\xc0"))], "something follows"),
    "a payload whose text is none": (lambda f, r: [f.say(msgspec.Raw(b"\xa1\xff"))], "not msgpack"),
    "too many in flight": (lambda f, r: [f.say(request_id=number) for number in range(1, 40)], "max_inflight"),
    "too many calls": (lambda f, r: [Call(number, "nothing", b"\x90") for number in range(9)], "max_calls"),
    "a lease it does not hold": (lambda f, r: [LeaseReturn((999,))], "does not hold it"),
    "a lease in use": (lambda f, r: [f.submit(f.slot()), LeaseReturn((f.lease.lease_id,))], "slot in use"),
    "a lease larger than the slab": (lambda f, r: [LeaseRequest(1, 2**40)], "lease of"),
    "a reply slot it does not hold": (lambda f, r: [ReplyRelease((1,))], "does not hold it"),
    "more inline than agreed upon": (lambda f, r: [f.submit(bytes(1025), payload=None)], "inline_nbytes"),
    "a slot that is described in another way": (
        lambda f, r: [f.say(copied=msgspec.msgpack.Ext(82, bytes(slot_extension().data)[:-1]))],
        "described in another way",
    ),
    "a fence and no slot in device memory": (lambda f, r: [f.say(fence=bytes(64))], "event"),
    "a payload in no slot": (lambda f, r: [f.say(lies_at=(0, 9))], "exceeds the slot"),
    "a payload of nothing in a slot": (lambda f, r: [f.say(copied=f.slot(), lies_at=(0, 0))], "exceeds the slot"),
    "a payload beyond its slot": (lambda f, r: [f.say(copied=f.slot(), lies_at=(92, 9))], "exceeds the slot"),
    "a payload whose end overflows": (lambda f, r: [f.say(copied=f.slot(), lies_at=(2**62, 9))], "exceeds the slot"),
    "a payload whose end wraps": (lambda f, r: [f.say(copied=f.slot(), lies_at=(2**64 - 8, 9))], "exceeds the slot"),
    "a payload larger than it may be": (
        lambda f, r: [f.say(copied=f.slot(nbytes=2**40), lies_at=(0, 2**30))],
        "max_payload_nbytes",
    ),
    "a payload twice": (lambda f, r: [f.say(1, copied=f.slot(), lies_at=(0, 9))], "described in another way"),
    "a goodbye that keeps what it does not have": (
        lambda f, r: [Goodbye(tuple(range(99)), (), more=True)],
        "keeps more than there is",
    ),
    "a goodbye that never ends": (lambda f, r: [Goodbye(more=True)], "nothing in one of them"),
    "more ids than a message has": (lambda f, r: [msgspec.Raw(msgspec.msgpack.encode([6, [1] * 1025]))], "length <= 1024"),
    "a second hello": (lambda f, r: [Hello(1, 0)], "Hello was sent a second time"),
}


@pytest.mark.first_row_on_both_loops
@pytest.mark.parametrize("forgery", FORGERIES)
async def test_a_forged_message_ends_its_connection_and_nothing_else(
    ring: Ring, connect: Any, socket_dir: Path, forgery: str
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
    ring._shell._book.check()
    # Its process (this one) lives, so what it leased is kept from everybody.
    assert ring.statistics().quarantined_nbytes == forger.lease.nbytes
    forger.close()


async def test_what_a_frontend_says_of_itself_can_be_printed(
    ring: Ring, socket_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    path = socket_path("honest", str(socket_dir))
    name = "\x1b[31mred\nERROR: not a line of ours"
    engine = await attach_engine(path, Hello(PROTOCOL_VERSION, 65536, name), frozenset({os.getuid()}))
    forger = Forger.of(engine)
    await forger.send(msgspec.Raw(msgspec.msgpack.encode([4, 1, 4096, 0, 7, True])))
    await eventually(lambda: ring.statistics().protocol_errors == 1)
    said = [record.getMessage() for record in caplog.records]
    assert any("\\x1b[31mred\\nERROR: not a line of ours" in text for text in said)
    assert all(text.isprintable() for text in said)
    forger.close()


async def test_whatever_stands_in_the_slabs_header_others_attach_and_are_answered(forger: Forger, connect: Any) -> None:
    forger.slab.bytes_at(0, 4096)[:] = 0xFF
    client = await connect("honest")
    assert await client.request({"x": torch.ones(5000, dtype=torch.uint8)}, timeout=5) == 5000


@pytest.mark.parametrize("damage", ["generation", "nbytes", "magic"])
async def test_a_header_that_differs_from_its_descriptor_is_stale(ring: Ring, forger: Forger, damage: str) -> None:
    """Whoever has the slab may have written it: that fails its request, and convicts nobody."""
    submit = forger.submit(forger.slot())
    if damage == "magic":
        forger.slab.bytes_at(forger.lease.offset, 8)[:] = 0
    else:
        generation, nbytes = forger.generation(), 100
        forger.write_header(*{"generation": (generation + 1, nbytes), "nbytes": (generation, nbytes + 1)}[damage])
    await forger.send(submit)
    await eventually(lambda: ring.statistics().failed == 1)
    assert ring.statistics().slots_in_use == 0
    assert ring.statistics().protocol_errors == 0
    await forger.send(Goodbye())
    [failed] = [message for message in await forger.messages() if isinstance(message, Failed)]
    assert (failed.request_id, failed.kind, failed.type_name) == (1, "invalid", "StaleDescriptorError")
    assert ("no slot's header" if damage == "magic" else "holds generation") in failed.message


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([99]),
        msgspec.msgpack.encode([3, 1, "extra"]),
        msgspec.msgpack.encode([3, -1]),
        msgspec.msgpack.encode([3, 2**63]),
        b"\x91" * 60000,
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
    ids=["empty", "not msgpack", "unknown tag", "extra", "negative", "large", "deep", "http"],
)
async def test_what_is_no_message_ends_its_connection(ring: Ring, forger: Forger, record: bytes) -> None:
    await forger.send_record(record)
    *_, last = await forger.messages()
    assert isinstance(last, Refused)
    assert ring.statistics().protocol_errors == 1
    ring._shell._book.check()


TAIL, HEAD, LENGTH = 0, 64, 4096


@pytest.mark.parametrize(
    ("ring_of", "at", "value", "reason"),
    [
        ("outgoing", TAIL, 2**18 + 8, "published more than it holds"),
        ("outgoing", TAIL, 4, "published more than it holds"),
        ("outgoing", TAIL, 2**64 - 8, "published more than it holds"),
        ("incoming", HEAD, 2**20, "has taken more than was published"),
        ("incoming", HEAD, 2**63, "has taken more than was published"),
    ],
)
async def test_a_count_that_cannot_be_true_ends_its_connection(
    ring: Ring,
    connect: Any,
    forger: Forger,
    ring_of: str,
    at: int,
    value: int,
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = await connect("honest")
    memoryview(getattr(forger, ring_of))[at : at + 8] = value.to_bytes(8, "little")
    if ring_of == "incoming":  # the engine looks at it when the ring seems to be full, or it is to answer
        frontend = next(each for each in ring._shell._frontends.values() if each.client_id == forger.welcome.client_id)
        while frontend.connected and frontend.link.can_write:
            frontend.link.send(Refused("x" * 10_000))
            await asyncio.sleep(0)
    forger.ring()
    await eventually(lambda: ring.statistics().protocol_errors == 1)
    assert reason in caplog.text
    assert await client.request({"x": torch.ones(5000, dtype=torch.uint8)}, timeout=5) == 5000
    ring._shell._book.check()


async def test_a_length_that_cannot_be_true_ends_its_connection(ring: Ring, forger: Forger) -> None:
    memory = memoryview(forger.outgoing)
    memory[LENGTH : LENGTH + 4] = (2**16 + 1).to_bytes(4, "little")
    memory[TAIL : TAIL + 8] = (2**17).to_bytes(8, "little")
    forger.ring()
    *_, last = await forger.messages()
    assert isinstance(last, Refused)
    assert "longer than what was published" in last.reason


@pytest.mark.parametrize("data", [b"x", b"\0\0\2", b"GET / HTTP/1.1\r\n\r\n"])
async def test_what_is_no_bell_ends_its_connection(ring: Ring, forger: Forger, data: bytes) -> None:
    forger.ring(data)
    *_, last = await forger.messages()
    assert isinstance(last, Refused)
    assert "no bell" in last.reason
    assert ring.statistics().protocol_errors == 1
    assert ring.statistics().quarantined_nbytes == forger.lease.nbytes


async def test_who_gives_up_while_it_attaches_keeps_nothing(ring: Ring, forger: Forger) -> None:
    forger.ring(GIVING_UP)
    assert await forger.messages() == []
    assert ring.statistics().protocol_errors == 0
    assert ring.statistics().quarantined_nbytes == 0


async def test_nobody_can_truncate_what_the_engine_reads(ring: Ring, socket_dir: Path) -> None:
    path = socket_path("honest", str(socket_dir))
    engine = await attach_engine(path, Hello(PROTOCOL_VERSION, 65536, "forger"), frozenset({os.getuid()}))
    for fd in (*engine.ring_fds, engine.load_fd):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
    for fd in (*engine.ring_fds, *engine.slab_fds, engine.load_fd, engine.pidfd):
        os.close(fd)
    engine.socket.close()


@pytest.mark.parametrize(
    "data",
    [
        b"\xc1" * 64,
        b"\x92\xc0",
        b"\xc0\xc0",
        b"\xa1\xff",
        msgspec.msgpack.encode([tensor_extension(9, 0, 0, "uint8", (0,))]),
        msgspec.msgpack.encode([tensor_extension(0, 64, 100, "uint8", (100,))]),
    ],
    ids=["not msgpack", "cut off", "followed", "no text", "in no region", "beyond its region"],
)
async def test_a_wrong_payload_in_a_slot_fails_its_request_and_nothing_else(ring: Ring, forger: Forger, data: bytes) -> None:
    """Whoever has the slab may have written there: that convicts nobody."""
    slot = forger.slot(nbytes=100)
    forger.slab.bytes_at(forger.lease.offset + 64, 100)[: len(data)] = list(data)
    await forger.send(forger.say(copied=slot, lies_at=(0, len(data))))
    await eventually(lambda: ring.statistics().failed == 1)
    assert ring.statistics().protocol_errors == 0
    await forger.send(Goodbye())
    kinds = [message.kind for message in await forger.messages() if isinstance(message, Failed)]
    assert kinds == ["invalid"]


async def test_a_frontend_that_never_reads_is_disconnected(
    serve: Any, socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shmring.ring.frontend._OTHER_UNREAD_NBYTES", 1 << 20)
    monkeypatch.setattr("shmring.ring.frontend._FAILED_NBYTES", 0)

    async def fail(claim: shmring.Claim) -> None:
        raise ValueError("x" * 4096)

    ring = await serve(fail, name="honest")
    forger = await Forger.attach(socket_dir)
    sent = 0
    while ring.statistics().protocol_errors == 0:
        # A hundred at a time, so that it is never above max_inflight: what it does not read are the answers.
        requests = [forger.say(request_id=sent + number) for number in range(1, 101)]
        sent += len(requests)
        await asyncio.wait_for(forger.send(*requests), 5)
        await eventually(lambda: ring.statistics().failed >= sent or ring.statistics().protocol_errors)  # noqa: B023
        assert sent < 10_000, "what is not read is kept without bound"
    assert ring.statistics().clients == 0
    forger.close()


async def test_a_record_that_was_never_published_is_the_end_of_a_connection_and_no_error(ring: Ring, socket_dir: Path) -> None:
    forger = await Forger.attach(socket_dir)
    memoryview(forger.outgoing)[LENGTH : LENGTH + 8] = b"\x40\0\0\0half"
    forger.close()
    await eventually(lambda: ring.statistics().clients == 0)
    assert ring.statistics().protocol_errors == 0


# -- one that asks for a great deal ----------------------------------------------------------------------------------------


async def test_what_one_frontend_asks_for_does_not_hold_up_another(serve: Any, connect: Any, socket_dir: Path) -> None:
    """Thousands of messages lie in a ring, each of which has the engine look through all leases."""

    async def answer(claim: shmring.Claim) -> None:
        await claim.reply(1)

    await serve(answer, name="honest", slab_nbytes="16MiB")
    client = await connect("honest", lease_nbytes="4KiB")
    slots = [await client.slot(4000) for _ in range(200)]
    forger = await Forger.attach(socket_dir)
    requests = 3000
    for number in range(1, requests + 1):
        assert forger.writer.write(encode_message(LeaseRequest(number, 10 << 20)))
    forger.writer.ring_bell()
    forger.ring()
    assert await client.request("x", timeout=5) == 1
    unread_nbytes = int.from_bytes(forger.outgoing_at(TAIL), "little") - int.from_bytes(forger.outgoing_at(HEAD), "little")
    assert unread_nbytes > 0, "the answer waited for all that the other one has asked for"
    for slot in slots:
        slot.close()
    forger.close()
