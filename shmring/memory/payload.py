"""Payloads: any msgspec-encodable object with torch tensors and numpy arrays at any depth, their bytes out of band.

Theory of operation: encoding replaces each tensor by a msgpack extension that holds its index, and lists the tensors;
nothing is copied yet. :class:`Packed` then knows how many bytes it needs in a slot, and once it is given a place it
copies each tensor there (only the bytes a view shows, never its storage) and describes it. Tensors that already lie in a
slot of the caller are described where they are. Decoding is the reverse, and builds views; nothing is executed and no
class is looked up by name, so a hostile payload can at worst be refused.

Several tensors share one slot, each on a cache line of its own. A payload that is too large for a message follows them there,
with their descriptors. The idea of msgpack with tensors out of band, and of hooks that collect them, is vLLM's
(``v1/serial_utils.py``).
"""

from __future__ import annotations

import ctypes
import dataclasses
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec.msgpack import Ext
from numpy.typing import NDArray

from shmring.core.messages import (
    TENSOR_EXTENSION,
    BodyRef,
    Content,
    SlotRef,
    TensorRef,
    align,
    encode_body,
    item_nbytes,
)
from shmring.core.views import Region, borrowed, copied
from shmring.errors import CapacityError, RemoteProtocolError
from shmring.memory.streaming import Copy, copier_for
from shmring.memory.views import TORCH_DTYPES, Place, tensor_view

__all__ = ["Packed", "Packer", "PayloadDecoder", "nbytes_for", "torch_dtype_name"]

_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

_TENSOR_NBYTES = 64  # at most, of a tensor's descriptor without its shape
_EXTENT_NBYTES = 9  # at most, of each of its dimensions
_SLOT_NBYTES = 48  # at most, of a slot's descriptor
_BODY_NBYTES = 16  # at most, of what is around both in a slot
_MESSAGE_NBYTES = 1536  # at most, of the rest of a message: its name (256 characters), numbers, the msgpack around them

# A tensor of one of our dtypes, with less than this and more than nothing in it, has no shape that a peer could refuse.
_PLAINLY_SOUND_NBYTES = 1 << 40
_PLAINLY_SOUND_DIMENSIONS = 8

#: Finds the region (1-based) and the offset in it of bytes that lie in a slot of the caller.
Locate = Callable[[int, int], "tuple[int, int] | None"]


def torch_dtype_name(dtype: torch.dtype) -> str:
    """Returns the wire's name of a torch dtype; ``TypeError`` if it can't travel."""
    name = _DTYPE_NAMES.get(dtype)
    if name is None:
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"a dtype is torch's own, such as torch.float32, not {dtype!r}")
        raise TypeError(f"{dtype} tensors can't be sent")
    return name


def nbytes_for(*tensors: tuple[tuple[int, ...], torch.dtype]) -> int:
    """Returns the size of a slot for tensors of these shapes and dtypes, each starting on a cache line.

    Args:
        tensors: ``(shape, dtype)`` of each tensor, in the order in which ``slot.tensor`` will be called.
    """
    nbytes = 0
    for shape, dtype in tensors:
        nbytes = align(nbytes) + int(np.prod(shape, dtype=object)) * dtype.itemsize
    return nbytes


@dataclasses.dataclass(slots=True, eq=False)
class _Part:
    """A tensor of a payload that is being sent."""

    source: torch.Tensor | NDArray[Any]
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    region: int = 0
    offset: int = 0
    in_place: bool = False

    def ref(self) -> TensorRef:
        return TensorRef(self.region, self.offset, self.nbytes, self.dtype, self.shape)

    def address(self) -> int | None:
        """Where its bytes are, if they are contiguous host memory that can be taken as they are."""
        if isinstance(self.source, np.ndarray):
            return int(self.source.ctypes.data) if self.source.flags.c_contiguous else None
        source = self.source
        plain = source.is_cpu and source.is_contiguous() and not source.is_conj() and not source.is_neg()
        return source.data_ptr() if plain else None

    def address_on_device(self) -> int | None:
        """Where its bytes are, if they are contiguous memory of a GPU: nothing to read from, but maybe in a slot there."""
        source = self.source
        if not isinstance(source, torch.Tensor) or not source.is_cuda:
            return None
        return source.data_ptr() if source.is_contiguous() and not source.is_conj() and not source.is_neg() else None

    def copy_to(self, anchor: NDArray[np.uint8], anchor_address: int, copy: Copy) -> None:
        """Copies its bytes to ``offset`` in a region. Releases the interpreter lock for all but the smallest."""
        if not self.nbytes:
            return
        address = self.address()
        if address is not None:
            copy(anchor_address + self.offset, address, self.nbytes)
            return
        target = tensor_view(self.ref(), borrowed(anchor_address, anchor.nbytes), writable=True)
        if isinstance(self.source, np.ndarray):
            assert isinstance(target, np.ndarray)
            np.copyto(target, self.source)
        else:
            assert isinstance(target, torch.Tensor)
            target.copy_(self.source.detach())


@dataclasses.dataclass(slots=True, eq=False)
class Packed:
    """An encoded payload whose tensors are not yet where they will be sent from.

    Attributes:
        payload: msgpack, with extensions for the tensors.
        copy_nbytes: what must be copied needs in one region: tensors, and the payload if it is too large for a message.
        copied, in_place: how many tensors are copied, and how many are described where they are.
        copied_nbytes, in_place_nbytes: bytes of both, what lies between them not included.
        needs_slot: whether that region is a slot, and not the message. This and what follows is decided by :meth:`settle`.
        body: payload and descriptors, if they go there as well, behind the tensors, at ``body_offset``.
    """

    payload: bytes
    parts: list[_Part]
    copy_nbytes: int
    copied: int
    copied_nbytes: int
    in_place: int
    in_place_nbytes: int
    needs_slot: bool = False
    body: bytes = b""
    body_offset: int = 0

    def settle(self, record_nbytes: int, inline_nbytes: int, max_payload_nbytes: int, slots: int = 0) -> None:
        """Decides what travels in the message, and what in a slot of its own (``needs_slot``, and ``copy_nbytes`` of it).

        Args:
            record_nbytes: the largest message.
            inline_nbytes: up to which the tensors that are copied may be in the message.
            max_payload_nbytes: of all that is no tensor.
            slots: in which tensors lie in place.

        Raises:
            CapacityError: it can't be sent.
        """
        nbytes = len(self.payload) + _BODY_NBYTES
        for part in self.parts:
            nbytes += _TENSOR_NBYTES + _EXTENT_NBYTES * len(part.shape)
        if nbytes > max_payload_nbytes:
            raise CapacityError(
                f"a payload of about {nbytes} bytes, tensors apart, exceeds max_payload_nbytes ({max_payload_nbytes}); send "
                "bulk data as tensors (numpy.frombuffer makes one of bytes)",
                needed=nbytes,
                capacity=max_payload_nbytes,
            )
        self.needs_slot = self.copy_nbytes > inline_nbytes
        fixed_nbytes = _MESSAGE_NBYTES + _SLOT_NBYTES * (slots + 1)
        if nbytes + fixed_nbytes + (0 if self.needs_slot else self.copy_nbytes) <= record_nbytes:
            return
        if fixed_nbytes > record_nbytes:
            raise CapacityError(
                f"a message that names {slots} slots exceeds {record_nbytes} bytes; put several tensors into one",
                needed=fixed_nbytes,
                capacity=record_nbytes,
            )
        for part in self.parts:
            if not part.in_place and part.nbytes:
                part.region = slots + 1
        self.body = encode_body(self.payload, tuple([part.ref() for part in self.parts]))
        self.body_offset = align(self.copy_nbytes)
        self.copy_nbytes = self.body_offset + len(self.body)
        self.needs_slot = True

    def inline(self) -> bytes:
        """Copies the tensors that are to travel in the message itself."""
        if not self.copy_nbytes:
            return b""
        if self.copied == 1:  # as most often: one copy instead of two
            [part] = [part for part in self.parts if part.nbytes and not part.in_place]
            if (address := part.address()) is not None:
                return ctypes.string_at(address, part.nbytes)
        inline = np.empty(self.copy_nbytes, np.uint8)
        self.copy_into(inline, int(inline.ctypes.data))
        return inline.tobytes()

    def content_with(self, inline: bytes, slots: tuple[SlotRef, ...] = ()) -> Content:
        """Describes the tensors that :meth:`inline` has copied; ``slots`` are those in which others lie in place."""
        return Content(self.payload, tuple([part.ref() for part in self.parts]), inline, slots)

    def content_in(self, slots: tuple[SlotRef, ...]) -> Content:
        """Describes the tensors after :meth:`copy_into` has filled the last of ``slots``."""
        if self.body:
            return Content(b"", (), b"", slots, b"", BodyRef(self.body_offset, len(self.body)))
        for part in self.parts:
            if not part.in_place and part.nbytes:
                part.region = len(slots)
        return self.content_with(b"", slots)

    def copy_into(self, anchor: NDArray[np.uint8], address: int) -> None:
        """Copies all that is not in place to its offsets in a region; may run on any thread.

        Args:
            anchor: the region.
            address: where it is; its owner knows, and numpy takes a microsecond to say.
        """
        copy = copier_for(self.copy_nbytes)
        for part in self.parts:
            if not part.in_place:
                part.copy_to(anchor, address, copy)
        if self.body:
            ctypes.memmove(address + self.body_offset, self.body, len(self.body))


class Packer:
    """Encodes payloads.

    Args:
        max_tensors: the most tensors a payload may hold.
    """

    def __init__(self, max_tensors: int) -> None:
        self._max_tensors = max_tensors
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode_foreign)
        self._parts: list[_Part] = []

    def pack(self, payload: object, locate: Locate | None = None) -> Packed:
        """Encodes a payload. Synchronous, copies no tensor, and changes nothing.

        Args:
            payload: any msgspec-encodable object holding tensors and arrays at any depth.
            locate: finds tensors that lie in slots of the caller.

        Raises:
            TypeError: something in it can't be sent; the message names its path.
            CapacityError: it holds more tensors than the peer accepts.
        """
        try:
            encoded = self._encoder.encode(payload)
        except RecursionError:
            raise TypeError("payload is nested too deeply, or contains itself") from None
        except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
            path, reason = self._find_culprit(payload, error)
            raise TypeError(f"{path} can't be sent: {reason}") from None
        finally:
            parts, self._parts = self._parts, []  # also of what failed: they keep its tensors alive
        if len(parts) > self._max_tensors:
            raise CapacityError(
                f"the payload holds {len(parts)} tensors, the engine takes {self._max_tensors} (max_tensors)",
                needed=len(parts),
                capacity=self._max_tensors,
            )
        return _lay_out(encoded, parts, locate)

    def _encode_foreign(self, value: object) -> object:
        if isinstance(value, torch.Tensor):
            part = _tensor_part(value)
        elif isinstance(value, np.ndarray):
            part = _array_part(value)
        elif isinstance(value, np.generic) and not isinstance(value.item(), np.generic):
            return value.item()
        else:
            raise TypeError(f"{_type_name(value)} is neither a tensor nor anything that msgspec encodes")
        if not 0 < part.nbytes < _PLAINLY_SOUND_NBYTES or len(part.shape) > _PLAINLY_SOUND_DIMENSIONS:
            try:
                part.ref().check(part.nbytes)  # what the peer would refuse, and disconnect us for
            except RemoteProtocolError as error:
                raise TypeError(str(error)) from None
        self._parts.append(part)
        return Ext(TENSOR_EXTENSION, (len(self._parts) - 1).to_bytes(4, "little"))

    def _find_culprit(self, value: object, error: Exception, path: str = "payload") -> tuple[str, str]:
        """Descends to the innermost value that can't be encoded; only ever runs after a failure."""
        for step, child in _children(value):
            try:
                self._encoder.encode(child)
            except RecursionError:
                return path + step, "it is nested too deeply, or contains itself"
            except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as child_error:
                return self._find_culprit(child, child_error, path + step)
        return path, str(error)


def _children(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, child in value.items():
            plain = isinstance(key, str) and key.isidentifier()
            yield (f".{key}" if plain else f"[{key!r}]"), child
    elif isinstance(value, list | tuple | set | frozenset):
        for index, child in enumerate(value):
            yield f"[{index}]", child
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            if (child := getattr(value, name)) is not msgspec.UNSET:  # which is not sent
                yield f".{name}", child
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            if (child := getattr(value, field.name, None)) is not msgspec.UNSET:
                yield f".{field.name}", child


def _type_name(value: object) -> str:
    if callable(value) and hasattr(value, "__qualname__"):
        return f"the {type(value).__name__} {value.__qualname__}"
    return f"an object of type {type(value).__module__}.{type(value).__qualname__}"


def _tensor_part(tensor: torch.Tensor) -> _Part:
    if tensor.is_quantized:
        raise TypeError(f"a quantized tensor ({tensor.dtype}) can't be sent; send its int_repr() and scale, or dequantize() it")
    if tensor.layout is not torch.strided:
        raise TypeError(f"a {tensor.layout} tensor of {tensor.dtype} can't be sent; make it dense first")
    if tensor.is_nested:
        raise TypeError("a nested tensor can't be sent; send a list of tensors, or pad it")
    if tensor.is_meta:
        raise TypeError("a tensor on the meta device has no content to send")
    return _Part(tensor, torch_dtype_name(tensor.dtype), tuple(tensor.shape), tensor.nbytes)


def _array_part(array: NDArray[Any]) -> _Part:
    dtype = array.dtype.str
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError("a masked array would lose its mask; send data and mask as two arrays")
    if array.dtype.hasobject or array.dtype.fields is not None or item_nbytes(dtype) is None:
        raise TypeError(f"a numpy array of dtype {array.dtype} can't be sent; use numbers, bool, text or times")
    return _Part(array, dtype, tuple(array.shape), array.nbytes)


def _lay_out(encoded: bytes, parts: list[_Part], locate: Locate | None) -> Packed:
    cursor = copied = copied_nbytes = in_place = in_place_nbytes = 0
    for part in parts:
        nbytes = part.nbytes
        if not nbytes:
            continue
        if locate is not None and (place := _place(part, locate)) is not None:
            part.region, part.offset = place
            part.in_place = True
            in_place += 1
            in_place_nbytes += nbytes
        else:
            part.offset = align(cursor)
            cursor = part.offset + nbytes
            copied += 1
            copied_nbytes += nbytes
    return Packed(encoded, parts, cursor, copied, copied_nbytes, in_place, in_place_nbytes)


def _place(part: _Part, locate: Locate) -> tuple[int, int] | None:
    address = part.address()
    if address is None:
        address = part.address_on_device()
    return None if address is None else locate(address, part.nbytes)


class PayloadDecoder:
    """Decodes payloads into plain objects, or into a msgspec type.

    Args:
        payload_type: what to decode into; ``Any`` gives dicts, lists, numbers, text and tensors.
        writable: whether numpy may write to the views.
    """

    def __init__(self, payload_type: Any = Any, *, writable: bool = False) -> None:
        self._writable = writable
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
            payload_type, ext_hook=self._decode_extension, dec_hook=_convert
        )
        self._content = _NO_CONTENT  # this and the rest: of the payload that is being decoded
        self._region: Callable[[int], Region] = _no_region
        self._place: Place | None = None
        self._inline: Region | None = None

    def decode(self, content: Content, region: Callable[[int], Region], place: Place | None = None) -> Any:
        """Decodes a content that :meth:`Content.check` has accepted.

        Args:
            content: from a message.
            region: returns a slot's memory, header excluded, by region number (1 is ``content.slots[0]``).
            place: makes tensors in place of views of the regions, those for which it does not return None.

        Returns:
            The payload; its tensors are views of the regions (small ones of a private copy of ``inline``), or what
            ``place`` made.

        Raises:
            RemoteProtocolError: it is not msgpack, or its tensors are not as described.
            msgspec.ValidationError: it is not of ``payload_type``.
        """
        self._content, self._region, self._place = content, region, place
        try:
            return self._decoder.decode(content.payload)
        except msgspec.ValidationError:
            raise
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise RemoteProtocolError(f"a payload is not msgpack: {error}") from error
        finally:
            self._content, self._region, self._place, self._inline = _NO_CONTENT, _no_region, None, None

    def _decode_extension(self, code: int, data: memoryview) -> object:
        if code != TENSOR_EXTENSION:
            return Ext(code, bytes(data))
        index = int.from_bytes(data, "little")
        if len(data) != 4 or index >= len(self._content.tensors):
            raise RemoteProtocolError(f"a payload names tensor {index} of {len(self._content.tensors)}")
        ref = self._content.tensors[index]
        if self._place is not None and (placed := self._place(ref)) is not None:
            return placed
        return tensor_view(ref, self._region_of(ref), writable=self._writable)

    def _region_of(self, ref: TensorRef) -> Region:
        if not ref.nbytes:
            return _EMPTY
        return self._region(ref.region) if ref.region else self._inline_region()

    def _inline_region(self) -> Region:
        """A copy of what came inline, for all tensors in it: theirs, to be written to."""
        if self._inline is None:
            self._inline = copied(self._content.inline)
        return self._inline


_EMPTY = copied(b"")
_NO_CONTENT = Content(b"")


def _no_region(number: int) -> Region:
    raise AssertionError(f"region {number} was asked for outside of a decode")


def _convert(wanted: Any, value: Any) -> Any:
    """msgspec asks this for types that it does not know: tensors, and whatever a caller's Struct names."""
    kind = typing.get_origin(wanted) or wanted
    if kind is object or kind is Any:
        return value
    if kind is torch.Tensor and isinstance(value, np.ndarray):
        native = value if value.dtype.isnative else value.astype(value.dtype.newbyteorder("="))
        native.flags.writeable = True  # torch knows no read-only tensors, and would warn of this one
        return torch.from_numpy(native)
    if kind is np.ndarray and isinstance(value, torch.Tensor):
        return value.numpy()
    if isinstance(kind, type) and isinstance(value, kind):
        return value
    raise TypeError(f"Expected `{getattr(kind, '__name__', kind)}`, got `{type(value).__name__}`")
