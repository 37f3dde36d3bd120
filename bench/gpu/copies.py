"""From host memory to the GPU, in one process: how much of it a second, and how long that holds the engine's loop up.

**Bandwidth**: as many requests as may be in flight are there, in host memory; timed is bringing one after another to the GPU
until the last one's data is usable on the engine's stream. Then each is checked, and the next are prepared, which is not timed.

**Stall**: one request is brought while the loop does nothing but turn; the longest time between two turns, from before it is
asked for until its data is usable, is what any other work of the loop would have waited at most. An idle loop's longest is
taken beside it, as that of the machine.

torch has as many threads as it takes by itself, which is more than vLLM leaves it: cloning is the faster for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence

import msgspec
import torch

from bench.children import described
from bench.gpu.device import Gpu
from bench.gpu.marks import check, sample
from bench.gpu.processes import Carry, Opened, Ready, Setting
from bench.gpu.ways import WAYS, Request, Way, in_flight

__all__ = ["Stall", "Stalls", "Transfer", "copying"]

_MOST_PASSES = 50  # of a repetition: preparing small requests takes longer than bringing them
_WARM_UP_PASSES = 1
_IDLE_TURNS = 200  # a millisecond or less


class Transfer(msgspec.Struct, frozen=True, tag=True):
    """Asks for the bandwidth of a way, in GB/s.

    Attributes:
        timed_s: seconds of copying, at least one pass.
    """

    way: str
    nbytes: int
    timed_s: float


class Stall(msgspec.Struct, frozen=True, tag=True):
    """Asks how long a way holds the loop up, in :class:`Stalls`.

    Attributes:
        requests: brought one after another.
    """

    way: str
    nbytes: int
    requests: int


class Stalls(msgspec.Struct, frozen=True):
    """The longest time between two turns of the loop, in seconds: while each request was brought, and before it."""

    brought_s: list[float]
    idle_s: list[float]


@contextlib.asynccontextmanager
async def copying(gpu: Gpu, setting: Setting) -> AsyncIterator[Opened]:
    """The process that copies: opens all ways, and carries out :class:`Transfer` and :class:`Stall`."""
    ways: dict[str, Way] = {}
    absent: dict[str, str] = {}
    async with contextlib.AsyncExitStack() as stack:
        for name in setting.ways:
            way = WAYS[name](gpu, setting.directory, setting.sizes)
            try:
                await stack.enter_async_context(way.opened())
            except Exception as error:  # noqa: BLE001 # of CUDA or the system; it has its place among the results
                absent[name] = described(error)
            else:
                ways[name] = way
        yield Opened(Ready(gpu.describe(), absent), _carrying(gpu, ways))


def _carrying(gpu: Gpu, ways: Mapping[str, Way]) -> Carry:
    async def carry_out(command: Transfer | Stall) -> float | Stalls:
        way = ways[command.way]
        if isinstance(command, Transfer):
            return await bandwidth(gpu, way, command)
        return await stalls(gpu, way, command)

    return carry_out


async def bandwidth(gpu: Gpu, way: Way, command: Transfer) -> float:
    """Returns what a way brings to the GPU, in GB/s."""
    requests = in_flight(command.nbytes)
    for _ in range(_WARM_UP_PASSES):
        await _timed_pass(gpu, way, command.nbytes, requests)
    passes, elapsed_s = 0, 0.0
    while not passes or (elapsed_s < command.timed_s and passes < _MOST_PASSES):
        elapsed_s += await _timed_pass(gpu, way, command.nbytes, requests)
        passes += 1
    return passes * requests * command.nbytes / elapsed_s / 1e9


async def _timed_pass(gpu: Gpu, way: Way, nbytes: int, requests: int) -> float:
    async with _prepared(gpu, way, nbytes, requests) as prepared:
        started_s = time.perf_counter()
        arrived = [await way.bring(request) for request in prepared]
        gpu.finish()
        elapsed_s = time.perf_counter() - started_s
        _check(way, prepared, arrived)
        del arrived
    return elapsed_s


def _check(way: Way, requests: Sequence[Request], arrived: Sequence[torch.Tensor]) -> None:
    for request, tensor in zip(requests, arrived, strict=True):
        check(sample(tensor).tolist(), request.number, way.title)


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


async def stalls(gpu: Gpu, way: Way, command: Stall) -> Stalls:
    """Returns how long a way holds the loop up."""
    longest = Stalls([], [])
    await _timed_pass(gpu, way, command.nbytes, 1)
    for _ in range(command.requests):
        async with _prepared(gpu, way, command.nbytes, 1) as (request,):
            with _Turns() as turns:
                for _ in range(_IDLE_TURNS):
                    await asyncio.sleep(0)
            longest.idle_s.append(turns.longest_s)
            with _Turns() as turns:
                await asyncio.sleep(0)
                arrived = await way.bring(request)
                over = gpu.watch()
                while not over():  # noqa: ASYNC110 # a loop that turns is what is looked at
                    await asyncio.sleep(0)
                await asyncio.sleep(0)
            longest.brought_s.append(turns.longest_s)
            _check(way, [request], [arrived])
            del arrived
    return longest


class _Turns:
    """Looks at how long the running loop takes from one turn to the next, for the time of a ``with``.

    Attributes:
        longest_s: the longest that it took.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._last_s = 0.0
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
