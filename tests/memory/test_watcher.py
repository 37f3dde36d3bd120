"""The thread that waits for events: it lets go after them, in their order, and keeps for good what CUDA can't speak of."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from shmring.gpu.watcher import Watcher


class Guarded:
    """Something whose death can be seen."""


async def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


def guard(watcher: Watcher, event: Any) -> weakref.ref[Guarded]:
    guarded = Guarded()
    watcher.guard(event, [guarded])
    return weakref.ref(guarded)


async def test_what_is_guarded_lives_until_its_event(cuda: Any) -> None:
    watcher, stream = Watcher(cuda, "test"), cuda.create_stream(0)
    stream.held = True
    events = [cuda.record(stream) for _ in range(2)]
    first, second = (guard(watcher, event) for event in events)
    cuda.advance(stream)
    await wait_for(lambda: first() is None)
    assert second() is not None
    cuda.release()
    await wait_for(lambda: second() is None)
    assert watcher.close(10)
    assert watcher.close(10)


async def test_closing_waits_for_what_is_guarded(cuda: Any) -> None:
    watcher, stream = Watcher(cuda, "test"), cuda.create_stream(0)
    stream.held = True
    guarded = guard(watcher, cuda.record(stream))
    assert not watcher.close(0.01)
    assert guarded() is not None
    cuda.release()
    assert watcher.close(10)
    assert guarded() is None


async def test_the_thread_gets_what_came_in_a_turn_when_that_is_over(cuda: Any) -> None:
    watcher, stream = Watcher(cuda, "test"), cuda.create_stream(0)
    guarded = [guard(watcher, cuda.record(stream)) for _ in range(3)]
    time.sleep(0.05)
    assert all(reference() is not None for reference in guarded), "the thread was woken in the midst of the turn"
    await wait_for(lambda: all(reference() is None for reference in guarded))
    assert watcher.close(10)


@pytest.mark.parametrize("kept", ["by its user", "by a failure"])
async def test_what_nobody_can_speak_of_is_kept_and_counted(cuda: Any, kept: str, caplog: pytest.LogCaptureFixture) -> None:
    watcher, guarded = Watcher(cuda, "test"), Guarded()
    reference = weakref.ref(guarded)
    if kept == "by its user":
        watcher.keep([guarded])
    else:
        cuda.fail("synchronize")
        watcher.guard(cuda.record(cuda.create_stream(0)), [guarded])
        await wait_for(lambda: watcher.kept == 1)
        assert "until this process ends: synchronize failed" in caplog.text
    del guarded
    assert not watcher.close(10)
    assert (watcher.kept, reference() is None) == (1, False)
