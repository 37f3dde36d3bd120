"""An engine process for tests: ``engine.py NAME SOCKET_DIR SLAB_NBYTES``.

It answers each request with the checksum of its tensor; ``hold`` makes it hold the claim until it is aborted, ``stream``
makes it answer for ever, ``texts`` with text in messages. ``statistics`` is a control call.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys

import uvloop

import shmring


async def handle(claim: shmring.Claim) -> None:
    mode, tensor = claim.payload["mode"], claim.payload["x"]
    answer = {"sum": int(tensor.sum()), "n": tensor.numel(), "x": tensor, "pid": os.getpid()}
    del tensor
    if mode == "hold":
        await asyncio.Event().wait()
    while mode == "texts":
        await claim.reply("x" * 1000)
    await claim.reply(answer)
    while mode == "stream":
        await claim.reply(answer)


async def main(name: str, socket_dir: str, slab_nbytes: str) -> None:
    ring: shmring.Ring | None = None

    async def statistics() -> dict[str, int]:
        assert ring is not None
        ring._shell._book.check()
        return dataclasses.asdict(ring.statistics())

    ring = await shmring.serve(
        name, slab_nbytes=slab_nbytes, reply_nbytes="2MiB", socket_dir=socket_dir, calls={"statistics": statistics}
    )
    print("ready", os.getpid(), flush=True)
    await ring.run(handle)


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
