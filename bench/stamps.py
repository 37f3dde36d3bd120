"""Stamps in tensors, and the check of them: what every message and request of the benchmarks carries, whatever its dtype.

Before each send the sender writes a value that follows from its own number and the message's to a few places of the tensor,
most of which move from message to message; whoever receives it compares. So what is lost, doubled, torn, overwritten too early
or seen too late ends a run, and nothing is timed that does not deliver what was sent. Stamps are 4 bytes at multiples of 4:
nothing is computed with them, and an odd bit pattern of a float is as good as any.

Stamps are part of what every transport is measured with, so they cost as little as can be: a tensor's memory is written and
read as an array of ctypes at its address, which takes a sixth of what a view of another dtype and a numpy array of it do.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

ITEM_NBYTES = 4  # of a stamp; sizes are multiples of it, and so of every dtype's
MAX_SENDERS = 1 << 7

_BITS = 24  # of the sequence number in a stamp; the 7 above are the sender's, the sign says that it is a stamp
_MASK = (1 << _BITS) - 1


class CheckError(Exception):
    """What came was not what was sent."""


class Stamps:
    """Writes and checks the stamps of one-dimensional tensors of a size and a dtype.

    A stamp is negative as an int32, which the tensors' initial content nowhere is. A message has its own at both ends of the
    tensor, and in two places that move through it.
    """

    def __init__(self, nbytes: int, dtype: torch.dtype = torch.float32) -> None:
        self._length = nbytes // ITEM_NBYTES
        self._half = self._length // 2
        self._words = ctypes.c_int32 * self._length
        self._dtype = dtype
        self._shape = (nbytes // dtype.itemsize,)

    def words(self, tensor: torch.Tensor) -> Any:
        """Returns the memory of a tensor, for :meth:`write`: contiguous and of as many bytes, of any dtype."""
        assert tensor.nbytes == self._length * ITEM_NBYTES, "it is of as many bytes"
        assert tensor.is_contiguous(), "it lies in one piece"
        return self._words.from_address(tensor.data_ptr())

    def write(self, words: Any, sender: int, sequence: int) -> None:
        """Stamps the memory of a tensor, by who sends it, and as which."""
        length = self._length
        stamp = -1 - (sender << _BITS | sequence & _MASK)
        words[0] = words[-1] = words[sequence * 40_503 % length] = words[(sequence * 9_973 + self._half) % length] = stamp

    def check(self, what: str, tensor: torch.Tensor, sender: int, sequence: int, whose: str = "") -> None:
        """Compares a tensor with what was sent: its dtype and shape, and its stamp in all its places.

        Raises CheckError if it is another one, named by ``what``, ``sequence`` and ``whose``.
        """
        if tensor.dtype is not self._dtype or tensor.shape != self._shape or not tensor.is_contiguous():
            asked = f"{self._dtype}{list(self._shape)} in one piece"
            raise CheckError(f"{what} {sequence} is {tensor.dtype}{list(tensor.shape)}, not {asked}{whose}")
        words = self._words.from_address(tensor.data_ptr())
        length = self._length
        stamp = -1 - (sender << _BITS | sequence & _MASK)
        third, fourth = sequence * 40_503 % length, (sequence * 9_973 + self._half) % length
        if not words[0] == words[-1] == words[third] == words[fourth] == stamp:
            self._complain(what, words, (0, length - 1, third, fourth), stamp, sequence, whose)

    def _complain(self, what: str, words: Any, places: tuple[int, ...], stamp: int, sequence: int, whose: str) -> None:
        place, word = next((place, words[place]) for place in places if words[place] != stamp)
        raise CheckError(f"{what} {sequence} holds {word} at {place * ITEM_NBYTES}, not {stamp}: it is corrupted{whose}")
