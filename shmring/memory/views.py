"""numpy and torch views of a region of memory, as a descriptor describes them.

Theory of operation: every view, and every tensor derived from it, holds a reference to its
:class:`~shmring.core.compiled.Region`, which is counted in C. The death of the last one is noticed there (``core/views.pyx``).

torch accepts memory by DLPack, but an older torch does not know all of its dtypes: the others are passed as integers of their
size, and then viewed as their dtype.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
import torch.utils.dlpack
from numpy.typing import NDArray

from shmring.core.compiled import Region, TensorMaker, copied
from shmring.core.messages import DLPACK_CODES, TORCH_ITEM_NBYTES, TensorRef
from shmring.errors import RemoteProtocolError

__all__ = ["TENSOR_MAKER", "TORCH_DTYPES", "dlpack_dtype", "gpu_dtype", "tensor_view"]

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in TORCH_ITEM_NBYTES if hasattr(torch, name)}

_SIGNED = 0  # DLPack's code of whole numbers, which every torch takes

TENSOR_MAKER = TensorMaker(torch.utils.dlpack.from_dlpack, getattr(torch.Tensor, "__dlpack_c_exchange_api__", None))


def tensor_view(ref: TensorRef, region: Region, *, writable: bool) -> torch.Tensor | NDArray[Any]:
    """Returns the tensor (or array) that a descriptor describes, as a view.

    Args:
        ref: a descriptor that was checked against the region's size.
        region: where it is. A tensor without bytes does not hold it.
        writable: whether numpy may write to it. torch has no such flag: a tensor is writable if its memory is.

    Raises:
        RemoteProtocolError: the descriptor can't be built here (a dtype this build of torch lacks, a time unit numpy
            does not know).
    """
    try:
        if ref.dtype in TORCH_ITEM_NBYTES:
            return _torch_view(ref, region)
        dtype = np.dtype(ref.dtype)
        # numpy's types know no buffers but the standard library's.
        array: NDArray[Any] = (
            np.ndarray(ref.shape, dtype, region.memory(), ref.offset)  # type: ignore[arg-type]
            if ref.nbytes
            else np.empty(ref.shape, dtype)
        )
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        raise RemoteProtocolError(f"a {ref.dtype} tensor of shape {ref.shape} can't be viewed here: {error}") from error
    array.flags.writeable = writable
    return array


def _torch_view(ref: TensorRef, region: Region) -> torch.Tensor:
    dtype = TORCH_DTYPES[ref.dtype]
    if not ref.nbytes:
        return torch.empty(ref.shape, dtype=dtype)
    bits = 8 * TORCH_ITEM_NBYTES[ref.dtype]
    tensor: torch.Tensor = TENSOR_MAKER.tensor(region, ref.offset, ref.shape, _dlpack_code(ref.dtype), bits)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


def dlpack_dtype(name: str) -> tuple[int, int] | None:
    """Returns DLPack's code and bits of a dtype that this torch takes by them; None if it does not."""
    code = DLPACK_CODES[name]
    return (code, 8 * TORCH_ITEM_NBYTES[name]) if name in TORCH_DTYPES and _dlpack_code(name) == code else None


@functools.cache
def _dlpack_code(name: str) -> int:
    """Returns by which code torch takes items of a dtype: its own, or that of whole numbers of the same size."""
    code, nbytes = DLPACK_CODES[name], TORCH_ITEM_NBYTES[name]
    try:
        tried = TENSOR_MAKER.tensor(copied(bytes(nbytes)), 0, (1,), code, 8 * nbytes)
    except (RuntimeError, BufferError):
        return _SIGNED
    return code if tried.dtype == TORCH_DTYPES[name] else _SIGNED


@functools.lru_cache(maxsize=256)  # dtypes as the wire spells them come from peers
def gpu_dtype(name: str) -> tuple[int, int, torch.dtype | None] | None:
    """Returns how a tensor on a GPU is made of a dtype of the wire, numpy's spelling included.

    Returns:
        DLPack's code and bits, and as what the tensor that is made by them is viewed, or None; None: torch has no such dtype.
    """
    if name not in TORCH_ITEM_NBYTES:
        try:
            dtype = np.dtype(name)
        except TypeError:
            return None
        if not dtype.isnative:
            return None
        name = dtype.name
    if name not in TORCH_DTYPES:
        return None
    code, bits = _dlpack_code(name), 8 * TORCH_ITEM_NBYTES[name]
    return code, bits, None if code == DLPACK_CODES[name] else TORCH_DTYPES[name]
