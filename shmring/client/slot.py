"""A slot that a frontend's caller holds: memory of one of the engine's slabs, to write tensors into.

A slot is the caller's from ``client.slot(nbytes)`` until the block is left; meanwhile the caller may submit it, and submit it
again when the engine has released it. Views of it are for use inside the block, like those of a file that is open. If a thread
may go on writing after the block was left (because a cancellation does not stop it), ``drain=True`` keeps the memory until the
last view has died.

A slot in device memory holds torch tensors only. Its caller queues work on the current stream of the GPU, which writes to the
slot. The caller need not wait for that work: submitting and leaving the slot take effect after it.
"""

from __future__ import annotations

import math
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from shmring.core.compiled import BaseSlot
from shmring.core.messages import TensorRef, item_nbytes
from shmring.door import shape_of, shown
from shmring.errors import ClosedError
from shmring.memory.tensors import other_view, torch_dtype_name
from shmring.memory.views import gpu_dtype
from shmring.uncopied import uncopied

__all__ = ["DeviceSlot", "Slot", "numpy_dtype_of"]


def numpy_dtype_of(dtype: DTypeLike) -> np.dtype[Any]:
    """Returns the dtype of a numpy array that can be sent.

    Raises:
        TypeError: there is no such dtype, or it can't be sent.
    """
    try:
        spelled = np.dtype(dtype)
    except (TypeError, ValueError) as error:
        raise TypeError(f"dtype is that of a numpy array, not {shown(dtype)}") from error
    if item_nbytes(spelled.str) is None:
        raise TypeError(f"a numpy array of dtype {spelled} can't be sent; use numbers, bool, text or times")
    return spelled


class Slot(BaseSlot):
    """Memory to write tensors into. Use it as ``async with client.slot(nbytes) as slot:`` (or ``with``, or :meth:`close`).

    Attributes:
        nbytes: how many bytes of tensors it holds, alignment between them included.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        state = "closed" if self._end is None else self._record.state.name
        return f"<Slot of {self.nbytes} bytes, {self._cursor} used, {state}>"

    __reduce_ex__ = uncopied("it is one piece of memory, which one caller leaves; copy what is in it, with clone() of a view")

    @property
    def engine(self) -> str:
        """The name of the engine in whose slab it is.

        Raises:
            ClosedError: it was left.
        """
        if self._end is None:
            raise ClosedError("this slot was left")
        session: Any = self._end.shell
        name: str = session.engine_name
        return name

    def _other_tensor(self, shape: tuple[int, ...] | list[int], dtype: torch.dtype) -> torch.Tensor:
        """For :meth:`tensor`: makes an uncommon tensor, or raises an error that says why it can't be made."""
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype is a torch.dtype, not {shown(dtype)}")
        name = torch_dtype_name(dtype)
        view = self._view(shape, name, dtype.itemsize)
        assert isinstance(view, torch.Tensor)
        return view

    def array(self, shape: tuple[int, ...] | list[int], dtype: DTypeLike) -> NDArray[Any]:
        """Returns an uninitialised, writable numpy array in the slot; otherwise like :meth:`tensor`.

        Raises:
            TypeError: also if the slot is in device memory, which numpy can't use.
        """
        spelled = numpy_dtype_of(dtype)
        view = self._view(shape, spelled.str, spelled.itemsize)
        assert isinstance(view, np.ndarray)
        return view

    def _view(self, shape: tuple[int, ...] | list[int], dtype: str, itemsize: int) -> torch.Tensor | NDArray[Any]:
        shape = shape_of(shape)  # runs code of the caller, which may leave the slot
        if self._end is None:
            raise ClosedError("this slot was left; views of it are made inside its block")
        self._end.shell.check_alive()
        nbytes = math.prod(shape) * itemsize
        return self._make(TensorRef(1, self._take_bytes(shape, dtype, nbytes), nbytes, dtype, shape))

    def _make(self, ref: TensorRef) -> torch.Tensor | NDArray[Any]:
        return other_view(ref, self._memory() if ref.nbytes else None, writable=True)

    async def __aenter__(self) -> Slot:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class DeviceSlot(Slot):
    """A slot in device memory. Only :meth:`Slot.tensor` works there."""

    __slots__ = ()

    def array(self, shape: tuple[int, ...] | list[int], dtype: DTypeLike) -> NDArray[Any]:
        """Raises :class:`TypeError`."""
        raise TypeError("numpy has no arrays in device memory: use tensor(), or a slot with device='cpu'")

    def _make(self, ref: TensorRef) -> torch.Tensor | NDArray[Any]:
        known = gpu_dtype(ref.dtype)
        if known is None:
            raise TypeError(f"{ref.dtype} tensors can't be in device memory")
        code, bits, dtype = known
        made: torch.Tensor = self._view_at(ref.offset if ref.nbytes else 0, ref.shape, code, bits)
        return made if dtype is None else made.view(dtype)
