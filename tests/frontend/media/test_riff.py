"""WAV files that are shorter than they say."""

from __future__ import annotations

import struct

import pytest

from frontend.media.errors import MediaError
from frontend.media.riff import check_wav

FORMAT = b"fmt " + struct.pack("<IHHIIHH", 16, 1, 1, 16_000, 32_000, 2, 16)


def wav(claimed: int, present: int, riff: int | None = None, before: bytes = b"") -> bytes:
    body = b"WAVE" + FORMAT + before + b"data" + struct.pack("<I", claimed) + bytes(present)
    return b"RIFF" + struct.pack("<I", len(body) if riff is None else riff) + body


@pytest.mark.parametrize(
    "data",
    [
        wav(1000, 1000),
        wav(1000, 1300),
        wav(1000, 1000, before=b"LIST" + struct.pack("<I", 3) + b"odd" + b"\0"),
        wav(0xFFFFFFFF, 1000, riff=0xFFFFFFFF),
        wav(0x7FFFF000, 1000, riff=0x7FFFF024),
        wav(0, 0),
        b"",
        b"RIFF",
        b"RIFF\xff\xff\xff\xffAVI " + bytes(100),
        b"fLaC" + bytes(100),
    ],
)
def test_whole_files_piped_ones_and_others_pass(data: bytes) -> None:
    check_wav(data)


@pytest.mark.parametrize(
    ("data", "present"),
    [
        (wav(1000, 998), 998),
        (wav(0xFFFFFFFF, 1000), 1000),
        (wav(1000, 10, riff=0xFFFFFFFF), 10),
        (wav(1000, 0), 0),
        (wav(1000, 10, before=b"LIST" + struct.pack("<I", 3) + b"odd" + b"\0"), 10),
    ],
)
def test_the_error_about_missing_samples_says_how_many_are_there(data: bytes, present: int) -> None:
    with pytest.raises(MediaError, match=f"truncated: of .* bytes of samples it has {present}$"):
        check_wav(data)
