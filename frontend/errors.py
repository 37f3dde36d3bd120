"""What a caller is told when a request fails, in the form of OpenAI's API.

``{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}``, for every error of every route, so that clients made
for that API show the message instead of a parse error of their own. How failures become statuses: :mod:`frontend.failures`.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

__all__ = ["ApiError", "ErrorBody", "ErrorEnvelope", "RETRY_AFTER_S"]

#: What ``Retry-After`` says. Slots and turns come free within about a second under load; an engine starts in a few.
RETRY_AFTER_S = 1


class ErrorBody(msgspec.Struct):
    """What went wrong: `message` is for a person, `code` for a program.

    `type` is `invalid_request_error` if the request must be changed, `server_error` if not. `param` is the part of the request
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
    """A request failed in a way that its caller is told.

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
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return ErrorEnvelope(ErrorBody(str(self), kind, self.param, self.code))
