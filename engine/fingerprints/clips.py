"""Clip fingerprints: the frames of a video in, a unit vector out, such that altered copies of a clip stay near it.

A frame is described as a picture (see :mod:`.pictures`), which takes care of other sizes, codecs and qualities; but of the
whole picture alone, since views around the middle lose part of how a movement goes on, and take time for each frame. Time is
taken relative to the clip's length, and fingerprints are interpolated between frames, so the frame rate does not matter. The
course of the frames' fingerprints over time is then broken into cosine waves:

- appearance: the slowest wave, which is their mean. What is seen, whenever it is seen.
- change: the next waves. They tell how the pictures follow each other, and vanish where nothing moves.

Each wave is turned into a space of its own and all are added up, so that 512 numbers hold them with little crosstalk.

Invariants:

- frames are only read, and the fingerprint shares no memory with them;
- a fingerprint is finite and of length one for every clip: appearance outweighs change, so they can't cancel out;
- at most `2 * _MOMENTS` frames are looked at, however many there are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Sequence

import numpy as np
import torch

from shmring.engine.fingerprints.pictures import WHOLE, fingerprint_picture
from shmring.engine.fingerprints.vectors import (
    Numbers,
    cosine_waves,
    normalise,
    normalise_above,
    place_in_space,
    product,
    tensor_from,
)

__all__ = ["FRAMES_LIMIT", "fingerprint_clip", "fingerprint_clip_in_steps"]

FRAMES_LIMIT = 4096
"""Frames that a clip may have: more than anybody needs who asks what a clip looks like, two minutes of every single one."""

# Each moment costs the fingerprints of up to two frames. Waves need two moments each at the least.
_MOMENTS = 16
_WAVES = 6

# Shares of the squared length; appearance must have more than half, see the invariants.
_APPEARANCE_SHARE = 0.55
_CHANGE_SHARE = 0.45

# Length of the change part below which it is mostly what codecs do to a still picture.
_CHANGE_FLOOR = 0.1


def fingerprint_clip(frames: torch.Tensor, timestamps_s: Sequence[float], duration_s: float) -> torch.Tensor:
    """Describes a clip by a unit vector; the cosine between two such vectors says how alike two clips are.

    Args:
        frames: uint8 of shape (frames, height, width, 3), RGB, in host memory, in order of time. It is only read, and may be a
            view of shared memory.
        timestamps_s: when each frame is shown, in seconds from the start.
        duration_s: of the whole clip, in seconds; where it is shorter than the timestamps say, they are believed.

    Returns:
        float32 of shape (`FINGERPRINT_SIZE`,) and Euclidean length one, in memory of its own.

    Raises:
        ValueError: `frames` is of another rank, channel count, dtype or device, empty or too many, or the times do not fit
            them.

    Source:
        Coskun, Sankur and Memon, "Spatio-Temporal Transform Based Video Hashing" (IEEE Transactions on Multimedia, 2006): the
        lowest cosine waves over time. Adding them up: see :func:`.vectors.place_in_space`.
    """
    steps = fingerprint_clip_in_steps(frames, timestamps_s, duration_s)
    while True:
        try:
            next(steps)
        except StopIteration as stopped:
            fingerprint: torch.Tensor = stopped.value
            return fingerprint


def fingerprint_clip_in_steps(
    frames: torch.Tensor, timestamps_s: Sequence[float], duration_s: float
) -> Generator[None, None, torch.Tensor]:
    """Returns what :func:`fingerprint_clip` does, and yields behind each frame, which takes a few milliseconds."""
    _check_clip(frames, timestamps_s, duration_s)
    moments = yield from _describe_moments(frames, timestamps_s, max(duration_s, timestamps_s[-1]))
    waves = math.sqrt(2) * product(cosine_waves(_WAVES, _MOMENTS), moments)
    appearance, *changes = (place_in_space(f"clip, wave {number}", wave) for number, wave in enumerate(waves))
    change = normalise_above(_CHANGE_FLOOR, np.sum(changes, axis=0))
    fingerprint = math.sqrt(_APPEARANCE_SHARE) * normalise(appearance) + math.sqrt(_CHANGE_SHARE) * change
    return tensor_from(normalise(fingerprint))


def _check_clip(frames: torch.Tensor, timestamps_s: Sequence[float], duration_s: float) -> None:
    is_clip = frames.dtype == torch.uint8 and frames.ndim == 4 and frames.shape[3] == 3
    if not is_clip or frames.device.type != "cpu" or frames.numel() == 0:
        raise ValueError(
            "expected a clip as uint8 of shape (frames, height, width, 3), not empty, on the cpu; "
            f"got {frames.dtype} of shape {tuple(frames.shape)} on {frames.device}"
        )
    if len(frames) > FRAMES_LIMIT:
        raise ValueError(f"a clip has {len(frames)} frames; at most {FRAMES_LIMIT} are described: take fewer of them")
    if len(timestamps_s) != len(frames):
        raise ValueError(f"expected one timestamp for each frame; got {len(timestamps_s)} for {len(frames)} frames")
    # What is not a number compares as false.
    in_order = all(earlier <= later for earlier, later in itertools.pairwise(timestamps_s))
    if not in_order or not 0 <= timestamps_s[0] <= timestamps_s[-1] < math.inf:
        raise ValueError("expected timestamps in seconds from the start, finite and in order of time; got others")
    if not 0 <= duration_s < math.inf:
        raise ValueError(f"expected a duration in seconds, finite and not negative; got {duration_s}")


def _describe_moments(frames: torch.Tensor, timestamps_s: Sequence[float], duration_s: float) -> Generator[None, None, Numbers]:
    """Returns what is seen at `_MOMENTS` even moments of a clip: shape (`_MOMENTS`, `FINGERPRINT_SIZE`)."""
    moments_s = (np.arange(_MOMENTS) + 0.5) * (duration_s / _MOMENTS)
    # Where between two frames each moment lies; before the first and after the last there are only these.
    positions = np.interp(moments_s, timestamps_s, np.arange(len(frames)))
    before = np.floor(positions).astype(np.int64)
    after = np.minimum(before + 1, len(frames) - 1)
    needed, places = np.unique(np.concatenate([before, after]), return_inverse=True)
    pictures = []
    for index in needed.tolist():
        pictures.append(fingerprint_picture(frames[index], [WHOLE]).numpy())
        yield
    described = np.stack(pictures).astype(np.float64)
    place_before, place_after = places.reshape(2, _MOMENTS)
    way = (positions - before)[:, None]
    moments: Numbers = described[place_before] * (1 - way) + described[place_after] * way
    return moments
