"""A GPU made of host memory: the protocol of ``shmring.gpu.cuda``, on the made-up driver (``made_up_driver.pyx``).

It refuses what a GPU refuses: a registration that overlaps another, unregistering what is unmapped already. And any call can
be made to fail.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from shmring.core.compiled import Gpu
from shmring.gpu.cuda import CudaError
from shmring.gpu.driver import driver_error
from tests.model.made_up_driver import MadeUpDriver, Stream

POISON = 0xEE  # what device memory holds before anything is copied to it
_ON_HOST = 1  # as DLPack numbers it


class FakeCuda(MadeUpDriver):
    """Attributes:
    reason: what ``unavailable`` says.
    hold_copies: whether streams for copies are made held.
    largest: the most bytes that one registration takes.
    pending: threads on which a failed call has left its error.
    visible: the GPUs that this process sees, in its order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reason: str | None = None
        self.hold_copies = False
        self.largest = 1 << 62
        self.unregistered: list[int] = []
        self.pending: set[int] = set()
        self.visible = ["GPU-a", "GPU-b", "GPU-c"]
        self._here = threading.local()
        self._gpus: dict[int, Gpu] = {}
        self._allocated: list[torch.Tensor] = []

    # -- for tests -----------------------------------------------------------------------------------------------------

    def select(self, device_index: int) -> None:
        """Makes a device this thread's current one."""
        self._here.device_index = device_index

    def queue(self, stream: Stream, work: Callable[[], object]) -> None:
        """Queues work, as a kernel is queued."""
        self.queue_work(stream, work)

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
            self.refuse("host_register", 712 if taken else 2)
        self.registered[address] = nbytes

    def host_unregister(self, device_index: int, address: int) -> None:
        assert is_mapped(address), "unregistered after it was unmapped"
        self._call("host_unregister", device_index)
        if address not in self.registered:
            self.refuse("host_unregister", 713)
        del self.registered[address]
        self.unregistered.append(address)

    def clear_error(self, device_index: int) -> None:
        self._call("clear_error", device_index)
        self.pending.discard(threading.get_ident())

    def allocate(self, device_index: int, nbytes: int) -> torch.Tensor:
        self._call("allocate", device_index)
        memory = torch.full((nbytes,), POISON, dtype=torch.uint8)
        self._allocated.append(memory)  # copies are queued by address; torch frees no memory that one uses
        return memory

    def create_stream(self, device_index: int) -> Stream:
        self._call("create_stream", device_index)
        return self.create(device_index, self.hold_copies)

    def used_on(self, memory: torch.Tensor, stream: int) -> None:
        self._call("used_on", next(other.device_index for other in self.streams if other.cuda_stream == stream))

    def gpu(self, device_index: int) -> Gpu:
        if device_index not in self._gpus:
            self._gpus[device_index] = Gpu((_ON_HOST, 0), self.context(device_index), self.functions, driver_error)
        return self._gpus[device_index]

    def device_index_of(self, uuid: str) -> int | None:
        return self.visible.index(uuid) if uuid in self.visible else None

    def uuid(self, device_index: int) -> str:
        return self.visible[device_index]

    # -- inside --------------------------------------------------------------------------------------------------------

    def _call(self, name: str, device_index: int) -> None:
        if self.has_failed(name, device_index):
            self.refuse(name, 999)

    def refuse(self, name: str, code: int) -> None:
        self.pending.add(threading.get_ident())
        raise CudaError(f"{name} failed", call=name, code=code)


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


def is_mapped(address: int) -> bool:
    """Whether this process has something mapped there."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(bound, 16) for bound in line.split(maxsplit=1)[0].split("-"))
        if start <= address < end:
            return True
    return False
