"""What the demonstration sends: the sample pictures and recordings, clips made of the pictures, and altered copies of each.

The clips are camera flights over sample pictures, made here, because no sample video is small enough to ship.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Iterator
from fractions import Fraction
from importlib import resources
from typing import Literal

import av
import numpy as np
from av.audio.resampler import AudioResampler
from numpy.typing import NDArray
from PIL import Image, ImageEnhance

__all__ = ["Kind", "Sample", "clips", "large_picture", "pictures", "recordings"]

Kind = Literal["picture", "recording", "video"]

_MEDIA_TYPES: dict[Kind, str] = {"picture": "image/jpeg", "recording": "audio/wav", "video": "video/mp4"}

_SAMPLE_RATE = 22_050  # of the sample recordings, in Hz
_CLIP_SECONDS = 2.4
_CLIPPED = ("chelsea", "coffee", "hubble", "rocket")  # the pictures that clips fly over


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """A file to send.

    Attributes:
        kind: of medium.
        name: of the original.
        alteration: what was done to it; empty for the original.
        size: as a person would say it.
        file: what is sent.
    """

    kind: Kind
    name: str
    alteration: str
    size: str
    file: bytes

    @property
    def media_type(self) -> str:
        """The type of the file, for a data: URL."""
        return "audio/mpeg" if self.alteration.startswith("MP3") else _MEDIA_TYPES[self.kind]


def pictures() -> Iterator[list[Sample]]:
    """Yields each sample picture with its altered copies."""
    for name, file in _files(".jpg"):
        yield [
            _picture(name, alteration, file if not alteration else _jpeg(alter(_open(file)), quality))
            for alteration, alter, quality in _PICTURE_ALTERATIONS
        ]


def large_picture() -> Sample:
    """Returns a sample picture as a camera of twelve megapixels would take it."""
    name, file = next(_files(".jpg"))
    return _picture(name, "12 megapixels", _jpeg(_open(file).resize((4000, 3000)), 90))


def recordings() -> Iterator[list[Sample]]:
    """Yields each sample recording with its altered copies."""
    for name, file in _files(".wav"):
        samples = _decode_sound(file)
        yield [
            _recording(name, alteration, file if not alteration else encode(alter(samples)), samples.size)
            for alteration, alter, encode in _SOUND_ALTERATIONS
        ]


def clips() -> Iterator[list[Sample]]:
    """Yields each clip with its altered copies."""
    for name, file in _files(".jpg"):
        if name in _CLIPPED:
            yield [
                Sample("video", name, alteration, f"{width}x{height}, {rate}/s", _film(_open(file), width, height, rate, codec))
                for alteration, width, height, rate, codec in _CLIP_ALTERATIONS
            ]


def _files(suffix: str) -> Iterator[tuple[str, bytes]]:
    directory = resources.files("shmring.frontend") / "samples"
    for path in sorted(directory.iterdir(), key=lambda path: path.name):
        if path.name.endswith(suffix):
            yield path.name.removesuffix(suffix), path.read_bytes()


# -- pictures -------------------------------------------------------------------------------------------------------------


def _as_it_is(picture: Image.Image) -> Image.Image:
    return picture


def _scaled(picture: Image.Image) -> Image.Image:
    return picture.resize((picture.width // 2, picture.height // 2))


def _brightened(picture: Image.Image) -> Image.Image:
    return ImageEnhance.Brightness(picture).enhance(1.1)


def _cropped(picture: Image.Image) -> Image.Image:
    margin_x, margin_y = picture.width // 40, picture.height // 40
    return picture.crop((margin_x, margin_y, picture.width - margin_x, picture.height - margin_y))


#: Name, alteration, JPEG quality; the first is the original.
_PICTURE_ALTERATIONS: tuple[tuple[str, Callable[[Image.Image], Image.Image], int], ...] = (
    ("", _as_it_is, 0),
    ("JPEG quality 50", _as_it_is, 50),
    ("scaled to 50 %", _scaled, 90),
    ("brightened 10 %", _brightened, 90),
    ("cropped 5 %", _cropped, 90),
)


def _picture(name: str, alteration: str, file: bytes) -> Sample:
    width, height = _open(file).size
    return Sample("picture", name, alteration, f"{width}x{height}", file)


def _open(file: bytes) -> Image.Image:
    return Image.open(io.BytesIO(file)).convert("RGB")


def _jpeg(picture: Image.Image, quality: int) -> bytes:
    encoded = io.BytesIO()
    picture.save(encoded, "JPEG", quality=quality)
    return encoded.getvalue()


# -- recordings -----------------------------------------------------------------------------------------------------------

_Samples = NDArray[np.float32]


def _noisy(samples: _Samples) -> _Samples:
    """Adds white noise with a hundredth of the recording's power: 20 dB below it."""
    noise = np.random.default_rng(20).standard_normal(samples.size)
    noisy: _Samples = (samples + noise * np.sqrt(np.mean(samples**2)) / 10).astype(np.float32)
    return noisy


def _quiet(samples: _Samples) -> _Samples:
    quiet: _Samples = (samples * 0.3).astype(np.float32)
    return quiet


def _unchanged(samples: _Samples) -> _Samples:
    return samples


def _encode_sound(samples: _Samples, container: str, codec: str) -> bytes:
    encoded = io.BytesIO()
    with av.open(encoded, "w", format=container) as file:
        stream = file.add_stream(codec, rate=_SAMPLE_RATE)
        assert isinstance(stream, av.AudioStream)
        stream.layout = "mono"
        frame = av.AudioFrame.from_ndarray(samples[np.newaxis].clip(-1, 1), format="flt", layout="mono")
        frame.sample_rate = _SAMPLE_RATE
        resampler = AudioResampler(format=stream.format, layout="mono", rate=_SAMPLE_RATE, frame_size=stream.frame_size)
        for part in (frame, None):
            for resampled in resampler.resample(part):
                file.mux(stream.encode(resampled))
        file.mux(stream.encode(None))
    return encoded.getvalue()


def _wav(samples: _Samples) -> bytes:
    return _encode_sound(samples, "wav", "pcm_s16le")


def _mp3(samples: _Samples) -> bytes:
    return _encode_sound(samples, "mp3", "libmp3lame")


#: Name, alteration, encoding; the first is the original.
_SOUND_ALTERATIONS: tuple[tuple[str, Callable[[_Samples], _Samples], Callable[[_Samples], bytes]], ...] = (
    ("", _unchanged, _wav),
    ("noise, 20 dB SNR", _noisy, _wav),
    ("level x 0.3", _quiet, _wav),
    ("MP3", _unchanged, _mp3),
)


def _decode_sound(file: bytes) -> _Samples:
    with av.open(io.BytesIO(file), "r") as container:
        frames = [frame.to_ndarray().reshape(-1) for frame in container.decode(audio=0)]
    samples: _Samples = np.concatenate(frames).astype(np.float32)
    return samples / np.float32(32768)


def _recording(name: str, alteration: str, file: bytes, samples: int) -> Sample:
    return Sample("recording", name, alteration, f"{samples / _SAMPLE_RATE:.1f} s", file)


# -- clips ----------------------------------------------------------------------------------------------------------------

#: Name, width, height, frames a second, codec; the first is the original.
_CLIP_ALTERATIONS: tuple[tuple[str, int, int, int, str], ...] = (
    ("", 320, 240, 25, "libx264"),
    ("half the size, 12 fps", 160, 120, 12, "libx264"),
    ("MPEG-4, 30 fps", 240, 180, 30, "mpeg4"),
)


def _film(picture: Image.Image, width: int, height: int, rate: int, codec: str) -> bytes:
    """A flight from the left to the right of a picture, ever closer."""
    encoded = io.BytesIO()
    with av.open(encoded, "w", format="mp4") as file:
        stream = file.add_stream(codec, rate=Fraction(rate))
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.bit_rate = 400_000
        frames = round(_CLIP_SECONDS * rate)
        for number in range(frames):
            view = picture.resize((width, height), box=_window(picture, number / (frames - 1)))
            file.mux(stream.encode(av.VideoFrame.from_ndarray(np.asarray(view), format="rgb24")))
        file.mux(stream.encode(None))
    return encoded.getvalue()


def _window(picture: Image.Image, progress: float) -> tuple[float, float, float, float]:
    """Where the camera looks, from 0 (left, far) to 1 (right, near)."""
    width, height = picture.width * (0.7 - 0.3 * progress), picture.height * (0.9 - 0.4 * progress)
    left, top = (picture.width - width) * progress, (picture.height - height) * (0.5 + 0.3 * progress)
    return left, top, left + width, top + height
