"""Whatever the bytes are: a MediaError or a medium, within seconds of CPU and with bounded memory; never anything else.

The files are made here. Some claim what they do not hold, some ask for other files, some are damaged in ways that chance
decides (by a fixed seed).
"""

from __future__ import annotations

import base64
import io
import random
import re
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias

import av
import numpy as np
import pytest
import torch
from PIL import Image

from shmring.engine.protocol import InputSpec, PictureSpec, SoundSpec, VideoSpec
from shmring.frontend.media import audio, container, image, video
from shmring.frontend.media.errors import MediaError
from shmring.frontend.media.options import MediaIoKwargs, MediaLimits
from shmring.frontend.media.signatures import demuxer_of
from tests.frontend.media.test_image import chunked, encoded
from tests.nursery import Nursery
from tests.tables import for_each, slow

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, about the damage that is done here

Kind: TypeAlias = Literal["image", "audio", "video"]
KINDS: tuple[Kind, ...] = ("image", "audio", "video")

LIMITS = MediaLimits(max_image_pixels=16_000_000)
SPEC = InputSpec(picture=PictureSpec(max_pixels=250_000), sound=SoundSpec(), video=VideoSpec(num_frames=4, max_pixels=250_000))
MAX_SECONDS = 5.0  # of CPU: how long it takes depends on who else computes; what waits for ever, pytest ends
MAX_NBYTES = 100 << 20


def load(data: bytes, kind: Kind) -> tuple[int, ...]:
    """Does what the loader's threads do; returns the shape of what came out."""
    if kind == "image":
        picture = image.probe(data, LIMITS, 250_000)
        pixels = np.empty(picture.shape, np.uint8)
        image.decode_into(data, picture, pixels)
        return pixels.shape
    if kind == "audio":
        sound = audio.probe(data, SoundSpec(), LIMITS)
        assert torch.Size(sound.shape).numel() * 4 <= 20 << 20
        spectrogram = np.full(sound.shape, np.nan, np.float32)
        length = audio.decode_into(data, sound, spectrogram).length
        assert np.isfinite(spectrogram[:length]).all()
        return spectrogram[:length].shape
    assert SPEC.video is not None
    clip = video.probe(data, SPEC.video, LIMITS, MediaIoKwargs())
    frames = np.empty(clip.shape, np.uint8)
    return frames[: len(video.decode_into(data, clip, frames).timestamps_s)].shape


def outcome(data: bytes, kind: Kind) -> str:
    """What came of it: "decoded", or the error's text."""
    began_s = time.process_time()
    try:
        load(data, kind)
        result = "decoded"
    except MediaError as error:
        result = str(error)
        assert len(result) < 300
        assert "<none>" not in result
    assert time.process_time() - began_s < MAX_SECONDS
    return result


# -- seeds --------------------------------------------------------------------------------------------------------------


def _picture(name: str) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (12, 16, 3), np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6  # turned
    options = {"exif": exif} if name in ("JPEG", "PNG", "WEBP") else {}
    return encoded(Image.fromarray(pixels).resize((160, 120), Image.Resampling.BICUBIC), name, **options)


def _animation() -> bytes:
    frames = [Image.new("RGB", (96, 64), (level, 0, 255 - level)) for level in range(0, 250, 25)]
    return encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:], duration=100)


@pytest.fixture(scope="module")
def seeds(recording_of: Callable[..., bytes], clip_of: Callable[..., bytes]) -> dict[str, tuple[Kind, bytes]]:
    """Small good files of each format, by name."""
    sound = 0.3 * np.sin(np.arange(8000) ** 1.3 / 50)
    levels = range(16, 216, 10)
    streaming = {"movflags": "frag_keyframe+empty_moov"}
    return {
        **{name: ("image", _picture(name)) for name in image.FORMATS},
        "WAV": ("audio", recording_of(sound, 16_000)),
        "FLAC": ("audio", recording_of(sound, 16_000, "flac", "flac")),
        "MP3": ("audio", recording_of(sound, 16_000, "mp3", "libmp3lame")),
        "Ogg": ("audio", recording_of(np.tile(sound, 3), 48_000, "ogg", "libopus")),
        "M4A": ("audio", recording_of(sound, 16_000, "ipod", "aac")),
        "ADTS": ("audio", recording_of(sound, 16_000, "adts", "aac")),
        "AIFF": ("audio", recording_of(sound, 16_000, "aiff", "pcm_s16be")),
        "CAF": ("audio", recording_of(sound, 16_000, "caf", "pcm_s16le")),
        "CAF with ALAC": ("audio", recording_of(sound, 16_000, "caf", "alac")),
        "MPEG-TS": ("video", clip_of(levels, "mpegts", g="5")),
        "WebP clip": ("video", _animation()),
        "MP4": ("video", clip_of(levels, g="5")),
        "MP4 in fragments": ("video", clip_of(levels, g="5", container_options=streaming)),
        "MPEG-4": ("video", clip_of(levels, "mp4", "mpeg4")),
        "HEVC": ("video", clip_of(levels, "mp4", "libx265", **{"x265-params": "log-level=none:pools=none"})),
        "WebM": ("video", clip_of(levels, "webm", "libvpx", deadline="realtime")),
        "VP9": ("video", clip_of(levels, "webm", "libvpx-vp9", deadline="realtime")),
        "AVI": ("video", clip_of(levels, "avi", "mpeg4")),
        "GIF clip": ("video", clip_of(levels, "gif", "gif", pixel_format="gray")),
    }


SEEDS = (
    *image.FORMATS,
    *("WAV", "FLAC", "MP3", "Ogg", "M4A", "ADTS", "AIFF", "CAF", "CAF with ALAC"),
    *("MPEG-TS", "WebP clip", "MP4", "MP4 in fragments", "MPEG-4", "HEVC", "WebM", "VP9", "AVI", "GIF clip"),
)


@for_each("name", SEEDS)
def test_the_seeds_themselves_are_good(seeds: dict[str, tuple[Kind, bytes]], name: str) -> None:
    assert outcome(seeds[name][1], seeds[name][0]) == "decoded"


# -- damage -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SEEDS)
def test_truncated_files(seeds: dict[str, tuple[Kind, bytes]], name: str, peak_nbytes: Any) -> None:
    kind, data = seeds[name]
    lengths = [*range(40), *np.linspace(40, len(data) - 1, 60).astype(int).tolist()]
    assert peak_nbytes(lambda: [outcome(data[:length], kind) for length in lengths]) < MAX_NBYTES


Damage: TypeAlias = Callable[[bytearray, random.Random], None]


def flip_bits(data: bytearray, chance: random.Random) -> None:
    for _ in range(chance.choice((1, 3, 10))):
        place = int(len(data) * chance.random() ** chance.choice((1, 3)))  # headers are at the front
        data[place] ^= 1 << chance.randrange(8)


def overwrite(data: bytearray, chance: random.Random) -> None:
    """As a disk or a network may, which has a piece of something else there; often what is behind is gone as well."""
    for _ in range(chance.randrange(7)):
        place = int(len(data) * chance.random() ** 2)
        data[place : place + chance.randint(1, 8)] = chance.randbytes(chance.randint(1, 8))
    del data[int(len(data) * chance.uniform(0.2, 1.5)) :]


def enlarge_a_number(data: bytearray, chance: random.Random) -> None:
    # The index of an MP4 is at its end, everybody else's headers are at the front.
    first = data.index(b"moov") if b"moov" in data and b"moof" not in data else 0
    place = first + chance.randrange(min(1200, len(data) - first - 4))
    number = chance.choice((0, 1, 0x7FFF, 0xFFFF, 0x00FFFFFF, 0x05F5E100, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF))
    data[place : place + 4] = number.to_bytes(4, chance.choice(("big", "little")))


WITH_NUMBERS = (
    *("MP4", "MP4 in fragments", "M4A", "WebM", "AVI", "WAV", "GIF clip", "Ogg", "CAF", "CAF with ALAC", "MPEG-TS"),
    *("WebP clip", "HEIF", "AVIF"),
)


@pytest.mark.parametrize("files", [25, slow(400)])
@pytest.mark.parametrize(
    ("damage", "name"),
    [
        *((flip_bits, name) for name in SEEDS),
        *((overwrite, name) for name in image.FORMATS),
        *((enlarge_a_number, name) for name in WITH_NUMBERS),
    ],
)
def test_damaged_files(seeds: dict[str, tuple[Kind, bytes]], damage: Damage, name: str, files: int, peak_nbytes: Any) -> None:
    kind, data = seeds[name]
    chance = random.Random(name)

    def load_damaged() -> None:
        for _ in range(files if damage is flip_bits else files * 8 // 5):
            damaged = bytearray(data)
            damage(damaged, chance)
            outcome(bytes(damaged), kind)

    assert peak_nbytes(load_damaged) < MAX_NBYTES


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_another_kind(seeds: dict[str, tuple[Kind, bytes]], kind: Kind) -> None:
    for name, (its_kind, data) in seeds.items():
        is_both = kind in ("image", "video") and name in ("GIF", "GIF clip", "WebP clip")
        if its_kind != kind and not is_both:
            assert outcome(data, kind) != "decoded", name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "data",
    [
        *(b"\0", b"\xff", bytes(1000), bytes(10_000), b"\xff" * 10_000, random.Random(1).randbytes(10_000)),
        *(b"just some text, and more of it\n" * 100, b"<!DOCTYPE html><html><body>404</body></html>"),
        b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
        *(b"%PDF-1.7\n" + bytes(100), b"PK\x03\x04" + bytes(100), b"\x7fELF" + bytes(100), b"\xff\xd8\xff", b"GIF89a"),
    ],
    ids=lambda data: repr(data[:8]),
)
def test_what_is_no_medium(data: bytes, kind: Kind) -> None:
    assert outcome(data, kind) != "decoded"


@for_each("kind", KINDS)
def test_nothing_is_empty(kind: Kind) -> None:
    assert "empty" in outcome(b"", kind)


@pytest.mark.parametrize(
    "magic",
    [
        *(b"RIFF\xff\xff\xff\x7fWAVE", b"RIFF\xff\xff\xff\x7fAVI ", b"FORM\x7f\xff\xff\xffAIFF", b"fLaC", b"OggS", b"GIF89a"),
        *(b"ID3\x04\0\0\0\0\0\x05", b"\xff\xfb\x90", b"\xff\xf1\x50", b"\x1aE\xdf\xa3"),
        *(b"\0\0\0\x10ftypisom", b"\0\0\0\0moov"),
    ],
)
def test_a_good_beginning_and_then_noise(magic: bytes) -> None:
    for seed in range(10):
        for kind in ("audio", "video"):
            outcome(magic + random.Random(seed).randbytes(5000), kind)


# -- claims -------------------------------------------------------------------------------------------------------------


def _png(width: int, height: int, rows: bytes, *chunks: tuple[bytes, bytes]) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return chunked((b"IHDR", header), *chunks, (b"IDAT", rows), (b"IEND", b""))


def _gif(width: int, height: int) -> bytes:
    screen = struct.pack("<HH", width, height) + b"\xf0\0\0\0\0\0\xff\xff\xff"
    return b"GIF89a" + screen + b"," + struct.pack("<4HB", 0, 0, width, height, 0) + b"\x02\x02\x4c\x01\0;"


def _bmp(side: int) -> bytes:
    data = bytearray(encoded(Image.new("1", (8, 8)), "BMP"))
    data[18:26] = side.to_bytes(4, "little") * 2
    return bytes(data)


def _jpeg(width: int, height: int) -> bytes:
    data = bytearray(_picture("JPEG"))
    place = data.index(b"\xff\xc0") + 5
    data[place : place + 4] = struct.pack(">HH", height, width)
    return bytes(data)


def _webp(width: int, height: int) -> bytes:
    size = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"VP8X" + struct.pack("<I", 10) + b"\0\0\0\0" + size + _picture("WEBP")[12:]
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


def _text_bomb() -> bytes:
    """A PNG of one pixel with a text that inflates to 64 MB."""
    return _png(1, 1, zlib.compress(bytes(4)), (b"zTXt", b"Comment\0\0" + zlib.compress(bytes(64 << 20), 9)))


def _tiff(tile_width: int, tile_height: int) -> bytes:
    """10 x 10 pixels in one tile of zeros, deflated."""
    tile = zlib.compress(bytes(3 * tile_width * tile_height), 9)
    short, long = 3, 4
    entries = [
        (256, long, 10), (257, long, 10), (259, short, 8), (262, short, 2), (277, short, 3), (284, short, 1),
        (322, long, tile_width), (323, long, tile_height), (324, long, 8), (325, long, len(tile)),
    ]  # fmt: skip
    directory = b"".join(
        struct.pack("<HHI", tag, kind, 1) + struct.pack("<I" if kind == long else "<Hxx", number)
        for tag, kind, number in sorted([*entries, (258, short, 8)])
    )
    return b"II*\0" + struct.pack("<I", 8 + len(tile)) + tile + struct.pack("<H", len(entries) + 1) + directory + bytes(4)


PICTURES: dict[str, Callable[[], bytes]] = {
    "PNG of 60000 x 60000": lambda: _png(60_000, 60_000, bytes(1000)),
    "PNG whose rows inflate to 48 MB": lambda: _png(4000, 4000, zlib.compress(bytes(4000 * 12_001), 9)),
    "PNG whose rows inflate to more than it has": lambda: _png(10, 10, zlib.compress(bytes(64 << 20), 9)),
    "PNG with a text that inflates": _text_bomb,
    "GIF of 65535 x 65535": lambda: _gif(65_535, 65_535),
    "GIF of 4000 x 4000": lambda: _gif(4000, 4000),
    "BMP of 60000 x 60000": lambda: _bmp(60_000),
    "JPEG of 65500 x 65500": lambda: _jpeg(65_500, 65_500),
    "JPEG of 4000 x 4000": lambda: _jpeg(4000, 4000),
    "WebP of 16383 x 16383": lambda: _webp(16_383, 16_383),
    "WebP of 4000 x 3000": lambda: _webp(4000, 3000),
    "TIFF of 10 x 10 in a tile of 8192 x 8192": lambda: _tiff(8192, 8192),
}


def test_a_tile_of_usual_size_may_be_larger_than_its_picture() -> None:
    assert outcome(_tiff(256, 256), "image") == "decoded"


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_that_claim_too_much(name: str, peak_nbytes: Any) -> None:
    data = PICTURES[name]()
    if re.search(r"\d{5} x \d{5}$", name):
        assert "pixels" in outcome(data, "image")
    assert peak_nbytes(lambda: outcome(data, "image")) < MAX_NBYTES
    if data[:3] == b"GIF":
        assert peak_nbytes(lambda: outcome(data, "video")) < MAX_NBYTES


@pytest.mark.parametrize("claimed", [0, 0x7FFFFFFF, 0xFFFFFFFE, 0xFFFFFFFF])
@pytest.mark.parametrize("block", [0, 1, 2, 0xFFFF])
def test_recordings_that_claim_4_gib(claimed: int, block: int, peak_nbytes: Any) -> None:
    head = struct.pack("<HHIIHH", 1, 1, 16_000, 0xFFFFFFFF, block, 16)
    data = b"RIFF\xff\xff\xff\xffWAVEfmt " + struct.pack("<I", 16) + head + b"data" + struct.pack("<I", claimed) + bytes(32_000)
    assert peak_nbytes(lambda: outcome(data, "audio")) < MAX_NBYTES


def _box(name: bytes, *parts: bytes) -> bytes:
    body = b"".join(parts)
    return struct.pack(">I", 8 + len(body)) + name + body


def _table(name: bytes, *numbers: int, flags: int = 0) -> bytes:
    return _box(name, struct.pack(f">{1 + len(numbers)}I", flags, *numbers))


def _mp4(
    *,
    stts: bytes,
    stsz: bytes,
    stsc: bytes,
    stco: bytes,
    rest: bytes = b"",
    extra: bytes = b"",
    sound: bool = False,
    duration: int = 1000,
    fragmented: bool = True,
) -> bytes:
    if sound:
        entry = _box(b"sowt", bytes(6), struct.pack(">H", 1), bytes(8), struct.pack(">HHHHHH", 1, 16, 0, 0, 16_000, 0))
    else:
        entry = _box(b"mp4v", bytes(6), struct.pack(">H", 1), bytes(16), struct.pack(">HH", 64, 48), bytes(50))
    stsd = _box(b"stsd", struct.pack(">II", 0, 1), entry)
    tables = _box(b"stbl", stsd, stts, stsz, stsc, stco, extra)
    handler = _box(b"hdlr", bytes(8), b"soun" if sound else b"vide", bytes(13))
    media = _box(b"mdia", _table(b"mdhd", 0, 0, 1000, duration, 0), handler, _box(b"minf", tables))
    track = _box(b"trak", _table(b"tkhd", 0, 0, 1, 0, duration, *[0] * 15, flags=7), media)
    extends = _box(b"mvex", _table(b"trex", 1, 1, 1, 1, 0)) if fragmented else b""
    movie = _box(b"moov", _table(b"mvhd", 0, 0, 1000, duration, *[0] * 20), track, extends)
    return _box(b"ftyp", b"isom", bytes(4), b"isom") + movie + rest + _box(b"mdat", bytes(2000))


MANY = 80_000_000
EMPTY = {"stts": _table(b"stts", 0), "stsz": _table(b"stsz", 0, 0), "stsc": _table(b"stsc", 0), "stco": _table(b"stco", 0)}
ONE = {
    "stts": _table(b"stts", 1, 10, 1),
    "stsz": _table(b"stsz", 1, 10),
    "stsc": _table(b"stsc", 1, 1, 10, 1),
    "stco": _table(b"stco", 1, 600),
}


def _fragment(*runs: int) -> bytes:
    return _box(
        b"moof", _table(b"mfhd", 1), _box(b"traf", _table(b"tfhd", 1, flags=0x20000), *(_table(b"trun", run) for run in runs))
    )


CLIPS: dict[str, bytes] = {
    "samples of one size": _mp4(
        **ONE | {"stsz": _table(b"stsz", 1, MANY), "stts": _table(b"stts", 1, MANY, 1), "stsc": _table(b"stsc", 1, 1, MANY, 1)}
    ),
    "a second table behind the first": _mp4(
        **ONE | {"stts": _table(b"stts", 1, MANY, 1), "stsc": _table(b"stsc", 1, 1, MANY, 1)}, extra=_table(b"stsz", 1, MANY)
    ),
    "a run of samples": _mp4(**EMPTY, rest=_fragment(MANY)),
    "many runs of samples": _mp4(**EMPTY, rest=_fragment(*[400_000] * 100)),
    "many fragments": _mp4(**EMPTY, rest=_fragment(400_000) * 100),
    "a duration of 136 years": _mp4(**ONE, duration=0xFFFFFFFF),
    "frames of 49 days each": _mp4(**ONE | {"stts": _table(b"stts", 1, 10, 0xFFFFFFFF)}),
    "an edit list of millions": _mp4(**ONE, extra=_box(b"edts", _table(b"elst", MANY, 1, 0, 0x10000))),
    "each of 200 edits shows 100,000 samples": _mp4(
        stts=_table(b"stts", 1, 100_000, 1),
        stsz=_table(b"stsz", 1, 100_000),
        stsc=_table(b"stsc", 1, 1, 100_000, 1),
        stco=_table(b"stco", 1, 600),
        extra=_box(b"edts", _table(b"elst", 200, *(100_000, 0, 0x10000) * 200)),
        duration=100_000,
        fragmented=False,
    ),
    "offsets of millions": _mp4(**ONE, extra=_table(b"ctts", 1, MANY, 5)),
    "millions of keyframes": _mp4(**ONE, extra=_table(b"stss", MANY)),
    "boxes in boxes": _box(b"ftyp", b"isom", bytes(4)) + struct.pack(">I4s", 1 << 20, b"moov") + b"\0\x0f\0\0trak" * 5000,
    "a box that ends before it begins": _box(b"ftyp", b"isom", bytes(4)) + struct.pack(">I4sQ", 1, b"moov", 3) + bytes(100),
    "a box of 2^63 bytes": _box(b"ftyp", b"isom", bytes(4)) + struct.pack(">I4sQ", 1, b"moov", 1 << 63) + bytes(100),
    "a header that inflates": _box(b"ftyp", b"qt  ", bytes(4))
    + _box(
        b"moov",
        _box(b"cmov", _box(b"dcom", b"zlib"), _box(b"cmvd", struct.pack(">I", 64 << 20), zlib.compress(bytes(64 << 20)))),
    ),
    "samples of one size of sound": _mp4(
        **ONE | {"stsz": _table(b"stsz", 2, MANY), "stts": _table(b"stts", 1, MANY, 2)}, sound=True
    ),
    "chunks of many samples": _mp4(
        **ONE
        | {
            "stts": _table(b"stts", 1, MANY, 1),
            "stsc": _table(b"stsc", 1, 1, 0x7FFFFFFF, 1),
            "stco": _table(b"stco", 40, *[600] * 40),
        },
        sound=True,
    ),
}


@pytest.mark.parametrize("kind", ["video", "audio"])
@pytest.mark.parametrize("name", CLIPS)
def test_clips_that_claim_too_much(name: str, kind: Kind, peak_nbytes: Any) -> None:
    assert peak_nbytes(lambda: outcome(CLIPS[name], kind)) < MAX_NBYTES


def test_claims_are_found_where_they_do_not_belong() -> None:
    inner = _mp4(**ONE)
    for name in (b"free", b"udta", b"uuid"):
        hidden = _mp4(**ONE, extra=_box(name, _table(b"stsz", 1, MANY)))
        assert "claims" in outcome(hidden, "video")
    assert "claims" not in outcome(inner, "video")


def test_encrypted_clips_are_refused() -> None:
    assert "encrypted" in outcome(_mp4(**ONE, extra=_table(b"senc", MANY)), "video")


def test_a_clip_of_uncompressed_sound_is_not_mistaken_for_a_bomb(recording_of: Callable[..., bytes]) -> None:
    data = recording_of(0.1 * np.ones(600_000), 48_000, "mov", "pcm_s16le")
    assert outcome(data, "audio") == "decoded"


# -- playlists and references -------------------------------------------------------------------------------------------


@pytest.fixture
def secret(tmp_path: Path, clip_of: Callable[..., bytes], recording_of: Callable[..., bytes]) -> Path:
    """A clip with a neighbour, where a file that refers to it by any name would find it."""
    (tmp_path / "secret.mp4").write_bytes(clip_of([50, 100, 150]))
    (tmp_path / "secret.wav").write_bytes(recording_of(np.ones(8000) * 0.1, 16_000))
    return tmp_path


@pytest.fixture
def server() -> Iterator[tuple[int, list[bytes]]]:
    """A port on which somebody listens, and what was said to it."""
    calls: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def listen() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            calls.append(b"somebody called")
            connection.close()

    thread = threading.Thread(target=listen)
    thread.start()
    yield listener.getsockname()[1], calls
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


PLAYLISTS = {
    "HLS": "#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\n{url}\n#EXT-X-ENDLIST\n",
    "HLS with a key": '#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXT-X-KEY:METHOD=AES-128,URI="{url}"\n#EXTINF:9,\n{url}\n',
    "a playlist of playlists": "#EXTM3U\n#EXT-X-STREAM-INF:BANDWIDTH=1\n{url}\n",
    "concat": "ffconcat version 1.0\nfile '{url}'\n",
    "DASH": '<?xml version="1.0"?><MPD type="static"><Period><AdaptationSet><Representation id="1" bandwidth="1">'
    "<BaseURL>{url}</BaseURL></Representation></AdaptationSet></Period></MPD>",
    "SDP": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\na=control:{url}\nm=video 5004 RTP/AVP 96\n",
    "a URL": "{url}",
    "Windows Media": '<asx version="3.0"><entry><ref href="{url}"/></entry></asx>',
}


@pytest.mark.parametrize("name", PLAYLISTS)
def test_playlists_are_not_followed(
    name: str, secret: Path, server: tuple[int, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(secret)
    port, said = server
    urls = [f"{secret}/secret.mp4", f"file:{secret}/secret.mp4", "secret.wav", f"http://127.0.0.1:{port}/a.ts"]
    for url in [*urls, f"concat:{secret}/secret.mp4", f"crypto:file:{secret}/secret.mp4", f"tcp://127.0.0.1:{port}"]:
        data = PLAYLISTS[name].format(url=url).encode()
        assert demuxer_of(data) == (None, 0)
        for kind in KINDS:
            for file in (data, b"ID3\x04\0\0\0\0\0\0" + data, b"\xff\xfb\x90\0" + data):
                assert outcome(file, kind) != "decoded"
    assert said == []


@pytest.mark.parametrize(("demuxer", "playlist"), [("concat", "concat"), ("hls", "HLS")])
def test_a_demuxer_that_opens_others_could_not(secret: Path, demuxer: str, playlist: str) -> None:
    """None of these is let in; this is what would meet it, or a vulnerability of one that is."""
    text = PLAYLISTS[playlist].format(url=f"{secret}/secret.mp4").encode()
    options = {"safe": "0", "allowed_extensions": "ALL", "extension_picky": "0"}
    with av.open(io.BytesIO(text), "r", format=demuxer, options=options) as followed:
        assert followed.streams.video  # as libav does by itself
    options |= container._NO_PROTOCOLS
    with pytest.raises((MediaError, av.error.FFmpegError)):
        av.open(io.BytesIO(text), "r", format=demuxer, options=options, io_open=container._refuse_to_open)


def test_references_in_an_mp4_are_not_followed(secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(secret)
    data = (secret / "secret.mp4").read_bytes()
    own = data.index(b"url ") - 4
    for reference in (f"file://{secret}/secret.mp4", "secret.mp4"):
        entry = _box(b"url ", bytes(4), reference.encode() + b"\0")
        grown = len(entry) - int.from_bytes(data[own : own + 4], "big")
        changed = bytearray(data[:own] + entry + data[own + 12 :])
        for name in (b"moov", b"trak", b"mdia", b"minf", b"dinf", b"dref"):
            place = changed.index(name) - 4
            changed[place : place + 4] = (int.from_bytes(changed[place : place + 4], "big") + grown).to_bytes(4, "big")
        media = changed.index(b"mdat")
        samples = slice(media + 4, media - 4 + int.from_bytes(changed[media - 4 : media], "big"))
        changed[samples] = bytes(samples.stop - samples.start)  # the frames are in the other file only
        assert outcome(bytes(changed), "video") != "decoded"


# -- what is said -------------------------------------------------------------------------------------------------------


def test_nothing_is_written_to_the_terminal(
    seeds: dict[str, tuple[Kind, bytes]], damaged_tiff: bytes, nursery: Nursery, tmp_path: Path
) -> None:
    lines = []
    for name in ("MP4", "WebM", "MP3", "FLAC", "JPEG", "TIFF", "GIF clip", "HEVC"):
        kind, data = seeds[name]
        damaged = bytearray(data)
        for place in range(len(data) // 2, len(data), 50):
            damaged[place] ^= 0x55
        files = (bytes(damaged), data[: len(data) * 2 // 3])
        lines += [f"{kind} {base64.b64encode(file).decode()}" for file in files]
    lines.append(f"image {base64.b64encode(damaged_tiff).decode()}")
    program = """
import asyncio, base64, sys, warnings
from shmring.engine.protocol import InputSpec, PictureSpec, SoundSpec, VideoSpec
from shmring.frontend.media.errors import MediaError
from shmring.frontend.media.preparation import Preparation
from shmring.frontend.media.signatures import demuxer_of
from shmring.frontend.media.sources import MediaFile
from shmring.frontend.settings import FrontendSettings
async def main():
    preparation = Preparation(FrontendSettings(decoders=2))
    spec = InputSpec(picture=PictureSpec(), sound=SoundSpec(), video=VideoSpec())
    async def is_refused(line):
        kind, data = line.split()
        try:
            file = MediaFile(kind, "x", base64.b64decode(data))
            (await preparation.decode(await preparation.probe(file, spec))).close()
        except MediaError:
            return True
        return False
    with open(sys.argv[1]) as lines:
        print(sum(await asyncio.gather(*map(is_refused, lines))))
    preparation.close()
warnings.simplefilter("ignore")
asyncio.run(main())
"""
    path = tmp_path / "lines"
    path.write_text("\n".join(lines))
    done = nursery.run_text(program, str(path))
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) >= 6
