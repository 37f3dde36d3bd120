"""Views of a slot: built without a copy, and their slot is unviewed exactly when the last of them has died."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from shmring.core.compiled import Mapping, Region, Regions, borrowed, copied
from shmring.core.messages import TORCH_ITEM_NBYTES, TensorRef
from shmring.errors import RemoteProtocolError
from shmring.memory import views
from shmring.memory.views import TORCH_DTYPES, tensor_view
from tests.tables import for_each

pytestmark = pytest.mark.usefixtures("without_collections")  # views die by reference counting


class Watched:
    """A region that was left, so that only its views keep it."""

    def __init__(self, nbytes: int = 256) -> None:
        self.regions = Regions()
        fd = os.memfd_create("watched")
        os.ftruncate(fd, nbytes)
        self.region = self.regions.open(Mapping(fd, nbytes), 0, nbytes, (1, 2))
        os.close(fd)


def region_of(memory: NDArray[np.uint8]) -> Region:
    """A region over an array that outlives its views."""
    return borrowed(memory.ctypes.data, memory.nbytes)


def watched_view(dtype: str, shape: tuple[int, ...], nbytes: int) -> tuple[Regions, Any]:
    watched = Watched()
    view = tensor_view(TensorRef(1, 0, nbytes, dtype, shape), watched.region, writable=True)
    assert watched.region.leave()
    return watched.regions, view


@for_each("name", sorted(TORCH_DTYPES))
def test_a_torch_view_shows_the_bytes_it_describes(name: str) -> None:
    size = TORCH_ITEM_NBYTES[name]
    memory = np.zeros(256, np.uint8)
    view = tensor_view(TensorRef(1, 64, 6 * size, name, (2, 3)), region_of(memory), writable=True)
    assert isinstance(view, torch.Tensor)
    assert (view.dtype, tuple(view.shape), view.is_contiguous()) == (TORCH_DTYPES[name], (2, 3), True)
    assert view.data_ptr() == memory.ctypes.data + 64
    view.view(torch.uint8)[0, 0] = 1
    assert memory[64] == 1


@for_each("dtype", ["<f4", ">f4", "|S4", "<U1", "<M8[s]", "|b1", ">u2", "<c8"])
def test_a_numpy_view_shows_the_bytes_it_describes(dtype: str) -> None:
    size = np.dtype(dtype).itemsize
    memory = np.zeros(256, np.uint8)
    view = tensor_view(TensorRef(1, 64, 6 * size, dtype, (3, 2)), region_of(memory), writable=True)
    assert isinstance(view, np.ndarray)
    assert (view.dtype.str, view.shape, view.ctypes.data) == (dtype, (3, 2), memory.ctypes.data + 64)
    view.view(np.uint8)[0, 0] = 1
    assert memory[64] == 1


def test_read_views_are_read_only_to_numpy() -> None:
    view = tensor_view(TensorRef(1, 0, 8, "<i8", (1,)), copied(bytes(8)), writable=False)
    assert isinstance(view, np.ndarray)
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


@for_each("dtype", ["float32", "bfloat16", "<f4"])
def test_an_empty_view_needs_no_memory(dtype: str) -> None:
    view = tensor_view(TensorRef(0, 0, 0, dtype, (2, 0, 3)), copied(b""), writable=True)
    assert tuple(view.shape) == (2, 0, 3)


@for_each(
    "ref", [TensorRef(1, 0, 8, "nonsense", (1,)), TensorRef(1, 0, 8, "<M8[fortnights]", (1,)), TensorRef(1, 8, 8, "<i8", (1,))]
)
def test_what_cannot_be_viewed_is_the_peers_fault(ref: TensorRef) -> None:
    with pytest.raises(RemoteProtocolError, match="can't be viewed"):
        tensor_view(ref, copied(bytes(8)), writable=True)


def test_a_dtype_this_torch_lacks_is_the_peers_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(TORCH_DTYPES, "uint16")
    with pytest.raises(RemoteProtocolError, match="uint16"):
        tensor_view(TensorRef(1, 0, 8, "uint16", (4,)), copied(bytes(8)), writable=True)


DERIVED = {
    "the view itself": lambda view: view,
    "a slice": lambda view: view[1:2],
    "a reshape": lambda view: view.reshape(-1),
    "a transpose": lambda view: view.T,
    "a chain": lambda view: view.reshape(-1)[2:].reshape(2, -1).T[:, :1],
}
TORCH_DERIVED = DERIVED | {
    "another dtype": lambda view: view.view(torch.uint8),
    "numpy's view": lambda view: view.view(torch.uint8).numpy(),
    "a detached alias": lambda view: view.detach(),
    "an element's view": lambda view: view[0, 0],
    "the storage": lambda view: view.untyped_storage(),
    "through dlpack": torch.from_dlpack,
    "an expansion": lambda view: view[:1].expand(4, -1),
    "a list of views": lambda view: list(view.unbind()),
    "a closure": lambda view: lambda: view,
    "a conjugate": lambda view: view.to(torch.complex64).conj() if view.is_complex() else view[...],
}
NUMPY_DERIVED = DERIVED | {
    "another dtype": lambda view: view.view(np.uint8),
    "torch's view": torch.from_numpy,
    "a memoryview": memoryview,
    "a cast memoryview": lambda view: memoryview(view).cast("B"),
    "as an array": np.asarray,
    "an array of a memoryview": lambda view: np.frombuffer(memoryview(view).cast("B"), np.uint8),
    "strided": lambda view: np.lib.stride_tricks.as_strided(view, (2,), (4,)),
    "a broadcast": lambda view: np.broadcast_to(view, (3, *view.shape)),
}


def outlives(dtype: str, derive: Any) -> None:
    regions, view = watched_view(dtype, (2, 4), 8 * (4 if dtype == "<i4" else TORCH_ITEM_NBYTES[dtype]))
    derived = derive(view)
    del view
    assert regions.collect() == []
    assert regions.living() == [(1, 2)]
    assert len(regions) == 1
    del derived
    assert regions.living() == []
    assert regions.collect() == [(1, 2)]
    assert len(regions) == 0


@for_each("derive", TORCH_DERIVED.values(), ids=TORCH_DERIVED.keys())
@for_each("dtype", ["int32", "bfloat16", "float8_e4m3fn"])
def test_whatever_is_derived_from_a_torch_view_keeps_the_slot(dtype: str, derive: Any) -> None:
    if dtype == "float8_e4m3fn" and derive is torch.from_dlpack:
        pytest.skip("dlpack has no float8 here")
    outlives(dtype, derive)


@for_each("derive", NUMPY_DERIVED.values(), ids=NUMPY_DERIVED.keys())
def test_whatever_is_derived_from_a_numpy_view_keeps_the_slot(derive: Any) -> None:
    outlives("<i4", derive)


def test_a_copy_does_not_keep_the_slot() -> None:
    regions, view = watched_view("int32", (2, 4), 32)
    copies = [view.clone(), view + 1, view.numpy().copy(), view.tolist(), view[0, 0].item()]
    del view
    assert regions.collect() == [(1, 2)]
    assert copies


def test_every_view_of_a_slot_counts() -> None:
    watched = Watched()
    first = tensor_view(TensorRef(1, 0, 32, "int32", (2, 4)), watched.region, writable=True)
    second = tensor_view(TensorRef(1, 64, 4, "<i4", (1,)), watched.region, writable=False)
    watched.region.leave()
    del first
    assert watched.regions.collect() == []
    del second
    assert watched.regions.collect() == [(1, 2)]


@for_each("dtype", ["int32", "bfloat16", "<i4"])
def test_an_empty_view_keeps_nothing(dtype: str) -> None:
    watched = Watched()
    view = tensor_view(TensorRef(1, 0, 0, dtype, (2, 0)), watched.region, writable=True)
    assert not watched.region.leave()
    assert tuple(view.shape) == (2, 0)


@for_each("name", ["bfloat16", "float8_e4m3fn", "bool", "complex32", "uint16"])
def test_a_dtype_that_this_torch_does_not_take_is_viewed_as_what_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an older torch, whose DLPack does not know it."""
    monkeypatch.setitem(views.DLPACK_CODES, name, 200)
    views._dlpack_code.cache_clear()
    try:
        size = TORCH_ITEM_NBYTES[name]
        regions, view = watched_view(name, (2, 3), 6 * size)
        assert (view.dtype, tuple(view.shape)) == (TORCH_DTYPES[name], (2, 3))
        derived = view[1:]
        del view
        assert regions.collect() == []
        del derived
        assert regions.collect() == [(1, 2)]
    finally:
        views._dlpack_code.cache_clear()
