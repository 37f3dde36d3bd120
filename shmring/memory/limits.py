"""Why the kernel refused memory: the call, the limit, and where that limit can be read.

The number of an error alone says too little. "File too large" is the shell's ``ulimit -f``, and "Cannot allocate memory" may be
``ulimit -v``; a smaller slab would be the wrong advice for both.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator

__all__ = ["RefusedCallError", "calling", "check_open_files", "is_about_size", "limit_behind"]

_OF_THIS_PROCESS = "/proc/self/limits"
_OPEN_FILES = "/proc/self/fd"
_ENOUGH_FILES = 65536  # a frontend has one for each connection


class RefusedCallError(OSError):
    """A system call that failed, with its name.

    Attributes:
        call: the name.
    """

    def __init__(self, number: int, text: str, call: str) -> None:
        super().__init__(number, text)
        self.call = call


@contextlib.contextmanager
def calling(call: str) -> Iterator[None]:
    """Gives an error of the block the name of the call."""
    try:
        yield
    except RefusedCallError:
        raise
    except OSError as error:
        raise RefusedCallError(error.errno or 0, error.strerror or str(error), call) from error


def limit_behind(error: OSError) -> str | None:
    """Returns which limit a call has met, where it can be read, and what to do; None: the limit is not known."""
    match error.errno:
        case errno.EFBIG:
            limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
            return f"a file may have {_shown(limit)} (ulimit -f; 'Max file size' of {_OF_THIS_PROCESS}); raise that"
        case errno.ENOMEM if (limit := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:
            return f"a process may map {_shown(limit)} (ulimit -v; 'Max address space' of {_OF_THIS_PROCESS}); raise that"
        case errno.ENOMEM | errno.EFAULT:
            return (
                "the memory of the machine or of its container is used up (memory.max of the group in /proc/self/cgroup), "
                "or the kernel promises no more (/proc/sys/vm/overcommit_memory)"
            )
        case errno.EMFILE | errno.ENFILE:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            return f"a process may have {limit} files open (ulimit -n; 'Max open files' of {_OF_THIS_PROCESS}); raise that"
        case errno.EPERM | errno.EACCES | errno.ENOSYS:
            return "a sandbox or a seccomp profile forbids the call ('Seccomp' of /proc/self/status); allow it there"
    return None


def check_open_files(needed: int, what: str) -> None:
    """Looks, before anything is begun, whether this process may open enough files. (Sockets and memory count as files.)

    Args:
        needed: how many more.
        what: that needs them.

    Raises:
        OSError: ``EMFILE``, and the text says how many there are, and how there are more.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return
    try:
        count = len(os.listdir(_OPEN_FILES)) - 1  # one is this directory
    except OSError as error:
        if error.errno != errno.EMFILE:
            return  # nobody mounted /proc
        count = limit
    if limit - count < needed:
        raise OSError(
            errno.EMFILE,
            f"{what} needs {needed} more open files, and of the {limit} that this process may have (ulimit -n; "
            f"'Max open files' of {_OF_THIS_PROCESS}), {max(0, limit - count)} are left; raise that limit: "
            f"ulimit -n {_ENOUGH_FILES}, LimitNOFILE={_ENOUGH_FILES} of systemd, docker run --ulimit nofile={_ENOUGH_FILES}",
        )


def is_about_size(error: OSError) -> bool:
    """Whether a call might have been granted if it had asked for less memory in all."""
    has_room = resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    return error.errno == errno.ENOSPC or (error.errno in (errno.ENOMEM, errno.EFAULT) and has_room)


def _shown(nbytes: int) -> str:
    return "bytes without a limit" if nbytes == resource.RLIM_INFINITY else f"{nbytes} bytes"
