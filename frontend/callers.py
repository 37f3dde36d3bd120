"""Who asks: a key, or where no key is needed an address. What callers share is given to them in turn, and not to requests."""

from __future__ import annotations

from contextvars import ContextVar

from starlette.types import Scope

__all__ = ["caller", "caller_of"]

#: Who asked for what the running task does; tasks that it begins have the same.
caller: ContextVar[bytes] = ContextVar("caller", default=b"")


def caller_of(scope: Scope) -> bytes:
    """Returns who asks: what the request's ``Authorization`` says, or else its address."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            return bytes(value)
    client = scope.get("client")
    return client[0].encode() if client else b""
