"""docs/api.md has every public call and attribute with the arguments that the code has."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

import shmring
import shmring.threads
from tests.pages import load_maker

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def make_api() -> ModuleType:
    return load_maker("make_api")


def test_the_tables_are_what_the_code_says(make_api: ModuleType) -> None:
    assert make_api.PAGE.read_text() == make_api.make_page(), "run: python docs/make_api.py"


def test_every_public_name_of_a_class_is_in_its_table(make_api: ModuleType) -> None:
    for section in make_api.SECTIONS:
        shown = set(section.members.split())
        assert len(shown) == len(section.members.split())
        for end in (section.asyncio_class, section.blocking_class):
            public = {name for name in dir(end) if not name.startswith("_")} | make_api._attributes(end).keys()
            assert public <= shown, end


def test_every_public_class_with_calls_has_a_table(make_api: ModuleType) -> None:
    shown = {end for section in make_api.SECTIONS for end in (section.asyncio_class, section.blocking_class)}
    classes = {
        value
        for module in (shmring, shmring.threads)
        for name in module.__all__
        if inspect.isclass(value := getattr(module, name)) and not issubclass(value, Exception)
    }
    elsewhere = {name for name in shmring.__all__ if name.endswith(("Config", "Statistics", "Snapshot"))}  # on other pages
    assert {end for end in classes if end.__name__ not in elsewhere} == shown


def test_every_row_has_a_meaning(make_api: ModuleType) -> None:
    rows = [line.strip("|").split(" | ") for line in make_api.make_page().splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row[0].strip() != "`shmring`"]
    assert len(rows) > 100
    assert [row[0] for row in rows if len(row) != 3 or len(row[2].strip()) < 10] == []


def test_every_argument_that_needs_words_is_explained(make_api: ModuleType) -> None:
    """The introduction has each argument of the calls that its name and its call alone do not explain."""
    by_hand = make_api.PAGE.read_text().partition("## Opening an end")[0]
    for name in ("serve", "connect", "join"):
        for end in (shmring, shmring.threads):
            arguments = inspect.signature(getattr(end, name)).parameters.keys() - {"name", "rank", "overrides"}
            assert [argument for argument in arguments if f"**`{argument}" not in by_hand] == []


def test_threads_md_names_each_call_that_differs(make_api: ModuleType) -> None:
    section = (ROOT / "docs" / "threads.md").read_text().partition("## What differs\n")[2].partition("\n## ")[0]
    differing = set()
    for part in make_api.SECTIONS:
        for name in part.members.split():
            own, twin = (getattr(end, name, None) for end in (part.asyncio_class, part.blocking_class))
            if not (inspect.isroutine(own) or inspect.isroutine(twin)):
                continue
            if (
                own is None
                or twin is None
                or "timeout" in inspect.signature(twin).parameters.keys() - inspect.signature(own).parameters
            ):
                differing.add(name)
    assert len(differing) > 10
    assert {name for name in differing if not re.search(rf"[`.]{name}\b", section)} == set()
