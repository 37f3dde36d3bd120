"""Sound fingerprints: a spectrogram in, a unit vector out, such that altered copies of a recording stay near it.

Everything starts from how far each cell of the spectrogram stands out from a floor 25 dB below the loudest cell. Measured so,
another gain changes nothing, noise well below the sound next to nothing, and silence is nought. A fingerprint has four parts:

- timbre: the cepstrum of the mean spectrum. It says what kind of sound it is, whenever it sounds.
- layout: which bands stand out in each of six stretches of time. Time is counted from the middle of what is heard, in widths
  of what is heard (its mean and standard deviation, weighted by how much sounds), so that silence before or after takes no
  place, and no threshold decides where a sound begins.
- movement: how the bands rise and fall together, and after one another. It does not depend on where in time anything lies,
  so cutting off a beginning leaves it, which shifts the whole layout.
- one constant, which is all there is of silence.

Movement compares every band with every other a little later, so that rising, falling and rhythms are told apart: a sweep
upwards is not one downwards.

Invariants:

- the spectrogram is only read, and the fingerprint shares no memory with it;
- a fingerprint is finite and of length one for every finite spectrogram, silence included;
- silent frames before or after change nothing but rounding; equal spectrograms give equal bits on one machine
  (see :mod:`.vectors`).
"""

from __future__ import annotations

import functools
import math
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from shmring.engine.fingerprints.vectors import (
    FINGERPRINT_SIZE,
    Numbers,
    cosine_waves,
    normalise,
    normalise_above,
    place_in_space,
    product,
    share_on_line,
    tensor_from,
)

__all__ = ["MEL_BANDS", "fingerprint_sound"]

Cells: TypeAlias = npt.NDArray[np.float32]
"""Of a spectrogram, of shape (frames, bands)."""

MEL_BANDS = 80
"""Bands of the spectrograms that are described."""

# 2 h 46 min at 100 frames a second. One float32 copy of that, which describing it takes, is 320 MB.
_FRAMES_LIMIT = 1_000_000

_SILENCE = math.log(1e-10)  # what spectrograms are floored at

# Noise 20 dB below speech lies mostly under it, in one band. Deeper floors let noise in, higher ones leave only vowels.
_DEPTH_DB = 25
_DEPTH = 10 ** (_DEPTH_DB / 10)

# More stretches tell more sounds apart and suffer more when a twentieth is cut off.
_STRETCHES = 6
_LAYOUT_BANDS = 40
_LAYOUT_SIZE = _STRETCHES * _LAYOUT_BANDS
# Stretches cover this many standard deviations to either side. An even sound reaches to the square root of three, 1.73.
_REACH = 1.5

# 40 ms: syllables and notes rise in it, and frames' own fluctuation is averaged out.
_STEP_FRAMES = 4
# A step later, and at the pace of notes and of syllables.
_LAGS_FRAMES = (4, 10, 25)
_MOVEMENT_BANDS = 8
_MOVEMENT_SIZE = len(_LAGS_FRAMES) * _MOVEMENT_BANDS**2

_TIMBRE_SIZE = MEL_BANDS - 1  # all but the mean
assert 1 + _TIMBRE_SIZE + _LAYOUT_SIZE + _MOVEMENT_SIZE == FINGERPRINT_SIZE

# Shares of the squared length. Timbre counts least, as all that one voice says agrees on it.
_TIMBRE_SHARE = 0.1
_LAYOUT_SHARE = 0.45
_MOVEMENT_SHARE = 0.45
_CONSTANT = 0.1

# Root mean square, in units of what the loudest cell stands out, below which a part is mostly noise.
_CONTRAST_FLOOR = 0.01

# Frames (10 ms each) of full sound below which there is next to nothing to divide by; far less than one.
_LEAST_SOUND = 1e-6

_FRAMES_AT_A_TIME = 4096  # as doubles they are 2.6 MB


def fingerprint_sound(log_mel: torch.Tensor) -> torch.Tensor:
    """Describes a sound by a unit vector; the cosine between two such vectors says how alike two sounds are.

    Args:
        log_mel: float32 of shape (frames, `MEL_BANDS`), in host memory, at least one frame: natural logarithm of the power in
            each band, 100 frames a second. It is only read, and may be a view of shared memory.

    Returns:
        float32 of shape (`FINGERPRINT_SIZE`,) and Euclidean length one, in memory of its own.

    Raises:
        ValueError: `log_mel` is of another rank, band count, dtype or device, empty, too long, or not finite.

    Source:
        Timbre: Davis and Mermelstein, "Comparison of Parametric Representations for Monosyllabic Word Recognition" (1980).
        Movement: Haitsma and Kalker, "A Highly Robust Audio Fingerprinting System" (ISMIR 2002), who compare neighbouring
        bands and frames, gathered as by McDermott and Simoncelli, "Sound Texture Perception via Statistics of the Auditory
        Periphery" (Neuron, 2011), who correlate bands.
    """
    _check_sound(log_mel)
    prominence = _stand_out(log_mel.numpy())
    loudness = prominence.mean(1).astype(np.float64)
    fingerprint = np.concatenate(
        [
            [_CONSTANT],
            math.sqrt(_TIMBRE_SHARE) * _describe_timbre(prominence, loudness),
            math.sqrt(_LAYOUT_SHARE) * _describe_layout(prominence, loudness),
            math.sqrt(_MOVEMENT_SHARE) * _describe_movement(prominence, loudness),
        ]
    )
    return tensor_from(normalise(place_in_space("sound", fingerprint)))


def _check_sound(log_mel: torch.Tensor) -> None:
    is_spectrogram = log_mel.dtype == torch.float32 and log_mel.ndim == 2 and log_mel.shape[1] == MEL_BANDS
    if not is_spectrogram or log_mel.device.type != "cpu" or log_mel.numel() == 0:
        raise ValueError(
            f"expected a log-mel spectrogram as float32 of shape (frames, {MEL_BANDS}), not empty, on the cpu; "
            f"got {log_mel.dtype} of shape {tuple(log_mel.shape)} on {log_mel.device}"
        )
    if len(log_mel) > _FRAMES_LIMIT:
        raise ValueError(f"a spectrogram has {len(log_mel)} frames; at most {_FRAMES_LIMIT} are described: split the recording")
    cells = log_mel.numpy()
    if not (np.isfinite(cells.min()) and np.isfinite(cells.max())):  # either is NaN where anything is
        raise ValueError("a log-mel spectrogram holds NaN or infinite values; floor the power before taking its logarithm")


def _stand_out(log_mel: Cells) -> Cells:
    """Returns how far each cell stands out from the floor: 0 is silence, 1 the loudest cell."""
    power = np.maximum(log_mel, np.float32(_SILENCE), order="C")  # the one copy; everything after happens in it
    loudest = power.max()
    power -= loudest
    np.exp(power, out=power)
    # What every cell has by the spectrogram's own floor is not heard.
    power -= np.exp(np.float32(_SILENCE) - loudest)
    np.maximum(power, 0, out=power)
    power *= _DEPTH
    np.log1p(power, out=power)
    power /= math.log1p(_DEPTH)
    return power


def _describe_timbre(prominence: Cells, loudness: Numbers) -> Numbers:
    spectrum = product(loudness[None], prominence) / (loudness.sum() + _LEAST_SOUND)
    # The orthonormal DCT-II. Its first coefficient, the mean, is how even a sound is, of which noise changes most.
    cepstrum = math.sqrt(2 * MEL_BANDS) * product(cosine_waves(MEL_BANDS, MEL_BANDS)[1:], spectrum.T)
    return normalise_above(_floor_of(MEL_BANDS), cepstrum.reshape(-1))


def _describe_layout(prominence: Cells, loudness: Numbers) -> Numbers:
    middle, spread = _locate(loudness)
    stretch_frames = 2 * _REACH * spread / _STRETCHES
    position = (np.arange(0.5, len(loudness)) - middle) / stretch_frames + (_STRETCHES - 1) / 2
    # One more stretch at either end takes up what lies beyond.
    shares = share_on_line(position + 1, _STRETCHES + 2)[1:-1]
    # Where a stretch reaches beyond the recording there is silence: it is divided by its length, not by what there is of it.
    stretches = product(product(shares, prominence), _band_windows(_LAYOUT_BANDS).T) / stretch_frames
    return normalise_above(_floor_of(_LAYOUT_SIZE), (stretches - stretches.mean(0)).reshape(-1))


def _locate(loudness: Numbers) -> tuple[float, float]:
    """Returns mean and standard deviation of the time, in frames, at which there is sound; at least one for the latter."""
    time = np.arange(0.5, len(loudness))
    total = loudness.sum() + _LEAST_SOUND
    middle = float((loudness * time).sum() / total)
    return middle, math.sqrt((loudness * np.square(time - middle)).sum() / total) + 1


def _describe_movement(prominence: Cells, loudness: Numbers) -> Numbers:
    # With silence before and after, so that a beginning is a rise, and what is silent already changes nothing.
    margin = 2 * _STEP_FRAMES + max(_LAGS_FRAMES)
    bands = np.zeros((_MOVEMENT_BANDS, len(prominence) + 2 * margin), dtype=np.float32)
    for start in range(0, len(prominence), _FRAMES_AT_A_TIME):
        frames = prominence[start : start + _FRAMES_AT_A_TIME]
        bands[:, margin + start : margin + start + len(frames)] = product(frames, _band_windows(_MOVEMENT_BANDS).T).T
    # What comes in a step, less what was in the one before.
    steps = np.lib.stride_tricks.sliding_window_view(bands, _STEP_FRAMES, axis=1).sum(2) / _STEP_FRAMES
    change = steps[:, _STEP_FRAMES:] - steps[:, :-_STEP_FRAMES]
    total = loudness.sum() + _LEAST_SOUND
    parts = []
    for lag in _LAGS_FRAMES:
        together = product(change[:, :-lag], change[:, lag:].T) / total
        # Signed square roots, so that the loudest pair of bands does not decide alone.
        balanced = np.sign(together) * np.sqrt(np.abs(together))
        parts.append(normalise_above(_floor_of(_MOVEMENT_BANDS**2), balanced.reshape(-1)))
    return np.concatenate(parts) / math.sqrt(len(parts))


def _floor_of(count: int) -> float:
    """Returns the length of a part of `count` numbers of which each is at the contrast floor."""
    return _CONTRAST_FLOOR * math.sqrt(count)


@functools.cache
def _band_windows(count: int) -> Numbers:
    """Returns the weight of each mel band in each of `count` wider ones, which overlap, so that these average over theirs."""
    position = (np.arange(0.5, MEL_BANDS)) * (count / MEL_BANDS) - 0.5
    windows = share_on_line(position, count)
    windows /= windows.sum(1, keepdims=True)
    return windows
