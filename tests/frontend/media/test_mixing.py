"""Channels that are mixed to one: two that are each other's opposite are not silence."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from av.audio.layout import AudioLayout

from shmring.engine.inputs import SoundSpec
from shmring.frontend.media.errors import MediaError
from tests.frontend.media.test_audio import RATE, chirp, decoded
from tests.tables import for_each

Array = np.ndarray[Any, Any]
SECONDS = 2


def noise(scale: float, seed: int = 0) -> Array:
    return scale * np.random.default_rng(seed).normal(size=SECONDS * RATE).clip(-3, 3)


def apart(first: Array, second: Array) -> float:
    """How different two sounds are, as a share of the second one."""
    return float(np.sqrt(np.mean((first[: len(second)] - second) ** 2) / np.mean(second**2)))


@for_each(
    ("container", "codec", "rate"),
    [
        *(("wav", codec, RATE) for codec in ("pcm_u8", "pcm_s16le", "pcm_s24le", "pcm_f32le")),
        ("flac", "flac", RATE),
        ("wav", "pcm_s16le", 44_100),
        ("mp3", "libmp3lame", 44_100),
        ("ogg", "libopus", 48_000),
        ("mp4", "aac", 44_100),
    ],
)
def test_channels_that_are_opposites_sound_as_one_alone(
    recording_of: Callable[..., bytes], container: str, codec: str, rate: int
) -> None:
    sound = chirp(rate)
    alone, _ = decoded(recording_of(sound, rate, container, codec, "mono"))
    samples, _ = decoded(recording_of(np.stack([sound, -sound]), rate, container, codec, "stereo"))
    assert apart(samples, alone) < 0.1


@for_each(
    ("second", "offset"),
    [(-0.8 * chirp(RATE), 0), (noise(0.01) - chirp(RATE), 0), (-chirp(RATE), 0.4)],
    ids=["quieter", "with noise", "around another value than 0"],
)
def test_channels_that_are_nearly_opposites_sound_as_one_alone(
    recording_of: Callable[..., bytes], second: Array, offset: float
) -> None:
    sides = np.stack([chirp(RATE), second]) + offset
    samples, _ = decoded(recording_of(sides, RATE, "wav", "pcm_f32le", "stereo"))
    np.testing.assert_allclose(samples, sides[0], atol=1e-6)


def test_a_half_that_is_opposite_is_heard_as_well(recording_of: Callable[..., bytes]) -> None:
    second = chirp(RATE)
    second[RATE:] *= -1
    samples, _ = decoded(recording_of(np.stack([chirp(RATE), second]), RATE, "wav", "pcm_f32le", "stereo"))
    np.testing.assert_allclose(samples, chirp(RATE), atol=1e-6)


def test_speakers_on_channels_of_their_own_stay_for_a_moment_of_opposites(recording_of: Callable[..., bytes]) -> None:
    sides = np.stack([noise(0.1, 1), noise(0.1, 2)])
    sides[0, RATE:] = sides[1, :RATE] = 0
    moment = slice(RATE - 1500, RATE + 1500)
    sides[:, moment] = np.stack([noise(0.1, 3), -noise(0.1, 3)])[:, moment]
    samples, _ = decoded(recording_of(sides, RATE, "wav", "pcm_f32le", "stereo"))
    np.testing.assert_allclose(samples, sides.mean(axis=0), atol=1e-6)


@for_each("layout", ["stereo", "5.1"])
def test_channels_that_have_nothing_in_common_are_mixed(recording_of: Callable[..., bytes], layout: str) -> None:
    sides = np.stack([noise(0.1, seed) for seed in range(2 if layout == "stereo" else 6)])
    samples, _ = decoded(recording_of(sides, RATE, "wav", "pcm_f32le", layout))
    assert 0.3 < samples.std() / sides.std() < 0.8


SURROUND = ["3.0", "quad", "5.0", "5.1", "7.1"]
CANCELLING = [[1, -1], [1, -1, 1, -1], [0, 0, 0, 0, 1, -1], [0.5, 0.5, -1], [0.6, -0.5]]


@for_each("layout", SURROUND)
@for_each("weights", CANCELLING)
@for_each("codec", ["pcm_f32le", "pcm_s16le"])
def test_channels_of_surround_that_cancel_each_other_out_are_not_silence(
    recording_of: Callable[..., bytes], layout: str, weights: list[float], codec: str
) -> None:
    num_channels = AudioLayout(layout).nb_channels
    if len(weights) > num_channels:
        return
    sides = np.outer([*weights, *[0] * (num_channels - len(weights))], chirp(RATE))
    samples, _ = decoded(recording_of(sides, RATE, "wav", codec, layout))
    loudest = samples / np.abs(samples).max()
    assert np.abs(samples).max() > 0.2
    assert min(apart(loudest, 2 * sign * chirp(RATE)) for sign in (1, -1)) < 0.01


def test_a_mixture_of_numbers_of_channels(recording_of: Callable[..., bytes]) -> None:
    opposite = recording_of(np.stack([chirp(RATE), -chirp(RATE)]), RATE, "wav", "pcm_f32le", "stereo")
    usual = recording_of(np.stack([noise(0.1, seed) for seed in range(6)]), RATE, "wav", "pcm_f32le", "5.1")
    alone, _ = decoded(usual)
    samples, _ = decoded(opposite + usual)
    assert apart(samples, chirp(RATE)) < 1e-6
    assert apart(samples[SECONDS * RATE :], alone) < 1e-6


@for_each(("num_channels", "places"), [(5, 0x1F), (2, 0x600), (3, 0x700), (4, 0x1E), (7, 0x7F)])
def test_channels_in_places_that_nobody_mixes_are_mixed_as_the_usual_ones(num_channels: int, places: int) -> None:
    sound = np.repeat(chirp(RATE).astype("<f4")[:, np.newaxis], num_channels, axis=1)
    head = struct.pack("<HHIIHH", 0xFFFE, num_channels, RATE, 4 * RATE * num_channels, 4 * num_channels, 32)
    head += struct.pack("<HHI", 22, 32, places) + bytes.fromhex("0300000000001000800000aa00389b71")
    body = b"WAVEfmt " + struct.pack("<I", len(head)) + head + b"data" + struct.pack("<I", sound.nbytes) + sound.tobytes()
    samples, told = decoded(b"RIFF" + struct.pack("<I", len(body)) + body)
    assert apart(samples, chirp(RATE)) < 1e-5
    assert told.shortfall == ""


@for_each("value", [np.inf, np.nan, 1e30])
def test_opposites_that_are_no_numbers_are_refused(recording_of: Callable[..., bytes], value: float) -> None:
    samples = np.outer([1, -1], np.where(np.arange(RATE) % 2, value, -value))
    with pytest.raises(MediaError, match="samples that are no numbers, or far over full scale"):
        decoded(recording_of(samples, RATE, "wav", "pcm_f32le", "stereo"))


def test_silence_is_silence(recording_of: Callable[..., bytes]) -> None:
    samples, sound = decoded(recording_of(np.zeros((2, RATE)), RATE, "wav", "pcm_s16le", "stereo"))
    assert not samples.any()
    assert sound.duration_s == pytest.approx(1)


def test_a_spectrogram_of_opposites_is_that_of_one(recording_of: Callable[..., bytes]) -> None:
    spec = SoundSpec(form="log_mel", sample_rate=RATE)
    sound = chirp(RATE)
    alone, _ = decoded(recording_of(sound, RATE, "wav", "pcm_f32le"), spec)
    opposites, _ = decoded(recording_of(np.stack([sound, -sound]), RATE, "wav", "pcm_f32le", "stereo"), spec)
    np.testing.assert_allclose(opposites, alone, atol=1e-5)
