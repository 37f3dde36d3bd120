"""The guards of ``make guards`` stand where tests/guards.py says, so that it can take each of them away.

The page of guarantees has them all.
"""

from __future__ import annotations

from pathlib import Path

from tests.faulty import Fault, check_place
from tests.guards import GUARDS
from tests.tables import for_each

ROOT = Path(__file__).resolve().parents[2]


@for_each("guard", GUARDS, ids=lambda guard: guard.name)
def test_a_guard_and_its_test_are_in_the_code(guard: Fault) -> None:
    check_place(guard)


def test_the_page_of_guarantees_has_each_guard_and_its_test() -> None:
    page = (ROOT / "docs" / "guarantees.md").read_text()
    table = page.partition("| removed guard | test that must fail |\n|---|---|\n")[2].partition("\n\n")[0]
    rows = [tuple(row.strip("| ").replace("`", "").split(" | ")) for row in table.splitlines()]
    assert sorted(rows) == sorted((guard.name, guard.test.removeprefix("tests/")) for guard in GUARDS)
