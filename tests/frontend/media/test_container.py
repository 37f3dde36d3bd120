"""Which demuxer a file gets, by its first bytes; what opened files may do is in test_hostile_media.py."""

from __future__ import annotations

import av
import pytest

from frontend.media import container
from frontend.media.container import SOUND_DECODERS, VIDEO_DECODERS, demuxer_of


@pytest.mark.parametrize(
    ("head", "demuxer"),
    [
        (b"RIFF\0\0\0\0WAVEfmt ", "wav"),
        (b"RF64\xff\xff\xff\xffWAVEds64", "wav"),
        (b"RIFF\0\0\0\0AVI LIST", "avi"),
        (b"FORM\0\0\0\0AIFCFVER", "aiff"),
        (b"\0\0\0\x20ftypisom", "mov"),
        (b"\0\0\0\x08wide\0\0\0\0mdat", "mov"),
        (b"\x1aE\xdf\xa3\x9fB\x86\x81", "matroska"),
        (b"OggS\0\x02", "ogg"),
        (b"fLaC\0\0\0\x22", "flac"),
        (b"GIF89a\x10\0\x10\0", "gif"),
        (b"\xff\xfb\x90\x64", "mp3"),
        (b"\xff\xf3\x48\xc4", "mp3"),
        (b"\xff\xf1\x50\x80", "aac"),
        (b"\xff\xf9\x50\x80", "aac"),
        (b"\xff\xe1\x00\x00", None),
        (b"\xff\xd8\xff\xe0", None),
        (b"#EXTM3U\n", None),
        (b"RIFF\0\0\0\0WEBPVP8 ", None),
        (b"\x89PNG\r\n\x1a\n", None),
        (b"\xff", None),
        (b"", None),
    ],
)
def test_first_bytes_decide(head: bytes, demuxer: str | None) -> None:
    assert demuxer_of(head) == demuxer


def test_libav_knows_what_is_listed() -> None:
    for name in {name for _, _, name in container._MAGIC}:
        assert av.ContainerFormat(name, "r").is_input
    for name in SOUND_DECODERS | VIDEO_DECODERS:
        assert av.Codec(name, "r").is_decoder
