"""Tools over HTTP, with a small handler as engine: calls in answers and streams, and what has no effect with a model."""

from __future__ import annotations

from typing import Any

import pytest

import shmring
from shmring.engine.executors.trials import refused
from shmring.engine.protocol import GenerateReply, StructuredOutputsParams, ToolCall, parameters_of
from tests.frontend.talking import OpenTalk, Talk, data_events, model
from tests.tables import for_each

CHATS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    CHATS: {"model": "m", "messages": [{"role": "user", "content": "Hi"}]},
    RESPONSES: {"model": "m", "input": "Hi"},
    MESSAGES: {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]},
}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BODY = BODIES[CHATS] | {"tools": [TOOL]}


async def call(claim: shmring.Claim) -> None:
    await claim.reply(GenerateReply("Let ", [1], 5, 1, reasoning="Hm"))
    await claim.reply(GenerateReply("me.", [2], 5, 2))
    await claim.reply(GenerateReply("", [3], 5, 3, None, [ToolCall("f", '{"x":1}')]))
    await claim.reply(GenerateReply("", [4], 5, 4, "tool_calls", [ToolCall("f", "{}", index=1)]))


async def test_calls_are_in_the_answer(open_talk: OpenTalk) -> None:
    talk = await open_talk(call)
    [choice] = (await talk.ask(CHATS, BODY))["choices"]
    calls = choice["message"].pop("tool_calls")
    assert choice["message"] == {"role": "assistant", "content": "Let me.", "reasoning": "Hm"}
    assert choice["finish_reason"] == "tool_calls"
    assert len({made.pop("id") for made in calls}) == 2
    assert calls == [{"type": "function", "function": {"name": "f", "arguments": text}} for text in ('{"x":1}', "{}")]


async def test_an_answer_that_is_only_calls_has_no_content(open_talk: OpenTalk) -> None:
    async def only_call(claim: shmring.Claim) -> None:
        await claim.reply(GenerateReply("", [4], 5, 4, "tool_calls", [ToolCall("f", "{}")]))

    talk = await open_talk(only_call)
    [choice] = (await talk.ask(CHATS, BODY))["choices"]
    assert choice["message"]["content"] is None


async def test_calls_are_in_a_stream(open_talk: OpenTalk) -> None:
    talk = await open_talk(call)
    choices = [event["choices"][0] for event in data_events(await talk.ask(CHATS, BODY, stream=True))]
    deltas = [choice["delta"] for choice in choices]
    assert "".join(delta.get("content", "") for delta in deltas) == "Let me."
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "Hm"
    calls = [made for delta in deltas for made in delta.get("tool_calls", [])]
    assert [(made["index"], made["function"]["arguments"]) for made in calls] == [(0, '{"x":1}'), (1, "{}")]
    assert all(made["id"] and made["function"]["name"] == "f" for made in calls)
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["tool_calls"]


NAMES = ("ff", "f")
SCHEMA = {"type": "object"}
CHAT_TOOLS = {"tools": [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES]}
FORM = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}
OF_FUNCTION, OF_ANSWER = f"no (in {parameters_of('f')}, at #)", "no (in the schema, at #)"


@for_each(
    ("path", "fields", "fault", "param"),
    [
        (CHATS, CHAT_TOOLS, OF_FUNCTION, "tools[1].function.parameters"),
        (CHATS, CHAT_TOOLS | {"stream": True}, OF_FUNCTION, "tools[1].function.parameters"),
        (CHATS, CHAT_TOOLS, "it takes more than 10 s", "tools"),
        (CHATS, FORM, OF_ANSWER, "response_format.json_schema.schema"),
        (CHATS, CHAT_TOOLS | FORM, OF_ANSWER, "response_format.json_schema.schema"),
        (CHATS, {"structured_outputs": {"regex": "("}}, "no", "structured_outputs"),
        (
            RESPONSES,
            {"tools": [{"type": "function", "name": name, "parameters": SCHEMA} for name in NAMES]},
            OF_FUNCTION,
            "tools[1].parameters",
        ),
        (
            RESPONSES,
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
            OF_ANSWER,
            "text.format.schema",
        ),
        (MESSAGES, {"tools": [{"name": name, "input_schema": SCHEMA} for name in NAMES]}, OF_FUNCTION, "tools[1].input_schema"),
        (
            MESSAGES,
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            OF_ANSWER,
            "output_config.format.schema",
        ),
    ],
)
async def test_a_form_that_is_refused_is_named_where_its_caller_has_written_it(
    refusing: Talk, path: str, fields: dict[str, Any], fault: str, param: str
) -> None:
    FAULTS.append(fault)
    response = await refusing.send(path, BODIES[path] | fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert error["message"] == f"the form of the answer can't be compiled: {fault}"


FAULTS: list[str] = []


@pytest.fixture
async def refusing(open_talk: OpenTalk) -> Talk:
    """Its engine refuses a form for the last of FAULTS."""

    async def refuse(_: shmring.Claim) -> None:
        raise refused(FAULTS[-1])

    return await open_talk(refuse)


def tools_of(*tools: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """For each API, the fields that offer functions, each with a name and more fields, and tools of other types."""
    functions = [{"parameters": SCHEMA} | tool if "name" in tool else tool for tool in tools]
    named = [{name: value for name, value in tool.items() if name != "parameters"} for tool in functions]
    return {
        CHATS: {"tools": [{"type": "function", "function": tool} if "name" in tool else tool for tool in functions]},
        RESPONSES: {"tools": [{"type": "function"} | tool for tool in functions]},
        MESSAGES: {"tools": [{"input_schema": SCHEMA} | tool if "name" in tool else tool | {"name": "run"} for tool in named]},
    }


STRICT = {CHATS: "tools[1].function.strict", RESPONSES: "tools[1].strict", MESSAGES: "tools[1].strict"}


@pytest.mark.parametrize("can_keep", [True, False])
async def test_strict_tools_are_kept_to_or_named(open_talk: OpenTalk, can_keep: bool) -> None:
    """Clients of agents say so of all their tools, whatever the model can be made to do."""
    talk = await open_talk(description=model(strict_tools=can_keep))
    for path, tools in tools_of({"name": "g"}, {"name": "f", "strict": True}).items():
        for stream in (False, True):
            ignored = await talk.ignored(path, BODIES[path] | tools, stream=stream, nosuch=1)
            assert ignored == ("nosuch" if can_keep else f"nosuch, {STRICT[path]}")
            assert talk.requests.pop().strict_tools == (["f"] if can_keep else [])


async def test_tools_of_other_types_and_an_effort_that_the_template_does_not_have_are_left_out_and_named(
    open_talk: OpenTalk,
) -> None:
    """Agents of the vendors send them to every model."""
    talk = await open_talk(description=model(strict_tools=False, reasoning_effort=False))
    effort = {"effort": "high"}
    efforts = {
        CHATS: ("reasoning_effort", {"reasoning_effort": "high"}),
        RESPONSES: ("reasoning.effort", {"reasoning": effort}),
        MESSAGES: ("output_config.effort", {"output_config": effort}),
    }
    for path, tools in tools_of({"type": "web_search"}, {"name": "f", "strict": True}).items():
        field, fields = efforts[path]
        assert await talk.ignored(path, BODIES[path] | tools | fields) == f"tools[0], {STRICT[path]}, {field}"
        request = talk.requests.pop()
        assert [tool["function"]["name"] for tool in request.tools] == ["f"]
        assert (request.strict_tools, request.template_options) == ([], {})
        asked = await talk.ignored(path, BODIES[path] | tools | fields, chat_template_kwargs={"reasoning_effort": "x"})
        assert asked == f"tools[0], {STRICT[path]}"  # it is the caller who knows the template


async def test_a_form_may_be_beside_tools_where_calls_can_be_kept_to(open_talk: OpenTalk) -> None:
    """(Where they can't be, it is refused: test_refused_bodies.py.)"""
    talk = await open_talk(call, model(capabilities=["structured_outputs"]))
    forms = {CHATS: {"response_format": {"type": "json_object"}}, RESPONSES: {"text": {"format": {"type": "json_object"}}}}
    for path, form in forms.items():
        await talk.ask(path, BODIES[path] | tools_of({"name": "f"})[path] | form)
        assert talk.requests.pop().sampling.structured_outputs == StructuredOutputsParams(json_object=True)
