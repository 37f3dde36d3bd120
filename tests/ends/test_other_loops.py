"""An end that is used in another loop than its own says so, and what to do; it changes nothing, and its own loop goes on."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shmring
from tests.model.inside import has_news as has_come
from tests.sessions import session_of
from tests.tables import for_each

pytestmark = [pytest.mark.both_loops, pytest.mark.timeout(60)]

KEY = bytes(32)
SMALL, LARGE = {"x": torch.ones(3)}, {"x": torch.ones(20_000)}
OURS = r"was made in another event loop.*make one in each loop, or use shmring\.threads"


class Ends:
    """A ring whose workers are one, a client of it, and one of several engines; nobody answers until told to."""

    def __init__(self, ring: shmring.Ring, client: shmring.Client, several: shmring.Client, worker: shmring.Worker) -> None:
        self.ring, self.client, self.several, self.worker = ring, client, several, worker

    async def stream(self) -> None:
        async for _ in self.client.stream(SMALL):
            pass

    async def submitted(self, payload: object) -> None:
        submission = await self.client.submit(payload)
        try:
            await submission.wait()
        finally:
            submission.abort()

    async def gone_through(self) -> None:
        async for _ in self.ring:
            pass


CALLS: dict[str, Callable[[Ends], Awaitable[object]]] = {
    "request": lambda ends: ends.client.request(SMALL),
    "request with a time limit": lambda ends: ends.client.request(LARGE, timeout=30),
    "request with a name": lambda ends: ends.client.request(SMALL, request_id="a"),
    "stream": lambda ends: ends.stream(),
    "wait": lambda ends: ends.submitted(LARGE),
    "a slot that is waited for": lambda ends: ends.client.slot(3 << 20),
    "slots": lambda ends: ends.client.slots([3 << 20]),
    "call": lambda ends: ends.client.call("anything"),
    "find": lambda ends: ends.client.find(KEY),
    "keep": lambda ends: ends.client.keep(KEY, LARGE),
    "wait_connected": lambda ends: ends.client.wait_connected(),
    "close a client": lambda ends: ends.client.close(),
    "request to one of several": lambda ends: ends.several.request(SMALL),
    "close a client of several": lambda ends: ends.several.close(),
    "claim": lambda ends: ends.ring.claim(),
    "iterate": lambda ends: ends.gone_through(),
    "run": lambda ends: ends.ring.run(lambda claim: asyncio.sleep(0)),
    "run in batches": lambda ends: ends.ring.run_batches(lambda claims: asyncio.sleep(0), 2, linger_s=1.0),
    "drain": lambda ends: ends.ring.drain(),
    "wait_workers": lambda ends: ends.ring.wait_workers(2),
    "gather": lambda ends: ends.ring.gather(1),
    "gather what takes long": lambda ends: ends.ring.gather(torch.ones(40_000)),
    "close a ring": lambda ends: ends.ring.close(),
    "receive": lambda ends: ends.worker.receive(),
    "close a worker": lambda ends: ends.worker.close(),
}


@pytest.fixture
async def ends(serve: Any, connect: Any, socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Ends]:
    monkeypatch.setattr("shmring.ring.limits.COPY_OFFLOAD_NBYTES", 64 << 10)
    options = {"broadcast_nbytes": "1MiB", "kept_nbytes": "1MiB", "slab_nbytes": "8MiB"}
    ring = await serve(**options)
    client = await connect(lease_nbytes="1MiB", connect_timeout_s=50)
    async with (
        shmring.connect(["test"], socket_dir=str(socket_dir), connect_timeout_s=50) as several,
        shmring.join("test", 0, socket_dir=str(socket_dir), connect_timeout_s=50) as worker,
    ):
        yield Ends(ring, client, several, worker)


async def answer_one(ring: shmring.Ring) -> None:
    with await ring.claim() as claim:
        await claim.done("answered")


async def is_well(ends: Ends) -> None:
    """Whether each end still works in its own loop."""
    ring = ends.ring
    for client in (ends.client, ends.several):
        while True:
            request = asyncio.ensure_future(client.request("again", timeout=10))
            with contextlib.suppress(shmring.AbortedError):
                with await ring.claim() as claim:
                    is_ours = claim.payload == "again"
                    await claim.done("answered")
                if is_ours:
                    break
            request.cancel()
        assert await request == "answered"
    gathering = asyncio.ensure_future(ring.gather("again", timeout=10))
    while True:
        with await ends.worker.receive() as message:
            if message.payload == "again":
                await message.reply("replied")
                break
    assert await gathering == ["replied"]


@for_each("call", CALLS)
async def test_an_end_that_is_used_in_another_loop_says_so_and_goes_on_in_its_own(ends: Ends, call: str) -> None:
    async def in_another_loop() -> None:
        await CALLS[call](ends)

    with pytest.raises(shmring.LocalProtocolError, match=OURS) as caught:
        await asyncio.to_thread(asyncio.run, in_another_loop())
    assert caught.value.__suppress_context__
    await is_well(ends)


async def test_another_runtime_error_stays_what_it_is(ends: Ends) -> None:
    request = asyncio.ensure_future(ends.client.request(SMALL))
    with await ends.ring.claim() as claim:
        await claim.done(None)
    await request
    waiting = (await ends.client.submit(SMALL)).next()
    assert waiting.send(None) is not None
    with pytest.raises(RuntimeError, match="from outside"):
        waiting.throw(RuntimeError("from outside"))


@pytest.mark.parametrize("has_news", [False, True])
def test_a_client_of_a_loop_that_has_ended_says_so(socket_dir: Path, has_news: bool) -> None:
    """What people meet: each ``asyncio.run`` has a loop of its own. The engine has confirmed an abort meanwhile, or not."""
    with shmring.threads.serve("test", socket_dir=str(socket_dir), slab_nbytes="8MiB"):

        async def connect() -> shmring.Client:
            return await shmring.connect("test", socket_dir=str(socket_dir), connect_timeout_s=50)

        client = asyncio.run(connect())
        assert client.connected
        for payload in (SMALL, LARGE):
            with pytest.raises(shmring.LocalProtocolError, match=OURS):
                asyncio.run(client.request(payload, timeout=10))
            while has_news and payload is SMALL and not has_come(session_of(client).link.reader):
                time.sleep(0.01)
        with pytest.raises(shmring.LocalProtocolError, match=OURS):
            asyncio.run(client.close())
