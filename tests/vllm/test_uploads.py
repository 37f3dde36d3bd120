"""What a copy to a GPU reads is held until an event behind the copy; the events are made up."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from shmring.integrations.vllm.uploads import Uploads


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
def uploads(events: list[Event]) -> Iterator[Uploads]:
    def record() -> Event:
        events.append(Event())
        return events[-1]

    uploads = Uploads(record)
    yield uploads
    uploads.close()
    eventually(lambda: "shmring uploads" not in [thread.name for thread in threading.enumerate()])


def start(uploads: Uploads) -> weakref.ref[torch.Tensor]:
    source = torch.zeros(8)
    uploads.started([source])
    return weakref.ref(source)


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_source_is_held_until_its_copy_is_over_and_no_longer(uploads: Uploads, events: list[Event]) -> None:
    first, second = start(uploads), start(uploads)
    assert first() is not None
    events[0].passed.set()
    eventually(lambda: first() is None)
    assert second() is not None
    events[1].passed.set()
    eventually(lambda: second() is None)


def test_where_cuda_has_failed_nothing_is_released(
    uploads: Uploads, events: list[Event], caplog: pytest.LogCaptureFixture
) -> None:
    source = start(uploads)
    events[0].fails = True
    events[0].passed.set()
    eventually(lambda: "tensors stay in the slab, since CUDA failed" in caplog.text)
    assert source() is not None
