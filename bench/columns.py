"""Tables of what was measured: a row for each subject in a case, and columns of numbers.

A cell stays empty where its number was not measured. :data:`READING` is shown with all tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bench import repetitions
from bench.repetitions import Measured, Number, measured_values, title_of
from bench.results import Table

READING = (
    "How to read the tables: numbers are medians of repetitions, in each of which all ways are measured in turn, in\n"
    "alternating order. spread, or least and most: of the repetitions, compared with the median. A ratio (shmring is: 2 x) is\n"
    "taken within each repetition: of the first way's number to that of the row. CPU is user and system time of all threads."
)


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


def _numbers(title: str, number: Callable[[Row], float | None], form: str) -> Column:
    def text(row: Row) -> str:
        value = number(row)
        return "" if value is None else form.format(value)

    return Column(title, text)


def median(title: str, number: Number, decimals: int = 0) -> Column:
    return _numbers(title, lambda row: repetitions.median(row.runs, number), f"{{:,.{decimals}f}}")


def percentile(title: str, numbers: Callable[[Any], Iterable[float]], percent: float, decimals: int = 0) -> Column:
    """A percentile of what all repetitions have together."""
    return _numbers(title, lambda row: repetitions.percentile(row.runs, numbers, percent), f"{{:,.{decimals}f}}")


def spread(title: str, number: Number) -> Column:
    """The least and the greatest of a number against its median; nothing beside a median of 0."""

    def text(row: Row) -> str:
        middle = repetitions.median(row.runs, number)
        found = measured_values(row.runs, number)
        return f"{min(found) / middle - 1:+.0%} {max(found) / middle - 1:+.0%}" if middle else ""

    return Column(title, text)


def ratio(title: str, ours: str, number: Number, *, inverse: bool = False) -> Column:
    """Our number over that of each of the others; or inverse: theirs over ours."""

    def value(row: Row) -> float | None:
        over, under = (row.subject, ours) if inverse else (ours, row.subject)
        return None if row.subject == ours else repetitions.ratio(row.measured, row.case, over, under, number)

    return _numbers(title, value, "{:.2f} x")


def compare(
    title: str,
    named: tuple[str, str],
    measured: Measured,
    columns: Sequence[Column],
    titles: Mapping[str, str] | None = None,
    case_title: Callable[[Any], str] = title_of,
) -> Table:
    """Returns a table with a row for each subject in each case, and what those two are called in its head.

    A subject without a title has its name for one.
    """
    rows = [
        [case_title(row.case), (titles or {}).get(row.subject, row.subject), *(column.text(row) for column in columns)]
        for row in _rows(measured)
    ]
    return Table(title, [*named, *(column.title for column in columns)], rows, texts=named[1:], grouped=True)


def shown_as(
    title: str, named: tuple[str, str], columns: Sequence[Column], titles: Mapping[str, str] | None = None
) -> Callable[[Measured], list[Table]]:
    """Returns what makes all that was measured one table; see :func:`compare`."""
    return lambda measured: [compare(title, named, measured, columns, titles)]


def cross(
    title: str,
    corner: str,
    measured: Measured,
    column: Column,
    titles: Mapping[str, str],
    case_title: Callable[[Any], str] = title_of,
) -> Table:
    """Returns a table of one number, with a row for each subject and a column for each case; see :func:`compare`."""
    texts = {(row.subject, row.case): column.text(row) for row in _rows(measured)}
    subjects = dict.fromkeys(subject for subject, _ in texts)
    rows = [[titles[subject], *(texts.get((subject, case), "") for case in measured)] for subject in subjects]
    return Table(title, [corner, *map(case_title, measured)], rows)


def _rows(measured: Measured) -> Iterator[Row]:
    return (Row(measured, case, subject, runs) for case, of_case in measured.items() for subject, runs in of_case.items())
