"""The handshake, and who may take part in it: with real sockets and real processes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from shmring.core.messages import PROTOCOL_VERSION, Abort, Hello, Refused, Welcome
from shmring.errors import EngineDeadError, PeerLostError, RemoteProtocolError
from shmring.transport.endpoint import (
    AttachedEngine,
    Peer,
    attach_engine,
    greet,
    handshake_frame,
    refuse,
    send_welcome,
)
from shmring.transport.listener import Listener, socket_path
from shmring.transport.rings import sealed_rings
from tests.waiting import cancel, turns

pytestmark = [pytest.mark.both_loops, pytest.mark.filterwarnings("error::ResourceWarning")]

ME = frozenset({os.getuid()})
HELLO = Hello(PROTOCOL_VERSION, 65536, "tester")
WELCOME = Welcome(
    version=PROTOCOL_VERSION, epoch=5, client_id=1, slab_nbytes=8192, block_nbytes=4096, leasable_nbytes=4096,
    max_inflight=1, max_calls=1, max_leases=1, message_ring_nbytes=1 << 16, max_record_nbytes=1 << 14, inline_nbytes=1,
    max_payload_nbytes=1, max_tensors=1, max_values=1, base_lease=None, engine_name="unit",
)  # fmt: skip


def frame_of(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def path(socket_dir: Path) -> Path:
    return socket_path("unit", str(socket_dir))


@pytest.fixture
def listener(path: Path) -> Iterator[Listener]:
    listener = Listener.create(path, others_may_connect=False)
    yield listener
    listener.close()


# -- the handshake ------------------------------------------------------------------------------------------------------


class Engine:
    """The engine's side of one handshake."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.slab_fds = (os.memfd_create("slab"), os.memfd_create("replies"))
        self.ring_fds = sealed_rings(1 << 16)
        self.load_fd = os.memfd_create("load")
        self.peers: list[Peer] = []
        self.connections: list[socket.socket] = []

    async def accept(self) -> socket.socket:
        connected, _ = await asyncio.get_running_loop().sock_accept(self.listener.socket)
        connected.setblocking(False)
        self.connections.append(connected)
        return connected

    async def greet(self, allowed: frozenset[int] = ME) -> Peer:
        peer = await greet(await self.accept(), allowed)
        self.peers.append(peer)
        return peer

    async def welcome(self) -> None:
        send_welcome(await self.greet(), WELCOME, self.slab_fds, self.ring_fds, self.load_fd)

    def close(self) -> None:
        for fd in (*self.slab_fds, *self.ring_fds, self.load_fd):
            os.close(fd)
        for peer in self.peers:
            os.close(peer.pidfd)
        for connected in self.connections:
            connected.close()


@pytest.fixture
async def engine(listener: Listener) -> AsyncIterator[Engine]:
    engine = Engine(listener)
    yield engine
    engine.close()


def let_go(attached: AttachedEngine) -> None:
    attached.socket.close()
    os.close(attached.pidfd)
    for fd in (*attached.slab_fds, *attached.ring_fds, attached.load_fd):
        os.close(fd)


async def test_a_handshake_passes_the_slab_and_says_who_is_there(engine: Engine, path: Path) -> None:
    _, attached = await asyncio.gather(engine.welcome(), attach_engine(path, HELLO, ME))
    assert attached.welcome == WELCOME
    received, sent = (
        (*attached.slab_fds, *attached.ring_fds, attached.load_fd),
        (*engine.slab_fds, *engine.ring_fds, engine.load_fd),
    )
    for ours, theirs in zip(received, sent, strict=True):
        assert os.path.sameopenfile(ours, theirs)
        assert not os.get_inheritable(ours)
    [peer] = engine.peers
    assert (peer.pid, peer.uid, peer.hello) == (os.getpid(), os.getuid(), HELLO)
    let_go(attached)


async def test_a_uid_that_is_not_allowed_is_refused_and_told(engine: Engine, path: Path) -> None:
    refused, attempt = await asyncio.gather(
        engine.greet(frozenset({os.getuid() + 1})), attach_engine(path, HELLO, ME), return_exceptions=True
    )
    assert isinstance(refused, RemoteProtocolError)
    assert isinstance(attempt, RemoteProtocolError)
    assert f"uid {os.getuid()} is not allowed" in str(attempt)


@pytest.mark.one_loop
async def test_an_engine_of_a_uid_that_is_not_trusted_hears_nothing(engine: Engine, path: Path) -> None:
    with pytest.raises(PermissionError):
        await attach_engine(path, HELLO, frozenset({os.getuid() + 1}))


async def test_another_protocol_version_is_refused_and_told(engine: Engine, path: Path) -> None:
    refused, attempt = await asyncio.gather(
        engine.greet(), attach_engine(path, Hello(PROTOCOL_VERSION + 1, 1), ME), return_exceptions=True
    )
    assert isinstance(refused, RemoteProtocolError)
    assert isinstance(attempt, RemoteProtocolError)
    assert f"protocol version {PROTOCOL_VERSION + 1} is not spoken here" in str(attempt)


@pytest.mark.first_row_on_both_loops
@pytest.mark.parametrize(
    ("data", "error"),
    [
        (handshake_frame(Abort(1)), "starts with Hello, not Abort"),
        (frame_of(b"\xc1"), "not a message"),
        (b"\xff\xff\xff\xff", "exceeds 4096"),
        (b"GET / HTTP/1.1\r\n\r\n", "exceeds 4096"),
        (frame_of(b"x" * 100)[:50], "ended during the handshake"),
        (b"", "ended during the handshake"),
    ],
)
async def test_who_does_not_say_hello_is_refused(engine: Engine, path: Path, data: bytes, error: str) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(os.fspath(path))
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        with pytest.raises((RemoteProtocolError, PeerLostError), match=error):
            await engine.greet()


async def test_a_hello_may_come_byte_by_byte(engine: Engine, path: Path) -> None:
    greeting = asyncio.create_task(engine.greet())
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(os.fspath(path))
        for byte in handshake_frame(HELLO):
            client.send(bytes([byte]))
            await asyncio.sleep(0)
        assert (await greeting).hello == HELLO


async def test_nobody_there_is_an_engine_that_is_dead(path: Path) -> None:
    with pytest.raises(EngineDeadError, match="no engine listens"):
        await attach_engine(path, HELLO, ME)
    with pytest.raises(EngineDeadError, match="no engine listens"):
        await attach_engine(path.parent / "missing" / path.name, HELLO, ME)


def reply_with(data: bytes, fds: list[int]) -> Callable[[socket.socket], None]:
    def send(connected: socket.socket) -> None:
        if fds:
            socket.send_fds(connected, [data], fds)
        else:
            connected.send(data)

    return send


WELCOME_FRAME = handshake_frame(WELCOME)


@pytest.mark.first_row_on_both_loops
@pytest.mark.parametrize(
    ("data", "fds", "error", "text"),
    [
        (b"", 0, EngineDeadError, "ended the connection"),
        (WELCOME_FRAME[:2], 1, EngineDeadError, "ended the connection"),
        (WELCOME_FRAME[:-1], 1, EngineDeadError, "ended the connection"),
        (WELCOME_FRAME, 0, RemoteProtocolError, "did not answer Hello"),
        (WELCOME_FRAME, 2, RemoteProtocolError, "did not answer Hello"),
        (handshake_frame(msgspec.structs.replace(WELCOME, engine_name="other\n")), 5, RemoteProtocolError, r"other\n"),
        (handshake_frame(Refused("no thanks")), 0, RemoteProtocolError, "no thanks"),
        (handshake_frame(Refused("no thanks")), 1, RemoteProtocolError, "no thanks"),
        (frame_of(b"\xc1\xc1"), 1, RemoteProtocolError, "not a message"),
        (b"\xff\xff\xff\xff", 1, RemoteProtocolError, "exceeds 4096"),
    ],
)
async def test_an_engine_that_answers_wrongly_is_an_error_and_leaks_no_descriptor(
    engine: Engine, path: Path, data: bytes, fds: int, error: type[Exception], text: str
) -> None:
    before = descriptors()

    async def answer() -> None:
        peer = await engine.greet()
        reply_with(data, [engine.slab_fds[0]] * fds)(peer.socket)
        peer.socket.close()
        os.close(peer.pidfd)
        engine.peers.clear()

    _, attempt = await asyncio.gather(answer(), attach_engine(path, HELLO, ME), return_exceptions=True)
    assert isinstance(attempt, error)
    assert text in str(attempt)
    del attempt
    assert descriptors() == before


@pytest.mark.first_row_on_both_loops
@pytest.mark.parametrize("count", [6, 20])  # as many as there happens to be room for, and more
async def test_surplus_descriptors_are_refused_and_closed(engine: Engine, path: Path, count: int) -> None:
    before = descriptors()

    async def answer() -> None:
        peer = await engine.greet()
        reply_with(WELCOME_FRAME, [engine.slab_fds[0]] * count)(peer.socket)

    with pytest.raises(RemoteProtocolError, match="did not answer Hello with Welcome"):
        await asyncio.gather(answer(), attach_engine(path, HELLO, ME))
    engine.close()
    engine.peers.clear()
    engine.connections.clear()
    engine.slab_fds, engine.ring_fds = sealed_rings(1 << 16), sealed_rings(1 << 16)
    engine.load_fd = os.memfd_create("load")
    assert descriptors() == before


async def test_a_process_without_room_for_the_descriptors_is_told_so(engine: Engine, path: Path) -> None:
    """The kernel passes what finds room, and says no more than that it has left some out."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = descriptors()

    async def answer() -> None:
        peer = await engine.greet()
        room = os.dup(0)  # the lowest number that is free, and then only this one and the next are
        os.close(room)
        resource.setrlimit(resource.RLIMIT_NOFILE, (room + 2, limits[1]))
        send_welcome(peer, WELCOME, engine.slab_fds, engine.ring_fds, engine.load_fd)

    try:
        _, attempt = await asyncio.gather(answer(), attach_engine(path, HELLO, ME), return_exceptions=True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert isinstance(attempt, OSError)
    assert attempt.errno == errno.EMFILE
    assert "ulimit -n" in str(attempt)
    del attempt
    engine.close()
    engine.peers.clear()
    engine.connections.clear()
    engine.slab_fds, engine.ring_fds = sealed_rings(1 << 16), sealed_rings(1 << 16)
    engine.load_fd = os.memfd_create("load")
    assert descriptors() == before


async def test_an_answer_may_come_in_pieces(engine: Engine, path: Path) -> None:
    async def answer() -> None:
        peer = await engine.greet()
        socket.send_fds(peer.socket, [WELCOME_FRAME[:1]], [*engine.slab_fds, *engine.ring_fds, engine.load_fd])
        for byte in WELCOME_FRAME[1:]:
            await asyncio.sleep(0)
            peer.socket.send(bytes([byte]))

    _, attached = await asyncio.gather(answer(), attach_engine(path, HELLO, ME))
    assert attached.welcome == WELCOME
    let_go(attached)


async def test_a_frontend_that_is_cancelled_at_any_moment_leaks_nothing(engine: Engine, path: Path) -> None:
    """One step further each time, until the handshake comes to its end."""
    for steps in range(200):
        before = descriptors()
        answering = asyncio.create_task(engine.welcome())
        attaching = asyncio.create_task(attach_engine(path, HELLO, ME))
        await turns(steps)
        arrived = attaching.done()
        attaching.cancel()
        attached, _ = await asyncio.gather(attaching, asyncio.wait([answering], timeout=0.02), return_exceptions=True)
        answering.cancel()  # it waits for a connection that never came
        await asyncio.gather(answering, return_exceptions=True)
        if isinstance(attached, AttachedEngine):
            let_go(attached)
        for peer in engine.peers:
            os.close(peer.pidfd)
        for connected in engine.connections:
            connected.close()
        engine.peers.clear()
        engine.connections.clear()
        del attached
        assert descriptors() == before, f"after {steps} steps"
        if arrived:
            return
    pytest.fail("the handshake never came to its end")


def test_refusing_one_that_is_gone_is_no_error() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours:
        refuse(ours, "too late")


async def test_welcoming_one_that_is_gone_says_so(engine: Engine, path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(os.fspath(path))
        client.sendall(handshake_frame(HELLO))
        peer = await engine.greet()
    with pytest.raises(PeerLostError):
        send_welcome(peer, WELCOME, engine.slab_fds, engine.ring_fds, engine.load_fd)


async def test_a_frontend_waits_while_as_many_wait_as_can(path: Path) -> None:
    """An engine that is stopped accepts nobody. asyncio took what the kernel says then for a connection."""
    with socket.socket(socket.AF_UNIX) as listening, contextlib.ExitStack() as waiting:
        listening.bind(os.fspath(path))
        listening.listen(0)
        listening.setblocking(False)
        while True:
            client = waiting.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            if client.connect_ex(os.fspath(path)) == errno.EAGAIN:
                break
        attaching = asyncio.create_task(attach_engine(path, HELLO, ME))
        await asyncio.wait([attaching], timeout=0.05)
        assert not attaching.done()
        loop = asyncio.get_running_loop()
        heard: list[asyncio.Task[bytes]] = []
        while not any(reading.done() for reading in heard):  # only the frontend says something
            with contextlib.suppress(BlockingIOError):
                connected, _ = listening.accept()
                connected.setblocking(False)
                waiting.enter_context(connected)
                heard.append(loop.create_task(loop.sock_recv(connected, 4096)))
            await asyncio.sleep(0.001)
        [said] = [reading.result() for reading in heard if reading.done()]
        assert HELLO.name.encode() in said
        await cancel(*heard)
        await cancel(attaching)
