"""Ogg files that lack pages: what is lost is told, by the numbers of pages and the samples up to their ends."""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Callable

import numpy as np
import pytest

from shmring.frontend.media.errors import MediaError
from shmring.frontend.media.options import MediaLimits
from tests.frontend.media.test_audio import RATE, chirp, decoded
from tests.tables import for_each

SECONDS = 20
GRANULE, STREAM, NUMBER, CHECKSUM = 6, 14, 18, 22  # places in a page
CODECS = [("libopus", 48_000), ("flac", 44_100)]


def pages(data: bytes) -> list[bytes]:
    found, place = [], 0
    while place < len(data):
        segments = data[place + 26]
        end = place + 27 + segments + sum(data[place + 27 : place + 27 + segments])
        found.append(data[place:end])
        place = end
    return found


def granule(page: bytes) -> int:
    return int(struct.unpack_from("<Q", page, GRANULE)[0])


def sealed(page: bytearray) -> bytes:
    """A page whose checksum is right."""
    page[CHECKSUM : CHECKSUM + 4] = bytes(4)
    checksum = 0
    for byte in page:
        checksum ^= byte << 24
        for _ in range(8):
            checksum = (checksum << 1 ^ (0x04C11DB7 if checksum >> 31 else 0)) & 0xFFFF_FFFF
    page[CHECKSUM : CHECKSUM + 4] = struct.pack("<I", checksum)
    return bytes(page)


def changed(page: bytes, place: int, form: str, value: int) -> bytes:
    """With another number in it, and a checksum that is right."""
    other = bytearray(page)
    struct.pack_into(form, other, place, value)
    return sealed(other)


def damaged(page: bytes) -> bytes:
    return page[:-1] + bytes([page[-1] ^ 1])


def ogg(recording_of: Callable[..., bytes], codec: str, rate: int, seconds: float = SECONDS) -> list[bytes]:
    return pages(recording_of(chirp(rate, seconds), rate, "ogg", codec))


def sounding(found: list[bytes]) -> list[int]:
    """Which pages have sound in them."""
    return [number for number, page in enumerate(found) if granule(page)]


@for_each(("codec", "rate"), CODECS)
def test_a_page_that_is_lost_or_damaged_is_told(recording_of: Callable[..., bytes], codec: str, rate: int) -> None:
    found = ogg(recording_of, codec, rate)
    assert decoded(b"".join(found))[1].shortfall == ""
    number = sounding(found)[len(sounding(found)) // 2]
    lost_s = (granule(found[number]) - granule(found[number - 1])) / rate
    for instead in ([], [damaged(found[number])]):
        samples, sound = decoded(b"".join([*found[:number], *instead, *found[number + 1 :]]))
        said = f"the recording is damaged or truncated: {lost_s:.3g} of "
        assert sound.shortfall.startswith(said)
        assert sound.shortfall.endswith(" %) are missing in the middle")
        assert len(samples) == pytest.approx((SECONDS - lost_s) * 16_000, abs=0.1 * 16_000)


def test_all_lost_pages_count_and_too_many_are_refused(recording_of: Callable[..., bytes]) -> None:
    found = ogg(recording_of, "libopus", 48_000)
    first = sounding(found)[0]
    sound = decoded(b"".join(found[: first + 4] + found[first + 5 : first + 12] + found[first + 13 :]))[1]
    assert "2 of 20 s (10 %) are missing in the middle" in sound.shortfall
    short = b"".join(found[: first + 4] + found[first + 9 :])
    with pytest.raises(MediaError, match=r"5 of 20 s \(25 %\) are missing in the middle"):
        decoded(short)
    assert decoded(short, limits=MediaLimits(max_missing_share=0.3))[1].duration_s == pytest.approx(SECONDS - 5, abs=0.1)


def test_a_pause_is_not_lost_nor_are_other_numbers_or_none(recording_of: Callable[..., bytes]) -> None:
    found = ogg(recording_of, "libopus", 48_000, 4)
    for others in (
        [*found[:3], *(changed(page, GRANULE, "<Q", granule(page) + 96_000) for page in found[3:])],
        [*found[:3], *(changed(page, NUMBER, "<I", 7 * number + 1000) for number, page in enumerate(found[3:]))],
        [changed(page, NUMBER, "<I", 0) for page in found],
    ):
        assert decoded(b"".join(others))[1].shortfall == ""


def test_a_beginning_that_is_missing_is_told(recording_of: Callable[..., bytes]) -> None:
    found = ogg(recording_of, "libopus", 48_000, 4)
    first = sounding(found)[0]
    for instead in ([], [damaged(found[first])]):
        sound = decoded(b"".join([*found[:first], *instead, *found[first + 1 :]]))[1]
        assert sound.shortfall == "the recording is damaged or truncated: its beginning is missing (OGG)"
        assert sound.duration_s == pytest.approx(3, abs=0.1)


def of_stream(found: list[bytes], stream: bytes) -> list[bytes]:
    return [changed(page, STREAM, ">I", int.from_bytes(stream, "big")) for page in found]


def test_pages_in_another_order_are_there(recording_of: Callable[..., bytes]) -> None:
    found = ogg(recording_of, "libopus", 48_000, 8)
    found[5], found[6] = found[6], found[5]
    sound = decoded(b"".join(found))[1]
    assert "missing" not in sound.shortfall
    assert "begin anew" in sound.shortfall
    assert sound.duration_s == pytest.approx(8, abs=0.1)


@pytest.fixture(scope="module")
def part_of(recording_of: Callable[..., bytes]) -> Callable[[tuple[str, int, str], int], bytes]:
    """``part_of(("flac", 44_100, "mono"), 1)``: the second of two parts of a recording, two seconds each."""

    @functools.cache
    def make(form: tuple[str, int, str], part: int) -> bytes:
        codec, rate, layout = form
        samples = chirp(rate, 4)[part * 2 * rate : (part + 1) * 2 * rate]
        samples = np.stack([samples, samples]) if layout == "stereo" else samples
        return recording_of(samples, rate, "ogg", codec, layout)

    return make


OTHERS = [("libopus", 48_000, "mono"), ("libopus", 48_000, "stereo"), ("flac", 44_100, "mono"), ("flac", 8_000, "stereo")]


@for_each("stream", [b"next", None])
@for_each("first", OTHERS)
@for_each("second", OTHERS)
def test_recordings_that_were_joined_are_heard_one_after_the_other(
    part_of: Callable[..., bytes], first: tuple[str, int, str], second: tuple[str, int, str], stream: bytes | None
) -> None:
    parts = [part_of(first, 0), part_of(second, 1)]
    if stream:
        parts[1] = b"".join(of_stream(pages(parts[1]), stream))
    samples, sound = decoded(b"".join(parts))
    assert re.search(r"not as its file says: its times begin anew at 2\.0\d s; its 2 parts", sound.shortfall)
    assert len(samples) == pytest.approx(4 * RATE, abs=0.05 * RATE)
    for place in (RATE, 3 * RATE):
        heard, expected = samples[place : place + RATE // 2], chirp(RATE, 4)[place : place + RATE // 2]
        assert np.corrcoef(heard, expected)[0, 1] > 0.9


def test_each_of_them_has_an_end(recording_of: Callable[..., bytes]) -> None:
    first, second = (recording_of(chirp(48_000), 48_000, "ogg", "libopus") for _ in range(2))
    cut = b"".join(pages(first)[:-1])
    assert (
        "its end is missing (OGG); its times begin anew"
        in decoded(cut + b"".join(of_stream(pages(second), b"next")))[1].shortfall
    )
