"""The inputs that an executor takes, so that frontends prepare them. This file does not import torch, because the processes
that decode media don't."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

__all__ = ["ITEM_NBYTES", "Feature", "InputSpec", "PictureSpec", "ProcessorSpec", "SoundSpec", "VideoSpec", "places_of"]

#: Bytes of a number, of the dtypes that features may have.
ITEM_NBYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int32": 4, "int64": 8}

_ALIGNMENT = 64  # bytes: a cache line, and a multiple of every number's size


class Feature(msgspec.Struct, frozen=True):
    """A tensor that an image processor makes of a picture: ``dtype`` is one of :data:`ITEM_NBYTES`.

    In a :class:`ProcessorSpec`, a first dimension of 0 stands for the number of the picture's patches.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


def places_of(features: Sequence[Feature]) -> tuple[list[int], int]:
    """Returns where the features of a picture begin in the memory that holds all of them, and how many bytes it has."""
    starts: list[int] = []
    end = 0
    for feature in features:
        starts.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
        end = starts[-1] + ITEM_NBYTES[feature.dtype] * math.prod(feature.shape)
    return starts, end


class ProcessorSpec(msgspec.Struct, frozen=True):
    """An image processor of Hugging Face transformers, for a picture at a time.

    Attributes:
        version: of transformers.
        name: of its class.
        settings: it is made with, as JSON.
        arguments: of its call, as JSON.
        dtype: that numbers with a point are brought to.
        needs_torch: whether it computes with torch. Without it, transformers takes a third of the time to import, and a fifth
            of the memory.
        features: what it makes, in their order.
    """

    version: str
    name: str
    settings: str
    arguments: str
    dtype: str
    needs_torch: bool
    features: tuple[Feature, ...] = ()


class PictureSpec(msgspec.Struct, frozen=True):
    """How pictures are prepared.

    Attributes:
        max_pixels: larger pictures are scaled down to it, keeping their aspect ratio; None: as they are.
        processor: makes :class:`shmring.engine.protocol.Features` of their pixels, wherever a frontend can run it. Elsewhere,
            pixels are sent.
    """

    max_pixels: int | None = None
    processor: ProcessorSpec | None = None


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
