"""What a client on another node may have in flight: requests, and bytes of their tensors.

Ray's object store does not refuse what does not fit: it writes other objects to disk, and everything becomes ten times slower.
So each client keeps below a bound of its own, and further requests wait here, in order. A request that is larger than the bound
goes alone.

Invariants: what is counted is what has begun and not ended; a cancelled waiter counts nothing and delays nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

__all__ = ["Flight"]


class Flight:
    """See above. Lives in a loop.

    Args:
        max_requests: at a time.
        max_nbytes: of their tensors.

    Attributes:
        requests, nbytes: in flight now.
        waiting: how many wait.
    """

    def __init__(self, max_requests: int, max_nbytes: int) -> None:
        self._max_requests = max_requests
        self._max_nbytes = max_nbytes
        self.requests = 0
        self.nbytes = 0
        self._line: deque[tuple[asyncio.Future[None], int]] = deque()

    @property
    def waiting(self) -> int:
        return sum(not place.done() for place, _ in self._line)

    def _fits(self, nbytes: int) -> bool:
        return self.requests < self._max_requests and (not self.nbytes or self.nbytes + nbytes <= self._max_nbytes)

    async def begin(self, nbytes: int) -> None:
        """Waits for the turn of a request of so many bytes, which is in flight from then on."""
        if not self._line and self._fits(nbytes):
            self._count(nbytes)
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append((place, nbytes))
        try:
            await place
        except BaseException:
            if place.done() and not place.cancelled():  # its turn came just then
                self.end(nbytes)
            else:
                with contextlib.suppress(ValueError):  # whoever served the line has seen it leave
                    self._line.remove((place, nbytes))
                self._serve()
            raise

    def end(self, nbytes: int) -> None:
        """A request of so many bytes is over."""
        self.requests -= 1
        self.nbytes -= nbytes
        self._serve()

    def _count(self, nbytes: int) -> None:
        self.requests += 1
        self.nbytes += nbytes

    def _serve(self) -> None:
        while self._line and self._fits(self._line[0][1]):
            place, nbytes = self._line.popleft()
            if not place.done():
                self._count(nbytes)
                place.set_result(None)
