"""Making malloc give memory back.

A frontend takes tens of megabytes for a picture and frees them a moment later, hundreds of times, on several threads. With
its defaults, glibc keeps much of that: each freed block raises the size from which blocks get a mapping of their own (up to
32 MiB, so that bodies and decoded pictures end up in heaps), heaps only shrink at their top, and there is one for every
thread.
"""

from __future__ import annotations

import ctypes

__all__ = ["make_malloc_return_memory"]

# From glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

# Measured with 200 requests at once, of pictures of 12 megapixels, and 200 more: left alone, a frontend has 390 MB of private
# memory afterwards, and then 480; with these settings 270 to 410, and does not grow. Mappings from 256 KiB on would keep as
# much, but so much is read of a body at a time, and copied three times on its way: each copy would be mapped, and its pages
# faulted in anew, which took a third of the CPU of a large body.
_MMAP_THRESHOLD_NBYTES = 320 << 10  # from here on a block has a mapping of its own; setting it also stops glibc from moving it
_TRIM_THRESHOLD_NBYTES = 2 << 20  # free memory at the top of the heap from which it shrinks
_ARENAS = 1  # threads rarely allocate at the same time: the interpreter lock sees to that


def make_malloc_return_memory() -> bool:
    """Sets up glibc's malloc for a process that takes and frees large blocks. Call it before threads are started.

    Returns:
        Whether that worked; other C libraries have no such settings.
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
