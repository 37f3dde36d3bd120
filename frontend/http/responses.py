"""Answers as JSON: objects that msgspec can encode, and errors in their envelope."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shmring.frontend.errors import ApiError

__all__ = ["ErrorForm", "JsonPieces", "JsonResponse", "error_content", "error_response", "new_id", "random_digits"]

#: Makes the body of an error; also given the name of its request.
ErrorForm: TypeAlias = Callable[[ApiError, str], msgspec.Struct]

_SENT_NBYTES = 256 << 10  # in a turn of the loop

_DRAWN_NBYTES = 4096  # of random digits; a system call for each name takes longer than the rest of it
_unused_digits: list[str] = []
os.register_at_fork(after_in_child=_unused_digits.clear)


class JsonResponse(Response):
    """An answer whose body is anything that msgspec can encode. Bytes are JSON already."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Returns the body."""
        return content if isinstance(content, bytes) else msgspec.json.encode(content)

    def init_headers(self, headers: Mapping[str, str] | None = None) -> None:
        """Makes the headers: those of the type and length of the body, and others. (Starlette's looks for these in those.)"""
        others = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in (headers or {}).items()]
        self.raw_headers = [(b"content-length", b"%d" % len(self.body)), (b"content-type", b"application/json"), *others]


class JsonPieces(Response):
    """An answer that is encoded and sent in pieces, so that a large one does not keep others waiting.

    Args:
        pieces: of one JSON document.
        headers: beside those of every answer.
    """

    media_type = "application/json"

    def __init__(self, pieces: Sequence[bytes], headers: Mapping[str, str]) -> None:
        self._pieces = pieces
        super().__init__(headers=dict(headers) | {"content-length": str(sum(map(len, pieces)))})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends it."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        pieces, self._pieces = self._pieces, ()
        sent_nbytes = 0
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            sent_nbytes += len(piece)
            if sent_nbytes > _SENT_NBYTES:
                sent_nbytes = 0
                await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def error_content(error: ApiError, scope: Scope) -> msgspec.Struct:
    """Returns an error in the form that the caller of a request expects: that of its route, or else OpenAI's."""
    form: ErrorForm | None = scope["state"].get("error_form")
    return error.envelope() if form is None else form(error, scope["state"]["request_id"])


def error_response(error: ApiError, scope: Scope) -> Response:
    """Returns the response of an error to a request."""
    return JsonResponse(error_content(error, scope), error.status, error.headers)


def new_id(prefix: str) -> str:
    """Returns a name for an answer, or for a part of it, that nothing else has."""
    return f"{prefix}{random_digits()[:24]}"


def random_digits() -> str:
    """Returns 32 hexadecimal digits that nothing else has. Any thread may ask."""
    try:
        return _unused_digits.pop()
    except IndexError:
        digits = os.urandom(_DRAWN_NBYTES).hex()
        first, *others = (digits[start : start + 32] for start in range(0, len(digits), 32))
        _unused_digits.extend(others)
        return first
