"""``python -m bench cost --gpu-fake``: what the host does for a GPU, with a driver that is made up, on any machine.

Engine and frontend are one process, one request at a time. The made-up GPU (``tests/model/fake_cuda.py``) is compiled, and
does what is queued at once, unless its stream is held: copies are, until ``claim.to`` has returned, since no real one is over
sooner. What its driver takes is in the numbers; a real one takes about as long.

CPU of ``claim.to`` is that of the thread which calls it. Calls are those that :func:`sys.setprofile` sees, of Python and of
functions that are not compiled with Cython. CPU of a hand-over is that of the whole process, user and system time, threads
included: a slot on the GPU is acquired, submitted, claimed, left by both, and back. *At work*: the engine's stream is not idle
when the claim is left. *Briefly*: it is by the loop's next turn, where that is looked at. *For longer*: a thread is woken, and
wakes the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, NamedTuple

import torch

import shmring
from bench.modes import Timing

_NBYTES = 64 << 10
_SHAPE = (_NBYTES // 4,)
REQUESTS = 1000  # that are measured
_WARM_UP = 50  # before
_COUNTED = 10  # requests whose calls are counted
_NAME = "bench-made-up"


class _Ends(NamedTuple):
    cuda: Any
    ring: shmring.Ring
    client: shmring.Client


@contextlib.asynccontextmanager
async def _opened() -> AsyncIterator[_Ends]:
    from tests.model.host_gpu import HostMemory  # whose driver is compiled where the sources are used in place

    gpu, sizes = HostMemory(), {"slab_nbytes": "8MiB", "device_slab_nbytes": "4MiB", "staging_nbytes": "4MiB"}
    with tempfile.TemporaryDirectory(prefix="shmring-bench-") as directory:
        async with (
            gpu.serve(_NAME, socket_dir=directory, **sizes) as ring,
            gpu.connect(_NAME, socket_dir=directory) as client,
        ):
            try:
                yield _Ends(gpu.cuda, ring, client)
            finally:
                gpu.cuda.release()


async def _to(ends: _Ends, requests: int) -> AsyncIterator[shmring.Claim]:
    """Yields claims of one tensor each, and lets their copies run when the next is asked for."""
    content = torch.zeros(_SHAPE)
    for number in range(_WARM_UP + requests):
        submission = await ends.client.submit({"x": content})
        claim = await ends.ring.claim()
        yield claim
        ends.cuda.release()
        claim.done()
        await submission.wait()
        await _home(lambda: ends.ring.statistics().slots_in_use)
        if not number:
            (copies,) = (stream for stream in ends.cuda.streams if stream is not ends.cuda.computing())
        copies.held = True


async def _home(count: Callable[[], int], pause_s: float = 0.0) -> None:
    """Waits until no slot is in use: for turns of the loop, with pauses in which a thread that waits for events can run."""
    while count():  # noqa: ASYNC110
        await asyncio.sleep(pause_s)


async def _to_cpu(_: Timing) -> float:
    taken_us = []
    async with _opened() as ends:
        async for claim in _to(ends, REQUESTS):
            started_ns = time.thread_time_ns()
            await claim.to("cuda")
            taken_us.append((time.thread_time_ns() - started_ns) / 1e3)
    return statistics.median(taken_us[_WARM_UP:])


async def _to_calls(_: Timing) -> float:
    counts: list[float] = []

    def count(frame: object, event: str, argument: object) -> None:
        counts[-1] += event in ("call", "c_call")

    async with _opened() as ends:
        async for claim in _to(ends, _COUNTED):
            counts.append(-1)  # of what ends the counting
            sys.setprofile(count)
            await claim.to("cuda")
            sys.setprofile(None)
    return statistics.median(counts[_WARM_UP:])


async def _hand_over(ends: _Ends, turns_at_work: int | None) -> None:
    async with ends.client.slot(_NBYTES, device="cuda") as slot:
        tensor = slot.tensor(_SHAPE, torch.float32)
        submission = await ends.client.submit({"x": tensor})
        del tensor
        with await ends.ring.claim() as claim:
            consumed = claim.payload["x"]
            del consumed
            ends.cuda.computing().held = turns_at_work is not None
        if turns_at_work is not None:
            for _ in range(turns_at_work):
                await asyncio.sleep(0)
            ends.cuda.release()
        await submission.wait()


def _hand_overs(turns_at_work: int | None = None) -> Callable[[Timing], Coroutine[Any, Any, float]]:
    async def measured(_: Timing) -> float:
        async with _opened() as ends:
            for _number in range(_WARM_UP):
                await _hand_over(ends, turns_at_work)
            started_ns = time.process_time_ns()
            for _number in range(REQUESTS):
                await _hand_over(ends, turns_at_work)
            await _home(lambda: ends.client.statistics().device_slots_in_use, pause_s=0.001)
            return (time.process_time_ns() - started_ns) / REQUESTS / 1e3

    return measured


#: What is measured, in words; how; what it may be, and of what. See :class:`bench.cost.Case`.
CASES = (
    ("claim.to of one tensor of 64 KB, CPU", _to_cpu, 25.0, "us"),
    ("claim.to of one tensor of 64 KB, calls", _to_calls, 25.0, "calls"),
    ("hand-over through the device slab, CPU of both ends", _hand_overs(), 40.0, "us"),
    ("hand-over through the device slab, its GPU briefly at work, CPU of both ends", _hand_overs(0), None, "us"),
    ("hand-over through the device slab, its GPU at work for longer, CPU of both ends", _hand_overs(3), None, "us"),
)
