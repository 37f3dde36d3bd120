"""A bounded number of messages in flight, for peers whose transport does not count them itself."""

from __future__ import annotations

import asyncio

__all__ = ["Window"]


class Window:
    """Counts messages in flight; for one producer.

    Args:
        size: how many there may be.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._in_flight = 0
        self._target = 0
        self._waiter: asyncio.Future[None] | None = None

    async def take(self) -> None:
        """Waits until there is room for a message, and counts it."""
        if self._in_flight >= self._size:
            await self._wait_until(self._size - 1)
        self._in_flight += 1

    async def drain(self) -> None:
        """Waits until nothing is in flight."""
        if self._in_flight:
            await self._wait_until(0)

    def give(self, messages: int) -> None:
        """So many have been consumed."""
        self._in_flight -= messages
        assert self._in_flight >= 0, "more was acknowledged than sent"
        if self._waiter is not None and not self._waiter.done() and self._in_flight <= self._target:
            self._waiter.set_result(None)

    def fail(self, error: Exception) -> None:
        """Nothing will be acknowledged any more; whoever waits gets the error."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)

    async def _wait_until(self, target: int) -> None:
        self._target = target
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
