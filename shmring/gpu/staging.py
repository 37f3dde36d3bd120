"""Device memory that copies land in: allocated once, lent out in parts, reused when the GPU is done with them.

Theory of operation: a part goes to one request. Its tensors are views of one :class:`~shmring.gpu.cuda.DeviceBytes`, so
the death of that object says that nobody will queue anything on them any more. The GPU may still be at work on what was
queued before; an event recorded then, on the stream that used them, says when that is over. Only then is the part free.

The event is recorded in the loop, a moment after the death, and so covers at least what was queued until then. It is
asked for (never waited for) when somebody needs space, and every millisecond while somebody waits for it: an engine
whose staging memory suffices never asks twice.

Invariants:

- a part is lent to one request at a time, and free again only after both its last view and the event behind it;
- tensors keep the memory itself alive, also when the ring that lent it is closed;
- waiters are served in order, and one that is cancelled passes its turn on.

Source: vLLM's ``CpuGpuBuffer`` and ``copy_slice`` keep a pair of buffers per kind of input; here any request may have any part.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import weakref
from collections import deque
from typing import Any

import torch

from shmring.core.compiled import RunAllocator
from shmring.errors import CapacityError, ClosedError, WouldBlock
from shmring.gpu.cuda import Cuda, CudaError, DeviceBytes, Event, Stream
from shmring.line import Line

__all__ = ["StagingPart", "StagingRing"]

logger = logging.getLogger("shmring.ring")

#: What parts are counted in: what torch's own allocator aligns to, so that no kernel finds an address it can't vectorise.
UNIT_NBYTES = 512
#: How often the GPU is asked while somebody waits for space.
_POLL_S = 0.001


@dataclasses.dataclass(slots=True, eq=False)
class StagingPart:
    """A part that is lent out; says nothing of whether it still is.

    Attributes:
        stream: where its last use is queued: the stream that fills it, then the one that computes on it.
    """

    start: int
    units: int
    stream: Stream


class StagingRing:
    """Lends out parts of one allocation. Lives in a loop: only the deaths of views come from elsewhere.

    Args:
        cuda: how to call CUDA.
        device_index: where the memory is.
        memory: ``uint8 (nbytes,)`` on that device; at least one unit.
        stream: what fills the parts.

    Attributes:
        nbytes: the largest part there can be.
    """

    def __init__(self, cuda: Cuda, device_index: int, memory: torch.Tensor, stream: Stream) -> None:
        self._cuda = cuda
        self._device_index = device_index
        self._memory = memory
        self._stream = stream
        self._loop = asyncio.get_running_loop()
        self._free = RunAllocator(0, memory.nbytes // UNIT_NBYTES)
        self.nbytes = self._free.length * UNIT_NBYTES
        self._lent: dict[StagingPart, weakref.ref[DeviceBytes]] = {}
        self._dead: deque[StagingPart] = deque()
        self._retired: list[tuple[Event, StagingPart]] = []
        self._users: set[Stream] = set()
        self._line: Line[tuple[StagingPart, torch.Tensor]] = Line()
        self._poll: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def free_nbytes(self) -> int:
        """Bytes that are lent to nobody, and that the GPU is done with, as far as it was asked."""
        return self._free.free_units * UNIT_NBYTES

    async def acquire(self, nbytes: int) -> tuple[StagingPart, torch.Tensor]:
        """Waits for a part; see :meth:`acquire_nowait`."""
        if (taken := self._take_in_turn(nbytes)) is not None:
            return taken
        place = self._line.enter(nbytes)
        self._serve()
        try:
            # A part that is given in vain dies, and goes on to the next.
            return await self._line.stay(place, lambda _: None, lambda _: self._serve())
        finally:
            del place

    def acquire_nowait(self, nbytes: int) -> tuple[StagingPart, torch.Tensor]:
        """Takes a part, if one is free and nobody waits.

        Args:
            nbytes: its size, at least 1.

        Returns:
            The part, and its bytes on the device: ``uint8 (nbytes,)``, content undefined. The part is lent for as long as
            a view of the bytes lives; to be used on the stream of the part, which the borrower keeps true.

        Raises:
            CapacityError: it is larger than all of the staging memory.
            WouldBlock: there is no such part now.
        """
        taken = self._take_in_turn(nbytes)
        if taken is None:
            raise WouldBlock(f"no {nbytes} bytes of staging memory are free on GPU {self._device_index}")
        return taken

    def hand_over(self, part: StagingPart, stream: Stream) -> None:
        """Notes that a part is used on another stream from now on, which waits for what was queued before."""
        if stream not in self._users:
            self._users.add(stream)
            self._cuda.used_on(self._memory, stream)  # for the day when the last view of a closed ring frees the memory
        part.stream = stream

    def close(self) -> None:
        """Lends nothing more out. The memory goes with the last view of it."""
        self._closed = True
        if self._poll is not None:
            self._poll.cancel()
        for place, _ in self._line.waiting():
            place.set_exception(ClosedError("the ring was closed"))

    def _take_in_turn(self, nbytes: int) -> tuple[StagingPart, torch.Tensor] | None:
        if self._closed:
            raise ClosedError("the ring was closed")
        if nbytes > self.nbytes:
            raise CapacityError(
                f"{nbytes} bytes can never fit the staging memory of {self.nbytes} on a GPU; raise staging_nbytes",
                needed=nbytes,
                capacity=self.nbytes,
            )
        self._reap()
        return None if self._line.is_waited_in else self._take(nbytes)

    def _take(self, nbytes: int) -> tuple[StagingPart, torch.Tensor] | None:
        units = -(-nbytes // UNIT_NBYTES)
        start = self._free.allocate(units)
        if start is None:
            return None
        part = StagingPart(start, units, self._stream)
        try:
            lent = DeviceBytes(self._memory, self._memory.data_ptr() + start * UNIT_NBYTES, nbytes)
            view = self._cuda.view(self._device_index, lent)
        except BaseException:
            self._free.free(start, units)
            raise
        self._lent[part] = weakref.ref(lent, functools.partial(self._died, part))
        return part, view

    def _died(self, part: StagingPart, _reference: Any) -> None:
        """On any thread, at any moment: says so, and nothing else."""
        self._dead.append(part)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to lend it to
            self._loop.call_soon_threadsafe(self._retire)

    def _retire(self) -> None:
        while self._dead:
            part = self._dead.popleft()
            del self._lent[part]
            if self._closed:
                continue
            try:
                self._retired.append((self._cuda.record(part.stream), part))
            except CudaError as error:
                logger.error("%d bytes of staging memory are lost: %s", part.units * UNIT_NBYTES, error)
        self._serve()

    def _reap(self) -> None:
        """Frees the parts that the GPU is done with."""
        retired, self._retired = self._retired, []
        for event, part in retired:
            try:
                over = self._cuda.query(event)
            except CudaError as error:
                logger.error("%d bytes of staging memory are lost: %s", part.units * UNIT_NBYTES, error)
                continue
            if over:
                self._free.free(part.start, part.units)
            else:
                self._retired.append((event, part))

    def _serve(self) -> None:
        """Gives those who wait what there is, first come first served."""
        if self._closed or not self._line.is_waited_in:
            return
        self._reap()
        for place, nbytes in self._line.waiting():
            try:
                taken = self._take(nbytes)
            except CudaError as error:
                place.set_exception(error)
                continue
            if taken is None:
                break  # nobody overtakes the first
            place.set_result(taken)
        if self._line.is_waited_in and self._retired and self._poll is None:
            self._poll = self._loop.call_later(_POLL_S, self._poll_again)

    def _poll_again(self) -> None:
        self._poll = None
        self._serve()
