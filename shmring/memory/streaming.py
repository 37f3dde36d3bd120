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
from collections.abc import Callable

from shmring.memory import _streaming

__all__ = ["STREAMING_NBYTES", "Copy", "copier_for", "streaming_width"]

#: Copies of at least so many bytes are streamed.
STREAMING_NBYTES = 4 << 20

#: ``copy(to, from, nbytes)`` between two addresses; the memory must not overlap. Releases the interpreter lock.
Copy = Callable[[int, int, int], object]


def streaming_width() -> int:
    """Returns the bytes that one streaming store writes; 0 if there is no streaming here."""
    return _streaming.WIDTH


def copier_for(nbytes: int) -> Copy:
    """Returns what copies memory that is part of ``nbytes`` to be copied in one go.

    Args:
        nbytes: of all tensors together; what counts is whether the cache holds them when they are read.
    """
    if nbytes >= STREAMING_NBYTES and streaming_width():
        return _streaming.copy
    return ctypes.memmove
