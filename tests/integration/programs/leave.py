"""A process that ends while views live: ``leave.py HOW LOOP SOCKET_DIR``. It must say "leaving", and end with status 0.

closed      both ends are closed, views of all kinds live on in globals, in a cycle and in a thread
unclosed    nothing is closed: the loop just ends
exited      sys.exit in the middle of everything
"""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

import torch
import uvloop

import shmring

kept: list[Any] = []
loop_ended = threading.Event()


def keep(*views: Any) -> None:
    kept.extend(views)
    cycle: list[Any] = [view[1:] for view in views]
    cycle.append(cycle)


def look_later(view: Any) -> None:
    loop_ended.wait()
    assert int(view[0]) == 1


async def main(how: str, socket_dir: str) -> None:
    ring = await shmring.serve("leave", slab_nbytes="1MiB", socket_dir=socket_dir)
    client = await shmring.connect("leave", socket_dir=socket_dir)
    data = torch.ones(5000, dtype=torch.uint8)
    submission = await client.submit({"x": data})
    claim = await ring.claim()
    keep(claim.payload["x"])
    await claim.reply({"x": data})
    claim.done()
    reply = await submission.next()
    keep(reply["x"])
    slot = await client.slot(5000, drain=True)
    view = slot.tensor((5000,), torch.uint8).fill_(1)
    keep(view)
    slot.close()
    threading.Thread(target=look_later, args=(reply["x"],)).start()
    kept.append(asyncio.create_task(client.request({"x": view})))
    while not ring.statistics().waiting:
        await asyncio.sleep(0)
    if how == "closed":
        await client.close()
        await ring.close()
        await asyncio.wait([kept.pop()])
    print("leaving", flush=True)
    if how == "exited":
        loop_ended.set()
        sys.exit(0)


if __name__ == "__main__":
    how, loop, socket_dir = sys.argv[1:]
    run = uvloop.run if loop == "uvloop" else asyncio.run
    try:
        run(main(how, socket_dir))
    finally:
        loop_ended.set()
