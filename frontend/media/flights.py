"""Who prepares which medium just now, so that two requests for the same new one have it decoded once.

Whoever prepares it leads; others wait until that is over, however it ended, and then look for it. If it failed, or its request
was cancelled, nothing is there, and one of them leads.

Invariant: a key has one leader at a time, and its flight ends with the leader's block.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterator

__all__ = ["Flights"]


class Flights:
    """The media that are being prepared.

    Attributes:
        waiting: requests that wait for others to prepare something.
        landed: how many flights have ended. Who has looked for a medium before it led, and finds this changed, looks again.
    """

    def __init__(self) -> None:
        self.landed = self.waiting = 0
        self._by_key: dict[bytes, asyncio.Event] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._by_key

    @contextlib.contextmanager
    def lead(self, keys: Collection[bytes]) -> Iterator[None]:
        """Leads for as long as the block lasts. Nobody else may lead for one of these keys."""
        assert not any(key in self._by_key for key in keys), "somebody else prepares this medium"
        flight = asyncio.Event()
        self._by_key.update(dict.fromkeys(keys, flight))
        try:
            yield
        finally:
            for key in keys:
                del self._by_key[key]
            self.landed += len(keys)
            flight.set()

    async def wait(self, keys: Collection[bytes]) -> None:
        """Waits until those who lead for these keys now are done."""
        flights = {self._by_key[key] for key in keys if key in self._by_key}
        self.waiting += 1
        try:
            for flight in flights:
                await flight.wait()
        finally:
            self.waiting -= 1
