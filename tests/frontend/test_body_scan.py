"""Values are counted as they come, and cost little."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend import value_count
from frontend.value_count import MAX_VALUES, ValueCount

TEXTS = st.text('a"\\,[{]}:é\n', max_size=8)
DOCUMENTS = st.recursive(
    st.none() | st.integers() | TEXTS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4)
)


def values_of(document: Any) -> int:
    """What brackets hold, and one for each that are empty."""
    inside = document if isinstance(document, list) else document.values() if isinstance(document, dict) else None
    return 0 if inside is None else max(1, len(inside)) + sum(map(values_of, inside))


@given(document=DOCUMENTS, is_ascii=st.booleans(), seed=st.integers(0, 99))
def test_values_are_counted_however_they_come(document: Any, is_ascii: bool, seed: int) -> None:
    body = json.dumps(document, ensure_ascii=is_ascii).encode()
    random, count = Random(seed), ValueCount()
    while body:
        size = random.randint(1, 9)
        assert count.add(body[:size])
        body = body[size:]
    assert count._values == 1 + values_of(document)


LARGE = {
    "lists": b"[" + b"[]," * MAX_VALUES,
    "numbers": b"[" + b"1," * MAX_VALUES,
    "objects": b"[" + b'{"a":1},' * (MAX_VALUES // 2),
    "texts": b"[" + b'"\\"",' * MAX_VALUES,
    "texts without commas": b'""' * (2 * MAX_VALUES + 17),
    "escaped": b'["\\\\"' + b",[]" * MAX_VALUES,
}


@pytest.mark.parametrize("body", LARGE.values(), ids=LARGE)
@pytest.mark.parametrize("size", [1000, 65_536])
def test_too_many_are_noticed(body: bytes, size: int) -> None:
    count = ValueCount()
    assert not all(count.add(body[start : start + size]) for start in range(0, len(body), size))


SMALL = {
    "a text": b'["' + b"[]{}, \\\\ \\n\\u00e9" * 100_000 + b'"]',
    "a file": b'{"a":"' + b"QUJD" * 1_000_000 + b'"}',
    "as many as there may be": b"[" + b"1," * (MAX_VALUES - 2) + b"1]",
    "blanks": b" " * 1_000_000,
}


@pytest.mark.parametrize("body", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize("size", [999, 65_536])
def test_long_ones_are_not_many(body: bytes, size: int) -> None:
    count = ValueCount()
    assert all(count.add(body[start : start + size]) for start in range(0, len(body), size))


def test_the_midst_of_a_text_is_not_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    count = ValueCount()
    assert count.add(b'["ab')
    monkeypatch.setattr(value_count, "_STRING", None)
    assert count.add(b"ab,[]" * 1000)
