"""Requests for embeddings: what is taken, and answers that the client can read. What is refused: test_refused_bodies.py."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from shmring.engine.protocol import Text
from shmring.frontend.errors import ApiError
from shmring.frontend.inference import check_dimensions
from shmring.frontend.media.sources import MediaSource
from shmring.frontend.openai.embeddings import (
    EMBEDDING_PARSER,
    EmbeddingInputs,
    EmbeddingResponse,
    encode_response,
    read_embedding,
)
from tests.tables import for_each

IMAGE = {"type": "image_url", "image_url": {"url": "data:,x", "detail": "auto"}}


@for_each(
    ("body", "inputs"),
    [
        ({"input": "hello"}, [Text("hello")]),
        (
            {"input": ["a", "data:audio/wav;base64,AA==", "data:b"]},
            [Text("a"), MediaSource("audio", "input[1]", url="data:audio/wav;base64,AA=="), Text("data:b")],
        ),
        ({"input": [5, 6, 7, 8]}, [Text([5, 6, 7, 8])]),
        ({"input": [[5, 6], "a", [7]]}, [Text([5, 6]), Text("a"), Text([7])]),
        (
            {"messages": [{"content": "d"}, {"content": [{"type": "text", "text": "b"}, IMAGE]}], "input": [], "unknown": [1]},
            [Text("d"), Text("b"), MediaSource("image", "messages[1].content[1].image_url", url="data:,x")],
        ),
    ],
)
def test_inputs_come_out_in_order_and_with_their_place(body: Any, inputs: Any) -> None:
    request = EMBEDDING_PARSER.parse(msgspec.json.encode({"model": "m"} | body))
    assert read_embedding(request, 3).inputs == inputs
    assert (request.messages, request.input) == (None, None), "their URLs are held once"


VECTORS = torch.nn.functional.normalize(torch.randn(100, 512, generator=torch.Generator().manual_seed(1)), dim=1)


async def answered(vectors: torch.Tensor, gate: asyncio.Lock | None = None, **fields: object) -> EmbeddingResponse:
    request = EMBEDDING_PARSER.parse(msgspec.json.encode({"model": "m"} | fields))
    pieces = await encode_response(vectors, request, 7, EmbeddingInputs(text=1, video=2), gate or asyncio.Lock())
    return msgspec.json.decode(b"".join(pieces), type=EmbeddingResponse)


@for_each("count", [0, 1, 16, 17, 100])
@for_each("form", [None, "float", "base64"])
@for_each("dimensions", [None, 1, 512])
async def test_an_answer_has_all_embeddings_in_their_form(count: int, form: str | None, dimensions: int | None) -> None:
    """Of fewer dimensions, each has length 1 again; base64 is of little-endian float32."""
    response = await answered(VECTORS[:count], encoding_format=form, dimensions=dimensions)
    assert all(isinstance(item.embedding, str) == (form == "base64") for item in response.data)
    found = [np.frombuffer(base64.b64decode(e), "<f4") if isinstance(e := item.embedding, str) else e for item in response.data]
    expected = VECTORS[:count, :dimensions] / VECTORS[:count, :dimensions].norm(dim=1, keepdim=True)
    np.testing.assert_allclose(np.array(found).reshape(-1, dimensions or 512), expected, rtol=1e-6)
    assert [(item.index, item.object) for item in response.data] == [(index, "embedding") for index in range(count)]
    assert (response.object, response.model, response.id[:5]) == ("list", "m", "embd-")
    assert (response.usage.prompt_tokens, response.usage.total_tokens) == (7, 7)
    assert response.usage.inputs == EmbeddingInputs(text=1, video=2)


async def test_what_is_not_cut_comes_out_as_it_is() -> None:
    assert [item.embedding for item in (await answered(2 * VECTORS)).data] == (2 * VECTORS).tolist()


async def test_a_vector_that_is_cut_to_nothing_stays_finite() -> None:
    assert (await answered(torch.tensor([[0.0, 1.0]]), dimensions=1)).data[0].embedding == [0.0]


async def test_more_dimensions_than_there_are_is_refused() -> None:
    check_dimensions(5, None)
    check_dimensions(5, 5)
    with pytest.raises(ApiError, match="dimensions is 5, the model's embeddings have 4") as raised:
        await answered(VECTORS[:, :4], dimensions=5)
    assert (raised.value.status, raised.value.param) == (400, "dimensions")


async def test_large_answers_are_encoded_piece_by_piece_and_let_others_through() -> None:
    gate, turns = asyncio.Lock(), 0
    await gate.acquire()
    large = [asyncio.ensure_future(answered(VECTORS, gate)) for _ in range(2)]
    await answered(VECTORS[:16], gate)  # a small one waits for nobody
    assert not any(task.done() for task in large)
    gate.release()
    while not all(task.done() for task in large):
        turns += 1
        await asyncio.sleep(0)
    assert turns >= 2 * len(VECTORS) // 16, "one piece in a turn, of both together"
