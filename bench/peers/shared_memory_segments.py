"""``multiprocessing.shared_memory``: a named segment for each tensor, and its name through a socket.

How its users use it: SGLang does this (``ShmPointerMMData`` in ``managers/mm_utils.py``). The producer creates a segment,
copies the tensor into it, closes it and sends its name; the consumer opens it by name, makes a tensor of it, closes it when it
needs it no more, and unlinks it. Both do so on their event loops. Two choices are kind to it: the consumer reads the segment
in place, where SGLang by default clones the tensor out of it, and names go as msgpack over a Unix stream socket, which is
cheaper than SGLang's pickle over ZMQ. An acknowledgement is a byte on the same socket.

Each process tells multiprocessing's resource tracker of every segment that it creates, opens or unlinks: the standard library
does so unless it is worked around, and it is what removes segments after a crash. The tracker's CPU time is spent in a process
of its own, and is in no column of the table. (Without it each side would save 5 of 30 microseconds at 4 KB.)
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from multiprocessing.context import SpawnContext
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import msgspec
import torch

from bench.messages import DTYPES, Cell, Header, Sink, Source
from bench.peers.in_flight import Window
from bench.peers.memory import shared_memory_shortage
from bench.peers.peer import Peer
from bench.peers.unix_stream import connected, consumed
from shmring.memory.slab import SHM_DIRECTORY

__all__ = ["SharedMemorySegments"]


class _Message(msgspec.Struct, array_like=True):
    header: Header
    segment: str
    dtype: str
    shape: tuple[int, ...]


class SharedMemorySegments(Peer):
    """See the head of this file."""

    name = "shared-memory"
    title = "a segment per tensor (SGLang)"

    def limits(self, cell: Cell) -> str | None:
        return shared_memory_shortage(cell.producers * cell.window * cell.nbytes, "its segments")

    def create_shared(self, context: SpawnContext, producers: int) -> str:
        return f"bench-{os.getpid()}-{secrets.token_hex(4)}"  # what the segments' names begin with

    def close_shared(self, shared: str) -> None:
        for path in SHM_DIRECTORY.glob(f"{shared}-*"):  # of a run that was ended in the middle
            segment = SharedMemory(path.name)
            segment.close()
            segment.unlink()

    async def produce(self, cell: Cell, shared: str, source: Source) -> None:
        window = Window(cell.window)
        encoder = msgspec.msgpack.Encoder()
        async with connected(_socket_path(cell), window) as sender:
            while not source.finished:
                await window.take()
                header = source.stamp()
                name = f"{shared}-{header.producer}-{header.sequence}"
                _fill_segment(name, source.tensor)
                sender.send(encoder.encode(_Message(header, name, cell.dtype, cell.shape)))
            await window.drain()

    async def consume(self, cell: Cell, shared: str, sink: Sink, listening: Callable[[], None]) -> None:
        decoder = msgspec.msgpack.Decoder(_Message)

        def take(body: memoryview) -> Header:
            message = decoder.decode(body)
            _read_segment(message, sink)
            return message.header

        await consumed(_socket_path(cell), cell.producers, take, listening)


def _socket_path(cell: Cell) -> Path:
    return Path(cell.directory, "shared-memory.sock")


def _fill_segment(name: str, tensor: torch.Tensor) -> None:
    """Makes a segment with the content of a tensor."""
    content = tensor.view(torch.uint8)
    segment = SharedMemory(name, create=True, size=content.nbytes)
    try:
        torch.frombuffer(segment.buf, dtype=torch.uint8).copy_(content)
    finally:
        segment.close()


def _read_segment(message: _Message, sink: Sink) -> None:
    """Reads a segment in place, and removes it."""
    segment = SharedMemory(message.segment)
    try:
        tensor = torch.frombuffer(segment.buf, dtype=DTYPES[message.dtype]).view(message.shape)
        sink.take(message.header, tensor)
        del tensor  # nothing but us knows that it needs the segment
    finally:
        segment.close()
        segment.unlink()
