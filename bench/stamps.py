"""Stamps in tensors, and the check of them: what every message and request of the benchmarks carries, whatever its dtype.

Before each send the sender writes a value that follows from its own number and the message's to a few places of the tensor,
most of which move from message to message; whoever receives it compares. So what is lost, doubled, torn, overwritten too early
or seen too late ends a run, and nothing is timed that does not deliver what was sent. Stamps are 4 bytes at multiples of 4:
nothing is computed with them, and an odd bit pattern of a float is as good as any.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["ITEM_NBYTES", "MAX_SENDERS", "CheckError", "places", "value", "write", "wrong_content", "wrong_form"]

ITEM_NBYTES = 4  # of a stamp; sizes are multiples of it, and so of every dtype's
MAX_SENDERS = 1 << 7

_BITS = 24  # of the sequence number in a stamp; the 7 above are the sender's, the sign says that it is a stamp


class CheckError(Exception):
    """What came was not what was sent."""


def value(sender: int, sequence: int) -> int:
    """Returns a stamp, as an int32: negative, which the tensors' initial content nowhere is."""
    return -1 - (sender << _BITS | sequence % (1 << _BITS))


def places(sequence: int, length: int) -> tuple[int, int, int, int]:
    """Returns where a message of so many stamps' length has its own: both ends, and two places that move through the tensor."""
    return 0, length - 1, sequence * 40_503 % length, (sequence * 9_973 + length // 2) % length


def write(words: Any, sender: int, sequence: int, *, spoiled: bool = False) -> None:
    """Stamps a tensor.

    Args:
        words: its memory, as a memoryview of int32: the fastest way to write single items.
        sender, sequence: who sends it, and as which.
        spoiled: for tests of the check.
    """
    stamp = value(sender, sequence)
    for place in places(sequence, len(words)):
        words[place] = stamp
    if spoiled:
        words[-1] = ~stamp


def wrong_form(tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> str | None:
    """Returns in words how a tensor is not of a form; None if it is."""
    if tensor.dtype is dtype and tensor.shape == shape:
        return None
    return f"is {tensor.dtype}{list(tensor.shape)}, not {dtype}{list(shape)}"


def wrong_content(words: NDArray[np.int32], sender: int, sequence: int, where: tuple[int, ...]) -> str | None:
    """Returns in words which of some places does not hold the stamp; None if all do."""
    stamp = value(sender, sequence)
    for place in where:
        if words.item(place) != stamp:
            return f"holds {words.item(place)} at {place * ITEM_NBYTES}, not {stamp}: it is corrupted"
    return None
