"""The engine as frontends see it; what it says when there is none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

import shmring
from engine.client import EngineClient
from engine.protocol import EncodeReply, EncodeRequest, Picture

REQUEST = EncodeRequest([Picture(torch.ones(5000, dtype=torch.uint8))])


@pytest.fixture
async def client(serve: Any, socket_dir: Any) -> AsyncIterator[EngineClient]:
    """A client of a ring that nobody answers yet."""
    await serve(name="engine", payload_type=EncodeRequest)
    async with await EngineClient.connect("engine", socket_dir=str(socket_dir), lease_nbytes="64KiB") as client:
        yield client


async def test_there_must_be_an_engine_to_connect_to(socket_dir: Any) -> None:
    with pytest.raises(shmring.EngineDeadError, match="no engine listens"):
        await EngineClient.connect("nobody", socket_dir=str(socket_dir), connect_timeout_s=0.0)


async def test_embeddings_are_the_callers_own_and_keep_no_reply_slot(serve: Any, socket_dir: Any) -> None:
    async def answer(claim: shmring.Claim) -> None:
        await claim.reply(EncodeReply(torch.full((1, 5000), 2.0)))

    ring = await serve(answer, name="engine", payload_type=EncodeRequest)
    async with await EngineClient.connect("engine", socket_dir=str(socket_dir)) as client:
        [output] = [output async for output in client.encode(REQUEST, request_id="one")]
        assert (output.request_id, output.finished) == ("one", True)
        assert torch.equal(output.embeddings, torch.full((1, 5000), 2.0))
        await asyncio.sleep(0)
        assert client.ring.statistics().reply_slots_held == 0
    assert ring.statistics().replies == 1


async def test_without_an_engine_every_call_fails_at_once(client: EngineClient, serve: Any, eventually: Any) -> None:
    session = client.ring._session
    assert session is not None
    assert client.is_running
    session.connection.abort()  # as if the engine had gone; there is none of that name to attach to afterwards
    client.ring._path = client.ring._path.with_name("nobody.sock")
    await eventually(lambda: client.errored)
    with pytest.raises(shmring.EngineDeadError):
        client.slot(100)
    with pytest.raises(shmring.EngineDeadError):
        await anext(client.encode(REQUEST))
    for call in (client.check_health, client.describe, client.statistics):
        with pytest.raises(shmring.EngineDeadError):
            await call()
    await client.abort("anything")


async def test_an_engine_without_the_call_is_not_well(client: EngineClient) -> None:
    with pytest.raises(shmring.RemoteError, match="no method 'health'"):
        await client.check_health()


async def test_a_deadline_is_kept(client: EngineClient) -> None:
    with pytest.raises(TimeoutError):
        await anext(client.encode(REQUEST, timeout=0.02))
