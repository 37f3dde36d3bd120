"""A slot in the hands of a frontend's caller: memory of one of the engine's slabs to write a tensor into, in place.

A slot is the caller's from ``client.slot(nbytes)`` until the block is left; in between it may be submitted, and submitted
again once the engine has released it. Views of it are for use inside the block, like those of a file that is open. Where
something may go on writing after the block was left (a thread that a cancellation leaves behind), ``drain=True`` keeps the
memory until the last view has died.

A slot in device memory holds torch tensors only. It is written by what its caller queues on the current stream of the GPU, and
nobody has to wait for that: submitting it and leaving it come behind what is queued by then.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from shmring.core.client_book import ClientSlotRecord
from shmring.core.messages import SLOT_HEADER_NBYTES, TensorRef, align, item_nbytes
from shmring.core.views import Region
from shmring.errors import CapacityError, ClosedError
from shmring.memory.payload import torch_dtype_name
from shmring.memory.views import device_view, tensor_view

if TYPE_CHECKING:
    from shmring.client.session import Session

__all__ = ["AcquiringSlot", "Slot"]


class Slot:
    """Memory to write tensors into. Use it as ``async with client.slot(nbytes) as slot:`` (or ``with``, or :meth:`close`).

    Attributes:
        nbytes: how many bytes of tensors it holds, alignment between them included.
    """

    def __init__(self, session: Session, record: ClientSlotRecord, memory: Region | torch.Tensor, drain: bool) -> None:
        self._session: Session | None = session
        self._drain = drain
        self._record = record
        self._cursor = 0
        self._memory: Region | torch.Tensor | None = memory
        self.nbytes = record.nbytes

    def __repr__(self) -> str:
        state = "closed" if self._session is None else self._record.state.name
        return f"<Slot of {self.nbytes} bytes, {self._cursor} used, {state}>"

    def tensor(self, shape: tuple[int, ...] | list[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns an uninitialised, writable tensor in the slot, behind those it has handed out before.

        Args:
            shape: its shape.
            dtype: a torch dtype that can travel.

        Raises:
            CapacityError: the slot has no room left for it; :func:`shmring.nbytes_for` says how large a slot must be.
            ClosedError: the slot was left.
            TypeError: the dtype can't travel.
        """
        view = self._view(tuple(shape), torch_dtype_name(dtype), dtype.itemsize)
        assert isinstance(view, torch.Tensor)
        return view

    def array(self, shape: tuple[int, ...] | list[int], dtype: DTypeLike) -> NDArray[Any]:
        """Returns an uninitialised, writable numpy array in the slot; otherwise like :meth:`tensor`.

        Raises:
            TypeError: also of a slot in device memory, where no array can be.
        """
        if isinstance(self._memory, torch.Tensor):
            raise TypeError("numpy has no arrays in device memory: use tensor(), or a slot with device='cpu'")
        spelled = np.dtype(dtype)
        size = item_nbytes(spelled.str)
        if size is None:
            raise TypeError(f"a numpy array of dtype {spelled} can't be sent; use numbers, bool, text or times")
        view = self._view(tuple(shape), spelled.str, size)
        assert isinstance(view, np.ndarray)
        return view

    def _view(self, shape: tuple[int, ...], dtype: str, itemsize: int) -> torch.Tensor | NDArray[Any]:
        if self._session is None or self._memory is None:
            raise ClosedError("this slot was left; views of it are made inside its block")
        self._session.check_alive()
        if any(extent < 0 for extent in shape):
            raise ValueError(f"a shape has no negative extents: {shape}")
        offset = align(self._cursor)
        nbytes = math.prod(shape) * itemsize
        if offset + nbytes > self.nbytes:
            raise CapacityError(
                f"a {dtype} tensor of shape {shape} needs {nbytes} bytes at {offset}, the slot has {self.nbytes}",
                needed=offset + nbytes,
                capacity=self.nbytes,
            )
        self._cursor = offset + nbytes
        ref = TensorRef(1, offset, nbytes, dtype, shape)
        if isinstance(self._memory, torch.Tensor):
            return device_view(ref, self._memory)
        return tensor_view(ref, self._memory, writable=True)

    def close(self) -> None:
        """Leaves the slot: it is free again when the engine has released it, and drained if that was asked for.

        Views of it must not be used any more. Twice is once.
        """
        if self._session is not None:
            session, self._session, self._memory = self._session, None, None
            session.leave_slot(self._record, drain=self._drain)

    def __enter__(self) -> Slot:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    async def __aenter__(self) -> Slot:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class AcquiringSlot:
    """What ``client.slot(nbytes)`` returns: await it, or use it with ``async with``. Waits for space in line."""

    def __init__(self, acquire: Callable[[], Awaitable[Slot]]) -> None:
        self._acquire = acquire
        self._slot: Slot | None = None

    def __await__(self) -> Generator[Any, None, Slot]:
        return self._acquire().__await__()

    async def __aenter__(self) -> Slot:
        self._slot = await self._acquire()
        return self._slot

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._slot is not None
        self._slot.close()


def content_start(record: ClientSlotRecord) -> int:
    """Where a slot's content starts in the slab, in bytes."""
    return record.offset + SLOT_HEADER_NBYTES
