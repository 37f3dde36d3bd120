"""One frame: what a stage passes on, as bytes with its tensors in one piece, so that each byte is copied once.

A frame begins with a head, and then has the tensors and arrays, each at a multiple of 64 bytes behind the head::

    4 bytes   the length of the head, a little-endian u32
    4 bytes   the magic number
    the head  msgpack; in place of a tensor, an ext value of (dtype, shape, place)
    ...       the tensors

vLLM-Omni's own serializer decides what the rest looks like on the other side: a struct comes as a dict, a tuple as a list, a
request's output as what it was. So it is asked for what is no tensor, on both sides.

The frame is one tensor of bytes to the store: a payload may have thousands of tensors, and tens of thousands of token ids,
and what a store keeps may have 4 KiB beside its tensors.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from shmring.memory.copying import copy_past_cache

__all__ = ["Frame", "pack", "unpack"]

_PREFIX = struct.Struct("<II")
_MAGIC = 0x314D4F53  # "SOM1": another layout has another one
_ALIGNMENT = 64
_TENSOR, _ARRAY, _BYTES = 1, 2, 3  # codes of ext values
_LONG_NBYTES = 256 << 10  # what is longer goes past the cache: a store's memory was not used for long
_NOTHING: NDArray[np.uint8] = np.empty(0, np.uint8)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """A frame that is to be written.

    Attributes:
        nbytes: of it.
    """

    nbytes: int
    _head: bytes
    _parts: list[tuple[int, torch.Tensor | NDArray[np.uint8]]]  # by their places

    @property
    def is_on_gpu(self) -> bool:
        """Whether writing it waits for a GPU."""
        return any(not isinstance(part, np.ndarray) and part.device.type != "cpu" for _, part in self._parts)

    def write_to(self, memory: torch.Tensor) -> None:
        """Writes it: the one copy, of tensors on a GPU as well.

        Args:
            memory: ``nbytes`` bytes, at a multiple of 64.
        """
        prefix = _PREFIX.pack(len(self._head), _MAGIC)
        start = _aligned(len(prefix) + len(self._head))
        array: NDArray[np.uint8] = memory.numpy()
        array[: len(prefix) + len(self._head)] = np.frombuffer(prefix + self._head, np.uint8)
        for place, part in self._parts:
            piece = slice(start + place, start + place + part.nbytes)
            if isinstance(part, np.ndarray):
                _copy(array[piece], part)
            elif part.device.type == "cpu" and part.is_contiguous():
                _copy(array[piece], part.reshape(-1).view(torch.uint8).numpy())
            else:
                memory[piece].view(part.dtype).view(part.shape).copy_(part)


def _copy(into: NDArray[np.uint8], part: NDArray[np.uint8]) -> None:
    """Copies bytes, without the interpreter's lock."""
    if part.nbytes < _LONG_NBYTES:
        into[:] = part
    else:
        copy_past_cache(into.ctypes.data, part.ctypes.data, part.nbytes)


def pack(data: Any, encode_other: Callable[[Any], Any]) -> Frame:
    """Makes a frame, whose tensors must not be changed before it is written.

    Args:
        data: what a stage passes on.
        encode_other: returns msgspec-encodable objects for those of other types, or raises ``TypeError``.

    Raises:
        TypeError: something in it can't be sent.
    """
    parts: list[tuple[int, torch.Tensor | NDArray[np.uint8]]] = []
    end = 0

    def placed(code: int, dtype: str, shape: tuple[int, ...], part: torch.Tensor | NDArray[np.uint8]) -> msgspec.msgpack.Ext:
        nonlocal end
        place, end = end, _aligned(end + part.nbytes)
        if part.nbytes:
            parts.append((place, part))
        return msgspec.msgpack.Ext(code, msgspec.msgpack.encode((dtype, shape, place)))

    def encode(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided or value.is_quantized:
                raise TypeError(f"a tensor of layout {value.layout} and dtype {value.dtype} can't be passed to another stage")
            tensor = value.detach().resolve_conj().resolve_neg()
            return placed(_TENSOR, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor)
        if isinstance(value, np.ndarray) and value.dtype.kind not in "OV":
            flat = np.ascontiguousarray(value).reshape(-1)
            return placed(_ARRAY, value.dtype.str, value.shape, flat.view(np.uint8) if value.nbytes else _NOTHING)
        return encode_other(value)

    if isinstance(data, bytes | bytearray | memoryview):  # a KV cache: these are many, and are copied once as well
        flat = np.frombuffer(data, np.uint8)
        data = placed(_BYTES, "", flat.shape, flat)
    head = msgspec.msgpack.encode(data, enc_hook=encode)
    return Frame(_aligned(_PREFIX.size + len(head)) + end, head, parts)


def unpack(memory: torch.Tensor, decode_other: Callable[[Any], Any]) -> Any:
    """Returns what a frame has. Its tensors and arrays are views of the memory, and keep it.

    Args:
        memory: the frame.
        decode_other: makes of decoded values what the other stage had; called once, for all of them.

    Raises:
        ValueError: it is no frame.
    """
    array: NDArray[np.uint8] = memory.numpy()
    if array.nbytes < _PREFIX.size:
        raise ValueError(f"{array.nbytes} bytes are no frame")
    head_nbytes, magic = _PREFIX.unpack(array.data[: _PREFIX.size])
    if magic != _MAGIC or _PREFIX.size + head_nbytes > array.nbytes:
        raise ValueError("this is no frame of this version of the connector; all stages need the same one")
    start = _aligned(_PREFIX.size + head_nbytes)

    def decode(code: int, data: memoryview) -> Any:
        name, shape, place = msgspec.msgpack.decode(data, type=tuple[str, tuple[int, ...], int])
        dtype = _torch_dtype(name) if code == _TENSOR else np.dtype(name or np.uint8)
        nbytes = math.prod(shape) * dtype.itemsize
        if min(shape, default=0) < 0 or place < 0 or (nbytes and start + place + nbytes > array.nbytes):
            raise ValueError(f"a tensor of {nbytes} bytes does not lie in its frame")
        piece = array[start + place : start + place + nbytes]
        if code == _BYTES:
            return piece.tobytes()
        if isinstance(dtype, torch.dtype):
            return torch.from_numpy(piece).view(dtype).view(shape) if nbytes else torch.empty(shape, dtype=dtype)
        view = piece.view(dtype).reshape(shape)
        view.flags.writeable = False  # as vLLM-Omni's own decoder has it
        return view

    try:
        decoded = msgspec.msgpack.decode(array.data[_PREFIX.size : _PREFIX.size + head_nbytes], ext_hook=decode)
    except msgspec.MsgspecError as error:
        raise ValueError(f"the head of a frame can't be read: {error}") from error
    return decode_other(decoded)


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return dtype
