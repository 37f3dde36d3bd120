"""Memory to write tensors into, of a client whose engine is on another host."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from shmring.client.slot import Slot
from shmring.door import shape_of
from shmring.errors import CapacityError, ClosedError

__all__ = ["FarSlot"]


class FarSlot(Slot):
    """Memory of this process to write tensors into, as any other :class:`shmring.Slot` is memory of the engine's slab. What was
    written here is sent from here, and can be sent to any engine.
    """

    def __init__(self, engine: str, nbytes: int) -> None:
        self._engine = engine
        self._nbytes = nbytes
        self._used_nbytes = 0
        self._closed = False

    def __repr__(self) -> str:
        return f"<FarSlot of {self._nbytes} bytes, {self._used_nbytes} used>"

    @property
    def nbytes(self) -> int:
        """How many bytes of tensors it holds."""
        return self._nbytes

    @property
    def engine(self) -> str:
        """The name of the engine that was chosen for it."""
        return self._engine

    def tensor(self, shape: tuple[int, ...] | list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Returns a new, uninitialised tensor, whose bytes count as the slot's: it has no memory of its own."""
        return torch.empty(self._take_shape(shape, dtype.itemsize), dtype=dtype)

    def array(self, shape: tuple[int, ...] | list[int], dtype: DTypeLike) -> NDArray[Any]:
        """Returns a new, uninitialised numpy array, whose bytes count as the slot's."""
        return np.empty(self._take_shape(shape, np.dtype(dtype).itemsize), dtype)

    def _take_shape(self, shape: tuple[int, ...] | list[int], item_nbytes: int) -> tuple[int, ...]:
        extents = shape_of(shape)
        if self._closed:
            raise ClosedError("this slot was left")
        nbytes = math.prod(extents) * item_nbytes
        if self._used_nbytes + nbytes > self._nbytes:
            raise CapacityError(
                f"{nbytes} bytes at {self._used_nbytes} are more than the slot has, {self._nbytes}",
                needed=self._used_nbytes + nbytes,
                capacity=self._nbytes,
            )
        self._used_nbytes += nbytes
        return extents

    def close(self) -> None:
        """Leaves the slot."""
        self._closed = True

    def __exit__(self, *_: object) -> None:
        self.close()
