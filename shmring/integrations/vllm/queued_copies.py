"""Copies to a GPU read the slab after the call that starts them: what they read is held until they are over.

vLLM copies with ``non_blocking=True`` where memory is pinned, which a slab is that was registered with CUDA. An aborted
request may drop its tensors while such a copy is queued, and their slot must not be written to by then. So the sources of
each copy are referred to from here until an event has come to pass that was recorded behind the copy. Views keep slots, so
nothing else has to know.

Tested with events that are made up. Not run on a GPU yet.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch

from shmring.core.loggers import logger_of

__all__ = ["QueuedCopies"]

logger = logger_of("vllm.shmring")


class Event(Protocol):
    """What is used of ``torch.cuda.Event``."""

    def synchronize(self) -> None:
        """Waits until everything has happened that was queued before it was recorded."""


class QueuedCopies:
    """Sources of copies that are not over; a thread waits for them in the order in which they were queued.

    Args:
        record: records an event on the current stream, and returns it.
    """

    def __init__(self, record: Callable[[], Event]) -> None:
        self._record = record
        self._held: queue.SimpleQueue[tuple[Event, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._wait, name="shmring copies", daemon=True).start()

    def started(self, sources: Any) -> None:
        """Copies of these were queued on the current stream just now."""
        self._held.put((self._record(), sources))

    def around(self, copy: Callable[..., Any], least_nbytes: int) -> Callable[..., Any]:
        """Returns a function that copies its first argument, whose large tensors are held."""

        @functools.wraps(copy)
        def held(data: Any, *arguments: Any, **named: Any) -> Any:
            copied = copy(data, *arguments, **named)
            if isinstance(data, torch.Tensor) and data.nbytes >= least_nbytes:
                self.started(data)
            return copied

        return held

    def close(self) -> None:
        """Ends the thread when all copies are over. vLLM's processes never do: it goes on for as long as they live."""
        self._held.put(None)

    def _wait(self) -> None:
        while (held := self._held.get()) is not None:
            event, sources = held
            del held
            try:
                event.synchronize()
            except RuntimeError as error:  # CUDA has failed, and with it vLLM: what the GPU reads may be read for ever
                _NEVER_RELEASED.append(sources)
                logger.error("shmring: tensors stay in the slab, since CUDA failed: %s", error)
            del event, sources  # or this frame would keep them until the next copy


_NEVER_RELEASED: list[Any] = []
