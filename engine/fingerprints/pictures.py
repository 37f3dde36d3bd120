"""Picture fingerprints: a picture in, a unit vector out, such that altered copies of a picture stay near it.

A picture is described by three parts, each blind to what some everyday alteration changes:

- layout: low-frequency DCT coefficients of the luminance. Recompression and scaling only touch higher frequencies, and
  brightening scales all of these alike.
- edges: gradient orientations gathered over overlapping cells. They tell textures apart and move little under a crop.
- colour: a histogram of chromaticity and relative luminance, which a crop, scaling or brightening hardly moves.

Layout and edges are described three times and added up: of the whole picture, and of smaller parts around its middle
(`VIEWS_FOR_CROPS`). A crop of a picture is about what such a part of it is, so the sums of both have much in common.

Each of these is made from a thumbnail of `_THUMBNAIL_SIDE` squared. Torch's antialiasing kernel makes it straight from the
bytes, in integers, so a picture of twelve megapixels costs little more than reading it twice and is never copied to floats.
Squeezing to a square forgets the aspect ratio on purpose: a crop changes it. Towards its corners the thumbnail fades out
(:func:`_fade`): a crop takes them away, and a rotation puts black there.

Bins and cells overlap like triangles (a value counts partly for each of its two neighbours), so that a small change of
the picture is a small change of the fingerprint.

Mirroring is then forgotten (:func:`_forget_mirroring`): a picture, its two mirror images and the picture upside down have one
fingerprint. Two simpler designs were measured and lost: to turn each picture to a canonical side first loses crops wherever
that decision is close, and the mean of the four fingerprints loses what tells pictures apart.

Invariants:

- the picture is only read, and the fingerprint shares no memory with it;
- a fingerprint is finite and of length one for every picture, a constant one included: layout and edges may vanish, the
  colour part has length one whatever the pixels are;
- equal pictures give equal bits on one machine (see :mod:`.vectors`): nothing here is random or depends on what was described
  before.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from shmring.engine.fingerprints.vectors import (
    FINGERPRINT_SIZE,
    Neighbours,
    Numbers,
    cosine_waves,
    length_of,
    neighbours_on_line,
    normalise,
    normalise_above,
    product,
    share_on_line,
    signs_of,
    tensor_from,
    triangle,
)

__all__ = ["VIEWS_FOR_CROPS", "WHOLE", "View", "fingerprint_picture"]

# Small enough that fine grain, which recompression and scaling change, is gone. Anything from 64 to 192 ranks the
# sample pictures about equally well.
_THUMBNAIL_SIDE = 96


class View(NamedTuple):
    """A part of a picture around its middle: the share of its width and height, and how much it counts."""

    share: float
    weight: int


WHOLE = View(1.0, 1)
"""The whole picture."""

VIEWS_FOR_CROPS = (View(1.0, 2), View(0.75, 1), View(0.6, 1))
"""The whole picture, and two parts of it.

With these, the smallest margin of crops by 25 % is 0.21; without the last, 0.09; with the whole alone, 0.01. The whole counts
twice for the sake of crops on one side only, which are no part around the middle.
"""

_SHORTEST_SUM = 1e-6  # of views that cancel each other out, or that have no pattern at all

# Where the thumbnail begins to fade and where it has faded out, in half sides from its middle; its corners are 1.41 away.
_FADE_BEGINS = 0.8
_FADE_ENDS = 1.15

# Parts of a picture are cut out of a square of this side; the smallest of them is then as large as a thumbnail.
_OVERVIEW_SIDE = 160

# Of a longer side only every n-th line is read. That leaves over 50 lines for each of the overview's, and bounds what
# grows with the sides instead of the area: torch's tables of weights, and its picture halfway (16 384 lines * 160 * 3
# bytes = 7.9 MB). Without this limit a picture 1 pixel wide and 12 000 000 high took 14 s and gigabytes.
_SIDE_LIMIT = 16_384

# More coefficients tell pictures apart better and survive a crop worse: from about 48 on a 10 % crop suffers.
_LAYOUT_SIZE = 32
_LAYOUT_FREQUENCIES = 8

_CELLS_PER_SIDE = 6  # even, so that no cell is its own mirror image
_ORIENTATIONS = 8
_EDGES_SIZE = _ORIENTATIONS * _CELLS_PER_SIDE**2

_LUMINANCE_BINS = 3
_CHROMA_BINS = 8
_COLOUR_SIZE = _LUMINANCE_BINS * _CHROMA_BINS**2

assert _LAYOUT_SIZE + _EDGES_SIZE + _COLOUR_SIZE == FINGERPRINT_SIZE  # 32 + 288 + 192

# How much each part counts, as shares of the squared length. Colour counts least: all grey pictures agree on it.
_LAYOUT_SHARE = 0.415
_EDGES_SHARE = 0.415
_COLOUR_SHARE = 0.17

# Grey levels of contrast below which a picture or a cell is mostly rounding noise, which must not be blown up to the
# weight of a real pattern. Also keeps a black picture's luminance from being divided by zero.
_CONTRAST_FLOOR = 1.0

# Length of the edge part, at most `_CELLS_PER_SIDE`, below which orientations are mostly chance, as they are in grass.
_EDGES_FLOOR = 1.0

# Added to red + green + blue, so that the chromaticity of almost black pixels, which is noise, stays near neutral.
_CHROMA_FLOOR = 48.0

# Chromaticities of photographs crowd around neutral; those beyond this fall into the outermost bins.
_CHROMA_LIMIT = 0.3


def fingerprint_picture(pixels: torch.Tensor, views: Sequence[View] = VIEWS_FOR_CROPS) -> torch.Tensor:
    """Describes a picture by a unit vector; the cosine between two such vectors says how alike two pictures are.

    Args:
        pixels: uint8 of shape (height, width, 3), RGB, in host memory, at least 1x1. It is only read, and may be a
            view of shared memory. If it is not contiguous, torch copies it once, as bytes.
        views: what is looked at, the whole picture first. Fingerprints of different views are not compared.

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
    thumbnails = _thumbnails(pixels, views)
    luminances = [_luminance(thumbnail) for thumbnail in thumbnails]
    layout = math.sqrt(_LAYOUT_SHARE) * _add_views(views, [_describe_layout(luminance) for luminance in luminances])
    edges = math.sqrt(_EDGES_SHARE) * _add_views(views, [_describe_edges(luminance) for luminance in luminances])
    colour = math.sqrt(_COLOUR_SHARE) * _describe_colour(thumbnails[0], luminances[0])
    return tensor_from(normalise(np.concatenate([_forget_mirroring(layout, edges), colour])))


def _check_picture(pixels: torch.Tensor) -> None:
    is_picture = pixels.dtype == torch.uint8 and pixels.ndim == 3 and pixels.shape[2] == 3
    if not is_picture or pixels.device.type != "cpu" or pixels.numel() == 0:
        raise ValueError(
            "expected a picture as uint8 of shape (height, width, 3), not empty, on the cpu; "
            f"got {pixels.dtype} of shape {tuple(pixels.shape)} on {pixels.device}"
        )


def _thumbnails(pixels: torch.Tensor, views: Sequence[View]) -> list[Numbers]:
    """Returns an array of shape (3, `_THUMBNAIL_SIDE`, `_THUMBNAIL_SIDE`), in 0..255, for each view."""
    height, width, _ = pixels.shape
    planes = pixels[:: math.ceil(height / _SIDE_LIMIT), :: math.ceil(width / _SIDE_LIMIT)].permute(2, 0, 1)
    # Parts are cut out of a small picture: torch would copy a part of the large one first, since its lines are not in a row.
    overview = _resize(planes, _OVERVIEW_SIDE) if any(view.share < 1 for view in views) else planes
    thumbnails = [_resize(planes if view.share == 1 else _middle(overview, view.share), _THUMBNAIL_SIDE) for view in views]
    return [thumbnail.numpy().astype(np.float64, order="C") for thumbnail in thumbnails]


def _resize(planes: torch.Tensor, side: int) -> torch.Tensor:
    """Returns shape (3, side, side), uint8; smaller pictures are enlarged."""
    return functional.interpolate(planes.unsqueeze(0), size=(side, side), mode="bilinear", antialias=True).squeeze(0)


def _middle(planes: torch.Tensor, share: float) -> torch.Tensor:
    """Returns the part of a square picture around its middle that has this share of its width and height."""
    side = planes.shape[-1]
    margin = round(side * (1 - share) / 2)
    return planes[:, margin : side - margin, margin : side - margin]


def _add_views(views: Sequence[View], parts: Sequence[Numbers]) -> Numbers:
    """Adds up one part of the description of all views, to the length that it has in a view on average.

    So a faint pattern stays faint, and a clear one does not become faint because the views differ.
    """
    total: Numbers = np.sum([view.weight * part for view, part in zip(views, parts, strict=True)], axis=0)
    usual = sum(map(length_of, parts)) / len(parts)
    return total * (usual / max(length_of(total), _SHORTEST_SUM))


def _luminance(thumbnail: Numbers) -> Numbers:
    """Returns the luma of ITU-R BT.601, as JPEG uses it."""
    red, green, blue = thumbnail
    luminance: Numbers = red * 0.299 + green * 0.587 + blue * 0.114
    return luminance


def _describe_layout(luminance: Numbers) -> Numbers:
    """Returns the lowest coefficients in a square, those that do not count as noughts: (vertical, horizontal frequency)."""
    fade = _fade()
    contrast = luminance - (luminance * fade).sum() / fade.sum()
    basis = cosine_waves(_LAYOUT_FREQUENCIES, _THUMBNAIL_SIDE)
    coefficients = product(product(basis, contrast * fade), basis.T)
    return normalise_above(_CONTRAST_FLOOR, coefficients * _layout_mask())


def _describe_edges(luminance: Numbers) -> Numbers:
    """Returns shape (`_ORIENTATIONS`, `_CELLS_PER_SIDE`, `_CELLS_PER_SIDE`)."""
    down, across = np.gradient(luminance)
    # Opposite directions are one orientation: an edge stays the same edge when its background turns from dark to light.
    orientation = np.arctan2(down, across) * (_ORIENTATIONS / math.pi)
    strength = np.sqrt(down * down + across * across) * _fade()
    windows = _cell_windows()
    cells = np.stack(
        [product(product(windows, strength * share), windows.T) for share in _share_on_circle(orientation, _ORIENTATIONS)]
    )
    balanced = cells / (np.sqrt(np.square(cells).sum(0)) + _CONTRAST_FLOOR)
    # Histograms are nowhere negative, so without this any two textures would look alike.
    return normalise_above(_EDGES_FLOOR, balanced - balanced.mean())


def _describe_colour(thumbnail: Numbers, luminance: Numbers) -> Numbers:
    """Returns the square roots of relative frequencies, whose squares add up to one."""
    red, green, blue = thumbnail.reshape(3, -1)
    total = red + green + blue + _CHROMA_FLOOR
    red_green = _bins_of_chroma((red - green) / total)
    yellow_blue = _bins_of_chroma(((red + green) / 2 - blue) / total)
    relative_luminance = luminance.reshape(-1) / (luminance.mean() + _CONTRAST_FLOOR)
    brightness = neighbours_on_line(relative_luminance * ((_LUMINANCE_BINS - 1) / 2), _LUMINANCE_BINS)
    counts = np.zeros(_COLOUR_SIZE)
    for (light, share), (red_bin, red_share), (blue_bin, blue_share) in itertools.product(brightness, red_green, yellow_blue):
        place = (light * _CHROMA_BINS + red_bin) * _CHROMA_BINS + blue_bin
        counts += np.bincount(place, share * red_share * blue_share, _COLOUR_SIZE)
    roots: Numbers = np.sqrt(counts / counts.sum())
    return roots


def _bins_of_chroma(chroma: Numbers) -> Neighbours:
    return neighbours_on_line((chroma / _CHROMA_LIMIT + 1) * ((_CHROMA_BINS - 1) / 2), _CHROMA_BINS)


def _share_on_circle(position: Numbers, bins: int) -> Numbers:
    """Shares each position, of shape (height, width), out between two of `bins`; bin `bins` would be bin 0 again."""
    distance = np.abs(np.remainder(position, bins) - np.arange(bins).reshape(-1, 1, 1))
    return triangle(np.minimum(distance, bins - distance))


# -- mirror images ----------------------------------------------------------------------------------------------------------


def _forget_mirroring(layout: Numbers, edges: Numbers) -> Numbers:
    """Turns layout and edges into as many numbers that are the same for a picture and its mirror images.

    Both are taken apart into what mirroring leaves as it is and what it only gives another sign, for either axis. Of the latter
    the common sign must go, and little else: each part is turned to a basis in which it is spread over all numbers, and of
    these the absolute values are taken. Two parts with a cosine `c` then have one of about `c * c`.
    """
    numbers = []
    even_or_odd = ((0, 0), (0, 1), (1, 0), (1, 1))
    for vertical, horizontal in even_or_odd:
        frequencies = layout[vertical::2, horizontal::2][_layout_mask()[vertical::2, horizontal::2]]
        cells = _part_of_edges(edges, vertical, horizontal)
        part = np.concatenate([frequencies, cells.reshape(-1)])
        numbers.append(_forget_sign(part) if vertical or horizontal else part)
    return np.concatenate(numbers)


def _part_of_edges(edges: Numbers, vertical: int, horizontal: int) -> Numbers:
    """Returns the quarter that mirroring upside down, and left to right, leaves as it is (0) or gives another sign (1)."""
    half = _CELLS_PER_SIDE // 2
    # In a mirror, an edge that rises falls.
    mirrored = edges[-np.arange(_ORIENTATIONS) % _ORIENTATIONS]
    left_to_right = (-1) ** horizontal * mirrored[:, :, ::-1]
    upside_down = (-1) ** vertical * mirrored[:, ::-1]
    both = (-1) ** (vertical + horizontal) * edges[:, ::-1, ::-1]
    part: Numbers = (edges + left_to_right + upside_down + both) / 2
    return part[:, :half, :half]


def _forget_sign(part: Numbers) -> Numbers:
    """Returns as many numbers of about the same length, the same for a vector and its opposite."""
    spread = product(_mixing_basis(len(part)), part[:, None])[:, 0]
    # What is nowhere negative would look alike; for numbers drawn from a normal distribution these are mean and deviation.
    usual = math.sqrt(2 / math.pi) * length_of(part) / math.sqrt(len(part))
    return (np.abs(spread) - usual) / math.sqrt(1 - 2 / math.pi)


@functools.cache
def _mixing_basis(count: int) -> Numbers:
    """Returns an orthonormal basis of `count` numbers, of which each looks at all: a DCT-II after signs as drawn by chance."""
    basis = math.sqrt(2 * count) * cosine_waves(count, count)
    basis[0] /= math.sqrt(2)
    return basis * signs_of("mirror images", count)


# -- tables -----------------------------------------------------------------------------------------------------------------


@functools.cache
def _layout_mask() -> npt.NDArray[np.bool_]:
    """Returns which coefficients count, of (vertical, horizontal frequency): the lowest but for the first, the mean."""
    by_frequency = sorted(range(_LAYOUT_FREQUENCIES**2), key=lambda index: sum(divmod(index, _LAYOUT_FREQUENCIES)))
    mask = np.zeros(_LAYOUT_FREQUENCIES**2, dtype=np.bool_)
    mask[by_frequency[1 : _LAYOUT_SIZE + 1]] = True
    return mask.reshape(_LAYOUT_FREQUENCIES, _LAYOUT_FREQUENCIES)


@functools.cache
def _cell_windows() -> Numbers:
    """Returns the weight of each line of the thumbnail in each row of cells, so that a cell averages over its lines."""
    cell_lines = _THUMBNAIL_SIDE / _CELLS_PER_SIDE
    position = (np.arange(0.5, _THUMBNAIL_SIDE)) / cell_lines - 0.5
    return share_on_line(position, _CELLS_PER_SIDE) / cell_lines


@functools.cache
def _fade() -> Numbers:
    """Returns the weight of each pixel of the thumbnail: one in the middle, nought in the corners."""
    position = (np.arange(0.5, _THUMBNAIL_SIDE)) * (2 / _THUMBNAIL_SIDE) - 1
    distance = np.sqrt(np.square(position)[:, None] + np.square(position))
    fade: Numbers = ((_FADE_ENDS - distance) / (_FADE_ENDS - _FADE_BEGINS)).clip(0, 1)
    return fade
