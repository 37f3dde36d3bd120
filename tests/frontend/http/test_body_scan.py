"""A body is looked through as it comes: its values are counted, what is long is cut out, and little is done for each byte."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmring.frontend.errors import ApiError
from shmring.frontend.http import body_scan
from shmring.frontend.http.body_scan import LONG_NBYTES, MAX_VALUES, BodyScan, is_cut
from tests.tables import for_each

TEXTS = st.text('a"\\,[{]}:é\n', max_size=8)
DOCUMENTS = st.recursive(
    st.none() | st.integers() | TEXTS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4)
)


def values_of(document: Any) -> int:
    """What brackets hold, and one for each that are empty."""
    inside = document if isinstance(document, list) else document.values() if isinstance(document, dict) else None
    return 0 if inside is None else max(1, len(inside)) + sum(map(values_of, inside))


def scanned(body: bytes, size: int | Random, *, counted_first: bool = True) -> tuple[bytes, BodyScan]:
    scan, left = BodyScan(0 if counted_first else LONG_NBYTES + 1), bytearray()
    while body:
        nbytes = size if isinstance(size, int) else size.randint(1, 9)
        left += scan.add(body[:nbytes])
        body = body[nbytes:]
    return bytes(left + scan.finish()), scan


@given(document=DOCUMENTS, is_ascii=st.booleans(), seed=st.integers(0, 99))
def test_values_are_counted_however_they_come(document: Any, is_ascii: bool, seed: int) -> None:
    body = json.dumps(document, ensure_ascii=is_ascii).encode()
    left, scan = scanned(body, Random(seed), counted_first=False)
    assert left == body
    assert scan._values == 1 + values_of(document)
    assert scan.long_texts == {}


@given(
    body=st.lists(st.sampled_from([b'"', b"\\", b"a", b",", b"[", b"\\u00e9"]), max_size=30).map(b"".join),
    seed=st.integers(0, 99),
)
def test_what_is_no_json_comes_out_as_it_is(body: bytes, seed: int) -> None:
    assert scanned(body, Random(seed), counted_first=False)[0] == scanned(body, Random(seed))[0] == body


@given(document=DOCUMENTS, seed=st.integers(0, 99), most=st.integers(1, 12), long=st.integers(1, 40))
def test_what_is_counted_first_makes_no_difference(document: Any, seed: int, most: int, long: int) -> None:
    def outcome(*, counted_first: bool) -> tuple[bytes, list[bytearray]] | str | None:
        try:
            left, scan = scanned(body, Random(seed), counted_first=counted_first)
        except ApiError as error:
            return error.code
        return left.replace(body_scan._MARK.encode(), b""), [*scan.long_texts.values()]

    body = json.dumps(document).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_scan, "MAX_VALUES", most)
        patch.setattr(body_scan, "LONG_NBYTES", long)
        exact = outcome(counted_first=False)
        if exact == "too_many_values" or len(body) <= long:
            assert outcome(counted_first=True) == exact


LARGE = {
    "lists": b"[" + b"[]," * MAX_VALUES,
    "numbers": b"[" + b"1," * MAX_VALUES,
    "objects": b"[" + b'{"a":1},' * (MAX_VALUES // 2),
    "texts": b"[" + b'"\\"",' * MAX_VALUES,
    "texts without commas": b'""' * LONG_NBYTES,
    "escaped": b'["\\\\"' + b",[]" * MAX_VALUES,
}


@pytest.mark.parametrize("body", LARGE.values(), ids=LARGE)
@pytest.mark.parametrize("size", [1000, 65_536])
def test_too_many_values_are_refused(body: bytes, size: int) -> None:
    with pytest.raises(ApiError) as raised:
        scanned(body, size)
    assert (raised.value.status, raised.value.code) == (413, "too_many_values")


def test_as_many_values_as_there_may_be_are_taken() -> None:
    body = b"[" + b"1," * (MAX_VALUES - 2) + b"1]"
    assert scanned(body, 65_536)[0] == body


# -- what is long --------------------------------------------------------------------------------------------------------

FILE = b"data:image/png;base64," + b"QUJD" * (LONG_NBYTES // 2)


@for_each("size", [99_999, 262_144, 10 << 20])
@for_each("counted_first", [True, False])
def test_a_long_file_is_cut_out(size: int, counted_first: bool) -> None:
    body = b'{"a": [1, "b\\"", "' + FILE + b'"], "c": "' + FILE[:-4] + b'", "d": "e"}'
    left, scan = scanned(body, size, counted_first=counted_first)
    if size > len(body):
        assert left == body, "what came at once is decoded at once"
        return
    document = msgspec.json.decode(left)
    assert document["a"][:2] == [1, 'b"']
    assert document["d"] == "e"
    names = [document["a"][2], document["c"]]
    assert all(is_cut(name) and name.startswith("data:image/png;base64,QUJD") and len(name) < 128 for name in names)
    assert [scan.long_texts[name] for name in names] == [FILE, FILE[:-4]]


@for_each("size", [99_999, 100_000, 100_001])
@for_each("counted_first", [True, False])
def test_slashes_and_lines_of_a_long_file_may_be_escaped(size: int, counted_first: bool) -> None:
    escaped = b'"' + (b"QU\\/D" * 19 + b"\\r\\n") * (LONG_NBYTES // 50) + b'"'
    left, scan = scanned(escaped, size, counted_first=counted_first)
    assert [*scan.long_texts] == [msgspec.json.decode(left)]
    assert [*scan.long_texts.values()] == [b"QU/D" * 19 * (LONG_NBYTES // 50)]


LONG_TEXTS = {
    "words": b"ab cd " * (LONG_NBYTES // 5),
    "escapes": b"ab\\u00e9" * (LONG_NBYTES // 5),
    "quotes": b'ab\\"' * (LONG_NBYTES // 3),
    "words after a while": b"a" * 2 * LONG_NBYTES + b" " + b"a" * LONG_NBYTES,
}


@for_each("text", LONG_TEXTS.values(), ids=LONG_TEXTS)
@for_each("size", [9_999, 65_536])
def test_a_long_text_that_is_no_file_is_refused(text: bytes, size: int) -> None:
    with pytest.raises(ApiError) as raised:
        scanned(b'["' + text + b'"]', size)
    assert (raised.value.status, raised.value.code) == (400, "text_too_long")


def test_a_text_as_long_as_one_may_be_is_taken() -> None:
    body = b'["' + b"ab\\n " * (LONG_NBYTES // 5) + b'"]'
    assert scanned(body, 65_536)[0] == body


def test_what_is_never_closed_is_left_to_the_decoder() -> None:
    left, scan = scanned(b'["' + FILE, 65_536)
    assert len(left) < 200
    assert len(scan.long_texts) == 1
    assert scanned(b'["ab\\', 2)[0] == b'["ab\\'


def test_the_midst_of_a_text_is_not_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    scan = BodyScan()
    before = b"[1," + b" " * LONG_NBYTES
    assert scan.add(before + b'"ab') == before + b'"'
    monkeypatch.setattr(body_scan, "_STRING", None)
    monkeypatch.setattr(body_scan, "_REST_OF_STRING", None)
    assert scan.add(b"ab,[]" * 1000) == b""
