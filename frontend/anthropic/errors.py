"""Errors as Anthropic's clients read them.

``{"type": "error", "error": {"type": ..., "message": ..., "param": ..., "code": ...}, "request_id": ...}``. The vendor's errors
have no ``param`` and no ``code``, and its clients take further fields; they are the same as in OpenAI's form
(:mod:`shmring.frontend.errors`).
"""

from __future__ import annotations

import msgspec

from shmring.frontend.errors import ApiError, ErrorBody

__all__ = ["MESSAGES_PATH", "MessagesErrorEnvelope", "messages_error"]

MESSAGES_PATH = "/v1/messages"

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessagesErrorEnvelope(msgspec.Struct, tag_field="type", tag="error"):
    """The body of every error of `/v1/messages`; also the last event of a stream that fails."""

    error: ErrorBody
    request_id: str


def messages_error(error: ApiError, request_id: str) -> MessagesErrorEnvelope:
    """Returns an error in Anthropic's form."""
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return MessagesErrorEnvelope(ErrorBody(str(error), kind, error.param, error.code), request_id)
