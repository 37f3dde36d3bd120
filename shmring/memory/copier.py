"""Copies into slots, large ones off the event loop.

A large copy runs on a thread (it releases the interpreter lock) while the loop goes on. Cancelling the task that waits for it
is safe: the cancellation is delivered when the thread has stopped writing, so the slot may be given back then.

Other copies are made in the loop, which is faster than waking a thread and then the loop. A turn of the loop copies no more
than a single copy may take, so many copies together can't stop it for long. Later copies wait for another turn, in order of
arrival. A caller that sends one message after the other gives the loop a turn sooner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from shmring.cancellation import uninterrupted
from shmring.core.compiled import CopyBudget, Mapping, Packed
from shmring.line import WaitingLine

__all__ = ["Copier"]

_LONG_NBYTES = 768 << 10  # smaller copies take little longer than the rest of their message, and need not wait for a turn
_TURN_NBYTES = 12 << 20  # of long copies, sent one after the other, before the loop has a turn: 0.3 to 0.7 ms

_Result = TypeVar("_Result")


class Copier(CopyBudget):
    """Copies packed payloads.

    Args:
        threads: how many copies may run beside the loop.
        offload_nbytes: the largest copy that is made in the loop, and the most that a turn of the loop copies in all.

    Attributes:
        offload_nbytes: as given.
    """

    def __init__(self, threads: int, offload_nbytes: int) -> None:
        self.offload_nbytes = offload_nbytes
        self.at_once_nbytes = offload_nbytes
        self.copied_in_turn = False
        self._turn_nbytes = 0  # bytes of this turn of the loop: copied, or granted to a waiting copy
        self._line: WaitingLine[None] = WaitingLine()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="shmring-copy")

    async def turn(self, nbytes: int) -> None:
        """Waits for a turn of the loop in which so many bytes may be copied, if they may not be copied now."""
        if nbytes <= self.at_once_nbytes or nbytes > self.offload_nbytes:
            return
        place = self._line.enter(nbytes)
        self._reckon()
        try:
            await self._line.stay(place, lambda _: self._reckon(), lambda _: self._reckon())  # its turn passes unused
        finally:
            del place

    async def copy(self, packed: Packed, mapping: Mapping, address: int) -> None:
        """Copies a payload into a slot. When this returns or raises, no thread is writing there.

        Args:
            packed: what to copy.
            mapping: of the slab, which stays mapped meanwhile.
            address: of the slot's content.
        """
        if packed.slot_nbytes > self.offload_nbytes:
            await self.run(lambda: _copy(packed, mapping, address))
            return
        await self.turn(packed.slot_nbytes)
        self.count_in_turn(packed.slot_nbytes)
        packed.copy_into(address)

    def count_in_turn(self, nbytes: int) -> None:
        """So many bytes are about to be copied in the loop."""
        if nbytes < _LONG_NBYTES:
            return
        if not self._turn_nbytes:
            asyncio.get_running_loop().call_soon(self._begin_turn)
        self._turn_nbytes += nbytes
        self._reckon()

    def _reckon(self) -> None:
        """The bytes of this turn, or the waiting copies, have changed."""
        left = 0 if self._line and self._line.is_waited_in else self.offload_nbytes - self._turn_nbytes
        self.at_once_nbytes = min(max(left, _LONG_NBYTES - 1), self.offload_nbytes)
        self.copied_in_turn = self._turn_nbytes >= min(_TURN_NBYTES, self.offload_nbytes) > 0

    def _begin_turn(self) -> None:
        self._turn_nbytes = 0
        for place, nbytes in self._line.waiting() if self._line else ():
            if self._turn_nbytes + nbytes > self.offload_nbytes:
                break
            self.count_in_turn(nbytes)
            place.set_result(None)
        self._reckon()

    async def run(self, work: Callable[[], _Result]) -> _Result:
        """Runs work on a thread; a cancellation waits until it has ended."""
        return await uninterrupted(asyncio.get_running_loop().run_in_executor(self._pool, work))

    def close(self) -> None:
        """Accepts no further work; running work ends by itself."""
        self._pool.shutdown(wait=False)


def _copy(packed: Packed, mapping: Mapping, address: int) -> None:
    packed.copy_into(address)
    del mapping  # held until here
