"""The caller of a request: a key, or an address if no key is needed. Shared resources are given to callers in turn, and not to
requests."""

from __future__ import annotations

from contextvars import ContextVar

from starlette.types import Scope

__all__ = ["caller", "caller_of"]

#: The caller for whom the running task works; tasks that it begins have the same caller.
caller: ContextVar[bytes] = ContextVar("caller", default=b"")


def caller_of(scope: Scope) -> bytes:
    """Returns the caller: the request's ``Authorization``, or else its address."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            return bytes(value)
    client = scope.get("client")
    return client[0].encode() if client else b""
