"""Where clients on other hosts come in: a listener beside an engine, in its process and loop.

Theory of operation: the gateway is a client of the ring, as any other process on this host could be. What a far client sends is
received into a slot of this client's, and submitted from there (:mod:`shmring.gateway.peer`). So the engine's book, its lines,
quotas and limits treat all far clients together as one frontend.

Who connects has some seconds to show the token. Connections that have not are few, and a new one takes the place of the oldest
of the host that has most of them; so ten thousand of them are nobody else's trouble. Those that have shown it are bounded as
well, and what they all receive in one turn of the loop.

Invariant: nothing is read beyond a hello before its token is known to be right.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import errno
import functools
import hashlib
import hmac
import ipaddress
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor

from shmring.client.client import Client
from shmring.client.far_session import Tls
from shmring.client.flight import Flight
from shmring.core.loggers import logger_of
from shmring.core.messages import Refused
from shmring.core.printable import printable
from shmring.door import FarAddress
from shmring.errors import ClosedError, LocalProtocolError, PeerLostError, RemoteProtocolError
from shmring.gateway.peer import Peer, Session
from shmring.transport.far_wire import PREAMBLE, Hello, decode_hello, frame, hello_nbytes
from shmring.transport.streams import Pace, Stream, Turns

__all__ = ["Gateway"]

logger = logger_of("shmring.gateway")

_TURN_NBYTES = 1 << 20  # of all far senders, in a turn of the engine's loop: some tenths of a millisecond
_MOST_SILENT = 64  # connections that have not shown the token; a hello takes milliseconds
_MOST_PEERS = 256  # connections that have: a client has five at most
_FILLING_SHARE = 4  # a fourth of what can be leased is in slots that are being received, at most
_GREETING_PATIENCE = 5  # seconds
_BACKLOG = 128
_PAUSE_S = 0.1  # when no connection can be accepted: there are no descriptors left, or the network is down


class Gateway:
    """See the head of this file. Made by :meth:`open`.

    Args:
        client: of the ring; the gateway closes it.
        listener: bound and listening.
        address: what clients connect to.
        tls: of connections; None: without.
        pace: of what comes and goes, once a token was shown.

    Attributes:
        address: as given.
        refused: connections that showed no right token, or were one too many.
    """

    def __init__(
        self,
        client: Client,
        listener: socket.socket,
        address: FarAddress,
        tls: ssl.SSLContext | None,
        pace: Pace,
    ) -> None:
        self.address = address
        self.refused = 0
        self._client = client
        self._listener = listener
        self._tls = tls
        self._pace = pace
        self._greeting_pace = Pace(_GREETING_PATIENCE)
        self._turns = Turns(_TURN_NBYTES)
        self._handshakes = ThreadPoolExecutor(1, "shmring-tls")  # its thread begins with the first one
        welcome = client.engines[client.names[0]]._welcome
        if welcome is None:
            raise ClosedError("the ring is closed")
        self._filling = Flight(welcome.max_inflight, welcome.leasable_nbytes // _FILLING_SHARE)
        self._tokens: list[bytes] = []
        self._silent: dict[asyncio.Task[None], str] = {}  # connections that have not shown the token, with their hosts
        self._peers: set[asyncio.Task[None]] = set()
        self._sessions: dict[bytes, Session] = {}
        self._is_draining = False
        self._loop = asyncio.get_running_loop()
        self._accepting = self._loop.create_task(self._accept())
        self._accepting.add_done_callback(_log_fault)

    @classmethod
    async def open(cls, client: Client, host: str, port: int, token: bytes, tls: Tls, pace: Pace | None = None) -> Gateway:
        """Listens.

        Args:
            client: of the ring, attached; the gateway closes it.
            host, port: where; port 0 is any that is free.
            token: who shows it may come in.
            tls: a context for servers, or ``"off"``; None: the place must be on the loopback interface.
            pace: of what comes and goes; None: ten seconds, and a second more for each MiB.

        Raises:
            OSError: nobody can listen there.
            LocalProtocolError: other hosts reach the place, and nothing was said about TLS.
        """
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, place = found[0]
        if tls is None and not ipaddress.ip_address(str(place[0]).partition("%")[0]).is_loopback:
            raise LocalProtocolError(
                f"other hosts reach {host}:{port}, and what comes there could be read on the way: give tls=, an ssl.SSLContext "
                "with a certificate, or tls='off'"
            )
        listener = socket.create_server((str(place[0]), port), family=family, backlog=_BACKLOG)
        try:
            listener.setblocking(False)
            address = FarAddress(host, listener.getsockname()[1], client.names[0])
            context = tls if isinstance(tls, ssl.SSLContext) else None
            gateway = cls(client, listener, address, context, pace or Pace())
        except BaseException:
            listener.close()
            raise
        gateway.admit(token)
        return gateway

    def admit(self, token: bytes) -> None:
        """Lets who shows this token in."""
        self._tokens.append(hashlib.sha256(token).digest())

    def dismiss(self, token: bytes) -> None:
        """Lets who shows this token in no more. Who is in stays."""
        with contextlib.suppress(ValueError):
            self._tokens.remove(hashlib.sha256(token).digest())

    def say_draining(self) -> None:
        """The engine drains: its clients are told, also those who will be."""
        if not self._is_draining:
            self._is_draining = True
            for session in self._sessions.values():
                if session.first is not None:
                    session.first.say_draining()

    async def close(self) -> None:
        """Closes all connections, and the client. A second call does nothing."""
        tasks = [self._accepting, *self._silent, *self._peers]
        for task in tasks:
            task.cancel()
        try:
            await asyncio.wait(tasks)
        finally:
            self._listener.close()
            self._handshakes.shutdown(wait=False, cancel_futures=True)
            await self._client.close()

    async def _accept(self) -> None:
        is_warned = False
        while True:
            try:
                connected, place = await self._loop.sock_accept(self._listener)
            except OSError as error:
                if not is_warned and error.errno != errno.ECONNABORTED:
                    is_warned = True
                    logger.warning("no connections from other hosts are accepted for now: %s", error)
                await asyncio.sleep(0 if error.errno == errno.ECONNABORTED else _PAUSE_S)
                continue
            is_warned = False
            if len(self._silent) >= _MOST_SILENT:
                host, _ = collections.Counter(self._silent.values()).most_common(1)[0]
                loser = next(task for task, theirs in self._silent.items() if theirs == host)
                del self._silent[loser]
                loser.cancel()
                self.refused += 1
            task = self._loop.create_task(self._serve(connected))
            self._silent[task] = _network_of(place[0])
            task.add_done_callback(functools.partial(self._over, connected))
            await asyncio.sleep(0)  # a flood of connections leaves the loop its turns

    def _over(self, connected: socket.socket, task: asyncio.Task[None]) -> None:
        connected.close()  # its task may have been cancelled before it began
        self._silent.pop(task, None)
        self._peers.discard(task)
        _log_fault(task)

    async def _serve(self, connected: socket.socket) -> None:
        """A connection, from its beginning to its end."""
        stream = None
        try:
            if self._tls is not None:
                connected.setblocking(False)
                connected = self._tls.wrap_socket(connected, server_side=True, do_handshake_on_connect=False)
            stream = Stream(connected, self._turns)
            async with self._greeting_pace.within(stream, 0):
                hello = await self._greet(stream)
            if hello is not None:
                await self._serve_peer(stream, hello)
        except (OSError, EOFError, RemoteProtocolError, ClosedError, PeerLostError) as error:
            logger.info("a connection from another host has ended: %s", error)
        finally:
            if stream is not None:
                stream.close()
            connected.close()

    async def _serve_peer(self, stream: Stream, hello: Hello) -> None:
        task = asyncio.current_task()
        assert task is not None
        is_first = hello.session not in self._sessions
        session = self._sessions.setdefault(hello.session, Session())
        session.connections.add(task)
        try:
            peer = Peer(self._client, stream, self._pace, self._filling, session, printable(hello.description))
            if is_first:
                session.first = peer
                if self._is_draining:
                    peer.say_draining()
            await peer.run()
        finally:
            session.connections.remove(task)
            if is_first:  # it is always read, so it is the one that learns of a client's end
                del self._sessions[hello.session]
                for other in session.connections:
                    other.cancel()

    async def _greet(self, stream: Stream) -> Hello | None:
        """Answers a hello; returns None if this connection is refused."""
        await stream.handshake(self._handshakes)
        preamble = bytearray(PREAMBLE.size)
        await stream.fill(memoryview(preamble), len(preamble))
        try:
            encoded = bytearray(hello_nbytes(preamble))
            await stream.fill(memoryview(encoded), len(encoded))
            hello = decode_hello(encoded)
            reason = self._why_not(hello)
        except RemoteProtocolError as error:
            reason = str(error)
        welcome = self._client.engines[self._client.names[0]]._welcome
        task = asyncio.current_task()
        if reason or welcome is None or task is None:
            self.refused += 1
            await stream.send(frame(Refused(reason or "the engine is closing")))
            return None
        self._silent.pop(task, None)
        self._peers.add(task)
        await stream.send(frame(Peer.welcome(welcome)))
        return hello

    def _why_not(self, hello: Hello) -> str:
        digest = hashlib.sha256(hello.token).digest()
        is_known = False
        for token in self._tokens:  # all of them, whichever is right
            is_known |= hmac.compare_digest(digest, token)
        if not is_known:
            return "the token is not that of this engine"
        if hello.engine != self._client.names[0]:
            return f"the engine here is {self._client.names[0]!r}, and not {printable(hello.engine)!r}"
        return "there are too many connections" if len(self._peers) >= _MOST_PEERS else ""


def _network_of(host: str) -> str:
    """Returns whose connections those of an address are: an IPv6 host has 2**64 of them, so it is known by the first half."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.version == 4 or address.is_loopback or address.ipv4_mapped is not None:
        return host
    return str(ipaddress.ip_network((address, 64), strict=False))


def _log_fault(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("what serves clients on other hosts has ended by a fault of this program", exc_info=error)
