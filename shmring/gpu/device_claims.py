"""A device slab in the engine: claimed slots, until the GPU is done with them.

Theory of operation: a request whose tensors lie in the device slab carries one *fence*, an event that its frontend recorded
behind its writes. When the request is claimed, this thread's stream waits for the event, so work that is queued there
afterwards may use the tensors, and no thread waits. Its slots go back by way of :class:`~shmring.gpu.device_views.DeviceViews`.

In the engine's address space the device slab begins where the slab ends: a slot whose offset is at or beyond that is ours.

Invariants:

- no stream is given a tensor of a slot before it waits for the slot's fence;
- a frontend's events are dropped with the frontend, and not used for another;
- the memory is freed only when every frontend that knows of it has said that it has unmapped it, or is dead: CUDA does not say
  what happens to a mapping whose owner has freed it. Otherwise it stays allocated until the process ends, and the log says so.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

from shmring.core.compiled import Lending, Placement, Submit
from shmring.core.geometry import BLOCK_NBYTES
from shmring.core.loggers import logger_of
from shmring.core.messages import SLOT_HEADER_NBYTES, DeviceHandle, SlotRef
from shmring.core.states import Lease
from shmring.gpu.cuda import Cuda, CudaError, Stream, cuda_index, stream_number
from shmring.gpu.device import DeviceSlab, OpenedFences
from shmring.gpu.device_views import DeviceViews, Key
from shmring.gpu.upload import Given

__all__ = ["DeviceClaims"]

logger = logger_of("shmring.ring")

#: How long closing waits for the GPU: far beyond anything that is queued on it.
_CLOSE_TIMEOUT_S = 10.0
#: How long it waits for views: handlers that were cancelled let go of theirs within a few turns of the loop.
_VIEWS_TIMEOUT_S = 1.0


class DeviceClaims:
    """An engine's device slab. Lives in a loop.

    Args:
        cuda: how to call CUDA.
        slab: the device slab; taken over.
        start: where it begins in the address space, in bytes.
        collect: called in the loop when :meth:`collect` has something to return.
    """

    def __init__(self, cuda: Cuda, slab: DeviceSlab, start: int, collect: Callable[[], object]) -> None:
        self._cuda = cuda
        self._slab = slab
        self._start = start
        self._gpu = cuda.gpu(slab.device_index)
        self._loop = asyncio.get_running_loop()
        self._views = DeviceViews(cuda, slab.device_index, self._loop, collect)  # by client and generation
        self._opened: dict[int, OpenedFences] = {}
        self._announced_to: set[int] = set()
        self._in_use: set[Key] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def handle(self) -> DeviceHandle:
        """Returns what a frontend needs to attach."""
        return self._slab.handle

    def statistics(self, lending: Lending) -> dict[str, Any]:
        """Returns the fields of :class:`~shmring.statistics.RingStatistics` that are about the device slab.

        Args:
            lending: what the book says of it.
        """
        return {
            "device_slab_nbytes": self._slab.nbytes,
            "device_slab_free_nbytes": lending.free_nbytes,
            "device_slab_leased_nbytes": lending.leased_nbytes(Lease.LEASED),
            "device_slab_quarantined_nbytes": lending.leased_nbytes(Lease.QUARANTINED),
            "device_slots_lost": self._views.lost,
            "device_fences": sum(len(opened) for opened in self._opened.values()),
        }

    # -- frontends -----------------------------------------------------------------------------------------------------

    def announced(self, client_id: int) -> None:
        """A frontend learns of the slab now, and may map it at any moment."""
        self._announced_to.add(client_id)

    def unmapped(self, client_id: int) -> None:
        """A frontend has said that it does not map the slab, or is dead."""
        self._announced_to.discard(client_id)

    def gone(self, client_id: int) -> None:
        """Nothing of a frontend is left in the books."""
        self._opened.pop(client_id, None)

    # -- claims --------------------------------------------------------------------------------------------------------

    def claim(self, client_id: int, submit: Submit) -> Placement:
        """Lets this thread's stream wait for the work that a request's frontend has queued. Returns at once, with the places of
        its tensors here.

        Raises:
            RemoteProtocolError: this is no fence.
            CudaError: CUDA failed. No slot counts as used.
        """
        stream = self._cuda.current_stream(self._slab.device_index)
        self._wait(client_id, submit.content.fence, stream)
        here = self._here(client_id, submit)
        given = self._give(here, stream)
        self._in_use.update([key for _, _, key in here])
        self._idle.clear()
        return Placement(given)

    def current_stream(self) -> int:
        """Returns the number of the stream that this thread computes on, on the slab's device."""
        return self._cuda.current_stream(self._slab.device_index)

    def use(self, client_id: int, submit: Submit, consumer: int) -> None:
        """The slots of a claim that are here are used on one more stream, which waits for their fence.

        Raises:
            CudaError: CUDA failed.
        """
        self._wait(client_id, submit.content.fence, consumer)
        for _, _, key in self._here(client_id, submit):
            self._views.use(key, consumer)

    def give(self, client_id: int, submit: Submit, device: torch.device | str | int, stream: Stream | None) -> Given:
        """Returns the slots of a claim that are here, to be used on one more stream, which waits for their fence.

        Raises:
            ValueError: it is a stream of another device.
            CudaError: CUDA failed.
        """
        device_index = cuda_index(self._cuda, device)
        own_index = self._slab.device_index
        if device_index != own_index:
            raise ValueError(
                f"request {submit.request_id} has tensors in the device slab on cuda:{own_index}, which cuda:{device_index} "
                f"can't have: claim.to('cuda:{own_index}') gives them as they are; copy what another GPU needs from there"
            )
        consumer = self._cuda.current_stream(own_index) if stream is None else stream_number(stream)
        self._wait(client_id, submit.content.fence, consumer)
        return self._give(self._here(client_id, submit), consumer)

    def _give(self, here: Iterable[tuple[int, SlotRef, Key]], stream: int) -> Given:
        given = {}
        for number, slot, key in here:
            self._views.use(key, stream)
            # A slot of no bytes counts as one byte: it has a block, and CUDA knows no empty ranges.
            start, nbytes = slot.offset - self._start + SLOT_HEADER_NBYTES, max(1, slot.nbytes)
            given[number] = self._views.region(key, self._slab.memory, start, nbytes)
        return given

    def _here(self, client_id: int, submit: Submit) -> list[tuple[int, SlotRef, Key]]:
        """The slots of a request that are here: the number of each in the request, the slot, and its key."""
        start = self._start
        return [
            (number, slot, (client_id, slot.generation))
            for number, slot in enumerate(submit.content.slots, 1)
            if slot.offset >= start
        ]

    def release(self, client_id: int, submit: Submit) -> list[bool]:
        """A claim is released. Returns which of its slots drain: those here that are viewed, or that a GPU is at work on."""
        keys = [(client_id, slot.generation) for slot in submit.content.slots]
        draining = [key in self._views and not self._views.leave(key) for key in keys]
        self._over([key for key, drains in zip(keys, draining, strict=True) if not drains])
        return draining

    def is_viewed(self, client_id: int, submit: Submit) -> bool:
        """Whether a view of one of a claim's slots here is alive in this process."""
        return any(self._views.is_viewed((client_id, slot.generation)) for slot in submit.content.slots)

    def collect(self) -> list[Key]:
        """Returns the slots that are no longer used since the last call, by client and generation."""
        over = self._views.collect()
        self._over(over)
        return over

    def _over(self, keys: list[Key]) -> None:
        self._in_use.difference_update(keys)
        if not self._in_use:
            self._idle.set()

    def _wait(self, client_id: int, fence: bytes, stream: int) -> None:
        opened = self._opened.get(client_id)
        if opened is None:
            # A fence is out for as long as a slot is, also when its request has ended. So no more of them can be needed than
            # there are blocks.
            opened = self._opened[client_id] = OpenedFences(self._gpu, self._slab.nbytes // BLOCK_NBYTES)
        opened.wait(stream, fence)

    # -- the end -------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Frees the device slab, if no frontend can still use it; otherwise logs that it stays. Call it once."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_VIEWS_TIMEOUT_S):
                await self._idle.wait()
        await self._loop.run_in_executor(None, self._close)
        self._views.end()

    def _close(self) -> None:
        is_over = self._views.close(_CLOSE_TIMEOUT_S)
        try:
            reason = (
                "a GPU has not said that it is done with it"
                if not is_over
                else f"{len(self._announced_to)} frontends were told of it, and have neither said goodbye nor died"
                if self._announced_to
                else "views of it are alive"
                if not self._slab.close()
                else None
            )
        except CudaError as error:
            reason = str(error)
        if reason is not None:
            logger.warning("the device slab of %d bytes stays allocated until this process ends: %s", self._slab.nbytes, reason)
