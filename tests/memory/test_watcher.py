"""The thread that waits for the GPU: it lets go in order, and keeps for good what CUDA can't speak of."""

from __future__ import annotations

from typing import Any

import pytest

from shmring.core.compiled import Regions
from shmring.gpu.cuda import CudaError
from shmring.gpu.watcher import Watcher
from tests.waiting import until


class Guarding:
    """A watcher, and what it has let go of."""

    def __init__(self, cuda: Any) -> None:
        self.regions, self.watcher = Regions(), Watcher(cuda.gpu(0), "test")
        self.stream = cuda.create_stream(0)
        self.stream.held = True
        self._gone: list[int] = []

    def guard(self, number: int) -> None:
        assert not self.watcher.watch.follow(self.regions, (0, number), [self.stream.cuda_stream])
        assert not self.watcher.watch.look()

    @property
    def gone(self) -> list[int]:
        self._gone += [number for _, number in self.regions.collect()]
        return self._gone


@pytest.fixture
def guarding(cuda: Any) -> Guarding:
    return Guarding(cuda)


def test_what_is_guarded_lives_until_its_event(cuda: Any, guarding: Guarding) -> None:
    for number in range(5):
        guarding.guard(number)
    cuda.advance(guarding.stream)
    until(lambda: guarding.gone == [0])
    cuda.release()
    until(lambda: guarding.gone == [0, 1, 2, 3, 4])
    assert cuda.calls["cuEventCreate"] == 5
    guarding.stream.held = True
    guarding.guard(5)
    assert cuda.calls["cuEventCreate"] == 5, "events are used again"
    cuda.release()
    assert guarding.watcher.close(10)
    assert guarding.watcher.close(10)
    assert guarding.gone == [0, 1, 2, 3, 4, 5]


def test_an_idle_stream_is_not_waited_for(cuda: Any, guarding: Guarding) -> None:
    cuda.release()
    assert guarding.watcher.watch.follow(guarding.regions, (0, 1), [guarding.stream.cuda_stream])
    assert cuda.calls["cuEventRecord"] == 0
    assert guarding.gone == []


def test_a_stream_that_is_at_work_does_not_hide_another_one(cuda: Any, guarding: Guarding) -> None:
    other = cuda.create_stream(0)
    other.held = True
    watch = guarding.watcher.watch
    assert not watch.follow(guarding.regions, (0, 1), [guarding.stream.cuda_stream])
    assert not watch.follow(guarding.regions, (0, 2), [other.cuda_stream])
    cuda.release(other)
    assert watch.look()
    assert guarding.gone == [2]
    cuda.release()
    assert guarding.watcher.close(10)
    assert guarding.gone == [2, 1]


def test_what_cannot_be_looked_at_is_waited_for(cuda: Any, guarding: Guarding) -> None:
    cuda.fail("cuEventQuery")
    guarding.guard(1)
    cuda.release()
    until(lambda: guarding.gone == [1])
    assert guarding.watcher.close(10)


def test_closing_waits_for_what_is_guarded(cuda: Any, guarding: Guarding) -> None:
    guarding.guard(1)
    assert not guarding.watcher.close(0.01)
    assert guarding.gone == []
    cuda.release()
    assert guarding.watcher.close(10)
    assert guarding.gone == [1]


@pytest.mark.parametrize("call", ["cuEventSynchronize", "cuEventRecord", "cuEventCreate", "cuStreamQuery"])
def test_what_nobody_can_speak_of_is_kept_and_counted(
    cuda: Any, guarding: Guarding, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.fail(call)
    if call == "cuEventSynchronize":
        guarding.guard(1)
        cuda.release()
        until(lambda: "until this process ends: cuEventSynchronize failed: made to fail (error 999)" in caplog.text)
    else:
        with pytest.raises(CudaError, match=f"{call} failed") as caught:
            guarding.guard(1)
        assert (caught.value.call, caught.value.code) == (call, 999)
    guarding.stream.held = True
    guarding.guard(2)
    cuda.release()
    until(lambda: guarding.gone == [2])
    assert not guarding.watcher.close(10)
    assert guarding.watcher.watch.kept == 1
    assert guarding.gone == [2]
