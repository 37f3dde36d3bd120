"""The guards of ``make guards`` stand where tests/guards.py says, so that it can take each of them away."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.guards import GUARDS, Guard, check_place

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)
def test_a_guard_and_its_test_are_in_the_code(guard: Guard) -> None:
    check_place(guard, ROOT)
