"""Tests of the books: each is run with the compiled books and their models side by side.

A model hears of every event. What it returns or raises, and its whole state, are compared with the compiled book's: so what a
test finds out about one holds of the other.
"""

from __future__ import annotations

import pytest

from tests.simulation.books import PAIRS


@pytest.fixture
def books(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the books with their models beside them under the names of books into the test's module."""
    for name, book in (("EngineBook", PAIRS.engine), ("ClientBook", PAIRS.client)):
        if hasattr(request.module, name):
            monkeypatch.setattr(request.module, name, book)
