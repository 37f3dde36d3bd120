"""The executor of docs/executors.md, which is examples/colours.py, runs: in an engine, for a frontend."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shmring
from shmring.engine.client import EngineClient
from shmring.engine.core import EngineCore
from shmring.engine.executors import ExecutorOptions, create_executor
from shmring.engine.protocol import ChatMessage, EncodeRequest, GenerateRequest, Picture, SamplingParams, Text, TextPart
from tests.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "colours.py"


@pytest.fixture
async def client(socket_dir: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EngineClient]:
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    monkeypatch.delitem(sys.modules, "colours", raising=False)
    executor = create_executor("colours:Colours", ExecutorOptions(options={"max_words": 6}))
    async with await EngineCore.create("colours", executor, slab_nbytes="16MiB", socket_dir=str(socket_dir)) as core:
        running = asyncio.create_task(core.run())
        async with await EngineClient.connect("colours", socket_dir=str(socket_dir), lease_nbytes="64KiB") as client:
            yield client
        await eventually(lambda: executor.answers == {})  # type: ignore[attr-defined]  # it is the example's
    await running


def test_the_page_shows_the_example() -> None:
    [shown] = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "executors.md").read_text(), re.DOTALL)
    assert shown == EXAMPLE.read_text()


def question(text: str, **sampling: Any) -> GenerateRequest:
    return GenerateRequest([ChatMessage("user", [TextPart(text)])], sampling=SamplingParams(**sampling))


async def test_it_embeds_streams_and_refuses(client: EngineClient) -> None:
    red = torch.zeros(8, 8, 3, dtype=torch.uint8)
    red[..., 0] = 200
    [output] = [output async for output in client.encode(EncodeRequest([Picture(red)]))]
    assert output.embeddings.tolist() == [[1.0, 0.0, 0.0]]
    pieces = [output async for output in client.generate(question("one two three"))]
    assert [piece.text for piece in pieces] == ["one ", "two ", "three "]
    assert [piece.finish_reason for piece in pieces] == [None, None, "stop"]
    for request, complaint in ((question("a b c", max_tokens=4), "the model takes 6"), (question("a " * 7), "shorten")):
        with pytest.raises(shmring.RemoteError, match=complaint) as caught:
            [_] = [output async for output in client.generate(request)]
        assert caught.value.type_name == "ContextLengthError"
    with pytest.raises(shmring.RemoteError, match="only pictures have a colour"):
        [_] = [output async for output in client.encode(EncodeRequest([Text("red")]))]


async def test_an_answer_that_is_left_is_forgotten(client: EngineClient) -> None:
    answer = client.generate(question("one two three"))
    await anext(answer)
    await answer.aclose()  # the fixture sees that nothing is kept


def test_it_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 90
