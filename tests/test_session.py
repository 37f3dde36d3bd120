"""Sessions: what crosses on the wire while leases come and go."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch

import shmring


async def test_frontends_pass_a_slab_that_holds_one_request_back_and_forth(socket_dir: Path) -> None:
    """A lease may be recalled in the same breath in which it is granted; a recall that is lost would stall the other
    frontend until the lease is returned as idle, which here takes longer than the requests may.
    """
    options = {"socket_dir": str(socket_dir)}
    large = torch.ones(1_200_000, dtype=torch.uint8)
    async with shmring.serve("passed", slab_nbytes="2MiB", **options) as ring:

        async def count(claim: shmring.Claim) -> None:
            await claim.reply(claim.payload["x"].numel())

        running = asyncio.create_task(ring.run(count))
        clients = [await shmring.connect("passed", lease_idle_s=600.0, **options) for _ in range(3)]
        requests = [client.request({"x": large}, timeout=20) for client in clients for _ in range(10)]
        assert await asyncio.gather(*requests) == [1_200_000] * 30
        for client in clients:
            await client.close()
    await running


async def test_a_large_request_of_one_frontend_is_not_held_up_by_small_ones_of_another(socket_dir: Path) -> None:
    options = {"socket_dir": str(socket_dir)}
    large, small = torch.ones(1_800_000, dtype=torch.uint8), torch.ones(50_000, dtype=torch.uint8)
    async with shmring.serve("mixed", slab_nbytes="2MiB", **options) as ring:

        async def count(claim: shmring.Claim) -> None:
            await claim.reply(claim.payload["x"].numel())

        running = asyncio.create_task(ring.run(count))
        async with shmring.connect("mixed", **options) as busy, shmring.connect("mixed", **options) as client:
            stop = asyncio.Event()

            async def keep_asking() -> None:
                while not stop.is_set():
                    assert await busy.request({"x": small}, timeout=20) == 50_000

            askers = [asyncio.create_task(keep_asking()) for _ in range(8)]
            for _ in range(5):
                assert await client.request({"x": large}, timeout=20) == 1_800_000
            stop.set()
            await asyncio.gather(*askers)
    await running
