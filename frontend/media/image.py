"""Pictures: their size from the header alone, and their pixels, as 8-bit RGB, straight into the caller's memory.

Theory of operation: a slot is acquired before a picture is decoded, so its size must be known before. :func:`probe` reads
it from the header, turned as EXIF asks; :func:`decode_into` decodes and refuses a picture that turns out otherwise. Pillow
keeps its own copy of the whole picture; beyond it there are only bands of rows, small enough for the cache: each is
converted, and written through a view of the target that is turned the opposite way, so that turning costs no memory.

Pictures that are to be scaled down are first reduced, by whole numbers and averaging, to at least twice the size that is wanted
(JPEGs while they are decoded, others band by band), and then resampled. So what is decoded full size is Pillow's copy alone.

Invariant: whatever the bytes are, :class:`MediaError` is all that comes out. Pillow's plugins raise nearly anything
(``OSError``, ``SyntaxError``, ``struct.error``, ``EOFError``, ``DecompressionBombError``, ...) when bytes are damaged.

What is decoded how: first what the numbers mean, then how many bits they have. Palettes by their colours; grey of which
white is zero, inverted; grey of fewer than 16 bits in 16 by the bits that the file says are used; 16-bit grey then by its
high byte; colours with an ICC profile or numbers that say what they are, converted to sRGB
(:mod:`shmring.frontend.media.colours`); transparency over a colour, white by default; CMYK, YCbCr and Lab as Pillow converts
them; of animations the first frame. Floating point and 32-bit greys have no agreed range and are refused.

A file that is damaged or ends early is decoded as far as it goes (:mod:`shmring.frontend.media.damage`). Pillow does not say
how far that was. So the picture is filled with a pattern before: rows that still have it were not decoded. They become grey.

What is not noticed: that bytes are missing in the middle of a JPEG that has its end marker. The decoder fills in grey without
a warning, as it does in every browser. The picture has the size that its header promised.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
from collections.abc import Iterator

import numpy as np

# Importing a plugin registers its format; otherwise Pillow would import all of its 70 plugins for the first WebP.
import pillow_heif
from numpy.typing import NDArray
from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,  # noqa: F401 - registers
    GifImagePlugin,  # noqa: F401 - registers
    Image,
    ImageFile,
    JpegImagePlugin,
    MpoImagePlugin,  # noqa: F401 - registers
    PngImagePlugin,  # noqa: F401 - registers
    TiffImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,  # noqa: F401 - registers
)
from PIL.ExifTags import Base as ExifTag

from shmring.frontend.media.colours import Conversion, conversion_to_srgb
from shmring.frontend.media.container import coded_sizes
from shmring.frontend.media.damage import Shortfall, accepted_shortfall
from shmring.frontend.media.errors import MediaError
from shmring.frontend.media.geometry import SWAPPING_ORIENTATIONS, as_stored, check_size, scaled_size
from shmring.frontend.media.options import MediaLimits
from shmring.frontend.media.signatures import picture_format_of
from shmring.frontend.media.work import check_work, chunk_of

__all__ = ["FORMATS", "PictureHeader", "decode_into", "picture_errors", "probe"]

#: What is accepted. Each further format is a further parser that hostile bytes reach. (A JPEG with several pictures in it,
#: as some cameras make them, is opened through "JPEG" and then calls itself "MPO".)
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "HEIF", "AVIF")

# One thread: a decoder process has one core, and its time is counted.
pillow_heif.register_heif_opener(thumbnails=False, depth_images=False, aux_images=False, decode_threads=1)
AvifImagePlugin.DEFAULT_MAX_THREADS = 1
# Of these, the size in the header is that of a container. A decoder takes memory by what the pictures in it say themselves.
_CONTAINED = ("HEIF", "AVIF")
_IN_PASSES = ("progressive", "progression", "interlace")  # what Pillow calls it: the last pass is all over the picture

_HARMLESS_NBYTES = 64 << 20  # decoded: 22 megapixels
_BAND_NBYTES = 512 << 10  # a band and its conversion stay in a core's second-level cache
_REDUCING_GAP = 2  # what Pillow calls it: resampling from twice the size looks like resampling from the whole
_WHITE = (255, 255, 255)
_GREY = (128, 128, 128)
_MAX_CONTAINED = 4  # times as many pixels as a picture may have: itself, its transparency, and what phones put beside it

_USUAL_SAMPLES = 5  # of a pixel: CMYK and transparency
_MAX_SAMPLE_VALUE = 281  # TIFF's tag; some write the largest sample that there is, so only full ranges of bits count
_LARGEST_OF_BITS = tuple((1 << bits) - 1 for bits in range(9, 17))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PictureHeader:
    """What a picture's header says, and what is made of it.

    Attributes:
        width, height: in pixels, after turning it as EXIF asks and scaling it down.
        stored_width, stored_height: in pixels, as it is stored.
        orientation: EXIF's, 1 to 8; 1 is as stored.
        format: Pillow's name of its format.
        start: where in the file it begins.
        max_missing_share: how much of it may be missing.
    """

    width: int
    height: int
    stored_width: int
    stored_height: int
    orientation: int
    format: str
    start: int = 0
    max_missing_share: float = MediaLimits.max_missing_share

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of its pixels: (height, width, 3)."""
        return self.height, self.width, 3


def probe(data: bytes, limits: MediaLimits, max_pixels: int | None = None) -> PictureHeader:
    """Reads a picture's size from its header; nothing is decoded.

    Args:
        data: its file.
        limits: what it may be.
        max_pixels: a larger one will be scaled down to it.

    Raises:
        MediaError: it is no picture of an accepted format, it is too large, or its header is damaged.
    """
    if len(data) > limits.max_image_nbytes:
        raise MediaError(f"the picture takes {len(data)} bytes, more than the {limits.max_image_nbytes} that are accepted")
    if not data:
        raise MediaError("the picture is empty: it has no bytes")
    known, start = picture_format_of(data)
    data = data[start:]
    check_work(data, limits.max_image_scans, limits.max_image_chunks)
    if known in _CONTAINED:
        _check_contained(data, known, limits)
    with _open(data, known, limits.max_image_pixels) as image:
        stored_width, stored_height = image.size
        orientation = _orientation(image, data)
        name = image.format or "unknown"
        tile = _tile_size(image)
    check_size("the picture", stored_width, stored_height, limits.max_image_pixels, limits.max_aspect_ratio)
    _check_expansion(len(data), 3 * stored_width * stored_height, limits.max_image_expansion)
    if tile is not None:  # it is decoded whole, however little of it is in the picture
        check_size("the picture's tile", *tile, limits.max_image_pixels, math.inf)
        _check_expansion(len(data), 3 * tile[0] * tile[1], limits.max_image_expansion)
    width, height = scaled_size(stored_width, stored_height, max_pixels)
    if orientation in SWAPPING_ORIENTATIONS:
        width, height = height, width
    return PictureHeader(
        width=width,
        height=height,
        stored_width=stored_width,
        stored_height=stored_height,
        orientation=orientation,
        format=name,
        start=start,
        max_missing_share=limits.max_missing_share,
    )


def decode_into(
    data: bytes, header: PictureHeader, target: NDArray[np.uint8], background: tuple[int, int, int] = _WHITE
) -> str:
    """Decodes a picture into the caller's memory.

    Args:
        data: what :func:`probe` was given.
        header: what it returned.
        target: (height, width, 3), uint8; becomes RGB. After an error its content is undefined.
        background: what is seen through transparent pixels.

    Returns:
        What the caller is told of what is missing; nothing if nothing is.

    Raises:
        MediaError: too much of the picture is damaged or missing, or it is not what its header says.
        ValueError: the target has another shape or dtype.
    """
    if target.shape != header.shape or target.dtype != np.uint8:
        raise ValueError(f"the target is {target.dtype} {target.shape}, the picture needs uint8 {header.shape}")
    stored = as_stored(target, header.orientation)
    data = data[header.start :]
    try:
        with _open(data, header.format) as image:
            shortfalls = _write(image, header, stored, background, conversion_to_srgb(image, data))
        return accepted_shortfall("picture", shortfalls, header.max_missing_share)
    except MediaError:
        if header.format not in _ROW_BY_ROW:
            raise
    with _open(data, header.format) as image:
        if any(image.info.get(name) for name in _IN_PASSES):
            raise MediaError(
                "the picture is damaged or truncated, and stored in several passes, so that what is missing is missing "
                "everywhere. Send the whole file"
            )
        with _truncated_images():
            shortfalls = _write(image, header, stored, background, conversion_to_srgb(image, data), finds_missing=True)
        return accepted_shortfall("picture", shortfalls, header.max_missing_share)


#: Formats that Pillow decodes row by row, so that a part of a file is a part of the picture.
_ROW_BY_ROW = ("JPEG", "MPO", "PNG", "GIF", "BMP")


def _write(
    image: Image.Image,
    header: PictureHeader,
    stored: NDArray[np.uint8],
    background: tuple[int, int, int],
    to_srgb: Conversion | None,
    *,
    finds_missing: bool = False,
) -> list[Shortfall]:
    """Decodes a picture and writes it; returns which of its rows are missing, and what sRGB does not have of its colours.

    Raises:
        MediaError: it can't be decoded, or too many are.
    """
    height, width = stored.shape[:2]
    scaled = (width, height) != (header.stored_width, header.stored_height)
    if scaled and image.format == "JPEG":
        _check_promise(image, header)
        # In eighths of the size, while it is decoded; Pillow takes the next larger one.
        image.draft(image.mode, (width * _REDUCING_GAP, height * _REDUCING_GAP))
    transparency = _transparency(image)
    if finds_missing:
        missing = _load_and_find_missing(image)
    else:
        image.load()
        missing = None
    if not (scaled and image.format == "JPEG"):
        _check_promise(image, header)
    shortfalls = []
    if missing is not None and missing.any():
        shortfalls = [Shortfall(missing=int(missing.sum()), promised=len(missing), unit="rows")]
        accepted_shortfall("picture", shortfalls, header.max_missing_share)
    reader = _Reader(image, transparency, background, missing, to_srgb)
    if not scaled:
        _convert(image, stored, reader)
    else:
        stored[:] = np.asarray(_flat(image, width, height, reader).resize((width, height), Image.Resampling.LANCZOS))
    return [*shortfalls, *(to_srgb.losses if to_srgb else ())]


def _load_and_find_missing(image: Image.Image) -> NDArray[np.bool_]:
    """Decodes a picture as far as it goes; returns for each row whether it is not there."""
    assert isinstance(image, ImageFile.ImageFile)
    prepare = image.load_prepare
    tiles = [tile[1] for tile in image.tile if tile[1] is not None]
    pattern = np.random.default_rng(0).integers(0, 256, (1, 8 * image.width), np.uint8)  # 8 bytes are the most of a pixel
    filling = b""

    def prepare_and_fill() -> None:
        nonlocal filling
        prepare()
        row = Image.frombytes(image.mode, (image.width, 1), pattern.tobytes()[: _row_nbytes(image)])
        filling = row.tobytes()
        rows = row.resize((image.width, image.height), Image.Resampling.NEAREST)
        image.im.paste(rows.im, (0, 0, image.width, image.height))

    image.load_prepare = prepare_and_fill  # type: ignore[method-assign] # the one place between allocating and decoding
    if isinstance(image, JpegImagePlugin.JpegImageFile):
        assert image.fp is not None
        image.load_read = image.fp.read  # type: ignore[method-assign,assignment] # its own adds an end, and libjpeg makes up the rows before it
    image.load()
    missing = np.zeros(image.height, np.bool_)
    decoded = range(min((top for _, top, _, _ in tiles), default=0), max((bottom for *_, bottom in tiles), default=0))
    for row in decoded:
        missing[row] = image.crop((0, row, image.width, row + 1)).tobytes() == filling
    return missing


def _row_nbytes(image: Image.Image) -> int:
    return len(Image.new(image.mode, (image.width, 1)).tobytes())


def _check_promise(image: Image.Image, header: PictureHeader) -> None:
    promised = (header.stored_width, header.stored_height)
    if image.size != promised:
        raise MediaError(
            f"the picture has {image.width} x {image.height} pixels, its header promised {promised[0]} x {promised[1]}"
        )


def _convert(image: Image.Image, stored: NDArray[np.uint8], reader: _Reader) -> None:
    """Writes a picture as RGB, band by band."""
    rows = max(1, _BAND_NBYTES // (4 * image.width))
    for top in range(0, image.height, rows):
        stored[top : top + rows] = reader.rgb(top, min(top + rows, image.height))


def _flat(image: Image.Image, width: int, height: int, reader: _Reader) -> Image.Image:
    """Returns a picture as RGB, band by band reduced to no less than twice the size that is wanted."""
    factor = max(1, min(image.width // (_REDUCING_GAP * width), image.height // (_REDUCING_GAP * height)))
    reduced = np.empty((-(-image.height // factor), -(-image.width // factor), 3), np.uint8)
    rows = max(1, _BAND_NBYTES // (4 * image.width) // factor) * factor
    for top in range(0, image.height, rows):
        flat = Image.fromarray(np.ascontiguousarray(reader.rgb(top, min(top + rows, image.height))))
        place = top // factor
        reduced[place : place + -(-flat.height // factor)] = np.asarray(flat.reduce(factor) if factor > 1 else flat)
    return Image.fromarray(reduced)


def _check_expansion(file_nbytes: int, decoded_nbytes: int, limit: float) -> None:
    if decoded_nbytes > _HARMLESS_NBYTES and decoded_nbytes > limit * file_nbytes:
        raise MediaError(
            f"the picture takes {decoded_nbytes} bytes decoded, {decoded_nbytes / file_nbytes:.0f} for each byte of its file; "
            f"{limit:g} are accepted for a picture of this size (max_image_expansion)"
        )


def _check_contained(data: bytes, name: str, limits: MediaLimits) -> None:
    """Refuses a HEIC or AVIF whose pictures are larger than is accepted, whatever its own header says."""
    sizes = coded_sizes(data, name)
    for width, height in sizes:
        check_size("a part of the picture", width, height, limits.max_image_pixels, math.inf)
    num_pixels = sum(width * height for width, height in sizes)
    if num_pixels > _MAX_CONTAINED * limits.max_image_pixels:
        raise MediaError(f"the parts of the picture have {num_pixels} pixels together, more than are accepted")
    _check_expansion(len(data), 3 * num_pixels, limits.max_image_expansion)


@contextlib.contextmanager
def _open(data: bytes, name: str | None, max_pixels: int | None = None) -> Iterator[Image.Image]:
    """Opens a picture. Wrong checksums of chunks that a PNG can do without are no reason not to."""
    with picture_errors("picture", FORMATS, max_pixels, name):
        try:
            with _truncated_images():
                image = Image.open(io.BytesIO(data), formats=FORMATS)
        except UnidentifiedImageError:
            kind = _kind_of_tiff(data) if name == "TIFF" else ""
            if not kind:
                raise
            raise MediaError(f"TIFFs with {kind} a pixel are not read; save it again with 8 bits a sample") from None
        with image:
            yield image


def _kind_of_tiff(data: bytes) -> str:
    """What the samples of a TIFF are that Pillow does not read; nothing if its header can't be read, or is a usual one."""
    try:
        directory = TiffImagePlugin.ImageFileDirectory_v2(data[:8])
        file = io.BytesIO(data)
        file.seek(directory.next)
        directory.load(file)
        bits = directory.get(TiffImagePlugin.BITSPERSAMPLE, (1,))
        formats = directory.get(TiffImagePlugin.SAMPLEFORMAT, (1,))
    except Exception:  # noqa: BLE001 - the parser of TIFF raises nearly anything, as the plugins do
        return ""
    if max(bits) <= 8 and len(bits) <= _USUAL_SAMPLES:
        return ""
    return f"{len(bits)} sample{'s' * (len(bits) != 1)} of {max(bits)} bits{' in floating point' * (3 in formats)}"


@contextlib.contextmanager
def _truncated_images() -> Iterator[None]:
    """Has Pillow take what there is. The switch is one for the process, which decodes one medium at a time."""
    before, ImageFile.LOAD_TRUNCATED_IMAGES = ImageFile.LOAD_TRUNCATED_IMAGES, True
    try:
        yield
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = before


@contextlib.contextmanager
def picture_errors(
    noun: str, formats: tuple[str, ...], max_pixels: int | None = None, name: str | None = None
) -> Iterator[None]:
    """Whatever goes wrong in Pillow is the fault of the bytes it was given.

    Args:
        noun: what it is called, for the text.
        formats: that are accepted, for the text.
        max_pixels: of a picture, for the text.
        name: the format that the file has by its signature.
    """
    try:
        yield
    except MediaError:
        raise
    except UnidentifiedImageError:
        if name is None:
            raise MediaError(f"not a {noun} in a format that is accepted ({', '.join(formats)})") from None
        raise MediaError(
            f"the {noun} is {'an' if name[0] in 'AH' else 'a'} {name} that is damaged, truncated, or of a kind that can't be "
            "read, such as samples of more than 8 bits that are no plain grey; save it again with 8 bits a sample"
        ) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        # Pillow's text names a limit of its own, which is above ours.
        accepted = "" if max_pixels is None else f": at most {max_pixels:,} are accepted"
        raise MediaError(f"the {noun} has too many pixels{accepted}") from error
    except MemoryError as error:
        raise MediaError(f"the {noun} asks for more memory than there is") from error
    except Exception as error:
        raise MediaError(f"the {noun} is damaged or truncated: {str(error) or type(error).__name__}") from error


def _orientation(image: Image.Image, data: bytes) -> int:
    """EXIF's orientation, 1 where there is none that makes sense. Damaged EXIF does not make a picture unusable."""
    if image.format == "TIFF":
        return 1  # Pillow turns these itself, and says so in their size
    try:
        # Not PngImageFile.getexif, which decodes the whole picture to find EXIF behind the pixels.
        exif = Image.Image.getexif(image)
        if image.format == "PNG" and not exif and (behind := chunk_of(data, b"eXIf")):
            exif.load(behind)
        orientation = exif.get(ExifTag.Orientation)
    except Exception:  # noqa: BLE001 - the parser of EXIF raises nearly anything, as the plugins do
        return 1
    return orientation if isinstance(orientation, int) and 1 <= orientation <= 8 else 1


def _tile_size(image: Image.Image) -> tuple[int, int] | None:
    """Width and height of a TIFF's tiles, if it has some."""
    if not isinstance(image, TiffImagePlugin.TiffImageFile):
        return None
    width, height = (image.tag_v2.get(tag) for tag in (TiffImagePlugin.TILEWIDTH, TiffImagePlugin.TILELENGTH))
    if width is None and height is None:
        return None
    if not isinstance(width, int) or not isinstance(height, int):
        raise MediaError("the picture is damaged: its tiles have an impossible size")
    return width, height


def _transparency(image: Image.Image) -> int | tuple[int, ...] | None:
    """The transparent colour of a PNG without an alpha channel, as its samples are in Pillow's memory.

    It is written as it is in the file; Pillow spreads grey of 1, 2 and 4 bits over 8, and of 16-bit colours keeps the high
    bytes.
    """
    transparency = image.info.get("transparency")
    if image.format != "PNG" or image.mode == "P" or not isinstance(transparency, int | tuple) or not image.tile:  # type: ignore[attr-defined]
        return None
    raw_mode = image.tile[0][3]  # type: ignore[attr-defined]
    if isinstance(transparency, tuple):
        return tuple(value >> 8 for value in transparency) if "16" in str(raw_mode) else transparency
    if image.mode == "1":
        return 255 if transparency else 0
    bits = str(raw_mode).partition(";")[2]
    return transparency * 255 // ((1 << int(bits)) - 1) if bits in ("2", "4") else transparency


class _Reader:
    """Converts rows of a picture to RGB.

    Args:
        image: decoded.
        transparency: the colour that is transparent, if it has no alpha channel.
        background: what is seen through transparent pixels.
        missing: which rows were not decoded; they become grey.
        to_srgb: how colours are converted; None: they are left as they are.
    """

    def __init__(
        self,
        image: Image.Image,
        transparency: int | tuple[int, ...] | None,
        background: tuple[int, int, int],
        missing: NDArray[np.bool_] | None,
        to_srgb: Conversion | None,
    ) -> None:
        self._image = image
        self._transparency = transparency
        self._has_alpha = transparency is None and image.has_transparency_data
        self._background = background
        self._missing = missing
        self._is_inverted, self._max_grey = _meaning_of_grey(image)
        self._to_srgb = to_srgb

    def rgb(self, top: int, bottom: int) -> NDArray[np.uint8]:
        """Returns rows as (rows, width, 3)."""
        band = self._image.crop((0, top, self._image.width, bottom))
        rgb = self._colours(band)
        if self._transparency is not None:
            samples = np.asarray(band.convert("L") if band.mode == "1" else band)
            is_clear = samples == self._transparency if samples.ndim == 2 else (samples == self._transparency).all(axis=2)
            rgb = np.where(is_clear[:, :, np.newaxis], np.asarray(self._background, np.uint8), rgb)
        if self._missing is not None and self._missing[top:bottom].any():
            rgb = np.where(self._missing[top:bottom, np.newaxis, np.newaxis], np.asarray(_GREY, np.uint8), rgb)
        return rgb

    def _colours(self, band: Image.Image) -> NDArray[np.uint8]:
        if band.mode.startswith("I;16"):
            samples = np.asarray(band)
            samples = np.minimum(samples, self._max_grey)
            if self._is_inverted:
                samples = self._max_grey - samples
            if self._to_srgb is not None and self._to_srgb.mode == "I;16":
                full = samples.astype(np.uint32) * 0xFFFF // self._max_grey
                return np.asarray(self._to_srgb.apply(Image.fromarray(full.astype(np.uint16))))
            # Of 16 bits the high byte; Pillow would clip, and make nearly everything white.
            high = samples >> 8 if self._max_grey == 0xFFFF else samples.astype(np.uint32) * 255 // self._max_grey
            band = Image.fromarray(high.astype(np.uint8))
        elif band.mode in ("I", "F"):
            raise MediaError(f"pictures of mode {band.mode} (32 bits a sample) have no agreed range; send 8 or 16 bits")
        elif band.mode == "La":  # Pillow multiplies nothing out where it converts it to anything else
            band = band.convert("LA")
        if not self._has_alpha:
            return np.asarray(self._srgb(band))
        clear = band.convert("RGBA")
        if self._to_srgb is not None:
            colours = band.convert("L" if band.mode == "LA" else "RGB")
            clear = Image.merge("RGBA", (*self._srgb(colours).split(), clear.getchannel("A")))
        return np.asarray(Image.alpha_composite(Image.new("RGBA", band.size, self._background), clear).convert("RGB"))

    def _srgb(self, band: Image.Image) -> Image.Image:
        if self._to_srgb is not None:
            return self._to_srgb.apply(band)
        return band if band.mode == "RGB" else band.convert("RGB")


def _meaning_of_grey(image: Image.Image) -> tuple[bool, int]:
    """Whether white is zero, and the largest sample, of 16-bit grey that Pillow hands out as it is stored."""
    if not isinstance(image, TiffImagePlugin.TiffImageFile):
        return False, 0xFFFF
    is_inverted = image.tag_v2.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) == 0
    bits = image.tag_v2.get(TiffImagePlugin.BITSPERSAMPLE, (16,))[0]
    stated = image.tag_v2.get(_MAX_SAMPLE_VALUE)
    largest = int(stated[0] if isinstance(stated, tuple) and stated else stated or 0)
    if largest not in _LARGEST_OF_BITS:
        largest = (1 << bits) - 1 if 8 < bits < 16 else 0xFFFF
    return is_inverted, largest
