"""Memory to write tensors into, of a client whose engine is on another host."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from shmring.client.slot import Slot, numpy_dtype_of
from shmring.core.messages import TENSOR_ALIGNMENT
from shmring.door import shape_of, shown
from shmring.errors import CapacityError, ClosedError
from shmring.memory.tensors import torch_dtype_name

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
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype is a torch.dtype, not {shown(dtype)}")
        name = torch_dtype_name(dtype)
        return torch.empty(self._take_shape(shape, name, dtype.itemsize), dtype=dtype)

    def array(self, shape: tuple[int, ...] | list[int], dtype: DTypeLike) -> NDArray[Any]:
        """Returns a new, uninitialised numpy array, whose bytes count as the slot's."""
        spelled = numpy_dtype_of(dtype)
        return np.empty(self._take_shape(shape, spelled.str, spelled.itemsize), spelled)

    def _take_shape(self, shape: tuple[int, ...] | list[int], dtype: str, itemsize: int) -> tuple[int, ...]:
        extents = shape_of(shape)
        if self._closed:
            raise ClosedError("this slot was left")
        nbytes = math.prod(extents) * itemsize
        offset = -(-self._used_nbytes // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT  # as in a slab: what fits here fits there
        if offset + nbytes > self._nbytes:
            raise CapacityError(
                f"a {dtype} tensor of shape {extents} needs {nbytes} bytes at {offset}, the slot has {self._nbytes}",
                needed=offset + nbytes,
                capacity=self._nbytes,
            )
        self._used_nbytes = offset + nbytes
        return extents

    def close(self) -> None:
        """Leaves the slot."""
        self._closed = True

    def __exit__(self, *_: object) -> None:
        self.close()
