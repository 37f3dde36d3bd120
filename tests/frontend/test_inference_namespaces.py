"""Functions in namespaces over /v1/responses, with a small handler as engine: what the model is told, and how calls come back.

Requests are written, and answers and events are read, as the types of OpenAI's own client say.
"""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai.types.responses import (
    NamespaceToolParam,
    Response,
    ResponseFunctionToolCall,
    ResponseFunctionToolCallParam,
    ResponseStreamEvent,
)
from pydantic import TypeAdapter

import shmring
from shmring.engine.executors.trials import refused
from shmring.engine.protocol import GenerateReply, GenerateRequest, ToolCall, parameters_of
from tests.frontend.talking import MODEL, OpenTalk, Talk, model, named_events
from tests.tables import for_each

PATH = "/v1/responses"
SCHEMA: dict[str, object] = {"type": "object", "properties": {"q": {"type": "string"}}}
CRM: NamespaceToolParam = {
    "type": "namespace",
    "name": "crm",
    "description": "All about customers.",
    "tools": [
        {"type": "function", "name": "find", "description": "Finds one.", "parameters": SCHEMA, "strict": False},
        {"type": "custom", "name": "note"},
        {"type": "function", "name": "drop", "parameters": SCHEMA},
    ],
}
MAIL: NamespaceToolParam = {
    "type": "namespace",
    "name": "mail",
    "description": "",
    "tools": [{"type": "function", "name": "find", "description": "Finds a letter.", "parameters": SCHEMA}],
}
PLAIN = {"type": "function", "name": "clock"}
BODY: dict[str, Any] = {"model": "m", "input": "Hi", "tools": [PLAIN, CRM, MAIL]}

_EVENT = TypeAdapter[Any](ResponseStreamEvent)


@pytest.fixture
async def talk(open_talk: OpenTalk) -> Talk:
    return await open_talk(description=model(strict_tools=False))


async def test_the_model_is_told_of_functions_in_namespaces(talk: Talk) -> None:
    """What a namespace is for is said once, with its first function: templates have no other place for it."""
    response = await talk.send(PATH, BODY)
    assert response.headers["x-shmring-ignored-fields"] == "tools[1].tools[1]"
    told = [tool["function"] for tool in talk.requests[0].tools]
    assert told == [
        {"name": "clock"},
        {"name": "crm__find", "description": "All about customers.\n\nFinds one.", "parameters": SCHEMA},
        {"name": "crm__drop", "parameters": SCHEMA},
        {"name": "mail__find", "description": "Finds a letter.", "parameters": SCHEMA},
    ]
    shown = Response.model_validate(response.json()).tools
    assert [tool.type for tool in shown] == ["function", "namespace", "namespace"]
    assert [function.name for function in shown[1].tools] == ["find", "drop"]  # type: ignore[union-attr]


async def test_a_call_names_its_namespace(open_talk: OpenTalk) -> None:
    async def call(claim: shmring.Claim) -> None:
        calls = [ToolCall(name, "{}", index=index) for index, name in enumerate(("crm__find", "clock", "unknown__f"))]
        await claim.reply(GenerateReply("", [1], 1, 1, "tool_calls", calls))

    talk = await open_talk(call)
    expected = [("find", "crm"), ("clock", None), ("unknown__f", None)]
    answer = await talk.ask(PATH, BODY)
    found: list[Any] = Response.model_validate(answer).output
    assert [(item.name, item.namespace) for item in found] == expected
    assert ["namespace" in item for item in answer["output"]] == [True, False, False]
    events = [_EVENT.validate_python(event) for event in named_events(await talk.ask(PATH, BODY, stream=True))]
    for kind in ("response.output_item.added", "response.output_item.done"):
        items = [event.item for event in events if event.type == kind]
        assert [(item.name, item.namespace) for item in items] == expected
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [event.name for event in done] == ["find", "clock", "unknown__f"]


async def test_a_conversation_goes_on_with_calls_in_namespaces(open_engine: Any, open_server: Any) -> None:
    """As OpenAI's own client sends the call back, and as the server has kept it."""
    requests: list[GenerateRequest] = []

    async def call(claim: shmring.Claim) -> None:
        requests.append(claim.payload)
        if claim.payload.messages[-1].role == "tool":
            await claim.reply(GenerateReply("Found.", [1], 1, 1, "stop"))
        else:
            await claim.reply(GenerateReply("", [1], 1, 1, "tool_calls", [ToolCall("crm__find", '{"q":"Ada"}')]))

    url = await open_server(await open_engine(call, MODEL))
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        first = await client.responses.create(model="m", input="Hi", tools=[CRM])
        [made] = first.output
        assert isinstance(made, ResponseFunctionToolCall)
        assert (made.namespace, made.name) == ("crm", "find")
        sent: ResponseFunctionToolCallParam = made.to_dict()  # type: ignore[assignment]
        returned: Any = {"type": "function_call_output", "call_id": made.call_id, "output": "Ada"}
        whole = await client.responses.create(model="m", input=[{"role": "user", "content": "Hi"}, sent, returned], tools=[CRM])
        kept = await client.responses.create(model="m", input=[returned], previous_response_id=first.id, tools=[CRM])
        assert (whole.output_text, kept.output_text) == ("Found.", "Found.")
        listed = await client.responses.input_items.list(kept.id, order="asc")
        assert [getattr(item, "namespace", None) for item in listed.data] == [None, "crm", None]
    for request in requests[1:]:
        assert [call.name for message in request.messages for call in message.tool_calls] == ["crm__find"]


@for_each(
    ("choice", "names"),
    [
        ({"type": "function", "name": "drop"}, ["crm__drop"]),
        ({"type": "function", "name": "mail__find"}, ["mail__find"]),
        ({"type": "function", "name": "clock"}, ["clock"]),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "drop"}]}, ["crm__drop"]),
        ("none", []),
    ],
)
async def test_a_choice_names_functions_in_namespaces(talk: Talk, choice: Any, names: list[str]) -> None:
    await talk.ask(PATH, BODY, tool_choice=choice)
    told = [tool["function"] for tool in talk.requests.pop().tools]
    assert [function["name"] for function in told] == names
    about = {"crm__drop": "All about customers.", "mail__find": "Finds a letter."}  # the first of its namespace that is told
    assert [function.get("description") for function in told] == [about.get(name) for name in names]


async def test_a_schema_that_is_refused_is_named_where_it_stands(open_talk: OpenTalk) -> None:
    async def refuse(claim: shmring.Claim) -> None:
        raise refused(f"no (in {parameters_of('crm__drop')}, at #)")

    talk = await open_talk(refuse)
    assert await talk.refusal(PATH, BODY) == (400, "rejected_by_engine", "tools[1].tools[2].parameters")


@pytest.mark.parametrize("can_keep", [True, False])
async def test_strict_functions_in_namespaces_are_kept_to_or_named(open_talk: OpenTalk, can_keep: bool) -> None:
    talk = await open_talk(description=model(strict_tools=can_keep))
    strict = [{"type": "function", "name": "find", "strict": True, "parameters": SCHEMA}]
    ignored = await talk.ignored(PATH, BODY, tools=[PLAIN, {**CRM, "tools": strict}])
    assert ignored == (None if can_keep else "tools[1].tools[0].strict")
    assert talk.requests[0].strict_tools == (["crm__find"] if can_keep else [])
