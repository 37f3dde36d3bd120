"""Subjects that are measured in turn, and the medians and ratios of their runs.

Repetitions are interleaved, so that whatever else the machine does hits all subjects alike. A ratio is taken within each
repetition, and the median of the ratios counts.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import click
import numpy as np

from bench.children import described
from bench.results import Coverage, Key, Planned, Status

_Case = TypeVar("_Case", bound=Hashable)
_Run = TypeVar("_Run")

#: The runs of each subject, by case, in the order in which they were made.
Measured: TypeAlias = Mapping[Any, Mapping[str, Sequence[Any]]]
#: What a run says of something: an attribute (``ttft.p99_ms``), or what a function makes of it. None: it was not measured.
Number: TypeAlias = str | Callable[[Any], float | None]


class Timing(NamedTuple):
    """How often a case is measured, and how long each time: what is timed, and before that what is not."""

    repetitions: int
    timed_s: float = 0.0
    warm_up_s: float = 0.0

    def asked(self, repetitions: int | None = None, seconds: float | None = None) -> Timing:
        """Returns it where somebody has said something else, or has not."""
        return Timing(repetitions or self.repetitions, seconds or self.timed_s, self.warm_up_s)


def title_of(case: Any) -> str:
    """Returns a case in words: its title, if it has one."""
    title = getattr(case, "title", None)
    return title if isinstance(title, str) else str(case)


class Repetitions(Generic[_Case, _Run]):
    """Measures subjects in cases, in turn and again and again, and keeps what there is.

    What has failed is not tried again: ratios are taken within a repetition, so that none may lack in the middle.
    """

    def __init__(self, subjects: Mapping[_Case, Sequence[str]], count: int, title: Callable[[_Case], str] = title_of) -> None:
        self.measured: dict[_Case, dict[str, list[_Run]]] = {}
        self.subjects, self.count, self._title = subjects, count, title
        self._failed: dict[Key, tuple[Status, str]] = {}
        self._begun = 0

    def parts(self, most: int) -> list[slice]:
        """So many parts of the repetitions, of even length if there are enough, or fewer where there are few repetitions."""
        length = -(-self.count // most)
        length += length % 2 if self.count > most else 0
        return [slice(start, start + length) for start in range(0, self.count, length)]

    def has_failed(self, cases: Iterable[_Case], subject: str) -> bool:
        """Whether nothing more is measured of a subject in cases."""
        return all((self._title(case), subject) in self._failed for case in cases)

    def measure(
        self,
        cases: Sequence[_Case],
        measure: Callable[[_Case, str], _Run],
        titles: Mapping[str, str] | None = None,
        part: slice = slice(None),
    ) -> None:
        """Measures all subjects of cases, in alternating order, with a line on stderr before each.

        A part of the repetitions is measured where there is something to do between them. A subject without a title has its
        name for one.
        """
        steps = self.count * sum(map(len, self.subjects.values()))
        for repetition, case in itertools.product(range(self.count)[part], cases):
            for subject in self.subjects[case][:: -1 if repetition % 2 else 1]:
                self._begun += 1
                if (self._title(case), subject) in self._failed:
                    continue
                what = f"{self._title(case)}, {(titles or {}).get(subject, subject)}"
                click.echo(f"{self._begun} of {steps}: {what}, repetition {repetition + 1} of {self.count}", err=True)
                try:
                    run = measure(case, subject)
                except Exception as error:  # noqa: BLE001 # it has its place among the results
                    self.fail([case], [subject], described(error))
                else:
                    self.measured.setdefault(case, {}).setdefault(subject, []).append(run)

    def fail(self, cases: Iterable[_Case], subjects: Iterable[str], reason: str, status: Status = Status.FAILED) -> None:
        """Says why subjects have no result in cases; if there are several reasons, the first one counts."""
        for case, subject in itertools.product(cases, list(subjects)):
            self._failed.setdefault((self._title(case), subject), (status, reason))

    def coverage(self) -> Coverage:
        planned = [Planned(self._title(case), list(subjects), self.count) for case, subjects in self.subjects.items()]
        counts = {(self._title(case), name): len(runs) for case, of in self.measured.items() for name, runs in of.items()}
        return Coverage.of(planned, counts, self._failed)


# -- what is made of them ------------------------------------------------------------------------------------------------


def values(runs: Iterable[Any], number: Number) -> list[float | None]:
    return [_attribute(run, number) if isinstance(number, str) else number(run) for run in runs]


def _attribute(run: Any, path: str) -> Any:
    for name in path.split("."):
        run = None if run is None else getattr(run, name)
    return run


def measured_values(runs: Iterable[Any], number: Number) -> list[float]:
    """Returns a number of each run that has it."""
    return [value for value in values(runs, number) if value is not None]


def median(runs: Iterable[Any], number: Number) -> float | None:
    """Returns the median of a number; None if no run has it."""
    found = measured_values(runs, number)
    return statistics.median(found) if found else None


def percentile(runs: Iterable[Any], numbers: Callable[[Any], Iterable[float]], percent: float) -> float | None:
    """Returns a percentile of what all repetitions have together: one alone has too few for a 99th. None: they have nothing."""
    found = [number for run in runs for number in numbers(run)]
    return float(np.percentile(found, percent)) if found else None


def ratio(measured: Measured, case: Hashable, ours: str, theirs: str, number: Number, of_case: Hashable = None) -> float | None:
    """Returns one subject's number over another's, in the same case, or in another one: the median of the ratios.

    None: no repetition has both numbers.
    """
    mine, others = measured.get(case, {}).get(ours, ()), measured.get(of_case or case, {}).get(theirs, ())
    pairs = zip(values(mine, number), values(others, number), strict=False)
    found = [mine / other for mine, other in pairs if mine is not None and other]
    return statistics.median(found) if found else None
