"""What a process does for the program that started it: it says that it is ready, and ends with its parent, or outlives it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

import msgspec

__all__ = ["end_with_parent", "leave_parent", "say_ready", "step_back"]

_PR_SET_PDEATHSIG = 1
_NICENESS = 5
_OOM_SCORE = 500  # of 1000


def say_ready(fd: int, word: object) -> None:
    """Writes the ready line, in JSON, and closes the descriptor.

    Args:
        fd: of a pipe to the process that started this one, such as :meth:`shmring.processes.process.Process.start` makes. It is
            closed in any case.
        word: what it says, a struct.

    Raises:
        OSError: nothing can be written there.
    """
    with open(fd, "wb", buffering=0) as pipe:
        line = memoryview(msgspec.json.encode(word) + b"\n")
        while line:
            line = line[pipe.write(line) :]


def end_with_parent(parent_pid: int | None = None) -> None:
    """Has the kernel kill this process when the thread that forked it ends.

    Args:
        parent_pid: the parent's, from before the fork. If the parent has ended since, this process ends, too. None: not known.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(1)


def leave_parent() -> int:
    """Forks, and goes on in the child, which is no child of the program that started this process.

    The process that was started ends when its child has said that it is ready; or as the child has ended, if that came first.
    To be called before there are threads.

    Returns:
        The descriptor for :func:`say_ready`.
    """
    reads, ready_fd = os.pipe()
    child = os.fork()
    if not child:
        os.close(reads)
        return ready_fd
    os.close(ready_fd)
    if os.read(reads, 1):
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(abs(code))


def step_back() -> None:
    """Puts this process behind others, because it works for one caller. Those that want its core answer everybody, and when
    memory runs out, the kernel ends it rather than an engine."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(_OOM_SCORE))
    os.nice(_NICENESS)
