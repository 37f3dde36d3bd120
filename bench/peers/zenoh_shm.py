"""zenoh, peer to peer, with its shared-memory provider.

How its users use it: the producer allocates a buffer from its ``ShmProvider``, writes the tensor into it and puts it on a key,
with the header as attachment; only a reference travels through the link, here a Unix stream socket between the two sessions.
The consumer's subscriber has a callback, as subscribers of asynchronous programs have: zenoh's receiving thread calls it and it
hands the sample to the event loop with ``call_soon_threadsafe``. There is no descriptor to wait for in its Python API.

Done well, to be worth comparing with: the provider's pool holds more than the window, so that no allocation has to wait, and
is kept for the life of the process, as servers keep theirs; the callback is direct, which spares a queue and a thread; the link
is of the low-latency kind, without priorities; puts are express, so that none waits for a batch to fill, and block rather than
drop; nothing is scouted or routed. The window is counted back through a pipe for each producer that its loop reads.

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
import importlib
import os
import shutil
import struct
import tempfile
from collections import deque
from collections.abc import Callable
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.messages import Cell, Header, Sink, Source
from bench.peers.in_flight import Acknowledgements
from bench.peers.memory import shared_memory_shortage
from bench.peers.peer import Peer, allow_read_only_tensors

__all__ = ["ZenohShm"]

_KEY = "bench/tensors"
_HEADER = struct.Struct("<4Q")
_SPARE_MESSAGES = (
    4  # in a pool beside the window: one being written, one not yet collected, and what the allocator itself takes
)
_MAX_BATCH = 64  # messages taken before the loop's other work has its turn,
_BATCH_NBYTES = 1 << 20  # and at most so many bytes of them, but for the first: each is copied
_MIN_POOL_NBYTES = 1 << 20  # less would be made anew for each of the smaller sizes


class _Shared(NamedTuple):
    records: str  # a directory: what each process has mapped, one file for each
    acknowledgements: Acknowledgements


class ZenohShm(Peer):
    """See the head of this file."""

    name = "zenoh"
    title = "zenoh, shared memory"
    requires = "eclipse-zenoh"

    def __init__(self) -> None:
        self._provider: Any = None  # a producer's, of this process
        self._pool_nbytes = 0

    def limits(self, cell: Cell) -> str | None:
        return shared_memory_shortage(cell.producers * _pool_nbytes(cell), "its pools")

    def create_shared(self, context: SpawnContext, producers: int) -> _Shared:
        return _Shared(tempfile.mkdtemp(prefix="shmring-bench-"), Acknowledgements.create(context, producers))

    def close_shared(self, shared: _Shared) -> None:
        for record in Path(shared.records).iterdir():
            for segment in record.read_text().splitlines():
                Path(segment).unlink(missing_ok=True)
        shutil.rmtree(shared.records)
        shared.acknowledgements.close()

    async def produce(self, cell: Cell, shared: _Shared, source: Source) -> None:
        zenoh: Any = importlib.import_module("zenoh")
        shm: Any = importlib.import_module("zenoh.shm")
        provider = self._open_provider(shm, cell)
        policy = shm.BlockOn(shm.GarbageCollect())
        bytes_of_tensor = bytearray(cell.nbytes)
        with zenoh.open(_config(zenoh, cell, "connect")) as session:
            publisher = session.declare_publisher(_KEY, congestion_control=zenoh.CongestionControl.BLOCK, express=True)
            await _matched(publisher)
            _record(shared)  # before anything is sent: this process may be killed because another one has failed
            with shared.acknowledgements.counted(source.producer, cell.window) as window:
                while not source.finished:
                    await window.take()
                    header = source.stamp()
                    buffer = provider.alloc(cell.nbytes, policy)
                    bytes_of_tensor[:] = source.array.data
                    buffer[:] = bytes_of_tensor
                    publisher.put(buffer, attachment=_HEADER.pack(*header))
                    if not header.sequence:
                        _record(shared)
                await window.drain()

    async def consume(self, cell: Cell, shared: _Shared, sink: Sink, listening: Callable[[], None]) -> None:
        zenoh: Any = importlib.import_module("zenoh")
        allow_read_only_tensors()
        reception = _Reception(cell, shared, sink)
        callback = zenoh.handlers.Callback(reception.deliver, indirect=False)
        with zenoh.open(_config(zenoh, cell, "listen")) as session:
            session.declare_subscriber(_KEY, callback)
            listening()
            await reception.finished

    def _open_provider(self, shm: Any, cell: Cell) -> Any:
        """Returns this process's provider; a new one if it is too small for the cell."""
        if self._pool_nbytes < (needed := _pool_nbytes(cell)):
            self._provider = None  # first, so that there are not both
            self._provider, self._pool_nbytes = shm.ShmProvider.default_backend(needed), needed
        return self._provider


class _Reception:
    """Samples on their way from zenoh's thread to the loop's."""

    def __init__(self, cell: Cell, shared: _Shared, sink: Sink) -> None:
        self._loop = asyncio.get_running_loop()
        self.finished: asyncio.Future[None] = self._loop.create_future()
        self._cell = cell
        self._shared = shared
        self._sink = sink
        self._give = shared.acknowledgements.givers()
        self._samples: deque[Any] = deque()
        self._due = False  # whether the loop is about to take samples
        self._batch = max(1, min(_MAX_BATCH, _BATCH_NBYTES // cell.nbytes))

    def deliver(self, sample: Any) -> None:
        """A sample has come. Called on zenoh's thread."""
        self._samples.append(sample)
        if not self._due:
            self._due = True
            self._loop.call_soon_threadsafe(self._take_batch)

    def _take_batch(self) -> None:
        self._due = False  # before samples are taken: what comes in between calls us again
        if self.finished.done():
            return  # after a failure
        try:
            for _ in range(min(self._batch, len(self._samples))):
                if self._take(self._samples.popleft()):
                    self.finished.set_result(None)
        except Exception as error:  # noqa: BLE001 # above us is only the loop; whoever waits for us hears of it
            self.finished.set_exception(error)
            return
        if self._samples and not self._due:
            self._due = True
            self._loop.call_soon(self._take_batch)

    def _take(self, sample: Any) -> bool:
        header = Header(*_HEADER.unpack(sample.attachment.to_bytes()))
        buffer = sample.payload.as_shm()
        if buffer is None:
            raise RuntimeError("zenoh has sent the tensor through its link, not through shared memory")
        finished = self._sink.take(header, torch.frombuffer(bytes(buffer), dtype=self._cell.torch_dtype))
        self._give[header.producer]()
        if not header.sequence:
            _record(self._shared)
        return finished


def _pool_nbytes(cell: Cell) -> int:
    return max(_MIN_POOL_NBYTES, (cell.window + _SPARE_MESSAGES) * cell.nbytes)


def _config(zenoh: Any, cell: Cell, role: str) -> Any:
    """A session that knows its one endpoint and looks for nothing else."""
    endpoint = f"unixsock-stream/{Path(cell.directory, 'zenoh.sock')}"
    config = zenoh.Config()
    config.insert_json5("mode", '"peer"')
    config.insert_json5("listen/endpoints", "[]")
    config.insert_json5(f"{role}/endpoints", f'["{endpoint}"]')
    config.insert_json5("scouting/multicast/enabled", "false")
    config.insert_json5("scouting/gossip/enabled", "false")
    config.insert_json5("transport/unicast/lowlatency", "true")
    config.insert_json5("transport/unicast/qos/enabled", "false")  # low latency excludes it
    config.insert_json5("transport/shared_memory/enabled", "true")
    config.insert_json5("transport/shared_memory/mode", '"init"')
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


def _record(shared: _Shared) -> None:
    """Writes down zenoh's segments that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    segments = {line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line and line.endswith(".zenoh")}
    Path(shared.records, str(os.getpid())).write_text("\n".join(segments))
