"""Configuration: sizes as text, limits that are refused, options by name."""

from __future__ import annotations

import dataclasses
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmring.config import (
    ClientConfig,
    ClientOptions,
    RingConfig,
    RingOptions,
    WorkerConfig,
    WorkerOptions,
    configured,
)
from shmring.door import parse_nbytes, validate_name
from tests.tables import for_each


@for_each(
    ("size", "nbytes"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("4096B", 4096),
        ("1k", 1 << 10),
        ("1KiB", 1 << 10),
        ("1kB", 1000),
        ("64M", 64 << 20),
        ("64 MiB", 64 << 20),
        ("10MB", 10_000_000),
        ("4GiB", 4 << 30),
        ("4g", 4 << 30),
        ("1GB", 10**9),
        ("2TiB", 2 << 40),
        ("1T", 1 << 40),
        ("1tb", 10**12),
        ("1.5 GiB", 3 << 29),
        ("  7 MiB\n", 7 << 20),
    ],
)
def test_a_size_is_bytes_or_text_with_a_unit(size: int | str, nbytes: int) -> None:
    assert parse_nbytes(size) == nbytes


@given(st.integers(0, 2**60))
def test_a_large_size_as_text_loses_no_digit(nbytes: int) -> None:
    assert parse_nbytes(str(nbytes)) == parse_nbytes(f"{nbytes}B") == nbytes


@for_each("size", ["", "GiB", "-1", "1 2", "1,5GiB", "4 XiB", "1e9", "0x10", "1..5M", "nan", "inf", "4GiBs"])
def test_text_that_is_no_size_is_refused_by_name(size: str) -> None:
    with pytest.raises(ValueError, match="is not a size") as caught:
        parse_nbytes(size)
    assert repr(size) in str(caught.value)


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="negative: -1"):
        parse_nbytes(-1)


@for_each("size", [True, 1.5, None, b"1", [1]])
def test_a_size_of_another_type_is_refused(size: Any) -> None:
    with pytest.raises(TypeError, match=type(size).__name__):
        parse_nbytes(size)


@for_each("name", ["vision", "a", "7b", "qwen2.5-vl_7B", "x" * 64])
def test_a_name_can_be_part_of_a_path(name: str) -> None:
    assert validate_name(name) == name


@for_each("name", ["", ".", "..", ".hidden", "-x", "_x", "a/b", "a\0b", "a b", "a\n", "é", "x" * 65])
def test_a_name_that_could_not_be_part_of_a_path_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="can't name an engine"):
        validate_name(name)


@for_each("kind", [RingConfig, ClientConfig])
def test_sizes_are_stored_in_bytes(kind: Any) -> None:
    config = kind()
    for field in dataclasses.fields(config):
        if field.name.endswith("_nbytes"):
            value = getattr(config, field.name)
            assert value is None or isinstance(value, int), field.name


def test_sizes_given_as_text_are_stored_in_bytes() -> None:
    ring = RingConfig(slab_nbytes="4GiB", reply_nbytes="1MiB", max_lease_nbytes="2MiB", client_quota_nbytes="3MiB")
    assert (ring.slab_nbytes, ring.reply_nbytes) == (4 << 30, 1 << 20)
    assert (ring.max_lease_nbytes, ring.client_quota_nbytes) == (2 << 20, 3 << 20)
    assert ClientConfig(lease_nbytes="1MiB", inline_nbytes="2k").lease_nbytes == 1 << 20


@for_each("config", [RingConfig(), ClientConfig()])
def test_a_config_is_frozen(config: Any) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.debug = True


@for_each(
    ("kind", "option", "value"),
    [
        (RingConfig, "max_clients", 0),
        (RingConfig, "max_inflight", 0),
        (RingConfig, "max_tensors", -1),
        (RingConfig, "max_values", 1023),
        (RingConfig, "max_payload_nbytes", 4095),
        (RingConfig, "message_ring_nbytes", 8 << 10),
        (RingConfig, "message_ring_nbytes", 32 << 20),
        (RingConfig, "message_ring_nbytes", 48 << 10),
        (RingConfig, "slab_nbytes", -1),
        (RingConfig, "reply_nbytes", "lots"),
        (RingConfig, "backing", "shm"),
        (RingConfig, "inline_nbytes", (32 << 10) + 1),
        (ClientConfig, "lease_nbytes", 4095),
        (ClientConfig, "lease_idle_s", -0.1),
        (ClientConfig, "connect_timeout_s", -1),
    ],
)
def test_a_limit_that_can_not_work_is_refused(kind: Any, option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{option}|negative|is not a size"):
        kind(**{option: value})


@for_each(
    ("kind", "option", "value"),
    [
        (RingConfig, "max_clients", 1),
        (RingConfig, "max_tensors", 1),
        (RingConfig, "max_values", 1024),
        (RingConfig, "inline_nbytes", 32 << 10),
        (ClientConfig, "lease_nbytes", 4096),
        (ClientConfig, "lease_idle_s", 0),
    ],
)
def test_the_smallest_limit_that_can_work_is_accepted(kind: Any, option: str, value: Any) -> None:
    assert getattr(kind(**{option: value}), option) == value


def test_configured_starts_from_the_defaults() -> None:
    assert configured(RingConfig, None, {}) == RingConfig()
    assert configured(ClientConfig, None, {"debug": True}) == ClientConfig(debug=True)


def test_configured_overrides_a_given_config_and_validates_again() -> None:
    base = RingConfig(slab_nbytes="1MiB", max_clients=3)
    assert configured(RingConfig, base, {"slab_nbytes": "2MiB"}) == RingConfig(slab_nbytes=2 << 20, max_clients=3)
    with pytest.raises(ValueError, match="max_clients"):
        configured(RingConfig, base, {"max_clients": 0})
    assert base.slab_nbytes == 1 << 20


@for_each(("config", "options"), [(RingConfig, RingOptions), (ClientConfig, ClientOptions), (WorkerConfig, WorkerOptions)])
def test_type_checkers_know_the_options_that_there_are(config: type, options: type) -> None:
    assert get_type_hints(options) == get_type_hints(config)


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(TypeError, match="RingConfig has no option slabs, zebra"):
        configured(RingConfig, None, {"zebra": 1, "slabs": 2, "debug": True})
