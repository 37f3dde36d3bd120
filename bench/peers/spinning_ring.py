"""Rings in shared memory whose ends spin: nothing wakes anybody, and a core of each process is always busy.

How its users use it: vLLM's ``MessageQueue`` (``distributed/device_communicators/shm_broadcast.py``) and its tensor arena
(``shm_tensor_arena.py``), written anew without pickle. A ring is written by one process and consists of chunks of a fixed
size with a flag each, which says whether the chunk is full; whoever waits for a flag calls ``sched_yield`` in a loop, and after
a second in which nothing came it sleeps for 100 ms at a time. There is no event loop: vLLM's workers spend their main thread in
``dequeue``, and here either end runs on a thread, so that a cell can be ended. Flags are read and written with a fence (a lock
taken and released, as vLLM does it). Two variants:

- ``spinning-ring``: the whole message is copied into a chunk, and out of it into fresh memory; then the chunk is free again.
- ``spinning-arena``: the ring carries descriptions only. The tensor is copied once, into a slot of an arena, and read there;
  the slot is free again when the reader has let go of it.

All choices are kind to it. A ring has a chunk for each message of the window, large enough for all of it (vLLM: 10 of 24 MiB,
and what is larger goes through a ZMQ socket), and the arena a slot for each, of whatever size (vLLM: 8 of 256 MiB, and only
from 8 MiB on); flags do not share cache lines; views of chunks and slots are made once; writers need not send the notification
by which vLLM wakes readers that sleep; slots are free at once, not at the next ``dequeue``, and a slot that is free again is
written again while it is warm in the cache. Memory is a memfd instead of a named segment, which costs the same and leaves
nothing behind when a process is killed.

Source: github.com/vllm-project/vllm, the two files named above and pull requests 16226 and 28053, for how long it spins.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from bench.messages import DTYPES, Cell, Header, Sink, Source
from bench.peers.memory import memory_shortage
from bench.peers.peer import Peer

__all__ = ["SpinningArena", "SpinningRing"]

_SPIN_S = 1.0  # after the last message, as vLLM
_NAP_S = 0.1  # as vLLM's first spin timer; no cell has gaps in which it matters
_LINE_NBYTES = 64  # a cache line, and the alignment of contents: memcpy is slow where source and target are off by a few bytes
_DESCRIPTION_NBYTES = 256  # at the start of a chunk; a description takes about 60
_LENGTH_NBYTES = 2  # of the length before a description

_LOCK = threading.Lock()  # for nothing but fences


# -- both ends ---------------------------------------------------------------------------------------------------------


def _write(cell: Cell, lane: _Lane, source: Source, spinning: _Spinning) -> None:
    while not source.finished:
        spinning.wait(lane.has_room)
        lane.write(source.stamp(), cell, source.array)
    spinning.wait(lane.is_empty)


def _read(lanes: list[_Lane], sink: Sink, spinning: _Spinning) -> None:
    finished = False
    while not finished:
        spinning.wait(lambda: any(lane.has_message() for lane in lanes))
        for lane in lanes:
            if lane.has_message():
                header, tensor = lane.read()
                finished = sink.take(header, tensor) or finished
                del tensor
                lane.release()


class _Spinning:
    """How both ends wait. What is waited for may also never come: then the other end has failed, and this one is stopped."""

    def __init__(self) -> None:
        self.stopped = False
        self._active_s = time.monotonic()

    def wait(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if self.stopped:
                raise RuntimeError("it was stopped while it waited for the other end")
            if time.monotonic() <= self._active_s + _SPIN_S:
                os.sched_yield()
            else:
                time.sleep(_NAP_S)
        self._active_s = time.monotonic()


async def _on_a_thread(run: Callable[[_Spinning], None]) -> None:
    spinning = _Spinning()
    try:
        await asyncio.to_thread(run, spinning)
    finally:
        spinning.stopped = True  # when this is cancelled, the thread does not know


# -- shared memory -----------------------------------------------------------------------------------------------------


def _fence() -> None:
    """Keeps what is before it before what is behind it; x86 does for flags, and other processors may not."""
    with _LOCK:
        pass


class _Pieces:
    """Pieces of shared memory of one size, each with a flag that says whether it is full.

    Args:
        memory: where.
        offset: of the first piece; the flags come behind the last.
        count: how many.
        nbytes: of a piece, a multiple of a cache line.
    """

    def __init__(self, memory: mmap.mmap, offset: int, count: int, nbytes: int) -> None:
        flags = offset + count * nbytes
        pieces = np.frombuffer(memory, np.uint8, count * nbytes, offset)
        self.count = count
        self.contents: list[NDArray[np.uint8]] = list(pieces.reshape(count, nbytes))
        self._flags: Any = np.frombuffer(memory, np.uint8, count * _LINE_NBYTES, flags)[::_LINE_NBYTES].data

    @staticmethod
    def total_nbytes(count: int, nbytes: int) -> int:
        """Returns how much memory they take, flags included."""
        return count * (nbytes + _LINE_NBYTES)

    def is_full(self, index: int) -> bool:
        _fence()
        return bool(self._flags[index])

    def fill(self, index: int) -> None:
        self._mark(index, 1)

    def free(self, index: int) -> None:
        self._mark(index, 0)

    def _mark(self, index: int, flag: int) -> None:
        _fence()
        self._flags[index] = flag
        _fence()


class _Description(msgspec.Struct, array_like=True):
    header: Header
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    slot: int = 0  # of an arena

    def tensor(self, content: NDArray[np.uint8]) -> torch.Tensor:
        """Returns a view of the content, which is at least as long."""
        dtype = DTYPES[self.dtype]
        return torch.frombuffer(content, dtype=dtype, count=self.nbytes // dtype.itemsize).view(self.shape)


class _Lane:
    """What leads from one producer to the consumer: the ring.

    Args:
        cell: what is sent on it.
        memory: :meth:`nbytes` of shared memory, zeros at first.
    """

    def __init__(self, cell: Cell, memory: mmap.mmap) -> None:
        self._chunks = _Pieces(memory, 0, cell.window, self._chunk_nbytes(cell))
        self._heads = [chunk[:_DESCRIPTION_NBYTES].data for chunk in self._chunks.contents]
        self._next = 0  # of either end
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(_Description)

    @classmethod
    def nbytes(cls, cell: Cell) -> int:
        return _Pieces.total_nbytes(cell.window, cls._chunk_nbytes(cell))

    @classmethod
    def _chunk_nbytes(cls, cell: Cell) -> int:
        return _DESCRIPTION_NBYTES + _whole_lines(cell.nbytes)

    def has_room(self) -> bool:
        return not self._chunks.is_full(self._next)

    def is_empty(self) -> bool:
        return not any(self._chunks.is_full(index) for index in range(self._chunks.count))

    def write(self, header: Header, cell: Cell, content: NDArray[np.uint8]) -> None:
        """Sends a message; there must be room."""
        self._chunks.contents[self._next][_DESCRIPTION_NBYTES:][: len(content)] = content
        self._describe(_Description(header, len(content), cell.dtype, cell.shape))

    def has_message(self) -> bool:
        return self._chunks.is_full(self._next)

    def read(self) -> tuple[Header, torch.Tensor]:
        """Receives a message; there must be one. The tensor is looked at until :meth:`release`."""
        description = self._description()
        end = _DESCRIPTION_NBYTES + description.nbytes
        content = self._chunks.contents[self._next][_DESCRIPTION_NBYTES:end].copy()
        self._advance(self._chunks.free)
        return description.header, description.tensor(content)

    def release(self) -> None:
        """The tensor read last is not looked at any more."""

    def _describe(self, description: _Description) -> None:
        encoded = self._encoder.encode(description)
        head = self._heads[self._next]
        head[:_LENGTH_NBYTES] = len(encoded).to_bytes(_LENGTH_NBYTES, "little")
        head[_LENGTH_NBYTES : _LENGTH_NBYTES + len(encoded)] = encoded
        self._advance(self._chunks.fill)

    def _description(self) -> _Description:
        head = self._heads[self._next]
        length = int.from_bytes(head[:_LENGTH_NBYTES], "little")
        return self._decoder.decode(head[_LENGTH_NBYTES : _LENGTH_NBYTES + length])

    def _advance(self, mark: Callable[[int], None]) -> None:
        index = self._next
        self._next = (index + 1) % self._chunks.count
        mark(index)


class _ArenaLane(_Lane):
    """A ring of descriptions, and the slots in which the tensors are."""

    def __init__(self, cell: Cell, memory: mmap.mmap) -> None:
        super().__init__(cell, memory)
        self._slots = _Pieces(memory, super().nbytes(cell), cell.window, _whole_lines(cell.nbytes))
        self._slot = 0  # to write to, or read last

    @classmethod
    def nbytes(cls, cell: Cell) -> int:
        return super().nbytes(cell) + _Pieces.total_nbytes(cell.window, _whole_lines(cell.nbytes))

    @classmethod
    def _chunk_nbytes(cls, cell: Cell) -> int:
        return _DESCRIPTION_NBYTES

    def has_room(self) -> bool:
        if not super().has_room():
            return False
        for probe in range(self._slots.count):
            slot = (self._slot + probe) % self._slots.count
            if not self._slots.is_full(slot):
                self._slot = slot
                return True
        return False

    def is_empty(self) -> bool:
        return not any(self._slots.is_full(slot) for slot in range(self._slots.count))

    def write(self, header: Header, cell: Cell, content: NDArray[np.uint8]) -> None:
        slot = self._slot
        self._slots.contents[slot][: len(content)] = content
        self._slots.fill(slot)
        self._describe(_Description(header, len(content), cell.dtype, cell.shape, slot))

    def read(self) -> tuple[Header, torch.Tensor]:
        description = self._description()
        self._advance(self._chunks.free)
        self._slot = description.slot
        return description.header, description.tensor(self._slots.contents[self._slot])

    def release(self) -> None:
        self._slots.free(self._slot)


def _whole_lines(nbytes: int) -> int:
    return -(-nbytes // _LINE_NBYTES) * _LINE_NBYTES


@contextlib.contextmanager
def _offered(path: Path, nbytes: int) -> Iterator[mmap.mmap]:
    """Makes shared memory of zeros that a process which knows the path can attach to meanwhile."""
    descriptor = os.memfd_create("bench-spinning-ring", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, nbytes)
        path.symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")
        try:
            yield mmap.mmap(descriptor, nbytes)  # goes with the last view of it
        finally:
            path.unlink()
    finally:
        os.close(descriptor)


def _attached(path: Path) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


# -- the peers ---------------------------------------------------------------------------------------------------------


class SpinningRing(Peer):
    """See the head of this file."""

    name = "spinning-ring"
    title = "spinning ring (vLLM MessageQueue)"
    event_driven = False
    loop_is_free = False
    lane: ClassVar[type[_Lane]] = _Lane

    def limits(self, cell: Cell) -> str | None:
        # Beside the rings: a copy of the message that is being read, and one that the reader has not yet let go of.
        return memory_shortage(cell.producers * self.lane.nbytes(cell) + 2 * cell.nbytes)

    async def produce(self, cell: Cell, shared: Any, source: Source) -> None:
        lane = self.lane(cell, _attached(self._path(cell, source.producer)))
        await _on_a_thread(lambda spinning: _write(cell, lane, source, spinning))

    async def consume(self, cell: Cell, shared: Any, sink: Sink, listening: Callable[[], None]) -> None:
        with contextlib.ExitStack() as stack:
            lanes = []
            for producer in range(cell.producers):
                memory = stack.enter_context(_offered(self._path(cell, producer), self.lane.nbytes(cell)))
                lanes.append(self.lane(cell, memory))
            listening()
            await _on_a_thread(lambda spinning: _read(lanes, sink, spinning))

    def _path(self, cell: Cell, producer: int) -> Path:
        return Path(cell.directory, f"{self.name}-{producer}")


class SpinningArena(SpinningRing):
    """See the head of this file."""

    name = "spinning-arena"
    title = "spinning tensor arena (vLLM)"
    lane = _ArenaLane
