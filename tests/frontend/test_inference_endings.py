"""What answers do if the engine fails on the way, or if their caller goes: of all routes that stream."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

import shmring
from shmring.engine.protocol import GenerateReply
from tests.frontend.talking import MODEL, picture_url
from tests.waiting import eventually

CHATS, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
PICTURE = {"type": "image_url", "image_url": {"url": picture_url()}}
BODIES: dict[str, dict[str, Any]] = {
    CHATS: {"messages": [{"role": "user", "content": [PICTURE]}], "max_tokens": 100_000},
    COMPLETIONS: {"prompt": "Hi", "max_tokens": 100_000},
    RESPONSES: {"input": "Hi", "max_output_tokens": 100_000},
    MESSAGES: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100_000},
}


@pytest.mark.parametrize("path", list(BODIES))
async def test_a_failure_on_the_way_is_the_last_event(open_engine: Any, open_server: Any, anthropic: Any, path: str) -> None:
    """In the form of the route's API: the vendors' own clients raise for it."""

    async def fail(claim: shmring.Claim) -> None:
        before = engine.client.ring.statistics().replies
        await claim.reply(GenerateReply("so far", [1], 5, 1))
        await eventually(lambda: engine.client.ring.statistics().replies > before)  # an error overtakes what was not taken yet
        raise RuntimeError("the model has fallen over")

    engine = await open_engine(fail, MODEL)
    url = await open_server(engine)
    async with httpx.AsyncClient(base_url=url, timeout=30) as http:
        response = await http.post(path, json={"model": "m", **BODIES[path], "stream": True})
        numbers = (await http.get("/metrics")).text
    *_, so_far, last = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
    assert "so far" in json.dumps(so_far)
    error = last["error"]
    assert error["code"] == "engine_error"
    assert "the model has fallen over" in error["message"]
    if path == RESPONSES:
        assert (last["type"], last["code"], last["message"]) == ("error", error["code"], error["message"])
    elif path == MESSAGES:
        anthropic.types.ErrorResponse.model_validate(last)
        assert (last["type"], error["type"], last["request_id"]) == ("error", "api_error", response.headers["x-request-id"])
    assert 'shmring_http_broken_streams_total{code="engine_error"} 1.0' in numbers
    assert f'shmring_request_failure_total{{reason="engine_error",route="{path}"}} 1.0' in numbers
    await eventually(lambda: engine.client.ring.statistics().slots_in_use == 0)
    asked: Any = {"model": "m", "stream": True, **BODIES[path]}
    if path == MESSAGES:
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
            with pytest.raises(anthropic.APIError, match="fallen over"):
                [event async for event in await client.messages.create(**asked)]
    elif path == RESPONSES:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as other:
            with pytest.raises(openai.APIError, match="engine"):
                [event async for event in await other.responses.create(**asked)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", list(BODIES))
async def test_who_hangs_up_ends_the_request_in_the_engine(open_core: Any, open_server: Any, path: str, stream: bool) -> None:
    engine = await open_core({"step_s": 0.005})
    url = await open_server(engine)
    body = json.dumps({"model": "shmring-synthetic", **BODIES[path], "stream": stream}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    if stream:
        await reader.readuntil(b"token2")
    await eventually(lambda: engine.core._scheduler.running == 1)
    writer.close()
    await eventually(lambda: engine.core._scheduler.running == 0)
    client = engine.client.ring
    await eventually(lambda: (client.statistics().slots_in_use, client.statistics().in_flight) == (0, 0))
    assert engine.ring.statistics().slots_in_use == 0
