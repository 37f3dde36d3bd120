"""The engine as frontends see it; what it says when there is none."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shmring
from shmring.engine.client import EngineClient
from shmring.engine.protocol import (
    ChatMessage,
    EncodeReply,
    EncodeRequest,
    EngineRequestPayload,
    GenerateReply,
    GenerateRequest,
    InputSpec,
    ModelDescription,
    Picture,
    TextPart,
)
from tests.sessions import attachment_of, session_of
from tests.waiting import eventually

REQUEST = EncodeRequest([Picture(torch.ones(5000, dtype=torch.uint8))])
QUESTION = GenerateRequest([ChatMessage("user", [TextPart("why?")])])


@pytest.fixture
async def client(serve: Any, socket_dir: Any) -> AsyncIterator[EngineClient]:
    """A client of a ring that nobody answers yet."""
    await serve(name="engine", payload_type=EngineRequestPayload)
    async with await EngineClient.connect("engine", socket_dir=str(socket_dir), lease_nbytes="64KiB") as client:
        yield client


async def test_there_must_be_an_engine_to_connect_to(socket_dir: Any) -> None:
    with pytest.raises(shmring.EngineDeadError, match="no engine listens"):
        await EngineClient.connect("nobody", socket_dir=str(socket_dir), connect_timeout_s=0.0)


async def test_embeddings_are_the_callers_own_and_keep_no_reply_slot(serve: Any, socket_dir: Any) -> None:
    async def answer(claim: shmring.Claim) -> None:
        await claim.reply(EncodeReply(torch.full((1, 5000), 2.0)))

    ring = await serve(answer, name="engine", payload_type=EngineRequestPayload)
    async with await EngineClient.connect("engine", socket_dir=str(socket_dir)) as client:
        [output] = [output async for output in client.encode(REQUEST, request_id="one")]
        assert torch.equal(output.embeddings, torch.full((1, 5000), 2.0))
        await eventually(lambda: client.ring.statistics().reply_slots_held == 0)
    assert ring.statistics().replies == 1


async def test_without_an_engine_every_call_fails_at_once(client: EngineClient, serve: Any) -> None:
    session = session_of(client.ring)
    assert session is not None
    assert client.is_running
    memory = client.media_memory()
    session.link.abort()  # as if the engine had gone; there is none of that name to attach to afterwards
    attachment = attachment_of(client.ring)
    attachment.place = Path(str(attachment.place)).with_name("nobody.sock")
    await eventually(lambda: client.errored)
    with pytest.raises(shmring.EngineDeadError):
        client.media_memory()
    with pytest.raises(shmring.EngineDeadError):
        await memory.slots([100])
    with pytest.raises(shmring.EngineDeadError):
        await memory.find(bytes(32))
    with pytest.raises(shmring.EngineDeadError):
        memory.check_capacity(100)
    with pytest.raises(shmring.EngineDeadError):
        await anext(client.encode(REQUEST))
    with pytest.raises(shmring.EngineDeadError):
        await anext(client.generate(QUESTION))
    for call in (
        client.check_health,
        client.describe,
        client.statistics,
        client.get_supported_tasks,
        client.pause_generation,
        client.resume_generation,
        client.is_paused,
        client.reset_mm_cache,
        client.do_log_stats,
        client.start_profile,
        client.stop_profile,
        lambda: client.collective_rpc("anything"),
    ):
        with pytest.raises(shmring.EngineDeadError):
            await call()
    assert "the engine 'engine' closed the connection, or died" in str(client.dead_error)
    await client.abort("anything")


async def test_an_engine_without_the_call_is_not_well(client: EngineClient) -> None:
    with pytest.raises(shmring.RemoteError, match="no method 'health'"):
        await client.check_health()


async def test_a_deadline_is_kept(client: EngineClient) -> None:
    with pytest.raises(TimeoutError):
        await anext(client.encode(REQUEST, timeout=0.02))


async def test_an_answer_comes_piece_by_piece(serve: Any, socket_dir: Any) -> None:
    async def answer(claim: shmring.Claim) -> None:
        assert claim.payload == QUESTION
        await claim.reply(GenerateReply("be", [1, 2], 5, 2))
        await claim.reply(GenerateReply("cause", [3], 5, 3, "stop"))

    await serve(answer, name="engine", payload_type=EngineRequestPayload)
    async with await EngineClient.connect("engine", socket_dir=str(socket_dir)) as client:
        first, last = [reply async for reply in client.generate(QUESTION)]
        assert (first.text, first.token_ids, first.finish_reason) == ("be", [1, 2], None)
        assert (last.text, last.prompt_tokens, last.completion_tokens, last.finish_reason) == ("cause", 5, 3, "stop")


async def test_a_timeout_travels_as_a_deadline_and_the_request_of_the_caller_is_not_changed(
    serve: Any, socket_dir: Any
) -> None:
    deadlines: list[float | None] = []

    async def answer(claim: shmring.Claim) -> None:
        deadlines.append(claim.payload.deadline)
        await claim.reply(EncodeReply(torch.ones(1, 1)))

    await serve(answer, name="engine", payload_type=EngineRequestPayload)
    async with await EngineClient.connect("engine", socket_dir=str(socket_dir)) as client:
        for options in ({}, {"timeout": 100.0}):
            [_] = [output async for output in client.encode(REQUEST, **options)]
        own = EncodeRequest(REQUEST.inputs, deadline=time.monotonic() + 7)
        [_] = [output async for output in client.encode(own, timeout=100.0)]
    assert deadlines[0] is None
    assert deadlines[1] is not None
    assert 90 < deadlines[1] - time.monotonic() < 100
    assert deadlines[2] == own.deadline
    assert REQUEST.deadline is None


async def test_an_engine_is_asked_what_it_is_once_in_its_life(serve: Any, socket_dir: Any) -> None:
    models: list[str] = []

    def calls(model: str) -> Any:
        async def describe() -> ModelDescription:
            models.append(model)
            return ModelDescription("test", model, ["encode"], InputSpec(), 8)

        return {"describe": describe}

    ring = await serve(name="engine", calls=calls("first"))
    async with await EngineClient.connect("engine", socket_dir=str(socket_dir)) as client:
        assert [(await client.describe()).model for _ in range(3)] == ["first"] * 3
        await ring.close()
        await eventually(lambda: client.errored)
        await serve(name="engine", calls=calls("second"))
        await client.ring.wait_connected(timeout=5)
        assert (await client.describe()).model == "second"
    assert models == ["first", "second"]
