"""What every benchmark stores and prints: what there is of a plan, tables, verdicts.

A run is written to JSON with the machine and the command that it comes from. ``bench report`` makes the document of these
files; it needs to know no more of a mode than this.

A plan is a list of cases, in each of which some subjects (peers, variants, policies) are measured, each a number of times. So
a run that is ended early says by itself what it lacks.
"""

from __future__ import annotations

import collections
import enum
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table as RichTable

from bench.machine import Machine

# -- what was planned, and what there is -------------------------------------------------------------------------------


class Planned(msgspec.Struct, frozen=True):
    """A case that is to be measured, in words; what is compared in it, and the repetitions of each."""

    case: str
    subjects: list[str]
    repetitions: int


class Status(enum.Enum):
    """Why something that was planned was not measured."""

    EXCLUDED = "not possible"  # it is not installed, or can't do that
    FAILED = "failed"  # it was tried
    MISSING = "missing"  # the run ended before it


class Gap(msgspec.Struct, frozen=True):
    """A subject that has fewer repetitions in a case than planned; with a reason, unless the run ended before it."""

    case: str
    subject: str
    measured: int
    status: Status
    reason: str = ""


class Coverage(msgspec.Struct, frozen=True):
    """What was planned, and the gaps in it."""

    planned: list[Planned]
    gaps: list[Gap]

    @property
    def complete(self) -> bool:
        return not self.gaps

    def summary(self) -> str:
        cases = len({planned.case for planned in self.planned})
        count = sum(len(planned.subjects) for planned in self.planned)
        counts = collections.Counter(gap.status for gap in self.gaps)
        rest = "".join(f", {counts[status]} {status.value}" for status in Status if counts[status])
        in_cases = f"{cases} case{'s' * (cases > 1)}"
        return f"{count - len(self.gaps)} of {count} measurements in {in_cases}{rest}"

    def table(self) -> Table:
        """Returns the gaps: the cases that lack a subject for the same reason, the subject, and what became of it."""
        columns, rows = ["case", "without", "what became of it"], []
        lacking: dict[tuple[str, str], list[str]] = {}
        for gap in self.gaps:
            outcome = f"{gap.status.value}: {gap.reason}" if gap.reason else gap.status.value
            if gap.measured:
                outcome += f"; {gap.measured} repetitions are there"
            lacking.setdefault((gap.subject, outcome), []).append(gap.case)
        all_cases = {planned.case for planned in self.planned}
        for (subject, outcome), cases in lacking.items():
            rows.append(("all" if 1 < len(all_cases) == len(cases) else "; ".join(cases), subject, outcome))
        return Table("missing", columns, rows, texts=tuple(columns))


# -- what is stored and shown ------------------------------------------------------------------------------------------


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

    def rich(self) -> RichTable:
        """Returns it as a terminal shows it."""
        table = RichTable(title=self.title)
        for number, column in enumerate(self.columns):
            left = not number or column in self.texts
            table.add_column(column, justify="left" if left else "right", no_wrap=column not in self.texts)
        for row, following in itertools.zip_longest(self.rows, self.rows[1:]):
            ends = self.grouped and (following is None or row[0] != following[0])
            table.add_row(*map(str, row), end_section=ends)
        return table

    def markdown(self) -> str:
        """Returns it as a document shows it. Of rows of one group, the first one has the first cell."""
        sides = "".join(
            "---:|" if number and column not in self.texts else "---|" for number, column in enumerate(self.columns)
        )
        lines = ["| " + " | ".join(map(_cell, self.columns)) + " |", f"|{sides}"]
        for row, before in zip(self.rows, [None, *self.rows], strict=False):
            first = "" if self.grouped and before is not None and row[0] == before[0] else row[0]
            lines.append("| " + " | ".join(map(_cell, (first, *row[1:]))) + " |")
        return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    return str(value).replace("|", "/").replace("\n", " ")


class Verdict(msgspec.Struct, frozen=True):
    """What became of a target.

    Attributes:
        asked, measured: in words; what was measured is the worst of ``detail``.
        met: None if it was not measured.
        detail: what was measured in each place, or why nothing was.
        decision: the number of the one that says why it is missed, where that is known and it was no worse than said there.
    """

    what: str
    at: str
    asked: str
    measured: str = ""
    met: bool | None = None
    detail: str = ""
    decision: int | None = None

    @property
    def fails(self) -> bool:
        """Whether it is missed, and no decision says why."""
        return self.met is False and self.decision is None

    @property
    def word(self) -> str:
        if self.decision is not None:
            return f"missed: decision {self.decision}"
        return {True: "met", False: "missed", None: "not measured"}[self.met]


class Findings(msgspec.Struct, frozen=True):
    """A run, as it is stored.

    Attributes:
        results: what a plot draws; None where there is none. Nothing else is ever read again, so nothing else is stored: no
            single repetitions, and no single requests.
        command: what was typed; empty: that of the mode, without options.
        coverage: what was planned, and what is missing of it; None in results that are older than the record.
    """

    mode: str
    machine: Machine | None = None
    tables: list[Table] = []
    notes: list[str] = []
    targets: list[Verdict] = []
    results: Any = None
    command: str = ""
    coverage: Coverage | None = None

    @property
    def failures(self) -> int:
        """How much was tried and went wrong, or was not tried; not what is not possible here."""
        gaps = self.coverage.gaps if self.coverage is not None else []
        return sum(gap.status is not Status.EXCLUDED for gap in gaps)


def write_json(findings: msgspec.Struct, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(findings)) + b"\n")


def format_nbytes(nbytes: int) -> str:
    """Returns a size as ``64 KB`` (of 1024 bytes), or in bytes if it is not a whole number of those."""
    for unit, name in ((1 << 20, "MB"), (1 << 10, "KB")):
        if nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def format_rate(per_s: float) -> str:
    """Returns a rate with as many digits as it has meaning."""
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.1f}"


def format_times(ratio: float | None) -> str:
    """Returns a ratio as ``1.25 x``; nothing where there is none."""
    if ratio is None:
        return ""
    return f"{ratio:.2f} x" if ratio < 10 else f"{ratio:.0f} x"
