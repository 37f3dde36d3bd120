"""Frontends that are stopped, or that read no reply: nobody else waits for them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shmring
import shmring.threads
from tests.segments import own_name
from tests.waiting import cancel, eventually

NAME = own_name("silent")
NBYTES = {"small": 600, "large": 200_000}  # five of the large ones fill the reserve
COUNT = 100  # more than there are handlers, and more small ones than a message ring holds
OPTIONS = {"slab_nbytes": "8MiB", "reply_nbytes": "1MiB", "message_ring_nbytes": "16KiB", "inline_nbytes": 1024}


def reply_to(payload: str) -> Any:
    return {"payload": payload, "x": torch.full((NBYTES[payload],), 7, dtype=torch.uint8)}


async def run(ring: shmring.Ring) -> None:
    async def handle(claim: shmring.Claim) -> None:
        await claim.done(reply_to(claim.payload))

    await ring.run(handle, max_concurrency=4)


async def run_batches(ring: shmring.Ring) -> None:
    async def handle(claims: list[shmring.Claim]) -> list[Any]:
        return [reply_to(claim.payload) for claim in claims]

    await ring.run_batches(handle, 4)


@pytest.mark.parametrize("serving", [run, run_batches])
@pytest.mark.parametrize("payload", NBYTES)
@pytest.mark.parametrize("how", ["stops", "reads nothing"])
async def test_nobody_waits_for_a_silent_frontend(
    launch: Callable[..., Any], socket_dir: Path, how: str, payload: str, serving: Callable[..., Any]
) -> None:
    async with shmring.serve(NAME, socket_dir=str(socket_dir), **OPTIONS) as ring:
        running = asyncio.create_task(serving(ring))
        silent = launch("silent", how, NAME, str(socket_dir), payload, str(COUNT))
        assert await silent.said() == ["sent"]
        if how == "stops":
            await silent.stopped()
        await eventually(lambda: ring.statistics().submitted == COUNT)
        async with shmring.connect(NAME, socket_dir=str(socket_dir)) as client:
            for kind in NBYTES:
                for _ in range(20):
                    reply = await client.request(kind, timeout=60)
                    assert len(reply["x"]) == NBYTES[kind]
                    del reply
        silent.signal(signal.SIGCONT if how == "stops" else signal.SIGUSR1)
        assert await silent.said() == ["read"]
        await silent.died()
        await cancel(running)
