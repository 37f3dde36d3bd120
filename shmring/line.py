"""A line to wait in: for a turn, for space, for the next thing that comes.

Theory of operation: whoever waits has a *place* in the line, which is a future. Who has something to give looks for the first
place that was given nothing yet, or knows the place that has asked for it. A place leaves the line when its task runs. So one
that was given something still stands there until then, and nobody who comes later can take it for a free turn.

A task may be cancelled in the very turn of the loop in which its place was given something: the task never sees it.

Invariant: what a place is given, its task returns, or ``unused`` gets it, which hands it on; a place that leaves with nothing
is told to ``left``. In either case it is not in the line any more by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Generic, TypeAlias, TypeVar

__all__ = ["Line", "Place", "give"]

_Thing = TypeVar("_Thing")

Place: TypeAlias = asyncio.Future[_Thing]


class Line(dict[Place[_Thing], Any], Generic[_Thing]):
    """A line of tasks: the places in order of arrival, with what each wants. Lives in a loop.

    It keeps nothing of those who wait but their places: callbacks would make circles with whatever has the line.
    """

    __slots__ = ()

    def enter(self, wants: Any = None) -> Place[_Thing]:
        """Returns a place at the end of the line, for :meth:`stay`.

        Whoever keeps it in a variable deletes that before an error leaves the function: the place holds its error, whose
        traceback holds the frame, and that the caller's tensors.

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
            unused: what becomes of a thing if this task was cancelled just as it came.
            left: is told of the place if its waiter goes with nothing: cancelled, or failed by the giver.
        """
        try:
            thing = await place
        except BaseException:
            del self[place]
            if place.done() and not place.cancelled() and place.exception() is None:
                unused(place.result())
            elif left is not None:
                left(place)
            raise
        else:
            del self[place]
            return thing
        finally:
            del place

    def wait(self, unused: Callable[[_Thing], object]) -> Awaitable[_Thing]:
        """Enters the line, and waits for what the place is given; see :meth:`stay`."""
        return self.stay(self.enter(), unused)

    def waiting(self) -> Iterator[tuple[Place[_Thing], Any]]:
        """Those that were given nothing yet, and what they want. They may be given something meanwhile."""
        return ((place, wants) for place, wants in self.items() if not place.done())

    @property
    def is_waited_in(self) -> bool:
        """Whether somebody was given nothing yet."""
        return not all(place.done() for place in self)

    def give_first(self, thing: _Thing) -> bool:
        """Gives something to the first that was given nothing yet; returns False if there is none."""
        for place in self:
            if not place.done():
                place.set_result(thing)
                return True
        return False

    def give_all(self, thing: _Thing) -> None:
        """Gives the same to all that were given nothing yet."""
        for place, _ in self.waiting():
            place.set_result(thing)


def give(place: Place[_Thing], thing: _Thing) -> bool:
    """Gives something to a place; returns False if nobody is there any more to take it."""
    if place.done():
        return False
    place.set_result(thing)
    return True
