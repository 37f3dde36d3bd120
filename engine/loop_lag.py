"""How late an event loop is: whatever computes in it, or holds the interpreter's lock for long, makes all others wait."""

from __future__ import annotations

import asyncio
import time
from typing import NoReturn

__all__ = ["LoopLag"]

_LOOK_S = 0.05  # a delay is measured short by this much at most; a look takes some 20 us
_WINDOW_S = 15.0  # as long as it is between two scrapes, usually


class LoopLag:
    """Measures how much later a loop wakes up than it was told to."""

    def __init__(self) -> None:
        self._longest_s = self._longest_before_s = 0.0
        self._window_until_s = 0.0

    @property
    def seconds(self) -> float:
        """The longest delay of the last 15 to 30 s."""
        self.note(0.0, time.monotonic())  # a loop that nobody watches any more has none
        return max(self._longest_s, self._longest_before_s)

    async def watch(self) -> NoReturn:
        """Measures the running loop until it is cancelled."""
        while True:
            due_s = time.monotonic() + _LOOK_S
            await asyncio.sleep(_LOOK_S)
            now_s = time.monotonic()
            self.note(now_s - due_s, now_s)

    def note(self, lag_s: float, now_s: float) -> None:
        """Notes one delay."""
        if now_s >= self._window_until_s:
            is_old = now_s >= self._window_until_s + _WINDOW_S
            self._longest_before_s, self._longest_s = 0.0 if is_old else self._longest_s, 0.0
            self._window_until_s = now_s + _WINDOW_S
        self._longest_s = max(self._longest_s, lag_s)
