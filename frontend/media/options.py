"""Limits of media, and how they are prepared if a server's options differ from its executor's wishes.

Both are frozen and hold no state. :class:`MediaLimits` is checked against headers before anything is decoded, and again against
what comes out: headers lie. :class:`MediaIoKwargs` is vLLM's ``--media-io-kwargs``, so that a command line written for it means
the same here; an unknown key is refused, since an option that is silently ignored is worse than an error.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any, Literal, TypeAlias

from shmring.service.flags import NO_OPTION, Flag

__all__ = ["MediaIoKwargs", "MediaKind", "MediaLimits"]

#: What a medium is meant to be.
MediaKind: TypeAlias = Literal["image", "audio", "video"]

_WHITE = (255, 255, 255)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MediaLimits:
    """What media may be.

    Attributes:
        max_image_pixels: Most pixels of a picture.

            Decoding 64 megapixels takes 256 MB in Pillow and 192 MB of the slab. Pillow refuses more than about 179 million.
        max_aspect_ratio: Longer side by shorter side, of pictures and frames.

            Vision models accept 200 at most (Qwen2-VL); a panorama has 10.
        max_image_expansion: Decoded bytes for each byte of the file, of large pictures.

            They count for pictures that take more than 64 MiB; smaller ones may be blank. Photographs have 5 to 50, drawings
            200; a deflate bomb has 1030.
        max_image_nbytes: Largest file of a picture.

            64 MiB holds a 16-bit PNG of about ten megapixels; cameras' JPEGs take a tenth.
        max_image_scans: of a JPEG. Progressive ones have about ten, 13 where every bit was fought for. Each goes over all
            pixels: a hundred scans of 64 megapixels take about five seconds of a core.
        max_image_chunks: of a PNG, and segments of a JPEG. 64 MiB in the 8 KiB chunks that libpng writes are 8192; each costs
            some microseconds.
        max_audio_nbytes: Largest file of a recording.

            64 MiB holds 600 s of 16-bit stereo at 48 kHz, and hours of MP3.
        max_audio_duration_s: Longest recording, in seconds.

            Ten minutes at 16 kHz take 38 MB of the slab, 19 MB as 80 mel bands.
        max_video_nbytes: Largest file of a clip.

            256 MiB holds 60 s as phones record 4K (35 Mbit/s).
        max_video_duration_s: Longest clip, in seconds.

            All its packets are read, and up to all its frames decoded.
        max_frame_pixels: Most pixels of a clip's frame.

            4096 x 2160 is the largest that phones and cameras make; a decoder holds up to 16 such frames of 13 MB.
        max_num_frames: Most frames taken of a clip.

            512 frames of 448 x 448 take 308 MB of the slab.
        max_coded_frames: frames in a clip's file: 120 a second for the longest clip. Each costs a few microseconds and 32
            bytes before anything is decoded.
        max_decoded_pixels: width times height times frames that must be decoded for those that are shown. Ten minutes of
            1920 x 1080 at 30 frames a second without any keyframe to start from: about two minutes of one core.
        max_video_expansion: those pixels for each byte of the file, where they are more than two thousand million (one to four
            seconds of one core). Films have 100, a recorded screen on which nothing moves 10 000; a clip made to cost much has
            more than 200 000.
        max_decode_s: Seconds of a processor's core that a medium may take.

            A picture of 12 megapixels takes 0.2, a minute of 1920 x 1080 about 5.
        max_missing_share: Share of a medium that may be missing because its file is damaged or truncated: 0 to 1; callers are
            told what is.

            It counts what the file promises (:mod:`shmring.frontend.media.damage`).
    """

    max_image_pixels: Annotated[int, Flag(names=("--max-pixels",))] = 64_000_000
    max_aspect_ratio: Annotated[float, Flag(least=1)] = 200.0
    max_image_expansion: Annotated[float, Flag(least=1)] = 500.0
    max_image_nbytes: int = 64 << 20
    max_image_scans: Annotated[int, NO_OPTION] = 100
    max_image_chunks: Annotated[int, NO_OPTION] = 65_536
    max_audio_nbytes: int = 64 << 20
    max_audio_duration_s: float = 600.0
    max_video_nbytes: int = 256 << 20
    max_video_duration_s: float = 600.0
    max_frame_pixels: int = 4096 * 2160
    max_num_frames: int = 512
    max_coded_frames: Annotated[int, NO_OPTION] = 72_000
    max_decoded_pixels: Annotated[int, NO_OPTION] = 40_000_000_000
    max_video_expansion: Annotated[float, NO_OPTION] = 25_000.0
    max_decode_s: Annotated[float, Flag(names=("--max-decode-time",))] = 20.0
    max_missing_share: Annotated[float, Flag(least=0, most=1)] = 0.1

    def max_nbytes(self, kind: str) -> int:
        """Returns how large the file of an ``"image"``, ``"audio"`` or ``"video"`` may be."""
        return {"image": self.max_image_nbytes, "audio": self.max_audio_nbytes, "video": self.max_video_nbytes}[kind]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MediaIoKwargs:
    """How media are prepared, beyond what the executor asks for.

    Attributes:
        rgba_background_color: what lies behind transparent pictures.
        num_frames: of a clip, instead of the executor's number; -1: all, up to :attr:`MediaLimits.max_num_frames`.
        fps: frames a second of the clip, at most; the smaller of the two counts.

    Source: vLLM's ``--media-io-kwargs``.
    """

    rgba_background_color: tuple[int, int, int] = _WHITE
    num_frames: int | None = None
    fps: float | None = None

    @classmethod
    def parse(cls, text: str) -> MediaIoKwargs:
        """Reads the option's text, such as ``{"video": {"num_frames": 32}, "image": {"rgba_background_color": [0, 0, 0]}}``.

        Raises:
            ValueError: it is no such JSON, or names what there is not.
        """
        try:
            kinds = json.loads(text)
        except ValueError as error:  # json.JSONDecodeError is one
            raise ValueError(f"media-io-kwargs is not JSON: {error}") from None
        except RecursionError:
            raise ValueError("media-io-kwargs is not what is expected: it is nested too deeply") from None
        if not isinstance(kinds, dict):
            raise ValueError(f"media-io-kwargs must be a JSON object of kinds of media, not {text[:64]}")
        _refuse_unknown("media-io-kwargs", kinds, _READERS)
        fields: dict[str, Any] = {}
        for kind, values in kinds.items():
            if not isinstance(values, dict):
                raise ValueError(f"media-io-kwargs: {kind} must be a JSON object")
            readers = _READERS[kind]
            _refuse_unknown(f"media-io-kwargs: {kind}", values, readers)
            for name, value in values.items():
                fields[name] = readers[name](f"media-io-kwargs: {kind}.{name}", value)
        return cls(**fields)


def _refuse_unknown(place: str, values: dict[str, Any], known: dict[str, Any]) -> None:
    unknown = [name for name in values if name not in known]
    if unknown:
        names = ", ".join(known) or "nothing so far"
        raise ValueError(f"{place} does not know {', '.join(map(repr, unknown))}; it knows {names}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _colour(place: str, value: object) -> tuple[int, int, int]:
    channels = value if isinstance(value, list) else []
    if len(channels) != 3 or not all(_is_number(channel) and channel in range(256) for channel in channels):
        raise ValueError(f"{place} must be three numbers from 0 to 255: red, green, blue")
    red, green, blue = (int(channel) for channel in channels)
    return red, green, blue


def _num_frames(place: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or (value != -1 and value < 1):
        raise ValueError(f"{place} must be a number of frames, 1 or more, or -1 for all")
    return value


def _fps(place: str, value: object) -> float | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        if value == -1:
            return None
        if 0 < value <= 1000:  # also refuses NaN and infinity, which Python's JSON has
            return float(value)
    raise ValueError(f"{place} must be a number of frames a second above 0, or -1 for no limit")


_READERS: dict[str, dict[str, Any]] = {
    "image": {"rgba_background_color": _colour},
    "audio": {},  # how recordings are prepared is said by the executor alone
    "video": {"num_frames": _num_frames, "fps": _fps},
}
