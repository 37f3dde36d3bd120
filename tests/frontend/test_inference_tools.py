"""Tools over HTTP, with a small handler as engine: calls in answers and streams, and models that have none."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import msgspec
import pytest

import shmring
from shmring.engine.executors.trials import refused
from shmring.engine.protocol import CAPABILITIES, GenerateReply, InputSpec, ModelDescription, ToolCall, parameters_of
from tests.tables import for_each

OpenApp = Callable[..., Awaitable[httpx.AsyncClient]]

TALKING = ModelDescription("test", "m", ["generate"], InputSpec(), 8, tools=True, template_options=True)
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BODY = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "tools": [TOOL]}


async def call(claim: shmring.Claim) -> None:
    await claim.reply(GenerateReply("Let ", [1], 5, 1, reasoning="Hm"))
    await claim.reply(GenerateReply("me.", [2], 5, 2))
    await claim.reply(GenerateReply("", [3], 5, 3, None, [ToolCall("f", '{"x":1}')]))
    await claim.reply(GenerateReply("", [4], 5, 4, "tool_calls", [ToolCall("f", "{}", index=1)]))


async def test_calls_are_in_the_answer(open_engine: Any, open_app: OpenApp) -> None:
    http = await open_app(await open_engine(call, TALKING))
    [choice] = (await http.post("/v1/chat/completions", json=BODY)).json()["choices"]
    calls = choice["message"].pop("tool_calls")
    assert choice["message"] == {"role": "assistant", "content": "Let me.", "reasoning": "Hm"}
    assert choice["finish_reason"] == "tool_calls"
    assert [made["function"] for made in calls] == [{"name": "f", "arguments": '{"x":1}'}, {"name": "f", "arguments": "{}"}]
    assert {made["type"] for made in calls} == {"function"}
    assert len({made["id"] for made in calls}) == 2


async def test_an_answer_that_is_only_calls_has_no_content(open_engine: Any, open_app: OpenApp) -> None:
    async def only_call(claim: shmring.Claim) -> None:
        await claim.reply(GenerateReply("", [4], 5, 4, "tool_calls", [ToolCall("f", "{}")]))

    http = await open_app(await open_engine(only_call, TALKING))
    [choice] = (await http.post("/v1/chat/completions", json=BODY)).json()["choices"]
    assert choice["message"]["content"] is None


async def test_calls_are_in_a_stream(open_engine: Any, open_app: OpenApp) -> None:
    http = await open_app(await open_engine(call, TALKING))
    response = await http.post("/v1/chat/completions", json=BODY | {"stream": True})
    *parts, _, _ = response.text.split("\n\n")
    choices = [json.loads(part.removeprefix("data: "))["choices"][0] for part in parts]
    deltas = [choice["delta"] for choice in choices]
    assert "".join(delta.get("content", "") for delta in deltas) == "Let me."
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "Hm"
    calls = [made for delta in deltas for made in delta.get("tool_calls", [])]
    assert [(made["index"], made["function"]["arguments"]) for made in calls] == [(0, '{"x":1}'), (1, "{}")]
    assert all(made["id"] and made["function"]["name"] == "f" for made in calls)
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["tool_calls"]


async def test_a_form_that_is_refused_is_named_where_its_caller_has_written_it(open_engine: Any, open_app: OpenApp) -> None:
    fault = ""

    async def refuse(claim: shmring.Claim) -> None:
        raise refused(fault)

    abilities = {"strict_tools": True, "capabilities": CAPABILITIES}
    http = await open_app(await open_engine(refuse, msgspec.structs.replace(TALKING, **abilities)))
    schema = {"type": "object"}
    chat = BODY | {"tools": [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("ff", "f")]}
    responses: dict[str, Any] = {"model": "m", "input": "Hi"}
    of_responses = {"tools": [{"type": "function", "name": name, "parameters": schema} for name in ("ff", "f")]}
    messages = {"model": "m", "max_tokens": 9, "messages": BODY["messages"]}
    of_messages = {"tools": [{"name": name, "input_schema": schema} for name in ("ff", "f")]}
    plain = {name: value for name, value in BODY.items() if name != "tools"}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    text = {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}}
    output_config = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    of_function, of_answer = f"no (in {parameters_of('f')}, at #)", "no (in the schema, at #)"
    for path, body, fault, param in (
        ("chat/completions", chat, of_function, "tools[1].function.parameters"),
        ("chat/completions", chat | {"stream": True}, of_function, "tools[1].function.parameters"),
        ("chat/completions", chat, "it takes more than 10 s", "tools"),
        ("chat/completions", plain | {"response_format": form}, of_answer, "response_format.json_schema.schema"),
        ("chat/completions", chat | {"response_format": form}, of_answer, "response_format.json_schema.schema"),
        ("chat/completions", plain | {"structured_outputs": {"regex": "("}}, "no", "structured_outputs"),
        ("responses", responses | of_responses, of_function, "tools[1].parameters"),
        ("responses", responses | text, of_answer, "text.format.schema"),
        ("messages", messages | of_messages, of_function, "tools[1].input_schema"),
        ("messages", messages | output_config, of_answer, "output_config.format.schema"),
    ):
        answer = await http.post(f"/v1/{path}", json=body)
        error = answer.json()["error"]
        assert answer.status_code == 400, (path, error)
        assert error["message"] == f"the form of the answer can't be compiled: {fault}"
        assert error.get("param") == param, path


@pytest.mark.parametrize("can_keep", [True, False])
async def test_strict_tools_are_kept_to_or_named(open_engine: Any, open_app: OpenApp, can_keep: bool) -> None:
    """Clients of agents say so of all their tools, whatever the model can be made to do."""
    requests = []

    async def note(claim: shmring.Claim) -> None:
        requests.append(claim.payload)
        await claim.reply(GenerateReply("Hi", [1], 1, 1, "stop"))

    http = await open_app(await open_engine(note, msgspec.structs.replace(TALKING, strict_tools=can_keep)))
    plain = {"name": "g", "parameters": {"type": "object"}}
    chat = BODY | {"tools": [{"type": "function", "function": tool} for tool in (plain, TOOL["function"] | {"strict": True})]}
    answer = {"model": "m", "input": "Hi", "tools": [{"type": "function", **plain}, TOOL["function"] | {"type": "function"}]}
    answer["tools"][1]["strict"] = True  # type: ignore[index]
    for path, body, field in (
        ("/v1/chat/completions", chat, "tools[1].function.strict"),
        ("/v1/responses", answer, "tools[1].strict"),
    ):
        for stream in (False, True):
            response = await http.post(path, json=body | {"stream": stream, "nosuch": 1})
            assert response.status_code == 200, response.text
            assert response.headers["x-shmring-ignored-fields"] == ("nosuch" if can_keep else f"nosuch, {field}")
            assert requests.pop().strict_tools == (["f"] if can_keep else [])


async def test_tools_of_other_types_and_an_effort_that_the_template_does_not_have_are_left_out_and_named(
    open_engine: Any, open_app: OpenApp
) -> None:
    """Agents of the vendors send them to every model."""
    requests = []

    async def note(claim: shmring.Claim) -> None:
        requests.append(claim.payload)
        await claim.reply(GenerateReply("Hi", [1], 1, 1, "stop"))

    http = await open_app(await open_engine(note, TALKING))
    function = {"name": "f", "parameters": {"type": "object"}, "strict": True}
    named = {"name": "f", "input_schema": {"type": "object"}, "strict": True}
    effort = {"effort": "high"}
    search, run = {"type": "web_search"}, {"type": "bash_20250124", "name": "bash"}
    message = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}], "output_config": effort}
    for path, body, field, effort_field in (
        (
            "/v1/chat/completions",
            BODY | {"tools": [search, {"type": "function", "function": function}], "reasoning_effort": "high"},
            "tools[1].function.strict",
            "reasoning_effort",
        ),
        (
            "/v1/responses",
            {"model": "m", "input": "Hi", "tools": [search, {"type": "function", **function}], "reasoning": effort},
            "tools[1].strict",
            "reasoning.effort",
        ),
        ("/v1/messages", message | {"tools": [run, named]}, "tools[1].strict", "output_config.effort"),
    ):
        response = await http.post(path, json=body)
        assert response.status_code == 200, response.text
        assert response.headers["x-shmring-ignored-fields"] == f"tools[0], {field}, {effort_field}"
        request = requests.pop()
        assert [tool["function"]["name"] for tool in request.tools] == ["f"]
        assert (request.strict_tools, request.template_options) == ([], {})
        asked = (await http.post(path, json=body | {"chat_template_kwargs": {"reasoning_effort": "x"}})).headers
        assert "effort" not in asked["x-shmring-ignored-fields"]  # it is the caller who knows the template


@pytest.mark.parametrize("can_keep", [True, False])
async def test_a_form_beside_tools_needs_calls_that_can_be_kept_to(open_engine: Any, open_app: OpenApp, can_keep: bool) -> None:
    description = msgspec.structs.replace(TALKING, strict_tools=can_keep, capabilities=["structured_outputs"])
    http = await open_app(await open_engine(call, description))
    response = await http.post("/v1/chat/completions", json=BODY | {"response_format": {"type": "json_object"}})
    assert response.status_code == (200 if can_keep else 400)
    if not can_keep:
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_value", "response_format")
    answer = {"model": "m", "input": "Hi", "tools": [{"type": "function", **TOOL["function"]}]}
    response = await http.post("/v1/responses", json=answer | {"text": {"format": {"type": "json_object"}}})
    assert response.status_code == (200 if can_keep else 400)
    assert can_keep or response.json()["error"]["param"] == "text.format"


@pytest.fixture
async def without_tools(open_engine: Any, open_app: OpenApp) -> httpx.AsyncClient:
    description = msgspec.structs.replace(TALKING, tools=False, template_options=False)
    return await open_app(await open_engine(call, description))


@for_each(
    ("fields", "param"),
    [
        ({"tools": [TOOL]}, "tools"),
        ({"messages": [{"role": "tool", "content": "4", "tool_call_id": "c"}]}, "messages"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
    ],
)
async def test_a_model_that_has_none_refuses(without_tools: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    response = await without_tools.post("/v1/chat/completions", json={**BODY, "tools": [], **fields})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "unsupported_value", param)
    assert "'m'" in error["message"]
