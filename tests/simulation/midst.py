"""What happens in the midst of a call.

In the product a call is left alone only as long as it neither looks for what has come nor runs a caller's code. What it takes
as it looks may end its session. A payload may have a computed field, and a shape may be a generator: their code may leave the
slot, finish the claim, or have the session look. So an action may have something *inside* (:class:`.scenario.Inside`), which
happens once, at the first such moment of the calls that the action consists of. Where there is none, nothing happens.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator

from tests.simulation.payloads import Code
from tests.simulation.scenario import Inside, Kind, Moment, Scenario, Violation


class Midst:
    """The midst of whatever is called next.

    Args:
        scenario: whether something happens there.
        happen: does something that code does.

    Attributes:
        offers: whether what can happen includes what has something inside.
        happened: how often what was to happen found its moment, by kind of the action and of what was inside.
    """

    def __init__(self, scenario: Scenario, happen: Callable[[Inside], None]) -> None:
        self.happened: Counter[tuple[Kind, Kind]] = Counter()
        self.offers = bool(scenario.looks or scenario.in_code)
        self._happen = happen
        self._inside: Inside | None = None
        self._kind = Kind.CONNECT  # of the action
        self._code = Code(self.run_code) if scenario.in_code else None

    def hold(self, kind: Kind, inside: Inside | None) -> None:
        """This is to happen in the midst of what is called until :meth:`let_go`."""
        self._kind, self._inside = kind, inside

    def let_go(self) -> None:
        """Nothing more is to happen."""
        self._inside = None

    @contextlib.contextmanager
    def offering(self, offers: bool) -> Iterator[None]:
        """Whether what can happen includes what has something inside: there is much of that, and some have no use for it."""
        self.offers, before = offers, self.offers
        try:
            yield
        finally:
            self.offers = before

    @property
    def code(self) -> Code | None:
        """A value of payloads, whose encoding is such a moment; None where nothing ever happens."""
        return self._code

    def run_code(self) -> None:
        """A caller's code runs."""
        inside = self._inside
        if inside is None or inside.moment is not Moment.IN_CODE:
            return
        self._inside = None
        self._count(inside)
        try:
            self._happen(inside)
        except Violation:
            raise
        except Exception as error:  # else whoever packs would take it for a value that can't be sent
            raise Violation(f"{type(error).__name__}: {error}") from error

    def shape(self) -> Iterator[int]:
        """A shape whose reading runs a caller's code."""
        self.run_code()
        yield 1

    def look(self, count: int) -> int:
        """Somebody looks where so many records have come; returns how many of them are there by now."""
        inside = self._inside
        if inside is None or inside.moment is not Moment.LOOKING:
            return 0
        if inside.item:
            self._count(inside)
        self._inside = inside._replace(item=0)
        return min(inside.item or count, count)

    def _count(self, inside: Inside) -> None:
        self.happened[self._kind, inside.kind] += 1
