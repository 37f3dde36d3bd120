"""From host memory to the GPU, in one process: how much of it a second, and how long that holds the engine's loop up.

What is compared, each as its users do it:

- **From a slot** of a pinned slab: a frontend writes it into a slot, the engine claims it and calls ``claim.to``.
- **From ``pin_memory()`` memory** that is there before: the ceiling, since nothing has to be done but the copy, to a place that
  is there, too; or to a new tensor, by ``tensor.to``, which is how torch is mostly used.
- **Cloned, then copied**: what vLLM does with tensors that come in memory shared with another process. It may not keep that
  memory, so it copies each tensor into memory of its own, and that to the GPU. torch has as many threads as it takes by itself,
  which is more than vLLM leaves it: cloning is the faster for it.

Checking what has arrived, and preparing the next requests, is not timed. What is, is said below the tables (:mod:`.command`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import mmap
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple

import numpy as np
import torch

import shmring
from bench.gpu.device import DTYPE, ITEM_NBYTES, Gpu, Numbers, Openers, check, marks, pinned_slab, sample

_RING = "bench-copies"
#: What is in flight together: enough for the copies to follow each other without a gap, and little beside any GPU's memory.
_IN_FLIGHT, _IN_FLIGHT_NBYTES = 64, 256 << 20
#: What a request takes of a lease or of staging memory beyond its tensor: a header and a rounding, in any case less than this.
_SPARE_NBYTES = 8 << 10
_HOME_LIMIT_S, _LOOK_S = 20.0, 0.001  # for slots to come back after their last copy, and between two looks at them
_MOST_PASSES = 50  # of a repetition: preparing small requests takes longer than bringing them

_numbers = itertools.count(1)  # of all requests of this process, so that none can be taken for an earlier one


def in_flight(nbytes: int) -> int:
    """Returns how many requests of a size are in flight together: at least two, so that one can follow another."""
    return max(2, min(_IN_FLIGHT, _IN_FLIGHT_NBYTES // nbytes))


# -- the ways ------------------------------------------------------------------------------------------------------------


class Request(NamedTuple):
    """A request whose data is in host memory: what its marks hold, and what brings it to the GPU, as a tensor ``int32 (n,)`` to
    be used on this thread's current stream.
    """

    number: int
    bring: Callable[[], Awaitable[torch.Tensor]]


#: A way to the GPU, opened in one process: has tensors of so many bytes in so many requests for the time of a ``with``, before
#: whose end those on the GPU are dropped. It is used with one size at a time.
Way = Callable[[int, int], AbstractAsyncContextManager[list[Request]]]


@contextlib.asynccontextmanager
async def _open_slots(gpu: Gpu, directory: str, footprint_nbytes: int) -> AsyncIterator[Way]:
    leased = footprint_nbytes + _IN_FLIGHT * _SPARE_NBYTES
    async with (
        gpu.serve(_RING, socket_dir=directory, **pinned_slab(leased)) as ring,
        gpu.connect(_RING, socket_dir=directory, lease_nbytes=leased) as client,
    ):
        yield functools.partial(_in_slots, ring, client)


@contextlib.asynccontextmanager
async def _in_slots(ring: shmring.Ring, client: shmring.Client, nbytes: int, requests: int) -> AsyncIterator[list[Request]]:
    async def bring(claim: shmring.Claim) -> torch.Tensor:
        tensor: torch.Tensor = (await claim.to("cuda"))["x"]
        return tensor

    claims = {}
    prepared = []
    for number in itertools.islice(_numbers, requests):
        async with client.slot(nbytes) as slot:
            tensor = slot.tensor((nbytes // ITEM_NBYTES,), DTYPE)
            marks(tensor).fill_(number)
            submission = await client.submit({"x": tensor})
            del tensor
        claims[submission] = await ring.claim()
        prepared.append(Request(number, functools.partial(bring, claims[submission])))
    try:
        yield prepared
    finally:
        for submission, claim in claims.items():
            claim.done()
            await submission.wait()
        # The next ones, of another size, may not fit between slots that still are not free.
        deadline_s = time.monotonic() + _HOME_LIMIT_S
        while (now := client.statistics()).free_nbytes < now.leased_nbytes:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{now.leased_nbytes - now.free_nbytes} bytes of slots did not come back")
            await asyncio.sleep(_LOOK_S)


#: Brings a tensor, which starts so many bytes from the beginning of its memory, to the GPU.
_Bring = Callable[[torch.Tensor, int], torch.Tensor]


@contextlib.asynccontextmanager
async def _in_memory(memory: torch.Tensor, bring: _Bring, nbytes: int, requests: int) -> AsyncIterator[list[Request]]:
    """Requests in memory that is there before; all copies are ``non_blocking``."""

    async def bring_it(source: torch.Tensor, start: int) -> torch.Tensor:
        return bring(source, start)

    prepared = []
    for place, number in enumerate(itertools.islice(_numbers, requests)):
        source = memory[place * nbytes : (place + 1) * nbytes].view(DTYPE)
        marks(source).fill_(number)
        prepared.append(Request(number, functools.partial(bring_it, source, place * nbytes)))
    yield prepared


def _shared(gpu: Gpu, nbytes: int) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(mmap.mmap(-1, nbytes), np.uint8))  # shared and anonymous


def _to_reused(gpu: Gpu, nbytes: int) -> _Bring:
    """Places on the GPU are there before, too."""
    target = torch.empty(nbytes, dtype=torch.uint8, device=gpu.device)
    return lambda source, start: target[start : start + source.nbytes].view(DTYPE).copy_(source, non_blocking=True)


def _to_new(gpu: Gpu, nbytes: int) -> _Bring:
    return lambda source, start: source.to(gpu.device, non_blocking=True)


def _cloned(gpu: Gpu, nbytes: int) -> _Bring:
    return lambda source, start: source.clone().to(gpu.device, non_blocking=True)


class Contender(NamedTuple):
    """A way that is compared, opened with the GPU, a directory for sockets, and the bytes of all requests in flight."""

    title: str
    open: Callable[[Gpu, str, int], AbstractAsyncContextManager[Way]]

    @classmethod
    def of_memory(
        cls, title: str, memory: Callable[[Gpu, int], torch.Tensor], bring: Callable[[Gpu, int], _Bring]
    ) -> Contender:
        """Returns that of memory which is there before."""

        def opened(gpu: Gpu, _: str, nbytes: int) -> AbstractAsyncContextManager[Way]:
            touched = memory(gpu, nbytes).fill_(1)  # a page's first use is not what is measured
            return contextlib.nullcontext(functools.partial(_in_memory, touched, bring(gpu, nbytes)))

        return cls(title, opened)


PINNED_SLOT, CEILING, TO, CLONED = "slot-pinned", "pin-memory", "pin-memory-to", "clone"

WAYS: dict[str, Contender] = {
    PINNED_SLOT: Contender("slot, pinned slab", _open_slots),
    CEILING: Contender.of_memory("pin_memory() memory", lambda gpu, nbytes: gpu.page_locked(nbytes), _to_reused),
    TO: Contender.of_memory("pin_memory() memory, tensor.to", lambda gpu, nbytes: gpu.page_locked(nbytes), _to_new),
    CLONED: Contender.of_memory("cloned, then copied", _shared, _cloned),
}
"""By name, in the order of tables."""


def openers(directory: str, sizes: Sequence[int], names: Sequence[str], gpu: Gpu) -> Openers:
    """Returns the ways with these names to a GPU, for tensors of these sizes in bytes."""
    footprint_nbytes = max(in_flight(nbytes) * nbytes for nbytes in sizes)
    return {name: functools.partial(WAYS[name].open, gpu, directory, footprint_nbytes) for name in names}


# -- measuring -----------------------------------------------------------------------------------------------------------


async def measure(gpu: Gpu, way: Way, nbytes: int, timed_s: float, requests: int) -> Numbers:
    """Returns what a repetition has shown: bandwidth, over so many seconds of copying, and latencies of so many requests."""
    return await _bandwidth(gpu, way, nbytes, timed_s) | await _latencies(gpu, way, nbytes, requests)


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
        arrived = [await request.bring() for request in prepared]
        gpu.finish()
        elapsed_s = time.perf_counter() - started_s
        for request, tensor in zip(prepared, arrived, strict=True):
            check(sample(tensor).tolist(), request.number)
        del arrived, tensor
    return elapsed_s


@contextlib.asynccontextmanager
async def _prepared(gpu: Gpu, way: Way, nbytes: int, requests: int) -> AsyncIterator[list[Request]]:
    """Requests in host memory, and a GPU that has nothing left to do; afterwards, a loop that has nothing left either."""
    try:
        async with way(nbytes, requests) as prepared:
            gpu.finish()
            yield prepared
    finally:
        await asyncio.sleep(0)  # what was dropped on the GPU comes back by the loop


async def _latencies(gpu: Gpu, way: Way, nbytes: int, requests: int) -> Numbers:
    """For so many requests: from the begin until its data is usable, and until bringing it has returned."""
    usable_us: list[float] = []
    held_us: list[float] = []
    await _timed_pass(gpu, way, nbytes, min(requests, in_flight(nbytes)))  # to warm up
    while len(usable_us) < requests:
        async with _prepared(gpu, way, nbytes, min(requests - len(usable_us), in_flight(nbytes))) as prepared:
            for request in prepared:
                started_s = time.perf_counter()
                arrived = await request.bring()
                returned_s = time.perf_counter()
                gpu.finish()
                usable_us.append((time.perf_counter() - started_s) * 1e6)
                held_us.append((returned_s - started_s) * 1e6)
                check(sample(arrived).tolist(), request.number)
                del arrived
                await asyncio.sleep(0)
    return {"usable_us": usable_us, "held_us": held_us}
