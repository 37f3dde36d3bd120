"""What a tensor is checked by: a few places all over it hold the number of the message.

As many places whatever the size: writing, reading and comparing them takes the same time for 64 KB as for 256 MB, so that a
hand-over that does not depend on the size can show that it does not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bench.messages import CheckError

__all__ = ["DTYPE", "ITEM_NBYTES", "MIN_NBYTES", "check", "marks", "sample"]

DTYPE = torch.int32
ITEM_NBYTES = DTYPE.itemsize
_PLACES = 64
MIN_NBYTES = _PLACES * ITEM_NBYTES


def marks(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the places of a tensor, as a view ``int32 (64,)``: the last element, one near the first, and those between.

    Args:
        tensor: ``int32 (n,)``, contiguous, of at least :data:`MIN_NBYTES`.
    """
    stride = (tensor.numel() - 1) // (_PLACES - 1)
    return tensor[(tensor.numel() - 1) - (_PLACES - 1) * stride :: stride]


def sample(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a tensor's places: on a GPU, one small kernel that reads the data."""
    return marks(tensor).clone()


def check(samples: Sequence[int], number: int, what: str) -> None:
    """Compares what :func:`sample` found with the number of the message.

    Raises:
        CheckError: it is not what was written.
    """
    wrong = [value for value in samples if value != number]
    if wrong or len(samples) != _PLACES:
        raise CheckError(
            f"{what}: message {number} holds {wrong[:1]} in {len(wrong)} of {len(samples)} places: it is corrupted"
        )
