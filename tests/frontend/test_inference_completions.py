"""Completions and tokens over HTTP, with the real engine core or a small handler: what the engine is sent and answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import msgspec
import pytest

import shmring
from shmring.engine.protocol import CAPABILITIES, GenerateReply, GenerateRequest, InputSpec, ModelDescription
from shmring.frontend.served_model import ServedModel
from tests.tables import for_each

OpenApp = Callable[..., Awaitable[httpx.AsyncClient]]

MODEL = "shmring-synthetic"
BODY = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 3}
TALKING = ModelDescription("test", MODEL, ["generate", "complete", "tokenize"], InputSpec(), 8, max_model_len=99)


@pytest.fixture
async def http(open_core: Any, open_app: OpenApp) -> httpx.AsyncClient:
    return await open_app(await open_core())


@pytest.fixture
async def talking(open_engine: Any, open_app: OpenApp) -> httpx.AsyncClient:
    return await open_app(await open_engine(description=TALKING))


async def test_a_prompt_is_gone_on_from(open_core: Any, open_app: OpenApp) -> None:
    http = await open_app(await open_core())
    response = await http.post("/v1/completions", json=BODY)
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["id"].startswith("cmpl-")
    assert (body["object"], body["model"]) == ("text_completion", MODEL)
    assert body["choices"] == [{"text": "[synthetic] token2 token3", "finish_reason": "length", "index": 0, "logprobs": None}]
    assert body["usage"] == {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}
    assert response.headers["x-shmring-synthetic"] == "true"


async def test_without_max_tokens_there_are_sixteen_as_in_the_api(open_core: Any, open_app: OpenApp) -> None:
    http = await open_app(await open_core())
    response = await http.post("/v1/completions", json={"model": MODEL, "prompt": [1, 2, 3]})
    assert response.json()["usage"] == {"prompt_tokens": 3, "completion_tokens": 16, "total_tokens": 19}


async def test_a_stream_has_no_opening_and_tells_its_usage(open_core: Any, open_app: OpenApp) -> None:
    http = await open_app(await open_core())
    response = await http.post("/v1/completions", json=BODY | {"stream": True, "stream_options": {"include_usage": True}})
    *parts, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    events = [json.loads(part.removeprefix("data: ")) for part in parts]
    assert {(event["object"], event["id"]) for event in events} == {("text_completion", events[0]["id"])}
    *chunks, usage = events
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 7)
    assert {chunk["usage"] for chunk in chunks} == {None}
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == "[synthetic] token2 token3"
    assert choices[0]["text"]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]


async def test_a_stop_text_ends_it(open_core: Any, open_app: OpenApp) -> None:
    http = await open_app(await open_core())
    [choice] = (await http.post("/v1/completions", json=BODY | {"stop": [" token3"]})).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("[synthetic] token2", "stop")


@pytest.mark.parametrize(("given", "prompt"), [("a", "a"), (["a"], "a"), ([5, 6], [5, 6]), ([[5, 6]], [5, 6])])
async def test_the_engine_gets_the_prompt(open_engine: Any, open_app: OpenApp, given: Any, prompt: Any) -> None:
    requests: list[GenerateRequest] = []

    async def note(claim: shmring.Claim) -> None:
        requests.append(claim.payload)
        await claim.reply(GenerateReply("yes", [1], 1, 1, "stop"))

    http = await open_app(await open_engine(note, TALKING))
    body = BODY | {"prompt": given, "seed": 4, "priority": 3, "add_special_tokens": False}
    assert (await http.post("/v1/completions", json=body)).status_code == 200
    [request] = requests
    assert (request.prompt, request.messages, request.tokenize) == (prompt, [], False)
    assert (request.add_special_tokens, request.sampling.seed, request.priority) == (False, 4, 3)


@for_each(
    ("prompt", "code"),
    [
        (["a"] * 129, "too_many_prompts"),
        (["a", ""], "invalid_value"),
        (["a", 1], "invalid_value"),
        ([[1], []], "invalid_value"),
        (["x" * (3 << 20)] * 2, "text_too_long"),
        ("", "invalid_value"),
        ([[]], "invalid_value"),
        ([1, "a"], "invalid_value"),
        ([-1], "invalid_value"),
        ([], "invalid_value"),
        (None, "invalid_value"),
        ({}, "invalid_value"),
    ],
)
async def test_a_prompt_that_is_none_is_refused(http: httpx.AsyncClient, prompt: Any, code: str) -> None:
    response = await http.post("/v1/completions", json=BODY | {"prompt": prompt})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, code)
    assert error["param"].startswith("prompt")


async def echo(claim: shmring.Claim) -> None:
    request: GenerateRequest = claim.payload
    name = request.prompt if isinstance(request.prompt, str) else "tokens"
    for piece in range(2):
        for index in range(request.sampling.n):
            reply = GenerateReply(f"{name}{index}.{piece} ", [piece], 10, piece + 1, "stop" if piece else None, index=index)
            await claim.reply(reply)


SEVERAL = BODY | {"prompt": ["a", [1, 2], "c"], "n": 2}
ECHOED = [f"{name}{index}.0 {name}{index}.1 " for name in ("a", "tokens", "c") for index in range(2)]


async def test_several_prompts_are_answered_by_index(open_engine: Any, open_app: OpenApp) -> None:
    http = await open_app(await open_engine(echo, msgspec.structs.replace(TALKING, capabilities=list(CAPABILITIES))))
    answer = (await http.post("/v1/completions", json=SEVERAL)).json()
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == list(enumerate(ECHOED))
    assert answer["usage"] == {"prompt_tokens": 30, "completion_tokens": 12, "total_tokens": 42}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    response = await http.post("/v1/completions", json=SEVERAL | options)
    *parts, usage, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert json.loads(usage.removeprefix("data: "))["usage"] == answer["usage"]
    choices = [json.loads(part.removeprefix("data: "))["choices"][0] for part in parts]
    texts = ["".join(choice["text"] for choice in choices if choice["index"] == index) for index in range(6)]
    assert texts == ECHOED
    assert sorted(choice["index"] for choice in choices if choice["finish_reason"]) == list(range(6))


async def test_one_prompt_that_fails_ends_all(open_engine: Any, open_app: OpenApp, eventually: Any) -> None:
    async def fail(claim: shmring.Claim) -> None:
        if claim.payload.prompt == "b":
            raise ValueError("not this one")
        await claim.reply(GenerateReply("x", [1], 1, 1))
        await asyncio.Event().wait()

    engine = await open_engine(fail, TALKING)
    http = await open_app(engine)
    response = await http.post("/v1/completions", json=BODY | {"prompt": ["a", "b", "c"]})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "rejected_by_engine")
    await eventually(lambda: engine.ring.statistics().running == 0)


async def test_prompts_of_one_request_do_not_take_the_engine_from_others(open_engine: Any, open_app: OpenApp) -> None:
    at_once: list[int] = []

    async def count(claim: shmring.Claim) -> None:
        at_once.append(engine.ring.statistics().running)
        await asyncio.sleep(0)
        await claim.reply(GenerateReply("x", [1], 1, 1, "stop"))

    engine = await open_engine(count, TALKING)
    http = await open_app(engine)
    answer = (await http.post("/v1/completions", json=BODY | {"prompt": ["a"] * 128})).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(128))
    assert len(at_once) == 128
    assert max(at_once) <= 8


async def test_who_hangs_up_aborts_all_prompts(open_engine: Any, open_server: Any, eventually: Any) -> None:
    async def go_on(claim: shmring.Claim) -> None:
        await claim.reply(GenerateReply("x", [1], 1, 1))
        await asyncio.Event().wait()

    engine = await open_engine(go_on, TALKING)
    url = await open_server(engine)
    async with (
        httpx.AsyncClient(timeout=30) as http,
        http.stream("POST", f"{url}/v1/completions", json=BODY | {"prompt": ["a"] * 20, "stream": True}) as response,
    ):
        async for _ in response.aiter_lines():
            break
        await eventually(lambda: engine.ring.statistics().running == 8)
    await eventually(lambda: engine.ring.statistics().running == 0)
    assert engine.ring.statistics().submitted == 8


@pytest.mark.parametrize(
    ("path", "fields"),
    [("/v1/completions", {"prompt": "a"}), ("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})],
)
async def test_a_model_that_can_not_is_named(open_engine: Any, open_app: OpenApp, path: str, fields: Any) -> None:
    http = await open_app(await open_engine())
    response = await http.post(path, json={"model": "shmring-fingerprints", **fields})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "unsupported_task")


# -- tokens -------------------------------------------------------------------------------------------------------------


async def test_tokens_are_asked_of_the_engine(open_engine: Any, open_app: OpenApp) -> None:
    requests: list[GenerateRequest] = []

    async def tokenize(claim: shmring.Claim) -> None:
        requests.append(claim.payload)
        is_text = isinstance(claim.payload.prompt, list)
        await claim.reply(GenerateReply("Hi", [], 0, 0, "stop") if is_text else GenerateReply("", [7, 8, 9], 3, 0, "stop"))

    http = await open_app(await open_engine(tokenize, TALKING))
    tokens = await http.post("/tokenize", json={"model": MODEL, "prompt": "Hi", "add_special_tokens": False})
    assert tokens.json() == {"tokens": [7, 8, 9], "count": 3, "max_model_len": 99, "token_strs": None}
    await http.post("/tokenize", json={"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]})
    text = await http.post("/detokenize", json={"model": MODEL, "tokens": [7, 8, 9]})
    assert text.json() == {"prompt": "Hi"}
    prompt, conversation, back = requests
    assert all(request.tokenize for request in requests)
    assert (prompt.prompt, prompt.add_special_tokens, back.prompt) == ("Hi", False, [7, 8, 9])
    assert [message.role for message in conversation.messages] == ["user"]


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@for_each(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ({"messages": [{"role": "user", "content": [PICTURE]}]}, "messages[0].content[0].image_url"),
        ({"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True}, "add_special_tokens"),
    ],
)
async def test_what_can_not_be_tokenised_is_refused(talking: httpx.AsyncClient, fields: Any, param: str) -> None:
    response = await talking.post("/tokenize", json={"model": MODEL, **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


@pytest.mark.parametrize(("path", "fields"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})])
async def test_tokens_that_do_not_come_in_time_are_given_up(
    open_engine: Any, open_app: OpenApp, path: str, fields: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where what takes long is not the engine's answer: its description is asked for first."""

    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(ServedModel, "check", never)
    http = await open_app(await open_engine(description=TALKING), request_timeout_s=0.05)
    response = await http.post(path, json={"model": MODEL, **fields})
    assert (response.status_code, response.json()["error"]["code"]) == (504, "request_timeout")


# -- names and load -----------------------------------------------------------------------------------------------------


async def test_a_model_may_have_several_names(open_core: Any, open_app: OpenApp) -> None:
    http = await open_app(await open_core(), served_model_name=("one", "another"))
    assert [model["id"] for model in (await http.get("/v1/models")).json()["data"]] == ["one", "another"]
    for name in ("one", "another"):
        assert (await http.get(f"/v1/models/{name}")).json()["id"] == name
        assert (await http.post("/v1/completions", json=BODY | {"model": name})).json()["model"] == name
    response = await http.post("/v1/completions", json=BODY)
    assert response.status_code == 404
    assert "'one', 'another'" in response.json()["error"]["message"]


async def test_the_load_is_the_requests_in_the_engine(open_core: Any, open_app: OpenApp, eventually: Any) -> None:
    engine = await open_core()
    http = await open_app(engine)
    assert (await http.get("/load")).json() == {"server_load": 0}
    await engine.client.pause_generation()
    waiting = [asyncio.create_task(http.post("/v1/completions", json=BODY)) for _ in range(3)]

    async def load() -> int:
        number: int = (await http.get("/load")).json()["server_load"]
        return number

    while await load() < 3:
        await asyncio.sleep(0)
    await engine.client.resume_generation()
    assert {response.status_code for response in await asyncio.gather(*waiting)} == {200}
    while await load():
        await asyncio.sleep(0)


async def test_without_an_engine_there_is_no_load(open_core: Any, open_app: OpenApp, eventually: Any) -> None:
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
