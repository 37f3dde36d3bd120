"""When a slot in device memory may be used again: after its last view, and after the events on all of its streams."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shmring.core.messages import TensorRef
from shmring.errors import RemoteProtocolError
from shmring.gpu.cuda import DeviceBytes
from shmring.gpu.device_views import DeviceViews
from shmring.memory.views import device_view


class Noticed:
    """Device views whose reports are collected, as a loop would."""

    def __init__(self, cuda: Any) -> None:
        self.woken = threading.Event()
        self.views: DeviceViews[str] = DeviceViews(cuda, 0, self.woken.set)
        self.memory = torch.zeros(64, dtype=torch.uint8)
        self.over: list[str] = []

    def lend(self, key: str, stream: Any) -> DeviceBytes:
        self.views.use(key, stream)
        lent = DeviceBytes(self.memory, self.memory.data_ptr(), 64)
        self.views.watch(key, lent)
        return lent

    def collect(self) -> list[str]:
        self.over += self.views.collect()
        return self.over

    def eventually(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline
            self.collect()
            time.sleep(0.001)


@pytest.fixture
def noticed(cuda: Any) -> Noticed:
    return Noticed(cuda)


def test_a_slot_is_over_after_its_view_and_then_its_streams(noticed: Noticed, cuda: Any) -> None:
    streams = [cuda.create_stream(0) for _ in range(2)]
    for stream in streams:
        stream.held = True
    lent = noticed.lend("slot", streams[0])
    noticed.views.use("slot", streams[1])
    assert "slot" in noticed.views
    assert noticed.views.lent("slot") is lent
    noticed.views.leave("slot")
    assert noticed.collect() == []
    assert cuda.calls["record"] == 0, "while it is viewed, more may be queued on it"
    del lent
    gc.collect()
    noticed.eventually(lambda: cuda.calls["record"] == 3)  # these streams, and the current one
    assert "slot" not in noticed.views
    cuda.release(streams[0])
    noticed.eventually(lambda: [*cuda.awaited] == [*streams[1].queue])
    assert noticed.collect() == []
    cuda.release(streams[1])
    noticed.eventually(lambda: noticed.over == ["slot"])
    assert noticed.views.close(10)


def test_without_draining_views_are_not_waited_for(noticed: Noticed, cuda: Any) -> None:
    lent = noticed.lend("slot", cuda.create_stream(0))
    noticed.views.leave("slot", drain=False)
    noticed.eventually(lambda: noticed.over == ["slot"])
    assert noticed.views.lent("slot") is None
    del lent
    gc.collect()
    assert noticed.collect() == ["slot"], "reported once"
    assert noticed.views.close(10)


def test_a_slot_that_was_never_viewed_waits_for_its_streams(noticed: Noticed, cuda: Any) -> None:
    stream = cuda.create_stream(0)
    stream.held = True
    noticed.views.use("slot", stream)
    noticed.views.leave("slot")
    assert noticed.views.lent("slot") is None, "what holds it now is no view"
    noticed.eventually(lambda: bool(cuda.awaited))
    assert noticed.collect() == []
    cuda.release()
    noticed.eventually(lambda: noticed.over == ["slot"])


@pytest.mark.parametrize("failing", ["record", "current_stream", "synchronize"])
def test_where_cuda_fails_the_slot_is_never_over(noticed: Noticed, cuda: Any, failing: str) -> None:
    stream = cuda.create_stream(0)
    cuda.fail(failing)
    noticed.views.use("slot", stream)
    noticed.views.leave("slot")
    noticed.eventually(lambda: noticed.views.lost == 1)
    assert noticed.collect() == []
    assert not noticed.views.close(10)


def test_after_the_end_each_death_of_a_view_still_wakes(noticed: Noticed, cuda: Any) -> None:
    lent = noticed.lend("slot", cuda.create_stream(0))
    noticed.views.abandon()
    assert not noticed.woken.is_set()
    del lent
    gc.collect()
    assert noticed.woken.is_set()


# -- tensors there -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "complex128", "float8_e4m3fn", "int64"])
def test_a_tensor_on_a_device_is_a_view_of_its_bytes(dtype: str) -> None:
    region = torch.arange(128, dtype=torch.uint8) % 2
    wanted: torch.dtype = getattr(torch, dtype)
    view = device_view(TensorRef(1, 32, 3 * wanted.itemsize, dtype, (3, 1)), region)
    assert (view.dtype, view.shape, view.data_ptr()) == (wanted, (3, 1), region.data_ptr() + 32)
    assert device_view(TensorRef(1, 0, 0, dtype, (0, 7)), region).shape == (0, 7)
    assert device_view(TensorRef(1, 16, wanted.itemsize, dtype, ()), region).shape == ()


@pytest.mark.parametrize(("dtype", "offset"), [("<f4", 0), ("<U1", 0), ("M8[s]", 0), ("float32", 2)])
def test_what_torch_cannot_have_there_is_refused(dtype: str, offset: int) -> None:
    with pytest.raises(RemoteProtocolError, match="can't be"):
        device_view(TensorRef(1, offset, 4, dtype, (1,)), torch.zeros(64, dtype=torch.uint8))
