"""What heavy callers send takes the loops little CPU at a time: the worst of ``bench isolation``, with much room."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import pytest
import torch

from bench.isolation.attacks import EMBEDDING_ATTACKS
from shmring.engine.executors.fingerprints import FingerprintsExecutor
from shmring.engine.executors.interface import StepInput
from shmring.engine.protocol import EncodeRequest, Picture, Text
from shmring.frontend.errors import ApiError
from shmring.frontend.http.bodies import BodyReader, BodyShare
from shmring.frontend.http.watch import Watch
from shmring.frontend.openai.embeddings import EMBEDDING_PARSER, EmbeddingInputs, EmbeddingRequest, encode_response
from shmring.frontend.settings import FrontendSettings
from tests.tables import for_each

_MOST_S = 0.15  # of CPU, in one turn: fifteen times what is meant, and a tenth of what the worst took before
_PIECE_NBYTES = 64 << 10


class Turns:
    """The most CPU seconds between two turns of the loop."""

    def __init__(self) -> None:
        self.most_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._since_s = time.thread_time()
        self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        now = time.thread_time()
        self.most_s = max(self.most_s, now - self._since_s)
        self._since_s = now
        self._loop.call_soon(self._turn)


BODIES = {
    attack.title: attack
    for attack in EMBEDDING_ATTACKS
    if "picture" not in attack.title and "clip" not in attack.title and not attack.chunked and attack.connections < 40
}


@for_each("name", list(BODIES))
async def test_reading_a_body_takes_little_at_a_time(name: str) -> None:
    body = BODIES[name].body()
    reader, sent = BodyReader(FrontendSettings()), 0

    async def receive() -> Any:
        nonlocal sent
        await asyncio.sleep(0)
        piece, sent = body[sent : sent + _PIECE_NBYTES], sent + _PIECE_NBYTES
        return {"type": "http.request", "body": piece, "more_body": sent < len(body)}

    turns = Turns()
    with contextlib.suppress(ApiError):
        read = await reader.read(receive, BodyShare(reader.memory), len(body), Watch())
        EMBEDDING_PARSER.parse(read.content)
    await asyncio.sleep(0)
    assert turns.most_s < _MOST_S


async def test_a_large_answer_takes_little_at_a_time() -> None:
    turns = Turns()
    await encode_response(torch.randn(2048, 512), EmbeddingRequest("m"), 0, EmbeddingInputs(), asyncio.Lock())
    await asyncio.sleep(0)
    assert turns.most_s < _MOST_S


INPUTS = {
    "texts": [Text("abc")] * 2000,
    "longer texts": [Text("ab cd " * 1000)] * 500,
    "pictures": [Picture(torch.zeros(64, 64, 3, dtype=torch.uint8))] * 64,
}


@for_each("inputs", INPUTS.values(), ids=INPUTS)
def test_heavy_requests_keep_a_step_short_and_a_small_request_is_answered(inputs: list[Any]) -> None:
    executor = FingerprintsExecutor()
    heavy = [StepInput(number, EncodeRequest(inputs)) for number in range(4)]
    executor.execute(heavy)
    for number in range(4, 14):
        started_s = time.thread_time()
        *_, output = executor.execute([*heavy, StepInput(number, EncodeRequest([Text("hello")]))])
        assert time.thread_time() - started_s < _MOST_S
        if not isinstance(output, Exception) and output.finished:
            break
    else:
        pytest.fail("the small one is never answered")
