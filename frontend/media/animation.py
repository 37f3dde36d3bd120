"""Clips that are pictures which move: animated WebP, as browsers and messengers make it from GIFs. libav does not decode
it; Pillow does.

Theory of operation: :func:`probe_frames` reads the number of frames and their size from the header, and refuses what would
be too much work before anything is decoded. It then goes through the frames, because libwebp tells when a frame is shown
only when it decodes it. :func:`decode_frames` goes through them again, up to the last one that is wanted. So decoding costs
twice, and memory is that of one frame.

Delays of up to 10 ms are 100 ms, as in browsers. Colours of an ICC profile become sRGB. What is transparent shows the
background colour.

Invariant: whatever the bytes are, :class:`MediaError` is all that comes out.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray
from PIL import Image, WebPImagePlugin

from shmring.engine.inputs import VideoSpec
from shmring.frontend.media.colours import conversion_to_srgb
from shmring.frontend.media.errors import MediaError
from shmring.frontend.media.geometry import check_size, scaled_size
from shmring.frontend.media.image import picture_errors
from shmring.frontend.media.options import MediaLimits
from shmring.frontend.media.timeline import Selection, Timeline

__all__ = ["decode_frames", "probe_frames"]

_MILLISECOND = Fraction(1, 1000)
_SHORT_MS, _SHOWN_INSTEAD_MS = 10, 100


def probe_frames(
    data: bytes, spec: VideoSpec, limits: MediaLimits, num_frames: int, fps: float | None
) -> tuple[int, int, Selection]:
    """Finds out which frames of an animated WebP are wanted.

    Args:
        data: its file, from its signature on.
        spec: what the executor wants.
        limits: what it may be.
        num_frames: wanted, at most.
        fps: frames a second, at most.

    Returns:
        Width and height of the frames, scaled down, and which of them are wanted; positions are milliseconds.

    Raises:
        MediaError: it does not move, exceeds a limit, or is damaged.
    """
    timeline = Timeline(_MILLISECOND, None, trusts_keyframes=False)
    with picture_errors("clip", ("animated WebP",)), Image.open(io.BytesIO(data), formats=("WEBP",)) as image:
        assert isinstance(image, WebPImagePlugin.WebPImageFile)
        check_size("the clip", image.width, image.height, limits.max_frame_pixels, limits.max_aspect_ratio)
        if not image.is_animated:
            raise MediaError("the WebP is a picture, not a clip: it has a single frame. Send it as a picture")
        if image.n_frames > limits.max_coded_frames:
            raise MediaError(f"the clip has more than the {limits.max_coded_frames} frames that are accepted")
        num_pixels = image.n_frames * image.width * image.height
        # Twice: here and when it is decoded. Unlike a film's, its frames may be nothing but a colour.
        if 2 * num_pixels > limits.max_decoded_pixels:
            raise MediaError(
                f"{image.n_frames} frames of {image.width} x {image.height} must be decoded, which are more pixels than are "
                "accepted (max_decoded_pixels); send a smaller clip"
            )
        for time_ms, duration_ms, _ in _frames(image):
            timeline.add(time_ms, duration_ms, is_keyframe=True, is_shown=True)
            if time_ms + duration_ms > 1000 * limits.max_video_duration_s:
                raise MediaError(f"the clip is longer than the {limits.max_video_duration_s:g} s that are accepted")
        width, height = scaled_size(image.width, image.height, spec.max_pixels)
    selection = timeline.select(num_frames, fps)
    assert selection is not None, "an animation has frames"
    return width, height, selection


def decode_frames(
    data: bytes, selection: Selection, target: NDArray[np.uint8], background: tuple[int, int, int]
) -> list[float]:
    """Decodes the chosen frames.

    Args:
        data: as :func:`probe_frames` got it.
        selection: what it returned.
        target: (frames, height, width, 3), uint8; becomes RGB.
        background: what is seen through transparent pixels.

    Returns:
        When each frame is shown, in seconds.

    Raises:
        MediaError: it is damaged.
    """
    height, width = target.shape[1:3]
    timestamps_s: list[float] = []
    with picture_errors("clip", ("animated WebP",)), Image.open(io.BytesIO(data), formats=("WEBP",)) as image:
        assert isinstance(image, WebPImagePlugin.WebPImageFile)
        conversion = conversion_to_srgb(image, data)
        for time_ms, _, frame in _frames(image):
            if len(timestamps_s) == len(selection.positions):
                break
            if time_ms != selection.positions[len(timestamps_s)]:
                continue
            shown = frame.convert("RGB")
            if conversion is not None:
                shown = conversion.apply(shown)
            if frame.mode == "RGBA":
                shown = Image.composite(shown, Image.new("RGB", frame.size, background), frame.getchannel("A"))
            if shown.size != (width, height):
                shown = shown.resize((width, height), Image.Resampling.LANCZOS)
            target[len(timestamps_s)] = np.asarray(shown)
            timestamps_s.append(selection.time_of(time_ms))
    return timestamps_s


def _frames(image: WebPImagePlugin.WebPImageFile) -> Iterator[tuple[int, int, Image.Image]]:
    """Yields when each frame is shown, for how long, and the frame. It changes with the next one."""
    time_ms = 0
    for number in range(image.n_frames):
        image.seek(number)
        image.load()
        duration_ms = int(image.info.get("duration", 0))
        duration_ms = _SHOWN_INSTEAD_MS if duration_ms <= _SHORT_MS else duration_ms
        yield time_ms, duration_ms, image
        time_ms += duration_ms
