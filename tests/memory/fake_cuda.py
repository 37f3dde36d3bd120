"""A GPU made of host memory: the protocol of ``shmring.gpu.cuda``, with streams that stop where a test wants them to.

What a real one would do at some later moment, this one does when its stream is let run: a copy from pinned memory reads its
source then, and not when it is queued, so a slot that is reused too early shows as wrong bytes. It refuses what a GPU
refuses: a copy across two registrations, a registration that overlaps another, unregistering what is unmapped already.
And any call can be made to fail.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shmring.gpu.cuda import CudaError, DeviceBytes

POISON = 0xEE  # what device memory holds before anything is copied to it


class FakeEvent:
    """Reached or not."""

    def __init__(self, device_index: int) -> None:
        self.device_index = device_index
        self.reached = threading.Event()


class FakeStream:
    """What is queued: work, events to be reached, events to wait for. Runs by itself unless it is held."""

    def __init__(self, device_index: int, *, held: bool = False) -> None:
        self.device_index = device_index
        self.held = held
        self.queue: deque[FakeEvent | Callable[[], None] | tuple[FakeEvent]] = deque()


class FakeCuda:
    """Attributes:
    reason: what ``unavailable`` says.
    hold_copies: whether streams for copies are made held.
    largest: the most bytes that one registration takes.
    registered: address to size.
    pending: threads on which a failed call has left its error.
    calls: how often each call was made.
    devices: devices that were touched.
    visible: the GPUs that this process sees, in its order.
    awaited: events that threads sleep for at this moment.
    exported, opened: events handed to other processes, and taken from them.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.hold_copies = False
        self.largest = 1 << 62
        self.registered: dict[int, int] = {}
        self.unregistered: list[int] = []
        self.pending: set[int] = set()
        self.calls: Counter[str] = Counter()
        self.devices: set[int] = set()
        self.streams: list[FakeStream] = []
        self.copied: list[tuple[int, int]] = []
        self.copy_threads: set[int] = set()
        self.visible = ["GPU-a", "GPU-b", "GPU-c"]
        self.exported: dict[bytes, FakeEvent] = {}
        self.opened: set[bytes] = set()
        self._here = threading.local()
        self._computing: dict[int, FakeStream] = {}
        self.awaited: set[FakeEvent] = set()
        self._failures: dict[str, int] = {}
        self._lock = threading.RLock()

    # -- for tests -----------------------------------------------------------------------------------------------------

    def fail(self, call: str, times: int = 1) -> None:
        """Makes the next calls of a name fail."""
        self._failures[call] = times

    def select(self, device_index: int) -> None:
        """Makes a device this thread's current one."""
        self._here.device_index = device_index

    def queue(self, stream: FakeStream, work: Callable[[], None]) -> None:
        """Queues work, as a kernel is queued."""
        self._queue(stream, work)

    def release(self, *streams: FakeStream) -> None:
        """Lets streams run, all of them if none is given."""
        with self._lock:
            for stream in streams or tuple(self.streams):
                stream.held = False
        self._run()

    def advance(self, stream: FakeStream) -> None:
        """Runs a held stream as far as its next event, if it has one."""
        with self._lock:
            if not any(isinstance(work, FakeEvent) for work in stream.queue):
                return
            while not isinstance(work := stream.queue[0], FakeEvent):
                stream.held = False
                tail = deque(list(stream.queue)[1:])
                stream.queue = deque([work])
                assert self._step(stream), "it waits for another stream"
                stream.queue = tail
            work.reached.set()
            stream.queue.popleft()
            stream.held = True
        self._run()

    # -- the protocol --------------------------------------------------------------------------------------------------

    def unavailable(self) -> str | None:
        return self.reason

    def current_device(self) -> int:
        return int(getattr(self._here, "device_index", 0))

    def host_register(self, device_index: int, address: int, nbytes: int) -> None:
        assert address % mmap.PAGESIZE == 0
        assert nbytes % mmap.PAGESIZE == 0
        self._call("host_register", device_index)
        taken = any(address < start + size and start < address + nbytes for start, size in self.registered.items())
        if nbytes > self.largest or taken:
            self._refuse("host_register", 712 if taken else 2)
        self.registered[address] = nbytes

    def host_unregister(self, device_index: int, address: int) -> None:
        assert is_mapped(address), "unregistered after it was unmapped"
        self._call("host_unregister", device_index)
        if address not in self.registered:
            self._refuse("host_unregister", 713)
        del self.registered[address]
        self.unregistered.append(address)

    def clear_error(self, device_index: int) -> None:
        self._call("clear_error", device_index)
        self.pending.discard(threading.get_ident())

    def allocate(self, device_index: int, nbytes: int) -> torch.Tensor:
        self._call("allocate", device_index)
        return torch.full((nbytes,), POISON, dtype=torch.uint8)

    def view(self, device_index: int, lent: DeviceBytes) -> torch.Tensor:
        self._call("view", device_index)
        return torch.from_numpy(np.asarray(_Shown(lent)))

    def create_stream(self, device_index: int) -> FakeStream:
        self._call("create_stream", device_index)
        stream = FakeStream(device_index, held=self.hold_copies)
        self.streams.append(stream)
        return stream

    def compute_on(self, stream: FakeStream | None) -> None:
        """Makes a stream this thread's current one; None: the one it had at first."""
        self._here.stream = stream

    def current_stream(self, device_index: int) -> FakeStream:
        self._call("current_stream", device_index)
        if (chosen := getattr(self._here, "stream", None)) is not None and chosen.device_index == device_index:
            return chosen
        if device_index not in self._computing:
            self._computing[device_index] = FakeStream(device_index)
            self.streams.append(self._computing[device_index])
        return self._computing[device_index]

    def used_on(self, memory: torch.Tensor, stream: FakeStream) -> None:
        self._call("used_on", stream.device_index)

    def copy_to_device(self, target: torch.Tensor, source: np.ndarray[Any, Any], stream: FakeStream) -> None:
        self._call("copy_to_device", stream.device_index)
        assert target.numel() == source.size
        self.copied.append((source.ctypes.data, source.size))
        self.copy_threads.add(threading.get_ident())
        read = None if self._is_pinned(source) else source.copy()  # of pageable memory, before the call returns
        # By address, as a GPU reads: a reference would keep the slot that nobody else keeps.
        start, nbytes = source.ctypes.data if read is None else read.ctypes.data, source.size
        self._queue(stream, lambda: _move(target, start, nbytes, read))

    def record(self, stream: FakeStream) -> FakeEvent:
        self._call("record", stream.device_index)
        event = FakeEvent(stream.device_index)
        self._queue(stream, event)
        return event

    def record_shared(self, stream: FakeStream, event: FakeEvent | None) -> FakeEvent:
        self._call("record_shared", stream.device_index)
        if event is None:
            event = FakeEvent(stream.device_index)
        event.reached.clear()
        self._queue(stream, event)
        return event

    def export_event(self, event: FakeEvent) -> bytes:
        self._call("export_event", event.device_index)
        handle = len(self.exported).to_bytes(64, "little")
        self.exported[handle] = event
        return handle

    def open_event(self, device_index: int, handle: bytes) -> FakeEvent:
        self._call("open_event", device_index)
        assert handle not in self.opened, "CUDA opens an event once in a process"
        if handle not in self.exported:
            self._refuse("open_event", 201)
        self.opened.add(handle)
        return self.exported[handle]

    def device_index_of(self, uuid: str) -> int | None:
        return self.visible.index(uuid) if uuid in self.visible else None

    def uuid(self, device_index: int) -> str:
        return self.visible[device_index]

    def wait_event(self, stream: FakeStream, event: FakeEvent) -> None:
        self._call("wait_event", stream.device_index)
        self._queue(stream, (event,))

    def query(self, event: FakeEvent) -> bool:
        self._call("query", event.device_index)
        return event.reached.is_set()

    def synchronize(self, event: FakeEvent) -> None:
        if not event.reached.is_set():
            self.awaited.add(event)
            assert event.reached.wait(20), "nobody let the stream run"
            self.awaited.remove(event)
        self._call("synchronize", event.device_index)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _call(self, name: str, device_index: int) -> None:
        with self._lock:
            self.calls[name] += 1
            self.devices.add(device_index)
            if self._failures.get(name):
                self._failures[name] -= 1
                self._refuse(name, 999)

    def _refuse(self, name: str, code: int) -> None:
        self.pending.add(threading.get_ident())
        raise CudaError(f"{name} failed", call=name, code=code)

    def _is_pinned(self, source: np.ndarray[Any, Any]) -> bool:
        start, end = source.ctypes.data, source.ctypes.data + source.size
        for address, nbytes in self.registered.items():
            if address < end and start < address + nbytes:
                if not address <= start <= end <= address + nbytes:
                    self._refuse("copy_to_device", 1)
                return True
        return False

    def _queue(self, stream: FakeStream, work: Any) -> None:
        with self._lock:
            stream.queue.append(work)
        self._run()

    def _run(self) -> None:
        with self._lock:
            moved = True
            while moved:
                moved = sum(self._step(stream) for stream in self.streams) > 0  # every one of them, each time

    def _step(self, stream: FakeStream) -> bool:
        moved = False
        while stream.queue and not stream.held:
            work = stream.queue[0]
            if isinstance(work, tuple):
                if not work[0].reached.is_set():
                    return moved
            elif isinstance(work, FakeEvent):
                work.reached.set()
            else:
                work()
            stream.queue.popleft()
            moved = True
        return moved


class FakeMemory:
    """Driver memory that is host memory; remembers who has what, and refuses what CUDA leaves undefined."""

    def __init__(self) -> None:
        self.memory: dict[int, torch.Tensor] = {}
        self.handles: dict[bytes, int] = {}
        self.opened: list[tuple[int, bytes]] = []
        self.log: list[tuple[str, int]] = []
        self.failing = ""  # the call that fails

    def _call(self, name: str, device_index: int) -> None:
        self.log.append((name, device_index))
        if self.failing == name:
            raise CudaError(f"{name} failed", call=name, code=999)

    def allocate(self, device_index: int, nbytes: int) -> int:
        self._call("allocate", device_index)
        memory = torch.zeros(nbytes, dtype=torch.uint8)
        self.memory[memory.data_ptr()] = memory
        return memory.data_ptr()

    def free(self, device_index: int, address: int) -> None:
        self._call("free", device_index)
        assert all(self.handles[handle] != address for _, handle in self.opened), "freed while another process has it open"
        del self.memory[address]

    def export(self, device_index: int, address: int) -> bytes:
        self._call("export", device_index)
        handle = (len(self.handles) + 1).to_bytes(64, "little")
        self.handles[handle] = address
        return handle

    def open(self, device_index: int, handle: bytes) -> int:
        self._call("open", device_index)
        assert (device_index, handle) not in self.opened, "opened twice"
        self.opened.append((device_index, handle))
        return self.handles[handle]

    def close(self, device_index: int, address: int) -> None:
        self._call("close", device_index)
        self.opened = [(index, handle) for index, handle in self.opened if self.handles[handle] != address]


def _move(target: torch.Tensor, start: int, nbytes: int, _read: np.ndarray[Any, Any] | None) -> None:
    ctypes.memmove(target.data_ptr(), start, nbytes)


class _Shown:
    """Host memory as what it stands for: the CUDA array interface, to numpy."""

    def __init__(self, lent: DeviceBytes) -> None:
        self.lent = lent
        self.__array_interface__ = dict(lent.__cuda_array_interface__)


def is_mapped(address: int) -> bool:
    """Whether this process has something mapped there."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(bound, 16) for bound in line.split(maxsplit=1)[0].split("-"))
        if start <= address < end:
            return True
    return False
