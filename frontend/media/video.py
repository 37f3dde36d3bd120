"""Clips: decodes frames at even distances, scaled and turned, straight into the caller's memory.

Theory of operation: :func:`probe` reads all packets without decoding them. They say when each frame is shown and where decoding
can begin. It also decodes one frame, because only a decoded frame says how large frames are and how they are turned. From this,
:mod:`shmring.frontend.media.timeline` chooses frames. :func:`decode_into` reads the packets again and decodes only the packets
that the chosen frames need: it skips all packets up to the keyframe before the next chosen frame. The packets lie in memory, so
skipping them costs almost nothing. Seeking is not needed; many containers seek only approximately, or not at all. One frame is
converted at a time, so in private memory there are the decoder's reference frames and one converted one.

All frames are scaled to one size, even if their size changes within the clip. If pixels are not square, it is the size at which
frames are shown. Colours are converted as the stream says, or else as BT.601; transparency is ignored. Packets that can't be
decoded are left out. If a chosen frame is damaged, the next frame takes its place; missing frames are counted
(:mod:`shmring.frontend.media.damage`).

A GIF's delays of 0 and 10 ms are 100 ms, as in every browser. :mod:`shmring.frontend.media.animation` decodes animated WebPs.

Invariant: with any bytes, the only error that is raised is :class:`MediaError`.
"""

from __future__ import annotations

import bisect
import dataclasses
import struct
from collections.abc import Iterator, Mapping
from typing import cast

import av
import av.container
import av.error
import numpy as np
from av.buffer import Buffer
from av.packet import Packet
from av.sidedata.sidedata import Type as SideDataType
from av.video.frame import VideoFrame
from av.video.reformatter import Interpolation, VideoReformatter
from av.video.stream import VideoStream
from numpy.typing import NDArray

from shmring.engine.inputs import VideoSpec
from shmring.frontend.media.animation import decode_frames, probe_frames
from shmring.frontend.media.container import VIDEO_DECODERS, OpenFile, missing_of, opened, prepare_decoder, tracks
from shmring.frontend.media.damage import Shortfall, accepted_shortfall, missing_packets
from shmring.frontend.media.errors import MediaError
from shmring.frontend.media.geometry import SWAPPING_ORIENTATIONS, as_stored, check_size, scaled_size
from shmring.frontend.media.options import MediaIoKwargs, MediaLimits
from shmring.frontend.media.signatures import demuxer_of
from shmring.frontend.media.timeline import Selection, Timeline

__all__ = ["ClipHeader", "DecodedClip", "decode_into", "probe"]

# In these formats, a packet that is marked as a keyframe really is one. A GIF also marks frames that are drawn over the one
# before.
_TRUSTED_KEYFRAMES = ("mov", "matroska")
# These formats store frames at a constant rate, without timestamps. libav invents some, which are wrong if frames refer to
# later ones.
_WITHOUT_TIMESTAMPS = ("avi",)

_MIN_GIF_DURATION = 2  # hundredths of a second; browsers show shorter frames for ten
_SHORT_GIF_DURATION = 10

# Bicubic, which swscale widens when it scales down, so that nothing is skipped. Without the other flag it darkens: 255 to 253.
# ACCURATE_RND would change nothing where a frame is scaled. Where it is not, it would spare the mean error of one level in
# 255 that the fast conversion makes (as OpenCV's does) and take three times as long, which is a third of a clip's decoding.
_SCALING = Interpolation.BICUBIC | Interpolation.FULL_CHR_H_INT

_WHITE = (255, 255, 255)
_HARMLESS_PIXELS = 2_000_000_000  # to decode: one to four seconds of a core
_MAX_UNDECODABLE = 600  # packets before the first frame: a clip that was cut out of another has up to 10 s of them

# Display matrices that only turn and mirror, by the signs of a, b, c, d (x' = a x + c y, y' = b x + d y), as EXIF numbers them.
_ORIENTATIONS = {
    (1, 0, 0, 1): 1,
    (-1, 0, 0, 1): 2,
    (-1, 0, 0, -1): 3,
    (1, 0, 0, -1): 4,
    (0, 1, 1, 0): 5,
    (0, 1, -1, 0): 6,
    (0, -1, -1, 0): 7,
    (0, -1, 1, 0): 8,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClipHeader:
    """What a clip will be decoded to.

    Attributes:
        width, height: of its frames, turned as the container asks and scaled down.
        orientation: EXIF's number for how they are turned; 1 is as stored.
        selection: which frames.
        max_frame_pixels: of a frame as it is stored.
        track: the number of its stream.
        shortfalls: the missing parts, as far as they are known before decoding.
        max_missing_share: how much may be.
        is_animation: it is a picture that moves, and :mod:`shmring.frontend.media.animation` decodes it.
    """

    width: int
    height: int
    orientation: int
    selection: Selection
    max_frame_pixels: int
    track: int = 0
    shortfalls: tuple[Shortfall, ...] = ()
    max_missing_share: float = MediaLimits.max_missing_share
    is_animation: bool = False

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the memory it needs: (frames, height, width, 3); uint8."""
        return len(self.selection.positions), self.height, self.width, 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodedClip:
    """What a clip turned out to be.

    Attributes:
        timestamps_s: of each frame that was written, in seconds from the clip's first frame.
        duration_s: of the clip.
        shortfall: the text for the caller about missing parts; empty if none are missing.
    """

    timestamps_s: list[float]
    duration_s: float
    shortfall: str = ""


def probe(data: bytes, spec: VideoSpec, limits: MediaLimits, io_kwargs: MediaIoKwargs) -> ClipHeader:
    """Finds out which frames a clip has, chooses frames, and computes the memory for them; decodes one frame.

    Args:
        data: its file, in any of the containers of :mod:`shmring.frontend.media.container`.
        spec: what the executor wants.
        limits: what it may be.
        io_kwargs: settings that replace the executor's wishes.

    Raises:
        MediaError: it holds no frames that can be decoded, exceeds a limit, or is damaged.
    """
    if len(data) > limits.max_video_nbytes:
        raise MediaError(f"the clip takes {len(data)} bytes, more than the {limits.max_video_nbytes} that are accepted")
    if not data:
        raise MediaError("the clip is empty: it has no bytes")
    num_frames = spec.num_frames if io_kwargs.num_frames is None else io_kwargs.num_frames
    if num_frames < 0 or num_frames > limits.max_num_frames:
        num_frames = limits.max_num_frames
    demuxer, start = demuxer_of(data)
    if demuxer == "webp":
        width, height, selection = probe_frames(data[start:], spec, limits, num_frames, io_kwargs.fps)
        return ClipHeader(
            width=width,
            height=height,
            orientation=1,
            selection=selection,
            max_frame_pixels=limits.max_frame_pixels,
            is_animation=True,
        )
    number = 0
    while True:  # a track may be there and hold nothing that can be decoded
        with opened(data, "clip", VIDEO_DECODERS, limits.max_frame_pixels) as file:
            candidates = tracks(file.container.streams.video, "clip", VIDEO_DECODERS, file.container.format.name)
            is_last = number + 1 == len(candidates)
            try:
                return _probe_track(data, file, candidates[number], num_frames, spec, limits, io_kwargs)
            except _NothingDecodableError:
                if is_last:
                    raise
        number += 1


class _NothingDecodableError(MediaError):
    """A track has no frame that can be decoded."""


def _probe_track(
    data: bytes,
    file: OpenFile,
    stream: VideoStream,
    num_frames: int,
    spec: VideoSpec,
    limits: MediaLimits,
    io_kwargs: MediaIoKwargs,
) -> ClipHeader:
    prepare_decoder(stream, limits.max_frame_pixels)
    width, height = stream.codec_context.width, stream.codec_context.height
    if width or height:
        check_size("the clip", width, height, limits.max_frame_pixels, limits.max_aspect_ratio)
    timeline, first, num_corrupt = _scan(file.container, stream, limits)
    shortfalls = [*file.shortfalls, *missing_of(file, stream, data, "clip", VIDEO_DECODERS, timeline.end_s())]
    if not shortfalls:  # if a file ends early, a part of the last frame is there
        shortfalls += missing_packets(num_corrupt, timeline.num_packets, "frames")
    accepted_shortfall("clip", shortfalls, limits.max_missing_share)
    selection = timeline.select(num_frames, io_kwargs.fps)
    if selection is None or first is None:
        raise _NothingDecodableError("the clip is damaged or empty: none of its frames can be decoded")
    check_size("the clip", first.width, first.height, limits.max_frame_pixels, limits.max_aspect_ratio)
    if selection.duration_s > limits.max_video_duration_s:
        raise _too_long(limits)
    most_pixels = min(limits.max_decoded_pixels, max(_HARMLESS_PIXELS, limits.max_video_expansion * len(data)))
    if selection.num_decoded * first.width * first.height > most_pixels:
        raise MediaError(
            f"{selection.num_decoded} frames of {first.width} x {first.height} must be decoded for those that are wanted, "
            f"and for a clip of {len(data)} bytes {most_pixels:.3g} pixels are accepted (max_decoded_pixels, "
            "max_video_expansion); send a smaller clip, or one with more keyframes"
        )
    orientation = _orientation(first)
    shown_width, shown_height = _shown_size(stream, first)
    check_size("the clip, as it is shown,", shown_width, shown_height, limits.max_frame_pixels, limits.max_aspect_ratio)
    width, height = scaled_size(shown_width, shown_height, spec.max_pixels)
    if orientation in SWAPPING_ORIENTATIONS:
        width, height = height, width
    return ClipHeader(
        width=width,
        height=height,
        orientation=orientation,
        selection=selection,
        max_frame_pixels=limits.max_frame_pixels,
        track=stream.index,
        shortfalls=tuple(shortfalls),
        max_missing_share=limits.max_missing_share,
    )


def _shown_size(stream: VideoStream, frame: VideoFrame) -> tuple[int, int]:
    """The size that a frame is shown with, before it is turned: pixels may be wider than high, or the other way round."""
    ratio = stream.sample_aspect_ratio
    if not ratio or ratio <= 0:
        return frame.width, frame.height
    return max(1, round(frame.width * ratio)), frame.height


def decode_into(
    data: bytes, header: ClipHeader, target: NDArray[np.uint8], background: tuple[int, int, int] = _WHITE
) -> DecodedClip:
    """Decodes the chosen frames of a clip into the caller's memory.

    Args:
        data: what :func:`probe` was given.
        header: what it returned.
        target: (frames, height, width, 3), uint8; becomes RGB. After an error its content is undefined.
        background: the colour behind transparent pixels of an animation.

    Raises:
        MediaError: it is damaged.
        ValueError: the target has another shape or dtype.
    """
    if target.shape != header.shape or target.dtype != np.uint8:
        raise ValueError(f"the target is {target.dtype} {target.shape}, the clip needs uint8 {header.shape}")
    if header.is_animation:
        timestamps_s = decode_frames(data[demuxer_of(data)[1] :], header.selection, target, background)
        return DecodedClip(timestamps_s=timestamps_s, duration_s=header.selection.duration_s)
    writer = _FrameWriter(header, target)
    with opened(data, "clip", VIDEO_DECODERS, header.max_frame_pixels) as file:
        stream = file.container.streams[header.track]
        assert isinstance(stream, VideoStream), "a header belongs to its file"
        prepare_decoder(stream, header.max_frame_pixels)
        _decode(file.container, stream, writer)
    shortfalls = [*header.shortfalls, *missing_packets(writer.num_damaged, writer.num_attempted, "frames")]
    num_wanted, num_written = len(header.selection.positions), len(writer.timestamps_s)
    if writer.num_damaged and num_written < num_wanted:  # a decoder may give nothing until the next keyframe
        shortfalls += missing_packets(num_wanted - num_written, num_wanted, "wanted frames")
    shortfall = accepted_shortfall("clip", shortfalls, header.max_missing_share)
    if not writer.timestamps_s:
        raise MediaError("the clip is damaged: none of its frames can be decoded")
    duration_s = header.selection.duration_s
    return DecodedClip(timestamps_s=writer.timestamps_s, duration_s=duration_s, shortfall=shortfall)


def _too_long(limits: MediaLimits) -> MediaError:
    return MediaError(f"the clip is longer than the {limits.max_video_duration_s:g} s that are accepted")


def _packets(container: av.container.InputContainer, stream: VideoStream) -> Iterator[Packet[VideoStream]]:
    """Yields all packets that are not empty; both passes count these. The caller drains the decoder at the end."""
    is_gif = container.format.name == "gif"
    shift = 0
    for packet in container.demux(stream):
        if not packet.size:
            continue
        if is_gif and packet.pts is not None:
            packet.pts += shift
            packet.dts = packet.pts
            if (packet.duration or 0) < _MIN_GIF_DURATION:
                shift += _SHORT_GIF_DURATION - (packet.duration or 0)
                packet.duration = _SHORT_GIF_DURATION
        yield packet


def _scan(
    container: av.container.InputContainer, stream: VideoStream, limits: MediaLimits
) -> tuple[Timeline, VideoFrame | None, int]:
    """Reads all packets, and decodes until there is a frame; counts packets that are there in part."""
    if stream.time_base is None:
        raise MediaError("the clip is damaged: it has no unit of time")
    demuxer = container.format.name.split(",")[0]
    timeline = Timeline(stream.time_base, stream.average_rate or stream.guessed_rate, demuxer in _TRUSTED_KEYFRAMES)
    first: VideoFrame | None = None
    num_corrupt = num_tried = 0
    for packet in _packets(container, stream):
        if timeline.num_packets >= limits.max_coded_frames:
            raise MediaError(f"the clip has more than the {limits.max_coded_frames} frames that are accepted")
        position = packet.pts if demuxer not in _WITHOUT_TIMESTAMPS else None
        num_corrupt += packet.is_corrupt
        is_shown = not packet.is_discard and not (stream.codec_context.name == "vp8" and _is_hidden_vp8(packet))
        is_usable = not packet.is_corrupt
        timeline.add(position, packet.duration or 0, packet.is_keyframe and is_usable, is_shown and is_usable)
        if timeline.span_s() > limits.max_video_duration_s:
            raise _too_long(limits)
        if first is None and is_usable:
            num_tried += 1
            if num_tried > _MAX_UNDECODABLE:
                reason = f"the clip is damaged: none of its first {_MAX_UNDECODABLE} frames can be decoded"
                raise _NothingDecodableError(reason)
            first = _first_frame(stream, packet)
    return timeline, first if first is not None else _first_frame(stream, None), num_corrupt


def _first_frame(stream: VideoStream, packet: Packet[VideoStream] | None) -> VideoFrame | None:
    """Packets before the first keyframe that can't be decoded are no error."""
    try:
        frames = stream.codec_context.decode(packet)
    except (av.error.InvalidDataError, av.error.EOFError):
        return None
    return frames[0] if frames else None


def _is_hidden_vp8(packet: Packet[VideoStream]) -> bool:
    """VP8 stores frames that are never shown, and that other frames refer to, in packets of their own (RFC 6386, 9.1:
    ``show_frame``)."""
    return not bytes(memoryview(packet)[:1])[0] & 0x10


def _orientation(frame: VideoFrame) -> int:
    """How a frame must be turned, as EXIF numbers it; 1 if the angle is no multiple of 90 degrees."""
    side_data = cast("Mapping[SideDataType, Buffer]", frame.side_data)  # PyAV's stub tells of motion vectors only
    if SideDataType.DISPLAYMATRIX not in side_data:
        return 1
    matrix = bytes(side_data[SideDataType.DISPLAYMATRIX])
    if len(matrix) < 36:
        return 1
    a, b, _, c, d, *_ = struct.unpack("=9i", matrix[:36])
    signs = tuple((number > 0) - (number < 0) for number in (a, b, c, d))
    return _ORIENTATIONS.get(signs, 1)


def _decode(container: av.container.InputContainer, stream: VideoStream, writer: _FrameWriter) -> None:
    decoder = stream.codec_context
    is_decoding = False

    def decode(packet: Packet[VideoStream] | None) -> None:
        try:
            frames = decoder.decode(packet)
        except (av.error.InvalidDataError, av.error.EOFError):
            writer.num_damaged += 1
            return
        for frame in frames:
            writer.take(frame)

    for number, packet in enumerate(_packets(container, stream)):
        if writer.is_complete:
            return
        if number < writer.next_start or packet.is_corrupt:
            is_decoding = is_decoding and number >= writer.next_start
            continue
        if not is_decoding:
            decoder.flush_buffers()
            is_decoding = True
        writer.num_attempted += 1
        decode(packet)
    if is_decoding and not writer.is_complete:
        decode(None)


class _FrameWriter:
    """Takes frames in the order in which they are shown, and writes those that are wanted.

    If a wanted frame never comes, or is damaged, the next one takes its place.

    Attributes:
        timestamps_s: of what was written.
        num_attempted: packets that were decoded.
        num_damaged: of these, how many could not be, or only in part.
    """

    def __init__(self, header: ClipHeader, target: NDArray[np.uint8]) -> None:
        self.timestamps_s: list[float] = []
        self.num_attempted = self.num_damaged = 0
        self._header = header
        self._selection = header.selection
        self._target = target
        self._reformatter = VideoReformatter()
        self._next = 0
        self._num_taken = 0

    @property
    def is_complete(self) -> bool:
        return self._next == len(self._selection.positions)

    @property
    def next_start(self) -> int:
        """The number of the packet from which the next wanted frame is decoded."""
        return self._selection.starts[self._next]

    def take(self, frame: VideoFrame) -> None:
        selection = self._selection
        position = self._num_taken
        self._num_taken += 1
        if selection.has_timestamps:
            if frame.pts is None:
                return
            position = frame.pts
        self.num_damaged += frame.is_corrupt
        if self.is_complete or position < selection.positions[self._next] or frame.is_corrupt:
            return
        self._write(frame)
        self.timestamps_s.append(selection.time_of(position))
        self._next = bisect.bisect_right(selection.positions, position)

    def _write(self, frame: VideoFrame) -> None:
        if frame.width * frame.height > self._header.max_frame_pixels:
            raise MediaError(f"a frame of the clip has {frame.width} x {frame.height} pixels, more than are accepted")
        stored = as_stored(self._target[len(self.timestamps_s)], self._header.orientation)
        height, width = stored.shape[:2]
        picture = self._reformatter.reformat(frame, width, height, "rgb24", interpolation=_SCALING, threads=1)
        plane = picture.planes[0]
        rows = np.frombuffer(memoryview(plane), np.uint8).reshape(height, plane.line_size)  # padded to whole cache lines
        stored[:] = rows[:, : 3 * width].reshape(height, width, 3)
