"""What fingerprints of all kinds have in common: what they are, what they do to what they are made of, and what is none."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shmring.engine.fingerprints.clips import fingerprint_clip
from shmring.engine.fingerprints.pictures import fingerprint_picture
from shmring.engine.fingerprints.sounds import fingerprint_sound
from shmring.engine.fingerprints.texts import fingerprint_text
from shmring.engine.fingerprints.vectors import FINGERPRINT_SIZE
from tests.tables import for_each

Describe = Callable[[Any], torch.Tensor]

SILENCE = math.log(1e-10)


def noise(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def spectrogram(frames: int) -> torch.Tensor:
    return torch.randn(frames, 80, generator=torch.Generator().manual_seed(1)) * 3 - 5


def zeros(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(*shape, **({"dtype": torch.uint8} | options))


def floats(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(*shape, **options)


def clip_at(timestamps_s: list[float], duration_s: float) -> Describe:
    return lambda frames: fingerprint_clip(frames, timestamps_s, duration_s)


def evenly(frames: torch.Tensor) -> torch.Tensor:
    return fingerprint_clip(frames, [float(index) for index in range(len(frames))], float(len(frames)))


SIZES = [(1, 1), (1, 2), (2, 1), (1, 777), (777, 1), (3, 5), (96, 96), (97, 95), (40_000, 3), (3, 40_000)]
TIMES: list[tuple[list[float], float]] = [
    *(([0.0], 0.0), ([5.0], 0.0), ([0.0], 10.0), ([0.0, 0.0, 0.0], 0.0), ([1.0, 2.0, 3.0], 0.5), ([0.0, 1e300], 1e300)),
]
LEVELS = [SILENCE, -1e30, -3.4e38, 0.0, 20.0, 3.4e38]


@for_each(
    ("describe", "thing"),
    [
        *((fingerprint_picture, noise(*size, 3)) for size in SIZES),
        *((fingerprint_picture, torch.tensor(colour).byte().repeat(40, 60, 1)) for colour in ([0] * 3, [255] * 3, [0, 0, 255])),
        *((fingerprint_sound, spectrogram(frames)) for frames in (1, 2, 3, 7, 8, 50, 3000)),
        *((fingerprint_sound, torch.full((frames, 80), level)) for frames in (1, 300) for level in LEVELS),
        (fingerprint_sound, torch.full((8000,), -3.4e38).index_fill(0, torch.tensor([4040]), 3.4e38).view(100, 80)),
        *((clip_at(*times), noise(len(times[0]), *size, 3)) for times in TIMES for size in ((1, 1), (3, 50), (120, 90))),
        *(
            (fingerprint_text, text)
            for text in ("a", "é", "狗", "👩‍👩‍👧", ".", "\ud800", "a b", "\0", "x" * 100_000, "ab " * 30_000)
        ),
    ],
    ids=lambda value: str(getattr(value, "shape", ""))[:40],
)
def test_anything_gives_a_unit_vector(describe: Describe, thing: Any) -> None:
    fingerprint = describe(thing)
    assert (fingerprint.shape, fingerprint.dtype) == ((FINGERPRINT_SIZE,), torch.float32)
    assert FINGERPRINT_SIZE == 512
    assert math.isclose(float(fingerprint.norm()), 1, abs_tol=1e-6)


@for_each(
    ("describe", "thing", "other"),
    [
        (fingerprint_picture, noise(96, 96, 3), noise(64, 64, 3)),  # which are as large as a thumbnail, and not
        (fingerprint_picture, noise(211, 307, 3), noise(64, 64, 3)),
        (fingerprint_sound, spectrogram(500), spectrogram(77)),
        (evenly, noise(3, 96, 96, 3), noise(2, 20, 20, 3)),
        (fingerprint_text, "the same", "another"),
    ],
)
def test_what_is_described_is_only_read_and_shares_nothing_with_a_fingerprint(
    describe: Describe, thing: Any, other: Any
) -> None:
    """Nor do fingerprints with one another; and equal things give equal bits."""
    untouched = thing.clone() if isinstance(thing, torch.Tensor) else thing
    fingerprint = describe(thing)
    kept = fingerprint.clone()
    if isinstance(thing, torch.Tensor):
        assert torch.equal(thing, untouched)
        thing.zero_()
    describe(other)
    assert torch.equal(fingerprint, kept)
    fingerprint.zero_()
    assert torch.equal(describe(untouched), kept)


@for_each(
    ("describe", "view"),
    [
        (fingerprint_picture, noise(300, 300, 3)[10:250:2, 20:200]),
        (fingerprint_picture, noise(3, 120, 180).permute(1, 2, 0)),
        (fingerprint_sound, spectrogram(500)[::2]),
        (fingerprint_sound, spectrogram(80).T),
    ],
)
def test_a_view_that_is_not_contiguous_is_described_as_it_is(describe: Describe, view: torch.Tensor) -> None:
    assert not view.is_contiguous()
    assert float(describe(view) @ describe(view.contiguous())) > 0.99999
    assert view.dtype != torch.uint8 or torch.equal(describe(view), describe(view.contiguous()))


@for_each(
    ("describe", "shape", "thing", "got"),
    [
        *(
            (fingerprint_picture, "uint8 of shape (height, width, 3)", thing, got)
            for thing, got in (
                (zeros(8, 8), "torch.uint8 of shape (8, 8) on cpu"),
                (zeros(1, 8, 8, 3), "shape (1, 8, 8, 3)"),
                (zeros(()), "shape ()"),
                (zeros(3, 8, 8), "shape (3, 8, 8)"),
                (zeros(8, 8, 4), "shape (8, 8, 4)"),
                (floats(8, 8, 3), "torch.float32 of shape (8, 8, 3)"),
                (zeros(8, 8, 3, dtype=torch.int8), "torch.int8"),
                (zeros(0, 8, 3), "shape (0, 8, 3)"),
                (zeros(8, 0, 3), "shape (8, 0, 3)"),
                (zeros(8, 8, 3, device="meta"), "on meta"),
            )
        ),
        *(
            (evenly, "uint8 of shape (frames, height, width, 3)", thing, got)
            for thing, got in (
                (zeros(8, 8, 3), "torch.uint8 of shape (8, 8, 3) on cpu"),
                (zeros(2, 3, 8, 8), "shape (2, 3, 8, 8)"),
                (floats(2, 8, 8, 3), "torch.float32"),
                (zeros(0, 8, 8, 3), "shape (0, 8, 8, 3)"),
                (zeros(2, 0, 8, 3), "shape (2, 0, 8, 3)"),
                (zeros(2, 8, 8, 3, device="meta"), "on meta"),
            )
        ),
        *(
            (fingerprint_sound, "float32 of shape (frames, 80)", thing, got)
            for thing, got in (
                (floats(80), "torch.float32 of shape (80,) on cpu"),
                (floats(1, 5, 80), "shape (1, 5, 80)"),
                (floats(80, 100), "shape (80, 100)"),
                (floats(100, 128), "shape (100, 128)"),
                (floats(100, 80, dtype=torch.float64), "torch.float64"),
                (floats(100, 80, dtype=torch.int16), "torch.int16"),
                (floats(0, 80), "shape (0, 80)"),
                (floats(5, 80, device="meta"), "on meta"),
            )
        ),
    ],
)
def test_what_is_none_is_refused_with_what_was_expected_and_got(describe: Describe, shape: str, thing: Any, got: str) -> None:
    with pytest.raises(ValueError) as raised:
        describe(thing)
    expected, _, came = str(raised.value).partition("; got ")
    assert expected.startswith("expected ")
    assert shape in expected
    assert got in came
