"""A blocking worker's wait: what ends it, and that two threads that wait at one socket take no bell from each other."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from shmring.core.fan_out_book import WORKER_PAGE_NBYTES
from shmring.core.mapping import Mapping
from shmring.core.message_ring import ENDED, FOREIGN, RecordReader, RecordWriter, ring_nbytes
from shmring.core.worker_end import MessageEnd, WorkerEnd
from shmring.memory.tensors import make_decoder, make_packer

RECORD = b"\x91\x00"  # of a kind that no message is of
NOBODY = -1  # instead of a process that may die


@pytest.fixture
def ends() -> Iterator[tuple[WorkerEnd, RecordWriter, socket.socket]]:
    """A worker's end, the engine's writer to it, and the engine's socket."""
    ours, theirs = socket.socketpair()
    fd = os.memfd_create("page")
    os.ftruncate(fd, WORKER_PAGE_NBYTES)
    incoming, outgoing = bytearray(ring_nbytes(1024)), bytearray(ring_nbytes(1024))
    end = WorkerEnd(
        RecordReader(incoming, ours.fileno()),
        RecordWriter(outgoing, ours.fileno()),
        ours.fileno(),
        Mapping(-1, 0),
        Mapping(fd, WORKER_PAGE_NBYTES),
        make_decoder(Any),
        make_decoder(tuple[Any, Any]),
        make_packer(16, 1 << 16),
        MessageEnd,
        max_tensors=16,
        max_payload_nbytes=1 << 16,
    )
    os.close(fd)
    with ours, theirs:
        yield end, RecordWriter(incoming, theirs.fileno()), theirs


def test_a_record_is_taken_before_anything_else_is_heard(ends: tuple[WorkerEnd, RecordWriter, socket.socket]) -> None:
    end, writer, theirs = ends
    assert end.receive(NOBODY, 0.0, -1.0) == 0
    assert writer.write(RECORD)
    theirs.close()
    assert end.receive(NOBODY, 0.0, -1.0) == RECORD
    assert end.receive(NOBODY, 0.0, -1.0) == ENDED
    assert end.receive(NOBODY, -1.0, 0.0) == ENDED


def test_a_dead_engine_and_what_is_no_bell_end_the_wait(ends: tuple[WorkerEnd, RecordWriter, socket.socket]) -> None:
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


def test_who_waits_for_room_takes_no_bell_from_who_receives(ends: tuple[WorkerEnd, RecordWriter, socket.socket]) -> None:
    end, writer, _ = ends
    is_over = threading.Event()

    def wait_for_room() -> None:
        while not is_over.is_set():
            end.wait_for_room(NOBODY, 0.01)

    def publish() -> None:
        assert writer.write(RECORD)
        writer.ring_bell()

    waiting = threading.Thread(target=wait_for_room)
    waiting.start()
    try:
        for _ in range(100):
            publishing = threading.Timer(0.002, publish)
            publishing.start()
            taken = end.receive(NOBODY, -1.0, -1.0)
            late = end.receive(NOBODY, 0.0, -1.0)  # what came without a bell that was heard
            publishing.join()
            assert taken == RECORD, f"waited a second, and there was {late!r}"
    finally:
        is_over.set()
        waiting.join()
