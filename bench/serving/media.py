"""What requests carry: pictures and clips, made from a seed.

They look like something: soft shapes with a little noise, so that they compress and decode as photographs do, where
noise alone would be ten times as large and a flat colour nearly nothing. They are made before the clock runs, and kept as the
JSON of a message's part, so that sending one costs no encoding.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from fractions import Fraction
from typing import TypeAlias

import av
import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from bench.serving.plan import Load

_Generator: TypeAlias = np.random.Generator

_SEED = 1
_FRAME_RATE = 10  # frames a second of a clip
_JPEG_QUALITY = 90
_GRAIN = 4.0  # standard deviation of the noise, of 255: a photograph in good light
_SHAPES = 8  # soft shapes along the shorter side


def media_parts(load: Load) -> list[msgspec.Raw]:
    """Returns the JSON of the message parts that the load's requests take in turn; none if they have no media."""
    if (media := load.media) is None:
        return []
    parts = []
    for number in range(min(media.distinct, load.requests)):
        generator = np.random.default_rng((_SEED, number))
        if media.frames:
            parts.append(video_part(media.size, media.frames, generator))
        else:
            parts.append(picture_part(media.size, generator))
    return [msgspec.Raw(msgspec.json.encode(part)) for part in parts]


def picture_part(size: tuple[int, int], generator: _Generator) -> dict[str, object]:
    """Returns the part of a message that is a picture of this width and height."""
    return _part("image", "jpeg", picture(size, generator))


def video_part(size: tuple[int, int], frames: int, generator: _Generator) -> dict[str, object]:
    """Returns the part of a message that is a clip."""
    return _part("video", "mp4", video(size, frames, generator))


def _part(kind: str, form: str, file: bytes) -> dict[str, object]:
    url = f"data:{kind}/{form};base64,{base64.b64encode(file).decode('ascii')}"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def picture(size: tuple[int, int], generator: _Generator) -> bytes:
    """Returns a JPEG file of this width and height."""
    encoded = io.BytesIO()
    Image.fromarray(_grainy(_shapes(size, generator), generator)).save(encoded, "JPEG", quality=_JPEG_QUALITY)
    return encoded.getvalue()


def video(size: tuple[int, int], frames: int, generator: _Generator) -> bytes:
    """Returns an MP4 file of this width and height (both even): a flight over a landscape of shapes."""
    encoded = io.BytesIO()
    with av.open(encoded, "w", format="mp4") as file:
        # One thread and the fastest preset: the machine may have little else, and what the server decodes is much the same.
        stream = file.add_stream("libx264", rate=Fraction(_FRAME_RATE), options={"preset": "ultrafast", "threads": "1"})
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        for frame in _flight(size, frames, generator):
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode(None))
    return encoded.getvalue()


def _flight(size: tuple[int, int], frames: int, generator: _Generator) -> Iterator[NDArray[np.uint8]]:
    width, height = size
    margin_x, margin_y = width // 4, height // 4
    landscape = _shapes((width + margin_x, height + margin_y), generator)
    for number in range(frames):
        progress = number / max(frames - 1, 1)
        left, top = round(margin_x * progress), round(margin_y * progress)
        yield _grainy(landscape.crop((left, top, left + width, top + height)), generator)


def _shapes(size: tuple[int, int], generator: _Generator) -> Image.Image:
    coarse = Image.fromarray(generator.integers(0, 256, (_SHAPES, _SHAPES, 3), dtype=np.uint8))
    return coarse.resize(size, Image.Resampling.BICUBIC)


def _grainy(shapes: Image.Image, generator: _Generator) -> NDArray[np.uint8]:
    noise = generator.standard_normal((shapes.height, shapes.width, 1), dtype=np.float32) * np.float32(_GRAIN)
    grainy: NDArray[np.uint8] = (np.asarray(shapes) + noise).clip(0, 255).astype(np.uint8)
    return grainy
