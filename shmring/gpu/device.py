"""The device slab: memory on a GPU that an engine allocates once and its frontends write to, by CUDA IPC.

Theory of operation: like the slab in host memory, it is one allocation with one owner. The engine exports one handle, a
frontend opens it once, and from then on slots are offsets, with no call of CUDA for each. In host memory, messages order writes
before reads; here this needs events: the producer records an event behind its writes, the event's handle travels with the
descriptor, and the consumer's stream waits for it. (If the producer's stream is idle by then, no event is needed: finished
writes are visible to all.) Each side keeps the events that it has made or opened, and records them again: making, exporting and
opening an event takes longer than a small copy, recording it again does not.

GPUs are named by their UUID. Index 0 of one process may be index 3 of another (``CUDA_VISIBLE_DEVICES``), and opening a handle
under the wrong index makes a context on another process's GPU (sglang #22662).

Invariants:

- a handle is opened once in a process, however many attach, and not at all in the process that exported it;
- mapped memory is unmapped after its last view, or not at all: :meth:`DeviceSlab.close` returns which;
- the owner frees last. CUDA does not tell the owner that others still have the memory open, so the engine must know that its
  frontends have closed theirs or are dead, as a lease in host memory has to be (``core/engine_book.pyx``);
- an event is recorded again only when all slots it went with have come back: the consumer has waited for it by then, or never
  will.

Source: vLLM PR 32104 hands hardware-decoded video over in VRAM, with a handle per tensor.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from typing import Protocol

from shmring.core.compiled import Gpu, GpuMemory
from shmring.core.messages import DeviceHandle
from shmring.errors import LocalProtocolError, RemoteProtocolError
from shmring.gpu.cuda import Cuda, CudaError

__all__ = ["OVER", "DeviceHandle", "DeviceMemory", "DeviceSlab", "Fence", "Fences", "OpenedFences", "whole_nbytes"]

#: An allocation is rounded up to this: CUDA packs smaller ones into one block, and a handle always means the whole block.
GRANULE_NBYTES = 2 << 20

#: In the place of an event's handle: the GPU had finished all queued work when the message was sent.
OVER = b"\0"


class DeviceMemory(Protocol):
    """Plain device memory, and its way to another process; see :class:`shmring.gpu.driver.Driver`."""

    def allocate(self, device_index: int, nbytes: int) -> int: ...

    def free(self, device_index: int, address: int) -> None: ...

    def export(self, device_index: int, address: int) -> bytes: ...

    def open(self, device_index: int, handle: bytes) -> int: ...

    def close(self, device_index: int, address: int) -> None: ...


class _Mapping:
    """Device memory in this process. Its users decide when it is given back."""

    def __init__(self, gpu: Gpu, memory: DeviceMemory, device_index: int, address: int, nbytes: int, *, owned: bool) -> None:
        self.address = address
        self.users = 1
        self.lendable = GpuMemory(gpu, address, nbytes)
        self._memory = memory
        self._device_index = device_index
        self._owned = owned

    def give_back(self) -> None:
        if self._owned:
            self._memory.free(self._device_index, self.address)
        else:
            self._memory.close(self._device_index, self.address)


_lock = threading.Lock()
_mappings: dict[bytes, _Mapping] = {}
_fences: weakref.WeakValueDictionary[bytes, Fence] = weakref.WeakValueDictionary()  # CUDA opens none where it was made


class DeviceSlab:
    """A device slab in this process. Made by :meth:`create` (the engine) or :meth:`attach` (a frontend).

    Attributes:
        device_index: the GPU, as this process counts.
        handle: lets others attach.
        nbytes: size.
    """

    def __init__(self, device_index: int, handle: DeviceHandle, mapping: _Mapping) -> None:
        self.device_index = device_index
        self.handle = handle
        self.nbytes = handle.nbytes
        self._mapping = mapping
        self._closed = False

    @classmethod
    def create(cls, cuda: Cuda, memory: DeviceMemory, device_index: int, nbytes: int) -> DeviceSlab:
        """Allocates a slab. Blocks for some milliseconds.

        Args:
            cuda: how to call CUDA.
            memory: how to call the driver.
            device_index: which GPU.
            nbytes: size; rounded up to 2 MiB.

        Raises:
            CudaError: there is no CUDA, or not enough memory, or the memory can't be shared. Nothing is left allocated.
        """
        _check_available(cuda, nbytes)
        nbytes = whole_nbytes(nbytes)
        address = memory.allocate(device_index, nbytes)
        try:
            handle = DeviceHandle(cuda.uuid(device_index), memory.export(device_index, address), nbytes)
            mapping = _Mapping(cuda.gpu(device_index), memory, device_index, address, nbytes, owned=True)
        except BaseException:
            memory.free(device_index, address)
            raise
        with _lock:
            _mappings[handle.memory] = mapping
        return cls(device_index, handle, mapping)

    @classmethod
    def attach(cls, cuda: Cuda, memory: DeviceMemory, handle: DeviceHandle) -> DeviceSlab:
        """Maps a slab that an engine exported.

        Raises:
            CudaError: CUDA is not there, this process does not see that GPU, or the handle can't be opened.
        """
        _check_available(cuda, handle.nbytes)
        device_index = cuda.device_index_of(handle.uuid)
        if device_index is None:
            raise CudaError(
                f"the engine's device slab is on {handle.uuid}, which this process does not see; add it to "
                "CUDA_VISIBLE_DEVICES (in any order), or use slots in host memory",
                call="cuIpcOpenMemHandle",
            )
        with _lock:
            mapping = _mappings.get(handle.memory)
            if mapping is not None:
                mapping.users += 1
            else:
                gpu, address = cuda.gpu(device_index), memory.open(device_index, handle.memory)
                mapping = _Mapping(gpu, memory, device_index, address, handle.nbytes, owned=False)
                _mappings[handle.memory] = mapping
        return cls(device_index, handle, mapping)

    @property
    def memory(self) -> GpuMemory:
        """The memory from which slots are lent; as long as one is lent, the slab stays mapped.

        Raises:
            LocalProtocolError: the slab was closed.
        """
        if self._closed:
            raise LocalProtocolError("the device slab was closed")
        return self._mapping.lendable

    def find(self, address: int) -> int | None:
        """Returns the offset of an address of this process in the slab, or None if it is elsewhere."""
        offset = address - self._mapping.address
        return offset if 0 <= offset < self.nbytes else None

    def close(self) -> bool:
        """Gives the slab up; waits for the device. May be called again, until it returns True.

        Returns:
            Whether it was unmapped. False: views of it are alive, and it stays mapped until this is called after their death,
            or the process ends.

        Raises:
            CudaError: CUDA failed to free or unmap it; it stays until the process ends.
        """
        with _lock:
            if not self._closed:
                self._closed = True
                self._mapping.users -= 1
            if self._mapping.users or _mappings.get(self.handle.memory) is not self._mapping:
                return True
            if self._mapping.lendable.lent:
                return False
            del _mappings[self.handle.memory]
            self._mapping.give_back()
        return True


@dataclasses.dataclass(eq=False, slots=True, weakref_slot=True)
class Fence:
    """A producer's event.

    Attributes:
        handle: what travels in the descriptor.
    """

    event: int
    handle: bytes


class Fences:
    """A producer's events, one for each submission that is on its way; recorded again when its slots have come back.

    Args:
        gpu: whose streams they are in.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._free: list[Fence] = []

    def record(self, stream: int) -> Fence:
        """Returns a fence behind all work that is queued in a stream."""
        fence = self._free.pop() if self._free else self._create()
        self._gpu.record_shared(fence.event, stream)
        return fence

    def _create(self) -> Fence:
        event = self._gpu.create_shared()
        fence = Fence(event, self._gpu.export(event))
        _fences[fence.handle] = fence
        return fence

    def give_back(self, fence: Fence) -> None:
        """All slots that went with a fence have come back."""
        self._free.append(fence)


class OpenedFences:
    """The events of one frontend, as the engine has opened them; dropped with the frontend.

    Args:
        gpu: of the slab.
        capacity: the most a frontend may have.
    """

    def __init__(self, gpu: Gpu, capacity: int) -> None:
        self._gpu = gpu
        self._capacity = capacity
        self._events: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._events)

    def wait(self, stream: int, handle: bytes) -> None:
        """Lets a stream wait for the work that the frontend had queued when it sent a handle.

        Raises:
            RemoteProtocolError: it is no handle, or one more than the frontend can need.
        """
        if handle == OVER:
            return
        event = self._events.get(handle)
        if event is None:
            own = _fences.get(handle)
            event = self._open(handle) if own is None else own.event
        self._gpu.wait(stream, event)

    def _open(self, handle: bytes) -> int:
        if len(self._events) >= self._capacity:
            raise RemoteProtocolError(f"a frontend sent more than {self._capacity} events")
        try:
            event = self._gpu.open(handle)
        except CudaError as error:
            raise RemoteProtocolError(f"a frontend's event can't be opened: {error}") from None
        self._events[handle] = event
        return event


def whole_nbytes(nbytes: int) -> int:
    """Returns the size of the slab that is allocated for ``nbytes``."""
    return -(-nbytes // GRANULE_NBYTES) * GRANULE_NBYTES


def _check_available(cuda: Cuda, nbytes: int) -> None:
    reason = cuda.unavailable()
    if reason is not None:
        raise CudaError(f"there can be no device slab here: {reason}", call="cuMemAlloc", nbytes=nbytes)
