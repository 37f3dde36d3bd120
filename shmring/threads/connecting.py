"""Opening a frontend's end without an event loop: ``shmring.threads.connect``, of one engine or of several."""

from __future__ import annotations

from typing import Unpack

from shmring.client.connecting import access_of, settle
from shmring.client.far_session import Tls
from shmring.client.routing import Route
from shmring.config import ClientConfig, ClientOptions, configured
from shmring.threads.client import Client

__all__ = ["connect"]


def connect(
    name: str | list[str] | tuple[str, ...],
    config: ClientConfig | None = None,
    *,
    route: Route | None = None,
    reconnect: bool | None = None,
    description: str = "",
    token: str | bytes | None = None,
    tls: Tls = None,
    **overrides: Unpack[ClientOptions],
) -> Client:
    """Connects a frontend to an engine: ``with shmring.threads.connect("vision") as client``.

    Args:
        name: the engine's name, or the address of one on another host (``tcp://host:port/name``); or a list of these: each
            request then goes to one of them.
        config: limits and sizes; ``overrides`` are fields of it.
        route, reconnect: as of :func:`shmring.connect`.
        description: what the engine's log calls this client.
        token, tls: of engines on other hosts, as of :func:`shmring.connect`.

    Raises:
        EngineDeadError: no engine of that name (none of these names) answers within ``connect_timeout_s``.
        RemoteProtocolError, PermissionError, SlabError, ValueError, TypeError: as :func:`shmring.connect`.
        LocalProtocolError: threads are greenlets here (gevent), and a call would never return; or an address is beyond this
            host, and ``tls`` says nothing.
    """
    settled = configured(ClientConfig, config, overrides)
    return Client(*settle(name, route, reconnect, description), settled, access_of(token, tls))
