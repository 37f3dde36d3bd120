"""What fingerprints of every kind are made with: their size, how parts are normalised, how bins overlap, and what keeps the
kinds apart (:func:`place_in_space`).
"""

from __future__ import annotations

import functools
import hashlib
import math

import numpy as np
import torch

__all__ = [
    "FINGERPRINT_SIZE",
    "cosine_waves",
    "count_up_to",
    "normalise_above",
    "place_in_space",
    "share_on_line",
    "triangle",
]

FINGERPRINT_SIZE = 512
"""Numbers of a fingerprint."""


def normalise_above(floor: float, part: torch.Tensor) -> torch.Tensor:
    """Brings a part to a length near one if it is well above the floor, and near nought if it is well below."""
    length: torch.Tensor = torch.linalg.vector_norm(part)
    return part / (length + floor)


def share_on_line(position: torch.Tensor, bins: int) -> torch.Tensor:
    """Shares each position out between its two nearest bins; what lies beyond an end counts for that end.

    Args:
        position: float32 of shape (count,); bin `i` is centred at `i`.
        bins: how many bins there are.

    Returns:
        float32 of shape (bins, count); each column adds up to one.
    """
    distance = (position.clamp(0, bins - 1) - count_up_to(bins).unsqueeze(1)).abs()
    return triangle(distance)


def triangle(distance: torch.Tensor) -> torch.Tensor:
    """Returns the weight of what lies that far from the centre of a bin: bins and their neighbours overlap."""
    return (1 - distance).clamp(min=0)


def count_up_to(end: int) -> torch.Tensor:
    """Returns 0, 1, 2, ... below `end`, as float32 in host memory."""
    # The device is named because a host process may have made another one torch's default.
    return torch.arange(end, dtype=torch.float32, device="cpu")


@functools.cache
def cosine_waves(count: int, length: int) -> torch.Tensor:
    """Returns the `count` lowest waves of a DCT-II, of shape (count, length), to average a signal of that length against."""
    frequency = count_up_to(count).unsqueeze(1)
    phase = (count_up_to(length) + 0.5) * (math.pi / length)
    return torch.cos(frequency * phase) / length


def place_in_space(space: str, fingerprints: torch.Tensor) -> torch.Tensor:
    """Turns fingerprints into a space of their own, always the same for the same name.

    Lengths and the cosines within a space stay what they were. Between two spaces, and to pictures, which are not turned,
    cosines are near nought, like those of random vectors (1 / sqrt(512) = 0.04): one index can hold things of several
    kinds, and each finds its own. First each number is spread over all places, so that this also holds for fingerprints that
    have little in them but one number, as those of silence or a short text; then signs make the spaces differ.

    Args:
        space: its name.
        fingerprints: float32 of shape (..., `FINGERPRINT_SIZE`).

    Returns:
        float32 of the same shape.

    Source:
        Ailon and Chazelle, "The Fast Johnson-Lindenstrauss Transform" (SIAM Journal on Computing, 2009): random signs and a
        Hadamard transform. Kanerva, "Hyperdimensional Computing" (Cognitive Computation, 2009): binding to a role by signs.
    """
    return (fingerprints @ _hadamard_matrix()) * _signs_of(space)


@functools.cache
def _hadamard_matrix() -> torch.Tensor:
    """Returns an orthonormal matrix of equal numbers of either sign: Sylvester's, whose side is a power of two."""
    smallest = torch.tensor([[1.0, 1.0], [1.0, -1.0]], device="cpu") / math.sqrt(2)
    matrix = torch.ones((1, 1), device="cpu")
    while len(matrix) < FINGERPRINT_SIZE:
        matrix = torch.kron(matrix, smallest)
    return matrix


@functools.cache
def _signs_of(space: str) -> torch.Tensor:
    digest = hashlib.blake2b(space.encode(), digest_size=FINGERPRINT_SIZE // 8).digest()
    bits = torch.from_numpy(np.unpackbits(np.frombuffer(digest, np.uint8)))
    return bits.to(torch.float32) * 2 - 1
