"""Colours become sRGB: by profiles, which are applied by what they do, whatever they are called, and by numbers."""

from __future__ import annotations

import io
import re
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import av
import numpy as np
from PIL import Image, ImageCms

from shmring.engine.inputs import VideoSpec
from shmring.frontend.media import video
from shmring.frontend.media.options import MediaIoKwargs, MediaLimits
from tests.frontend.media.test_image import chunked, decoded, encoded, settled
from tests.tables import for_each

Array = np.ndarray[Any, Any]
NUM_TAGS, FIRST_TAG = 128, 132  # places in a profile
LINEAR = b"curv" + bytes(8)
GAMMA_2_2 = b"curv" + bytes(4) + struct.pack(">IH", 1, round(2.2 * 256))
INVISIBLE = 2


def tags_of_srgb() -> dict[bytes, bytes]:
    made = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    count = struct.unpack_from(">I", made, NUM_TAGS)[0]
    entries = [struct.unpack_from(">4sII", made, FIRST_TAG + 12 * number) for number in range(count)]
    return {name: made[place : place + nbytes] for name, place, nbytes in entries}


def profile(name: str, tags: dict[bytes, bytes], space: bytes = b"RGB ", connection: bytes = b"XYZ ") -> bytes:
    """An ICC profile of version 4, of a monitor."""
    text = name.encode("utf-16-be")
    named = tags | {b"desc": b"mluc" + struct.pack(">IIIHHII", 0, 1, 12, 0x656E, 0x5553, len(text), 28) + text}
    directory, content = struct.pack(">I", len(named)), b""
    for tag, value in named.items():
        directory += struct.pack(">4sII", tag, FIRST_TAG + 12 * len(named) + len(content), len(value))
        content += value + bytes(-len(value) % 4)
    illuminant = struct.pack(">3i", 63190, 65536, 54061)
    head = struct.pack(">I4s4s4s4s4s12s4s", 0, b"", b"\4\x20\0\0", b"mntr", space, connection, bytes(12), b"acsp")
    head = (head + bytes(68 - len(head)) + illuminant).ljust(NUM_TAGS, b"\0")
    return struct.pack(">I", len(head + directory + content)) + head[4:] + directory + content


def table(lightness: list[int]) -> bytes:
    """Tables that make a grey of each corner of the colours: so light, of 255."""
    channels = len(lightness).bit_length() - 1
    head = b"mft1" + struct.pack(">IBBBB9i", 0, channels, 3, 2, 0, 65536, 0, 0, 0, 65536, 0, 0, 0, 65536)
    straight = bytes(range(256))
    return head + channels * straight + b"".join(bytes([value, 128, 128]) for value in lightness) + 3 * straight


def curves(curve: bytes) -> dict[bytes, bytes]:
    return dict.fromkeys((b"rTRC", b"gTRC", b"bTRC"), curve)


SRGB = tags_of_srgb()
SWAPPED = SRGB | {b"rXYZ": SRGB[b"bXYZ"], b"bXYZ": SRGB[b"rXYZ"]}
# Of eight corners of red, green and blue each is as light as what it lacks: white becomes black.
INVERTING = SRGB | {b"A2B0": table([255 - 85 * bin(corner).count("1") for corner in range(8)])}
GREY = {b"wtpt": SRGB[b"wtpt"], b"kTRC": LINEAR}
INK = {b"A2B0": table([255 - 60 * bin(corner).count("1") for corner in range(16)])}

OTHERS = {
    "linear": profile("sRGB linear", SRGB | curves(LINEAR)),
    "a power": profile("sRGB IEC61966-2.1", SRGB | curves(GAMMA_2_2)),
    "other primaries": profile("sRGB", SWAPPED),
    "tables": profile("sRGB", INVERTING, connection=b"Lab "),
}


def noise(*shape: int) -> Array:
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def as_the_profile_says(pixels: Array, icc: bytes, mode: str = "RGB") -> Array:
    picture = Image.fromarray(pixels) if mode != "CMYK" else Image.merge(mode, [Image.fromarray(ink) for ink in pixels])
    shown = ImageCms.profileToProfile(picture, io.BytesIO(icc), ImageCms.createProfile("sRGB"), outputMode="RGB")
    assert shown is not None
    return np.asarray(shown).astype(int)


def as_light_as(linear: Array) -> Array:
    """sRGB's shades of linear ones of 0 to 1."""
    return np.rint(255 * np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055))


@for_each("name", ["PNG", "JPEG", "TIFF", "WEBP", "AVIF", "HEIF"])
@for_each("what", OTHERS)
def test_a_profile_that_is_called_srgb_is_applied_if_it_is_another_one(name: str, what: str) -> None:
    picture = Image.fromarray(noise(5, 7, 3)).resize((56, 40))
    as_stored = decoded(encoded(picture, name))
    expected = as_the_profile_says(as_stored, OTHERS[what])
    pixels = decoded(encoded(picture, name, icc_profile=OTHERS[what]))
    assert np.abs(expected - as_stored).max() > 3 * INVISIBLE
    assert np.abs(expected - pixels).max() <= INVISIBLE


def test_the_picture_is_scaled_in_srgb() -> None:
    data = encoded(Image.new("RGB", (32, 32), (220, 60, 20)), "PNG", icc_profile=OTHERS["other primaries"])
    np.testing.assert_allclose(decoded(data, 100)[5, 5], (20, 60, 220), atol=INVISIBLE)


def test_a_profile_of_srgb_leaves_the_pixels_as_they_are_whatever_its_name() -> None:
    pixels = noise(64, 64, 3)
    data = encoded(Image.fromarray(pixels), "PNG", icc_profile=profile("Camera", SRGB))
    np.testing.assert_array_equal(decoded(data), pixels)


def test_colours_of_sixteen_bits_are_converted() -> None:
    samples = np.random.default_rng(0).integers(0, 1 << 16, (4, 9, 3)).astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in samples)
    data = chunked(
        (b"IHDR", struct.pack(">IIBBBBB", 9, 4, 16, 2, 0, 0, 0)),
        (b"iCCP", b"sRGB\0\0" + zlib.compress(OTHERS["linear"])),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    )
    expected = as_the_profile_says((samples >> 8).astype(np.uint8), OTHERS["linear"])
    assert np.abs(decoded(data) - expected).max() <= INVISIBLE


@for_each(
    ("picture", "linear"),
    [
        (lambda: Image.fromarray(np.arange(16, 256, dtype=np.uint8).reshape(16, 15)), np.arange(16, 256) / 255),
        (
            lambda: Image.fromarray(np.arange(4096, 65536, 64, dtype=np.uint16).reshape(32, 30)),
            np.arange(4096, 65536, 64) / 65535,
        ),
        (lambda: Image.new("LA", (2, 2), (100, 255)), np.full(4, 100 / 255)),
    ],
    ids=["8 bits", "16 bits", "with transparency"],
)
@for_each("icc", [profile("sRGB", GREY, b"GRAY"), OTHERS["linear"]], ids=["of grey", "of colours"])
def test_grey_is_converted_also_by_a_profile_of_colours(picture: Callable[[], Image.Image], linear: Array, icc: bytes) -> None:
    made = picture()
    if made.mode == "I;16" and icc is OTHERS["linear"]:  # of which the high byte is converted
        linear = (linear * 65535 // 256) / 255
    pixels = decoded(encoded(made, "PNG", icc_profile=icc))
    expected = as_light_as(linear).reshape(
        made.height, made.width, 1
    )  # not of the darkest shades, where Little CMS interpolates
    assert np.abs(pixels - expected).max() <= INVISIBLE


@for_each("name", ["JPEG", "TIFF"])
def test_inks_are_converted(name: str) -> None:
    inks = [Image.new("L", (16, 16), ink) for ink in (20, 200, 90, 0)]
    icc = profile("sRGB", INK, b"CMYK", b"Lab ")
    pixels = decoded(encoded(Image.merge("CMYK", inks), name, icc_profile=icc))
    expected = as_the_profile_says(np.stack([np.asarray(ink) for ink in inks]), icc, "CMYK")
    assert np.abs(pixels - expected).max() <= 2 * INVISIBLE
    assert np.ptp(expected[8, 8]) <= INVISIBLE  # the tables know grey only


def test_transparent_colours_are_converted_before_they_lie_over_the_background() -> None:
    pixels = np.array([[[220, 60, 20, 255], [220, 60, 20, 0]]], np.uint8)
    data = encoded(Image.fromarray(pixels), "PNG", icc_profile=OTHERS["other primaries"])
    np.testing.assert_allclose(decoded(data), [[[20, 60, 220], [255, 255, 255]]], atol=INVISIBLE)


@for_each("icc", [b"not a profile", bytes(200), OTHERS["other primaries"][:300]])
def test_a_profile_that_can_t_be_read_is_taken_for_srgb(icc: bytes) -> None:
    pixels = noise(9, 9, 3)
    np.testing.assert_array_equal(decoded(encoded(Image.fromarray(pixels), "PNG", icc_profile=icc)), pixels)


def told(data: bytes) -> str:
    return settled(data)[1]


def numbered_png(colour: Sequence[int], *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG of 4 x 4 pixels of one colour, with chunks before its pixels."""
    rows = (b"\0" + bytes(colour) * 4) * 4
    head = struct.pack(">IIBBBBB", 4, 4, 8, 2, 0, 0, 0)
    return chunked((b"IHDR", head), *chunks, (b"IDAT", zlib.compress(rows)), (b"IEND", b""))


def cicp(numbers: tuple[int, int]) -> tuple[bytes, bytes]:
    return b"cICP", bytes([*numbers, 0, 1])


# Colours, and what is seen of them in sRGB; those of HDR by libswscale, whose output was brought from BT.1886 to sRGB.
SEEN = [
    ((12, 13), (234, 51, 35), (255, 0, 0)),
    ((12, 1), (100, 100, 100), (100, 100, 100)),
    ((11, 13), (100, 100, 100), (100, 100, 100)),
    ((9, 14), (207, 75, 35), (255, 0, 0)),
    ((9, 16), (97, 97, 97), (100, 100, 100)),
    ((9, 16), (148, 148, 148), (255, 255, 255)),
    ((9, 16), (255, 255, 255), (255, 255, 255)),
    ((9, 16), (106, 67, 45), (147, 30, 7)),
    ((9, 18), (97, 97, 97), (101, 101, 101)),
    ((9, 18), (191, 191, 191), (254, 254, 254)),
    ((9, 18), (133, 84, 56), (158, 82, 53)),
    ((1, 8), (55, 55, 55), (128, 128, 128)),
    ((2, 2), (234, 51, 35), (234, 51, 35)),
    ((1, 13), (234, 51, 35), (234, 51, 35)),
    ((6, 6), (234, 51, 35), (234, 51, 35)),
]
HDR = (
    "is not as its file says: its colours are BT.2020 in {} (HDR); in sRGB, which they were converted to, all that is "
    "brighter than white is white"
)


@for_each("name", ["PNG", "AVIF", "HEIF"])
@for_each(("numbers", "colour", "seen"), SEEN)
def test_colours_that_are_said_by_numbers_are_converted(
    name: str, numbers: tuple[int, int], colour: Sequence[int], seen: Sequence[int]
) -> None:
    if name == "PNG":
        data = numbered_png(colour, cicp(numbers))
    else:
        made = encoded(Image.new("RGB", (16, 16), tuple(colour)), name, quality=100, subsampling="4:4:4")
        data = re.sub(rb"(?s)colrnclx....", b"colrnclx" + struct.pack(">HH", *numbers), made)
    np.testing.assert_allclose(decoded(data)[1, 1], seen, atol=3 * INVISIBLE)  # dark shades of 8 bits are coarse
    shades = {16: "PQ", 18: "HLG"}.get(numbers[1])
    assert told(data) == (f"the picture {HDR.format(shades)}" if shades else "")


def test_numbers_of_a_png_go_before_its_profile_and_a_profile_before_other_numbers() -> None:
    profiled = (b"iCCP", b"linear\0\0" + zlib.compress(OTHERS["linear"]))
    gamma = (b"gAMA", struct.pack(">I", 180_000))
    for chunks, shade in [
        ([cicp((1, 13)), profiled], 55),
        ([profiled], 128),
        ([gamma, profiled], 128),
        ([gamma, (b"sRGB", b"\0")], 55),
        ([gamma, cicp((1, 8))], 128),
    ]:
        np.testing.assert_allclose(decoded(numbered_png((55, 55, 55), *chunks))[1, 1], (shade,) * 3, atol=INVISIBLE)
    made = encoded(Image.new("RGB", (16, 16), (55, 55, 55)), "AVIF", icc_profile=OTHERS["linear"])
    both = re.sub(rb"(?s)colrnclx....", b"colrnclx" + struct.pack(">HH", 9, 16), made)
    np.testing.assert_allclose(decoded(both), 128, atol=3 * INVISIBLE)


REC_709 = (31_270, 32_900, 64_000, 33_000, 30_000, 60_000, 15_000, 6_000)  # white, red, green, blue
ADOBE = (31_270, 32_900, 64_000, 33_000, 21_000, 71_000, 15_000, 6_000)


@for_each(
    ("gamma", "places", "colour", "seen"),
    [
        (100_000, None, (55, 55, 55), (128, 128, 128)),
        (55_556, None, (128, 128, 128), (147, 147, 147)),
        (45_455, None, (10, 60, 128), (10, 60, 128)),
        (45_455, REC_709, (10, 60, 128), (10, 60, 128)),
        (45_455, ADOBE, (219, 0, 0), (255, 0, 0)),
        (None, ADOBE, (128, 128, 128), (128, 128, 128)),
        (0, None, (10, 60, 128), (10, 60, 128)),
        (0xFFFF_FFFF, None, (10, 60, 128), (10, 60, 128)),
        (None, 8 * (0,), (10, 60, 128), (10, 60, 128)),
        (None, 8 * (33_333,), (10, 60, 128), (10, 60, 128)),
    ],
)
def test_powers_and_places_of_a_png(gamma: int | None, places: Sequence[int] | None, colour: Any, seen: Any) -> None:
    chunks = [(b"gAMA", struct.pack(">I", gamma))] if gamma is not None else []
    chunks += [(b"cHRM", struct.pack(">8I", *places))] if places else []
    np.testing.assert_allclose(decoded(numbered_png(colour, *chunks))[1, 1], seen, atol=INVISIBLE)


def test_a_picture_that_is_cut_off_says_both() -> None:
    data = encoded(Image.fromarray(noise(100, 100, 3)), "PNG")
    chunk = b"cICP" + bytes([9, 16, 0, 1])
    numbered = data[:33] + struct.pack(">I", 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) + data[33:]
    text = told(numbered[: len(numbered) * 96 // 100])
    assert "rows" in text
    assert "; its colours are BT.2020 in PQ" in text


def clip_of_a_colour(luma: int, chroma: tuple[int, int], numbers: tuple[int, int, int]) -> bytes:
    """HEVC of 10 bits, whose numbers of H.273 say primaries, shades and matrix."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        options = {"x265-params": "log-level=none:pools=none", "crf": "5"}
        stream = output.add_stream("libx265", rate=25, options=options)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p10le"
        context = stream.codec_context
        context.color_primaries, context.color_trc, context.colorspace = numbers
        context.color_range = 1
        for number in range(5):
            frame = av.VideoFrame(64, 64, "yuv420p10le")
            for plane, sample in zip(frame.planes, (luma, *chroma), strict=True):
                np.frombuffer(plane, np.uint16)[:] = sample
            frame.pts = number
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return file.getvalue()


@for_each(
    ("luma", "chroma", "numbers", "seen"),
    [
        (397, (512, 512), (9, 16, 9), (100, 100, 100)),  # 26 cd/m2, as grey of 18 %
        (573, (512, 512), (9, 16, 9), (255, 255, 255)),
        (940, (512, 512), (9, 16, 9), (255, 255, 255)),
        (397, (512, 512), (9, 18, 9), (101, 101, 101)),
        (721, (512, 512), (9, 18, 9), (254, 254, 254)),
        (391, (439, 601), (9, 18, 9), (158, 82, 53)),  # red, green and blue of 0.52, 0.33 and 0.22
        (397, (512, 512), (9, 14, 9), (97, 97, 97)),
        (397, (512, 512), (1, 1, 1), (97, 97, 97)),
    ],
)
def test_clips_are_converted(luma: int, chroma: tuple[int, int], numbers: tuple[int, int, int], seen: Sequence[int]) -> None:
    data = clip_of_a_colour(luma, chroma, numbers)
    header = video.probe(data, VideoSpec(num_frames=2), MediaLimits(), MediaIoKwargs())
    target = np.empty(header.shape, np.uint8)
    clip = video.decode_into(data, header, target)
    np.testing.assert_allclose(target[:, 30, 30], [seen] * 2, atol=2 * INVISIBLE)
    shades = {16: "PQ", 18: "HLG"}.get(numbers[1])
    assert clip.shortfall == (f"the clip {HDR.format(shades)}" if shades else "")


@for_each(
    ("mode", "name", "icc"),
    [
        ("RGB", "PNG", profile("Grey", GREY, b"GRAY")),
        ("P", "PNG", profile("Grey", GREY, b"GRAY")),
        ("RGB", "JPEG", profile("Ink", INK, b"CMYK", b"Lab ")),
        ("L", "JPEG", profile("Ink", INK, b"CMYK", b"Lab ")),
        ("CMYK", "JPEG", OTHERS["linear"]),
    ],
)
def test_a_profile_of_other_colours_is_passed_over(mode: str, name: str, icc: bytes) -> None:
    picture = Image.fromarray(noise(9, 9, 3)).convert(mode)
    np.testing.assert_array_equal(decoded(encoded(picture, name, icc_profile=icc)), decoded(encoded(picture, name)))
