"""Busy polling: for a moment after a message, the loop asks for the next one instead of sleeping until it comes.

Being woken costs a sleeper tens of microseconds: the kernel's scheduler, and the core's own sleep. Whoever expects an answer
within that time can spend it looking. A callback that arms itself again for the next iteration keeps the loop from
sleeping; everything else that the loop does goes on between two looks. It ends a set time after the last message, so an
idle process sleeps as it does without.

Source: the idea is the kernel's (``net.core.busy_poll``), and of vLLM's ``shm_broadcast``, whose readers spin for a second.
"""

from __future__ import annotations

import asyncio
import time

__all__ = ["BusyPolling"]


class BusyPolling:
    """Keeps one loop awake.

    Args:
        loop: which one.
        duration_s: for how long after the last message.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, duration_s: float) -> None:
        self._loop = loop
        self._duration_s = duration_s
        self._until = 0.0
        self._armed = False

    def extend(self) -> None:
        """A message came, or was sent."""
        self._until = time.perf_counter() + self._duration_s  # the loop's own clock may be a cached one
        if not self._armed:
            self._armed = True
            self._loop.call_soon(self._look_again)

    def _look_again(self) -> None:
        if time.perf_counter() < self._until:
            self._loop.call_soon(self._look_again)
        else:
            self._armed = False
