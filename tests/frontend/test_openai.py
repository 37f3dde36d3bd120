"""OpenAI's JSON: what is taken, what is refused and with which ``param``, and answers that the client can read."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from frontend.errors import ApiError
from frontend.openai import EmbeddingRequest, Message, embedding_response, parse_embedding_request, take_pictures


def image(url: str = "data:,x") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}


def parse(messages: object = None, **fields: object) -> EmbeddingRequest:
    body = {"model": "m", **fields} | ({} if messages is None else {"messages": messages})
    return parse_embedding_request(msgspec.json.encode(body))


def user(*parts: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": list(parts)}]


def refused(body: bytes) -> ApiError:
    with pytest.raises(ApiError) as raised:
        parse_embedding_request(body)
    assert raised.value.status == 400
    return raised.value


def test_pictures_come_out_in_order_and_with_their_place() -> None:
    messages = [*user(image("data:,a"), image("data:,b")), *user(image("data:,c"))]
    request = parse(messages, input=[], user="somebody", something_unknown=[1])
    sources = take_pictures(request, 3)
    assert [source.url for source in sources] == ["data:,a", "data:,b", "data:,c"]
    assert [source.param for source in sources] == [
        "messages[0].content[0].image_url",
        "messages[0].content[1].image_url",
        "messages[1].content[0].image_url",
    ]
    assert request.messages == []  # their URLs are held once


@pytest.mark.parametrize("body", [b"", b"{", b"nonsense", b'{"model": "m"', b"\xff\xfe", b'{"model": "\xff"}'])
def test_what_is_not_json_is_refused(body: bytes) -> None:
    assert refused(body).code == "invalid_json"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": 1}, "model"),
        ({"model": "m", "dimensions": 0}, "dimensions"),
        ({"model": "m", "dimensions": 1.5}, "dimensions"),
        ({"model": "m", "encoding_format": "int8"}, "encoding_format"),
        ({"model": "m", "messages": "hello"}, "messages"),
        ({"model": "m", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"model": "m", "messages": user({"type": "video_url", "video_url": {}})}, "messages[0].content[0].type"),
        (
            {"model": "m", "messages": user(image(), {"type": "image_url", "image_url": {"url": 3}})},
            "messages[0].content[1].image_url.url",
        ),
        ({}, None),
        ([], None),
    ],
)
def test_what_is_not_such_a_request_is_refused_with_its_place(fields: object, param: str | None) -> None:
    error = refused(msgspec.json.encode(fields))
    assert (error.code, error.param) == ("invalid_value", param)


@pytest.mark.parametrize(
    ("request_", "param", "code"),
    [
        (parse(input="hello"), "input", "unsupported_input"),
        (parse(input=["hello"]), "input", "unsupported_input"),
        (parse(input=[[1, 2]]), "input", "unsupported_input"),
        (parse(input=[]), "messages", "missing_input"),
        (parse(), "messages", "missing_input"),
        (parse([]), "messages", "missing_input"),
        (parse(user()), "messages", "missing_input"),
        (parse([{"role": "user", "content": "hello"}]), "messages[0].content", "unsupported_input"),
        (parse(user(image(), {"type": "text", "text": "a cat"})), "messages[0].content[1].text", "unsupported_input"),
        (parse(user(image(), image(), image(), image())), "messages", "too_many_pictures"),
    ],
)
def test_what_can_not_be_embedded_is_refused(request_: EmbeddingRequest, param: str, code: str) -> None:
    with pytest.raises(ApiError) as raised:
        take_pictures(request_, 3)
    assert (raised.value.status, raised.value.param, raised.value.code) == (400, param, code)


def vectors() -> torch.Tensor:
    return torch.nn.functional.normalize(torch.arange(12, dtype=torch.float32).reshape(3, 4) - 5, dim=1)


def test_numbers_come_out_as_they_are() -> None:
    response = embedding_response(vectors(), parse())
    assert [item.index for item in response.data] == [0, 1, 2]
    assert [item.embedding for item in response.data] == vectors().tolist()
    assert (response.object, response.data[0].object, response.model) == ("list", "embedding", "m")
    assert response.id.startswith("embd-")


def test_base64_is_little_endian_float32() -> None:
    response = embedding_response(vectors(), parse(encoding_format="base64"))
    for item, vector in zip(response.data, vectors(), strict=True):
        assert isinstance(item.embedding, str)
        np.testing.assert_array_equal(np.frombuffer(base64.b64decode(item.embedding), "<f4"), vector.numpy())


@pytest.mark.parametrize("dimensions", [1, 3, 4])
def test_fewer_dimensions_are_made_length_one_again(dimensions: int) -> None:
    [first, *_] = embedding_response(vectors(), parse(dimensions=dimensions)).data
    expected = vectors()[0, :dimensions] / vectors()[0, :dimensions].norm()
    np.testing.assert_allclose(first.embedding, expected, rtol=1e-6)


def test_a_vector_that_is_cut_to_nothing_stays_finite() -> None:
    [item] = embedding_response(torch.tensor([[0.0, 1.0]]), parse(dimensions=1)).data
    assert item.embedding == [0.0]


def test_more_dimensions_than_there_are_is_refused() -> None:
    with pytest.raises(ApiError, match="dimensions is 5, the model's embeddings have 4") as raised:
        embedding_response(vectors(), parse(dimensions=5))
    assert (raised.value.status, raised.value.param) == (400, "dimensions")


def test_requests_do_not_share_their_messages() -> None:
    first, second = parse(), parse()
    first.messages.append(Message("user", "x"))
    assert second.messages == []
