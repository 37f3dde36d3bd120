"""The memory of a client's two message rings: made and sealed by the engine, mapped by both ends.

Each ring is a memfd of its own. It is sealed against shrinking and growing before it is passed on: otherwise one side could
truncate it, and the next access of the other side would be SIGBUS. So a frontend refuses a ring that is not sealed.

The descriptors are not needed once both sides have mapped the rings, so no side keeps them.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence

from shmring.core.compiled import RingMemory, ring_nbytes
from shmring.errors import RemoteProtocolError, SlabError

__all__ = ["check_sealed", "map_rings", "sealed_memory", "sealed_rings"]

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_NAME = "shmring-messages"


def sealed_rings(capacity_nbytes: int) -> tuple[int, int]:
    """Makes the memory of two rings, and returns their descriptors, which are the caller's.

    Args:
        capacity_nbytes: of each; see :func:`~shmring.core.compiled.ring_nbytes`.

    Raises:
        OSError: there is no memory, or there are no descriptors for it.
    """
    first = _sealed_ring(capacity_nbytes)
    try:
        return first, _sealed_ring(capacity_nbytes)
    except BaseException:
        os.close(first)
        raise


def _sealed_ring(capacity_nbytes: int) -> int:
    return sealed_memory(_NAME, ring_nbytes(capacity_nbytes))


def sealed_memory(name: str, nbytes: int) -> int:
    """Makes memory that both sides write and no process can truncate, and returns its descriptor, which is the caller's.

    Args:
        name: shown in ``/proc``, for people.
        nbytes: of it, all zero.

    Raises:
        OSError: there is no memory, or there is no descriptor for it.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, nbytes)  # now, or an error: no SIGBUS later
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_sealed(fd: int, nbytes: int, what: str) -> None:
    """Raises RemoteProtocolError unless memory is of that size, and no process can truncate it.

    Args:
        fd: its descriptor.
        nbytes: that were announced.
        what: its name, for the error.
    """
    size = os.fstat(fd).st_size
    if size != nbytes:
        raise RemoteProtocolError(f"{what} of {nbytes} bytes was announced, and one of {size} passed")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise RemoteProtocolError(f"{what} is no memory that can be sealed: {error}") from error
    if seals & _SEALS != _SEALS:
        raise RemoteProtocolError(f"{what} is not sealed: whoever has it could truncate it")


def map_rings(fds: Sequence[int], capacity_nbytes: int) -> list[RingMemory]:
    """Maps rings, which forked children do not inherit. The descriptors may be closed then.

    Raises:
        RemoteProtocolError: one of them is not as announced, or could still be truncated.
        SlabError: it can't be mapped.
    """
    try:
        nbytes = ring_nbytes(capacity_nbytes)
    except ValueError as error:
        raise RemoteProtocolError(str(error)) from None
    memories = []
    for fd in fds:
        check_sealed(fd, nbytes, "a message ring")
        try:
            memories.append(RingMemory(fd, capacity_nbytes))
        except OSError as error:
            raise SlabError(
                f"mapping a message ring of {nbytes} bytes failed: {error}", errno=error.errno, nbytes=nbytes
            ) from error
    return memories
