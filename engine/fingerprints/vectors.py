"""What fingerprints of every kind are made with: sums in a fixed order, overlapping bins, and a space for each kind.

Equal inputs give equal bits on one machine: in every process and every batch, whatever number of threads torch or a BLAS may
use. That rests on three things:

- Numbers are added up by NumPy's own loops, in the calling thread, in an order that follows from the shapes alone. No matrix
  product of torch or NumPy (``@``, ``dot``, ``linalg.norm``) is used here: a BLAS splits its sums by threads and by processor.
  :func:`product` and :func:`length_of` stand for them.
- What is added up lies in memory in one way only (C order), wherever the input came from.
- Torch computes nothing but the thumbnail of a picture, in whole numbers.

Between machines only a tolerance is promised, of `1e-5` in each number: exponentials and angles end in other last bits on other
processors, as NumPy chooses its loops by what a processor can. ``tests/engine/fingerprints/test_equal_bits.py`` looks at both.
"""

from __future__ import annotations

import functools
import hashlib
import math
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

__all__ = [
    "FINGERPRINT_SIZE",
    "Neighbours",
    "Numbers",
    "cosine_waves",
    "length_of",
    "neighbours_on_line",
    "normalise",
    "normalise_above",
    "place_in_space",
    "product",
    "share_on_line",
    "signs_of",
    "tensor_from",
    "triangle",
]

Numbers: TypeAlias = npt.NDArray[np.float64]
Neighbours: TypeAlias = tuple[tuple[npt.NDArray[np.int64], Numbers], tuple[npt.NDArray[np.int64], Numbers]]

FINGERPRINT_SIZE = 512
"""Numbers of a fingerprint. A power of two: see :func:`place_in_space`."""

# Products take so many terms of their sums at a time, as doubles: 4096 lines of 80 bands are 2.6 MB.
_TERMS_AT_A_TIME = 4096


def product(left: npt.NDArray[Any], right: npt.NDArray[Any]) -> Numbers:
    """Multiplies two matrices, in doubles, and in an order that no thread and no BLAS decides."""
    total = np.zeros((left.shape[0], right.shape[1]))
    for start in range(0, left.shape[1], _TERMS_AT_A_TIME):
        terms = slice(start, start + _TERMS_AT_A_TIME)
        # Without `optimize`, einsum never asks a BLAS.
        total += np.einsum("ij,jk->ik", np.asarray(left[:, terms], np.float64), np.asarray(right[terms], np.float64))
    return total


def length_of(vector: Numbers) -> float:
    """Returns the Euclidean length of all numbers of an array."""
    return math.sqrt(np.square(vector).sum())


def normalise(vector: Numbers) -> Numbers:
    """Brings a vector, which must not be nought, to length one."""
    return vector / length_of(vector)


def normalise_above(floor: float, part: Numbers) -> Numbers:
    """Brings a part to a length near one if it is well above the floor, and near nought if it is well below."""
    return part / (length_of(part) + floor)


def share_on_line(position: Numbers, bins: int) -> Numbers:
    """Shares each position out between its two nearest bins; what lies beyond an end counts for that end.

    Args:
        position: of shape (count,); bin `i` is centred at `i`.
        bins: how many bins there are.

    Returns:
        Shape (bins, count); each column adds up to one.
    """
    return triangle(np.abs(position.clip(0, bins - 1) - np.arange(bins)[:, None]))


def neighbours_on_line(position: Numbers, bins: int) -> Neighbours:
    """Returns the same as :func:`share_on_line` in another form: for either neighbour its bin, and how much falls into it."""
    inside: Numbers = position.clip(0, bins - 1)
    lower = inside.astype(np.int64)
    share = inside - lower
    return (lower, 1 - share), (np.minimum(lower + 1, bins - 1), share)


def triangle(distance: Numbers) -> Numbers:
    """Returns how much of a thing falls into a bin whose centre is so far away: bins overlap with their neighbours."""
    return (1 - distance).clip(0)


@functools.cache
def cosine_waves(count: int, length: int) -> Numbers:
    """Returns the `count` lowest waves of a DCT-II, of shape (count, length), to average a signal of that length against."""
    phase = (np.arange(length) + 0.5) * (math.pi / length)
    return np.cos(np.arange(count)[:, None] * phase) / length


def place_in_space(space: str, vector: Numbers) -> Numbers:
    """Turns a vector into a space of its own, always the same for the same name.

    Lengths and the cosines within a space stay what they were. Between two spaces, and to pictures, which are not turned,
    cosines are near nought, like those of random vectors (1 / sqrt(512) = 0.04): one index can hold things of several
    kinds, and each finds its own. First each number is spread over all places, so that this also holds for vectors that
    have little in them but one number, as those of silence or a short text; then signs make the spaces differ.

    Args:
        space: its name.
        vector: of shape (`FINGERPRINT_SIZE`,).

    Returns:
        The same shape.

    Source:
        Ailon and Chazelle, "The Fast Johnson-Lindenstrauss Transform" (SIAM Journal on Computing, 2009): random signs and a
        Hadamard transform. Kanerva, "Hyperdimensional Computing" (Cognitive Computation, 2009): binding to a role by signs.
    """
    spread = vector
    # Sylvester's Hadamard matrix, one factor at a time.
    stride = 1
    while stride < FINGERPRINT_SIZE:
        pairs = spread.reshape(-1, 2, stride)
        spread = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1)
        stride *= 2
    return spread.reshape(-1) / math.sqrt(FINGERPRINT_SIZE) * signs_of(space, FINGERPRINT_SIZE)


@functools.cache
def signs_of(name: str, count: int) -> Numbers:
    """Returns `count` signs, at most `FINGERPRINT_SIZE`, as if drawn by chance, always the same for the same name."""
    digest = hashlib.blake2b(name.encode(), digest_size=FINGERPRINT_SIZE // 8).digest()
    return np.unpackbits(np.frombuffer(digest, np.uint8))[:count].astype(np.float64) * 2 - 1


def tensor_from(vector: Numbers) -> torch.Tensor:
    """Returns a finished fingerprint as a float32 tensor in memory of its own."""
    return torch.from_numpy(vector.astype(np.float32))
