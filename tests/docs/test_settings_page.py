"""docs/settings.md is what the code says."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.pages import load_maker


@pytest.fixture(scope="module")
def make_settings() -> ModuleType:
    return load_maker("make_settings")


def test_the_page_is_what_the_code_says(make_settings: ModuleType) -> None:
    assert make_settings.PAGE.read_text() == make_settings.make_page(), "run: python docs/make_settings.py"


def test_every_setting_has_a_meaning(make_settings: ModuleType) -> None:
    rows = [line.split(" | ") for line in make_settings.make_page().splitlines() if line.startswith(("| `-", "| `"))]
    assert len(rows) > 100
    assert [row[0] for row in rows if len(row[-1].strip(" |")) < 5] == []
