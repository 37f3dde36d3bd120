"""Objects of vLLM on their way to another of its processes: pickled as vLLM does it, with all tensors and arrays apart.

vLLM sends its own classes between its own processes, and pickles them; so does this. But no tensor's bytes go through
pickle: those of a megabyte and more travel as tensors, the others together as one block. The reader gets views of the large
ones, or copies of all.

A parcel that finds no memory can be sent in pieces, and is put together again at the other end (:class:`Pieces`).
"""

from __future__ import annotations

import copyreg
import dataclasses
import io
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["IN_RECORD_NBYTES", "LARGE_NBYTES", "Parcel", "Pieces", "is_first_piece", "pack", "unpack"]

LARGE_NBYTES = 1 << 20  # as in vLLM's own queue; below that, a view saves less than it costs to look after
IN_RECORD_NBYTES = 32 << 10  # of a message's bytes: a record of shmring takes twice that
_ALIGNMENT = 64  # of each tensor in the block of small ones

_FIRST_PIECE_LENGTH = 2  # of the list; other lists are longer

_Buffer = bytes | bytearray | memoryview


@dataclasses.dataclass(frozen=True, slots=True)
class Parcel:
    """An object, taken apart.

    Attributes:
        head: what pickle made of it.
        sizes: bytes of each tensor and array in it, in the order of ``head``.
        small: those below ``LARGE_NBYTES``, one behind the other, each aligned.
        large: the others, as flat bytes: torch tensors for tensors, numpy arrays for arrays.
    """

    head: bytes
    sizes: Sequence[int]
    small: bytes | bytearray
    large: Sequence[Any]

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return len(self.head) + len(self.small) + sum(int(part.nbytes) for part in self.large)

    @property
    def needs_memory(self) -> bool:
        """Whether it is too large for a record."""
        return bool(self.large) or len(self.head) + len(self.small) > IN_RECORD_NBYTES

    def message(self, *, views: bool) -> object:
        """Returns what shmring sends.

        Args:
            views: whether who reads may keep views of the large tensors.
        """
        if not self.sizes:
            return _sent(self.head)
        return [views, _sent(self.head), list(self.sizes), _sent(self.small), list(self.large)]

    def pieces(self, nbytes: int) -> Iterator[Any]:
        """Yields what :class:`Pieces` is made of, and then arrays of no more than so many bytes."""
        yield [list(self.sizes), self.nbytes]
        for part in (self.small, *self.large, self.head):  # tensors begin where their numbers may
            flat = part.numpy() if isinstance(part, torch.Tensor) else np.frombuffer(part, np.uint8)
            for start in range(0, flat.nbytes, nbytes):
                yield flat[start : start + nbytes]


def pack(thing: object) -> Parcel:
    """Takes an object apart. Its large tensors are referred to, not copied."""
    sizes: list[int] = []
    small = bytearray()
    large: list[Any] = []
    tensors: dict[int, torch.Tensor] = {}  # as flat bytes, by the id of what pickle is given for them

    def apart(buffer: pickle.PickleBuffer) -> None:
        raw = buffer.raw()
        sizes.append(raw.nbytes)
        if raw.nbytes >= LARGE_NBYTES:
            tensor = tensors.get(id(buffer))
            large.append(np.frombuffer(raw, np.uint8) if tensor is None else tensor)
        else:
            small.extend(raw)
            small.extend(bytes(-len(small) % _ALIGNMENT))

    kept: list[pickle.PickleBuffer] = []  # their ids are looked at

    def reduce(tensor: torch.Tensor) -> Any:
        flat = _flat_bytes(tensor)
        if flat is None:
            return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
        buffer = pickle.PickleBuffer(flat.numpy().data)
        kept.append(buffer)
        tensors[id(buffer)] = flat
        return _tensor_of, (buffer, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))

    file = io.BytesIO()
    pickler = pickle.Pickler(file, pickle.HIGHEST_PROTOCOL, buffer_callback=apart)
    pickler.dispatch_table = {**copyreg.dispatch_table, torch.Tensor: reduce}
    pickler.dump(thing)
    return Parcel(file.getvalue(), sizes, small, large)


def unpack(message: Any) -> Any:
    """Returns the object of a message that :meth:`Parcel.message` made."""
    if not isinstance(message, list):
        return pickle.loads(message)  # noqa: S301 - vLLM's own processes send each other nothing else
    views, head, sizes, small, large = message
    block = memoryview(bytearray(small))
    parts = iter(large)
    buffers: list[Any] = []
    start = 0
    for nbytes in sizes:
        if nbytes >= LARGE_NBYTES:
            part = next(parts)
            buffers.append(part if views and isinstance(part, torch.Tensor) else _own_copy(part))
        else:
            buffers.append(block[start : start + nbytes])
            start += _padded(nbytes)
    return pickle.loads(head, buffers=buffers)  # noqa: S301 - as above


class Pieces:
    """A parcel that comes in pieces.

    Args:
        first: the first message of :meth:`Parcel.pieces`.
    """

    def __init__(self, first: Sequence[Any]) -> None:
        self._sizes, nbytes = first
        self._memory = memoryview(bytearray(nbytes))
        self._came = 0

    def add(self, piece: Any) -> bool:
        """Takes one; returns whether it was the last."""
        nbytes = memoryview(piece).nbytes
        self._memory[self._came : self._came + nbytes] = piece
        self._came += nbytes
        return self._came == self._memory.nbytes

    def unpack(self) -> Any:
        """Returns the object."""
        small, large = 0, sum(_padded(nbytes) for nbytes in self._sizes if nbytes < LARGE_NBYTES)
        buffers: list[memoryview] = []
        for nbytes in self._sizes:
            if nbytes >= LARGE_NBYTES:
                buffers.append(self._memory[large : large + nbytes])
                large += nbytes
            else:
                buffers.append(self._memory[small : small + nbytes])
                small += _padded(nbytes)
        return pickle.loads(self._memory[large:], buffers=buffers)  # noqa: S301 - as above


def is_first_piece(message: Any) -> bool:
    """Whether a message is the first of some that belong together."""
    return isinstance(message, list) and len(message) == _FIRST_PIECE_LENGTH


def _sent(content: bytes | bytearray) -> object:
    """Bytes as they are sent: long ones as an array, which who reads need not copy."""
    return bytes(content) if len(content) <= IN_RECORD_NBYTES // 2 else np.frombuffer(content, np.uint8)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns a tensor's bytes, where they lie if it is contiguous; None: it is more than its bytes."""
    if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.requires_grad or tensor.is_quantized:
        return None
    if tensor.is_conj() or tensor.is_neg() or tensor.is_nested:
        return None
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _tensor_of(buffer: torch.Tensor | _Buffer, shape: tuple[int, ...], dtype_name: str) -> torch.Tensor:
    """For pickle: the tensor again."""
    dtype = getattr(torch, dtype_name)
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    if not isinstance(buffer, torch.Tensor):
        if memoryview(buffer).nbytes and _address_of(buffer) % dtype.itemsize:
            buffer = bytearray(buffer)  # in pieces, a large one begins where the one before it ends
        buffer = torch.frombuffer(buffer, dtype=torch.uint8)
    return buffer.view(dtype).view(shape)


def _address_of(buffer: _Buffer) -> int:
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])


def _own_copy(part: Any) -> Any:
    return part.clone() if isinstance(part, torch.Tensor) else memoryview(bytearray(part))
