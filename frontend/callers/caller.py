"""The caller of a request: the owner of its key, or else the key, or an address if no key is needed. Shared resources are given
to callers in turn, and not to requests."""

from __future__ import annotations

import ipaddress
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import Scope

__all__ = ["caller", "caller_of"]

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
