"""zenoh, peer to peer, with its shared-memory provider.

How its users use it: the producer allocates a buffer from its ``ShmProvider``, writes the tensor into it and puts it on a key,
with the header as attachment; only a reference travels through the link, here a Unix stream socket between the two sessions.
The consumer's subscriber has a callback, as subscribers of asynchronous programs have: zenoh's receiving thread calls it and it
hands the sample to the event loop with ``call_soon_threadsafe``. There is no descriptor to wait for in its Python API.

Done well, to be worth comparing with: the provider's pool holds more than the window, so that no allocation has to wait, and
is kept for the life of the process, as servers keep theirs; the callback is direct, which spares a queue and a thread; the link
is of the low-latency kind, without priorities; puts are express, so that none waits for a batch to fill, and block rather than
drop; nothing is scouted or routed.

Python sees zenoh's shared memory through copies alone. A buffer is written from ``bytes`` or a ``bytearray``, so the tensor
goes through one, which is kept and so is warm; a buffer that was received is read by ``bytes(...)``. That makes three copies
where C and Rust have one or none.

zenoh commits a pool's memory when it is made, and a receiver maps it until its process ends (zenoh #2787), so what larger
messages have needed stays in use. A process that is killed, or ends without the C library's exit handlers, as
multiprocessing's children do, leaves segments of metadata in /dev/shm. So the parent, when its children have ended, removes
those that have come meanwhile and that no process maps.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import struct
from collections import deque
from collections.abc import AsyncIterator, Callable
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any

import torch

from bench.messages import Cell, Header, Source
from bench.peers.in_flight import Intake, Reception, Send, WindowedPeer
from bench.peers.peer import allow_read_only_tensors, shared_memory_shortage

__all__ = ["ZenohShm"]

_KEY = "bench/tensors"
_HEADER = struct.Struct("<4Q")
_SPARE_MESSAGES = 4  # in a pool beside the window: one being written, one not yet collected, what the allocator itself takes
_BATCH_NBYTES = 1 << 20
_MIN_POOL_NBYTES = 1 << 20  # less would be made anew for each of the smaller sizes


class ZenohShm(WindowedPeer):
    """What the processes share is nothing; what is kept for them is which segments were there before."""

    name = "zenoh"
    title = "zenoh, shared memory"
    requires = "eclipse-zenoh"

    def __init__(self) -> None:
        self._provider: Any = None  # a producer's, of this process
        self._pool_nbytes = 0

    def limits(self, cell: Cell) -> str | None:
        return shared_memory_shortage(cell.producers * _pool_nbytes(cell), "its pools")

    def create_own(self, context: SpawnContext, producers: int) -> frozenset[Path]:
        return _segments()

    def close_own(self, own: frozenset[Path]) -> None:
        added = _segments() - own
        for segment in added - _mapped_segments():
            with contextlib.suppress(OSError):  # another user's, or gone meanwhile
                segment.unlink()

    @contextlib.asynccontextmanager
    async def sending(self, cell: Cell, own: frozenset[Path], source: Source) -> AsyncIterator[Send]:
        zenoh: Any = importlib.import_module("zenoh")
        shm: Any = importlib.import_module("zenoh.shm")
        if self._pool_nbytes < (needed := _pool_nbytes(cell)):
            self._provider = None  # first, so that there are not both
            self._provider, self._pool_nbytes = shm.ShmProvider.default_backend(needed), needed
        policy = shm.BlockOn(shm.GarbageCollect())
        bytes_of_tensor = bytearray(cell.nbytes)
        with zenoh.open(_config(zenoh, cell, "connect")) as session:
            publisher = session.declare_publisher(_KEY, congestion_control=zenoh.CongestionControl.BLOCK, express=True)
            await _matched(publisher)

            def send() -> None:
                header = source.stamp()
                buffer = self._provider.alloc(cell.nbytes, policy)
                bytes_of_tensor[:] = source.array.data
                buffer[:] = bytes_of_tensor
                publisher.put(buffer, attachment=_HEADER.pack(*header))

            yield send

    async def receive(self, cell: Cell, own: frozenset[Path], intake: Intake, listening: Callable[[], None]) -> None:
        zenoh: Any = importlib.import_module("zenoh")
        allow_read_only_tensors()
        reception = _Reception(cell, intake)
        callback = zenoh.handlers.Callback(reception.deliver, indirect=False)
        with zenoh.open(_config(zenoh, cell, "listen")) as session:
            session.declare_subscriber(_KEY, callback)
            listening()
            await reception.finished


class _Reception(Reception):
    """Samples on their way from zenoh's thread to the loop's."""

    def __init__(self, cell: Cell, intake: Intake) -> None:
        super().__init__(cell, intake, _BATCH_NBYTES)
        self._dtype = cell.torch_dtype
        self._samples: deque[Any] = deque()
        self._due = False  # whether the loop is about to take samples

    def deliver(self, sample: Any) -> None:
        """A sample has come. Called on zenoh's thread."""
        self._samples.append(sample)
        if not self._due:
            self._due = True
            self.loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._due = False  # before samples are taken: what comes in between calls us again
        self.take_batch()

    def next_sample(self) -> Any:
        return self._samples.popleft() if self._samples else None

    def read(self, sample: Any) -> tuple[Header, torch.Tensor]:
        buffer = sample.payload.as_shm()
        if buffer is None:
            raise RuntimeError("zenoh has sent the tensor through its link, not through shared memory")
        return Header(*_HEADER.unpack(sample.attachment.to_bytes())), torch.frombuffer(bytes(buffer), dtype=self._dtype)


def _pool_nbytes(cell: Cell) -> int:
    return max(_MIN_POOL_NBYTES, (cell.window + _SPARE_MESSAGES) * cell.nbytes)


def _config(zenoh: Any, cell: Cell, role: str) -> Any:
    """A session that knows its one endpoint and looks for nothing else."""
    config = zenoh.Config()
    for setting, value in {
        "mode": '"peer"',
        "listen/endpoints": "[]",
        f"{role}/endpoints": f'["unixsock-stream/{Path(cell.directory, "zenoh.sock")}"]',
        "scouting/multicast/enabled": "false",
        "scouting/gossip/enabled": "false",
        "transport/unicast/lowlatency": "true",
        "transport/unicast/qos/enabled": "false",  # low latency excludes it
        "transport/shared_memory/enabled": "true",
        "transport/shared_memory/mode": '"init"',
    }.items():
        config.insert_json5(setting, value)
    return config


async def _matched(publisher: Any) -> None:
    """Waits until the subscriber is known to the publisher: what is put before goes nowhere."""
    loop = asyncio.get_running_loop()
    matched = asyncio.Event()
    listener = publisher.declare_matching_listener(
        lambda status: loop.call_soon_threadsafe(matched.set) if status.matching else None
    )
    if not publisher.matching_status.matching:
        await matched.wait()
    listener.undeclare()


def _segments() -> frozenset[Path]:
    """Zenoh's segments, anybody's."""
    with os.scandir("/dev/shm") as entries:
        return frozenset(Path(entry.path) for entry in entries if entry.name.endswith(".zenoh"))


def _mapped_segments() -> set[Path]:
    """Those that a process of this user maps."""
    mapped: set[Path] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            lines = maps.read_text().splitlines()
            mapped.update(Path(line.split(maxsplit=5)[5]) for line in lines if line.endswith(".zenoh"))
    return mapped
