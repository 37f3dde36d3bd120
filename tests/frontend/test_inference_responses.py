"""/v1/responses over HTTP, with a small handler as engine: what the engine is sent, what callers get, events of streams.

Answers and events are checked by the types of OpenAI's own client. What is refused: test_refused_bodies.py.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

import shmring
from shmring.engine.executors.interface import StepOutput
from shmring.engine.executors.synthetic import SyntheticExecutor
from shmring.engine.protocol import GenerateReply, SamplingParams, StructuredOutputsParams, ToolCall
from tests.frontend.talking import (
    LARGE_PICTURE,
    OpenTalk,
    Talk,
    in_pieces,
    named_events,
    picture_url,
    said_in,
    say,
    think_and_call,
)

OpenApp = Callable[..., Awaitable[httpx.AsyncClient]]

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
G = TOOL | {"name": "g"}
USER = {"role": "user", "content": "Hi"}
BODY = {"model": "m", "input": "Hi"}

_EVENT = TypeAdapter[Any](ResponseStreamEvent)


def checked_events(text: str) -> list[Any]:
    """The events of a stream; each is what OpenAI's client expects, and its line says its type."""
    events = named_events(text)
    for event in events:
        _EVENT.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def events_of(talk: Talk, **fields: Any) -> list[Any]:
    return checked_events(await talk.ask(PATH, BODY | fields, stream=True))


def shape_of(answer: dict[str, Any]) -> Any:
    """An answer without what differs from one to the next."""
    items = [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in answer["output"]]
    return {name: value for name, value in answer.items() if name not in ("id", "created_at")} | {"output": items}


@pytest.fixture
async def talk(open_talk: OpenTalk) -> Talk:
    return await open_talk()


async def test_an_answer_comes_whole(open_talk: OpenTalk) -> None:
    talk = await open_talk(say)
    fields = {"metadata": {"a": "b"}, "instructions": "Be brief.", "temperature": 0.5, "user": "me"}
    response = await talk.send(PATH, BODY | fields | {"tools": [TOOL]})
    answer = response.json()
    assert Response.model_validate(answer).output_text == "Hello."
    assert answer["id"].startswith("resp_")
    expected = {"object": "response", "model": "m", "status": "completed", "error": None, **fields}
    assert {name: answer[name] for name in expected} == expected
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


async def test_a_stream_has_the_events_of_the_api(open_talk: OpenTalk) -> None:
    talk = await open_talk(say)
    response = await talk.send(PATH, BODY | {"stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = checked_events(response.text)
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
    assert shape_of(last["response"]) == shape_of(await talk.ask(PATH, BODY))


async def test_reasoning_text_and_calls_are_items(open_talk: OpenTalk) -> None:
    talk = await open_talk(think_and_call)
    answer = await talk.ask(PATH, BODY, tools=[TOOL, G])
    Response.model_validate(answer)
    reasoning, message, *calls = answer["output"]
    assert (reasoning["type"], reasoning["content"]) == ("reasoning", [{"type": "reasoning_text", "text": "Hmm."}])
    assert (message["type"], message["content"][0]["text"]) == ("message", "Let me.")
    call = {"type": "function_call", "status": "completed"}
    assert shape_of(answer)["output"][2:] == [
        call | {"name": "f", "arguments": '{"x":1}'},
        call | {"name": "g", "arguments": "{}"},
    ]
    assert len({call["call_id"] for call in calls} | {call["id"] for call in calls}) == 4
    assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}
    events = await events_of(talk, tools=[TOOL, G])
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
    whole = (await http.post(PATH, json=body)).json()
    events = checked_events((await http.post(PATH, json=body | {"stream": True})).text)
    assert shape_of(whole) == shape_of(events[-1]["response"])
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message"] * 2
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}


async def test_an_answer_that_is_cut_off_is_incomplete(open_talk: OpenTalk) -> None:
    async def stop(claim: shmring.Claim) -> None:
        await claim.reply(GenerateReply("", [1], 5, 1, "length"))

    talk = await open_talk(stop)
    answer = await talk.ask(PATH, BODY, max_output_tokens=1)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [(item["type"], item["status"]) for item in answer["output"]] == [("message", "incomplete")]
    assert (await events_of(talk))[-1]["type"] == "response.incomplete"


# -- what the engine is sent ----------------------------------------------------------------------------------------------


async def test_items_become_messages(talk: Talk) -> None:
    """Also those of an answer, which clients send back as they are."""
    asked = [{"type": "input_text", "text": "What?"}, {"type": "input_image", "image_url": picture_url()}]
    answered = [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]
    items = [
        {"role": "user", "content": asked},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": answered},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": '{"x":1}', "status": "completed"},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "Rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "Sun"}]},
        {"role": "developer", "content": "Now."},
    ]
    body = {
        "model": "m",
        "input": items,
        "instructions": "Be brief.",
        "max_output_tokens": 7,
        "seed": 4,
        "stop": "x",
        "tools": [TOOL | {"description": "It looks."}],
        "reasoning": {"effort": "low"},
        "parallel_tool_calls": False,
        "presence_penalty": 0.5,
        "stop_token_ids": [3],
    }
    assert await talk.ignored(PATH, body) == "input[1]"
    [request] = talk.requests
    assert said_in(request) == [
        ("system", ["Be brief."]),
        ("user", ["What?", 0]),
        ("assistant", ["I look."]),
        ("tool", ["Rain"]),
        ("tool", ["Sun"]),
        ("developer", ["Now."]),
    ]
    assert len(request.media) == 1
    assert request.messages[2].tool_calls == [ToolCall("f", '{"x":1}', "c1"), ToolCall("g", "{}", "c2", 1)]
    assert [message.tool_call_id for message in request.messages[3:5]] == ["c1", "c2"]
    function = {"name": "f", "description": "It looks.", "parameters": {"type": "object"}}
    assert request.tools == [{"type": "function", "function": function}]
    assert request.sampling == SamplingParams(max_tokens=7, seed=4, stop=["x"], presence_penalty=0.5, stop_token_ids=[3])
    assert (request.template_options, request.parallel_tool_calls) == ({"reasoning_effort": "low"}, False)


async def test_encrypted_reasoning_may_be_asked_for(talk: Talk) -> None:
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "of-another-server"}
    body = {"model": "m", "store": False, "input": [USER, reasoning]}
    for include in ([], ["reasoning.encrypted_content", "message.input_image.image_url"]):
        assert await talk.ignored(PATH, body, include=include) == "input[1]"
        assert said_in(talk.requests.pop()) == [("user", ["Hi"])]


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
OF_SCHEMA = StructuredOutputsParams(json='{"type":"object","properties":{"a":{"type":"integer"}}}')


async def test_forms_and_required_calls_are_those_of_chats(talk: Talk) -> None:
    for fields, form in (
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}}, OF_SCHEMA),
        ({"text": {"format": {"type": "json_object"}}}, StructuredOutputsParams(json_object=True)),
        ({"structured_outputs": {"regex": "a+"}}, StructuredOutputsParams(regex="a+")),
    ):
        await talk.ask(PATH, BODY, **fields)
        assert talk.requests.pop().sampling.structured_outputs == form
    named = {"type": "function", "name": "g"}
    for choice, names, mode in (
        ("required", ["f", "g"], "required"),
        (named, ["g"], "required"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [named]}, ["g"], "auto"),
    ):
        await talk.ask(PATH, BODY, tools=[TOOL, G], tool_choice=choice)
        request = talk.requests.pop()
        assert ([tool["function"]["name"] for tool in request.tools], request.tool_choice) == (names, mode)


async def test_a_call_without_a_message_before_it_gets_one(talk: Talk) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    await talk.ask(PATH, BODY, input=[USER, call])
    messages = talk.requests[0].messages
    assert [(message.role, len(message.tool_calls)) for message in messages] == [("user", 0), ("assistant", 1)]


async def test_options_beside_a_large_picture_come_back_whole(talk: Talk) -> None:
    """Though the picture is cut out of the body."""
    options = {"metadata": {"a": "x" * 512}, "user": "me"}
    parts = [{"type": "input_image", "image_url": picture_url(LARGE_PICTURE)}]
    body = json.dumps({"model": "m", "input": [{"role": "user", "content": parts}], **options}).encode()
    assert len(body) > 1 << 20
    response = await talk.http.post(PATH, content=in_pieces(body))
    assert (response.status_code, {name: response.json()[name] for name in options}) == (200, options)
