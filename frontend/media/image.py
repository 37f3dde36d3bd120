"""Pictures: their size from the header alone, and their pixels, as 8-bit RGB, straight into the caller's memory.

Theory of operation: a slot is acquired before a picture is decoded, so its size must be known before. :func:`probe` reads
it from the header, turned as EXIF asks; :func:`decode_into` decodes and refuses a picture that turns out otherwise. Pillow
keeps its own copy of the whole picture; beyond it there are only bands of rows, small enough for the cache: each is
converted, and written through a view of the target that is turned the opposite way, so that turning costs no memory.

Invariant: whatever the bytes are, :class:`MediaError` is all that comes out. Pillow's plugins raise nearly anything
(``OSError``, ``SyntaxError``, ``struct.error``, ``EOFError``, ``DecompressionBombError``, ...) when bytes are damaged.

What is decoded how: palettes by their colours; transparency over white; CMYK, YCbCr and Lab as Pillow converts them; 16-bit
grey by its high byte; of animations the first frame. Floating point and 32-bit greys have no agreed range and are refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
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
    TiffImagePlugin,  # noqa: F401 - registers
    UnidentifiedImageError,
    WebPImagePlugin,  # noqa: F401 - registers
)
from PIL.ExifTags import Base as ExifTag

from frontend.media.errors import MediaError

__all__ = ["FORMATS", "PictureHeader", "PictureLimits", "decode_into", "probe"]

#: What is accepted. Each further format is a further parser that hostile bytes reach. (A JPEG with several pictures in it,
#: as some cameras make them, is opened through "JPEG" and then calls itself "MPO".)
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")

_BAND_NBYTES = 512 << 10  # a band and its conversion stay in a core's second-level cache
_SWAPPING_ORIENTATIONS = (5, 6, 7, 8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PictureLimits:
    """What a picture may be.

    Attributes:
        max_nbytes: of its file. 64 MiB holds a 16-bit PNG of about ten megapixels; cameras' JPEGs take a tenth.
        max_pixels: width times height. Decoding 64 megapixels takes 256 MB in Pillow and 192 MB of the slab. Pillow itself
            refuses more than about 179 million.
    """

    max_nbytes: int = 64 << 20
    max_pixels: int = 64_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class PictureHeader:
    """What a picture's header says.

    Attributes:
        width, height: in pixels, after turning it as EXIF asks.
        orientation: EXIF's, 1 to 8; 1 is as stored.
        format: Pillow's name of its format.
    """

    width: int
    height: int
    orientation: int
    format: str

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of its pixels: (height, width, 3)."""
        return self.height, self.width, 3


def probe(data: bytes, limits: PictureLimits) -> PictureHeader:
    """Reads a picture's size from its header; nothing is decoded.

    Raises:
        MediaError: it is no picture of an accepted format, it is too large, or its header is damaged.
    """
    if len(data) > limits.max_nbytes:
        raise MediaError(f"the picture takes {len(data)} bytes, more than the {limits.max_nbytes} that are accepted")
    if not data:
        raise MediaError("the picture is empty: it has no bytes")
    with _media_errors(), Image.open(io.BytesIO(data), formats=FORMATS) as image:
        width, height = image.size
        orientation = _orientation(image)
        name = image.format or "unknown"
    if width * height > limits.max_pixels:
        raise MediaError(f"the picture has {width} x {height} pixels, more than the {limits.max_pixels} that are accepted")
    if orientation in _SWAPPING_ORIENTATIONS:
        width, height = height, width
    return PictureHeader(width=width, height=height, orientation=orientation, format=name)


def decode_into(data: bytes, header: PictureHeader, target: NDArray[np.uint8]) -> None:
    """Decodes a picture into the caller's memory.

    Args:
        data: what :func:`probe` was given.
        header: what it returned.
        target: (height, width, 3), uint8; becomes RGB. After an error its content is undefined.

    Raises:
        MediaError: the picture is damaged or truncated, or not what its header says.
        ValueError: the target has another shape or dtype.
    """
    if target.shape != header.shape or target.dtype != np.uint8:
        raise ValueError(f"the target is {target.dtype} {target.shape}, the picture needs uint8 {header.shape}")
    stored = _as_stored(target, header.orientation)
    height, width = stored.shape[:2]
    rows = max(1, _BAND_NBYTES // (4 * width))
    with _media_errors(), Image.open(io.BytesIO(data), formats=FORMATS) as image:
        image.load()
        if image.size != (width, height):
            raise MediaError(f"the picture has {image.width} x {image.height} pixels, its header promised {width} x {height}")
        transparent = image.has_transparency_data
        for top in range(0, height, rows):
            band = image.crop((0, top, width, min(top + rows, height)))
            stored[top : top + rows] = _rgb(band, transparent)


@contextlib.contextmanager
def _media_errors() -> Iterator[None]:
    """Whatever goes wrong in Pillow is the fault of the bytes it was given."""
    try:
        yield
    except MediaError:
        raise
    except UnidentifiedImageError:
        raise MediaError(f"not a picture in a format that is accepted ({', '.join(FORMATS)})") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise MediaError(f"the picture has too many pixels: {error}") from error
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


def _as_stored(target: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """A view of the turned picture's memory in which the rows of the stored picture lie in order."""
    turned = target.transpose(1, 0, 2) if orientation in _SWAPPING_ORIENTATIONS else target
    flip_rows = orientation in (3, 4, 6, 7)
    flip_columns = orientation in (2, 3, 7, 8)
    return turned[:: -1 if flip_rows else 1, :: -1 if flip_columns else 1]


def _rgb(band: Image.Image, transparent: bool) -> NDArray[np.uint8]:
    """Converts rows of a picture to (rows, width, 3)."""
    if band.mode.startswith("I;16"):
        grey = (np.asarray(band) >> 8).astype(np.uint8)  # Pillow would clip, and make nearly everything white
        return np.broadcast_to(grey[:, :, np.newaxis], (*grey.shape, 3))
    if band.mode in ("I", "F"):
        raise MediaError(f"pictures of mode {band.mode} (32 bits a sample) have no agreed range; send 8 or 16 bits")
    if transparent:
        band = Image.alpha_composite(Image.new("RGBA", band.size, "white"), band.convert("RGBA"))
    return np.asarray(band if band.mode == "RGB" else band.convert("RGB"))
