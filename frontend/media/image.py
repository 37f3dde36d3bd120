"""Pictures: their size from the header alone, and their pixels, as 8-bit RGB, straight into the caller's memory.

Theory of operation: a slot is acquired before a picture is decoded, so its size must be known before. :func:`probe` reads
it from the header, turned as EXIF asks; :func:`decode_into` decodes and refuses a picture that turns out otherwise. Pillow
keeps its own copy of the whole picture; beyond it there are only bands of rows, small enough for the cache: each is
converted, and written through a view of the target that is turned the opposite way, so that turning costs no memory.

Pictures that are to be scaled down are first reduced, by whole numbers and averaging, to at least twice the size that is wanted
(JPEGs while they are decoded, others band by band), and then resampled. So what is decoded full size is Pillow's copy alone.

Invariant: whatever the bytes are, :class:`MediaError` is all that comes out. Pillow's plugins raise nearly anything
(``OSError``, ``SyntaxError``, ``struct.error``, ``EOFError``, ``DecompressionBombError``, ...) when bytes are damaged.

What is decoded how: palettes by their colours; transparency over a colour, white by default; CMYK, YCbCr and Lab as Pillow
converts them; 16-bit grey by its high byte; of animations the first frame. Floating point and 32-bit greys have no agreed range
and are refused.

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
from numpy.typing import NDArray

# Importing a plugin registers its format; otherwise Pillow would import all of its 70 plugins for the first WebP.
from PIL import (
    BmpImagePlugin,  # noqa: F401 - registers
    GifImagePlugin,  # noqa: F401 - registers
    Image,
    JpegImagePlugin,  # noqa: F401 - registers
    MpoImagePlugin,  # noqa: F401 - registers
    PngImagePlugin,  # noqa: F401 - registers
    TiffImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,  # noqa: F401 - registers
)
from PIL.ExifTags import Base as ExifTag

from frontend.media.errors import MediaError
from frontend.media.geometry import SWAPPING_ORIENTATIONS, as_stored, check_size, scaled_size
from frontend.media.options import PictureLimits
from frontend.media.work import check_work

__all__ = ["FORMATS", "PictureHeader", "decode_into", "probe"]

#: What is accepted. Each further format is a further parser that hostile bytes reach. (A JPEG with several pictures in it,
#: as some cameras make them, is opened through "JPEG" and then calls itself "MPO".)
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")

_HARMLESS_NBYTES = 64 << 20  # decoded: 22 megapixels
_BAND_NBYTES = 512 << 10  # a band and its conversion stay in a core's second-level cache
_REDUCING_GAP = 2  # what Pillow calls it: resampling from twice the size looks like resampling from the whole
_WHITE = (255, 255, 255)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PictureHeader:
    """What a picture's header says, and what is made of it.

    Attributes:
        width, height: in pixels, after turning it as EXIF asks and scaling it down.
        stored_width, stored_height: in pixels, as it is stored.
        orientation: EXIF's, 1 to 8; 1 is as stored.
        format: Pillow's name of its format.
    """

    width: int
    height: int
    stored_width: int
    stored_height: int
    orientation: int
    format: str

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of its pixels: (height, width, 3)."""
        return self.height, self.width, 3


def probe(data: bytes, limits: PictureLimits, max_pixels: int | None = None) -> PictureHeader:
    """Reads a picture's size from its header; nothing is decoded.

    Args:
        data: its file.
        limits: what it may be.
        max_pixels: a larger one will be scaled down to it.

    Raises:
        MediaError: it is no picture of an accepted format, it is too large, or its header is damaged.
    """
    if len(data) > limits.max_nbytes:
        raise MediaError(f"the picture takes {len(data)} bytes, more than the {limits.max_nbytes} that are accepted")
    if not data:
        raise MediaError("the picture is empty: it has no bytes")
    check_work(data, limits.max_scans, limits.max_chunks)
    with _media_errors(limits.max_pixels), Image.open(io.BytesIO(data), formats=FORMATS) as image:
        stored_width, stored_height = image.size
        orientation = _orientation(image)
        name = image.format or "unknown"
        tile = _tile_size(image)
    check_size("the picture", stored_width, stored_height, limits.max_pixels, limits.max_aspect_ratio)
    _check_expansion(len(data), 3 * stored_width * stored_height, limits.max_expansion)
    if tile is not None:  # it is decoded whole, however little of it is in the picture
        check_size("the picture's tile", *tile, limits.max_pixels, math.inf)
        _check_expansion(len(data), 3 * tile[0] * tile[1], limits.max_expansion)
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
    )


def decode_into(
    data: bytes, header: PictureHeader, target: NDArray[np.uint8], background: tuple[int, int, int] = _WHITE
) -> None:
    """Decodes a picture into the caller's memory.

    Args:
        data: what :func:`probe` was given.
        header: what it returned.
        target: (height, width, 3), uint8; becomes RGB. After an error its content is undefined.
        background: what is seen through transparent pixels.

    Raises:
        MediaError: the picture is damaged or truncated, or not what its header says.
        ValueError: the target has another shape or dtype.
    """
    if target.shape != header.shape or target.dtype != np.uint8:
        raise ValueError(f"the target is {target.dtype} {target.shape}, the picture needs uint8 {header.shape}")
    stored = as_stored(target, header.orientation)
    height, width = stored.shape[:2]
    with _media_errors(), Image.open(io.BytesIO(data), formats=FORMATS) as image:
        scaled = (width, height) != (header.stored_width, header.stored_height)
        if scaled and image.format == "JPEG":
            _check_promise(image, header)
            # In eighths of the size, while it is decoded; Pillow takes the next larger one.
            image.draft(image.mode, (width * _REDUCING_GAP, height * _REDUCING_GAP))
            image.load()
        else:
            image.load()
            _check_promise(image, header)
        if not scaled:
            _convert(image, stored, background)
        else:
            stored[:] = np.asarray(_flat(image, width, height, background).resize((width, height), Image.Resampling.LANCZOS))


def _check_promise(image: Image.Image, header: PictureHeader) -> None:
    promised = (header.stored_width, header.stored_height)
    if image.size != promised:
        raise MediaError(
            f"the picture has {image.width} x {image.height} pixels, its header promised {promised[0]} x {promised[1]}"
        )


def _convert(image: Image.Image, stored: NDArray[np.uint8], background: tuple[int, int, int]) -> None:
    """Writes a picture as RGB, band by band."""
    transparent = image.has_transparency_data
    rows = max(1, _BAND_NBYTES // (4 * image.width))
    for top in range(0, image.height, rows):
        band = image.crop((0, top, image.width, min(top + rows, image.height)))
        stored[top : top + rows] = _rgb(band, transparent, background)


def _flat(image: Image.Image, width: int, height: int, background: tuple[int, int, int]) -> Image.Image:
    """Returns a picture as RGB, band by band reduced to no less than twice the size that is wanted."""
    factor = max(1, min(image.width // (_REDUCING_GAP * width), image.height // (_REDUCING_GAP * height)))
    reduced = np.empty((-(-image.height // factor), -(-image.width // factor), 3), np.uint8)
    transparent = image.has_transparency_data
    rows = max(1, _BAND_NBYTES // (4 * image.width) // factor) * factor
    for top in range(0, image.height, rows):
        band = image.crop((0, top, image.width, min(top + rows, image.height)))
        flat = Image.fromarray(np.ascontiguousarray(_rgb(band, transparent, background)))
        place = top // factor
        reduced[place : place + -(-band.height // factor)] = np.asarray(flat.reduce(factor) if factor > 1 else flat)
    return Image.fromarray(reduced)


def _check_expansion(file_nbytes: int, decoded_nbytes: int, limit: float) -> None:
    if decoded_nbytes > _HARMLESS_NBYTES and decoded_nbytes > limit * file_nbytes:
        raise MediaError(
            f"the picture takes {decoded_nbytes} bytes decoded, {decoded_nbytes / file_nbytes:.0f} for each byte of its file; "
            f"{limit:g} are accepted for a picture of this size (max_image_expansion)"
        )


@contextlib.contextmanager
def _media_errors(max_pixels: int | None = None) -> Iterator[None]:
    """Whatever goes wrong in Pillow is the fault of the bytes it was given.

    Args:
        max_pixels: of a picture, for the text.
    """
    try:
        yield
    except MediaError:
        raise
    except UnidentifiedImageError:
        raise MediaError(f"not a picture in a format that is accepted ({', '.join(FORMATS)})") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        # Pillow's text names a limit of its own, which is above ours.
        accepted = "" if max_pixels is None else f": at most {max_pixels:,} are accepted"
        raise MediaError(f"the picture has too many pixels{accepted}") from error
    except MemoryError as error:
        raise MediaError("the picture asks for more memory than there is") from error
    except Exception as error:
        raise MediaError(f"the picture is damaged or truncated: {error or type(error).__name__}") from error


def _orientation(image: Image.Image) -> int:
    """EXIF's orientation, 1 where there is none that makes sense. Damaged EXIF does not make a picture unusable."""
    if image.format == "TIFF":
        return 1  # Pillow turns these itself, and says so in their size
    try:
        # Not PngImageFile.getexif, which decodes the whole picture to find EXIF behind the pixels.
        orientation = Image.Image.getexif(image).get(ExifTag.Orientation)
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


def _rgb(band: Image.Image, transparent: bool, background: tuple[int, int, int]) -> NDArray[np.uint8]:
    """Converts rows of a picture to (rows, width, 3)."""
    if band.mode.startswith("I;16"):
        grey = (np.asarray(band) >> 8).astype(np.uint8)  # Pillow would clip, and make nearly everything white
        return np.broadcast_to(grey[:, :, np.newaxis], (*grey.shape, 3))
    if band.mode in ("I", "F"):
        raise MediaError(f"pictures of mode {band.mode} (32 bits a sample) have no agreed range; send 8 or 16 bits")
    if transparent:
        band = Image.alpha_composite(Image.new("RGBA", band.size, background), band.convert("RGBA"))
    return np.asarray(band if band.mode == "RGB" else band.convert("RGB"))
