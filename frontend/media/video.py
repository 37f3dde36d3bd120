"""Clips: decodes frames at even distances, scaled and turned, straight into the caller's memory.

Theory of operation: :func:`probe` reads all packets without decoding them. They say when each frame is shown and where decoding
can begin. It also decodes one frame, because only a decoded frame says how large frames are and how they are turned. From this,
:mod:`shmring.frontend.media.timeline` chooses frames. :func:`decode_into` reads the packets again and decodes only the packets
that the chosen frames need: it skips all packets up to the keyframe before the next chosen frame. The packets lie in memory, so
skipping them costs almost nothing. Seeking is not needed; many containers seek only approximately, or not at all. One frame is
converted at a time, so in private memory there are the decoder's reference frames and one converted one.

All frames are scaled to one size, even if their size changes within the clip. If pixels are not square, it is the size at which
frames are shown. Matrices of colours are those that the stream says, or else BT.601's; HDR and wide gamuts become sRGB
(:mod:`shmring.frontend.media.colours`); transparency is ignored. Packets that can't be decoded are left out. If a chosen frame
is damaged, the next frame takes its place; missing frames are counted (:mod:`shmring.frontend.media.damage`).

A GIF's delays of 0 and 10 ms are 100 ms, as in every browser. :mod:`shmring.frontend.media.animation` decodes animated WebPs.

Invariant: with any bytes, the only error that is raised is :class:`MediaError`.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import math
import struct
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import NamedTuple, cast

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
from PIL import Image

from shmring.engine.inputs import VideoSpec
from shmring.frontend.media.animation import decode_frames, probe_frames
from shmring.frontend.media.colours import conversion_by_numbers
from shmring.frontend.media.container import (
    VIDEO_DECODERS,
    OpenFile,
    missing_of,
    missing_pieces,
    opened,
    packets_of,
    prepare_decoder,
    split,
    track_of_piece,
    tracks,
)
from shmring.frontend.media.damage import Shortfall, accepted_shortfall, joined, largest, missing_packets, of_all_parts
from shmring.frontend.media.errors import MediaError
from shmring.frontend.media.geometry import SWAPPING_ORIENTATIONS, as_stored, check_size, scaled_size
from shmring.frontend.media.options import MediaIoKwargs, MediaLimits
from shmring.frontend.media.pieces import Piece
from shmring.frontend.media.seams import max_gap_s
from shmring.frontend.media.signatures import demuxer_of
from shmring.frontend.media.timeline import Selection, Timeline

__all__ = ["ClipHeader", "DecodedClip", "decode_into", "probe"]

# In these formats, a packet that is marked as a keyframe really is one. A GIF also marks frames that are drawn over the one
# before.
_TRUSTED_KEYFRAMES = ("mov", "matroska")
# These formats store frames at a constant rate, without timestamps. libav invents some, which are wrong if frames refer to
# later ones.
_WITHOUT_TIMESTAMPS = ("avi",)
# These formats store when each packet is decoded; for others, libav guesses it.
_WITH_DECODING_TIMES = ("mpegts",)
# In these formats, a packet that is marked as corrupt may be whole, and the next one be in part: it is decoded like others.
_WITH_SUSPECTS = ("mpegts",)

_MIN_GIF_DURATION = 2  # hundredths of a second; browsers show shorter frames for ten
_SHORT_GIF_DURATION = 10

# Bicubic, which swscale widens when it scales down, so that nothing is skipped. Without the other flag it darkens: 255 to 253.
# ACCURATE_RND would change nothing where a frame is scaled. Where it is not, it would spare the mean error of one level in
# 255 that the fast conversion makes (as OpenCV's does) and take three times as long, which is a third of a clip's decoding.
_SCALING = Interpolation.BICUBIC | Interpolation.FULL_CHR_H_INT

_WHITE = (255, 255, 255)
_HARMLESS_PIXELS = 2_000_000_000  # to decode: one to four seconds of a core
_MAX_PARTS = 1000  # each is a part of a recording, and takes 15 bytes of what decoders are told
_MAX_SHIFT = 1 << 62
_MAX_UNDECODABLE = 600  # packets before the first frame: a clip that was cut out of another has up to 10 s of them

_MAX_TILT_DEGREES = 1.0  # less is rounding

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


class PieceTrack(NamedTuple):
    """The track in a piece of the file.

    Attributes:
        stream: its number; None: the piece can't be read.
        first_packet: the number of its first packet.
        orientation: EXIF's number for how its frames are turned; 1 is as stored.
    """

    stream: int | None
    first_packet: int
    orientation: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClipHeader:
    """What a clip will be decoded to.

    Attributes:
        width, height: of its frames, turned as the container asks and scaled down.
        selection: which frames.
        max_frame_pixels: of a frame as it is stored.
        tracks: the clip's, in each piece of its file.
        time_base: seconds of one unit of time in the first piece.
        shortfalls: the missing parts, as far as they are known before decoding.
        max_missing_share: how much may be.
        is_animation: it is a picture that moves, and :mod:`shmring.frontend.media.animation` decodes it.
    """

    width: int
    height: int
    selection: Selection
    max_frame_pixels: int
    tracks: tuple[PieceTrack, ...] = ()
    time_base: Fraction = Fraction(1)
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
            selection=selection,
            max_frame_pixels=limits.max_frame_pixels,
            is_animation=True,
        )
    pieces = split(data)
    number = 0
    while True:  # a track may be there and hold nothing that can be decoded
        with opened(pieces[0], "clip", VIDEO_DECODERS, limits.max_frame_pixels) as file:
            candidates = _tracks(file)
            is_last = number + 1 == len(candidates)
            try:
                return _probe_track(pieces, file, candidates[number], num_frames, spec, limits, io_kwargs)
            except _NothingDecodableError:
                if is_last:
                    raise
        number += 1


class _NothingDecodableError(MediaError):
    """A track has no frame that can be decoded."""


def _tracks(file: OpenFile) -> list[VideoStream]:
    return tracks(file.container.streams.video, "clip", VIDEO_DECODERS, file.container.format.name)


def _probe_track(
    pieces: list[Piece],
    file: OpenFile,
    stream: VideoStream,
    num_frames: int,
    spec: VideoSpec,
    limits: MediaLimits,
    io_kwargs: MediaIoKwargs,
) -> ClipHeader:
    scan = _Scan(file, stream, limits)
    scan.read(file, stream)
    for piece in pieces[1:]:
        scan.read_further(piece)
    timeline, first = scan.timeline, scan.first
    shortfalls = [*of_all_parts(scan.missing), *missing_pieces(pieces, scan.unread)]
    if file.demuxer in _TRUSTED_KEYFRAMES and timeline.num_unreachable:
        cause = f"its first {timeline.num_unreachable} frames come before a frame from which decoding can begin"
        shortfalls.append(Shortfall(missing=0, promised=0, unit="", cause=cause, is_damage=False))
    if not shortfalls:  # if a file ends early, a part of the last frame is there
        shortfalls += missing_packets(timeline.num_corrupt, timeline.num_packets, "frames", "are incomplete")
    shortfalls = [*largest(shortfalls), *joined(timeline.seams_s)]
    accepted_shortfall("clip", shortfalls, limits.max_missing_share)
    selection = timeline.select(num_frames, io_kwargs.fps)
    if selection is None or first is None:
        raise _NothingDecodableError("the clip is damaged or empty: none of its frames can be decoded")
    if any(abs(shift) > _MAX_SHIFT for _, shift in selection.shifts):
        raise MediaError("the clip is damaged: its times are too far from each other")
    if selection.duration_s > limits.max_video_duration_s:
        raise _too_long(limits)
    nbytes = sum(piece.nbytes for piece in pieces)
    most_pixels = min(limits.max_decoded_pixels, max(_HARMLESS_PIXELS, limits.max_video_expansion * nbytes))
    if selection.num_decoded * scan.num_pixels > most_pixels:
        raise MediaError(
            f"{selection.num_decoded} frames of {first.width} x {first.height} must be decoded for those that are wanted, "
            f"and for a clip of {nbytes} bytes {most_pixels:.3g} pixels are accepted (max_decoded_pixels, "
            "max_video_expansion); send a smaller clip, or one with more keyframes"
        )
    orientation, degrees = _orientation(first)
    if degrees > _MAX_TILT_DEGREES:
        cause = f"it is to be turned by {degrees:.0f} degrees more than it is; frames are turned by right angles only"
        shortfalls.append(Shortfall(missing=0, promised=0, unit="", cause=cause, is_damage=False))
    shown_width, shown_height = _shown_size(stream, first)
    check_size("the clip, as it is shown,", shown_width, shown_height, limits.max_frame_pixels, limits.max_aspect_ratio)
    width, height = scaled_size(shown_width, shown_height, spec.max_pixels)
    if orientation in SWAPPING_ORIENTATIONS:
        width, height = height, width
    return ClipHeader(
        width=width,
        height=height,
        selection=selection,
        max_frame_pixels=limits.max_frame_pixels,
        tracks=tuple(scan.tracks),
        time_base=scan.time_base,
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
    ends = [track.first_packet for track in header.tracks[1:]] + [None]
    for piece, track, end in zip(split(data), header.tracks, ends, strict=True):
        if writer.is_complete:
            break
        if track.stream is None or (end is not None and end <= writer.next_start):
            continue
        with opened(piece, "clip", VIDEO_DECODERS, header.max_frame_pixels) as file:
            stream = file.container.streams[track.stream]
            assert isinstance(stream, VideoStream), "a header belongs to its file"
            prepare_decoder(stream, header.max_frame_pixels)
            writer.orientation = track.orientation
            _decode(file, stream, track.first_packet, writer)
    shortfalls = [*header.shortfalls, *missing_packets(writer.num_damaged, writer.num_attempted, "frames"), *writer.losses]
    num_wanted, num_written = len(header.selection.positions), len(writer.timestamps_s)
    if num_written < num_wanted:
        lacking = missing_packets(num_wanted - num_written, num_wanted, "wanted frames")
        if writer.num_damaged:  # a decoder may give nothing until the next keyframe
            shortfalls += lacking
        else:  # their times are others than the file says, or two packets make one frame
            cause = f"{num_wanted - num_written} of {num_wanted} wanted frames do not come at their times"
            shortfalls.append(Shortfall(missing=0, promised=0, unit="", cause=cause, is_damage=False))
    shortfall = accepted_shortfall("clip", shortfalls, header.max_missing_share)
    if not writer.timestamps_s:
        raise MediaError("the clip is damaged: none of its frames can be decoded")
    duration_s = header.selection.duration_s
    return DecodedClip(timestamps_s=writer.timestamps_s, duration_s=duration_s, shortfall=shortfall)


def _too_long(limits: MediaLimits) -> MediaError:
    return MediaError(f"the clip is longer than the {limits.max_video_duration_s:g} s that are accepted")


def _packets(file: OpenFile, stream: VideoStream, time_base: Fraction) -> Iterator[Packet[VideoStream]]:
    """Yields all packets that are not empty, their times in some unit; both passes count these.

    The caller drains the decoder at the end.
    """
    is_gif = file.demuxer == "gif"
    unit = (stream.time_base or time_base) / time_base
    shift = 0
    for packet in packets_of(file, stream):
        if not packet.size:
            continue
        if unit != 1:
            packet.pts = round(packet.pts * unit) if packet.pts is not None else None
            packet.dts = round(packet.dts * unit) if packet.dts is not None else None
            packet.duration = round((packet.duration or 0) * unit)
        if is_gif and packet.pts is not None:
            packet.pts += shift
            packet.dts = packet.pts
            if (packet.duration or 0) < _MIN_GIF_DURATION:
                shift += _SHORT_GIF_DURATION - (packet.duration or 0)
                packet.duration = _SHORT_GIF_DURATION
        yield packet


class _Scan:
    """Reads all packets, and decodes of each piece until there is a frame.

    Attributes:
        timeline: of all pieces.
        time_base: its unit.
        first: the first frame.
        num_pixels: of the largest of the frames that were decoded.
        tracks: the clip's, in each piece.
        missing: what is missing of those that can be read, and how many seconds of each there are.
        unread: those that can't.
    """

    def __init__(self, file: OpenFile, stream: VideoStream, limits: MediaLimits) -> None:
        if stream.time_base is None:
            raise MediaError("the clip is damaged: it has no unit of time")
        rate = stream.average_rate or stream.guessed_rate
        gap_s = max_gap_s(file.demuxer, limits.max_video_duration_s)
        self.timeline = Timeline(stream.time_base, rate, file.demuxer in _TRUSTED_KEYFRAMES, gap_s)
        self.time_base = stream.time_base
        self.first: VideoFrame | None = None
        self.num_pixels = 0
        self.tracks: list[PieceTrack] = []
        self.missing: list[tuple[list[Shortfall], float]] = []
        self.unread: list[tuple[Piece, MediaError]] = []
        self._limits = limits
        self._first_index = stream.index

    def read(self, file: OpenFile, stream: VideoStream) -> None:
        """Reads a piece."""
        limits, timeline = self._limits, self.timeline
        first_packet, orientation = timeline.num_packets, 1
        prepare_decoder(stream, limits.max_frame_pixels)
        width, height = stream.codec_context.width, stream.codec_context.height
        if width or height:
            check_size("the clip", width, height, limits.max_frame_pixels, limits.max_aspect_ratio)
        frame = self._read_packets(file, stream)
        if frame is not None:
            check_size("the clip", frame.width, frame.height, limits.max_frame_pixels, limits.max_aspect_ratio)
            self.num_pixels = max(self.num_pixels, frame.width * frame.height)
            self.first = self.first or frame
            orientation, _ = _orientation(frame)
        self.tracks.append(PieceTrack(stream.index, first_packet, orientation))
        end_s = timeline.piece_end_s()
        missing = missing_of(file, stream, "clip", VIDEO_DECODERS, end_s, limits.max_video_nbytes, limits.max_video_duration_s)
        self.missing.append(([*file.shortfalls, *missing], end_s))

    def read_further(self, piece: Piece) -> None:
        """Reads a piece that is not the first; if that is impossible, it is missing."""
        self.timeline.begin_piece()
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(opened(piece, "clip", VIDEO_DECODERS, self._limits.max_frame_pixels))
                stream = track_of_piece(_tracks(file), self._first_index)
            except MediaError as error:
                self.tracks.append(PieceTrack(None, self.timeline.num_packets))
                self.unread.append((piece, error))
                return
            self.read(file, stream)

    def _read_packets(self, file: OpenFile, stream: VideoStream) -> VideoFrame | None:
        limits, timeline = self._limits, self.timeline
        first: VideoFrame | None = None
        num_tried = 0
        for packet in _packets(file, stream, self.time_base):
            if timeline.num_packets >= limits.max_coded_frames:
                raise MediaError(f"the clip has more than the {limits.max_coded_frames} frames that are accepted")
            is_usable = _is_usable(packet, file)
            is_shown = not packet.is_discard and not (stream.codec_context.name == "vp8" and _is_hidden_vp8(packet))
            timeline.add(
                packet.pts if file.demuxer not in _WITHOUT_TIMESTAMPS else None,
                packet.duration or 0,
                packet.is_keyframe and is_usable,
                is_shown and is_usable,
                decoded=packet.dts if file.demuxer in _WITH_DECODING_TIMES else None,
                is_corrupt=packet.is_corrupt,
            )
            if timeline.span_s() > limits.max_video_duration_s:
                raise _too_long(limits)
            if timeline.num_parts > _MAX_PARTS:
                raise MediaError(f"the clip is damaged: its times begin anew in more than {_MAX_PARTS} places")
            if first is None and is_usable:
                num_tried += 1
                if num_tried > _MAX_UNDECODABLE:
                    reason = f"the clip is damaged: none of its first {_MAX_UNDECODABLE} frames can be decoded"
                    raise _NothingDecodableError(reason)
                first = _first_frame(stream, packet)
        return first if first is not None else _first_frame(stream, None)


def _is_usable(packet: Packet[VideoStream], file: OpenFile) -> bool:
    return not packet.is_corrupt or file.demuxer in _WITH_SUSPECTS


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


def _orientation(frame: VideoFrame) -> tuple[int, float]:
    """How a frame must be turned, as EXIF numbers it, and how many degrees the container asks for beside that.

    It may ask for any angle; frames are turned to the nearest of right angles.
    """
    side_data = cast("Mapping[SideDataType, Buffer]", frame.side_data)  # PyAV's stub tells of motion vectors only
    if SideDataType.DISPLAYMATRIX not in side_data:
        return 1, 0.0
    matrix = bytes(side_data[SideDataType.DISPLAYMATRIX])
    if len(matrix) < 36:
        return 1, 0.0
    a, b, _, c, d, *_ = struct.unpack("=9i", matrix[:36])
    alike = {
        orientation: sum(number * sign for number, sign in zip((a, b, c, d), signs, strict=True))
        for signs, orientation in _ORIENTATIONS.items()
    }
    nearest = max(alike, key=lambda orientation: alike[orientation])  # the first one, as it is stored, if all are 0
    diagonals = math.hypot(a, d), math.hypot(b, c)
    across, along = sorted(diagonals)
    return nearest, math.degrees(math.atan2(across, along))


def _decode(file: OpenFile, stream: VideoStream, first_packet: int, writer: _FrameWriter) -> None:
    """Decodes what is wanted of a piece, whose first packet has that number."""
    decoder, selection = stream.codec_context, writer.selection
    is_decoding = False

    def decode(packet: Packet[VideoStream] | None) -> None:
        try:
            frames = decoder.decode(packet)
        except (av.error.InvalidDataError, av.error.EOFError):
            writer.num_damaged += 1
            return
        for frame in frames:
            writer.take(frame)

    for number, packet in enumerate(_packets(file, stream, writer.time_base), first_packet):
        if writer.is_complete:
            return
        if number < writer.next_start or not _is_usable(packet, file):
            is_decoding = is_decoding and number >= writer.next_start
            continue
        if not is_decoding:
            decoder.flush_buffers()
            is_decoding = True
        if selection.has_timestamps and packet.pts is not None:
            packet.pts += selection.shift_of(number)
        writer.num_attempted += 1
        decode(packet)
    if is_decoding and not writer.is_complete:
        decode(None)


class _FrameWriter:
    """Takes frames in the order in which they are shown, and writes those that are wanted.

    If a wanted frame never comes, or is damaged, the next one takes its place.

    Attributes:
        selection: what is wanted.
        time_base: the unit of its positions.
        orientation: of the frames that come, as EXIF numbers it.
        timestamps_s: of what was written.
        num_attempted: packets that were decoded.
        num_damaged: of these, how many could not be, or only in part.
        losses: what sRGB does not have of the frames' colours.
    """

    def __init__(self, header: ClipHeader, target: NDArray[np.uint8]) -> None:
        self.orientation = 1
        self.timestamps_s: list[float] = []
        self.num_attempted = self.num_damaged = 0
        self.losses: dict[Shortfall, None] = {}
        self._header = header
        self.selection = header.selection
        self.time_base = header.time_base
        self._target = target
        self._reformatter = VideoReformatter()
        self._next = 0
        self._num_taken = 0

    @property
    def is_complete(self) -> bool:
        return self._next == len(self.selection.positions)

    @property
    def next_start(self) -> int:
        """The number of the packet from which the next wanted frame is decoded."""
        return self.selection.starts[self._next]

    def take(self, frame: VideoFrame) -> None:
        selection = self.selection
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
        stored = as_stored(self._target[len(self.timestamps_s)], self.orientation)
        height, width = stored.shape[:2]
        picture = self._reformatter.reformat(frame, width, height, "rgb24", interpolation=_SCALING, threads=1)
        plane = picture.planes[0]
        rows = np.frombuffer(memoryview(plane), np.uint8).reshape(height, plane.line_size)  # padded to whole cache lines
        stored[:] = rows[:, : 3 * width].reshape(height, width, 3)
        to_srgb = conversion_by_numbers(frame.color_primaries, frame.color_trc)
        if to_srgb is not None:
            stored[:] = np.asarray(to_srgb.apply(Image.fromarray(np.ascontiguousarray(stored))))
            self.losses |= dict.fromkeys(to_srgb.losses)
