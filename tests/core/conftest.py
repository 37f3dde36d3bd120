"""Tests of the books: each is run with the compiled books, with their models, and with both side by side."""

from __future__ import annotations

import pytest

from tests.simulation.books import COMPILED, MODELS, PAIRS


@pytest.fixture(params=[COMPILED, MODELS, PAIRS], ids=["compiled", "model", "pair"])
def books(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the books of one kind under their names into the test's module."""
    for name, book in (("EngineBook", request.param.engine), ("ClientBook", request.param.client)):
        if hasattr(request.module, name):
            monkeypatch.setattr(request.module, name, book)
