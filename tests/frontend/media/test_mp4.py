"""MP4s whose index is damaged: what its tables say of each other is compared, and callers are told."""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Callable

import av
import numpy as np
import pytest

from shmring.frontend.media.errors import MediaError
from tests.frontend.media.test_pieces import OWN_PLACES, recording, tone
from tests.frontend.media.test_video import LEVELS, NUM_FRAMES, decoded, numbers
from tests.tables import for_each

Make = Callable[..., bytes]


def with_number(data: bytes, table: str, place: int, number: int) -> bytes:
    """With another number in a table, so many bytes behind its name."""
    start = data.index(table.encode()) + 4 + place
    return data[:start] + struct.pack(">I", number) + data[start + 4 :]


@for_each(
    ("table", "place", "number", "missing"),
    [
        *(("stsz", 8, 25, 25), ("stts", 8, 25, 25), ("stts", 8, 0, 50)),
        *(("stsc", 12, 10, 40), ("stsc", 4, 0, 50), ("stsz", 8, 20, 30)),
    ],
)
def test_frames_that_are_not_in_all_tables_are_missing(
    clip_of: Make, table: str, place: int, number: int, missing: int
) -> None:
    data = with_number(clip_of(LEVELS, bf="0"), table, place, number)
    with pytest.raises(
        MediaError, match=rf"{missing} of 50 frames \(.*\) are not in all tables of its index, which is damaged"
    ):
        decoded(data)


def test_what_two_tables_agree_on_is_there(clip_of: Make) -> None:
    data = clip_of(LEVELS, bf="0")
    frames, clip = decoded(with_number(data, "stsz", 8, 49), num_frames=100)
    assert numbers(frames) == list(range(49))
    assert "1 of 50 frames (2 %) are not in all tables of its index" in clip.shortfall
    for more in (with_number(data, "stsz", 8, 51), with_number(data, "stsc", 12, 1000)):
        frames, clip = decoded(more, num_frames=100)
        assert numbers(frames) == list(range(NUM_FRAMES))
        assert clip.shortfall == ""


@for_each("number", [0, 0x7FFFFFFF, 100])
def test_frames_that_do_not_last_as_long_as_the_track_are_told(clip_of: Make, number: int) -> None:
    _, clip = decoded(with_number(clip_of(LEVELS, bf="0"), "stts", 12, number), num_frames=100)
    assert "its index is damaged: by its tables, its frames last for " in clip.shortfall


@for_each("head", ["mdhd", "mvhd"])
@for_each("factor", [0.01, 0.1, 10, 1000])
@for_each("has_edits", [True, False])
def test_a_unit_of_time_that_is_damaged_is_told(clip_of: Make, head: str, factor: float, has_edits: bool) -> None:
    data = clip_of(LEVELS, bf="0") if has_edits else clip_of(LEVELS, bf="0").replace(b"edts", b"free")
    place = data.index(head.encode()) + 16
    units = int.from_bytes(data[place : place + 4], "big")
    _, clip = decoded(with_number(data, head, 12, round(units * factor)), num_frames=100)
    assert re.search(r"by its index, .* s of it are shown, and its frames last for .* s", clip.shortfall)


def with_edits(data: bytes, *edits: tuple[int, int], version: int = 0) -> bytes:
    """With other edits: how long each lasts, and from when on, in ms and in the track's unit; its tables stand at its end."""
    start = data.index(b"edts") - 4
    end = start + int.from_bytes(data[start : start + 4], "big")
    content = b"".join(struct.pack(">QqI" if version else ">IiI", lasts, time, 1 << 16) for lasts, time in edits)
    table = struct.pack(">I4sII", 16 + len(content), b"elst", version << 24, len(edits)) + content
    made = bytearray(data[:start] + struct.pack(">I4s", 8 + len(table), b"edts") + table + data[end:])
    for name in (b"trak", b"moov"):
        place = made.rindex(name, 0, start) - 4
        made[place : place + 4] = struct.pack(">I", int.from_bytes(made[place : place + 4], "big") + len(made) - len(data))
    return bytes(made)


@for_each("version", [0, 1])
@for_each("order", [{"bf": "0"}, {"bf": "3"}])
def test_an_edit_that_shows_nothing_is_a_pause_wherever_it_stands(clip_of: Make, version: int, order: dict[str, str]) -> None:
    data = clip_of(LEVELS, g="10", **order)
    first, unit = (
        int.from_bytes(data[place : place + 4], "big") for place in (data.index(b"elst") + 16, data.index(b"mdhd") + 16)
    )
    for pause in range(4):
        edits = [(400, first), (800, first + unit * 4 // 10), (800, first + unit * 12 // 10)]
        edits.insert(pause, (1000, -1))
        frames, clip = decoded(with_edits(data, *edits, version=version), num_frames=100)
        assert numbers(frames) == list(range(NUM_FRAMES))
        starts_s = [
            number / 25 + (1 if number >= frame else 0) for number in range(NUM_FRAMES) for frame in ((0, 10, 30, 50)[pause],)
        ]
        np.testing.assert_allclose(clip.timestamps_s, np.subtract(starts_s, starts_s[0]), atol=0.002)
        assert clip.shortfall == ""


@for_each(("container", "codec"), [("mp4", "aac"), ("mov", "pcm_s16le")])
def test_a_recording_is_not_heard_twice_because_of_a_pause(recording_of: Make, container: str, codec: str) -> None:
    data = recording_of(tone(500, 2), 16_000, container, codec)
    sound = recording(with_edits(data, (1000, 1024 if codec == "aac" else 0), (1000, -1), (1000, 16_000)))[1]
    assert sound.duration_s == pytest.approx(2, abs=0.1)
    assert sound.shortfall == ""


def test_a_table_that_is_not_there_is_told(clip_of: Make) -> None:
    _, clip = decoded(clip_of(LEVELS, bf="0").replace(b"mdhd", b"none"), num_frames=100)
    assert "its index is damaged: it has no mdhd" in clip.shortfall


def test_frames_that_do_not_come_at_their_times_are_told(clip_of: Make) -> None:
    frames, clip = decoded(clip_of(LEVELS, bf="2", g="10").replace(b"ctts", b"none"), num_frames=100)
    assert len(frames) < 48
    assert f"{48 - len(frames)} of 48 wanted frames do not come at their times" in clip.shortfall


@for_each("container", ["mp4", "matroska"])
def test_frames_without_the_one_that_they_begin_with_are_told(clip_of: Make, container: str) -> None:
    data = bytearray(clip_of(LEVELS, container, bf="0", g="10", sc_threshold="0"))
    with av.open(io.BytesIO(data)) as file:
        first = next(packet for packet in file.demux(0) if packet.size)
        assert first.pos is not None
        place = data.index(bytes(first), first.pos)
    data[place : place + first.size] = bytes(first.size)
    frames, clip = decoded(bytes(data), num_frames=100)
    assert numbers(frames[-40:]) == list(range(10, NUM_FRAMES))
    assert (
        "its first 10 frames come before a frame from which decoding can begin" in clip.shortfall
        or "can't be decoded" in clip.shortfall
    )


def test_a_clip_of_a_few_frames_contradicts_nothing(clip_of: Make) -> None:
    for count in (1, 2, 3, 5):
        assert decoded(clip_of(LEVELS[:count]))[1].shortfall == ""


@for_each("container", ["mp4", "mov"])
@for_each("options", [{}, {"movflags": OWN_PLACES}])
def test_whole_clips_contradict_nothing(clip_of: Make, container: str, options: dict[str, str]) -> None:
    for order in ({"bf": "0"}, {"bf": "3", "g": "10"}):
        times = [*range(20), *range(40, 70)]
        data = clip_of(LEVELS, container, times=times, container_options=options, **order)
        assert decoded(data)[1].shortfall == ""


@for_each(
    ("container", "codec"),
    [("mp4", "aac"), ("ipod", "alac"), ("mov", "pcm_s16le"), ("mov", "pcm_s24be"), ("mov", "adpcm_ima_qt"), ("mp4", "flac")],
)
@for_each("layout", ["mono", "stereo"])
def test_whole_recordings_contradict_nothing(recording_of: Make, container: str, codec: str, layout: str) -> None:
    sound = tone(500, 2)
    data = recording_of(np.stack([sound] * 2) if layout == "stereo" else sound, 16_000, container, codec, layout)
    assert recording(data)[1].shortfall == ""
