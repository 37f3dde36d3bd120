"""A scheduler that serves frontends from its own loop, and its other ranks, without asyncio.

``scheduler.py looks NAME SOCKET_DIR``  takes what has come in each turn of its loop, shares it with the ranks, and replies
``scheduler.py away NAME SOCKET_DIR``   opens the ring, and then never calls it
``scheduler.py rank NAME SOCKET_DIR``   a rank: says the number and the sum of what it is shared
"""

from __future__ import annotations

import signal
import sys
import time

import shmring
from shmring import threads


def say(*words: object) -> None:
    print(*words, flush=True)


def look(ring: threads.Ring) -> None:
    ring.wait_workers(1, timeout=20)
    say("ready")
    while True:
        try:
            claim = ring.claim_nowait()
        except shmring.WouldBlock:
            time.sleep(0.0005)  # a step of its model
            continue
        claim.share({"number": claim.request_id}, timeout=10)
        claim.done({"sum": int(claim.payload["x"].sum())})
        del claim


def rank(name: str, directory: str) -> None:
    for message in threads.join(name, 0, socket_dir=directory, connect_timeout_s=20):
        with message:
            say("got", message.beside["number"], int(message.payload["x"].sum()))


if __name__ == "__main__":
    role, name, directory = sys.argv[1:4]
    if role == "rank":
        rank(name, directory)
    else:
        with threads.serve(name, slab_nbytes="4MiB", socket_dir=directory, served_by="both") as ring:
            if role == "looks":
                look(ring)
            say("ready")
            signal.pause()
