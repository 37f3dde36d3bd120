"""What is between the two ends: two message rings, a socket, and a slab.

Each direction of a connection keeps its order and nothing else: a record may lie there for any time. What was sent before
an end closed can still be read by the other, or be lost: a write that fails ends a connection before it is read empty.

The ends write to real rings. Those are emptied as soon as something was written, so that a record can lie anywhere between
its two ends; how full a ring is, is a number of the scenario.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable

from shmring.core.compiled import Mapping, RecordReader, RecordWriter, ring_nbytes
from shmring.core.messages import EngineMessage, FrontendMessage, encode_message

_RING_NBYTES = 1 << 14  # far more than a record takes
_NO_BELL = -1  # nobody sleeps


def map_slab(nbytes: int) -> Mapping:
    """Returns memory for a slab, which has no name."""
    fd, mapping = open_slab(nbytes)
    os.close(fd)
    return mapping


def open_slab(nbytes: int) -> tuple[int, Mapping]:
    """Returns the same with its descriptor, which is the caller's."""
    fd = os.memfd_create("slab")
    try:
        os.ftruncate(fd, nbytes)
        return fd, Mapping(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise


class Link:
    """One direction of a connection, as the end that writes to it has it.

    Args:
        wire: that it is a direction of.
        max_queue: records at which there is no room.

    Attributes:
        records: under way.
        writer: of the ring.
        largest_nbytes: of a record.
        room_changed: called when a record came or went.
    """

    def __init__(self, wire: Wire, max_queue: int) -> None:
        memory = bytearray(ring_nbytes(_RING_NBYTES))
        self.records: deque[bytes] = deque()
        self.writer = RecordWriter(memory, _NO_BELL)
        self.writer.told = True  # this, of each record
        self.largest_nbytes = self.writer.largest_record_nbytes
        self._reader = RecordReader(memory, _NO_BELL)
        self._wire = wire
        self._max_queue = max_queue
        self.room_changed: Callable[[], object] = _nobody_waits

    @property
    def can_write(self) -> bool:
        """Whether what can wait need not."""
        return len(self.records) < self._max_queue

    def published(self) -> None:
        """A record was written to the ring."""
        while (record := self._reader.read()) is not None:
            self.queue(record)

    def queue(self, record: bytes) -> None:
        """Sends a record; where nobody reads any more it goes nowhere."""
        if self._wire.is_open:
            self.records.append(record)
            self._count()

    def take(self) -> bytes:
        """The other end takes a record."""
        record = self.records.popleft()
        self._count()
        return record

    def clear(self) -> None:
        """What nobody has taken is lost."""
        self.records.clear()
        self._count()

    def _count(self) -> None:
        self.writer.blocked = not self.can_write
        self.room_changed()

    def send(self, message: FrontendMessage | EngineMessage) -> None:
        """Sends a message as :meth:`queue` does."""
        self.queue(encode_message(message))


def _nobody_waits() -> None:
    pass


class Wire:
    """One connection, of a frontend or of a worker.

    Args:
        max_queue: records in one direction at which there is no room.
        link_type: of the engine's end.
    """

    def __init__(self, max_queue: int, link_type: type[Link] = Link) -> None:
        self.towards_engine = Link(self, max_queue)
        self.towards_frontend = link_type(self, max_queue)
        self.to_engine = self.towards_engine.records
        self.to_frontend = self.towards_frontend.records
        self.frontend_open = True
        self.engine_open = True
        self.forged: bytes | None = None  # the record that must be refused; the last of its frontend

    @property
    def is_open(self) -> bool:
        """Whether both ends are there."""
        return self.frontend_open and self.engine_open

    @property
    def holds_forged(self) -> bool:
        """Whether a record that breaks the rules is under way."""
        return self.forged is not None and any(record is self.forged for record in self.to_engine)

    def forge(self, record: bytes) -> None:
        """Sends a record that breaks the rules."""
        self.towards_engine.queue(record)
        if self.is_open:
            self.forged = self.to_engine[-1]

    def close_frontend(self) -> None:
        """The frontend closes, or its process ends."""
        self.frontend_open = False
        self.towards_frontend.clear()

    def close_engine(self) -> None:
        """The engine closes, or its process ends."""
        self.engine_open = False
        self.towards_engine.clear()


def map_beside(slab_fd: int, slab_nbytes: int, nbytes: int) -> tuple[Mapping, Mapping]:
    """Makes memory for broadcasts; returns it as the engine maps it, and behind the slab, as workers map both."""
    fd = os.memfd_create("broadcasts")
    try:
        os.ftruncate(fd, nbytes)
        return Mapping(fd, nbytes), Mapping(slab_fd, slab_nbytes, fd, nbytes, False, False)
    finally:
        os.close(fd)
