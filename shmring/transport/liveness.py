"""Knowing from the kernel that a process is dead.

A pidfd becomes readable when all threads of its process have ended and its memory is unmapped. Nothing else is a proof: a
living process may close its socket, a forked child may hold a socket open, a pid may have been reused, and a silent process may
live (zenoh #2628 lost data by trusting a timeout).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from shmring.errors import PeerLostError

__all__ = ["ProcessId", "ProcessWatch", "is_stopped", "open_peer_pidfd"]

_SO_PEERPIDFD = 77  # Linux 6.5
# What pidfd_open says of a number that was a process's: nobody has it now, or a thread has (which depends on the kernel).
_NO_PROCESS = frozenset({errno.ESRCH, errno.EINVAL, errno.ENOENT})
_GONE = (FileNotFoundError, ProcessLookupError)  # what reading /proc/PID/stat says of it
_STATE, _STARTED = 0, 19  # fields of /proc/PID/stat, behind the name


def open_peer_pidfd(peer: socket.socket, pid: int) -> int:
    """Returns a descriptor for the process at the other end of a Unix socket; the caller closes it.

    A kernel before 6.5 can't give the pidfd of the process that connected. Then the pid is opened, and the socket is checked
    afterwards: if it is still open, its process was alive meanwhile, and the pid can't have been reused.

    Args:
        peer: a connected Unix stream socket.
        pid: what ``SO_PEERCRED`` says of it.

    Raises:
        PeerLostError: it is gone already, or lives in a process namespace that can't be seen from here.
        OSError: this process can't open it, which says nothing about that process: there are no descriptors left, say.
    """
    with contextlib.suppress(OSError):
        return peer.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    if pid <= 0:
        raise PeerLostError("the peer's process can't be seen from this process namespace; share it (--pid) or use Linux 6.5")
    pidfd = _open(pid)
    if _has_hung_up(peer):
        os.close(pidfd)
        raise PeerLostError(f"process {pid} connected and is gone")
    return pidfd


class ProcessId(NamedTuple):
    """A process, as another process of its machine can be told of it: a number may have passed to a later one.

    Attributes:
        pid: its number.
        started: when it started, in the kernel's ticks since the machine did.
    """

    pid: int
    started: int

    @classmethod
    def own(cls) -> ProcessId:
        """Returns that of this process."""
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Returns that of the process that has a number now.

        Args:
            pid: the number.

        Raises:
            PeerLostError: none has it.
        """
        try:
            return cls(pid, int(_stat_of(pid)[_STARTED]))
        except _GONE:
            raise PeerLostError(f"process {pid} is gone") from None

    @classmethod
    def elder(cls, pid: int) -> ProcessId:
        """Returns that of a process that was there when this one started, and may have ended since then.

        Args:
            pid: its number.

        Raises:
            PeerLostError: it is gone. Another process may have its number.
        """
        elder = cls.of(pid)
        if elder.started <= cls.own().started:
            return elder
        raise PeerLostError(f"process {pid} is gone")

    def state(self) -> str:
        """Returns the letter that the kernel has for its state (``T``: stopped by a signal). Empty: it is gone.

        Raises:
            OSError: this process can't look, which says nothing about that process: there are no descriptors left, say.
        """
        with contextlib.suppress(*_GONE):
            stat = _stat_of(self.pid)
            if int(stat[_STARTED]) == self.started:
                return stat[_STATE].decode()
        return ""

    def open(self) -> int:
        """Returns a descriptor (pidfd) for the process; the caller closes it.

        Raises:
            PeerLostError: it is gone. Another process may have its number.
            OSError: as :func:`open_peer_pidfd`.
        """
        pidfd = _open(self.pid)
        try:  # whoever has the number now has had it since before it was opened, if it is the same process
            if int(_stat_of(self.pid)[_STARTED]) == self.started:
                return pidfd
        except _GONE:
            pass  # it has ended just now
        except BaseException:
            os.close(pidfd)
            raise
        os.close(pidfd)
        raise PeerLostError(f"process {self.pid} is gone")


def _open(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in _NO_PROCESS:
            raise PeerLostError(f"process {pid} is gone: {error}") from error
        raise OSError(error.errno, f"process {pid} can't be watched (pidfd_open): {error.strerror}{_advice(error)}") from error


def _stat_of(pid: int) -> list[bytes]:
    """Returns what ``/proc/PID/stat`` says of a process, behind its name: see ``proc_pid_stat(5)``."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()


def _advice(error: OSError) -> str:
    match error.errno:
        case errno.EMFILE:
            return "; raise the limit of this process (ulimit -n)"
        case errno.ENFILE:
            return "; raise the limit of the machine (fs.file-max)"
        case errno.EPERM | errno.EACCES | errno.ENOSYS:
            return "; allow it in the seccomp profile of the container, or use Linux 5.3 or later"
    return ""


def _has_hung_up(peer: socket.socket) -> bool:
    poll = select.poll()
    poll.register(peer, select.POLLRDHUP)
    return bool(poll.poll(0))


def is_stopped(pidfd: int) -> bool:
    """Asks the kernel whether a signal has stopped a process (SIGSTOP), or a debugger. One that is dead is not stopped.

    Args:
        pidfd: of the process; one that can't be seen from here counts as running.
    """
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines():
            if line.startswith("Pid:"):
                state = _stat_of(int(line[4:]))[_STATE]
                return state in (b"T", b"t")
    return False


class ProcessWatch:
    """Calls back, once, when a process has died. Owns its descriptor.

    Args:
        loop: whose loop calls back.
        pidfd: taken over.
        on_death: called in the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, pidfd: int, on_death: Callable[[], object]) -> None:
        self._loop = loop
        self._pidfd = pidfd
        self._on_death = on_death
        try:
            loop.add_reader(pidfd, self._dead)
        except BaseException:
            os.close(pidfd)
            raise

    def has_died(self) -> bool:
        """Asks the kernel whether the process is dead. After its sockets are closed, its death may not be reported yet."""
        poll = select.poll()
        if self._pidfd >= 0:
            poll.register(self._pidfd, select.POLLIN)
        return self._pidfd < 0 or bool(poll.poll(0))

    def is_stopped(self) -> bool:
        """Asks the kernel whether a signal has stopped the process."""
        return self._pidfd >= 0 and is_stopped(self._pidfd)

    def close(self) -> None:
        """Stops watching."""
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _dead(self) -> None:
        self.close()
        self._on_death()
