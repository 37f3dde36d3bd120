"""What the tests of media share: recordings and clips made by libav on the spot, and how much memory something took."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest
from av.stream import Disposition
from PIL import Image

_STRIP_OFFSETS = 273  # the TIFF tag that says where the pixels begin

Array = np.ndarray[Any, Any]


def _recording(
    samples: Array, rate: int, container: str = "wav", codec: str = "pcm_s16le", layout: str = "mono", bit_rate: int = 0
) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=rate)
        stream.layout = layout
        if bit_rate:
            stream.bit_rate = bit_rate
        packed = np.ascontiguousarray(np.atleast_2d(samples).T, np.float32).reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(packed, format="flt", layout=layout)
        frame.sample_rate, frame.pts = rate, 0
        resampler = av.AudioResampler(stream.format, layout, rate, frame_size=stream.codec_context.frame_size or 1024)
        for part in [*resampler.resample(frame), *resampler.resample(None)]:
            output.mux(stream.encode(part))
        output.mux(stream.encode(None))
    return file.getvalue()


def remuxed(
    *files: bytes,
    container: str = "mp4",
    into: Any = None,
    edit: Callable[[int, int, av.Packet[Any]], av.Packet[Any]] = lambda file, number, packet: packet,
    **container_options: str,
) -> bytes:
    """The first tracks of files as one track of another file, whose packets follow each other.

    Args:
        files: of one codec.
        container: what they come into.
        into: is written to instead of memory.
        edit: is given the number of a file, that of a packet in it, and the packet; returns what comes there.
        container_options: of libav.
    """
    target = io.BytesIO() if into is None else into
    with (
        av.open(target, "w", format=container, container_options=container_options) as output,
        av.open(io.BytesIO(files[0])) as first,
    ):
        stream = output.add_stream_from_template(first.streams[0])
        for file_number, file in enumerate(files):
            with av.open(io.BytesIO(file)) as source:
                for number, packet in enumerate(source.demux(0)):
                    if packet.dts is not None:
                        edited = edit(file_number, number, packet)
                        edited.stream = stream
                        output.mux(edited)
    return target.getvalue() if into is None else b""


def _two_tracks(first: bytes, second: bytes, default: int) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as output, av.open(io.BytesIO(first)) as one, av.open(io.BytesIO(second)) as two:
        sources = (one, two)
        streams = [output.add_stream_from_template(source.streams[0]) for source in sources]
        for number, stream in enumerate(streams):
            stream.disposition = Disposition.default if number == default else Disposition(0)
        for source, stream in zip(sources, streams, strict=True):
            for packet in source.demux(0):
                if packet.size:
                    packet.dts, packet.stream = packet.pts, stream
                    output.mux(packet)
    return file.getvalue()


def _clip(
    levels: Sequence[int],
    container: str = "mp4",
    codec: str = "libx264",
    *,
    size: tuple[int, int] = (96, 64),
    rate: int = 25,
    times: Sequence[int] | None = None,
    rotation: float | None = None,
    pixel_format: str = "yuv420p",
    container_options: dict[str, str] | None = None,
    **options: str,
) -> bytes:
    width, height = size
    file = io.BytesIO()
    with av.open(file, "w", format=container, container_options=container_options or {}) as output:
        stream = output.add_stream(codec, rate=rate, options={"threads": "1", **options})
        stream.width, stream.height, stream.pix_fmt = width, height, pixel_format
        stream.bit_rate = 4_000_000  # much, so that levels are as they were given
        stream.codec_context.time_base = Fraction(1, rate)
        if rotation is not None:
            stream.set_display_rotation(rotation)
        for number, level in enumerate(levels):
            pixels = np.full((height, width, 3), level, np.uint8)
            pixels[: height // 2, : width // 2] = 255
            frame = av.VideoFrame.from_ndarray(pixels)
            frame.pts, frame.time_base = (times[number] if times else number), Fraction(1, rate)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return file.getvalue()


@pytest.fixture(scope="session")
def recording_of() -> Callable[..., bytes]:
    """``recording_of(samples, rate, "mp3", "libmp3lame", "stereo")``: a file; samples are (samples,) or (channels, samples)."""
    return _recording


@pytest.fixture(scope="session")
def clip_of() -> Callable[..., bytes]:
    """``clip_of(levels, "mp4", "libx264", g="10")``: a file; each frame is of a level of grey, its upper left is white."""
    return _clip


def _many_scans(count: int, side: int = 3000) -> bytes:
    """A progressive JPEG whose last scan, 23 bytes that say "nothing changes" of all its blocks, is there so many times."""
    file = io.BytesIO()
    Image.new("RGB", (side, side), (100, 150, 200)).save(file, "JPEG", progressive=True, quality=50)
    data = file.getvalue()
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + count * last + data[-2:]


@pytest.fixture(scope="session")
def many_scans() -> Callable[..., bytes]:
    """``many_scans(count, side)``: a JPEG that takes 7 ms of a core for each scan, if a side has 3000 pixels."""
    return functools.cache(_many_scans)


def _long_clip(count: int, size: tuple[int, int] = (4096, 2160)) -> bytes:
    """VP9: a frame, and then one of 125 bytes that says "nothing changes", so many times."""
    rate = 120
    options = {"deadline": "realtime", "cpu-used": "8", "lag-in-frames": "0", "auto-alt-ref": "0", "error-resilient": "1"}
    file = io.BytesIO()
    with av.open(file, "w", format="webm") as output:
        stream = output.add_stream("libvpx-vp9", rate=rate, options=options)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        stream.codec_context.time_base = Fraction(1, rate)
        packets = []
        for number in range(4):  # the second one is larger than those that follow
            frame = av.VideoFrame.from_ndarray(np.full((size[1] * 3 // 2, size[0]), 128, np.uint8), format="yuv420p")
            frame.pts, frame.time_base = number, Fraction(1, rate)
            packets += stream.encode(frame)
        packets += stream.encode(None)
        for number in range(count):
            packet = av.Packet(bytes(packets[-1 if number else 0]))
            packet.stream, packet.time_base, packet.is_keyframe = stream, Fraction(1, rate), not number
            packet.pts = packet.dts = number
            output.mux(packet)
    return file.getvalue()


@pytest.fixture(scope="session")
def long_clip() -> Callable[..., bytes]:
    """``long_clip(count, size)``: frames that take 11 ms of a core each, if they have 4096 x 2160 pixels."""
    return functools.cache(_long_clip)


@pytest.fixture(scope="session")
def damaged_tiff() -> bytes:
    """A picture whose pixels can't be decompressed, and about which libtiff itself writes to stderr."""
    file = io.BytesIO()
    Image.new("L", (64, 64), 80).save(file, "TIFF", compression="tiff_adobe_deflate")
    data = bytearray(file.getvalue())
    strip = Image.open(io.BytesIO(data)).tag_v2[_STRIP_OFFSETS][0]
    data[strip : strip + 2] = bytes(2)  # no header of zlib's, so that no decoder can take the bytes behind it for something
    return bytes(data)


@pytest.fixture
def two_tracks() -> Callable[[bytes, bytes, int], bytes]:
    """``two_tracks(first, second, default)``: the first tracks of two files in one, of which one is the default."""
    return _two_tracks
