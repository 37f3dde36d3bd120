"""Embeddings over HTTP: what the engine gets, and what comes back. What is refused: test_refused_bodies.py."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import numpy as np
import pytest
import torch

import shmring
from shmring.engine.protocol import EncodeReply, Text
from tests.frontend.talking import OpenTalk, Talk, picture_url
from tests.tables import for_each
from tests.waiting import eventually

PATH = "/v1/embeddings"
PIXELS = np.random.default_rng(5).integers(0, 256, (3, 20, 30, 3), np.uint8)


async def test_each_picture_has_its_embedding_in_order_and_none_is_copied(
    open_engine: Any, open_app: Callable[..., Awaitable[httpx.AsyncClient]], body_of: Any, embedding_of: Any
) -> None:
    engine = await open_engine()
    http = await open_app(engine)
    expected = [embedding_of(pixels) for pixels in PIXELS]
    response = await http.post(PATH, json=body_of(*PIXELS))
    body = response.json()
    assert [item["index"] for item in body["data"]] == [0, 1, 2]
    np.testing.assert_allclose([item["embedding"] for item in body["data"]], expected, rtol=1e-6)
    assert (body["object"], body["model"], body["usage"]) == (
        "list",
        "shmring-fingerprints",
        {"prompt_tokens": 0, "total_tokens": 0, "inputs": {"text": 0, "image": 3, "audio": 0, "video": 0}},
    )
    headers = {"x-shmring-slab-bytes": str(PIXELS.nbytes), "x-shmring-copies": "0"}
    assert headers.items() <= dict(response.headers).items()
    assert "x-shmring-synthetic" not in response.headers
    statistics = engine.client.ring.statistics()
    assert (statistics.in_place, statistics.copies, statistics.inline_payloads, statistics.submitted) == (3, 0, 0, 1)
    assert statistics.slot_nbytes_submitted == PIXELS.nbytes
    await eventually(lambda: engine.client.ring.statistics().slots_in_use == 0)
    as_base64 = (await http.post(PATH, json=body_of(*PIXELS, encoding_format="base64", input=[]))).json()  # as OpenAI's client
    found = [np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in as_base64["data"]]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


async def embed(claim: shmring.Claim) -> None:
    vectors = torch.eye(2)[[0, 1, 0]]
    await claim.reply(EncodeReply(vectors[: len(claim.payload.inputs)], 5))


@pytest.fixture
async def talk(open_talk: OpenTalk) -> Talk:
    return await open_talk(embed)


MEDIA = [{"type": "image_url", "image_url": {"url": picture_url(pixels)}} for pixels in PIXELS[:2]]


@for_each(
    ("fields", "received", "slab_nbytes"),
    [
        (
            {"messages": [{"role": "user", "content": [MEDIA[0], {"type": "text", "text": "between"}, MEDIA[1]]}]},
            [PIXELS[0].sum(), "between", PIXELS[1].sum()],
            PIXELS[:2].nbytes,
        ),
        ({"input": ["a", "b"]}, ["a", "b"], 0),  # texts need no slot
        ({"input": [[5, 6], "a"]}, [[5, 6], "a"], 0),
    ],
)
async def test_texts_tokens_and_media_stay_in_order(
    talk: Talk, fields: dict[str, Any], received: list[Any], slab_nbytes: int
) -> None:
    response = await talk.send(PATH, {"model": "m", **fields})
    answer = response.json()
    [request] = talk.requests
    talk.requests.clear()
    assert [item.text if isinstance(item, Text) else item.pixels.sum().item() for item in request.inputs] == received
    del request
    images = sum(not isinstance(item, str | list) for item in received)
    assert answer["usage"]["inputs"] == {"text": len(received) - images, "image": images, "audio": 0, "video": 0}
    assert answer["usage"]["prompt_tokens"] == 5
    assert [item["embedding"] for item in answer["data"]] == [[1, 0], [0, 1], [1, 0]][: len(received)]
    assert response.headers["x-shmring-slab-bytes"] == str(slab_nbytes)


async def test_the_engine_knows_the_request_by_its_id(open_talk: OpenTalk) -> None:
    names: list[str] = []

    async def note(claim: shmring.Claim) -> None:
        names.append(claim.name)
        await embed(claim)

    talk = await open_talk(note)
    await talk.send(PATH, {"model": "m", "input": "a"}, headers={"x-request-id": "the-id"})
    assert names == ["the-id"]
