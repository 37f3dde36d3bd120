"""A worker's messages: what is believed of a record, and what its page says when one was left."""

from __future__ import annotations

import mmap
import os
import socket
import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from shmring.core.compiled import (
    LARGEST_BACKLOG,
    WORKER_PAGE_NBYTES,
    BaseMessage,
    Home,
    Mapping,
    RecordReader,
    RecordWriter,
    WorkerEnd,
    ring_nbytes,
)
from shmring.core.messages import SlotRef
from shmring.errors import RemoteProtocolError
from shmring.memory.tensors import make_decoder, make_packer
from tests.records import slot_extension

BROADCAST = 120
AT_WANT, AT_STAMPS = 0, 2048
SLAB_NBYTES = 8192


class Ends:
    """A worker's end, its page and the engine's socket."""

    def __init__(self) -> None:
        ours, self.engine = socket.socketpair()
        page, slab = (os.memfd_create("memory") for _ in range(2))
        os.ftruncate(page, WORKER_PAGE_NBYTES)
        os.ftruncate(slab, SLAB_NBYTES)
        self.page = mmap.mmap(page, WORKER_PAGE_NBYTES)
        self.end = WorkerEnd(
            cast(Any, SimpleNamespace(home=Home("a worker", "join anew"))),
            RecordReader(bytearray(ring_nbytes(1024)), ours.fileno()),
            RecordWriter(bytearray(ring_nbytes(1024)), ours.fileno()),
            ours.fileno(),
            Mapping(slab, SLAB_NBYTES),
            Mapping(page, WORKER_PAGE_NBYTES),
            make_decoder(Any),
            make_decoder(tuple[Any, Any]),
            make_packer(16, 1 << 16),
            BaseMessage,
            max_tensors=16,
            max_values=1000,
            max_payload_nbytes=1 << 16,
        )
        for fd in (page, slab):
            os.close(fd)
        ours.close()
        self.engine.setblocking(False)

    def open(self, sequence: int, stamp: int = 0, slots: tuple[SlotRef, ...] = ()) -> BaseMessage:
        described = [slot_extension(*msgspec.structs.astuple(slot)) for slot in slots]
        message = self.end.open(msgspec.msgpack.encode([BROADCAST, sequence, stamp, 0, described, None, "payload"]))
        assert isinstance(message, BaseMessage)
        return message

    def bells(self) -> int:
        try:
            return len(self.engine.recv(4096))
        except BlockingIOError:
            return 0

    def want(self, sequence: int) -> None:
        struct.pack_into("<Q", self.page, AT_WANT, sequence)

    def wanted(self) -> int:
        return struct.unpack_from("<Q", self.page, AT_WANT)[0]

    def stamp(self, place: int) -> int:
        return struct.unpack_from("<Q", self.page, AT_STAMPS + 8 * place)[0]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.engine.close()


def test_an_engine_is_rung_for_once_for_the_message_that_it_waits_for_or_a_later_one(ends: Ends) -> None:
    messages = [ends.open(sequence, stamp=sequence) for sequence in (1, 2, 3)]
    ends.want(2)
    bells = []
    for message in messages:
        message.leave()
        bells.append(ends.bells())
    assert bells == [0, 1, 0]
    assert ends.wanted() == 0
    assert [ends.stamp(place) for place in (1, 2, 3)] == [1, 2, 3]


@pytest.mark.parametrize("stamp", [LARGEST_BACKLOG, 2**40])
def test_a_stamp_that_no_page_has_is_refused(ends: Ends, stamp: int) -> None:
    assert ends.open(1, LARGEST_BACKLOG - 1).sequence == 1
    with pytest.raises(RemoteProtocolError, match="not as this protocol has it"):
        ends.open(2, stamp)


@pytest.mark.parametrize(("offset", "nbytes"), [(4096, 4096 - 64 + 1), (SLAB_NBYTES - 64, 1), (SLAB_NBYTES, 0), (0, 2**62)])
def test_a_slot_behind_the_engines_memory_is_refused(ends: Ends, offset: int, nbytes: int) -> None:
    assert ends.open(1, slots=(SlotRef(0, 4096, 4096 - 64, 1),)).sequence == 1
    with pytest.raises(RemoteProtocolError, match="exceeds the engine's memory"):
        ends.open(2, slots=(SlotRef(0, offset, nbytes, 1),))
