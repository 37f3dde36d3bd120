"""The thread that waits for events: it lets go after them, in their order, and keeps for good what CUDA can't speak of."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from shmring.gpu.watcher import Watcher


class Guarded:
    """Something whose death can be seen."""


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def guard(watcher: Watcher, event: Any) -> weakref.ref[Guarded]:
    guarded = Guarded()
    watcher.guard(event, [guarded])
    return weakref.ref(guarded)


def test_what_is_guarded_lives_until_its_event(cuda: Any) -> None:
    watcher, stream = Watcher(cuda, "test"), cuda.create_stream(0)
    stream.held = True
    events = [cuda.record(stream) for _ in range(2)]
    first, second = (guard(watcher, event) for event in events)
    cuda.advance(stream)
    wait_for(lambda: first() is None)
    assert second() is not None
    cuda.release()
    wait_for(lambda: second() is None)
    assert watcher.close(10)
    assert watcher.close(10)


def test_closing_waits_for_what_is_guarded(cuda: Any) -> None:
    watcher, stream = Watcher(cuda, "test"), cuda.create_stream(0)
    stream.held = True
    guarded = guard(watcher, cuda.record(stream))
    assert not watcher.close(0.01)
    assert guarded() is not None
    cuda.release()
    assert watcher.close(10)
    assert guarded() is None


@pytest.mark.parametrize("kept", ["by its user", "by a failure"])
def test_what_nobody_can_speak_of_is_kept_and_counted(cuda: Any, kept: str, caplog: pytest.LogCaptureFixture) -> None:
    watcher, guarded = Watcher(cuda, "test"), Guarded()
    reference = weakref.ref(guarded)
    if kept == "by its user":
        watcher.keep([guarded])
    else:
        cuda.fail("synchronize")
        watcher.guard(cuda.record(cuda.create_stream(0)), [guarded])
        wait_for(lambda: watcher.kept == 1)
        assert "until this process ends: synchronize failed" in caplog.text
    del guarded
    assert not watcher.close(10)
    assert (watcher.kept, reference() is None) == (1, False)
