"""Files that were joined: all that is in them comes out, in its order, and the answer says so."""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest

from shmring.engine.inputs import SoundSpec
from shmring.frontend.media import audio
from shmring.frontend.media.errors import MediaError
from shmring.frontend.media.options import MediaLimits
from shmring.frontend.media.pieces import pieces_of
from shmring.frontend.media.signatures import boxes
from shmring.frontend.media.video import decode_into
from tests.frontend.media.conftest import remuxed
from tests.frontend.media.test_video import LEVELS, NUM_FRAMES, decoded, expected_numbers, numbers, prepared
from tests.tables import for_each

Make = Callable[..., bytes]

FIRST, SECOND = LEVELS[:20], LEVELS[20:]
SEAM = "its times begin anew at 0.80 s; its 2 parts follow each other as they are stored"
ORDERS = [{"bf": "0", "g": "10"}, {"bf": "3", "g": "10"}, {"g": "8", "x264-params": "open-gop=1:bframes=3"}]
FRAGMENTS = "frag_keyframe+empty_moov"
OWN_PLACES = f"{FRAGMENTS}+default_base_moof"


def from_fragments_on(data: bytes) -> bytes:
    return data[data.index(b"moof") - 4 :]


def assert_all_frames(data: bytes, shortfall: str = SEAM) -> None:
    frames, clip = decoded(data, num_frames=100)
    assert numbers(frames) == list(range(NUM_FRAMES))
    np.testing.assert_allclose(clip.timestamps_s, [number / 25 for number in range(NUM_FRAMES)], atol=0.0011)
    assert clip.duration_s == pytest.approx(NUM_FRAMES / 25, abs=0.002)
    assert clip.shortfall == (f"the clip is not as its file says: {shortfall}" if shortfall else "")
    frames, _ = decoded(data)
    assert numbers(frames) == expected_numbers()


# -- clips ----------------------------------------------------------------------------------------------------------------


@for_each("order", ORDERS)
@for_each("start", [0, 10, 19 + 25 * 11, 125_000], ids=["again", "overlap", "11 s", "5000 s"])
def test_transport_streams(clip_of: Make, order: dict[str, str], start: int) -> None:
    second = clip_of(SECOND, "mpegts", times=range(start, start + 30), **order)
    assert_all_frames(clip_of(FIRST, "mpegts", **order) + second)


def test_two_frames_at_the_same_time_beside_a_seam_are_both_there(clip_of: Make) -> None:
    first, second = clip_of(FIRST, "mpegts", bf="0"), clip_of(SECOND, "mpegts", bf="0", times=range(19, 49))
    assert_all_frames(first + second, shortfall="")


def test_a_clock_that_is_far_behind_is_libav_s_clock_that_starts_again(clip_of: Make) -> None:
    first = clip_of(FIRST, "mpegts", bf="0", times=range(125_000, 125_020))
    assert_all_frames(first + clip_of(SECOND, "mpegts", bf="0"))


@for_each("order", ORDERS)
def test_a_clock_of_33_bits_goes_on_when_it_starts_again(clip_of: Make, order: dict[str, str]) -> None:
    options = {"output_ts_offset": str(2**33 / 90_000 - 1)}
    data = clip_of(LEVELS, "mpegts", container_options=options, **order)
    with av.open(io.BytesIO(data)) as file:
        starts = [packet.pts for packet in file.demux() if packet.size]
    assert min(starts) < 0 < max(starts)
    assert_all_frames(data, shortfall="")


def test_a_stream_that_says_that_its_clock_is_another(clip_of: Make) -> None:
    second = clip_of(SECOND, "mpegts", container_options={"mpegts_flags": "initial_discontinuity"})
    assert_all_frames(clip_of(FIRST, "mpegts") + second)


def test_a_stream_whose_times_go_on_has_no_seam_and_all_its_frames(clip_of: Make) -> None:
    data = clip_of(FIRST, "mpegts", bf="0") + clip_of(SECOND, "mpegts", bf="0", times=range(20, 50))
    frames, clip = decoded(data, num_frames=100)
    assert numbers(frames) == list(range(NUM_FRAMES))
    assert "begin anew" not in clip.shortfall


@for_each("order", ORDERS)
def test_a_transport_stream_with_other_tracks(clip_of: Make, order: dict[str, str]) -> None:
    options = {"mpegts_start_pid": "0x200", "mpegts_pmt_start_pid": "0x1001"}
    first = clip_of(FIRST, "mpegts", **order)
    assert_all_frames(first + clip_of(SECOND, "mpegts", container_options=options, **order))
    assert_all_frames(first + clip_of(SECOND, "mpegts", container_options={"mpegts_start_pid": "0x200"}, **order))
    if order["g"] == "10":
        assert_all_frames(first + clip_of(SECOND, "mpegts", "mpeg2video", g="1", bf="0"))


@for_each(("container", "options"), [("mpegts", {}), ("matroska", {}), ("mp4", {}), ("mp4", {"movflags": FRAGMENTS})])
def test_sizes_that_change(clip_of: Make, container: str, options: dict[str, str]) -> None:
    second = clip_of(SECOND, container, size=(192, 128), container_options=options)
    assert_all_frames(clip_of(FIRST, container, container_options=options) + second)


@for_each("order", ORDERS)
@for_each("live", ["0", "1"])
def test_matroska(clip_of: Make, order: dict[str, str], live: str) -> None:
    first, second = (clip_of(levels, "matroska", container_options={"live": live}, **order) for levels in (FIRST, SECOND))
    assert_all_frames(first + second)
    if live == "1":  # whose head says that it ends nowhere
        assert_all_frames(first + second[second.index(b"\x1f\x43\xb6\x75") :])


@for_each("order", ORDERS)
@for_each("flags", [FRAGMENTS, OWN_PLACES])
def test_fragments_with_their_heads_and_without(clip_of: Make, order: dict[str, str], flags: str) -> None:
    first, second = (clip_of(levels, "mp4", container_options={"movflags": flags}, **order) for levels in (FIRST, SECOND))
    assert_all_frames(first + second)
    assert_all_frames(first + from_fragments_on(second))
    frames, clip = decoded(first + first + from_fragments_on(first), num_frames=100)
    assert numbers(frames) == 3 * list(range(20))
    assert "begin anew at 0.80 s, 1.60 s" in clip.shortfall


def test_fragments_of_a_single_time_are_parts(clip_of: Make) -> None:
    first, second = (clip_of(levels, "mp4", g="50", container_options={"movflags": OWN_PLACES}) for levels in (FIRST, SECOND))
    assert first.count(b"moof") == 1
    assert_all_frames(first + from_fragments_on(second))


def test_segments_that_repeat_their_head_have_no_seam(clip_of: Make) -> None:
    data = clip_of(LEVELS, "mp4", g="10", container_options={"movflags": OWN_PLACES})
    head = data[: data.index(b"moof") - 4]
    segments = [data[start:end] for start, name, end in boxes(data) if name in (b"moof", b"mdat")]
    assert len(segments) > 6
    joined = b"".join(head + segments[number] + segments[number + 1] for number in range(0, len(segments), 2))
    assert_all_frames(joined, shortfall="")


@for_each("order", ORDERS)
def test_mp4s(clip_of: Make, order: dict[str, str]) -> None:
    assert_all_frames(clip_of(FIRST, **order) + clip_of(SECOND, **order))


@for_each("rate", [30, 50])
def test_each_part_has_a_unit_of_time_of_its_own(clip_of: Make, rate: int) -> None:
    frames, clip = decoded(clip_of(FIRST) + clip_of(SECOND, rate=rate), num_frames=100)
    assert numbers(frames) == list(range(NUM_FRAMES))
    times_s = [number / 25 for number in range(20)] + [0.8 + number / rate for number in range(30)]
    np.testing.assert_allclose(clip.timestamps_s, times_s, atol=0.002)


@for_each("turns", [(0, 90), (90, 0), (90, 270), (180, 0)])
def test_each_part_is_turned_as_it_says(clip_of: Make, turns: tuple[int, int]) -> None:
    frames, _ = decoded(b"".join(clip_of([100] * 5, rotation=turn) for turn in turns), num_frames=10)
    for turn, frame in zip(turns, (frames[0], frames[-1]), strict=True):
        is_white = np.rot90(frame[:, :, 0] > 200, -turn // 90)
        assert is_white[4, 4]
        assert is_white.mean() == pytest.approx(0.25, abs=0.02)


def test_a_part_that_can_t_be_read_is_missing(clip_of: Make) -> None:
    first, second = clip_of(LEVELS), clip_of(LEVELS[:2])
    damaged = second.replace(b"trak", b"kart")
    frames, clip = decoded(first * 3 + damaged, MediaLimits(max_missing_share=0.3), num_frames=200)
    assert numbers(frames) == 3 * list(range(NUM_FRAMES))
    assert re.search(r"bytes \(\d+ %\) are in 1 of its 4 parts, which can't be read \(.*index", clip.shortfall)
    with pytest.raises(MediaError, match="are in 3 of its 4 parts, which can't be read"):
        prepared(first + damaged * 3)


def test_limits_hold_for_all_parts_together(clip_of: Make) -> None:
    data = clip_of(FIRST) + clip_of(SECOND)
    assert prepared(data, MediaLimits(max_video_duration_s=2.01)).shape[0] == 8
    with pytest.raises(MediaError, match=r"longer than the 1.9 s"):
        prepared(data, MediaLimits(max_video_duration_s=1.9))
    with pytest.raises(MediaError, match="more than the 49 frames"):
        prepared(data, MediaLimits(max_coded_frames=49))
    assert prepared(data, MediaLimits(max_coded_frames=50)).shape[0] == 8
    large = clip_of(SECOND, size=(192, 128))
    with pytest.raises(MediaError, match="192 x 128 pixels, more than the 6144"):
        prepared(clip_of(FIRST) + large, MediaLimits(max_frame_pixels=6144))
    with pytest.raises(MediaError, match="must be decoded"):
        prepared(clip_of(FIRST) + large, MediaLimits(max_decoded_pixels=50 * 96 * 64), num_frames=50)


def test_parts_are_not_without_number(clip_of: Make) -> None:
    with pytest.raises(MediaError, match="consists of more than the 1000 files that are accepted"):
        prepared(clip_of(LEVELS[:1]) * 1001)
    fragments = clip_of(LEVELS[:1], container_options={"movflags": OWN_PLACES})
    with pytest.raises(MediaError, match="consists of more than the 1000 files that are accepted"):
        prepared(fragments + from_fragments_on(fragments) * 1000)
    with pytest.raises(MediaError, match="more than the 100000 fragments that are accepted"):
        prepared(fragments + b"\0\0\0\x08moof" * 100_000)


@for_each("container_options", [{}, {"movflags": OWN_PLACES}])
def test_a_frame_that_is_shown_for_longer_than_anybody_looks_is_not(clip_of: Make, container_options: dict[str, str]) -> None:
    times = [*range(20), *range(125_020, 125_050)]
    assert_all_frames(
        clip_of(LEVELS, times=times, bf="0", g="10", container_options=container_options), SEAM.replace("0.80", "0.76")
    )


def test_decoding_does_not_open_parts_without_a_wanted_frame(clip_of: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    data = clip_of(LEVELS[:10]) * 9
    header = prepared(data, num_frames=2)
    opened = []
    monkeypatch.setattr(av, "open", lambda *args, _open=av.open, **kwargs: (opened.append(args), _open(*args, **kwargs))[1])
    decode_into(data, header, np.empty(header.shape, np.uint8))
    assert len(opened) == 2


def test_a_file_is_a_piece(clip_of: Make) -> None:
    for container, demuxer, options in (
        ("mp4", "mov", {}),
        ("mp4", "mov", {"movflags": FRAGMENTS}),
        ("mp4", "mov", {"movflags": OWN_PLACES}),
        ("matroska", "matroska", {}),
        ("mpegts", "mpegts", {}),
    ):
        data = memoryview(clip_of(LEVELS, container, container_options=options))
        [piece] = pieces_of(data, demuxer)
        assert piece.data().obj is data.obj  # nothing is copied
        assert piece.data() == data


# -- edit lists -----------------------------------------------------------------------------------------------------------


def with_edits(data: bytes, edits: list[tuple[int, int]], *, is_wide: bool = False) -> bytes:
    """An MP4 with another edit list: (duration in ms, frame from which on), -1 for nothing."""
    rate = int.from_bytes(data[data.index(b"mdhd") + 16 :][:4], "big")
    first = int.from_bytes(data[data.index(b"elst") + 16 :][:4], "big")
    entries = [(duration, -1 if frame < 0 else first + frame * rate // 25) for duration, frame in edits]
    table = b"".join(struct.pack(">qqHH" if is_wide else ">iiHH", *entry, 1, 0) for entry in entries)
    table = struct.pack(">II", is_wide << 24, len(entries)) + table
    box = struct.pack(">II4s", 16 + len(table), 8 + len(table), b"elst")
    box = box[:4] + b"edts" + box[4:] + table
    place = data.index(b"edts") - 4
    nbytes = int.from_bytes(data[place : place + 4], "big")
    changed = bytearray(data)
    changed[place : place + nbytes] = box
    for name in (b"moov", b"trak"):
        start = data.index(name) - 4
        changed[start : start + 4] = (int.from_bytes(data[start : start + 4], "big") + len(box) - nbytes).to_bytes(4, "big")
    return bytes(changed)


@for_each("is_wide", [False, True])
@for_each(("edits", "shown"), [([(0, 0)], range(50)), ([(0, 20)], range(20, 50)), ([(400, -1), (0, 3)], range(3, 50))])
def test_an_edit_that_lasts_0_lasts_to_the_end(
    clip_of: Make, edits: list[tuple[int, int]], shown: range, is_wide: bool
) -> None:
    frames, clip = decoded(with_edits(clip_of(LEVELS), edits, is_wide=is_wide), num_frames=100)
    assert numbers(frames) == list(shown)
    assert clip.timestamps_s == pytest.approx([number / 25 for number in range(len(shown))])
    assert clip.shortfall == ""


@for_each(
    ("edits", "shown"),
    [
        ([(1000, 25), (1000, 0)], [*range(25, 50), *range(25)]),
        ([(400, 5), (400, 5)], [*range(5, 15), *range(5, 15)]),
        ([(400, 5), (0, 20)], range(5, 15)),
    ],
)
def test_other_edits_are_no_seam(clip_of: Make, edits: list[tuple[int, int]], shown: list[int]) -> None:
    frames, clip = decoded(with_edits(clip_of(LEVELS), edits), num_frames=100)
    assert numbers(frames) == list(shown)
    assert clip.shortfall == ""


# -- recordings -----------------------------------------------------------------------------------------------------------

RATE = 16_000


def recording(data: bytes, limits: MediaLimits | None = None) -> tuple[np.ndarray[Any, Any], audio.DecodedSound]:
    header = audio.probe(data, SoundSpec(form="waveform", sample_rate=RATE), limits or MediaLimits())
    target = np.zeros(header.shape, np.float32)
    sound = audio.decode_into(data, header, target)
    return target[: sound.length], sound


def assert_both_are_heard(data: bytes) -> str:
    """A tone of 500 Hz and then one of 2000; returns what is told of them."""
    samples, sound = recording(data)
    assert sound.duration_s == pytest.approx(3, abs=0.3)
    assert loudest_hertz(samples[:RATE]) == pytest.approx(500, abs=5)
    assert loudest_hertz(samples[-RATE:]) == pytest.approx(2000, abs=5)
    return sound.shortfall


def tone(hertz: int, duration_s: float, rate: int = RATE) -> np.ndarray[Any, Any]:
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(int(duration_s * rate)) / rate)


def loudest_hertz(samples: np.ndarray[Any, Any]) -> float:
    spectrum = np.abs(np.fft.rfft(samples))
    return float(np.fft.rfftfreq(len(samples), 1 / RATE)[spectrum.argmax()])


RECORDINGS = [("mp4", "aac"), ("matroska", "aac"), ("webm", "libopus"), ("mpegts", "aac"), ("matroska", "pcm_s16le")]


@for_each(("container", "codec"), RECORDINGS)
def test_recordings(recording_of: Make, container: str, codec: str) -> None:
    first, second = (recording_of(tone(hertz, 1.5), RATE, container, codec) for hertz in (500, 2000))
    told = assert_both_are_heard(first + second)
    assert re.search(r"not as its file says: its times begin anew at 1\.[4-6]", told)
    assert recording(first)[1].shortfall == ""
    with pytest.raises(MediaError, match=r"longer than the 2 s"):
        recording(first + second, MediaLimits(max_audio_duration_s=2))


@for_each("flags", [FRAGMENTS, OWN_PLACES])
def test_recordings_in_fragments(recording_of: Make, flags: str) -> None:
    first, second = (
        remuxed(recording_of(tone(hertz, 1.5), RATE, "mp4", "aac"), movflags=flags, frag_duration="400000")
        for hertz in (500, 2000)
    )
    for data in (first + second, first + from_fragments_on(second)):
        assert "begin anew at 1.5" in assert_both_are_heard(data)


@for_each("rates", [(44_100, 16_000), (16_000, 44_100), (48_000, 8000)])
@for_each(("container", "codec"), [("adts", "aac"), ("mpegts", "aac"), ("mpegts", "mp2"), ("mp3", "libmp3lame")])
def test_recordings_whose_rate_changes(recording_of: Make, container: str, codec: str, rates: tuple[int, int]) -> None:
    if codec == "mp2" and 8000 in rates:
        return
    parts = zip((500, 2000), rates, strict=True)
    assert_both_are_heard(b"".join(recording_of(tone(hertz, 1.5, rate), rate, container, codec) for hertz, rate in parts))


@for_each("rates", [(48_000, 48_000), (22_050, 44_100)])
@for_each("kilobits", [(16, 160), (160, 16)])
def test_mp3s_of_which_the_first_counts_its_own_frames_only(
    recording_of: Make, rates: tuple[int, int], kilobits: tuple[int, int]
) -> None:
    parts = zip((500, 2000), rates, kilobits, strict=True)
    joined = (
        recording_of(tone(hertz, 1.5, rate), rate, "mp3", "libmp3lame", bit_rate=1000 * kilo) for hertz, rate, kilo in parts
    )
    assert_both_are_heard(b"".join(joined))


# -- fragments that are missing -------------------------------------------------------------------------------------------


@for_each("order", ORDERS[:2])
@for_each("flags", [FRAGMENTS, OWN_PLACES])
def test_a_fragment_that_is_lost_in_the_middle_is_told(clip_of: Make, order: dict[str, str], flags: str) -> None:
    data = clip_of(LEVELS * 4, "mp4", container_options={"movflags": flags}, **order)
    places = [start for start, name, _ in boxes(data) if name == b"moof"]
    lost = data[: places[4]] + data[places[5] :]
    frames, clip = decoded(lost, num_frames=500)
    assert numbers(frames) == [number % 50 for number in range(200) if not 40 <= number < 50]
    assert clip.shortfall == "the clip is damaged or truncated: 0.4 of 8 s (5 %) are missing in the middle"
    assert clip.duration_s == pytest.approx(8)
    with pytest.raises(MediaError, match=r"1.2 of 8 s \(15 %\) are missing in the middle"):
        prepared(data[: places[4]] + data[places[7] :])


def test_a_recording_that_lacks_a_fragment_says_so(recording_of: Make) -> None:
    data = remuxed(recording_of(tone(500, 8), RATE, "mp4", "aac"), movflags=FRAGMENTS, frag_duration="400000")
    places = [start for start, name, _ in boxes(data) if name == b"moof"]
    _, sound = recording(data[: places[4]] + data[places[5] :])
    lost_s = float(re.search(r": ([\d.]+) of 8.* s .* are missing in the middle", sound.shortfall)[1])  # type: ignore[index]
    assert lost_s == pytest.approx(0.4, abs=0.1)


def test_a_sender_may_pause_or_count_otherwise(clip_of: Make) -> None:
    options = {"movflags": OWN_PLACES}
    paused = clip_of(LEVELS, "mp4", g="10", bf="0", times=[*range(20), *range(60, 90)], container_options=options)
    assert decoded(paused)[1].shortfall == ""
    data = bytearray(clip_of(LEVELS, "mp4", g="10", container_options=options))
    for number, (start, name, _) in enumerate(boxes(bytes(data))):
        if name == b"moof":
            data[start + 20 : start + 24] = (2 * number).to_bytes(4, "big")
    assert_all_frames(bytes(data), shortfall="")


def test_times_are_fractions_of_the_first_part_s_unit(clip_of: Make) -> None:
    header = prepared(clip_of(FIRST, "matroska") + clip_of(SECOND, "matroska"))
    assert header.time_base == header.selection.seconds == Fraction(1, 1000)
