"""docs/settings.md is what the code says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def make_settings() -> ModuleType:
    specification = importlib.util.spec_from_file_location("make_settings", ROOT / "docs" / "make_settings.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_the_page_is_what_the_code_says(make_settings: ModuleType) -> None:
    assert make_settings.PAGE.read_text() == make_settings.make_page(), "run: python docs/make_settings.py"


def test_every_setting_has_a_meaning(make_settings: ModuleType) -> None:
    rows = [line.split(" | ") for line in make_settings.make_page().splitlines() if line.startswith(("| `-", "| `"))]
    assert len(rows) > 100
    assert [row[0] for row in rows if len(row[-1].strip(" |")) < 5] == []
