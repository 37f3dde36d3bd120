"""WAV files whose sizes are wrong: what is promised, and what is there."""

from __future__ import annotations

import struct

from shmring.frontend.media.riff import WavSizes, wav_sizes
from tests.tables import for_each

FORMAT = b"fmt " + struct.pack("<IHHIIHH", 16, 1, 1, 16_000, 32_000, 2, 16)


def large(claimed: int, present: int) -> bytes:
    body = (
        b"WAVEds64" + struct.pack("<IQQQI", 28, claimed + 72, claimed, 0, 0) + FORMAT + b"data\xff\xff\xff\xff" + bytes(present)
    )
    return b"RF64\xff\xff\xff\xff" + body


def wav(claimed: int, present: int, riff: int | None = None, before: bytes = b"") -> bytes:
    body = b"WAVE" + FORMAT + before + b"data" + struct.pack("<I", claimed) + bytes(present)
    return b"RIFF" + struct.pack("<I", len(body) if riff is None else riff) + body


LIST = b"LIST" + struct.pack("<I", 3) + b"odd" + b"\0"


@for_each(
    "data",
    [
        wav(1000, 1000),
        wav(1000, 1000) + LIST,
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
        wav(0xFFFFFFFF, 1000, riff=0xFFFFFFFF),
        wav(0xFFFFFFFF, 1000, riff=36),
        wav(0xFFFFFFFF, 1000),
        wav(0x7FFFF000, 1000, riff=0x7FFFF024),
        wav(0, 1000, riff=0),
        wav(0, 1000, riff=36),
        large(0, 1000),
        large((1 << 64) - 80, 1000),
        wav(500, 1000),
        wav(500, 1000, before=LIST),
    ],
)
def test_sizes_that_promise_nothing_let_the_samples_go_to_the_end(data: bytes) -> None:
    assert wav_sizes(data) == WavSizes(goes_to_the_end=True)


@for_each(
    ("data", "missing"),
    [
        (wav(1000, 998), 2),
        (wav(1000, 10, riff=0xFFFFFFFF), 990),
        (wav(1000, 0), 1000),
        (large(1000, 400), 600),
        (wav(1000, 10, before=LIST), 990),
    ],
)
def test_what_is_missing_is_counted(data: bytes, missing: int) -> None:
    shortfall = wav_sizes(data).shortfall
    assert shortfall is not None
    assert (shortfall.missing, shortfall.promised, shortfall.unit) == (missing, 1000, "bytes of samples")
