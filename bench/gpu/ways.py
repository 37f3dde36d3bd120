"""The ways by which a request's tensor comes from host memory to the GPU, each as its users go it.

- **From a slot**, pinned or not: a frontend writes it into a slot, the engine claims it and calls ``claim.to``.
- **From ``pin_memory()`` memory** that is there before: the ceiling, since nothing has to be done but the copy.
- **From pageable memory** that is there before: what a tensor that was just made or received lies in.
- **Cloned, then copied**, and **pinned, then copied**: what vLLM does with tensors that come in memory shared with another
  process. It may not keep that memory, so it copies each tensor into memory of its own, pageable or (``pin_memory()``, whose
  allocations torch keeps for the next) page-locked, and that to the GPU.

All have as many sources and as many places on the GPU as requests are in flight, and all copy with ``non_blocking=True``.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import dataclasses
import itertools
import mmap
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from bench.gpu.device import Gpu
from bench.gpu.marks import DTYPE, ITEM_NBYTES, marks
from bench.peers.shmring_copy import see_to_its_end

__all__ = ["CEILING", "CLONED", "PINNED_SLOT", "WAYS", "Request", "Way", "in_flight"]

_RING = "bench"
#: What is in flight together: enough for the copies to follow each other without a gap, and little beside any GPU's memory.
_IN_FLIGHT, _IN_FLIGHT_NBYTES = 64, 256 << 20
#: What a request takes of a lease or of staging memory beyond its tensor: a header and a rounding, in any case less than this.
_SPARE_NBYTES = 8 << 10
#: How long slots may take to come back after their last copy, and how often that is looked for.
_HOME_LIMIT_S, _LOOK_S = 20.0, 0.001
#: Of a slab, beside what is leased: its header, and replies, of which there are none.
_SLAB_SPARE_NBYTES = 16 << 20


def in_flight(nbytes: int) -> int:
    """Returns how many requests of a size are in flight together: at least two, so that one can follow another."""
    return max(2, min(_IN_FLIGHT, _IN_FLIGHT_NBYTES // nbytes))


@dataclasses.dataclass(eq=False, slots=True)
class Request:
    """A request whose data is in host memory.

    Attributes:
        number: what its marks hold.
        source: whatever the way brings it from.
    """

    number: int
    source: Any


class Way(abc.ABC):
    """One of them. Used in one process, one size at a time.

    Args:
        gpu: where to.
        directory: for sockets.
        sizes: of the tensors that will be asked for, in bytes.

    Attributes:
        name, title: for JSON and for people.
    """

    name: ClassVar[str]
    title: ClassVar[str]

    def __init__(self, gpu: Gpu, directory: str, sizes: Sequence[int]) -> None:
        self._gpu = gpu
        self._directory = directory
        self._footprint_nbytes = max(in_flight(nbytes) * nbytes for nbytes in sizes)
        self._numbers = itertools.count(1)

    @abc.abstractmethod
    def opened(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Allocates what it needs, for the time of a ``with``."""

    @abc.abstractmethod
    async def prepare(self, nbytes: int, requests: int) -> list[Request]:
        """Returns so many requests, each with a tensor of so many bytes, marked with its number."""

    @abc.abstractmethod
    async def bring(self, request: Request) -> torch.Tensor:
        """Returns a request's tensor on the GPU, to be used on this thread's current stream: ``int32 (n,)``."""

    async def clear(self, requests: Sequence[Request]) -> None:
        """Ends requests, brought or not. Their tensors on the GPU were dropped before."""
        return


class _FromSlot(Way):
    pin: ClassVar[str]

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        leased = self._footprint_nbytes + _IN_FLIGHT * _SPARE_NBYTES
        options = {
            "slab_nbytes": leased * 9 // 8 + _SLAB_SPARE_NBYTES,  # a sixteenth is for replies
            "max_lease_nbytes": leased,
            "staging_nbytes": leased,
            "pin": self.pin,
            "socket_dir": self._directory,
        }
        name = f"{_RING}-{self.name}"
        async with (
            self._gpu.serve(name, **options) as self._ring,
            self._gpu.connect(name, lease_nbytes=leased, socket_dir=self._directory) as self._client,
        ):
            yield

    async def prepare(self, nbytes: int, requests: int) -> list[Request]:
        prepared = []
        for number in itertools.islice(self._numbers, requests):
            async with self._client.slot(nbytes) as slot:
                tensor = slot.tensor((nbytes // ITEM_NBYTES,), DTYPE)
                marks(tensor).fill_(number)
                submission = await self._client.submit({"x": tensor})
                del tensor
            prepared.append(Request(number, (await self._ring.claim(), submission)))
        return prepared

    async def bring(self, request: Request) -> torch.Tensor:
        claim, _ = request.source
        payload = await claim.to("cuda")
        tensor: torch.Tensor = payload["x"]
        return tensor

    async def clear(self, requests: Sequence[Request]) -> None:
        for request in requests:
            claim, submission = request.source
            claim.done()
            await see_to_its_end(submission)
        await self._come_home()

    async def _come_home(self) -> None:
        """Waits until all slots are free. The next ones, of another size, may not fit between some that still are not."""
        deadline_s = time.monotonic() + _HOME_LIMIT_S
        while (now := self._client.statistics()).free_nbytes < now.leased_nbytes:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{now.leased_nbytes - now.free_nbytes} bytes of slots did not come back")
            await asyncio.sleep(_LOOK_S)


class FromPinnedSlot(_FromSlot):
    """See the head of this file."""

    name = "slot-pinned"
    title = "slot, pinned slab"
    pin = "on"


class FromUnpinnedSlot(_FromSlot):
    """See the head of this file."""

    name = "slot-unpinned"
    title = "slot, slab not pinned"
    pin = "off"


class _FromMemory(Way):
    """From memory that is there before."""

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        self._memory = self._allocate()
        self._memory.fill_(1)  # touched: a page's first use is not what is measured
        yield
        del self._memory

    @abc.abstractmethod
    def _allocate(self) -> torch.Tensor:
        """Returns memory for all requests in flight: ``uint8``."""

    async def prepare(self, nbytes: int, requests: int) -> list[Request]:
        prepared = []
        for number, start in zip(itertools.islice(self._numbers, requests), _starts(nbytes), strict=False):
            source = self._memory[start : start + nbytes].view(DTYPE)
            marks(source).fill_(number)
            prepared.append(Request(number, source))
        return prepared


class _Reused(_FromMemory):
    """To places on the GPU that are there before, too."""

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        self._target = torch.empty(self._footprint_nbytes, dtype=torch.uint8, device=self._gpu.device)
        async with super().opened():
            yield
        del self._target

    async def prepare(self, nbytes: int, requests: int) -> list[Request]:
        prepared = await super().prepare(nbytes, requests)
        for request, start in zip(prepared, _starts(nbytes), strict=False):
            request.source = (request.source, self._target[start : start + nbytes].view(DTYPE))
        return prepared

    async def bring(self, request: Request) -> torch.Tensor:
        source, target = request.source
        copied: torch.Tensor = target.copy_(source, non_blocking=True)
        return copied


class FromPageLocked(_Reused):
    """See the head of this file."""

    name = "pin-memory"
    title = "pin_memory() memory"

    def _allocate(self) -> torch.Tensor:
        return self._gpu.page_locked(self._footprint_nbytes)


class FromPageable(_Reused):
    """See the head of this file."""

    name = "pageable"
    title = "pageable memory"

    def _allocate(self) -> torch.Tensor:
        return torch.empty(self._footprint_nbytes, dtype=torch.uint8)


class _FromShared(_FromMemory):
    def _allocate(self) -> torch.Tensor:
        return torch.from_numpy(np.frombuffer(mmap.mmap(-1, self._footprint_nbytes), np.uint8))  # shared and anonymous


class Cloned(_FromShared):
    """See the head of this file."""

    name = "clone"
    title = "cloned, then copied"

    async def bring(self, request: Request) -> torch.Tensor:
        source: torch.Tensor = request.source
        return source.clone().to(self._gpu.device, non_blocking=True)


class Pinned(_FromShared):
    """See the head of this file."""

    name = "pin"
    title = "pinned each, then copied"

    async def bring(self, request: Request) -> torch.Tensor:
        return self._gpu.pin(request.source).to(self._gpu.device, non_blocking=True)


def _starts(nbytes: int) -> Iterator[int]:
    return itertools.count(0, nbytes)


WAYS: dict[str, type[Way]] = {
    way.name: way for way in (FromPinnedSlot, FromUnpinnedSlot, FromPageLocked, FromPageable, Cloned, Pinned)
}
"""By name, in the order of tables."""

PINNED_SLOT, CEILING, CLONED = FromPinnedSlot.name, FromPageLocked.name, Cloned.name
