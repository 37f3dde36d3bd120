"""Both ends of an abort storm: ``engine NAME SOCKET_DIR FRONTENDS``, and ``frontend NAME SOCKET_DIR SEED REQUESTS ABORTED``.

The engine works in steps: it claims what is there, works on all of it at once, and answers. Behind every step it checks its
book, and that no slot is held beyond the step: not one of an aborted request either. It says how many steps it made when its
frontends have gone. A frontend sends its requests, ABORTED percent of which it aborts at a random moment, checks the
answers to the others, and says what became of them.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time

import torch
import uvloop

import shmring
from shmring.core.states import EngineSlot

STEP_S = 0.002
IN_FLIGHT = 50


async def engine(name: str, socket_dir: str, frontends: str) -> None:
    done = 0

    async def is_done() -> None:
        nonlocal done
        done += 1

    async with shmring.serve(name, slab_nbytes="16MiB", socket_dir=socket_dir, calls={"is_done": is_done}) as ring:
        print("ready", flush=True)
        steps = [0]
        working = asyncio.create_task(work(ring, steps))
        while done < int(frontends) or ring.statistics().clients:
            await asyncio.wait([working], timeout=0.05)
            if working.done():
                working.result()
        working.cancel()
        statistics = ring.statistics()
        whole = statistics.free_nbytes == statistics.leasable_nbytes
        print("steps", *steps, "aborted", statistics.aborted, "errors", statistics.protocol_errors, "whole", whole, flush=True)


async def work(ring: shmring.Ring, steps: list[int]) -> None:
    while True:
        claims = [await ring.claim()]
        while True:
            try:
                claims.append(ring.claim_nowait())
            except shmring.WouldBlock:
                break
        await asyncio.sleep(STEP_S)
        for claim in claims:
            with claim:
                tensor = claim.payload["x"]
                answer = {"sum": int(tensor.sum()), "first": int(tensor[0])}
                del tensor
                if not claim.aborted:
                    await claim.reply(answer)
            del claim
        claims.clear()
        book = ring._shell._book
        book.check()
        assert book.count_slots(EngineSlot.CLAIMED) == book.count_slots(EngineSlot.DRAINING) == 0, "held beyond the step"
        steps[0] += 1


async def frontend(name: str, socket_dir: str, seed: str, requests: str, aborted: str) -> None:
    chance = random.Random(int(seed))
    outcomes = {"answered": 0, "aborted": 0}
    async with shmring.connect(name, socket_dir=socket_dir, connect_timeout_s=30) as client:

        async def send_request(number: int) -> None:
            value = chance.randrange(256)
            nbytes = chance.choice((100, 5_000, 40_000))
            payload = {"x": torch.full((nbytes,), value, dtype=torch.uint8)}
            name = f"{seed}-{number}"
            if chance.random() < int(aborted) / 100:
                asyncio.get_running_loop().call_later(chance.random() * 3 * STEP_S, client.abort, name)
            try:
                answer = await client.request(payload, request_id=name, timeout=60)
            except shmring.AbortedError:
                outcomes["aborted"] += 1
                return
            assert answer == {"sum": value * nbytes, "first": value}, "a wrong answer"
            outcomes["answered"] += 1

        numbers = iter(range(int(requests)))

        async def worker() -> None:
            for number in numbers:
                await send_request(number)

        started = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))
        seconds = time.perf_counter() - started
        while client.statistics().slots_in_use:
            await asyncio.sleep(0.001)
        await client.call("is_done", timeout=60)
    print("answered", outcomes["answered"], "aborted", outcomes["aborted"], "seconds", f"{seconds:.3f}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    uvloop.run({"engine": engine, "frontend": frontend}[sys.argv[1]](*sys.argv[2:]))
