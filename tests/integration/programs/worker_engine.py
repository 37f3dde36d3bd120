"""An engine for workers: ``worker_engine.py NAME SOCKET_DIR``. Sends the first one messages as it takes them."""

from __future__ import annotations

import asyncio
import sys

import torch

import shmring


async def main() -> None:
    name, directory = sys.argv[1:3]
    async with shmring.serve(
        name, slab_nbytes="1MiB", broadcast_nbytes="256KiB", worker_backlog=8, socket_dir=directory
    ) as ring:
        print("workers", len(await ring.wait_workers(1)), flush=True)
        while True:
            await ring.broadcast({"x": torch.ones(10_000, dtype=torch.uint8)})


if __name__ == "__main__":
    asyncio.run(main())
