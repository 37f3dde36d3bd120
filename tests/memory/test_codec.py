"""Payloads are encoded and decoded in C as msgspec does it: the same bytes for any value, the same value for any bytes."""

from __future__ import annotations

import datetime
import enum
import math
import struct
from collections import OrderedDict, namedtuple
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmring.core.compiled import MAX_DEPTH, check_payload
from shmring.errors import RemoteProtocolError
from shmring.memory.tensors import make_decoder, make_packer
from tests.model.inside import Reply, decode_content, read_record
from tests.tables import for_each

_PACKER = make_packer(16, 1 << 24)
_DECODER = make_decoder()
_REPLY = b"\x94\x67\x01\xc0"  # [103, 1, nil, payload]


class Color(enum.Enum):
    RED = "red"


class Number(enum.IntEnum):
    SEVEN = 7


class Point(msgspec.Struct):
    x: int
    y: float


Header = namedtuple("Header", ["sequence", "phase"])  # a tuple is what is tested

_NUMBERS = st.one_of(
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.sampled_from([sign * (1 << bits) + more for bits in range(64) for sign in (1, -1) for more in (-1, 0, 1)]),
).filter(lambda number: -(1 << 63) <= number < 1 << 64)
_LENGTHS = st.sampled_from([0, 1, 15, 16, 31, 32, 255, 256, 65535, 65536])
_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    _NUMBERS,
    st.floats(allow_nan=False),
    st.text(max_size=40),
    st.binary(max_size=40),
    _LENGTHS.map(lambda length: "x" * length),
    _LENGTHS.map(bytes),
)
_OTHERS = st.sampled_from(
    [
        datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC), Color.RED, Number.SEVEN, Point(1, 2.0), {3}, bytearray(b"abc"),
        OrderedDict(b=1, a=[2]), {1: "one", "two": 2}, {(1, 2): 3}, msgspec.msgpack.Ext(7, b"abc"), Header(1, {"x": 2}),
    ]
)  # fmt: skip


def _containers(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(values, max_size=20),
        st.lists(values, max_size=20).map(tuple),
        st.dictionaries(st.text(max_size=40), values, max_size=20),
        st.tuples(values, values).map(lambda pair: Header(*pair)),
    )


_VALUES = st.recursive(_SCALARS | _OTHERS, _containers, max_leaves=40)


def decoded(payload: bytes) -> Any:
    """What the decoder makes of a payload that has been checked, as every payload is."""
    reply = read_record(_REPLY + payload, 16, from_engine=True)
    assert isinstance(reply, Reply)
    value, viewed = decode_content(_DECODER, reply.content, 1, None, None)  # it has no tensors
    assert viewed == []
    return value


@given(value=_VALUES)
def test_what_is_encoded_is_what_msgspec_encodes(value: object) -> None:
    payload = _PACKER.pack(value, 0, 1 << 16).payload
    assert payload == msgspec.msgpack.encode(value)
    assert _same(decoded(payload), msgspec.msgpack.decode(payload))


@given(payload=_VALUES.map(msgspec.msgpack.encode), place=st.integers(0, 1 << 20), byte=st.integers(0, 255))
def test_what_is_decoded_is_what_msgspec_decodes_whatever_the_bytes(payload: bytes, place: int, byte: int) -> None:
    changed = bytearray(payload)
    changed[place % len(changed)] = byte
    _compare(bytes(changed))


@given(payload=st.binary(min_size=1, max_size=30))
def test_any_bytes_are_decoded_as_msgspec_decodes_them(payload: bytes) -> None:
    _compare(payload)


def _compare(payload: bytes) -> None:
    try:
        tensors = check_payload(payload, 16)
    except RemoteProtocolError:
        return  # nothing decodes what has not been checked
    if tensors:
        return
    try:
        expected = msgspec.msgpack.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        with pytest.raises(RemoteProtocolError):
            decoded(payload)
        return
    except (TypeError, ValueError, OverflowError) as error:  # a map as the key of a map, a time that Python can't hold
        with pytest.raises((type(error), RemoteProtocolError)):
            decoded(payload)
        return
    assert _same(decoded(payload), expected)


def _same(one: object, other: object) -> bool:
    """Whether two values are equal and of the same types; nan is nan."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float) and isinstance(other, float):
        return (one == other and math.copysign(1, one) == math.copysign(1, other)) or (one != one and other != other)
    if isinstance(one, dict) and isinstance(other, dict):
        return _same(list(one.items()), list(other.items()))
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, msgspec.msgpack.Ext) and isinstance(other, msgspec.msgpack.Ext):
        return (one.code, bytes(one.data)) == (other.code, bytes(other.data))
    return one == other


@for_each("short", [0.0, -1.5, math.inf, 1e-45, 3.0e38])
def test_short_floats_which_msgspec_does_not_write_are_read(short: float) -> None:
    payload = b"\xca" + struct.pack(">f", short)
    assert _same(decoded(payload), msgspec.msgpack.decode(payload))


@for_each("container", [lambda inner: [inner], lambda inner: {"k": inner}, lambda inner: (inner,)])
def test_payloads_may_be_nested_as_deeply_as_the_peer_takes_it(container: Any) -> None:
    value: Any = 1
    for _ in range(MAX_DEPTH - 1):
        value = container(value)
    payload = _PACKER.pack(value, 0, 1 << 16).payload
    assert payload == msgspec.msgpack.encode(value)
    assert decoded(payload) == msgspec.msgpack.decode(payload)
    with pytest.raises(TypeError, match="nested"):
        _PACKER.pack(container(value), 0, 1 << 16)


@for_each("data", [bytes(20), bytes([0, 0, 1, 0, *bytes(8), 1, *bytes(7)]), b"x"])
def test_an_extension_that_stands_for_tensors_can_not_be_sent_as_such(data: bytes) -> None:
    with pytest.raises(TypeError, match="extension"):
        _PACKER.pack([1, msgspec.msgpack.Ext(83, data)], 0, 1 << 16)


def test_what_refers_to_itself_can_not_be_sent() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(TypeError):
        _PACKER.pack(value, 0, 1 << 16)


@for_each("value", [1 << 64, -(1 << 63) - 1, "\ud800", [1, {"a": "\udfff"}], {"\ud800": 1}])
def test_what_msgpack_can_not_say_is_an_error_for_both(value: object) -> None:
    with pytest.raises((TypeError, OverflowError, UnicodeEncodeError)):
        msgspec.msgpack.encode(value)
    with pytest.raises((TypeError, OverflowError, UnicodeEncodeError)):
        _PACKER.pack(value, 0, 1 << 16)


def test_keys_that_came_before_are_not_mistaken_for_others() -> None:
    """Keys of the same length, first and last letter share a place among those that are kept."""
    keys = [f"k{middle}y" for middle in "abcdefgh"] + ["", "é", "e\u0301", "k" * 32, "k" * 33]
    for _ in range(2):
        for key in keys:
            assert decoded(msgspec.msgpack.encode({key: 1})) == {key: 1}
