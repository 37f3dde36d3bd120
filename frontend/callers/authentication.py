"""Keys that callers must have: ``Authorization: Bearer KEY``, as OpenAI's clients send it, or ``x-api-key: KEY``, as
Anthropic's do. With both, the first one counts.

Only ``/v1`` is protected, as in vLLM. Monitoring (``/health``, ``/ready``, ``/metrics``, ``/version``) and the documentation
(``/docs``) need no key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from shmring.frontend.callers.key_usage import OwnerUsage
from shmring.frontend.errors import ApiError, ErrorCode

__all__ = ["Authentication"]

_SHOWN = 4  # bytes of a key's digest by which a key without an owner is told from others


class Authentication:
    """Middleware of routes that need a key.

    Args:
        app: answers callers that have a key.
        keys: a caller needs one of them; if there are none, no key is needed.
        admin_keys: of operators, which are as good, where a route takes them; it becomes part of the state that it is one.
        usages: what their owners use, by key; for those that have one. It becomes part of the request's state, and so do
            what the caller is called, and the account by which the caller is told from all others.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Iterable[str],
        usages: Mapping[str, OwnerUsage] | None = None,
        admin_keys: Iterable[str] = (),
    ) -> None:
        self._app = app
        self._admins = {_digest(key.encode()) for key in admin_keys}
        # By digest: how long a look-up takes says nothing about how nearly right a key is.
        self._usages = {_digest(key.encode()): (usages or {}).get(key) for key in keys}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request through if it has a key.

        Raises:
            ApiError: 401, it has none, or a wrong one.
        """
        token = _token(scope) if self._usages or self._admins else None
        digest = _digest(token or b"")
        if token is not None and digest in self._admins:
            scope["state"]["is_admin"] = True
        elif self._usages:
            if token is None or digest not in self._usages:
                headers = "'Authorization: Bearer KEY' or 'x-api-key: KEY'"
                message = f"this server needs a key: send the header {headers} with one that it knows"
                raise ApiError(ErrorCode.INVALID_API_KEY, message, headers={"www-authenticate": "Bearer"})
            scope["state"]["usage"] = usage = self._usages[digest]
            scope["state"]["caller"] = f"key {digest[:_SHOWN].hex()}" if usage is None else usage.owner.name
            scope["state"]["account"] = digest if usage is None else _digest(b"owner " + usage.owner.name.encode())
        await self._app(scope, receive, send)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _token(scope: Scope) -> bytes | None:
    values = [value.partition(b" ") for name, value in scope["headers"] if name == b"authorization"]
    tokens = [token for scheme, _, token in values if scheme.lower() == b"bearer"]
    tokens = tokens or [value for name, value in scope["headers"] if name == b"x-api-key"]
    return bytes(tokens[0].strip()) if len(tokens) == 1 else None
