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
multiprocessing's children do, leaves segments of metadata in /dev/shm. So each process writes down which ones it has mapped,
and their parent removes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import shutil
import struct
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any

import torch

from bench.messages import Cell, Header, Source
from bench.peers.in_flight import Intake, Reception, Send, WindowedPeer
from bench.peers.memory import shared_memory_shortage
from bench.peers.peer import allow_read_only_tensors

__all__ = ["ZenohShm"]

_KEY = "bench/tensors"
_HEADER = struct.Struct("<4Q")
_SPARE_MESSAGES = 4  # in a pool beside the window: one being written, one not yet collected, what the allocator itself takes
_BATCH_NBYTES = 1 << 20
_MIN_POOL_NBYTES = 1 << 20  # less would be made anew for each of the smaller sizes


class ZenohShm(WindowedPeer):
    """What the processes share is a directory, where each says what it has mapped."""

    name = "zenoh"
    title = "zenoh, shared memory"
    requires = "eclipse-zenoh"

    def __init__(self) -> None:
        self._provider: Any = None  # a producer's, of this process
        self._pool_nbytes = 0

    def limits(self, cell: Cell) -> str | None:
        return shared_memory_shortage(cell.producers * _pool_nbytes(cell), "its pools")

    def create_own(self, context: SpawnContext, producers: int) -> str:
        return tempfile.mkdtemp(prefix="shmring-bench-")

    def close_own(self, own: str) -> None:
        for record in Path(own).iterdir():
            for segment in record.read_text().splitlines():
                Path(segment).unlink(missing_ok=True)
        shutil.rmtree(own)

    @contextlib.asynccontextmanager
    async def sending(self, cell: Cell, own: str, source: Source) -> AsyncIterator[Send]:
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
            _record(own)  # before anything is sent: this process may be killed because another one has failed

            def send() -> None:
                header = source.stamp()
                buffer = self._provider.alloc(cell.nbytes, policy)
                bytes_of_tensor[:] = source.array.data
                buffer[:] = bytes_of_tensor
                publisher.put(buffer, attachment=_HEADER.pack(*header))
                if not header.sequence:
                    _record(own)

            yield send

    async def receive(self, cell: Cell, own: str, intake: Intake, listening: Callable[[], None]) -> None:
        zenoh: Any = importlib.import_module("zenoh")
        allow_read_only_tensors()
        reception = _Reception(cell, own, intake)
        callback = zenoh.handlers.Callback(reception.deliver, indirect=False)
        with zenoh.open(_config(zenoh, cell, "listen")) as session:
            session.declare_subscriber(_KEY, callback)
            listening()
            await reception.finished


class _Reception(Reception):
    """Samples on their way from zenoh's thread to the loop's."""

    def __init__(self, cell: Cell, records: str, intake: Intake) -> None:
        super().__init__(cell, intake, _BATCH_NBYTES)
        self._dtype = cell.torch_dtype
        self._records = records
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

    def release(self, sample: Any, header: Header) -> None:
        if not header.sequence:
            _record(self._records)


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


def _record(directory: str) -> None:
    """Writes down zenoh's segments that this process has mapped, in a file of its own."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    segments = {line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line and line.endswith(".zenoh")}
    Path(directory, str(os.getpid())).write_text("\n".join(segments))
