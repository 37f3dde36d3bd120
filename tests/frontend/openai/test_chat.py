"""Requests for chats: what the engine is asked for them, and what is refused because it is not built."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shmring.engine.protocol import ChatMessage, MediumPart, SamplingParams, TextPart, ToolCall
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


def test_parts_are_counted_over_all_messages() -> None:
    half = {"role": "user", "content": [{"type": "text", "text": "x"}] * (MAX_PARTS // 2)}
    engine_request(parse([half, half]))
    with pytest.raises(ApiError, match="have 6144 parts, at most 4096 are accepted") as raised:
        engine_request(parse([half, half, half]))
    assert (raised.value.status, raised.value.code, raised.value.param) == (400, "too_many_parts", "messages")


def test_the_default_sampling_is_openais() -> None:
    generate_request, _ = engine_request(parse())
    assert (generate_request.sampling, generate_request.priority, generate_request.media) == (SamplingParams(), 0, [])


def test_how_tokens_are_filtered_reaches_the_engine() -> None:
    filters = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "logit_bias": {"7": -100}}
    sampling = engine_request(parse(**filters))[0].sampling
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty, sampling.logit_bias) == (5, 0.1, 1.2, {7: -100})


def test_what_is_generated_reaches_the_engine() -> None:
    fields = {"n": 3, "min_tokens": 2, "presence_penalty": 0.5, "frequency_penalty": -0.5, "stop_token_ids": [4]}
    sampling = engine_request(parse(**fields))[0].sampling
    assert sampling == SamplingParams(**fields)


@for_each(
    ("fields", "count"),
    [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 20}, 20)],
)
def test_probabilities_are_asked_for(fields: dict[str, Any], count: int | None) -> None:
    assert engine_request(parse(**fields))[0].sampling.logprobs == count


@for_each(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": "2"}, "n"),
        ({"n": True}, "n"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": "x"}, "frequency_penalty"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 4, "max_tokens": 3}, "min_tokens"),
        ({"min_tokens": 4, "max_completion_tokens": 3}, "min_tokens"),
        ({"min_tokens": 4, "response_format": {"type": "json_object"}}, "min_tokens"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [0] * 129}, "stop_token_ids"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
    ],
)
def test_what_makes_no_sense_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as raised:
        engine_request(parse(**fields))
    assert (raised.value.status, raised.value.param) == (400, param)


TOOLS = [{"type": "function", "function": {"name": name}} for name in "fg"]


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@for_each(
    ("choice", "names", "required"),
    [
        (None, "fg", "auto"),
        ("auto", "fg", "auto"),
        ("none", "", "auto"),
        ("required", "fg", "required"),
        ({"type": "function", "function": {"name": "g"}}, "g", "required"),
        (allowed("auto", "g"), "g", "auto"),
        (allowed("required", "g", "f", "g"), "gf", "required"),
    ],
)
def test_which_tools_may_or_must_be_called(choice: Any, names: str, required: str) -> None:
    request, _ = engine_request(parse(tools=TOOLS, tool_choice=choice))
    assert ("".join(tool["function"]["name"] for tool in request.tools), request.tool_choice) == (names, required)


@for_each(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes", "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "h"}}, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": allowed("auto", "g", "h"), "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": allowed("auto"), "tools": TOOLS}, "tool_choice.allowed_tools.tools"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "g"}}, "tools": TOOLS}, "tool_choice.type"),
        ({"tools": [{"type": "custom", "custom": {"name": "g"}}]}, "tools[0].type"),
        ({"tools": [*TOOLS, {"type": "function"}]}, "tools[2].function"),
        ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "tool_choice.function"),
        ({"tools": TOOLS, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
)
def test_a_choice_of_tools_that_makes_no_sense_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as raised:
        engine_request(parse(**fields))
    assert (raised.value.status, raised.value.param) == (400, param)


def test_of_some_tools_that_may_be_called_those_are_strict_that_say_so() -> None:
    tools = [{"type": "function", "function": {"name": name, "strict": name != "h"}} for name in "fgh"]
    request, _ = engine_request(parse(tools=tools, tool_choice=allowed("auto", "g", "h")))
    assert request.strict_tools == ["g"]


def test_a_call_that_is_required_is_strict_anyway() -> None:
    tools = [{"type": "function", "function": {"name": "f", "strict": True}}]
    request, _ = engine_request(parse(tools=tools, tool_choice="required"))
    assert request.tools == [{"type": "function", "function": {"name": "f"}}]
    assert request.strict_tools == []


def test_a_form_of_json_may_be_beside_tools_and_a_required_call_needs_none() -> None:
    form = {"response_format": {"type": "json_object"}, "tools": TOOLS}
    request, _ = engine_request(parse(**form))
    assert (request.sampling.structured_outputs is not None, len(request.tools)) == (True, len(TOOLS))
    assert engine_request(parse(**form, tool_choice="required"))[0].sampling.structured_outputs is None


def test_tools_that_may_not_be_called_leave_room_for_a_form() -> None:
    request, _ = engine_request(parse(tools=TOOLS, tool_choice="none", response_format={"type": "json_object"}))
    assert (request.tools, request.needs_form) == ([], True)


def test_max_completion_tokens_is_the_newer_name() -> None:
    assert engine_request(parse(max_tokens=3))[0].sampling.max_tokens == 3
    assert engine_request(parse(max_tokens=3, max_completion_tokens=5))[0].sampling.max_tokens == 5


def test_one_stop_text_is_a_list_of_one() -> None:
    assert engine_request(parse(stop="end"))[0].sampling.stop == ["end"]


@for_each(
    ("field", "value"),
    [
        ("use_beam_search", True),
        ("use_beam_search", 0),
        ("use_beam_search", "false"),
        ("modalities", ["text", "audio"]),
        ("guided_json", {}),
    ],
)
def test_what_is_not_built_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ApiError, match=f"{field} is not supported") as raised:
        engine_request(parse(**{field: value}))
    assert (raised.value.status, raised.value.code, raised.value.param) == (400, "unsupported_value", field)


@for_each("field", list(_UNSUPPORTED))
def test_what_asks_for_nothing_is_taken(field: str) -> None:
    engine_request(parse(**{field: None}))
    for value in _UNSUPPORTED[field]:
        engine_request(parse(**{field: value}))


@for_each(
    ("messages", "param"),
    [
        ([{"role": "user", "content": "x"}, {"role": "function", "content": "4"}], "messages[1].role"),
        ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "messages[0].tool_calls"),
        (
            [{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": "[1]"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        ([{"role": "user"}], "messages[0].content"),
    ],
)
def test_messages_that_can_not_be_answered_are_refused(messages: list[Any], param: str) -> None:
    with pytest.raises(ApiError) as raised:
        engine_request(parse(messages))
    assert (raised.value.status, raised.value.param) == (400, param)


@for_each(
    ("message", "texts"),
    [
        ({"role": "user", "content": ["a", {"type": "text", "text": "b"}, "c"]}, ["a", "b", "c"]),
        ({"role": "assistant", "content": None}, [""]),
        ({"role": "assistant", "content": None, "refusal": "no"}, ["no"]),
        ({"role": "assistant", "refusal": "no"}, ["no"]),
        ({"role": "assistant", "content": "yes", "refusal": None}, ["yes"]),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, ["no"]),
    ],
)
def test_messages_have_the_shapes_that_clients_send(message: Any, texts: list[str]) -> None:
    request, _ = engine_request(parse([message]))
    [made] = request.messages
    assert [part.text for part in made.parts if isinstance(part, TextPart)] == texts
    assert len(made.parts) == len(texts)


@for_each("messages", [[], "hello", [{"role": "nobody", "content": "x"}], [{"content": "x"}]])
def test_what_is_no_conversation_is_refused(messages: Any) -> None:
    with pytest.raises(ApiError) as raised:
        parse(messages)
    assert raised.value.code == "invalid_value"


def test_stream_options_are_for_streams() -> None:
    engine_request(parse(stream=True, stream_options={"include_usage": True}))
    with pytest.raises(ApiError) as raised:
        engine_request(parse(stream_options={"include_usage": True}))
    assert raised.value.param == "stream_options"


# -- tools ----------------------------------------------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


def test_tools_go_to_the_engine_as_templates_take_them() -> None:
    request, _ = engine_request(parse(tools=[TOOL, {"type": "function", "function": {"name": "g"}}]))
    assert request.tools == [TOOL, {"type": "function", "function": {"name": "g"}}]
    assert (request.parallel_tool_calls, request.needs_tools) == (True, True)
    assert not engine_request(parse(tools=[TOOL], parallel_tool_calls=False))[0].parallel_tool_calls
    without, _ = engine_request(parse(tools=[TOOL], tool_choice="none"))
    assert (without.tools, without.needs_tools) == ([], False)


def test_calls_and_what_they_returned_are_part_of_a_conversation() -> None:
    answer = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    request, _ = engine_request(parse([answer, {"role": "tool", "content": "4", "tool_call_id": "call_1"}]))
    called, returned = request.messages
    assert called.tool_calls == [ToolCall("f", '{"x": 1}', "call_1")]
    assert (returned.role, returned.tool_call_id, returned.parts) == ("tool", "call_1", [TextPart("4")])
    assert request.needs_tools


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ('{"a": [' + "[]," * 40_000 + "1]}", "too_many_values"),
        ('{"a": "' + "x" * 5_000_000 + '"}', "text_too_long"),
    ],
)
def test_arguments_that_take_long_to_read_are_refused_unread(arguments: str, code: str) -> None:
    answer = {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": arguments}}]}
    request = parse([answer])
    with pytest.raises(ApiError) as raised:
        engine_request(request)
    assert raised.value.code == code


def test_commas_in_a_text_are_no_values() -> None:
    arguments = '{"a": "' + "," * 100_000 + '"}'
    request, _ = engine_request(
        parse([{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": arguments}}]}])
    )
    assert request.messages[0].tool_calls[0].arguments == arguments


def test_a_number_that_no_message_can_have_is_refused() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"maximum": 10**30}}}
    with pytest.raises(ApiError, match="more than 64 bits"):
        engine_request(parse(tools=[tool]))


def test_strict_tools_are_named_to_the_engine() -> None:
    tools = [{"type": "function", "function": {"name": name, "strict": strict}} for name, strict in (("f", True), ("g", False))]
    for choice in ("auto", None):
        request, _ = engine_request(parse(tools=tools, tool_choice=choice))
        assert (request.strict_tools, request.needs_form, request.tool_choice) == (["f"], True, "auto")
    assert engine_request(parse(tools=tools, tool_choice="none"))[0].strict_tools == []


def test_a_named_function_is_called_once() -> None:
    named = {"type": "function", "function": {"name": "g"}}
    request, _ = engine_request(parse(tools=[*TOOLS, *TOOLS], tool_choice=named | {"function": {"name": "f"}}))
    assert (len(request.tools), request.tool_choice, request.parallel_tool_calls) == (1, "required", False)
    assert engine_request(parse(tools=TOOLS, tool_choice="required"))[0].parallel_tool_calls


def test_variables_of_the_template_go_to_the_engine() -> None:
    request, _ = engine_request(parse(chat_template_kwargs={"enable_thinking": False}, reasoning_effort="high"))
    assert request.template_options == {"enable_thinking": False, "reasoning_effort": "high"}


def test_values_in_one_another_are_bounded() -> None:
    deep: Any = {}
    for _ in range(100):
        deep = {"x": deep}
    with pytest.raises(ApiError, match="in one another"):
        engine_request(parse(chat_template_kwargs=deep))
    with pytest.raises(ApiError, match="in one another"):
        engine_request(parse(tools=[{"type": "function", "function": {"name": "f", "parameters": deep}}]))


def test_a_tool_whose_schema_is_nested_without_end_is_refused() -> None:
    parameters: dict[str, Any] = {}
    for _ in range(5000):
        parameters = {"not": parameters}
    with pytest.raises(ApiError, match="values in one another") as caught:
        engine_tools([Tool("function", FunctionDefinition("f", parameters=parameters))])
    assert caught.value.param == "tools[0].function.parameters"
