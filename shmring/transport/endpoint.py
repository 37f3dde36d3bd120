"""Where the socket is, which processes may use it, and the handshake, which passes descriptors: of the slab's two parts, of two
message rings, and of the engine's load page.

Over the socket, a message of the handshake is its length, a little-endian u32, and that many bytes.

The socket lies in a directory that only its owner can write to, mode 0600, and its peer's uid is checked against an
allow-list (``SO_PEERCRED``): a name in a world-writable directory proves nothing.

One engine has a name in a directory. It holds two things that end with its process, and a forked child closes its copies at
once:

- a ``flock`` on a lock beside the socket. All processes that see the directory see it, also those in other containers. But
  whoever removes the directory removes it as well (logind does that to ``$XDG_RUNTIME_DIR`` when its user logs out);
- an address that only the kernel knows (``unix(7)``: an abstract socket), which nobody can remove. It is made of the name, the
  path of the directory, the user and the mount namespace, so that containers that share a network, and not their files, have
  one each.

An engine looks every now and then whether socket and lock are where they were, and makes them again if they are not
(:meth:`Listener.keep`).
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import os
import socket
import stat
import struct
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

from shmring.core.compiled import GIVING_UP
from shmring.core.loggers import logger_of
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
from shmring.door import directory_of, shown, validate_name
from shmring.errors import EngineDeadError, LocalProtocolError, PeerLostError, RankTakenError, RemoteProtocolError
from shmring.snapshot import MAX_SNAPSHOT_NBYTES
from shmring.transport.liveness import open_peer_pidfd

__all__ = [
    "AttachedEngine",
    "JoinedEngine",
    "Listener",
    "Peer",
    "answer_inspection",
    "answer_peer",
    "attach_engine",
    "describe_peer",
    "give_up",
    "greet",
    "handshake_frame",
    "inspect_engine",
    "join_engine",
    "peer_pid",
    "send_welcome",
    "socket_path",
    "sweep_names",
]

logger = logger_of("shmring.transport")

_PREFIX = struct.Struct("<I")
_HANDSHAKE_NBYTES = 4096  # of a Hello, Welcome or Refused: their fields are numbers and short text
# Beside Welcome: the slab but for replies, its part for replies, the ring to the frontend, that to the engine, the load page.
_DESCRIPTORS = 5
# Beside WorkerWelcome: both parts of the slab, broadcasts, the ring to the worker, that to the engine, its page.
_WORKER_DESCRIPTORS = 6
_LOCK_MARK = b"shmring"  # in a lock, after the pid: other files that end with .lock are not ours
_LOCK_NBYTES = 64
_SWEEPS = 5  # sweeps that may hold a lock, one after the other, when an engine takes its name
_SWEEP_S = 0.01  # far longer than that takes one
_BETWEEN_CALLS = 5  # looks at an address that another process has taken, and at which it does not listen yet
_BETWEEN_CALLS_S = 0.01
_PROBES = 128  # processes that may ask who has a name until its engine looks again
_BACKLOG = 512  # frontends that may connect at the same moment
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.5  # of a frontend that finds no place among them
_MAX_PATH_NBYTES = 107  # of a Unix socket's address
_PEER_CREDENTIALS = struct.Struct("3i")
_ROLES: dict[type[Welcome | WorkerWelcome], str] = {Welcome: "client", WorkerWelcome: "worker"}


def socket_path(name: str, socket_dir: str | None) -> Path:
    """Returns where the engine of a name listens.

    Args:
        name: the engine's name.
        socket_dir: the configured directory; None: ``$XDG_RUNTIME_DIR/shmring``, else ``/tmp/shmring-<uid>``.

    Raises:
        ValueError: the name can't be a file's name, or the path is longer than a socket's address can be.
        TypeError: the name is no text, or the directory no path.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    given = directory_of(socket_dir, "socket_dir")
    if given is not None:
        directory = Path(given)
    else:
        directory = Path(runtime, "shmring") if runtime else Path(f"/tmp/shmring-{os.getuid()}")
    path = directory / f"{validate_name(name)}.sock"
    if len(os.fsencode(path)) > _MAX_PATH_NBYTES:
        raise ValueError(
            f"{shown(str(path))} is longer than the {_MAX_PATH_NBYTES} bytes of a socket's address; set a shorter socket_dir"
        )
    return path


def _check_directory(directory: Path, owners: frozenset[int]) -> None:
    """Refuses a directory in which another user could put a socket of our name."""
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise PermissionError(f"{directory} is not a directory (a symbolic link is refused, too)")
    if status.st_uid not in owners:
        raise PermissionError(f"{directory} belongs to uid {status.st_uid}; expected one of {sorted(owners)}")
    if status.st_mode & 0o022:
        raise PermissionError(f"{directory} is writable for others (mode {stat.S_IMODE(status.st_mode):04o}); chmod go-w it")


def _peer_credentials(peer: socket.socket) -> tuple[int, int]:
    size = _PEER_CREDENTIALS.size
    pid, uid, _ = _PEER_CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return pid, uid


def peer_pid(peer: socket.socket) -> int:
    """Returns the pid of the process at the other end of a Unix socket; 0: it can't be seen from this process namespace."""
    return _peer_credentials(peer)[0]


def describe_peer(peer: socket.socket) -> str:
    """Describes the process at the other end of a Unix socket, for logs."""
    try:
        pid, uid = _peer_credentials(peer)
    except OSError as error:
        return f"an unknown process ({error})"
    return f"process {pid} of uid {uid}"


# -- the engine's side -------------------------------------------------------------------------------------------------


class Listener:
    """A listening socket, and what makes its name ours. Made by :meth:`create`.

    Args:
        path: of the socket.
        others_may_connect: whether other users may reach it.
        name_holder: holds the name in the kernel; taken over.
        lock_fd: of the lock; taken over.
        listening: the socket; taken over.
        bound: the status of its file.

    Attributes:
        path: see above.
        socket: that listens now. :meth:`keep` may replace it.
    """

    def __init__(
        self,
        path: Path,
        others_may_connect: bool,
        name_holder: socket.socket,
        lock_fd: int,
        listening: socket.socket,
        bound: os.stat_result,
    ) -> None:
        self.path = path
        self.socket = listening
        self._others_may_connect = others_may_connect
        self._name_holder = name_holder
        self._lock_fd = lock_fd
        self._bound = bound
        _close_in_children(self)

    @classmethod
    def create(cls, path: Path, *, others_may_connect: bool) -> Listener:
        """Takes the name and listens.

        Args:
            path: see :func:`socket_path`.
            others_may_connect: whether other users may reach the socket (the allow-list still decides).

        Raises:
            LocalProtocolError: a living engine has this name.
            PermissionError: the directory is not safe, or a file that is no socket is in the socket's place.
        """
        _make_directory(path.parent, others_may_connect)
        name_holder = _hold_name(path)
        try:
            lock_fd = _take_lock(path.with_suffix(".lock"))
            try:
                swept = sweep_names(path.parent)
                listener = cls(path, others_may_connect, name_holder, lock_fd, *_bind(path, others_may_connect))
            except BaseException:
                os.close(lock_fd)
                raise
        except BaseException:
            name_holder.close()
            raise
        if swept:
            logger.info("removed sockets and locks of engines that are dead: %s", ", ".join(swept))
        return listener

    def keep(self) -> socket.socket | None:
        """Looks whether new clients still find the socket, and makes it, its lock and their directory again if they don't.

        It waits for nobody. What the directory must be is checked as by :meth:`create`.

        Returns:
            The socket that listened until now, which the caller closes: connections may still wait in it. None: nothing was
            missing.

        Raises:
            LocalProtocolError: another engine has taken the lock meanwhile (in another container, say).
            OSError: the socket can't be made again: the directory is not safe (``PermissionError``), or can't be made. It may
                be possible later.
        """
        _drop_probes(self._name_holder)
        lock = self.path.with_suffix(".lock")
        is_locked, is_bound = _is_same_file(self._lock_fd, lock), self._is_bound()
        if is_locked and is_bound:
            return None
        _make_directory(self.path.parent, self._others_may_connect)
        if not is_locked:
            fd = _try_lock(lock)
            if fd is None:
                raise _name_taken(self.path, _owner_of(lock))
            os.close(self._lock_fd)
            self._lock_fd = fd
            if is_bound:
                return None
        before = self.socket
        self.socket, self._bound = _bind(self.path, self._others_may_connect)
        return before

    def _is_bound(self) -> bool:
        try:
            return os.path.samestat(self._bound, self.path.lstat())
        except (FileNotFoundError, NotADirectoryError):
            return False

    def close(self) -> None:
        """Stops listening and gives the name up. The files go while the lock is still ours; those of others stay."""
        if self._lock_fd < 0:
            return
        lock = self.path.with_suffix(".lock")
        if self._is_bound():
            self.path.unlink(missing_ok=True)
        if _is_same_file(self._lock_fd, lock):
            lock.unlink(missing_ok=True)
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        if self._lock_fd < 0:
            return  # closed already: a forked child goes through all that are referenced
        self.socket.close()
        os.close(self._lock_fd)
        self._lock_fd = -1
        self._name_holder.close()


_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()
_registered_at_fork = False


def _close_in_children(listener: Listener) -> None:
    """Without this, a forked child would keep a dead engine's lock and socket alive."""
    global _registered_at_fork
    _listeners.add(listener)
    if not _registered_at_fork:
        os.register_at_fork(after_in_child=_close_inherited)
        _registered_at_fork = True


def _close_inherited() -> None:
    for listener in list(_listeners):
        listener._close_descriptors()
    _listeners.clear()


def _make_directory(directory: Path, others_may_connect: bool) -> None:
    directory.mkdir(mode=0o711 if others_may_connect else 0o700, parents=True, exist_ok=True)
    _check_directory(directory, frozenset({os.getuid()}))


def _bind(path: Path, others_may_connect: bool) -> tuple[socket.socket, os.stat_result]:
    """Listens at a path whose lock is ours; returns the file's status as well."""
    _remove_stale(path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.setblocking(False)
        listening.bind(os.fspath(path))
        path.chmod(0o666 if others_may_connect else 0o600)
        listening.listen(_BACKLOG)
        return listening, path.lstat()
    except BaseException:
        listening.close()
        raise


def _hold_name(path: Path) -> socket.socket:
    """Returns a socket that holds a name in the kernel; see the head of this file.

    Another user can take this address as well. Then the lock alone holds the name: others can't keep an engine from starting.

    Raises:
        LocalProtocolError: a living engine of this user has it.
    """
    address = _kernel_name(path)
    holder = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        holder.setblocking(False)
        for attempt in range(_BETWEEN_CALLS + 1):
            if attempt:
                time.sleep(_BETWEEN_CALLS_S)
            try:
                holder.bind(address)
                holder.listen(_PROBES)
                return holder
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.setblocking(False)
                try:
                    probe.connect(address)
                except ConnectionRefusedError:
                    continue  # its process has just ended, or does not listen yet
                except BlockingIOError:
                    raise _name_taken(path, None) from None
                pid, uid = _peer_credentials(probe)  # of the process that listens
            if uid == os.getuid():
                raise _name_taken(path, pid)
            break
        logger.warning("another user has taken the address %s; the lock beside the socket alone holds the name", address[1:])
        return holder
    except BaseException:
        holder.close()
        raise


def _kernel_name(path: Path) -> str:
    try:
        mounts = os.stat("/proc/self/ns/mnt").st_ino
    except OSError:  # nobody mounted /proc
        mounts = 0
    place = hashlib.sha256(f"{mounts} {path.parent.resolve()}".encode(errors="surrogateescape")).hexdigest()[:16]
    return f"\0shmring-{os.getuid()}-{path.stem}-{place}"


def _drop_probes(holder: socket.socket) -> None:
    """Makes room for processes that ask who has a name: they have got their answer from the kernel."""
    with contextlib.suppress(OSError):  # none waits; or the address is another's, or there is no descriptor left for it
        for _ in range(_PROBES):
            holder.accept()[0].close()


def _name_taken(path: Path, pid: int | None) -> LocalProtocolError:
    owner = "unknown" if pid is None else str(pid)
    return LocalProtocolError(
        f"an engine named {path.stem!r} is running already (pid {owner}, lock {path.with_suffix('.lock')}); "
        "stop it or choose another name"
    )


def _take_lock(path: Path) -> int:
    for attempt in range(_SWEEPS + 1):
        if attempt:
            time.sleep(_SWEEP_S)  # it may be a sweep that has the lock, and is about to remove it
        fd = _try_lock(path)
        if fd is not None:
            return fd
    raise _name_taken(path.with_suffix(".sock"), _owner_of(path))


def _owner_of(lock: Path) -> int | None:
    """Returns the pid that a lock names; None if it is not known: the lock was removed just now, or is being written."""
    try:
        return _lock_owner(lock.read_bytes())
    except (OSError, ValueError):
        return None


def _lock_owner(content: bytes) -> int:
    """Returns the pid that a lock names; ``ValueError`` if it is not our lock."""
    pid, mark, _ = content.split(b"\n", 2)
    if mark != _LOCK_MARK:
        raise ValueError("not the lock of an engine")
    return int(pid)


def _try_lock(path: Path) -> int | None:
    """Locks a file and returns its descriptor; None if another process has locked it."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same_file(fd, path):
                os.ftruncate(fd, 0)
                os.write(fd, b"%d\n%s\n" % (os.getpid(), _LOCK_MARK))
                return fd
        except BlockingIOError:
            os.close(fd)
            return None
        os.close(fd)  # its owner removed it between our open and our lock


def sweep_names(directory: Path, *, remove: bool = True) -> list[str]:
    """Removes the sockets and locks that killed engines of this user left in a directory.

    The process that has the lock of a name is its engine; a dead engine has no lock. Other files there stay.

    Args:
        directory: of sockets.
        remove: False: only look.

    Returns:
        The names of those engines.
    """
    swept = []
    for lock in sorted(directory.glob("*.lock")):
        try:
            fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue  # removed just now, or no lock of ours
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
                continue
            _lock_owner(os.pread(fd, _LOCK_NBYTES, 0))
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_same_file(fd, lock):
                continue  # another sweep was faster
            if remove:
                with contextlib.suppress(PermissionError):  # no socket lies there
                    _remove_stale(lock.with_suffix(".sock"))
                lock.unlink()
            swept.append(lock.stem)
        except (BlockingIOError, ValueError):
            continue  # its engine lives, or it is none of ours
        finally:
            os.close(fd)
    return swept


def _is_same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except (FileNotFoundError, NotADirectoryError):
        return False


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise PermissionError(f"{path} is in the place of the socket and is none; remove it")
    path.unlink()  # the lock is ours, so it is no living engine's


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
    pid, uid = _peer_credentials(connected)
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


async def inspect_engine(path: Path, engine_uids: frozenset[int]) -> bytes:
    """Asks the engine at ``path`` what it is doing; returns its answer, which is JSON. The caller bounds the time.

    Raises:
        EngineDeadError, PermissionError, RemoteProtocolError: as :func:`attach_engine`.
    """
    _check_socket(path, engine_uids)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connected:
        connected.setblocking(False)
        try:
            await _greet_engine(connected, path, Inspect(PROTOCOL_VERSION), engine_uids)
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
    return answer


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
        _check_directory(path.parent, engine_uids | {0})
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
        pid, uid = _peer_credentials(connected)
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
