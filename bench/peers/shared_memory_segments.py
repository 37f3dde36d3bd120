"""``multiprocessing.shared_memory``: a named segment for each tensor, and its name through a socket.

How its users use it: SGLang does this (``ShmPointerMMData`` in ``managers/mm_utils.py``). The producer creates a segment,
copies the tensor into it, closes it and sends its name; the consumer opens it by name, makes a tensor of it, closes it when it
needs it no more, and unlinks it. Both do so on their event loops. Two choices are kind to it: the consumer reads the segment
in place, where SGLang by default clones the tensor out of it, and names go as msgpack over a Unix stream socket, which is
cheaper than SGLang's pickle over ZMQ.

Each process tells multiprocessing's resource tracker of every segment that it creates, opens or unlinks: the standard library
does so unless it is worked around, and it is what removes segments after a crash. The tracker's CPU time is spent in a process
of its own, and is in no column of the table. (Without it each side would save 5 of 30 microseconds at 4 KB.)
"""

from __future__ import annotations

import os
import secrets
from multiprocessing.context import SpawnContext
from multiprocessing.shared_memory import SharedMemory

import msgspec
import torch

from bench.messages import Cell, Header, Source
from bench.peers.in_flight import Intake
from bench.peers.peer import Description, encode, shared_memory_shortage
from bench.peers.unix_stream import SocketPeer
from shmring.memory.slab import SHM_DIRECTORY

__all__ = ["SharedMemorySegments"]


class _Message(Description):
    segment: str


_decoder = msgspec.msgpack.Decoder(_Message)


class SharedMemorySegments(SocketPeer):
    name = "shared-memory"
    title = "a segment per tensor (SGLang)"

    def limits(self, cell: Cell) -> str | None:
        return shared_memory_shortage(cell.producers * cell.window * cell.nbytes, "its segments")

    def create_own(self, context: SpawnContext, producers: int) -> str:
        return f"bench-{os.getpid()}-{secrets.token_hex(4)}"  # what the segments' names begin with

    def close_own(self, own: str) -> None:
        for path in SHM_DIRECTORY.glob(f"{own}-*"):  # of a run that was ended in the middle
            segment = SharedMemory(path.name)
            segment.close()
            segment.unlink()

    def encode(self, cell: Cell, own: str, source: Source) -> bytes:
        header = source.stamp()
        content = source.tensor.view(torch.uint8)
        segment = SharedMemory(f"{own}-{header.producer}-{header.sequence}", create=True, size=content.nbytes)
        try:
            torch.frombuffer(segment.buf, dtype=torch.uint8).copy_(content)
        finally:
            segment.close()
        return encode(_Message(header, cell.dtype, cell.shape, segment.name))

    def take(self, body: memoryview, intake: Intake) -> tuple[Header, bool]:
        message = _decoder.decode(body)
        segment = SharedMemory(message.segment)
        try:  # the tensor is gone before the segment is: nothing but us knows that it needs it
            return message.header, intake.take(message.header, message.tensor(segment.buf))
        finally:
            segment.close()
            segment.unlink()
