"""A blocking worker's wait: what ends it, and that two threads that wait at one socket take no bell from each other."""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch

from shmring.core import compiled
from shmring.core.compiled import (
    ENDED,
    FOREIGN,
    WORKER_PAGE_NBYTES,
    BaseMessage,
    Home,
    Mapping,
    RecordReader,
    RecordWriter,
    WorkerEnd,
    ring_nbytes,
)
from shmring.errors import ClosedError
from shmring.memory.tensors import make_decoder, make_packer
from tests.model.stepped import IS_STEPPED, OtherThread, at_each_step

RECORD = b"\x91\x00"  # of a kind that no message is of
NOBODY = -1  # instead of a process that may die


@pytest.fixture
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[WorkerEnd, mmap.mmap, socket.socket]]:
    """A worker's end, the memory of the ring to it, and the engine's socket. Its parameter: the type of payloads."""
    ours, theirs = socket.socketpair()
    fd = os.memfd_create("page")
    os.ftruncate(fd, WORKER_PAGE_NBYTES)
    incoming = mmap.mmap(-1, ring_nbytes(1024))
    end = WorkerEnd(
        cast(Any, SimpleNamespace(home=Home("a worker", "join anew"))),
        RecordReader(incoming, ours.fileno()),
        RecordWriter(bytearray(ring_nbytes(1024)), ours.fileno()),
        ours.fileno(),
        Mapping(-1, 0),
        Mapping(fd, WORKER_PAGE_NBYTES),
        make_decoder(getattr(request, "param", Any)),
        make_decoder(tuple[Any, Any]),
        make_packer(16, 1 << 16),
        BaseMessage,
        max_tensors=16,
        max_values=1024,
        max_payload_nbytes=1 << 16,
    )
    os.close(fd)
    with ours, theirs:
        yield end, incoming, theirs


def test_a_reply_is_these_bytes(ends: tuple[WorkerEnd, mmap.mmap, socket.socket]) -> None:
    end, _, _ = ends
    tensor = "c71c53" + "0000" + "0c01" + "0000000000000000" + "0c00000000000000" + "0300000000000000"
    record = end.pack_answer({"x": torch.tensor([1.0, 2.0, 3.0])}, 0x31)
    assert record.hex() == "94" + "20" + "31" + "c40c" + "0000803f0000004000004040" + "81a178" + tensor
    assert end.pack_answer("done", 0x31).hex() == "94" + "20" + "31" + "c0" + "a4646f6e65"


def test_a_record_is_taken_before_anything_else_is_heard(ends: tuple[WorkerEnd, mmap.mmap, socket.socket]) -> None:
    end, incoming, theirs = ends
    assert end.receive(NOBODY, 0.0, -1.0) == 0
    assert RecordWriter(incoming, -1).write(RECORD)
    theirs.close()
    assert end.receive(NOBODY, 0.0, -1.0) == RECORD
    assert end.receive(NOBODY, 0.0, -1.0) == ENDED
    assert end.receive(NOBODY, -1.0, 0.0) == ENDED


def test_a_dead_engine_or_a_foreign_byte_ends_the_wait(ends: tuple[WorkerEnd, mmap.mmap, socket.socket]) -> None:
    end, _, theirs = ends
    theirs.send(b"\0\0")
    assert end.receive(NOBODY, 0.01, 0.0) == 0, "bells for nothing are no reason to stop waiting"
    theirs.send(b"\0\2")
    assert end.receive(NOBODY, -1.0, 0.0) == FOREIGN
    pid = os.fork()
    if not pid:
        os._exit(0)
    pidfd = os.pidfd_open(pid)
    assert end.receive(pidfd, -1.0, 0.0) == ENDED
    os.close(pidfd)
    os.waitpid(pid, 0)


def test_a_signal_handler_may_close_it_in_the_middle_of_a_wait(ends: tuple[WorkerEnd, mmap.mmap, socket.socket]) -> None:
    end, _, _ = ends
    here, over = threading.get_ident(), threading.Event()

    def ring() -> None:
        while not over.wait(0.005):
            signal.pthread_kill(here, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lambda *_: end.close())
    ringing = threading.Thread(target=ring)
    ringing.start()
    try:
        with contextlib.suppress(ClosedError):
            while not end.receive(NOBODY, -1.0, -1.0):
                pass
    finally:
        over.set()
        ringing.join()
        signal.signal(signal.SIGUSR1, before)
    with pytest.raises(ClosedError):
        end.receive(NOBODY, 0.0, -1.0)


class Closes(msgspec.Struct):
    """A payload that closes the end that decodes it."""

    close: str
    tensor: torch.Tensor

    def __post_init__(self) -> None:
        closing.pop().close()


closing: list[WorkerEnd] = []


@pytest.mark.parametrize("ends", [Closes], indirect=True)
def test_a_hook_that_decodes_may_close_it(ends: tuple[WorkerEnd, mmap.mmap, socket.socket]) -> None:
    end, incoming, _ = ends
    closing.append(end)
    tensor = "c71c53" + "0000" + "0c01" + "0000000000000000" + "0c00000000000000" + "0300000000000000"
    payload = "82" + "a5636c6f7365" + "a178" + "a674656e736f72" + tensor
    record = bytes.fromhex("97" + "78" + "01" + "00" + "00" + "90" + "c40c" + "0000803f0000004000004040" + payload)
    assert RecordWriter(incoming, -1).write(record)
    message = end.receive(NOBODY, 0.0, -1.0)
    assert message.payload.tensor.tolist() == [1, 2, 3]
    message.leave()
    with pytest.raises(ClosedError):
        end.open(record)
    end.close()


def test_who_waits_for_room_takes_no_bell_from_who_receives(ends: tuple[WorkerEnd, mmap.mmap, socket.socket]) -> None:
    """One looks again and again, so where there are cores enough it is there before the other has been woken."""
    end, incoming, theirs = ends
    rounds = 30
    asked, asking = os.pipe()
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            writer = RecordWriter(incoming, theirs.fileno())
            for _ in range(rounds):
                os.read(asked, 1)
                time.sleep(0.002)
                assert writer.write(RECORD)
                writer.ring_bell()
        os._exit(0)
    is_over = threading.Event()

    def wait_for_room() -> None:
        while not is_over.is_set():
            end.wait_for_room(NOBODY, 0.0)

    waiting = threading.Thread(target=wait_for_room)
    waiting.start()
    try:
        for _ in range(rounds):
            os.write(asking, b"?")
            taken = end.receive(NOBODY, -1.0, -1.0)
            assert taken == RECORD or end.receive(NOBODY, 0.0, -1.0) != RECORD, "its bell was taken, and it slept for a second"
    finally:
        is_over.set()
        waiting.join()
        os.close(asking)
        os.close(asked)
        os.waitpid(pid, 0)


@pytest.mark.skipif(not IS_STEPPED, reason="only x86 stops behind each instruction")
def test_who_waits_for_other_things_reads_nothing_at_any_moment_while_another_receives(
    ends: tuple[WorkerEnd, mmap.mmap, socket.socket],
) -> None:
    """Who receives has said that it sleeps and does not sleep yet, or was woken and has not looked: what came is its own."""
    end, _, theirs = ends
    asked, asking = os.pipe()
    answered, answering = os.pipe()
    heard: list[int] = []

    def wait_for_room() -> None:
        while os.read(asked, 1):
            heard.append(end.wait_for_room(NOBODY, 0.0))
            os.write(answering, b"!")

    def begin() -> tuple[Callable[[], object], OtherThread, Callable[[object], None]]:
        theirs.send(b"\2")

        def check(received: object) -> None:
            assert (received, heard.pop()) == (FOREIGN, 0)

        return functools.partial(end.receive, NOBODY, 0.5, -1.0), OtherThread(asking, answered), check

    waiting = threading.Thread(target=wait_for_room)
    waiting.start()
    try:
        assert at_each_step(compiled, begin) > 5
    finally:
        os.close(asking)
        waiting.join()
        for fd in (asked, answered, answering):
            os.close(fd)
