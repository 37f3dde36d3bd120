"""Subjects that are measured in turn, and what is made of their runs: medians, ratios, tables, numbers for targets.

Repetitions are interleaved, so that whatever else the machine does hits all subjects alike. A ratio is taken within each
repetition, and the median of the ratios counts. The subjects of a case stand in one table, a row for each.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from bench.children import described
from bench.results import Coverage, Key, Planned, Spread, Status, Table, deviation

_Case = TypeVar("_Case", bound=Hashable)
_Run = TypeVar("_Run")

#: The runs of each subject, by case, in the order in which they were made.
Measured: TypeAlias = Mapping[Any, Mapping[str, Sequence[Any]]]
#: What a run says of something; None: it was not measured.
Number: TypeAlias = Callable[[Any], float | None]


class Repetitions(Generic[_Case, _Run]):
    """Measures subjects in cases, in turn and again and again, and keeps what there is.

    What has failed is not tried again: ratios are taken within a repetition, so that none may lack in the middle.

    Args:
        subjects: of each case.
        count: of the repetitions of each.
        title: a case in words.

    Attributes:
        subjects: as given.
        measured: the repetitions of each subject, by case.
    """

    def __init__(self, subjects: Mapping[_Case, Sequence[str]], count: int, title: Callable[[_Case], str]) -> None:
        self.measured: dict[_Case, dict[str, list[_Run]]] = {}
        self.subjects, self._count, self._title = subjects, count, title
        self._failed: dict[Key, tuple[Status, str]] = {}

    @property
    def steps(self) -> int:
        """How many lines of progress there will be."""
        return self._count * sum(map(len, self.subjects.values()))

    def parts(self, most: int) -> list[slice]:
        """So many parts of the repetitions, of even length if there are enough, or fewer where there are few repetitions."""
        length = -(-self._count // most)
        length += length % 2 if self._count > most else 0
        return [slice(start, start + length) for start in range(0, self._count, length)]

    def has_failed(self, cases: Iterable[_Case], subject: str) -> bool:
        """Whether nothing more is measured of a subject in cases."""
        return all((self._title(case), subject) in self._failed for case in cases)

    def measure(
        self,
        cases: Sequence[_Case],
        measure: Callable[[_Case, str], _Run],
        progress: Callable[[str], None],
        titles: Mapping[str, str] | None = None,
        part: slice = slice(None),
    ) -> None:
        """Measures all subjects of cases, in alternating order, with a line before each.

        Args:
            cases: which.
            measure: one subject in one case, once.
            progress: gets the line.
            titles: of subjects; without one, its name is its title.
            part: of the repetitions; all of them, if there is nothing to do between them.
        """
        for repetition, case in itertools.product(range(self._count)[part], cases):
            for subject in self.subjects[case][:: -1 if repetition % 2 else 1]:
                words = (titles or {}).get(subject, subject)
                progress(f"{self._title(case)}, {words}, repetition {repetition + 1} of {self._count}")
                if (self._title(case), subject) not in self._failed:
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
        """What was planned, and what of it is missing."""
        planned = [Planned(self._title(case), list(subjects), self._count) for case, subjects in self.subjects.items()]
        counts = {(self._title(case), name): len(runs) for case, of in self.measured.items() for name, runs in of.items()}
        return Coverage.of(planned, counts, self._failed)


# -- what is made of them ------------------------------------------------------------------------------------------------


def median_ratio(ours: Iterable[float | None], theirs: Iterable[float | None]) -> float | None:
    """Returns the median of the ratios within each repetition that has both numbers; None if there is none."""
    found = [mine / other for mine, other in zip(ours, theirs, strict=False) if mine is not None and other]
    return statistics.median(found) if found else None


def median(runs: Sequence[Any], number: Number) -> float | None:
    """Returns the median of a number; None if no run has it."""
    found = [value for run in runs if (value := number(run)) is not None]
    return statistics.median(found) if found else None


def ratio(measured: Measured, case: Hashable, ours: str, theirs: str, number: Number, of_case: Hashable = None) -> float | None:
    """Returns one subject's number over another's, in the same case, or in another one; None where one of them is missing."""
    mine, others = measured.get(case, {}).get(ours, ()), measured.get(of_case or case, {}).get(theirs, ())
    return median_ratio(map(number, mine), map(number, others))


def ratios(
    ours: str, theirs: str, number: Number, cases: Mapping[str, Hashable], of_cases: Mapping[str, Hashable] | None = None
) -> Callable[[Measured], Iterator[tuple[str, float | None]]]:
    """Returns what a target compares: such a ratio in each case, by what the case is called there."""
    others = cases if of_cases is None else of_cases
    return lambda measured: ((name, ratio(measured, cases[name], ours, theirs, number, others[name])) for name in cases)


def medians(
    subject: str, number: Number, cases: Mapping[str, Hashable]
) -> Callable[[Measured], Iterator[tuple[str, float | None]]]:
    """Returns likewise a number of one subject."""
    return lambda measured: ((name, median(measured.get(cases[name], {}).get(subject, ()), number)) for name in cases)


class Row(NamedTuple):
    """A subject in a case, with all that was measured."""

    measured: Measured
    case: Any
    subject: str
    runs: Sequence[Any]


class Column(NamedTuple):
    """A column of a table, and what it says of a row."""

    title: str
    text: Callable[[Row], str]


def median_column(title: str, number: Number, decimals: int = 0) -> Column:
    """A number's median; nothing where it was not measured."""

    def text(row: Row) -> str:
        value = median(row.runs, number)
        return "" if value is None else f"{value:,.{decimals}f}"

    return Column(title, text)


def spread_column(title: str, number: Number) -> Column:
    """The least and the greatest of a number against its median; nothing where it was not measured."""

    def text(row: Row) -> str:
        values = [value for run in row.runs if (value := number(run)) is not None]
        return deviation(Spread.of(values)) if values else ""

    return Column(title, text)


def ratio_column(title: str, ours: str, number: Number, theirs: str = "") -> Column:
    """Our number over that of each of the others; or in our row, over theirs."""

    def text(row: Row) -> str:
        if (row.subject == ours) is not bool(theirs):
            return ""
        value = ratio(row.measured, row.case, ours, theirs or row.subject, number)
        return "" if value is None else f"{value:.2f} x"

    return Column(title, text)


def compare(
    title: str,
    named: tuple[str, str],
    measured: Measured,
    columns: Sequence[Column],
    case_title: Callable[[Any], str] = str,
    titles: Mapping[str, str] | None = None,
) -> Table:
    """Returns a table with a row for each subject in each case.

    Args:
        title: of the table.
        named: what cases and subjects are called in its head.
        measured: the runs.
        columns: behind those two.
        case_title: a case in words.
        titles: of subjects; without one, its name is its title.
    """
    rows = [
        [case_title(case), (titles or {}).get(subject, subject)]
        + [column.text(Row(measured, case, subject, runs)) for column in columns]
        for case, of_case in measured.items()
        for subject, runs in of_case.items()
    ]
    return Table(title, [*named, *(column.title for column in columns)], rows, texts=named[1:], grouped=True)


def cross(
    title: str,
    corner: str,
    measured: Measured,
    column: Column,
    case_title: Callable[[Any], str] = str,
    titles: Mapping[str, str] | None = None,
) -> Table:
    """Returns a table of one number, with a row for each subject and a column for each case; see :func:`compare`."""
    cells = [
        ((titles or {}).get(subject, subject), case_title(case), column.text(Row(measured, case, subject, runs)))
        for case, of_case in measured.items()
        for subject, runs in of_case.items()
    ]
    return Table.crossed(title, corner, cells)
