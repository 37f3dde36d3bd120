"""A waiting line: for a turn, for space, for the next message or request.

Theory of operation: each waiting task has a *place* in the line, which is a future. Code that has something to give looks for
the first place that was given nothing yet, or knows the place that has asked. A place leaves the line when its task runs. Until
then, a place that was given something still stands in the line, so later tasks see that they must wait.

A task may be cancelled in the same turn of the loop in which its place was given something. Then the task never sees the thing.

Invariant: a thing that a place was given is returned by its task, or goes to ``unused``, which hands it on. If a place leaves
with nothing, ``left`` is called. In either case it is not in the line any more by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Generic, TypeAlias, TypeVar

__all__ = ["Place", "WaitingLine", "give"]

_Thing = TypeVar("_Thing")

Place: TypeAlias = asyncio.Future[_Thing]


class WaitingLine(dict[Place[_Thing], Any], Generic[_Thing]):
    """A line of tasks: the places in order of arrival, each with its wish. Lives in a loop.

    It keeps only the places of the waiting tasks: callbacks would make reference cycles with the owner of the line.
    """

    __slots__ = ()

    def enter(self, wants: Any = None) -> Place[_Thing]:
        """Returns a place at the end of the line, for :meth:`stay`.

        If a variable of a function keeps the place, delete the variable before an error leaves the function: the place holds
        its error, whose traceback holds the frame, which holds the caller's tensors.

        Args:
            wants: for :meth:`waiting`.
        """
        place: Place[_Thing] = asyncio.get_running_loop().create_future()
        self[place] = wants
        return place

    async def stay(
        self,
        place: Place[_Thing],
        unused: Callable[[_Thing], object],
        left: Callable[[Place[_Thing]], object] | None = None,
    ) -> _Thing:
        """Waits for what the place is given, and returns it.

        Args:
            place: from :meth:`enter`.
            unused: called with the thing if this task was cancelled just when it came.
            left: called with the place if its task leaves with nothing: it was cancelled, or the giver has failed it.
        """
        try:
            thing = await place
        except BaseException:
            self.leave(place, unused, left)
            raise
        else:
            del self[place]
            return thing
        finally:
            del place

    def leave(
        self,
        place: Place[_Thing],
        unused: Callable[[_Thing], object],
        left: Callable[[Place[_Thing]], object] | None = None,
    ) -> None:
        """The task of a place waits no more; arguments as of :meth:`stay`."""
        del self[place]
        if place.done() and not place.cancelled() and place.exception() is None:
            unused(place.result())
        else:
            place.cancel()  # unless it was failed: so whoever has something for it sees that its task has left
            if left is not None:
                left(place)

    def wait(self, unused: Callable[[_Thing], object]) -> Awaitable[_Thing]:
        """Enters the line, and waits for what the place is given; see :meth:`stay`."""
        return self.stay(self.enter(), unused)

    def waiting(self) -> Iterator[tuple[Place[_Thing], Any]]:
        """The places that were given nothing yet, and their wishes. They may be given something meanwhile."""
        return ((place, wants) for place, wants in self.items() if not place.done())

    @property
    def is_waited_in(self) -> bool:
        """Whether a place was given nothing yet."""
        return not all(place.done() for place in self)

    def give_first(self, thing: _Thing) -> bool:
        """Gives something to the first place that was given nothing yet; returns False if there is none."""
        for place in self:
            if not place.done():
                place.set_result(thing)
                return True
        return False

    def give_all(self, thing: _Thing) -> None:
        """Gives the same to all places that were given nothing yet."""
        for place, _ in self.waiting():
            place.set_result(thing)


def give(place: Place[_Thing], thing: _Thing) -> bool:
    """Gives something to a place; returns False if its task has left."""
    if place.done():
        return False
    place.set_result(thing)
    return True
