"""What every benchmark stores and prints: tables of text, the targets that they speak about, and the numbers behind them.

A run is written to JSON with the machine and the command that it comes from, and with what was planned. ``bench report`` makes
the document of these files; it needs to know no more of a mode than this.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table as RichTable

from bench.coverage import Coverage
from bench.machine import Machine

__all__ = ["Findings", "Spread", "Table", "Verdict", "deviation", "format_nbytes", "format_rate", "format_times", "write_json"]


class Spread(msgspec.Struct, frozen=True):
    """A number over the repetitions."""

    median: float
    minimum: float
    maximum: float

    @classmethod
    def of(cls, numbers: Iterable[float]) -> Spread:
        """Returns it for at least one number."""
        values = list(numbers)
        return cls(statistics.median(values), min(values), max(values))


class Table(msgspec.Struct, frozen=True):
    """A table as it is shown: the first column names a row.

    Attributes:
        texts: further columns of words, which stand to the left; numbers stand to the right.
        grouped: whether a line separates rows whose first cells differ.
    """

    title: str
    columns: list[str]
    rows: Sequence[Sequence[Any]]
    texts: tuple[str, ...] = ()
    grouped: bool = False

    @classmethod
    def crossed(
        cls, title: str, corner: str, cells: Iterable[tuple[str, str, str]], columns: Sequence[str] | None = None
    ) -> Table:
        """Lays out cells, each of which comes with the names of its row and its column; what is in none stays empty.

        Rows stand in the order in which they come; so do columns, unless their order is given.
        """
        texts = {(row, column): text for row, column, text in cells}
        columns = columns if columns is not None else list(dict.fromkeys(column for _, column in texts))
        rows = [[row, *(texts.get((row, column), "") for column in columns)] for row in dict.fromkeys(row for row, _ in texts)]
        return cls(title, [corner, *columns], rows)

    def rich(self) -> RichTable:
        """Returns it as a terminal shows it."""
        table = RichTable(title=self.title)
        for number, column in enumerate(self.columns):
            left = not number or column in self.texts
            table.add_column(column, justify="left" if left else "right", no_wrap=True)
        for row, following in itertools.zip_longest(self.rows, self.rows[1:]):
            ends = self.grouped and (following is None or row[0] != following[0])
            table.add_row(*map(str, row), end_section=ends)
        return table

    def markdown(self) -> str:
        """Returns it as a document shows it: all but the first column to the right."""
        lines = ["| " + " | ".join(map(_cell, self.columns)) + " |", "|---|" + "---:|" * (len(self.columns) - 1)]
        lines += ["| " + " | ".join(map(_cell, row)) + " |" for row in self.rows]
        return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    return str(value).replace("|", "/").replace("\n", " ")


class Verdict(msgspec.Struct, frozen=True):
    """What became of a target.

    Attributes:
        what: is compared.
        at: where.
        asked, measured: in words; what was measured is the worst of ``detail``.
        met: None if it was not measured.
        detail: what was measured in each place, or why nothing was.
    """

    what: str
    at: str
    asked: str
    measured: str = ""
    met: bool | None = None
    detail: str = ""

    @property
    def word(self) -> str:
        """The verdict in a word or two."""
        return {True: "met", False: "missed", None: "not measured"}[self.met]


class Findings(msgspec.Struct, frozen=True):
    """A run, as it is stored.

    Attributes:
        mode: which benchmark.
        tables, notes: as shown to people.
        targets: what the run says of those that it measured.
        results: the numbers behind them, as the mode has them.
        plan: what was asked for, where that is more than the command.
        command: what was typed; empty where it was not kept.
        coverage: what was planned, and what is missing of it; None in results that are older than the record.
    """

    mode: str
    machine: Machine | None = None
    tables: list[Table] = []
    notes: list[str] = []
    targets: list[Verdict] = []
    results: Any = None
    plan: Any = None
    command: str = ""
    coverage: Coverage | None = None

    @property
    def failures(self) -> int:
        """How much of what was planned is not there, for whatever reason."""
        return len(self.coverage.gaps) if self.coverage is not None else 0


def write_json(findings: msgspec.Struct, path: Path) -> None:
    """Writes all that a run has found."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(findings)) + b"\n")


# -- numbers in words ----------------------------------------------------------------------------------------------------


def format_nbytes(nbytes: int) -> str:
    """Returns a size as ``64 KB`` (of 1024 bytes), or in bytes if it is not a whole number of those."""
    for unit, name in ((1 << 20, "MB"), (1 << 10, "KB")):
        if nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def format_rate(per_s: float) -> str:
    """Returns a rate with as many digits as it has meaning."""
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.1f}"


def format_times(ratio: float) -> str:
    """Returns a ratio as ``1.25 x``."""
    return f"{ratio:.2f} x" if ratio < 10 else f"{ratio:.0f} x"


def deviation(numbers: Spread) -> str:
    """Returns the slowest and the fastest against the median."""
    return f"{numbers.minimum / numbers.median - 1:+.0%} {numbers.maximum / numbers.median - 1:+.0%}"
