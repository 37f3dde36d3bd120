"""OpenAI's JSON, as far as it is served: embeddings in vLLM's multimodal form, and the list of models.

The official ``openai`` client sends ``encoding_format="base64"`` unless told otherwise, always an ``input``, and whatever is in
``extra_body``; so ``client.embeddings.create(model=..., input=[], extra_body={"messages": [...]})`` is a request here.

One request with several pictures has one embedding for each of them, in the order in which they appear. Text is refused
and not ignored: an embedding that leaves out half of what was sent is a wrong answer.
"""

from __future__ import annotations

import base64
import dataclasses
import re
import secrets
import time
from typing import Annotated, Any, Literal

import msgspec
import torch

from frontend.errors import ApiError

__all__ = [
    "EmbeddingRequest",
    "EmbeddingResponse",
    "Model",
    "ModelList",
    "PictureSource",
    "embedding_response",
    "parse_embedding_request",
    "take_pictures",
]

_TEXT_REFUSED = "this model embeds pictures only; send them as messages with image_url parts"


class ImageUrl(msgspec.Struct):
    """A picture's place. ``detail`` and other fields of the API mean nothing here."""

    url: str


class ImagePart(msgspec.Struct, tag_field="type", tag="image_url"):
    """A picture in a message."""

    image_url: ImageUrl


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    """Text in a message."""

    text: str


class Message(msgspec.Struct):
    """A message: one role's parts."""

    role: str
    content: str | list[ImagePart | TextPart]


class EmbeddingRequest(msgspec.Struct):
    """The body of ``POST /v1/embeddings``. Unknown fields are ignored, as other servers of this API do."""

    model: str
    messages: list[Message] = []
    input: Any = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, msgspec.Meta(ge=1)] | None = None
    user: str | None = None


class Embedding(msgspec.Struct):
    """One embedding: numbers, or base64 of little-endian float32."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class Usage(msgspec.Struct):
    """Tokens used. Pictures have none here."""

    prompt_tokens: int = 0
    total_tokens: int = 0


class EmbeddingResponse(msgspec.Struct):
    """The answer to ``POST /v1/embeddings``."""

    id: str
    created: int
    model: str
    data: list[Embedding]
    usage: Usage
    object: str = "list"


class Model(msgspec.Struct):
    """A model that is served."""

    id: str
    created: int
    object: str = "model"
    owned_by: str = "shmring"


class ModelList(msgspec.Struct):
    """The answer to ``GET /v1/models``."""

    data: list[Model]
    object: str = "list"


@dataclasses.dataclass(slots=True)
class PictureSource:
    """A picture of a request.

    Attributes:
        param: where in the request it is, for error messages.
        url: where the picture is. Of a ``data:`` URL, the picture itself.
    """

    param: str
    url: str


_request_decoder = msgspec.json.Decoder(EmbeddingRequest)
_ERROR_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")


def parse_embedding_request(body: bytes) -> EmbeddingRequest:
    """Decodes a request's body.

    Raises:
        ApiError: it is not JSON, or not such a request.
    """
    try:
        return _request_decoder.decode(body)
    except msgspec.ValidationError as error:
        found = _ERROR_PATH.search(str(error))
        path = found["path"] if found else None
        raise ApiError(400, str(error), code="invalid_value", param=path or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the request's body is not valid JSON: {error}", code="invalid_json") from None


def take_pictures(request: EmbeddingRequest, max_pictures: int) -> list[PictureSource]:
    """Takes the pictures out of a request, which is left without its messages: they are the bulk of its memory.

    Raises:
        ApiError: there are none or too many, or there is text.
    """
    if request.input:
        raise ApiError(400, _TEXT_REFUSED, code="unsupported_input", param="input")
    messages, request.messages = request.messages, []
    sources = []
    for position, message in enumerate(messages):
        param = f"messages[{position}].content"
        if isinstance(message.content, str):
            raise ApiError(400, _TEXT_REFUSED, code="unsupported_input", param=param)
        for index, part in enumerate(message.content):
            if isinstance(part, TextPart):
                raise ApiError(400, _TEXT_REFUSED, code="unsupported_input", param=f"{param}[{index}].text")
            sources.append(PictureSource(f"{param}[{index}].image_url", part.image_url.url))
    if not sources:
        raise ApiError(400, f"the request has no pictures; {_TEXT_REFUSED}", code="missing_input", param="messages")
    if len(sources) > max_pictures:
        message_text = f"the request has {len(sources)} pictures, {max_pictures} are accepted"
        raise ApiError(400, message_text, code="too_many_pictures", param="messages")
    return sources


def embedding_response(embeddings: torch.Tensor, request: EmbeddingRequest) -> EmbeddingResponse:
    """Makes the answer.

    Args:
        embeddings: (pictures, embedding size), float32.
        request: says in which form, and how many dimensions to keep.

    Raises:
        ApiError: it asks for more dimensions than there are.
    """
    if request.dimensions is not None:
        embeddings = _truncate(embeddings, request.dimensions)
    data = [
        Embedding(index, _base64(row) if request.encoding_format == "base64" else row.tolist())
        for index, row in enumerate(embeddings)
    ]
    return EmbeddingResponse(f"embd-{secrets.token_hex(12)}", int(time.time()), request.model, data, Usage())


def _truncate(embeddings: torch.Tensor, dimensions: int) -> torch.Tensor:
    size = embeddings.shape[1]
    if dimensions > size:
        message = f"dimensions is {dimensions}, the model's embeddings have {size}"
        raise ApiError(400, message, code="invalid_value", param="dimensions")
    return torch.nn.functional.normalize(embeddings[:, :dimensions], dim=1)


def _base64(row: torch.Tensor) -> str:
    return base64.b64encode(row.numpy().astype("<f4").tobytes()).decode("ascii")
