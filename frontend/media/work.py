"""How much work a picture's file needs, counted before it is decoded.

A file can ask for far more work than its size and its pixels tell. A progressive JPEG repeats scans of 23 bytes, each of which
goes over all pixels; a PNG has millions of chunks that hold nothing, a JPEG millions of segments. Honest files have about ten
scans and some thousand chunks. Work that can't be counted here is bounded by the budget of
:mod:`shmring.frontend.media.decoder_pool`.

Invariant: counting costs no more than the limits allow. Damage is for the decoder to report; here it only ends the counting.
"""

from __future__ import annotations

import re

from shmring.frontend.media.errors import MediaError

__all__ = ["check_work"]

_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG = b"\xff\xd8\xff"

# Markers that a length follows, or that end the picture. Not stuffed zeros, restarts and others that stand alone.
_MARKER = re.compile(rb"\xff([\x02-\xcf\xd9-\xfe])")  # written so that re looks for the first byte as fast as memchr
_END_OF_IMAGE, _START_OF_SCAN = b"\xd9", b"\xda"


def check_work(data: bytes, max_scans: int, max_chunks: int) -> None:
    """Refuses a picture whose file asks for too much work.

    Args:
        data: its file; of formats other than JPEG and PNG nothing is counted.
        max_scans: of a JPEG.
        max_chunks: of a PNG, and segments of a JPEG.

    Raises:
        MediaError: there are more.
    """
    if data.startswith(_PNG):
        _check_png(data, max_chunks)
    elif data.startswith(_JPEG):
        _check_jpeg(data, max_scans, max_chunks)


def _check_png(data: bytes, max_chunks: int) -> None:
    place = len(_PNG)
    for _ in range(max_chunks):
        if place + 8 > len(data) or data[place + 4 : place + 8] == b"IEND":
            return
        place += 12 + int.from_bytes(data[place : place + 4], "big")  # length, name, content, checksum
    raise MediaError(
        f"the picture has more than the {max_chunks} chunks that are accepted (max_image_chunks); save it again as PNG"
    )


def _check_jpeg(data: bytes, max_scans: int, max_segments: int) -> None:
    place = num_scans = num_segments = 0
    while (match := _MARKER.search(data, place)) and match[1] != _END_OF_IMAGE:
        place = match.end() + int.from_bytes(data[match.end() : match.end() + 2], "big")
        num_segments += 1
        num_scans += match[1] == _START_OF_SCAN
        if num_scans > max_scans:
            raise MediaError(
                f"the picture has more than the {max_scans} scans that are accepted (max_image_scans); "
                "save it again, as a baseline JPEG"
            )
        if num_segments > max_segments:
            raise MediaError(
                f"the picture has more than the {max_segments} segments that are accepted (max_image_chunks); "
                "save it again as JPEG"
            )
