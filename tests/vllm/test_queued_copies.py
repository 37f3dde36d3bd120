"""What a copy to a GPU reads is held until an event behind the copy; the events are made up."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

import pytest
import torch

from shmring.integrations.vllm.queued_copies import QueuedCopies
from tests.waiting import until


class Event:
    """An event that comes to pass when a test says so."""

    def __init__(self) -> None:
        self.passed = threading.Event()
        self.fails = False

    def synchronize(self) -> None:
        assert self.passed.wait(10)
        if self.fails:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def copies(events: list[Event]) -> Iterator[QueuedCopies]:
    def record() -> Event:
        events.append(Event())
        return events[-1]

    copies = QueuedCopies(record)
    yield copies
    copies.close()
    until(lambda: "shmring copies" not in [thread.name for thread in threading.enumerate()])


def start(copies: QueuedCopies) -> weakref.ref[torch.Tensor]:
    source = torch.zeros(8)
    copies.started([source])
    return weakref.ref(source)


def test_a_source_is_held_until_its_copy_is_over_and_no_longer(copies: QueuedCopies, events: list[Event]) -> None:
    first, second = start(copies), start(copies)
    assert first() is not None
    events[0].passed.set()
    until(lambda: first() is None)
    assert second() is not None
    events[1].passed.set()
    until(lambda: second() is None)


def test_a_large_tensor_is_held_whatever_copies_it(copies: QueuedCopies, events: list[Event]) -> None:
    copy = copies.around(lambda data, device=None: (len(data), device), 32)
    assert copy([1, 2], device="cuda") == (2, "cuda")
    small, large = torch.zeros(4), torch.zeros(8)
    assert copy(small, device="cuda") == (4, "cuda")
    assert copy(large, "cuda") == (8, "cuda")
    gone = [weakref.ref(small), weakref.ref(large)]
    del small, large
    assert [reference() is None for reference in gone] == [True, False]
    (event,) = events
    event.passed.set()
    until(lambda: gone[1]() is None)


def test_where_cuda_has_failed_nothing_is_released(
    copies: QueuedCopies, events: list[Event], caplog: pytest.LogCaptureFixture
) -> None:
    source = start(copies)
    events[0].fails = True
    events[0].passed.set()
    until(lambda: "tensors stay in the slab, since CUDA failed" in caplog.text)
    assert source() is not None
