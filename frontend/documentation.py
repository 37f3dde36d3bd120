"""The OpenAPI document, and a page that shows it.

The document is generated from the types that the server decodes requests into and encodes answers from, so the two can't
differ. The limits of requests come from the options (``x-limits``). Statuses and headers are written here; tests generate
requests from the document and compare every answer with it.

The page works without any other server, because Swagger UI's files come with the package ``offapi``. Most such pages load
them from a CDN and stay blank in a cluster without internet. The content security policy forbids the page to load from
anywhere else.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

import shmring
from shmring.frontend.anthropic.errors import MESSAGES_PATH, MessagesErrorEnvelope
from shmring.frontend.anthropic.messages_answer import MessagesAnswer, MessagesEvent
from shmring.frontend.anthropic.messages_request import VERSIONS, CountTokensAnswer, CountTokensRequest, MessagesRequest
from shmring.frontend.errors import ErrorCode, ErrorEnvelope
from shmring.frontend.http.responses import JsonResponse
from shmring.frontend.openai.chat import ChatCompletion, ChatCompletionChunk, ChatRequest
from shmring.frontend.openai.completions import Completion, CompletionRequest
from shmring.frontend.openai.embeddings import EmbeddingRequest, EmbeddingResponse
from shmring.frontend.openai.input_items import InputItemList
from shmring.frontend.openai.models import Load, Model, ModelList, Version
from shmring.frontend.openai.responses_answer import ResponsesAnswer, ResponsesEvent
from shmring.frontend.openai.responses_request import ResponsesRequest
from shmring.frontend.openai.scoring import RerankRequest, RerankResponse, ScoreRequest, ScoreResponse
from shmring.frontend.openai.speech import (
    SpeechEvent,
    Transcription,
    TranscriptionRequest,
    TranslationRequest,
    VerboseTranscription,
)
from shmring.frontend.openai.stored_responses import DeletedResponse
from shmring.frontend.openai.tokens import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from shmring.frontend.operator.admin import AbortRequest, AbortResponse, AdminStatus, PauseState
from shmring.frontend.operator.health import Health
from shmring.frontend.options import limits_of
from shmring.frontend.served_model import ServedModel
from shmring.frontend.settings import FrontendSettings

__all__ = ["DOCS_PATH", "DOCUMENT_PATHS", "Documentation", "openapi_document"]

DOCS_PATH = "/docs"
DOCUMENT_PATHS = ("/openapi.json", "/docs/openapi.json")

_SPEC_URL = "openapi.json"  # relative to /docs, which is beside it, wherever a proxy puts both
_POLICY = (
    "default-src 'none'; connect-src 'self'; img-src 'self' data:; font-src data:; "
    "style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

_DESCRIPTION = (
    "OpenAI's API for chats and embeddings, with pictures, recordings and clips, and Anthropic's for messages. All errors have "
    "OpenAI's envelope, those of wrong paths (404) and wrong methods (405) included; those of `/v1/messages` have Anthropic's. "
    "A status of 429 or 503 comes with Retry-After: the same request may "
    "succeed a moment later."
)
_ERRORS = {
    status: "; ".join(f"`{code}`: {code.meaning}" for code in codes)
    for status, codes in itertools.groupby(sorted(ErrorCode, key=lambda code: code.status), key=lambda code: code.status)
}
_BODY_ERRORS = (400, 401, 404, 408, 413, 415, 429, 500, 501, 503, 504)

_STREAM = (
    "With `stream`: events `data: {...}`, each of the type that is named here, and `data: [DONE]` at the end. If it fails on "
    'the way, the last event is `data: {"error": {...}}`, and no `[DONE]` follows.'
)
_MESSAGES_STREAM = (
    "With `stream`: events `event: NAME` and `data: {...}`, each of the type that is named here; `message_stop` is the last. "
    "If it fails on the way, the last event is `event: error`, and its data are the body of an error."
)
_SPEECH_STREAM = (
    "With `stream`: events `data: {...}`, each of the type that is named here; `transcript.text.done` is the last. "
    'If it fails on the way, the last event is `data: {"error": {...}}`.'
)
_REQUEST_ID = {
    "name": "X-Request-Id",
    "in": "header",
    "description": "The caller's name for the request, sent back: up to 128 visible ASCII characters, or else it is replaced.",
    "schema": {"type": "string"},
}

_VERSION = {
    "name": "anthropic-version",
    "in": "header",
    "description": "The version of the API; it may be left out.",
    "schema": {"enum": list(VERSIONS)},
}

_PICTURE = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4//8/AAX+Av4N70a4AAAAAElFTkSuQmCC"
_PICTURE_PART = {"type": "image_url", "image_url": {"url": _PICTURE}}
_CHAT_EXAMPLE = {"messages": [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, _PICTURE_PART]}]}
_EMBEDDING_EXAMPLE = {"messages": [{"role": "user", "content": [_PICTURE_PART]}]}
_MESSAGES_EXAMPLE = {"messages": [{"role": "user", "content": "What is this?"}]}
_DOCUMENTS = ["It rains.", "The sun shines."]
_TOKENS = "The tokens or the text."


class Documentation:
    """The document and its page.

    Args:
        settings: whether callers of ``/v1`` need a key, and the limits of requests.
        model: the examples use its name, so that they can be tried as they are.
    """

    def __init__(self, settings: FrontendSettings, model: ServedModel) -> None:
        self._settings = settings
        self._model = model

    async def document(self, http_request: Request) -> Response:
        """Answers ``GET /openapi.json``, with or without an engine."""
        try:
            name = (await self._model.served()).names[0]
        except (shmring.ShmringError, TimeoutError):
            name = "MODEL"
        return JsonResponse(_encoded(self._settings, name, http_request.scope.get("root_path", "")))

    async def page(self, _: Request) -> Response:
        """Answers ``GET /docs``."""
        text = await asyncio.to_thread(_page)  # two megabytes of scripts and styles are read
        return HTMLResponse(text, headers={"content-security-policy": _POLICY})


@functools.cache
def _page() -> str:
    from offapi import OpenAPITemplate  # it holds 10 MB of scripts from then on, which most servers are never asked for

    return str(OpenAPITemplate.SWAGGER.value.format(spec_url=_SPEC_URL))


@functools.lru_cache(maxsize=4)  # one, as a rule: another when the next engine serves another model
def _encoded(settings: FrontendSettings, model: str, root_path: str) -> bytes:
    return msgspec.json.encode(openapi_document(settings, model, root_path))


def openapi_document(settings: FrontendSettings, model: str = "MODEL", root_path: str = "") -> dict[str, Any]:
    """Returns the document.

    Args:
        settings: whether callers of ``/v1`` need a key, and the limits of requests.
        model: for the examples.
        root_path: what a proxy in front strips from paths.
    """
    servers: dict[str, Any] = {"servers": [{"url": root_path}]} if root_path else {}
    schemes = {"key": settings.api_keys, "admin_key": settings.admin_keys}
    schemas: dict[str, Any] = {name: {"type": "http", "scheme": "bearer"} for name, keys in schemes.items() if keys}
    if settings.api_keys:
        schemas["x_api_key"] = {"type": "apiKey", "in": "header", "name": "x-api-key"}
    kinds: list[type] = []

    def named(kind: type) -> str:
        kinds.append(kind)
        return f"#/components/schemas/{kind.__name__}"

    paths = msgspec.to_builtins(_paths(settings, model), enc_hook=named)
    _, shown = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    return {
        "openapi": "3.1.0",
        "info": {"title": "shmring", "version": shmring.__version__, "description": _DESCRIPTION},
        "x-limits": limits_of(settings),
        **servers,
        "components": {"schemas": shown} | ({"securitySchemes": schemas} if schemas else {}),
        "paths": paths,
    }


# -- operations ---------------------------------------------------------------------------------------------------------


def _paths(settings: FrontendSettings, model: str) -> dict[str, dict[str, Any]]:
    """Returns all paths, with types in the place of references to their schemas."""
    posted = functools.partial(_posted, model)
    comparing = _answer("The scores.", ScoreResponse, _TAKEN | _TOLD)
    score = posted("Compare texts and media", ScoreRequest, {"queries": "rain", "documents": _DOCUMENTS}, comparing)
    ordering = _answer("The documents.", RerankResponse, _TAKEN | _TOLD)
    rerank = posted("Order documents by a query", RerankRequest, {"query": "rain", "documents": _DOCUMENTS}, ordering)
    of_callers = {
        "/v1/chat/completions": posted(
            "Answer a conversation", ChatRequest, _CHAT_EXAMPLE, _text_answer(ChatCompletion, ChatCompletionChunk)
        ),
        "/v1/responses": posted(
            "Answer a conversation, as items",
            ResponsesRequest,
            {"input": "What is this?"},
            _text_answer(ResponsesAnswer, ResponsesEvent),
        ),
        **_stored_responses(),
        "/v1/audio/transcriptions": _speech("Write down what is said", TranscriptionRequest),
        "/v1/audio/translations": _speech("Say in English what is said", TranslationRequest),
        "/v1/completions": posted(
            "Go on from a prompt", CompletionRequest, {"prompt": "Once upon a time"}, _text_answer(Completion, Completion)
        ),
        "/tokenize": posted("Tokenize", TokenizeRequest, {"prompt": "Hello"}, _answer(_TOKENS, TokenizeResponse, _IGNORED)),
        "/detokenize": posted(
            "Detokenize", DetokenizeRequest, {"tokens": [1, 2]}, _answer(_TOKENS, DetokenizeResponse, _IGNORED)
        ),
        "/v1/embeddings": posted(
            "Embed media and texts",
            EmbeddingRequest,
            _EMBEDDING_EXAMPLE,
            _answer("The embeddings.", EmbeddingResponse, _TAKEN | _TOLD),
        ),
        **dict.fromkeys(("/score", "/v1/score"), score),
        **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), rerank),
        "/v1/models": _got("List the models", _answer("The models.", ModelList), (401, 500, 503, 504)),
        "/v1/models/{name}": _got(
            "Describe a model", _answer("The model.", Model), (401, 404, 500, 503, 504), parameters=[_in_path("name")]
        ),
    }
    of_messages = {
        MESSAGES_PATH: posted(
            "Answer a conversation, as Anthropic does",
            MessagesRequest,
            {"max_tokens": 256} | _MESSAGES_EXAMPLE,
            _text_answer(MessagesAnswer, MessagesEvent, _MESSAGES_STREAM),
            MessagesErrorEnvelope,
            parameters=[_VERSION],
        ),
        f"{MESSAGES_PATH}/count_tokens": posted(
            "Count a conversation's tokens",
            CountTokensRequest,
            _MESSAGES_EXAMPLE,
            _answer("The number.", CountTokensAnswer, _TAKEN | _TOLD),
            MessagesErrorEnvelope,
            parameters=[_VERSION],
        ),
    }
    return {
        **_secured(of_callers, [{"key": []}] if settings.api_keys else []),
        **_secured(of_messages, [{"x_api_key": []}, {"key": []}] if settings.api_keys else []),
        **_operations(),
        **(_secured(_administration(), [{"admin_key": []}]) if settings.admin_keys else {}),
    }


def _secured(paths: dict[str, dict[str, Any]], schemes: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns paths whose operations need a key of one of these kinds; none: they need no key."""
    security = {"security": schemes} if schemes else {}
    return {path: {method: each | security for method, each in methods.items()} for path, methods in paths.items()}


def _posted(
    model: str,
    summary: str,
    request: type,
    example: dict[str, Any],
    answer: dict[str, Any],
    envelope: type = ErrorEnvelope,
    *,
    parameters: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    body = _body(request, {"model": model} | example)
    errors = _errors(_BODY_ERRORS, envelope)
    return {"post": _operation(summary, "v1", answer, errors, parameters=parameters, requestBody=body)}


def _got(
    summary: str, answer: dict[str, Any], statuses: Iterable[int], *, parameters: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    return {"get": _operation(summary, "v1", answer, _errors(statuses), parameters=parameters)}


def _in_path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _stored_responses() -> dict[str, dict[str, Any]]:
    """Returns the paths of responses that the server keeps."""
    path = "/v1/responses/{response_id}"
    stream = {"name": "stream", "in": "query", "description": "Not supported.", "schema": {"enum": ["false"]}}

    def of(summary: str, answer: type, statuses: Iterable[int], *further: dict[str, Any]) -> dict[str, Any]:
        errors, parameters = _errors((*statuses, 401, 404, 500)), (_in_path("response_id"), *further)
        return _operation(summary, "v1", _answer("The response.", answer), errors, parameters=parameters)

    page = [
        {"name": field, "in": "query", "schema": schema}
        for field, schema in (
            ("limit", {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}),
            ("order", {"enum": ["asc", "desc"], "default": "desc"}),
            ("after", {"type": "string", "description": "The name of the item before the first one."}),
        )
    ]
    cancel = of("Cancel a response that goes on: there are none, so it is always refused", ResponsesAnswer, (400,))
    return {
        path: {
            "get": of("Return a response that the server keeps", ResponsesAnswer, (400,), stream),
            "delete": of("Forget a response", DeletedResponse, ()),
        },
        f"{path}/input_items": {"get": of("List the items that were a response's input", InputItemList, (400,), *page)},
        f"{path}/cancel": {"post": cancel},
    }


def _speech(summary: str, request: type) -> dict[str, Any]:
    either = {"schema": {"oneOf": [_schema(VerboseTranscription)["schema"], _schema(Transcription)["schema"]]}}
    content = {
        "application/json": either,
        "text/plain": {"schema": {"type": "string", "description": "With `response_format` `text`, `srt` or `vtt`."}},
        "text/event-stream": _stream(SpeechEvent, _SPEECH_STREAM),
    }
    body = {"required": True, "content": {"multipart/form-data": _schema(request)}}
    answer = _answer("What is said.", content, _TAKEN_IF_WHOLE | _TOLD)
    return {"post": _operation(summary, "v1", answer, _errors((*_BODY_ERRORS, 403)), requestBody=body)}


def _text_answer(whole: type, event: type, stream: str = _STREAM) -> dict[str, Any]:
    content = {"application/json": _schema(whole), "text/event-stream": _stream(event, stream)}
    return _answer("The answer.", content, _TAKEN_IF_WHOLE | _TOLD)


def _operations() -> dict[str, Any]:
    """Returns the paths for operators of the server."""
    plain = {"text/plain": {"schema": {"type": "string"}}}
    unwell, bugs, busy = (500, 503), (500,), (500, 503, 504)

    def of(summary: str, answer: dict[str, Any], statuses: Iterable[int]) -> dict[str, Any]:
        return _operation(summary, "operations", answer, _errors(statuses))

    works = of("As /health", _answer("It does.", Health), unwell)
    return {
        "/health": {"get": of("Whether the engine works", _answer("It does.", Health), unwell)},
        "/ready": {"get": of("Whether requests are answered now", _answer("They are.", Health), unwell)},
        "/ping": {"get": works, "post": works},
        "/load": {"get": of("How many requests wait or run", _answer("So many.", Load), busy)},
        "/metrics": {"get": of("Numbers for Prometheus", _answer("The numbers.", plain), bugs)},
        "/version": {"get": of("The version", _answer("The version.", Version), bugs)},
    }


def _administration() -> dict[str, Any]:
    """Returns the paths that need an admin key."""

    def path(method: str, summary: str, answer: type, statuses: Iterable[int], **further: Any) -> dict[str, Any]:
        errors = _errors((401, *statuses, 500, 503, 504))
        return {method: _operation(summary, "administration", _answer("It was done.", answer), errors, **further)}

    mode = "What becomes of requests that run: `abort` (503 `paused`), or `wait` for their end."
    waiting = {"description": "As `mode=wait`.", "schema": {"type": "boolean"}}
    of_pause = (
        {"name": "mode", "in": "query", "description": mode, "schema": {"enum": ["abort", "wait"], "default": "abort"}},
        {"name": "wait_for_inflight_requests", "in": "query", **waiting},
    )
    abort = _body(AbortRequest, {"request_ids": ["my-request"]})
    return {
        "/pause": path("post", "Pause all engines: requests wait", AdminStatus, (400,), parameters=of_pause),
        "/resume": path("post", "Go on", AdminStatus, ()),
        "/is_paused": path("get", "Whether all engines are paused", PauseState, ()),
        "/start_profile": path("post", "Profile the engines' steps", AdminStatus, (409,)),
        "/stop_profile": path("post", "Write the profiles to --profiler-dir", AdminStatus, (409,)),
        "/abort_requests": path("post", "End requests in the engines", AbortResponse, (400, 408, 413), requestBody=abort),
    }


def _operation(
    summary: str,
    tag: str,
    answer: dict[str, Any],
    errors: dict[str, Any],
    *,
    parameters: Sequence[dict[str, Any]] = (),
    **further: dict[str, Any],
) -> dict[str, Any]:
    responses = {"200": answer} | errors
    return {"summary": summary, "tags": [tag], "parameters": [_REQUEST_ID, *parameters], "responses": responses, **further}


def _body(kind: type, example: dict[str, Any]) -> dict[str, Any]:
    return {"required": True, "content": {"application/json": _schema(kind) | {"example": example}}}


def _schema(kind: type) -> dict[str, Any]:
    return {"schema": {"$ref": kind}}


def _stream(event: type, description: str) -> dict[str, Any]:
    # Only OpenAPI 3.2 can describe events (itemSchema). Tools that do not know it take the schema for that of all bytes, or for
    # that of each event as an object: so it has no type.
    return {"schema": {"description": description}, "x-itemSchema": {"$ref": event}}


# -- answers ------------------------------------------------------------------------------------------------------------


def _header(description: str, kind: str = "string", *, required: bool = False) -> dict[str, Any]:
    return {"description": description, "schema": {"type": kind}, "required": required}


_NAMED = {"X-Request-Id": _header("The request's name.", required=True)}
_TOLD = {
    "X-Shmring-Synthetic": _header("`true` if the answer is made up, for load tests."),
    "X-Shmring-Media-Shortfall": _header("What of the request's media was damaged or missing, and left out."),
    "X-Shmring-Ignored-Fields": _header("Fields of the request that the server does not know, by their paths."),
}
_TAKEN = {
    "X-Shmring-Slab-Bytes": _header("Bytes of tensors that crossed through the slab.", "integer", required=True),
    "X-Shmring-Copies": _header("Tensors that were copied for sending, at most.", "integer", required=True),
}
_TAKEN_IF_WHOLE = {name: header | {"required": False} for name, header in _TAKEN.items()}  # of answers that are not streamed
_IGNORED = {name: header for name, header in _TOLD.items() if name == "X-Shmring-Ignored-Fields"}
_WAIT = {"Retry-After": _header("Seconds to wait.", "integer", required=True)}
_HEADERS_OF_STATUS = {401: {"WWW-Authenticate": _header("How to say who one is.", required=True)}, 429: _WAIT, 503: _WAIT}


def _answer(
    description: str, content: type | dict[str, Any], headers: Mapping[str, dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Returns an answer.

    Args:
        description: of it.
        content: its type, which is JSON then; or what there is of each media type.
        headers: beside the request's name.
    """
    content = content if isinstance(content, dict) else {"application/json": _schema(content)}
    return {"description": description, "headers": _NAMED | dict(headers or {}), "content": content}


def _errors(statuses: Iterable[int], envelope: type = ErrorEnvelope) -> dict[str, Any]:
    return {str(status): _answer(_ERRORS[status], envelope, _HEADERS_OF_STATUS.get(status)) for status in statuses}
