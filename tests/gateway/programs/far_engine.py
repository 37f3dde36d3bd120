"""An engine that listens for clients on other hosts, and is killed or stopped: ``far_engine.py PLACE TOKEN DIRECTORY``."""

from __future__ import annotations

import asyncio
import sys

import shmring


async def main(place: str, token: str, directory: str) -> None:
    async def handler(claim: shmring.Claim) -> None:
        await claim.done({"x": claim.payload["x"] + 1, "value": int(claim.payload["x"][-1])})

    async with shmring.serve(
        "far", slab_nbytes="32MiB", reply_nbytes="16MiB", socket_dir=directory, listen=place, token=token
    ) as ring:
        print("ready", ring.address, flush=True)
        await ring.run(handler)


asyncio.run(main(*sys.argv[1:]))
