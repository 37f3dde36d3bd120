"""A model that can everything, engines that say something, and what their callers send and get.

``open_talk`` (conftest.py) serves such a model: the application, with a small handler as engine, and all that the engine gets.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import msgspec
import numpy as np
from PIL import Image

import shmring
from shmring.engine.protocol import (
    CAPABILITIES,
    GenerateReply,
    GenerateRequest,
    InputSpec,
    ModelDescription,
    PictureSpec,
    SoundSpec,
    TextPart,
    ToolCall,
)

TASKS = ["encode", "generate", "complete", "tokenize", "transcribe", "translate"]
INPUT = InputSpec(text=True, tokens=True, picture=PictureSpec(), sound=SoundSpec("waveform", 16_000))

#: It can everything that a model can.
MODEL = ModelDescription(
    "test",
    "m",
    TASKS,
    INPUT,
    8,
    embedding_size=2,
    max_model_len=99,
    tools=True,
    template_options=True,
    reasoning_effort=True,
    strict_tools=True,
    word_times=True,
    capabilities=list(CAPABILITIES),
)
#: It does every task, and nothing that only some models can.
PLAIN_MODEL = ModelDescription("test", "m", TASKS, InputSpec(picture=PictureSpec(), sound=INPUT.sound), 8, embedding_size=2)

#: A text that may be a file in base64, and so is cut out of a body that comes in pieces.
LONG = "A" * (3 << 20)
PICTURE = np.random.default_rng(6).integers(0, 256, (24, 32, 3), np.uint8)
#: Its file is cut out of its body.
LARGE_PICTURE = np.random.default_rng(1).integers(0, 256, (800, 800, 3), np.uint8)


def model(**fields: Any) -> ModelDescription:
    """Returns a model that can everything but what the fields say."""
    return msgspec.structs.replace(MODEL, **fields)


def picture_url(picture: Any = PICTURE) -> str:
    """Returns the data: URL of a picture, or of its file; behind its comma stands the file in base64."""
    file = io.BytesIO(picture if isinstance(picture, bytes) else b"")
    if not isinstance(picture, bytes):
        Image.fromarray(picture).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


class Talk:
    """The application with a small handler as engine.

    Attributes:
        http: asks it.
        engine: both ends of its engine.
        requests: what the engine was sent.
    """

    def __init__(self, http: httpx.AsyncClient, engine: Any, requests: list[Any]) -> None:
        self.http = http
        self.engine = engine
        self.requests = requests

    async def ask(self, path: str, body: Any, **fields: Any) -> Any:
        """Returns the JSON of an answer, or the text of a stream; it must be one of status 200."""
        response = await self.send(path, body | fields)
        assert response.status_code == 200, response.text
        return response.text if (body | fields).get("stream") else response.json()

    async def ignored(self, path: str, body: Any, **fields: Any) -> str | None:
        """Returns which fields of a request that is answered have no effect."""
        response = await self.send(path, body | fields)
        assert response.status_code == 200, response.text
        header: str | None = response.headers.get("x-shmring-ignored-fields")
        return header

    async def refusal(self, path: str, body: Any, **fields: Any) -> tuple[int, str, str | None]:
        """Returns the status of an error, its code, and what it names."""
        response = await self.send(path, body | fields)
        error = response.json()["error"]
        return response.status_code, error["code"], error["param"]

    async def send(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """Sends JSON, or bytes as they are; what has a long text comes in pieces, as from a server."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.http.post(path, content=in_pieces(content) if LONG.encode() in content else content, **options)


OpenTalk = Callable[..., Awaitable[Talk]]


async def say(claim: shmring.Claim) -> None:
    """Says something in two pieces."""
    await claim.reply(GenerateReply("Hel", [1], 5, 1))
    await claim.reply(GenerateReply("lo.", [2], 5, 2, "stop"))


async def say_yes(claim: shmring.Claim) -> None:
    """Says a word; asked for tokens, it has three."""
    await claim.reply(GenerateReply("yes", [1, 2, 3], 1, 1, "stop"))


async def think_and_call(claim: shmring.Claim) -> None:
    """Thinks, says something, and calls two tools."""
    await claim.reply(GenerateReply("", [1], 5, 1, reasoning="Hm"))
    await claim.reply(GenerateReply("Let ", [2], 5, 2, reasoning="m."))
    await claim.reply(GenerateReply("me.", [3], 5, 3))
    calls = [ToolCall("f", '{"x":1}'), ToolCall("g", "{}", index=1)]
    await claim.reply(GenerateReply("", [4], 5, 4, "tool_calls", calls))


def said_in(request: GenerateRequest) -> list[tuple[str, list[Any]]]:
    """Returns the messages of a request: who says each, and its texts and the numbers of its media."""
    return [
        (message.role, [part.text if isinstance(part, TextPart) else part.index for part in message.parts])
        for message in request.messages
    ]


def alone(request: GenerateRequest) -> GenerateRequest:
    """Returns a request without what says whose it is and how long it has."""
    assert request.owner == "127.0.0.1"
    return msgspec.structs.replace(request, owner="", deadline=None)


def data_events(text: str) -> list[Any]:
    """Returns the events of a stream of data alone, without its end, which must be there."""
    *parts, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(part.startswith("data: ") and "\n" not in part for part in parts)
    return [json.loads(part[6:]) for part in parts]


def named_events(text: str) -> list[Any]:
    """Returns the events of a stream, in which each line with an event's name says its type."""
    *parts, rest = text.split("\n\n")
    assert rest == ""
    events = []
    for part in parts:
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


async def in_pieces(body: bytes) -> AsyncIterator[bytes]:
    """Yields a body as a server hands it out."""
    for start in range(0, len(body), 64 << 10):
        yield body[start : start + (64 << 10)]
