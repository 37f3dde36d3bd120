"""A frontend's end of a device slab: slots in the memory of a GPU, written by whatever this process queues there.

Theory of operation: the engine says in its welcome what to attach to; that is done on a thread, when the first slot in device
memory is asked for. From then on such a slot is like any other, in a :class:`~shmring.core.client_book.ClientBook` of its own
whose generations are the first one's. Two things differ. Nothing but tensors is written to device memory, so a slot has room
for a header and no header. And who writes there has not written when its call returns: so a submission carries one *fence*,
an event behind all that was queued on the current stream when it was submitted; and a slot that is left is free only when the
GPU has come to what was queued by then (``memory/device_views.py``), the engine being done with it or not.

What a caller queues on other streams than the current one, the current one has to wait for, before the slot is submitted and
before it is left.

Invariants:

- a fence is recorded again only when all slots that went with it have come back: the engine has waited for it by then;
- the slab is unmapped only after the last view of it and after all that this process has queued on its GPU, or not at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Sequence

import torch

from shmring.core.client_book import ClientBook, ClientSlotRecord
from shmring.core.effects import ClientEffect
from shmring.core.geometry import BLOCK_NBYTES, ClientBookLimits
from shmring.core.messages import DEVICE_MEMORY, SLOT_HEADER_NBYTES, Welcome
from shmring.core.states import ClientSlot
from shmring.gpu.cuda import Cuda, CudaError, Stream
from shmring.gpu.device import DeviceSlab, Fence, Fences
from shmring.gpu.device_views import DeviceViews

__all__ = ["DeviceSlots"]

logger = logging.getLogger("shmring.client")

_CLOSE_TIMEOUT_S = 10.0  # for the GPU to come to what this process has queued: far beyond anything that is


@dataclasses.dataclass(slots=True, eq=False)
class _Submission:
    """A fence, and how many of the slots that went with it are still out."""

    fence: Fence
    slots: int


class DeviceSlots:
    """The slots of one session in the device slab. Lives in a loop.

    Args:
        cuda: how to call CUDA.
        slab: attached; taken over.
        welcome: of the engine.
        lease_nbytes, lease_idle_s: see :class:`~shmring.config.ClientConfig`.
        wake: called on any thread; must only wake the loop, which calls :meth:`collect`.

    Attributes:
        book: of the leases in device memory.
        device: the GPU, as this process counts.
    """

    def __init__(
        self,
        cuda: Cuda,
        slab: DeviceSlab,
        welcome: Welcome,
        *,
        lease_nbytes: int,
        lease_idle_s: float,
        wake: Callable[[], object],
    ) -> None:
        self._cuda = cuda
        self._slab = slab
        self._start = welcome.slab_nbytes
        self.device = slab.device
        self.book = ClientBook(
            ClientBookLimits(
                client_id=welcome.client_id,
                slab_nbytes=self._start + slab.nbytes,
                leasable_nbytes=slab.nbytes,
                max_leases=welcome.max_leases,
                lease_nbytes=lease_nbytes,
                lease_idle_s=lease_idle_s,
                memory=DEVICE_MEMORY,
                first_block=self._start // BLOCK_NBYTES,
            )
        )
        self._views: DeviceViews[int] = DeviceViews(cuda, slab.device, wake)  # by id of the record
        self._left: dict[int, ClientSlotRecord] = {}  # by id, until nobody uses them any more
        self._fences = Fences(cuda)
        self._submissions: dict[int, _Submission] = {}  # by generation
        self._closed = False

    def statistics(self) -> dict[str, int]:
        """Returns the fields of :class:`~shmring.statistics.ClientStatistics` that are about this."""
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

    def find(self, address: int) -> int | None:
        """Returns where an address of this process lies in the engine's address space; None if not in the device slab."""
        offset = self._slab.find(address)
        return None if offset is None else self._start + offset

    def check_index(self, wanted: int | None) -> None:
        """Raises :class:`ValueError` unless the slab is on the GPU of this index."""
        if wanted is not None and wanted != self.device:
            raise ValueError(f"the engine's device slab is on cuda:{self.device} of this process, not on cuda:{wanted}")

    # -- slots ---------------------------------------------------------------------------------------------------------

    def anchor(self, record: ClientSlotRecord) -> torch.Tensor:
        """Returns the bytes of a slot that was acquired, ``uint8``, and watches for the death of the last view of them.

        Raises:
            CudaError: CUDA failed. Nothing was changed.
        """
        stream = self.current_stream()
        # Of a slot of no bytes one is viewed: it has a block, and CUDA knows no empty ranges.
        lent, view = self._slab.anchor(record.offset - self._start + SLOT_HEADER_NBYTES, max(1, record.nbytes))
        self._views.use(id(record), stream)
        self._views.watch(id(record), lent)
        return view

    def is_viewed(self, record: ClientSlotRecord) -> bool:
        """Whether a view of a held slot is alive."""
        return self._views.lent(id(record)) is not None

    def leave(self, record: ClientSlotRecord, *, drain: bool, now: float) -> list[ClientEffect]:
        """The caller leaves a slot; it is free when the GPU has come to what was queued on it, and the engine is done."""
        record.viewed = True
        self._left[id(record)] = record
        self._views.leave(id(record), drain=drain)
        return self.book.give_up(record, now)

    def collect(self, now: float) -> list[ClientEffect]:
        """Takes back what nobody in this process uses any more."""
        effects: list[ClientEffect] = []
        for key in self._views.collect():
            effects += self.book.last_view_gone(self._left.pop(key), now)
        return effects

    # -- submissions -----------------------------------------------------------------------------------------------------

    def current_stream(self) -> Stream:
        """Returns the stream that this thread computes on, on the slab's device."""
        return self._cuda.current_stream(self.device)

    def record_fence(self, records: Sequence[ClientSlotRecord], stream: Stream | None) -> Fence | None:
        """Records a fence for a submission of these slots, behind all that is queued on a stream; None if none needs one.

        Raises:
            CudaError: CUDA failed. Nothing was changed.
        """
        if not any(self.has(record) for record in records):
            return None
        stream = self.current_stream() if stream is None else stream
        for record in records:
            if self.has(record):
                self._views.use(id(record), stream)
        return self._fences.record(stream)

    def unused(self, fence: Fence) -> None:
        """Nothing was submitted with a fence that was recorded for it."""
        self._fences.give_back(fence)

    def submitted(self, generations: Sequence[int], fence: Fence) -> None:
        """A submission's slots here went under these generations, and with this fence."""
        submission = _Submission(fence, len(generations))
        for generation in generations:
            self._submissions[generation] = submission

    def released(self, generations: Sequence[int], now: float) -> tuple[list[ClientEffect], list[int]]:
        """The engine hands slots back.

        Returns:
            The effects, and those of the generations that are not of slots here.
        """
        own = [generation for generation in generations if generation in self._submissions]
        for generation in own:
            submission = self._submissions.pop(generation)
            submission.slots -= 1
            if not submission.slots:
                self._fences.give_back(submission.fence)
        effects, _ = self.book.released(own, now)
        return effects, [generation for generation in generations if generation not in own]

    # -- the end -----------------------------------------------------------------------------------------------------------

    async def close(self) -> bool:
        """Unmaps the slab when the GPU has come to all that this process queued; returns whether it is unmapped.

        Where views are alive it stays mapped, and is unmapped after the last of them, if :meth:`abandon` is called.
        """
        return await asyncio.get_running_loop().run_in_executor(None, self._close)

    def abandon(self) -> None:
        """The session has ended: unmaps the slab on a thread, as soon as nobody views it; waits for nothing."""
        self._views.abandon()
        self.close_soon()

    def close_soon(self) -> None:
        """Unmaps the slab on a thread unless somebody views it; once the session has ended, after each death of a view."""
        with contextlib.suppress(RuntimeError):  # the loop is closing: the mapping ends with the process
            asyncio.get_running_loop().run_in_executor(None, self._close)

    def _close(self) -> bool:
        if self._closed:
            return True
        if not self._views.close(_CLOSE_TIMEOUT_S):
            return False
        try:
            self._closed = self._slab.close()
        except CudaError as error:
            logger.warning("the engine's device slab stays mapped until this process ends: %s", error)
        return self._closed
