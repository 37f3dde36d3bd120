"""What happens in an event loop behind work that is queued on a GPU, without waiting for it there.

A number is reported when a GPU has done what was queued on a stream: as the death of a view is, by the regions of a session. A
thread waits for that (``watcher.py``); it begins with the first use. Nothing here calls CUDA before that.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from shmring.core.compiled import Regions
from shmring.gpu.cuda import Cuda, Stream, stream_number
from shmring.gpu.watcher import Watcher

__all__ = ["Behind"]

_CLOSE_TIMEOUT_S = 10.0  # for the GPU to come to what this process has queued: far beyond anything that is


class Behind:
    """See the head of this file. Lives in a loop.

    Args:
        cuda: how to call CUDA.
        regions: they report numbers.
        key: the first number of their keys.
        loop: of the session.
    """

    def __init__(self, cuda: Cuda, regions: Regions, key: int, loop: asyncio.AbstractEventLoop) -> None:
        self._cuda = cuda
        self._regions = regions
        self._key = key
        self._loop = loop
        self._watchers: dict[int, Watcher] = {}  # by device

    def follow(self, stream: Stream, number: int) -> bool:
        """Has a number reported when a GPU has done what is queued on a stream now.

        Args:
            stream: torch's, or the number of one of this thread's device.
            number: which.

        Returns:
            Whether it has done so already; then nothing will be reported.

        Raises:
            CudaError: CUDA can't say when that is.
        """
        device = self._cuda.current_device() if isinstance(stream, int) else stream.device_index
        watcher = self._watchers.get(device)
        if watcher is None:
            watcher = self._watchers[device] = Watcher(self._cuda.gpu(device), "shmring publishing")
        if watcher.watch.follow(self._regions, (self._key, number), (stream_number(stream),)):
            return True
        watcher.look_soon(self._loop)
        return False

    def close(self, held: list[Any]) -> None:
        """Reports nothing more. What is held goes, on a thread, when the GPU has done all that it was given; or never."""
        watchers, self._watchers = self._watchers, {}
        if watchers:
            with contextlib.suppress(RuntimeError):  # the loop is closing: it goes with the process
                self._loop.run_in_executor(None, _see_out, list(watchers.values()), held)


def _see_out(watchers: list[Watcher], held: list[Any]) -> None:
    if sum(not watcher.close(_CLOSE_TIMEOUT_S) for watcher in watchers):
        _NEVER_RELEASED.append(held)


_NEVER_RELEASED: list[Any] = []
