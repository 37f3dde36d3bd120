"""Fetching media over HTTP from the hosts that the operator allows, and from nowhere else.

A server that fetches what callers name can be sent to what only it can reach: its own ports, a cloud's metadata service,
the databases beside it. So, for every request, redirected ones included:

- Its host and port must be listed (:mod:`shmring.frontend.media.urls`).
- The host's name is resolved once; every address it has must be acceptable, and the connection is made to one of those very
  addresses. So it does not matter what the name means a moment later (DNS rebinding). TLS still asks for the host's name.
- What comes back is bounded while it arrives, in bytes and in time, and none of it appears in an error or a log.

Of httpcore this uses one connection at a time, and no client above it: such a client would take the URL apart once more, know
proxies, follow redirects, inflate what is compressed and keep cookies, and each of those would have to be kept from it. Nor is
there a pool: httpcore's can lose a connection to a cancelled request for good, and every deadline here is a cancellation.

Sources: vLLM's CVE-2025-6242 (any host was fetched from), its pull request 26035 (redirects led past the list of hosts) and
its issue 57157 (addresses were not looked at); the IANA registries of special-purpose addresses.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import ipaddress
import logging
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import TypeAlias

import httpcore

from shmring.core.loggers import logger_of
from shmring.frontend.callers.caller import caller
from shmring.frontend.callers.places import Places
from shmring.frontend.media.errors import MediaError
from shmring.frontend.media.urls import AllowedHosts, RemoteUrl, is_address, parse_redirect, parse_url

__all__ = ["Connector", "RemoteClient", "Resolver", "is_acceptable", "parse_networks"]

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

#: From a host's name and a port to its addresses as text; OSError if it has none.
Resolver: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]

logger = logger_of("shmring.frontend.media.network")

_MAX_CONNECTIONS = 32  # fetches at a time: each holds up to one medium; more would only share the same network
_MAX_WAITING = 1024  # fetches in line; whoever begins one has a place for that, and there are fewer of these
_MAX_LOOKUPS = 32  # names that are resolved at a time: each has a thread, which a silent name server may hold for half a minute
_CONNECT_TIMEOUT_S = 5.0  # for one address: three lost SYN packets
_MAX_ATTEMPTS = 3  # addresses that are tried: a host with one dead address is common, with three it is down
_PIECES_PER_TURN = 16  # a host may send one byte in a piece; up to 10 000 of them are parsed from one read

_HEADERS = [("User-Agent", "shmring"), ("Accept", "*/*"), ("Accept-Encoding", "identity"), ("Connection", "close")]
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


# -- addresses ----------------------------------------------------------------------------------------------------------

# What Python takes for global, in some version or in all, and nobody offers media at.
_NEVER_GLOBAL = tuple(
    map(
        ipaddress.ip_network,
        (
            "168.63.129.16/32",  # public, but inside Azure it is the platform's agent of this very machine
            "192.0.0.0/24",  # protocol assignments; Oracle's cloud has its metadata there
            "192.88.99.0/24",  # relays of 6to4
            "2001::/23",  # protocol assignments, Teredo among them: it holds an IPv4 address
            "2002::/16",  # 6to4, withdrawn by RFC 7526: it holds an IPv4 address
            "3fff::/20",  # documentation, RFC 9637
        ),
    )
)
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")  # all of IPv6 that is given out so far
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # RFC 6052: an IPv4 address as a host sees it that has IPv6 only


def parse_networks(networks: Iterable[str]) -> tuple[Network, ...]:
    """Returns networks from their CIDR form. Raises ValueError if one is not."""
    return tuple(map(ipaddress.ip_network, networks))


def is_acceptable(address: Address, allowed: Sequence[Network] = ()) -> bool:
    """Whether a connection may be made to an address: it is one of the public Internet's hosts, or in an allowed network."""
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if any(address in network for network in allowed):
        return True
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            return is_acceptable(ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF))
        if address not in _GLOBAL_UNICAST:
            return False
    return address.is_global and not address.is_multicast and not any(address in network for network in _NEVER_GLOBAL)


class _SystemResolver:
    """``getaddrinfo``, in threads of its own.

    Nobody can interrupt it. The loop's threads for it are few, and used for other things as well: silent name servers would
    keep all of these waiting. Here a thread counts for its caller until it ends, even if nobody waits for it any more; and one
    caller may have half of them.
    """

    def __init__(self) -> None:
        self._places = Places(_MAX_LOOKUPS, _MAX_WAITING, None, most=_MAX_LOOKUPS // 2)

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        """Returns the addresses of a host. Raises OSError if it has none."""
        loop = asyncio.get_running_loop()
        who = caller.get()
        await self._places.take(who)
        found: asyncio.Future[Sequence[str]] = loop.create_future()

        def end(addresses: Sequence[str], error: OSError | None) -> None:
            self._places.give_back(who)
            if found.cancelled():
                return
            if error is None:
                found.set_result(addresses)
            else:
                found.set_exception(error)

        def look_up() -> None:
            addresses: Sequence[str] = ()
            failure: OSError | None = None
            try:
                infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                addresses = [str(sockaddr[0]) for *_, sockaddr in infos]
            except (OSError, UnicodeError) as error:  # the latter: a part of the name is empty, or too long
                failure = OSError(str(error))
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(end, addresses, failure)

        try:
            threading.Thread(target=look_up, name="resolver", daemon=True).start()
        except RuntimeError:  # there are too many threads
            self._places.give_back(who)
            raise OSError(errno.EAGAIN, "no thread is left to resolve a name") from None
        return await found


class Connector:
    """Connects to acceptable addresses only.

    Args:
        allowed: networks that are acceptable besides the public Internet.
        resolver: asked once for a connection; ``getaddrinfo`` if None.
    """

    def __init__(self, allowed: Sequence[Network], resolver: Resolver | None = None) -> None:
        self._allowed = allowed
        self._resolver = _SystemResolver() if resolver is None else resolver
        self._backend = httpcore.AnyIOBackend()

    async def connect(self, host: str, port: int) -> httpcore.AsyncNetworkStream:
        """Resolves the host, checks all its addresses, and connects to the first of them that answers.

        Raises:
            MediaError: it has no address, or one that is not acceptable.
            httpcore.ConnectError: none of them answers.
        """
        for address in (await self._addresses(host, port))[:_MAX_ATTEMPTS]:
            try:
                return await self._backend.connect_tcp(address, port, _CONNECT_TIMEOUT_S)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                continue
        raise httpcore.ConnectError("no address of the host answers")

    async def _addresses(self, host: str, port: int) -> list[str]:
        try:
            texts = [host] if is_address(host) else await self._resolver(host, port)
        except OSError:
            texts = []
        if not texts:
            raise MediaError(f"no address of the host {host[:64]!r} could be found")
        addresses = list(map(ipaddress.ip_address, dict.fromkeys(texts)))
        if not all(is_acceptable(address, self._allowed) for address in addresses):
            raise MediaError(f"the host {host[:64]!r} has an address that this server does not connect to")
        return list(map(str, addresses))


# -- fetching -----------------------------------------------------------------------------------------------------------


class RemoteClient:
    """Fetches over HTTP. Close it with :meth:`close`.

    Args:
        hosts: that may be fetched from.
        allowed: networks that may be connected to, besides the public Internet.
        timeout_s: for all of one fetch: waiting for its turn, redirects, the last byte.
        max_redirects: of one fetch.
        resolver: see :class:`Connector`.
        ssl_context: how hosts must prove who they are; the usual authorities if None.
    """

    def __init__(
        self,
        hosts: AllowedHosts,
        allowed: Sequence[Network],
        *,
        timeout_s: float,
        max_redirects: int,
        resolver: Resolver | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self._hosts = hosts
        self._timeout_s = timeout_s
        self._max_redirects = max_redirects
        self._connector = Connector(allowed, resolver)
        self._ssl_context = httpcore.default_ssl_context() if ssl_context is None else ssl_context
        self._turns = Places(_MAX_CONNECTIONS, _MAX_WAITING, None, most=max(1, _MAX_CONNECTIONS // 2))
        self._open: set[httpcore.AsyncNetworkStream] = set()
        library = logging.getLogger("httpcore")
        if library.level == logging.NOTSET:  # at debug level it quotes headers, and so the URLs of redirects
            library.setLevel(logging.INFO)

    async def get(self, url: str, max_nbytes: int) -> bytes:
        """Returns what is at a URL.

        Args:
            url: of ``http:`` or ``https:``.
            max_nbytes: refused above, before it is read where the host says how much it is.

        Raises:
            MediaError: it is not allowed, too large, too slow, or not there.
        """
        start = parse_url(url)
        try:
            async with asyncio.timeout(self._timeout_s), self._turn():
                return await self._follow(start, max_nbytes)
        except (TimeoutError, httpcore.TimeoutException):
            problem = f"the medium could not be fetched within {self._timeout_s:g} s"
        except (httpcore.NetworkError, httpcore.RemoteProtocolError, ssl.SSLError) as error:  # the last of damaged records
            problem = _what_broke(error)
        raise MediaError(problem)  # out here, so that what the host sent is not in its context

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        who = caller.get()
        await self._turns.take(who)
        try:
            yield
        finally:
            self._turns.give_back(who)

    async def close(self) -> None:
        """Closes all connections; fetches that are under way fail."""
        for stream in list(self._open):
            await stream.aclose()

    async def _follow(self, url: RemoteUrl, max_nbytes: int) -> bytes:
        for _ in range(self._max_redirects + 1):
            if url not in self._hosts:
                raise MediaError(f"{url.authority[:64]!r} is not a host and port that this server fetches media from")
            answer = await self._get(url, max_nbytes)
            if isinstance(answer, bytes):
                return answer
            url = answer
        raise MediaError(f"the host redirects more than {self._max_redirects} times")

    async def _get(self, url: RemoteUrl, max_nbytes: int) -> bytes | RemoteUrl:
        """Returns what is there, or where else to look for it."""
        logger.debug("fetching a medium from %s", url.host)
        target = httpcore.URL(scheme=url.scheme, host=url.host, port=url.port, target=url.target)
        headers = [("Host", url.authority), *_HEADERS]
        async with (
            self._connected(url, target.origin) as connection,
            connection.stream("GET", target, headers=headers) as response,
        ):
            if response.status in _REDIRECTS:
                locations = _values(response, b"location")
                if len(locations) != 1:
                    raise MediaError("the host redirects, but does not say where to, or says it more than once")
                return parse_redirect(url, locations[0])
            _check_head(response, max_nbytes)
            data = await _read(response.aiter_stream(), max_nbytes)
        is_html = any(value.lower().startswith(b"text/html") for value in _values(response, b"content-type"))
        if is_html and data[:64].lstrip().startswith(b"<"):
            raise MediaError("the URL is that of a web page, not of a medium")
        return data

    @contextlib.asynccontextmanager
    async def _connected(self, url: RemoteUrl, origin: httpcore.Origin) -> AsyncIterator[httpcore.AsyncHTTP11Connection]:
        stream = tcp = await self._connector.connect(url.host, url.port)
        self._open.add(tcp)
        try:
            if url.scheme == "https":
                stream = await tcp.start_tls(self._ssl_context, url.host)
            yield httpcore.AsyncHTTP11Connection(origin, stream)
        finally:  # a handshake that is cancelled leaves it open
            self._open.remove(tcp)
            await tcp.aclose()


def _values(response: httpcore.Response, name: bytes) -> list[bytes]:
    return [value for key, value in response.headers if key.lower() == name]


def _check_head(response: httpcore.Response, max_nbytes: int) -> None:
    if response.status != 200:
        raise MediaError(f"the host answered with status {response.status} instead of the medium")
    if any(value.strip().lower() not in (b"", b"identity") for value in _values(response, b"content-encoding")):
        raise MediaError("the host sent the medium compressed, which was not asked for")
    for value in _values(response, b"content-length"):  # digits, as far as h11 let it through
        if int(value) > max_nbytes:
            raise MediaError(f"the medium has {int(value)} bytes, more than the {max_nbytes} that are accepted")


async def _read(pieces: AsyncIterator[bytes], max_nbytes: int) -> bytes:
    """Reads a body into memory once: getvalue() hands the buffer over without a copy."""
    count = 0
    with io.BytesIO() as buffer:
        async for piece in pieces:
            if buffer.tell() + len(piece) > max_nbytes:
                raise MediaError(f"the medium has more than the {max_nbytes} bytes that are accepted")
            buffer.write(piece)
            count += 1
            if count % _PIECES_PER_TURN == 0:  # pieces that have arrived already come without a wait
                await asyncio.sleep(0)
        return buffer.getvalue()


def _what_broke(error: Exception) -> str:
    cause = error.__cause__ or error.__context__
    if isinstance(error, httpcore.ConnectError):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return "the host's certificate is not valid for it"
        return "a connection to the host could not be made"
    return "the host ended the connection, or broke the rules of HTTP, before the medium was complete"
