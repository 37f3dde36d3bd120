"""torch's and numpy's tensors, for the compiled :class:`~shmring.core.compiled.Packer`, which knows neither library.

It describes dense torch tensors in host memory by itself. All other values that msgspec does not encode come here: arrays,
tensors on a GPU, numpy's scalars, and values that can't be sent, for which it raises an error that says what to do.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from shmring.core.compiled import DTYPES, MAX_VALUES, Packer, Part, PayloadDecoder, RegionBytes, borrowed
from shmring.core.messages import TORCH_ITEM_NBYTES, TensorRef, align, item_nbytes
from shmring.errors import RemoteProtocolError
from shmring.memory.copying import copy_into_cache, copy_past_cache
from shmring.memory.views import TENSOR_MAKER, TORCH_DTYPES, dlpack_dtype, gpu_dtype, tensor_view

__all__ = ["children", "convert", "make_decoder", "make_packer", "nbytes_for", "other_view", "slot_dtypes", "torch_dtype_name"]

_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

#: Exact types that are their data and nothing else. Other subclasses may be several tensors, or know more than their numbers.
_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)


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


def make_packer(max_tensors: int, max_payload_nbytes: int, max_values: int = MAX_VALUES) -> Packer:
    """Returns an encoder of payloads with torch tensors and numpy arrays in them.

    Args:
        max_tensors: the most tensors a payload may hold.
        max_payload_nbytes: of a payload, tensors apart.
        max_values: what its values may count.
    """
    packer = Packer(
        max_tensors,
        max_payload_nbytes,
        max_values,
        _TENSOR_TYPES,
        getattr(torch.Tensor, "__dlpack_c_exchange_api__", None),
        _tensor_memory(),
        _describe,
        _copy_strided,
        copy_past_cache,
        copy_into_cache,
        lambda payload, error: _explain(packer, payload, error),
    )
    return packer


@functools.cache
def _tensor_memory() -> tuple[int, int, int, int, int] | None:
    """Returns the functions by which the packer asks a tensor for its storage in some nanoseconds; None: this torch lacks one.

    They are of torch's stable C interface, but for ``bool at::native::is_neg(const at::Tensor&)``, whose name holds the types
    of its arguments. Their argument is the address of a pointer inside of a tensor's object. It is found by searching the
    object for the value of ``_cdata``.
    """
    torch_library = ctypes.CDLL(torch._C.__file__)
    stable = [f"aoti_torch_get_{name}" for name in ("storage_size", "storage_offset", "data_ptr")]
    names = [*stable, "_ZN2at6native6is_negERKNS_6TensorE"]
    functions = [getattr(torch_library, name, None) for name in names]
    addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in functions if function is not None]
    probes = [kind(torch.empty(1)) for kind in _TENSOR_TYPES]
    places = [
        place
        for place in range(object.__basicsize__, torch.Tensor.__basicsize__, ctypes.sizeof(ctypes.c_void_p))
        if all(ctypes.c_void_p.from_address(id(probe) + place).value == probe._cdata for probe in probes)
    ]
    if len(addresses) != len(names) or len(places) != 1:
        return None
    storage_nbytes, storage_offset, data_address, is_negative = (address or 0 for address in addresses)
    return storage_nbytes, storage_offset, data_address, is_negative, places[0]


def make_decoder(payload_type: Any = Any, *, writable: bool = False) -> PayloadDecoder:
    """Returns a decoder of payloads into plain objects, or into a msgspec type.

    Args:
        payload_type: what to decode into; ``Any`` gives dicts, lists, numbers, text and tensors.
        writable: whether numpy may write to the views.
    """

    def other(ref: TensorRef, memory: RegionBytes | None) -> torch.Tensor | NDArray[Any]:
        try:
            return other_view(ref, memory, writable)
        except (TypeError, ValueError, KeyError, RuntimeError) as error:
            raise RemoteProtocolError(f"a {ref.dtype} tensor of shape {ref.shape} can't be viewed here: {error}") from error

    return PayloadDecoder(payload_type, convert, TENSOR_MAKER, _dlpack_dtypes(), other, gpu_dtype)


@functools.cache
def _dlpack_dtypes() -> tuple[tuple[int, int] | None, ...]:
    """Returns DLPack's code and bits of the wire's dtypes, by number; None for those that this torch takes in another way."""
    return tuple(None if name is None else dlpack_dtype(name) for name in DTYPES)


@functools.cache
def slot_dtypes() -> dict[torch.dtype, tuple[int, int, int]]:
    """Returns DLPack's code and bits, and the bytes of an item, of the dtypes that :data:`TENSOR_MAKER` makes."""
    known = {name: dlpack_dtype(name) for name in TORCH_DTYPES}
    return {TORCH_DTYPES[name]: (*code, TORCH_ITEM_NBYTES[name]) for name, code in known.items() if code is not None}


def other_view(ref: TensorRef, memory: RegionBytes | None, writable: bool) -> torch.Tensor | NDArray[Any]:
    """Makes the views that DLPack can't make: arrays, tensors without content, and dtypes that this torch does not accept from
    it."""
    if ref.dtype in TORCH_ITEM_NBYTES:
        dtype = TORCH_DTYPES[ref.dtype]
        if memory is None:
            return torch.empty(ref.shape, dtype=dtype)
        carrier = np.dtype(f"int{8 * TORCH_ITEM_NBYTES[ref.dtype]}")
        return torch.from_numpy(np.ndarray(ref.shape, carrier, memory, ref.offset)).view(dtype)  # type: ignore[arg-type]
    spelled = np.dtype(ref.dtype)
    # numpy's types know no buffers but the standard library's.
    array: NDArray[Any] = (
        np.empty(ref.shape, spelled) if memory is None else np.ndarray(ref.shape, spelled, memory, ref.offset)  # type: ignore[arg-type]
    )
    array.flags.writeable = writable
    return array


def convert(wanted: Any, value: Any) -> Any:
    """msgspec calls this for types that it does not know: tensors, and other types that a caller's Struct names."""
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


def _describe(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return _tensor_part(value)
    if isinstance(value, np.ndarray):
        return _array_part(value)
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):
        return value.item()
    raise TypeError(f"{_type_name(value)} is neither a tensor nor anything that msgspec encodes")


def _tensor_part(tensor: torch.Tensor) -> Part:
    if type(tensor) not in _TENSOR_TYPES:
        raise TypeError(
            f"a {_full_name(type(tensor))} may be more than the numbers of one tensor; send the tensors that it is made of, "
            "or tensor.as_subclass(torch.Tensor) if that is all there is"
        )
    if tensor.is_quantized:
        raise TypeError(f"a quantized tensor ({tensor.dtype}) can't be sent; send its int_repr() and scale, or dequantize() it")
    if tensor.layout is not torch.strided:
        raise TypeError(f"a {tensor.layout} tensor of {tensor.dtype} can't be sent; make it dense first")
    if tensor.is_nested:
        raise TypeError("a nested tensor can't be sent; send a list of tensors, or pad it")
    if tensor.is_meta:
        raise TypeError("a tensor on the meta device has no content to send")
    _check_memory(tensor)
    shape = tuple(tensor.shape)
    nbytes = math.prod(shape) * tensor.itemsize  # torch's own number overflows for what was expanded
    if nbytes >= 1 << 63:
        raise TypeError(f"a tensor of shape {shape} is larger than any memory")
    is_plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    return Part(
        tensor,
        torch_dtype_name(tensor.dtype),
        shape,
        nbytes,
        address=tensor.data_ptr() if is_plain else 0,
        is_on_host=tensor.is_cpu,
    )


def _check_memory(tensor: torch.Tensor) -> None:
    """Raises ``TypeError`` unless all of a tensor's bytes are there."""
    try:
        storage_nbytes, address = tensor.untyped_storage().nbytes(), tensor.data_ptr()
    except RuntimeError:  # of vmap, grad and the like
        storage_nbytes = address = 0
    else:
        if not tensor.numel():
            return
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((extent - 1) * stride for extent, stride in steps)
    nbytes = (last + 1) * tensor.itemsize
    if storage_nbytes < nbytes:
        raise TypeError(
            f"its storage of {storage_nbytes} bytes is smaller than a tensor of shape {tuple(tensor.shape)} needs, {nbytes}; "
            "it was freed, or stands for a tensor inside a transformation (vmap, grad)"
        )
    if not address:
        raise TypeError("it has no memory of its own: it stands for a tensor inside a transformation (functionalize)")


def _array_part(array: np.ndarray[Any, Any]) -> Part:
    dtype = array.dtype.str
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError("a masked array would lose its mask; send data and mask as two arrays")
    if array.dtype.hasobject or array.dtype.fields is not None or item_nbytes(dtype) is None:
        raise TypeError(f"a numpy array of dtype {array.dtype} can't be sent; use numbers, bool, text or times")
    address = int(array.__array_interface__["data"][0]) if array.flags.c_contiguous else 0
    return Part(array, dtype, tuple(array.shape), array.nbytes, address=address, is_on_host=True)


def _copy_strided(part: Part, address: int) -> None:
    """Copies what is not contiguous host memory."""
    source = part.source
    if isinstance(source, torch.Tensor):
        _check_memory(source)  # it may have waited since it was packed
    dtype = source.dtype.str if isinstance(source, np.ndarray) else _DTYPE_NAMES[source.dtype]
    ref = TensorRef(0, 0, part.nbytes, dtype, tuple(source.shape))
    target = tensor_view(ref, borrowed(address, part.nbytes), writable=True)
    if isinstance(target, np.ndarray):
        np.copyto(target, source)
    else:
        target.copy_(source.detach())


def _explain(packer: Packer, payload: object, error: Exception, path: str = "payload") -> TypeError:
    """Descends to the innermost value that can't be encoded, and says why; only ever runs after a failure."""
    if isinstance(error, RecursionError):
        return TypeError(f"{path} is nested too deeply, or contains itself")
    for step, child in children(payload):
        try:
            packer.encode(child)
        except RecursionError:
            return TypeError(f"{path + step} can't be sent: it is nested too deeply, or contains itself")
        except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as child_error:
            return _explain(packer, child, child_error, path + step)
    return TypeError(f"{path} can't be sent: {error}")


def children(value: object) -> Iterator[tuple[str, object]]:
    """Yields the members of a value of a payload, each with its step of the path."""
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
    return f"an object of type {_full_name(type(value))}"


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
