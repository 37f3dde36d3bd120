"""Opening a frontend's end: ``shmring.connect``, of one engine or of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict, TypeVar, Unpack

from shmring.client.client import Client
from shmring.client.far_session import Access, Tls, tls_of
from shmring.client.routing import Route
from shmring.config import ClientConfig, ClientOptions, configured
from shmring.door import check_name, shown, token_of
from shmring.memory.limits import check_open_files
from shmring.opening import Opening

__all__ = ["access_of", "connect", "open_client", "settle"]

_OPEN_FILES = 8  # of a client: its socket, what it is sent with the welcome, the pidfd; of each further engine, two

_Client = TypeVar("_Client", bound=Client)


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
) -> Opening[Client]:
    """Connects a frontend to an engine: ``async with shmring.connect("vision") as client``.

    With a list of names, it connects to several engines, and each request goes to one of them. One engine that answers is
    enough; the client attaches to the others when they start.

    Args:
        name: the engine's name; or, of an engine on another host, the address at which its :func:`serve` listens,
            ``tcp://host:port/name``; or a list of names and addresses.
        config: limits and sizes; ``overrides`` are fields of it.
        route: for several engines: ``"least_loaded"`` (the default), to the one with the fewest requests in flight; or
            ``"round_robin"``, to each in turn. A request's ``key`` or ``engine`` comes first.
        reconnect: whether to attach to the next engine of that name when this one ends. Pending calls then fail with
            :class:`EngineDeadError`, and later ones wait for the next engine. The default is true for a list of names, where
            calls wait only while no engine is attached, and false for one name.
        description: what the engine's log calls this client.
        token: of engines on other hosts: the secret that they were given.
        tls: of engines on other hosts: a context, such as ``ssl.create_default_context()`` makes, or ``"off"``. None: there is
            no TLS, and an address beyond this host is refused.

    Raises:
        EngineDeadError: no engine of that name (none of these names) answers within ``connect_timeout_s``.
        RemoteProtocolError: the engine refuses this client (all of them do).
        LocalProtocolError: an address is beyond this host, and ``tls`` says nothing.
        PermissionError: the process that listens there is not to be trusted.
        SlabError: its slab can't be mapped.
        OSError: this process has no descriptors left, say; the text says what to do.
        ValueError, TypeError: a name, size or option is not valid.
    """
    settled = configured(ClientConfig, config, overrides)
    names, options = settle(name, route, reconnect, description)
    access = access_of(token, tls)
    return Opening(lambda: open_client(Client, names, settled, access=access, **options))


def access_of(token: Any, tls: Any) -> Access | None:
    """Returns what lets a client of another host in; None: there is no token.

    Raises:
        TypeError, ValueError: the token, or what is said about TLS, can't be used.
    """
    checked = tls_of(tls)
    return None if token is None else Access(token_of(token), checked)


class Options(TypedDict):
    """What :func:`open_client` takes besides names and sizes."""

    route: Route
    reconnect: bool
    description: str


def settle(
    name: str | list[str] | tuple[str, ...], route: Route | None, reconnect: bool | None, description: str
) -> tuple[Sequence[str], Options]:
    """Returns what arguments of :func:`connect` mean.

    Raises:
        TypeError: there is a route, and one engine; or something is no name.
        ValueError: the description is too long.
    """
    if not isinstance(name, str | list | tuple):
        raise TypeError(f"name is the name of an engine, or a list of them, not {shown(name)}")
    check_name(description, "description")
    if isinstance(name, str) and route is not None:
        raise TypeError(f"route={shown(route)} is for several engines: connect([...], route=...)")
    again = not isinstance(name, str) if reconnect is None else reconnect
    options = Options(route=route or "least_loaded", reconnect=again, description=description)
    return ((name,) if isinstance(name, str) else tuple(name)), options


async def open_client(kind: type[_Client], names: Sequence[str], config: ClientConfig, **options: Any) -> _Client:
    """Makes a client and attaches it.

    Args:
        kind: :class:`Client`, or a subclass.
        names, config, options: its arguments.

    Raises:
        EngineDeadError, RemoteProtocolError, PermissionError, SlabError, OSError, ValueError: as :func:`connect`.
    """
    client = kind(names, config, **options)
    try:
        check_open_files(_OPEN_FILES, f"a client of {names[0]!r}")
        await client._engines.attach()
    except BaseException:
        await client.close()
        raise
    return client
