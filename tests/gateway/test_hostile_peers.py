"""Peers on other hosts that break the rules, are slow, vanish or are many: each fails alone, and no slot is lost."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import shmring
from shmring.gateway.gateway import _network_of
from shmring.memory.bundles import bundle
from shmring.transport.far_wire import (
    HEADER,
    HELLO_NBYTES,
    MAX_HEAD_NBYTES,
    PREAMBLE,
    WINDOW_NBYTES,
    Abort,
    Call,
    End,
    Hello,
    Read,
    Reply,
    Request,
    decode_answer,
    frame,
    hello_bytes,
)
from shmring.transport.streams import Pace, Stream
from tests.gateway.test_far_clients import MIB, TOKEN, gateway_of, serving
from tests.transport.test_streams import connected
from tests.waiting import eventually, turns

pytestmark = pytest.mark.filterwarnings("error::ResourceWarning")

HELLO = Hello(TOKEN.encode(), "far", bytes(range(16)))
BOUNDS = {"max_tensors": 4096, "max_payload_nbytes": 16 * MIB, "max_values": 524288}


@pytest.fixture
async def ring(socket_dir: Path) -> AsyncIterator[shmring.Ring]:
    async with serving(socket_dir, slab_nbytes="16MiB", reply_nbytes="4MiB") as ring:
        yield ring


class RawPeer:
    """A connection that sends what a test says."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> Any:
        head_nbytes, body_nbytes = HEADER.unpack(await self.reader.readexactly(HEADER.size))
        head = await self.reader.readexactly(head_nbytes)
        await self.reader.readexactly(body_nbytes)
        return decode_answer(head)

    async def read_to_the_end(self) -> bytes:
        with contextlib.suppress(ConnectionError):
            return await self.reader.read()
        return b""


@contextlib.asynccontextmanager
async def peer_of(ring: shmring.Ring, first: bytes | None = None) -> AsyncIterator[RawPeer]:
    """Connects, and says hello; or these bytes in its place."""
    host, port = ring.address.split("/")[2].split(":")
    peer = RawPeer(*await asyncio.open_connection(host, int(port)))
    try:
        await peer.send(hello_bytes(HELLO) if first is None else first)
        if first is None:
            assert type(await peer.answer()).__name__ == "Welcome"
        yield peer
    finally:
        peer.writer.close()
        with contextlib.suppress(ConnectionError):
            await peer.writer.wait_closed()


def request_of(payload: object, number: int = 1) -> tuple[bytes, bytes]:
    """A request's frame up to its body, and its body."""
    nbytes, parts = bundle(payload, **BOUNDS).laid_out()
    return frame(Request(number, "", bundle(payload, **BOUNDS).payload), nbytes), b"".join(map(bytes, parts))


async def require_that_all_is_well(ring: shmring.Ring, submitted: int) -> None:
    """The gateway holds nothing, no request came but these, and who behaves is served."""
    gateway = gateway_of(ring)
    await eventually(lambda: not gateway._peers and gateway._filling.requests == 0 and not gateway._sessions)
    here = gateway._client.statistics
    await eventually(lambda: here().slots_writing == here().slots_submitted == here().slots_draining == here().in_flight == 0)
    assert ring.statistics().submitted == submitted
    async with shmring.connect(ring.address, token=TOKEN) as client:
        x = torch.arange(100_000)
        assert torch.equal((await client.request({"x": x}, timeout=60))["x"], x)


X = {"x": torch.ones(MIB // 4)}
HEAD, BODY = request_of(X)
PAYLOAD = bundle(X, **BOUNDS).payload


def changed(at: int, data: bytes) -> bytes:
    first = bytearray(hello_bytes(HELLO))
    first[at : at + len(data)] = data
    return bytes(first)


def hello_of(**fields: Any) -> bytes:
    return hello_bytes(msgspec.structs.replace(HELLO, **fields))


STRANGERS: dict[str, bytes] = {
    "another protocol": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
    "another version": changed(8, b"\2"),
    "a long hello": PREAMBLE.pack(changed(0, b"")[:8], 1, HELLO_NBYTES + 1) + bytes(HELLO_NBYTES + 1),
    "no hello": PREAMBLE.pack(changed(0, b"")[:8], 1, 20) + b"\xc1" * 20,
    "a wrong token": hello_of(token=b"another secret, as long"),
    "a token that begins right": hello_of(token=TOKEN.encode()[:-1]),
    "an empty token": hello_of(token=b""),
    "another engine": hello_of(engine="other"),
    "a short session": hello_of(session=b"short"),
}


@pytest.mark.parametrize("first", STRANGERS.values(), ids=STRANGERS)
async def test_a_stranger_is_refused(ring: shmring.Ring, first: bytes) -> None:
    async with peer_of(ring, first + HEAD + BODY) as peer:
        answer = await peer.read_to_the_end()
    assert not answer or type(decode_answer(answer[HEADER.size :])).__name__ == "Refused"
    assert gateway_of(ring).refused == 1
    await require_that_all_is_well(ring, 0)


def packed(payload: bytes, nbytes: int = MIB, number: int = 1) -> bytes:
    return frame(Request(number, "", payload), nbytes)


def moved(offset: int) -> bytes:
    """The payload, with its tensor at another place of its body."""
    place = PAYLOAD.index((MIB).to_bytes(8, "little"))  # its bytes; where it begins stands before that
    return PAYLOAD[: place - 8] + offset.to_bytes(8, "little") + PAYLOAD[place:]


NESTED = b"\x91" * 100_000 + b"\xc0"
FRAMES: dict[str, bytes] = {
    "a head without end": HEADER.pack(2**32 - 1, 0),
    "a head that is too large": HEADER.pack(16 * MIB + MAX_HEAD_NBYTES + 1, 0),
    "a body without end": HEADER.pack(100, 2**64 - 1),
    "a body larger than all there is": HEADER.pack(100, 65 * MIB),
    "no head": HEADER.pack(0, 0),
    "a head that is no message": HEADER.pack(4, 0) + b"\xc1abc",
    "a message of the other side": frame(Reply(1, b"\xc0")),
    "an end": frame(End(1, (0, 0, False))),
    "a negative number": HEADER.pack(3, 0) + b"\x92\x02\xff",
    "a body for an abort": frame(Abort(1), 10) + bytes(10),
    "more bytes than its tensors have": packed(PAYLOAD, MIB + 64),
    "fewer": packed(PAYLOAD, MIB - 64),
    "bytes and no tensors": packed(msgspec.msgpack.encode({"a": 1}), 64),
    "a tensor elsewhere": packed(moved(64)),
    "a tensor far away": packed(moved(2**62)),
    "a tensor askew": packed(moved(1), MIB + 1),
    "a payload that is none": packed(b"\xc1", 0),
    "two payloads": packed(b"\xc0\xc0", 0),
    "nested without end": packed(NESTED, 0),
    "too many values": packed(b"\xdd" + (600_000).to_bytes(4, "big") + bytes(600_000), 0),
    "a number twice": packed(msgspec.msgpack.encode({"do": "wait"}), 0) * 2,
    "calls without end": b"".join(frame(Call(n, "never", b"\x90")) for n in range(100)),
}


@pytest.mark.parametrize("sent", FRAMES.values(), ids=FRAMES)
async def test_who_breaks_the_rules_loses_its_connection_before_a_slot_is_taken(ring: shmring.Ring, sent: bytes) -> None:
    taken = gateway_of(ring)._client.statistics().slots_writing
    gateway_of(ring)._pace = Pace(patience=10_000)  # it is the rule that ends the connection, and not its silence
    async with peer_of(ring) as peer:
        with contextlib.suppress(ConnectionError):
            await peer.send(sent)
        await peer.read_to_the_end()
        assert gateway_of(ring)._client.statistics().slots_writing == taken == 0
    await require_that_all_is_well(ring, 1 if sent == FRAMES["a number twice"] else 0)


async def test_what_is_said_of_a_request_that_has_ended_is_late_and_no_fault(ring: shmring.Ring) -> None:
    async with peer_of(ring) as peer:
        await peer.send(frame(Abort(7)) + frame(Read(8, 2**60)) + request_of({"n": 1}, 2)[0])
        answers = [await peer.answer(), await peer.answer()]
        assert [type(each).__name__ for each in answers] == ["Reply", "End"]
    await require_that_all_is_well(ring, 1)


@pytest.mark.both_loops
async def test_bytes_may_come_one_at_a_time(ring: shmring.Ring) -> None:
    head, body = request_of({"x": torch.arange(200, dtype=torch.uint8)})
    sent = hello_bytes(HELLO) + head + body
    async with peer_of(ring, sent[:1]) as peer:
        peer.writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(1, len(sent)):
            await peer.send(sent[at : at + 1])
            await turns(2)
        assert [type(await peer.answer()).__name__ for _ in range(3)] == ["Welcome", "Reply", "End"]
    await require_that_all_is_well(ring, 1)


SILENT: dict[str, tuple[bytes, bytes | None]] = {
    "before the hello": (b"", b""),
    "in the hello": (b"", hello_bytes(HELLO)[:-3]),
    "in a header": (HEAD[:3], None),
    "in a head": (HEAD[:-2], None),
    "before the body": (HEAD, None),
    "in the body": (HEAD + BODY[: MIB // 2], None),
    "at the end of the body": (HEAD + BODY[:-1], None),
}


@pytest.mark.both_loops
@pytest.mark.parametrize("case", SILENT.values(), ids=SILENT)
async def test_who_falls_silent_is_left_after_a_while(ring: shmring.Ring, case: tuple[bytes, bytes | None]) -> None:
    gateway_of(ring)._pace = gateway_of(ring)._greeting_pace = Pace(patience=3, tick_s=0.01)
    sent, first = case
    async with peer_of(ring, first) as peer:
        await peer.send(sent)
        await peer.read_to_the_end()  # the gateway has closed the connection
    await require_that_all_is_well(ring, 0)


@pytest.mark.both_loops
@pytest.mark.parametrize("case", SILENT.values(), ids=SILENT)
async def test_who_vanishes_leaves_nothing(ring: shmring.Ring, case: tuple[bytes, bytes | None]) -> None:
    sent, first = case
    async with peer_of(ring, first) as peer:
        await peer.send(sent)
        await turns()
    await require_that_all_is_well(ring, 0)


@pytest.mark.both_loops
async def test_who_sends_too_slowly_is_left(ring: shmring.Ring) -> None:
    """It never falls silent."""
    gateway_of(ring)._pace = Pace(patience=20, tick_s=0.01)
    async with peer_of(ring) as peer:
        await peer.send(HEAD)
        with contextlib.suppress(ConnectionError, RuntimeError):  # uvloop's
            while not peer.reader.at_eof():
                await peer.send(b"x")
                await asyncio.sleep(0.001)
    await require_that_all_is_well(ring, 0)


async def test_who_is_idle_between_requests_stays(ring: shmring.Ring) -> None:
    gateway_of(ring)._pace = Pace(patience=1, tick_s=0.001)
    async with shmring.connect(ring.address, token=TOKEN) as client:
        await asyncio.sleep(0.05)  # many ticks, if there were any
        gateway_of(ring)._pace = Pace()
        assert await client.request({"n": 1}, timeout=60) == {"n": 1}


async def test_a_loop_that_was_held_up_has_not_waited_for_its_peers() -> None:
    """A second of patience, and three seconds in which the loop did not run."""
    loop = asyncio.get_running_loop()
    pace = Pace(patience=2, tick_s=0.02)
    held_up = asyncio.Event()

    def hold_up() -> None:
        end_s = loop.time() + 0.3
        while loop.time() < end_s:
            pass
        loop.call_soon(held_up.set)

    with connected() as (here, _):
        stream = Stream(here)
        async with pace.within(stream, 0):
            loop.call_soon(hold_up)
            await held_up.wait()
        stream.close()


@pytest.mark.both_loops
async def test_who_reads_nothing_is_left_and_what_it_kept_comes_back(ring: shmring.Ring) -> None:
    gateway_of(ring)._pace = Pace(patience=3, tick_s=0.01)
    head, body = request_of({"do": "stream", "times": 100, "x": X["x"]})
    async with peer_of(ring) as peer:
        await peer.send(head + body)
        await eventually(lambda: not gateway_of(ring)._peers)
    await eventually(lambda: ring.statistics().reply_free_nbytes == ring.statistics().reply_nbytes)
    gateway_of(ring)._pace = Pace()
    await require_that_all_is_well(ring, 1)


@pytest.mark.both_loops
async def test_many_who_say_nothing_keep_nobody_out(ring: shmring.Ring) -> None:
    host, port = ring.address.split("/")[2].split(":")
    silent: list[socket.socket] = []
    try:
        for _ in range(200):
            silent.append(socket.create_connection((host, int(port))))
            await asyncio.sleep(0)
            assert len(gateway_of(ring)._silent) <= 64
        async with shmring.connect(ring.address, token=TOKEN) as client:
            assert await client.request({"n": 1}, timeout=60) == {"n": 1}
        await eventually(lambda: gateway_of(ring).refused >= 200 - 64)
    finally:
        for each in silent:
            each.close()
    await require_that_all_is_well(ring, 1)


async def test_an_ipv6_host_with_many_addresses_takes_no_others_place(
    ring: shmring.Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has 2**64 addresses, and each of them could have one connection that says nothing."""
    loop, gateway = asyncio.get_running_loop(), gateway_of(ring)
    accept, numbers = loop.sock_accept, itertools.count()

    async def sock_accept(listener: socket.socket) -> tuple[socket.socket, Any]:
        accepted, _ = await accept(listener)
        return accepted, (f"2001:db8::{next(numbers):x}", 1, 0, 0)

    host, port = ring.address.split("/")[2].split(":")
    async with contextlib.AsyncExitStack() as stack:
        other = RawPeer(*await asyncio.open_connection(host, int(port)))  # from an address of its own
        stack.callback(other.writer.close)
        await eventually(lambda: len(gateway._silent) == 1)
        monkeypatch.setattr(loop, "sock_accept", sock_accept)
        for _ in range(100):
            stack.enter_context(socket.create_connection((host, int(port))))
            await asyncio.sleep(0)
        await eventually(lambda: gateway.refused >= 100 + 1 - 64)
        await other.send(hello_bytes(HELLO))
        assert type(await other.answer()).__name__ == "Welcome"


def test_an_ipv6_host_is_known_by_its_network() -> None:
    assert _network_of("2001:db8::1") == _network_of("2001:db8::ffff:1%eth0") != _network_of("2001:db8:0:1::1")
    assert len({_network_of(host) for host in ("10.0.0.1", "10.0.0.2", "::ffff:10.0.0.1", "::ffff:10.0.0.2", "::1")}) == 5


async def test_connections_that_have_the_token_are_bounded(ring: shmring.Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shmring.gateway.gateway._MOST_PEERS", 3)
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(3):
            await stack.enter_async_context(peer_of(ring))
        with pytest.raises(shmring.RemoteProtocolError, match="too many connections"):
            await shmring.connect(ring.address, token=TOKEN)
    await require_that_all_is_well(ring, 0)


async def test_who_vanishes_while_a_request_waits_for_a_slot_leaves_nothing(ring: shmring.Ring, socket_dir: Path) -> None:
    """Nobody reads what comes over that request's connection."""
    head, body = request_of({"do": "wait", "x": X["x"]})
    near = await shmring.connect("far", socket_dir=str(socket_dir))
    async with near, peer_of(ring) as first, peer_of(ring) as second:
        await second.send(head + body)
        await eventually(lambda: ring.statistics().running == 1)
        async with near.slot("8MiB"):
            await second.send(request_of({"x": torch.ones(6 * MIB // 4)}, 2)[0])
            await eventually(lambda: gateway_of(ring)._filling.requests == 1)
            first.writer.close()
            await eventually(lambda: ring.statistics().running == 0 and not gateway_of(ring)._peers)
            assert gateway_of(ring)._filling.requests == 0
    await require_that_all_is_well(ring, 1)


async def test_what_is_being_received_leaves_the_others_their_memory(ring: shmring.Ring, socket_dir: Path) -> None:
    """Six clients stop in the midst of a MiB each. What they may fill together is a fourth of what can be lent."""
    gateway = gateway_of(ring)
    async with contextlib.AsyncExitStack() as stack:
        peers = [await stack.enter_async_context(peer_of(ring, hello_of(session=bytes([n]) * 16))) for n in range(6)]
        for peer in peers:
            await peer.send(HEAD + BODY[:1000])
            assert type(await peer.answer()).__name__ == "Welcome"
        await eventually(lambda: gateway._filling.requests + gateway._filling.waiting == 6)
        await eventually(lambda: gateway._client.statistics().slots_writing == gateway._filling.requests)
        leasable_nbytes = next(iter(gateway._client.engines.values()))._welcome.leasable_nbytes  # type: ignore[union-attr]
        assert 1 <= gateway._filling.requests <= leasable_nbytes // 4 // MIB < 6
        async with shmring.connect("far", socket_dir=str(socket_dir)) as near:
            assert torch.equal((await near.request(X, timeout=60))["x"], X["x"])
        for peer in peers:
            await peer.send(BODY[1000:])
        for peer in peers:
            assert [type(await peer.answer()).__name__ for _ in range(2)] == ["Reply", "End"]
    await require_that_all_is_well(ring, 7)


async def test_a_number_is_its_requests_from_its_head_on(ring: shmring.Ring) -> None:
    async with peer_of(ring) as first, peer_of(ring) as second, peer_of(ring) as third:
        await second.send(HEAD + BODY[:1000])
        await eventually(lambda: gateway_of(ring)._client.statistics().slots_writing == 1)
        await third.send(HEAD + BODY)
        assert await third.read_to_the_end() == b""
        await second.send(BODY[1000:])
        assert [type(await second.answer()).__name__ for _ in range(2)] == ["Reply", "End"]
        await first.send(request_of({"n": 1}, 1)[0])
        assert type(await first.answer()).__name__ == "Reply"
    await require_that_all_is_well(ring, 2)


async def test_a_session_has_its_part_of_the_limits_and_one_more_for_each_connection(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of twelve. A request may have been given up by closing its connection, which the gateway has not heard yet."""
    monkeypatch.setattr("shmring.gateway.peer._FEW", 3)
    monkeypatch.setattr("shmring.ring.limits.MAX_CALLS", 12)
    async with serving(socket_dir, max_inflight=12) as ring:
        waits = [request_of({"do": "wait"}, number)[0] for number in range(9)]
        calls = [frame(Call(number, "never", b"\x90")) for number in range(9)]
        async with peer_of(ring) as first, peer_of(ring) as second:
            await first.send(b"".join(waits[:3] + calls[:3]))
            await second.send(b"".join(waits[3:5]))
            await eventually(lambda: ring.statistics().running == 5)
            await first.send(waits[5])
            assert await first.read_to_the_end() == b""
        async with peer_of(ring) as first, peer_of(ring) as second:
            await first.send(b"".join(calls[:3]))
            await eventually(lambda: next(iter(gateway_of(ring)._sessions.values())).calls == 3)
            await second.send(calls[3])
            assert await second.read_to_the_end() == b""
        await require_that_all_is_well(ring, 5)


async def test_replies_in_records_that_nobody_reads_are_bounded(ring: shmring.Ring) -> None:
    """The engine does not wait with them. The peer takes what comes, and never says that it has read something."""
    async with peer_of(ring) as peer:
        await peer.send(request_of({"do": "say", "times": 3000, "nbytes": 60_000})[0])
        answers: list[Any] = []
        async with asyncio.timeout(60):
            while not answers or not isinstance(answers[-1], End):
                answers.append(await peer.answer())
        failed = answers[-1].failed
        assert failed is not None
        assert failed[:2] == ("invalid", "CapacityError")
        assert (len(answers) - 1) * 60_000 <= WINDOW_NBYTES + 60_000
    await require_that_all_is_well(ring, 1)


async def test_an_accept_that_fails_again_and_again_leaves_the_loop_its_turns(
    ring: shmring.Ring, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried = 0

    async def sock_accept(_: socket.socket) -> None:
        nonlocal tried
        tried += 1
        raise OSError(errno.ENETDOWN, "the network is down")

    monkeypatch.setattr("shmring.gateway.gateway._PAUSE_S", 0.001)
    with monkeypatch.context() as broken:
        broken.setattr(asyncio.get_running_loop(), "sock_accept", sock_accept)
        async with peer_of(ring):  # was accepted before
            await eventually(lambda: tried > 5)
    assert [record.message.partition(":")[0] for record in caplog.records if "accepted" in record.message] == [
        "no connections from other hosts are accepted for now"
    ]
    await require_that_all_is_well(ring, 0)
