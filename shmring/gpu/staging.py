"""Device memory that copies land in: allocated once, lent out in parts, reused when the GPU is done with them.

Theory of operation: a part goes to one request. Its tensors are views of one region. When the last of them has died
(``core/views.pyx``), no more work is queued on them. The GPU may still be at work on what was queued before: if the stream that
used them is not idle then, a mark in it says when that is over. Only then is the part free.

The mark is made in the loop, a moment after the departure, and so covers at least what was queued until then. The mark is
queried (never waited for) when a request needs space, and every millisecond while a request waits: an engine with enough
staging memory never queries twice.

Invariants:

- a part is lent to one request at a time, and free again only after both its last view and what was queued by then;
- tensors keep the memory itself alive, also when the ring that lent it is closed;
- waiters are served in order, and one that is cancelled passes its turn on.

Source: vLLM's ``CpuGpuBuffer`` and ``copy_slice`` keep a pair of buffers per kind of input; here any request may have any part.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import torch
import torch.utils.dlpack

from shmring.core.compiled import GpuMemory, Mark, Region, Regions, RunAllocator
from shmring.core.loggers import logger_of
from shmring.errors import CapacityError, ClosedError, WouldBlock
from shmring.gpu.cuda import Cuda, CudaError
from shmring.line import WaitingLine

__all__ = ["StagingPart", "StagingRing"]

logger = logger_of("shmring.ring")

_dlpack: Any = torch.utils.dlpack  # which is not annotated

#: What parts are counted in: what torch's own allocator aligns to, so that no kernel finds an address it can't vectorise.
UNIT_NBYTES = 512
#: How often the GPU is queried while a request waits for space.
_POLL_S = 0.001


@dataclasses.dataclass(slots=True, eq=False)
class StagingPart:
    """A part that is lent out.

    Attributes:
        region: its bytes, to be viewed until the part is left.
        stream: the number of that where its last use is queued: that which fills it, then that which computes on it.
    """

    number: int
    start: int
    units: int
    region: Region
    stream: int


class StagingRing:
    """Lends out parts of one allocation. Lives in a loop: only the deaths of views come from elsewhere.

    Args:
        cuda: how to call CUDA.
        device_index: where the memory is.
        memory: ``uint8 (nbytes,)`` on that device; at least one unit.
        stream: the number of that which fills the parts.

    Attributes:
        nbytes: the largest part there can be.
    """

    def __init__(self, cuda: Cuda, device_index: int, memory: torch.Tensor, stream: int) -> None:
        self._cuda = cuda
        self._device_index = device_index
        self._gpu = cuda.gpu(device_index)
        self._memory = memory
        # Regions keep torch's tensor in C, also when this is gone.
        keeper = _dlpack.to_dlpack(memory)
        self._lendable = GpuMemory(self._gpu, memory.data_ptr(), memory.nbytes, keeper)
        self._stream = stream
        self._loop = asyncio.get_running_loop()
        self._free = RunAllocator(0, memory.nbytes // UNIT_NBYTES)
        self.nbytes = self._free.length * UNIT_NBYTES
        self._regions = Regions()
        self._loop.add_reader(self._regions.bell, self._departed)
        self._lent: dict[int, StagingPart] = {}
        self._number = 0  # of the last part
        self._retired: list[tuple[Mark, StagingPart]] = []
        self._users: set[int] = set()
        self._line: WaitingLine[StagingPart] = WaitingLine()
        self._poll: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def free_nbytes(self) -> int:
        """Free bytes, with which the GPU was done when it was last queried."""
        return self._free.free_units * UNIT_NBYTES

    async def acquire(self, nbytes: int) -> StagingPart:
        """Waits for a part; see :meth:`take`."""
        if (part := self.take(nbytes)) is not None:
            return part
        place = self._line.enter(nbytes)
        self._serve()
        try:
            return await self._line.stay(place, self.leave, lambda _: self._serve())
        finally:
            del place

    def take(self, nbytes: int) -> StagingPart | None:
        """Lends a part, if one is free and no request waits; otherwise returns None.

        Args:
            nbytes: its size, at least 1.

        Returns:
            The part, its content undefined. It is lent until it was left, and the last view of it is gone; to be used on the
            stream of the part, which the borrower keeps true.

        Raises:
            CapacityError: it is larger than all of the staging memory.
            ClosedError: the ring was closed.
        """
        if self._closed:
            raise ClosedError("the ring was closed")
        if nbytes > self.nbytes:
            raise CapacityError(
                f"{nbytes} bytes can never fit the staging memory of {self.nbytes} on a GPU; raise staging_nbytes",
                needed=nbytes,
                capacity=self.nbytes,
            )
        if self._retired:
            self._reap()
        return None if self._line and self._line.is_waited_in else self._take(nbytes)

    def no_space(self, nbytes: int) -> WouldBlock:
        """Returns the error for a call that does not wait."""
        return WouldBlock(f"no {nbytes} bytes of staging memory are free on GPU {self._device_index}")

    def leave(self, part: StagingPart) -> None:
        """The borrower makes no further views of a part."""
        if not part.region.leave():
            self._retire(part)
            self._serve()

    def is_used_on(self, stream: int) -> bool:
        """Whether a part was handed over to a stream before. So that has waited for the last owner of the memory."""
        return stream in self._users

    def hand_over(self, part: StagingPart, stream: int) -> None:
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
        self._loop.remove_reader(self._regions.bell)
        self._regions.close()

    def _take(self, nbytes: int) -> StagingPart | None:
        units = -(-nbytes // UNIT_NBYTES)
        start = self._free.allocate(units)
        if start is None:
            return None
        self._number += 1
        region = self._lendable.lend(self._regions, start * UNIT_NBYTES, nbytes, (0, self._number))
        part = self._lent[self._number] = StagingPart(self._number, start, units, region, self._stream)
        return part

    def _departed(self) -> None:
        for _, number in self._regions.collect():
            self._retire(self._lent[number])
        self._serve()

    def _retire(self, part: StagingPart) -> None:
        """The last view of a part has died."""
        del self._lent[part.number]
        if self._closed:
            return
        try:
            if self._gpu.is_idle(part.stream):
                self._free.free(part.start, part.units)
            else:
                self._retired.append((self._gpu.record(part.stream), part))
        except CudaError as error:
            self._lose(part, error)

    def _lose(self, part: StagingPart, error: CudaError) -> None:
        logger.error("%d bytes of staging memory are lost: %s", part.units * UNIT_NBYTES, error)

    def _reap(self) -> None:
        """Frees the parts that the GPU is done with."""
        retired, self._retired = self._retired, []
        for mark, part in retired:
            try:
                has_come = mark.has_come
            except CudaError as error:
                self._lose(part, error)
                continue
            if has_come:
                self._free.free(part.start, part.units)
            else:
                self._retired.append((mark, part))

    def _serve(self) -> None:
        """Serves waiting requests, in order of arrival."""
        if self._closed or not self._line.is_waited_in:
            return
        self._reap()
        for place, nbytes in self._line.waiting():
            part = self._take(nbytes)
            if part is None:
                break  # the first is not overtaken
            place.set_result(part)
        if self._line.is_waited_in and self._retired and self._poll is None:
            self._poll = self._loop.call_later(_POLL_S, self._poll_again)

    def _poll_again(self) -> None:
        self._poll = None
        self._serve()
