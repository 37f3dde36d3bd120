"""When a slot in device memory may be used again: after its last view, and after the events on all of its streams."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from shmring.core.compiled import GpuMemory
from shmring.gpu.device_views import DeviceViews, Key
from shmring.memory.views import TENSOR_MAKER

SLOT = (3, 1 << 60)


class Noticed:
    """Device views whose reports are collected, in a loop that has turns when a test says so."""

    def __init__(self, cuda: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.views = DeviceViews(cuda, 0, loop, self.report)
        self.memory = torch.zeros(64, dtype=torch.uint8)
        self.lendable = GpuMemory(cuda.gpu(0), self.memory.data_ptr(), 64)
        self.reports = 0
        self.over: list[Key] = []

    def report(self) -> None:
        self.reports += 1
        self.over += self.views.collect()

    def lend(self, stream: Any) -> torch.Tensor:
        """Returns a view of the slot, which is used on a stream."""
        self.views.use(SLOT, stream.cuda_stream)
        region = self.views.region(SLOT, self.lendable, 0, 64)
        assert self.views.region(SLOT, self.lendable, 0, 64) is region
        view: torch.Tensor = TENSOR_MAKER.tensor(region, 0, (64,), 1, 8)
        return view

    def collect(self) -> list[Key]:
        self.loop.run_until_complete(asyncio.sleep(0.001))
        return self.over

    def eventually(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline
            self.collect()


@pytest.fixture
def noticed(cuda: Any) -> Iterator[Noticed]:
    loop = asyncio.new_event_loop()
    yield Noticed(cuda, loop)
    loop.close()


def test_a_slot_is_over_after_its_view_and_then_its_streams(noticed: Noticed, cuda: Any) -> None:
    streams = [cuda.create_stream(0) for _ in range(2)]
    for stream in streams:
        stream.held = True
    view = noticed.lend(streams[0])
    noticed.views.use(SLOT, streams[1].cuda_stream)
    assert SLOT in noticed.views
    assert noticed.views.is_viewed(SLOT)
    assert not noticed.views.leave(SLOT)
    assert noticed.collect() == []
    assert cuda.calls["cuEventRecord"] == 0, "while it is viewed, more may be queued on it"
    del view
    gc.collect()
    noticed.eventually(lambda: cuda.calls["cuEventRecord"] == 2)
    assert cuda.calls["cuStreamQuery"] == 3, "the current one is idle"
    assert SLOT not in noticed.views
    cuda.release(streams[0])
    noticed.eventually(lambda: [*cuda.awaited] == [recorded.event for recorded in streams[1].queue])
    assert noticed.collect() == []
    cuda.release(streams[1])
    noticed.eventually(lambda: noticed.over == [SLOT])
    assert noticed.views.close(10)


def test_what_an_idle_gpu_has_used_is_over_at_once(noticed: Noticed, cuda: Any) -> None:
    noticed.lend(cuda.create_stream(0))
    assert noticed.views.leave(SLOT)
    assert cuda.calls["cuEventRecord"] == 0
    assert SLOT not in noticed.views
    assert noticed.collect() == []
    assert noticed.views.close(10)


def test_without_draining_views_are_not_waited_for(noticed: Noticed, cuda: Any) -> None:
    stream = cuda.create_stream(0)
    stream.held = True
    view = noticed.lend(stream)
    assert not noticed.views.leave(SLOT, drain=False)
    cuda.release()
    noticed.eventually(lambda: noticed.over == [SLOT])
    assert not noticed.views.is_viewed(SLOT)
    assert noticed.lendable.lent == 1, "the memory must stay"
    del view
    gc.collect()
    assert noticed.lendable.lent == 0
    assert noticed.collect() == [SLOT], "reported once"
    assert noticed.views.close(10)


def test_a_slot_that_was_never_viewed_waits_for_its_streams(noticed: Noticed, cuda: Any) -> None:
    stream = cuda.create_stream(0)
    stream.held = True
    noticed.views.use(SLOT, stream.cuda_stream)
    assert not noticed.views.leave(SLOT)
    assert not noticed.views.is_viewed(SLOT), "what holds it now is no view"
    noticed.eventually(lambda: bool(cuda.awaited))
    assert noticed.collect() == []
    cuda.release()
    noticed.eventually(lambda: noticed.over == [SLOT])


def test_work_that_is_over_by_the_next_turn_of_the_loop_wakes_no_thread(noticed: Noticed, cuda: Any) -> None:
    stream = cuda.create_stream(0)
    for _ in range(3):
        stream.held = True
        noticed.lend(stream)
        assert not noticed.views.leave(SLOT)
        cuda.release()
    assert noticed.over == [], "the loop has not had a turn"
    noticed.eventually(lambda: noticed.over == [SLOT] * 3)
    assert cuda.calls["cuEventSynchronize"] == 0
    assert noticed.views.close(10)


def test_what_the_loop_had_no_turn_to_look_at_is_waited_for_at_the_end(noticed: Noticed, cuda: Any) -> None:
    stream = cuda.create_stream(0)
    stream.held = True
    noticed.lend(stream)
    assert not noticed.views.leave(SLOT)
    assert not noticed.views.close(0.05), "the GPU is at it"
    cuda.release()
    assert noticed.views.close(10)
    assert noticed.collect() == [SLOT]


@pytest.mark.parametrize("failing", ["cuEventRecord", "cuStreamQuery", "cuEventCreate", "current_stream", "cuEventSynchronize"])
def test_where_cuda_fails_the_slot_is_never_over(noticed: Noticed, cuda: Any, failing: str) -> None:
    stream = cuda.create_stream(0)
    stream.held = True
    cuda.fail(failing)
    noticed.views.use(SLOT, stream.cuda_stream)
    assert not noticed.views.leave(SLOT)
    noticed.collect()  # the loop finds it not over
    cuda.release()
    noticed.eventually(lambda: noticed.views.lost == 1)
    assert noticed.collect() == []
    assert not noticed.views.close(10)


def test_after_the_end_each_death_of_a_view_is_still_reported(noticed: Noticed, cuda: Any) -> None:
    view = noticed.lend(cuda.create_stream(0))
    noticed.views.abandon()
    noticed.collect()
    assert noticed.reports == 0
    del view
    gc.collect()
    noticed.collect()
    assert noticed.reports == 1
