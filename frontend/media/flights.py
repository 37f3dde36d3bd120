"""The media that are being prepared, so that two requests for the same new medium have it decoded once.

The request that prepares a medium leads. Others join: they wait until that is over, and then look for the medium. So a medium
that others wait for is kept in any case. If preparing it failed, or its request was cancelled, the medium is not there, and one
of the others leads.

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
        landed: how many flights have ended. A request that has looked for a medium before it leads, and finds this number
            changed, looks again.
    """

    def __init__(self) -> None:
        self.landed = self.waiting = 0
        self._by_key: dict[bytes, _Flight] = {}

    @contextlib.contextmanager
    def lead(self, keys: Collection[bytes]) -> Iterator[None]:
        """Leads for as long as the block lasts. No other request may lead for one of these keys."""
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
        """Returns the keys for which another request leads now; that request learns that others want its medium."""
        joined = [key for key in keys if key in self._by_key]
        for key in joined:
            self._by_key[key].wanted.add(key)
        return joined

    def is_wanted(self, key: bytes) -> bool:
        """Whether a request has joined the flight of a key, and will look for the medium when the flight has ended."""
        return key in self._by_key[key].wanted

    async def wait(self, keys: Collection[bytes]) -> None:
        """Waits until the requests that lead for these keys now are done."""
        flights = {self._by_key[key] for key in keys if key in self._by_key}
        self.waiting += 1
        try:
            for flight in flights:
                await flight.ended.wait()
        finally:
            self.waiting -= 1
