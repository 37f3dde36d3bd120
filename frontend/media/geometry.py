"""Sizes and directions of pictures and frames: what both kinds of decoders need to know.

Decoded rows come in the order in which they are stored, and cameras store them turned. So a decoder writes through a view of
the target that is turned the opposite way, and turning costs no memory and no pass of its own.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from shmring.frontend.media.errors import MediaError

__all__ = ["SWAPPING_ORIENTATIONS", "as_stored", "check_size", "scaled_size"]

#: EXIF's orientations in which the stored rows are columns of what is shown.
SWAPPING_ORIENTATIONS = (5, 6, 7, 8)


def check_size(what: str, width: int, height: int, max_pixels: int, max_aspect_ratio: float) -> None:
    """Refuses a picture or frame by its size.

    Raises:
        MediaError: it has no pixels, too many, or is a line rather than a picture.
    """
    if width < 1 or height < 1:
        raise MediaError(f"{what} has {width} x {height} pixels, which is none")
    if width * height > max_pixels:
        raise MediaError(f"{what} has {width} x {height} pixels, more than the {max_pixels} that are accepted")
    if max(width, height) > max_aspect_ratio * min(width, height):
        ratio = f"{max_aspect_ratio:g} to 1"
        raise MediaError(f"{what} has {width} x {height} pixels: sides of more than {ratio} are not accepted")


def scaled_size(width: int, height: int, max_pixels: int | None) -> tuple[int, int]:
    """Returns the size, of the same aspect ratio but for rounding, that has at most so many pixels; never a larger one."""
    if max_pixels is None or width * height <= max_pixels:
        return width, height
    scale = math.sqrt(max_pixels / (width * height))
    scaled_width, scaled_height = max(1, int(width * scale)), max(1, int(height * scale))
    # Where one side was rounded up to 1, the other must make up for it.
    return min(scaled_width, max(1, max_pixels // scaled_height)), min(scaled_height, max(1, max_pixels // scaled_width))


def as_stored(target: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Returns a view of the turned picture's memory in which the rows of the stored picture lie in order.

    Args:
        target: (height, width, 3) as it is shown.
        orientation: EXIF's, 1 to 8.
    """
    turned = target.transpose(1, 0, 2) if orientation in SWAPPING_ORIENTATIONS else target
    flip_rows = orientation in (3, 4, 6, 7)
    flip_columns = orientation in (2, 3, 7, 8)
    return turned[:: -1 if flip_rows else 1, :: -1 if flip_columns else 1]
