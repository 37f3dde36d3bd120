"""Clips: the frames that are wanted, at their times, from every container and codec that is accepted."""

from __future__ import annotations

import io
import re
import struct
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from shmring.engine.protocol import VideoSpec
from shmring.frontend.media import video
from shmring.frontend.media.errors import MediaError
from shmring.frontend.media.options import MediaIoKwargs, MediaLimits
from shmring.frontend.media.video import ClipHeader, DecodedClip, decode_into, probe
from tests.frontend.media.conftest import remuxed
from tests.frontend.media.test_colours import INVISIBLE, OTHERS
from tests.tables import for_each

Array = np.ndarray[Any, Any]
Clip = Callable[..., bytes]

LIMITS = MediaLimits()
NUM_FRAMES = 50
LEVELS = [16 + 4 * number for number in range(NUM_FRAMES)]


def prepared(data: bytes, limits: MediaLimits = LIMITS, io_kwargs: MediaIoKwargs | None = None, **spec: Any) -> ClipHeader:
    return probe(data, VideoSpec(**{"num_frames": 8, **spec}), limits, io_kwargs or MediaIoKwargs())


def decoded(data: bytes, limits: MediaLimits = LIMITS, **spec: Any) -> tuple[Array, DecodedClip]:
    header = prepared(data, limits, **spec)
    target = np.full(header.shape, 77, np.uint8)
    clip = decode_into(data, header, target)
    assert (target[len(clip.timestamps_s) :] == 77).all()
    return target[: len(clip.timestamps_s)], clip


def numbers(frames: Array) -> list[int]:
    """Which frames they are, by their level of grey in the lower right."""
    return [round((float(frame[-12:, -12:].mean()) - 16) / 4) for frame in frames]


def expected_numbers(count: int = 8, total: int = NUM_FRAMES) -> list[int]:
    return np.linspace(0, total - 1, count).astype(int).tolist()


def animated(pictures: list[Image.Image], durations: int | list[int], name: str, **options: Any) -> bytes:
    file = io.BytesIO()
    options |= {"lossless": True} if name == "WEBP" else {}
    pictures[0].save(file, name, save_all=True, append_images=pictures[1:], duration=durations, loop=0, **options)
    return file.getvalue()


FORMATS = [
    ("mp4", "libx264", {}),
    ("mp4", "libx264", {"g": "7"}),
    ("mov", "libx264", {"g": "8", "x264-params": "open-gop=1:bframes=3"}),
    ("mp4", "mpeg4", {}),
    ("mp4", "libx265", {"x265-params": "log-level=none:pools=none", "g": "9"}),
    ("matroska", "libx264", {"g": "12"}),
    ("webm", "libvpx", {"auto-alt-ref": "1", "lag-in-frames": "16", "g": "20", "deadline": "realtime"}),
    ("webm", "libvpx-vp9", {"deadline": "realtime"}),
    ("matroska", "mjpeg", {"pixel_format": "yuvj420p"}),
    ("avi", "mpeg4", {"bf": "2"}),
    ("gif", "gif", {"pixel_format": "gray"}),
]


@for_each(("container", "codec", "options"), FORMATS)
def test_the_frames_that_are_wanted_come_out_and_so_do_all(
    clip_of: Clip, container: str, codec: str, options: dict[str, str]
) -> None:
    data = clip_of(LEVELS, container, codec, **options)
    frames, clip = decoded(data)
    assert numbers(frames) == expected_numbers()
    np.testing.assert_allclose(clip.timestamps_s, [number / 25 for number in expected_numbers()], atol=0.002)
    assert clip.duration_s == pytest.approx(NUM_FRAMES / 25, abs=0.05)
    assert (frames[:, 5:20, 5:30] > 240).all()
    assert numbers(decoded(data, num_frames=500)[0]) == list(range(NUM_FRAMES))


@for_each("num_frames", [1, 2, 49, 50])
def test_any_number_of_frames(clip_of: Clip, num_frames: int) -> None:
    frames, _ = decoded(clip_of(LEVELS, g="10"), num_frames=num_frames)
    assert numbers(frames) == expected_numbers(num_frames)


def test_only_what_is_needed_is_decoded(clip_of: Clip, monkeypatch: pytest.MonkeyPatch) -> None:
    data = clip_of(LEVELS * 10, "mp4", "libx264", g="10", bf="0")
    header = prepared(data, num_frames=4)
    assert header.selection.num_decoded <= 40
    timestamps = []
    take = video._FrameWriter.take
    monkeypatch.setattr(video._FrameWriter, "take", lambda writer, frame: (timestamps.append(frame.pts), take(writer, frame)))
    decode_into(data, header, np.empty(header.shape, np.uint8))
    assert len(timestamps) <= 44


# -- time -----------------------------------------------------------------------------------------------------------------


@for_each("container", ["mp4", "matroska"])
def test_frames_may_come_at_any_rate(clip_of: Clip, container: str) -> None:
    times = [0, 1, 2, 3, 50, 51, 100, 250]
    frames, clip = decoded(clip_of(LEVELS[:8], container, times=times), num_frames=4)
    assert numbers(frames) == [0, 2, 4, 7]
    np.testing.assert_allclose(clip.timestamps_s, [0, 2 / 25, 2, 10], atol=0.002)


@for_each("start", [-40, 1000])
def test_time_begins_with_the_first_frame(clip_of: Clip, start: int) -> None:
    data = clip_of(LEVELS, "matroska", "mpeg4", times=range(start, start + NUM_FRAMES))
    frames, clip = decoded(data, num_frames=3)
    assert numbers(frames) == [0, 24, 49]
    np.testing.assert_allclose(clip.timestamps_s, [0, 24 / 25, 49 / 25], atol=0.002)


def test_what_an_edit_list_cuts_is_not_shown(clip_of: Clip) -> None:
    data = bytearray(clip_of(LEVELS, bf="0"))
    edit = data.index(b"elst") + 12  # version, flags and the number of edits; then duration and media time
    time = data.index(b"mdhd") + 16
    scale = int.from_bytes(data[time : time + 4], "big")
    data[edit + 4 : edit + 8] = (scale * 20 // 25).to_bytes(4, "big")  # begins with frame 20
    frames, clip = decoded(bytes(data), num_frames=100)
    assert numbers(frames)[0] == 20
    assert clip.timestamps_s[:2] == pytest.approx([0, 1 / 25])


@for_each("mode", ["RGB", "RGBA"])
def test_an_animated_avif_is_a_clip(mode: str) -> None:
    frames = [Image.fromarray(np.full((64, 96, 3), level, np.uint8)).convert(mode) for level in LEVELS[:20]]
    for frame in frames[1:] if mode == "RGBA" else ():
        frame.putalpha(128)
    shown, clip = decoded(animated(frames, 40, "AVIF", quality=95), num_frames=100)
    assert numbers(shown) == list(range(20))
    np.testing.assert_allclose(clip.timestamps_s, [number / 25 for number in range(20)], atol=0.002)
    assert clip.shortfall == ""


def test_frames_that_nobody_sees_are_not_counted(clip_of: Clip) -> None:
    def hide(file: int, number: int, packet: av.Packet[Any]) -> av.Packet[Any]:
        frame = bytearray(bytes(packet))
        if number % 10 == 9:
            frame[0] &= ~0x10  # VP8's show_frame
        changed = av.Packet(bytes(frame))
        changed.pts, changed.dts, changed.time_base = packet.pts, packet.dts, packet.time_base
        changed.is_keyframe = packet.is_keyframe
        return changed

    data = remuxed(clip_of(LEVELS, "webm", "libvpx", deadline="realtime"), container="webm", edit=hide)
    frames, _ = decoded(data, num_frames=100)
    assert numbers(frames) == [number for number in range(NUM_FRAMES) if number % 10 != 9]
    assert prepared(data, num_frames=100).shape[0] == 45


def test_a_clip_in_fragments_has_no_index(clip_of: Clip) -> None:
    data = clip_of(LEVELS, g="10", container_options={"movflags": "frag_keyframe+empty_moov"})
    frames, _ = decoded(data)
    assert numbers(frames) == expected_numbers()


def test_a_webm_that_was_streamed_has_no_duration(clip_of: Clip) -> None:
    class Pipe(io.RawIOBase):
        def __init__(self) -> None:
            self.data = bytearray()

        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            self.data += data
            return len(data)

    pipe = Pipe()
    remuxed(clip_of(LEVELS, "webm", "libvpx", deadline="realtime"), container="webm", into=pipe, live="1")
    with av.open(io.BytesIO(pipe.data)) as streamed:
        assert streamed.duration is None
    frames, clip = decoded(bytes(pipe.data))
    assert numbers(frames) == expected_numbers()
    assert clip.duration_s == pytest.approx(2, abs=0.05)


# -- what frames look like ------------------------------------------------------------------------------------------------


@for_each(("rotation", "corner"), [(0, (0, 0)), (90, (1, 0)), (180, (1, 1)), (-90, (0, 1))])
def test_frames_are_turned_as_the_container_asks(clip_of: Clip, rotation: int, corner: tuple[int, int]) -> None:
    frames, _ = decoded(clip_of(LEVELS, rotation=rotation))
    assert frames.shape[1:] == ((96, 64, 3) if rotation in (90, -90) else (64, 96, 3))
    quarters = frames[0].reshape(2, frames.shape[1] // 2, 2, frames.shape[2] // 2, 3).mean(axis=(1, 3, 4))
    assert np.unravel_index(quarters.argmax(), (2, 2)) == corner


@for_each(
    ("rotation", "size", "degrees"),
    [
        (45, (64, 96), 45),
        (30, (64, 96), 30),
        (80, (96, 64), 10),
        (-135, (64, 96), 45),
        (89.5, (96, 64), 0),
        (-179.5, (64, 96), 0),
    ],
)
def test_frames_are_turned_by_right_angles_and_what_is_missing_is_told(
    clip_of: Clip, rotation: float, size: tuple[int, int], degrees: int
) -> None:
    frames, clip = decoded(clip_of(LEVELS, rotation=rotation))
    assert frames.shape[1:3] == size
    turned = f"it is to be turned by {degrees} degrees more than it is; frames are turned by right angles only"
    assert clip.shortfall == (f"the clip is not as its file says: {turned}" if degrees else "")


@for_each("max_pixels", [1000, 6143])
def test_larger_frames_are_scaled_down(clip_of: Clip, max_pixels: int) -> None:
    frames, _ = decoded(clip_of(LEVELS, size=(192, 128)), max_pixels=max_pixels)
    _, height, width, _ = frames.shape
    assert 0.9 * max_pixels < width * height <= max_pixels
    assert width / height == pytest.approx(1.5, rel=0.05)
    assert numbers(frames) == expected_numbers()


def test_scaled_frames_are_turned_too(clip_of: Clip) -> None:
    frames, _ = decoded(clip_of(LEVELS, size=(192, 128), rotation=90), max_pixels=192 * 128 // 4)
    assert frames.shape[1:] == (96, 64, 3)
    assert frames[0, 60:90, :25].min() > 240


def test_smaller_frames_are_not_scaled(clip_of: Clip) -> None:
    assert decoded(clip_of(LEVELS), max_pixels=96 * 64)[0].shape[1:] == (64, 96, 3)


def test_odd_sizes_have_no_padding_in_them() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 37, 53), np.uint8)
    frames, _ = decoded(animated([Image.fromarray(frame) for frame in pixels], 100, "GIF"))
    np.testing.assert_array_equal(frames, np.repeat(pixels[..., np.newaxis], 3, axis=3))


def test_frames_that_change_their_size_are_scaled_to_the_first(clip_of: Clip) -> None:
    def later(file: int, number: int, packet: av.Packet[Any]) -> av.Packet[Any]:
        packet.pts = packet.dts = packet.pts + 200 * file  # type: ignore[operator] # it has one
        return packet

    mjpeg = {"container": "matroska", "codec": "mjpeg", "pixel_format": "yuvj420p"}
    parts = [clip_of(LEVELS[:5], **mjpeg), clip_of(LEVELS[5:10], **mjpeg, size=(48, 32))]
    frames, _ = decoded(remuxed(*parts, container="matroska", edit=later), num_frames=10)
    assert frames.shape == (10, 64, 96, 3)
    assert numbers(frames) == list(range(10))


# -- how many -------------------------------------------------------------------------------------------------------------


def test_the_server_may_want_another_number(clip_of: Clip) -> None:
    data = clip_of(LEVELS)
    assert prepared(data, io_kwargs=MediaIoKwargs(num_frames=3)).shape[0] == 3
    assert prepared(data, io_kwargs=MediaIoKwargs(num_frames=-1)).shape[0] == NUM_FRAMES
    assert prepared(data, io_kwargs=MediaIoKwargs(fps=2.0)).shape[0] == 4
    assert prepared(data, io_kwargs=MediaIoKwargs(num_frames=3, fps=2.0)).shape[0] == 3


def test_all_frames_are_so_many_as_are_accepted(clip_of: Clip) -> None:
    limits = MediaLimits(max_num_frames=20)
    assert prepared(clip_of(LEVELS), limits, MediaIoKwargs(num_frames=-1)).shape[0] == 20
    assert prepared(clip_of(LEVELS), limits, num_frames=30).shape[0] == 20


# -- what is refused, and when --------------------------------------------------------------------------------------------


@for_each(
    ("limits", "reason"),
    [
        (MediaLimits(max_video_nbytes=100), "more than the 100"),
        (MediaLimits(max_frame_pixels=6143), "96 x 64 pixels, more than the 6143"),
        (MediaLimits(max_aspect_ratio=1.4), "96 x 64 pixels: sides"),
        (MediaLimits(max_video_duration_s=1.5), r"longer than the 1.5 s"),
        (MediaLimits(max_coded_frames=49), "more than the 49 frames"),
        (MediaLimits(max_decoded_pixels=40 * 96 * 64), r"\d\d frames of 96 x 64 must be decoded"),
    ],
)
def test_what_exceeds_a_limit_is_refused(clip_of: Clip, limits: MediaLimits, reason: str) -> None:
    with pytest.raises(MediaError, match=reason):
        prepared(clip_of(LEVELS), limits)


def test_limits_themselves_are_accepted(clip_of: Clip) -> None:
    limits = MediaLimits(
        max_frame_pixels=6144,
        max_video_duration_s=2.0,
        max_coded_frames=50,
        max_decoded_pixels=50 * 96 * 64,
        max_aspect_ratio=1.5,
    )
    assert prepared(clip_of(LEVELS), limits).shape == (8, 64, 96, 3)


@for_each("box", [b"trak", b"tkhd", b"mdia", b"mdhd"])
def test_an_index_that_is_damaged_is_not_missing(clip_of: Clip, box: bytes) -> None:
    data = clip_of(LEVELS)
    place, index = data.index(box), data.index(b"moov")
    damaged = data[: place - 4] + b"\0\0\0\3" + data[place:]
    unknown = data[: index - 4] + b"\x7f\0\0\0????" + data[index + 4 :]  # so that the last box seems to be cut
    for altered in (damaged, unknown):
        with pytest.raises(MediaError, match="the clip is damaged: the index of the MP4 can't be read"):
            prepared(altered)
    with pytest.raises(MediaError, match="the clip is damaged: it is an MP4 without an index"):
        prepared(data[: index - 4] + bytes(len(data) - index + 4))
    with pytest.raises(MediaError, match="the clip is truncated: it is an MP4 without its index, which is at its end"):
        prepared(data[: index - 100])
    with pytest.raises(MediaError, match="damaged or truncated"):
        prepared(data[: index - 4])


def with_index_first(data: bytes, tmp_path: Path) -> bytes:
    path = tmp_path / "fast.mp4"  # libav moves the index to the front only of a file that has a name
    remuxed(data, into=str(path), movflags="faststart")
    return path.read_bytes()


def test_an_mp4_without_its_end_is_taken_as_far_as_it_goes_or_refused(clip_of: Clip, tmp_path: Path) -> None:
    data = with_index_first(clip_of(LEVELS, bf="0"), tmp_path)
    frames, clip = decoded(data)
    assert (numbers(frames), clip.shortfall) == (expected_numbers(), "")
    for nbytes in range(1, 100, 7):
        frames, clip = decoded(data[:-nbytes], num_frames=100)
        missing = NUM_FRAMES - len(frames)
        assert 1 <= missing <= 5
        assert numbers(frames) == list(range(len(frames)))
        assert clip.shortfall == f"the clip is damaged or truncated: {missing} of 50 frames ({2 * missing} %) are missing"
    with pytest.raises(MediaError, match="max_missing_share"):
        decoded(data[: data.index(b"mdat") + 1000])


def test_fragments_without_their_end_are_taken_as_far_as_they_go_or_refused(clip_of: Clip) -> None:
    data = clip_of(LEVELS, g="10", bf="0", container_options={"movflags": "frag_keyframe+empty_moov"})
    last = data.rindex(b"mdat")
    with pytest.raises(MediaError, match=r"\d+ of 50 frames .*max_missing_share"):
        prepared(data[: last + 50])
    assert len(prepared(data[: last + 50], MediaLimits(max_missing_share=0.2)).shortfalls) >= 1
    frames, clip = decoded(data[: data.rindex(b"moof") + 50], num_frames=100)
    assert numbers(frames) == list(range(40))
    assert clip.shortfall == "the clip is damaged or truncated: its end is missing (MP4)"


HALVES = [
    ("mp4", "libx264", {"bf": "0", "g": "5"}, "frames"),
    ("webm", "libvpx", {"deadline": "realtime"}, "s"),
    ("avi", "mpeg4", {}, "s"),
]


@for_each(("container", "codec", "options", "unit"), HALVES)
def test_half_a_clip_is_refused_and_taken_where_that_is_wanted(
    clip_of: Clip, tmp_path: Path, container: str, codec: str, options: dict[str, str], unit: str
) -> None:
    data = clip_of(LEVELS, container, codec, **options)
    data = with_index_first(data, tmp_path) if container == "mp4" else data
    begin = data.index(b"mdat") if container == "mp4" else 0  # its index is as large as its frames
    half = data[: (begin + len(data)) // 2 + len(data) // 20]
    with pytest.raises(MediaError, match=rf"the clip is damaged or truncated: .* of \d+ {unit} .*max_missing_share"):
        decoded(half)
    frames, clip = decoded(half, MediaLimits(max_missing_share=1.0), num_frames=100)
    assert numbers(frames) == list(range(len(frames)))
    assert f" {unit} (" in clip.shortfall


@for_each(("container", "codec"), [("mp4", "mpeg4"), ("mp4", "libx264"), ("matroska", "libx264")])
def test_bad_bytes_in_the_middle_cost_the_frames_that_they_are_in(clip_of: Clip, container: str, codec: str) -> None:
    data = bytearray(clip_of(LEVELS, container, codec, size=(192, 128), bf="0", g="10"))
    with av.open(io.BytesIO(data)) as source:
        packets = [packet for packet in source.demux(video=0) if packet.size]
    place = bytes(data).index(bytes(packets[25])) + 5
    count = min(64, packets[25].size - 10)  # what is behind it is another packet's
    data[place : place + count] = bytes(count)
    frames, clip = decoded(bytes(data), num_frames=100)
    assert len(frames) >= 45
    assert re.match(r"the clip is damaged or truncated: \d of 50 frames \(\d %\) can't be decoded", clip.shortfall)


def test_an_ogg_or_gif_without_its_end_says_so(clip_of: Clip) -> None:
    data = clip_of(LEVELS, "gif", "gif", pixel_format="gray")
    assert decoded(data)[1].shortfall == ""
    assert decoded(data[: len(data) // 2])[1].shortfall == "the clip is damaged or truncated: its end is missing (GIF)"


# -- formats and tracks ---------------------------------------------------------------------------------------------------


@for_each("before", [0, 100])
def test_a_transport_stream_is_a_clip(clip_of: Clip, before: int) -> None:
    frames, clip = decoded(clip_of(LEVELS, "mpegts", g="10")[before:], num_frames=100)
    assert numbers(frames)[-30:] == list(range(20, 50))
    assert clip.timestamps_s[1] - clip.timestamps_s[0] == pytest.approx(1 / 25)


def test_a_transport_stream_that_lacks_a_packet_loses_no_other_frame(clip_of: Clip) -> None:
    data = clip_of(LEVELS, "mpegts", size=(640, 480), bf="0", g="10", **{"x264-params": "qp=1"})
    packets = [data[start : start + 188] for start in range(0, len(data), 188)]
    goes_on = [number for number, packet in enumerate(packets) if packet[1:3] == b"\x01\0"]  # of a frame that began before
    lost = goes_on[3 * len(goes_on) // 4]
    frames, clip = decoded(b"".join(packets[:lost] + packets[lost + 1 :]), num_frames=100)
    assert numbers(frames) == list(range(NUM_FRAMES))
    assert clip.shortfall == "the clip is damaged or truncated: 1 of 50 frames (2 %) are incomplete"


@for_each("box", [b"uuid", b"free", b"emsg"])
def test_an_mp4_may_begin_with_any_box(clip_of: Clip, box: bytes) -> None:
    data = clip_of(LEVELS)
    assert numbers(decoded(struct.pack(">I", 24) + box + bytes(16) + data)[0]) == expected_numbers()
    fragments = clip_of(LEVELS, g="10", container_options={"movflags": "frag_keyframe+empty_moov+default_base_moof"})
    assert numbers(decoded(b"\0\0\0\x14stypmsdh\0\0\0\0msdh" + fragments)[0]) == expected_numbers()


@for_each(("container", "codec"), [("mp4", "libx264"), ("webm", "libvpx"), ("avi", "mpeg4")])
def test_a_line_break_before_a_clip_is_left_out(clip_of: Clip, container: str, codec: str) -> None:
    assert numbers(decoded(b"\n" + clip_of(LEVELS, container, codec))[0]) == expected_numbers()


def test_the_track_is_the_default_one(clip_of: Clip, two_tracks: Callable[..., bytes]) -> None:
    dark, light = clip_of([20] * 10, "matroska", bf="0"), clip_of([180] * 10, "matroska", bf="0")
    assert decoded(two_tracks(dark, light, 0))[0][0, -1, -1, 0] < 40
    assert decoded(two_tracks(dark, light, 1))[0][0, -1, -1, 0] > 160


def test_a_track_that_can_t_be_decoded_is_passed_over(clip_of: Clip, two_tracks: Callable[..., bytes]) -> None:
    data = two_tracks(clip_of(LEVELS, "matroska", "ffv1"), clip_of(LEVELS, "matroska", bf="0"), 0)
    assert numbers(decoded(data)[0]) == expected_numbers()


@for_each("name", ["WEBP", "GIF"])
def test_what_moves_is_shown_at_the_times_of_browsers(name: str) -> None:
    colours = ["red", "lime", "blue", "white", "black"]
    frames, clip = decoded(animated([Image.new("RGB", (20, 10), colour) for colour in colours], [100, 10, 0, 20, 300], name))
    expected = [[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255], [0, 0, 0]]
    np.testing.assert_array_equal(frames[:, 3, 3], expected)
    assert clip.timestamps_s == pytest.approx([0, 0.1, 0.2, 0.3, 0.32])
    assert clip.duration_s == pytest.approx(0.62)


def test_an_animated_webp_is_a_clip_within_the_limits() -> None:
    pictures = [Image.new("RGBA", (40, 30), (level, 0, 0, 255 if level else 0)) for level in range(0, 250, 10)]
    data = animated(pictures, [40] * 25, "WEBP")
    frames, clip = decoded(data, num_frames=5, max_pixels=300)
    assert frames.shape == (5, 15, 20, 3)
    assert frames[:, 7, 7].tolist() == [[255, 255, 255], *([level, 0, 0] for level in (60, 120, 180, 240))]
    assert clip.timestamps_s == pytest.approx([0, 0.24, 0.48, 0.72, 0.96])
    assert prepared(data, io_kwargs=MediaIoKwargs(fps=3.0)).shape[0] == 3
    for limits, reason in (
        (MediaLimits(max_frame_pixels=1199), "40 x 30 pixels, more than the 1199"),
        (MediaLimits(max_coded_frames=24), "more than the 24 frames"),
        (MediaLimits(max_video_duration_s=0.9), r"longer than the 0.9 s"),
        (MediaLimits(max_decoded_pixels=40 * 30 * 49), "max_decoded_pixels"),
    ):
        with pytest.raises(MediaError, match=reason):
            prepared(data, limits)
    with pytest.raises(MediaError, match="damaged or truncated"):
        prepared(data[:-20])
    with pytest.raises(MediaError, match="a picture, not a clip"):
        prepared(animated(pictures[:1], [40], "WEBP"))


def test_an_animated_webp_is_shown_in_srgb() -> None:
    pictures = [Image.new("RGBA", (20, 10), (220, 60, 20, alpha)) for alpha in (255, 0)]
    frames, _ = decoded(animated(pictures, [40, 40], "WEBP", icc_profile=OTHERS["other primaries"]))
    np.testing.assert_allclose(frames[:, 5, 5], [[20, 60, 220], [255, 255, 255]], atol=INVISIBLE)


@for_each(("ratio", "size"), [(Fraction(2), (192, 64)), (Fraction(1, 2), (48, 64)), (Fraction(4, 3), (128, 64))])
def test_frames_have_the_size_that_they_are_shown_with(clip_of: Clip, ratio: Fraction, size: tuple[int, int]) -> None:
    data = clip_of(LEVELS, "matroska", "libx264", **{"x264-params": f"sar={ratio.numerator}/{ratio.denominator}"})
    frames, _ = decoded(data)
    assert frames.shape[1:] == (size[1], size[0], 3)
    assert numbers(frames) == expected_numbers()


def test_the_size_that_frames_are_shown_with_is_limited_as_well(clip_of: Clip) -> None:
    data = clip_of(LEVELS, "matroska", "libx264", **{"x264-params": "sar=3/1"})
    for limits in (MediaLimits(max_aspect_ratio=4.0), MediaLimits(max_frame_pixels=10_000)):
        with pytest.raises(MediaError, match="as it is shown, has 288 x 64 pixels"):
            prepared(data, limits)


def test_a_recording_is_no_clip(recording_of: Callable[..., bytes]) -> None:
    with pytest.raises(MediaError, match="holds no clip"):
        prepared(recording_of(np.zeros(8000), 8000))


def test_a_codec_that_is_not_listed_is_refused(clip_of: Clip) -> None:
    with pytest.raises(MediaError, match="encoded with ffv1, which is not accepted"):
        prepared(clip_of(LEVELS, "matroska", "ffv1"))


def test_a_target_of_another_shape_is_the_caller_s_mistake(clip_of: Clip) -> None:
    data = clip_of(LEVELS)
    with pytest.raises(ValueError, match="the clip needs uint8"):
        decode_into(data, prepared(data), np.empty((8, 96, 64, 3), np.uint8))


def test_a_long_clip_takes_no_more_memory_than_a_short_one(clip_of: Clip, peak_nbytes: Any) -> None:
    data = clip_of(LEVELS * 4, size=(960, 540), codec="mpeg4", g="200", bf="0")
    header = prepared(data, max_pixels=10_000)
    target = np.zeros(header.shape, np.uint8)
    decode_into(data, header, target)  # what is allocated once
    assert header.selection.num_decoded > 100  # which would take 78 MB as they are decoded
    assert peak_nbytes(lambda: decode_into(data, header, target)) < 20 << 20


def test_times_are_fractions_of_the_stream_s_unit(clip_of: Clip) -> None:
    selection = prepared(clip_of(LEVELS, "matroska")).selection
    assert selection.seconds == Fraction(1, 1000)


def test_a_clip_that_is_small_in_bytes_and_long_in_work_is_refused_before_it_is_decoded(
    long_clip: Callable[..., bytes],
) -> None:
    data = long_clip(900)
    assert len(data) < 125_000
    began_s = time.process_time()
    with pytest.raises(MediaError, match=r"900 frames of 4096 x 2160 must be decoded.*max_video_expansion"):
        probe(data, VideoSpec(num_frames=4, max_pixels=10_000), MediaLimits(), MediaIoKwargs())
    assert time.process_time() - began_s < 1  # decoding takes ten


def test_looking_for_the_first_frame_ends() -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="webm") as output:
        stream = output.add_stream("libvpx-vp9", rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        for number in range(650):
            packet = av.Packet(b"\x82" + b"\xff" * 20)
            packet.stream, packet.time_base, packet.pts, packet.dts = stream, Fraction(1, 25), number, number
            packet.is_keyframe = True
            output.mux(packet)
    with pytest.raises(MediaError, match="none of its first 600 frames can be decoded"):
        prepared(file.getvalue())


@pytest.mark.parametrize(("codec", "options"), [("libvpx", {"deadline": "realtime"}), ("libx264", {"bf": "0"})])
def test_what_is_lost_in_the_middle_of_a_matroska_is_told(clip_of: Clip, codec: str, options: dict[str, str]) -> None:
    levels = LEVELS * 10
    data = bytearray(clip_of(levels, "matroska", codec, g="25", container_options={"cluster_time_limit": "2000"}, **options))
    assert decoded(bytes(data))[1].shortfall == ""
    middle = len(data) // 2
    data[middle : middle + 64] = b"\xff" * 64
    frames, clip = decoded(bytes(data), num_frames=500)
    lost_s = float(re.search(r": ([\d.]+) of 20 s .* are missing in the middle", clip.shortfall)[1])  # type: ignore[index]
    assert lost_s == pytest.approx((500 - len(frames)) / 25, abs=0.1)
