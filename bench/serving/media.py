"""What requests carry: pictures, recordings and clips, made from a seed.

They look like something: soft shapes with a little noise, so that they compress and decode as photographs do, where
noise alone would be ten times as large and a flat colour nearly nothing. They are made before the clock runs, and kept as the
JSON of a message's part, so that sending one costs no encoding.
"""

from __future__ import annotations

import base64
import io
import wave
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import TypeAlias

import av
import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from bench.serving.plan import Load, Media, MediaKind

_Generator: TypeAlias = np.random.Generator

_SAMPLE_RATE = 16_000  # in Hz; what speech models take
_FRAME_RATE = 10  # frames a second of a clip
_JPEG_QUALITY = 90
_GRAIN = 4.0  # standard deviation of the noise, of 255: a photograph in good light
_SHAPES = 8  # soft shapes along the shorter side

_PART_TYPES: Mapping[MediaKind, str] = {"picture": "image_url", "audio": "audio_url", "video": "video_url"}


def media_parts(load: Load) -> list[msgspec.Raw]:
    """Returns the JSON of the message parts that the load's requests take in turn; none if they have no media."""
    media = load.media
    make: Mapping[MediaKind, Callable[[Media, _Generator], tuple[str, bytes]]] = {
        "picture": lambda media, generator: ("image/jpeg", picture(media.picture_size, generator)),
        "audio": lambda media, generator: ("audio/wav", recording(media.audio_seconds, generator)),
        "video": lambda media, generator: ("video/mp4", video(media.video_size, media.video_frames, generator)),
    }
    count = min(media.distinct, -(-load.requests // max(len(media.kinds), 1)))
    return [
        _part(kind, *make[kind](media, np.random.default_rng((load.seed, 1, number))))
        for number in range(count)
        for kind in media.kinds
    ]


def _part(kind: MediaKind, media_type: str, file: bytes) -> msgspec.Raw:
    name = _PART_TYPES[kind]
    url = f"data:{media_type};base64,{base64.b64encode(file).decode('ascii')}"
    return msgspec.Raw(msgspec.json.encode({"type": name, name: {"url": url}}))


# -- making them ----------------------------------------------------------------------------------------------------------


def picture(size: tuple[int, int], generator: _Generator) -> bytes:
    """Returns a JPEG file of this width and height."""
    encoded = io.BytesIO()
    Image.fromarray(_grainy(_shapes(size, generator), generator)).save(encoded, "JPEG", quality=_JPEG_QUALITY)
    return encoded.getvalue()


def recording(seconds: float, generator: _Generator) -> bytes:
    """Returns a WAV file: a chord that fades in and out, with some noise."""
    times = np.arange(max(1, round(seconds * _SAMPLE_RATE))) / _SAMPLE_RATE
    tones = sum(np.sin(2 * np.pi * frequency * times) for frequency in generator.uniform(80, 2000, 4))
    samples = tones * (0.15 + 0.1 * np.sin(2 * np.pi * generator.uniform(1, 4) * times))
    samples += generator.normal(0, 0.01, times.size)
    encoded = io.BytesIO()
    with wave.open(encoded, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(_SAMPLE_RATE)
        file.writeframes((samples.clip(-1, 1) * 32767).astype("<i2").tobytes())
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
