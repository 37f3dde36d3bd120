"""Targets as data: what is compared, where, and the threshold. Those of a benchmark stand beside it.

Where a target spans several places, the worst of them counts. What a run did not measure is neither met nor missed: a verdict
says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

from bench.repetitions import Measured, Number, median, ratio
from bench.results import Verdict

_SHOWN_PLACES = 4  # of a target that spans many

#: The number of each place of a target; None where it was not measured.
Numbers = Iterator[tuple[str, float | None]]


@dataclasses.dataclass(frozen=True)
class Known:
    """A target that is missed on some machines as far as this, for a reason that a decision gives. What misses that is news."""

    decision: int
    limit: float


@dataclasses.dataclass(frozen=True)
class Target:
    """Something to reach: what is compared, and where, for people; the threshold; and what the results of a mode say of it."""

    what: str
    at: str
    limit: float
    unit: str
    numbers: Callable[[Any], Iterable[tuple[str, float | None]]]
    at_least: bool = True
    known: Known | None = None

    def judge(self, results: Any) -> Verdict:
        """Returns whether results meet it, which the worst place decides."""
        asked = f"{'>=' if self.at_least else '<='} {self.limit:g} {self.unit}"
        places = list(self.numbers(results))
        measured = [(name, number) for name, number in places if number is not None]
        measured.sort(key=lambda place: place[1], reverse=not self.at_least)
        if not measured:
            return Verdict(self.what, self.at, asked, detail="not part of this run")
        worst, rest = measured[0][1], ""
        if len(places) > _SHOWN_PLACES:
            places, rest = [*measured[:_SHOWN_PLACES]], f"; the worst of {len(measured)}"
        detail = ", ".join(f"{name}: {'not measured' if number is None else f'{number:.3g}'}" for name, number in places)
        met = self._reaches(worst, self.limit)
        decision = None
        if self.known is not None and not met and self._reaches(worst, self.known.limit):
            decision = self.known.decision
        return Verdict(self.what, self.at, asked, f"{worst:.3g} {self.unit}", met, detail + rest, decision)

    def _reaches(self, number: float, limit: float) -> bool:
        return number >= limit if self.at_least else number <= limit


def ratios(
    ours: str, theirs: str, number: Number, cases: Mapping[str, Hashable], of_cases: Mapping[str, Hashable] | None = None
) -> Callable[[Measured], Numbers]:
    """Returns what a target compares: our number over theirs in each case, by what the case is called there."""
    others = cases if of_cases is None else of_cases
    return lambda measured: ((name, ratio(measured, cases[name], ours, theirs, number, others[name])) for name in cases)


def medians(subject: str, number: Number, cases: Mapping[str, Hashable]) -> Callable[[Measured], Numbers]:
    """Returns likewise the median of a number of one subject."""
    return lambda measured: ((name, median(measured.get(cases[name], {}).get(subject, ()), number)) for name in cases)
