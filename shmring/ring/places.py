"""Places of handlers: how many of them may work at a time.

Theory of operation: a handler that waits for a frontend to take its reply gives its place to another handler meanwhile. When
the reply was sent, it takes a place again before it goes on; such handlers go before new requests. So a frontend that does not
read holds its own handlers up, and no others. Each handler without a place has a request in flight, so there are at most
``max_inflight`` of them for each frontend: a smaller bound would let one frontend hold the others up again.

Invariant: free places, and those that handlers have, are together as many as there were at first.
"""

from __future__ import annotations

from contextvars import ContextVar

from shmring.line import WaitingLine

__all__ = ["Place", "Places", "own_place"]


class Places:
    """So many places. Lives in a loop."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._returning: WaitingLine[None] = WaitingLine()
        self._new: WaitingLine[None] = WaitingLine()

    async def take(self, *, returns: bool = False) -> None:
        """Waits for a place, and takes it.

        Args:
            returns: whether it had one before; then it goes before those that had none.
        """
        if self._free:  # otherwise nobody waits
            self._free -= 1
        else:
            await (self._returning if returns else self._new).wait(lambda _: self.give_back())

    def give_back(self) -> None:
        """A place is not used any more."""
        if not self._returning.give_first(None) and not self._new.give_first(None):
            self._free += 1


class Place:
    """One of the places, which was taken, in the hands of a handler.

    Attributes:
        is_held: whether the handler has it now.
    """

    def __init__(self, places: Places) -> None:
        self.is_held = True
        self._places = places
        self._is_over = False
        self._is_taking = False
        self._others: WaitingLine[None] = WaitingLine()  # tasks of the handler that wait while one of them takes a place

    def give_up(self) -> None:
        """The handler waits for its frontend. A second call does nothing."""
        if self.is_held:
            self.is_held = False
            self._places.give_back()

    async def take_again(self) -> None:
        """The handler goes on: waits for a place, if it gave its own up."""
        while not (self.is_held or self._is_over):
            if self._is_taking:  # by another task of the handler
                await self._others.wait(lambda _: None)
            else:
                await self._take()

    async def _take(self) -> None:
        self._is_taking = True
        try:
            await self._places.take(returns=True)
        finally:
            self._is_taking = False
            self._others.give_all(None)
        if self._is_over:
            self._places.give_back()
        else:
            self.is_held = True

    def leave(self) -> None:
        """The handler has ended."""
        self.give_up()
        self._is_over = True


#: That of the handler that this task, or the task that made it, belongs to.
own_place: ContextVar[Place | None] = ContextVar("own_place", default=None)
