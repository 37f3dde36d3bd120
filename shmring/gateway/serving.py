"""Opening an engine's end: ``shmring.serve``, with a gateway for clients on other hosts if that is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, Unpack, overload

from shmring.client.client import Client
from shmring.client.connecting import open_client, settle
from shmring.client.far_session import Tls, tls_of
from shmring.config import ClientConfig, RingConfig, RingOptions, configured
from shmring.door import check_calls, listening_place_of, token_of
from shmring.gateway.gateway import Gateway
from shmring.opening import Opening
from shmring.ring.frontend import CallHandler
from shmring.ring.ring import Ring
from shmring.ring.serving import create_shell
from shmring.ring.shell import Shell

__all__ = ["open_gateway", "serve"]

_Payload = TypeVar("_Payload")


@overload
def serve(
    name: str,
    config: RingConfig | None = ...,
    *,
    payload_type: type[_Payload],
    calls: Mapping[str, CallHandler] | None = ...,
    listen: str | None = ...,
    token: str | bytes | None = ...,
    tls: Tls = ...,
    **overrides: Unpack[RingOptions],
) -> Opening[Ring[_Payload]]: ...


@overload
def serve(
    name: str,
    config: RingConfig | None = ...,
    *,
    payload_type: Any = ...,
    calls: Mapping[str, CallHandler] | None = ...,
    listen: str | None = ...,
    token: str | bytes | None = ...,
    tls: Tls = ...,
    **overrides: Unpack[RingOptions],
) -> Opening[Ring[Any]]: ...


def serve(
    name: str,
    config: RingConfig | None = None,
    *,
    payload_type: Any = Any,
    calls: Mapping[str, CallHandler] | None = None,
    listen: str | None = None,
    token: str | bytes | None = None,
    tls: Tls = None,
    **overrides: Unpack[RingOptions],
) -> Opening[Ring[Any]]:
    """Opens a ring, the engine's side: ``async with shmring.serve("vision", slab_nbytes="1GiB") as ring``.

    Args:
        name: what frontends connect to; one living engine of a user may have it.
        config: limits and sizes; ``overrides`` are fields of it.
        payload_type: a msgspec type that payloads are decoded into; plain objects if not given.
        calls: control calls that frontends may make, by name: coroutine functions of msgpack values.
        listen: where clients on other hosts come in, ``"host:port"``; port 0 is any that is free. They connect to
            ``ring.address``. All of them together are one of ``max_clients``. None: nowhere.
        token: the secret that lets these clients in, of 16 bytes at least.
        tls: for these clients: an ``ssl.SSLContext`` with a certificate, or ``"off"``. None: there is no TLS, and the place has
            to be on the loopback interface.

    Raises:
        SlabError: there is no memory for the slab, or no space in ``/dev/shm``; or (``CudaError``) it can't be pinned with
            ``pin="on"``, or a GPU can't hold the device slab.
        LocalProtocolError: a living engine has this name; or other hosts reach ``listen``, and ``tls`` says nothing.
        PermissionError: the socket's directory is not safe.
        OSError: this process has too few open files left; the text says what to do.
        ValueError, TypeError: a name, size or option is not valid; or ``listen`` has no ``token``.

    Source: objects that can be awaited or used with ``async with`` are how ``websockets`` does it.
    """
    settled = configured(RingConfig, config, overrides)
    check_calls(calls)
    if (listen is None) != (token is None):
        raise TypeError("listen= and token= belong together: who connects from another host shows the token")
    tls_of(tls)
    place = None if listen is None else (*listening_place_of(listen, "listen"), token_of(token))

    async def create() -> Ring[Any]:
        ring: Ring[Any] = Ring(await create_shell(Shell, name, settled, payload_type=payload_type, calls=calls))
        if place is not None:
            try:
                await open_gateway(ring, *place, tls)
            except BaseException:
                await ring.close()
                raise
        return ring

    return Opening(create)


async def open_gateway(ring: Ring[Any], host: str, port: int, token: bytes, tls: Tls) -> Gateway:
    """Has a ring listen, until it closes; arguments and errors are those of :meth:`Gateway.open`."""
    config = ClientConfig(socket_dir=ring.config.socket_dir, prefault=ring.config.prefault)
    names, options = settle(ring.name, None, None, "gateway")
    client = await open_client(Client, names, config, **options)
    try:
        gateway = await Gateway.open(client, host, port, token, tls)
    except BaseException:
        await client.close()
        raise
    ring._listen(str(gateway.address), gateway.close, gateway.say_draining)
    return gateway
