"""How much work a picture's file needs, counted before it is decoded.

A file can ask for far more work than its size and its pixels tell. A progressive JPEG repeats scans of 23 bytes, each of which
goes over all pixels; a PNG has millions of chunks that hold nothing, a JPEG millions of segments. Honest files have about ten
scans and some thousand chunks. Work that can't be counted here is bounded by the budget of
:mod:`shmring.frontend.media.decoder_pool`.

Invariant: counting costs no more than the limits allow. Damage is for the decoder to report; here it only ends the counting.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from shmring.frontend.media.errors import MediaError

__all__ = ["check_work", "chunk_of"]

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
    if next(itertools.islice(_chunks(data), max_chunks - 1, None), None):
        raise MediaError(
            f"the picture has more than the {max_chunks} chunks that are accepted (max_image_chunks); save it again as PNG"
        )


def chunk_of(data: bytes, wanted: bytes) -> bytes:
    """Returns what is in the first chunk of a PNG with this name; nothing if there is none.

    Args:
        data: the file, whose chunks have been counted.
        wanted: the name.
    """
    return next((data[begin:end] for name, begin, end in _chunks(data) if name == wanted), b"")


def _chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yields the name of each chunk of a PNG but the last, and where its content begins and ends."""
    place = len(_PNG)
    while place + 8 <= len(data) and (name := data[place + 4 : place + 8]) != b"IEND":
        end = place + 8 + int.from_bytes(data[place : place + 4], "big")
        yield name, place + 8, end
        place = end + 4  # a checksum


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
