"""Altered copies of recordings must stay nearer to their original than to any other recording."""

from __future__ import annotations

import functools
import io
import itertools
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt
import pytest
import torch

from shmring.engine.fingerprints.sounds import fingerprint_sound
from tests.tables import for_each

REPOSITORY = Path(__file__).resolve().parents[3]
MEDIA = REPOSITORY / "frontend" / "samples"
SAMPLE_RATE = 16_000
SPEECH = sorted(path.stem for path in MEDIA.glob("speech-*.wav"))

# The worst margin measured is 0.30, and 0.13 of white noise that lost half its frequencies.
MARGIN = 0.2
MARGIN_WITHOUT_HALF = 0.1

SILENCE = math.log(1e-10)

Samples = npt.NDArray[np.float64]


# -- from samples to spectrograms, and through codecs ---------------------------------------------------------------------


@functools.cache
def mel_filters() -> Samples:
    """Returns 80 triangles over the 201 frequencies of a window of 25 ms, even in mel from 0 to 8 kHz."""
    edges_mel = np.linspace(0, 2595 * math.log10(1 + SAMPLE_RATE / 2 / 700), 82)
    edges = 700 * (10 ** (edges_mel / 2595) - 1)
    frequencies = np.arange(201) * SAMPLE_RATE / 400
    low, centre, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    triangles = np.minimum((frequencies - low) / (centre - low), (high - frequencies) / (high - centre)).clip(0)
    # The lowest are narrower than the distance of two frequencies; those between two take the nearest.
    empty = triangles.sum(1) == 0
    triangles[empty, np.abs(frequencies - centre[empty]).argmin(1)] = 1
    return triangles


def log_mel(samples: Samples) -> torch.Tensor:
    windows = np.lib.stride_tricks.sliding_window_view(samples, 400)[::160] * np.hanning(401)[:-1]
    power = np.abs(np.fft.rfft(windows)) ** 2 @ mel_filters().T
    return torch.from_numpy(np.log(np.maximum(power, 1e-10)).astype(np.float32))


def describe(samples: Samples) -> torch.Tensor:
    return fingerprint_sound(log_mel(samples))


def frame_of(samples: Samples, rate: int) -> av.AudioFrame:
    frame = av.AudioFrame.from_ndarray(samples[None].astype(np.float32), "flt", "mono")
    frame.sample_rate = rate
    return frame


def resample(frames: Iterable[av.AudioFrame], rate: int) -> Samples:
    resampler = av.AudioResampler("flt", "mono", rate)
    pieces = [piece for frame in [*frames, None] for piece in resampler.resample(frame)]
    return np.concatenate([piece.to_ndarray()[0] for piece in pieces]).astype(np.float64)


def read(file: str | io.BytesIO) -> Samples:
    with av.open(file) as container:
        return resample(container.decode(audio=0), SAMPLE_RATE)


def recode(samples: Samples, codec: str, container_format: str, rate: int, bit_rate: int) -> Samples:
    encoded = io.BytesIO()
    with av.open(encoded, "w", format=container_format) as container:
        stream = container.add_stream(codec, rate=rate, layout="mono", bit_rate=bit_rate)
        resampler = av.AudioResampler(stream.format, "mono", rate, stream.frame_size)
        for frame in [*resampler.resample(frame_of(samples, SAMPLE_RATE)), *resampler.resample(None)]:
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    encoded.seek(0)
    return read(encoded)


# -- recordings -----------------------------------------------------------------------------------------------------------


def seconds(duration_s: float) -> Samples:
    return np.arange(int(duration_s * SAMPLE_RATE)) / SAMPLE_RATE


def white_noise(count: int, seed: int = 1) -> Samples:
    return np.random.default_rng(seed).standard_normal(count)


def pink_noise(count: int, seed: int = 1) -> Samples:
    spectrum = np.fft.rfft(white_noise(count, seed))
    spectrum[0] = 0
    spectrum[1:] /= np.sqrt(np.arange(1, len(spectrum)))
    noise = np.fft.irfft(spectrum, count)
    return noise / noise.std()


def tone(frequency: float) -> Samples:
    return 0.5 * np.sin(2 * math.pi * frequency * seconds(3))


def sweep(start: float, end: float) -> Samples:
    time = seconds(3)
    return 0.5 * np.sin(2 * math.pi * (start * time + (end - start) * time**2 / 6))


def bursts(*times_s: float) -> Samples:
    samples = np.zeros(3 * SAMPLE_RATE)
    for index, time_s in enumerate(times_s):
        start = int(time_s * SAMPLE_RATE)
        samples[start : start + 1600] += 0.3 * white_noise(1600, index) * np.exp(-np.arange(1600) / 400)
    return samples


def melody(*semitones: int) -> Samples:
    """Returns notes above A3, of 0.3 s, plucked, with four harmonics."""
    time = seconds(0.3)
    frequencies = [220 * 2 ** (note / 12) for note in semitones]
    strings = [sum(0.3 / n * np.sin(2 * math.pi * n * frequency * time) for n in (1, 2, 3, 4)) for frequency in frequencies]
    return np.concatenate([string * np.exp(-3 * time) for string in strings])


@functools.cache
def recordings() -> dict[str, Samples]:
    return {
        **{name: read(str(MEDIA / f"{name}.wav")) for name in SPEECH},
        "low-tone": tone(440),
        "high-tone": tone(660),
        "trembling-tone": tone(800) * (1 + np.sin(2 * math.pi * 4 * seconds(3))) / 2,
        "rising": sweep(200, 4000),
        "falling": sweep(4000, 200),
        "even-bursts": bursts(0.1, 0.6, 1.1, 1.6, 2.1, 2.6),
        "grouped-bursts": bursts(0.1, 0.3, 1.1, 1.4, 2.2, 2.3),
        "scale": melody(0, 2, 4, 5, 7, 9, 11, 12, 7, 4),
        "scale-backwards": melody(12, 11, 9, 7, 5, 4, 2, 0, 4, 7),
        "song": melody(0, 0, 7, 7, 9, 9, 7, 5, 5, 4),
        "white-noise": 0.1 * white_noise(3 * SAMPLE_RATE, 7),
        "pink-noise": 0.1 * pink_noise(3 * SAMPLE_RATE, 8),
    }


@functools.cache
def excerpts() -> dict[str, Samples]:
    """Two seconds of speech every second, so that neighbours have half in common: the hardest to tell apart."""
    starts = [(name, start) for name in SPEECH for start in range(int(len(recordings()[name]) / SAMPLE_RATE) - 1)]
    return {f"{name}-{start}": recordings()[name][start * SAMPLE_RATE :][: 2 * SAMPLE_RATE] for name, start in starts}


INDEXES = {"recordings": recordings, "excerpts": excerpts}

Alteration = Callable[[Samples], Samples]


def add_noise(samples: Samples, noise: Callable[[int], Samples], ratio_db: float = 20) -> Samples:
    return samples + noise(len(samples)) * samples.std() / 10 ** (ratio_db / 20)


def pad(samples: Samples, before_s: float, after_s: float) -> Samples:
    return np.concatenate([np.zeros(int(before_s * SAMPLE_RATE)), samples, np.zeros(int(after_s * SAMPLE_RATE))])


def trim(samples: Samples, start: float, end: float) -> Samples:
    return samples[round(len(samples) * start) : round(len(samples) * (1 - end))]


def narrow(samples: Samples, rate: int) -> Samples:
    """Returns samples after a time at a lower sample rate, at which the higher frequencies get lost."""
    lower = resample([frame_of(samples, SAMPLE_RATE)], rate)
    return resample([frame_of(lower, rate)], SAMPLE_RATE)


ALTERATIONS: dict[str, Alteration] = {
    "white-noise-20-db-below": lambda samples: add_noise(samples, white_noise),
    "pink-noise-20-db-below": lambda samples: add_noise(samples, pink_noise),
    "white-noise-15-db-below": lambda samples: add_noise(samples, white_noise, 15),
    "a-tenth-as-loud": lambda samples: samples * 0.1,
    "three-times-as-loud": lambda samples: samples * 3,
    "clipped": lambda samples: (samples * 3).clip(-1, 1),
    "silence-before": lambda samples: pad(samples, 0.3, 0),
    "silence-after": lambda samples: pad(samples, 0, 0.3),
    "silence-around": lambda samples: pad(samples, 0.5, 0.5),
    "trimmed-start": lambda samples: trim(samples, 0.05, 0),
    "trimmed-end": lambda samples: trim(samples, 0, 0.05),
    "trimmed-twice": lambda samples: trim(samples, 0.05, 0.05),
    "mp3": lambda samples: recode(samples, "mp3", "mp3", 44_100, 64_000),
    "poor-mp3": lambda samples: recode(samples, "mp3", "mp3", 22_050, 32_000),
    "opus-in-ogg": lambda samples: recode(samples, "libopus", "ogg", 48_000, 24_000),
    "8-khz": lambda samples: narrow(samples, 8_000),
    "11-khz": lambda samples: narrow(samples, 11_025),
    "trimmed-quiet-mp3-noise": lambda samples: add_noise(
        recode(trim(samples, 0.025, 0.025) * 0.3, "mp3", "mp3", 44_100, 64_000), pink_noise
    ),
}


@pytest.fixture(scope="module")
def described() -> dict[str, dict[str, torch.Tensor]]:
    return {index: {name: describe(samples) for name, samples in make().items()} for index, make in INDEXES.items()}


def test_all_the_sample_recordings_are_there() -> None:
    assert len(SPEECH) == 4
    assert len(excerpts()) == 13


ENCODED = {"mp3", "poor-mp3", "opus-in-ogg", "trimmed-quiet-mp3-noise"}  # which takes a second for each index
SLOW = ENCODED - {"poor-mp3"}  # and the index that is easier
CASES = [
    pytest.param(alteration, index, id=f"{name}-{index}", marks=[pytest.mark.slow] * (name in SLOW or index == "recordings"))
    for name, alteration in ALTERATIONS.items()
    for index in INDEXES
]


@pytest.mark.parametrize(("alteration", "index"), CASES)
def test_altered_copy_is_nearest_to_its_original(
    alteration: Alteration, index: str, described: dict[str, dict[str, torch.Tensor]]
) -> None:
    for name, samples in INDEXES[index]().items():
        fingerprint = describe(alteration(samples))
        cosines = {other: float(fingerprint @ original) for other, original in described[index].items()}
        own = cosines.pop(name)
        margin = MARGIN_WITHOUT_HALF if alteration is ALTERATIONS["8-khz"] else MARGIN
        assert own - max(cosines.values()) > margin, name


# -- what the parts are for -----------------------------------------------------------------------------------------------


def cosine(spectrogram: torch.Tensor, other: torch.Tensor) -> float:
    return float(fingerprint_sound(spectrogram) @ fingerprint_sound(other))


def test_gain_cancels_out() -> None:
    speech = log_mel(recordings()[SPEECH[0]])
    assert cosine(speech, speech + math.log(9)) > 0.9999


def test_silent_frames_around_a_sound_change_nothing() -> None:
    speech = log_mel(recordings()[SPEECH[0]])
    silent = torch.full((200, 80), SILENCE)
    assert cosine(speech, torch.cat([silent, speech, silent])) > 0.9999


def test_what_lies_below_the_floor_is_silence_too() -> None:
    speech = log_mel(recordings()[SPEECH[0]])
    deeper = torch.where(speech <= speech.quantile(0.05), -100.0, speech)
    floored = torch.where(speech <= speech.quantile(0.05), SILENCE, speech)
    assert torch.equal(fingerprint_sound(deeper), fingerprint_sound(floored))


def test_backwards_is_another_sound() -> None:
    for name in ("rising", "scale", SPEECH[0]):
        spectrogram = log_mel(recordings()[name])
        assert cosine(spectrogram, spectrogram.flip(0)) < 0.8, name


def test_pitches_are_told_apart() -> None:
    tones = [log_mel(tone(frequency)) for frequency in (220, 440, 660, 880, 1320)]
    assert max(cosine(tone, other_tone) for tone, other_tone in itertools.combinations(tones, 2)) < 0.8


def test_silence_is_silence_however_long_and_nothing_else() -> None:
    silence = torch.full((300, 80), SILENCE)
    assert cosine(silence, silence[:1]) > 0.9999
    assert max(cosine(silence, log_mel(samples)) for samples in recordings().values()) < 0.3


def test_half_an_hour_needs_little_more_memory_than_one_copy(peak_nbytes: Callable[[Callable[[], object]], int]) -> None:
    spectrogram = torch.zeros(200_000, 80)
    spectrogram[::7] = 3
    assert peak_nbytes(lambda: fingerprint_sound(spectrogram)) < 2 * spectrogram.nbytes


@for_each("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(value: float) -> None:
    spectrogram = torch.zeros(100, 80)
    spectrogram[99, 79] = value
    with pytest.raises(ValueError, match="NaN or infinite"):
        fingerprint_sound(spectrogram)


def test_too_many_frames_are_refused_before_they_are_looked_at() -> None:
    with pytest.raises(ValueError, match=re.escape("1000001 frames; at most 1000000")):
        fingerprint_sound(torch.zeros(1).expand(1_000_001, 80))
