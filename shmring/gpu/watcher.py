"""A thread that waits for events of CUDA, and lets go of what each of them guards when it has come.

Why a thread, and no polling from the loop: both event loops count in milliseconds (asyncio rounds a timer up to the next one,
uvloop takes half of one for none at all and spins), while a thread that sleeps in ``cudaEventSynchronize`` is back some ten
microseconds after the event, and costs nothing meanwhile. What it lets go of dies there, and from there on it is the death of
a view like any other (``views.py``).

Invariant: what is guarded is let go of only when CUDA has said that its event has come; where CUDA can't say so any more, it is
kept until the process ends: memory that is never used again harms nobody.
"""

from __future__ import annotations

import logging
import queue
import threading
from typing import Any

from shmring.gpu.cuda import Cuda, CudaError, Event

__all__ = ["Watcher"]

logger = logging.getLogger("shmring.ring")


class Watcher:
    """Waits for events in the order in which it was given them, and empties the list that each guards.

    Args:
        cuda: how to call CUDA.
        name: of the thread.
    """

    def __init__(self, cuda: Cuda, name: str) -> None:
        self._cuda = cuda
        self._queue: queue.SimpleQueue[tuple[Event, list[Any]] | None] = queue.SimpleQueue()
        self._kept: list[list[Any]] = []  # what nobody can say of whether it is in use
        # A daemon: where the GPU never answers, the process must still be able to end.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def kept(self) -> int:
        """How many lists are kept for good."""
        return len(self._kept)

    def guard(self, event: Event, guarded: list[Any]) -> None:
        """Keeps what a list holds until an event has come, then empties the list."""
        self._queue.put((event, guarded))

    def keep(self, guarded: list[Any]) -> None:
        """Keeps what a list holds for good."""
        self._kept.append(list(guarded))

    def close(self, timeout_s: float) -> bool:
        """Waits until all that was guarded is let go; returns whether that came to be. Twice is once."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and not self._kept

    def _run(self) -> None:
        while self._see_out(self._queue.get()):  # nothing of an item may stay in this frame while the next is awaited
            pass

    def _see_out(self, item: tuple[Event, list[Any]] | None) -> bool:
        if item is None:
            return False
        event, guarded = item
        try:
            self._cuda.synchronize(event)
        except CudaError as error:
            logger.error("slots that a GPU may still be using are kept until this process ends: %s", error)
            self.keep(guarded)
        guarded.clear()
        return True
