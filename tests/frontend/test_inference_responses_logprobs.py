"""How likely the tokens of an answer of /v1/responses were, over HTTP, with a small handler as engine.

Answers and events are checked by the types of OpenAI's own client.
"""

from __future__ import annotations

from typing import Any

import openai
from openai.types.responses import Response, ResponseOutputMessage, ResponseOutputText, ResponseStreamEvent
from openai.types.responses.response_output_text import Logprob
from pydantic import TypeAdapter

import shmring
from shmring.engine.protocol import GenerateReply, GenerateRequest, TokenLogprobs, ToolCall
from tests.frontend.talking import MODEL, OpenTalk, named_events, said_in

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
BODY: dict[str, Any] = {"model": "m", "input": "Hi"}
LIKELY = BODY | {"include": ["message.output_text.logprobs"], "top_logprobs": 2}

_EVENT = TypeAdapter[Any](ResponseStreamEvent)


def tokens(*texts: str) -> list[TokenLogprobs]:
    return [TokenLogprobs(text.encode(), -0.5, [(text.encode(), -0.5), (b"\xf0\x9f", -1.5)]) for text in texts]


async def think_and_call(claim: shmring.Claim) -> None:
    """Thinks, says something, calls a tool and says more. What marks these is no text, and some text comes late."""
    await claim.reply(GenerateReply("", [1, 2], 5, 2, reasoning="Hm", logprobs=tokens("<think>", "Hm")))
    await claim.reply(GenerateReply("Let", [3, 4], 5, 4, reasoning=".", logprobs=tokens(".", "</think>", "Let")))
    await claim.reply(GenerateReply("", [5], 5, 5, logprobs=tokens(" m")))
    await claim.reply(GenerateReply(" mé.", [6], 5, 6, logprobs=tokens("é", ".", "<tool_call>")))
    of_call = [TokenLogprobs(text, -9.0, []) for text in (b'{"q":"', b"So", b".", b'"}', b"</tool_call>")]
    await claim.reply(GenerateReply("", [7], 5, 7, None, [ToolCall("f", '{"q":"So."}')], logprobs=of_call))
    await claim.reply(GenerateReply("So.", [8], 5, 8, "tool_calls", logprobs=tokens("So", ".", "<|end|>")))


def logprobs_of(answer: Any) -> list[list[Logprob]]:
    found = []
    for item in Response.model_validate(answer, strict=True).output:
        if isinstance(item, ResponseOutputMessage):
            [part] = item.content
            assert isinstance(part, ResponseOutputText)
            assert part.logprobs is not None
            found.append(part.logprobs)
    return found


async def test_a_whole_answer_says_how_likely_the_tokens_of_its_text_were(open_talk: OpenTalk) -> None:
    talk = await open_talk(think_and_call)
    answer = await talk.ask(PATH, LIKELY, tools=[TOOL])
    assert answer["top_logprobs"] == 2
    first, second = logprobs_of(answer)
    assert [token.token for token in first] == ["Let", " m", "é", "."]
    assert [(token.token, token.logprob) for token in second] == [("So", -0.5), (".", -0.5)]
    assert first[2].model_dump() == {
        "token": "é",
        "bytes": [195, 169],
        "logprob": -0.5,
        "top_logprobs": [
            {"token": "é", "bytes": [195, 169], "logprob": -0.5},
            {"token": "\ufffd", "bytes": [0xF0, 0x9F], "logprob": -1.5},
        ],
    }


async def test_a_stream_says_it_with_each_piece_of_text(open_talk: OpenTalk) -> None:
    talk = await open_talk(think_and_call)
    written = named_events(await talk.ask(PATH, LIKELY, tools=[TOOL], stream=True))
    events = [_EVENT.validate_python(event) for event in written]
    deltas = [
        (event.delta, [token.token for token in event.logprobs])
        for event in events
        if event.type == "response.output_text.delta"
    ]
    assert deltas == [("Let", ["Let"]), (" mé.", [" m", "é", "."]), ("So.", ["So", "."])]
    done = [event["logprobs"] for event in written if event["type"] == "response.output_text.done"]
    parts = [
        event["part"]["logprobs"]
        for event in written
        if event["type"] == "response.content_part.done" and "logprobs" in event["part"]
    ]
    items = [
        event["item"]["content"][0]["logprobs"]
        for event in written
        if event["type"] == "response.output_item.done" and event["item"]["type"] == "message"
    ]
    assert done == parts == items
    assert [[token["token"] for token in each] for each in done] == [["Let", " m", "é", "."], ["So", "."]]
    assert logprobs_of(written[-1]["response"]) == [[Logprob.model_validate(token) for token in each] for each in done]


async def test_without_include_nothing_is_said(open_talk: OpenTalk) -> None:
    talk = await open_talk()
    for fields, asked, ignored in (
        ({}, None, None),
        ({"top_logprobs": 0}, None, None),
        ({"top_logprobs": 3}, None, "top_logprobs"),
        ({"include": LIKELY["include"]}, 0, None),
        (LIKELY, 2, None),
    ):
        response = await talk.send(PATH, BODY | fields)
        assert talk.requests[-1].sampling.logprobs == asked
        assert response.headers.get("x-shmring-ignored-fields") == ignored
        assert logprobs_of(response.json()) == [[]]


async def test_a_conversation_goes_on_without_them(open_engine: Any, open_server: Any) -> None:
    """As OpenAI's own client sends an answer back, and as the server has kept it; the answer itself is kept with them."""
    requests: list[GenerateRequest] = []

    async def say(claim: shmring.Claim) -> None:
        requests.append(claim.payload)
        await claim.reply(GenerateReply("Yes.", [1], 1, 1, "stop", logprobs=tokens("Yes", ".")))

    url = await open_server(await open_engine(say, MODEL))
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        options: Any = {"model": "m", "include": LIKELY["include"], "top_logprobs": 2}
        first = await client.responses.create(input="Hi", **options)
        assert (await client.responses.retrieve(first.id)).output == first.output
        items: Any = [{"role": "user", "content": "Hi"}, *first.output, {"role": "user", "content": "Why?"}]
        await client.responses.create(input=items, **options)
        kept = await client.responses.create(input="Why?", previous_response_id=first.id, **options)
        listed = await client.responses.input_items.list(kept.id, order="asc")
        answered: Any = listed.data[1]
        assert answered.content[0].logprobs == []
    for request in requests[1:]:
        assert [texts for _, texts in said_in(request)] == [["Hi"], ["Yes."], ["Why?"]]
