"""What is counted before a decoder sees a picture: scans and chunks, cheaply, and only where they are."""

from __future__ import annotations

import io
import struct
import time
import zlib
from collections.abc import Callable

import pytest
from PIL import Image

from shmring.frontend.media.errors import MediaError
from shmring.frontend.media.options import MediaLimits
from shmring.frontend.media.work import check_work
from tests.tables import for_each

LIMITS = MediaLimits()
MAX_SECONDS = 0.5  # of a core, on a busy machine; each of these files took seconds or minutes to decode


def check(data: bytes) -> None:
    """Checks a file with the usual limits, and that this is cheap."""
    began_s = time.process_time()
    try:
        check_work(data, LIMITS.max_image_scans, LIMITS.max_image_chunks)
    finally:
        assert time.process_time() - began_s < MAX_SECONDS


def png(*chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG of 8 x 8 black pixels, with more chunks behind its header."""
    pixels = zlib.compress(bytes(8 * 25))
    all_chunks = [(b"IHDR", struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0)), *chunks, (b"IDAT", pixels), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in all_chunks
    )


def jpeg(**options: object) -> bytes:
    file = io.BytesIO()
    Image.effect_noise((300, 200), 80).convert("RGB").save(file, "JPEG", **options)
    return file.getvalue()


@for_each("progressive", [False, True])
@for_each("restart", [0, 1])
def test_honest_pictures_pass(progressive: bool, restart: int) -> None:
    check(jpeg(progressive=progressive, restart_marker_blocks=restart))
    check(png((b"tEXt", b"a\0b")))


def test_scans_are_counted_exactly(many_scans: Callable[..., bytes]) -> None:
    check(many_scans(LIMITS.max_image_scans - 10, 64))  # ten are there already
    with pytest.raises(MediaError, match=r"more than the 100 scans .*max_image_scans.* as a baseline JPEG"):
        check(many_scans(LIMITS.max_image_scans - 9, 64))


def test_585_kb_of_scans_are_refused(many_scans: Callable[..., bytes]) -> None:
    data = many_scans(23_000)  # of nine megapixels: 160 s
    assert len(data) < 600_000
    with pytest.raises(MediaError, match="scans"):
        check(data)


@for_each(("name", "body"), [(b"IDAT", b""), (b"tEXt", b"a\0b"), (b"IDAT", b"\0")])
def test_millions_of_chunks_are_refused(name: bytes, body: bytes) -> None:
    chunk_content = (name, body)
    check(png(*[chunk_content] * (LIMITS.max_image_chunks - 3)))
    with pytest.raises(MediaError, match=r"more than the 65536 chunks .*max_image_chunks"):
        check(png(*[chunk_content] * (LIMITS.max_image_chunks - 2)))
    begin, end = png()[:33], png()[33:]
    chunk = png(chunk_content)[33 : 33 + 12 + len(body)]
    with pytest.raises(MediaError, match="chunks"):
        check(begin + chunk * 3_300_000 + end)


def test_millions_of_segments_are_refused() -> None:
    data = jpeg()
    with pytest.raises(MediaError, match="segments"):
        check(data[:2] + b"\xff\xfe\0\2" * 3_000_000 + data[2:])


def test_what_only_looks_like_a_scan_is_none() -> None:
    data = jpeg()
    comment = b"\xff\xda" * 30_000  # a thumbnail's, say
    check(data[:2] + b"\xff\xfe" + struct.pack(">H", 2 + len(comment)) + comment + data[2:])
    check(data + b"\xff\xda\0\2" * 1000)  # behind the end: a film, as some telephones append it
    check(b"RIFF" + b"\xff\xda" * 1000)


@for_each("cut", [3, 4, 21, 200, -2])
def test_damage_is_for_the_decoder_to_report(cut: int) -> None:
    check(jpeg(progressive=True)[:cut])
    check(png()[:cut])
