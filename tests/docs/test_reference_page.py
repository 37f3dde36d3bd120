"""docs/reference.md is what the code says."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.pages import load_maker


@pytest.fixture(scope="module")
def make_reference() -> ModuleType:
    return load_maker("make_reference")


def test_its_tables_are_what_the_code_says(make_reference: ModuleType) -> None:
    assert make_reference.PAGE.read_text() == make_reference.make_page(), "run: python docs/make_reference.py"


def test_every_setting_has_a_meaning(make_reference: ModuleType) -> None:
    options = make_reference.make_page().partition("\n## Options\n")[2].partition("\n## Numbers\n")[0]
    rows = [line.split(" | ") for line in options.splitlines() if line.startswith(("| `-", "| `"))]
    assert len(rows) > 100
    assert [row[0] for row in rows if len(row[-1].strip(" |")) < 5] == []


def test_an_option_of_several_commands_is_explained_once(make_reference: ModuleType) -> None:
    tables = make_reference.tables()
    served = {tuple(row) for row in tables["`shmring serve`"]}
    for command in ("`shmring engine`", "`shmring frontend`"):
        own = {tuple(row) for row in tables[command]}
        assert own
        assert not served & own
