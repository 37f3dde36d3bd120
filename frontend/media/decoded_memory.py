"""The memory of media that are decoded and not in the slab yet: how much of it all requests of a frontend take together.

A request's media are decoded before it takes a slot, so that a slow clip keeps no memory of the slab from others. Until
they are copied there, they lie in memory files of the frontend. The size of each is known from its header. A request takes
the memory for all its media at once before the first of them is decoded, and gives it back after the last was copied. If it
took a part of it, two requests could hold a half each and wait for each other.

There are two parts with a line each. Three quarters are for large media and for clips, whose decoding may take long. The
rest is for requests that are decoded quickly, so that these never wait for the others. A request that is larger than its part
waits until no other request has memory of the part, and then takes all that it needs. Its media fit the slab; otherwise it was
refused before. So the bound is the limit, or the leasable part of the slab if that is larger, and the quarter for quick
requests.

Invariant: the used memory of a part is the sum of what its requests took and have not given back; a waiter that is cancelled
takes none.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from shmring.frontend.errors import ErrorCode, unavailable
from shmring.line import WaitingLine

__all__ = ["DecodedMemory"]

_QUICK_SHARE = 4  # one part in four: with the default, 32 requests of the largest size that counts as quick


class DecodedMemory:
    """The memory for decoded media of all requests.

    Args:
        limit_nbytes: of it.
        timeout_s: how long a request waits for its memory.
    """

    def __init__(self, limit_nbytes: int, timeout_s: float) -> None:
        quick_nbytes = limit_nbytes // _QUICK_SHARE
        self._quick = _Part(quick_nbytes)
        self._slow = _Part(limit_nbytes - quick_nbytes)
        self._timeout_s = timeout_s

    @property
    def nbytes(self) -> int:
        """How many bytes are in use."""
        return self._quick.taken_nbytes + self._slow.taken_nbytes

    @property
    def waiting(self) -> int:
        """Requests that wait for it."""
        return self._quick.waiting + self._slow.waiting

    @contextlib.asynccontextmanager
    async def take(self, nbytes: int, *, is_quick: bool) -> AsyncIterator[None]:
        """Waits for memory in order of arrival, and holds it for as long as the block lasts.

        Args:
            nbytes: of all decoded media of a request.
            is_quick: whether decoding them takes little time.

        Raises:
            ApiError: 503, it did not come free in time.
        """
        part = self._quick if is_quick else self._slow
        try:
            async with asyncio.timeout(self._timeout_s):
                await part.take(nbytes)
        except TimeoutError:
            message = f"no memory for {nbytes} bytes of decoded media came free within {self._timeout_s:g} s"
            raise unavailable(message, ErrorCode.OVERLOADED) from None
        try:
            yield
        finally:
            part.give_back(nbytes)


class _Part:
    """A bounded number of bytes, which are given out in order of arrival."""

    def __init__(self, limit_nbytes: int) -> None:
        self.taken_nbytes = 0
        self._limit_nbytes = limit_nbytes
        self._line: WaitingLine[None] = WaitingLine()

    @property
    def waiting(self) -> int:
        """Requests that wait for room."""
        return sum(1 for _ in self._line.waiting())

    async def take(self, nbytes: int) -> None:
        """Waits until there is room for so many bytes, or until no other request has any."""
        # Those behind one that leaves may fit.
        staying = self._line.stay(self._line.enter(nbytes), lambda _: self.give_back(nbytes), lambda _: self._grant())
        self._grant()
        await staying

    def give_back(self, nbytes: int) -> None:
        """Gives bytes back, and lets waiting requests go on."""
        self.taken_nbytes -= nbytes
        self._grant()

    def _grant(self) -> None:
        for place, nbytes in self._line.waiting():
            if self.taken_nbytes and self.taken_nbytes + nbytes > self._limit_nbytes:
                return
            self.taken_nbytes += nbytes
            place.set_result(None)
