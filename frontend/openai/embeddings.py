"""Embeddings: OpenAI's ``input``, and vLLM's ``messages`` for media.

The official ``openai`` client sends ``encoding_format="base64"`` unless told otherwise, always an ``input``, and whatever is in
``extra_body``; so ``client.embeddings.create(model=..., input=[], extra_body={"messages": [...]})`` is a request here. An
``input`` that is empty therefore counts as none.

One request has one embedding for each of its parts, media or text, in the order in which they appear. (vLLM gives one for a
whole conversation, which is the same where it has one part: docs/decisions/0011-an-embedding-for-each-part.md.) A text of
``input`` that is a ``data:`` URL of a picture, a recording or a clip is that medium. Inputs that the model can't embed are
refused and not ignored: an embedding that leaves out half of the input is a wrong answer.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import torch
from msgspec import Meta

from shmring.engine.protocol import Text
from shmring.frontend.errors import ApiError, ErrorCode
from shmring.frontend.http.parsing import BodyParser
from shmring.frontend.http.responses import new_id
from shmring.frontend.inference import Encoding, check_dimensions
from shmring.frontend.media.sources import MediaSource
from shmring.frontend.openai.generation import Token
from shmring.frontend.openai.messages import (
    MAX_MESSAGES,
    MAX_PARTS,
    ContentPart,
    Priority,
    TextPart,
    data_url_kind,
    source_of,
)
from shmring.frontend.openai.unsupported import Unsupported, check_supported, only

__all__ = [
    "EMBEDDING_PARSER",
    "EmbeddingInputs",
    "EmbeddingRequest",
    "EmbeddingResponse",
    "count_inputs",
    "encode_response",
    "input_of",
    "read_embedding",
]

_INPUT = (
    "One text or several, or the tokens of one or several. A text that is a data: URL of a picture, a recording or a clip is "
    "that medium."
)


class EmbeddingMessage(msgspec.Struct):
    """A message: one role's parts, each of which gets an embedding."""

    content: str | Annotated[list[ContentPart | str], Meta(max_length=MAX_PARTS)]
    role: str = "user"


class EmbeddingRequest(msgspec.Struct):
    """The body of `POST /v1/embeddings`: a model, and either `input` or `messages`."""

    TAKES_URLS: ClassVar[bool] = True
    model: str
    input: Annotated[str | list[str | Token | list[Token]] | None, Meta(description=_INPUT)] = None
    messages: Annotated[
        Annotated[list[EmbeddingMessage], Meta(max_length=MAX_MESSAGES)] | None,
        Meta(description="Media and texts, as vLLM takes them."),
    ] = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="Keep as many of them, and make the length 1 again.")
    ] = None
    user: str | None = None
    priority: Priority | None = None
    add_special_tokens: Annotated[Any, only(True)] = None
    padding: Annotated[Any, only("do_not_pad")] = None
    truncate_prompt_tokens: Annotated[Any, only()] = None
    truncation_side: Annotated[Any, only()] = None
    use_activation: Annotated[Any, only(True)] = None
    embed_dtype: Annotated[Any, only("float32")] = None
    endianness: Annotated[Any, only("little", "native")] = None
    add_generation_prompt: Annotated[Any, only(False)] = None
    continue_final_message: Annotated[Any, only(False)] = None
    chat_template: Annotated[Any, only()] = None
    chat_template_kwargs: Annotated[Any, only({})] = None
    media_io_kwargs: Annotated[Any, only({})] = None
    mm_processor_kwargs: Annotated[Any, only({})] = None


class Embedding(msgspec.Struct):
    """One embedding: numbers, or base64 of little-endian float32."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingInputs(msgspec.Struct):
    """What was embedded, counted by kind; the kinds have vLLM's names."""

    text: int = 0
    image: int = 0
    audio: int = 0
    video: int = 0


class EmbeddingUsage(msgspec.Struct):
    """Tokens used, those of media included where the model makes tokens of them, and how many inputs of each kind."""

    prompt_tokens: int
    total_tokens: int
    inputs: EmbeddingInputs


class EmbeddingResponse(msgspec.Struct):
    """The answer to `POST /v1/embeddings`."""

    id: str
    created: int
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage
    object: str = "list"


_NO_DATA = b'"data":[]'
_PIECE_VALUES = 8192  # in a piece of an answer: 16 embeddings of 512 numbers, which take 1.5 ms

_UNSUPPORTED = Unsupported(EmbeddingRequest)

#: For bodies of requests.
EMBEDDING_PARSER = BodyParser(EmbeddingRequest)


def read_embedding(request: EmbeddingRequest, max_inputs: int) -> Encoding:
    """Returns what a request asks for; empties the request of its inputs, because they are most of its memory.

    Raises:
        ApiError: there are none, too many, or some that can't be embedded; or the request asks for something that is not
            implemented.
    """
    check_supported(request, _UNSUPPORTED)
    texts, messages = request.input, request.messages
    request.input = request.messages = None
    if texts and messages:
        raise ApiError(ErrorCode.INVALID_VALUE, "send either input or messages, not both", param="input")
    param = "messages" if messages else "input"
    count = _count(messages) if messages else _count_of_input(texts)
    if not count:
        message = "the request has nothing to embed; send input, or messages with media"
        raise ApiError(ErrorCode.MISSING_INPUT, message, param=param)
    if count > max_inputs:  # before millions of them are looked at, one by one, in the event loop
        message = f"the request has {count} inputs, at most {max_inputs} are accepted"
        raise ApiError(ErrorCode.TOO_MANY_INPUTS, message, param=param)
    inputs = _of_messages(messages) if messages else _of_input(texts or [])
    return Encoding(request.model, inputs, request.priority or 0, param, request.dimensions)


def _count_of_input(texts: str | list[str | int | list[int]] | None) -> int:
    return bool(texts) if isinstance(texts, str) or _are_tokens(texts) else len(texts or ())


def _are_tokens(texts: str | list[str | int | list[int]] | None) -> bool:
    """Whether a list has the tokens of one text."""
    return isinstance(texts, list) and bool(texts) and isinstance(texts[0], int)


def _count(messages: list[EmbeddingMessage]) -> int:
    return sum(1 if isinstance(message.content, str) else len(message.content) for message in messages)


def _of_input(texts: str | list[str | int | list[int]]) -> list[Text | MediaSource]:
    if isinstance(texts, str):
        return [_of_text(texts, "input")]
    if _are_tokens(texts):
        return [_of_tokens(texts, "input")]
    places = ((text, f"input[{index}]") for index, text in enumerate(texts))
    return [_of_text(text, place) if isinstance(text, str) else _of_tokens(text, place) for text, place in places]


def _of_tokens(given: int | list[str | int | list[int]] | list[int], param: str) -> Text:
    tokens = [token for token in given if isinstance(token, int)] if isinstance(given, list) else []
    if not isinstance(given, list) or len(tokens) != len(given):
        raise ApiError(ErrorCode.INVALID_VALUE, "an input is a text or tokens, not both", param=param)
    if not tokens:
        raise ApiError(ErrorCode.INVALID_VALUE, "an input without tokens can't be embedded", param=param)
    return Text(tokens)


def _of_text(text: str, param: str) -> Text | MediaSource:
    if not text:
        raise ApiError(ErrorCode.INVALID_VALUE, "an empty text can't be embedded", param=param)
    kind = data_url_kind(text)
    if kind is not None:
        return MediaSource(kind, param, url=text)
    return Text(text)


def _of_messages(messages: list[EmbeddingMessage]) -> list[Text | MediaSource]:
    inputs: list[Text | MediaSource] = []
    for position, message in enumerate(messages):
        param = f"messages[{position}].content"
        if isinstance(message.content, str):
            inputs.append(_of_text(message.content, param))
        else:
            inputs += [input_of(part, f"{param}[{index}]") for index, part in enumerate(message.content)]
    return inputs


def input_of(part: ContentPart | str, param: str) -> Text | MediaSource:
    """Returns what is to be embedded of a part.

    Args:
        part: of a message, or a text.
        param: where in the request it stands.
    """
    if isinstance(part, str):
        return _of_text(part, param)
    return _of_text(part.text, f"{param}.text") if isinstance(part, TextPart) else source_of(part, param)


def count_inputs(inputs: Iterable[Text | MediaSource]) -> EmbeddingInputs:
    """Counts inputs by kind."""
    counts = Counter("text" if isinstance(item, Text) else item.kind for item in inputs)
    return EmbeddingInputs(**counts)


async def encode_response(
    embeddings: torch.Tensor, request: EmbeddingRequest, prompt_tokens: int, inputs: EmbeddingInputs, gate: asyncio.Lock
) -> list[bytes]:
    """Encodes the answer, an :class:`EmbeddingResponse`, in pieces.

    Two thousand embeddings in numbers take a fifth of a second. So they are encoded some at a time, and of all answers of this
    process one piece in a turn of the loop.

    Args:
        embeddings: (inputs, embedding size), float32.
        request: says in which form, and how many dimensions to keep.
        prompt_tokens: of all inputs.
        inputs: how many there were of each kind.
        gate: of all large answers of this process; it is held for one piece.

    Returns:
        The pieces of the document.

    Raises:
        ApiError: it asks for more dimensions than there are.
    """
    check_dimensions(request.dimensions, embeddings.shape[1])
    if request.dimensions is not None:
        embeddings = torch.nn.functional.normalize(embeddings[:, : request.dimensions], dim=1)
    usage = EmbeddingUsage(prompt_tokens, prompt_tokens, inputs)
    empty = EmbeddingResponse(new_id("embd-"), int(time.time()), request.model, [], usage)
    before, _, after = msgspec.json.encode(empty).partition(_NO_DATA)
    pieces = [before, _NO_DATA[:-1]]
    per_piece = max(1, _PIECE_VALUES // max(1, embeddings.shape[1]))
    for start in range(0, len(embeddings), per_piece):
        if start:
            pieces.append(b",")
        async with contextlib.nullcontext() if len(embeddings) <= per_piece else gate:
            rows = embeddings[start : start + per_piece]
            values = map(_base64, rows) if request.encoding_format == "base64" else rows.tolist()
            data = [Embedding(index, value) for index, value in enumerate(values, start)]
            pieces.append(msgspec.json.encode(data)[1:-1])
            if len(embeddings) > per_piece:
                await asyncio.sleep(0)
    pieces.append(_NO_DATA[-1:] + after)
    return pieces


def _base64(row: torch.Tensor) -> str:
    return base64.b64encode(row.numpy().astype("<f4").tobytes()).decode("ascii")
