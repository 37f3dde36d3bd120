"""What makes vLLM's queue to its workers wait for ever ("No available shared memory broadcast block"), and does not make ours.

Both ends are in one process, each with a thread of its own. Dead and stopped workers are in ``test_queues.py``.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from shmring import threads
from shmring.integrations.vllm import queues
from shmring.integrations.vllm.queues import Reader, Writer

MB = 1 << 20
MOST_OUTSTANDING = 256  # messages of a ring to its workers
LIMIT_S = 60.0  # only what hangs takes so long


def begin(function: Callable[[], Any]) -> Future[Any]:
    """Calls a function in a thread of its own, for which no test that fails waits."""
    called: Future[Any] = Future()

    def call() -> None:
        try:
            called.set_result(function())
        except Exception as error:  # noqa: BLE001 - it is raised where the result is asked for
            called.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return called


@pytest.fixture
def writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Writer]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    ring = threads.serve(
        "test", slab_nbytes=1 * MB, broadcast_nbytes=16 * MB, served_by="callers", worker_backlog=MOST_OUTSTANDING
    )
    writer = Writer(ring, [0])
    yield writer
    writer.shutdown()


@pytest.fixture
def reader(writer: Writer) -> Iterator[Reader]:
    reader = Reader(writer.export_handle(), 0)
    joining = begin(reader.wait_until_ready)
    writer.wait_until_ready()
    joining.result(LIMIT_S)
    yield reader
    reader.shutdown()


def test_a_reader_that_sleeps_is_woken_by_each_object(writer: Writer, reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's is woken by a socket that drops what comes too soon (#45224). This one looks at nothing, and has no time-out."""
    monkeypatch.setattr(queues, "_LOOKING_S", -1.0)
    went_on = threading.Semaphore(0)

    def read() -> list[int]:
        came = []
        for _ in range(3000):
            came.append(reader.dequeue(indefinite=True))
            went_on.release()
        return came

    reading = begin(read)
    for number in range(3000):
        writer.enqueue(number)
        assert went_on.acquire(timeout=LIMIT_S)  # so that the next one comes as it falls asleep
    assert reading.result(LIMIT_S) == list(range(3000))


class Unreadable:
    """Can be sent; whoever reads it gets an error."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __setstate__(self, state: Any) -> None:
        raise ValueError("it can't be read")


@pytest.mark.parametrize("numbers", [1, 1 * MB, 8 * MB], ids=["in a record", "in memory", "in pieces"])
def test_what_cannot_be_read_keeps_no_room(writer: Writer, reader: Reader, numbers: int) -> None:
    """In vLLM's queue, its block stayed marked as unread (#45224)."""
    unreadable, count = Unreadable(torch.zeros(numbers, dtype=torch.float32)), MOST_OUTSTANDING + 2 if numbers == 1 else 6

    def write() -> None:
        for _ in range(count):
            writer.enqueue(unreadable)
        writer.enqueue("readable")

    writing = begin(write)
    for _ in range(count):
        with pytest.raises(ValueError, match="it can't be read"):
            reader.dequeue(LIMIT_S)
    assert reader.dequeue(LIMIT_S) == "readable"
    writing.result(LIMIT_S)


def test_threads_that_read_from_one_queue_get_all_of_it(writer: Writer, reader: Reader) -> None:
    """In vLLM's queue, one of them waits for a block that the other one has read (#50398)."""
    sent: list[Any] = [number if number % 7 else torch.full((6 * MB,), number, dtype=torch.float32) for number in range(60)]
    reading = [begin(lambda: [reader.dequeue() for _ in range(30)]) for _ in range(2)]
    begin(lambda: [writer.enqueue(thing) for thing in sent]).result(LIMIT_S)
    came = [thing for each in reading for thing in each.result(LIMIT_S)]
    assert sorted(int(thing if isinstance(thing, int) else thing[0]) for thing in came) == list(range(60))
    assert writer.counts.in_pieces > 0


def test_a_wait_that_may_take_for_ever_is_nothing_to_tell_of(
    writer: Writer, reader: Reader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM's idle queues have written the line (#43420). Of a wait for an answer, the log has who does not give it."""
    monkeypatch.setattr(queues, "_LOOK_S", 0.01)
    monkeypatch.setattr(queues, "_WARN_S", 0.0)
    caplog.set_level(logging.INFO, "vllm.shmring")
    for indefinite, said in ((True, False), (False, True)):
        with pytest.raises(TimeoutError):
            reader.dequeue(timeout=0.1, indefinite=indefinite)
        assert (f"process {os.getpid()} has not written to test for a minute" in caplog.text) == said
