"""A request in the engine's hands, with a real claim."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

import shmring
from engine.protocol import EncodeReply, EncodeRequest, Picture
from engine.request import EngineRequest

REPLY = EncodeReply(torch.ones(1, 4))
LARGE_REPLY = EncodeReply(torch.ones(1, 10_000))


@pytest.fixture
async def ring(serve: Any) -> shmring.Ring:
    ring: shmring.Ring = await serve(payload_type=EncodeRequest, reply_nbytes=65536)
    return ring


@pytest.fixture
async def asked(ring: shmring.Ring, connect: Any) -> AsyncIterator[tuple[EngineRequest, asyncio.Task[Any]]]:
    """A claimed request of 5,000 bytes, and whoever waits for its answer."""
    client = await connect()
    payload = EncodeRequest([Picture(torch.full((5000,), 3, dtype=torch.uint8))])
    waiting = asyncio.create_task(client.request(payload, timeout=10, reply_type=EncodeReply))
    yield EngineRequest(await ring.claim(), claimed_at=1.0), waiting
    waiting.cancel()
    await asyncio.wait([waiting])


async def test_it_knows_its_payload_and_its_size(asked: tuple[EngineRequest, asyncio.Task[Any]]) -> None:
    request, _ = asked
    assert request.nbytes == 5000
    assert request.payload.pictures[0].pixels.sum() == 15_000
    request.claim.done()


async def test_an_answer_ends_it_and_releases_its_slot(
    ring: shmring.Ring, asked: tuple[EngineRequest, asyncio.Task[Any]]
) -> None:
    request, waiting = asked
    request.answer_nowait(REPLY)
    assert ring.statistics().slots_in_use == 0
    assert torch.equal((await waiting).embeddings, REPLY.embeddings)


async def test_an_error_is_told(asked: tuple[EngineRequest, asyncio.Task[Any]]) -> None:
    request, waiting = asked
    request.answer_nowait(ValueError("no good"))
    with pytest.raises(shmring.RemoteError, match="ValueError: no good"):
        await waiting


async def test_an_aborted_one_is_released_in_silence(
    ring: shmring.Ring, asked: tuple[EngineRequest, asyncio.Task[Any]], eventually: Any
) -> None:
    request, waiting = asked
    waiting.cancel()
    await eventually(lambda: request.claim.aborted)
    assert ring.statistics().slots_claimed == 1
    request.answer_nowait(REPLY)
    assert ring.statistics().slots_in_use == 0
    assert ring.statistics().replies == 0


async def test_what_can_not_be_sent_now_is_sent_later_without_its_slot(
    ring: shmring.Ring, asked: tuple[EngineRequest, asyncio.Task[Any]]
) -> None:
    request, waiting = asked
    client_id = request.claim.client_id
    blocking = ring._ledger.acquire_reply(client_id, 60_000)
    assert blocking is not None
    with pytest.raises(shmring.WouldBlock):
        request.answer_nowait(LARGE_REPLY)
    assert ring.statistics().slots_in_use == 0, "it must not wait with its slot"
    answering = asyncio.create_task(request.answer(LARGE_REPLY))
    await asyncio.sleep(0)
    assert not answering.done()
    ring._carry_out(ring._ledger.discard_reply(client_id, blocking.generation))
    await answering
    assert torch.equal((await waiting).embeddings, LARGE_REPLY.embeddings)
