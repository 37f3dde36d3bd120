"""Starting a store if there is none: one for the processes of a user on a machine, whoever comes first.

Theory of operation. The name of an engine is its own: of two stores that start at a time, one ends before it has reserved
anything. So nothing has to be agreed on. Who starts one holds an address in the kernel meanwhile, so that the others need not
start processes in vain; they look for the store, and start one themselves if that process ends without one.

The store is a process of its own session. It outlives who has started it, and ends when no client was there for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from shmring.door import parse_nbytes, seconds_of, timeout_of
from shmring.errors import EngineDeadError
from shmring.processes.process import Process, ProcessError
from shmring.transport.listener import hold_start, listens, make_directory, socket_path

__all__ = ["start_store", "start_store_blocking", "store_name"]

_LOOK_S = 0.02  # between two looks, while another process starts one: that takes seconds
_LONGEST_START_S = 300.0  # a slab of many GiB is filled, and the machine may be busy
_END_S = 10.0  # from the end of a process's pipe to its own; on an idle machine that is less than a millisecond
_LOG_NBYTES = 4096  # the last of the log of a store that did not start
_PATH, _OPTIONS = "PYTHONPATH", "SHMRING_"


class _Ready(msgspec.Struct, frozen=True):
    """What a store says when clients can connect; :class:`shmring.engine.store.process.Ready` has more."""

    pid: int


#: The stores that this process has started.
_started: list[Process] = []


def store_name() -> str:
    """Returns the name of a user's store, if no other is given: it has the user's number, as directories may be shared."""
    return f"store-{os.getuid()}"


async def start_store(
    name: str | None = None,
    *,
    slab_nbytes: int | str = "1GiB",
    idle_timeout_s: float = 300.0,
    socket_dir: str | None = None,
    timeout: float | None = 60.0,
) -> str:
    """Starts a store if there is none of this name; safe if several processes do so at a time. Connect to it as to any engine.

    It needs the extra ``serve``. Its log, of warnings and errors, is ``NAME.log`` in the directory of its socket.

    Args:
        name: of the store; None: ``store-`` and the user's number.
        slab_nbytes: the memory that it reserves, if it is started here.
        idle_timeout_s: seconds without any client after which it ends; 0: it stays until it is told to end.
        socket_dir: where its socket lies; None: the user's runtime directory.
        timeout: seconds. Who is cancelled, or has no more time, stops waiting; the store may come all the same.

    Returns:
        Its name.

    Raises:
        EngineDeadError: it did not start; the last lines of its log are in the text.
        TimeoutError: it was not there in time.
        PermissionError: the directory is not safe.
        ValueError, TypeError: a name, size or time is not valid.
    """
    return await asyncio.to_thread(
        start_store_blocking,
        name,
        slab_nbytes=slab_nbytes,
        idle_timeout_s=idle_timeout_s,
        socket_dir=socket_dir,
        timeout=timeout,
    )


def start_store_blocking(
    name: str | None = None,
    *,
    slab_nbytes: int | str = "1GiB",
    idle_timeout_s: float = 300.0,
    socket_dir: str | None = None,
    timeout: float | None = 60.0,
) -> str:
    """Starts a store if there is none of this name, and waits for it. Safe if several processes do so at a time.

    It needs the extra ``serve``. Its log, of warnings and errors, is ``NAME.log`` in the directory of its socket. What is held
    meanwhile: the start of this one store, unless another process has it.

    Args:
        name, slab_nbytes, idle_timeout_s, socket_dir, timeout: as of :func:`shmring.start_store`.

    Returns:
        Its name.

    Raises:
        EngineDeadError, TimeoutError, PermissionError, ValueError, TypeError: as :func:`shmring.start_store`.
    """
    name = store_name() if name is None else name
    path = socket_path(name, socket_dir)
    options = ["--slab-nbytes", str(parse_nbytes(slab_nbytes, "slab_nbytes"))]
    options += ["--idle-timeout", str(seconds_of(idle_timeout_s, "idle_timeout_s")), "--log-level", "warning"]
    if socket_dir is not None:
        options += ["--socket-dir", str(path.parent)]
    seconds = timeout_of(timeout)
    end_s = time.monotonic() + (_LONGEST_START_S if seconds is None else seconds)
    make_directory(path.parent)
    while not listens(path):
        starting = hold_start(path)
        if starting is not None:
            with starting:
                if not listens(path):  # else it came while we were asking
                    _start(name, path, options, end_s - time.monotonic())
        elif time.monotonic() >= end_s:
            raise TimeoutError(f"another process is starting the store {name!r}, and it is not there in time")
        else:
            time.sleep(_LOOK_S)
    return name


def _start(name: str, path: Path, options: list[str], limit_s: float) -> None:
    """Starts the process, and waits until clients can connect.

    Raises:
        EngineDeadError: it has ended, and there is no other.
        TimeoutError: it is not there in time. It goes on.
    """
    log = path.with_suffix(".log")
    _started[:] = [each for each in _started if each.returncode is None]  # those that have ended are no zombies any more
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        process = Process.start(
            [sys.executable, "-P", "-m", "shmring.engine.store", name, *options],
            ready_flag="--ready-fd=",
            stdin=subprocess.DEVNULL,
            stdout=fd,
            stderr=fd,
            env=_environment(),
            start_new_session=True,
            cwd="/",
        )
    finally:
        os.close(fd)
    end_s = time.monotonic() + limit_s
    _started.append(process)  # Python warns of a child that is forgotten while it lives
    try:
        process.wait_until_ready(_Ready, max(0.0, limit_s))
    except ProcessError as error:
        if (left_s := end_s - time.monotonic()) > 0:  # it has closed its pipe: it is about to end
            with contextlib.suppress(TimeoutError):
                process.wait(min(left_s, _END_S))
        if process.lives:
            raise TimeoutError(f"the store {name!r} {error}; it may come later, {log} says more") from None
        process.wait()
        if not listens(path):  # else somebody has started one by hand
            raise EngineDeadError(f"the store {name!r} did not start: {_last_of(log)}", engine=name) from None
    finally:
        process.close()


def _environment() -> dict[str, str]:
    """Returns the variables for a store: none that is an option (perhaps of a server), and nothing is imported from the working
    directory."""
    kept = {name: value for name, value in os.environ.items() if name != _PATH and not name.startswith(_OPTIONS)}
    parts = [part for part in os.environ.get(_PATH, "").split(os.pathsep) if part]
    return kept | ({_PATH: os.pathsep.join(parts)} if parts else {})


def _last_of(log: Path) -> str:
    try:
        text = log.read_bytes()[-_LOG_NBYTES:].decode(errors="replace").strip()
    except OSError:
        text = ""
    return text or "it has ended, and said nothing"
