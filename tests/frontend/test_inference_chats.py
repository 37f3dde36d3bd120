"""Chats, mostly with the real engine core and the synthetic executor: answers, streams, and failures on the way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

import shmring
from shmring.engine.protocol import (
    GenerateReply,
    GenerateRequest,
    InputSpec,
    MediumPart,
    ModelDescription,
    PictureSpec,
    TextPart,
)
from shmring.engine.scheduler import SchedulerConfig
from shmring.frontend.admission import Admitted
from shmring.frontend.inference import Inference

PIXELS = np.random.default_rng(6).integers(0, 256, (2, 24, 32, 3), np.uint8)
OpenApp = Callable[..., Awaitable[httpx.AsyncClient]]

GENERATING = ModelDescription(
    executor="test",
    model="shmring-synthetic",
    tasks=["generate"],
    input=InputSpec(picture=PictureSpec()),
    max_batch_size=8,
)


def events_of(text: str) -> list[Any]:
    """The contents of a stream's events; the last one of a complete stream is "[DONE]"."""
    parts = text.split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") and "\n" not in part for part in parts)
    return [part[6:] if part == "data: [DONE]" else json.loads(part[6:]) for part in parts]


async def test_an_answer_comes_whole(open_core: Any, open_app: OpenApp, chat_of: Any, eventually: Any) -> None:
    engine = await open_core()
    http = await open_app(engine)
    response = await http.post("/v1/chat/completions", json=chat_of(*PIXELS, max_tokens=3))
    assert response.status_code == 200, response.text
    body = response.json()
    assert (body["object"], body["model"]) == ("chat.completion", "shmring-synthetic")
    assert body["id"].startswith("chatcmpl-")
    [choice] = body["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": "[synthetic] token2 token3"},
        "finish_reason": "length",
        "logprobs": None,
    }
    assert body["usage"] == {"prompt_tokens": 3 + 2 * 64, "completion_tokens": 3, "total_tokens": 3 + 2 * 64 + 3}
    assert response.headers["x-shmring-slab-bytes"] == str(PIXELS.nbytes)
    assert response.headers["x-shmring-copies"] == "0"
    assert response.headers["x-shmring-synthetic"] == "true"
    await eventually(lambda: engine.client.ring.statistics().slots_in_use == 0)
    assert engine.client.ring.statistics().in_place == 2


@pytest.mark.parametrize("usage_asked", [False, True])
async def test_an_answer_comes_in_events(open_core: Any, open_app: OpenApp, chat_of: Any, usage_asked: bool) -> None:
    http = await open_app(await open_core({"tokens": 3}))
    options = {"stream_options": {"include_usage": True}} if usage_asked else {}
    response = await http.post("/v1/chat/completions", json=chat_of(PIXELS[0], stream=True, **options))
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert (response.headers["cache-control"], response.headers["x-accel-buffering"]) == ("no-cache", "no")
    assert response.headers["x-shmring-synthetic"] == "true"
    assert "content-length" not in response.headers
    *chunks, done = events_of(response.text)
    assert done == "[DONE]"
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


async def test_the_engine_gets_the_callers_parameters(open_engine: Any, open_app: OpenApp, chat_of: Any) -> None:
    requests: list[GenerateRequest] = []

    async def note(claim: shmring.Claim) -> None:
        request: GenerateRequest = claim.payload
        assert [medium.pixels.sum() for medium in request.media] == [pixels.sum() for pixels in PIXELS]
        request.media = []
        requests.append(request)
        await claim.reply(GenerateReply("yes", [1], 1, 1, "stop"))

    http = await open_app(await open_engine(note, GENERATING))
    body = chat_of(*PIXELS, seed=5, stop=["a", "b"], temperature=0, top_p=0.5, max_completion_tokens=9, priority=2)
    body["messages"].insert(0, {"role": "developer", "content": "Be brief."})
    response = await http.post("/v1/chat/completions", json=body | {"max_tokens": 1, "ignore_eos": True})
    assert response.json()["choices"][0]["finish_reason"] == "stop"
    [request] = requests
    sampling = request.sampling
    assert (sampling.seed, sampling.stop, sampling.temperature, sampling.top_p) == (5, ["a", "b"], 0, 0.5)
    assert (sampling.max_tokens, sampling.ignore_eos, request.priority) == (9, True, 2)
    assert request.deadline is not None
    first, second = request.messages
    assert (first.role, first.parts) == ("developer", [TextPart("Be brief.")])
    assert (second.role, second.parts) == ("user", [TextPart("What is this?"), MediumPart(0), MediumPart(1)])


async def test_a_model_that_does_not_generate_says_so(open_engine: Any, open_app: OpenApp, chat_of: Any) -> None:
    http = await open_app(await open_engine())
    response = await http.post("/v1/chat/completions", json=chat_of(model="shmring-fingerprints"))
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "unsupported_task"
    assert "does not do chat completions, it does embeddings" in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("raised", "status", "code"),
    [(ValueError("too long"), 400, "rejected_by_engine"), (RuntimeError("broke"), 500, "engine_error")],
)
async def test_what_fails_before_the_first_piece_has_a_status(
    open_engine: Any, open_app: OpenApp, chat_of: Any, raised: Exception, status: int, code: str, stream: bool
) -> None:
    async def fail(claim: shmring.Claim) -> None:
        raise raised

    http = await open_app(await open_engine(fail, GENERATING))
    response = await http.post("/v1/chat/completions", json=chat_of(PIXELS[0], stream=stream))
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)


@pytest.mark.parametrize("pieces", [0, 1])
async def test_an_answer_without_an_end_is_an_error(open_engine: Any, open_app: OpenApp, chat_of: Any, pieces: int) -> None:
    async def stop_short(claim: shmring.Claim) -> None:
        for _ in range(pieces):
            await claim.reply(GenerateReply("and then", [1], 1, 1))
        claim.done()

    http = await open_app(await open_engine(stop_short, GENERATING))
    response = await http.post("/v1/chat/completions", json=chat_of())
    assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_error")


async def test_the_times_of_an_answer_are_counted(open_core: Any, open_app: OpenApp, chat_of: Any) -> None:
    http = await open_app(await open_core())
    for media, stream in (([PIXELS[0]], True), ([PIXELS[0]], False), ([], True), ([], False)):
        response = await http.post("/v1/chat/completions", json=chat_of(*media, stream=stream, max_tokens=5))
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


async def test_what_fails_on_the_way_is_the_last_event(
    open_engine: Any, open_app: OpenApp, chat_of: Any, eventually: Any
) -> None:
    async def break_off(claim: shmring.Claim) -> None:
        await claim.reply(GenerateReply("so far", [1], 1, 1))
        await eventually(lambda: engine.client.ring.statistics().replies == 1)  # an error overtakes what was not taken yet
        raise RuntimeError("the executor broke")

    engine = await open_engine(break_off, GENERATING)
    http = await open_app(engine)
    response = await http.post("/v1/chat/completions", json=chat_of(PIXELS[0], stream=True))
    *_, so_far, last = events_of(response.text)
    assert so_far["choices"][0]["delta"] == {"content": "so far"}
    assert last["error"]["code"] == "engine_error"
    assert "the executor broke" in last["error"]["message"]
    numbers = (await http.get("/metrics")).text
    assert 'shmring_http_broken_streams_total{code="engine_error"} 1.0' in numbers
    assert 'shmring_request_failure_total{reason="engine_error",route="/v1/chat/completions"} 1.0' in numbers
    await eventually(lambda: engine.client.ring.statistics().slots_in_use == 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_deadline_is_of_all_of_it(
    open_core: Any, open_app: OpenApp, chat_of: Any, stream: bool, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a stream, the time is over when it has begun: not by a clock, or a busy machine would let it pass before that."""
    begin = Inference.begin

    async def begin_in_time(service: Inference, form: Any, request: Any, admitted: Admitted, request_id: str) -> Any:
        answer = await begin(service, form, request, admitted, request_id)
        admitted.deadline = asyncio.get_running_loop().time()
        return answer

    if stream:
        monkeypatch.setattr(Inference, "begin", begin_in_time)
    engine = await open_core({"step_s": 0.02})
    http = await open_app(engine, request_timeout_s=600 if stream else 0.3)
    response = await http.post("/v1/chat/completions", json=chat_of(PIXELS[0], stream=stream, max_tokens=10_000))
    if stream:
        assert response.status_code == 200
        assert events_of(response.text)[-1]["error"]["code"] == "request_timeout"
    else:
        assert (response.status_code, response.json()["error"]["code"]) == (504, "request_timeout")
    await eventually(lambda: engine.core._scheduler.running == 0)
    assert engine.client.ring.statistics().in_flight == 0


async def test_the_deadline_counts_waiting_for_a_turn_and_a_slot(open_core: Any, open_app: OpenApp, chat_of: Any) -> None:
    engine = await open_core(slab_nbytes="1MiB")
    http = await open_app(engine, request_timeout_s=0.1, max_concurrent_media=1)
    picture = np.zeros((300, 300, 3), np.uint8)
    async with engine.client.ring.slot(engine.ring.statistics().leasable_nbytes - (128 << 10)):
        both = await asyncio.gather(*(http.post("/v1/chat/completions", json=chat_of(picture)) for _ in range(2)))
    assert [response.status_code for response in both] == [504, 504]


async def test_a_stream_holds_neither_turn_nor_slot(open_core: Any, open_server: Any, chat_of: Any, eventually: Any) -> None:
    """Also while the engine goes on: its media were for the first step."""
    engine = await open_core({"step_s": 0.005})
    url = await open_server(engine, max_concurrent_media=1)
    async with httpx.AsyncClient(base_url=url, timeout=30) as http:
        body = chat_of(PIXELS[0], stream=True, max_tokens=100_000)
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            pieces = response.aiter_text()
            await anext(pieces)
            await eventually(lambda: engine.client.ring.statistics().slots_in_use == 0)
            assert engine.client.ring.statistics().in_flight == 1
            assert (await http.post("/v1/chat/completions", json=chat_of(PIXELS[1], max_tokens=2))).status_code == 200
            assert engine.client.ring.statistics().in_flight == 1  # the first one still goes on


@pytest.mark.parametrize("stream", [False, True])
async def test_hanging_up_ends_the_request_in_the_engine(
    open_core: Any, open_server: Any, chat_of: Any, eventually: Any, stream: bool
) -> None:
    engine = await open_core({"step_s": 0.005})
    url = await open_server(engine)
    body = msgspec.json.encode(chat_of(PIXELS[0], stream=stream, max_tokens=100_000))
    _, _, port = url.rpartition(":")
    reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        % len(body)
        + body
    )
    if stream:
        assert b"token2" in await reader.readuntil(b"token2")
    await eventually(lambda: engine.core._scheduler.running == 1)
    writer.close()
    await eventually(lambda: engine.core._scheduler.running == 0)
    await eventually(
        lambda: engine.client.ring.statistics().slots_in_use == 0 and not engine.client.ring.statistics().in_flight
    )
    assert engine.ring.statistics().slots_in_use == 0


async def test_while_the_engine_is_paused_requests_wait(
    open_core: Any, open_app: OpenApp, chat_of: Any, eventually: Any
) -> None:
    engine = await open_core()
    http = await open_app(engine)
    assert (await http.get("/ready")).status_code == 200
    await engine.client.pause_generation()
    request = asyncio.create_task(http.post("/v1/chat/completions", json=chat_of(PIXELS[0], max_tokens=2)))
    await eventually(lambda: engine.core._scheduler.waiting == 1)
    ready = await http.get("/ready")
    assert (ready.status_code, ready.json()["error"]["code"]) == (503, "paused")
    assert (await http.get("/health")).json()["engine"] == "paused"
    assert not request.done()
    await engine.client.resume_generation()
    assert (await request).status_code == 200
    assert (await http.get("/ready")).status_code == 200


async def test_pausing_gives_up_what_runs(open_core: Any, open_app: OpenApp, chat_of: Any, eventually: Any) -> None:
    engine = await open_core({"step_s": 0.005})
    http = await open_app(engine)
    request = asyncio.create_task(http.post("/v1/chat/completions", json=chat_of(max_tokens=100_000)))
    await eventually(lambda: engine.core._scheduler.running == 1)
    await engine.client.pause_generation()
    response = await request
    assert (response.status_code, response.json()["error"]["code"]) == (503, "paused")
    assert response.headers["retry-after"] == "1"


async def test_a_full_engine_is_a_503(open_core: Any, open_app: OpenApp, chat_of: Any, eventually: Any) -> None:
    engine = await open_core({"step_s": 0.005}, scheduler_config=SchedulerConfig(max_num_seqs=1, max_waiting=1))
    http = await open_app(engine)
    running = asyncio.create_task(http.post("/v1/chat/completions", json=chat_of(max_tokens=100_000)))
    await eventually(lambda: engine.core._scheduler.running == 1)
    waiting = asyncio.create_task(http.post("/v1/chat/completions", json=chat_of(max_tokens=1)))
    await eventually(lambda: engine.core._scheduler.waiting == 1)
    response = await http.post("/v1/chat/completions", json=chat_of(max_tokens=1))
    assert (response.status_code, response.json()["error"]["code"]) == (503, "overloaded")
    for task in (running, waiting):
        task.cancel()
    await asyncio.wait([running, waiting])


async def test_media_can_be_copied_instead_of_being_decoded_in_place(open_core: Any, open_app: OpenApp, chat_of: Any) -> None:
    engine = await open_core()
    http = await open_app(engine, disable_mm_shm=True)
    response = await http.post("/v1/chat/completions", json=chat_of(*PIXELS, max_tokens=1))
    assert response.status_code == 200, response.text  # the executor has checked what arrived
    assert engine.client.ring.statistics().in_place == 0
    assert engine.client.ring.statistics().copied_nbytes >= int(response.headers["x-shmring-slab-bytes"]) > 0


async def test_stop_texts_are_bounded(open_core: Any, open_app: Any) -> None:
    http = await open_app(await open_core())
    body = {"model": "shmring-synthetic", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    for stop in (["x"] * 16, "x" * 1024, [], None):
        response = await http.post("/v1/chat/completions", json=body | {"stop": stop})
        assert response.status_code == 200, response.text
    for stop in (["x"] * 17, "x" * 1025, ["x" * 1025], [""], ""):
        response = await http.post("/v1/chat/completions", json=body | {"stop": stop})
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"].partition("[")[0]) == (400, "invalid_value", "stop")
