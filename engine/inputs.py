"""The inputs that an executor takes, so that frontends prepare them. This file does not import torch, because the processes
that decode media don't."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["InputSpec", "PictureSpec", "SoundSpec", "VideoSpec"]


class PictureSpec(msgspec.Struct, frozen=True):
    """How pictures are prepared.

    Attributes:
        max_pixels: larger pictures are scaled down to it, keeping their aspect ratio; None: as they are.
    """

    max_pixels: int | None = None


class SoundSpec(msgspec.Struct, frozen=True):
    """How recordings are prepared.

    Attributes:
        form: ``"waveform"`` (:class:`shmring.engine.protocol.Waveform`) or ``"log_mel"``
            (:class:`shmring.engine.protocol.Spectrogram`).
        sample_rate: they are resampled to it, in Hz.
        mel_bands: of a spectrogram.
    """

    form: Literal["waveform", "log_mel"] = "log_mel"
    sample_rate: int = 16_000
    mel_bands: int = 80


class VideoSpec(msgspec.Struct, frozen=True):
    """How clips are prepared.

    Attributes:
        num_frames: frames taken, evenly over the clip; of shorter clips all.
        max_pixels: larger frames are scaled down to it, keeping their aspect ratio; None: as they are.
    """

    num_frames: int = 16
    max_pixels: int | None = None


class InputSpec(msgspec.Struct, frozen=True):
    """The inputs that an executor takes; it refuses those that are None (False). ``tokens`` are those of a text to be embedded.
    With ``checksum``, frontends add one to each medium. With ``keys``, they add its key, if they keep media."""

    text: bool = False
    tokens: bool = False
    picture: PictureSpec | None = None
    sound: SoundSpec | None = None
    video: VideoSpec | None = None
    checksum: bool = False
    keys: bool = False
