"""From host memory to the GPU, in one process: how much of it a second, and how long that holds the engine's loop up.

What is compared, each as its users do it:

- **From a slot**, pinned or not: a frontend writes it into a slot, the engine claims it and calls ``claim.to``.
- **From ``pin_memory()`` memory** that is there before: the ceiling, since nothing has to be done but the copy.
- **From pageable memory** that is there before: what a tensor that was just made or received lies in.
- **Cloned, then copied**, and **pinned, then copied**: what vLLM does with tensors that come in memory shared with another
  process. It may not keep that memory, so it copies each tensor into memory of its own, pageable or page-locked, and that to
  the GPU. torch has as many threads as it takes by itself, which is more than vLLM leaves it: cloning is the faster for it.

**Bandwidth**: as many requests as may be in flight are in host memory; timed is bringing one after another to the GPU until the
last one's data is usable on the engine's stream. Then each is checked, and the next are prepared, which is not timed.

**Stall**: one request is brought while the loop does nothing but turn; the longest time between two turns is what any other
work of the loop would have waited at most. An idle loop's longest is taken beside it, as that of the machine.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import functools
import itertools
import mmap
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple

import numpy as np
import torch

import shmring
from bench.gpu.device import DTYPE, ITEM_NBYTES, Gpu, check, marks, pinned_slab, sample
from bench.gpu.processes import Command, Numbers, Openers
from bench.peers.shmring_ring import see_to_its_end

__all__ = ["BANDWIDTH", "CEILING", "CLONED", "COMMANDS", "PINNED_SLOT", "STALLS", "WAYS", "in_flight", "openers"]

BANDWIDTH, STALLS = "bandwidth", "stalls"  # what is measured

#: What is in flight together: enough for the copies to follow each other without a gap, and little beside any GPU's memory.
_IN_FLIGHT, _IN_FLIGHT_NBYTES = 64, 256 << 20
#: What a request takes of a lease or of staging memory beyond its tensor: a header and a rounding, in any case less than this.
_SPARE_NBYTES = 8 << 10
_HOME_LIMIT_S, _LOOK_S = 20.0, 0.001  # for slots to come back after their last copy, and between two looks at them
_MOST_PASSES = 50  # of a repetition: preparing small requests takes longer than bringing them
_IDLE_TURNS = 200  # a millisecond or less


def in_flight(nbytes: int) -> int:
    """Returns how many requests of a size are in flight together: at least two, so that one can follow another."""
    return max(2, min(_IN_FLIGHT, _IN_FLIGHT_NBYTES // nbytes))


# -- the ways ------------------------------------------------------------------------------------------------------------


class Request(NamedTuple):
    """A request whose data is in host memory: what its marks hold, and whatever the way brings it from."""

    number: int
    source: Any


class Way(abc.ABC):
    """One way to the GPU, opened in one process and used with one size at a time."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

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
    def __init__(self, ring: shmring.Ring, client: shmring.RingClient) -> None:
        super().__init__()
        self._ring = ring
        self._client = client

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
        tensor: torch.Tensor = (await claim.to("cuda"))["x"]
        return tensor

    async def clear(self, requests: Sequence[Request]) -> None:
        for request in requests:
            claim, submission = request.source
            claim.done()
            await see_to_its_end(submission)
        # The next ones, of another size, may not fit between slots that still are not free.
        deadline_s = time.monotonic() + _HOME_LIMIT_S
        while (now := self._client.statistics()).free_nbytes < now.leased_nbytes:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{now.leased_nbytes - now.free_nbytes} bytes of slots did not come back")
            await asyncio.sleep(_LOOK_S)


@contextlib.asynccontextmanager
async def _open_slots(pin: str, gpu: Gpu, directory: str, footprint_nbytes: int) -> AsyncIterator[Way]:
    leased = footprint_nbytes + _IN_FLIGHT * _SPARE_NBYTES
    options = pinned_slab(leased) | {"pin": pin}
    name = f"bench-pin-{pin}"
    async with (
        gpu.serve(name, socket_dir=directory, **options) as ring,
        gpu.connect(name, socket_dir=directory, lease_nbytes=leased) as client,
    ):
        yield _FromSlot(ring, client)


#: Brings a tensor, which starts so many bytes from the beginning of its memory, to the GPU.
_Bring = Callable[[torch.Tensor, int], torch.Tensor]


class _FromMemory(Way):
    """From memory that is there before; all copies are ``non_blocking``."""

    def __init__(self, memory: torch.Tensor, bring: _Bring) -> None:
        super().__init__()
        self._memory = memory.fill_(1)  # touched: a page's first use is not what is measured
        self._bring = bring

    async def prepare(self, nbytes: int, requests: int) -> list[Request]:
        prepared = []
        for place, number in enumerate(itertools.islice(self._numbers, requests)):
            source = self._memory[place * nbytes : (place + 1) * nbytes].view(DTYPE)
            marks(source).fill_(number)
            prepared.append(Request(number, (source, place * nbytes)))
        return prepared

    async def bring(self, request: Request) -> torch.Tensor:
        return self._bring(*request.source)


def _shared(gpu: Gpu, nbytes: int) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(mmap.mmap(-1, nbytes), np.uint8))  # shared and anonymous


def _to_reused(gpu: Gpu, nbytes: int) -> _Bring:
    """Places on the GPU are there before, too."""
    target = torch.empty(nbytes, dtype=torch.uint8, device=gpu.device)
    return lambda source, start: target[start : start + source.nbytes].view(DTYPE).copy_(source, non_blocking=True)


def _cloned(gpu: Gpu, nbytes: int) -> _Bring:
    return lambda source, start: source.clone().to(gpu.device, non_blocking=True)


def _pinned(gpu: Gpu, nbytes: int) -> _Bring:
    return lambda source, start: gpu.pin(source).to(gpu.device, non_blocking=True)


class Contender(NamedTuple):
    """A way that is compared, opened with the GPU, a directory for sockets, and the bytes of all requests in flight."""

    title: str
    open: Callable[[Gpu, str, int], AbstractAsyncContextManager[Way]]

    @classmethod
    def of_memory(
        cls, title: str, memory: Callable[[Gpu, int], torch.Tensor], bring: Callable[[Gpu, int], _Bring]
    ) -> Contender:
        """Returns that of memory which is there before."""
        return cls(title, lambda gpu, _, nbytes: contextlib.nullcontext(_FromMemory(memory(gpu, nbytes), bring(gpu, nbytes))))


PINNED_SLOT, CEILING, CLONED = "slot-pinned", "pin-memory", "clone"

WAYS: dict[str, Contender] = {
    PINNED_SLOT: Contender("slot, pinned slab", functools.partial(_open_slots, "on")),
    "slot-unpinned": Contender("slot, slab not pinned", functools.partial(_open_slots, "off")),
    CEILING: Contender.of_memory("pin_memory() memory", lambda gpu, nbytes: gpu.page_locked(nbytes), _to_reused),
    "pageable": Contender.of_memory("pageable memory", lambda gpu, nbytes: torch.empty(nbytes, dtype=torch.uint8), _to_reused),
    CLONED: Contender.of_memory("cloned, then copied", _shared, _cloned),
    "pin": Contender.of_memory("pinned each, then copied", _shared, _pinned),
}
"""By name, in the order of tables."""


def openers(directory: str, sizes: Sequence[int], names: Sequence[str], gpu: Gpu) -> Openers:
    """Returns the ways with these names to a GPU, for tensors of these sizes in bytes."""
    footprint_nbytes = max(in_flight(nbytes) * nbytes for nbytes in sizes)
    return {name: functools.partial(WAYS[name].open, gpu, directory, footprint_nbytes) for name in names}


# -- measuring -----------------------------------------------------------------------------------------------------------


async def _bandwidth(gpu: Gpu, way: Way, nbytes: int, timed_s: float) -> Numbers:
    """GB/s, over so many seconds of copying and at least one pass."""
    requests = in_flight(nbytes)
    await _timed_pass(gpu, way, nbytes, requests)  # to warm up
    passes, elapsed_s = 0, 0.0
    while not passes or (elapsed_s < timed_s and passes < _MOST_PASSES):
        elapsed_s += await _timed_pass(gpu, way, nbytes, requests)
        passes += 1
    return {"gb_per_s": [passes * requests * nbytes / elapsed_s / 1e9]}


async def _timed_pass(gpu: Gpu, way: Way, nbytes: int, requests: int) -> float:
    async with _prepared(gpu, way, nbytes, requests) as prepared:
        started_s = time.perf_counter()
        arrived = [await way.bring(request) for request in prepared]
        gpu.finish()
        elapsed_s = time.perf_counter() - started_s
        for request, tensor in zip(prepared, arrived, strict=True):
            check(sample(tensor).tolist(), request.number)
        del arrived, tensor
    return elapsed_s


@contextlib.asynccontextmanager
async def _prepared(gpu: Gpu, way: Way, nbytes: int, requests: int) -> AsyncIterator[list[Request]]:
    """Requests in host memory, and a GPU that has nothing left to do; afterwards, a loop that has nothing left either."""
    prepared = await way.prepare(nbytes, requests)
    gpu.finish()
    try:
        yield prepared
    finally:
        await way.clear(prepared)
        await asyncio.sleep(0)  # what was dropped on the GPU comes back by the loop


async def _stalls(gpu: Gpu, way: Way, nbytes: int, requests: int) -> Numbers:
    """The longest time between two turns of the loop: while each of so many requests is brought, and before it."""
    brought_us, idle_us = [], []
    await _timed_pass(gpu, way, nbytes, 1)
    for _ in range(requests):
        async with _prepared(gpu, way, nbytes, 1) as (request,):
            with _Turns() as turns:
                for _ in range(_IDLE_TURNS):
                    await asyncio.sleep(0)
            idle_us.append(turns.longest_s * 1e6)
            with _Turns() as turns:
                await asyncio.sleep(0)
                arrived = await way.bring(request)
                over = gpu.watch()
                while not over():  # noqa: ASYNC110 # a loop that turns is what is looked at
                    await asyncio.sleep(0)
                await asyncio.sleep(0)
            brought_us.append(turns.longest_s * 1e6)
            check(sample(arrived).tolist(), request.number)
            del arrived
    return {"brought_us": brought_us, "idle_us": idle_us}


class _Turns:
    """Looks at how long the running loop takes at most from one turn to the next, for the time of a ``with``."""

    def __init__(self) -> None:
        self.longest_s = self._last_s = 0.0
        self._loop = asyncio.get_running_loop()

    def _turn(self) -> None:
        now_s = time.perf_counter()
        self.longest_s = max(self.longest_s, now_s - self._last_s)
        self._last_s = now_s
        self._next = self._loop.call_soon(self._turn)

    def __enter__(self) -> _Turns:
        self._last_s = time.perf_counter()
        self._next = self._loop.call_soon(self._turn)
        return self

    def __exit__(self, *exception: object) -> None:
        self._next.cancel()


COMMANDS: Mapping[str, Command] = {BANDWIDTH: _bandwidth, STALLS: _stalls}
