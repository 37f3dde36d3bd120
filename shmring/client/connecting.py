"""Opening a frontend's end: ``shmring.connect``, of one engine or of several."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar, Unpack, overload

from shmring.client.client import RingClient
from shmring.client.routing import Route
from shmring.client.routing_client import RoutingClient
from shmring.config import ClientConfig, ClientOptions, configured

__all__ = ["Connecting", "connect"]


class _Closable(Protocol):
    async def close(self) -> None: ...


_Client = TypeVar("_Client", bound=_Closable)


class Connecting(Generic[_Client]):
    """What :func:`connect` returns: await it, or use it with ``async with``."""

    def __init__(self, create: Callable[[], Awaitable[_Client]]) -> None:
        self._create = create
        self._client: _Client | None = None

    def __await__(self) -> Generator[Any, None, _Client]:
        return self._create().__await__()

    async def __aenter__(self) -> _Client:
        self._client = await self._create()
        return self._client

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._client is not None
        await self._client.close()


@overload
def connect(
    name: str,
    config: ClientConfig | None = None,
    *,
    reconnect: bool | None = None,
    description: str = "",
    **overrides: Unpack[ClientOptions],
) -> Connecting[RingClient]: ...


@overload
def connect(
    name: list[str] | tuple[str, ...],
    config: ClientConfig | None = None,
    *,
    route: Route = "least_loaded",
    reconnect: bool | None = None,
    description: str = "",
    **overrides: Unpack[ClientOptions],
) -> Connecting[RoutingClient]: ...


def connect(
    name: str | list[str] | tuple[str, ...],
    config: ClientConfig | None = None,
    *,
    route: Route | None = None,
    reconnect: bool | None = None,
    description: str = "",
    **overrides: Unpack[ClientOptions],
) -> Connecting[RingClient] | Connecting[RoutingClient]:
    """Opens a frontend's end of a ring: ``async with shmring.connect("vision") as client``.

    With a list of names, it is the end of several rings, and each request goes to one of them. One engine that answers is
    enough; the others are attached to when they are there.

    Args:
        name: the engine's name, or a list of names.
        config: limits and sizes; ``overrides`` are fields of it.
        route: for several engines: ``"least_loaded"`` (the default), to the one with the fewest requests in flight; or
            ``"round_robin"``, to each in turn. A request's ``key`` or ``engine`` comes first.
        reconnect: whether to attach to the next engine of that name when this one ends. Pending calls then fail with
            :class:`EngineDeadError`, and later ones wait for the next engine. By default, so it is with several engines, where
            calls wait only while none is attached; and not with one.
        description: what the engine's log calls this client.

    Raises:
        EngineDeadError: no engine of that name (none of these names) answers within ``connect_timeout_s``.
        RemoteProtocolError: the engine refuses this client (all of them do).
        PermissionError: whoever listens there is not to be trusted.
        SlabError: its slab can't be mapped.
        ValueError, TypeError: a name, size or option is not valid.
    """
    settled = configured(ClientConfig, config, overrides)
    if isinstance(name, str):
        if route is not None:
            raise TypeError(f"route={route!r} is for several engines: connect([...], route=...)")
        return Connecting(lambda: RingClient.create(name, settled, reconnect=bool(reconnect), description=description))
    names, chosen = tuple(name), route or "least_loaded"
    again = reconnect is None or reconnect
    return Connecting(lambda: RoutingClient.create(names, settled, route=chosen, reconnect=again, description=description))
