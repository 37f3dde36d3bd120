"""Log-mel spectrograms: the same numbers as the plain formula gives, however the samples arrive."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from shmring.frontend.media.mel import LogMelWriter, mel_filters, num_mel_frames
from tests.tables import for_each

RATE = 16_000
Array = np.ndarray[Any, Any]


def spectrogram(samples: Array, rate: int = RATE, bands: int = 80, piece: int | None = None) -> Array:
    target = np.full((num_mel_frames(len(samples), rate), bands), np.nan, np.float32)
    writer = LogMelWriter(target, rate)
    for start in range(0, len(samples), piece or len(samples)):
        writer.write(samples[start : start + (piece or len(samples))].astype(np.float32))
    writer.finish()
    assert writer.length == len(target)
    return target


def by_the_formula(samples: Array) -> Array:
    """In double precision, a window at a time."""
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 400)
    starts = range(0, len(samples) - 399, 160)
    power = np.stack([np.abs(np.fft.rfft(samples[start : start + 400] * window, 512)) ** 2 for start in starts])
    return np.log(np.maximum(power @ mel_filters(RATE, 80).astype(np.float64), 1e-10))


def noise(num_samples: int) -> Array:
    return np.random.default_rng(0).normal(0, 0.1, num_samples)


def test_it_is_what_the_formula_says() -> None:
    samples = noise(5 * RATE)
    np.testing.assert_allclose(spectrogram(samples), by_the_formula(samples), atol=1e-3)


@for_each("piece", [1, 159, 160, 161, 400, 1024, 50_000])
def test_it_does_not_matter_in_which_pieces_samples_come(piece: int) -> None:
    samples = noise(4000 if piece == 1 else 60_000)
    np.testing.assert_allclose(spectrogram(samples, piece=piece), spectrogram(samples), atol=1e-5)


def test_a_tone_is_in_its_band() -> None:
    edges = [1000 * (6.4 ** ((mel - 15) / 27)) if mel > 15 else mel * 1000 / 15 for mel in np.linspace(0, 45.245, 82)]
    for band in (2, 20, 50, 78):
        tone = np.sin(2 * np.pi * edges[band + 1] * np.arange(RATE) / RATE)
        assert set(spectrogram(tone).argmax(axis=1)) == {band}


def test_twice_as_loud_is_log_4_more() -> None:
    samples = noise(RATE)
    np.testing.assert_allclose(spectrogram(2 * samples) - spectrogram(samples), math.log(4), atol=1e-3)


def test_silence_is_the_floor() -> None:
    np.testing.assert_allclose(spectrogram(np.zeros(RATE)), math.log(1e-10), rtol=1e-6)


@for_each(("num_samples", "frames"), [(1, 1), (399, 1), (400, 1), (559, 1), (560, 2), (16_000, 98)])
def test_there_is_a_row_for_each_window_that_fits(num_samples: int, frames: int) -> None:
    assert num_mel_frames(num_samples, RATE) == frames
    assert spectrogram(noise(num_samples)).shape == (frames, 80)


def test_what_is_shorter_than_a_window_is_followed_by_silence() -> None:
    samples = noise(100)
    np.testing.assert_allclose(spectrogram(samples), by_the_formula(np.pad(samples, (0, 300))), atol=1e-3)


@for_each(("rate", "bands"), [(16_000, 80), (16_000, 128), (8_000, 80), (48_000, 64), (44_100, 1), (22_050, 512)])
def test_no_band_is_empty_and_none_is_beyond_half_the_rate(rate: int, bands: int) -> None:
    filters = mel_filters(rate, bands)
    assert filters.shape[1] == bands
    assert (filters.sum(axis=0) > 0).all()
    assert (filters >= 0).all()
    assert np.isfinite(spectrogram(noise(rate), rate, bands)).all()


@for_each("bands", [0, 513])
def test_an_absurd_number_of_bands_is_refused(bands: int) -> None:
    with pytest.raises(ValueError, match="1 to 512 mel bands"):
        mel_filters(RATE, bands)
