"""Which pages of other sites may call this server, and read its answers (CORS).

Starlette answers the preflight requests of browsers. The CORS headers of every answer are made here, once, because some answers
are made outside of the application: for a request that is refused early, or cut off by a shutdown. Without these headers, a
page sees a network error instead of the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Scope, Send

from shmring.frontend.errors import ApiError, ErrorCode
from shmring.frontend.settings import CorsSettings

__all__ = ["CrossOrigin", "HeadersFor", "RawHeaders", "check_origin"]

RawHeaders: TypeAlias = Iterable[tuple[bytes, bytes]]

#: Returns the CORS headers of an answer, from the request's headers, whose names are in lower case.
HeadersFor: TypeAlias = Callable[[RawHeaders], list[tuple[bytes, bytes]]]

# The headers of an answer that pages of other sites may read.
_EXPOSED_HEADERS = (
    *("X-Request-Id", "Retry-After", "X-Shmring-Slab-Bytes", "X-Shmring-Copies"),
    *("X-Shmring-Synthetic", "X-Shmring-Media-Shortfall", "X-Shmring-Ignored-Fields"),
)


_SHOWN_CHARACTERS = 256  # of an origin, in an error


class CrossOrigin(CORSMiddleware):
    """Middleware that lets pages of other sites call. It is outside of the code that answers errors, so that these pages can
    read errors as well.

    Args:
        app: what answers.
        cors: which pages may call. If none may, the middleware is of no use, apart from :meth:`headers_for`.
    """

    def __init__(self, app: ASGIApp, cors: CorsSettings) -> None:
        super().__init__(
            app,
            allow_origins=cors.allowed_origins,
            allow_credentials=cors.allow_credentials,
            allow_methods=cors.allowed_methods,
            allow_headers=cors.allowed_headers,
            expose_headers=_EXPOSED_HEADERS,
        )

    async def send(self, message: Message, send: Send, request_headers: Headers) -> None:
        """Sends a part of an answer of the application."""
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *self.headers_for(request_headers.raw)]
        await send(message)

    def headers_for(self, request_headers: RawHeaders) -> list[tuple[bytes, bytes]]:
        """Returns the CORS headers of an answer; see :data:`HeadersFor`."""
        if not self.allow_origins:
            return []
        headers = {"vary": "Origin"}
        origin = next((value.decode("latin-1") for name, value in request_headers if name == b"origin"), None)
        if origin is not None and self.is_allowed_origin(origin):
            headers |= self.simple_headers
            if self.preflight_explicit_allow_origin:  # not "*"
                headers["Access-Control-Allow-Origin"] = origin
        return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


def check_origin(scope: Scope, allowed: Sequence[str]) -> None:
    """Refuses a form that a page of another site sends: a browser does not ask before it posts one.

    Args:
        scope: of the request.
        allowed: origins of sites whose pages may call; ``*``: all.

    Raises:
        ApiError: 403, it is such a page.
    """
    headers = dict(scope["headers"])
    origin = headers.get(b"origin", b"").decode("latin-1")
    if not origin or "*" in allowed or origin in allowed:
        return
    if urlsplit(origin).netloc.lower() != headers.get(b"host", b"").decode("latin-1").lower():
        text = f"pages of {origin[:_SHOWN_CHARACTERS]} may not call this server: its option allowed-origins does not name it"
        raise ApiError(ErrorCode.ORIGIN_NOT_ALLOWED, text)
