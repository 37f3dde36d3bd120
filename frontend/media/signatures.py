"""The format of a file, by the bytes that the format begins with, and where it begins.

A file's name or declared type proves nothing, and formats do not always begin at the first byte. Files come with a line break,
a mark of byte order or the rest of a mail before them; an MP4 may begin with any box; a piece cut out of an MP3 begins in the
middle of a frame. So a signature is first looked for at the beginning, then in the first 4 KiB. What stands before it is left
out.

What has no signature that is worth the name (MPEG audio, whose frames begin with 11 bits) is left to libav's own probing, which
looks for several frames in a row (:mod:`shmring.frontend.media.container`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

__all__ = ["boxes", "demuxer_of", "inner_boxes", "is_another_file", "is_still_picture", "picture_format_of"]

_MAX_JUNK_NBYTES = 4096  # the head of a mail, or what an application writes before a picture that it keeps
_MAX_BOXES = 64  # of an MP4 before the one that says what it is; there are one or two
_TS_SYNC = 0x47
_TS_PACKETS = 5  # libav wants as many in a row
_TS_STRIDES = ((188, 0), (192, 4), (204, 0))  # bytes of a packet, and of the time before it: plain, from Blu-ray, with parity

_DEMUXERS: tuple[tuple[bytes, str], ...] = (
    (rb"fLaC", "flac"),
    (rb"OggS\0", "ogg"),
    (rb"\x1aE\xdf\xa3", "matroska"),
    (rb"GIF8[79]a", "gif"),
    (rb"(?:RIFF|RF64|BW64|RIFX)....WAVE", "wav"),
    (rb"RIFF....AVI ", "avi"),
    (rb"RIFF....WEBP", "webp"),
    (rb"FORM....AIF[FC]", "aiff"),
    (rb"caff\0\x01", "caf"),
    (rb"\0...ftyp", "mov"),
    (rb"\0...styp", "mov"),
)
_DEMUXER = re.compile(b"|".join(b"(%s)" % pattern for pattern, _ in _DEMUXERS), re.DOTALL)

_PICTURES: tuple[tuple[bytes, str], ...] = (
    (rb"\xff\xd8\xff", "JPEG"),
    (rb"\x89PNG\r\n\x1a\n", "PNG"),
    (rb"GIF8[79]a", "GIF"),
    (rb"RIFF....WEBP", "WEBP"),
    (rb"II[*+]\0", "TIFF"),
    (rb"MM\0[*+]", "TIFF"),
    (rb"\0...ftyp(?:avif|avis)", "AVIF"),
    (rb"\0...ftyp(?:heic|heix|heim|heis|hevc|hevx)", "HEIF"),
    (rb"\0...ftyp(?:mif1|msf1|miaf)", "ISO"),
)
_PICTURE = re.compile(b"|".join(b"(%s)" % pattern for pattern, _ in _PICTURES), re.DOTALL)

_STILLS = (b"avif", b"heic", b"heix", b"heim", b"heis", b"mif1", b"miaf")

# Boxes that MP4 and QuickTime files have, and nothing else. Files of old begin with any of them.
_BOXES = frozenset((b"ftyp", b"styp", b"moov", b"moof", b"mdat", b"sidx"))
_FILLING = frozenset((b"wide", b"free", b"skip", b"pnot", b"uuid", b"emsg", b"prft", b"ssix", b"pdin", b"udta", b"meta"))


def picture_format_of(data: bytes) -> tuple[str | None, int]:
    """Returns Pillow's name of a picture's format, and where in the bytes it begins; (None, 0): none that is known."""
    if data[:2] == b"BM":  # too short to be looked for further on
        return "BMP", 0
    match = _PICTURE.search(data, 0, _MAX_JUNK_NBYTES)
    if match is None:
        return None, 0
    assert match.lastindex is not None
    name = _PICTURES[match.lastindex - 1][1]
    if name == "ISO":  # says only that it is a picture; of what kind is said by the brands that follow
        size = int.from_bytes(data[match.start() : match.start() + 4], "big")
        name = "AVIF" if b"avif" in data[match.start() : match.start() + min(size, _MAX_JUNK_NBYTES)] else "HEIF"
    return name, match.start()


def is_still_picture(data: bytes | memoryview) -> bool:
    """Whether what begins as an MP4 does is a HEIC or AVIF of one picture."""
    return bytes(data[4:8]) == b"ftyp" and bytes(data[8:12]) in _STILLS


def is_another_file(data: bytes | memoryview) -> bool:
    """Whether a recording or clip with a signature begins here, or the tags in front of one."""
    return bytes(data[:3]) == b"ID3" or _DEMUXER.match(data) is not None


def demuxer_of(data: bytes | memoryview) -> tuple[str | None, int]:
    """Returns libav's name of the demuxer for a recording or clip, and where in the bytes it begins.

    (None, 0): no signature that is accepted. It may still be MPEG audio, with whatever before its first frame.
    """
    head = bytes(data[:_MAX_JUNK_NBYTES])
    match = _DEMUXER.search(head)
    if match is not None and match.start() == 0:
        assert match.lastindex is not None
        return _DEMUXERS[match.lastindex - 1][1], 0
    if _begins_with_boxes(data):
        return "mov", 0
    if _is_transport_stream(head):
        return "mpegts", 0
    if len(head) >= 2 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0:  # the synchronisation of MPEG audio
        if head[1] & 0xF6 == 0xF0:
            return "aac", 0  # ADTS, which says that it is layer 0
        return ("mp3" if head[1] & 0x06 else None), 0
    if match is not None:
        assert match.lastindex is not None
        return _DEMUXERS[match.lastindex - 1][1], match.start()
    return None, 0


def boxes(data: bytes | memoryview) -> Iterator[tuple[int, bytes, int]]:
    """Yields the outermost boxes of an MP4: where each begins, its name, and where it says that it ends.

    It stops at what can't be a box. The last one may say that it ends behind the file.
    """
    place = 0
    while place + 8 <= len(data):
        size, header = int.from_bytes(data[place : place + 4], "big"), 8
        if size == 1:
            size, header = int.from_bytes(data[place + 8 : place + 16], "big"), 16
        elif size == 0:
            size = len(data) - place
        if size < header:
            return
        yield place, bytes(data[place + 4 : place + 8]), place + size
        place += size


def inner_boxes(data: memoryview, start: int, end: int) -> Iterator[tuple[int, bytes, int]]:
    """Yields the boxes inside of one, as :func:`boxes` does; all end where it ends, or the data do.

    Args:
        data: the file.
        start: of the outer box.
        end: of the outer box.
    """
    end = min(end, len(data))
    for place, name, box_end in boxes(data[start + 8 : end]):
        yield start + 8 + place, name, min(start + 8 + box_end, end)


def _begins_with_boxes(data: bytes | memoryview) -> bool:
    for number, (_, name, _) in enumerate(boxes(data)):
        if name in _BOXES:
            return True
        if number == 0 and name not in _FILLING:
            return False
        if number == _MAX_BOXES:
            break
    return False


def _is_transport_stream(head: bytes) -> bool:
    """Whether there are packets in a row, from any byte of the first one on."""
    for nbytes, before in _TS_STRIDES:
        for start in range(before, before + nbytes):
            places = range(start, start + _TS_PACKETS * nbytes, nbytes)
            if places[-1] < len(head) and all(head[place] == _TS_SYNC for place in places):
                return True
    return False
