"""Copies into slots, large ones off the event loop.

A large copy runs on a thread (it releases the interpreter lock) while the loop goes on. Cancelling the task that waits for
it is safe: the cancellation is delivered when the thread has stopped writing, so whoever cleans up afterwards may give
the slot back.

Others are made in the loop, which is faster than waking a thread and then the loop. So that many of them don't hold it up
together, a turn of the loop copies no more than what a single copy may take: who comes after that waits for the next turn.
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

_COUNTED_NBYTES = 768 << 10  # smaller ones take little longer than the rest of their message

_Result = TypeVar("_Result")


class Copier:
    """Copies packed payloads, and counts what it copied.

    Args:
        threads: how many copies may run beside the loop.
        offload_nbytes: up to this size a copy is made in the loop; so much a turn of the loop copies in all.

    Attributes:
        copies, copied_nbytes: tensors that were copied so far, and their bytes.
    """

    def __init__(self, threads: int, offload_nbytes: int) -> None:
        self._offload_nbytes = offload_nbytes
        self._copied_in_turn_nbytes = 0
        self._next_turn = asyncio.Lock()  # whose turn it is, in order of arrival
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="shmring-copy")
        self.copies = 0
        self.copied_nbytes = 0

    async def copy(self, packed: Packed, anchor: NDArray[np.uint8], address: int) -> None:
        """Copies a payload's tensors into a region. When this returns or raises, nobody is writing there."""
        if packed.copy_nbytes > self._offload_nbytes:
            await self.run(lambda: packed.copy_into(anchor, address))
            self.count(packed)
            return
        if packed.copy_nbytes <= self.turn_nbytes:
            self.copy_nowait(packed, anchor, address)
            return
        async with self._next_turn:
            if packed.copy_nbytes > self._left_in_turn():
                await asyncio.sleep(0)
            self.copy_nowait(packed, anchor, address)

    def copy_nowait(self, packed: Packed, anchor: NDArray[np.uint8], address: int) -> None:
        """The same in the loop, whatever the size."""
        if packed.copy_nbytes >= _COUNTED_NBYTES:
            if not self._copied_in_turn_nbytes:
                asyncio.get_running_loop().call_soon(self._begin_turn)
            self._copied_in_turn_nbytes += packed.copy_nbytes
        packed.copy_into(anchor, address)
        self.count(packed)

    @property
    def copied_in_turn(self) -> bool:
        """Whether this turn of the loop has made a copy that is worth another."""
        return self._copied_in_turn_nbytes > 0

    @property
    def turn_nbytes(self) -> int:
        """How much :meth:`copy` would copy at once: what is left of this turn of the loop, and nothing while others wait."""
        return 0 if self._next_turn.locked() else self._left_in_turn()

    def _left_in_turn(self) -> int:
        return max(0, self._offload_nbytes - self._copied_in_turn_nbytes)

    def _begin_turn(self) -> None:
        self._copied_in_turn_nbytes = 0

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
