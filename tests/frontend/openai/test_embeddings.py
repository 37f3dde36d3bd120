"""Requests for embeddings: what is taken, what is refused and with which ``param``, and answers that the client can read."""

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
from shmring.frontend.media.sources import MediaSource
from shmring.frontend.openai import embeddings
from shmring.frontend.openai.embeddings import (
    EMBEDDING_PARSER,
    EmbeddingInputs,
    EmbeddingRequest,
    EmbeddingResponse,
    check_dimensions,
    encode_response,
    take_inputs,
)
from tests.tables import for_each


def image(url: str = "data:,x") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}


def parse(messages: object = None, **fields: object) -> EmbeddingRequest:
    body = {"model": "m", **fields} | ({} if messages is None else {"messages": messages})
    return EMBEDDING_PARSER.parse(msgspec.json.encode(body))


def user(*parts: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": list(parts)}]


def test_inputs_come_out_in_order_and_with_their_place() -> None:
    messages = [*user(image("data:,a"), {"type": "text", "text": "b"}), *user(image("data:,c")), {"content": "d"}]
    request = parse(messages, input=[], user="somebody", something_unknown=[1])
    assert take_inputs(request, 4) == [
        MediaSource("image", "messages[0].content[0].image_url", url="data:,a"),
        Text("b"),
        MediaSource("image", "messages[1].content[0].image_url", url="data:,c"),
        Text("d"),
    ]
    assert (request.messages, request.input) == (None, None)  # their URLs are held once


def test_texts_and_data_urls_are_input() -> None:
    assert take_inputs(parse(input="hello"), 1) == [Text("hello")]
    assert take_inputs(parse(input=["a", "data:audio/wav;base64,AA==", "data:b"]), 3) == [
        Text("a"),
        MediaSource("audio", "input[1]", url="data:audio/wav;base64,AA=="),
        Text("data:b"),
    ]


@for_each(
    ("fields", "param"),
    [
        ({"model": 1}, "model"),
        ({"model": "m", "dimensions": 0}, "dimensions"),
        ({"model": "m", "dimensions": 1.5}, "dimensions"),
        ({"model": "m", "encoding_format": "int8"}, "encoding_format"),
        ({"model": "m", "messages": "hello"}, "messages"),
        ({"model": "m", "messages": user({"type": "image_url"})}, "messages[0].content[0].image_url"),
        ({"model": "m", "messages": user({"type": "file", "file": {}})}, "messages[0].content[0].type"),
        (
            {"model": "m", "messages": user(image(), {"type": "image_url", "image_url": {"url": 3}})},
            "messages[0].content[1].image_url.url",
        ),
        ({}, "model"),
        ([], None),
    ],
)
def test_what_is_not_such_a_request_is_refused_with_its_place(fields: object, param: str | None) -> None:
    with pytest.raises(ApiError) as raised:
        EMBEDDING_PARSER.parse(msgspec.json.encode(fields))
    assert (raised.value.status, raised.value.code, raised.value.param) == (400, "invalid_value", param)


def test_tokens_are_one_input_or_several() -> None:
    assert take_inputs(parse(input=[5, 6, 7, 8]), 3) == [Text([5, 6, 7, 8])]
    assert take_inputs(parse(input=[[5, 6], "a", [7]]), 3) == [Text([5, 6]), Text("a"), Text([7])]
    for token in (-1, 2**31, 1.5):
        with pytest.raises(ApiError):
            parse(input=[[token]])


@pytest.mark.parametrize("in_messages", [False, True])
def test_too_many_inputs_are_refused_before_one_is_looked_at(monkeypatch: pytest.MonkeyPatch, in_messages: bool) -> None:
    monkeypatch.setattr(embeddings, "_of_text", None)
    texts = ["a"] * 3000
    request = parse(user(*({"type": "text", "text": text} for text in texts))) if in_messages else parse(input=texts)
    with pytest.raises(ApiError, match="has 3000 inputs, at most 10 are accepted"):
        take_inputs(request, 10)


@for_each(
    ("request_", "param", "code"),
    [
        (parse(input=[[1, 2], []]), "input[1]", "invalid_value"),
        (parse(input=[1, "a"]), "input", "invalid_value"),
        (parse(input=[1, [2]]), "input", "invalid_value"),
        (parse(input=["a", 1]), "input[1]", "invalid_value"),
        (parse(input=[[1]] * 4), "input", "too_many_inputs"),
        (parse(input=["a", ""]), "input[1]", "invalid_value"),
        (parse(input="a", messages=user(image())), "input", "invalid_value"),
        (parse(input=[]), "input", "missing_input"),
        (parse(), "input", "missing_input"),
        (parse([]), "input", "missing_input"),
        (parse(user()), "messages", "missing_input"),
        (parse([{"role": "user", "content": ""}]), "messages[0].content", "invalid_value"),
        (parse(user(image(), image(), image(), image())), "messages", "too_many_inputs"),
        (parse(input=["a"] * 4), "input", "too_many_inputs"),
    ],
)
def test_what_can_not_be_embedded_is_refused(request_: EmbeddingRequest, param: str, code: str) -> None:
    with pytest.raises(ApiError) as raised:
        take_inputs(request_, 3)
    assert (raised.value.status, raised.value.param, raised.value.code) == (400, param, code)


def vectors() -> torch.Tensor:
    return torch.nn.functional.normalize(torch.arange(12, dtype=torch.float32).reshape(3, 4) - 5, dim=1)


async def embedding_response(
    embeddings: torch.Tensor, request: EmbeddingRequest, prompt_tokens: int, inputs: EmbeddingInputs
) -> EmbeddingResponse:
    pieces = await encode_response(embeddings, request, prompt_tokens, inputs, asyncio.Lock())
    return msgspec.json.decode(b"".join(pieces), type=EmbeddingResponse)


async def test_numbers_come_out_as_they_are() -> None:
    response = await embedding_response(vectors(), parse(), 7, EmbeddingInputs(text=1, video=2))
    assert [item.index for item in response.data] == [0, 1, 2]
    assert [item.embedding for item in response.data] == vectors().tolist()
    assert (response.object, response.data[0].object, response.model) == ("list", "embedding", "m")
    assert (response.usage.prompt_tokens, response.usage.total_tokens) == (7, 7)
    assert response.usage.inputs == EmbeddingInputs(text=1, video=2)
    assert response.id.startswith("embd-")


async def test_base64_is_little_endian_float32() -> None:
    response = await embedding_response(vectors(), parse(encoding_format="base64"), 0, EmbeddingInputs(text=3))
    for item, vector in zip(response.data, vectors(), strict=True):
        assert isinstance(item.embedding, str)
        np.testing.assert_array_equal(np.frombuffer(base64.b64decode(item.embedding), "<f4"), vector.numpy())


@for_each("dimensions", [1, 3, 4])
async def test_fewer_dimensions_are_made_length_one_again(dimensions: int) -> None:
    [first, *_] = (await embedding_response(vectors(), parse(dimensions=dimensions), 0, EmbeddingInputs(text=3))).data
    expected = vectors()[0, :dimensions] / vectors()[0, :dimensions].norm()
    np.testing.assert_allclose(first.embedding, expected, rtol=1e-6)


async def test_a_vector_that_is_cut_to_nothing_stays_finite() -> None:
    [item] = (await embedding_response(torch.tensor([[0.0, 1.0]]), parse(dimensions=1), 0, EmbeddingInputs(text=1))).data
    assert item.embedding == [0.0]


async def test_more_dimensions_than_there_are_is_refused() -> None:
    request = parse(dimensions=5)
    check_dimensions(request, None)
    with pytest.raises(ApiError, match="dimensions is 5, the model's embeddings have 4") as raised:
        check_dimensions(request, 4)
    assert (raised.value.status, raised.value.param) == (400, "dimensions")
    with pytest.raises(ApiError, match="dimensions is 5, the model's embeddings have 4"):
        await embedding_response(vectors(), request, 0, EmbeddingInputs(text=3))


@for_each("count", [0, 1, 16, 17, 100])
async def test_a_large_answer_is_encoded_in_pieces_and_lets_others_through(count: int) -> None:
    vectors = torch.nn.functional.normalize(torch.randn(count, 512, generator=torch.Generator().manual_seed(1)), dim=1)
    turns: list[None] = []
    gate, loop = asyncio.Lock(), asyncio.get_running_loop()

    def turn() -> None:
        turns.append(None)
        loop.call_soon(turn)

    loop.call_soon(turn)
    pieces = await encode_response(vectors, parse(), 0, EmbeddingInputs(), gate)
    assert len(turns) >= (count // 16 if count > 16 else 0)
    response = msgspec.json.decode(b"".join(pieces), type=EmbeddingResponse)
    assert [item.index for item in response.data] == list(range(count))
    assert [item.embedding for item in response.data] == vectors.tolist()


async def test_of_two_large_answers_one_piece_is_encoded_at_a_time() -> None:
    gate = asyncio.Lock()
    await gate.acquire()
    tasks = [asyncio.ensure_future(encode_response(torch.ones(40, 512), parse(), 0, EmbeddingInputs(), gate)) for _ in range(2)]
    small = await encode_response(torch.ones(16, 512), parse(), 0, EmbeddingInputs(), gate)
    assert not any(task.done() for task in tasks)
    gate.release()
    first, second = await asyncio.gather(*tasks)
    assert len(first) == len(second) > len(small)
