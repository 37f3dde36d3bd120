"""Memory to write tensors into, of a client whose engine is on another node."""

from __future__ import annotations

import math
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from shmring.door import shape_of
from shmring.errors import CapacityError, ClosedError

__all__ = ["FarSlot"]


class FarSlot:
    """Memory of this process to write tensors into, as :class:`shmring.Slot` is memory of the engine's slab. Ray copies
    what was written there once, to its object store.

    Attributes:
        engine: the name of the engine that was chosen for it. What is written here can be sent to any.
        nbytes: how many bytes of tensors it holds.
    """

    def __init__(self, engine: str, nbytes: int) -> None:
        self.engine = engine
        self.nbytes = nbytes
        self._used_nbytes = 0
        self._closed = False

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Returns a new, uninitialised tensor, whose bytes count as the slot's: it has no memory of its own."""
        shape = self._take(shape, dtype.itemsize)
        return torch.empty(shape, dtype=dtype)

    def array(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Returns a new, uninitialised numpy array, whose bytes count as the slot's."""
        shape = self._take(shape, np.dtype(dtype).itemsize)
        return np.empty(shape, dtype)

    def _take(self, shape: tuple[int, ...], item_nbytes: int) -> tuple[int, ...]:
        shape = shape_of(shape)
        if self._closed:
            raise ClosedError("this slot was left")
        nbytes = math.prod(shape) * item_nbytes
        if self._used_nbytes + nbytes > self.nbytes:
            raise CapacityError(
                f"{nbytes} bytes at {self._used_nbytes} are more than the slot has, {self.nbytes}",
                needed=self._used_nbytes + nbytes,
                capacity=self.nbytes,
            )
        self._used_nbytes += nbytes
        return shape

    def close(self) -> None:
        """Leaves the slot."""
        self._closed = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
