"""What people call such a server with: each client asks, calls a tool and says what that returned."""

from __future__ import annotations

import asyncio
import base64
import io
import sys
import wave
from collections.abc import Iterable
from typing import Literal

import agents
import anthropic
import instructor
import litellm
import openai
import pydantic_ai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from llama_index.core.llms import AudioBlock, ChatMessage, ImageBlock, TextBlock
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

ARGUMENTS = {"city": "Ulm", "days": 3}
RAIN = "It rains in Ulm."
PICTURE = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4//8/AAX+Av4N70a4AAAAAElFTkSuQmCC"
SECONDS = 2  # of silence
HELLO = [{"role": "user", "content": "How is the weather in Ulm?"}]
LIKELY = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
TOOL = {
    "type": "function",
    "function": {
        "name": "Weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}


def recording() -> bytes:
    """A WAV file."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(16_000)
        writer.writeframes(bytes(2 * 16_000 * SECONDS))
    return file.getvalue()


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    days: int


class Report(BaseModel):
    """The same, in a form that has an end, since the model chooses anything else at random."""

    city: str = Field(max_length=5)
    days: int = Field(ge=0, le=9)


class Choice(BaseModel):
    """The same where a client leaves numbers out of a schema."""

    city: Literal["Ulm", "Aalen"]
    days: Literal["1", "2"]


class Anything(BaseModel):
    """Any JSON object: the mode JSON leaves the form to the model, and this one knows none."""


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
    for choice in ("required", {"type": "function", "function": {"name": "Weather"}}):
        answer = client.chat.completions.create(
            model=model, messages=HELLO, tools=[openai.pydantic_function_tool(Report, name="Weather")], tool_choice=choice
        )
        for call in answer.choices[0].message.tool_calls:
            Report.model_validate_json(call.function.arguments)
    parsed = client.chat.completions.parse(model=model, messages=HELLO, response_format=Report, n=2, seed=1)
    assert all(isinstance(choice.message.parsed, Report) for choice in parsed.choices)
    assert [choice.index for choice in parsed.choices] == [0, 1]
    likely = client.chat.completions.create(model=model, messages=HELLO, logprobs=True, top_logprobs=2, temperature=0)
    tokens = likely.choices[0].logprobs.content
    assert "".join(token.token for token in tokens).startswith(RAIN)
    assert all(token.top_logprobs[0].logprob == token.logprob for token in tokens)
    said = client.completions.create(model=model, prompt="<|says|>", logprobs=1, temperature=0).choices[0]
    assert "".join(said.logprobs.tokens).startswith(said.text)
    try:
        client.chat.completions.create(
            model=model,
            messages=HELLO,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "cat"}}},
        )
    except openai.BadRequestError as error:
        refused, param = error.body["message"], error.param
    else:
        refused = param = ""
    assert "can't be compiled" in refused
    assert param == "response_format.json_schema.schema"


def try_responses(url: str, model: str) -> None:
    client = openai.OpenAI(base_url=url, api_key="none")
    tool = {"type": "function", **TOOL["function"]}
    answer = client.responses.create(model=model, input=HELLO, tools=[tool])
    message, call = answer.output
    assert (message.content[0].text, call.type) == ("I look.", "function_call")
    assert (call.name, Weather.model_validate_json(call.arguments).model_dump()) == ("Weather", ARGUMENTS)
    returned = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain"}
    again = client.responses.create(model=model, input=[*HELLO, *answer.output, returned], tools=[tool])
    assert (again.output_text, again.status) == (RAIN, "completed")
    with client.responses.stream(model=model, input="Hello", instructions="Be brief.") as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == stream.get_final_response().output_text == RAIN
    assert isinstance(client.responses.parse(model=model, input="Hello", text_format=Report).output_parsed, Report)
    likely = client.responses.create(model=model, input=HELLO, tools=[tool], temperature=0, **LIKELY)
    [text] = likely.output[0].content
    assert "".join(token.token for token in text.logprobs) == text.text == "I look."
    assert all(token.top_logprobs[0].logprob == token.logprob for token in text.logprobs)
    going_on = client.responses.create(model=model, input=[returned], previous_response_id=answer.id, tools=[tool])
    assert going_on.output_text == RAIN
    assert client.responses.retrieve(going_on.id).output_text == RAIN
    kinds = [item.type for item in client.responses.input_items.list(going_on.id, order="asc", limit=2)]  # in pages
    assert kinds == ["message", "message", "function_call", "function_call_output"]
    client.responses.delete(going_on.id)
    try:
        client.responses.create(model=model, input="Hello", previous_response_id=going_on.id)
    except openai.BadRequestError as error:
        refused = error.param
    else:
        refused = None
    assert refused == "previous_response_id"


async def try_responses_async(url: str, model: str) -> None:
    client = openai.AsyncOpenAI(base_url=url, api_key="none")
    tool = {"type": "function", **TOOL["function"]}
    events = [event async for event in await client.responses.create(model=model, input="Hello", tools=[tool], stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    [call] = [item for item in events[-1].response.output if item.type == "function_call"]
    assert Weather.model_validate_json(call.arguments).model_dump() == ARGUMENTS
    stream = await client.responses.create(model=model, input="Hello", temperature=0, stream=True, **LIKELY)
    deltas = [event async for event in stream if event.type == "response.output_text.delta"]
    assert all("".join(token.token for token in event.logprobs) == event.delta for event in deltas)
    assert "".join(event.delta for event in deltas) == RAIN


def try_others_of_openai(url: str, model: str) -> None:
    client = openai.OpenAI(base_url=url, api_key="none")
    said = client.completions.create(model=model, prompt=["<|says|>", "<|says|>"], temperature=0)
    assert [(choice.index, choice.text) for choice in said.choices] == [(0, RAIN), (1, RAIN)]
    embedded = client.embeddings.create(model=model, input=[[1, 2], [3]])
    assert [item.index for item in embedded.data] == [0, 1]


async def try_openai_async(url: str, model: str) -> None:
    client = openai.AsyncOpenAI(base_url=url, api_key="none")
    stream = await client.chat.completions.create(model=model, messages=HELLO, tools=[TOOL], stream=True)
    deltas = [chunk.choices[0].delta async for chunk in stream]
    assert "".join(delta.content or "" for delta in deltas) == "I look."
    [call] = [call for delta in deltas for call in delta.tool_calls or []]
    assert Weather.model_validate_json(call.function.arguments).model_dump() == ARGUMENTS
    async with client.chat.completions.stream(model=model, messages=HELLO, response_format=Report) as parsing:
        async for _ in parsing:
            pass
        final = await parsing.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Report)


def try_langchain(url: str, model: str) -> None:
    chat = ChatOpenAI(base_url=url, api_key="none", model=model).bind_tools([Weather])
    answer = chat.invoke("How is the weather in Ulm?")
    [call] = answer.tool_calls
    assert (call["name"], call["args"]) == ("Weather", ARGUMENTS)
    returned = ToolMessage("Rain", tool_call_id=call["id"])
    assert chat.invoke([("user", "How is the weather in Ulm?"), answer, returned]).content == RAIN
    for method in ("json_schema", "function_calling"):
        structured = ChatOpenAI(base_url=url, api_key="none", model=model).with_structured_output(Report, method=method)
        assert isinstance(structured.invoke("How is the weather in Ulm?"), Report)


def try_langchain_with_responses(url: str, model: str) -> None:
    plain = ChatOpenAI(base_url=url, api_key="none", model=model, use_responses_api=True)
    chat = plain.bind_tools([Weather])
    question = ("user", "How is the weather in Ulm?")
    answer = chat.invoke([question])
    [call] = answer.tool_calls
    assert (call["name"], call["args"]) == ("Weather", ARGUMENTS)
    assert chat.invoke([question, answer, ToolMessage("Rain", tool_call_id=call["id"])]).text == RAIN
    assert "".join(chunk.text for chunk in plain.stream([("system", "Be brief."), question])) == RAIN
    assert isinstance(plain.with_structured_output(Report, method="json_schema").invoke([question]), Report)


def try_litellm(url: str, model: str) -> None:
    with_server = {"model": f"hosted_vllm/{model}", "api_base": url, "api_key": "none"}
    answer = litellm.completion(messages=HELLO, tools=[TOOL], **with_server)
    [call] = answer.choices[0].message.tool_calls
    assert Weather.model_validate_json(call.function.arguments).model_dump() == ARGUMENTS
    chunks = litellm.completion(messages=HELLO, stream=True, **with_server)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == RAIN
    ranked = litellm.rerank(query="rain", documents=["sun", "rain"], top_n=1, **with_server)
    assert [result["index"] for result in ranked.results] == [1]


def try_instructor(url: str, model: str) -> None:
    """With calls that the model may make, and in the modes in which it must."""
    client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="none"), mode=instructor.Mode.PARALLEL_TOOLS)
    [found] = client.chat.completions.create(model=model, messages=HELLO, response_model=Iterable[Weather])
    assert found.model_dump() == ARGUMENTS
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="none"), mode=mode)
        report = client.chat.completions.create(model=model, messages=HELLO, response_model=Report, max_retries=0)
        assert isinstance(report, Report)
    client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="none"), mode=instructor.Mode.JSON)
    assert isinstance(client.chat.completions.create(model=model, messages=HELLO, response_model=Anything), Anything)


async def try_openai_agents(url: str, model: str, pictures_url: str, pictures_model: str) -> None:
    """All their tools are strict. By responses, which is their default, and by chats."""
    agents.set_tracing_disabled(True)

    @agents.function_tool(name_override="Weather")
    def weather(city: str, days: int) -> str:
        return f"Rain for {days} days in {city}"

    async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
        for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
            agent = agents.Agent("Forecaster", instructions="Be brief.", model=kind(model, client), tools=[weather])
            result = await agents.Runner.run(agent, "How is the weather in Ulm?")
            assert result.final_output == RAIN
            assert any("Rain for 3 days in Ulm" in str(item) for item in result.new_items)
            streamed = agents.Runner.run_streamed(agent, "How is the weather in Ulm?")
            async for _ in streamed.stream_events():
                pass
            assert streamed.final_output == RAIN
            reporter = agents.Agent("Reporter", model=kind(model, client), output_type=Report)
            assert isinstance((await agents.Runner.run(reporter, "How is the weather in Ulm?")).final_output, Report)
    content = [{"type": "input_text", "text": "What is this?"}, {"type": "input_image", "image_url": PICTURE, "detail": "auto"}]
    async with openai.AsyncOpenAI(base_url=pictures_url, api_key="none") as client:
        viewer = agents.Agent("Viewer", model=agents.OpenAIResponsesModel(pictures_model, client))
        seen = await agents.Runner.run(viewer, [{"role": "user", "content": content}])
    assert seen.final_output.startswith("[synthetic]")


async def try_pydantic_ai(url: str, model: str, pictures_url: str, pictures_model: str) -> None:
    provider = OpenAIProvider(base_url=url, api_key="none")
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        agent = pydantic_ai.Agent(kind(model, provider=provider))

        @agent.tool_plain(name="Weather", strict=True)
        def weather(city: str, days: int) -> str:
            return f"Rain for {days} days in {city}"

        result = await agent.run("How is the weather in Ulm?")
        assert result.output == RAIN
        assert "Rain for 3 days in Ulm" in str(result.all_messages())
        async with agent.run_stream("How is the weather in Ulm?") as streamed:
            assert await streamed.get_output() in ("I look.", RAIN)  # it takes the first text for the last one
        reporter = pydantic_ai.Agent(kind(model, provider=provider), output_type=pydantic_ai.NativeOutput(Report))
        assert isinstance((await reporter.run("How is the weather in Ulm?")).output, Report)
    seeing = OpenAIChatModel(pictures_model, provider=OpenAIProvider(base_url=pictures_url, api_key="none"))
    picture = pydantic_ai.BinaryContent(base64.b64decode(PICTURE.partition(",")[2]), media_type="image/png")
    sound = pydantic_ai.BinaryContent(recording(), media_type="audio/wav")
    assert (await pydantic_ai.Agent(seeing).run(["What is this?", picture, sound])).output.startswith("[synthetic]")


def try_anthropic(url: str, model: str, pictures_url: str, pictures_model: str) -> None:
    client = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0)
    tools = [{"name": "Weather", "input_schema": Weather.model_json_schema()}]
    settings = {"model": model, "max_tokens": 100, "tools": tools}
    answer = client.messages.create(messages=HELLO, **settings)
    said, call = answer.content
    assert (said.text, call.name, call.input, answer.stop_reason) == ("I look.", "Weather", ARGUMENTS, "tool_use")
    returned = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "Rain"}]}
    conversation = [*HELLO, {"role": "assistant", "content": answer.content}, returned]
    assert client.messages.create(messages=conversation, **settings).content[0].text == RAIN
    with client.messages.stream(messages=conversation, **settings) as stream:
        assert "".join(stream.text_stream) == RAIN
    with client.messages.stream(messages=HELLO, **settings) as stream:
        assert stream.get_final_message().content[1].input == ARGUMENTS

    @anthropic.beta_tool(name="Weather")
    def weather(city: str, days: int) -> str:
        """The weather of a city."""
        return f"Rain for {days} days in {city}"

    runner = client.beta.messages.tool_runner(model=model, max_tokens=100, tools=[weather], messages=HELLO)
    assert runner.until_done().content[0].text == RAIN
    parsed = client.messages.parse(model=model, max_tokens=100, messages=HELLO, output_format=Choice)
    assert isinstance(parsed.parsed_output, Choice)
    assert client.messages.count_tokens(model=model, messages=HELLO, tools=tools).input_tokens > 100
    try:
        client.messages.create(model="other", max_tokens=9, messages=HELLO)
    except anthropic.NotFoundError as error:
        refused = error.body["error"]["type"]
    else:
        refused = ""
    assert refused == "not_found_error"
    source = {"type": "base64", "media_type": "image/png", "data": PICTURE.partition(",")[2]}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "What is this?"}]
    seeing = anthropic.Anthropic(base_url=pictures_url.removesuffix("/v1"), api_key="none", max_retries=0)
    seen = seeing.messages.create(model=pictures_model, max_tokens=9, messages=[{"role": "user", "content": content}])
    assert seen.content[0].text.startswith("[synthetic]")


def try_sounds(url: str, model: str) -> None:
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    sound = {"type": "input_audio", "input_audio": {"data": base64.b64encode(recording()).decode(), "format": "wav"}}
    content = [sound, {"type": "text", "text": "What is this?"}]
    answer = client.chat.completions.create(model=model, messages=[{"role": "user", "content": content}], max_tokens=9)
    assert answer.choices[0].message.content.startswith("[synthetic]")
    assert answer.usage.prompt_tokens == 64 + 3  # a medium counts as 64 words
    heard = ChatOpenAI(base_url=url, api_key="none", model=model, max_retries=0).invoke([HumanMessage(content)])
    assert heard.usage_metadata["input_tokens"] == 64 + 3
    answer = litellm.completion(
        model=f"hosted_vllm/{model}", api_base=url, api_key="none", messages=[{"role": "user", "content": content}]
    )
    assert answer.usage.prompt_tokens == 64 + 3


def try_speech(url: str, model: str) -> None:
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    file = ("speech.wav", recording(), "audio/wav")
    text = client.audio.transcriptions.create(model=model, file=file, language="en").text
    verbose = client.audio.transcriptions.create(
        model=model, file=file, language="en", response_format="verbose_json", timestamp_granularities=["segment"]
    )
    assert (verbose.text, verbose.duration, verbose.language) == (text, SECONDS, "english")
    assert "".join(segment.text for segment in verbose.segments).strip() == text
    timed = client.audio.transcriptions.create(
        model=model, file=file, language="en", response_format="verbose_json", timestamp_granularities=["word", "segment"]
    )
    assert "".join(word.word for word in timed.words) == "".join(timed.text.split())
    assert all(0 <= word.start <= word.end <= SECONDS for word in timed.words)
    subtitles = client.audio.transcriptions.create(model=model, file=file, language="en", response_format="srt")
    assert subtitles.count(" --> ") == len(verbose.segments)
    events = list(client.audio.transcriptions.create(model=model, file=file, language="en", stream=True))
    assert [event.type for event in events][-1] == "transcript.text.done"
    assert events[-1].text == text
    assert isinstance(client.audio.translations.create(model=model, file=file).text, str)
    said = litellm.transcription(model=f"hosted_vllm/{model}", api_base=url, api_key="none", file=file, language="en")
    assert said.text == text


def try_llama_index(url: str, model: str, pictures_url: str, pictures_model: str) -> None:
    options = {"api_key": "none", "is_chat_model": True, "is_function_calling_model": True}
    llm = OpenAILike(model=model, api_base=url, context_window=8192, **options)

    def weather(city: str, days: int) -> str:
        return "Rain"

    tool = FunctionTool.from_defaults(weather, name="Weather")
    answer = llm.chat_with_tools([tool], user_msg="How is the weather in Ulm?")
    [call] = llm.get_tool_calls_from_response(answer)
    assert call.tool_kwargs == ARGUMENTS
    assert str(llm.complete("How is the weather in Ulm?")) == RAIN
    assert "".join(piece.delta or "" for piece in llm.stream_complete("How is the weather in Ulm?")) == RAIN
    seeing = OpenAILike(model=pictures_model, api_base=pictures_url, context_window=8192, **options)
    picture = ImageBlock(image=base64.b64decode(PICTURE.partition(",")[2]), image_mimetype="image/png")
    sound = AudioBlock(audio=recording(), format="wav")
    seen = seeing.chat([ChatMessage(role="user", blocks=[TextBlock(text="What is this?"), picture, sound])])
    assert str(seen.message.content).startswith("[synthetic]")


def main() -> None:
    url, model, *others = sys.argv[1:]
    pictures, speech = others[:2], others[2:]
    try_openai(url, model)
    asyncio.run(try_openai_async(url, model))
    asyncio.run(try_responses_async(url, model))
    attempts = (try_responses, try_others_of_openai, try_langchain, try_langchain_with_responses, try_litellm, try_instructor)
    for attempt in attempts:
        attempt(url, model)
        print(f"{attempt.__name__}: as it should be")
    for seeing in (try_openai_agents, try_pydantic_ai):
        asyncio.run(seeing(url, model, *pictures))
        print(f"{seeing.__name__}: as it should be")
    for seeing in (try_llama_index, try_anthropic):
        seeing(url, model, *pictures)
        print(f"{seeing.__name__}: as it should be")
    for attempt, place in ((try_sounds, pictures), (try_speech, speech)):
        attempt(*place)
        print(f"{attempt.__name__}: as it should be")


if __name__ == "__main__":
    main()
