"""A table in one test: every row is tried, and each that fails is named."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from tests.tables import for_each


class Subtests:
    """In place of pytest's: what was reported, and no more."""

    def __init__(self) -> None:
        self.reported: list[tuple[str, str]] = []

    @contextlib.contextmanager
    def test(self, name: str) -> Iterator[None]:
        try:
            yield
        except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:  # noqa: BLE001 - it is told
            self.reported.append((name, str(error)))


def test_every_row_is_tried_and_each_that_fails_is_named() -> None:
    subtests, tried = Subtests(), []

    @for_each("value", [1, 2, 3, 4, 5], ids=["one", "two", "three", "four", "five"])
    def test(value: int) -> None:
        tried.append(value)
        assert value != 1, "an error"
        if value == 2:
            with pytest.raises(ValueError):
                pass
        if value == 4:
            pytest.skip("not here")

    test(subtests=subtests)
    assert tried == [1, 2, 3, 4, 5]
    assert [name for name, _ in subtests.reported] == ["one", "two", "four"]
    assert "an error" in subtests.reported[0][1]


def test_two_tables_are_all_pairs_and_fixtures_are_passed_on() -> None:
    subtests, tried = Subtests(), []

    @for_each(("name", "number"), [("a", 1), ("b", 2)])
    @for_each("kind", [int, str], ids=lambda kind: kind.__name__.upper())
    def test(fixture: str, name: str, number: int, kind: type) -> None:
        tried.append((fixture, name, number, kind))
        assert (number, kind) != (2, str)

    assert list(inspect.signature(test).parameters) == ["fixture", "subtests"]
    test(fixture="f", subtests=subtests)
    assert tried == [("f", "a", 1, int), ("f", "a", 1, str), ("f", "b", 2, int), ("f", "b", 2, str)]
    assert [name for name, _ in subtests.reported] == ["'b', 2 - STR"]


def test_what_a_row_has_patched_is_as_before_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    patched: list[int] = []

    @for_each("value", [1, 2])
    def test(value: int, monkeypatch: pytest.MonkeyPatch) -> None:
        patched.append(len(patched_by_rows))
        monkeypatch.setitem(patched_by_rows, value, "here")

    patched_by_rows: dict[int, str] = {}
    test(monkeypatch=monkeypatch, subtests=Subtests())
    assert (patched, patched_by_rows) == ([0, 0], {})


async def test_coroutines_are_awaited_row_by_row() -> None:
    subtests: Any = Subtests()

    @for_each("value", ["x", "y"])
    async def test(value: str) -> None:
        assert value == "x"

    await test(subtests=subtests)
    assert [name for name, _ in subtests.reported] == ["'y'"]


def test_a_table_has_rows_of_its_own_length() -> None:
    with pytest.raises(AssertionError, match="nothing to try for value"):
        for_each("value", [])
    with pytest.raises(ValueError, match="shorter"):
        for_each("a, b", [(1,)])


@for_each("value", ["passes"])
def test_pytest_gives_what_it_needs(value: str, tmp_path: Any) -> None:
    assert (value, tmp_path.is_dir()) == ("passes", True)
