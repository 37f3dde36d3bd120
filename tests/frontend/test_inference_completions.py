"""Completions and tokens over HTTP, with the real engine core or a small handler: what the engine is sent and answers.

What is refused: test_refused_bodies.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

import shmring
from shmring.engine.protocol import ChatMessage, GenerateReply, GenerateRequest, SamplingParams, TextPart
from shmring.frontend.served_model import ServedModel
from tests.frontend.talking import MODEL as MODEL_OF_ALL
from tests.frontend.talking import OpenTalk, Talk, alone, data_events
from tests.tables import for_each
from tests.waiting import eventually

OpenApp = Callable[..., Awaitable[httpx.AsyncClient]]

PATH, MODEL = "/v1/completions", "shmring-synthetic"
BODY = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 3}
ASKED: dict[str, Any] = {"model": "m", "prompt": "a", "max_tokens": 3}  # of a small handler
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture
async def http(open_core: Any, open_app: OpenApp) -> httpx.AsyncClient:
    return await open_app(await open_core())


async def test_a_prompt_is_gone_on_from(http: httpx.AsyncClient) -> None:
    response = await http.post(PATH, json=BODY)
    body = response.json()
    assert body.pop("id").startswith("cmpl-")
    assert abs(body.pop("created") - time.time()) < 600
    assert body == {
        "object": "text_completion",
        "model": MODEL,
        "choices": [{"text": "[synthetic] token2 token3", "finish_reason": "length", "index": 0, "logprobs": None}],
        "usage": {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7},
    }
    assert response.headers["x-shmring-synthetic"] == "true"
    [choice] = (await http.post(PATH, json=BODY | {"stop": [" token3"]})).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("[synthetic] token2", "stop")
    without_max_tokens = (await http.post(PATH, json={"model": MODEL, "prompt": [1, 2, 3]})).json()
    assert without_max_tokens["usage"] == {"prompt_tokens": 3, "completion_tokens": 16, "total_tokens": 19}, "as in the API"


async def test_a_stream_has_no_opening_and_tells_its_usage(http: httpx.AsyncClient) -> None:
    *chunks, usage = data_events((await http.post(PATH, json=BODY | USAGE)).text)
    assert {(event["object"], event["id"]) for event in (*chunks, usage)} == {("text_completion", usage["id"])}
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 7)
    assert {chunk["usage"] for chunk in chunks} == {None}
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == "[synthetic] token2 token3"
    assert choices[0]["text"]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]


@pytest.fixture
async def talk(open_talk: OpenTalk) -> Talk:
    return await open_talk()


@for_each(("given", "prompt"), [("a", "a"), (["a"], "a"), ([5, 6], [5, 6]), ([[5, 6]], [5, 6])])
async def test_the_engine_gets_the_prompt(talk: Talk, given: Any, prompt: Any) -> None:
    await talk.ask(PATH, ASKED | {"prompt": given, "seed": 4, "priority": 3, "add_special_tokens": False})
    sampling = SamplingParams(max_tokens=3, seed=4)
    expected = GenerateRequest(prompt=prompt, add_special_tokens=False, sampling=sampling, priority=3, stream=False)
    assert alone(talk.requests.pop()) == expected


async def echo(claim: shmring.Claim) -> None:
    request: GenerateRequest = claim.payload
    name = request.prompt if isinstance(request.prompt, str) else "tokens"
    for piece in range(2):
        for index in range(request.sampling.n):
            reply = GenerateReply(f"{name}{index}.{piece} ", [piece], 10, piece + 1, "stop" if piece else None, index=index)
            await claim.reply(reply)


SEVERAL = ASKED | {"prompt": ["a", [1, 2], "c"], "n": 2}
ECHOED = [f"{name}{index}.0 {name}{index}.1 " for name in ("a", "tokens", "c") for index in range(2)]


async def test_several_prompts_are_answered_by_index(open_talk: OpenTalk) -> None:
    talk = await open_talk(echo)
    answer = await talk.ask(PATH, SEVERAL)
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == list(enumerate(ECHOED))
    assert answer["usage"] == {"prompt_tokens": 30, "completion_tokens": 12, "total_tokens": 42}
    *events, usage = data_events(await talk.ask(PATH, SEVERAL, **USAGE))
    assert usage["usage"] == answer["usage"]
    choices = [event["choices"][0] for event in events]
    texts = ["".join(choice["text"] for choice in choices if choice["index"] == index) for index in range(6)]
    assert texts == ECHOED
    assert sorted(choice["index"] for choice in choices if choice["finish_reason"]) == list(range(6))


async def test_one_prompt_that_fails_ends_all(open_talk: OpenTalk) -> None:
    async def fail(claim: shmring.Claim) -> None:
        if claim.payload.prompt == "b":
            raise ValueError("not this one")
        await claim.reply(GenerateReply("x", [1], 1, 1))
        await asyncio.Event().wait()

    talk = await open_talk(fail)
    assert await talk.refusal(PATH, ASKED, prompt=["a", "b", "c"]) == (400, "rejected_by_engine", None)
    await eventually(lambda: talk.engine.ring.statistics().running == 0)


async def test_prompts_of_one_request_do_not_take_the_engine_from_others(open_talk: OpenTalk) -> None:
    at_once: list[int] = []

    async def count(claim: shmring.Claim) -> None:
        at_once.append(talk.engine.ring.statistics().running)
        await asyncio.sleep(0)
        await claim.reply(GenerateReply("x", [1], 1, 1, "stop"))

    talk = await open_talk(count)
    answer = await talk.ask(PATH, ASKED, prompt=["a"] * 128)
    assert [choice["index"] for choice in answer["choices"]] == list(range(128))
    assert len(at_once) == 128
    assert max(at_once) <= 8


async def test_who_hangs_up_aborts_all_prompts(open_engine: Any, open_server: Any) -> None:
    async def go_on(claim: shmring.Claim) -> None:
        await claim.reply(GenerateReply("x", [1], 1, 1))
        await asyncio.Event().wait()

    engine = await open_engine(go_on, MODEL_OF_ALL)
    url = await open_server(engine)
    async with (
        httpx.AsyncClient(timeout=30) as http,
        http.stream("POST", f"{url}{PATH}", json=ASKED | {"prompt": ["a"] * 20, "stream": True}) as response,
    ):
        async for _ in response.aiter_lines():
            break
        await eventually(lambda: engine.ring.statistics().running == 8)
    await eventually(lambda: engine.ring.statistics().running == 0)
    assert engine.ring.statistics().submitted == 8


# -- tokens -------------------------------------------------------------------------------------------------------------


async def test_tokens_are_asked_of_the_engine(open_talk: OpenTalk) -> None:
    async def tokenize(claim: shmring.Claim) -> None:
        is_text = isinstance(claim.payload.prompt, list)
        await claim.reply(GenerateReply("Hi", [], 0, 0, "stop") if is_text else GenerateReply("", [7, 8, 9], 3, 0, "stop"))

    talk = await open_talk(tokenize)
    tokens = {"tokens": [7, 8, 9], "count": 3, "max_model_len": 99, "token_strs": None}
    assert await talk.ask("/tokenize", {"model": "m", "prompt": "Hi", "add_special_tokens": False}) == tokens
    assert await talk.ask("/tokenize", {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}) == tokens
    assert await talk.ask("/detokenize", {"model": "m", "tokens": [7, 8, 9]}) == {"prompt": "Hi"}
    assert [alone(request) for request in talk.requests] == [
        GenerateRequest(prompt="Hi", add_special_tokens=False, tokenize=True),
        GenerateRequest([ChatMessage("user", [TextPart("Hi")])], tokenize=True),
        GenerateRequest(prompt=[7, 8, 9], tokenize=True),
    ]


@pytest.mark.parametrize(("path", "fields"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})])
async def test_tokens_that_do_not_come_in_time_are_given_up(
    open_talk: OpenTalk, path: str, fields: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where what takes long is not the engine's answer: its description is asked for first."""

    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(ServedModel, "check", never)
    talk = await open_talk(request_timeout_s=0.05)
    assert await talk.refusal(path, {"model": "m"}, **fields) == (504, "request_timeout", None)


# -- load and health -----------------------------------------------------------------------------------------------------


async def test_the_load_is_the_requests_in_the_engine(open_core: Any, open_app: OpenApp) -> None:
    engine = await open_core()
    http = await open_app(engine)
    assert (await http.get("/load")).json() == {"server_load": 0}
    await engine.client.pause_generation()
    waiting = [asyncio.create_task(http.post(PATH, json=BODY)) for _ in range(3)]

    async def load() -> int:
        number: int = (await http.get("/load")).json()["server_load"]
        return number

    while await load() < 3:
        await asyncio.sleep(0)
    await engine.client.resume_generation()
    assert {response.status_code for response in await asyncio.gather(*waiting)} == {200}
    while await load():
        await asyncio.sleep(0)


async def test_without_an_engine_there_is_no_load(open_core: Any, open_app: OpenApp) -> None:
    """A server without an engine is not the least loaded one."""
    engine = await open_core()
    http = await open_app(engine)
    await engine.core.ring.close()
    await eventually(lambda: not any(each.connected for each in engine.client.engines.values()))
    assert (await http.get("/load")).status_code == 503


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_ping_is_health(open_core: Any, open_app: OpenApp, method: str) -> None:
    http = await open_app(await open_core())
    assert (await http.request(method, "/ping")).json() == (await http.get("/health")).json()
