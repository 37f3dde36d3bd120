"""How many functions of the frontend whoever follows a request reads, and how often they return to a file that they had left.

It is what tests/ends/test_journeys.py counts of the transport, but that a function counts where it is first called: a reader
knows it then, and how many tokens are streamed makes no difference. Comprehensions are no rooms, and what the engine does is
not counted. Each request is sent several times, and the shortest journey counts: the picture is kept since the first one.

A request is read, done and written. So the middle, app.py and inference.py, has bounds of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest

from tests.ends.test_journeys import Journey
from tests.frontend.talking import MODEL, picture_url, say_yes

_TIMES = 8
_PICTURE = {"type": "image_url", "image_url": {"url": picture_url(np.zeros((24, 32, 3), np.uint8))}}
_SCHEMA = {"type": "object", "properties": {"colour": {"type": "string"}}, "required": ["colour"]}
_TOOL = {"type": "function", "function": {"name": "paint", "parameters": _SCHEMA}}


def _chat(*parts: dict[str, Any], model: str = "shmring-synthetic", **fields: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": "What is this?"}, *parts]
    return {"model": model, "messages": [{"role": "user", "content": content}], **fields}


@dataclass(frozen=True)
class Bound:
    """Of a request: how many functions, returns to a file already left, and of these to the files of the middle."""

    name: str
    path: str
    body: dict[str, Any]
    calls: int
    returns: int
    to_the_middle: int


BOUNDS = [
    Bound("a text, whole", "/v1/chat/completions", _chat(), 114, 44, 2),
    Bound("a picture, streamed", "/v1/chat/completions", _chat(_PICTURE, stream=True), 144, 52, 2),
    Bound("tools, streamed", "/v1/chat/completions", _chat(model="m", tools=[_TOOL], stream=True), 117, 45, 2),
    Bound("Anthropic's, streamed", "/v1/messages", _chat(max_tokens=3, stream=True), 134, 47, 3),
    Bound("a completion", "/v1/completions", {"model": "shmring-synthetic", "prompt": "Once"}, 106, 40, 2),
]


async def _journey(url: str, bound: Bound) -> Journey:
    journeys = []
    async with httpx.AsyncClient(base_url=url, timeout=60, headers={"content-type": "application/json"}) as client:
        for _ in range(_TIMES):
            journey = Journey("frontend")
            with journey.traced():
                answer = await client.post(bound.path, content=json.dumps(bound.body))
            assert answer.status_code == 200, answer.text
            journey.calls = list(dict.fromkeys(call for call in journey.calls if not call[1].endswith(">")))
            journeys.append(journey)
    return min(journeys, key=lambda journey: (len(journey.calls), journey.returns))


@pytest.mark.parametrize("bound", BOUNDS, ids=lambda bound: bound.name)
async def test_a_request_passes_no_more_rooms_than_it_did(
    bound: Bound, open_engine: Callable[..., Any], open_core: Callable[..., Any], open_server: Callable[..., Any]
) -> None:
    can_call_tools = bound.body["model"] == MODEL.model
    engine = await (open_engine(say_yes, MODEL) if can_call_tools else open_core({"tokens": 3}, kept_nbytes="1MiB"))
    journey = await _journey(await open_server(engine), bound)
    files = [file for file, _ in journey.stays]
    to_the_middle = sum(files.count(file) - 1 for file in ("frontend/app.py", "frontend/inference.py"))
    found = len(journey.calls), journey.returns, to_the_middle
    bounds = bound.calls, bound.returns, bound.to_the_middle
    assert all(number <= most for number, most in zip(found, bounds, strict=True)), (
        f"{found}, more than of {bound.name}:\n{journey}"
    )
