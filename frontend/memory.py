"""Making malloc give memory back.

A frontend takes tens of megabytes for a picture and lets go of them a moment later, hundreds of times, on several threads.
Left alone, glibc keeps much of that: each freed block raises the size from which blocks get a mapping of their own (up to
32 MiB, so that bodies and decoded pictures end up in heaps), heaps only shrink at their top, and there is one for every thread.
"""

from __future__ import annotations

import ctypes

__all__ = ["make_malloc_return_memory"]

# From glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

# Bodies, files and pictures are far above, and are unmapped when freed. What is below is small and reused. Setting it also
# stops glibc from moving it. Lower, and mapping and unmapping would cost more than it saves.
_MMAP_THRESHOLD_NBYTES = 64 << 10
_TRIM_THRESHOLD_NBYTES = 1 << 20  # free memory at the top of the heap from which it shrinks
_ARENAS = 2  # the loop's and one for all threads: they hardly allocate while they hold no interpreter lock


def make_malloc_return_memory() -> bool:
    """Sets up glibc's malloc for a process that takes and frees large blocks. Call it before threads are started.

    Returns:
        Whether that worked; other C libraries have no such settings, and other habits.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    settings = (
        (_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_NBYTES),
        (_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_NBYTES),
        (_M_ARENA_MAX, _ARENAS),
    )
    done = [mallopt(parameter, value) for parameter, value in settings]
    return all(done)
