"""/score and /rerank over HTTP: which inputs are compared, and what callers get."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import torch

import shmring
from shmring.engine.protocol import EncodeReply, InputSpec, ModelDescription, Picture, PictureSpec, Text
from shmring.frontend.openai.scoring import Pairs
from tests.tables import for_each

OpenApp = Callable[..., Awaitable[httpx.AsyncClient]]

BOTH = ModelDescription("test", "m", ["encode"], InputSpec(text=True, picture=PictureSpec()), 8, embedding_size=2)
# What is embedded as what: cosines are 1, 0, -1 and 0.6.
VECTORS = {"right": (2.0, 0.0), "up": (0.0, 3.0), "left": (-1.0, 0.0), "near": (3.0, 4.0)}
SCORE = {"model": "m", "queries": "right", "documents": ["up", "right", "left", "near"]}
RERANK = {"model": "m", "query": "right", "documents": ["up", "right", "left", "near"]}


async def point(claim: shmring.Claim) -> None:
    vectors = [VECTORS[str(item.text)] if isinstance(item, Text) else VECTORS["near"] for item in claim.payload.inputs]
    await claim.reply(EncodeReply(torch.tensor(vectors), 7))


@pytest.fixture
async def http(open_engine: Any, open_app: OpenApp) -> httpx.AsyncClient:
    return await open_app(await open_engine(point, BOTH))


@pytest.fixture
async def narrow(open_engine: Any, open_app: OpenApp) -> httpx.AsyncClient:
    """It takes eight inputs at a time."""
    return await open_app(await open_engine(point, BOTH), max_inputs=8)


async def test_scores_are_cosines(http: httpx.AsyncClient) -> None:
    for path in ("/score", "/v1/score"):
        response = await http.post(path, json=SCORE)
        assert response.status_code == 200, response.text
        answer = response.json()
        assert (answer["object"], answer["model"]) == ("list", "m")
        assert [item["index"] for item in answer["data"]] == [0, 1, 2, 3]
        assert [item["score"] for item in answer["data"]] == pytest.approx([0, 1, -1, 0.6])
        assert answer["usage"] == {"prompt_tokens": 7, "total_tokens": 7}


async def test_as_many_of_both_are_compared_one_by_one(http: httpx.AsyncClient) -> None:
    body = {"model": "m", "text_1": ["up", "left"], "text_2": ["up", "right"]}
    assert [item["score"] for item in (await http.post("/score", json=body)).json()["data"]] == pytest.approx([1, -1])
    body = {"model": "m", "data_1": "up", "data_2": "up"}
    assert [item["score"] for item in (await http.post("/score", json=body)).json()["data"]] == pytest.approx([1])


async def test_the_nearest_document_is_first(http: httpx.AsyncClient) -> None:
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        response = await http.post(path, json=RERANK)
        assert response.status_code == 200, response.text
        answer = response.json()
        assert [(item["index"], item["document"]["text"]) for item in answer["results"]] == [
            (1, "right"),
            (3, "near"),
            (0, "up"),
            (2, "left"),
        ]
        assert [item["relevance_score"] for item in answer["results"]] == pytest.approx([1, 0.6, 0, -1])
    for top_n, count in ((1, 1), (0, 4), (9, 4)):
        assert len((await http.post("/rerank", json=RERANK | {"top_n": top_n})).json()["results"]) == count


def test_rounding_leads_to_no_score_beyond_one() -> None:
    vectors = torch.randn(1000, 512, generator=torch.Generator().manual_seed(0))
    scores = Pairs([], 1000, [], "documents").scores(torch.cat([vectors, vectors]))
    assert torch.nn.functional.cosine_similarity(vectors, vectors).max() > 1, "it would otherwise"
    assert max(scores) == 1


async def test_media_are_compared_with_texts(open_engine: Any, open_app: OpenApp, body_of: Any) -> None:
    received: list[Any] = []

    async def note(claim: shmring.Claim) -> None:
        received.extend(type(item) for item in claim.payload.inputs)
        await point(claim)

    http = await open_app(await open_engine(note, BOTH))
    [part] = body_of(np.zeros((8, 9, 3), np.uint8))["messages"][0]["content"]
    body = RERANK | {
        "documents": [{"content": [part]}, part["image_url"]["url"], {"content": [{"type": "text", "text": "up"}]}]
    }
    answer = (await http.post("/rerank", json=body)).json()
    assert received == [Text, Picture, Picture, Text]
    assert [(item["index"], item["document"]["text"]) for item in answer["results"]] == [(0, None), (1, None), (2, "up")]


async def test_an_answer_in_pieces_is_one_document(open_engine: Any, open_app: OpenApp) -> None:
    async def embed(claim: shmring.Claim) -> None:
        await claim.reply(EncodeReply(torch.randn(len(claim.payload.inputs), 2), 1))

    http = await open_app(await open_engine(embed, BOTH))
    documents = [f"{index} " + "word " * 8_000 for index in range(50)]
    answers = await asyncio.gather(*(http.post("/rerank", json=RERANK | {"documents": documents}) for _ in range(3)))
    for answer in answers:
        results = answer.json()["results"]
        assert sorted(item["index"] for item in results) == list(range(50))
        assert all(item["document"]["text"] == documents[item["index"]] for item in results)
        scores = [item["relevance_score"] for item in results]
        assert scores == sorted(scores, reverse=True)


@for_each(
    ("path", "fields", "param", "code"),
    [
        ("/score", {"documents": None}, "documents", "invalid_value"),
        ("/score", {"queries": None}, "queries", "invalid_value"),
        ("/score", {"text_1": "a"}, "text_1", "invalid_value"),
        ("/score", {"documents": []}, "documents", "invalid_value"),
        ("/score", {"queries": ["a", "b"]}, "queries", "invalid_value"),
        ("/score", {"documents": ["a"] * 10}, "documents", "too_many_inputs"),
        ("/score", {"documents": ["up", ""]}, "documents[1]", "invalid_value"),
        ("/score", {"documents": ""}, "documents", "invalid_value"),
        ("/score", {"documents": [{"content": []}]}, "documents[0].content", "invalid_value"),
        ("/score", {"documents": [{"content": ["a", "b"]}]}, "documents[0].content", "invalid_value"),
        ("/score", {"documents": [1]}, "documents[0]", "invalid_value"),
        ("/rerank", {"query": ["a"]}, "query", "invalid_value"),
        ("/rerank", {"documents": []}, "documents", "invalid_value"),
        ("/rerank", {"top_n": -1}, "top_n", "invalid_value"),
        ("/rerank", {"max_tokens_per_doc": 5}, "max_tokens_per_doc", "unsupported_value"),
        ("/rerank", {"documents": ["up", "data:image/png;base64,AAAA"]}, "documents[1]", "invalid_image"),
        ("/rerank", {"model": "another"}, "model", "model_not_found"),
    ],
)
async def test_what_makes_no_pairs_is_refused(
    narrow: httpx.AsyncClient, path: str, fields: dict[str, Any], param: str, code: str
) -> None:
    body = SCORE if path == "/score" else RERANK
    response = await narrow.post(path, json=body | fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (404 if param == "model" else 400, param, code), error


async def test_a_model_without_embeddings_or_texts_refuses(open_engine: Any, open_app: OpenApp) -> None:
    talking = await open_app(await open_engine(point, msgspec.structs.replace(BOTH, tasks=["generate"])))
    error = (await talking.post("/rerank", json=RERANK)).json()["error"]
    assert error["code"] == "unsupported_task"
    assert "does not do embeddings" in error["message"]


async def test_documents_are_bounded_since_they_are_in_the_answer(http: httpx.AsyncClient) -> None:
    body = json.dumps(RERANK | {"documents": ["x" * (1 << 20)] * 17})
    response = await http.post("/rerank", content=body)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "text_too_long")
