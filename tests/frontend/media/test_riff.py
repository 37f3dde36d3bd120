"""WAV files whose sizes are wrong: what is promised, and what is there."""

from __future__ import annotations

import random
import struct

import pytest

from shmring.frontend.media import riff
from shmring.frontend.media.errors import MediaError
from shmring.frontend.media.riff import WavSizes, wav_pieces
from tests.tables import for_each

MAX_NBYTES = 64 << 20
FORMAT = b"fmt " + struct.pack("<IHHIIHH", 16, 1, 1, 16_000, 32_000, 2, 16)


def wav_sizes(data: bytes, max_nbytes: int = MAX_NBYTES) -> WavSizes:
    return riff.wav_sizes(memoryview(data), max_nbytes)


def large(claimed: int, present: int) -> bytes:
    size = b"ds64" + struct.pack("<IQQQI", 28, (claimed + 72) % (1 << 64), claimed, 0, 0)
    return b"RF64\xff\xff\xff\xffWAVE" + size + FORMAT + b"data\xff\xff\xff\xff" + bytes(present)


def noise(nbytes: int) -> bytes:
    return random.Random(nbytes).randbytes(nbytes)


def wav(claimed: int, present: int, riff: int | None = None, before: bytes = b"") -> bytes:
    body = b"WAVE" + FORMAT + before + b"data" + struct.pack("<I", claimed) + bytes(present)
    return b"RIFF" + struct.pack("<I", len(body) if riff is None else riff) + body


def big_endian(data: bytes) -> bytes:
    """With its numbers the other way round: of all chunks, in the format, of the samples."""
    numbers = struct.unpack_from("<IHHIIHH", data, 16)
    head = b"RIFX" + data[4:8][::-1] + b"WAVEfmt " + struct.pack(">IHHIIHH", *numbers)
    return head + b"data" + data[40:44][::-1] + data[44:]


LIST = b"LIST" + struct.pack("<I", 3) + b"odd" + b"\0"


@for_each(
    "data",
    [
        wav(1000, 1000),
        wav(1000, 1000) + LIST,
        wav(999, 999, riff=36 + 999 + len(LIST)) + LIST,  # not filled up to an even number
        wav(1000, 1000, riff=36 + 1000 + len(LIST)) + LIST[:-2],
        wav(1000, 1000) + bytes(3200),  # a tenth of a second
        wav(1000, 1000, before=LIST),
        wav(0, 0),
        large(1000, 1000),
        b"",
        b"RIFF",
        b"RIFF\xff\xff\xff\xffAVI " + bytes(100),
        b"fLaC" + bytes(100),
    ],
)
def test_nothing_is_wrong_with_whole_files_and_with_others(data: bytes) -> None:
    assert wav_sizes(data) == WavSizes()


@for_each(
    "data",
    [
        *(wav(0xFFFFFFFF, 1000, riff=riff) for riff in (0xFFFFFFFF, 36, None)),
        *(wav(claimed, 1000, riff=claimed + 36) for claimed in (0x7FFFF000, 0x7FFFEFFC)),
        *(wav(claimed, 1000) for claimed in (2_000_000_000, 1_000_000_000, 1 << 30, 100_000_000, MAX_NBYTES - 43, 500)),
        *(wav(0, 1000, riff=riff) for riff in (0, 36)),
        *(large(claimed, 1000) for claimed in (0, (1 << 64) - 80, 1 << 40)),
        *(big_endian(wav(2_000_000_000, 1000)), wav(500, 1000, before=LIST)),
    ],
)
def test_sizes_that_promise_nothing_let_the_samples_go_to_the_end(data: bytes) -> None:
    assert wav_sizes(data) == WavSizes(goes_to_the_end=True)


@for_each(
    ("nbytes", "behind", "told"),
    [
        (500, bytes(3201), "3201 bytes behind its 500 bytes of samples are taken for samples, as they are nothing else"),
        (2, noise(5000), "5000 bytes behind its 2 bytes of samples are taken for samples, as they are nothing else"),
        *(
            (
                500,
                tag + noise(5000),
                "5004 bytes behind its 500 bytes of samples are another file, or its tags, and are left out",
            )
            for tag in (b"fLaC", b"ID3\4")
        ),
    ],
)
def test_what_is_behind_the_end_of_the_file_is_told(nbytes: int, behind: bytes, told: str) -> None:
    sizes = wav_sizes(wav(nbytes, nbytes) + behind)
    assert sizes.shortfall is not None
    assert (str(sizes.shortfall), sizes.shortfall.is_damage) == (told, False)
    assert sizes.goes_to_the_end == ("taken for samples" in told)


@for_each(
    ("data", "missing"),
    [
        (wav(1000, 998), 2),
        (wav(1000, 10, riff=0xFFFFFFFF), 990),
        (wav(1000, 0), 1000),
        (large(1000, 400), 600),
        (wav(1000, 10, before=LIST), 990),
        (big_endian(wav(1000, 400)), 600),
    ],
)
def test_what_is_missing_is_counted(data: bytes, missing: int) -> None:
    shortfall = wav_sizes(data).shortfall
    assert shortfall is not None
    assert (shortfall.missing, shortfall.promised, shortfall.unit) == (missing, 1000, "bytes of samples")


def test_what_is_accepted_says_which_sizes_are_promises() -> None:
    data = wav(10_000, 1000)
    assert wav_sizes(data, 10_043) == WavSizes(goes_to_the_end=True)
    assert wav_sizes(data, 10_044).shortfall is not None


def sound(data: bytes, max_nbytes: int = MAX_NBYTES) -> list[tuple[int, int]]:
    """Of each file that a WAV was joined of, how many samples it has, and how many bytes are missing."""
    sounds = []
    for views in wav_pieces(memoryview(data)):
        piece = b"".join(views)
        place = piece.index(b"data") + 8
        shortfall = wav_sizes(piece, max_nbytes).shortfall
        sounds.append(((len(piece) - place) // 2, int(shortfall.missing) if shortfall else 0))
    return sounds


def test_a_file_that_was_not_joined_is_one_piece_and_not_copied() -> None:
    for data in (wav(1000, 1000) + LIST, wav(1 << 30, 1000), large(1000, 1000), b"", b"RIFF", b"fLaC" + bytes(100)):
        ((view,),) = wav_pieces(memoryview(data))
        assert view.obj is data


@for_each(
    ("parts", "samples", "missing"),
    [
        ([wav(1000, 1000)] * 3, 1500, 0),
        ([wav(1000, 1000, before=LIST) + LIST, wav(600, 600)], 800, 0),
        ([wav(1 << 30, 1000, riff=0xFFFFFFFF)] * 3, 1500, 0),
        ([wav(0, 1000, riff=0)] * 3, 1500, 0),
        ([wav(500, 1000), wav(1000, 1000)], 1000, 0),
        ([large(1000, 1000)] * 2, 1000, 0),
        ([large((1 << 64) - 1, 1000)], 500, 0),
        ([wav(1000, 1000), wav(1000, 400)], 700, 600),
        ([wav(1000, 401), wav(1000, 1000)], 700, 600),
        ([wav(1000, 1000), wav(1000, 1000)[:20]], 500, 0),
        ([big_endian(wav(1000, 1000))] * 2, 1000, 0),
        ([wav(1000 + 44 + 600, 1000), wav(600, 600)], 800, 0),  # the first head was set right for the whole
        ([wav(1000 + 600, 1000), wav(600, 600)], 800, 0),
        ([wav(500, 500) + bytes(4000), wav(600, 600)], 2550, 0),
        ([wav(500, 500) + LIST + b"data" + struct.pack("<I", 600) + bytes(600)], 550, 0),
        ([wav(500, 500) + b"data" + struct.pack("<I", 100) + bytes(100) + LIST, wav(600, 600)], 600, 0),
    ],
)
def test_wavs_that_were_joined_are_one_and_promise_what_each_does(parts: list[bytes], samples: int, missing: int) -> None:
    assert sound(b"".join(parts)) == [(samples, missing)]


@for_each("parts", [1, 2])
@for_each("bits", [8, 16, 24, 32])
def test_samples_of_big_endian_files_are_turned_round(parts: int, bits: int) -> None:
    nbytes = bits // 8
    head = struct.pack("<HHIIHH", 1, 1, 16_000, 16_000 * nbytes, nbytes, bits)
    samples = bytes(range(120))
    plain = wav(120, 0)[:20] + head + wav(120, 0)[36:] + samples
    other = big_endian(plain)[:-120] + b"".join(samples[place : place + nbytes][::-1] for place in range(0, 120, nbytes))
    ((turned_head, *turned),) = wav_pieces(memoryview(other * parts))
    assert b"".join(turned) == samples * parts
    assert bytes(turned_head[8:40]) == plain[8:40]


def test_an_identifier_of_a_big_endian_format_is_turned_round() -> None:
    numbers = (0xFFFE, 1, 16_000, 32_000, 2, 16, 22, 16, 4, 1, 0, 16)
    rest = bytes.fromhex("800000aa00389b71")
    plain, other = (struct.pack(order + "HHIIHHHHIIHH", *numbers) + rest for order in "<>")
    data = b"RIFX" + struct.pack(">I", 68) + b"WAVEfmt " + struct.pack(">I", 40) + other + b"data" + struct.pack(">I", 8)
    ((head, samples),) = wav_pieces(memoryview(data + b"\1\2\3\4\5\6\7\x08"))
    assert bytes(head[16:60]) == struct.pack("<I", 40) + plain
    assert bytes(samples) == b"\2\1\4\3\6\5\x08\7"


@for_each("claims", [(0, 0), (36 + 1000, 1000), (500, 500)])
def test_a_large_file_whose_samples_have_a_size_of_their_own(claims: tuple[int, int]) -> None:
    chunk = b"ds64" + struct.pack("<IQQQI", 28, *claims, 0, 0)
    for before in (chunk, b""):
        data = b"RF64\xff\xff\xff\xffWAVE" + before + FORMAT + b"data" + struct.pack("<I", 1000) + bytes(1000)
        (views,) = wav_pieces(memoryview(data))
        assert (views[0][:4] == b"RF64") == (before != b"" and claims[1] == 1000)
        assert sound(data) == [(500, 0)]


def test_wavs_of_other_formats_are_pieces_of_their_own() -> None:
    other = bytearray(wav(600, 600))
    other[24:28] = struct.pack("<I", 8000)  # samples a second
    assert sound(wav(1000, 1000) * 2 + bytes(other) + wav(1000, 1000)) == [(1000, 0), (300, 0), (500, 0)]


def test_the_number_of_parts_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(riff, "_MAX_PARTS", 4)
    assert sound(wav(10, 10) * 4) == [(20, 0)]
    with pytest.raises(MediaError, match="more than the 4 WAV files"):
        wav_pieces(memoryview(wav(10, 10) * 5))
