"""Picture fingerprints: a picture in, a unit vector out, such that altered copies of a picture stay near it.

A fingerprint has three parts, each blind to what some everyday alteration changes:

- layout: low-frequency DCT coefficients of the luminance. Recompression and scaling only touch higher frequencies, and
  brightening scales all of these alike.
- edges: gradient orientations gathered over overlapping cells. They tell textures apart and move little under a crop.
- colour: a histogram of chromaticity and relative luminance, which a crop, scaling or brightening hardly moves.

All three are made from one thumbnail of `_THUMBNAIL_SIDE` squared. Torch's antialiasing kernel makes it straight from
the bytes, in integers, so a picture of twelve megapixels costs little more than reading it once and is never copied to
floats. Squeezing to a square forgets the aspect ratio on purpose: a crop changes it.

Bins and cells overlap like triangles (a value counts partly for each of its two neighbours), so that a small change of
the picture is a small change of the fingerprint.

Invariants:

- the picture is only read, and the fingerprint shares no memory with it;
- a fingerprint is finite and of length one for every picture, a constant one included: layout and edges may vanish, the
  colour part has length one whatever the pixels are;
- equal pictures give equal bits on one machine: nothing here is random or depends on what was described before.
"""

from __future__ import annotations

import functools
import math

import torch
from torch.nn import functional

from engine.executors.fingerprints.vectors import (
    FINGERPRINT_SIZE,
    cosine_waves,
    count_up_to,
    normalise_above,
    share_on_line,
    triangle,
)

__all__ = ["fingerprint_picture"]

# Small enough that fine grain, which recompression and scaling change, is gone. Anything from 64 to 192 ranks the
# sample pictures about equally well.
_THUMBNAIL_SIDE = 96

# Of a longer side only every n-th line is read. That leaves over 80 lines for each of the thumbnail's, and bounds what
# grows with the sides instead of the area: torch's tables of weights, and its picture halfway (16 384 lines * 96 * 3
# bytes = 4.7 MB). Without this limit a picture 1 pixel wide and 12 000 000 high took 14 s and gigabytes.
_SIDE_LIMIT = 16_384

# More coefficients tell pictures apart better and survive a crop worse: from about 48 on a 10 % crop suffers.
_LAYOUT_SIZE = 32
_LAYOUT_FREQUENCIES = 8

_CELLS_PER_SIDE = 6
_ORIENTATIONS = 8
_EDGES_SIZE = _ORIENTATIONS * _CELLS_PER_SIDE**2

_LUMINANCE_BINS = 3
_CHROMA_BINS = 8
_COLOUR_SIZE = _LUMINANCE_BINS * _CHROMA_BINS**2

assert _LAYOUT_SIZE + _EDGES_SIZE + _COLOUR_SIZE == FINGERPRINT_SIZE  # 32 + 288 + 192

# How much each part counts, as shares of the squared length. Colour counts least: all grey pictures agree on it.
_LAYOUT_SHARE = 0.4
_EDGES_SHARE = 0.4
_COLOUR_SHARE = 0.2

# Grey levels of contrast below which a picture or a cell is mostly rounding noise, which must not be blown up to the
# weight of a real pattern. Also keeps a black picture's luminance from being divided by zero.
_CONTRAST_FLOOR = 1.0

# Length of the edge part, at most `_CELLS_PER_SIDE`, below which orientations are mostly chance, as they are in grass.
_EDGES_FLOOR = 1.0

# Added to red + green + blue, so that the chromaticity of almost black pixels, which is noise, stays near neutral.
_CHROMA_FLOOR = 48.0

# Chromaticities of photographs crowd around neutral; those beyond this fall into the outermost bins.
_CHROMA_LIMIT = 0.3


def fingerprint_picture(pixels: torch.Tensor) -> torch.Tensor:
    """Describes a picture by a unit vector; the cosine between two such vectors says how alike two pictures are.

    Args:
        pixels: uint8 of shape (height, width, 3), RGB, in host memory, at least 1x1. It is only read, and may be a
            view of shared memory. If it is not contiguous, torch copies it once, as bytes.

    Returns:
        float32 of shape (`FINGERPRINT_SIZE`,) and Euclidean length one, in memory of its own.

    Raises:
        ValueError: `pixels` is of another rank, channel count, dtype or device, or empty.

    Source:
        Edges: Dalal and Triggs, "Histograms of Oriented Gradients for Human Detection" (CVPR 2005). Layout: after the
        colour layout descriptor of MPEG-7. Square roots of colour counts: Arandjelovic and Zisserman, "Three things
        everyone should know to improve object retrieval" (CVPR 2012).
    """
    _check_picture(pixels)
    thumbnail = _shrink(pixels)
    luminance = _luminance(thumbnail)
    fingerprint = torch.cat(
        [
            math.sqrt(_LAYOUT_SHARE) * _describe_layout(luminance),
            math.sqrt(_EDGES_SHARE) * _describe_edges(luminance),
            math.sqrt(_COLOUR_SHARE) * _describe_colour(thumbnail, luminance),
        ]
    )
    return functional.normalize(fingerprint, dim=0)


def _check_picture(pixels: torch.Tensor) -> None:
    is_picture = pixels.dtype == torch.uint8 and pixels.ndim == 3 and pixels.shape[2] == 3
    if not is_picture or pixels.device.type != "cpu" or pixels.numel() == 0:
        raise ValueError(
            "expected a picture as uint8 of shape (height, width, 3), not empty, on the cpu; "
            f"got {pixels.dtype} of shape {tuple(pixels.shape)} on {pixels.device}"
        )


def _shrink(pixels: torch.Tensor) -> torch.Tensor:
    """Returns float32 of shape (3, `_THUMBNAIL_SIDE`, `_THUMBNAIL_SIDE`), in 0..255; smaller pictures are enlarged."""
    height, width, _ = pixels.shape
    sampled = pixels[:: math.ceil(height / _SIDE_LIMIT), :: math.ceil(width / _SIDE_LIMIT)]
    thumbnail = functional.interpolate(
        sampled.permute(2, 0, 1).unsqueeze(0),
        size=(_THUMBNAIL_SIDE, _THUMBNAIL_SIDE),
        mode="bilinear",
        antialias=True,
    )
    return thumbnail.squeeze(0).to(torch.float32)


def _luminance(thumbnail: torch.Tensor) -> torch.Tensor:
    """Returns the luma of ITU-R BT.601, as JPEG uses it."""
    red, green, blue = thumbnail.unbind(0)
    return red * 0.299 + green * 0.587 + blue * 0.114


def _describe_layout(luminance: torch.Tensor) -> torch.Tensor:
    basis = cosine_waves(_LAYOUT_FREQUENCIES, _THUMBNAIL_SIDE)
    coefficients = basis @ luminance @ basis.T
    return normalise_above(_CONTRAST_FLOOR, coefficients.flatten()[_layout_order()])


def _describe_edges(luminance: torch.Tensor) -> torch.Tensor:
    down, across = torch.gradient(luminance)
    # Opposite directions are one orientation: an edge stays the same edge when its background turns from dark to light.
    orientation = torch.atan2(down, across) * (_ORIENTATIONS / math.pi)
    strengths = torch.hypot(down, across) * _share_on_circle(orientation, _ORIENTATIONS)
    windows = _cell_windows()
    cells = windows @ strengths @ windows.T
    balanced = cells / (torch.linalg.vector_norm(cells, dim=0) + _CONTRAST_FLOOR)
    # Histograms are nowhere negative, so without this any two textures would look alike.
    return normalise_above(_EDGES_FLOOR, (balanced - balanced.mean()).flatten())


def _describe_colour(thumbnail: torch.Tensor, luminance: torch.Tensor) -> torch.Tensor:
    """Returns the square roots of relative frequencies, whose squares add up to one."""
    red, green, blue = thumbnail.flatten(1).unbind(0)
    total = red + green + blue + _CHROMA_FLOOR
    red_green = _share_chroma((red - green) / total)
    yellow_blue = _share_chroma(((red + green) / 2 - blue) / total)
    relative_luminance = luminance.flatten() / (luminance.mean() + _CONTRAST_FLOOR)
    brightness = share_on_line(relative_luminance * ((_LUMINANCE_BINS - 1) / 2), _LUMINANCE_BINS)
    counts = (brightness.unsqueeze(1) * red_green).flatten(0, 1) @ yellow_blue.T
    return (counts.flatten() / counts.sum()).sqrt()


def _share_chroma(chroma: torch.Tensor) -> torch.Tensor:
    return share_on_line((chroma / _CHROMA_LIMIT + 1) * ((_CHROMA_BINS - 1) / 2), _CHROMA_BINS)


def _share_on_circle(position: torch.Tensor, bins: int) -> torch.Tensor:
    """Shares each position, of shape (height, width), out between two of `bins`; bin `bins` would be bin 0 again."""
    turned = torch.remainder(position - count_up_to(bins).reshape(-1, 1, 1), bins)
    distance = torch.minimum(turned, bins - turned)
    return triangle(distance)


@functools.cache
def _layout_order() -> torch.Tensor:
    """Returns where the lowest coefficients lie in the flattened square of them, but for the first: the mean."""
    by_frequency = sorted(range(_LAYOUT_FREQUENCIES**2), key=lambda index: sum(divmod(index, _LAYOUT_FREQUENCIES)))
    return torch.tensor(by_frequency[1 : _LAYOUT_SIZE + 1], device="cpu")


@functools.cache
def _cell_windows() -> torch.Tensor:
    """Returns the weight of each line of the thumbnail in each row of cells, so that a cell averages over its lines."""
    cell_lines = _THUMBNAIL_SIDE / _CELLS_PER_SIDE
    position = (count_up_to(_THUMBNAIL_SIDE) + 0.5) / cell_lines - 0.5
    return share_on_line(position, _CELLS_PER_SIDE) / cell_lines
