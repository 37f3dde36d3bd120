"""The rule for what is missing: how shares are compared, and what callers are told."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

import numpy as np
import pytest

from shmring.frontend.media.damage import Shortfall, accepted_shortfall, joined, missing_packets, missing_s, of_all_parts
from shmring.frontend.media.errors import MediaError
from shmring.frontend.media.options import MediaLimits
from tests.frontend.media.test_pieces import recording
from tests.frontend.media.test_video import LEVELS, NUM_FRAMES, decoded, numbers
from tests.tables import for_each


def test_nothing_is_said_of_what_is_whole() -> None:
    assert accepted_shortfall("clip", [], 0.0) == ""
    assert missing_packets(0, 100, "frames") == []
    assert missing_s(None, 5.0, 600) == missing_s(5.0, 6.0, 600) == missing_s(5.0, 4.95, 600) == []


def test_the_caller_is_told_all_that_is_missing() -> None:
    shortfalls = [*missing_s(10.0, 9.5, 600), *missing_packets(4, 100, "frames"), *missing_s(10.0, 9.5, 600)]
    told = accepted_shortfall("clip", shortfalls, 0.1)
    assert told == "the clip is damaged or truncated: 0.5 of 10 s (5 %) are missing; 4 of 100 frames (4 %) can't be decoded"


@for_each("share", [0.0, 0.1, 0.5])
def test_as_much_as_is_accepted_may_be_missing_and_no_more(share: float) -> None:
    accepted_shortfall("clip", [Shortfall(missing=1000 * share, promised=1000, unit="rows")], share)
    with pytest.raises(
        MediaError, match=rf"at most {100 * share:g} % may be missing \(max_missing_share\)\. Send the whole file"
    ):
        accepted_shortfall("clip", [Shortfall(missing=1000 * share + 1, promised=1000, unit="rows")], share)


def test_two_packets_at_a_cut_are_told_and_not_counted() -> None:
    assert "2 of 4 packets" in accepted_shortfall("recording", missing_packets(2, 4, "packets"), 0.0)
    with pytest.raises(MediaError, match="3 of 4 packets"):
        accepted_shortfall("recording", missing_packets(3, 4, "packets"), 0.2)


def test_an_end_of_unknown_length_is_told_and_accepted() -> None:
    end = Shortfall(missing=0, promised=0, unit="", cause="its end is missing (OGG)")
    assert accepted_shortfall("recording", [end], 0.0) == "the recording is damaged or truncated: its end is missing (OGG)"


def test_all_is_not_a_hundred_percent_of_it() -> None:
    with pytest.raises(MediaError, match=r"1000 of 1000 rows \(all\) are missing"):
        accepted_shortfall("picture", [Shortfall(missing=1000, promised=1000, unit="rows")], 0.9)


def test_what_is_no_damage_is_not_called_so() -> None:
    told = accepted_shortfall("clip", joined([1.0, 2.5]), 0.0)
    assert told == (
        "the clip is not as its file says: its times begin anew at 1.00 s, 2.50 s; "
        "its 3 parts follow each other as they are stored"
    )
    assert "at 0.00 s, 1.00 s, 2.00 s and 5 more; its 9 parts" in accepted_shortfall(
        "clip", joined([*map(float, range(8))]), 0.0
    )
    told = accepted_shortfall("clip", [*missing_packets(1, 100, "frames"), *joined([1.0])], 0.1)
    assert told.startswith("the clip is damaged or truncated: 1 of 100 frames (1 %) can't be decoded; its times begin anew")
    assert joined([]) == []


# -- lengths that nobody could keep ---------------------------------------------------------------------------------------


def written(data: bytes, name: bytes, behind: int, value: bytes) -> bytes:
    """A file with other bytes so far behind the first place where there is a name."""
    place = data.index(name) + len(name) + behind
    return data[:place] + value + data[place + len(value) :]


FRAGMENTS = {"container_options": {"movflags": "frag_keyframe+empty_moov"}}


@for_each(
    ("container", "codec", "options", "place", "value"),
    [
        ("matroska", "libx264", {}, (b"\x44\x89\x88", 0), struct.pack(">d", 1e9)),
        ("avi", "mpeg4", {}, (b"strh", 36), b"\xff\xff\xff\x7f"),
        ("mp4", "libx264", FRAGMENTS, (b"mdhd", 16), b"\x7f\xff\xff\xff"),
    ],
)
def test_a_clip_whose_header_names_a_length_that_is_not_accepted_is_whole(
    clip_of: Callable[..., bytes], container: str, codec: str, options: dict[str, str], place: tuple[bytes, int], value: bytes
) -> None:
    frames, clip = decoded(written(clip_of(LEVELS, container, codec, **options), *place, value), num_frames=100)
    assert numbers(frames) == list(range(NUM_FRAMES))
    assert clip.shortfall == ""


@for_each(
    ("container", "codec", "place", "value"),
    [
        ("matroska", "pcm_s16le", (b"\x44\x89\x88", 0), struct.pack(">d", 1e9)),
        ("flac", "flac", (b"fLaC", 17), b"\x0f\xff\xff\xff\xff"),
        ("aiff", "pcm_s16be", (b"COMM", 6), b"\x7f\xff\xff\xff"),
    ],
)
def test_a_recording_whose_header_names_a_length_that_is_not_accepted_is_whole(
    recording_of: Callable[..., bytes], container: str, codec: str, place: tuple[bytes, int], value: bytes
) -> None:
    data = recording_of(np.sin(np.arange(16_000) / 5) / 2, 16_000, container, codec)
    if container == "flac":  # the bits before are those of a sample
        value = bytes([data[21] | value[0]]) + value[1:]
    samples, sound = recording(written(data, *place, value))
    assert len(samples) == 16_000
    assert sound.shortfall == ""


@for_each(("container", "codec"), [("matroska", "pcm_s16le"), ("flac", "flac"), ("caf", "pcm_s16le"), ("mp3", "libmp3lame")])
def test_the_beginning_of_a_recording_that_is_too_long_is_heard_and_told(
    recording_of: Callable[..., bytes], container: str, codec: str
) -> None:
    noise = np.random.default_rng(3).uniform(-0.5, 0.5, 9 * 16_000)
    data = recording_of(noise, 16_000, container, codec)
    samples, sound = recording(data[: len(data) // 3], MediaLimits(max_audio_duration_s=5.0))
    assert len(samples) == pytest.approx(3 * 16_000, rel=0.1)
    assert re.search(r"it says that it has 9(\.\d+)? s, and (2\.[89]|3\.?)\d* s are there", sound.shortfall), sound.shortfall
    with pytest.raises(MediaError, match="longer than the 5 s"):
        recording(data, MediaLimits(max_audio_duration_s=5.0))


def test_the_beginning_of_a_clip_that_is_too_long_is_seen_and_told(clip_of: Callable[..., bytes]) -> None:
    data = clip_of(LEVELS, "matroska", "mpeg4")
    limits = MediaLimits(max_video_duration_s=0.75 * NUM_FRAMES / 30)
    frames, clip = decoded(data[: len(data) // 2], limits, num_frames=100)
    assert 0.3 * NUM_FRAMES < len(frames) < 0.7 * NUM_FRAMES
    assert "the clip is not as its file says: it says that it has" in clip.shortfall
    with pytest.raises(MediaError, match="longer than"):
        decoded(data, limits)


@for_each("rate", [48_000, 44_100, 32_000, 22_050, 11_025])
@for_each("layout", ["mono", "stereo"])
def test_an_mp3_promises_the_frames_that_its_first_one_counts(
    recording_of: Callable[..., bytes], rate: int, layout: str
) -> None:
    samples = 0.5 * np.sin(np.arange(8 * rate) / 10)
    data = recording_of(np.stack([samples] * 2) if layout == "stereo" else samples, rate, "mp3", "libmp3lame", layout)
    assert recording(data)[1].shortfall == ""
    with pytest.raises(MediaError, match=r"1\.\d* of 8(\.\d+)? s \(2[0-5] %\) are missing"):
        recording(data[: len(data) * 77 // 100])
    uncounted = data.replace(b"Xing", b"none").replace(b"Info", b"none")
    assert "missing" not in recording(uncounted[: len(data) * 77 // 100])[1].shortfall


def test_what_is_missing_in_a_part_counts_for_the_whole() -> None:
    lost, whole = missing_s(3.0, 2.0, 600), list[Shortfall]()
    [alone] = of_all_parts([(lost, 2.0)])
    assert str(alone) == "1 of 3 s (33 %) are missing"
    [of_two] = of_all_parts([(lost, 2.0), (whole, 9.0)])
    assert of_two.share == pytest.approx(1 / 12)
    assert str(of_two) == "1 of 3 s (33 %) are missing in one of its parts"
    assert [shortfall.share for shortfall in of_all_parts([(lost, 2.0)] * 9)] == pytest.approx([1 / 3] * 9)
    [all_of_one] = of_all_parts([(missing_s(3.0, 0.0, 600), 0.0), (whole, 3.0)])
    assert all_of_one.share > 0.2


@for_each(("container", "codec"), [("matroska", "pcm_s16le"), ("aiff", "pcm_s16be"), ("flac", "flac"), ("caf", "pcm_s16le")])
def test_the_end_of_a_part_is_missing(recording_of: Callable[..., bytes], container: str, codec: str) -> None:
    noise = np.random.default_rng(3).uniform(-0.5, 0.5, 4 * 16_000)
    data = recording_of(noise, 16_000, container, codec)
    _, sound = recording(data[: len(data) * 7 // 8] + data + data)
    assert "(1" in sound.shortfall.partition(" %")[0]
    assert " %) are missing in one of its parts; its times begin anew" in sound.shortfall
    with pytest.raises(MediaError, match="are missing in one of its parts"):
        recording(data[: len(data) * 7 // 8] + data[: len(data) * 7 // 8])


def test_a_flac_that_lacks_something_in_the_middle_says_so(recording_of: Callable[..., bytes]) -> None:
    data = recording_of(np.random.default_rng(3).uniform(-0.5, 0.5, 10 * 16_000), 16_000, "flac", "flac")
    lost = data[: len(data) // 2] + data[len(data) * 11 // 20 :]
    _, sound = recording(lost)
    assert "of 10 s (" in sound.shortfall
    assert "are missing" in sound.shortfall
