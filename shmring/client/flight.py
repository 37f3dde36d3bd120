"""What may be in flight between hosts: requests, and bytes of their tensors.

Of a far client, of all that a gateway receives, and of what a client has in Ray's object store, which does not refuse what does
not fit: it writes other objects to disk, and everything becomes ten times slower. Further requests wait here, in order. A
request that is larger than the bound goes alone.

Invariants: what is counted is what has begun and not ended; a cancelled waiter counts nothing and delays nobody.
"""

from __future__ import annotations

from shmring.errors import fresh
from shmring.line import WaitingLine, give

__all__ = ["Flight"]


class Flight:
    """See above. Lives in a loop.

    Args:
        max_requests: at a time.
        max_nbytes: of their tensors.

    Attributes:
        requests, nbytes: in flight now.
        why_closed: the error that it was closed with; None: it is open.
    """

    def __init__(self, max_requests: int, max_nbytes: int) -> None:
        self._max_requests = max_requests
        self._max_nbytes = max_nbytes
        self.requests = 0
        self.nbytes = 0
        self._line: WaitingLine[int] = WaitingLine()
        self.why_closed: Exception | None = None

    @property
    def waiting(self) -> int:
        """How many wait."""
        return sum(1 for _ in self._line.waiting())

    def _fits(self, nbytes: int) -> bool:
        return self.requests < self._max_requests and (not self.nbytes or self.nbytes + nbytes <= self._max_nbytes)

    async def begin(self, nbytes: int) -> None:
        """Waits for the turn of a request of so many bytes, which is in flight from then on.

        Raises:
            Exception: that this was closed with.
        """
        self.check_open()
        if not self._line.is_waited_in and self._fits(nbytes):
            self._count(nbytes)
        else:
            await self._line.stay(self._line.enter(nbytes), self.end, lambda _: self._serve())

    def end(self, nbytes: int) -> None:
        """A request of so many bytes is over."""
        self.requests -= 1
        self.nbytes -= nbytes
        self._serve()

    def check_open(self) -> None:
        """Raises the error that this was closed with, if it was."""
        if self.why_closed is not None:
            raise fresh(self.why_closed)

    def close(self, why: Exception) -> None:
        """No more requests begin; those that wait get this error."""
        self.why_closed = why
        for place, _ in self._line.waiting():
            place.set_exception(fresh(why))

    def _count(self, nbytes: int) -> None:
        self.requests += 1
        self.nbytes += nbytes

    def _serve(self) -> None:
        for place, nbytes in self._line.waiting():
            if not self._fits(nbytes):
                break
            self._count(nbytes)
            give(place, nbytes)
