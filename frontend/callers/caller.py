"""The caller of a request: the owner of its key, or else the key, or an address if no key is needed. Shared resources are given
to callers in turn, and not to requests. And when the caller hangs up."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import Receive, Scope

__all__ = ["caller", "caller_of", "on_hang_up"]

_NETWORK_BITS = 64  # of an IPv6 address: the smallest network, whose owner may send from any address in it

#: The caller for whom the running task works, as people may read it; tasks that it begins have the same caller.
caller: ContextVar[str] = ContextVar("caller", default="")


def caller_of(scope: Scope) -> str:
    """Returns the caller: whose key the request has, if keys are needed; or else its address, of IPv6 the network's."""
    name: str | None = scope["state"].get("caller")
    if name is not None:
        return name
    client = scope.get("client")
    if not client:
        return "a local process"
    if ":" not in client[0]:
        return str(client[0])
    try:
        address = ipaddress.IPv6Address(client[0].partition("%")[0])
    except ValueError:
        return str(client[0])
    network = ipaddress.IPv6Network((address, _NETWORK_BITS), strict=False)
    return str(address.ipv4_mapped or network)


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
