"""While clients wait for leases, tells the book when another moment has passed.

The book has no clock. It passes over the leases whose holders are silent: a process that is stopped, or busy with a slot, does
not answer a recall. An engine for whose memory nobody waits has no timer for this.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shmring.core.compiled import EngineBook
from shmring.core.effects import EngineEffect
from shmring.ring.life import RingLife

__all__ = ["Moments"]

_MOMENT_S = 0.025  # of which the book gives two: a frontend answers in a millisecond, and a loop that is late by 50 ms is rare
_PAUSES = 20  # so many times as long as a look at all leases takes, none is made: a twentieth of the loop at most


class Moments:
    """See above.

    Args:
        life, book: of the engine.
        carry_out: carries effects of the book out.
    """

    def __init__(self, life: RingLife, book: EngineBook, carry_out: Callable[[list[EngineEffect]], None]) -> None:
        self._life = life
        self._book = book
        self._carry_out = carry_out
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """A client has asked for a lease, and may wait for it."""
        if self._timer is None and self._book.is_awaited():
            self._timer = self._life.loop.call_later(_MOMENT_S, self._moment_passed)

    def close(self) -> None:
        """The engine's life ends."""
        if self._timer is not None:
            self._timer.cancel()

    def _moment_passed(self) -> None:
        self._timer = None
        if self._life.home.is_closed or self._life.home.forked or not self._book.is_awaited():
            return
        loop = self._life.loop
        began_s = loop.time()
        effects = self._book.moment_passed()
        self._timer = loop.call_later(max(_MOMENT_S, _PAUSES * (loop.time() - began_s)), self._moment_passed)
        self._carry_out(effects)
