"""Requests for chats: what the engine is asked for them, whole. What is refused: test_refused_bodies.py."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from shmring.engine.protocol import (
    ChatMessage,
    GenerateRequest,
    MediumPart,
    SamplingParams,
    StructuredOutputsParams,
    TextPart,
    ToolCall,
)
from shmring.frontend.errors import ApiError
from shmring.frontend.media.sources import MediaSource
from shmring.frontend.openai.chat import _UNSUPPORTED, CHAT_PARSER, ChatRequest, engine_request
from shmring.frontend.openai.messages import MAX_PARTS
from shmring.frontend.openai.tools import FunctionDefinition, Tool, engine_tools
from tests.tables import for_each

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


def parse(messages: list[Any] | None = None, **fields: object) -> ChatRequest:
    given_messages = [{"role": "user", "content": "x"}] if messages is None else messages
    return CHAT_PARSER.parse(msgspec.json.encode({"model": "m", "messages": given_messages, **fields}))


def asked(messages: list[Any] | None = None, **fields: object) -> GenerateRequest:
    return engine_request(parse(messages, **fields))[0]


def test_media_are_numbered_over_all_messages() -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": "a"}},
                {"type": "text", "text": "or"},
                {"type": "input_audio", "input_audio": {"data": "b", "format": "wav"}},
            ],
        },
        {"role": "assistant", "content": "this", "refusal": None},
        {"role": "user", "content": [{"type": "video_url", "video_url": {"url": "c"}}]},
    ]
    request = parse(messages)
    generate_request, sources = engine_request(request)
    assert generate_request.messages == [
        ChatMessage("system", [TextPart("be brief")]),
        ChatMessage("user", [MediumPart(0), TextPart("or"), MediumPart(1)]),
        ChatMessage("assistant", [TextPart("this")]),
        ChatMessage("user", [MediumPart(2)]),
    ]
    assert sources == [
        MediaSource("image", "messages[1].content[0].image_url", url="a"),
        MediaSource("audio", "messages[1].content[2].input_audio", base64="b"),
        MediaSource("video", "messages[3].content[0].video_url", url="c"),
    ]
    assert request.messages == []  # their URLs are held once


F, G = ({"type": "function", "function": {"name": name}} for name in "fg")
FULL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


def strict(**functions: bool) -> list[Any]:
    return [{"type": "function", "function": {"name": name, "strict": is_strict}} for name, is_strict in functions.items()]


def tools(choice: Any, *offered: Any) -> dict[str, Any]:
    return {"tools": offered or [F, G], "tool_choice": choice}


def allowed(mode: str, *tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
OF_SCHEMA = {"json": json.dumps(SCHEMA, separators=(",", ":"))}  # in the order of its properties
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
OBJECT = {"response_format": {"type": "json_object"}}
GENERATED = {"n": 3, "min_tokens": 2, "presence_penalty": 0.5, "frequency_penalty": -0.5, "stop_token_ids": [4]}
FILTERS = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2}


def sampling(**fields: Any) -> dict[str, Any]:
    return {"sampling": SamplingParams(**fields)}


def form(**fields: Any) -> dict[str, Any]:
    return sampling(structured_outputs=StructuredOutputsParams(**fields))


@for_each(
    ("fields", "expected"),
    [
        ({}, {}),
        (FILTERS | {"logit_bias": {"7": -100}}, sampling(**FILTERS, logit_bias={7: -100})),
        (GENERATED, sampling(**GENERATED)),
        ({"max_tokens": 3}, sampling(max_tokens=3)),
        ({"max_tokens": 3, "max_completion_tokens": 5}, sampling(max_tokens=5)),  # the newer name
        ({"stop": "end"}, sampling(stop=["end"])),
        ({"stop": ["x"] * 16}, sampling(stop=["x"] * 16)),
        *(({"stop": value}, sampling(stop=[value] if value else [])) for value in ("x" * 1024, [], None)),
        ({"logprobs": False}, {}),
        ({"logprobs": True}, sampling(logprobs=0)),
        ({"logprobs": True, "top_logprobs": 20}, sampling(logprobs=20)),
        ({"stream": True, "stream_options": {"include_usage": True}}, {}),
        (
            {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "high"},
            {"template_options": {"enable_thinking": False, "reasoning_effort": "high"}},
        ),
        # tools, as templates take them
        *((tools(choice), {"tools": [F, G]}) for choice in (None, "auto")),
        (tools(None, FULL, G), {"tools": [FULL, G]}),
        (tools("none"), {}),
        (tools("required"), {"tools": [F, G], "tool_choice": "required"}),
        (tools(G), {"tools": [G], "tool_choice": "required", "parallel_tool_calls": False}),
        (tools(F, F, G, F), {"tools": [F], "tool_choice": "required", "parallel_tool_calls": False}),  # called once
        (tools(allowed("auto", G)), {"tools": [G]}),
        (tools(allowed("required", G, F, G)), {"tools": [G, F], "tool_choice": "required"}),
        (tools(None) | {"parallel_tool_calls": False}, {"tools": [F, G], "parallel_tool_calls": False}),
        *((tools(choice, *strict(f=True, g=False)), {"tools": [F, G], "strict_tools": ["f"]}) for choice in ("auto", None)),
        (tools("none", *strict(f=True)), {}),
        (tools("required", *strict(f=True)), {"tools": [F], "tool_choice": "required"}),  # its call is strict anyway
        (tools(allowed("auto", G), *strict(f=True, g=True)), {"tools": [G], "strict_tools": ["g"]}),
        (tools(allowed("auto", F, G), *strict(f=False, g=True)), {"tools": [F, G], "strict_tools": ["g"]}),
        # forms
        ({"response_format": None, "structured_outputs": None}, {}),
        ({"response_format": {"type": "text"}}, {}),
        (OBJECT, form(json_object=True)),
        ({"response_format": FORMAT}, form(**OF_SCHEMA)),
        ({"structured_outputs": {"json": SCHEMA}}, form(**OF_SCHEMA)),
        ({"response_format": {"type": "text"}, "structured_outputs": {"regex": "a+"}}, form(regex="a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, form(choice=["a", "b"])),
        ({"structured_outputs": {"json_object": True, "json": None}}, form(json_object=True)),
        ({"structured_outputs": {"json": '{"type": "null"}'}}, form(json='{"type": "null"}')),
        (OBJECT | tools(None), form(json_object=True) | {"tools": [F, G]}),
        (OBJECT | tools("none"), form(json_object=True)),
        (OBJECT | tools("required"), {"tools": [F, G], "tool_choice": "required"}),  # a call needs no form
    ],
)
def test_the_engine_is_asked_for_what_the_caller_wants_and_nothing_else(
    fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert asked(**fields) == GenerateRequest([ChatMessage("user", [TextPart("x")])], **expected)


@for_each("field", list(_UNSUPPORTED))
def test_what_asks_for_nothing_is_taken(field: str) -> None:
    for value in (None, *_UNSUPPORTED[field]):
        assert asked(**{field: value}) == asked()


@for_each(
    ("fields", "needs_tools", "needs_form"),
    [
        ({}, False, False),
        ({"tools": [F]}, True, False),
        ({"tools": strict(f=True)}, True, True),
        (tools("required"), True, True),
        (tools("none", *strict(f=True)), False, False),
        (OBJECT | tools("none"), False, True),
        ({"messages": [{"role": "assistant", "tool_calls": [CALL]}]}, True, False),
        ({"messages": [{"role": "tool", "content": "4", "tool_call_id": "c"}]}, True, False),
    ],
)
def test_a_request_says_what_its_model_must_be_able_to(fields: dict[str, Any], needs_tools: bool, needs_form: bool) -> None:
    request = asked(**fields)
    assert (request.needs_tools, request.needs_form) == (needs_tools, needs_form)


@for_each(
    ("message", "texts"),
    [
        ({"role": "user", "content": ["a", {"type": "text", "text": "b"}, "c"]}, ["a", "b", "c"]),
        ({"role": "user", "content": ["x"] * MAX_PARTS}, ["x"] * MAX_PARTS),
        ({"role": "assistant", "content": None}, [""]),
        ({"role": "assistant", "content": None, "refusal": "no"}, ["no"]),
        ({"role": "assistant", "refusal": "no"}, ["no"]),
        ({"role": "assistant", "content": "yes", "refusal": None}, ["yes"]),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, ["no"]),
    ],
)
def test_messages_have_the_shapes_that_clients_send(message: Any, texts: list[str]) -> None:
    assert asked([message]).messages == [ChatMessage(message["role"], [TextPart(text) for text in texts])]


@for_each("arguments", ['{"x": 1}', '{"a": "' + "," * 100_000 + '"}'], ids=["short", "with commas, which are no values"])
def test_calls_and_what_they_returned_are_part_of_a_conversation(arguments: str) -> None:
    call = CALL | {"function": {"name": "f", "arguments": arguments}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert asked([answer, {"role": "tool", "content": "4", "tool_call_id": "call_1"}]).messages == [
        ChatMessage("assistant", [TextPart("")], [ToolCall("f", arguments, "call_1")]),
        ChatMessage("tool", [TextPart("4")], tool_call_id="call_1"),
    ]


def test_a_tool_whose_schema_is_nested_without_end_is_refused() -> None:
    parameters: dict[str, Any] = {}
    for _ in range(5000):
        parameters = {"not": parameters}
    with pytest.raises(ApiError, match="values in one another") as caught:
        engine_tools([Tool("function", FunctionDefinition("f", parameters=parameters))])
    assert caught.value.param == "tools[0].function.parameters"
