"""Which demuxer a file gets, by its first bytes; what opened files may do is in test_hostile_media.py."""

from __future__ import annotations

import av

from shmring.frontend.media import signatures
from shmring.frontend.media.container import SOUND_DECODERS, VIDEO_DECODERS
from shmring.frontend.media.signatures import demuxer_of, picture_format_of
from tests.tables import for_each


@for_each(
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
        (b"RIFF\0\0\0\0WEBPVP8 ", "webp"),
        (b"caff\0\x01\0\0desc", "caf"),
        (b"\0\0\0\x14stypmsdh", "mov"),
        (b"\0\0\0\x18uuid" + bytes(16) + b"\0\0\0\x20ftypisom", "mov"),
        (b"\0\0\0\x08abcd" + b"\0\0\0\x20mdat", None),
        (5 * (b"\x47" + bytes(187)), "mpegts"),
        (bytes(99) + 5 * (b"\x47" + bytes(187)), "mpegts"),
        (5 * (b"time\x47" + bytes(187)), "mpegts"),
        (4 * (b"\x47" + bytes(187)), None),
        (b"\x89PNG\r\n\x1a\n", None),
        (b"\xff", None),
        (b"", None),
    ],
)
def test_first_bytes_decide(head: bytes, demuxer: str | None) -> None:
    assert demuxer_of(head) == (demuxer, 0)


@for_each("junk", [b"\n", b"\xef\xbb\xbf", b"Content-Type: a/b\r\n\r\n", bytes(4000)])
def test_what_stands_before_a_signature_is_left_out(junk: bytes) -> None:
    assert demuxer_of(junk + b"RIFF\0\0\0\0WAVEfmt ") == ("wav", len(junk))
    assert demuxer_of(junk + b"\0\0\0\x20ftypisom") == ("mov", len(junk))
    assert picture_format_of(junk + b"\xff\xd8\xff\xe0") == ("JPEG", len(junk))


@for_each(
    ("head", "name"),
    [
        (b"\xff\xd8\xff\xe0", "JPEG"),
        (b"\x89PNG\r\n\x1a\n", "PNG"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "WEBP"),
        (b"BM\0\0", "BMP"),
        (b"II*\0", "TIFF"),
        (b"MM\0+", "TIFF"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1", "HEIF"),
        (b"\0\0\0\x18ftypavif\0\0\0\0mif1", "AVIF"),
        (b"\0\0\0\x18ftypmif1\0\0\0\0heic", "HEIF"),
        (b"\0\0\0\x18ftypmif1\0\0\0\0avif", "AVIF"),
        (b"\0\0\0\x18ftypisom\0\0\0\0mp42", None),
        (b"%PDF-1.7", None),
        (b"", None),
    ],
)
def test_pictures_are_known_by_their_signature(head: bytes, name: str | None) -> None:
    assert picture_format_of(head) == (name, 0)


def test_libav_knows_what_is_listed() -> None:
    for name in {name for _, name in signatures._DEMUXERS} - {"webp"}:
        assert av.ContainerFormat(name, "r").is_input
    for name in SOUND_DECODERS | VIDEO_DECODERS:
        assert av.Codec(name, "r").is_decoder
