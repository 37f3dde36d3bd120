"""All tensors of a request to a GPU: one copy per slot, on a stream of their own, and nobody waits for it.

Theory of operation: the bytes that a request's tensors cover in each slot are copied as they lie, in as few copies as
their gaps allow, into a part of the device's staging memory; the tensors are then views of that part. The consumer's
stream waits for an event behind the copies, so whatever it is given next may use the tensors at once.

Until that event has come, the slots must not be reused. A view in our hands is what says so, like any other: it is
handed to a thread that waits for the events of one stream, in their order, and lets go of what each of them guards
(``watcher.py``). From
there on it is the death of a view like any other.

Copies from a slab that is not pinned block whoever asks for them until the bytes have been read; those above
``offload_nbytes`` are made on a thread.

Invariants:

- such a view is let go of only when CUDA has said that the copies before its event are over;
- no copy crosses a boundary of :meth:`~shmring.gpu.pinned.PinnedSlab.split`;
- :meth:`Uploads.close` returns when no copy is under way, or says that it can't tell.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shmring.cancellation import retrieve, uninterrupted
from shmring.core.compiled import Content, borrowed
from shmring.core.messages import TensorRef
from shmring.errors import ClosedError, WouldBlock, fresh
from shmring.gpu.cuda import Cuda, CudaError, Event, Stream, cuda_index
from shmring.gpu.layout import NOTHING_GIVEN, Given, Layout
from shmring.gpu.pinned import PinnedSlab
from shmring.gpu.staging import StagingPart, StagingRing
from shmring.gpu.watcher import Watcher
from shmring.memory.copier import Copier
from shmring.memory.slab import Slab
from shmring.memory.views import Place, tensor_view

__all__ = ["BytesOf", "Decode", "Uploads"]

#: How long closing waits for the copies under way: thousands of times what the largest of them takes.
_CLOSE_TIMEOUT_S = 10.0

#: Decodes a payload, its tensors made by a :data:`~shmring.gpu.layout.Place`.
Decode = Callable[[Place], Any]
#: Returns a slot's bytes by region number, 1 being the first slot, as a view, which keeps the slot.
BytesOf = Callable[[int], NDArray[np.uint8]]


@dataclasses.dataclass(slots=True, eq=False)
class _Lane:
    """What copies to one device need."""

    device_index: int
    stream: Stream
    staging: StagingRing
    watcher: Watcher


@dataclasses.dataclass(slots=True, eq=False)
class _Upload:
    """One request on its way. ``sources`` are the regions of ``layout.runs``, emptied when the copies are over."""

    layout: Layout
    sources: list[NDArray[np.uint8]]
    part: StagingPart
    target: torch.Tensor
    payload: Any


#: Makes one ready, in the part of the staging memory that it was given.
_Prepare = Callable[[StagingPart, torch.Tensor], _Upload]


class Uploads:
    """Copies of requests to devices, for one ring. Lives in a loop.

    Args:
        cuda: how to call CUDA.
        slab: where the slots are.
        pinned: what of it is pinned.
        copier: has the threads.
        staging_nbytes: device memory for copies, on each device that is copied to. Allocated at the first copy.
        offload_nbytes: copies from memory that is not pinned are made in the loop up to this size.

    Attributes:
        copies, copied_nbytes: requests copied, and their bytes, gaps included.
    """

    def __init__(
        self, cuda: Cuda, slab: Slab, pinned: PinnedSlab, copier: Copier, *, staging_nbytes: int, offload_nbytes: int
    ) -> None:
        self._cuda = cuda
        self._slab = slab
        self._pinned = pinned
        self._copier = copier
        self._staging_nbytes = staging_nbytes
        self._offload_nbytes = offload_nbytes
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
        content: Content,
        bytes_of: BytesOf,
        decode: Decode,
        device: torch.device | str | int,
        stream: Stream | None,
        check: Callable[[], object],
        given: Given = NOTHING_GIVEN,
    ) -> Any:
        """Copies a content's tensors; returns its payload with them on the device, to be used on ``stream``.

        Args:
            content: as it was checked.
            bytes_of: returns a slot's bytes; those that are read are kept until their copies are over.
            decode: makes the payload.
            device: where to.
            stream: that will use the tensors; ``None``: the current one of this thread on that device.
            check: called when the waiting is over; raises if the slots are no more the caller's.
            given: tensors that are there already; where all are, nothing is copied, and nothing awaited.

        Raises:
            ValueError: ``device`` is no CUDA device.
            CapacityError: the tensors can never fit the staging memory.
            CudaError: CUDA is not there, or failed.
            ClosedError: the ring was closed.
        """
        layout = Layout(content, given.regions)
        if given.regions and not layout.nbytes:
            return decode(self._placing(layout, content, bytes_of, given, given.nowhere()))
        lane = await self._lane(cuda_index(self._cuda, device))
        consumer = self._cuda.current_stream(lane.device_index) if stream is None else stream
        prepare = functools.partial(self._prepare, layout, content, bytes_of, decode, given)
        try:
            return await self._upload(lane, consumer, layout, prepare, check)
        except BaseException as error:
            _cut_off(error)
            raise

    async def _upload(
        self, lane: _Lane, consumer: Stream, layout: Layout, prepare: _Prepare, check: Callable[[], object]
    ) -> Any:
        part, target = await lane.staging.acquire(max(1, layout.nbytes))
        check()
        upload = prepare(part, target)
        try:
            if self._must_offload(layout):
                await self._on_thread(functools.partial(self._queue_copies, lane, upload))
            else:
                self._queue_copies(lane, upload)
        finally:
            event = self._guard(lane, upload)  # also of what was cut off: some of it may be under way
        return self._hand_over(lane, upload, event, consumer)

    def upload_nowait(
        self,
        content: Content,
        bytes_of: BytesOf,
        decode: Decode,
        device: torch.device | str | int,
        stream: Stream | None,
        given: Given = NOTHING_GIVEN,
    ) -> Any:
        """The same if nothing has to be waited for.

        Raises:
            WouldBlock: the device's staging memory is full, or was never used; or the slab is not pinned, and the copy large.
        """
        self._check_open()
        layout = Layout(content, given.regions)
        if given.regions and not layout.nbytes:
            return decode(self._placing(layout, content, bytes_of, given, given.nowhere()))
        lane = self._lanes.get(cuda_index(self._cuda, device))
        if lane is None:
            raise WouldBlock(
                f"nothing was copied to {device} yet, its staging memory has to be made; claim.to() waits for that"
            )
        if self._must_offload(layout):
            raise WouldBlock(f"the slab is not pinned, and copying {layout.nbytes} bytes from it would hold the loop up")
        consumer = self._cuda.current_stream(lane.device_index) if stream is None else stream
        prepare = functools.partial(self._prepare, layout, content, bytes_of, decode, given)
        try:
            return self._upload_nowait(lane, consumer, layout, prepare)
        except BaseException as error:
            _cut_off(error)
            raise

    def _upload_nowait(self, lane: _Lane, consumer: Stream, layout: Layout, prepare: _Prepare) -> Any:
        part, target = lane.staging.acquire_nowait(max(1, layout.nbytes))
        upload = prepare(part, target)
        try:
            self._queue_copies(lane, upload)
        finally:
            event = self._guard(lane, upload)
        return self._hand_over(lane, upload, event, consumer)

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
            lane.staging.close()
        watchers = [lane.watcher for lane in self._lanes.values()]
        self._lanes.clear()  # the memory goes with the last tensor in it
        if not watchers:
            return True
        ended = await uninterrupted(
            asyncio.get_running_loop().run_in_executor(None, lambda: [watcher.close(_CLOSE_TIMEOUT_S) for watcher in watchers])
        )
        return all(ended)

    # -- lanes ---------------------------------------------------------------------------------------------------------

    async def _lane(self, device_index: int) -> _Lane:
        self._check_open()
        if (lane := self._lanes.get(device_index)) is not None:
            return lane
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
            # The allocator hands memory out while its last user is still queued on this thread's stream.
            self._cuda.wait_event(stream, self._cuda.record(self._cuda.current_stream(device_index)))
            self._cuda.used_on(memory, stream)
            return memory, stream

        memory, stream = await self._copier.run(allocate)
        lane = _Lane(
            device_index,
            stream,
            StagingRing(self._cuda, device_index, memory, stream),
            Watcher(self._cuda, f"shmring-gpu-{device_index}"),
        )
        self._lanes[device_index] = lane
        return lane

    # -- one upload ----------------------------------------------------------------------------------------------------

    def _must_offload(self, layout: Layout) -> bool:
        return not self._pinned.nbytes and layout.nbytes > self._offload_nbytes

    def _prepare(
        self,
        layout: Layout,
        content: Content,
        bytes_of: BytesOf,
        decode: Decode,
        given: Given,
        part: StagingPart,
        target: torch.Tensor,
    ) -> _Upload:
        self._check_open()
        sources = [_bytes_of(content, bytes_of, run.region) for run in layout.runs]
        return _Upload(layout, sources, part, target, decode(self._placing(layout, content, bytes_of, given, target)))

    @staticmethod
    def _placing(layout: Layout, content: Content, bytes_of: BytesOf, given: Given, target: torch.Tensor) -> Place:
        """Returns what makes each tensor: as it is there, as it is copied to ``target``, or, unknown to torch, on the host."""

        def place(ref: TensorRef) -> torch.Tensor | NDArray[Any]:
            placed = given.place(ref)
            if placed is None:
                placed = layout.place(ref, target)
            if placed is not None:
                return placed
            source = _bytes_of(content, bytes_of, ref.region) if ref.nbytes else _NOTHING
            on_host = tensor_view(ref, borrowed(source.ctypes.data, source.nbytes), writable=False)
            assert isinstance(on_host, np.ndarray)
            return on_host.copy()

        return place

    async def _on_thread(self, work: Callable[[], None]) -> None:
        self._on_threads += 1
        self._idle.clear()
        try:
            await self._copier.run(work)
        finally:
            self._on_threads -= 1
            if not self._on_threads:
                self._idle.set()

    def _queue_copies(self, lane: _Lane, upload: _Upload) -> None:
        for run, source in zip(upload.layout.runs, upload.sources, strict=True):
            start = self._slab.find(int(source.ctypes.data)) if run.region else None
            if start is None:
                parts = [(run.start, run.end - run.start)]
            else:
                parts = [
                    (offset - start, nbytes) for offset, nbytes in self._pinned.split(start + run.start, run.end - run.start)
                ]
            for offset, nbytes in parts:
                at = run.target + offset - run.start
                self._cuda.copy_to_device(upload.target[at : at + nbytes], source[offset : offset + nbytes], lane.stream)

    def _guard(self, lane: _Lane, upload: _Upload) -> Event:
        try:
            event = self._cuda.record(lane.stream)
        except CudaError:
            lane.watcher.keep(upload.sources)
            raise
        lane.watcher.guard(event, upload.sources)
        return event

    def _hand_over(self, lane: _Lane, upload: _Upload, event: Event, consumer: Stream) -> Any:
        self._cuda.wait_event(consumer, event)
        lane.staging.hand_over(upload.part, consumer)
        self.copies += 1
        self.copied_nbytes += upload.layout.nbytes
        return upload.payload

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the ring was closed")


def _cut_off(error: BaseException) -> None:
    """Takes the frames off an error and its causes: a kept error keeps its frames, and these keep staging memory and slots."""
    chained: BaseException | None = error
    while chained is not None:
        chained.__traceback__ = None
        chained = chained.__cause__ or chained.__context__


_NOTHING = np.empty(0, np.uint8)


def _bytes_of(content: Content, bytes_of: BytesOf, number: int) -> NDArray[np.uint8]:
    # What is inline as a bytearray, since torch warns of arrays that it must not write to.
    return bytes_of(number) if number else np.frombuffer(bytearray(content.inline), np.uint8)
