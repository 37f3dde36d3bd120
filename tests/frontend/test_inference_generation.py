"""Several answers to a request, and how likely their tokens were, over HTTP, with a small handler as engine."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

import shmring
from shmring.engine.protocol import CAPABILITIES, GenerateReply, InputSpec, ModelDescription, TokenLogprobs
from shmring.frontend import inference
from tests.tables import for_each

OpenApp = Callable[..., Awaitable[httpx.AsyncClient]]

TALKING = ModelDescription("test", "m", ["generate", "complete"], InputSpec(), 8, capabilities=list(CAPABILITIES))
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"model": "m", "prompt": "Hi"}
PATHS = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}


async def three(claim: shmring.Claim) -> None:
    """Three answers at the same time, of which the first one ends first."""
    for index in (0, 1, 2):
        await claim.reply(GenerateReply(f"a{index}", [1], 5, 1, index=index))
    await claim.reply(GenerateReply("!", [2], 5, 2, "stop"))
    for index in (2, 1):
        await claim.reply(GenerateReply(f"b{index}", [3, 4], 5, 3, "length", index=index))


PARTS = [(b"\xf0\x9f", -1.5), (b"\xf0\x9f\x99", -2.0), ("\ufffd".encode(), -2.5), ("Hé".encode(), -3.0)]
TOKENS = [TokenLogprobs("Hé".encode(), -0.5, [("Hé".encode(), -0.5), *PARTS]), TokenLogprobs(b"x", -9999.0, [(b"y", -0.25)])]


async def likely(claim: shmring.Claim) -> None:
    await claim.reply(GenerateReply("H", [1], 5, 1, logprobs=TOKENS[:1]))  # the rest may become a stop text
    await claim.reply(GenerateReply("éx", [2], 5, 2, "stop", logprobs=TOKENS[1:]))


def events_of(response: httpx.Response) -> list[Any]:
    *parts, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def text_of(choice: Any) -> str:
    return choice["text"] if "text" in choice else (choice.get("message") or choice["delta"]).get("content") or ""


@pytest.mark.parametrize("path", list(PATHS))
async def test_a_request_has_several_answers(open_engine: Any, open_app: OpenApp, path: str) -> None:
    http = await open_app(await open_engine(three, TALKING))
    whole = (await http.post(path, json=PATHS[path] | {"n": 3})).json()
    found = [(choice["index"], text_of(choice), choice["finish_reason"]) for choice in whole["choices"]]
    assert found == [(0, "a0!", "stop"), (1, "a1b1", "length"), (2, "a2b2", "length")]
    assert whole["usage"] == {"prompt_tokens": 5, "completion_tokens": 8, "total_tokens": 13}


@pytest.mark.parametrize("path", list(PATHS))
async def test_a_stream_has_several_answers(open_engine: Any, open_app: OpenApp, path: str) -> None:
    http = await open_app(await open_engine(three, TALKING))
    fields = {"n": 3, "stream": True, "stream_options": {"include_usage": True}}
    *events, last = events_of(await http.post(path, json=PATHS[path] | fields))
    choices = [event["choices"][0] for event in events]
    for index, (text, reason) in enumerate([("a0!", "stop"), ("a1b1", "length"), ("a2b2", "length")]):
        mine = [choice for choice in choices if choice["index"] == index]
        assert "".join(map(text_of, mine)) == text
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + [reason]
    assert last["usage"] == {"prompt_tokens": 5, "completion_tokens": 8, "total_tokens": 13}
    roles = [choice["index"] for choice in choices if choice.get("delta", {}).get("role")]
    assert roles == ([0, 1, 2] if "chat" in path else [])


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_missing_or_too_many_is_the_engines_fault(
    open_engine: Any, open_app: OpenApp, stream: bool
) -> None:
    http = await open_app(await open_engine(three, TALKING))
    for n in (2, 4):
        response = await http.post("/v1/chat/completions", json=CHAT | {"n": n, "stream": stream})
        assert (response.status_code == 500) != stream
        assert '"engine_error"' in response.text
        assert "[DONE]" not in response.text


async def test_how_likely_tokens_of_a_chat_were(open_engine: Any, open_app: OpenApp) -> None:
    http = await open_app(await open_engine(likely, TALKING))
    body = CHAT | {"logprobs": True, "top_logprobs": 2}
    [choice] = (await http.post("/v1/chat/completions", json=body)).json()["choices"]
    expected = [
        {
            "token": "Hé",
            "logprob": -0.5,
            "bytes": [72, 195, 169],
            "top_logprobs": [
                {"token": "Hé", "logprob": -0.5, "bytes": [72, 195, 169]},
                {"token": "\ufffd", "logprob": -1.5, "bytes": [0xF0, 0x9F]},
                {"token": "\ufffd", "logprob": -2.0, "bytes": [0xF0, 0x9F, 0x99]},
                {"token": "\ufffd", "logprob": -2.5, "bytes": [0xEF, 0xBF, 0xBD]},
                {"token": "Hé", "logprob": -3.0, "bytes": [72, 195, 169]},
            ],
        },
        {
            "token": "x",
            "logprob": -9999.0,
            "bytes": [120],
            "top_logprobs": [{"token": "y", "logprob": -0.25, "bytes": [121]}],
        },
    ]
    assert choice["logprobs"] == {"content": expected}
    events = events_of(await http.post("/v1/chat/completions", json=body | {"stream": True}))
    streamed = [event["choices"][0]["logprobs"] for event in events]
    assert [entry for part in streamed if part for entry in part["content"]] == expected


async def test_parts_of_characters_are_told_by_their_bytes(open_engine: Any, open_app: OpenApp) -> None:
    """Callers join them; the types are those of OpenAI's client."""
    text = "é🙂x"
    pieces = ["é".encode(), b"\xf0\x9f", b"\x99\x82", b"x"]

    async def say(claim: shmring.Claim) -> None:
        tokens = [TokenLogprobs(piece, -0.5, [(piece, -0.5)]) for piece in pieces]
        await claim.reply(GenerateReply(text, [1, 2, 3, 4], 5, 4, "stop", logprobs=tokens))

    http = await open_app(await open_engine(say, TALKING))
    answer = (await http.post("/v1/chat/completions", json=CHAT | {"logprobs": True, "top_logprobs": 1})).json()
    [choice] = ChatCompletion.model_validate(answer).choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert b"".join(bytes(token.bytes or []) for token in choice.logprobs.content).decode() == text
    completion = Completion.model_validate((await http.post("/v1/completions", json=COMPLETION | {"logprobs": 1})).json())
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["é", r"bytes:\xf0\x9f", r"bytes:\x99\x82", "x"]
    assert [list(top) for top in logprobs.top_logprobs or []] == [[token] for token in logprobs.tokens]
    assert logprobs.text_offset == [0, 1, 2, 2]


async def test_how_likely_tokens_of_a_completion_were(open_engine: Any, open_app: OpenApp) -> None:
    http = await open_app(await open_engine(likely, TALKING))
    body = COMPLETION | {"logprobs": 2}
    [choice] = (await http.post("/v1/completions", json=body)).json()["choices"]
    assert choice["logprobs"] == {
        "tokens": ["Hé", "x"],
        "token_logprobs": [-0.5, -9999.0],
        "top_logprobs": [
            {
                "Hé": -0.5,
                r"bytes:\xf0\x9f": -1.5,
                r"bytes:\xf0\x9f\x99": -2.0,
                "\ufffd": -2.5,
                r"bytes:\x48\xc3\xa9": -3.0,
            },
            {"y": -0.25, "x": -9999.0},
        ],
        "text_offset": [0, 2],
    }
    events = events_of(await http.post("/v1/completions", json=body | {"stream": True}))
    streamed = [event["choices"][0]["logprobs"] for event in events if event["choices"][0]["logprobs"]]
    joined = {name: [entry for part in streamed for entry in part[name]] for name in choice["logprobs"]}
    assert joined == choice["logprobs"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_has_only_so_many_logprobs(open_engine: Any, open_app: OpenApp, stream: bool) -> None:
    """They are held until their caller has read them: 16 answers of 4096 tokens with 20 others each would be 93 MB."""
    http = await open_app(await open_engine(likely, TALKING))
    described = {"logprobs": True, "top_logprobs": 20, "stream": stream}
    most = (256 << 10) // 21
    assert (await http.post("/v1/chat/completions", json=CHAT | described | {"max_tokens": most})).status_code == 200
    assert (await http.post("/v1/chat/completions", json=CHAT | described)).status_code == 200
    many = {"prompt": ["Hi"] * 16, "logprobs": 20, "stream": stream}
    for path, body in [
        ("/v1/chat/completions", CHAT | described | {"max_tokens": most + 1}),
        ("/v1/chat/completions", CHAT | described | {"max_completion_tokens": most + 1}),
        ("/v1/chat/completions", CHAT | described | {"max_tokens": 4096, "n": 16}),
        ("/v1/completions", COMPLETION | many | {"max_tokens": 4096}),
    ]:
        response = await http.post(path, json=body)
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("invalid_value", "max_tokens")
        assert "more than the 262144 logprobs that a request may have: lower max_tokens to" in error["message"]


async def test_logprobs_are_held_in_one_form_only(open_engine: Any, open_app: OpenApp, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Any] = []
    add = inference._Parts.add

    def noted(parts: Any, piece: Any) -> Any:
        result = add(parts, piece)
        held.extend(piece.logprobs for piece in parts.pieces)
        return result

    monkeypatch.setattr(inference._Parts, "add", noted)
    http = await open_app(await open_engine(likely, TALKING))
    await http.post("/v1/chat/completions", json=CHAT | {"logprobs": True})
    assert held == [[], [], []]


@pytest.mark.parametrize("path", list(PATHS))
async def test_without_being_asked_for_they_are_null(open_engine: Any, open_app: OpenApp, path: str) -> None:
    async def plain(claim: shmring.Claim) -> None:
        await claim.reply(GenerateReply("x", [1], 5, 1, "stop"))

    http = await open_app(await open_engine(plain, TALKING))
    [choice] = (await http.post(path, json=PATHS[path])).json()["choices"]
    assert choice["logprobs"] is None


@pytest.fixture
async def synthetic(open_core: Any, open_app: OpenApp) -> httpx.AsyncClient:
    return await open_app(await open_core())


@for_each(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"presence_penalty": 0.1}, "presence_penalty"),
        ({"frequency_penalty": 0.1}, "frequency_penalty"),
        ({"stop_token_ids": [1]}, "stop_token_ids"),
        ({"logprobs": True}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
)
async def test_what_an_executor_does_not_know_is_refused_by_name(
    synthetic: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    """The synthetic one knows none of it."""
    response = await synthetic.post("/v1/chat/completions", json=CHAT | {"model": "shmring-synthetic"} | fields)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "unsupported_value", param)
    assert f"{param} is not supported by the model 'shmring-synthetic' (executor synthetic)" in error["message"]
