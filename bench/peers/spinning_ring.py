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

from bench.messages import Cell, Header, Sink, Source
from bench.peers.peer import Description, Peer, encode

_SPIN_S = 1.0  # after the last message, as vLLM
_NAP_S = 0.1  # as vLLM's first spin timer; no cell has gaps in which it matters
_LINE_NBYTES = 64  # a cache line, and the alignment of contents: memcpy is slow where source and target are off by a few bytes
_DESCRIPTION_NBYTES = 256  # of a chunk of the ring; a description takes about 60
_LENGTH_NBYTES = 2  # of the length before a description

_LOCK = threading.Lock()  # for nothing but fences


# -- shared memory -----------------------------------------------------------------------------------------------------


def _fence() -> None:
    """Keeps what is before it before what is behind it; x86 does for flags, and other processors may not."""
    with _LOCK:
        pass


class _Pieces:
    """Pieces of shared memory of one size, so many. Behind the last is a flag for each, which says that it is full."""

    def __init__(self, memory: NDArray[np.uint8], count: int) -> None:
        pieces = memory[: -count * _LINE_NBYTES]
        self.contents: list[NDArray[np.uint8]] = list(pieces.reshape(count, -1))
        self._flags: Any = memory[len(pieces) :: _LINE_NBYTES].data

    def is_full(self, index: int) -> bool:
        _fence()
        return bool(self._flags[index])

    def any_is_full(self) -> bool:
        return any(self.is_full(index) for index in range(len(self.contents)))

    def mark(self, index: int, full: bool) -> None:
        _fence()
        self._flags[index] = full
        _fence()


class _Message(Description):
    slot: int  # where the content is


_decoder = msgspec.msgpack.Decoder(_Message)


class _Lane:
    """What leads from one producer to the consumer: a ring of chunks with descriptions, and as many slots with contents.

    A ring proper has its contents in the chunks, and so each slot belongs to the chunk of its number. Its memory is zeros at
    first.
    """

    def __init__(self, cell: Cell, memory: NDArray[np.uint8]) -> None:
        ring_nbytes = cell.window * (_DESCRIPTION_NBYTES + _LINE_NBYTES)
        self._chunks = _Pieces(memory[:ring_nbytes], cell.window)
        self._slots = _Pieces(memory[ring_nbytes:], cell.window)
        self._heads = [chunk.data for chunk in self._chunks.contents]
        self._next = 0  # of either end
        self._slot = 0  # to write to, or read last

    @staticmethod
    def nbytes(cell: Cell) -> int:
        lines = -(-cell.nbytes // _LINE_NBYTES)
        return cell.window * (_DESCRIPTION_NBYTES + (lines + 2) * _LINE_NBYTES)

    def has_room(self) -> bool:
        self._slot = self._next
        return not self.has_message()

    def is_empty(self) -> bool:
        return not self._chunks.any_is_full()

    def write(self, header: Header, cell: Cell, content: NDArray[np.uint8]) -> None:
        """Sends a message; there must be room."""
        self._slots.contents[self._slot][: len(content)] = content
        encoded = encode(_Message(header, cell.dtype, cell.shape, self._slot))
        head = self._heads[self._next]
        head[:_LENGTH_NBYTES] = len(encoded).to_bytes(_LENGTH_NBYTES, "little")
        head[_LENGTH_NBYTES : _LENGTH_NBYTES + len(encoded)] = encoded
        self._advance(full=True)

    def has_message(self) -> bool:
        return self._chunks.is_full(self._next)

    def read(self) -> tuple[Header, torch.Tensor]:
        """Receives a message; there must be one. The tensor is looked at until :meth:`release`."""
        message = self._read_message()
        content = self._slots.contents[message.slot][: message.nbytes].copy()
        self._advance(full=False)
        return message.header, message.tensor(content)

    def release(self) -> None:
        """The tensor read last is not looked at any more."""

    def _read_message(self) -> _Message:
        head = self._heads[self._next]
        length = int.from_bytes(head[:_LENGTH_NBYTES], "little")
        return _decoder.decode(head[_LENGTH_NBYTES : _LENGTH_NBYTES + length])

    def _advance(self, *, full: bool) -> None:
        index, self._next = self._next, (self._next + 1) % len(self._heads)
        self._chunks.mark(index, full)


class _ArenaLane(_Lane):
    """The slots are an arena: each is taken and given back for itself, and read where it is."""

    def has_room(self) -> bool:
        if self.has_message():
            return False
        for _ in self._heads:
            if not self._slots.is_full(self._slot):
                return True
            self._slot = (self._slot + 1) % len(self._heads)
        return False

    def is_empty(self) -> bool:
        return not self._slots.any_is_full()

    def write(self, header: Header, cell: Cell, content: NDArray[np.uint8]) -> None:
        self._slots.mark(self._slot, True)
        super().write(header, cell, content)

    def read(self) -> tuple[Header, torch.Tensor]:
        message = self._read_message()
        self._advance(full=False)
        self._slot = message.slot
        return message.header, message.tensor(self._slots.contents[message.slot])

    def release(self) -> None:
        self._slots.mark(self._slot, False)


def _mapped(path: Path, nbytes: int) -> NDArray[np.uint8]:
    """Shared memory, which goes with the last view of it."""
    return np.asarray(np.memmap(path, np.uint8, "r+", shape=(nbytes,)))


@contextlib.contextmanager
def _offered(path: Path, nbytes: int) -> Iterator[NDArray[np.uint8]]:
    """Makes shared memory of zeros that a process which knows the path can map meanwhile."""
    with os.fdopen(os.memfd_create("bench-spinning-ring", os.MFD_CLOEXEC), "r+b") as file:
        path.symlink_to(f"/proc/{os.getpid()}/fd/{file.fileno()}")
        try:
            file.truncate(nbytes)
            yield _mapped(path, nbytes)
        finally:
            path.unlink()


# -- both ends ---------------------------------------------------------------------------------------------------------


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


class SpinningRing(Peer):
    name = "spinning-ring"
    title = "spinning ring (vLLM MessageQueue)"
    event_driven = False
    lane: ClassVar[type[_Lane]] = _Lane

    async def produce(self, cell: Cell, shared: Any, source: Source) -> None:
        lane = self.lane(cell, _mapped(cell.path(f"{self.name}-{source.producer}"), self.lane.nbytes(cell)))

        def write(spinning: _Spinning) -> None:
            while not source.finished:
                spinning.wait(lane.has_room)
                lane.write(source.stamp(), cell, source.array)
            spinning.wait(lane.is_empty)

        await _on_a_thread(write)

    async def consume(self, cell: Cell, shared: Any, sink: Sink, listening: Callable[[], None]) -> None:
        with contextlib.ExitStack() as stack:
            lanes = []
            for producer in range(cell.producers):
                memory = stack.enter_context(_offered(cell.path(f"{self.name}-{producer}"), self.lane.nbytes(cell)))
                lanes.append(self.lane(cell, memory))

            def read(spinning: _Spinning) -> None:
                last = False
                while not last:
                    spinning.wait(lambda: any(lane.has_message() for lane in lanes))
                    for lane in filter(_Lane.has_message, lanes):
                        last = sink.take(*lane.read()) or last
                        lane.release()

            listening()
            await _on_a_thread(read)


class SpinningArena(SpinningRing):
    name = "spinning-arena"
    title = "spinning tensor arena (vLLM)"
    lane = _ArenaLane
