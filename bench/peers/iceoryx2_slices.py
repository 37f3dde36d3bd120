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
loop moved about half as many small messages. The window is counted back through a pipe, which is cheaper than a second event
service. An engine is not told beforehand what it will receive, so dtype and shape travel with each tensor, here in the user
header.

Every message is a sample of its own, received and checked by itself; what messages share are wakes. The producer fills its
window without going back to its loop, and iceoryx2 makes no system call for a notification while one is pending. Nothing
spins: after the last sample the loop sleeps until its descriptor is ready.

iceoryx2 leaves a management segment and directories behind, by intent. Here all names have a prefix of their own, so that
what is left can be told from other users' and is removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import math
import secrets
from collections.abc import AsyncIterator, Callable
from multiprocessing.context import SpawnContext
from typing import Any

import psutil
import torch

from bench.messages import DTYPES, Cell, Header, Source
from bench.peers.in_flight import Intake, Send, WindowedPeer
from shmring.memory.slab import SHM_DIRECTORY

_ALIGNMENT = 64  # bytes: a cache line; copies into memory that is not aligned so are slower
_BATCH_NBYTES, _MAX_BATCH = 4 << 20, 64  # bytes, and messages, that are taken at a time
_MAX_DIMENSIONS = 8  # of a tensor; no model's input has more
_DTYPES = tuple(DTYPES.values())
_ROOT = "iceoryx2"  # the directory of its sockets


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


class Iceoryx2(WindowedPeer):
    """What the processes share is the prefix of all names that iceoryx2 gives out."""

    name = "iceoryx2"
    title = "iceoryx2, one copy"
    requires = "iceoryx2"

    def create_own(self, context: SpawnContext) -> str:
        return f"bench{secrets.token_hex(4)}_"  # short: the listener's socket has it in its address, which ends at 107 bytes

    def close_own(self, own: str) -> None:
        for path in SHM_DIRECTORY.glob(f"{own}*"):
            path.unlink(missing_ok=True)

    @contextlib.asynccontextmanager
    async def sending(self, cell: Cell, own: str, source: Source) -> AsyncIterator[Send]:
        iceoryx2, _node, tensors, arrivals = _open(cell, own)
        builder = tensors.publisher_builder().initial_max_slice_len(cell.nbytes).max_loaned_samples(1)
        publisher = builder.allocation_strategy(iceoryx2.AllocationStrategy.Static).create()
        notifier = arrivals.notifier_builder().create()
        dimensions, dtype = len(cell.shape), _DTYPES.index(cell.torch_dtype)

        def send() -> None:
            header, loan = self._fill(publisher, cell, source)
            fields = _UserHeader.from_address(loan.user_header_ptr)
            fields.sequence, fields.phase, fields.sent_ns, fields.producer = header
            fields.shape[:dimensions], fields.dimensions, fields.dtype = cell.shape, dimensions, dtype
            loan.assume_init().send()
            notifier.notify()

        try:
            yield send
        finally:
            notifier.delete()
            publisher.delete()

    async def receive(self, cell: Cell, own: str, intake: Intake, listening: Callable[[], None]) -> None:
        _, _node, tensors, arrivals = _open(cell, own)
        subscriber = tensors.subscriber_builder().buffer_size(cell.window).create()
        listener = arrivals.listener_builder().create()
        reception = _Reception(cell, intake, subscriber, listener)
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
    name = "iceoryx2-loaned"
    title = "iceoryx2, loaned"
    in_place = True

    def _fill(self, publisher: Any, cell: Cell, source: Source) -> tuple[Header, Any]:
        loan = publisher.loan_slice_uninit(cell.nbytes)
        return source.stamp(_tensor(loan.payload_ptr, cell.torch_dtype, cell.shape)), loan


class _Reception:
    """Takes samples in the loop when the listener's descriptor says that there are some: few enough at a time for other work.

    It is finished when the last message has been taken.
    """

    def __init__(self, cell: Cell, intake: Intake, subscriber: Any, listener: Any) -> None:
        self._loop = asyncio.get_running_loop()
        self.finished: asyncio.Future[None] = self._loop.create_future()
        self._intake, self._subscriber, self._listener = intake, subscriber, listener
        self._batch = max(1, min(_MAX_BATCH, _BATCH_NBYTES // cell.nbytes))  # a consumer may copy them

    def wake(self) -> None:
        """The descriptor is readable."""
        self._listener.try_wait()  # before samples are taken: what comes in between wakes us again
        self._take_batch()

    def _take_batch(self) -> None:
        try:
            for _ in range(self._batch):
                if self.finished.done() or (sample := self._subscriber.receive()) is None:
                    return
                fields = _UserHeader.from_address(sample.user_header_ptr)
                header = Header(fields.sequence, fields.phase, fields.sent_ns, fields.producer)
                shape = tuple(fields.shape[: fields.dimensions])
                last = self._intake.take(header, _tensor(sample.payload_ptr, _DTYPES[fields.dtype], shape))
                sample.delete()
                self._intake.acknowledge(header)
                if last:
                    self.finished.set_result(None)
        except Exception as error:  # noqa: BLE001 # above us is only the loop; whoever waits for us hears of it
            self.finished.set_exception(error)
        else:
            self._loop.call_soon(self._take_batch)  # what is left wakes nobody


def _open(cell: Cell, prefix: str) -> tuple[Any, Any, Any, Any]:
    """Opens both services, the same in every process; whoever comes first creates them.

    Returns the module, the node, with which the services end, and the services: of tensors, and of arrivals.
    """
    iceoryx2: Any = importlib.import_module("iceoryx2")
    iceoryx2.set_log_level(iceoryx2.LogLevel.Error)
    config = iceoryx2.config.default()
    config.global_cfg.root_path = iceoryx2.Path.new(str(cell.path(_ROOT)))
    config.global_cfg.prefix = iceoryx2.FileName.new(prefix)
    builder = iceoryx2.NodeBuilder.new().config(config).signal_handling_mode(iceoryx2.SignalHandlingMode.Disabled)
    node = builder.create(iceoryx2.ServiceType.Ipc)
    tensors = node.service_builder(iceoryx2.ServiceName.new("tensors")).publish_subscribe(iceoryx2.Slice[ctypes.c_uint8])
    tensors = tensors.user_header(_UserHeader).payload_alignment(iceoryx2.Alignment.new(_ALIGNMENT))
    tensors = tensors.max_nodes(cell.producers + 1).max_publishers(cell.producers).max_subscribers(1)
    tensors = tensors.subscriber_max_buffer_size(cell.window).subscriber_max_borrowed_samples(1).history_size(0)
    tensors = tensors.enable_safe_overflow(False)  # nothing may be dropped for what is newer
    arrivals = node.service_builder(iceoryx2.ServiceName.new("arrivals")).event()
    arrivals = arrivals.max_nodes(cell.producers + 1).max_notifiers(cell.producers).max_listeners(1)
    return iceoryx2, node, tensors.open_or_create(), arrivals.open_or_create()


def _descriptor(cell: Cell) -> int:
    """Returns the listener's descriptor: that of this process's one socket which is bound in iceoryx2's directory."""
    for connection in psutil.Process().net_connections("unix"):
        if str(connection.laddr).startswith(f"{cell.path(_ROOT)}/"):
            return int(connection.fd)
    raise RuntimeError("this version of iceoryx2 has listeners without a socket: the adapter must wait in another way")


def _tensor(address: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The content of a sample, where it lies; it dies with the sample."""
    content = (ctypes.c_uint8 * (math.prod(shape) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(content, dtype=dtype).view(shape)
