"""The handshake at an engine's socket, which passes descriptors: of the slab's two parts, of two message rings, and of the
engine's load page.

Over the socket, a message of the handshake is its length, a little-endian u32, and that many bytes.

Each side checks the uid of the other (``SO_PEERCRED``) against an allow-list. A client checks the directory of the socket, the
socket itself, and whether the engine that answers has the name that was meant.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import dataclasses
import errno
import os
import socket
import stat
import struct
from collections.abc import Generator, Sequence
from pathlib import Path

from shmring.core.compiled import GIVING_UP
from shmring.core.messages import (
    PROTOCOL_VERSION,
    EngineMessage,
    FrontendMessage,
    Hello,
    Inspect,
    Join,
    RankTaken,
    Refused,
    Welcome,
    WorkerMessage,
    WorkerWelcome,
    decode_engine_message,
    decode_first_message,
    encode_message,
)
from shmring.core.printable import printable
from shmring.core.welcome import check_engine_name
from shmring.errors import EngineDeadError, PeerLostError, RankTakenError, RemoteProtocolError
from shmring.snapshot import MAX_SNAPSHOT_NBYTES
from shmring.transport.listener import check_directory
from shmring.transport.liveness import open_peer_pidfd
from shmring.transport.peers import peer_credentials

__all__ = [
    "AttachedEngine",
    "JoinedEngine",
    "Peer",
    "answer_inspection",
    "answer_peer",
    "attach_engine",
    "give_up",
    "greet",
    "handshake_frame",
    "has_answered",
    "inspect_engine",
    "join_engine",
    "send_welcome",
]

_PREFIX = struct.Struct("<I")
_HANDSHAKE_NBYTES = 4096  # of a Hello, Welcome or Refused: their fields are numbers and short text
# Beside Welcome: the slab but for replies, its part for replies, the ring to the frontend, that to the engine, the load page.
_DESCRIPTORS = 5
# Beside WorkerWelcome: both parts of the slab, broadcasts, the ring to the worker, that to the engine, its page.
_WORKER_DESCRIPTORS = 6
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.5  # of a frontend that finds no place among those that wait
_ROLES: dict[type[Welcome | WorkerWelcome], str] = {Welcome: "client", WorkerWelcome: "worker"}


# -- the engine's side -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """A frontend or a worker that has said hello. The owner of this object closes ``pidfd``."""

    socket: socket.socket
    pid: int
    uid: int
    pidfd: int
    hello: Hello | Join


async def greet(connected: socket.socket, allowed_uids: frozenset[int]) -> Peer | None:
    """Reads a new connection's hello and identifies its process. The caller bounds the time, and closes on any error.

    Returns:
        The process; None if it only asks what the engine is doing (:func:`answer_inspection`).

    Raises:
        RemoteProtocolError: it is not allowed, or neither a frontend nor a worker of this protocol version. It has got the
            reason.
        PeerLostError: it is gone.
    """
    pid, uid = peer_credentials(connected)
    if uid not in allowed_uids:
        raise _refusal(connected, f"uid {uid} is not allowed to connect to this engine")
    body = await _receive_frame(connected)
    hello = decode_first_message(body)
    if not isinstance(hello, Hello | Join | Inspect):
        raise _refusal(connected, f"a connection starts with Hello, not {type(hello).__name__}")
    if hello.version != PROTOCOL_VERSION:
        raise _refusal(connected, f"protocol version {hello.version} is not spoken here, only {PROTOCOL_VERSION}")
    if isinstance(hello, Inspect):
        return None
    return Peer(connected, pid, uid, open_peer_pidfd(connected, pid), hello)


def _refusal(connected: socket.socket, reason: str) -> RemoteProtocolError:
    refuse(connected, reason)
    return RemoteProtocolError(reason)


def refuse(connected: socket.socket, reason: str) -> None:
    """Tells a connection that has no transport yet why it ends."""
    with contextlib.suppress(OSError):  # it may be gone
        connected.send(handshake_frame(Refused(reason)))


def send_welcome(peer: Peer, welcome: Welcome, slab_fds: tuple[int, int], ring_fds: tuple[int, int], load_fd: int) -> None:
    """Answers a hello, with descriptors. The socket is new, so its buffer takes the frame at once.

    Args:
        peer: whom to answer.
        welcome: the answer.
        slab_fds: of the slab but for replies, and of its part for replies.
        ring_fds: of the message rings to the frontend and to the engine.
        load_fd: of the engine's load page.

    Raises:
        PeerLostError: it is gone.
    """
    answer_peer(peer, welcome, (*slab_fds, *ring_fds, load_fd))


def answer_peer(peer: Peer, answer: EngineMessage, fds: Sequence[int]) -> None:
    """Answers a frontend or a worker, with descriptors.

    Raises:
        PeerLostError: it is gone.
    """
    frame = handshake_frame(answer)
    try:
        sent = socket.send_fds(peer.socket, [frame], list(fds))
    except ConnectionError as error:
        raise PeerLostError(f"process {peer.pid} is gone: {error}") from error
    assert sent == len(frame), "a new socket's buffer holds more than a handshake"


async def answer_inspection(connected: socket.socket, answer: bytes) -> None:
    """Answers a connection that wants to know what the engine is doing, and ends it. The caller bounds the time."""
    with contextlib.suppress(OSError):  # it may be gone
        await asyncio.get_running_loop().sock_sendall(connected, _PREFIX.pack(len(answer)) + answer)
    connected.close()


def handshake_frame(message: FrontendMessage | WorkerMessage | EngineMessage | Inspect) -> bytes:
    """Returns what a message of the handshake is on the socket."""
    record = encode_message(message)
    assert len(record) <= _HANDSHAKE_NBYTES, "a handshake's fields are bounded"
    return _PREFIX.pack(len(record)) + record


async def _receive_frame(connected: socket.socket) -> bytes:
    (length,) = _PREFIX.unpack(await _receive_exactly(connected, _PREFIX.size))
    if length > _HANDSHAKE_NBYTES:
        raise RemoteProtocolError(f"a handshake of {length} bytes exceeds {_HANDSHAKE_NBYTES}")
    return await _receive_exactly(connected, length)


async def _receive_exactly(connected: socket.socket, nbytes: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < nbytes:
        try:
            more = await loop.sock_recv(connected, nbytes - len(data))
        except ConnectionError as error:
            raise PeerLostError(f"the connection ended during the handshake: {error}") from error
        if not more:
            raise PeerLostError("the connection ended during the handshake")
        data += more
    return data


# -- a frontend's side -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class AttachedEngine:
    """An engine that has said welcome. The owner of this object closes the descriptors."""

    socket: socket.socket
    pidfd: int
    slab_fds: tuple[int, int]
    ring_fds: tuple[int, int]
    load_fd: int
    welcome: Welcome


async def attach_engine(path: Path, hello: Hello, engine_uids: frozenset[int]) -> AttachedEngine:
    """Connects to the engine at ``path`` and shakes hands. The caller bounds the time.

    Raises:
        EngineDeadError: no process listens there (any more).
        PermissionError: the process that listens there, or the directory, is not to be trusted.
        RemoteProtocolError: the engine refuses this client (with its reason), or it is no engine.
        OSError: this process has no descriptors left, or a call failed for another reason that says nothing about the engine.
    """
    connected, pidfd, fds, welcome = await _attach(path, hello, engine_uids, _DESCRIPTORS)
    assert isinstance(welcome, Welcome)
    return AttachedEngine(connected, pidfd, (fds[0], fds[1]), (fds[2], fds[3]), fds[4], welcome)


@dataclasses.dataclass(frozen=True, slots=True)
class JoinedEngine:
    """An engine that has accepted a worker. The owner of this object closes the descriptors."""

    socket: socket.socket
    pidfd: int
    memory_fds: tuple[int, int, int]
    ring_fds: tuple[int, int]
    page_fd: int
    welcome: WorkerWelcome


async def join_engine(path: Path, join: Join, engine_uids: frozenset[int]) -> JoinedEngine:
    """Connects to the engine at ``path`` as a worker. The caller bounds the time.

    Raises:
        RankTakenError: a worker of that rank lives.
        EngineDeadError, PermissionError, RemoteProtocolError, OSError: as :func:`attach_engine`.
    """
    connected, pidfd, fds, welcome = await _attach(path, join, engine_uids, _WORKER_DESCRIPTORS)
    assert isinstance(welcome, WorkerWelcome)
    return JoinedEngine(connected, pidfd, (fds[0], fds[1], fds[2]), (fds[3], fds[4]), fds[5], welcome)


async def inspect_engine(path: Path, engine_uids: frozenset[int]) -> tuple[int, bytes]:
    """Asks the engine at ``path`` what it is doing. The caller bounds the time.

    Returns:
        The pid that its process has here, by the kernel's word (0: it can't be seen from here); its answer, which is JSON.

    Raises:
        EngineDeadError, PermissionError, RemoteProtocolError: as :func:`attach_engine`.
    """
    _check_socket(path, engine_uids)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connected:
        connected.setblocking(False)
        try:
            pid = await _greet_engine(connected, path, Inspect(PROTOCOL_VERSION), engine_uids)
            (length,) = _PREFIX.unpack(await _receive_exactly(connected, _PREFIX.size))
            if length > MAX_SNAPSHOT_NBYTES:
                raise RemoteProtocolError(f"a snapshot of {length} bytes exceeds {MAX_SNAPSHOT_NBYTES}")
            answer = await _receive_exactly(connected, length)
        except PeerLostError as error:
            raise EngineDeadError(
                f"the engine at {path} ended the connection: {error}; if it lives, its log says why", engine=path.stem
            ) from error
    if not answer.startswith(b"{"):  # a message of the handshake, which is no JSON
        refusal = decode_engine_message(answer)
        reason = printable(refusal.reason) if isinstance(refusal, Refused) else "its answer is no snapshot"
        raise RemoteProtocolError(f"the engine at {path} tells nothing: {reason}")
    return pid, answer


def has_answered(path: Path) -> Generator[bool]:
    """Asks the engine at a path what it is doing, and again if there is none or it has ended.

    Returns:
        For each time that it is asked for the next one: whether an engine of this user has answered. It waits for nothing.
    """
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connected, contextlib.suppress(OSError):
            connected.setblocking(False)
            connected.connect(os.fspath(path))
            connected.sendall(handshake_frame(Inspect(PROTOCOL_VERSION)))
            while peer_credentials(connected)[1] == os.getuid():
                try:
                    if not connected.recv(1, socket.MSG_PEEK):
                        break
                except BlockingIOError:
                    yield False
                else:
                    yield True
        yield False


_Attached = tuple[socket.socket, int, list[int], Welcome | WorkerWelcome]


async def _attach(path: Path, hello: Hello | Join, engine_uids: frozenset[int], descriptors: int) -> _Attached:
    _check_socket(path, engine_uids)
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.setblocking(False)
        return await _shake_hands(connected, path, hello, engine_uids, descriptors)
    except PeerLostError as error:
        connected.close()
        raise EngineDeadError(
            f"the engine at {path} ended the connection: {error}; if it lives, its log says why", engine=path.stem
        ) from error
    except BaseException:
        connected.close()
        raise


def _check_socket(path: Path, engine_uids: frozenset[int]) -> None:
    try:
        check_directory(path.parent, engine_uids | {0})
        mode = path.lstat().st_mode
    except FileNotFoundError as error:
        raise EngineDeadError(
            f"no engine listens at {path}: start one of that name, or set socket_dir to its own", engine=path.stem
        ) from error
    if not stat.S_ISSOCK(mode):
        raise PermissionError(f"{path} is in the place of the socket and is none (a symbolic link is refused, too)")


async def _shake_hands(
    connected: socket.socket, path: Path, hello: Hello | Join, engine_uids: frozenset[int], descriptors: int
) -> _Attached:
    pid = await _greet_engine(connected, path, hello, engine_uids)
    try:
        expected = Welcome if isinstance(hello, Hello) else WorkerWelcome
        return await _receive_welcome(connected, pid, path.stem, expected, descriptors)
    except BaseException:
        give_up(connected)
        raise


async def _greet_engine(
    connected: socket.socket, path: Path, hello: Hello | Join | Inspect, engine_uids: frozenset[int]
) -> int:
    """Connects, and sends the first message; returns the engine's pid."""
    try:
        await _connect(connected, path)
        pid, uid = peer_credentials(connected)
        if uid not in engine_uids:
            raise PermissionError(f"the process at {path} runs as uid {uid}; expected one of {sorted(engine_uids)}")
        await asyncio.get_running_loop().sock_sendall(connected, handshake_frame(hello))
    except (ConnectionError, FileNotFoundError) as error:
        raise EngineDeadError(f"no engine listens at {path}: {error}", engine=path.stem) from error
    return pid


async def _connect(connected: socket.socket, path: Path) -> None:
    """Connects. If as many wait for the engine as may (it is stopped, say), it waits for a place; the caller bounds the time.

    ``loop.sock_connect`` takes the kernel's answer for "under way", and so returns without a connection.
    """
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            return connected.connect(os.fspath(path))
        except BlockingIOError:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def give_up(connected: socket.socket) -> None:
    """Tells the engine that attaching was given up, and that this process uses none of the memory that the engine may have lent
    to it."""
    with contextlib.suppress(OSError):  # it is gone, or knows already
        connected.send(GIVING_UP)


async def _receive_welcome(
    connected: socket.socket, pid: int, name: str, expected: type[Welcome | WorkerWelcome], descriptors: int
) -> _Attached:
    prefix, fds = await _receive_with_fds(connected, descriptors)
    try:
        message = await _receive_body(connected, prefix)
        if isinstance(message, Refused):
            raise RemoteProtocolError(f"the engine refused this {_ROLES[expected]}: {printable(message.reason)}")
        if isinstance(message, RankTaken | Welcome | WorkerWelcome):
            check_engine_name(message.engine_name, name)
        if isinstance(message, RankTaken):
            raise RankTakenError(f"process {message.pid} is this engine's worker {message.rank}", rank=message.rank)
        if not isinstance(message, Welcome | WorkerWelcome) or type(message) is not expected or len(fds) != descriptors:
            if expected is Welcome:
                raise RemoteProtocolError(
                    "the engine did not answer Hello with Welcome, a slab in two parts, two message rings and a load page"
                )
            raise RemoteProtocolError(f"the engine did not answer Join with WorkerWelcome and {descriptors} descriptors")
        return connected, open_peer_pidfd(connected, pid), fds, message
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


async def _receive_body(connected: socket.socket, prefix: bytes) -> EngineMessage:
    if len(prefix) < _PREFIX.size:
        prefix += await _receive_exactly(connected, _PREFIX.size - len(prefix))
    (length,) = _PREFIX.unpack(prefix)
    if length > _HANDSHAKE_NBYTES:
        raise RemoteProtocolError(f"a handshake of {length} bytes exceeds {_HANDSHAKE_NBYTES}")
    return decode_engine_message(await _receive_exactly(connected, length))


async def _receive_with_fds(connected: socket.socket, descriptors: int) -> tuple[bytes, list[int]]:
    """Receives the first bytes of a frame and the descriptors that came with them."""
    space = socket.CMSG_SPACE(descriptors * array.array("i").itemsize)  # the kernel closes those that find no room
    while True:
        try:
            data, ancillary, flags, _ = connected.recvmsg(_PREFIX.size, space, socket.MSG_CMSG_CLOEXEC)
            break
        except (BlockingIOError, InterruptedError):
            await _readable(connected)
        except ConnectionError as error:
            raise PeerLostError(f"the connection ended during the handshake: {error}") from error
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    if data and not (flags & socket.MSG_CTRUNC and len(fds) < descriptors):
        return data, list(fds)
    for fd in fds:
        os.close(fd)
    if not data:
        raise PeerLostError("the engine closed the connection during the handshake")
    raise OSError(errno.EMFILE, f"{descriptors} descriptors of the engine find no room in this process; raise ulimit -n")


async def _readable(connected: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not future.done():
            future.set_result(None)

    loop.add_reader(connected.fileno(), wake)
    try:
        await future
    finally:
        loop.remove_reader(connected.fileno())
