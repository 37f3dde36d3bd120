"""Starting a store if there is none: one for the processes of a user on a machine, whoever comes first.

Theory of operation. The name of an engine is its own: of two stores that start at a time, one ends before it has reserved
anything. So nothing has to be agreed on. Everybody asks what has the name until it answers: a store that only has its name may
end before it has a slab. Who starts one holds an address in the kernel meanwhile, so that the others need not start processes
in vain. Whoever finds neither a name nor a start starts one, also if others were there before.

The store is no child of the process that started it, which may be ended with all its children. It ends when no client was there
for a while. A process between these two lasts until the store is ready: it ends as the store, if that ends before.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

from shmring.core.messages import PROTOCOL_VERSION
from shmring.door import parse_nbytes, seconds_of, timeout_of
from shmring.errors import EngineDeadError
from shmring.processes.process import Process
from shmring.transport.endpoint import has_answered
from shmring.transport.listener import hold_start, listens, make_directory, socket_path

__all__ = ["start_store", "start_store_blocking", "store_name"]

_LOOK_S = 0.02  # between two looks, while a store starts: that takes seconds
_FIRST_LOOK_S = 0.001  # a store that is there answers at once
_LONGEST_START_S = 300.0  # a slab of many GiB is filled, and the machine may be busy
_LAST_LOOKS = 10  # when a store answers, for the end of the process between: else it is a zombie
_LOG_NBYTES = 4096  # the last of the log of a store that did not start
_PATH, _OPTIONS = "PYTHONPATH", "SHMRING_"

#: Processes between this one and a store that was not waited for: Python warns of a child that is forgotten while it lives.
_forgotten: list[Process] = []


def store_name() -> str:
    """Returns the name of a user's store, if no other is given: it has the user's number, as directories may be shared, and the
    version of the protocol: a store that an older shmring started refuses newer clients, and goes on."""
    return f"store-{os.getuid()}-v{PROTOCOL_VERSION}"


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
        name: of the store; None: ``store-``, the user's number, and the version of the protocol.
        slab_nbytes: the memory that it reserves, if it is started here.
        idle_timeout_s: seconds without any client after which it ends; 0: it stays until it is told to end.
        socket_dir: where its socket lies; None: the user's runtime directory.
        timeout: seconds; None: 300. Who is cancelled, or has no more time, stops waiting; the store may come all the same.

    Returns:
        Its name.

    Raises:
        EngineDeadError: it did not start; the last lines of its log are in the text.
        TimeoutError: it was not there in time.
        PermissionError: the directory is not safe.
        ValueError, TypeError: a name, size or time is not valid.
    """
    name = store_name() if name is None else name
    with contextlib.closing(_looks(name, slab_nbytes, idle_timeout_s, socket_dir, timeout)) as looks:
        for pause_s in looks:
            await asyncio.sleep(pause_s)
    return name


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
    with contextlib.closing(_looks(name, slab_nbytes, idle_timeout_s, socket_dir, timeout)) as looks:
        for pause_s in looks:
            time.sleep(pause_s)
    return name


def _looks(
    name: str, slab_nbytes: int | str, idle_timeout_s: float, socket_dir: str | None, timeout: float | None
) -> Generator[float]:
    """Starts a store if there is none, and ends when it answers. Until then it says after how many seconds to go on.

    Raises: as :func:`start_store`.
    """
    directory = socket_path(name, socket_dir).parent.absolute()  # the store is elsewhere
    path = socket_path(name, str(directory))
    options = ["--socket-dir", str(directory), "--slab-nbytes", str(parse_nbytes(slab_nbytes, "slab_nbytes"))]
    options += ["--idle-timeout", str(seconds_of(idle_timeout_s, "idle_timeout_s")), "--log-level", "warning"]
    seconds = timeout_of(timeout)
    end_s = time.monotonic() + (_LONGEST_START_S if seconds is None else seconds)
    pause_s, last_looks = _FIRST_LOOK_S, _LAST_LOOKS
    make_directory(directory)
    _forgotten[:] = [each for each in _forgotten if each.returncode is None]  # those that have ended are no zombies any more
    process: Process | None = None
    with contextlib.ExitStack() as held:
        answers = held.enter_context(contextlib.closing(has_answered(path)))
        starting = None
        try:
            while not next(answers) or (process is not None and (last_looks := last_looks - 1)):
                if process is not None and process.returncode is not None:
                    if process.returncode not in (0, os.EX_TEMPFAIL) and not listens(path):
                        why = _last_of(path.with_suffix(".log")) or f"it {process.describe_end()}"
                        raise EngineDeadError(f"the store {name!r} did not start: {why}", engine=name)
                    process = None  # it is ready, or another one was faster, which may have ended since
                if process is None and not listens(path):
                    if starting is None and (starting := hold_start(path)) is not None:
                        held.enter_context(starting)
                    if starting is not None and not listens(path):  # else it came while we were asking
                        process = _start(name, path, options)
                if time.monotonic() >= end_s:
                    who = "another process is starting" if starting is None else "this process is starting"
                    why = _last_of(path.with_suffix(".log"))
                    raise TimeoutError(f"{who} the store {name!r}, which is not there in time, and may come later. {why}")
                yield pause_s
                pause_s = min(2 * pause_s, _LOOK_S)
        finally:
            if process is not None:
                _forgotten.append(process)


def _start(name: str, path: Path, options: list[str]) -> Process:
    """Returns the process that starts a store, and ends when it is ready, or as it has ended before."""
    fd = os.open(
        path.with_suffix(".log"), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    try:
        process = Process.start(
            [sys.executable, "-P", "-m", "shmring.engine.store", name, *options, "--detach"],
            stdin=subprocess.DEVNULL,
            stdout=fd,
            stderr=fd,
            env=_environment(),
            start_new_session=True,
            cwd="/",
        )
    finally:
        os.close(fd)
    process.close()  # it is waited for by looking
    return process


def _environment() -> dict[str, str]:
    """Returns the variables for a store: none that is an option (perhaps of a server), and nothing is imported from the working
    directory, unless a path names it."""
    kept = {name: value for name, value in os.environ.items() if name != _PATH and not name.startswith(_OPTIONS)}
    parts = [os.path.abspath(part) for part in os.environ.get(_PATH, "").split(os.pathsep) if part]
    return kept | ({_PATH: os.pathsep.join(parts)} if parts else {})


def _last_of(log: Path) -> str:
    try:
        return log.read_bytes()[-_LOG_NBYTES:].decode(errors="replace").strip()
    except OSError:
        return ""
