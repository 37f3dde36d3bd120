"""An engine's core and its ranks, as servers have them: loops without asyncio, a ring to the ranks and one back from each.

``step.py core NAME SOCKET_DIR RANKS``   sends steps, takes each rank's reply, and says how far it has come
``step.py rank NAME SOCKET_DIR RANK``    replies to each step

Whoever can't go on says why. So does a core of which a rank is stopped; it waits on.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import shmring
from shmring import threads

OPTIONS: dict[str, Any] = {"slab_nbytes": "1MiB", "broadcast_nbytes": "8MiB", "served_by": "callers"}


def say(*words: object) -> None:
    print(*words, flush=True)


def receive(back: threads.Worker[Any]) -> int:
    """What a rank has replied."""
    was_stopped = False
    while True:
        try:
            with back.receive(timeout=0.1, busy_poll_s=0.001) as message:
                number: int = message.payload["number"]
                return number
        except TimeoutError:
            if back.engine_is_stopped and not was_stopped:
                was_stopped = True
                say("stopped", back.name)


def core(name: str, directory: str, ranks: int) -> None:
    ring = threads.serve(name, socket_dir=directory, **OPTIONS)
    ring.wait_workers(ranks, timeout=20)
    backs = [threads.join(f"{name}-{rank}", 0, socket_dir=directory, connect_timeout_s=20) for rank in range(ranks)]
    number = 0
    while True:
        number += 1
        to = ring.broadcast({"number": number, "x": torch.full((1 << 20,), number % 251, dtype=torch.uint8)}, timeout=10)
        if len(to) < ranks:
            say("lost")
        for back in backs:
            assert receive(back) == number
        if number % 10 == 0:
            say("step", number)


def rank(name: str, directory: str, number: int) -> None:
    worker = threads.join(name, number, socket_dir=directory, connect_timeout_s=20)
    back = threads.serve(f"{name}-{number}", socket_dir=directory, **OPTIONS)
    back.wait_workers(1, timeout=20)
    say("ready")
    while True:
        with worker.receive(busy_poll_s=0.001) as message:
            x = message.payload["x"]
            assert x.eq(message.payload["number"] % 251).all()
            back.broadcast({"number": message.payload["number"]}, timeout=10)
            del x


if __name__ == "__main__":
    role, *arguments, last = sys.argv[1:]
    try:
        play: Any = core if role == "core" else rank
        play(*arguments, int(last))
    except shmring.ShmringError as error:
        say(type(error).__name__, error.engine if isinstance(error, shmring.EngineDeadError) else "")
