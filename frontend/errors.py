"""How failures become statuses, terminal events of streams, and messages to the caller, in the form of OpenAI's API.

``{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}``, for every error of every route, so that clients made
for that API show the message instead of a parse error of their own.

=====================================================  ======  =====================================
failure                                                status  code
=====================================================  ======  =====================================
not JSON; not such a request; bad media                400     invalid_json, invalid_value, invalid_image, ...
a field that is not implemented but changes an answer  400     unsupported_value, unsupported_input
a task that the model does not do                      400     unsupported_task
``ValueError`` or ``ValidationError`` of the executor  400     rejected_by_engine
``FormRefusedError`` of the executor                 400     rejected_by_engine, with ``param``
prompt and ``max_tokens`` longer than the model takes  400     context_length_exceeded
an answer's form is too complex to be gone on with     400     form_too_complex
no key, or a wrong one                                 401     invalid_api_key
a page of another site sends a form                    403     origin_not_allowed
no such model; no such route                           404     model_not_found, not_found
a response or an item of one that is not kept          404     response_not_found, item_not_found
one that a request is to go on from                    400     previous_response_not_found
no such method                                         405     method_not_allowed
the body did not arrive in time                        408     body_timeout
the profiler is off, or runs, or does not run          409     profiler
body too large; of too many values; of a long text     413     body_too_large, too_many_values, text_too_long
a key is at one of its limits                          429     rate_limit_exceeded (``Retry-After``)
media too large together                               413     media_too_large
media, or an answer, that never fit the slab           413     slab_too_small
the body is said to be something else; is compressed   415     unsupported_media_type, unsupported_content_encoding
any other failure of the executor; a bug               500     engine_error, internal_error
a package that media need is not installed             501     not_installed
no turn in time, here or in the engine                 503     overloaded (``Retry-After``)
no space in the slab in time                           503     slab_full (``Retry-After``)
engine gone or going; request aborted there            503     engine_unavailable (``Retry-After``)
a decoder died, and the one that was next as well      503     decoder_lost (``Retry-After``)
an operator has ended the request                      500     aborted
the engine was paused and gave the request up          503     paused (``Retry-After``)
a step has been running for too long (``/health``)     503     engine_unhealthy (``Retry-After``)
the server shuts down, and its grace is over           503     shutting_down (``Retry-After``)
the request took too long                              504     request_timeout
=====================================================  ======  =====================================

503 means that the same request may succeed a moment later, 413 that it never will, and 504 that a second try would most likely
take as long. All have OpenAI's error envelope. A caller that hangs up gets nothing, and its request is aborted.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping

import msgspec

import shmring
from shmring.core.loggers import logger_of

__all__ = ["ApiError", "ErrorBody", "ErrorEnvelope", "aborted", "api_error_of", "not_installed", "report", "unavailable"]

logger = logger_of("shmring.frontend.errors")

#: What ``Retry-After`` says. Slots and turns come free within about a second under load; an engine starts in a few.
_RETRY_AFTER_S = 1

_CODES_OF_STATUS = {404: "not_found", 405: "method_not_allowed"}
# Errors of the engine itself and not of the request, by the name of the exception there.
_UNAVAILABLE = {"OverloadedError": "overloaded", "PausedError": "paused", "ClosedError": "engine_unavailable"} | dict.fromkeys(
    ("AbortedError", "EngineDeadError", "ExecutorDeadError"), "engine_unavailable"
)

_EXPECTED = frozenset(("overloaded", "slab_full", "paused", "shutting_down", "engine_unhealthy", "request_timeout"))


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


class ApiError(Exception):
    """A request failed, and its caller gets this error.

    Attributes:
        status: of HTTP.
        param, code: see :class:`ErrorBody`.
        retry_after_s: when to try again, if that makes sense.
        headers: further headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        retry_after_s: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["retry-after"] = str(retry_after_s)

    def envelope(self) -> ErrorEnvelope:
        """Returns the body of the response."""
        kind = "server_error" if self.status >= 500 else "rate_limit_error" if self.status == 429 else "invalid_request_error"
        return ErrorEnvelope(ErrorBody(str(self), kind, self.param, self.code))


def api_error_of(error: Exception) -> ApiError:
    """Returns the error that the caller gets; the table is at the head of this file."""
    from starlette.exceptions import HTTPException  # here, since the command line reads settings, and they these errors

    match error:
        case ApiError():
            return error
        case HTTPException():
            code = _CODES_OF_STATUS.get(error.status_code, "invalid_request")
            return ApiError(error.status_code, error.detail, code=code, headers=error.headers)
        case shmring.RemoteError(type_name="ContextLengthError"):
            return ApiError(400, error.message, code="context_length_exceeded")
        case shmring.RemoteError(type_name="FormError"):
            return ApiError(400, error.message, code="form_too_complex")
        case shmring.RemoteError(type_name="ValueError" | "ValidationError" | "FormRefusedError"):
            return ApiError(400, error.message, code="rejected_by_engine")
        case shmring.RemoteError(type_name="OperatorAbortError"):
            return aborted()
        case shmring.RemoteError(type_name="CapacityError"):
            return ApiError(413, f"the answer can never fit this server's memory: {error.message}", code="slab_too_small")
        case shmring.RemoteError() if error.type_name in _UNAVAILABLE:
            return unavailable(error.message, _UNAVAILABLE[error.type_name])
        case shmring.RemoteError():
            return ApiError(500, f"the engine failed with this request: {error}", code="engine_error")
        case shmring.CapacityError() if "max_payload_nbytes" in str(error):
            return ApiError(413, f"the request's texts are too long together: {error.needed} bytes", code="text_too_large")
        case shmring.CapacityError():
            return ApiError(413, f"the request can never fit this server's memory: {error}", code="slab_too_small")
        case shmring.PeerLostError() | shmring.ClosedError() | shmring.AbortedError():
            return unavailable(str(error), "engine_unavailable")
        case TimeoutError():
            return ApiError(504, "the request took longer than this server allows", code="request_timeout")
    return ApiError(500, "internal error; the server's log has it under this request's X-Request-Id", code="internal_error")


def aborted() -> ApiError:
    """Returns the error of a request that an operator has ended. Clients of OpenAI's heed the header."""
    message = "an operator of this server has ended the request"
    return ApiError(500, message, code="aborted", headers={"x-should-retry": "false"})


def not_installed(message: str, param: str) -> ApiError:
    """Returns the error of a request that this server's environment has no package for. Clients of OpenAI's heed the header."""
    return ApiError(501, message, code="not_installed", param=param, headers={"x-should-retry": "false"})


def unavailable(message: str, code: str) -> ApiError:
    """Returns a 503 that asks the caller to try again in a second."""
    return ApiError(503, message, code=code, retry_after_s=_RETRY_AFTER_S)


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
