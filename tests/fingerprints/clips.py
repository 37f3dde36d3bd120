"""Clips, altered: flights over the sample pictures, from left to right and ever closer."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import NamedTuple

import av
import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from shmring.engine.fingerprints.clips import fingerprint_clip
from tests.fingerprints.pictures import load_pictures
from tests.fingerprints.scores import Kind, score

_SIZE = (320, 240)
_RATE = 25
_FRAMES = 60
_TAKEN = 16  # frames that reach the executor unless it is told another number


class Clip(NamedTuple):
    """Frames, even in time."""

    frames: list[npt.NDArray[np.uint8]]
    rate: float


def score_clips() -> Iterator[Kind]:
    """Scores the flights over all sample pictures."""
    originals = [_fly(picture) for picture in load_pictures()]
    copies = {title: [_fingerprint(alter(clip)) for clip in originals] for title, alter in _ALTERATIONS.items()}
    yield score("Clips", [_fingerprint(clip) for clip in originals], copies)


def _fly(picture: Image.Image) -> Clip:
    frames = []
    for progress in np.linspace(0, 1, _FRAMES):
        width, height = picture.width * (0.7 - 0.3 * progress), picture.height * (0.9 - 0.4 * progress)
        left, top = (picture.width - width) * progress, (picture.height - height) * 0.6
        frames.append(np.asarray(picture.resize(_SIZE, box=(left, top, left + width, top + height))))
    return Clip(frames, _RATE)


def _fingerprint(clip: Clip) -> torch.Tensor:
    places = np.linspace(0, len(clip.frames) - 1, min(_TAKEN, len(clip.frames))).round().astype(int)
    frames = torch.from_numpy(np.stack([clip.frames[place] for place in places]))
    return fingerprint_clip(frames, [float(place / clip.rate) for place in places], len(clip.frames) / clip.rate)


def _recode(clip: Clip, codec: str, size: tuple[int, int], rate: int, bit_rate: int) -> Clip:
    width, height = size
    encoded = io.BytesIO()
    with av.open(encoded, "w", format="matroska") as container:
        stream = container.add_stream(codec, rate=rate)
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height, stream.pix_fmt, stream.bit_rate = width, height, "yuv420p", bit_rate
        stream.thread_count = 1  # encoders share a picture out by threads, and encode it otherwise
        for number in range(round(len(clip.frames) / clip.rate * rate)):
            frame = av.VideoFrame.from_ndarray(clip.frames[int(number / rate * clip.rate)], format="rgb24")
            container.mux(stream.encode(frame.reformat(width, height, "yuv420p")))
        container.mux(stream.encode(None))
    encoded.seek(0)
    with av.open(encoded, "r") as container:
        return Clip([np.asarray(frame.to_ndarray(format="rgb24"), np.uint8) for frame in container.decode(video=0)], rate)


def _seen(clip: Clip, look: Callable[[npt.NDArray[np.uint8]], npt.NDArray[np.uint8]]) -> Clip:
    return Clip([np.ascontiguousarray(look(frame)) for frame in clip.frames], clip.rate)


_ALTERATIONS: dict[str, Callable[[Clip], Clip]] = {
    "H.264, 12 frames a second": lambda clip: _recode(clip, "libx264", _SIZE, 12, 400_000),
    "H.264, 5 frames a second": lambda clip: _recode(clip, "libx264", _SIZE, 5, 400_000),
    "MPEG-4, half size": lambda clip: _recode(clip, "mpeg4", (160, 120), 25, 200_000),
    "MPEG-4, poor": lambda clip: _recode(clip, "mpeg4", _SIZE, 25, 60_000),
    "cropped: 10 % of width and height": lambda clip: _seen(clip, lambda frame: frame[12:228, 16:304]),
    "flipped, left to right": lambda clip: _seen(clip, lambda frame: frame[:, ::-1]),
    "twice as fast": lambda clip: Clip(clip.frames, clip.rate * 2),
    "a tenth cut at the start": lambda clip: Clip(clip.frames[6:], clip.rate),
    "the second half only": lambda clip: Clip(clip.frames[30:], clip.rate),
    "backwards": lambda clip: Clip(clip.frames[::-1], clip.rate),
}
