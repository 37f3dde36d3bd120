"""How failures become statuses, terminal events of streams, and messages to the caller, in the form of OpenAI's API.

``{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}``, for every error of every route, so that clients made
for that API show the message instead of a parse error of their own.

What a caller can get is :class:`ErrorCode`, and nothing else; ``docs/reference.md`` shows it.

503 means that the same request may succeed a moment later, 413 that it never will, and 504 that a second try would most likely
take as long. All have OpenAI's error envelope. A caller that hangs up gets nothing, and its request is aborted.
"""

from __future__ import annotations

import enum
import logging
import traceback
from collections.abc import Mapping
from typing import Self

import msgspec

import shmring
from shmring.core.loggers import logger_of

__all__ = [
    "ApiError",
    "ErrorBody",
    "ErrorCode",
    "ErrorEnvelope",
    "aborted",
    "api_error_of",
    "not_installed",
    "report",
    "unavailable",
]

logger = logger_of("shmring.frontend.errors")

#: What ``Retry-After`` says. Slots and turns come free within about a second under load; an engine starts in a few.
_RETRY_AFTER_S = 1


class ErrorCode(enum.StrEnum):
    """Why a request failed, for a program: the `code` of :class:`ErrorBody`.

    Attributes:
        status: of HTTP.
        meaning: when it is given, for the reader of a page.
    """

    status: int
    meaning: str

    def __new__(cls, value: str, status: int, meaning: str) -> Self:
        """Makes a member of its text, and keeps the rest beside it."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.status, member.meaning = status, meaning
        return member

    INVALID_HTTP = "invalid_http", 400, "what came is not HTTP, or asks for a proxy"
    INVALID_HOST = "invalid_host", 400, "the request has no `Host`, several, or one that is not a host"
    INVALID_TRANSFER_CODING = "invalid_transfer_coding", 400, "`Transfer-Encoding` is not `chunked`, once, of HTTP/1.1"
    CHUNKS_TOO_SMALL = "chunks_too_small", 400, "a body of many chunks of a few bytes"
    INVALID_REQUEST = "invalid_request", 400, "a request that the router refuses for another reason"
    INVALID_JSON = "invalid_json", 400, "the body is not JSON"
    INVALID_FORM = "invalid_form", 400, "the body is not a form with a file"
    INVALID_VALUE = "invalid_value", 400, "a field has a wrong type or value"
    INVALID_IMAGE = "invalid_image", 400, "a picture can't be fetched or decoded"
    INVALID_AUDIO = "invalid_audio", 400, "a recording can't be fetched or decoded"
    INVALID_VIDEO = "invalid_video", 400, "a clip can't be fetched or decoded"
    MISSING_INPUT = "missing_input", 400, "the request has nothing to work on"
    TEXT_TOO_LONG = "text_too_long", 400, "a text of the body, or its texts together, are too long"
    TOO_MANY_INPUTS = "too_many_inputs", 400, "more inputs than one request may have"
    TOO_MANY_MEDIA = "too_many_media", 400, "more media than one request may have"
    TOO_MANY_PARTS = "too_many_parts", 400, "more messages and parts than one request may have"
    TOO_MANY_PROMPTS = "too_many_prompts", 400, "more prompts than one request may have"
    UNSUPPORTED_VALUE = "unsupported_value", 400, "a field that is not implemented, and that would change the answer"
    UNSUPPORTED_INPUT = "unsupported_input", 400, "a kind of input that this model does not take"
    UNSUPPORTED_TASK = "unsupported_task", 400, "a task that this model does not do"
    REJECTED_BY_ENGINE = "rejected_by_engine", 400, "the engine does not take such a request; the message says why"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded", 400, "prompt and answer are longer than the model takes"
    FORM_TOO_COMPLEX = "form_too_complex", 400, "the form of the answer is too complex to be gone on with"
    PREVIOUS_RESPONSE_NOT_FOUND = (
        "previous_response_not_found",
        400,
        "the response to go on from is not kept, or is not this caller's",
    )
    INVALID_API_KEY = "invalid_api_key", 401, "no key, or a wrong one"
    ORIGIN_NOT_ALLOWED = "origin_not_allowed", 403, "a page of another site sends a form"
    NOT_FOUND = "not_found", 404, "there is no such route, or no such request"
    MODEL_NOT_FOUND = "model_not_found", 404, "there is no such model"
    RESPONSE_NOT_FOUND = "response_not_found", 404, "the response is not kept, or is not this caller's"
    ITEM_NOT_FOUND = "item_not_found", 404, "the item of a response is not kept, or is not this caller's"
    METHOD_NOT_ALLOWED = "method_not_allowed", 405, "the route does not take this method"
    BODY_TIMEOUT = "body_timeout", 408, "the body did not arrive in time"
    PROFILER = "profiler", 409, "the profiler is off, or runs already, or does not run"
    BODY_TOO_LARGE = "body_too_large", 413, "the body has too many bytes"
    TOO_MANY_VALUES = "too_many_values", 413, "the body, or a text of JSON in it, has too many values"
    TEXT_TOO_LARGE = "text_too_large", 413, "the texts take more bytes than one message to the engine may have"
    MEDIA_TOO_LARGE = "media_too_large", 413, "the media are too large together"
    SLAB_TOO_SMALL = "slab_too_small", 413, "the media, or the answer, can never fit this server's slab"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type", 415, "`Content-Type` says that the body is something else"
    UNSUPPORTED_CONTENT_ENCODING = "unsupported_content_encoding", 415, "the body is compressed"
    RATE_LIMIT_EXCEEDED = "rate_limit_exceeded", 429, "the key is at one of its limits"
    HEAD_TOO_LARGE = "head_too_large", 431, "the request's head has too many bytes or headers"
    ABORTED = "aborted", 500, "an operator has ended the request"
    ENGINE_ERROR = "engine_error", 500, "the engine failed with this request"
    INTERNAL_ERROR = "internal_error", 500, "a bug of the server"
    NOT_INSTALLED = "not_installed", 501, "the server's environment lacks a package that the media need"
    UNKNOWN_TRANSFER_CODING = "unknown_transfer_coding", 501, "`Transfer-Encoding` names another coding than `chunked`"
    OVERLOADED = "overloaded", 503, "there was no turn in time, in the frontend or in the engine"
    SLAB_FULL = "slab_full", 503, "there was no space in the slab in time"
    ENGINE_UNAVAILABLE = "engine_unavailable", 503, "the engine is gone or going"
    DECODER_LOST = "decoder_lost", 503, "a decoder died, and the next one as well"
    DECODERS_BUSY = "decoders_busy", 503, "`/ready`: media wait for decoders for too long"
    PAUSED = "paused", 503, "an operator has paused the engine"
    ENGINE_UNHEALTHY = "engine_unhealthy", 503, "`/health`: a step has been running for too long"
    SHUTTING_DOWN = "shutting_down", 503, "the server shuts down"
    REQUEST_TIMEOUT = "request_timeout", 504, "the request took longer than this server allows"

    @property
    def kind(self) -> str:
        """What the error is by OpenAI's names: the `type` of :class:`ErrorBody`."""
        return "server_error" if self.status >= 500 else "rate_limit_error" if self.status == 429 else "invalid_request_error"


class ErrorBody(msgspec.Struct):
    """What went wrong: `message` is for a person, `code` for a program.

    `type` is `invalid_request_error` if the request must be changed, `rate_limit_error` if a key is at one of its limits,
    `server_error` else. `param` is the part of the request
    it is about, such as `messages[0].content[2].image_url`.
    """

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorEnvelope(msgspec.Struct):
    """The body of every error."""

    error: ErrorBody


# Errors of the engine itself and not of the request, by the name of the exception there.
_UNAVAILABLE = {"OverloadedError": ErrorCode.OVERLOADED, "PausedError": ErrorCode.PAUSED} | dict.fromkeys(
    ("AbortedError", "ClosedError", "EngineDeadError", "ExecutorDeadError"), ErrorCode.ENGINE_UNAVAILABLE
)

_EXPECTED = frozenset(
    (
        ErrorCode.OVERLOADED,
        ErrorCode.SLAB_FULL,
        ErrorCode.PAUSED,
        ErrorCode.SHUTTING_DOWN,
        ErrorCode.ENGINE_UNHEALTHY,
        ErrorCode.REQUEST_TIMEOUT,
    )
)


class ApiError(Exception):
    """A request failed, and its caller gets this error.

    Attributes:
        code: why; it has the status.
        param: see :class:`ErrorBody`.
        retry_after_s: when to try again, if that makes sense.
        headers: further headers of the answer.
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["retry-after"] = str(retry_after_s)

    @property
    def status(self) -> int:
        """Of HTTP."""
        return self.code.status

    def envelope(self) -> ErrorEnvelope:
        """Returns the body of the response."""
        return ErrorEnvelope(ErrorBody(str(self), self.code.kind, self.param, self.code))


def api_error_of(error: Exception) -> ApiError:
    """Returns the error that the caller gets."""
    from starlette.exceptions import HTTPException  # here, since the command line reads settings, and they these errors

    match error:
        case ApiError():
            return error
        case HTTPException():
            of_the_router = {404: ErrorCode.NOT_FOUND, 405: ErrorCode.METHOD_NOT_ALLOWED}
            code = of_the_router.get(error.status_code, ErrorCode.INVALID_REQUEST)
            return ApiError(code, error.detail, headers=error.headers)
        case shmring.RemoteError(type_name="ContextLengthError"):
            return ApiError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, error.message)
        case shmring.RemoteError(type_name="FormError"):
            return ApiError(ErrorCode.FORM_TOO_COMPLEX, error.message)
        case shmring.RemoteError(type_name="ValueError" | "ValidationError" | "FormRefusedError"):
            return ApiError(ErrorCode.REJECTED_BY_ENGINE, error.message)
        case shmring.RemoteError(type_name="OperatorAbortError"):
            return aborted()
        case shmring.RemoteError(type_name="CapacityError"):
            return ApiError(ErrorCode.SLAB_TOO_SMALL, f"the answer can never fit this server's memory: {error.message}")
        case shmring.RemoteError() if error.type_name in _UNAVAILABLE:
            return unavailable(error.message, _UNAVAILABLE[error.type_name])
        case shmring.RemoteError():
            return ApiError(ErrorCode.ENGINE_ERROR, f"the engine failed with this request: {error}")
        case shmring.CapacityError() if "max_payload_nbytes" in str(error):
            return ApiError(ErrorCode.TEXT_TOO_LARGE, f"the request's texts are too long together: {error.needed} bytes")
        case shmring.CapacityError():
            return ApiError(ErrorCode.SLAB_TOO_SMALL, f"the request can never fit this server's memory: {error}")
        case shmring.PeerLostError() | shmring.ClosedError() | shmring.AbortedError():
            return unavailable(str(error), ErrorCode.ENGINE_UNAVAILABLE)
        case TimeoutError():
            return ApiError(ErrorCode.REQUEST_TIMEOUT, "the request took longer than this server allows")
    return ApiError(ErrorCode.INTERNAL_ERROR, "internal error; the server's log has it under this request's X-Request-Id")


def aborted() -> ApiError:
    """Returns the error of a request that an operator has ended. Clients of OpenAI's heed the header."""
    message = "an operator of this server has ended the request"
    return ApiError(ErrorCode.ABORTED, message, headers={"x-should-retry": "false"})


def not_installed(message: str, param: str) -> ApiError:
    """Returns the error of a request that this server's environment has no package for. Clients of OpenAI's heed the header."""
    return ApiError(ErrorCode.NOT_INSTALLED, message, param=param, headers={"x-should-retry": "false"})


def unavailable(message: str, code: ErrorCode) -> ApiError:
    """Returns a 503 that asks the caller to try again in a second."""
    return ApiError(code, message, retry_after_s=_RETRY_AFTER_S)


def report(error: Exception, request_id: str) -> ApiError:
    """Returns the error that the caller gets. Logs errors that are the server's own fault."""
    answer = api_error_of(error)
    if answer.status >= 500:
        known = isinstance(error, ApiError | shmring.ShmringError | TimeoutError)
        # As text: a log handler that keeps the exception would keep its frames, and these keep views of the request's slot.
        text = str(error) or type(error).__name__ if known else "".join(traceback.format_exception(error))
        if not known:
            logger.error("the request %s failed by a bug of this server: %s", request_id, text)
        else:
            # Errors of overload, of timeouts and of a shutdown are counted anyway.
            level = logging.INFO if answer.code in _EXPECTED else logging.WARNING
            logger.log(level, "the request %s failed: %s", request_id, text)
    return answer
