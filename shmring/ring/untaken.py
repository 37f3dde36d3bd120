"""Deliveries that nobody takes: the book has them pinned, and has no clock.

What nobody has taken for long is dropped, sooner if its sender has gone: who still wants it is asking for it already. An engine
without such deliveries has no timer for this.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shmring.core.compiled import EngineBook
from shmring.core.effects import EngineEffect
from shmring.core.geometry import GENERATION_BITS
from shmring.core.loggers import logger_of
from shmring.ring.life import RingLife

__all__ = ["Untaken"]

logger = logger_of("shmring.ring")

_LOOK_S = 5.0  # between two looks
_UNTAKEN_S = 900.0  # an inference server has failed the request that it belongs to long before
_ALONE_S = 60.0  # since its sender has gone


class Untaken:
    """See above.

    Args:
        life, book: of the engine.
        carry_out: carries effects of the book out.
    """

    def __init__(self, life: RingLife, book: EngineBook, carry_out: Callable[[list[EngineEffect]], None]) -> None:
        self._life = life
        self._book = book
        self._carry_out = carry_out
        self._since_s: dict[tuple[int, bool], float] = {}  # when each was seen so first: generation, and if its sender has gone
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Something was delivered."""
        if self._timer is None:
            self._timer = self._life.loop.call_later(_LOOK_S, self._look)

    def close(self) -> None:
        """The engine's life ends."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer = None
        if not (self._life.home.is_closed or self._life.home.forked):
            try:
                self.drop_old(self._life.loop.time())
            finally:
                if self._since_s:
                    self.begin()

    def drop_old(self, now_s: float) -> None:
        """Drops what nobody has taken for long.

        Args:
            now_s: the time of the loop.
        """
        book = self._book
        before_s, self._since_s = self._since_s, {}
        old = set()
        for kept in book.untaken():
            sender = book.clients.get(kept.generation >> GENERATION_BITS)
            seen = kept.generation, sender is None or not sender.connected
            since_s = self._since_s[seen] = before_s.get(seen, now_s)
            if now_s - since_s >= (_ALONE_S if seen[1] else _UNTAKEN_S):
                old.add(kept.generation)
        if old:
            self._carry_out(book.drop_untaken(old))
            logger.warning("deliveries that nobody has taken in time were dropped: %d", len(old))
