"""Pictures: every format and mode that is accepted comes out as Pillow itself would show it; damaged bytes are MediaErrors."""

from __future__ import annotations

import io
import itertools
import struct
import tracemalloc
import zlib
from typing import Any

import numpy as np
import pillow_heif
import pytest
from PIL import Image, ImageOps

from shmring.frontend.media.errors import MediaError
from shmring.frontend.media.image import FORMATS, PictureHeader, decode_into, probe
from shmring.frontend.media.options import MediaLimits
from tests.tables import for_each

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, about the damage that is done here

LIMITS = MediaLimits()
WIDTH, HEIGHT = 37, 23  # odd, unequal, and more than a row in each band


def noise(width: int = WIDTH, height: int = HEIGHT, seed: int = 0) -> np.ndarray[Any, Any]:
    small = np.random.default_rng(seed).integers(0, 256, (height // 4 + 2, width // 4 + 2, 3), np.uint8)
    return np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))


def encoded(picture: Image.Image, name: str, **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, name, **options)
    return file.getvalue()


def settled(
    data: bytes,
    limits: MediaLimits = LIMITS,
    max_pixels: int | None = None,
    background: tuple[int, int, int] = (255, 255, 255),
) -> tuple[np.ndarray[Any, Any], str]:
    """The pixels, and what is told of them."""
    header = probe(data, limits, max_pixels)
    target = np.full(header.shape, 77, np.uint8)
    return target, decode_into(data, header, target, background)


def decoded(data: bytes, max_pixels: int | None = None) -> np.ndarray[Any, Any]:
    return settled(data, max_pixels=max_pixels)[0]


def chunked(*chunks: tuple[bytes, bytes]) -> bytes:
    data = b"\x89PNG\r\n\x1a\n"
    for kind, content in chunks:
        data += struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
    return data


def as_pillow_shows_it(data: bytes) -> np.ndarray[Any, Any]:
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))


def with_orientation(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


@for_each("name", FORMATS)
def test_every_format_is_decoded(name: str) -> None:
    data = encoded(Image.fromarray(noise()), name)
    header = probe(data, LIMITS)
    assert (header.width, header.height, header.format) == (WIDTH, HEIGHT, name)
    np.testing.assert_array_equal(decoded(data), as_pillow_shows_it(data))


@for_each("orientation", range(1, 9))
@for_each("name", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_exif_turns_the_picture(name: str, orientation: int) -> None:
    data = encoded(Image.fromarray(noise()), name, exif=with_orientation(orientation))
    header = probe(data, LIMITS)
    assert (header.width, header.height) == ((HEIGHT, WIDTH) if orientation >= 5 else (WIDTH, HEIGHT))
    np.testing.assert_array_equal(decoded(data), as_pillow_shows_it(data))


def test_turning_works_over_many_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shmring.frontend.media.image._BAND_NBYTES", 4 * WIDTH * 5)  # five rows
    for orientation in range(1, 9):
        data = encoded(Image.fromarray(noise()), "JPEG", exif=with_orientation(orientation))
        np.testing.assert_array_equal(decoded(data), as_pillow_shows_it(data))


def test_exif_behind_the_pixels_turns_a_png() -> None:
    plain = encoded(Image.fromarray(noise()), "PNG")
    turned = encoded(Image.fromarray(noise()), "PNG", exif=with_orientation(6))
    start = turned.index(b"eXIf") - 4
    chunk = turned[start : start + 12 + int.from_bytes(turned[start : start + 4], "big")]
    end = plain.index(b"IEND") - 4
    np.testing.assert_array_equal(decoded(plain[:end] + chunk + plain[end:]), np.rot90(noise(), -1))


def test_grey_that_was_multiplied_with_its_transparency() -> None:
    grey, alpha = np.full((4, 4), 200.0), np.full((4, 4), 128)
    samples = np.dstack([grey * alpha / 255, alpha]).round().astype(np.uint8)
    fields = [(256, 4), (257, 4), (258, 8 | 8 << 16), (259, 1), (262, 1), (273, 134), (277, 2), (278, 4), (279, 32), (338, 1)]
    entries = b"".join(struct.pack("<HHII", tag, 3, 1 + (tag == 258), value) for tag, value in fields)
    data = struct.pack("<4sIH", b"II*\0", 8, len(fields)) + entries + bytes(4) + samples.tobytes()
    assert len(data) == 134 + 32
    np.testing.assert_allclose(decoded(data), 228, atol=1)


@for_each("orientation", [0, 9, 77])
def test_an_orientation_that_means_nothing_is_ignored(orientation: int) -> None:
    data = encoded(Image.fromarray(noise()), "JPEG", exif=with_orientation(orientation))
    assert probe(data, LIMITS).orientation == 1


def test_damaged_exif_does_not_spoil_the_picture() -> None:
    data = encoded(Image.fromarray(noise()), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff damaged")
    assert decoded(data).shape == (HEIGHT, WIDTH, 3)


@for_each(
    ("mode", "name"),
    [("1", "PNG"), ("L", "JPEG"), ("P", "PNG"), ("P", "GIF"), ("CMYK", "JPEG"), ("CMYK", "TIFF"), ("YCbCr", "TIFF")],
)
def test_modes_without_transparency_are_converted_as_pillow_does(mode: str, name: str) -> None:
    data = encoded(Image.fromarray(noise()).convert(mode), name)
    np.testing.assert_array_equal(decoded(data), as_pillow_shows_it(data))


@for_each("name", ["PNG", "TIFF", "WEBP", "GIF"])
@for_each("background", [(255, 255, 255), (10, 20, 30)])
def test_transparency_lies_over_the_background(name: str, background: tuple[int, int, int]) -> None:
    pixels = np.array([[[255, 0, 0, 255], [0, 0, 255, 0]], [[0, 0, 0, 128], [200, 100, 0, 255]]], np.uint8)
    if name == "GIF":
        pixels = pixels[:1]  # it knows no half
    data = encoded(Image.fromarray(pixels, "RGBA"), name, **({"lossless": True} if name == "WEBP" else {}))
    half = [0.5 * level for level in background]
    expected = np.array([[[255, 0, 0], background], [half, [200, 100, 0]]])[: len(pixels)]
    np.testing.assert_allclose(settled(data, background=background)[0], expected, atol=1)


def test_a_grey_picture_with_transparency_lies_over_white() -> None:
    data = encoded(Image.fromarray(np.array([[[10, 255], [10, 0]]], np.uint8), "LA"), "PNG")
    np.testing.assert_array_equal(decoded(data), [[[10] * 3, [255] * 3]])


def test_a_palette_with_a_transparent_colour_lies_over_white() -> None:
    picture = Image.new("P", (2, 1))
    picture.putpalette([9, 8, 7, 1, 2, 3])
    picture.putdata([0, 1])
    np.testing.assert_array_equal(decoded(encoded(picture, "PNG", transparency=1)), [[[9, 8, 7], [255] * 3]])


def test_a_colour_that_the_palette_does_not_have_is_black() -> None:
    chunks = (b"IHDR", struct.pack(">IIBBBBB", 4, 1, 8, 3, 0, 0, 0)), (b"PLTE", bytes([9, 8, 7, 1, 2, 3])), (b"tRNS", b"\0")
    data = chunked(*chunks, (b"IDAT", zlib.compress(bytes([0, 0, 1, 2, 255]))), (b"IEND", b""))
    np.testing.assert_array_equal(decoded(data), [[[255] * 3, [1, 2, 3], [0] * 3, [0] * 3]])


@for_each("name", ["PNG", "TIFF"])
def test_sixteen_bit_grey_keeps_its_high_byte(name: str) -> None:
    data = encoded(Image.fromarray(np.array([[0, 0x80FF, 0xFFFF]], np.uint16)), name)
    np.testing.assert_array_equal(decoded(data), [[[0] * 3, [0x80] * 3, [0xFF] * 3]])


@for_each("mode", ["F", "I"])
def test_thirty_two_bit_grey_is_refused(mode: str) -> None:
    with pytest.raises(MediaError, match="no agreed range"):
        decoded(encoded(Image.new(mode, (3, 2), 5), "TIFF"))


@for_each("name", ["GIF", "WEBP", "TIFF", "PNG", "MPO"])
def test_of_several_pictures_the_first_is_taken(name: str) -> None:
    frames = [Image.new("RGB", (8, 6), colour) for colour in ("red", "lime", "blue")]
    data = encoded(frames[0], name, save_all=True, append_images=frames[1:])
    np.testing.assert_allclose(decoded(data), np.broadcast_to([255, 0, 0], (6, 8, 3)), atol=2)


def test_the_target_may_be_a_view_of_other_memory() -> None:
    data = encoded(Image.fromarray(noise()), "PNG")
    memory = np.full(HEIGHT * WIDTH * 3 + 128, 77, np.uint8)
    decode_into(data, probe(data, LIMITS), memory[64:-64].reshape(HEIGHT, WIDTH, 3))
    np.testing.assert_array_equal(memory[64:-64].reshape(HEIGHT, WIDTH, 3), noise())
    assert set(memory[:64]) | set(memory[-64:]) == {77}


def test_a_target_of_another_shape_is_the_caller_s_mistake() -> None:
    data = encoded(Image.fromarray(noise()), "PNG")
    with pytest.raises(ValueError, match="the picture needs uint8"):
        decode_into(data, probe(data, LIMITS), np.empty((WIDTH, HEIGHT, 3), np.uint8))


def test_no_temporary_is_as_large_as_the_picture() -> None:
    data = encoded(Image.fromarray(noise(1500, 2000)), "JPEG")
    header = probe(data, LIMITS)
    target = np.empty(header.shape, np.uint8)
    tracemalloc.start()
    try:
        decode_into(data, header, target)
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_nbytes < target.nbytes / 4


def test_probing_decodes_nothing() -> None:
    whole = encoded(Image.fromarray(noise(400, 300)), "JPEG")
    data = whole[: len(whole) // 2]
    assert probe(data, LIMITS).shape == (300, 400, 3)
    with pytest.raises(MediaError, match="truncated"):
        decoded(data)


@for_each("name", FORMATS)
def test_a_truncated_picture_is_refused(name: str) -> None:
    data = encoded(Image.fromarray(noise(200, 160)), name)
    with pytest.raises(MediaError):
        decoded(data[: len(data) * 2 // 3])


def test_a_format_that_is_not_listed_is_refused() -> None:
    with pytest.raises(MediaError, match="not a picture in a format that is accepted"):
        probe(encoded(Image.fromarray(noise()), "PPM"), LIMITS)


def test_a_picture_without_pixels_is_refused() -> None:
    data = bytearray(encoded(Image.new("RGB", (3, 3)), "GIF"))
    data[6:10] = bytes(4)  # the screen's width and height
    frame = data.index(b",")
    data[frame + 5 : frame + 9] = bytes(4)
    with pytest.raises(MediaError, match="a GIF that is damaged"):
        probe(bytes(data), LIMITS)


def test_too_many_pixels_are_refused_from_the_header() -> None:
    data = encoded(Image.new("1", (5000, 4000)), "PNG")
    assert len(data) < 5000
    with pytest.raises(MediaError, match=r"5000 x 4000 pixels, more than the 19999999"):
        probe(data, MediaLimits(max_image_pixels=19_999_999))
    assert probe(data, MediaLimits(max_image_pixels=20_000_000)).width == 5000


def test_the_error_about_far_too_many_pixels_names_our_limit_and_not_pillows() -> None:
    """Pillow refuses those before we do, by a limit of its own."""
    header = struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)
    with pytest.raises(MediaError, match="at most 64,000,000 are accepted") as caught:
        probe(chunked((b"IHDR", header), (b"IDAT", zlib.compress(b""))), LIMITS)
    assert "178" not in str(caught.value)


def test_too_large_a_file_is_refused() -> None:
    with pytest.raises(MediaError, match="11 bytes, more than the 10"):
        probe(b"x" * 11, MediaLimits(max_image_nbytes=10))


def test_a_picture_that_is_not_what_its_header_says_is_refused() -> None:
    data = encoded(Image.fromarray(noise()), "PNG")
    header = PictureHeader(width=10, height=10, stored_width=10, stored_height=10, orientation=1, format="PNG")
    with pytest.raises(MediaError, match="its header promised 10 x 10"):
        decode_into(data, header, np.empty(header.shape, np.uint8))


def test_a_line_is_no_picture() -> None:
    data = encoded(Image.new("L", (1005, 5)), "PNG")
    with pytest.raises(MediaError, match="1005 x 5 pixels: sides of more than 200 to 1"):
        probe(data, LIMITS)
    assert probe(data, MediaLimits(max_aspect_ratio=201)).width == 1005


# -- scaling ------------------------------------------------------------------------------------------------------------


@for_each(("name", "mode"), [("JPEG", "RGB"), ("JPEG", "L"), ("PNG", "RGB"), ("PNG", "RGBA"), ("GIF", "P"), ("TIFF", "CMYK")])
@for_each("size", [(640, 400), (150, 241), (3000, 40)])
def test_larger_pictures_are_scaled_down(name: str, mode: str, size: tuple[int, int]) -> None:
    picture = Image.fromarray(noise(40, 40)).resize(size, Image.Resampling.BICUBIC).convert(mode)
    data = encoded(picture, name)
    pixels = decoded(data, 10_000)
    height, width = pixels.shape[:2]
    assert 9_000 < width * height <= 10_000
    assert width / height == pytest.approx(size[0] / size[1], rel=0.1)
    whole = Image.fromarray(as_pillow_shows_it(data))
    expected = np.asarray(whole.resize((width, height), Image.Resampling.LANCZOS))
    assert np.abs(pixels.astype(int) - expected).mean() < 2.5


@for_each("orientation", range(1, 9))
@for_each("name", ["JPEG", "PNG"])
def test_scaled_pictures_are_turned_too(name: str, orientation: int) -> None:
    picture = Image.fromarray(noise(20, 15)).resize((400, 300), Image.Resampling.BICUBIC)
    data = encoded(picture, name, exif=with_orientation(orientation))
    pixels = decoded(data, 1200)
    assert pixels.shape == ((40, 30, 3) if orientation >= 5 else (30, 40, 3))
    expected = Image.fromarray(as_pillow_shows_it(data)).resize(pixels.shape[1::-1], Image.Resampling.LANCZOS)
    assert np.abs(pixels.astype(int) - np.asarray(expected)).mean() < 3


def test_smaller_pictures_are_not_scaled() -> None:
    data = encoded(Image.fromarray(noise()), "PNG")
    np.testing.assert_array_equal(decoded(data, WIDTH * HEIGHT), noise())


def test_sixteen_bit_grey_is_scaled_by_its_high_byte() -> None:
    data = encoded(Image.fromarray(np.full((40, 40), 0x80FF, np.uint16)), "PNG")
    np.testing.assert_array_equal(decoded(data, 100), np.full((10, 10, 3), 0x80))


def test_scaling_a_jpeg_does_not_decode_it_full_size(peak_nbytes: Any) -> None:
    data = encoded(Image.new("RGB", (6000, 6000), "teal"), "JPEG")
    header = probe(data, LIMITS, 250_000)
    target = np.zeros(header.shape, np.uint8)
    assert peak_nbytes(lambda: decode_into(data, header, target)) < 40 << 20  # its pixels take 108 MB
    assert np.abs(target.astype(int) - [0, 128, 128]).max() <= 3


@for_each("size", [(1, 1), (1, 150), (150, 1)])
def test_no_side_becomes_nothing(size: tuple[int, int]) -> None:
    assert 1 <= decoded(encoded(Image.new("L", size), "PNG"), 20).size // 3 <= 20


def test_a_large_picture_that_is_packed_too_well_is_a_bomb_and_a_small_one_is_blank() -> None:
    small, large = (encoded(Image.new("RGB", (side, side)), "PNG") for side in (3000, 5000))
    assert probe(small, LIMITS).shape == (3000, 3000, 3)
    with pytest.raises(MediaError, match=r"10[0-9][0-9] for each byte of its file; 500 are accepted"):
        probe(large, LIMITS)
    assert probe(large, MediaLimits(max_image_expansion=2000)).shape == (5000, 5000, 3)


# -- what is missing ------------------------------------------------------------------------------------------------------


@for_each(
    ("name", "mode"),
    [
        *itertools.product(["JPEG"], ["RGB", "L", "CMYK"]),
        *itertools.product(["PNG", "BMP"], ["RGB", "L", "P", "1", "RGBA"]),
    ],
)
def test_a_picture_without_its_end_is_decoded_as_far_as_it_goes(name: str, mode: str) -> None:
    data = encoded(Image.fromarray(noise(300, 400)).convert(mode), name)
    whole, nothing = settled(data)
    assert nothing == ""
    pixels, told = settled(data[: len(data) * 95 // 100])
    rows = np.flatnonzero((pixels == 128).all(axis=(1, 2)))
    assert 1 <= len(rows) <= 40
    assert f"{len(rows)} of 400 rows" in told
    kept = np.setdiff1d(np.arange(400), rows)
    assert (np.abs(pixels[kept].astype(int) - whole[kept]).mean(axis=(1, 2)) < 1).sum() >= len(kept) - 1
    assert f"{len(rows)} of" in settled(data[: len(data) * 95 // 100], max_pixels=10_000)[1] or name == "JPEG"


@for_each("name", ["JPEG", "PNG", "BMP", "GIF"])
def test_half_a_picture_is_refused_and_taken_where_that_is_wanted(name: str) -> None:
    data = encoded(Image.fromarray(noise(300, 400)), name)
    half = data[: len(data) // 2]
    with pytest.raises(MediaError, match=r"\d+ of 400 rows \(\d\d %\) are missing; at most 10 % may be .*max_missing_share"):
        settled(half)
    assert "of 400 rows" in settled(half, MediaLimits(max_missing_share=0.6))[1]


def test_of_a_picture_in_several_passes_nothing_may_be_missing() -> None:
    data = encoded(Image.fromarray(noise(300, 400)), "JPEG", progressive=True)
    with pytest.raises(MediaError, match="stored in several passes"):
        settled(data[: len(data) * 97 // 100])


@for_each("chunk", [b"tEXt", b"gAMA", b"eXIf", b"pHYs", b"abCd"])
@for_each("behind", [False, True])
def test_a_wrong_checksum_of_a_chunk_that_does_not_matter_does_not_matter(chunk: bytes, behind: bool) -> None:
    data = encoded(Image.fromarray(noise()), "PNG")
    content = {b"gAMA": struct.pack(">I", 45455), b"pHYs": struct.pack(">IIB", 1, 1, 0)}.get(chunk, b"Comment\0text")
    bad = struct.pack(">I", len(content)) + chunk + content + b"\xba\xad\xf0\x0d"
    place = data.index(b"IEND") - 4 if behind else 33
    pixels, told = settled(data[:place] + bad + data[place:])
    np.testing.assert_array_equal(pixels, noise())
    assert told == ""


def test_no_text_says_that_a_listed_format_is_not_accepted() -> None:
    data = bytearray(encoded(Image.fromarray(noise()), "PNG"))
    data[29:33] = bytes(4)  # the checksum of its header
    with pytest.raises(MediaError, match="the picture is a PNG that is damaged"):
        probe(bytes(data), LIMITS)
    with pytest.raises(MediaError, match="TIFFs with 3 samples of 32 bits in floating point a pixel are not read"):
        probe(tiff(np.zeros((4, 5, 3), "<f4"), photometric=2, sample_format=3), LIMITS)
    with pytest.raises(MediaError, match="TIFFs with 3 samples of 16 bits a pixel are not read"):
        probe(tiff(np.zeros((4, 5, 3), "<u2")), LIMITS)
    with pytest.raises(MediaError, match="the picture is a TIFF that is damaged"):
        probe(tiff(np.zeros((4, 5, 3), "<u2"))[:100], LIMITS)


@for_each("junk", [b"\n", b"\r\n\r\n", b"\xef\xbb\xbf", bytes(2000)])
@for_each("name", ["JPEG", "PNG", "GIF", "WEBP", "TIFF", "HEIF", "AVIF"])
def test_what_stands_before_a_picture_is_left_out(name: str, junk: bytes) -> None:
    data = encoded(Image.fromarray(noise()), name)
    np.testing.assert_array_equal(decoded(junk + data), decoded(data))


# -- what the numbers mean ------------------------------------------------------------------------------------------------


def tiff(samples: np.ndarray[Any, Any], *, photometric: int = 1, sample_format: int = 1, largest: int | None = None) -> bytes:
    """Uncompressed, in one strip, of the array's own byte order and type."""
    order = ">" if samples.dtype.byteorder == ">" else "<"
    height, width = samples.shape[:2]
    count = samples.shape[2] if samples.ndim == 3 else 1
    short, long = 3, 4
    bits = 8 * samples.dtype.itemsize
    tags = [
        *((256, long, width), (257, long, height), (258, short, bits), (259, short, 1), (262, short, photometric)),
        *((273, long, 8), (277, short, count), (278, long, height), (279, long, samples.nbytes), (339, short, sample_format)),
        *([(281, short, largest)] if largest is not None else []),
    ]
    body = samples.tobytes()
    if count > 1:
        tags = [tag for tag in tags if tag[0] not in (258, 339)]
        places = 8 + len(body)
        body += struct.pack(f"{order}{count}H", *count * [bits]) + struct.pack(f"{order}{count}H", *count * [sample_format])
        offsets = {258: places, 339: places + 2 * count}
    entries = [
        struct.pack(f"{order}HHII" if kind == long else f"{order}HHIHxx", tag, kind, 1, value) for tag, kind, value in tags
    ]
    if count > 1:
        entries += [struct.pack(f"{order}HHII", tag, short, count, place) for tag, place in offsets.items()]
    entries.sort(key=lambda entry: struct.unpack(f"{order}H", entry[:2])[0])
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", 8 + len(body))
    return head + body + struct.pack(f"{order}H", len(entries)) + b"".join(entries) + bytes(4)


def test_grey_of_which_white_is_zero_is_inverted_before_its_bits_are_taken() -> None:
    samples = np.array([[0, 0x7FFF, 0xFFFF]], "<u2")
    np.testing.assert_array_equal(decoded(tiff(samples, photometric=0))[0, :, 0], [0xFF, 0x80, 0])
    np.testing.assert_array_equal(decoded(tiff(samples.astype("u1"), photometric=0))[0, :, 0], [0xFF, 0, 0])


@for_each("bits", [9, 10, 12, 14, 15, 16])
@for_each("order", ["<", ">"])
def test_fewer_bits_in_sixteen_are_as_bright_as_eight(bits: int, order: str) -> None:
    largest = (1 << bits) - 1
    samples = np.array([[0, largest // 2, largest]], f"{order}u2")
    np.testing.assert_array_equal(decoded(tiff(samples, largest=largest))[0, :, 0], [0, 127, 255])
    if order == "<":
        np.testing.assert_array_equal(
            decoded(tiff(samples, largest=largest, photometric=0))[0, :, 0], [255, 128 - (bits < 16), 0]
        )


def test_the_largest_sample_of_a_dark_picture_is_not_its_number_of_bits() -> None:
    samples = np.array([[0, 3000]], "<u2")
    np.testing.assert_array_equal(decoded(tiff(samples, largest=3000))[0, :, 0], [0, 3000 >> 8])


DEEP = (0x1234, 0x5678, 0x9ABC)


@for_each(
    ("bits", "colour", "row", "transparent", "expected"),
    [
        (16, 0, struct.pack(">2H", 0x1234, 0x12FF), struct.pack(">H", 0x1234), [[1, 2, 3], [0x12] * 3]),
        (16, 2, struct.pack(">6H", *DEEP, 0xFFFF, 0, 0), struct.pack(">3H", *DEEP), [[1, 2, 3], [255, 0, 0]]),
        (8, 0, b"\x12\x13", struct.pack(">H", 0x12), [[1, 2, 3], [0x13] * 3]),
        (8, 2, b"\x12\x13\x14\x15\x16\x17", struct.pack(">3H", 0x12, 0x13, 0x14), [[1, 2, 3], [0x15, 0x16, 0x17]]),
        (4, 0, b"\x3f", struct.pack(">H", 3), [[1, 2, 3], [255] * 3]),
        (2, 0, b"\x70", struct.pack(">H", 1), [[1, 2, 3], [255] * 3]),
        (1, 0, b"\x40", struct.pack(">H", 1), [[0] * 3, [1, 2, 3]]),
        (1, 0, b"\x40", struct.pack(">H", 0), [[1, 2, 3], [255] * 3]),
    ],
)
def test_a_transparent_colour_is_seen_through_whatever_its_bits(
    bits: int, colour: int, row: bytes, transparent: bytes, expected: list[list[int]]
) -> None:
    header = struct.pack(">IIBBBBB", 2, 1, bits, colour, 0, 0, 0)
    data = chunked((b"IHDR", header), (b"tRNS", transparent), (b"IDAT", zlib.compress(b"\0" + row)), (b"IEND", b""))
    np.testing.assert_array_equal(settled(data, background=(1, 2, 3))[0][0], expected)


# -- HEIC and AVIF --------------------------------------------------------------------------------------------------------


@for_each("name", ["HEIF", "AVIF"])
def test_the_pictures_inside_are_measured_and_not_their_container(name: str) -> None:
    data = bytearray(encoded(Image.new("RGB", (640, 480), "teal"), name))
    place = data.index(b"ispe") + 8
    data[place : place + 8] = struct.pack(">II", 64, 48)
    with pytest.raises(MediaError, match="640 x 480 pixels, more than the 100000"):
        probe(bytes(data), MediaLimits(max_image_pixels=100_000))
    data[place : place + 8] = struct.pack(">II", 60_000, 60_000)
    with pytest.raises(MediaError, match=r"pixels|damaged"):
        probe(bytes(data), LIMITS)


@for_each("orientation", range(1, 9))
def test_an_avif_is_turned(orientation: int) -> None:
    exif = with_orientation(orientation)
    expected = as_pillow_shows_it(encoded(Image.fromarray(noise()), "PNG", exif=exif))
    pixels = decoded(encoded(Image.fromarray(noise()), "AVIF", exif=exif))
    assert pixels.shape == expected.shape
    assert np.abs(pixels.astype(int) - expected).mean() < 12


def test_a_heic_is_turned_by_its_container_alone() -> None:
    data = encoded(Image.fromarray(noise()), "HEIF", exif=with_orientation(6))
    assert probe(data, LIMITS).shape == (HEIGHT, WIDTH, 3)


def test_a_heic_in_tiles_is_decoded_as_phones_make_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pillow_heif.options, "GRID_TILE_SIZE", 128)
    pixels = np.asarray(Image.fromarray(noise(20, 15)).resize((300, 200), Image.Resampling.BICUBIC))
    data = encoded(Image.fromarray(pixels), "HEIF")
    assert b"grid" in data
    assert np.abs(decoded(data).astype(int) - pixels).mean() < 6
    with pytest.raises(MediaError, match="300 x 200 pixels, more than the 59999"):
        probe(data, MediaLimits(max_image_pixels=59_999))
    with pytest.raises(MediaError, match="parts of the picture have 98304 pixels together"):
        probe(data, MediaLimits(max_image_pixels=20_000))
