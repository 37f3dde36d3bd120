"""A frontend that sends requests and reads no reply: ``silent.py HOW NAME SOCKET_DIR PAYLOAD COUNT``.

``stops``: it stops itself then, and reads when it goes on. ``reads nothing``: its loop goes on, and it reads after SIGUSR1.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import shmring


async def main(how: str, name: str, socket_dir: str, payload: str, count: int) -> None:
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, told.set)
    async with shmring.connect(name, socket_dir=socket_dir, connect_timeout_s=60, description="silent") as client:
        submissions = [await client.submit(payload) for _ in range(count)]
        print("sent", flush=True)
        if how == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            await told.wait()
        for submission in submissions:
            reply = await submission.result()
            assert reply["payload"] == payload, reply
            assert bool((reply["x"] == 7).all())
        print("read", flush=True)


asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5])))
