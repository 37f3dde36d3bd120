"""A worker for the guarantees: ``worker.py MODE NAME SOCKET_DIR RANK``. It says on stdout how far it has come.

serve     says the number of each message and the sum of its ``x``; replies with its rank where that is wanted
hold      takes messages and leaves none
write     writes to the first message's ``x``, which is to be its end
protect   tries to make the engine's memory writable
fork      has a forked child use it, and says what that got
asyncio   as serve, with an event loop
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from typing import Any

import shmring


def say(*words: object) -> None:
    print(*words, flush=True)


def handle(message: Any) -> None:
    payload = message.payload
    say(
        "got",
        message.sequence,
        int(payload["x"].sum()) if "x" in payload else 0,
        *([message.beside] if message._is_shared else []),
    )


def serve(worker: Any, rank: int) -> None:
    for message in worker:
        with message:
            handle(message)
            if message.wants_reply:
                message.reply(rank)
    say("over")


def hold(worker: Any) -> None:
    held = []
    while True:
        held.append(worker.receive())
        say("held", held[-1].sequence)


def write(worker: Any) -> None:
    with worker.receive(timeout=10) as message:
        say("got", message.sequence)
        message.payload["x"].add_(1)
        say("written")


def protect(worker: Any) -> None:
    with worker.receive(timeout=10) as message:
        address = message.payload["x"].data_ptr() & -4096
        libc = ctypes.CDLL(None, use_errno=True)
        result = libc.mprotect(ctypes.c_void_p(address), 4096, 3)
        say("refused" if result else "allowed", ctypes.get_errno())


def fork(worker: Any) -> None:
    message = worker.receive(timeout=10)
    pid = os.fork()
    if not pid:
        try:
            worker.receive(timeout=1)
        except shmring.ClosedError:
            say("child refused")
        message.leave()
        os._exit(0)
    os.waitpid(pid, 0)
    say("child gone")
    worker.receive(timeout=10).leave()
    say("next")
    message.leave()


async def with_loop(name: str, directory: str, rank: int) -> None:
    async with shmring.join(name, rank, socket_dir=directory) as worker:
        say("joined", os.getpid())
        async for message in worker:
            with message:
                handle(message)
                if message.wants_reply:
                    await message.reply(rank)
        say("over")


def main() -> None:
    mode, name, directory, rank = sys.argv[1:5]
    if mode == "asyncio":
        asyncio.run(with_loop(name, directory, int(rank)))
        return
    try:
        with shmring.threads.join(name, int(rank), socket_dir=directory) as worker:
            say("joined", os.getpid())
            if mode == "serve":
                serve(worker, int(rank))
            else:
                {"hold": hold, "write": write, "protect": protect, "fork": fork}[mode](worker)
    except shmring.EngineDeadError:
        say("engine dead")


if __name__ == "__main__":
    main()
