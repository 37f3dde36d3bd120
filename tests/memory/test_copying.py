"""Copies past the cache and into it: every width of stores, every alignment, and not a byte beside."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from shmring.memory import _copying, copying
from shmring.memory.copying import Copy, cache_nbytes, copy_into_cache, copy_past_cache, last_level_cache_nbytes
from shmring.memory.tensors import make_packer

streams = pytest.mark.skipif(_copying.WIDTH == 0, reason="this processor has no streaming stores")

MIB = 1 << 20


@pytest.fixture
def width(request: pytest.FixtureRequest) -> Iterator[int]:
    yield _copying.limit_width(request.param)
    _copying.limit_width(64)


def check(copy: Copy, nbytes: int) -> None:
    """Copies from and to addresses of every kind."""
    source = np.random.default_rng(nbytes).integers(0, 256, nbytes + 256, np.uint8)
    target = np.empty(nbytes + 512, np.uint8)
    aligned = -int(target.ctypes.data) % 64 + 64
    for to in (0, 1, 17, 32, 63):
        for start in (0, 1, 16, 33, 63):
            target[:] = 0xAA
            copy(int(target.ctypes.data) + aligned + to, int(source.ctypes.data) + start, nbytes)
            written = slice(aligned + to, aligned + to + nbytes)
            np.testing.assert_array_equal(target[written], source[start : start + nbytes])
            target[written] = 0xAA
            assert (target == 0xAA).all(), (to, start)


SIZES = pytest.mark.parametrize(
    "nbytes", [0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 1000, 2047, 2048, 2049, 2112, 4096, 100_001]
)


@streams
@pytest.mark.parametrize("width", [16, 32, 64], indirect=True)
@SIZES
def test_what_is_copied_past_the_cache_is_the_same_and_nothing_beside_it_changes(width: int, nbytes: int) -> None:
    check(_copying.copy_past_cache, nbytes)


@SIZES
def test_what_is_copied_in_whole_lines_is_the_same_and_nothing_beside_it_changes(nbytes: int) -> None:
    check(_copying.copy_whole_lines, nbytes)


@streams
def test_stores_are_as_wide_as_the_processor_allows() -> None:
    assert _copying.WIDTH in (16, 32, 64)
    assert _copying.limit_width(16) == 16
    assert _copying.limit_width(1 << 20) == _copying.WIDTH


@pytest.mark.parametrize("copy", [_copying.copy_past_cache, _copying.copy_whole_lines])
@pytest.mark.parametrize("arguments", [(0, 0, -1), (0, 0), ("a", 0, 0), (0, 0, 1 << 70)])
def test_what_is_no_copy_is_refused(copy: Callable[..., None], arguments: tuple[object, ...]) -> None:
    with pytest.raises((ValueError, TypeError, OverflowError)):
        copy(*arguments)


def test_a_processor_that_is_slow_at_it_moves_no_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_fast, expected in ((True, _copying.copy_whole_lines), (False, ctypes.memmove)):
        monkeypatch.setattr(_copying, "moves_whole_lines", lambda is_fast=is_fast: is_fast)
        assert copy_into_cache.__wrapped__() is expected


def test_a_processor_without_streaming_stores_copies_with_memcpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_copying, "WIDTH", 0)
    assert copy_past_cache() is ctypes.memmove


def test_what_a_cache_holds_is_what_the_kernel_says_and_no_more_than_one_machine_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < cache_nbytes() <= last_level_cache_nbytes()
    monkeypatch.setattr(copying, "last_level_cache_nbytes", lambda: 480 * MIB)
    assert cache_nbytes() == 32 * MIB
    monkeypatch.setattr(copying, "last_level_cache_nbytes", lambda: 8 * MIB)
    assert cache_nbytes() == 8 * MIB


@pytest.mark.parametrize("large_nbytes", [MIB, 5 * MIB])
@pytest.mark.parametrize("processor_streams", [True, False])
def test_a_payload_arrives_with_and_without_streaming_stores(
    processor_streams: bool, large_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not processor_streams:
        monkeypatch.setattr(_copying, "WIDTH", 0)
    large = torch.arange(large_nbytes // 4 + 3, dtype=torch.int32)
    payload = {"large": large, "view": large[1::2], "odd": torch.arange(77, dtype=torch.uint8), "array": np.arange(1001)}
    packed = make_packer(16, 1 << 16).pack(payload, 0, 1 << 16)
    region = np.zeros(packed.slot_nbytes, np.uint8)
    packed.copy_into(int(region.ctypes.data))
    for part in packed.parts:
        expected = part.source.contiguous().numpy() if isinstance(part.source, torch.Tensor) else part.source
        copied = region[part.offset : part.offset + part.nbytes]
        assert copied.tobytes() == expected.tobytes()
