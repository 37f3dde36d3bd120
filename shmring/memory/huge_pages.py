"""Huge pages: shared memory of which one entry of the page tables maps 2 MiB.

Through pages of 4 KiB, a copy needs another entry after every 4 KiB that it writes, and in a virtual machine the walk to each
is two walks. With huge pages, copies into a slab are a little faster, and reserving and touching it takes less than half of
the time (``docs/decisions/0026``).

The kernel gives them by itself only if the machine is set up for it: in a mount with ``huge=``, which ``/dev/shm`` does not
have, and for memfds if ``transparent_hugepage/shmem_enabled`` says so. But every process may ask for a range to be collapsed
into one (``MADV_COLLAPSE``, Linux 6.1), wherever its file lies. The range must not be empty, so its first page is reserved
before, by a call that fails if there is no room; touching the page would be SIGBUS then.

A range for which there is no huge page stays as it is, and works. On a machine whose memory is in many pieces the kernel
moves things first; that is bounded here, since an engine that starts must not wait for long.

Source: the man page of ``madvise``; that databases and DPDK put what they share in huge pages.
"""

from __future__ import annotations

import mmap
import os
import time

from shmring.core.compiled import Mapping
from shmring.memory.limits import calling

__all__ = ["HUGE_PAGE_NBYTES", "can_be_had", "reserve_huge_pages"]

HUGE_PAGE_NBYTES = 2 << 20  # where a page has 4 KiB; elsewhere it is more, and the kernel refuses

_MADV_DONTFORK = 10
_MADV_COLLAPSE = 25
_LONGEST_S = 5.0  # 4 GiB take half a second if nothing has to be moved
_MOST_REFUSED = 8  # then there are none, or no more


def reserve_huge_pages(fd: int, nbytes: int) -> int:
    """Gives a file its size, and reserves as much as possible of it in huge pages. In the rest, at most one page of each 2 MiB
    is reserved.

    Blocks for some 0.1 seconds per GiB, longer where memory has to be moved first, and for 5 seconds at most.

    Args:
        fd: of tmpfs memory in which nothing is yet.
        nbytes: its size, a multiple of the page size.

    Returns:
        The bytes that lie in huge pages.

    Raises:
        OSError: there is no room for the file.
    """
    with calling("ftruncate"):
        os.ftruncate(fd, nbytes)
    with calling("mmap"):
        mapping = Mapping(fd, nbytes)
    with calling("madvise(MADV_DONTFORK)"):
        mapping.advise(0, nbytes, _MADV_DONTFORK)
    deadline_s = time.monotonic() + _LONGEST_S
    reserved_nbytes = refused = 0
    for offset in range(0, nbytes - HUGE_PAGE_NBYTES + 1, HUGE_PAGE_NBYTES):
        with calling("fallocate"):
            os.posix_fallocate(fd, offset, mmap.PAGESIZE)
        try:
            mapping.advise(offset, HUGE_PAGE_NBYTES, _MADV_COLLAPSE)
            reserved_nbytes += HUGE_PAGE_NBYTES
        except OSError:
            refused += 1
        if refused == _MOST_REFUSED or time.monotonic() > deadline_s:
            break
    return reserved_nbytes


def can_be_had() -> bool:
    """Returns whether this machine gives huge pages for shared memory now; by asking for one."""
    fd = os.memfd_create("shmring-huge-page", os.MFD_CLOEXEC)
    try:
        return reserve_huge_pages(fd, HUGE_PAGE_NBYTES) > 0
    except OSError:
        return False
    finally:
        os.close(fd)
