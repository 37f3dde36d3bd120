"""Copies past the cache: every width of stores, every alignment, and not a byte beside."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from shmring.memory import streaming
from shmring.memory.streaming import STREAMING_NBYTES, copier_for, streaming_width
from shmring.memory.tensors import make_packer

built = pytest.mark.skipif(streaming_width() == 0, reason="the extension was not built, or this processor can't stream")


@pytest.fixture
def width(request: pytest.FixtureRequest) -> Iterator[int]:
    yield streaming._streaming.limit_width(request.param)
    streaming._streaming.limit_width(64)


@built
@pytest.mark.parametrize("width", [16, 32, 64], indirect=True)
@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 1000, 4096, 100_001])
def test_what_is_copied_is_the_same_and_nothing_beside_it_changes(width: int, nbytes: int) -> None:
    source = np.random.default_rng(nbytes).integers(0, 256, nbytes + 256, np.uint8)
    target = np.empty(nbytes + 512, np.uint8)
    aligned = -int(target.ctypes.data) % 64 + 64
    for to in (0, 1, 17, 32, 63):
        for start in (0, 1, 16, 33, 63):
            target[:] = 0xAA
            streaming._streaming.copy(int(target.ctypes.data) + aligned + to, int(source.ctypes.data) + start, nbytes)
            written = slice(aligned + to, aligned + to + nbytes)
            np.testing.assert_array_equal(target[written], source[start : start + nbytes])
            target[written] = 0xAA
            assert (target == 0xAA).all(), (to, start)


@built
def test_stores_are_as_wide_as_the_processor_allows() -> None:
    assert streaming_width() in (16, 32, 64)
    assert streaming._streaming.limit_width(16) == 16
    assert streaming._streaming.limit_width(1 << 20) == streaming_width()


@built
@pytest.mark.parametrize("arguments", [(0, 0, -1), (0, 0), ("a", 0, 0), (0, 0, 1 << 70)])
def test_what_is_no_copy_is_refused(arguments: tuple[object, ...]) -> None:
    with pytest.raises((ValueError, TypeError, OverflowError)):
        streaming._streaming.copy(*arguments)  # type: ignore[arg-type, call-arg]


@built
def test_large_copies_are_streamed_and_small_ones_are_not() -> None:
    assert copier_for(STREAMING_NBYTES - 1) is ctypes.memmove
    assert copier_for(STREAMING_NBYTES) is streaming._streaming.copy


@pytest.mark.parametrize("processor_streams", [True, False])
def test_a_payload_arrives_with_and_without_streaming_stores(processor_streams: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not processor_streams:
        monkeypatch.setattr(streaming._streaming, "WIDTH", 0)
        assert streaming_width() == 0
        assert copier_for(1 << 40) is ctypes.memmove
    large = torch.arange(STREAMING_NBYTES // 4 + 3, dtype=torch.int32)
    payload = {"large": large, "view": large[1::2], "odd": torch.arange(77, dtype=torch.uint8), "array": np.arange(1001)}
    packed = make_packer(16, 1 << 16).pack(payload, 0, 1 << 16)
    region = np.zeros(packed.slot_nbytes, np.uint8)
    packed.copy_into(int(region.ctypes.data))
    for part in packed.parts:
        expected = part.source.contiguous().numpy() if isinstance(part.source, torch.Tensor) else part.source
        copied = region[part.offset : part.offset + part.nbytes]
        assert copied.tobytes() == expected.tobytes()
