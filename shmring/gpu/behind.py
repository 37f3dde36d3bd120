"""What happens in an event loop behind work that is queued on a GPU, without waiting for it there.

A number is reported when a GPU has done what was queued on a stream: as the death of a view is, by the regions of a session. A
thread waits for that (``watcher.py``); it begins with the first use. Nothing here calls CUDA before that.
"""

from __future__ import annotations

import asyncio
from typing import Any

from shmring.core.compiled import Regions
from shmring.gpu.cuda import Cuda
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
        self._has_failed = False

    def follow(self, device: int, stream: int, number: int) -> bool:
        """Has a number reported when a GPU has done what is queued on a stream now.

        Args:
            device, stream: the numbers of a GPU and of a stream there.
            number: which is reported.

        Returns:
            Whether it has done so already; then nothing will be reported.

        Raises:
            CudaError, RuntimeError: CUDA can't say when that is, or no thread can wait for it. What is held at the end is kept
                for good.
        """
        try:
            watcher = self._watchers.get(device)
            if watcher is None:
                watcher = self._watchers[device] = Watcher(self._cuda.gpu(device), "shmring publishing")
            if watcher.watch.follow(self._regions, (self._key, number), (stream,)):
                return True
            watcher.look_soon(self._loop)
        except BaseException:
            self._has_failed = True
            raise
        return False

    def close(self, held: list[Any]) -> None:
        """Reports nothing more. What is held goes, on a thread, when the GPU has done all that it was given; or never."""
        watchers, self._watchers = [*self._watchers.values()], {}
        if watchers or held:
            try:
                self._loop.run_in_executor(None, _see_out, watchers, held, self._has_failed)
            except RuntimeError:  # there is no thread, or the loop is closing
                _NEVER_RELEASED.append(held)


def _see_out(watchers: list[Watcher], held: list[Any], has_failed: bool) -> None:
    if sum(not watcher.close(_CLOSE_TIMEOUT_S) for watcher in watchers) or has_failed:
        _NEVER_RELEASED.append(held)


_NEVER_RELEASED: list[Any] = []
