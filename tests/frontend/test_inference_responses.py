"""/v1/responses over HTTP, with a small handler as engine: what the engine is sent, what callers get, events of streams.

Answers and events are checked by the types of OpenAI's own client.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import msgspec
import numpy as np
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

import shmring
from shmring.engine.executors.interface import StepOutput
from shmring.engine.executors.synthetic import SyntheticExecutor
from shmring.engine.protocol import (
    CAPABILITIES,
    GenerateReply,
    GenerateRequest,
    InputSpec,
    MediumPart,
    ModelDescription,
    PictureSpec,
    StructuredOutputsParams,
    TextPart,
)
from tests.frontend.talking import in_pieces, named_events, say, think_and_call
from tests.tables import for_each

OpenApp = Callable[..., Awaitable[httpx.AsyncClient]]

PIXELS = np.random.default_rng(6).integers(0, 256, (24, 32, 3), np.uint8)
TALKING = ModelDescription(
    "test",
    "m",
    ["generate"],
    InputSpec(picture=PictureSpec()),
    8,
    tools=True,
    template_options=True,
    reasoning_effort=True,
)
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
BODY = {"model": "m", "input": "Hi"}

_EVENT = TypeAdapter[Any](ResponseStreamEvent)


def events_of(text: str) -> list[Any]:
    """The events of a stream; each is what OpenAI's client expects, and its line says its type."""
    events = named_events(text)
    for event in events:
        _EVENT.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def note_requests(open_engine: Any, open_app: OpenApp) -> tuple[httpx.AsyncClient, list[GenerateRequest]]:
    requests: list[GenerateRequest] = []

    async def note(claim: shmring.Claim) -> None:
        requests.append(claim.payload)
        await claim.reply(GenerateReply("yes", [1], 1, 1, "stop"))

    return await open_app(await open_engine(note, TALKING)), requests


@pytest.fixture
async def noted(open_engine: Any, open_app: OpenApp) -> tuple[httpx.AsyncClient, list[GenerateRequest]]:
    return await note_requests(open_engine, open_app)


async def test_an_answer_comes_whole(open_engine: Any, open_app: OpenApp) -> None:
    http = await open_app(await open_engine(say, TALKING))
    fields = {"metadata": {"a": "b"}, "instructions": "Be brief.", "temperature": 0.5, "tools": [TOOL], "user": "me"}
    response = await http.post("/v1/responses", json=BODY | fields)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert Response.model_validate(answer).output_text == "Hello."
    assert answer["id"].startswith("resp_")
    assert (answer["object"], answer["model"], answer["status"], answer["error"]) == ("response", "m", "completed", None)
    assert {name: answer[name] for name in ("metadata", "instructions", "temperature", "user")} == {
        name: fields[name] for name in ("metadata", "instructions", "temperature", "user")
    }
    assert answer["tools"] == [TOOL | {"description": None, "strict": None}]
    [message] = answer["output"]
    assert message["id"].startswith("msg_")
    assert message == {
        "type": "message",
        "id": message["id"],
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "Hello.", "annotations": [], "logprobs": []}],
    }
    usage = answer["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (5, 2, 7)
    assert {"x-shmring-slab-bytes", "x-shmring-copies"} <= set(response.headers)


async def test_a_stream_has_the_events_of_the_api(open_engine: Any, open_app: OpenApp) -> None:
    http = await open_app(await open_engine(say, TALKING))
    response = await http.post("/v1/responses", json=BODY | {"stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = events_of(response.text)
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert [event["delta"] for event in events if "delta" in event] == ["Hel", "lo."]
    assert (events[0]["response"]["status"], events[0]["response"]["output"]) == ("in_progress", [])
    added, done, last = events[2], events[-2], events[-1]
    assert (added["item"]["status"], added["item"]["content"]) == ("in_progress", [])
    assert last["response"]["output"] == [done["item"]]
    assert {event["item_id"] for event in events if "item_id" in event} == {done["item"]["id"]}
    whole = (await http.post("/v1/responses", json=BODY)).json()
    assert shape_of(last["response"]) == shape_of(whole)


def shape_of(answer: dict[str, Any]) -> Any:
    """An answer without what differs from one to the next."""
    items = [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in answer["output"]]
    return {name: value for name, value in answer.items() if name not in ("id", "created_at")} | {"output": items}


async def test_reasoning_text_and_calls_are_items(open_engine: Any, open_app: OpenApp) -> None:
    http = await open_app(await open_engine(think_and_call, TALKING))
    body = BODY | {"tools": [TOOL, TOOL | {"name": "g"}]}
    answer = (await http.post("/v1/responses", json=body)).json()
    Response.model_validate(answer)
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message", "function_call", "function_call"]
    reasoning, message, *calls = answer["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hmm."}]
    assert message["content"][0]["text"] == "Let me."
    assert [(call["name"], call["arguments"], call["status"]) for call in calls] == [
        ("f", '{"x":1}', "completed"),
        ("g", "{}", "completed"),
    ]
    assert len({call["call_id"] for call in calls} | {call["id"] for call in calls}) == 4
    assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}
    events = events_of((await http.post("/v1/responses", json=body | {"stream": True})).text)
    assert shape_of(events[-1]["response"]) == shape_of(answer)
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item["status"] for item in added] == ["in_progress"] * 4
    assert [item["arguments"] for item in added[2:]] == ["", ""]
    assert [event["output_index"] for event in events if event["type"] == "response.output_item.done"] == [0, 1, 2, 3]


async def test_an_answer_that_the_engine_sends_whole_has_the_items_of_one_that_it_streams(
    open_core: Any, open_app: OpenApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = ["reasoning"] * 3 + ["text"] * 5 + ["reasoning"] + ["text"] * 2

    def say_next(_: SyntheticExecutor, answer: Any) -> StepOutput:
        answer.sent += 1
        finished = answer.sent == len(kinds)
        reply = GenerateReply("", [answer.sent], 1, answer.sent, "stop" if finished else None)
        setattr(reply, kinds[answer.sent - 1], f"{answer.sent} ")
        return StepOutput(reply, finished=finished)

    monkeypatch.setattr(SyntheticExecutor, "_next_token", say_next)
    http = await open_app(await open_core())
    body = BODY | {"model": "shmring-synthetic"}
    whole = (await http.post("/v1/responses", json=body)).json()
    events = events_of((await http.post("/v1/responses", json=body | {"stream": True})).text)
    assert shape_of(whole) == shape_of(events[-1]["response"])
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message"] * 2
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}


async def test_an_answer_that_is_cut_off_is_incomplete(open_engine: Any, open_app: OpenApp) -> None:
    async def stop(claim: shmring.Claim) -> None:
        await claim.reply(GenerateReply("", [1], 5, 1, "length"))

    http = await open_app(await open_engine(stop, TALKING))
    answer = (await http.post("/v1/responses", json=BODY | {"max_output_tokens": 1})).json()
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [(item["type"], item["status"]) for item in answer["output"]] == [("message", "incomplete")]
    [*_, last] = events_of((await http.post("/v1/responses", json=BODY | {"stream": True})).text)
    assert last["type"] == "response.incomplete"


# -- what the engine is sent ----------------------------------------------------------------------------------------------


async def test_items_become_messages(open_engine: Any, open_app: OpenApp, encoded: Any) -> None:
    """Also those of an answer, which clients send back as they are."""
    import base64

    http, requests = await note_requests(open_engine, open_app)
    url = f"data:image/png;base64,{base64.b64encode(encoded(PIXELS)).decode()}"
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "What?"}, {"type": "input_image", "image_url": url}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": '{"x":1}', "status": "completed"},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "Rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "Sun"}]},
        {"role": "developer", "content": "Now."},
    ]
    fields = {
        "instructions": "Be brief.",
        "max_output_tokens": 7,
        "seed": 4,
        "stop": "x",
        "tools": [TOOL | {"description": "It looks."}],
        "reasoning": {"effort": "low"},
        "parallel_tool_calls": False,
    }
    response = await http.post("/v1/responses", json={"model": "m", "input": items, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["x-shmring-ignored-fields"] == "input[1]"
    [request] = requests
    said = [
        (message.role, [part.text if isinstance(part, TextPart) else part.index for part in message.parts])
        for message in request.messages
    ]
    assert said == [
        ("system", ["Be brief."]),
        ("user", ["What?", 0]),
        ("assistant", ["I look."]),
        ("tool", ["Rain"]),
        ("tool", ["Sun"]),
        ("developer", ["Now."]),
    ]
    assert isinstance(request.messages[1].parts[1], MediumPart)
    calls = request.messages[2].tool_calls
    assert [(call.id, call.name, call.arguments) for call in calls] == [("c1", "f", '{"x":1}'), ("c2", "g", "{}")]
    assert [message.tool_call_id for message in request.messages[3:5]] == ["c1", "c2"]
    assert request.tools == [
        {"type": "function", "function": {"name": "f", "description": "It looks.", "parameters": {"type": "object"}}}
    ]
    assert (request.sampling.max_tokens, request.sampling.seed, request.sampling.stop) == (7, 4, ["x"])
    assert (request.template_options, request.parallel_tool_calls) == ({"reasoning_effort": "low"}, False)


async def test_encrypted_reasoning_may_be_asked_for(
    noted: tuple[httpx.AsyncClient, list[GenerateRequest]],
) -> None:
    http, requests = noted
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "of-another-server"}
    body = {"model": "m", "store": False, "input": [{"role": "user", "content": "Hi"}, reasoning]}
    for include in ([], ["reasoning.encrypted_content", "message.input_image.image_url"]):
        response = await http.post("/v1/responses", json=body | {"include": include})
        assert (response.status_code, response.headers["x-shmring-ignored-fields"]) == (200, "input[1]")
    assert [len(request.messages) for request in requests] == [1, 1]


ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}


async def test_forms_and_required_calls_are_those_of_chats(open_engine: Any, open_app: OpenApp) -> None:
    requests: list[GenerateRequest] = []

    async def note(claim: shmring.Claim) -> None:
        requests.append(claim.payload)
        await claim.reply(GenerateReply("{}", [1], 1, 1, "stop"))

    http = await open_app(await open_engine(note, msgspec.structs.replace(TALKING, capabilities=list(CAPABILITIES))))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for fields in (
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}},
        {"text": {"format": {"type": "json_object"}}},
        {"tools": [TOOL, TOOL | {"name": "g"}], "tool_choice": "required"},
        {"tools": [TOOL, TOOL | {"name": "g"}], "tool_choice": {"type": "function", "name": "g"}},
        {"tools": [TOOL, TOOL | {"name": "g"}], "tool_choice": ALLOWED},
        {"presence_penalty": 0.5, "stop_token_ids": [3], "structured_outputs": {"regex": "a+"}},
    ):
        response = await http.post("/v1/responses", json=BODY | fields)
        assert response.status_code == 200, response.text
    by_schema, by_object, required, named, allowed, beside = requests
    assert by_schema.sampling.structured_outputs is not None
    assert json.loads(by_schema.sampling.structured_outputs.json or "") == schema
    assert by_object.sampling.structured_outputs == StructuredOutputsParams(json_object=True)
    assert [tool["function"]["name"] for tool in required.tools] == ["f", "g"]
    assert [tool["function"]["name"] for tool in named.tools] == ["g"]
    assert [tool["function"]["name"] for tool in allowed.tools] == ["g"]
    assert (required.tool_choice, named.tool_choice, allowed.tool_choice) == ("required", "required", "auto")
    assert (beside.sampling.presence_penalty, beside.sampling.stop_token_ids) == (0.5, [3])
    assert beside.sampling.structured_outputs == StructuredOutputsParams(regex="a+")
    for fields, param in (
        ({"text": {"format": {"type": "json_schema", "schema": schema}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"tool_choice": "required"}, "tool_choice"),
    ):
        error = (await http.post("/v1/responses", json=BODY | fields)).json()["error"]
        assert (error["param"], error["code"]) == (param, "invalid_value"), error


async def test_a_model_without_forms_refuses_them(open_engine: Any, open_app: OpenApp) -> None:
    http = await open_app(await open_engine(say, TALKING))
    error = (await http.post("/v1/responses", json=BODY | {"text": {"format": {"type": "json_object"}}})).json()["error"]
    assert (error["param"], error["code"]) == ("text.format", "unsupported_value")


async def test_a_call_without_a_message_before_it_gets_one(open_engine: Any, open_app: OpenApp) -> None:
    http, requests = await note_requests(open_engine, open_app)
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    assert (
        await http.post("/v1/responses", json=BODY | {"input": [{"role": "user", "content": "Hi"}, call]})
    ).status_code == 200
    assert [(message.role, len(message.tool_calls)) for message in requests[0].messages] == [("user", 0), ("assistant", 1)]


# -- refusals ---------------------------------------------------------------------------------------------------------------

USER = {"role": "user", "content": "Hi"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
BROKEN_PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}


@for_each(
    ("fields", "param"),
    [
        ({"store": "yes"}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"content": "Hi"}]}, "input[0].role"),
        ({"input": [USER, {"role": "user"}]}, "input[1].content"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]}, "input[0].content[0].file_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
        ({"input": [{"role": "user", "content": [{"type": "reasoning_text", "text": ""}]}]}, "input[0].content[0].type"),
        ({"input": [USER, {"role": "user", "content": [BROKEN_PICTURE]}]}, "input[1].content[0].image_url"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id"),
        ({"input": [USER, CALL, CALL | {"arguments": "["}]}, "input[2].arguments"),
        ({"input": [USER, CALL | {"name": None}]}, "input[1].name"),
        ({"input": [USER, {"type": "function_call_output", "output": "x"}]}, "input[1].call_id"),
        ({"input": [USER, {"type": "function_call_output", "call_id": "c"}]}, "input[1].output"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL | {"name": ""}]}, "tools[0].name"),
        ({"tools": [TOOL] * 1025}, "tools"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort"),
        ({"metadata": {"a": "x" * 513}}, "metadata[...]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.tools"),
        ({"n": 2}, "n"),
    ],
)
async def test_what_is_wrong_is_named_as_the_caller_wrote_it(
    noted: tuple[httpx.AsyncClient, list[GenerateRequest]], fields: dict[str, Any], param: str
) -> None:
    http, requests = noted
    for stream in (False, True):
        response = await http.post("/v1/responses", json={**BODY, **fields, "stream": stream})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param), error
        assert "messages[" not in error["message"]
        assert "response_format" not in error["message"]
    assert requests == []


LONG = "A" * (3 << 20)  # it could be a file in base64, so it is cut out of the body


async def test_a_long_text_is_refused_and_never_cut(open_engine: Any, open_app: OpenApp) -> None:
    http, requests = await note_requests(open_engine, open_app)
    for fields, param in (
        ({"metadata": {"a": LONG}}, "metadata"),
        ({"stop": LONG}, "stop"),
        ({"stop": ["x", LONG]}, "stop"),
        ({"user": LONG}, "user"),
        ({"instructions": LONG}, "instructions"),
        ({"model": LONG}, "model"),
        ({"reasoning": {"effort": LONG}}, "reasoning"),
        ({"tools": [TOOL | {"description": LONG}]}, "tools"),
        ({"tools": [TOOL | {"parameters": {LONG: 1}}]}, "tools"),
        ({"text": {"format": {"type": "json_schema", "name": LONG, "schema": {}}}}, "text"),
        ({"chat_template_kwargs": {"x": [LONG]}}, "chat_template_kwargs"),
        ({"logit_bias": {"1": 2}, "user": LONG}, "user"),
    ):
        response = await http.post("/v1/responses", content=in_pieces({**BODY, **fields}))
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, "text_too_long", param), error
        assert "cut-" not in response.text
    assert requests == []


async def test_options_beside_a_large_picture_come_back_whole(open_engine: Any, open_app: OpenApp, encoded: Any) -> None:
    http, _ = await note_requests(open_engine, open_app)
    noise = np.random.default_rng(1).integers(0, 256, (800, 800, 3), np.uint8)
    url = "data:image/png;base64," + base64.b64encode(encoded(noise)).decode()
    assert len(url) > 1 << 20
    metadata = {"a": "x" * 512}
    parts = [{"type": "input_image", "image_url": url}]
    body = {"model": "m", "input": [{"role": "user", "content": parts}], "metadata": metadata, "user": "me"}
    response = await http.post("/v1/responses", content=in_pieces(body))
    assert (response.status_code, response.json()["metadata"], response.json()["user"]) == (200, metadata, "me")


async def test_a_model_that_has_no_tools_refuses_them(open_engine: Any, open_app: OpenApp) -> None:
    http = await open_app(await open_engine(say, msgspec.structs.replace(TALKING, tools=False, template_options=False)))
    for fields, param in (
        ({"tools": [TOOL]}, "tools"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ({"input": [CALL]}, "input"),
    ):
        response = await http.post("/v1/responses", json={**BODY, **fields})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("items", "status", "code"),
    [
        ([USER] * 100_000, 413, "too_many_values"),
        ([USER] * 5000, 400, "invalid_value"),
        ([{"role": "user", "content": [{"type": "input_text", "text": "x"}] * 2500}] * 2, 400, "too_many_parts"),
        ([USER | {"content": "x" * 999_999}] * 5, 400, "text_too_long"),
        ([USER, *[CALL | {"arguments": json.dumps({"x": [0] * 30_000})}] * 2], 413, "too_many_values"),
        ([USER, *[CALL | {"arguments": '{"x":"' + "x" * 999_999 + '"}'}] * 5], 400, "text_too_long"),
    ],
)
async def test_the_limits_are_those_of_chats(open_engine: Any, open_app: OpenApp, items: Any, status: int, code: str) -> None:
    http, requests = await note_requests(open_engine, open_app)
    response = await http.post("/v1/responses", content=json.dumps(BODY | {"input": items}))
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert requests == []


async def test_deep_values_are_refused(open_engine: Any, open_app: OpenApp) -> None:
    http, requests = await note_requests(open_engine, open_app)
    deep: Any = {}
    for _ in range(70):
        deep = {"a": deep}
    for fields in (
        {"tools": [TOOL | {"parameters": deep}]},
        {"text": {"format": {"type": "text", "schema": deep}}},
        {"chat_template_kwargs": deep},
    ):
        assert (await http.post("/v1/responses", json=BODY | fields)).status_code == 400
    for place in ('"summary":', '"x":', '"output":', '"content":'):
        nested = "[" * 30_000 + "]" * 30_000
        text = f'{{"model":"m","input":[{{"type":"reasoning",{place}{nested}}}]}}'
        assert (await http.post("/v1/responses", content=text)).status_code in (400, 413)
    assert requests == []


# -- failures ---------------------------------------------------------------------------------------------------------------


async def test_a_failure_on_the_way_is_the_last_event(open_engine: Any, open_server: Any, eventually: Any) -> None:
    """OpenAI's client raises for it; others find its parts where the API has them."""

    async def fail(claim: shmring.Claim) -> None:
        before = engine.client.ring.statistics().replies
        await claim.reply(GenerateReply("Hel", [1], 5, 1))
        await eventually(lambda: engine.client.ring.statistics().replies > before)  # an error overtakes what was not taken yet
        raise RuntimeError("the model has fallen over")

    engine = await open_engine(fail, TALKING)
    url = await open_server(engine)
    async with httpx.AsyncClient(timeout=30) as http:
        response = await http.post(f"{url}/v1/responses", json=BODY | {"stream": True})
    *_, last = events_of(response.text)
    assert (last["type"], last["code"]) == ("error", "engine_error")
    assert last["message"] == last["error"]["message"]
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.responses.create(model="m", input="Hi", stream=True)
        with pytest.raises(openai.APIError, match="engine"):
            async for _ in stream:
                pass


async def test_who_hangs_up_aborts_the_request(open_engine: Any, open_server: Any, eventually: Any) -> None:
    aborted = asyncio.Event()

    async def go_on(claim: shmring.Claim) -> None:
        try:
            while True:  # of a caller that has gone, the server learns when it sends something
                await claim.reply(GenerateReply("Hel", [1], 5, 1))
                await asyncio.sleep(0.01)
        finally:
            aborted.set()

    engine = await open_engine(go_on, TALKING)
    url = await open_server(engine)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        async with await client.responses.create(model="m", input="Hi", stream=True) as stream:
            async for event in stream:
                if event.type == "response.output_text.delta":
                    break
        await asyncio.wait_for(aborted.wait(), 30)
    await eventually(lambda: engine.ring.statistics().running == 0)
