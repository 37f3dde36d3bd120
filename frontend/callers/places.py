"""Places that callers share: of requests in flight, of large media that are decoded.

Whoever has fewest places is next; of equals, whose last place was given longest ago. The requests of one caller go in order of
arrival. If too many wait, whoever has most requests in line loses the last of them to a caller who has fewer: a caller who
fills the line keeps nobody else out.

Invariants: taken and free places are all places; a waiter that is cancelled, or whose time is over, takes none.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter

from shmring.frontend.errors import ErrorCode, unavailable

__all__ = ["Places"]


class Places:
    """Places, and the line of those who wait for one.

    Args:
        count: of places.
        max_waiting: requests in line.
        timeout_s: for which they wait; None: for ever, because whoever takes a place has a limit of its own.
        most: that one caller may have at a time, so that the others need not wait for it; None: all.
    """

    def __init__(self, count: int, max_waiting: int, timeout_s: float | None, most: int | None = None) -> None:
        self._free = count
        self._most_of_one = count if most is None else most
        self._max_waiting = max_waiting
        self._timeout_s = timeout_s
        self._taken = Counter[str]()  # by caller
        self._waiting: dict[str, dict[asyncio.Future[None], None]] = {}  # by caller, in order of arrival
        self._count = 0  # of those that wait
        self._turns = itertools.count(1)
        self._last_turn: dict[str, int] = {}  # of callers that wait or have places

    def check(self, who: str) -> None:
        """Refuses a request that would have to wait where too many wait, and whose caller has most of them.

        Raises:
            ApiError: 503.
        """
        if not self._free and self._count >= self._max_waiting and len(self._waiting.get(who, ())) + 1 >= self._most()[1]:
            raise unavailable("too many requests are waiting", ErrorCode.OVERLOADED)

    async def take(self, who: str) -> None:
        """Waits for a place, which must be given back.

        Args:
            who: the caller.

        Raises:
            ApiError: 503, too many wait already, or it did not come in time.
        """
        if self._free and self._may_have_more(who) and self._next() is None:
            self._give(who)
            return
        self.check(who)
        if self._count >= self._max_waiting:
            self._refuse_last(self._most()[0])
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(who, {})[granted] = None
        self._count += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                await granted
        except BaseException as error:
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                self.give_back(who)
            else:
                self._leave(who, granted)
            if isinstance(error, TimeoutError):
                text = f"the request's turn did not come within {self._timeout_s:g} s"
                raise unavailable(text, ErrorCode.OVERLOADED) from None
            raise
        finally:
            del granted

    def give_back(self, who: str) -> None:
        """Passes a place on."""
        self._free += 1
        self._taken[who] -= 1
        self._forget(who)
        while self._free and (following := self._next()) is not None:
            granted = next(iter(self._waiting[following]))
            self._leave(following, granted)
            if not granted.done():
                self._give(following)
                granted.set_result(None)

    def _next(self) -> str | None:
        """Returns whose turn it is of those that wait; None: nobody's."""
        callers = filter(self._may_have_more, self._waiting)
        return min(callers, key=lambda caller: (self._taken[caller], self._last_turn.get(caller, 0)), default=None)

    def _may_have_more(self, who: str) -> bool:
        return self._taken[who] < self._most_of_one

    def _give(self, who: str) -> None:
        self._free -= 1
        self._taken[who] += 1
        self._last_turn[who] = next(self._turns)

    def _most(self) -> tuple[str, int]:
        """Returns who has most requests in line, and how many."""
        return max(((who, len(waiting)) for who, waiting in self._waiting.items()), key=lambda each: each[1], default=("", 0))

    def _refuse_last(self, who: str) -> None:
        granted = next(reversed(self._waiting[who]))
        self._leave(who, granted)
        if not granted.done():
            granted.set_exception(unavailable("too many requests are waiting, most of them yours", ErrorCode.OVERLOADED))

    def _leave(self, who: str, granted: asyncio.Future[None]) -> None:
        waiting = self._waiting.get(who, {})
        if granted in waiting:
            del waiting[granted]
            self._count -= 1
            if not waiting:
                del self._waiting[who]
            self._forget(who)

    def _forget(self, who: str) -> None:
        if not self._taken[who]:
            del self._taken[who]
            if who not in self._waiting:
                self._last_turn.pop(who, None)
