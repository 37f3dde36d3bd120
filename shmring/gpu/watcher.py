"""A thread that waits for events of CUDA, and lets go of what each of them guards when it has come.

Why a thread, and no polling from the loop: both event loops count in milliseconds (asyncio rounds a timer up to the next one,
uvloop takes half of one for none at all and spins), while a thread that sleeps in ``cudaEventSynchronize`` is back some ten
microseconds after the event, and costs nothing meanwhile. What it lets go of dies there, and from there on it is the death of
a view like any other (``views.py``).

The thread is woken when the loop's turn is over: in the midst of it the two take the interpreter's lock from each other, which
made a copy to a GPU take a quarter longer.

Invariant: what is guarded is let go of only when CUDA has said that its event has come; where CUDA can't say so any more, it is
kept until the process ends: memory that is never used again harms nobody.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from typing import Any

from shmring.gpu.cuda import Cuda, CudaError, Event

__all__ = ["Watcher"]

logger = logging.getLogger("shmring.ring")


class Watcher:
    """Waits for events in the order in which it was given them, and empties the list that each guards. Lives in a loop.

    Args:
        cuda: how to call CUDA.
        name: of the thread.
    """

    def __init__(self, cuda: Cuda, name: str) -> None:
        self._cuda = cuda
        self._loop = asyncio.get_running_loop()
        self._coming: list[tuple[Event, list[Any]]] = []  # what came in the loop's turn
        self._lock = threading.Lock()  # of that list: who closes does it on another thread
        self._queue: queue.SimpleQueue[list[tuple[Event, list[Any]]] | None] = queue.SimpleQueue()
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
        with self._lock:
            self._coming.append((event, guarded))
            is_first = len(self._coming) == 1
        if is_first:
            self._loop.call_soon(self._hand_in)

    def keep(self, guarded: list[Any]) -> None:
        """Keeps what a list holds for good."""
        self._kept.append(list(guarded))

    def close(self, timeout_s: float) -> bool:
        """Waits until all that was guarded is let go; returns whether that came to be. Twice is once. Blocks."""
        self._hand_in()
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and not self._kept

    def _hand_in(self) -> None:
        with self._lock:
            coming, self._coming = self._coming, []
        if coming:
            self._queue.put(coming)

    def _run(self) -> None:
        while self._see_out(self._queue.get()):  # nothing of an item may stay in this frame while the next is awaited
            pass

    def _see_out(self, items: list[tuple[Event, list[Any]]] | None) -> bool:
        if items is None:
            return False
        items.reverse()
        while items:
            event, guarded = items.pop()
            try:
                self._cuda.synchronize(event)
            except CudaError as error:
                logger.error("slots that a GPU may still be using are kept until this process ends: %s", error)
                self.keep(guarded)
            guarded.clear()
        return True
