"""iceoryx2: publish and subscribe with loaned slices of bytes, and an event that wakes the consumer.

How its users use it: a service of dynamic ``[u8]`` payloads with a user header, and beside it an event service. The producer
takes a loan, writes into it, sends it and notifies; the consumer's listener wakes, and it receives samples until there are
none, reads each in place, and lets go of it. Measured twice. ``iceoryx2``: the tensor is copied into the loan, as who gets it
from a decoder must. ``iceoryx2-loaned``: the content is already where it belongs, in the loaned memory, only the stamps are
written, and nothing is copied.

Done well, to be worth comparing with: the subscriber's buffer holds the whole window, so that nothing overflows and no
publisher waits; loans are preallocated (``Static``) and aligned to cache lines; there is no history. A listener is a
descriptor: C++ and Rust attach it to any event loop, and Python's bindings only lack the accessor. So the descriptor is found
by the address that it is bound to, and the loop watches it; a thread that blocks in ``Listener.blocking_wait`` and wakes the
loop moved about half as many small messages. The window is counted back through a pipe for each producer that its loop reads,
which is cheaper than a second event service. An engine is not told beforehand what it will receive, so dtype and shape travel
with each tensor, here in the user header.

Every message is a sample of its own, received and checked by itself; what messages share are wakes. The producer fills its
window without going back to its loop, and iceoryx2 makes no system call for a notification while one is pending. When this
was written, there was one wake for about 14 messages with 16 in flight, and one for each with one in flight: 8 and 25
microseconds of CPU a message on each side. Nothing spins: after the last sample the loop sleeps until its descriptor is ready.

iceoryx2 leaves a management segment and directories behind, by intent. Here all names have a prefix of their own, so that
what is left can be told from other users' and is removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import math
import os
import secrets
import socket
from collections.abc import Callable
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.messages import DTYPES, Cell, Header, Sink, Source
from bench.peers.in_flight import Acknowledgements
from bench.peers.memory import shared_memory_shortage
from bench.peers.peer import Peer
from shmring.memory.slab import SHM_DIRECTORY

__all__ = ["Iceoryx2", "Iceoryx2Loaned"]

_ALIGNMENT = 64  # bytes: a cache line; copies into memory that is not aligned so are slower
_MAX_BATCH = 64  # messages taken before the loop's other work has its turn,
_BATCH_NBYTES = 4 << 20  # and at most so many bytes of them, but for the first: a consumer may copy them
_MAX_DIMENSIONS = 8  # of a tensor; no model's input has more
_DTYPES = tuple(DTYPES.values())
_SPARE_SAMPLES = 2  # that a publisher preallocates beside the window: one on loan, and one that is being read


class _UserHeader(ctypes.Structure):
    """A :class:`bench.messages.Header`, and what the tensor is, as they lie in shared memory."""

    _fields_ = (
        ("sequence", ctypes.c_uint64),
        ("phase", ctypes.c_uint64),
        ("sent_ns", ctypes.c_uint64),
        ("producer", ctypes.c_uint64),
        ("shape", ctypes.c_uint64 * _MAX_DIMENSIONS),
        ("dimensions", ctypes.c_uint8),
        ("dtype", ctypes.c_uint8),  # its place in _DTYPES
    )


class _Shared(NamedTuple):
    prefix: str  # of all names that iceoryx2 gives out
    acknowledgements: Acknowledgements


class _Services(NamedTuple):
    node: Any  # kept: the services end with it
    tensors: Any
    arrivals: Any


class Iceoryx2(Peer):
    """See the head of this file."""

    name = "iceoryx2"
    title = "iceoryx2, one copy"
    requires = "iceoryx2"

    def limits(self, cell: Cell) -> str | None:
        return shared_memory_shortage(cell.producers * (cell.window + _SPARE_SAMPLES) * cell.nbytes, "its loans")

    def create_shared(self, context: SpawnContext, producers: int) -> _Shared:
        # Short: the listener's socket has it in its address, which ends at 107 bytes.
        return _Shared(f"bench{secrets.token_hex(4)}_", Acknowledgements.create(context, producers))

    def close_shared(self, shared: _Shared) -> None:
        for path in SHM_DIRECTORY.glob(f"{shared.prefix}*"):
            path.unlink(missing_ok=True)
        shared.acknowledgements.close()

    async def produce(self, cell: Cell, shared: _Shared, source: Source) -> None:
        services = _open(cell, shared)
        publisher, notifier = _publisher(services, cell), services.arrivals.notifier_builder().create()
        dimensions, dtype = len(cell.shape), _DTYPES.index(cell.torch_dtype)
        try:
            with shared.acknowledgements.counted(source.producer, cell.window) as window:
                while not source.finished:
                    await window.take()
                    header, loan = self._fill(publisher, cell, source)
                    fields = _UserHeader.from_address(loan.user_header_ptr)
                    fields.sequence, fields.phase, fields.sent_ns, fields.producer = header
                    fields.shape[:dimensions], fields.dimensions, fields.dtype = cell.shape, dimensions, dtype
                    loan.assume_init().send()
                    notifier.notify()
                await window.drain()
        finally:
            notifier.delete()
            publisher.delete()

    async def consume(self, cell: Cell, shared: _Shared, sink: Sink, listening: Callable[[], None]) -> None:
        services = _open(cell, shared)
        subscriber = services.tensors.subscriber_builder().buffer_size(cell.window).create()
        listener = services.arrivals.listener_builder().create()
        reception = _Reception(cell, shared, sink, subscriber, listener)
        loop = asyncio.get_running_loop()
        descriptor = _descriptor(cell)
        loop.add_reader(descriptor, reception.wake)
        try:
            listening()
            await reception.finished
        finally:
            loop.remove_reader(descriptor)
            listener.delete()
            subscriber.delete()

    def _fill(self, publisher: Any, cell: Cell, source: Source) -> tuple[Header, Any]:
        """Returns a loan with the next message's content, and its header."""
        header = source.stamp()
        loan = publisher.loan_slice_uninit(cell.nbytes)
        ctypes.memmove(loan.payload_ptr, source.array.ctypes.data, cell.nbytes)
        return header, loan


class Iceoryx2Loaned(Iceoryx2):
    """See the head of this file."""

    name = "iceoryx2-loaned"
    title = "iceoryx2, loaned"
    in_place = True

    def _fill(self, publisher: Any, cell: Cell, source: Source) -> tuple[Header, Any]:
        loan = publisher.loan_slice_uninit(cell.nbytes)
        return source.stamp(_tensor(loan.payload_ptr, cell.torch_dtype, cell.shape)), loan


class _Reception:
    """Takes samples when the listener's descriptor says that there are some."""

    def __init__(self, cell: Cell, shared: _Shared, sink: Sink, subscriber: Any, listener: Any) -> None:
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sink = sink
        self._subscriber = subscriber
        self._listener = listener
        self._give = shared.acknowledgements.givers()
        self._batch = max(1, min(_MAX_BATCH, _BATCH_NBYTES // cell.nbytes))

    def wake(self) -> None:
        """The descriptor is readable."""
        self._listener.try_wait()  # before samples are taken: what comes in between wakes us again
        self._take_batch()

    def _take_batch(self) -> None:
        if self.finished.done():
            return
        try:
            for _ in range(self._batch):
                sample = self._subscriber.receive()
                if sample is None:
                    return
                self._take(sample)
        except Exception as error:  # noqa: BLE001 # above us is only the loop; whoever waits for us hears of it
            self.finished.set_exception(error)
        else:
            asyncio.get_running_loop().call_soon(self._take_batch)  # what is left wakes nobody

    def _take(self, sample: Any) -> None:
        fields = _UserHeader.from_address(sample.user_header_ptr)
        header = Header(fields.sequence, fields.phase, fields.sent_ns, fields.producer)
        shape = tuple(fields.shape[: fields.dimensions])
        finished = self._sink.take(header, _tensor(sample.payload_ptr, _DTYPES[fields.dtype], shape))
        sample.delete()
        self._give[header.producer]()
        if finished:
            self.finished.set_result(None)


def _open(cell: Cell, shared: _Shared) -> _Services:
    """Opens both services, the same in every process; whoever comes first creates them."""
    iceoryx2: Any = importlib.import_module("iceoryx2")

    iceoryx2.set_log_level(iceoryx2.LogLevel.Error)
    config = iceoryx2.config.default()
    config.global_cfg.root_path = iceoryx2.Path.new(str(_root(cell)))
    config.global_cfg.prefix = iceoryx2.FileName.new(shared.prefix)
    builder = iceoryx2.NodeBuilder.new().config(config).signal_handling_mode(iceoryx2.SignalHandlingMode.Disabled)
    node = builder.create(iceoryx2.ServiceType.Ipc)
    tensors = (
        node.service_builder(iceoryx2.ServiceName.new("tensors"))
        .publish_subscribe(iceoryx2.Slice[ctypes.c_uint8])
        .user_header(_UserHeader)
        .payload_alignment(iceoryx2.Alignment.new(_ALIGNMENT))
        .max_nodes(cell.producers + 1)
        .max_publishers(cell.producers)
        .max_subscribers(1)
        .subscriber_max_buffer_size(cell.window)
        .subscriber_max_borrowed_samples(1)
        .history_size(0)
        .enable_safe_overflow(False)  # nothing may be dropped for what is newer
        .open_or_create()
    )
    arrivals = (
        node.service_builder(iceoryx2.ServiceName.new("arrivals"))
        .event()
        .max_nodes(cell.producers + 1)
        .max_notifiers(cell.producers)
        .max_listeners(1)
        .open_or_create()
    )
    return _Services(node, tensors, arrivals)


def _publisher(services: _Services, cell: Cell) -> Any:
    iceoryx2: Any = importlib.import_module("iceoryx2")

    builder = services.tensors.publisher_builder().initial_max_slice_len(cell.nbytes).max_loaned_samples(1)
    return builder.allocation_strategy(iceoryx2.AllocationStrategy.Static).create()


def _root(cell: Cell) -> Path:
    return Path(cell.directory, "iceoryx2")


def _descriptor(cell: Cell) -> int:
    """Returns the listener's descriptor: that of this process's one socket which is bound in iceoryx2's directory.

    Raises:
        RuntimeError: there is none.
    """
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(FileNotFoundError):  # that of the listing, which is closed by now
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                with socket.socket(fileno=os.dup(descriptor)) as copy:
                    if str(copy.getsockname()).startswith(f"{_root(cell)}/"):
                        return descriptor
    raise RuntimeError("this version of iceoryx2 has listeners without a socket: the adapter must wait in another way")


def _tensor(address: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The content of a sample, where it lies; it dies with the sample."""
    content = (ctypes.c_uint8 * (math.prod(shape) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(content, dtype=dtype).view(shape)
