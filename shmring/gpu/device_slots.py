"""A device slab in a frontend: slots in the memory of a GPU, written by work that this process queues there.

Theory of operation: the engine says in its welcome what to attach to; that is done on a thread, when the first slot in device
memory is asked for. From then on such a slot is like any other, in a book whose generations are those of the slab's. Two things
differ. Only tensors are written to device memory, so a slot has room for a header but no header. And a call that writes there
returns before the GPU has written: so a submission carries one *fence*, an event behind all work that was queued on the current
stream when it was submitted; and a left slot is free only when the GPU has also finished the work that was queued by then
(``device_views.py``).

If a caller uses other streams than the current one, it must let the current one wait for them, before the slot is submitted and
before it is left.

Invariants:

- a fence is recorded again only when all slots that went with it have come back: the engine has waited for it by then;
- the slab is unmapped only after the last view of it and after all that this process has queued on its GPU, or not at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch

from shmring.cancellation import retrieve, uninterrupted
from shmring.core.compiled import BaseSlot, ClientSlotRecord, Gpu, Mapping, Mark
from shmring.core.geometry import BLOCK_NBYTES
from shmring.core.loggers import logger_of
from shmring.core.messages import DEVICE_MEMORY, SLOT_HEADER_NBYTES
from shmring.core.states import ClientSlot
from shmring.errors import SlabError, WouldBlock, fresh
from shmring.gpu.cuda import Cuda, CudaError
from shmring.gpu.device import OVER, DeviceMemory, DeviceSlab, Fence, Fences
from shmring.gpu.device_views import DeviceViews
from shmring.memory.copier import Copier
from shmring.memory.slots import Owner, Slots

__all__ = ["DeviceSlots"]

logger = logger_of("shmring.client")

_CLOSE_TIMEOUT_S = 10.0  # for the GPU to come to what this process has queued: far beyond anything that is


#: Slabs in host memory whose engines' device slabs are mapped here. They stay mapped as long, since the end of a mapping says
#: that nothing of either is used.
_MAPPED_WITH: set[Mapping] = set()


@dataclasses.dataclass(slots=True, eq=False)
class _Submission:
    """A fence, and how many of the slots that went with it are still out. None: all had been written when it was sent."""

    fence: Fence | None
    slots: int = 0


class DeviceSlots(Slots):
    """The slots of one session in the device slab. There are none before :meth:`open`. Lives in a loop.

    Args:
        owner: the session.
        engine_name: of its engine.
        cuda, memory: how to call CUDA.
        copier: has the threads.
        slot_type: of slots in callers' hands.

    Attributes:
        held: slots that callers hold.
        is_mapped: whether the slab is mapped into this process, or about to be.
    """

    def __init__(
        self, owner: Owner, engine_name: str, cuda: Cuda, memory: DeviceMemory, copier: Copier, slot_type: type[BaseSlot]
    ) -> None:
        self._start = owner.welcome.slab_nbytes
        self._handle = owner.welcome.device_slab
        nbytes = 0 if self._handle is None else self._handle.nbytes
        super().__init__(owner, DEVICE_MEMORY, first_block=self._start // BLOCK_NBYTES, nbytes=nbytes)
        self.held = 0
        self.is_mapped = False
        self._engine_name = engine_name
        self._cuda = cuda
        self._memory = memory
        self._copier = copier
        self._slot_type = slot_type
        self._opening: asyncio.Task[None] | None = None
        self._is_open = False
        self._host_slab: Mapping
        self._slab: DeviceSlab  # these from then on
        self._gpu: Gpu
        self._views: DeviceViews  # by (0, id of the slot's record): a client has no client ids
        self._fences: Fences
        self._submissions: dict[int, _Submission] = {}  # by generation
        self._submission: _Submission  # the last one

    def statistics(self) -> dict[str, int]:
        if not self._is_open:
            return {}
        return {
            "device_slab_nbytes": self._slab.nbytes,
            "device_leased_nbytes": self.book.leased_nbytes,
            "device_free_nbytes": self.book.free_nbytes,
            "device_slots_in_use": sum(self.book.count(state) for state in ClientSlot),
            "device_slots_lost": self._views.lost,
        }

    def has(self, record: ClientSlotRecord) -> bool:
        """Whether a slot lies in the device slab."""
        return record.offset >= self._start

    # -- mapping the slab --------------------------------------------------------------------------------------------------

    async def open(self, device_index: int | None) -> DeviceSlots:
        """Attaches to the engine's device slab, once.

        Args:
            device_index: of the GPU that is wanted, as this process counts; None: any.

        Raises:
            SlabError: the engine has none, or (``CudaError``) this process can't have it. The next call tries again.
            ValueError: it is on another GPU.
        """
        self._check_there()
        if not self._is_open:
            if self._opening is None:
                self._opening = self._loop.create_task(self._attach())
                self._opening.add_done_callback(self._opened)
            try:
                await asyncio.shield(self._opening)
            except CudaError as error:
                raise fresh(error) from None  # others may be waiting for the same
            self._owner.check_alive()
        return self.opened(device_index)

    def opened(self, device_index: int | None) -> DeviceSlots:
        """Returns these slots if :meth:`open` has attached before.

        Raises:
            WouldBlock: it was not.
            SlabError, ValueError: as :meth:`open`.
        """
        self._check_there()
        if not self._is_open:
            raise WouldBlock("the engine's device slab is not mapped yet; await client.slot(..., device='cuda') once")
        if device_index is not None and device_index != self._slab.device_index:
            raise ValueError(
                f"the engine's device slab is on cuda:{self._slab.device_index} of this process, not on cuda:{device_index}"
            )
        return self

    def hold_now(self, nbytes: int, device: torch.device, drain: bool) -> Any:
        """For the end: returns a slot for a caller; None if something has to be waited for, or refused.

        Raises:
            CapacityError: so much can never be had.
            CudaError: as :meth:`hold`.
        """
        if not self._is_open or device.index not in {None, self._slab.device_index}:
            return None
        record = self.book.acquire(nbytes, held=True)
        return None if record is None else self.hold(record, drain=drain)

    def _check_there(self) -> None:
        if self._handle is None:
            raise SlabError(f"engine {self._engine_name!r} has no device slab: serve it with device_slab_nbytes=...")

    async def _attach(self) -> None:
        assert self._handle is not None
        self._host_slab = self._owner.mapping
        _MAPPED_WITH.add(self._host_slab)
        self.is_mapped = True
        try:
            attach = functools.partial(DeviceSlab.attach, self._cuda, self._memory, self._handle)
            self._slab = await self._copier.run(attach)
        except BaseException:
            self._unmapped()
            raise
        self._gpu = self._cuda.gpu(self._slab.device_index)
        self._fences = Fences(self._gpu)
        self._views = DeviceViews(self._cuda, self._slab.device_index, self._loop, self._collect_deaths)
        self._is_open = True
        if self._is_lost:  # meanwhile
            self._abandon()

    def _unmapped(self) -> None:
        self.is_mapped = False
        _MAPPED_WITH.discard(self._host_slab)

    def _opened(self, opening: asyncio.Task[None]) -> None:
        self._opening = None
        retrieve(opening)

    # -- slots ---------------------------------------------------------------------------------------------------------

    def hold(self, record: ClientSlotRecord, *, drain: bool) -> Any:
        """Hands an acquired slot to the caller, and watches for the death of the last view of it.

        Raises:
            CudaError: CUDA failed. The slot is free again.
        """
        key = (0, id(record))
        try:
            stream = self.current_stream()
            # Of a slot of no bytes one is viewed: it has a block, and CUDA knows no empty ranges.
            start = record.offset - self._start + SLOT_HEADER_NBYTES
            region = self._views.region(key, self._slab.memory, start, max(1, record.nbytes))
        except BaseException:
            self.give_up(record)
            raise
        self._views.use(key, stream)
        self.held += 1
        return self._owner.end.hold_lent(self._slot_type, record, region, drain)

    def leave(self, record: ClientSlotRecord, drain: bool) -> None:
        """For the end: a slot was left. It is free when the GPU has come to what was queued on it, and the engine is done."""
        key = (0, id(record))
        self.held -= 1
        if self._is_lost:
            return
        is_worth_a_warning = self._owner.config.debug and self._views.is_viewed(key)
        if not self._views.leave(key, drain=drain):
            record.viewed = True
            self._left[id(record)] = record
        self.give_up(record)
        if is_worth_a_warning:
            self._owner.warn_of_views(record)

    def _collect_deaths(self) -> None:
        over = self._views.collect()
        if self._is_lost:
            self._close_soon()
            return
        for _, number in over:
            self.views_gone(number)

    # -- submissions -----------------------------------------------------------------------------------------------------

    def current_stream(self) -> int:
        """Returns the number of the stream that this thread computes on, on the slab's device."""
        return self._cuda.current_stream(self._slab.device_index)

    # The loop submits and leaves slots on its own thread's stream. Threads that it does so for have streams of their own.

    def mark(self) -> Mark:
        """In any thread: stands for what this thread has queued on its current stream by now.

        Raises:
            CudaError: CUDA failed.
        """
        return self._gpu.record(self.current_stream())

    def follow(self, mark: Mark) -> None:
        """In the loop's thread: what is submitted from now on comes behind a mark.

        Raises:
            CudaError: CUDA failed.
        """
        self._gpu.follow(self.current_stream(), mark)

    def use(self, record: ClientSlotRecord, stream: int) -> None:
        """A slot that a caller holds is used on this stream, too."""
        if not self._is_lost:
            self._views.use((0, id(record)), stream)

    def record_fence(self, records: Sequence[ClientSlotRecord], stream: int | None) -> bytes:
        """For the end, which submits slots of which some are here: records an event behind all that is queued on a stream.

        Where the stream is idle already there is nothing to wait for, and no event: waiting for another process's event
        takes a GPU longer than a small copy does.

        Args:
            records: of the slots; those that are here are submitted next.
            stream: None: the current one.

        Returns:
            The handle of the event; ``OVER``: there is none.

        Raises:
            CudaError: CUDA failed. Nothing was changed.
        """
        stream = self.current_stream() if stream is None else stream
        for record in records:
            if self.has(record):
                self._views.use((0, id(record)), stream)
        fence = None if self._gpu.is_idle(stream) else self._fences.record(stream)
        self._submission = _Submission(fence)
        return OVER if fence is None else fence.handle

    def submit(self, record: ClientSlotRecord) -> int:
        """For the end: a slot goes with the fence that was recorded last. Returns its generation."""
        generation = self.book.submit(record, self._owner.end.book)
        self._submissions[generation] = self._submission
        self._submission.slots += 1
        return generation

    def release(self, generation: int) -> bool:
        """For the end: the engine hands a slot back. Returns whether it is one of these."""
        submission = self._submissions.pop(generation, None)
        if submission is None:
            return False
        submission.slots -= 1
        if not submission.slots and submission.fence is not None:
            self._fences.give_back(submission.fence)
        effects, _ = self.book.released((generation,), self._loop.time())
        self.carry_out(effects)
        return True

    # -- the end -----------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Unmaps the slab when the GPU has come to all that this process queued.

        Where views are alive it stays mapped, and is unmapped after the last of them, if :meth:`lose` is called.
        """
        if self._opening is not None:
            await asyncio.wait([self._opening])
        if self._is_open:
            await uninterrupted(self._loop.run_in_executor(None, self._close))
            self._collect_deaths()

    def lose(self) -> list[asyncio.Future[Any]]:
        """Returns what callers wait for, which will not come. The slab is unmapped on a thread, as soon as nobody views it."""
        if self._is_open:
            self._abandon()
        return super().lose()

    def _abandon(self) -> None:
        self._views.abandon()
        self._close_soon()

    def _close_soon(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closing: the mapping ends with the process
            self._loop.run_in_executor(None, self._close)

    def _close(self) -> None:
        if not self.is_mapped or not self._views.close(_CLOSE_TIMEOUT_S):
            return
        try:
            if self._slab.close():
                self._unmapped()
        except CudaError as error:
            logger.warning("the engine's device slab stays mapped until this process ends: %s", error)
