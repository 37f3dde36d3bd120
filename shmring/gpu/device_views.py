"""When a slot in device memory may be used again: its last view has died, and the GPU has finished the work that was queued on
it.

Theory of operation: after the death of the last view, no more work is queued on a slot in this process, but the GPU may still
be busy with earlier work. So when a slot was left and its last view has died, each stream that it was used on is asked whether
it is idle. Where one is not, a point behind its work is looked at in the loop's next turn, or else waited for by a thread
(``watcher.py``), and when it has come, this is reported like the death of a view (``core/views.pyx``). Both sides do the same:
the engine with slots that were handed to it, a frontend with slots that it leaves.

A view may die anywhere, and CUDA is not called there, but only in the loop, when the death is reported.

Invariants:

- a slot is reported once, and only after the work on all of its streams, or never: where CUDA fails to say when that is over,
  the slot is kept for good, and counted;
- the current stream of the loop's thread is always among them: a user of another stream lets the current one wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shmring.core.compiled import GpuMemory, Region, Regions
from shmring.core.loggers import logger_of
from shmring.gpu.cuda import Cuda, CudaError
from shmring.gpu.watcher import Watcher

__all__ = ["DeviceViews", "Key"]

logger = logger_of("shmring.ring")

#: Two numbers from 0 to 2**64 - 1.
Key = tuple[int, int]


class DeviceViews:
    """The slots in device memory that this process uses, by key. Lives in a loop.

    Args:
        cuda: how to call CUDA.
        device_index: where the memory is.
        loop: theirs.
        report: called in the loop when :meth:`collect` has something to return; until :meth:`end`.
    """

    def __init__(self, cuda: Cuda, device_index: int, loop: asyncio.AbstractEventLoop, report: Callable[[], object]) -> None:
        self._cuda = cuda
        self._device_index = device_index
        self._report = report
        self._regions = Regions()
        self._loop = loop
        self._lent: dict[Key, Region] = {}
        self._streams: dict[Key, set[int]] = {}
        self._watcher = Watcher(cuda.gpu(device_index), f"shmring-slots-{device_index}")
        self._loop.add_reader(self._regions.bell, report)

    def __contains__(self, key: Key) -> bool:
        return key in self._streams

    @property
    def lost(self) -> int:
        """Slots that are kept for good, because CUDA failed to say when they are free."""
        return self._watcher.watch.kept

    def use(self, key: Key, stream: int) -> None:
        """A slot is used on a stream from now on; the first use opens it."""
        streams = self._streams.get(key)
        if streams is None:
            self._streams[key] = {stream}
        else:
            streams.add(stream)

    def region(self, key: Key, memory: GpuMemory, offset: int, nbytes: int) -> Region:
        """Returns the bytes of an open slot, to be viewed until it is left; they are lent once."""
        region = self._lent.get(key)
        if region is None:
            region = self._lent[key] = memory.lend(self._regions, offset, nbytes, key)
        return region

    def is_viewed(self, key: Key) -> bool:
        """Whether a view of an open slot is alive."""
        region = self._lent.get(key)
        return region is not None and region.is_viewed

    def leave(self, key: Key, *, drain: bool = True) -> bool:
        """No further views of an open slot are made.

        Args:
            drain: whether the views that live are waited for.

        Returns:
            Whether it is no longer used. Otherwise :meth:`collect` will report it.
        """
        region = self._lent.pop(key, None)
        if region is not None:
            if drain and region.leave():
                return False
            region.abandon()
        return self._is_over(key)

    def collect(self) -> list[Key]:
        """Returns the slots that are no longer used, since the last call."""
        return [key for key in self._regions.collect() if key not in self._streams or self._is_over(key)]

    def abandon(self) -> None:
        """Nothing will be reported any more; but each death of a view that is alive now still rings the bell."""
        for region in self._lent.values():
            region.leave()
        self._lent.clear()

    def close(self, timeout_s: float) -> bool:
        """Waits until the GPU is done with all slots that were left; returns whether it is. Blocks: call it on a thread."""
        return self._watcher.close(timeout_s)

    def end(self) -> None:
        """The owner no longer collects."""
        self._loop.remove_reader(self._regions.bell)
        self._regions.close()

    def _is_over(self, key: Key) -> bool:
        """The last view of a slot has died; returns whether the GPU is done with it, too."""
        streams = self._streams.pop(key)
        try:
            streams.add(self._cuda.current_stream(self._device_index))
        except CudaError as error:
            self._watcher.watch.keep_for_good()
            return self._lose(error)
        try:
            is_over = self._watcher.watch.follow(self._regions, key, streams)
        except CudaError as error:
            self._look_soon()  # it may have followed some of them
            return self._lose(error)
        if not is_over:
            self._look_soon()
        return is_over

    def _look_soon(self) -> None:
        if not self._loop.is_closed():  # otherwise closing these waits for the GPU
            self._watcher.look_soon(self._loop, self._report)

    @staticmethod
    def _lose(error: CudaError) -> bool:
        logger.error("a slot in device memory is kept until this process ends: %s", str(error))
        return False
