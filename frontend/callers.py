"""The caller of a request: a key, or an address if no key is needed. Shared resources are given to callers in turn, and not to
requests. And when the caller hangs up."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

from starlette.types import Receive, Scope

__all__ = ["caller", "caller_of", "on_hang_up"]

#: The caller for whom the running task works; tasks that it begins have the same caller.
caller: ContextVar[bytes] = ContextVar("caller", default=b"")


def caller_of(scope: Scope) -> bytes:
    """Returns the caller: the request's ``Authorization``, or else its address."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            return bytes(value)
    client = scope.get("client")
    return client[0].encode() if client else b""


def on_hang_up(receive: Receive, function: Callable[[], None] | None) -> None:
    """Has a function called when the caller of a request hangs up before its answer is complete. (If that has happened already,
    ``receive()`` says so.)

    ASGI has only ``receive()`` for that, for which somebody would have to wait. Our server's is a method of an object that can
    be told what to call. With another server, nothing is called.

    Args:
        receive: of the request.
        function: must not raise; None: nothing is called any more.
    """
    watch = getattr(getattr(receive, "__self__", None), "watch_caller", None)
    if watch is not None:
        watch(function)
