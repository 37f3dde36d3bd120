"""/v1/messages over HTTP, with a small handler as engine: what the engine is sent, what callers get, events of streams.

Answers and events are checked by the types of Anthropic's own client, and the client itself runs against a real server. What is
refused: test_refused_bodies.py.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter

import shmring
from shmring.engine.protocol import GenerateReply, SamplingParams, StructuredOutputsParams, ToolCall
from tests.frontend.talking import (
    LARGE_PICTURE,
    MODEL,
    PICTURE,
    OpenTalk,
    Talk,
    in_pieces,
    model,
    named_events,
    picture_url,
    said_in,
    say,
    think_and_call,
)

OpenApp = Callable[..., Awaitable[httpx.AsyncClient]]

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TOOL = {"name": "f", "input_schema": {"type": "object"}}
G = TOOL | {"name": "g"}
USER = {"role": "user", "content": "Hi"}
BODY = {"model": "m", "max_tokens": 9, "messages": [USER]}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": "x"}


def picture_block(pixels: Any = PICTURE) -> dict[str, Any]:
    return {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": picture_url(pixels).partition(",")[2]},
    }


def of_user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


@pytest.fixture
async def talk(open_talk: OpenTalk) -> Talk:
    return await open_talk()


async def events_of(talk: Talk, **fields: Any) -> list[Any]:
    """The events of a stream; each is what Anthropic's client expects, and its line says its type."""
    events = named_events(await talk.ask(PATH, BODY | fields, stream=True))
    for event in events:
        if event["type"] != "ping":
            _event().validate_python(event, strict=True)
    return events


@functools.cache
def _event() -> TypeAdapter[Any]:
    from anthropic.types import RawMessageStreamEvent

    return TypeAdapter(RawMessageStreamEvent)


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


def without_id(part: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in part.items() if name != "id"}


def shape_of(answer: dict[str, Any]) -> Any:
    """An answer without what differs from one to the next."""
    return without_id(answer) | {"content": [*map(without_id, answer["content"])]}


# -- answers ----------------------------------------------------------------------------------------------------------------


async def test_an_answer_comes_whole(open_talk: OpenTalk, anthropic: Any) -> None:
    talk = await open_talk(say)
    response = await talk.send(f"{PATH}?beta=true", BODY, headers={"anthropic-version": "2023-06-01"})
    answer = response.json()
    anthropic.types.Message.model_validate(answer, strict=True)
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


async def test_a_stream_has_the_events_of_the_api(open_talk: OpenTalk) -> None:
    talk = await open_talk(say)
    response = await talk.send(PATH, BODY | {"stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = await events_of(talk)
    assert [event["type"] for event in events] == [
        *("message_start", "ping", "content_block_start", "content_block_delta", "content_block_delta"),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    begun = events[0]["message"]
    assert (begun["usage"]["input_tokens"], begun["content"], begun["stop_reason"]) == (5, [], None)
    assert [event["delta"]["text"] for event in events[3:5]] == ["Hel", "lo."]
    assert shape_of(built(events)) == shape_of(await talk.ask(PATH, BODY))


async def test_reasoning_text_and_calls_are_blocks(open_talk: OpenTalk, anthropic: Any) -> None:
    talk = await open_talk(think_and_call)
    answer = await talk.ask(PATH, BODY, tools=[TOOL, G])
    anthropic.types.Message.model_validate(answer, strict=True)
    ids = [block["id"] for block in answer["content"][2:]]
    blocks = [
        {"type": "thinking", "thinking": "Hmm.", "signature": ""},
        {"type": "text", "text": "Let me.", "citations": None},
        {"type": "tool_use", "name": "f", "input": {"x": 1}},
        {"type": "tool_use", "name": "g", "input": {}},
    ]
    assert ([*map(without_id, answer["content"])], answer["stop_reason"]) == (blocks, "tool_use")
    assert len(set(ids)) == 2
    assert all(name.startswith("toolu_") for name in ids)
    events = await events_of(talk, tools=[TOOL, G])
    assert shape_of(built(events)) == shape_of(answer)
    started = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [block.get("input") for block in started] == [None, None, {}, {}]
    hidden = await talk.ask(PATH, BODY, tools=[TOOL, G], thinking={"type": "disabled"})
    assert [*map(without_id, hidden["content"])] == blocks[1:]


@pytest.mark.parametrize(
    ("last", "reason", "sequence"),
    [
        (GenerateReply("", [1], 5, 1, "length"), "max_tokens", None),
        (GenerateReply("a", [1], 5, 1, "stop"), "end_turn", None),
        (GenerateReply("a", [1], 5, 1, "stop", stop_text="END"), "stop_sequence", "END"),
        (GenerateReply("a", [1], 5, 1, "tool_calls", [ToolCall("f", "{}")], stop_text="END"), "tool_use", None),
    ],
)
async def test_why_an_answer_ends(open_talk: OpenTalk, last: GenerateReply, reason: str, sequence: str | None) -> None:
    async def end(claim: shmring.Claim) -> None:
        await claim.reply(last)

    talk = await open_talk(end)
    answer = await talk.ask(PATH, BODY)
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)
    assert (await events_of(talk))[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


async def test_the_stop_text_of_an_engine_is_told(open_core: Any, open_app: OpenApp) -> None:
    """Also if the engine joins the pieces of the answer."""
    http = await open_app(await open_core())
    body = BODY | {"model": "shmring-synthetic", "stop_sequences": ["never", "token3"]}
    answer = (await http.post(PATH, json=body)).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "token3")
    assert answer["content"][0]["text"] == "[synthetic] token2 "


# -- what the engine is sent ----------------------------------------------------------------------------------------------


async def test_blocks_become_messages(talk: Talk) -> None:
    """Also those of an answer, which clients send back as they are."""
    by_url = {"type": "image", "source": {"type": "url", "url": picture_url()}}
    results = [
        {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "Rain"}, by_url]},
        {"type": "tool_result", "tool_use_id": "c2", "content": "No", "is_error": True},
        {"type": "tool_result", "tool_use_id": "c3"},
        {"type": "text", "text": "And now?"},
    ]
    answered = [
        {"type": "thinking", "thinking": "Hm", "signature": ""},
        {"type": "text", "text": "I look.", "citations": None},
        {"type": "tool_use", "id": "c1", "name": "f", "input": {"x": 1}},
        {"type": "tool_use", "id": "c2", "name": "g", "input": {}},
    ]
    asked = [{"type": "text", "text": "What?", "cache_control": {"type": "ephemeral"}}, picture_block()]
    body = {
        "model": "m",
        "messages": [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": answered},
            {"role": "user", "content": results},
            {"role": "system", "content": "Now."},
            {"role": "user", "content": "Go."},
        ],
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
    assert await talk.ignored(PATH, body) == "messages[1].content[0]"
    [request] = talk.requests
    assert said_in(request) == [
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
    assert [medium.pixels.shape for medium in request.media] == [PICTURE.shape] * 2
    assert request.messages[2].tool_calls == [ToolCall("f", '{"x":1}', "c1"), ToolCall("g", "{}", "c2", 1)]
    assert [message.tool_call_id for message in request.messages[3:6]] == ["c1", "c2", "c3"]
    function = {"name": "f", "description": "It looks.", "parameters": {"type": "object"}}
    assert request.tools == [{"type": "function", "function": function}]
    assert request.sampling == SamplingParams(max_tokens=7, stop=["x"], temperature=0.5)
    assert request.template_options == {"enable_thinking": False, "reasoning_effort": "low"}
    assert (request.parallel_tool_calls, request.priority, request.stream) == (False, 3, False)


async def test_blocks_keep_their_order_around_what_tools_returned(talk: Talk) -> None:
    await talk.ask(
        PATH, BODY, **of_user(*({"type": "text", "text": "a"}, RESULT), *({"type": "text", "text": text} for text in "bc"))
    )
    assert said_in(talk.requests[0]) == [("user", ["a"]), ("tool", ["x"]), ("user", ["b", "c"])]


async def test_the_model_is_told_of_errors_of_tools(talk: Talk) -> None:
    """As Anthropic's own types have them."""
    picture = picture_block()
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": "c1", "content": "No such file", "is_error": True},
        {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "No"}, picture], "is_error": True},
        {"type": "tool_result", "tool_use_id": "c3", "content": [picture], "is_error": True},
        {"type": "tool_result", "tool_use_id": "c4", "is_error": True},
        {"type": "tool_result", "tool_use_id": "c5", "content": "Rain", "is_error": False},
    ]
    for path, ignored in ((PATH, None), (COUNT, "max_tokens")):
        assert await talk.ignored(path, BODY | of_user(*results)) == ignored
        said = [texts for _, texts in said_in(talk.requests.pop())]
        assert said == [["Error: No such file"], ["Error: ", "No", 0], ["Error: ", 1], ["Error: "], ["Rain"]]


async def test_forms_and_required_calls_are_those_of_chats(talk: Talk) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    await talk.ask(PATH, BODY, output_config={"format": {"type": "json_schema", "schema": schema}})
    form = StructuredOutputsParams(json='{"type":"object","properties":{"a":{"type":"integer"}}}')
    assert talk.requests.pop().sampling.structured_outputs == form
    for choice, names, mode in (
        ({"type": "any"}, ["f", "g"], "required"),
        ({"type": "tool", "name": "g"}, ["g"], "required"),
        ({"type": "none"}, [], "auto"),
    ):
        await talk.ask(PATH, BODY, tools=[TOOL, G], tool_choice=choice)
        request = talk.requests.pop()
        assert ([tool["function"]["name"] for tool in request.tools], request.tool_choice) == (names, mode)


async def test_what_has_no_effect_with_a_model_is_named_as_the_caller_wrote_it(open_talk: OpenTalk) -> None:
    talk = await open_talk(description=model(strict_tools=False))
    fields = {"tools": [TOOL, G | {"strict": True}], "thinking": {"type": "enabled", "budget_tokens": 1024}}
    for stream in (False, True):
        assert await talk.ignored(PATH, BODY | fields, stream=stream) == "thinking.budget_tokens, tools[1].strict"
    assert await talk.ignored(COUNT, {"model": "m", "messages": [USER]} | fields) == "thinking.budget_tokens"


async def test_a_header_names_so_many_parts_that_were_ignored_at_most(open_talk: OpenTalk) -> None:
    talk = await open_talk(description=model(strict_tools=False))
    thoughts = [{"type": "thinking", "thinking": "Hm", "signature": ""}] * 20
    answer = {"role": "assistant", "content": [*thoughts, {"type": "text", "text": "Yes."}]}
    body = BODY | {"messages": [USER, answer, USER], "tools": [G | {"strict": True}], "unknown": 1}
    named = await talk.ignored(PATH, body)
    assert named == ", ".join(["unknown", *(f"messages[1].content[{index}]" for index in range(15))])


async def test_tokens_are_counted_with_pictures(talk: Talk, anthropic: Any) -> None:
    body = {"model": "m", **of_user(picture_block()), "tools": [TOOL], "system": "Be brief."}
    response = await talk.send(COUNT, body)
    assert (response.status_code, response.json()) == (200, {"input_tokens": 3})
    anthropic.types.MessageTokensCount.model_validate(response.json(), strict=True)
    [request] = talk.requests
    assert (request.tokenize, len(request.media), len(request.tools), len(request.messages)) == (True, 1, 1, 2)
    assert response.headers["x-shmring-slab-bytes"] == str(PICTURE.nbytes)


async def test_tokens_are_counted_whatever_the_answer_is_to_be(talk: Talk) -> None:
    """A form that was prepared for it would be in vain."""
    for fields, tools in (
        ({"tools": [TOOL | {"strict": True}]}, 1),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, 1),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}}, 0),
    ):
        await talk.ask(COUNT, {"model": "m", "messages": [USER]}, **fields)
        request = talk.requests.pop()
        assert (request.needs_form, len(request.tools)) == (False, tools)


async def test_a_large_picture_in_base64_arrives(open_talk: OpenTalk) -> None:
    """It is cut out of the body, and is no text."""
    talk = await open_talk()
    source = picture_block(LARGE_PICTURE)
    body = json.dumps(BODY | of_user(source)).encode()
    assert len(body) > 1 << 20
    assert (await talk.http.post(PATH, content=in_pieces(body))).status_code == 200
    assert [medium.pixels.shape for medium in talk.requests[0].media] == [LARGE_PICTURE.shape]


# -- errors and keys ------------------------------------------------------------------------------------------------------


async def test_another_version_of_the_api_is_refused(talk: Talk) -> None:
    for path in (PATH, COUNT):
        assert (await talk.send(path, BODY, headers={"anthropic-version": "2026-10-21"})).status_code == 200
        response = await talk.send(path, BODY, headers={"anthropic-version": "2023-01-01"})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "anthropic-version")
        assert "2023-06-01" in response.json()["error"]["message"]
    assert len(talk.requests) == 2


async def test_errors_are_in_the_form_of_the_api_wherever_they_come_from(open_talk: OpenTalk, anthropic: Any) -> None:
    http = (await open_talk(say, api_keys=("a-key",), max_body_nbytes=10_000)).http
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
            anthropic.types.ErrorResponse.model_validate(answer, strict=True)
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
async def test_either_header_has_the_key(open_talk: OpenTalk, headers: list[tuple[str, str]], status: int) -> None:
    talk = await open_talk(say, api_keys=("a-key",))
    for path in (PATH, "/v1/chat/completions"):
        assert (await talk.http.post(path, json=BODY, headers=headers)).status_code == status


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


async def test_the_client_converses_with_tools_and_pictures(open_engine: Any, open_server: Any, anthropic: Any) -> None:
    url = await open_server(await open_engine(weather, MODEL), api_keys=("a-key",))
    question = {"role": "user", "content": [picture_block(), {"type": "text", "text": "How is the weather there?"}]}
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
