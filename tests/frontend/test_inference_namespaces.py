"""Functions in namespaces over /v1/responses, with a small handler as engine: what the model is told, and how calls come back.

Requests are written, and answers and events are read, as the types of OpenAI's own client say.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import msgspec
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
from shmring.engine.protocol import (
    CAPABILITIES,
    GenerateReply,
    GenerateRequest,
    InputSpec,
    ModelDescription,
    ToolCall,
    parameters_of,
)
from tests.frontend.talking import named_events
from tests.tables import for_each

OpenApp = Callable[..., Awaitable[httpx.AsyncClient]]

TALKING = ModelDescription("test", "m", ["generate"], InputSpec(), 8, tools=True, capabilities=list(CAPABILITIES))
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


async def note_requests(
    open_engine: Any, open_app: OpenApp, *calls: ToolCall, description: ModelDescription = TALKING
) -> tuple[httpx.AsyncClient, list[GenerateRequest]]:
    requests: list[GenerateRequest] = []

    async def note(claim: shmring.Claim) -> None:
        requests.append(claim.payload)
        await claim.reply(GenerateReply("" if calls else "yes", [1], 1, 1, "tool_calls" if calls else "stop", list(calls)))

    return await open_app(await open_engine(note, description)), requests


@pytest.fixture
async def noted(open_engine: Any, open_app: OpenApp) -> tuple[httpx.AsyncClient, list[GenerateRequest]]:
    return await note_requests(open_engine, open_app)


async def test_the_model_is_told_of_functions_in_namespaces(open_engine: Any, open_app: OpenApp) -> None:
    """What a namespace is for is said once, with its first function: templates have no other place for it."""
    http, requests = await note_requests(open_engine, open_app)
    response = await http.post("/v1/responses", json=BODY)
    assert response.status_code == 200, response.text
    assert response.headers["x-shmring-ignored-fields"] == "tools[1].tools[1]"
    told = [tool["function"] for tool in requests[0].tools]
    assert told == [
        {"name": "clock"},
        {"name": "crm__find", "description": "All about customers.\n\nFinds one.", "parameters": SCHEMA},
        {"name": "crm__drop", "parameters": SCHEMA},
        {"name": "mail__find", "description": "Finds a letter.", "parameters": SCHEMA},
    ]
    shown = Response.model_validate(response.json()).tools
    assert [tool.type for tool in shown] == ["function", "namespace", "namespace"]
    assert [function.name for function in shown[1].tools] == ["find", "drop"]  # type: ignore[union-attr]


async def test_a_call_names_its_namespace(open_engine: Any, open_app: OpenApp) -> None:
    calls = [ToolCall(name, "{}", index=index) for index, name in enumerate(("crm__find", "clock", "unknown__f"))]
    http, _ = await note_requests(open_engine, open_app, *calls)
    expected = [("find", "crm"), ("clock", None), ("unknown__f", None)]
    answer = (await http.post("/v1/responses", json=BODY)).json()
    found: list[Any] = Response.model_validate(answer).output
    assert [(item.name, item.namespace) for item in found] == expected
    assert ["namespace" in item for item in answer["output"]] == [True, False, False]
    events = [
        _EVENT.validate_python(event)
        for event in named_events((await http.post("/v1/responses", json=BODY | {"stream": True})).text)
    ]
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

    url = await open_server(await open_engine(call, TALKING))
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
async def test_a_choice_names_functions_in_namespaces(
    noted: tuple[httpx.AsyncClient, list[GenerateRequest]], choice: Any, names: list[str]
) -> None:
    http, requests = noted
    requests.clear()
    response = await http.post("/v1/responses", json=BODY | {"tool_choice": choice})
    assert response.status_code == 200, response.text
    assert [tool["function"]["name"] for tool in requests[0].tools] == names
    about = {"crm__drop": "All about customers.", "mail__find": "Finds a letter."}  # the first of its namespace that is told
    assert [tool["function"].get("description") for tool in requests[0].tools] == [about.get(name) for name in names]


def crm(**fields: Any) -> dict[str, Any]:
    return {"tools": [PLAIN, {**CRM, **fields}]}


FIND = {"type": "function", "name": "find"}


@for_each(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "function", "name": "find"}}, "tool_choice"),  # there are two
        ({"tool_choice": {"type": "function", "name": "lose"}}, "tool_choice"),
        (crm(name=None), "tools[1].name"),
        (crm(tools=None), "tools[1].tools"),
        (crm(tools=[FIND, {"type": "function"}]), "tools[1].tools[1].name"),
        (crm(tools=[FIND | {"name": "x" * 256}]), "tools[1].tools[0].name"),
        (crm(tools=[FIND, FIND | {"name": "b", "parameters": {"x": 1 << 70}}]), "tools[1].tools[1].parameters"),
        (crm(tools=[]) | {"tool_choice": {"type": "function", "name": "find"}}, "tool_choice"),
        ({"tools": [{**CRM, "tools": [FIND]}, FIND | {"name": "crm__find"}]}, "tools[1].name"),  # two that the model can't tell
        ({"tools": [{**CRM, "tools": [{"type": "custom", "name": "x"}]}]}, "tools[0].tools[0].type"),
    ],
)
async def test_what_is_wrong_is_named_as_the_caller_wrote_it(
    noted: tuple[httpx.AsyncClient, list[GenerateRequest]], fields: dict[str, Any], param: str
) -> None:
    http, requests = noted
    error = (await http.post("/v1/responses", json=BODY | fields)).json()["error"]
    assert error["param"] == param, error
    assert requests == []


async def test_a_schema_that_is_refused_is_named_where_it_stands(open_engine: Any, open_app: OpenApp) -> None:
    async def refuse(claim: shmring.Claim) -> None:
        raise refused(f"no (in {parameters_of('crm__drop')}, at #)")

    http = await open_app(await open_engine(refuse, TALKING))
    error = (await http.post("/v1/responses", json=BODY)).json()["error"]
    assert error["param"] == "tools[1].tools[2].parameters", error


@pytest.mark.parametrize("can_keep", [True, False])
async def test_strict_functions_in_namespaces_are_kept_to_or_named(open_engine: Any, open_app: OpenApp, can_keep: bool) -> None:
    description = msgspec.structs.replace(TALKING, strict_tools=can_keep)
    http, requests = await note_requests(open_engine, open_app, description=description)
    strict = [{"type": "function", "name": "find", "strict": True, "parameters": SCHEMA}]
    response = await http.post("/v1/responses", json=BODY | {"tools": [PLAIN, {**CRM, "tools": strict}]})
    assert requests[0].strict_tools == (["crm__find"] if can_keep else [])
    ignored = response.headers.get("x-shmring-ignored-fields")
    assert ignored == (None if can_keep else "tools[1].tools[0].strict")
