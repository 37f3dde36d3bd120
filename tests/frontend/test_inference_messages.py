"""/v1/messages over HTTP, with a small handler as engine: what the engine is sent, what callers get, events of streams.

Answers and events are checked by the types of Anthropic's own client, and the client itself runs against a real server.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import httpx
import msgspec
import numpy as np
import pytest
from anthropic.types import (
    ErrorResponse,
    ImageBlockParam,
    Message,
    MessageTokensCount,
    RawMessageStreamEvent,
    ToolResultBlockParam,
)
from pydantic import TypeAdapter

import shmring
from shmring.engine.protocol import (
    CAPABILITIES,
    GenerateReply,
    GenerateRequest,
    InputSpec,
    MediumPart,
    ModelDescription,
    Picture,
    PictureSpec,
    TextPart,
    ToolCall,
)
from tests.frontend.talking import in_pieces, named_events, say, think_and_call
from tests.tables import for_each

OpenApp = Callable[..., Awaitable[httpx.AsyncClient]]

PIXELS = np.random.default_rng(6).integers(0, 256, (24, 32, 3), np.uint8)
TALKING = ModelDescription(
    "test",
    "m",
    ["generate", "tokenize"],
    InputSpec(picture=PictureSpec()),
    8,
    tools=True,
    template_options=True,
    reasoning_effort=True,
)
TOOL = {"name": "f", "input_schema": {"type": "object"}}
USER = {"role": "user", "content": "Hi"}
BODY = {"model": "m", "max_tokens": 9, "messages": [USER]}

_EVENT = TypeAdapter[Any](RawMessageStreamEvent)


def events_of(text: str) -> list[Any]:
    """The events of a stream; each is what Anthropic's client expects, and its line says its type."""
    events = named_events(text)
    for event in events:
        if event["type"] == "error":
            ErrorResponse.model_validate(event)
        elif event["type"] != "ping":
            _EVENT.validate_python(event, strict=True)
    return events


def built(events: list[Any]) -> Any:
    """The message that a stream's events build."""
    message: Any = None
    for event in events:
        match event["type"]:
            case "message_start":
                message = json.loads(json.dumps(event["message"]))
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"] | ({"json": ""} if "input" in event["content_block"] else {}))
            case "content_block_delta":
                kind, *[value] = (event["delta"]["type"], [value for key, value in event["delta"].items() if key != "type"])
                name = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "json"}[kind]
                message["content"][event["index"]][name] += value[0]
            case "content_block_stop":
                block = message["content"][event["index"]]
                if "json" in block:
                    block["input"] = json.loads(block.pop("json"))
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    return message


def shape_of(answer: dict[str, Any]) -> Any:
    """An answer without what differs from one to the next."""
    blocks = [{name: value for name, value in block.items() if name != "id"} for block in answer["content"]]
    return {name: value for name, value in answer.items() if name != "id"} | {"content": blocks}


async def note_requests(
    open_engine: Any, open_app: OpenApp, description: ModelDescription = TALKING
) -> tuple[httpx.AsyncClient, list[GenerateRequest]]:
    requests: list[GenerateRequest] = []

    async def note(claim: shmring.Claim) -> None:
        requests.append(claim.payload)
        await claim.reply(GenerateReply("yes", [1, 2, 3], 1, 1, "stop"))

    return await open_app(await open_engine(note, description)), requests


@pytest.fixture
async def noted(open_engine: Any, open_app: OpenApp) -> tuple[httpx.AsyncClient, list[GenerateRequest]]:
    return await note_requests(open_engine, open_app)


# -- answers ----------------------------------------------------------------------------------------------------------------


async def test_an_answer_comes_whole(open_engine: Any, open_app: OpenApp) -> None:
    http = await open_app(await open_engine(say, TALKING))
    response = await http.post("/v1/messages?beta=true", json=BODY, headers={"anthropic-version": "2023-06-01"})
    assert response.status_code == 200, response.text
    answer = response.json()
    Message.model_validate(answer, strict=True)
    assert answer["id"].startswith("msg_")
    assert answer == {
        "type": "message",
        "id": answer["id"],
        "role": "assistant",
        "model": "m",
        "content": [{"type": "text", "text": "Hello.", "citations": None}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 5, "output_tokens": 2, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0},
    }
    assert {"x-shmring-slab-bytes", "x-shmring-copies"} <= set(response.headers)
    assert response.headers["request-id"] == response.headers["x-request-id"]


async def test_a_stream_has_the_events_of_the_api(open_engine: Any, open_app: OpenApp) -> None:
    http = await open_app(await open_engine(say, TALKING))
    response = await http.post("/v1/messages", json=BODY | {"stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = events_of(response.text)
    assert [event["type"] for event in events] == [
        *("message_start", "ping", "content_block_start", "content_block_delta", "content_block_delta"),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert events[0]["message"]["usage"]["input_tokens"] == 5
    assert (events[0]["message"]["content"], events[0]["message"]["stop_reason"]) == ([], None)
    assert [event["delta"]["text"] for event in events[3:5]] == ["Hel", "lo."]
    whole = (await http.post("/v1/messages", json=BODY)).json()
    assert shape_of(built(events)) == shape_of(whole)


async def test_reasoning_text_and_calls_are_blocks(open_engine: Any, open_app: OpenApp) -> None:
    http = await open_app(await open_engine(think_and_call, TALKING))
    body = BODY | {"tools": [TOOL, TOOL | {"name": "g"}]}
    answer = (await http.post("/v1/messages", json=body)).json()
    Message.model_validate(answer, strict=True)
    thinking, text, *calls = answer["content"]
    assert thinking == {"type": "thinking", "thinking": "Hmm.", "signature": ""}
    assert text == {"type": "text", "text": "Let me.", "citations": None}
    assert [(call["type"], call["name"], call["input"]) for call in calls] == [
        ("tool_use", "f", {"x": 1}),
        ("tool_use", "g", {}),
    ]
    assert all(call["id"].startswith("toolu_") for call in calls)
    assert len({call["id"] for call in calls}) == 2
    assert answer["stop_reason"] == "tool_use"
    events = events_of((await http.post("/v1/messages", json=body | {"stream": True})).text)
    assert shape_of(built(events)) == shape_of(answer)
    started = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [block.get("input") for block in started] == [None, None, {}, {}]
    hidden = (await http.post("/v1/messages", json=body | {"thinking": {"type": "disabled"}})).json()
    assert shape_of(hidden)["content"] == shape_of(answer)["content"][1:]


@pytest.mark.parametrize(
    ("last", "reason", "sequence"),
    [
        (GenerateReply("", [1], 5, 1, "length"), "max_tokens", None),
        (GenerateReply("a", [1], 5, 1, "stop"), "end_turn", None),
        (GenerateReply("a", [1], 5, 1, "stop", stop_text="END"), "stop_sequence", "END"),
        (GenerateReply("a", [1], 5, 1, "tool_calls", [ToolCall("f", "{}")], stop_text="END"), "tool_use", None),
    ],
)
async def test_why_an_answer_ends(
    open_engine: Any, open_app: OpenApp, last: GenerateReply, reason: str, sequence: str | None
) -> None:
    async def end(claim: shmring.Claim) -> None:
        await claim.reply(last)

    http = await open_app(await open_engine(end, TALKING))
    answer = (await http.post("/v1/messages", json=BODY)).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)
    events = events_of((await http.post("/v1/messages", json=BODY | {"stream": True})).text)
    assert events[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


async def test_the_stop_text_of_an_engine_is_told(open_core: Any, open_app: OpenApp) -> None:
    """Also if the engine joins the pieces of the answer."""
    http = await open_app(await open_core())
    body = BODY | {"model": "shmring-synthetic", "stop_sequences": ["never", "token3"]}
    answer = (await http.post("/v1/messages", json=body)).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "token3")
    assert answer["content"][0]["text"] == "[synthetic] token2 "


# -- what the engine is sent ----------------------------------------------------------------------------------------------


async def test_blocks_become_messages(open_engine: Any, open_app: OpenApp, encoded: Any) -> None:
    """Also those of an answer, which clients send back as they are."""
    http, requests = await note_requests(open_engine, open_app)
    data = base64.b64encode(encoded(PIXELS)).decode()
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    by_url = {"type": "image", "source": {"type": "url", "url": f"data:image/png;base64,{data}"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "What?", "cache_control": {"type": "ephemeral"}}, picture]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": ""},
                {"type": "text", "text": "I look.", "citations": None},
                {"type": "tool_use", "id": "c1", "name": "f", "input": {"x": 1}},
                {"type": "tool_use", "id": "c2", "name": "g", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "Rain"}, by_url]},
                {"type": "tool_result", "tool_use_id": "c2", "content": "No", "is_error": True},
                {"type": "tool_result", "tool_use_id": "c3"},
                {"type": "text", "text": "And now?"},
            ],
        },
        {"role": "system", "content": "Now."},
        {"role": "user", "content": "Go."},
    ]
    fields = {
        "system": [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}],
        "max_tokens": 7,
        "stop_sequences": ["x"],
        "temperature": 0.5,
        "tools": [TOOL | {"description": "It looks.", "cache_control": {"type": "ephemeral"}}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "output_config": {"effort": "low"},
        "chat_template_kwargs": {"enable_thinking": False},
        "priority": 3,
    }
    response = await http.post("/v1/messages", json={"model": "m", "messages": messages, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["x-shmring-ignored-fields"] == "messages[1].content[0]"
    [request] = requests
    said = [
        (message.role, [part.text if isinstance(part, TextPart) else part.index for part in message.parts])
        for message in request.messages
    ]
    assert said == [
        ("system", ["Be brief.", "Be kind."]),
        ("user", ["What?", 0]),
        ("assistant", ["I look."]),
        ("tool", ["Rain", 1]),
        ("tool", ["Error: No"]),
        ("tool", [""]),
        ("user", ["And now?"]),
        ("system", ["Now."]),
        ("user", ["Go."]),
    ]
    assert isinstance(request.messages[1].parts[1], MediumPart)
    assert [medium.pixels.shape for medium in request.media if isinstance(medium, Picture)] == [(24, 32, 3)] * 2
    calls = request.messages[2].tool_calls
    assert [(call.id, call.name, call.arguments) for call in calls] == [("c1", "f", '{"x":1}'), ("c2", "g", "{}")]
    assert [message.tool_call_id for message in request.messages[3:6]] == ["c1", "c2", "c3"]
    assert request.tools == [
        {"type": "function", "function": {"name": "f", "description": "It looks.", "parameters": {"type": "object"}}}
    ]
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.stop, sampling.temperature) == (7, ["x"], 0.5)
    assert request.template_options == {"enable_thinking": False, "reasoning_effort": "low"}
    assert (request.parallel_tool_calls, request.priority, request.stream) == (False, 3, False)


async def test_blocks_keep_their_order_around_what_tools_returned(open_engine: Any, open_app: OpenApp) -> None:
    http, requests = await note_requests(open_engine, open_app)
    blocks = [{"type": "text", "text": "a"}, RESULT, {"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    assert (await http.post("/v1/messages", json=BODY | of_user(*blocks))).status_code == 200
    said = [(message.role, [part.text for part in message.parts]) for message in requests[0].messages]  # type: ignore[union-attr]
    assert said == [("user", ["a"]), ("tool", ["x"]), ("user", ["b", "c"])]


async def test_the_model_is_told_of_errors_of_tools(open_engine: Any, open_app: OpenApp, encoded: Any) -> None:
    """As Anthropic's own types have them; what is wrong in such a result is named where it stands."""
    http, requests = await note_requests(open_engine, open_app)
    picture: ImageBlockParam = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(encoded(PIXELS)).decode()},
    }
    results: list[ToolResultBlockParam] = [
        {"type": "tool_result", "tool_use_id": "c1", "content": "No such file", "is_error": True},
        {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "No"}, picture], "is_error": True},
        {"type": "tool_result", "tool_use_id": "c3", "content": [picture], "is_error": True},
        {"type": "tool_result", "tool_use_id": "c4", "is_error": True},
        {"type": "tool_result", "tool_use_id": "c5", "content": "Rain", "is_error": False},
    ]
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        requests.clear()
        response = await http.post(path, json=BODY | of_user(*results))
        assert response.status_code == 200, response.text
        assert "max_tokens" in response.headers.get("x-shmring-ignored-fields", "max_tokens")  # of a count, nothing else
        said = [
            [part.text if isinstance(part, TextPart) else part.index for part in message.parts]
            for message in requests[0].messages
        ]
        assert said == [["Error: No such file"], ["Error: ", "No", 0], ["Error: ", 1], ["Error: "], ["Rain"]]
    broken: ImageBlockParam = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    wrong = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "No"}, broken], "is_error": True}
    error = (await http.post("/v1/messages", json=BODY | of_user(wrong))).json()["error"]
    assert error["param"] == "messages[0].content[0].content[1].source", error
    long = {"type": "tool_result", "tool_use_id": "c", "content": "A" * (3 << 20), "is_error": True}
    error = (await http.post("/v1/messages", content=in_pieces(BODY | of_user(long)))).json()["error"]
    assert (error["code"], error["param"]) == ("text_too_long", "messages[0].content[0].content"), error


async def test_forms_and_required_calls_are_those_of_chats(open_engine: Any, open_app: OpenApp) -> None:
    http, requests = await note_requests(
        open_engine, open_app, msgspec.structs.replace(TALKING, capabilities=list(CAPABILITIES))
    )
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tools = [TOOL, TOOL | {"name": "g"}]
    for fields in (
        {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
        {"tools": tools, "tool_choice": {"type": "any"}},
        {"tools": tools, "tool_choice": {"type": "tool", "name": "g"}},
        {"tools": tools, "tool_choice": {"type": "none"}},
    ):
        response = await http.post("/v1/messages", json=BODY | fields)
        assert response.status_code == 200, response.text
    by_schema, required, named, none = requests
    assert by_schema.sampling.structured_outputs is not None
    assert json.loads(by_schema.sampling.structured_outputs.json or "") == schema
    assert [tool["function"]["name"] for tool in required.tools] == ["f", "g"]
    assert [tool["function"]["name"] for tool in named.tools] == ["g"]
    assert (required.tool_choice, named.tool_choice, none.tool_choice, none.tools) == ("required", "required", "auto", [])


async def test_what_has_no_effect_with_a_model_is_named_as_the_caller_wrote_it(
    noted: tuple[httpx.AsyncClient, list[GenerateRequest]],
) -> None:
    http, _ = noted
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        fields = {"tools": [TOOL, TOOL | {"name": "g", "strict": True}], "thinking": {"type": "enabled", "budget_tokens": 1024}}
        if path == "/v1/messages":
            for stream in (False, True):
                response = await http.post(path, json=BODY | fields | {"stream": stream})
                assert response.headers["x-shmring-ignored-fields"] == "thinking.budget_tokens, tools[1].strict"
        else:
            response = await http.post(path, json={"model": "m", "messages": [USER]} | fields)
            assert response.headers["x-shmring-ignored-fields"] == "thinking.budget_tokens"


async def test_tokens_are_counted_with_pictures(open_engine: Any, open_app: OpenApp, encoded: Any) -> None:
    http, requests = await note_requests(open_engine, open_app)
    data = base64.b64encode(encoded(PIXELS)).decode()
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    body = {"model": "m", "messages": [{"role": "user", "content": [picture]}], "tools": [TOOL], "system": "Be brief."}
    response = await http.post("/v1/messages/count_tokens", json=body)
    assert (response.status_code, response.json()) == (200, {"input_tokens": 3})
    MessageTokensCount.model_validate(response.json(), strict=True)
    [request] = requests
    assert (request.tokenize, len(request.media), len(request.tools), len(request.messages)) == (True, 1, 1, 2)
    assert response.headers["x-shmring-slab-bytes"] == str(PIXELS.nbytes)


async def test_tokens_are_counted_whatever_the_answer_is_to_be(open_engine: Any, open_app: OpenApp) -> None:
    """A form that was prepared for it would be in vain."""
    description = msgspec.structs.replace(TALKING, capabilities=list(CAPABILITIES), strict_tools=True)
    http, requests = await note_requests(open_engine, open_app, description)
    for fields in (
        {"tools": [TOOL | {"strict": True}]},
        {"tools": [TOOL], "tool_choice": {"type": "any"}},
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
    ):
        response = await http.post("/v1/messages/count_tokens", json={"model": "m", "messages": [USER]} | fields)
        assert response.status_code == 200, response.text
    assert [request.needs_form for request in requests] == [False] * 3
    assert [len(request.tools) for request in requests] == [1, 1, 0]


async def test_a_model_that_counts_no_tokens_says_so(open_core: Any, open_app: OpenApp) -> None:
    http = await open_app(await open_core())
    body = {"model": "shmring-synthetic", "messages": [USER]}
    response = await http.post("/v1/messages/count_tokens", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == (400, "invalid_request_error", "unsupported_task")


# -- refusals ---------------------------------------------------------------------------------------------------------------

BROKEN = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
CALL = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": "x"}


def of_user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def of_assistant(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": list(blocks)}, USER]}


@for_each(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [USER, {"role": "assistant", "content": "The"}]}, "messages[1].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        (of_user({"type": "document", "source": {}}), "messages[0].content[0].type"),
        (of_user({"type": "image", "source": {"type": "file", "file_id": "x"}}), "messages[0].content[0].source.type"),
        (of_user({"type": "text", "text": "x"}, BROKEN), "messages[0].content[1].source"),
        (of_user(RESULT, {"type": "text", "text": "x"}, BROKEN), "messages[0].content[2].source"),
        (of_user({**RESULT, "content": [BROKEN]}), "messages[0].content[0].content[0].source"),
        (of_user(CALL), "messages[0].content[0].type"),
        (of_assistant(RESULT), "messages[0].content[0].type"),
        (of_assistant({"type": "text", "text": "x"}, CALL | {"input": [1]}), "messages[0].content[1].input"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [TOOL | {"name": ""}]}, "tools[0].name"),
        ({"tools": [TOOL] * 1025}, "tools"),
        ({"tools": [TOOL | {"defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
        ({"output_config": {"effort": 3}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config.format"),
        ({"stop_sequences": ["x" * 1025]}, "stop_sequences[0]"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"temperature": 3}, "temperature"),
        ({"priority": -1}, "priority"),
        ({"container": "x"}, "container"),
    ],
)
async def test_what_is_wrong_is_named_as_the_caller_wrote_it(
    noted: tuple[httpx.AsyncClient, list[GenerateRequest]], fields: dict[str, Any], param: str
) -> None:
    http, requests = noted
    for stream in (False, True):
        response = await http.post("/v1/messages", json={**BODY, **fields, "stream": stream})
        ErrorResponse.model_validate(response.json(), strict=True)
        error = response.json()["error"]
        assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param), error
        assert "$.stop[" not in error["message"]
    assert requests == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (of_assistant(CALL | {"input": {"x": "A" * (3 << 20)}}), "messages[0].content[0].input"),
        (of_assistant(CALL | {"name": "A" * (3 << 20)}), "messages[0].content[0].name"),
        (of_user(RESULT | {"tool_use_id": "A" * (3 << 20)}), "messages[0].content[0].tool_use_id"),
        (of_user(RESULT | {"content": "A" * (3 << 20)}), "messages[0].content[0].content"),
        (of_user({"type": "text", "text": "A" * (3 << 20)}), "messages[0].content"),
        ({"system": "A" * (3 << 20)}, "system"),
        ({"stop_sequences": ["A" * (3 << 20)]}, "stop_sequences"),
        ({"tools": [TOOL | {"description": "A" * (3 << 20)}]}, "tools"),
    ],
)
async def test_a_long_text_is_refused_and_never_cut(
    noted: tuple[httpx.AsyncClient, list[GenerateRequest]], fields: dict[str, Any], param: str
) -> None:
    http, requests = noted
    response = await http.post("/v1/messages", content=in_pieces({**BODY, **fields}))
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "text_too_long", param), error
    assert "cut-" not in response.text
    assert requests == []


async def test_a_large_picture_in_base64_arrives(open_engine: Any, open_app: OpenApp, encoded: Any) -> None:
    """It is cut out of the body, and is no text."""
    shapes: list[tuple[int, ...]] = []

    async def look(claim: shmring.Claim) -> None:
        shapes.extend(tuple(medium.pixels.shape) for medium in claim.payload.media)
        await claim.reply(GenerateReply("yes", [1], 1, 1, "stop"))

    http = await open_app(await open_engine(look, TALKING))
    noise = np.random.default_rng(1).integers(0, 256, (800, 800, 3), np.uint8)
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(encoded(noise)).decode()}
    assert len(source["data"]) > 1 << 20
    response = await http.post("/v1/messages", content=in_pieces(BODY | of_user({"type": "image", "source": source})))
    assert response.status_code == 200, response.text
    assert shapes == [(800, 800, 3)]


async def test_another_version_of_the_api_is_refused(noted: tuple[httpx.AsyncClient, list[GenerateRequest]]) -> None:
    http, requests = noted
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        assert (await http.post(path, json=BODY, headers={"anthropic-version": "2026-10-21"})).status_code == 200
        response = await http.post(path, json=BODY, headers={"anthropic-version": "2023-01-01"})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "anthropic-version")
        assert "2023-06-01" in response.json()["error"]["message"]
    assert len(requests) == 2


async def test_errors_are_in_the_form_of_the_api_wherever_they_come_from(open_engine: Any, open_app: OpenApp) -> None:
    http = await open_app(await open_engine(say, TALKING), api_keys=("a-key",), max_body_nbytes=10_000)
    key = {"x-api-key": "a-key"}
    cases = [
        ("POST", "/v1/messages", {}, BODY, 401, "authentication_error"),
        ("POST", "/v1/messages", key, BODY | {"model": "other"}, 404, "not_found_error"),
        ("POST", "/v1/messages", key, BODY | {"system": "x" * 10_000}, 413, "request_too_large"),
        ("GET", "/v1/messages", {}, None, 405, "invalid_request_error"),
        ("GET", "/v1/messages/batches", {}, None, 404, "not_found_error"),
    ]
    for method, path, headers, body, status, kind in cases:
        response = await http.request(method, path, headers=headers, json=body)
        answer = response.json()
        if status != 413:  # of a proxy in front of the vendor's servers; its documentation has it, and its types have not
            ErrorResponse.model_validate(answer, strict=True)
        assert (response.status_code, answer["type"], answer["error"]["type"]) == (status, "error", kind)
        assert answer["request_id"] == response.headers["x-request-id"]
    assert "type" not in (await http.get("/v1/messagesx")).json()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("x-api-key", "a-key")], 200),
        ([("authorization", "Bearer a-key")], 200),
        ([("authorization", "Basic of-a-proxy"), ("x-api-key", "a-key")], 200),
        ([("authorization", "Bearer a-key"), ("x-api-key", "other")], 200),
        ([("authorization", "Bearer other"), ("x-api-key", "a-key")], 401),
        ([("x-api-key", "other")], 401),
        ([("x-api-key", "")], 401),
        ([("x-api-key", "a-key"), ("x-api-key", "a-key")], 401),
    ],
)
async def test_either_header_has_the_key(
    open_engine: Any, open_app: OpenApp, headers: list[tuple[str, str]], status: int
) -> None:
    http = await open_app(await open_engine(say, TALKING), api_keys=("a-key",))
    for path in ("/v1/messages", "/v1/chat/completions"):
        assert (await http.post(path, json=BODY, headers=headers)).status_code == status


# -- the client ---------------------------------------------------------------------------------------------------------------


async def weather(claim: shmring.Claim) -> None:
    """Looks at a picture, calls a tool for it, and says what the tool has returned."""
    request = claim.payload
    if request.tokenize:
        await claim.reply(GenerateReply("", list(range(12)), 12, 0))
    elif request.messages[-1].role == "tool":
        said = request.messages[-1].parts[0].text
        await claim.reply(GenerateReply("It is ", [1], 30, 1))
        await claim.reply(GenerateReply(f"{said}.", [2], 30, 2, "stop"))
    else:
        height, width, _ = request.media[0].pixels.shape
        await claim.reply(GenerateReply("", [1], 20, 1, reasoning="I see."))
        await claim.reply(GenerateReply("I look.", [2], 20, 2))
        call = ToolCall("f", json.dumps({"height": height, "width": width}))
        await claim.reply(GenerateReply("", [3], 20, 3, "tool_calls", [call]))


async def test_the_client_converses_with_tools_and_pictures(open_engine: Any, open_server: Any, encoded: Any) -> None:
    url = await open_server(await open_engine(weather, TALKING), api_keys=("a-key",))
    data = base64.b64encode(encoded(PIXELS)).decode()
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    question = {"role": "user", "content": [picture, {"type": "text", "text": "How is the weather there?"}]}
    asked: dict[str, Any] = {"model": "m", "max_tokens": 100, "tools": [TOOL], "system": "Be brief."}

    def returned(answer: Any, content: str) -> Any:
        [call] = [block for block in answer.content if block.type == "tool_use"]
        assert (call.name, call.input) == ("f", {"height": 24, "width": 32})
        assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
        assert answer.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": call.id, "content": content}
        return [question, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]

    def converse() -> None:
        with anthropic.Anthropic(base_url=url, api_key="a-key", max_retries=0) as client:
            answer = client.messages.create(messages=[question], **asked)
            again = client.messages.create(messages=returned(answer, "rain"), **asked)
            assert None not in {answer._request_id, again._request_id}
            assert (again.content[0].text, again.stop_reason, again.usage.output_tokens) == ("It is rain.", "end_turn", 2)
            with client.messages.stream(messages=[question], **asked) as stream:
                streamed = stream.get_final_message()
            with client.messages.stream(messages=returned(streamed, "sun"), **asked) as stream:
                assert "".join(stream.text_stream) == "It is sun."
            counted = client.messages.count_tokens(messages=[question], model="m", tools=[TOOL])
            assert counted.input_tokens == 12
            with pytest.raises(anthropic.NotFoundError, match="does not exist") as raised:
                client.messages.create(messages=[question], **asked | {"model": "other"})
            assert raised.value.request_id is not None

    await asyncio.to_thread(converse)
    async with anthropic.AsyncAnthropic(base_url=url, auth_token="a-key", api_key=None, max_retries=0) as client:
        answer = await client.messages.create(messages=[question], **asked)
        async with client.messages.stream(messages=returned(answer, "snow"), **asked) as stream:
            assert [text async for text in stream.text_stream] == ["It is ", "snow."]
        parts = [event async for event in await client.messages.create(messages=[question], stream=True, **asked)]
        assert [part.type for part in parts][-2:] == ["message_delta", "message_stop"]
    async with anthropic.AsyncAnthropic(base_url=url, api_key="other", max_retries=0) as client:
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.create(messages=[question], **asked)


async def test_a_failure_on_the_way_is_the_last_event(open_engine: Any, open_server: Any, eventually: Any) -> None:
    async def fail(claim: shmring.Claim) -> None:
        before = engine.client.ring.statistics().replies
        await claim.reply(GenerateReply("Hel", [1], 5, 1))
        await eventually(lambda: engine.client.ring.statistics().replies > before)  # an error overtakes what was not taken yet
        raise RuntimeError("the model has fallen over")

    engine = await open_engine(fail, TALKING)
    url = await open_server(engine)
    async with httpx.AsyncClient(timeout=30) as http:
        response = await http.post(f"{url}/v1/messages", json=BODY | {"stream": True})
    *_, last = events_of(response.text)
    assert (last["type"], last["error"]["type"], last["error"]["code"]) == ("error", "api_error", "engine_error")
    assert last["request_id"] == response.headers["x-request-id"]
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        stream = await client.messages.create(stream=True, **BODY)  # type: ignore[call-overload]
        with pytest.raises(anthropic.APIError, match="fallen over"):
            async for _ in stream:
                pass
