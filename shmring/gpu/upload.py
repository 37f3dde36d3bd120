"""Copies all tensors of a request to a GPU, on a stream of their own, without waiting.

Theory of operation: the bytes go into a part of the device's staging memory (``staging.py``); the tensors are then views of
that part. How they are copied, and what keeps their slots until that is over, is compiled (``core/copies.pyx``). The loop's
next turn finds small copies over; a thread waits for all others (``watcher.py``). Copies from a slab that is not pinned block
the calling thread until the bytes have been read; those above ``offload_nbytes`` are made on a thread.

Invariant: :meth:`Uploads.close` returns when no copy is under way, or says that it can't tell.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from shmring.cancellation import retrieve, uninterrupted
from shmring.core.compiled import ContentRegions, CopyLane, Gpu, PayloadDecoder, Placement, Region, plan_copies
from shmring.errors import ClosedError, WouldBlock, fresh
from shmring.gpu.cuda import Cuda, CudaError, Stream, cuda_index, stream_number
from shmring.gpu.pinned import PinnedSlab
from shmring.gpu.staging import StagingPart, StagingRing
from shmring.gpu.watcher import Watcher
from shmring.memory.copier import Copier

__all__ = ["NOTHING_GIVEN", "Given", "Uploads"]

#: Copies up to this size take the GPU less time than it takes to agree on them with another stream, or with another thread.
_SMALL_NBYTES = 1 << 20

#: How long closing waits for the copies under way: thousands of times what the largest of them takes.
_CLOSE_TIMEOUT_S = 10.0

#: Slots of a content that are in device memory already, by their number from 1 on.
Given = dict[int, Region]
NOTHING_GIVEN: Given = {}


@dataclasses.dataclass(slots=True, eq=False)
class _Lane:
    """What copies to one device need."""

    gpu: Gpu
    stream: Stream
    staging: StagingRing
    watcher: Watcher
    copies: CopyLane


class Uploads:
    """Copies of requests to devices, for one ring. Lives in a loop.

    Args:
        cuda: how to call CUDA.
        pinned: what of the slab is pinned.
        copier: has the threads.
        staging_nbytes: device memory for copies, on each device that is copied to. Allocated at the first copy.
        offload_nbytes: copies from memory that is not pinned are made in the loop up to this size.

    Attributes:
        copies, copied_nbytes: requests copied, and their bytes, gaps included.
    """

    def __init__(self, cuda: Cuda, pinned: PinnedSlab, copier: Copier, *, staging_nbytes: int, offload_nbytes: int) -> None:
        self._cuda = cuda
        self._pinned = pinned
        self._copier = copier
        self._staging_nbytes = staging_nbytes
        self._offload_nbytes = offload_nbytes
        self._loop = asyncio.get_running_loop()
        self._lanes: dict[int, _Lane] = {}
        self._opening: dict[int, asyncio.Task[_Lane]] = {}
        self._on_threads = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False
        self.copies = 0
        self.copied_nbytes = 0

    async def upload(
        self,
        regions: ContentRegions,
        decoder: PayloadDecoder,
        device: torch.device | str | int,
        stream: Stream | None,
        check: Callable[[], object],
        given: Given = NOTHING_GIVEN,
    ) -> Any:
        """Copies a content's tensors; returns its payload with them on the device, to be used on ``stream``.

        Args:
            regions: of the content, as it was checked; those that are copied from are kept until that is over.
            decoder: makes the payload.
            device: where to.
            stream: that will use the tensors; ``None``: the current one of this thread on that device.
            check: called when something was waited for; raises if the slots are no more the caller's.
            given: what is there already; where all tensors are, nothing is copied, and nothing awaited.

        Raises:
            ValueError: ``device`` is no CUDA device.
            CapacityError: the tensors can never fit the staging memory.
            CudaError: CUDA is not there, or failed.
            ClosedError: the ring was closed.
        """
        placement = plan_copies(decoder, regions.content, given)
        if given and not placement.nbytes:
            return decoder.decode_again(regions, placement)
        device_index = cuda_index(self._cuda, device)
        try:
            lane = self._lanes.get(device_index)
            if lane is None:
                lane = await self._lane(device_index)
                check()
            consumer, is_there = self._consumer(device_index, stream)
            part, waited = lane.staging.take(placement.nbytes or 1), False
            if part is None:
                part, waited = await lane.staging.acquire(placement.nbytes or 1), True
            try:
                if waited:
                    check()
                if self._must_offload(placement):
                    return await self._copy_on_thread(lane, part, placement, regions, decoder, consumer)
                return self._copy(lane, part, placement, regions, decoder, consumer, is_there)
            finally:
                lane.staging.leave(part)
        except BaseException as error:
            _cut_off(error)
            raise

    def upload_nowait(
        self,
        regions: ContentRegions,
        decoder: PayloadDecoder,
        device: torch.device | str | int,
        stream: Stream | None,
        given: Given = NOTHING_GIVEN,
    ) -> Any:
        """Copies tensors to a device as :meth:`upload` does, if nothing has to be waited for.

        Raises:
            WouldBlock: the device's staging memory is full, or was never used; or the slab is not pinned, and the copy large.
        """
        self._check_open()
        placement = plan_copies(decoder, regions.content, given)
        if given and not placement.nbytes:
            return decoder.decode_again(regions, placement)
        device_index = cuda_index(self._cuda, device)
        lane = self._lanes.get(device_index)
        if lane is None:
            raise WouldBlock(
                f"nothing was copied to {device} yet, its staging memory has to be made; claim.to() waits for that"
            )
        if self._must_offload(placement):
            raise WouldBlock(f"the slab is not pinned, and copying {placement.nbytes} bytes from it would hold the loop up")
        try:
            consumer, is_there = self._consumer(device_index, stream)
            part = lane.staging.take(placement.nbytes or 1)
            if part is None:
                raise lane.staging.no_space(placement.nbytes)
            try:
                return self._copy(lane, part, placement, regions, decoder, consumer, is_there)
            finally:
                lane.staging.leave(part)
        except BaseException as error:
            _cut_off(error)
            raise

    async def close(self) -> bool:
        """Ends all copies. Returns whether none is under way; if not, the slab's memory must stay as it is."""
        self._closed = True
        await asyncio.gather(*self._opening.values(), return_exceptions=True)
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._idle.wait()
        except TimeoutError:
            return False
        for lane in self._lanes.values():
            lane.watcher.watch.look()
            lane.staging.close()
        watchers = [lane.watcher for lane in self._lanes.values()]
        self._lanes.clear()  # the memory goes with the last tensor in it
        if not watchers:
            return True
        ended = await uninterrupted(
            self._loop.run_in_executor(None, lambda: [watcher.close(_CLOSE_TIMEOUT_S) for watcher in watchers])
        )
        return all(ended)

    # -- lanes ---------------------------------------------------------------------------------------------------------

    async def _lane(self, device_index: int) -> _Lane:
        self._check_open()
        opening = self._opening.get(device_index)
        if opening is None:
            opening = self._opening[device_index] = asyncio.create_task(self._open_lane(device_index))
            opening.add_done_callback(functools.partial(self._lane_opened, device_index))
        try:
            lane = await asyncio.shield(opening)
        except CudaError as error:
            raise fresh(error) from None  # others may be waiting for the same
        self._check_open()
        return lane

    def _lane_opened(self, device_index: int, opening: asyncio.Task[_Lane]) -> None:
        del self._opening[device_index]
        retrieve(opening)

    async def _open_lane(self, device_index: int) -> _Lane:
        reason = self._cuda.unavailable()
        if reason is not None:
            raise CudaError(f"nothing can be copied to GPU {device_index}: {reason}", call="allocate")

        def allocate() -> tuple[torch.Tensor, Stream]:
            memory = self._cuda.allocate(device_index, self._staging_nbytes)
            stream = self._cuda.create_stream(device_index)
            number, gpu = stream_number(stream), self._cuda.gpu(device_index)
            # The allocator hands memory out while its last user is still queued on this thread's stream.
            gpu.follow(number, gpu.record(self._cuda.current_stream(device_index)))
            self._cuda.used_on(memory, number)
            return memory, stream

        memory, stream = await self._copier.run(allocate)
        number, gpu = stream_number(stream), self._cuda.gpu(device_index)
        watcher = Watcher(gpu, f"shmring-gpu-{device_index}")
        lane = _Lane(
            gpu,
            stream,
            StagingRing(self._cuda, device_index, memory, number),
            watcher,
            CopyLane(gpu, watcher.watch, number, self._pinned.chunks),
        )
        self._lanes[device_index] = lane
        return lane

    # -- one upload ----------------------------------------------------------------------------------------------------

    def _must_offload(self, placement: Placement) -> bool:
        return not self._pinned.nbytes and placement.nbytes > self._offload_nbytes

    def _copy(
        self,
        lane: _Lane,
        part: StagingPart,
        placement: Placement,
        regions: ContentRegions,
        decoder: PayloadDecoder,
        consumer: int,
        is_there: bool,
    ) -> Any:
        placement.target = part.region
        is_small = placement.nbytes <= _SMALL_NBYTES
        choose = is_small and is_there and lane.staging.is_used_on(consumer)
        stream = part.stream = consumer if choose and self._is_idle(lane, consumer) else lane.copies.stream
        if is_small:
            lane.watcher.look_soon(self._loop)  # before there is something: an error in between would leave it forever
        lane.copies.copy(placement, regions, stream, consumer, is_small)
        payload = decoder.decode_again(regions, placement)  # while the GPU is at it
        self._arrive(lane, part, placement, consumer)
        return payload

    def _consumer(self, device_index: int, stream: Stream | None) -> tuple[int, bool]:
        """Returns the number of the stream that will use the tensors, and whether it is known to be of that device."""
        if stream is None:
            return self._cuda.current_stream(device_index), True
        return stream_number(stream), getattr(stream, "device_index", None) == device_index

    @staticmethod
    def _is_idle(lane: _Lane, stream: int) -> bool:
        try:
            return lane.gpu.is_idle(stream)
        except CudaError:  # whatever it is, the lane's stream is there
            return False

    async def _copy_on_thread(
        self,
        lane: _Lane,
        part: StagingPart,
        placement: Placement,
        regions: ContentRegions,
        decoder: PayloadDecoder,
        consumer: int,
    ) -> Any:
        placement.target = part.region
        lane.copies.begin(placement, regions)
        try:
            payload = decoder.decode_again(regions, placement)  # afterwards, the slots may be somebody else's
            await self._on_thread(functools.partial(lane.copies.queue, placement))
        finally:
            lane.copies.finish(placement, consumer)  # also of what was cut off: some of it may be under way
        self._arrive(lane, part, placement, consumer)
        return payload

    async def _on_thread(self, work: Callable[[], None]) -> None:
        self._on_threads += 1
        self._idle.clear()
        try:
            await self._copier.run(work)
        finally:
            self._on_threads -= 1
            if not self._on_threads:
                self._idle.set()

    def _arrive(self, lane: _Lane, part: StagingPart, placement: Placement, consumer: int) -> None:
        if placement.nbytes:  # or it has waited for nothing
            lane.staging.hand_over(part, consumer)
        self.copies += 1
        self.copied_nbytes += placement.nbytes

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the ring was closed")


def _cut_off(error: BaseException) -> None:
    """Takes the frames off an error and its causes: a kept error keeps its frames, and these keep staging memory and slots."""
    chained: BaseException | None = error
    while chained is not None:
        chained.__traceback__ = None
        chained = chained.__cause__ or chained.__context__
