"""The name of an engine: where its socket is, and what makes the name its own.

The socket lies in a directory that only its owner can write to, mode 0600: a name in a world-writable directory proves nothing.

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

import contextlib
import errno
import fcntl
import hashlib
import os
import socket
import stat
import time
import weakref
from pathlib import Path
from typing import NamedTuple

from shmring.core.loggers import logger_of
from shmring.door import directory_of, shown, validate_name
from shmring.errors import LocalProtocolError
from shmring.transport.peers import peer_credentials

__all__ = [
    "Listener",
    "Missing",
    "check_directory",
    "hold_start",
    "listens",
    "make_directory",
    "socket_path",
    "sweep_names",
]

logger = logger_of("shmring.transport")

_LOCK_MARK = b"shmring"  # in a lock, after the pid: other files that end with .lock are not ours
_LOCK_NBYTES = 64
_SWEEPS = 5  # sweeps that may hold a lock, one after the other, when an engine takes its name
_SWEEP_S = 0.01  # far longer than that takes one
_BETWEEN_CALLS = 5  # looks at an address that another process has taken, and at which it does not listen yet
_BETWEEN_CALLS_S = 0.01
_PROBES = 128  # processes that may ask who has a name until its engine looks again
_BACKLOG = 512  # frontends that may connect at the same moment
_MAX_PATH_NBYTES = 107  # of a Unix socket's address


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


def check_directory(directory: Path, owners: frozenset[int]) -> None:
    """Refuses a directory in which another user could put a socket of our name.

    Args:
        directory: of sockets.
        owners: the uids that it may belong to.

    Raises:
        PermissionError: it is not safe.
        FileNotFoundError: it is not there.
    """
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise PermissionError(f"{directory} is not a directory (a symbolic link is refused, too)")
    if status.st_uid not in owners:
        raise PermissionError(f"{directory} belongs to uid {status.st_uid}; expected one of {sorted(owners)}")
    if status.st_mode & 0o022:
        raise PermissionError(f"{directory} is writable for others (mode {stat.S_IMODE(status.st_mode):04o}); chmod go-w it")


# -- listening ---------------------------------------------------------------------------------------------------------


class Missing(NamedTuple):
    """What somebody has removed, and :meth:`Listener.keep` has made again.

    Attributes:
        path: of the socket; of the lock, if that alone was missing.
        before: the socket that listened until now, which the caller closes: connections may still wait in it. None: it goes
            on.
    """

    path: Path
    before: socket.socket | None


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
        make_directory(path.parent, others_may_connect)
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

    def keep(self) -> Missing | None:
        """Looks whether new clients still find the socket, and makes it, its lock and their directory again if they don't.

        It waits for nobody. What the directory must be is checked as by :meth:`create`.

        Returns:
            What was missing. None: nothing.

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
        make_directory(self.path.parent, self._others_may_connect)
        if not is_locked:
            fd = _try_lock(lock)
            if fd is None:
                raise _name_taken(self.path, _owner_of(lock))
            os.close(self._lock_fd)
            self._lock_fd = fd
            if is_bound:
                return Missing(lock, None)
        before = self.socket
        self.socket, self._bound = _bind(self.path, self._others_may_connect)
        return Missing(self.path, before)

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


_inherited: weakref.WeakSet[Listener | socket.socket] = weakref.WeakSet()
_registered_at_fork = False


def _close_in_children(held: Listener | socket.socket) -> None:
    """Without this, a forked child would keep a dead engine's lock and socket alive, and the start of a store."""
    global _registered_at_fork
    _inherited.add(held)
    if not _registered_at_fork:
        os.register_at_fork(after_in_child=_close_inherited)
        _registered_at_fork = True


def _close_inherited() -> None:
    for held in list(_inherited):
        held.close() if isinstance(held, socket.socket) else held._close_descriptors()
    _inherited.clear()


def make_directory(directory: Path, others_may_connect: bool = False) -> None:
    """Makes a directory of sockets, if it is not there.

    Args:
        directory: which one.
        others_may_connect: whether engines of other users listen there as well.

    Raises:
        PermissionError: it can't be made, or is not safe.
    """
    try:
        with contextlib.suppress(FileExistsError):  # it is no directory, and that is said below
            directory.mkdir(mode=0o711 if others_may_connect else 0o700, parents=True, exist_ok=True)
        check_directory(directory, frozenset({os.getuid()}))
    except PermissionError as error:
        if error.errno is None:  # it says what to do
            raise
        raise PermissionError(f"{directory}, the directory of sockets, can't be made: {error.strerror}") from error
    except OSError as error:
        raise PermissionError(f"{directory}, the directory of sockets, can't be made: {error.strerror}") from error


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


def hold_start(path: Path) -> socket.socket | None:
    """Returns what says, until it is closed, that this process starts an engine at a path; None: another process of this user
    does. The kernel closes it with this process, and there is no file.

    If another user has taken the address, or whoever has it does not listen, several processes may start one at a time: an
    engine's name is its own anyway.
    """
    try:
        return _hold(path, f"{_kernel_name(path)}-start")
    except LocalProtocolError:
        return None


def listens(path: Path) -> bool:
    """Whether an engine of this user has the name of a path, or listens there.

    The engine does not hear of it, unless it runs where files are seen otherwise (in another container).
    """
    return _is_ours(_kernel_name(path)) or _is_ours(os.fspath(path))


def _is_ours(address: str) -> bool:
    """Whether a process of this user listens at an address."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(address)
        except BlockingIOError:  # as many wait for it as may
            return True
        except OSError:
            return False
        return peer_credentials(probe)[1] == os.getuid()


def _hold_name(path: Path) -> socket.socket:
    """Returns a socket that holds a name in the kernel; see the head of this file.

    Another user can take this address as well. Then the lock alone holds the name: others can't keep an engine from starting.

    Raises:
        LocalProtocolError: a living engine of this user has it.
    """
    return _hold(path, _kernel_name(path))


def _hold(path: Path, address: str) -> socket.socket:
    holder = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    _close_in_children(holder)
    try:
        holder.setblocking(False)
        who = "a process that does not listen there"  # and may be another user's
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
                pid, uid = peer_credentials(probe)  # of the process that listens
            if uid == os.getuid():
                raise _name_taken(path, pid)
            who = "another user"
            break
        logger.warning("%s has taken the address %s; the lock beside the socket alone holds the name", who, address[1:])
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
    """Empties the backlog of the socket that holds a name. Who asks who has the name connects, and the kernel answers: nobody
    else would make room for further ones."""
    with contextlib.suppress(OSError):  # none waits; or another process listens there, or there is no descriptor left
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
