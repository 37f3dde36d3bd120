"""Who prepares which medium just now, so that two requests for the same new one have it decoded once.

Whoever prepares it leads; others join, wait until that is over, however it ended, and then look for it. So what somebody has
joined for is kept in any case. If preparing it failed, or its request was cancelled, nothing is there, and one of them leads.

Invariant: a key has one leader at a time, and its flight ends with the leader's block.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Collection, Iterator

__all__ = ["Flights"]


@dataclasses.dataclass(slots=True, eq=False)
class _Flight:
    """The media that one request prepares: when that is over, and which of them others wait for."""

    ended: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    wanted: set[bytes] = dataclasses.field(default_factory=set)


class Flights:
    """The media that are being prepared.

    Attributes:
        waiting: requests that wait for others to prepare something.
        landed: how many flights have ended. Who has looked for a medium before it led, and finds this changed, looks again.
    """

    def __init__(self) -> None:
        self.landed = self.waiting = 0
        self._by_key: dict[bytes, _Flight] = {}

    @contextlib.contextmanager
    def lead(self, keys: Collection[bytes]) -> Iterator[None]:
        """Leads for as long as the block lasts. Nobody else may lead for one of these keys."""
        assert not any(key in self._by_key for key in keys), "somebody else prepares this medium"
        flight = _Flight()
        self._by_key.update(dict.fromkeys(keys, flight))
        try:
            yield
        finally:
            for key in keys:
                del self._by_key[key]
            self.landed += len(keys)
            flight.ended.set()

    def join(self, keys: Collection[bytes]) -> list[bytes]:
        """Returns those of the keys for which somebody leads now, who learns that his medium is wanted."""
        joined = [key for key in keys if key in self._by_key]
        for key in joined:
            self._by_key[key].wanted.add(key)
        return joined

    def is_wanted(self, key: bytes) -> bool:
        """Whether somebody has joined the flight of a key, and will look for the medium when that has ended."""
        return key in self._by_key[key].wanted

    async def wait(self, keys: Collection[bytes]) -> None:
        """Waits until those who lead for these keys now are done."""
        flights = {self._by_key[key] for key in keys if key in self._by_key}
        self.waiting += 1
        try:
            for flight in flights:
                await flight.ended.wait()
        finally:
            self.waiting -= 1
