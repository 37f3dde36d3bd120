"""docs/reference.md has every public call and attribute with the arguments that the code has; docs/api.md explains them."""

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
def make_reference() -> ModuleType:
    return load_maker("make_reference")


def test_every_public_name_of_a_class_is_in_its_table(make_reference: ModuleType) -> None:
    for section in make_reference.SECTIONS:
        shown = set(section.members.split())
        assert len(shown) == len(section.members.split())
        for end in (section.asyncio_class, section.blocking_class):
            public = {name for name in dir(end) if not name.startswith("_")} | make_reference.attributes(end).keys()
            assert public <= shown, end


def test_every_public_class_with_calls_has_a_table(make_reference: ModuleType) -> None:
    shown = {end for section in make_reference.SECTIONS for end in (section.asyncio_class, section.blocking_class)}
    classes = {
        value
        for module in (shmring, shmring.threads)
        for name in module.__all__
        if inspect.isclass(value := getattr(module, name)) and not issubclass(value, Exception)
    }
    elsewhere = {name for name in shmring.__all__ if name.endswith(("Config", "Statistics", "Snapshot"))}  # on other pages
    assert {end for end in classes if end.__name__ not in elsewhere} == shown


def test_every_row_has_a_meaning(make_reference: ModuleType) -> None:
    calls = make_reference.make_page().partition("\n## Calls\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in calls.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row[0].strip() != "call"]
    assert len(rows) > 100
    assert [row[0] for row in rows if len(row) != 2 or len(row[1].strip()) < 10] == []


def test_every_argument_that_needs_words_is_explained() -> None:
    """The page has each argument of the calls that its name and its call alone do not explain."""
    page = (ROOT / "docs" / "api.md").read_text()
    for name in ("serve", "connect", "join"):
        for end in (shmring, shmring.threads):
            arguments = inspect.signature(getattr(end, name)).parameters.keys() - {"name", "rank", "overrides"}
            assert [argument for argument in arguments if f"**`{argument}" not in page] == []


def test_each_call_that_differs_says_so(make_reference: ModuleType) -> None:
    rows = make_reference.tables()
    differing = set()
    for part in make_reference.SECTIONS:
        for name in part.members.split():
            own, twin = (getattr(end, name, None) for end in (part.asyncio_class, part.blocking_class))
            if not (inspect.isroutine(own) or inspect.isroutine(twin)):
                continue
            [text] = [text for call, text in rows[part.heading] if re.search(rf"\b{part.variable}\.{name}\(", call)]
            here, there = (list(inspect.signature(call).parameters) if call else None for call in (own, twin))
            if here != there:
                differing.add(name)
                more = set(there or ()) - set(here or ())
                expected = "In threads only." if own is None else "Not in threads." if twin is None else "In threads"
                assert expected in text, (name, text)
                assert own is None or not [argument for argument in more if f"{argument}=" not in text], (name, text)
            else:
                assert "in threads" not in text.lower(), (name, text)
    assert len(differing) > 10
