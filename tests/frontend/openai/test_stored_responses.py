"""Responses that the server keeps: over HTTP, with OpenAI's own client and its types, and with a small handler as engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseItem
from pydantic import TypeAdapter

import shmring
from shmring.engine.protocol import GenerateReply, GenerateRequest, MediumPart, ToolCall
from shmring.frontend.openai.input_items import _part
from tests.frontend.talking import LARGE_PICTURE, MODEL, PICTURE, picture_url, said_in

OpenApp = Callable[..., Awaitable[httpx.AsyncClient]]

TOOL: Any = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
KEYS = ("a-key-of-mine", "a-key-of-yours")


class Conversation:
    """An engine that calls a tool, and says what it has heard."""

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []

    async def answer(self, claim: shmring.Claim) -> None:
        request = claim.payload
        self.requests.append(request)
        if request.tools and request.messages[-1].role != "tool":
            await claim.reply(GenerateReply("Let me", [1], 5, 1, reasoning="Hm"))
            await claim.reply(GenerateReply("", [2], 5, 2, "tool_calls", [ToolCall("f", '{"x":1}')]))
        else:
            await claim.reply(GenerateReply(f"answer {len(self.requests)}", [1], 5, 1, "stop"))

    @property
    def heard(self) -> list[tuple[str, list[Any]]]:
        """The messages of the last request."""
        return said_in(self.requests[-1])


@pytest.fixture
def talk() -> Conversation:
    return Conversation()


@pytest.fixture
async def url(talk: Conversation, open_engine: Any, open_server: Any) -> str:
    address: str = await open_server(await open_engine(talk.answer, MODEL), api_keys=KEYS)
    return address


@pytest.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEYS[0], max_retries=0) as mine:
        yield mine


@pytest.fixture
async def others(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEYS[1], max_retries=0) as yours:
        yield yours


async def check_unknown(client: openai.AsyncOpenAI, *names: str | None) -> None:
    """A caller finds none of these responses, and goes on from none."""
    for name in names:
        assert name is not None
        for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError, match="store to false"):
                await ask(name)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="m", input="Two", previous_response_id=name)
        assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


async def test_a_response_is_gone_on_from(client: openai.AsyncOpenAI, talk: Conversation) -> None:
    first = await client.responses.create(model="m", input="One", instructions="Be brief.")
    assert (first.store, first.previous_response_id) == (True, None)
    second = await client.responses.create(model="m", input=[{"role": "user", "content": "Two"}], previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert talk.heard == [("user", ["One"]), ("assistant", ["answer 1"]), ("user", ["Two"])]
    async with client.responses.stream(model="m", input="Three", previous_response_id=second.id, instructions="Now.") as stream:
        third = await stream.get_final_response()
    assert talk.heard == [
        ("system", ["Now."]),
        ("user", ["One"]),
        ("assistant", ["answer 1"]),
        ("user", ["Two"]),
        ("assistant", ["answer 2"]),
        ("user", ["Three"]),
    ]
    await client.responses.create(model="m", input="Four", previous_response_id=third.id)
    assert len(talk.heard) == 7


async def test_items_are_referred_to_as_the_ai_sdk_does(client: openai.AsyncOpenAI, talk: Conversation) -> None:
    user: Any = {"role": "user", "content": [{"type": "input_text", "text": "Go"}]}
    first = await client.responses.create(model="m", input=[user], tools=[TOOL])
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    references: Any = [{"type": "item_reference", "id": item.id} for item in first.output]
    call: Any = first.output[-1]
    returned: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "4"}
    second = await client.responses.create(model="m", input=[user, *references, returned], tools=[TOOL])
    assert second.output_text == "answer 2"
    assert talk.heard == [("user", ["Go"]), ("assistant", ["Let me"]), ("tool", ["4"])]
    [made] = talk.requests[-1].messages[1].tool_calls
    assert (made.id, made.arguments) == (call.call_id, '{"x":1}')
    # The type of a reference may be left out.
    untyped: Any = [{"id": reference["id"]} for reference in references]
    await client.responses.create(model="m", input=[user, *untyped, returned], tools=[TOOL])
    assert talk.heard == [("user", ["Go"]), ("assistant", ["Let me"]), ("tool", ["4"])]
    # All of it is kept as what it stands for, so that it can be gone on from.
    await client.responses.create(model="m", input="And?", previous_response_id=second.id)
    assert [role for role, _ in talk.heard] == ["user", "assistant", "tool", "assistant", "user"]


async def test_a_response_is_returned_cancelled_and_deleted(client: openai.AsyncOpenAI, url: str) -> None:
    made = await client.responses.create(model="m", input="One", metadata={"a": "b"})
    assert await client.responses.retrieve(made.id) == made
    with pytest.raises(openai.BadRequestError, match="is complete"):
        await client.responses.cancel(made.id)
    with pytest.raises(openai.BadRequestError, match="leave stream out"):
        await client.responses.retrieve(made.id, stream=True)
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {KEYS[0]}"}) as http:
        answer = (await http.delete(f"{url}/v1/responses/{made.id}")).json()
    assert answer == {"id": made.id, "deleted": True, "object": "response"}
    await check_unknown(client, made.id)


async def test_the_input_of_a_response_is_listed(client: openai.AsyncOpenAI, others: openai.AsyncOpenAI) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    asked: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Go"}, {"type": "text", "text": "on"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": "fc_mine"},
        {"type": "function_call_output", "call_id": "c", "output": "4"},
    ]
    first = await client.responses.create(model="m", input=asked, tools=[TOOL])
    second = await client.responses.create(model="m", input="And?", previous_response_id=first.id)
    found = [item async for item in client.responses.input_items.list(second.id, order="asc", limit=2)]  # in pages
    assert [item.type for item in found] == [
        "message",
        "message",
        "function_call",
        "function_call_output",
        "message",
        "message",
    ]
    assert [item.id for item in found][2] == "fc_mine"
    assert found[4].id == first.output[0].id
    assert len({item.id for item in found}) == len(found)
    texts = [[part.text for part in item.content] for item in found if item.type == "message"]
    assert texts == [["Be brief."], ["Go", "on"], ["answer 1"], ["And?"]]
    for item in found:
        TypeAdapter(ResponseItem).validate_python(item.model_dump(), strict=True)
    page = await client.responses.input_items.list(second.id)
    assert [item.id for item in page.data] == [item.id for item in reversed(found)]
    assert page.has_more is False
    written = _part(picture, "input_text")
    assert written == {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "auto"}
    for query, param in (({"limit": 0}, "limit"), ({"order": "up"}, "order"), ({"after": "x"}, "after")):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.input_items.list(first.id, **query)
        assert caught.value.param == param
    for ask in (others.responses.input_items.list(first.id), client.responses.input_items.list("resp_x")):
        with pytest.raises(openai.NotFoundError):
            await ask


async def test_the_name_of_an_item_is_none_of_a_response(client: openai.AsyncOpenAI) -> None:
    made = await client.responses.create(model="m", input="One")
    item = made.output[0].id or ""
    await check_unknown(client, item, item.replace("msg", "resp"), made.id.replace("resp", "msg"), f"{made.id}0")
    assert (await client.responses.retrieve(made.id)).id == made.id


async def test_what_is_streamed_is_there_when_its_last_event_has_come(client: openai.AsyncOpenAI) -> None:
    found = None
    async with await client.responses.create(model="m", input="One", stream=True) as stream:
        async for event in stream:
            if event.type == "response.completed":
                assert event.response.store
                found = (await client.responses.retrieve(event.response.id)).output_text
    assert found == "answer 1"


async def test_what_is_not_to_be_kept_is_not(client: openai.AsyncOpenAI) -> None:
    made = await client.responses.create(model="m", input="One", store=False)
    assert made.store is False
    await check_unknown(client, made.id)
    item: Any = {"type": "item_reference", "id": made.output[0].id}
    with pytest.raises(openai.NotFoundError) as caught:
        await client.responses.create(model="m", input=[{"role": "user", "content": "Two"}, item])
    assert (caught.value.code, caught.value.param) == ("item_not_found", "input[1].id")


async def test_one_callers_items_are_never_anothers(client: openai.AsyncOpenAI, others: openai.AsyncOpenAI) -> None:
    made = await client.responses.create(model="m", input="One")
    await check_unknown(others, made.id)
    with pytest.raises(openai.NotFoundError):
        await others.responses.create(model="m", input=[{"type": "item_reference", "id": made.output[0].id}])
    assert (await client.responses.retrieve(made.id)).id == made.id


async def test_pictures_are_kept_with_the_conversation(client: openai.AsyncOpenAI, talk: Conversation) -> None:
    """Also those that are so large that they are cut out of their body."""
    for pixels in (PICTURE, LARGE_PICTURE):
        part: Any = {"type": "input_image", "image_url": picture_url(pixels), "detail": "auto"}
        question: Any = {"role": "user", "content": [{"type": "input_text", "text": "What?"}, part]}
        first = await client.responses.create(model="m", input=[question])
        assert first.store
        await client.responses.create(model="m", input="And?", previous_response_id=first.id)
        assert talk.heard[0] == ("user", ["What?", 0])
        assert isinstance(talk.requests[-1].messages[0].parts[1], MediumPart)


async def test_what_is_too_large_is_answered_and_says_that_it_is_not_kept(
    open_engine: Any, open_app: OpenApp, talk: Conversation
) -> None:
    http = await open_app(await open_engine(talk.answer, MODEL), response_store_nbytes=128 << 10)
    answer = (await http.post("/v1/responses", json={"model": "m", "input": "x" * 100_000})).json()
    assert (answer["status"], answer["store"]) == ("completed", False)
    assert (await http.get(f"/v1/responses/{answer['id']}")).status_code == 404
    small = (await http.post("/v1/responses", json={"model": "m", "input": "x"})).json()
    assert (await http.get(f"/v1/responses/{small['id']}")).json() == small
    Response.model_validate(small)


async def test_a_server_may_keep_none(open_engine: Any, open_app: OpenApp, talk: Conversation) -> None:
    http = await open_app(await open_engine(talk.answer, MODEL), response_lifetime_s=0.0)
    answer = (await http.post("/v1/responses", json={"model": "m", "input": "Hi"})).json()
    assert answer["store"] is False
    for fields, status, param in (
        ({"store": True}, 400, "store"),
        ({"previous_response_id": answer["id"]}, 400, "previous_response_id"),
        ({"input": [{"type": "item_reference", "id": answer["output"][0]["id"]}]}, 404, "input[0].id"),
    ):
        response = await http.post("/v1/responses", json={"model": "m", "input": "Hi", **fields})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (status, param), error
        assert "store to false" in error["message"]
        assert "--response-lifetime" in error["message"]
    assert (await http.get(f"/v1/responses/{answer['id']}")).status_code == 404


async def test_a_conversation_has_only_so_many_items(open_engine: Any, open_app: OpenApp, talk: Conversation) -> None:
    http = await open_app(await open_engine(talk.answer, MODEL))
    items = [{"role": "user", "content": "x"}] * 4000
    first = (await http.post("/v1/responses", json={"model": "m", "input": items})).json()
    body = {"model": "m", "input": items[:200], "previous_response_id": first["id"]}
    response = await http.post("/v1/responses", content=json.dumps(body))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "previous_response_id")
