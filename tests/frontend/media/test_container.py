"""Which demuxer a file gets, by its first bytes; what opened files may do is in test_hostile_media.py."""

from __future__ import annotations

import av

from shmring.frontend.media import signatures
from shmring.frontend.media.container import SOUND_DECODERS, VIDEO_DECODERS
from shmring.frontend.media.signatures import demuxer_of, picture_format_of
from tests.tables import for_each

HEADS = {
    "wav": [b"RIFF\0\0\0\0WAVEfmt ", b"RF64\xff\xff\xff\xffWAVEds64"],
    "avi": [b"RIFF\0\0\0\0AVI LIST"],
    "webp": [b"RIFF\0\0\0\0WEBPVP8 "],
    "aiff": [b"FORM\0\0\0\0AIFCFVER"],
    "caf": [b"caff\0\x01\0\0desc"],
    "mov": [
        *(b"\0\0\0\x20ftypisom", b"\0\0\0\x08wide\0\0\0\0mdat", b"\0\0\0\x14stypmsdh"),
        b"\0\0\0\x18uuid" + bytes(16) + b"\0\0\0\x20ftypisom",
    ],
    "matroska": [b"\x1aE\xdf\xa3\x9fB\x86\x81"],
    "ogg": [b"OggS\0\x02"],
    "flac": [b"fLaC\0\0\0\x22"],
    "gif": [b"GIF89a\x10\0\x10\0"],
    "mp3": [b"\xff\xfb\x90\x64", b"\xff\xf3\x48\xc4"],
    "aac": [b"\xff\xf1\x50\x80", b"\xff\xf9\x50\x80"],
    "mpegts": [start + 5 * (before + b"\x47" + bytes(187)) for start, before in ((b"", b""), (bytes(99), b""), (b"", b"time"))],
    None: [
        *(b"\xff\xe1\x00\x00", b"\xff\xd8\xff\xe0", b"#EXTM3U\n", b"\x89PNG\r\n\x1a\n", b"\xff", b""),
        *(b"\0\0\0\x08abcd\0\0\0\x20mdat", 4 * (b"\x47" + bytes(187))),
    ],
}


@for_each(("head", "demuxer"), [(head, demuxer) for demuxer, heads in HEADS.items() for head in heads])
def test_first_bytes_decide(head: bytes, demuxer: str | None) -> None:
    assert demuxer_of(head) == (demuxer, 0)


@for_each("junk", [b"\n", b"\xef\xbb\xbf", b"Content-Type: a/b\r\n\r\n", bytes(4000)])
def test_what_stands_before_a_signature_is_left_out(junk: bytes) -> None:
    assert demuxer_of(junk + b"RIFF\0\0\0\0WAVEfmt ") == ("wav", len(junk))
    assert demuxer_of(junk + b"\0\0\0\x20ftypisom") == ("mov", len(junk))
    assert picture_format_of(junk + b"\xff\xd8\xff\xe0") == ("JPEG", len(junk))


PICTURES = {
    "JPEG": [b"\xff\xd8\xff\xe0"],
    "PNG": [b"\x89PNG\r\n\x1a\n"],
    "WEBP": [b"RIFF\0\0\0\0WEBPVP8 "],
    "BMP": [b"BM\0\0"],
    "TIFF": [b"II*\0", b"MM\0+"],
    "HEIF": [b"\0\0\0\x18ftypheic\0\0\0\0mif1", b"\0\0\0\x18ftypmif1\0\0\0\0heic"],
    "AVIF": [b"\0\0\0\x18ftypavif\0\0\0\0mif1", b"\0\0\0\x18ftypmif1\0\0\0\0avif"],
    None: [b"\0\0\0\x18ftypisom\0\0\0\0mp42", b"%PDF-1.7", b""],
}


@for_each(("head", "name"), [(head, name) for name, heads in PICTURES.items() for head in heads])
def test_pictures_are_known_by_their_signature(head: bytes, name: str | None) -> None:
    assert picture_format_of(head) == (name, 0)


def test_libav_knows_what_is_listed() -> None:
    for name in {name for _, name in signatures._DEMUXERS} - {"webp"}:
        assert av.ContainerFormat(name, "r").is_input
    for name in SOUND_DECODERS | VIDEO_DECODERS:
        assert av.Codec(name, "r").is_decoder
