"""A supervisor that restarts an engine when it dies, and a caller that goes on.

    python examples/supervisor.py             # in one terminal: starts the engine, and prints its process id
    python examples/supervisor.py call        # in another; then kill the engine (kill -9 PID), and look at both

Put your engine in the place of `run_engine`. `shmring serve` has a supervisor of its own.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time

import torch

import shmring

NAME = "supervised"
FIRST_PAUSE_S = 0.1  # before an engine is started again; doubles while engines end soon
LONGEST_PAUSE_S = 30.0
SOON_S = 60.0  # an engine that has run for longer was well: its pause is the first one again
STOP_S = 10.0  # how long an engine may take to stop


async def run_engine() -> None:
    """Answers requests until its input ends: its supervisor has closed it, or has died."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sys.stdin, stop.set)
    loop.add_signal_handler(signal.SIGINT, lambda: None)  # Ctrl-C reaches the engine too, but the supervisor decides

    async def answer(claim: shmring.Claim) -> None:
        await claim.reply(float(claim.payload["x"].sum()))

    async with shmring.serve(NAME, slab_nbytes="64MiB") as ring:
        running = asyncio.create_task(ring.run(answer))
        await stop.wait()
        loop.remove_reader(sys.stdin)
        await ring.drain(timeout=STOP_S / 2)
        await ring.close("the engine stops")
        await running


async def stopped(engine: asyncio.subprocess.Process) -> None:
    """Has an engine stop, and kills one that does not."""
    assert engine.stdin is not None
    engine.stdin.close()
    try:
        await asyncio.wait_for(engine.wait(), STOP_S)
    except TimeoutError:
        engine.kill()
        await engine.wait()


async def supervise() -> None:
    """Keeps an engine running until Ctrl-C or SIGTERM.

    There is nothing to clean up after an engine that died: the kernel frees its slab, and its name can be used again at once.
    """
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    stopping = asyncio.create_task(stop.wait())
    pause_s = FIRST_PAUSE_S
    while not stop.is_set():
        began = time.monotonic()
        engine = await asyncio.create_subprocess_exec(sys.executable, __file__, "engine", stdin=asyncio.subprocess.PIPE)
        print(f"engine {engine.pid} is started", flush=True)
        ended = asyncio.create_task(engine.wait())
        await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            await stopped(engine)
            break
        if time.monotonic() - began > SOON_S:
            pause_s = FIRST_PAUSE_S
        print(f"engine {engine.pid} has ended ({ended.result()}); the next one is started in {pause_s:.1f} s", flush=True)
        await asyncio.wait({stopping}, timeout=pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    print("stopped", flush=True)


async def call(times: int) -> None:
    """Asks again and again. A request waits while there is no engine, and is sent once more if its engine died."""
    async with shmring.connect(NAME, reconnect=True) as client:
        for number in range(times):
            answer = await client.request({"x": torch.full((1000,), float(number))}, timeout=60, retry=1)
            assert answer == 1000 * number
            print(f"answer {number}", flush=True)
            await asyncio.sleep(0.02)
        print(f"{times} answers; {client.resent} requests were sent again")


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            asyncio.run(supervise())
        case ["engine"]:
            asyncio.run(run_engine())
        case ["call"]:
            asyncio.run(call(times=1000))
        case ["call", times]:
            asyncio.run(call(int(times)))
        case _:
            sys.exit(__doc__)
