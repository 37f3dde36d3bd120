"""Views that are counted in C: a region is reported once, when it was left and its last view has died, wherever that was."""

from __future__ import annotations

import copy
import ctypes
import io
import os
import pickle
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shmring.core import compiled
from shmring.core.compiled import Mapping, Region, RegionBytes, Regions, TensorMaker, borrowed, copied
from tests.forked import in_child
from tests.model.inside import uses_table
from tests.model.stepped import IS_STEPPED, LastView, at_each_step
from tests.nursery import Nursery
from tests.tables import for_each

NBYTES = 1 << 16
INT32 = (0, 32)  # as DLPack numbers dtypes
TABLE = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
MAKERS = {"capsule": TensorMaker(torch.from_dlpack)} | ({"table": TensorMaker(torch.from_dlpack, TABLE)} if TABLE else {})
MAKER = list(MAKERS.values())[-1]


pytestmark = pytest.mark.usefixtures("without_collections")  # views die by reference counting


@pytest.fixture
def mapping() -> Mapping:
    fd = os.memfd_create("views")
    os.ftruncate(fd, NBYTES)
    mapping = Mapping(fd, NBYTES)
    os.close(fd)
    return mapping


@pytest.fixture
def regions() -> Regions:
    return Regions()


def rings(regions: Regions) -> bool:
    return bool(select.select([regions.bell], [], [], 0)[0])


def tensor(region: Region, shape: tuple[int, ...] = (8,), offset: int = 0, maker: TensorMaker = MAKER) -> torch.Tensor:
    view = maker.tensor(region, offset, shape, *INT32)
    assert isinstance(view, torch.Tensor)
    return view


def array(region: Region) -> Any:
    return np.ndarray((8,), np.int32, region.memory())


KINDS: dict[str, Callable[[Region], Any]] = {
    "tensor": tensor,
    "tensor by capsule": lambda region: tensor(region, maker=MAKERS["capsule"]),
    "array": array,
    "buffer": lambda region: region.memory(),
    "memoryview": lambda region: memoryview(region.memory()),
}
each_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())


# -- life and death -----------------------------------------------------------------------------------------------------


@each_kind
def test_a_region_drains_until_its_last_view_dies(mapping: Mapping, regions: Regions, make: Callable[[Region], Any]) -> None:
    region = regions.open(mapping, 64, 128, (3, 2**64 - 1))
    first, second = make(region), make(region)
    assert region.is_viewed
    assert len(regions) == 0
    assert region.leave()
    assert (len(regions), regions.living(), regions.collect()) == (1, [(3, 2**64 - 1)], [])
    del first
    assert not rings(regions)
    assert regions.living() == [(3, 2**64 - 1)]
    del second
    assert rings(regions)
    assert (len(regions), regions.living()) == (1, []), "dead, and not collected"
    assert regions.collect() == [(3, 2**64 - 1)]
    assert (len(regions), regions.collect(), rings(regions)) == (0, [], False)


@each_kind
def test_whoever_leaves_after_the_last_view_is_told_at_once(
    mapping: Mapping, regions: Regions, make: Callable[[Region], Any]
) -> None:
    region = regions.open(mapping, 64, 128, (1, 2))
    view = make(region)
    del view
    assert not region.is_viewed
    assert not region.leave()
    assert (len(regions), regions.collect(), rings(regions)) == (0, [], False)


@each_kind
def test_what_is_abandoned_is_never_reported(mapping: Mapping, regions: Regions, make: Callable[[Region], Any]) -> None:
    region, dropped = regions.open(mapping, 0, 64, (1, 1)), regions.open(mapping, 64, 64, (1, 2))
    views = [make(region), make(dropped)]
    region.abandon()
    region.abandon()
    del dropped
    assert len(regions) == 0
    views.clear()
    assert (regions.collect(), rings(regions)) == ([], False)


def test_a_region_that_was_left_makes_no_views(mapping: Mapping, regions: Regions) -> None:
    region = regions.open(mapping, 0, 64, (1, 1))
    region.leave()
    for use in (region.leave, region.memory, lambda: region.is_viewed, lambda: region.address, lambda: region.nbytes):
        with pytest.raises(ValueError, match="was left"):
            use()
    with pytest.raises(ValueError, match="was left"):
        tensor(region)


def test_deaths_are_collected_in_order_and_ring_once(mapping: Mapping, regions: Regions) -> None:
    views = {}
    for key in range(6):
        region = regions.open(mapping, 64 * key, 64, (0, key))
        views[key] = tensor(region)
        assert region.leave()
    for key in (4, 0, 5):
        del views[key]
    assert regions.living() == [(0, 3), (0, 2), (0, 1)]
    assert os.read(regions.bell, 8) == (1).to_bytes(8, sys.byteorder), "who finds the stack empty rings, and nobody else"
    assert regions.collect() == [(0, 4), (0, 0), (0, 5)]
    del views[1]
    assert rings(regions)
    assert regions.collect() == [(0, 1)]
    assert len(regions) == 2


def test_a_key_may_be_used_again_while_an_older_region_of_it_drains(mapping: Mapping, regions: Regions) -> None:
    views = []
    for _ in range(2):
        region = regions.open(mapping, 0, 64, (1, 1))
        views.append(tensor(region))
        region.leave()
    views.pop()
    assert regions.collect() == [(1, 1)]
    assert regions.living() == [(1, 1)]


@each_kind
def test_views_outlive_whatever_they_came_from(mapping: Mapping, make: Callable[[Region], Any]) -> None:
    regions = Regions()
    left, held, closed = (regions.open(mapping, 64 * key, 64, (0, key)) for key in range(3))
    views = [make(region) for region in (left, held, closed)]
    np.frombuffer(mapping, np.uint8)[:192] = 9
    left.leave()
    del mapping
    bell = regions.bell
    regions.close()
    assert (regions.collect(), regions.living(), len(regions)) == ([], [], 0)
    assert closed.leave(), "it is viewed, though nobody is told when it is not"
    assert (regions.living(), len(regions)) == ([], 0)
    del regions, left, held, closed
    os.fstat(bell)  # the views may still ring it
    for view in views:
        assert bytes(memoryview(view.numpy() if isinstance(view, torch.Tensor) else view))[:32] == b"\x09" * 32
    del view
    views.clear()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(bell)


def test_closing_forgets_what_was_not_collected(mapping: Mapping, regions: Regions) -> None:
    region = regions.open(mapping, 0, 64, (1, 1))
    view = tensor(region)
    region.leave()
    del view
    regions.close()
    regions.close()
    assert (regions.collect(), regions.living(), len(regions)) == ([], [], 0)
    for use in (lambda: regions.bell, lambda: regions.open(mapping, 0, 64, (1, 1))):
        with pytest.raises(ValueError, match="were closed"):
            use()


def test_without_descriptors_there_is_an_error() -> None:
    script = """
import resource, os
from shmring.core.compiled import Regions
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1,) * 2)
try:
    Regions()
except OSError as error:
    print(error.errno == 24)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "True\n", "")


# -- what keeps a view --------------------------------------------------------------------------------------------------


DERIVED: dict[str, Callable[[torch.Tensor], Any]] = {
    "a slice": lambda view: view[1:2],
    "a reshape": lambda view: view.reshape(2, 4).T,
    "an element": lambda view: view[3],
    "numpy": lambda view: view.numpy(),
    "numpy's slice": lambda view: view.numpy()[::2],
    "a memoryview": lambda view: memoryview(view.numpy()),
    "torch of numpy": lambda view: torch.from_numpy(view.numpy()),
    "numpy by dlpack": np.from_dlpack,
    "torch by dlpack": torch.from_dlpack,
    "a capsule": lambda view: view.__dlpack__(),
    "another dtype": lambda view: view.view(torch.uint8),
    "the storage": lambda view: view.untyped_storage(),
    "a detached alias": lambda view: view.detach(),
    "a shallow copy": copy.copy,
    "a parameter": lambda view: torch.nn.Parameter(view.view(torch.float32)),
    "an autograd graph": lambda view: (view.view(torch.float32).requires_grad_() * view.view(torch.float32)).sum(),
}


@for_each("maker", MAKERS.values(), ids=MAKERS.keys())
@for_each("derive", DERIVED.values(), ids=DERIVED.keys())
def test_whatever_shows_the_memory_keeps_the_region(
    mapping: Mapping, regions: Regions, maker: TensorMaker, derive: Callable[[torch.Tensor], Any]
) -> None:
    region = regions.open(mapping, 0, 64, (1, 1))
    view = tensor(region, maker=maker)
    derived = derive(view)
    del view
    assert region.leave()
    assert regions.collect() == []
    del derived
    assert regions.collect() == [(1, 1)]


COPIES: dict[str, Callable[[torch.Tensor], Any]] = {
    "a clone": torch.clone,
    "a sum": lambda view: view + 1,
    "a list": lambda view: view.tolist(),
    "an item": lambda view: view[0].item(),
    "a deep copy": copy.deepcopy,
    "a pickle": pickle.dumps,
    "a file": lambda view: torch.save(view, io.BytesIO()),
    "a pickled array": lambda view: pickle.dumps(view.numpy()),
}


@for_each("derive", COPIES.values(), ids=COPIES.keys())
def test_a_copy_does_not_keep_the_region(mapping: Mapping, regions: Regions, derive: Callable[[torch.Tensor], Any]) -> None:
    region = regions.open(mapping, 0, 64, (1, 1))
    view = tensor(region)
    view[:] = torch.arange(8, dtype=torch.int32)
    derived = derive(view)
    del view
    assert not region.leave()
    np.frombuffer(mapping, np.uint8)[:] = 0
    if isinstance(derived, torch.Tensor) and derived.dim():
        assert derived.sum() in (28, 36)


def test_a_view_moved_to_shared_memory_leaves_the_region(mapping: Mapping, regions: Regions) -> None:
    region = regions.open(mapping, 0, 64, (1, 1))
    view = tensor(region)
    view[:] = 5
    view.share_memory_()
    assert not region.leave()
    assert view.tolist() == [5] * 8


def test_what_was_not_made_by_a_region_shows_nothing() -> None:
    with pytest.raises(BufferError, match="made by a region"):
        memoryview(RegionBytes())
    with pytest.raises(ValueError, match="was left"):
        Region().memory()


def test_what_holds_the_region_can_not_be_pickled(mapping: Mapping, regions: Regions) -> None:
    region = regions.open(mapping, 0, 64, (1, 1))
    for thing in (mapping, regions, region, region.memory(), MAKER):
        with pytest.raises(TypeError, match=r"pickl|__reduce__"):
            pickle.dumps(thing)
        with pytest.raises(TypeError, match=r"pickl|__reduce__"):
            copy.copy(thing)


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS.keys())
def test_a_view_can_not_grow(mapping: Mapping, regions: Regions, maker: TensorMaker) -> None:
    view = tensor(regions.open(mapping, 0, 64, (1, 1)), maker=maker)
    with pytest.raises(RuntimeError, match="not resizable"):
        view.resize_(64)
    with pytest.raises(RuntimeError, match="not resizable"):
        view.untyped_storage().resize_(1 << 20)
    with pytest.raises(ValueError, match="own its data"):
        array(regions.open(mapping, 0, 64, (1, 2))).resize(100)


# -- what they show -----------------------------------------------------------------------------------------------------


@for_each("maker", MAKERS.values(), ids=MAKERS.keys())
@for_each("shape", [(), (1,), (5,), (2, 3), (3, 1, 2), (1,) * 64])
@for_each("offset", [0, 64, 4, 1, 3], ids=lambda offset: f"at {offset}")
def test_a_tensor_is_contiguous_where_it_was_wanted(
    mapping: Mapping, regions: Regions, maker: TensorMaker, shape: tuple[int, ...], offset: int
) -> None:
    """At odd offsets too, which tensors that come inline may have: torch does not ask for alignment."""
    region = regions.open(mapping, 128, 1024, (1, 1))
    view = tensor(region, shape, offset, maker)
    assert (tuple(view.shape), view.is_contiguous(), view.dtype) == (shape, True, torch.int32)
    assert view.data_ptr() == mapping.address + 128 + offset == region.address + offset
    count = max(1, view.numel())
    view.copy_(torch.arange(count, dtype=torch.int32).reshape(shape))
    there = np.frombuffer(mapping, np.uint8, 4 * count, 128 + offset)
    assert there.tobytes() == np.arange(count, dtype="<i4").tobytes()
    assert (view + 1).sum() == sum(range(1, count + 1))
    assert region.nbytes == 1024


@for_each(
    ("offset", "shape", "bits", "message"),
    [
        (0, (17,), 32, "exceeds its region"),
        (61, (1,), 32, "exceeds its region"),
        (65, (), 8, "exceeds its region"),
        (2**64 - 4, (1,), 32, "exceeds its region"),
        (0, (2**61, 4), 8, "exceeds its region"),
        (0, (2**62, 4, 4), 8, "negative, or too large"),
        (0, (2**62,), 64, "too large"),
        (0, (-1,), 32, "negative"),
        (0, (2, -1), 32, "negative"),
        (0, (1,) * 65, 32, "65 dimensions"),
        (0, (1,), 4, "whole bytes"),
        (0, (1,), 0, "whole bytes"),
    ],
)
@for_each("maker", MAKERS.values(), ids=MAKERS.keys())
def test_a_tensor_lies_in_its_region(
    mapping: Mapping, regions: Regions, maker: TensorMaker, offset: int, shape: tuple[int, ...], bits: int, message: str
) -> None:
    region = regions.open(mapping, 64, 64, (1, 1))
    with pytest.raises(ValueError, match=message):
        maker.tensor(region, offset, shape, 0, bits)
    assert not region.is_viewed


def test_numbers_that_are_none_of_c_are_refused(mapping: Mapping, regions: Regions) -> None:
    region = regions.open(mapping, 0, 64, (1, 1))
    for offset, shape in ((-1, (1,)), (2**64, (1,)), (0, (2**63,))):
        with pytest.raises(OverflowError):
            MAKER.tensor(region, offset, shape, *INT32)
    with pytest.raises(TypeError):
        MAKER.tensor(region, 0, ("1",), *INT32)
    for key in ((-1, 0), (0, 2**64)):
        with pytest.raises(OverflowError):
            regions.open(mapping, 0, 64, key)
    assert not region.is_viewed


@for_each(("offset", "nbytes"), [(0, NBYTES + 1), (NBYTES, 1), (NBYTES + 1, 0), (64, 2**64 - 64)])
def test_a_region_lies_in_its_mapping(mapping: Mapping, regions: Regions, offset: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match="exceed a mapping"):
        regions.open(mapping, offset, nbytes, (0, 0))


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS.keys())
def test_what_torch_refuses_holds_nothing(mapping: Mapping, regions: Regions, maker: TensorMaker) -> None:
    region = regions.open(mapping, 0, 64, (1, 1))
    with pytest.raises((RuntimeError, BufferError)):
        maker.tensor(region, 0, (1,), 200, 32)
    assert not region.is_viewed
    assert not region.leave()


def test_what_is_handed_in_may_fail_in_its_own_way(mapping: Mapping, regions: Regions) -> None:
    kept: list[Any] = []
    region = regions.open(mapping, 0, 64, (1, 1))

    def fail(capsule: Any) -> None:
        kept.append(capsule)
        raise KeyError("of its own")

    def take_and_fail(capsule: Any) -> None:
        torch.from_dlpack(capsule)
        raise KeyError("of its own")

    for from_dlpack in (fail, take_and_fail):
        with pytest.raises(KeyError, match="of its own"):
            TensorMaker(from_dlpack).tensor(region, 0, (1,), *INT32)
        assert not region.is_viewed


def test_a_table_of_another_version_is_not_used() -> None:
    assert not uses_table(MAKERS["capsule"])
    if TABLE is not None:
        assert uses_table(MAKERS["table"])
    with pytest.raises(ValueError, match="PyCapsule"):
        TensorMaker(torch.from_dlpack, object())
    assert not uses_table(TensorMaker(torch.from_dlpack, capsule_of_version(2)))


def capsule_of_version(major: int) -> Any:
    """A capsule with a table that is none, of a version."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    _kept.append(ctypes.create_string_buffer(major.to_bytes(4, sys.byteorder) + bytes(60)))
    return new(ctypes.addressof(_kept[-1]), b"dlpack_exchange_api", None)


_kept: list[Any] = []


# -- regions without an owner -------------------------------------------------------------------------------------------


@each_kind
def test_a_copy_is_the_views_own(make: Callable[[Region], Any]) -> None:
    source = bytearray(range(64))
    region = copied(source)
    assert region.nbytes == 64
    views = [make(region), make(region)]
    source[:] = bytes(64)
    assert region.leave()
    for view in views:
        shown = view.numpy() if isinstance(view, torch.Tensor) else view
        assert bytes(memoryview(shown))[:32] == bytes(range(32))


def test_copies_of_any_size_begin_with_a_line_of_the_cache() -> None:
    copies = [copied(bytes(nbytes)) for nbytes in range(100)]  # all at once, or the memory of one is that of the next
    assert {each.address % 64 for each in copies} == {0}


def test_nothing_can_be_copied_too() -> None:
    region = copied(b"")
    assert region.nbytes == 0
    assert bytes(region.memory()) == b""
    with pytest.raises(ValueError, match="exceeds"):
        tensor(region, (1,))


def test_what_is_borrowed_is_looked_after_by_somebody_else() -> None:
    memory = np.arange(16, dtype=np.int32)
    view = tensor(borrowed(memory.ctypes.data, memory.nbytes), (4,), 16)
    assert view.tolist() == [4, 5, 6, 7]


# -- anywhere -----------------------------------------------------------------------------------------------------------


@each_kind
def test_a_view_may_die_on_another_thread(mapping: Mapping, regions: Regions, make: Callable[[Region], Any]) -> None:
    region = regions.open(mapping, 0, 64, (1, 1))
    held = [make(region)]
    region.leave()
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert rings(regions)
    assert regions.collect() == [(1, 1)]


def test_a_view_may_die_in_autograd(mapping: Mapping, regions: Regions) -> None:
    """Its graph is taken apart on a thread of torch's, without the interpreter's lock."""
    region = regions.open(mapping, 0, 64, (1, 1))
    view = tensor(region).view(torch.float32)
    view.fill_(2)
    leaf = torch.ones(8, requires_grad=True)
    loss = (leaf * view).sum()
    del view
    region.leave()
    loss.backward()  # frees what was saved for it
    assert regions.collect() == [(1, 1)]
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [2.0] * 8


class Unlocked:
    """A view as torch has one, which dies without the interpreter's lock: ctypes gives it back while it calls the deleter."""

    _DELETER = 56  # where it stands in a DLManagedTensor, behind a DLTensor of 48 bytes and a pointer

    def __init__(self, region: Region) -> None:
        capsule = TensorMaker(lambda capsule: capsule).tensor(region, 0, (8,), *INT32)
        pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
        pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        self._tensor = pointer_of(capsule, b"dltensor")
        self._delete = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(ctypes.c_void_p.from_address(self._tensor + self._DELETER).value)

    def __del__(self) -> None:
        self._delete(self._tensor)


def test_many_threads_drop_views_while_the_owner_leaves_and_collects(mapping: Mapping) -> None:
    """Each region is either free when it is left or collected, once, and the bell never fails to ring."""
    regions, count, threads = Regions(), 4000, 4
    queues: list[list[Any]] = [[] for _ in range(threads)]
    ends = threading.Event()

    def drop(queue: list[Any]) -> None:
        while not (ends.is_set() and not queue):
            if queue:
                queue.pop()

    droppers = [threading.Thread(target=drop, args=(queue,)) for queue in queues]
    for thread in droppers:
        thread.start()
    gone: list[tuple[int, int]] = []
    kinds = [*KINDS.values(), Unlocked, Unlocked, Unlocked]
    for key in range(count):
        region = regions.open(mapping, 64 * (key % 512), 64, (7, key))
        for index, queue in enumerate(queues):
            queue.append(kinds[(key + index) % len(kinds)](region))
        if not region.leave():
            gone.append((7, key))
        if not key % 16:
            gone += regions.collect()
    ends.set()
    while len(gone) < count:
        assert select.select([regions.bell], [], [], 10)[0], f"{count - len(gone)} regions were never reported"
        gone += regions.collect()
    for thread in droppers:
        thread.join()
    assert sorted(gone) == [(7, key) for key in range(count)]
    assert (len(regions), regions.collect(), regions.living()) == (0, [], [])


def test_threads_drop_views_while_the_owner_ends(mapping: Mapping) -> None:
    """Before the stack is closed, meanwhile or afterwards: nothing is touched that is gone."""
    for _ in range(300):
        regions, queue = Regions(), []
        for key in range(8):
            region = regions.open(mapping, 64 * key, 64, (0, key))
            queue.append(tensor(region))
            region.leave()
        start = threading.Barrier(2)

        def drop(queue: list[Any] = queue, start: threading.Barrier = start) -> None:
            start.wait()
            while queue:
                queue.pop()

        thread = threading.Thread(target=drop)
        thread.start()
        bell = regions.bell
        start.wait()
        regions.collect()
        regions.close()
        del regions, region
        thread.join()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(bell)


@pytest.mark.skipif(not IS_STEPPED, reason="only x86 stops behind each instruction")
def test_a_last_view_may_die_at_any_moment_while_its_region_is_left(mapping: Mapping) -> None:
    """On another thread, without the interpreter's lock: the owner is told of it, at once or later."""

    def begin() -> tuple[Callable[[], bool], LastView, Callable[[bool], None]]:
        regions = Regions()
        region = regions.open(mapping, 0, 64, (1, 2))

        def check(drains: bool) -> None:
            assert rings(regions) == drains
            assert regions.collect() == ([(1, 2)] if drains else [])
            assert (len(regions), regions.living()) == (0, [])

        return region.leave, LastView(region), check

    assert at_each_step(compiled, begin) > 20


@pytest.mark.skipif(not IS_STEPPED, reason="only x86 stops behind each instruction")
def test_a_last_view_may_die_at_any_moment_while_others_are_collected(mapping: Mapping) -> None:
    """What is not among those that are collected rings again."""

    def begin() -> tuple[Callable[[], list[tuple[int, int]]], LastView, Callable[[list[tuple[int, int]]], None]]:
        regions = Regions()
        region = regions.open(mapping, 0, 64, (1, 2))
        last = LastView(region)
        assert region.leave()

        def check(collected: list[tuple[int, int]]) -> None:
            assert collected or rings(regions)
            assert collected + regions.collect() == [(1, 2)]

        return regions.collect, last, check

    assert at_each_step(compiled, begin) > 20


@each_kind
def test_a_death_in_a_forked_child_is_none_in_its_parent(
    mapping: Mapping, regions: Regions, make: Callable[[Region], Any]
) -> None:
    region = regions.open(mapping, 0, 64, (1, 1))
    view = make(region)
    region.leave()

    def dies() -> None:
        nonlocal view
        view = None
        assert (1, 1) in regions.collect()
        regions.close()

    in_child(dies)
    assert not rings(regions)
    assert regions.collect() == []
    other = regions.open(mapping, 64, 64, (1, 2))
    view_of_other = make(other)
    other.leave()
    del view_of_other
    assert rings(regions)
    in_child(dies)
    assert rings(regions), "a child that collects does not take the parent's ring"
    view = None
    assert regions.collect() == [(1, 2), (1, 1)]


def test_views_may_live_until_the_interpreter_has_ended(nursery: Nursery) -> None:
    """Kept by a module, a cycle, a thread that never ends, what runs at the exit, and torch itself."""
    script = """
import atexit, gc, os, threading, torch, numpy as np
from shmring.core import compiled
from shmring.core.compiled import Mapping
from shmring.core.compiled import Regions, TensorMaker
gc.disable()
fd = os.memfd_create("views")
os.ftruncate(fd, 4096)
mapping, regions = Mapping(fd, 4096), Regions()
maker = TensorMaker(torch.from_dlpack, getattr(torch.Tensor, "__dlpack_c_exchange_api__", None))
def views_of(key):
    region, held = regions.open(mapping, 0, 64, (1, key)), regions.open(mapping, 64, 64, (2, key))
    views = [maker.tensor(region, 0, (4,), 0, 32), np.ndarray((4,), np.int32, held.memory()), memoryview(region.memory()), held]
    region.leave()
    return views
os.kept = views_of(1)
cycle = views_of(2)
cycle.append(cycle)
del cycle
threading.Thread(target=lambda views: threading.Event().wait(), args=(views_of(3),), daemon=True).start()
atexit.register(views_of(4).clear)
torch.kept = torch.nn.Parameter(views_of(5)[0], requires_grad=False)
print(len(regions))
"""
    ended = nursery.run_text(script)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "5\n", "")


def test_what_drains_when_its_owner_ends_is_unmapped_with_its_last_view() -> None:
    fd = os.memfd_create("memory")
    os.ftruncate(fd, 1 << 16)
    mapping, regions = Mapping(fd, 1 << 16), Regions()
    os.close(fd)
    address = f"{mapping.address:x}-"
    region = regions.open(mapping, 0, 4096, (1, 2))
    view = region.memory()
    assert region.leave()
    regions.close()
    del mapping, region
    assert address in Path("/proc/self/maps").read_text()
    del view
    assert address not in Path("/proc/self/maps").read_text()
