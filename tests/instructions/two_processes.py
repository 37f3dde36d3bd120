"""The program that ``ratios.py`` starts twice: ``engine DIRECTORY``, and ``frontend DIRECTORY``, which is told what to do.

The frontend does what it reads, ``[case, messages]`` in JSON on a line, and prints how many seconds it took. Both end with
their standard input.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import signal
import sys
import time
from collections.abc import Awaitable, Callable

import torch
import uvloop

import shmring

_NAME = "ratios"
_SLAB = "256MiB"
_WINDOW = 16
_LIMIT_S = 600  # nobody waits longer for these


async def _requests(client: shmring.Client, n: int, window: int) -> None:
    async def ask(share: int) -> None:
        for _ in range(share):
            await client.request([1, 1.0, 2])

    await asyncio.gather(*(ask(n // window) for _ in range(window)))


async def _messages(client: shmring.Client, n: int, nbytes: int, *, in_place: bool) -> None:
    in_flight: collections.deque[shmring.Submission] = collections.deque()
    shape = (nbytes // 4,)
    content = torch.zeros(shape)
    for _ in range(n):
        if len(in_flight) == _WINDOW:
            await in_flight.popleft().wait()
        if in_place:
            async with client.slot(nbytes) as slot:
                in_flight.append(await client.submit({"tensor": slot.tensor(shape, torch.float32)}))
        else:
            in_flight.append(await client.submit({"tensor": content}))
    for submission in in_flight:
        await submission.wait()


_CASES: dict[str, Callable[[shmring.Client, int], Awaitable[None]]] = {
    "request": lambda client, n: _requests(client, n, 1),
    "request, 16 in flight": lambda client, n: _requests(client, n, _WINDOW),
    "64 KB in place": lambda client, n: _messages(client, n, 64 << 10, in_place=True),
    "1 MB copied": lambda client, n: _messages(client, n, 1 << 20, in_place=False),
}


async def _engine(directory: str) -> None:
    async def answer(claim: shmring.Claim) -> None:
        if isinstance(claim.payload, list):
            await claim.reply(claim.payload)
        else:
            claim.payload["tensor"]

    async def serve(ring: shmring.Ring) -> None:
        while True:
            with await ring.claim() as claim:
                await answer(claim)

    async with shmring.serve(_NAME, slab_nbytes=_SLAB, socket_dir=directory) as ring:
        print("ready", flush=True)
        serving = asyncio.create_task(serve(ring))
        await asyncio.to_thread(sys.stdin.read)
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving


async def _frontend(directory: str) -> None:
    async with shmring.connect(_NAME, socket_dir=directory) as client:
        await client.wait_prefaulted()
        print(json.dumps(list(_CASES)), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            case, n = json.loads(line)
            begun_s = time.perf_counter()
            await _CASES[case](client, n)
            print(time.perf_counter() - begun_s, flush=True)


if __name__ == "__main__":
    signal.alarm(_LIMIT_S)
    uvloop.run({"engine": _engine, "frontend": _frontend}[sys.argv[1]](sys.argv[2]))
