"""/score and /rerank over HTTP: which inputs are compared, and what callers get. What is refused: test_refused_bodies.py."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

import shmring
from shmring.engine.protocol import EncodeReply, Picture, Text
from shmring.frontend.openai.scoring import Pairs
from tests.frontend.talking import OpenTalk, Talk, picture_url

# What is embedded as what: cosines are 1, 0, -1 and 0.6.
VECTORS = {"right": (2.0, 0.0), "up": (0.0, 3.0), "left": (-1.0, 0.0), "near": (3.0, 4.0)}
SCORE = {"model": "m", "queries": "right", "documents": ["up", "right", "left", "near"]}
RERANK = {"model": "m", "query": "right", "documents": ["up", "right", "left", "near"]}


async def point(claim: shmring.Claim) -> None:
    vectors = [VECTORS[str(item.text)] if isinstance(item, Text) else VECTORS["near"] for item in claim.payload.inputs]
    await claim.reply(EncodeReply(torch.tensor(vectors), 7))


@pytest.fixture
async def talk(open_talk: OpenTalk) -> Talk:
    return await open_talk(point)


def scores_in(answer: Any) -> Any:
    return pytest.approx([item["score"] for item in answer["data"]])


async def test_scores_are_cosines(talk: Talk) -> None:
    for path in ("/score", "/v1/score"):
        answer = await talk.ask(path, SCORE)
        assert (answer["object"], answer["model"]) == ("list", "m")
        assert [item["index"] for item in answer["data"]] == [0, 1, 2, 3]
        assert scores_in(answer) == [0, 1, -1, 0.6]
        assert answer["usage"] == {"prompt_tokens": 7, "total_tokens": 7}


async def test_as_many_of_both_are_compared_one_by_one(talk: Talk) -> None:
    assert scores_in(await talk.ask("/score", {"model": "m", "text_1": ["up", "left"], "text_2": ["up", "right"]})) == [1, -1]
    assert scores_in(await talk.ask("/score", {"model": "m", "data_1": "up", "data_2": "up"})) == [1]


async def test_the_nearest_document_is_first(talk: Talk) -> None:
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        results = (await talk.ask(path, RERANK))["results"]
        ranks = [(1, "right"), (3, "near"), (0, "up"), (2, "left")]
        assert [(item["index"], item["document"]["text"]) for item in results] == ranks
        assert [item["relevance_score"] for item in results] == pytest.approx([1, 0.6, 0, -1])
    for top_n, count in ((1, 1), (0, 4), (9, 4)):
        assert len((await talk.ask("/rerank", RERANK, top_n=top_n))["results"]) == count


def test_rounding_leads_to_no_score_beyond_one() -> None:
    vectors = torch.randn(1000, 512, generator=torch.Generator().manual_seed(0))
    scores = Pairs(1000, []).scores(torch.cat([vectors, vectors]))
    assert torch.nn.functional.cosine_similarity(vectors, vectors).max() > 1, "it would otherwise"
    assert max(scores) == 1


async def test_media_are_compared_with_texts(talk: Talk) -> None:
    part = {"type": "image_url", "image_url": {"url": picture_url()}}
    documents = [{"content": [part]}, picture_url(), {"content": [{"type": "text", "text": "up"}]}]
    answer = await talk.ask("/rerank", RERANK, documents=documents)
    assert [type(item) for item in talk.requests[0].inputs] == [Text, Picture, Picture, Text]
    assert [(item["index"], item["document"]["text"]) for item in answer["results"]] == [(0, None), (1, None), (2, "up")]


async def test_an_answer_in_pieces_is_one_document(open_talk: OpenTalk) -> None:
    async def embed(claim: shmring.Claim) -> None:
        await claim.reply(EncodeReply(torch.randn(len(claim.payload.inputs), 2), 1))

    talk = await open_talk(embed)
    documents = [f"{index} " + "word " * 8_000 for index in range(50)]
    answers = await asyncio.gather(*(talk.ask("/rerank", RERANK, documents=documents) for _ in range(3)))
    for answer in answers:
        results = answer["results"]
        assert sorted(item["index"] for item in results) == list(range(50))
        assert all(item["document"]["text"] == documents[item["index"]] for item in results)
        scores = [item["relevance_score"] for item in results]
        assert scores == sorted(scores, reverse=True)
