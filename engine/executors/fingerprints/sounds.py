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
- silent frames before or after change nothing but rounding; equal spectrograms give equal bits on one machine.
"""

from __future__ import annotations

import functools
import math

import torch
from torch.nn import functional

from engine.executors.fingerprints.vectors import (
    FINGERPRINT_SIZE,
    cosine_waves,
    count_up_to,
    normalise_above,
    place_in_space,
    share_on_line,
)

__all__ = ["MEL_BANDS", "fingerprint_sound"]

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
    prominence = _stand_out(log_mel)
    loudness = prominence.mean(1)
    fingerprint = torch.cat(
        [
            torch.full((1,), _CONSTANT, device="cpu"),
            math.sqrt(_TIMBRE_SHARE) * _describe_timbre(prominence, loudness),
            math.sqrt(_LAYOUT_SHARE) * _describe_layout(prominence, loudness),
            math.sqrt(_MOVEMENT_SHARE) * _describe_movement(prominence, loudness),
        ]
    )
    return functional.normalize(place_in_space("sound", fingerprint), dim=0)


def _check_sound(log_mel: torch.Tensor) -> None:
    is_spectrogram = log_mel.dtype == torch.float32 and log_mel.ndim == 2 and log_mel.shape[1] == MEL_BANDS
    if not is_spectrogram or log_mel.device.type != "cpu" or log_mel.numel() == 0:
        raise ValueError(
            f"expected a log-mel spectrogram as float32 of shape (frames, {MEL_BANDS}), not empty, on the cpu; "
            f"got {log_mel.dtype} of shape {tuple(log_mel.shape)} on {log_mel.device}"
        )
    if len(log_mel) > _FRAMES_LIMIT:
        raise ValueError(f"a spectrogram has {len(log_mel)} frames; at most {_FRAMES_LIMIT} are described: split the recording")
    if not all(extreme.isfinite() for extreme in log_mel.aminmax()):
        raise ValueError("a log-mel spectrogram holds NaN or infinite values; floor the power before taking its logarithm")


def _stand_out(log_mel: torch.Tensor) -> torch.Tensor:
    """Returns how far each cell stands out from the floor: 0 is silence, 1 the loudest cell."""
    power = log_mel.clamp(min=_SILENCE)  # the one copy; everything after happens in it
    loudest = power.max()
    power.sub_(loudest).exp_()
    # What every cell has by the spectrogram's own floor is not heard.
    power.sub_((_SILENCE - loudest).exp()).clamp_(min=0)
    return power.mul_(_DEPTH).log1p_().div_(math.log1p(_DEPTH))


def _describe_timbre(prominence: torch.Tensor, loudness: torch.Tensor) -> torch.Tensor:
    spectrum = loudness @ prominence / (loudness.sum() + _LEAST_SOUND)
    # The orthonormal DCT-II. Its first coefficient, the mean, is how even a sound is, of which noise changes most.
    cepstrum = math.sqrt(2 * MEL_BANDS) * (cosine_waves(MEL_BANDS, MEL_BANDS)[1:] @ spectrum)
    return normalise_above(_floor_of(MEL_BANDS), cepstrum)


def _describe_layout(prominence: torch.Tensor, loudness: torch.Tensor) -> torch.Tensor:
    middle, spread = _locate(loudness)
    stretch_frames = 2 * _REACH * spread / _STRETCHES
    position = ((count_up_to(len(loudness)) + 0.5) - middle) / stretch_frames + (_STRETCHES - 1) / 2
    # One more stretch at either end takes up what lies beyond.
    shares = share_on_line(position + 1, _STRETCHES + 2)[1:-1]
    # Where a stretch reaches beyond the recording there is silence: it is divided by its length, not by what there is of it.
    stretches = shares @ prominence @ _band_windows(_LAYOUT_BANDS).T / stretch_frames
    return normalise_above(_floor_of(_LAYOUT_SIZE), (stretches - stretches.mean(0)).flatten())


def _locate(loudness: torch.Tensor) -> tuple[float, float]:
    """Returns mean and standard deviation of the time, in frames, at which there is sound; at least one for the latter."""
    # In doubles: squares of a million frames.
    weights = loudness.to(torch.float64)
    time = count_up_to(len(loudness)).to(torch.float64) + 0.5
    total = float(weights.sum()) + _LEAST_SOUND
    middle = float(weights @ time) / total
    return middle, math.sqrt(float(weights @ (time - middle).square()) / total) + 1


def _describe_movement(prominence: torch.Tensor, loudness: torch.Tensor) -> torch.Tensor:
    bands = (prominence @ _band_windows(_MOVEMENT_BANDS).T).T
    # With silence before and after, so that a beginning is a rise, and what is silent already changes nothing.
    margin = 2 * _STEP_FRAMES + max(_LAGS_FRAMES)
    steps = functional.avg_pool1d(functional.pad(bands, (margin, margin)), _STEP_FRAMES, stride=1)
    change = steps[:, _STEP_FRAMES:] - steps[:, :-_STEP_FRAMES]
    total = loudness.sum() + _LEAST_SOUND
    parts = []
    for lag in _LAGS_FRAMES:
        together = change[:, :-lag] @ change[:, lag:].T / total
        # Signed square roots, so that the loudest pair of bands does not decide alone.
        balanced = together.sign() * together.abs().sqrt()
        parts.append(normalise_above(_floor_of(_MOVEMENT_BANDS**2), balanced.flatten()))
    return torch.cat(parts) / math.sqrt(len(parts))


def _floor_of(count: int) -> float:
    """Returns the length of a part of `count` numbers of which each is at the contrast floor."""
    return _CONTRAST_FLOOR * math.sqrt(count)


@functools.cache
def _band_windows(count: int) -> torch.Tensor:
    """Returns the weight of each mel band in each of `count` wider ones, which overlap, so that these average over theirs."""
    position = (count_up_to(MEL_BANDS) + 0.5) * (count / MEL_BANDS) - 0.5
    windows = share_on_line(position, count)
    return windows / windows.sum(1, keepdim=True)
