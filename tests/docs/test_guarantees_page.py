"""docs/guarantees.md names tests that exist, in each row of its tables; that of the guards is what the table of faults says."""

from __future__ import annotations

import fnmatch
import functools
import re
from pathlib import Path
from typing import NamedTuple

from tests.pages import load_maker
from tests.tables import for_each

TESTS = Path(__file__).resolve().parents[1]
PAGE = (TESTS.parent / "docs" / "guarantees.md").read_text()


class Row(NamedTuple):
    """A promise.

    Attributes:
        promise: the first cell.
        shown_by: what stands in backticks in the other one.
        files: what files are called here: ``...`` and letters; the empty name is the file that a table is about.
    """

    promise: str
    shown_by: list[str]
    files: dict[str, str]


def rows_of(page: str) -> list[Row]:
    files = {"...": "integration/test_guarantees_processes.py"}
    rows = []
    for block in page.split("\n\n"):
        if "| removed guard |" in block:
            continue  # it is made of tests/mutants/, whose tests look whether its own exist
        if block.startswith("## "):
            files = {"...": files["..."]}
        files = files | {letter: file for file, letter in re.findall(r"`([\w/]+\.py)`\s+\(`(\w)`", block)}
        if whole := re.search(r"All in `([\w/]+\.py)`", block):
            files = files | {"": whole[1]}
        for line in block.splitlines():
            cells = line.strip("|").split(" | ")
            if line.startswith("| ") and cells[0].strip() != "promise":
                rows.append(Row(cells[0].strip(), re.findall(r"`([^`]+)`", cells[-1]), files))
    return rows


@functools.cache
def functions_in(file: str) -> list[str]:
    return re.findall(r"^\s*(?:async )?def (\w+)\(", (TESTS / file).read_text(), re.MULTILINE)


ROWS = rows_of(PAGE)


def test_the_table_of_guards_is_that_of_the_faults() -> None:
    make_guarantees = load_maker("make_guarantees")
    assert make_guarantees.PAGE.read_text() == make_guarantees.make_page(), "run: python docs/make_guarantees.py"


def test_the_page_has_rows() -> None:
    assert len(ROWS) == len(re.findall(r"^\| ", PAGE.partition("## Would a test notice")[0], re.MULTILINE)) - PAGE.count(
        "| promise |"
    )


@for_each("row", ROWS, ids=lambda row: row.promise)
def test_what_shows_a_promise_is_there(row: Row) -> None:
    assert row.shown_by
    last = row.files.get("", "")
    for name in row.shown_by:
        if name.startswith("make "):
            makefile = (TESTS.parent / "Makefile").read_text()
            assert re.search(rf"^{name.removeprefix('make ').split()[0]}:", makefile, re.MULTILINE), name
            continue
        file, separator, function = name.partition("::")
        if separator:
            last = row.files.get(file, file) if file else last
        elif file.endswith(".py") or file in row.files:
            last = row.files.get(file, file)
        else:
            last, function = row.files[""], name
        assert (TESTS / last).is_file(), name
        assert not function or fnmatch.filter(functions_in(last), function), name
