"""The device slab: opened once, closed in order, found on whatever index its GPU has here; and the events beside it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shmring.core.compiled import Region, Regions
from shmring.errors import LocalProtocolError, RemoteProtocolError
from shmring.gpu import device as device_module
from shmring.gpu.cuda import CudaError
from shmring.gpu.device import DeviceHandle, DeviceSlab, Fences, OpenedFences
from shmring.memory.views import TENSOR_MAKER
from tests.tables import for_each

MIB = 1 << 20


@pytest.fixture(autouse=True)
def nothing_stays_mapped() -> Iterator[None]:
    yield
    assert device_module._mappings == {}


@pytest.fixture
def memory(device_memory: Any) -> Any:
    return device_memory


def lend(slab: DeviceSlab, offset: int, nbytes: int) -> tuple[Region, torch.Tensor]:
    region = slab.memory.lend(Regions(), offset, nbytes, (0, 0))
    return region, TENSOR_MAKER.tensor(region, 0, (nbytes,), 1, 8)


def elsewhere(memory: Any, nbytes: int = 2 * MIB, uuid: str = "GPU-b") -> DeviceHandle:
    """A handle that another process exported."""
    return DeviceHandle(uuid, memory.export(1, memory.allocate(1, nbytes)), nbytes)


def test_an_engine_allocates_once_and_frees_it(cuda: Any, memory: Any) -> None:
    slab = DeviceSlab.create(cuda, memory, 1, 3 * MIB)
    assert (slab.nbytes, slab.device_index, slab.handle.uuid) == (4 * MIB, 1, "GPU-b")
    assert slab.close()
    assert slab.close()
    assert memory.log == [("allocate", 1), ("export", 1), ("free", 1)]


@pytest.mark.parametrize(("failing", "left"), [("allocate", ["allocate"]), ("export", ["allocate", "export", "free"])])
def test_a_slab_that_cannot_be_made_leaves_nothing(cuda: Any, memory: Any, failing: str, left: list[str]) -> None:
    memory.failing = failing
    with pytest.raises(CudaError, match=f"{failing} failed"):
        DeviceSlab.create(cuda, memory, 0, MIB)
    assert [name for name, _ in memory.log] == left
    assert memory.memory == {}


def test_a_frontend_finds_the_gpu_whatever_its_index_is_here(cuda: Any, memory: Any) -> None:
    cuda.visible = ["GPU-b", "GPU-a"]
    slab = DeviceSlab.attach(cuda, memory, elsewhere(memory))
    assert slab.device_index == 0
    assert memory.log[-1] == ("open", 0)
    assert slab.close()
    assert memory.log[-1] == ("close", 0)


def test_a_gpu_that_this_process_does_not_see_is_named(cuda: Any, memory: Any) -> None:
    cuda.visible = ["GPU-a"]
    with pytest.raises(CudaError, match=r"is on GPU-b, which this process does not see; add it to CUDA_VISIBLE_DEVICES"):
        DeviceSlab.attach(cuda, memory, elsewhere(memory))


def test_without_cuda_there_is_none(cuda: Any, memory: Any) -> None:
    cuda.reason = "torch finds no CUDA device"
    with pytest.raises(CudaError, match="no device slab here: torch finds no CUDA device"):
        DeviceSlab.create(cuda, memory, 0, MIB)
    with pytest.raises(CudaError, match="no device slab here"):
        DeviceSlab.attach(cuda, memory, DeviceHandle("GPU-a", bytes(64), MIB))


def test_a_handle_is_opened_once_and_closed_by_the_last(cuda: Any, memory: Any) -> None:
    handle = elsewhere(memory)
    first, second = (DeviceSlab.attach(cuda, memory, handle) for _ in range(2))
    assert [name for name, _ in memory.log].count("open") == 1
    assert first.close()
    assert first.close()
    assert memory.opened
    assert second.close()
    assert memory.opened == []


def test_the_process_that_exported_a_slab_does_not_open_it(cuda: Any, memory: Any) -> None:
    owner = DeviceSlab.create(cuda, memory, 0, MIB)
    attached = DeviceSlab.attach(cuda, memory, owner.handle)
    lent, view = lend(attached, 64, 8)
    view.fill_(7)
    assert lend(owner, 64, 8)[1].tolist() == [7] * 8
    del lent, view
    gc.collect()
    assert owner.close()
    assert memory.memory, "the other one still uses it"
    assert attached.close()
    assert memory.memory == {}
    assert "open" not in [name for name, _ in memory.log]


def test_what_is_viewed_stays_mapped(cuda: Any, memory: Any) -> None:
    slab = DeviceSlab.attach(cuda, memory, elsewhere(memory))
    lent, view = lend(slab, 4096, 16)
    derived = view[:8].view(torch.int64)
    assert not slab.close()
    del lent, view
    gc.collect()
    assert not slab.close()
    with pytest.raises(LocalProtocolError, match="closed"):
        lend(slab, 0, 1)
    derived.fill_(3)
    del derived
    gc.collect()
    assert slab.close()
    assert memory.opened == []


@for_each(("offset", "nbytes"), [(-1, 10), (2 * MIB - 4, 5), (2 * MIB, 1)])
def test_views_are_inside_the_slab(cuda: Any, memory: Any, offset: int, nbytes: int) -> None:
    slab = DeviceSlab.create(cuda, memory, 0, 2 * MIB)
    with pytest.raises((ValueError, OverflowError)):
        lend(slab, offset, nbytes)
    assert slab.close()


def test_a_slab_that_cuda_does_not_take_back_is_reported_once(cuda: Any, memory: Any) -> None:
    slab = DeviceSlab.create(cuda, memory, 0, MIB)
    memory.failing = "free"
    with pytest.raises(CudaError, match="free failed"):
        slab.close()
    assert slab.close()


def test_a_handle_that_cannot_be_opened_can_be_tried_again(cuda: Any, memory: Any) -> None:
    handle = elsewhere(memory)
    memory.failing = "open"
    with pytest.raises(CudaError, match="open failed"):
        DeviceSlab.attach(cuda, memory, handle)
    memory.failing = ""
    assert DeviceSlab.attach(cuda, memory, handle).close()


# -- events --------------------------------------------------------------------------------------------------------------


def forget_that_they_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this process, for events, somebody else than who made them."""
    monkeypatch.setattr(device_module, "_fences", {})


def test_the_consumers_stream_waits_for_the_producers(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    producing, consuming = cuda.create_stream(0), cuda.create_stream(0)
    producing.held = True
    fence = Fences(cuda.gpu(0)).record(producing.cuda_stream)
    forget_that_they_are_ours(monkeypatch)
    OpenedFences(cuda.gpu(0), 4).wait(consuming.cuda_stream, fence.handle)
    assert not cuda.record(consuming).reached.is_set()
    cuda.release(producing)
    assert not consuming.queue


def test_events_are_made_exported_and_opened_once(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, fences = cuda.create_stream(0), Fences(cuda.gpu(0))
    opened = OpenedFences(cuda.gpu(0), 4)
    for _ in range(5):
        fence = fences.record(stream.cuda_stream)
        with monkeypatch.context() as patch:
            forget_that_they_are_ours(patch)
            opened.wait(stream.cuda_stream, fence.handle)
        fences.give_back(fence)
    assert (cuda.calls["cuIpcGetEventHandle"], cuda.calls["cuIpcOpenEventHandle"], cuda.calls["cuEventRecord"]) == (1, 1, 5)


def test_slots_on_their_way_have_events_of_their_own(cuda: Any) -> None:
    stream, fences = cuda.create_stream(0), Fences(cuda.gpu(0))
    first, second = fences.record(stream.cuda_stream), fences.record(stream.cuda_stream)
    assert first.handle != second.handle
    fences.give_back(first)
    assert fences.record(stream.cuda_stream) is first


def test_an_event_is_not_opened_where_it_was_made(cuda: Any) -> None:
    stream = cuda.create_stream(0)
    fence = Fences(cuda.gpu(0)).record(stream.cuda_stream)
    OpenedFences(cuda.gpu(0), 4).wait(stream.cuda_stream, fence.handle)
    assert cuda.calls["cuIpcOpenEventHandle"] == 0


def test_a_frontend_cannot_make_the_engine_open_ever_more(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, fences, opened = cuda.create_stream(0), Fences(cuda.gpu(0)), OpenedFences(cuda.gpu(0), 2)
    handles = [fences.record(stream.cuda_stream).handle for _ in range(3)]
    forget_that_they_are_ours(monkeypatch)
    for handle in [*handles[:2], *handles[:2]]:
        opened.wait(stream.cuda_stream, handle)
    with pytest.raises(RemoteProtocolError, match="more than 2 events"):
        opened.wait(stream.cuda_stream, handles[2])


def test_what_is_no_handle_is_the_frontends_fault(cuda: Any) -> None:
    cuda.fail("cuIpcOpenEventHandle")
    with pytest.raises(RemoteProtocolError, match="a frontend's event can't be opened: cuIpcOpenEventHandle failed"):
        OpenedFences(cuda.gpu(0), 2).wait(cuda.create_stream(0).cuda_stream, bytes(64))
