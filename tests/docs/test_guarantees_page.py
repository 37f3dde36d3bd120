"""docs/guarantees.md names tests that exist, in each row of its tables of promises."""

from __future__ import annotations

import fnmatch
import functools
import re
from pathlib import Path
from typing import NamedTuple

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
        if block.startswith("## "):
            files = {"...": files["..."]}
        files = files | {letter: file for file, letter in re.findall(r"`([\w/]+\.py)`\s+\(`(\w)`", block)}
        if whole := re.search(r"All in `([\w/]+\.py)`", block):
            files = files | {"": whole[1]}
        head, *lines = block.splitlines()
        if head == "| promise | shown by |":
            cells = [line.strip("|").split(" | ") for line in lines[1:]]
            rows += [Row(promise.strip(), re.findall(r"`([^`]+)`", shown_by), files) for promise, shown_by in cells]
    return rows


@functools.cache
def functions_in(file: str) -> list[str]:
    return re.findall(r"^\s*(?:async )?def (\w+)\(", (TESTS / file).read_text(), re.MULTILINE)


ROWS = rows_of(PAGE)


def test_the_page_has_rows() -> None:
    assert len(ROWS) > 100
    assert PAGE.count("| promise |") == PAGE.count("\n\n| promise | shown by |\n|---|---|\n| ") > 5


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
