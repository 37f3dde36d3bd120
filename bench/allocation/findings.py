"""What ``bench allocator`` has found, in the form in which the report reads every benchmark: tables, notes, raw results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table as RichTable

from bench.coverage import Coverage
from bench.machine import Machine
from bench.targets import Verdict

__all__ = ["Findings", "Table", "write_json"]


class Table(msgspec.Struct, frozen=True):
    """A table of texts: the first column names a row, the others are numbers to compare."""

    title: str
    columns: list[str]
    rows: list[list[str]]

    def rich(self) -> RichTable:
        """Returns it as the terminal shows it."""
        table = RichTable(title=self.title)
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="right" if number else "left", no_wrap=True)
        for row in self.rows:
            table.add_row(*row)
        return table


class Findings(msgspec.Struct, frozen=True):
    """A run of a mode of the benchmark.

    Attributes:
        results: what the tables were made from.
        targets: what the run says of those that it measured.
        command: what was typed.
    """

    mode: str
    machine: Machine
    tables: list[Table]
    notes: list[str]
    results: list[dict[str, Any]]
    targets: list[Verdict] = []
    command: str = ""
    coverage: Coverage | None = None


def write_json(findings: Findings, path: Path) -> None:
    """Writes everything that was found."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(findings)) + b"\n")
