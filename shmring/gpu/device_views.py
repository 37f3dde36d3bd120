"""When a slot in device memory may be used again: its last view has died, and the GPU is done with what was queued on it.

Theory of operation: the death of a view says that nobody in this process will queue anything on it any more; the GPU may still
be at what was queued before. So when the last view of a slot has died, an event is recorded on each stream that it was used
on, and a :class:`Hold` is put where the views were: a thread keeps it until the events have come (``watcher.py``). Its death is
the slot's last, and is noticed like that of a view (``obituaries.py``). Both ends do the same: the engine with slots that it
was handed, a frontend with slots that it gives up.

Nothing of CUDA is called where a view dies, which is anywhere: only in the loop, when it hears of it.

Invariants:

- a slot is reported once, and only after the events on all of its streams, or never: where CUDA fails to record or to wait,
  nobody can say when the slot is free, so it is kept for good, and counted;
- the loop thread's stream of the moment is always among them: whoever used another one has the current one wait for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from shmring.gpu.cuda import Cuda, CudaError, DeviceBytes, Stream
from shmring.gpu.obituaries import Obituaries
from shmring.gpu.watcher import Watcher

__all__ = ["DeviceViews", "Hold"]

logger = logging.getLogger("shmring.ring")

_Key = TypeVar("_Key", bound=Hashable)


class Hold:
    """Stands for work that a GPU may still be at; its death says that it is over."""

    __slots__ = ("__weakref__",)


class DeviceViews(Generic[_Key]):
    """The slots in device memory that this process uses, by key. Lives in a loop.

    Args:
        cuda: how to call CUDA.
        device_index: where the memory is.
        wake: called on any thread; must only wake the loop, which calls :meth:`collect`.
    """

    def __init__(self, cuda: Cuda, device_index: int, wake: Callable[[], object]) -> None:
        self._cuda = cuda
        self._device_index = device_index
        self._views: Obituaries[_Key, DeviceBytes | Hold] = Obituaries(wake)
        self._streams: dict[_Key, set[Stream]] = {}
        self._watcher = Watcher(cuda, f"shmring-slots-{device_index}")

    def __contains__(self, key: _Key) -> bool:
        return key in self._streams

    @property
    def lost(self) -> int:
        """Slots that are kept for good, because CUDA failed to say when they are free."""
        return self._watcher.kept

    def use(self, key: _Key, stream: Stream) -> None:
        """A slot is used on a stream from now on; the first use opens it."""
        self._streams.setdefault(key, set()).add(stream)

    def watch(self, key: _Key, lent: DeviceBytes) -> None:
        """Watches the bytes of an open slot; one living one at a time."""
        self._views.watch(key, lent)

    def lent(self, key: _Key) -> DeviceBytes | None:
        """Returns the living bytes of an open slot."""
        lent = self._views.watched(key)
        return lent if isinstance(lent, DeviceBytes) else None

    def leave(self, key: _Key, *, drain: bool = True) -> None:
        """Nobody makes further views of an open slot; :meth:`collect` will report it.

        Args:
            drain: whether the views that live are waited for.
        """
        if drain and self._views.watched(key) is not None:
            self._views.expect(key)
        else:
            self._views.forget(key)
            self._hold(key)

    def collect(self) -> list[_Key]:
        """Returns the slots that nobody uses any more, since the last call."""
        over = []
        for key in self._views.collect():
            if key in self._streams:  # the last view; the GPU is next
                self._hold(key)
            else:
                over.append(key)
        return over

    def abandon(self) -> None:
        """Nothing will be reported any more; but each death of a view that is alive now still wakes the loop."""
        for key in self._views.living():
            self._views.expect(key)

    def close(self, timeout_s: float) -> bool:
        """Waits until the GPU is done with all slots that were left; returns whether it is. Blocks: call it on a thread."""
        return self._watcher.close(timeout_s)

    def _hold(self, key: _Key) -> None:
        streams = self._streams.pop(key)
        hold = Hold()
        self._views.watch(key, hold)
        self._views.expect(key)
        try:
            streams.add(self._cuda.current_stream(self._device_index))
            events = [self._cuda.record(stream) for stream in streams]
        except CudaError as error:
            logger.error("a slot in device memory is kept until this process ends: %s", str(error))
            self._watcher.keep([hold])
            return
        for event in events:
            self._watcher.guard(event, [hold])
