"""How frontends and workers connect: accepting connections, the handshake, and the welcome of a new frontend.

Invariants: a connection that fails on the way leaves nothing behind, and stops no other; a frontend that has the slab can't die
unnoticed at any moment.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from shmring.core.compiled import EngineBook, RingMemory
from shmring.core.geometry import BLOCK_NBYTES, Geometry
from shmring.core.loggers import logger_of
from shmring.core.messages import PROTOCOL_VERSION, Goodbye, Hello, Join, Welcome
from shmring.errors import ClosedError, PeerLostError, RemoteProtocolError, SlabError
from shmring.gpu.device_claims import DeviceClaims
from shmring.memory.slab import Slab
from shmring.ring import limits
from shmring.ring.frontend import Frontend
from shmring.ring.injecting import Injector
from shmring.ring.life import Life
from shmring.transport.endpoint import Listener, Peer, answer_inspection, describe_peer, greet, refuse, send_welcome
from shmring.transport.liveness import ProcessWatch
from shmring.transport.rings import map_rings, sealed_rings

__all__ = ["Handshakes"]

logger = logger_of("shmring.ring")

# Connections of one process that have ended, but whose memory may still be in use: each costs a pidfd, an entry in the books
# and its leases. A client that is lost, or is closed while views live, leaves one behind; 16 are a fault.
_MAX_GONE = 16
_ACCEPT_PAUSE_S = 0.1  # before accepting again when that failed: mostly because this process is out of descriptors


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
        life: Life,
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
        self._greeting = 0  # of peers that are no frontends yet
        self._inspecting = 0  # of peers that are being told what the engine does
        accepting = life.loop.create_task(self._accept(), name=f"shmring-accept-{life.name}")
        accepting.add_done_callback(self._accepting_ended)
        self._accepting: asyncio.Task[None] | None = accepting

    def next_client_id(self) -> int:
        """Returns a number that no frontend has had."""
        return next(self._client_ids)

    async def close(self) -> None:
        """Accepts no more connections, and waits until the peers in a handshake have gone."""
        if self._accepting is not None:
            # asyncio would accept once more for the cancelled task if a connection has come in this turn of the loop, and fail.
            self._life.loop.remove_reader(self._listener.socket)
        tasks = [task for task in (self._accepting, *self._running) if task is not None]
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            self._listener.close()

    async def _accept(self) -> None:
        while True:
            try:
                connected, _ = await self._life.loop.sock_accept(self._listener.socket)
            except OSError as error:
                self.refused += 1
                logger.warning("can't accept a frontend: %s; if there are too many open files, raise their limit", error)
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            task = self._life.loop.create_task(self._shake_hands(connected))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    def _accepting_ended(self, accepting: asyncio.Task[None]) -> None:
        self._accepting = None  # if it was cancelled, it holds its error, whose traceback holds frames
        if not accepting.cancelled():
            logger.critical("ring %r accepts no further frontends", self._life.name, exc_info=accepting.exception())

    async def _shake_hands(self, connected: socket.socket) -> None:
        """Admits a new connection, or refuses it; raises none of its errors."""
        description = describe_peer(connected)
        try:
            connected.setblocking(False)
            if self._greeting >= self._config.max_clients + limits.MAX_WORKERS:
                refuse(connected, "the engine is busy with connections that say nothing")
                raise RemoteProtocolError("too many connections that say nothing")
            allowed = self._config.allowed_uids if self._config.allowed_uids is not None else frozenset({os.getuid()})
            self._greeting += 1
            try:
                async with asyncio.timeout(limits.HANDSHAKE_S):
                    peer = await greet(connected, allowed)
            finally:
                self._greeting -= 1
            if peer is None:
                await self._answer_inspection(connected)
            elif isinstance(peer.hello, Join):
                await self._admit_worker(peer)
            else:
                self._admit(peer, peer.hello)
        except (RemoteProtocolError, PeerLostError, SlabError, ClosedError, TimeoutError, OSError) as error:
            self.refused += 1
            connected.close()
            reason = "it sent no hello in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
            self._life.note_error(f"a connection of {description} was refused: {reason}")
            logger.warning("a connection of %s was refused: %s", description, reason)
        except BaseException:
            connected.close()
            raise

    async def _answer_inspection(self, connected: socket.socket) -> None:
        if self._inspecting >= limits.MAX_INSPECTIONS:
            refuse(connected, f"{limits.MAX_INSPECTIONS} others are asking what the engine does; ask again")
            raise RemoteProtocolError("too many connections that ask what the engine does")
        self._inspecting += 1
        try:
            async with asyncio.timeout(limits.HANDSHAKE_S):
                await answer_inspection(connected, self._inspect())
        except TimeoutError:
            raise PeerLostError("it asked for a snapshot, and did not read it in time") from None
        finally:
            self._inspecting -= 1

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
        )
