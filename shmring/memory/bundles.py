"""Payloads that travel without a slab: encoded, with the memory of their tensors beside.

Theory of operation: a :class:`Bundle` is what a submission would be, without slots: the same encoding, and the bytes of each
tensor where they already lie. Making one copies nothing that is contiguous host memory, and opening one makes views. So who
carries it decides how often it is copied. The views keep the memory that they show.

It is pickled with its memory out of band (protocol 5). A carrier that stores such buffers apart, such as Ray's object store,
moves them without a copy in between.

Invariant: ``offsets`` grow, and each tensor with bytes lies inside the buffer with the largest offset not above its own.
"""

from __future__ import annotations

import bisect
import functools
import pickle
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec.msgpack import Ext
from numpy.typing import NDArray

from shmring.core.compiled import Packed, Packer, Part, check_payload, tensor_of
from shmring.core.messages import TENSOR_EXTENSION, TORCH_ITEM_NBYTES, TensorRef, align
from shmring.errors import RemoteProtocolError
from shmring.memory.tensors import convert, make_packer, other_view
from shmring.memory.views import TORCH_DTYPES

__all__ = ["Bundle", "bounds_of", "bundle", "check_bundle", "copied_bundle"]

_MOST = (1 << 63) - 1  # bytes in a record: here, nothing has to fit one


class Bundle:
    """See above.

    Attributes:
        payload: msgpack, with extensions for the tensors.
        offsets: where each buffer begins, as the extensions count.
        buffers: of the tensors; objects with the buffer protocol.
        nbytes: of all buffers.
    """

    __slots__ = ("buffers", "nbytes", "offsets", "payload")

    def __init__(self, payload: bytes, offsets: tuple[int, ...], *buffers: Any) -> None:
        self.payload = payload
        self.offsets = offsets
        self.buffers = buffers
        self.nbytes = sum(memoryview(buffer).nbytes for buffer in buffers)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        buffers = map(pickle.PickleBuffer, self.buffers) if protocol >= 5 else map(bytes, self.buffers)
        return Bundle, (self.payload, self.offsets, *buffers)

    def open(self, payload_type: Any = Any, move: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Any:
        """Decodes the payload.

        Args:
            payload_type: a msgspec type to decode into; ``Any`` gives plain objects.
            move: called with each tensor, and with each array as a tensor; what it returns is put in that place. None: tensors
                and arrays are views of the buffers.

        Raises:
            RemoteProtocolError: it is not what :func:`bundle` makes.
            msgspec.ValidationError: it is not of ``payload_type``.
        """

        def extension(code: int, data: memoryview) -> object:
            if code != TENSOR_EXTENSION:
                return Ext(code, bytes(data))
            view = self._view(tensor_of(bytes(data)))
            if move is None:
                return view
            return move(view if isinstance(view, torch.Tensor) else torch.from_numpy(view.copy()))

        try:
            return msgspec.msgpack.Decoder(payload_type, ext_hook=extension, dec_hook=convert).decode(self.payload)
        except msgspec.ValidationError:
            raise
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise RemoteProtocolError(f"a payload is not msgpack: {error}") from error

    def laid_out(self) -> tuple[int, list[Any]]:
        """Returns how many bytes of one piece of memory its tensors take, and these bytes, as buffers that follow each other.

        Who has received them opens ``Bundle(payload, (0,), memory)``.
        """
        parts: list[Any] = []
        end = 0
        for offset, buffer in zip(self.offsets, self.buffers, strict=True):
            if offset > end:
                parts.append(bytes(offset - end))
            parts.append(buffer)
            end = offset + memoryview(buffer).nbytes
        return end, parts

    def _view(self, ref: TensorRef) -> torch.Tensor | NDArray[Any]:
        if not ref.nbytes:
            return other_view(ref, None, False)
        place = bisect.bisect_right(self.offsets, ref.offset) - 1
        if place < 0 or place >= len(self.buffers):
            raise RemoteProtocolError(f"a tensor at {ref.offset} lies in no buffer")
        memory = _Memory(self.buffers[place])
        start = ref.offset - self.offsets[place]
        if start + ref.nbytes > memory.nbytes:
            raise RemoteProtocolError(f"a tensor at {ref.offset} exceeds its buffer of {memory.nbytes} bytes")
        array = np.asarray(memory)[start : start + ref.nbytes]
        try:
            if ref.dtype in TORCH_ITEM_NBYTES:
                return torch.from_numpy(array).view(TORCH_DTYPES[ref.dtype]).view(ref.shape)
            there = TensorRef(0, 0, ref.nbytes, ref.dtype, ref.shape)
            return other_view(there, array.data, False)  # type: ignore[arg-type]  # any buffer will do
        except (TypeError, ValueError, KeyError, RuntimeError) as error:
            raise RemoteProtocolError(f"a {ref.dtype} tensor of shape {ref.shape} can't be viewed here: {error}") from error


class _Memory:
    """A buffer for numpy, which takes it for writable: torch has no read-only tensors, and warns of such an array."""

    def __init__(self, buffer: Any) -> None:
        shown = np.frombuffer(buffer, np.uint8)
        self._shown = shown
        self.nbytes = shown.nbytes
        self.__array_interface__ = {
            "version": 3,
            "shape": (shown.nbytes,),
            "typestr": "|u1",
            "data": (shown.__array_interface__["data"][0], False),
        }


@functools.cache
def _packer(max_tensors: int, max_payload_nbytes: int, max_values: int) -> Packer:
    return make_packer(max_tensors, max_payload_nbytes, max_values)


def bounds_of(limits: Any) -> dict[str, int]:
    """Returns the bounds of :func:`bundle` and :func:`check_bundle`, of an object that has them as attributes."""
    return {name: getattr(limits, name) for name in ("max_tensors", "max_payload_nbytes", "max_values")}


def bundle(payload: object, *, max_tensors: int, max_payload_nbytes: int, max_values: int) -> Bundle:
    """Encodes a payload. Copies only tensors that are not contiguous host memory; of the others, the bundle shows the memory.

    Args:
        payload: any msgspec-encodable object with tensors and arrays at any depth.
        max_tensors, max_payload_nbytes, max_values: what who opens it accepts.

    Raises:
        TypeError: something in it can't be sent; the message names its path.
        CapacityError: it breaks one of the bounds.
    """
    packed = _packer(max_tensors, max_payload_nbytes, max_values).pack(payload, _MOST, _MOST)
    parts = [part for part in packed.parts if part.nbytes]
    return Bundle(packed.payload, tuple(part.offset for part in parts), *map(_bytes_of, parts))


def check_bundle(payload: bytes, nbytes: int, *, max_tensors: int, max_payload_nbytes: int, max_values: int) -> None:
    """Checks the payload of a bundle that a peer sends, before memory is taken for its tensors.

    Args:
        payload: of the bundle.
        nbytes: of that memory: all of it has to be its tensors', laid out as :meth:`Bundle.laid_out` does it.
        max_tensors, max_payload_nbytes, max_values: what is accepted here.

    Raises:
        RemoteProtocolError: it breaks a bound, is no payload, or its tensors take another number of bytes.
    """
    if len(payload) > max_payload_nbytes:
        raise RemoteProtocolError(f"a payload of {len(payload)} bytes exceeds max_payload_nbytes ({max_payload_nbytes})")
    check_payload(payload, max_tensors, max_values)
    end = 0

    def extension(code: int, data: memoryview) -> object:
        nonlocal end
        if code == TENSOR_EXTENSION:
            ref = tensor_of(bytes(data))
            if ref.nbytes and (ref.region or ref.offset != align(ref.offset)):
                raise RemoteProtocolError(f"a tensor of a bundle is at {ref.offset} of region {ref.region}")
            end = max(end, ref.offset + ref.nbytes if ref.nbytes else 0)
        return None

    try:
        msgspec.msgpack.decode(payload, ext_hook=extension)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, TypeError) as error:  # TypeError: a key without a hash
        raise RemoteProtocolError(f"a payload is not msgpack: {error}") from error
    if end != nbytes:
        raise RemoteProtocolError(f"the tensors of a payload take {end} bytes, and {nbytes} were announced")


def copied_bundle(packed: Packed, content: NDArray[np.uint8] | None) -> Bundle:
    """Returns the bundle of a payload whose tensors were copied to ``content``."""
    return Bundle(packed.payload, ()) if content is None else Bundle(packed.payload, (0,), content)


def _bytes_of(part: Part) -> NDArray[np.uint8]:
    source = part.source
    if isinstance(source, np.ndarray):
        return np.ascontiguousarray(source).reshape(-1).view(np.uint8)
    source = source.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return source.reshape(-1).view(torch.uint8).numpy()  # type: ignore[no-any-return]
