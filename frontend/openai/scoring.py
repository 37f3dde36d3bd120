"""How near texts and media are to each other: ``POST /score`` of vLLM, and ``POST /rerank`` of Jina, Cohere and vLLM.

The score of two inputs is the cosine of the angle between their embeddings, as in vLLM for models that embed (it calls them
bi-encoders). A model that reads both inputs together and answers with a number, a cross-encoder, is not served.

An input is a text, a ``data:`` URL of a medium, or ``{"content": [...]}`` with one part: an embedding is of one part
(docs/decisions/0011-an-embedding-for-each-part.md).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, NamedTuple

import msgspec
import torch
from msgspec import Meta

from shmring.engine.protocol import Text
from shmring.frontend.errors import ApiError, ErrorCode
from shmring.frontend.http.parsing import BodyParser
from shmring.frontend.http.responses import new_id
from shmring.frontend.inference import Embedded, Encoding
from shmring.frontend.media.sources import MediaSource
from shmring.frontend.openai.embeddings import input_of
from shmring.frontend.openai.messages import ContentPart, Priority, check_characters
from shmring.frontend.openai.unsupported import Unsupported, check_supported, only

__all__ = [
    "RERANK_PARSER",
    "SCORE_PARSER",
    "RerankRequest",
    "RerankResponse",
    "ScoreRequest",
    "ScoreResponse",
    "encode_scores",
    "read_pairs",
]


class ScoreContent(msgspec.Struct):
    """A medium or a text, as a part of a message."""

    content: Annotated[list[ContentPart | str], Meta(min_length=1, max_length=1)]


_Input = str | ScoreContent
_Inputs = _Input | list[_Input]


class ScoringRequest(msgspec.Struct, kw_only=True):
    """What both have in common."""

    TAKES_URLS: ClassVar[bool] = True
    model: str
    priority: Priority | None = None
    user: str | None = None
    max_tokens_per_query: Annotated[Any, only(0)] = None
    max_tokens_per_doc: Annotated[Any, only(0)] = None
    instruction: Annotated[Any, only()] = None
    chat_template_kwargs: Annotated[Any, only({})] = None
    mm_processor_kwargs: Annotated[Any, only({})] = None
    padding: Annotated[Any, only("do_not_pad")] = None
    truncate_prompt_tokens: Annotated[Any, only()] = None
    truncation_side: Annotated[Any, only()] = None
    use_activation: Annotated[Any, only(True)] = None


class ScoreRequest(ScoringRequest, kw_only=True):
    """The body of `POST /score`: one input and others, or as many as there are others. One of four pairs of names."""

    queries: _Inputs | None = None
    documents: _Inputs | None = None
    items: _Inputs | None = None
    text_1: _Inputs | None = None
    text_2: _Inputs | None = None
    data_1: _Inputs | None = None
    data_2: _Inputs | None = None


class RerankRequest(ScoringRequest, kw_only=True):
    """The body of `POST /rerank`: documents are put in the order in which they are near to the query."""

    query: _Input
    documents: _Inputs
    top_n: Annotated[Annotated[int, Meta(ge=0)] | None, Meta(description="Only so many of them; 0: all.")] = None


class ScoringUsage(msgspec.Struct):
    """Tokens used, those of media included where the model makes tokens of them."""

    prompt_tokens: int
    total_tokens: int


class Score(msgspec.Struct):
    """How near the inputs of one pair are: from -1 to 1."""

    index: int
    score: float
    object: str = "score"


class ScoreResponse(msgspec.Struct):
    """The answer to `POST /score`."""

    id: str
    created: int
    model: str
    data: list[Score]
    usage: ScoringUsage
    object: str = "list"


class RerankDocument(msgspec.Struct):
    """A document, if it is a text."""

    text: str | None


class RerankResult(msgspec.Struct):
    """A document, by its place in the request, and how near it is to the query: from -1 to 1."""

    index: int
    document: RerankDocument
    relevance_score: float


class RerankResponse(msgspec.Struct):
    """The answer to `POST /rerank`: the nearest document first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: ScoringUsage


class Pairs(NamedTuple):
    """Whose embeddings are compared: those that are first in their pairs, and the others behind them.

    Attributes:
        first: how many are first: one for all others, or as many.
        texts: of the others, for the answer; None for media.
    """

    first: int
    texts: list[str | None]

    def scores(self, embeddings: torch.Tensor) -> list[float]:
        """Returns the cosine of each pair; takes milliseconds for thousands.

        Args:
            embeddings: of the inputs: shape (inputs, embedding size).
        """
        cosines = torch.nn.functional.cosine_similarity(embeddings[: self.first], embeddings[self.first :])
        numbers: list[float] = cosines.clamp(-1, 1).tolist()  # rounding may lead beyond
        return numbers


_UNSUPPORTED = Unsupported(ScoringRequest)
_NAMES = (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2"))
_MAX_CHARACTERS = 16 << 20  # of documents together, which wait in memory to be in the answer
_PIECE_CHARACTERS = 64 << 10  # of an answer: it is encoded in a tenth of a millisecond
_NO_RESULTS = b'"results":[]'

#: For bodies of requests.
SCORE_PARSER = BodyParser(ScoreRequest)
RERANK_PARSER = BodyParser(RerankRequest)


def read_pairs(request: ScoreRequest | RerankRequest, max_inputs: int) -> tuple[Encoding, Pairs]:
    """Returns what is to be embedded for a request; empties the request of its inputs, because they are most of its memory.

    Raises:
        ApiError: there are too many, or they make no pairs; or the request asks for something that is not implemented.
    """
    check_supported(request, _UNSUPPORTED)
    names = ("query", "documents") if isinstance(request, RerankRequest) else _names_of(request)
    first, others = (_listed(getattr(request, name)) for name in names)
    for name in names:
        setattr(request, name, "")
    for name, given in zip(names, (first, others), strict=True):
        if not given:
            raise ApiError(ErrorCode.INVALID_VALUE, f"there is nothing in {name}", param=name)
    if len(first) + len(others) > max_inputs:
        text = f"the request has {len(first) + len(others)} inputs, at most {max_inputs} are accepted"
        raise ApiError(ErrorCode.TOO_MANY_INPUTS, text, param=names[1])
    if len(first) not in (1, len(others)):
        text = f"{names[0]} are {len(first)}, and {names[1]} {len(others)}; send one of the former, or as many"
        raise ApiError(ErrorCode.INVALID_VALUE, text, param=names[0])
    inputs = [
        _input_of(given, name if len(listed) == 1 else f"{name}[{index}]")
        for name, listed in zip(names, (first, others), strict=True)
        for index, given in enumerate(listed)
    ]
    texts = [item.text if isinstance(item, Text) and isinstance(item.text, str) else None for item in inputs[len(first) :]]
    check_characters(f"{names[1]} have {{}} characters", filter(None, texts), names[1], _MAX_CHARACTERS)
    return Encoding(request.model, inputs, request.priority or 0, names[1]), Pairs(len(first), texts)


def _names_of(request: ScoreRequest) -> tuple[str, str]:
    given = {name for names in _NAMES for name in names if getattr(request, name) is not None}
    for names in _NAMES:
        if given == set(names):
            return names
    names = next((names for names in _NAMES if given & set(names)), _NAMES[0])
    missing = next((name for name in names if name not in given), None)
    text = f"{missing} is missing" if missing else f"there are several pairs: {', '.join(sorted(given))}"
    raise ApiError(ErrorCode.INVALID_VALUE, f"{text}; send queries and documents", param=missing or min(given - set(names)))


def _listed(given: _Inputs) -> list[_Input]:
    return given if isinstance(given, list) else [given]


def _input_of(given: _Input, param: str) -> Text | MediaSource:
    return input_of(given, param) if isinstance(given, str) else input_of(given.content[0], f"{param}.content[0]")


async def encode_scores(
    request: ScoreRequest | RerankRequest, pairs: Pairs, embedded: Embedded, gate: asyncio.Lock
) -> list[bytes]:
    """Encodes the answer in pieces.

    Args:
        request: says in which form.
        pairs: its inputs.
        embedded: their embeddings.
        gate: of all large answers of this process; it is held for one piece.
    """
    scores = await asyncio.to_thread(pairs.scores, embedded.embeddings)
    usage = ScoringUsage(embedded.prompt_tokens, embedded.prompt_tokens)
    if isinstance(request, RerankRequest):
        return await _encode_reranked(request, pairs, scores, usage, gate)
    data = [Score(index, score) for index, score in enumerate(scores)]
    return [msgspec.json.encode(ScoreResponse(new_id("score-"), int(time.time()), request.model, data, usage))]


async def _encode_reranked(
    request: RerankRequest, pairs: Pairs, scores: Sequence[float], usage: ScoringUsage, gate: asyncio.Lock
) -> list[bytes]:
    """It has the documents, and so it comes in pieces."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n or None]
    empty = RerankResponse(new_id("rerank-"), request.model, [], usage)
    before, _, after = msgspec.json.encode(empty).partition(_NO_RESULTS)
    pieces = [before + _NO_RESULTS[:-1]]
    results: list[RerankResult] = []
    characters = 0
    for place, index in enumerate(order, 1):
        text = pairs.texts[index]
        results.append(RerankResult(index, RerankDocument(text), scores[index]))
        characters += len(text or "")
        if characters > _PIECE_CHARACTERS or place == len(order):
            async with gate:
                pieces.append(msgspec.json.encode(results)[1:-1])
                await asyncio.sleep(0)
            if place < len(order):
                pieces.append(b",")
            results, characters = [], 0
    pieces.append(_NO_RESULTS[-1:] + after)
    return pieces
