"""How frontends and workers connect: accepting connections, the handshake, and the welcome of a new frontend.

Invariants: a connection that fails on the way leaves nothing behind, and stops no other; a peer that is silent keeps no other
out; a frontend that has the slab can't die unnoticed at any moment; while the engine lives, new frontends find its socket, or
the log says why not.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from shmring.core.compiled import EngineBook, RingMemory
from shmring.core.geometry import BLOCK_NBYTES, Geometry
from shmring.core.loggers import logger_of
from shmring.core.messages import PROTOCOL_VERSION, Goodbye, Hello, Join, Welcome
from shmring.errors import ClosedError, LocalProtocolError, PeerLostError, RemoteProtocolError, SlabError
from shmring.gpu.device_claims import DeviceClaims
from shmring.memory.slab import Slab
from shmring.ring import limits
from shmring.ring.frontend import Frontend
from shmring.ring.injecting import Injector
from shmring.ring.life import RingLife
from shmring.transport.endpoint import Peer, answer_inspection, greet, refuse, send_welcome
from shmring.transport.listener import Listener
from shmring.transport.liveness import ProcessWatch
from shmring.transport.peers import describe_peer, peer_pid
from shmring.transport.rings import map_rings, sealed_rings

__all__ = ["Handshakes"]

logger = logger_of("shmring.ring")

# Connections of one process that have ended, but whose memory may still be in use: each costs a pidfd, an entry in the books
# and its leases. A client that is lost, or is closed while views live, leaves one behind; 16 are a fault.
_MAX_GONE = 16
_ACCEPT_PAUSE_S = 0.1  # before accepting again when that failed: mostly because this process is out of descriptors
_SHORT_AGAIN_S = 30.0  # between two lines about that: clients try again many times a second
_SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
_LOOK_S = 1.0  # between two looks at the socket's file: two system calls; a client that finds none tries for longer than that


class _Places:
    """Connections whose peers are waited for, in a place each, and for a time. Nothing else is held meanwhile.

    A peer that is silent keeps no other out: if all places are taken, the process with the most loses the one that it has had
    for longest.

    Args:
        count: of the places.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._pids: dict[asyncio.Timeout, int] = {}  # whoever came first is first

    @contextlib.asynccontextmanager
    async def hold(self, pid: int) -> AsyncIterator[None]:
        """Holds a place.

        Args:
            pid: of the peer.

        Raises:
            TimeoutError: the time is over, or another peer has got the place.
        """
        if len(self._pids) >= self._count:
            self._free_one()
        async with asyncio.timeout(limits.HANDSHAKE_S) as waiting:
            self._pids[waiting] = pid
            try:
                yield
            finally:
                self._pids.pop(waiting, None)

    def _free_one(self) -> None:
        [(greediest, _)] = Counter(self._pids.values()).most_common(1)
        oldest = next(waiting for waiting, pid in self._pids.items() if pid == greediest)
        del self._pids[oldest]
        if not oldest.expired():
            oldest.reschedule(asyncio.get_running_loop().time())


class Handshakes:
    """Accepts frontends and workers of a ring. Lives in its loop, and begins at once.

    Args:
        life, book: of their engine.
        listener: taken over.
        geometry: of the slab.
        slab, load_fd: what a frontend maps.
        device_claims: of the device slab: none or one.
        frontends: that are there, by id; new ones are put there.
        make_frontend: makes one of its id, its peer, the watch of its process, and the memory of the rings from it and to it.
        admit_worker: makes a peer a worker.
        inspect: returns what a peer is told that asks what the engine is doing.

    Attributes:
        refused: connections that were refused so far.
    """

    def __init__(
        self,
        life: RingLife,
        book: EngineBook,
        listener: Listener,
        geometry: Geometry,
        slab: Slab,
        load_fd: int,
        device_claims: tuple[DeviceClaims, ...],
        frontends: dict[int, Frontend | Injector],
        make_frontend: Callable[[int, Peer, ProcessWatch, RingMemory, RingMemory], Frontend],
        admit_worker: Callable[[Peer], Awaitable[None]],
        inspect: Callable[[], bytes],
    ) -> None:
        self.refused = 0
        self._life = life
        self._config = life.config
        self._book = book
        self._listener = listener
        self._geometry = geometry
        self._slab = slab
        self._load_fd = load_fd
        self._device_claims = device_claims
        self._frontends = frontends
        self._make_frontend = make_frontend
        self._admit_worker = admit_worker
        self._inspect = inspect
        self._client_ids = itertools.count(1)
        self._running: set[asyncio.Task[None]] = set()
        self._greeting = _Places(self._config.max_clients + limits.MAX_WORKERS)  # peers that are no frontends yet
        self._inspecting = _Places(limits.MAX_INSPECTIONS)  # peers that are being told what the engine does
        self._short_at = -_SHORT_AGAIN_S
        self._why_lost = ""  # why the socket can't be made again; empty: it is there
        self._pausing: asyncio.TimerHandle | None = None
        self._looking = life.loop.call_later(_LOOK_S, self._look_again)
        life.loop.add_reader(listener.socket.fileno(), self._accept)

    def next_client_id(self) -> int:
        """Returns a number that no frontend has had."""
        return next(self._client_ids)

    async def close(self) -> None:
        """Accepts no more connections, and waits until the peers in a handshake have gone. A second call does nothing."""
        descriptor = self._listener.socket.fileno()
        if descriptor < 0:
            return
        self._looking.cancel()
        if self._pausing is not None:
            self._pausing.cancel()
        self._life.loop.remove_reader(descriptor)
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            self._listener.close()

    # -- accepting -----------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        """The loop calls this in each of its turns in which a connection waits."""
        try:
            self._take_connection(self._listener.socket)
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            pass  # it has gone
        except OSError as error:
            self.refused += 1
            self._life.loop.remove_reader(self._listener.socket.fileno())  # or it would be called again and again, for nothing
            self._pausing = self._life.loop.call_later(_ACCEPT_PAUSE_S, self._accept_again)
            self._warn_of_shortage(error)

    def _accept_again(self) -> None:
        self._pausing = None
        self._life.loop.add_reader(self._listener.socket.fileno(), self._accept)

    def _take_connection(self, listening: socket.socket) -> None:
        connected, _ = listening.accept()
        task = self._life.loop.create_task(self._shake_hands(connected))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def _warn_of_shortage(self, error: OSError | SlabError) -> None:
        now = self._life.loop.time()
        if now - self._short_at < _SHORT_AGAIN_S:
            return
        self._short_at = now
        self._life.note_error(f"can't accept a frontend: {error}")
        logger.warning("can't accept a frontend: %s; if there are too many open files, raise their limit", error)

    def _look_again(self) -> None:
        """Sees to it that new frontends find the socket, whatever somebody removes."""
        if self._life.home.is_closed or self._life.home.forked:
            return
        self._looking = self._life.loop.call_later(_LOOK_S, self._look_again)
        path = self._listener.path
        try:
            missing = self._listener.keep()
        except (LocalProtocolError, OSError) as error:
            if str(error) != self._why_lost:
                self._why_lost = str(error)
                self._life.note_error(f"the socket {path} was removed, and can't be made again yet: {error}")
                logger.error(
                    "the socket %s was removed, and can't be made again yet: %s; new clients can't connect, the others go on",
                    path,
                    error,
                )
            return
        self._why_lost = ""
        if missing is None:
            return
        if missing.before is not None:
            self._move(missing.before)
        self._life.note_error(f"{missing.path} was removed, and is there again")
        logger.warning("%s was removed, and is there again; choose a socket_dir that nobody empties", missing.path)

    def _move(self, before: socket.socket) -> None:
        """Listens at the new socket. Whoever waits in the one before is taken up."""
        self._life.loop.remove_reader(before.fileno())
        try:
            while True:
                self._take_connection(before)
        except OSError:
            pass  # no more wait there, or can be taken: they try again
        finally:
            before.close()
        if self._pausing is None:
            self._life.loop.add_reader(self._listener.socket.fileno(), self._accept)

    # -- a handshake ---------------------------------------------------------------------------------------------------

    async def _shake_hands(self, connected: socket.socket) -> None:
        """Admits a new connection, or refuses it; raises none of its errors."""
        description = describe_peer(connected)
        try:
            connected.setblocking(False)
            allowed = self._config.allowed_uids if self._config.allowed_uids is not None else frozenset({os.getuid()})
            pid = peer_pid(connected)
            async with self._greeting.hold(pid):
                peer = await greet(connected, allowed)
            if peer is None:
                await self._answer_inspection(connected, pid)
            elif isinstance(peer.hello, Join):
                await self._admit_worker(peer)
            else:
                self._admit(peer, peer.hello)
        except (RemoteProtocolError, PeerLostError, SlabError, ClosedError, TimeoutError, OSError) as error:
            self.refused += 1
            connected.close()
            if isinstance(error, SlabError | OSError) and error.errno in _SHORT:
                self._warn_of_shortage(error)
                return
            reason = "it sent no hello in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
            self._life.note_error(f"a connection of {description} was refused: {reason}")
            logger.warning("a connection of %s was refused: %s", description, reason)
        except BaseException:
            connected.close()
            raise

    async def _answer_inspection(self, connected: socket.socket, pid: int) -> None:
        try:
            async with self._inspecting.hold(pid):
                await answer_inspection(connected, self._inspect())
        except TimeoutError:
            raise PeerLostError("it asked for a snapshot, and did not read it in time") from None

    def _admit(self, peer: Peer, hello: Hello) -> None:
        """Makes a peer a frontend, and takes its pidfd over."""
        reason = self._why_not(peer)
        if reason:
            os.close(peer.pidfd)
            refuse(peer.socket, reason)
            raise RemoteProtocolError(reason)
        client_id = self.next_client_id()
        # This comes first, so that the frontend can't die unnoticed at any moment.
        watch = ProcessWatch(self._life.loop, peer.pidfd, lambda: frontend.died())
        try:
            frontend = self._make_welcome(client_id, peer, hello, watch)
        except BaseException:
            watch.close()
            raise
        try:
            frontend.link.start()
        except BaseException:
            frontend.link.abort()
            frontend.connection_lost()
            raise
        logger.info("%s is connected", frontend)

    def _why_not(self, peer: Peer) -> str:
        """Returns why a peer can't be a frontend; an empty text if it can.

        A connection that has ended is no frontend any more. Its memory is kept until its process is dead, so it counts only for
        that process: no other process is refused because of it.
        """
        if sum(frontend.connected for frontend in self._frontends.values()) >= self._config.max_clients:
            return f"the engine has its max_clients ({self._config.max_clients}) frontends"
        gone = sum(not frontend.connected and frontend.pid == peer.pid for frontend in self._frontends.values())
        if gone < _MAX_GONE:
            return ""
        return (
            f"process {peer.pid} has had {gone} connections that have ended, whose memory is kept until it ends, since it may "
            "still use it: close clients after their slots and views, or start a new process"
        )

    def _make_welcome(self, client_id: int, peer: Peer, hello: Hello, watch: ProcessWatch) -> Frontend:
        ring_nbytes = int(self._config.message_ring_nbytes)
        ring_fds = sealed_rings(ring_nbytes)
        try:
            to_frontend, to_engine = map_rings(ring_fds, ring_nbytes)
            base_lease = self._book.connect(client_id, hello.lease_nbytes)
            frontend = self._make_frontend(client_id, peer, watch, to_engine, to_frontend)
            self._frontends[client_id] = frontend
            for device_claims in self._device_claims:
                device_claims.announced(client_id)
            try:
                slab_fds = self._slab.fd, self._slab.reply_fd
                send_welcome(peer, self._welcome(client_id, base_lease), slab_fds, ring_fds, self._load_fd)
            except BaseException:  # it never got the slab, so no proof is needed that it does not write
                frontend.said_goodbye(Goodbye())
                raise
            return frontend
        finally:
            for fd in ring_fds:
                os.close(fd)

    def _welcome(self, client_id: int, base_lease: Any) -> Welcome:
        config = self._config
        return Welcome(
            version=PROTOCOL_VERSION,
            epoch=self._life.epoch,
            client_id=client_id,
            slab_nbytes=self._geometry.slab_nbytes,
            block_nbytes=BLOCK_NBYTES,
            leasable_nbytes=self._geometry.leasable_blocks * BLOCK_NBYTES,
            max_inflight=config.max_inflight,
            max_calls=limits.MAX_CALLS,
            max_leases=self._book.limits.max_leases,
            message_ring_nbytes=int(config.message_ring_nbytes),
            max_record_nbytes=self._life.record_nbytes,
            inline_nbytes=int(config.inline_nbytes),
            max_payload_nbytes=int(config.max_payload_nbytes),
            max_tensors=config.max_tensors,
            max_values=config.max_values,
            base_lease=base_lease,
            device_slab=next((device_claims.handle for device_claims in self._device_claims), None),
            kept_nbytes=self._book.kept.max_blocks * BLOCK_NBYTES,
            client_pinned_nbytes=self._book.limits.pinned_blocks * BLOCK_NBYTES,
            engine_name=self._life.name,
        )
