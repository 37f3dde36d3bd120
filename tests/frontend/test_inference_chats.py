"""Chats, mostly with the real engine core and the synthetic executor: answers, streams, and failures on the way."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import numpy as np
import pytest

import shmring
from shmring.engine.protocol import (
    ChatMessage,
    GenerateReply,
    GenerateRequest,
    InputSpec,
    MediumPart,
    ModelDescription,
    PictureSpec,
    SamplingParams,
    TextPart,
)
from shmring.engine.scheduler import SchedulerConfig
from shmring.frontend.answer import Answer
from shmring.frontend.callers.admission import Admitted
from shmring.frontend.inference import Generation, Inference
from tests.frontend.talking import OpenTalk, alone, data_events
from tests.waiting import eventually

PIXELS = np.random.default_rng(6).integers(0, 256, (2, 24, 32, 3), np.uint8)
OpenApp = Callable[..., Awaitable[httpx.AsyncClient]]
Handler = Callable[[shmring.Claim], Awaitable[None]]
PATH = "/v1/chat/completions"

GENERATING = ModelDescription(
    executor="test",
    model="shmring-synthetic",
    tasks=["generate"],
    input=InputSpec(picture=PictureSpec()),
    max_batch_size=8,
)


async def test_an_answer_comes_whole(open_core: Any, open_app: OpenApp, chat_of: Any) -> None:
    engine = await open_core()
    http = await open_app(engine)
    response = await http.post(PATH, json=chat_of(*PIXELS, max_tokens=3))
    assert response.status_code == 200, response.text
    body = response.json()
    assert body.pop("id").startswith("chatcmpl-")
    assert abs(body.pop("created") - time.time()) < 600
    message = {"role": "assistant", "content": "[synthetic] token2 token3"}
    assert body == {
        "object": "chat.completion",
        "model": "shmring-synthetic",
        "choices": [{"index": 0, "message": message, "finish_reason": "length", "logprobs": None}],
        "usage": {"prompt_tokens": 3 + 2 * 64, "completion_tokens": 3, "total_tokens": 3 + 2 * 64 + 3},
    }
    assert response.headers["x-shmring-slab-bytes"] == str(PIXELS.nbytes)
    assert response.headers["x-shmring-copies"] == "0"
    assert response.headers["x-shmring-synthetic"] == "true"
    await eventually(lambda: engine.client.ring.statistics().slots_in_use == 0)
    assert engine.client.ring.statistics().in_place == 2


@pytest.mark.parametrize("usage_asked", [False, True])
async def test_an_answer_comes_in_events(open_core: Any, open_app: OpenApp, chat_of: Any, usage_asked: bool) -> None:
    http = await open_app(await open_core({"tokens": 3}))
    options = {"stream_options": {"include_usage": True}} if usage_asked else {}
    response = await http.post(PATH, json=chat_of(PIXELS[0], stream=True, **options))
    assert response.status_code == 200, response.text
    headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
    assert (headers | {"x-shmring-synthetic": "true"}).items() <= dict(response.headers).items()
    assert "content-length" not in response.headers
    chunks = data_events(response.text)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    if usage_asked:
        usage = chunks.pop()
        assert (usage["choices"], usage["usage"]["completion_tokens"], usage["usage"]["prompt_tokens"]) == ([], 3, 67)
        assert {chunk["usage"] for chunk in chunks} == {None}
    else:
        assert not any("usage" in chunk for chunk in chunks)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta["content"] for delta in deltas[1:-1]) == "[synthetic] token2 token3"
    assert deltas[-1] == {}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


async def test_the_engine_gets_the_callers_parameters(open_talk: OpenTalk, chat_of: Any) -> None:
    async def note(claim: shmring.Claim) -> None:
        heard.extend([medium.pixels.sum() for medium in claim.payload.media])
        claim.payload.media = []
        await claim.reply(GenerateReply("yes", [1], 1, 1, "stop"))

    heard: list[Any] = []
    talk = await open_talk(note, GENERATING)
    body = chat_of(*PIXELS, seed=5, stop=["a", "b"], temperature=0, top_p=0.5, max_completion_tokens=9, priority=2)
    body["messages"].insert(0, {"role": "developer", "content": "Be brief."})
    answer = await talk.ask(PATH, body | {"max_tokens": 1, "ignore_eos": True})
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert heard == [pixels.sum() for pixels in PIXELS]
    [request] = talk.requests
    assert request.deadline is not None
    assert alone(request) == GenerateRequest(
        [
            ChatMessage("developer", [TextPart("Be brief.")]),
            ChatMessage("user", [TextPart("What is this?"), MediumPart(0), MediumPart(1)]),
        ],
        sampling=SamplingParams(seed=5, stop=["a", "b"], temperature=0, top_p=0.5, max_tokens=9, ignore_eos=True),
        priority=2,
        stream=False,
    )


def failing(error: type[Exception] | None, pieces: int = 0) -> Handler:
    async def fail(claim: shmring.Claim) -> None:
        for _ in range(pieces):
            await claim.reply(GenerateReply("and then", [1], 1, 1))
        if error is not None:
            raise error("no")
        claim.done()

    return fail


@pytest.mark.parametrize(
    ("handler", "stream", "refusal"),
    [
        *((failing(ValueError), stream, (400, "rejected_by_engine", None)) for stream in (False, True)),
        *((failing(RuntimeError), stream, (500, "engine_error", None)) for stream in (False, True)),
        *((failing(None), stream, (500, "engine_error", None)) for stream in (False, True)),
        (failing(None, pieces=1), False, (500, "engine_error", None)),
    ],
)
async def test_what_fails_before_anything_was_sent_has_a_status(
    open_talk: OpenTalk, chat_of: Any, handler: Handler, stream: bool, refusal: tuple[int, str, None]
) -> None:
    """So does an answer that has no end."""
    talk = await open_talk(handler, GENERATING)
    assert await talk.refusal(PATH, chat_of(PIXELS[0], stream=stream)) == refusal


async def test_the_times_of_an_answer_are_counted(open_core: Any, open_app: OpenApp, chat_of: Any) -> None:
    http = await open_app(await open_core())
    for media, stream in (([PIXELS[0]], True), ([PIXELS[0]], False), ([], True), ([], False)):
        response = await http.post(PATH, json=chat_of(*media, stream=stream, max_tokens=5))
        assert response.status_code == 200, response.text
    lines = (await http.get("/metrics")).text.splitlines()
    for line in (
        "shmring_time_to_first_token_seconds_count 4.0",
        "shmring_inter_token_latency_seconds_count 16.0",  # the first of five has no token before it
        "shmring_e2e_request_latency_seconds_count 4.0",
        'shmring_request_success_total{finished_reason="length"} 4.0',
        "shmring_request_queue_time_seconds_count 4.0",
        "shmring_request_prefill_time_seconds_count 4.0",
        "shmring_request_decode_time_seconds_count 4.0",
        "shmring_generation_tokens_total 20.0",
    ):
        assert line in lines
    assert any(line.startswith("shmring_prompt_tokens_total ") and float(line.split()[1]) > 0 for line in lines)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_deadline_is_of_all_of_it(
    open_core: Any, open_app: OpenApp, chat_of: Any, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a stream, the time is over when it has begun: not by a clock, or a busy machine would let it pass before that."""
    begin = Inference.begin

    async def begin_in_time(service: Inference, generation: Generation, admitted: Admitted, request_id: str) -> Answer:
        answer = await begin(service, generation, admitted, request_id)
        admitted.deadline = asyncio.get_running_loop().time()
        return answer

    if stream:
        monkeypatch.setattr(Inference, "begin", begin_in_time)
    engine = await open_core({"step_s": 0.02})
    http = await open_app(engine, request_timeout_s=600 if stream else 0.3)
    response = await http.post(PATH, json=chat_of(PIXELS[0], stream=stream, max_tokens=10_000))
    if stream:
        assert response.status_code == 200
        *_, last, end = response.text.split("\n\n")
        assert (json.loads(last.removeprefix("data: "))["error"]["code"], end) == ("request_timeout", "")
    else:
        assert (response.status_code, response.json()["error"]["code"]) == (504, "request_timeout")
    await eventually(lambda: engine.core._scheduler.running == 0)
    assert engine.client.ring.statistics().in_flight == 0


async def test_the_deadline_counts_waiting_for_a_turn_and_a_slot(open_core: Any, open_app: OpenApp, chat_of: Any) -> None:
    engine = await open_core(slab_nbytes="1MiB")
    http = await open_app(engine, request_timeout_s=0.1, max_concurrent_media=1)
    picture = np.zeros((300, 300, 3), np.uint8)
    async with engine.client.ring.slot(engine.ring.statistics().leasable_nbytes - (128 << 10)):
        both = await asyncio.gather(*(http.post(PATH, json=chat_of(picture)) for _ in range(2)))
    assert [response.status_code for response in both] == [504, 504]


async def test_a_stream_holds_neither_turn_nor_slot(open_core: Any, open_server: Any, chat_of: Any) -> None:
    """Also while the engine goes on: its media were for the first step."""
    engine = await open_core({"step_s": 0.005})
    url = await open_server(engine, max_concurrent_media=1)
    async with httpx.AsyncClient(base_url=url, timeout=30) as http:
        body = chat_of(PIXELS[0], stream=True, max_tokens=100_000)
        async with http.stream("POST", PATH, json=body) as response:
            pieces = response.aiter_text()
            await anext(pieces)
            await eventually(lambda: engine.client.ring.statistics().slots_in_use == 0)
            assert engine.client.ring.statistics().in_flight == 1
            assert (await http.post(PATH, json=chat_of(PIXELS[1], max_tokens=2))).status_code == 200
            assert engine.client.ring.statistics().in_flight == 1  # the first one still goes on


async def test_while_the_engine_is_paused_requests_wait(open_core: Any, open_app: OpenApp, chat_of: Any) -> None:
    engine = await open_core()
    http = await open_app(engine)
    assert (await http.get("/ready")).status_code == 200
    await engine.client.pause_generation()
    request = asyncio.create_task(http.post(PATH, json=chat_of(PIXELS[0], max_tokens=2)))
    await eventually(lambda: engine.core._scheduler.waiting == 1)
    ready = await http.get("/ready")
    assert (ready.status_code, ready.json()["error"]["code"]) == (503, "paused")
    assert (await http.get("/health")).json()["engine"] == "paused"
    assert not request.done()
    await engine.client.resume_generation()
    assert (await request).status_code == 200
    assert (await http.get("/ready")).status_code == 200


async def test_pausing_gives_up_what_runs(open_core: Any, open_app: OpenApp, chat_of: Any) -> None:
    engine = await open_core({"step_s": 0.005})
    http = await open_app(engine)
    request = asyncio.create_task(http.post(PATH, json=chat_of(max_tokens=100_000)))
    await eventually(lambda: engine.core._scheduler.running == 1)
    await engine.client.pause_generation()
    response = await request
    assert (response.status_code, response.json()["error"]["code"]) == (503, "paused")
    assert response.headers["retry-after"] == "1"


async def test_a_full_engine_is_a_503(open_core: Any, open_app: OpenApp, chat_of: Any) -> None:
    engine = await open_core({"step_s": 0.005}, scheduler_config=SchedulerConfig(max_num_seqs=1, max_waiting=1))
    http = await open_app(engine)
    running = asyncio.create_task(http.post(PATH, json=chat_of(max_tokens=100_000)))
    await eventually(lambda: engine.core._scheduler.running == 1)
    waiting = asyncio.create_task(http.post(PATH, json=chat_of(max_tokens=1)))
    await eventually(lambda: engine.core._scheduler.waiting == 1)
    response = await http.post(PATH, json=chat_of(max_tokens=1))
    assert (response.status_code, response.json()["error"]["code"]) == (503, "overloaded")
    for task in (running, waiting):
        task.cancel()
    await asyncio.wait([running, waiting])


async def test_media_can_be_copied_instead_of_being_decoded_in_place(open_core: Any, open_app: OpenApp, chat_of: Any) -> None:
    engine = await open_core()
    http = await open_app(engine, disable_mm_shm=True)
    response = await http.post(PATH, json=chat_of(*PIXELS, max_tokens=1))
    assert response.status_code == 200, response.text  # the executor has checked what arrived
    assert engine.client.ring.statistics().in_place == 0
    assert engine.client.ring.statistics().copied_nbytes >= int(response.headers["x-shmring-slab-bytes"]) > 0
