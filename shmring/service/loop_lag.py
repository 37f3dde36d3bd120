"""How late an event loop is: whatever computes in it, or holds the interpreter's lock for long, makes all others wait."""

from __future__ import annotations

import asyncio
import math
import time
from typing import NoReturn

__all__ = ["LoopLag"]

_LOOK_S = 0.05  # a delay is measured short by this much at most; a look takes some 20 us
_MISSED_S = 0.1  # from which a delay may be one of the whole process
_WINDOW_S = 15.0  # as long as it is between two scrapes, usually


class LoopLag:
    """Measures how much later a loop wakes up than it was told to, and how much of that the whole process did not run."""

    def __init__(self) -> None:
        self._longest = self._longest_before = (0.0, 0.0)  # seconds, and when it was over
        self._window_until_s = 0.0
        # Of the look that is due: when, and how much of a processor the process had used when that was last looked at.
        self._due_s, self._used_s = math.inf, 0.0
        self._missed_s = 0.0

    @property
    def seconds(self) -> float:
        """The longest delay of the last 15 to 30 s."""
        return self.longest()[0]

    def longest(self) -> tuple[float, float]:
        """Returns the longest delay of the last 15 to 30 s, and how many seconds ago it was over."""
        now_s = time.monotonic()
        self.note(0.0, now_s)  # a loop that nobody watches any more has none
        seconds, at_s = max(self._longest, self._longest_before)
        return seconds, now_s - at_s

    def missed_s(self, now_s: float) -> float:
        """Returns for how many seconds so far the process did not get to run, though its loop was due: it was stopped, or the
        processors were busy with others."""
        if now_s - self._due_s >= _MISSED_S:
            used_s = time.process_time()
            self._missed_s += max(0.0, now_s - self._due_s - (used_s - self._used_s))
            self._due_s, self._used_s = now_s, used_s
        return self._missed_s

    async def watch(self) -> NoReturn:
        """Measures the running loop until it is cancelled."""
        try:
            while True:
                self._used_s = time.process_time()
                self._due_s = due_s = time.monotonic() + _LOOK_S
                await asyncio.sleep(_LOOK_S)
                now_s = time.monotonic()
                self.missed_s(now_s)
                self.note(now_s - due_s, now_s)
        finally:
            self._due_s = math.inf

    def note(self, lag_s: float, now_s: float) -> None:
        """Notes one delay."""
        if now_s >= self._window_until_s:
            is_old = now_s >= self._window_until_s + _WINDOW_S
            self._longest_before, self._longest = (0.0, now_s) if is_old else self._longest, (0.0, now_s)
            self._window_until_s = now_s + _WINDOW_S
        self._longest = max(self._longest, (lag_s, now_s))
