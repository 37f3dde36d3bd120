"""Copies between addresses, past the cache where that is faster.

``memcpy`` into memory that is not in the cache reads every line before it overwrites it. The extension ``_streaming`` writes
with streaming stores, which do not: a third less traffic, and the caches keep what they held. Where the processor has no such
stores, everything is ``memcpy``.

Streaming loses where a copy is small enough to be read out of the cache by its consumer. Hence the limit below: in ``bench
transport`` with a consumer that copies every byte out, always streaming did 0.92 times the messages per second of never
streaming at 1 MiB, 0.95 at 2, 1.07 at 4, 1.38 at 8 and 1.54 at 16 (medians of three interleaved runs on 2 cores; without
copying out 1.17 at 8 MiB, 1.88 at 16 and 1.45 at 64). Since copies of up to 16 MiB are made in the loop, and with a
consumer that copies out: 1.43 at 8 MiB, 1.33 at 64.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

from shmring.memory import _streaming

__all__ = ["STREAMING_NBYTES", "Copy", "cold_nbytes", "copier_for", "last_level_cache_nbytes", "streaming_width"]

#: Copies of at least so many bytes are streamed.
STREAMING_NBYTES = 4 << 20

_UNKNOWN_CACHE_NBYTES = 64 << 20  # assumed where the kernel does not say; more than most have

#: ``copy(to, from, nbytes)`` between two addresses; the memory must not overlap. Releases the interpreter lock.
Copy = Callable[[int, int, int], object]


def streaming_width() -> int:
    """Returns the bytes that one streaming store writes; 0 if there is no streaming here."""
    return _streaming.WIDTH


@functools.cache
def last_level_cache_nbytes() -> int:
    """Returns the size of the cache that a core shares with its neighbours; 64 MiB if the kernel does not say."""
    levels = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    if not levels:
        return _UNKNOWN_CACHE_NBYTES
    size = levels[-1].read_text().strip()
    return int(size.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(size[-1], 0)


def cold_nbytes() -> int:
    """Returns of how much that is written a cache has nothing left of what was there before, nearly always.

    That it is twice the cache is measured (``docs/decisions/0025``). At once, half of that is still found there often enough.
    """
    return 2 * last_level_cache_nbytes()


def copier_for(nbytes: int) -> Copy:
    """Returns what copies memory that is part of ``nbytes`` to be copied in one go.

    Args:
        nbytes: of all tensors together; what counts is whether the cache holds them when they are read.
    """
    if nbytes >= STREAMING_NBYTES and streaming_width():
        return _streaming.copy
    return ctypes.memmove
