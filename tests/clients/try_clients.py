"""What people call such a server with: each client asks, calls a tool and says what that returned."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable

import instructor
import openai
from langchain_core.messages import ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

ARGUMENTS = {"city": "Ulm", "days": 3}
RAIN = "It rains in Ulm."
HELLO = [{"role": "user", "content": "How is the weather in Ulm?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "Weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    days: int


def try_openai(url: str, model: str) -> None:
    client = openai.OpenAI(base_url=url, api_key="none")
    answer = client.chat.completions.create(model=model, messages=HELLO, tools=[TOOL])
    [call] = answer.choices[0].message.tool_calls
    assert (call.function.name, Weather.model_validate_json(call.function.arguments).model_dump()) == ("Weather", ARGUMENTS)
    assert answer.choices[0].finish_reason == "tool_calls"
    returned = {"role": "tool", "tool_call_id": call.id, "content": "Rain"}
    again = client.chat.completions.create(model=model, messages=[*HELLO, answer.choices[0].message, returned], tools=[TOOL])
    assert again.choices[0].message.content == RAIN
    assert client.completions.create(model=model, prompt="<|says|>").choices[0].text == RAIN
    try:
        client.chat.completions.create(model=model, messages=HELLO, tools=[TOOL], tool_choice="required")
    except openai.BadRequestError as error:
        refused = error.param
    else:
        refused = None
    assert refused == "tool_choice"


async def try_openai_async(url: str, model: str) -> None:
    client = openai.AsyncOpenAI(base_url=url, api_key="none")
    stream = await client.chat.completions.create(model=model, messages=HELLO, tools=[TOOL], stream=True)
    deltas = [chunk.choices[0].delta async for chunk in stream]
    assert "".join(delta.content or "" for delta in deltas) == "I look."
    [call] = [call for delta in deltas for call in delta.tool_calls or []]
    assert Weather.model_validate_json(call.function.arguments).model_dump() == ARGUMENTS


def try_langchain(url: str, model: str) -> None:
    chat = ChatOpenAI(base_url=url, api_key="none", model=model).bind_tools([Weather])
    answer = chat.invoke("How is the weather in Ulm?")
    [call] = answer.tool_calls
    assert (call["name"], call["args"]) == ("Weather", ARGUMENTS)
    returned = ToolMessage("Rain", tool_call_id=call["id"])
    assert chat.invoke([("user", "How is the weather in Ulm?"), answer, returned]).content == RAIN


def try_instructor(url: str, model: str) -> None:
    """With calls that the model may make; the modes in which it must are refused, since nothing makes it do so."""
    client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="none"), mode=instructor.Mode.PARALLEL_TOOLS)
    [found] = client.chat.completions.create(model=model, messages=HELLO, response_model=Iterable[Weather])
    assert found.model_dump() == ARGUMENTS


def main() -> None:
    url, model = sys.argv[1:]
    try_openai(url, model)
    asyncio.run(try_openai_async(url, model))
    for attempt in (try_langchain, try_instructor):
        attempt(url, model)
        print(f"{attempt.__name__}: as it should be")


if __name__ == "__main__":
    main()
