"""Views of a slot: built without a copy, and their slot is unviewed exactly when the last of them has died."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from shmring.core.messages import TORCH_ITEM_NBYTES, TensorRef
from shmring.errors import RemoteProtocolError
from shmring.memory.views import TORCH_DTYPES, Obituaries, tensor_view


@pytest.fixture(autouse=True)
def without_collections() -> Iterator[None]:
    """Views die by reference counting: nothing here may need the cyclic collector."""
    gc.disable()
    yield
    gc.enable()


class Watched:
    """An anchor that only its views keep alive."""

    def __init__(self, nbytes: int = 256) -> None:
        self.memory = bytearray(range(256)) * (nbytes // 256)
        self.wakes = 0
        self.obituaries: Obituaries[str, NDArray[np.uint8]] = Obituaries(self.wake)
        self.obituaries.watch("slot", np.frombuffer(self.memory, np.uint8))
        self.obituaries.forget("slot")

    def wake(self) -> None:
        self.wakes += 1


def watched_view(dtype: str, shape: tuple[int, ...], nbytes: int) -> tuple[Watched, Any]:
    watched = Watched()
    watched.obituaries.collect()
    anchor = np.frombuffer(watched.memory, np.uint8)
    watched.obituaries.watch("slot", anchor)
    watched.obituaries.expect("slot")
    return watched, tensor_view(TensorRef(1, 0, nbytes, dtype, shape), anchor, writable=True)


@pytest.mark.parametrize("name", sorted(TORCH_DTYPES))
def test_a_torch_view_shows_the_bytes_it_describes(name: str) -> None:
    size = TORCH_ITEM_NBYTES[name]
    anchor = np.zeros(256, np.uint8)
    view = tensor_view(TensorRef(1, 64, 6 * size, name, (2, 3)), anchor, writable=True)
    assert isinstance(view, torch.Tensor)
    assert (view.dtype, tuple(view.shape), view.is_contiguous()) == (TORCH_DTYPES[name], (2, 3), True)
    assert view.data_ptr() == anchor.ctypes.data + 64
    view.view(torch.uint8)[0, 0] = 1
    assert anchor[64] == 1


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "|S4", "<U1", "<M8[s]", "|b1", ">u2", "<c8"])
def test_a_numpy_view_shows_the_bytes_it_describes(dtype: str) -> None:
    size = np.dtype(dtype).itemsize
    anchor = np.zeros(256, np.uint8)
    view = tensor_view(TensorRef(1, 64, 6 * size, dtype, (3, 2)), anchor, writable=True)
    assert isinstance(view, np.ndarray)
    assert (view.dtype.str, view.shape, view.ctypes.data) == (dtype, (3, 2), anchor.ctypes.data + 64)
    view.view(np.uint8)[0, 0] = 1
    assert anchor[64] == 1


def test_read_views_are_read_only_to_numpy() -> None:
    view = tensor_view(TensorRef(1, 0, 8, "<i8", (1,)), np.zeros(8, np.uint8), writable=False)
    assert isinstance(view, np.ndarray)
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "<f4"])
def test_an_empty_view_needs_no_memory(dtype: str) -> None:
    view = tensor_view(TensorRef(0, 0, 0, dtype, (2, 0, 3)), np.empty(0, np.uint8), writable=True)
    assert tuple(view.shape) == (2, 0, 3)


@pytest.mark.parametrize(
    "ref", [TensorRef(1, 0, 8, "nonsense", (1,)), TensorRef(1, 0, 8, "<M8[fortnights]", (1,)), TensorRef(1, 8, 8, "<i8", (1,))]
)
def test_what_cannot_be_viewed_is_the_peers_fault(ref: TensorRef) -> None:
    with pytest.raises(RemoteProtocolError, match="can't be viewed"):
        tensor_view(ref, np.zeros(8, np.uint8), writable=True)


def test_a_dtype_this_torch_lacks_is_the_peers_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(TORCH_DTYPES, "uint16")
    with pytest.raises(RemoteProtocolError, match="uint16"):
        tensor_view(TensorRef(1, 0, 8, "uint16", (4,)), np.zeros(8, np.uint8), writable=True)


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
    watched, view = watched_view(dtype, (2, 4), 8 * (4 if dtype == "<i4" else TORCH_ITEM_NBYTES[dtype]))
    derived = derive(view)
    del view
    assert watched.obituaries.collect() == []
    assert watched.obituaries.living() == ["slot"]
    assert len(watched.obituaries) == 1
    wakes = watched.wakes
    del derived
    assert watched.wakes == wakes + 1
    assert watched.obituaries.living() == []
    assert watched.obituaries.collect() == ["slot"]
    assert len(watched.obituaries) == 0


@pytest.mark.parametrize("derive", TORCH_DERIVED.values(), ids=TORCH_DERIVED.keys())
@pytest.mark.parametrize("dtype", ["int32", "bfloat16", "float8_e4m3fn"])
def test_whatever_is_derived_from_a_torch_view_keeps_the_slot(dtype: str, derive: Any) -> None:
    if dtype == "float8_e4m3fn" and derive is torch.from_dlpack:
        pytest.skip("dlpack has no float8 here")
    outlives(dtype, derive)


@pytest.mark.parametrize("derive", NUMPY_DERIVED.values(), ids=NUMPY_DERIVED.keys())
def test_whatever_is_derived_from_a_numpy_view_keeps_the_slot(derive: Any) -> None:
    outlives("<i4", derive)


def test_a_copy_does_not_keep_the_slot() -> None:
    watched, view = watched_view("int32", (2, 4), 32)
    copies = [view.clone(), view + 1, view.numpy().copy(), view.tolist(), view[0, 0].item()]
    del view
    assert watched.obituaries.collect() == ["slot"]
    assert copies


def test_every_view_of_a_slot_counts() -> None:
    watched, first = watched_view("int32", (2, 4), 32)
    anchor = watched.obituaries.anchor("slot")
    assert anchor is not None
    second = tensor_view(TensorRef(1, 64, 4, "<i4", (1,)), anchor, writable=False)
    del anchor, first
    assert watched.obituaries.collect() == []
    del second
    assert watched.obituaries.collect() == ["slot"]


# -- obituaries ---------------------------------------------------------------------------------------------------------


def anchor() -> NDArray[np.uint8]:
    return np.zeros(8, np.uint8)


def test_a_death_on_another_thread_is_noticed_there_and_collected_here() -> None:
    woken_on: list[int] = []
    obituaries: Obituaries[int, NDArray[np.uint8]] = Obituaries(lambda: woken_on.append(threading.get_ident()))
    held = [anchor()]
    obituaries.watch(1, held[0])
    obituaries.expect(1)
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert woken_on == [thread.ident]
    assert obituaries.collect() == [1]
    assert obituaries.collect() == []


def test_a_key_can_be_watched_again_after_its_death_and_the_old_death_is_not_the_new_ones() -> None:
    obituaries: Obituaries[int, NDArray[np.uint8]] = Obituaries(lambda: None)
    first = anchor()
    obituaries.watch(1, first)
    obituaries.expect(1)
    del first
    second = anchor()
    obituaries.watch(1, second)
    obituaries.expect(1)
    assert obituaries.collect() == [], "the death of the first is not that of the second"
    assert obituaries.anchor(1) is second
    del second
    assert obituaries.collect() == [1]


def test_two_living_anchors_of_one_key_are_our_own_bug() -> None:
    obituaries: Obituaries[int, NDArray[np.uint8]] = Obituaries(lambda: None)
    first = anchor()
    obituaries.watch(1, first)
    with pytest.raises(AssertionError, match="watched already"):
        obituaries.watch(1, anchor())


def test_what_is_forgotten_has_no_obituary() -> None:
    obituaries: Obituaries[int, NDArray[np.uint8]] = Obituaries(lambda: None)
    living, dying = anchor(), anchor()
    for key, value in ((1, living), (2, dying)):
        obituaries.watch(key, value)
        obituaries.expect(key)
    del dying, value
    obituaries.forget(1)
    obituaries.forget(2)
    obituaries.forget(3)
    del living
    assert obituaries.collect() == []
    assert len(obituaries) == 0


def test_deaths_are_told_in_order_and_only_of_the_dead() -> None:
    obituaries: Obituaries[int, NDArray[np.uint8]] = Obituaries(lambda: None)
    anchors = {key: anchor() for key in range(5)}
    for key, value in anchors.items():
        obituaries.watch(key, value)
        obituaries.expect(key)
    del value
    del anchors[3], anchors[1]
    assert obituaries.living() == [0, 2, 4]
    assert obituaries.collect() == [3, 1]
    assert len(obituaries) == 3


def test_only_expected_deaths_wake_and_one_that_has_happened_is_told_at_once() -> None:
    wakes: list[int] = []
    obituaries: Obituaries[int, NDArray[np.uint8]] = Obituaries(lambda: wakes.append(1))
    held = anchor()
    obituaries.watch(1, held)
    del held
    assert wakes == []
    assert obituaries.collect() == []
    obituaries.expect(1)
    assert wakes == [1]
    assert obituaries.collect() == [1]
    assert len(obituaries) == 0


def test_a_death_at_the_very_moment_at_which_it_is_expected_is_told_once() -> None:
    """The thread on which it dies, and the one that expects it, may both report it."""
    obituaries: Obituaries[int, NDArray[np.uint8]] = Obituaries(lambda: None)
    for _ in range(200):
        held = [anchor()]
        obituaries.watch(1, held[0])
        thread = threading.Thread(target=held.clear)
        thread.start()
        obituaries.expect(1)
        thread.join()
        assert obituaries.collect() == [1]
        assert obituaries.collect() == []
