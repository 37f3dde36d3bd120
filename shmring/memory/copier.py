"""Copies into slots, large ones off the event loop.

A large copy runs on a thread (it releases the interpreter lock) while the loop goes on. Cancelling the task that waits for
it is safe: the cancellation is delivered when the thread has stopped writing, so whoever cleans up afterwards may give
the slot back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from shmring.cancellation import uninterrupted
from shmring.memory.payload import Packed

__all__ = ["Copier"]

_Result = TypeVar("_Result")


class Copier:
    """Copies packed payloads, and counts what it copied.

    Args:
        threads: how many copies may run beside the loop.
        offload_nbytes: up to this size a copy is made in the loop.

    Attributes:
        offload_nbytes: as given.
        copies, copied_nbytes: tensors that were copied so far, and their bytes.
    """

    def __init__(self, threads: int, offload_nbytes: int) -> None:
        self.offload_nbytes = offload_nbytes
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="shmring-copy")
        self.copies = 0
        self.copied_nbytes = 0

    async def copy(self, packed: Packed, anchor: NDArray[np.uint8], address: int) -> None:
        """Copies a payload's tensors into a region. When this returns or raises, nobody is writing there."""
        if packed.copy_nbytes <= self.offload_nbytes:
            packed.copy_into(anchor, address)
        else:
            await self.run(lambda: packed.copy_into(anchor, address))
        self.count(packed)

    def copy_nowait(self, packed: Packed, anchor: NDArray[np.uint8], address: int) -> None:
        """The same in the loop, whatever the size."""
        packed.copy_into(anchor, address)
        self.count(packed)

    def count(self, packed: Packed) -> None:
        """Counts a payload's tensors as copied."""
        self.copies += packed.copied
        self.copied_nbytes += packed.copied_nbytes

    async def run(self, work: Callable[[], _Result]) -> _Result:
        """Runs work on a thread; a cancellation waits until it has ended."""
        return await uninterrupted(asyncio.get_running_loop().run_in_executor(self._pool, work))

    def close(self) -> None:
        """Takes no further work; what is running ends by itself."""
        self._pool.shutdown(wait=False)
