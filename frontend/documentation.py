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
from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

import shmring
from shmring.frontend.anthropic.errors import MESSAGES_PATH, MessagesErrorEnvelope
from shmring.frontend.anthropic.messages_answer import MessagesAnswer, MessagesEvent
from shmring.frontend.anthropic.messages_request import VERSIONS, CountTokensAnswer, CountTokensRequest, MessagesRequest
from shmring.frontend.errors import ErrorEnvelope
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
from shmring.service.supervision import FrontendState

__all__ = ["DOCS_PATH", "DOCUMENT_PATHS", "Documentation", "openapi_document"]

DOCS_PATH = "/docs"
DOCUMENT_PATHS = ("/openapi.json", "/docs/openapi.json")

_SPEC_URL = "openapi.json"  # relative to /docs, which is beside it, wherever a proxy puts both
_POLICY = (
    "default-src 'none'; connect-src 'self'; img-src 'self' data:; font-src data:; "
    "style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

_TYPES = (
    ChatRequest,
    ChatCompletion,
    ChatCompletionChunk,
    ResponsesRequest,
    ResponsesAnswer,
    ResponsesEvent,
    DeletedResponse,
    InputItemList,
    MessagesRequest,
    MessagesAnswer,
    MessagesEvent,
    CountTokensRequest,
    CountTokensAnswer,
    MessagesErrorEnvelope,
    CompletionRequest,
    Completion,
    TranscriptionRequest,
    TranslationRequest,
    Transcription,
    VerboseTranscription,
    SpeechEvent,
    TokenizeRequest,
    TokenizeResponse,
    DetokenizeRequest,
    DetokenizeResponse,
    EmbeddingRequest,
    EmbeddingResponse,
    ScoreRequest,
    ScoreResponse,
    RerankRequest,
    RerankResponse,
    Model,
    ModelList,
    Version,
    Load,
    Health,
    FrontendState,
    AdminStatus,
    PauseState,
    AbortRequest,
    AbortResponse,
    ErrorEnvelope,
)

_DESCRIPTION = (
    "OpenAI's API for chats and embeddings, with pictures, recordings and clips, and Anthropic's for messages. All errors have "
    "OpenAI's envelope, those of wrong paths (404) and wrong methods (405) included; those of `/v1/messages` have Anthropic's. "
    "A status of 429 or 503 comes with Retry-After: the same request may "
    "succeed a moment later."
)
_ERRORS = {
    400: "The request is wrong, or asks for what this server does not do; `param` says where.",
    401: "The server needs a key, and this is none of them.",
    403: "A page of another site has sent the form.",
    404: "There is no such model, or no such response.",
    409: "The profiler is off, or runs already, or does not run.",
    408: "The body did not arrive in time.",
    413: "The body or its media are too large, or can never fit the slab.",
    415: "The body is not said to be JSON, or a form (Content-Type), or is compressed.",
    429: "The key is at one of its limits.",
    500: "The engine failed with this request, or the server has a bug.",
    501: "The request has media, and this server has no packages that decode them.",
    503: "Too many requests, no space in the slab, no engine at the moment, or a decoder that died.",
    504: "The request took longer than the server allows.",
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
    _, schemas = msgspec.json.schema_components(_TYPES, ref_template="#/components/schemas/{name}")
    components: dict[str, Any] = {"schemas": schemas}
    schemes = {"key": settings.api_keys, "admin_key": settings.admin_keys}
    if any(schemes.values()):
        components["securitySchemes"] = {name: {"type": "http", "scheme": "bearer"} for name, keys in schemes.items() if keys}
    security: dict[str, Any] = {"security": [{"key": []}]} if settings.api_keys else {}
    of_messages: dict[str, Any] = {}
    if settings.api_keys:
        components["securitySchemes"]["x_api_key"] = {"type": "apiKey", "in": "header", "name": "x-api-key"}
        of_messages = {"security": [{"x_api_key": []}, {"key": []}]}
    return {
        "openapi": "3.1.0",
        "info": {"title": "shmring", "version": shmring.__version__, "description": _DESCRIPTION},
        "x-limits": limits_of(settings),
        **servers,
        "components": components,
        "paths": {
            "/v1/chat/completions": {"post": _chat(model) | security},
            "/v1/responses": {"post": _responses(model) | security},
            **{path: {method: each | security for method, each in of.items()} for path, of in _stored_responses().items()},
            MESSAGES_PATH: {"post": _messages(model) | of_messages},
            f"{MESSAGES_PATH}/count_tokens": {"post": _token_counts(model) | of_messages},
            "/v1/audio/transcriptions": {"post": _speech("Write down what is said", "TranscriptionRequest") | security},
            "/v1/audio/translations": {"post": _speech("Say in English what is said", "TranslationRequest") | security},
            "/v1/completions": {"post": _completions(model) | security},
            "/tokenize": {"post": _tokens("Tokenize", {"prompt": "Hello"}, model) | security},
            "/detokenize": {"post": _tokens("Detokenize", {"tokens": [1, 2]}, model) | security},
            "/v1/embeddings": {"post": _embeddings(model) | security},
            **{path: {"post": _scores(model) | security} for path in ("/score", "/v1/score")},
            **{path: {"post": _reranking(model) | security} for path in ("/rerank", "/v1/rerank", "/v2/rerank")},
            "/v1/models": {"get": _models() | security},
            "/v1/models/{name}": {"get": _model() | security},
            **_operations(),
            **(_administration() if settings.admin_keys else {}),
        },
    }


# -- operations ---------------------------------------------------------------------------------------------------------


def _chat(model: str) -> dict[str, Any]:
    answer = _text_answer("ChatCompletion", "ChatCompletionChunk")
    body = _body("ChatRequest", {"model": model} | _CHAT_EXAMPLE)
    return _operation("Answer a conversation", "v1", answer, _errors(_BODY_ERRORS), requestBody=body)


def _responses(model: str) -> dict[str, Any]:
    answer = _text_answer("ResponsesAnswer", "ResponsesEvent")
    body = _body("ResponsesRequest", {"model": model, "input": "What is this?"})
    return _operation("Answer a conversation, as items", "v1", answer, _errors(_BODY_ERRORS), requestBody=body)


def _messages(model: str) -> dict[str, Any]:
    answer = _text_answer("MessagesAnswer", "MessagesEvent", _MESSAGES_STREAM)
    return _of_messages("Answer a conversation, as Anthropic does", answer, "MessagesRequest", model, max_tokens=256)


def _token_counts(model: str) -> dict[str, Any]:
    answer = _answer("The number.", {"application/json": _schema("CountTokensAnswer")}, _TAKEN | _TOLD)
    return _of_messages("Count a conversation's tokens", answer, "CountTokensRequest", model)


def _of_messages(summary: str, answer: dict[str, Any], request: str, model: str, **fields: Any) -> dict[str, Any]:
    body = _body(request, {"model": model, **fields, "messages": [{"role": "user", "content": "What is this?"}]})
    operation = _operation(summary, "v1", answer, _errors(_BODY_ERRORS, "MessagesErrorEnvelope"), requestBody=body)
    return operation | {"parameters": [_REQUEST_ID, _VERSION]}


def _stored_responses() -> dict[str, dict[str, Any]]:
    """Returns the paths of responses that the server keeps."""
    path = "/v1/responses/{response_id}"
    name = {"name": "response_id", "in": "path", "required": True, "schema": {"type": "string"}}
    stream = {"name": "stream", "in": "query", "description": "Not supported.", "schema": {"enum": ["false"]}}

    def of(summary: str, answer: str, statuses: Iterable[int], *further: dict[str, Any]) -> dict[str, Any]:
        content = {"application/json": _schema(answer)}
        operation = _operation(summary, "v1", _answer("The response.", content), _errors((*statuses, 401, 404, 500)))
        return operation | {"parameters": [*operation["parameters"], name, *further]}

    page = [
        {"name": field, "in": "query", "schema": schema}
        for field, schema in (
            ("limit", {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}),
            ("order", {"enum": ["asc", "desc"], "default": "desc"}),
            ("after", {"type": "string", "description": "The name of the item before the first one."}),
        )
    ]
    cancel = of("Cancel a response that goes on: there are none, so it is always refused", "ResponsesAnswer", (400,))
    return {
        path: {
            "get": of("Return a response that the server keeps", "ResponsesAnswer", (400,), stream),
            "delete": of("Forget a response", "DeletedResponse", ()),
        },
        f"{path}/input_items": {"get": of("List the items that were a response's input", "InputItemList", (400,), *page)},
        f"{path}/cancel": {"post": cancel},
    }


def _speech(summary: str, request: str) -> dict[str, Any]:
    either = {"schema": {"oneOf": [_schema("VerboseTranscription")["schema"], _schema("Transcription")["schema"]]}}
    content = {
        "application/json": either,
        "text/plain": {"schema": {"type": "string", "description": "With `response_format` `text`, `srt` or `vtt`."}},
        "text/event-stream": _stream("SpeechEvent", _SPEECH_STREAM),
    }
    taken = {name: header | {"required": False} for name, header in _TAKEN.items()}  # of answers that come whole
    body = {"required": True, "content": {"multipart/form-data": _schema(request)}}
    answer = _answer("What is said.", content, taken | _TOLD)
    return _operation(summary, "v1", answer, _errors((*_BODY_ERRORS, 403)), requestBody=body)


def _completions(model: str) -> dict[str, Any]:
    answer = _text_answer("Completion", "Completion")
    body = _body("CompletionRequest", {"model": model, "prompt": "Once upon a time"})
    return _operation("Go on from a prompt", "v1", answer, _errors(_BODY_ERRORS), requestBody=body)


def _text_answer(whole: str, event: str, stream: str = _STREAM) -> dict[str, Any]:
    content = {"application/json": _schema(whole), "text/event-stream": _stream(event, stream)}
    taken = {name: header | {"required": False} for name, header in _TAKEN.items()}  # of answers that come whole
    return _answer("The answer.", content, taken | _TOLD)


def _tokens(what: str, example: dict[str, Any], model: str) -> dict[str, Any]:
    headers = {"X-Shmring-Ignored-Fields": _TOLD["X-Shmring-Ignored-Fields"]}
    answer = _answer("The tokens or the text.", {"application/json": _schema(f"{what}Response")}, headers)
    body = _body(f"{what}Request", {"model": model} | example)
    return _operation(what, "v1", answer, _errors(_BODY_ERRORS), requestBody=body)


def _embeddings(model: str) -> dict[str, Any]:
    answer = _answer("The embeddings.", {"application/json": _schema("EmbeddingResponse")}, _TAKEN | _TOLD)
    body = _body("EmbeddingRequest", {"model": model} | _EMBEDDING_EXAMPLE)
    return _operation("Embed media and texts", "v1", answer, _errors(_BODY_ERRORS), requestBody=body)


def _scores(model: str) -> dict[str, Any]:
    answer = _answer("The scores.", {"application/json": _schema("ScoreResponse")}, _TAKEN | _TOLD)
    body = _body("ScoreRequest", {"model": model, "queries": "rain", "documents": ["It rains.", "The sun shines."]})
    return _operation("Compare texts and media", "v1", answer, _errors(_BODY_ERRORS), requestBody=body)


def _reranking(model: str) -> dict[str, Any]:
    answer = _answer("The documents.", {"application/json": _schema("RerankResponse")}, _TAKEN | _TOLD)
    body = _body("RerankRequest", {"model": model, "query": "rain", "documents": ["It rains.", "The sun shines."]})
    return _operation("Order documents by a query", "v1", answer, _errors(_BODY_ERRORS), requestBody=body)


def _models() -> dict[str, Any]:
    answer = _answer("The models.", {"application/json": _schema("ModelList")})
    return _operation("List the models", "v1", answer, _errors((401, 500, 503, 504)))


def _model() -> dict[str, Any]:
    answer = _answer("The model.", {"application/json": _schema("Model")})
    operation = _operation("Describe a model", "v1", answer, _errors((401, 404, 500, 503, 504)))
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    return operation | {"parameters": [*operation["parameters"], name]}


def _operations() -> dict[str, Any]:
    """Returns the paths for operators of the server."""
    version = {"application/json": _schema("Version")}
    plain = {"text/plain": {"schema": {"type": "string"}}}
    health = {"application/json": _schema("Health")}
    load = {"application/json": _schema("Load")}
    unwell, bugs, busy = _errors((500, 503)), _errors((500,)), _errors((500, 503, 504))
    return {
        "/health": {"get": _operation("Whether the engine works", "operations", _answer("It does.", health), unwell)},
        "/ready": {"get": _operation("Whether requests are answered now", "operations", _answer("They are.", health), unwell)},
        "/ping": {
            method: _operation("As /health", "operations", _answer("It does.", health), unwell) for method in ("get", "post")
        },
        "/load": {"get": _operation("How many requests wait or run", "operations", _answer("So many.", load), busy)},
        "/metrics": {"get": _operation("Numbers for Prometheus", "operations", _answer("The numbers.", plain), bugs)},
        "/version": {"get": _operation("The version", "operations", _answer("The version.", version), bugs)},
    }


def _administration() -> dict[str, Any]:
    """Returns the paths that need an admin key."""

    def path(method: str, summary: str, answer: str, statuses: Iterable[int], **further: Any) -> dict[str, Any]:
        content = {"application/json": _schema(answer)}
        errors = _errors((401, *statuses, 500, 503, 504))
        operation = _operation(summary, "administration", _answer("It was done.", content), errors, **further)
        return {method: operation | {"security": [{"admin_key": []}]}}

    pause = path("post", "Pause all engines: requests wait", "AdminStatus", (400,))
    mode = "What becomes of requests that run: `abort` (503 `paused`), or `wait` for their end."
    waiting = {"description": "As `mode=wait`.", "schema": {"type": "boolean"}}
    pause["post"]["parameters"] = [
        _REQUEST_ID,
        {"name": "mode", "in": "query", "description": mode, "schema": {"enum": ["abort", "wait"], "default": "abort"}},
        {"name": "wait_for_inflight_requests", "in": "query", **waiting},
    ]
    abort = _body("AbortRequest", {"request_ids": ["my-request"]})
    return {
        "/pause": pause,
        "/resume": path("post", "Go on", "AdminStatus", ()),
        "/is_paused": path("get", "Whether all engines are paused", "PauseState", ()),
        "/start_profile": path("post", "Profile the engines' steps", "AdminStatus", (409,)),
        "/stop_profile": path("post", "Write the profiles to --profiler-dir", "AdminStatus", (409,)),
        "/abort_requests": path("post", "End requests in the engines", "AbortResponse", (400, 408, 413), requestBody=abort),
    }


def _operation(
    summary: str, tag: str, answer: dict[str, Any], errors: dict[str, Any], **further: dict[str, Any]
) -> dict[str, Any]:
    return {"summary": summary, "tags": [tag], "parameters": [_REQUEST_ID], "responses": {"200": answer} | errors, **further}


def _body(name: str, example: dict[str, Any]) -> dict[str, Any]:
    return {"required": True, "content": {"application/json": _schema(name) | {"example": example}}}


def _schema(name: str) -> dict[str, Any]:
    return {"schema": {"$ref": f"#/components/schemas/{name}"}}


def _stream(event: str, description: str) -> dict[str, Any]:
    # Only OpenAPI 3.2 can describe events (itemSchema). Tools that do not know it take the schema for that of all bytes, or for
    # that of each event as an object: so it has no type.
    return {
        "schema": {"description": description},
        "x-itemSchema": {"$ref": f"#/components/schemas/{event}"},
    }


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
_HEADERS_OF_STATUS = {
    401: {"WWW-Authenticate": _header("How to say who one is.", required=True)},
    429: {"Retry-After": _header("Seconds to wait.", "integer", required=True)},
    503: {"Retry-After": _header("Seconds to wait.", "integer", required=True)},
}


def _answer(description: str, content: dict[str, Any] | None = None, headers: dict[str, Any] | None = None) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": description, "headers": _NAMED | (headers or {})}
    return answer if content is None else answer | {"content": content}


def _errors(statuses: Iterable[int], envelope: str = "ErrorEnvelope") -> dict[str, Any]:
    content = {"application/json": _schema(envelope)}
    return {str(status): _answer(_ERRORS[status], content, _HEADERS_OF_STATUS.get(status)) for status in statuses}
