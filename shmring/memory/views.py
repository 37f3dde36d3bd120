"""Views of a slot, and knowing when the last of them has died.

Theory of operation: the *anchor* of a slot is one uint8 array over its bytes. Every numpy and torch view of the slot is
built on it and keeps it alive, slices and reshapes included, so the slot is unviewed when a weak reference to the anchor
dies. (``torch.frombuffer`` would not do: its buffer can be released under a live tensor.)

A weak reference's callback may run on any thread and in the middle of anything, so it does nothing but append to a deque
and wake the event loop; :class:`Obituaries` hands the deaths out there. Waking a loop takes system calls and a turn of it,
and most anchors die before anybody waits for that, so it is done for those only whose death is expected.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from shmring.core.messages import TORCH_ITEM_NBYTES, TensorRef
from shmring.errors import RemoteProtocolError

__all__ = ["Obituaries", "Place", "TORCH_DTYPES", "device_view", "tensor_view"]

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in TORCH_ITEM_NBYTES if hasattr(torch, name)}

# numpy has no bfloat16, float8 or complex32: those travel as integers of their size and are viewed as what they are.
_CARRIERS: dict[str, np.dtype[Any]] = {
    name: np.dtype(name) if name in np.sctypeDict else np.dtype(f"int{8 * nbytes}")
    for name, nbytes in TORCH_ITEM_NBYTES.items()
}

#: Makes the tensor that a descriptor describes, somewhere else than in host memory; None: it is to be viewed there after all.
Place = Callable[[TensorRef], "torch.Tensor | NDArray[Any] | None"]

_Key = TypeVar("_Key", bound=Hashable)
_Anchor = TypeVar("_Anchor")


class Obituaries(Generic[_Key, _Anchor]):
    """Tells when anchors die.

    Args:
        wake: called on whatever thread an expected death happened; must only wake the loop, which calls :meth:`collect`.
    """

    def __init__(self, wake: Callable[[], object]) -> None:
        self._wake = wake
        self._references: dict[_Key, weakref.ref[_Anchor]] = {}
        self._expected: set[_Key] = set()
        self._dead: deque[tuple[_Key, weakref.ref[_Anchor]]] = deque()

    def __len__(self) -> int:
        return len(self._references)

    def watch(self, key: _Key, anchor: _Anchor) -> None:
        """Watches an anchor; one living one at a time for a key."""
        assert self.anchor(key) is None, f"{key} is watched already"
        self._references[key] = weakref.ref(anchor, functools.partial(self._died, key))

    def anchor(self, key: _Key) -> _Anchor | None:
        """Returns the living anchor watched under a key."""
        reference = self._references.get(key)
        return None if reference is None else reference()

    def expect(self, key: _Key) -> None:
        """Has a watched anchor's death reported; at once if it has died."""
        self._expected.add(key)
        reference = self._references[key]
        if reference() is None:  # maybe a moment ago on another thread, which did not see yet that it was expected
            self._report(key, reference)

    def living(self) -> list[_Key]:
        """Returns the keys whose anchors are alive."""
        return [key for key, reference in self._references.items() if reference() is not None]

    def collect(self) -> list[_Key]:
        """Returns the keys whose expected deaths have happened since the last call, and forgets them."""
        dead = []
        while self._dead:
            key, reference = self._dead.popleft()
            if self._references.get(key) is reference:
                self.forget(key)
                dead.append(key)
        return dead

    def forget(self, key: _Key) -> None:
        """Stops watching; a death that was already noticed is dropped as well."""
        self._references.pop(key, None)
        self._expected.discard(key)

    def _died(self, key: _Key, reference: weakref.ref[_Anchor]) -> None:
        if key in self._expected:
            self._report(key, reference)

    def _report(self, key: _Key, reference: weakref.ref[_Anchor]) -> None:
        self._dead.append((key, reference))
        self._wake()


def tensor_view(ref: TensorRef, anchor: NDArray[np.uint8], *, writable: bool) -> torch.Tensor | NDArray[Any]:
    """Returns the tensor (or array) that a descriptor describes, as a view.

    Args:
        ref: a descriptor that was checked against the anchor's size.
        anchor: the region's bytes, header excluded.
        writable: whether numpy may write to it. torch can't be told: a tensor is writable where its memory is.

    Raises:
        RemoteProtocolError: the descriptor can't be built here (a dtype this build of torch lacks, a time unit numpy
            does not know).
    """
    try:
        if ref.dtype in TORCH_ITEM_NBYTES:
            return _torch_view(ref, anchor)
        dtype = np.dtype(ref.dtype)
        array: NDArray[Any] = np.ndarray(ref.shape, dtype, anchor, ref.offset) if ref.nbytes else np.empty(ref.shape, dtype)
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        raise RemoteProtocolError(f"a {ref.dtype} tensor of shape {ref.shape} can't be viewed here: {error}") from error
    array.flags.writeable = writable
    return array


def device_view(ref: TensorRef, region: torch.Tensor) -> torch.Tensor:
    """Returns the tensor that a descriptor describes, as a view of bytes on a device.

    Args:
        ref: a descriptor that was checked against the region's size.
        region: ``uint8``, the region's bytes, header excluded.

    Raises:
        RemoteProtocolError: torch has no such tensors. What numpy alone has, no device can hold.
    """
    dtype = TORCH_DTYPES.get(ref.dtype)
    if dtype is None:
        raise RemoteProtocolError(f"a {ref.dtype} tensor can't be in device memory")
    if not ref.nbytes:
        return torch.empty(ref.shape, dtype=dtype, device=region.device)
    try:
        return region[ref.offset : ref.offset + ref.nbytes].view(dtype).view(ref.shape)
    except RuntimeError as error:
        raise RemoteProtocolError(f"a {ref.dtype} tensor of shape {ref.shape} can't be viewed here: {error}") from error


def _torch_view(ref: TensorRef, anchor: NDArray[np.uint8]) -> torch.Tensor:
    dtype = TORCH_DTYPES[ref.dtype]
    if not ref.nbytes:
        return torch.empty(ref.shape, dtype=dtype)
    carrier = _CARRIERS[ref.dtype]
    tensor = torch.from_numpy(np.ndarray(ref.shape, carrier, anchor, ref.offset))
    return tensor if tensor.dtype == dtype else tensor.view(dtype)
