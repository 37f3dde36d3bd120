"""Two ways to copy between addresses: past the cache, and into it. Each is the faster one somewhere.

``memcpy`` into memory that is not in the cache reads every line before it overwrites it. Streaming stores do not: a third
less traffic, and the caches keep what they held. But the reader of the copy must then read from memory. So streaming is for
slots that no cache holds, and for copies that are larger than a cache. If a slot has come back so soon that it is still in the
cache, a copy into the cache is as fast or faster, and so is reading it.

The choice depends on how many bytes are written between two uses of a slot (:class:`~shmring.core.compiled.ClientEnd` measures
it) beside what the cache can hold of it. Others use the cache as well, so long copies into it are timed beside streaming, and
copies stream while streaming is a good deal faster. ``docs/decisions/0025`` has the figures. Both release the interpreter lock,
and share copies of megabytes with other threads (``copy_helpers.c``, ``docs/decisions/0027``).
"""

from __future__ import annotations

import functools
from pathlib import Path

from shmring.memory._copying import copy_into_cache, copy_past_cache

__all__ = ["cache_nbytes", "copy_into_cache", "copy_past_cache", "last_level_cache_nbytes"]

_UNKNOWN_CACHE_NBYTES = 64 << 20  # assumed where the kernel does not say; more than most have

# A larger cache belongs to dozens of cores, and others use most of it: of 480 MiB that a kernel reported, we could use 150.
_MOST_CACHE_NBYTES = 32 << 20


def cache_nbytes() -> int:
    """Returns how many of the last written bytes a process probably finds in the last-level cache."""
    return min(last_level_cache_nbytes(), _MOST_CACHE_NBYTES)


@functools.cache
def last_level_cache_nbytes() -> int:
    """Returns the size of the cache that a core shares with its neighbours; 64 MiB if the kernel does not say."""
    levels = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    if not levels:
        return _UNKNOWN_CACHE_NBYTES
    size = levels[-1].read_text().strip()
    return int(size.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(size[-1], 0)
