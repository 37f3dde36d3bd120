"""Keys that callers must have: ``Authorization: Bearer KEY``, as OpenAI's clients send it.

Only ``/v1`` is protected, as in vLLM. Monitoring (``/health``, ``/ready``, ``/metrics``, ``/version``) and the documentation
(``/docs``) need no key.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from shmring.frontend.errors import ApiError

__all__ = ["Authentication"]


class Authentication:
    """Middleware of routes that need a key.

    Args:
        app: answers callers that have a key.
        keys: a caller needs one of them; if there are none, no key is needed.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request through if it has a key.

        Raises:
            ApiError: 401, it has none, or a wrong one.
        """
        if self._digests and not self._is_known(_bearer_token(scope)):
            message = "this server needs a key: send the header 'Authorization: Bearer KEY' with one that it knows"
            raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        await self._app(scope, receive, send)

    def _is_known(self, token: bytes | None) -> bool:
        """Takes the same time for every key, so that the time says nothing about how nearly right a key is."""
        digest = _digest(token or b"")
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return token is not None and any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _bearer_token(scope: Scope) -> bytes | None:
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(values) != 1:
        return None
    scheme, _, token = values[0].partition(b" ")
    return bytes(token.strip()) if scheme.lower() == b"bearer" else None
