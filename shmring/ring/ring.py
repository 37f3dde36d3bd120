"""The engine's end of the transport.

Theory of operation: :class:`Ring` is the asyncio shell around the :class:`~shmring.core.engine_end.EngineEnd`, which does what
happens with every message. Here is what happens less often: frontends come and go, requests are aborted or fail, replies wait
for space, calls are answered, slots lie in device memory. There is no ``await`` between reading the book and acting on it.

What ends a frontend: its goodbye, its socket, its process's death, or breaking the rules. In each case its requests are
aborted at once; its memory comes back when the kernel says that its process is dead (or when it said goodbye), and no
claim or view of ours still reads it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import logging
import mmap
import os
import secrets
import socket
import traceback
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import msgspec
import torch

from shmring.cancellation import uninterrupted
from shmring.config import RingConfig, configured
from shmring.core.effects import (
    Answered,
    ClientGone,
    EngineEffect,
    Granted,
    Recalled,
    Reclaimed,
    Released,
    ReplyGranted,
    ReplySlot,
    RequestAborted,
)
from shmring.core.engine_book import EngineBook
from shmring.core.engine_calls import EngineCalls
from shmring.core.engine_end import EngineEnd, FrontendEnd
from shmring.core.geometry import BLOCK_NBYTES, EngineBookLimits, Geometry, blocks_for
from shmring.core.kept_content import check_kept
from shmring.core.message_ring import RingMemory, largest_record_nbytes
from shmring.core.messages import (
    COPY_OUT,
    MAX_FINDS,
    PROTOCOL_VERSION,
    SLOT_HEADER_NBYTES,
    Abort,
    Call,
    CallResult,
    EngineMessage,
    Failed,
    FailureKind,
    Find,
    FrontendMessage,
    Goodbye,
    Hello,
    Join,
    Keep,
    LeaseRecall,
    LeaseRequest,
    LeaseReturn,
    Refused,
    Release,
    ReplyRelease,
    SlotRef,
    Unpin,
    Welcome,
    decode_frontend_message,
)
from shmring.core.payload import Packed
from shmring.core.states import EngineSlot, RequestEvent
from shmring.errors import (
    CapacityError,
    ClosedError,
    PeerLostError,
    RemoteProtocolError,
    SlabError,
    StaleDescriptorError,
    WouldBlock,
)
from shmring.forks import Origin
from shmring.gpu.cuda import Cuda, CudaError, Stream, TorchCuda
from shmring.gpu.device import DeviceMemory, whole_nbytes
from shmring.gpu.device_claims import DeviceClaims
from shmring.gpu.driver import Driver
from shmring.gpu.layout import NOTHING_GIVEN, Given
from shmring.memory.copier import Copier
from shmring.memory.tensors import make_decoder, make_packer
from shmring.memory.views import Place
from shmring.ring.claim import Claim
from shmring.ring.host_claims import ClaimedMemory, HostClaims
from shmring.ring.reserve import Memories, create_memories
from shmring.ring.workers import Workers
from shmring.statistics import RingStatistics
from shmring.transport.endpoint import Listener, Peer, describe_peer, greet, refuse, send_welcome, socket_path
from shmring.transport.link import Link
from shmring.transport.liveness import ProcessWatch
from shmring.transport.polling import Poller
from shmring.transport.rings import map_rings, sealed_rings

__all__ = ["CallHandler", "Ring", "Serving", "serve"]

logger = logging.getLogger("shmring.ring")

#: A control call: positional arguments in, any msgspec-encodable result out.
CallHandler = Callable[..., Awaitable[Any]]

_MAX_ERROR_TEXT = 4096  # characters of an exception's text that travel; the rest is in the engine's log
_CALL_RESULT_NBYTES = 64  # at most, of a call's result around the result itself
_FAILED_NBYTES = 4 * _MAX_ERROR_TEXT + 2048  # at most, of the end of a request and of the release of its slots
_OTHER_UNREAD_NBYTES = 4 << 20  # of leases, and of slots that drained: far more than there are
_ACCEPT_PAUSE_S = 0.1  # before accepting again when that failed: mostly because this process is out of descriptors
_COPY_THREADS = 2  # for replies, which are small beside requests
_NO_SLOTS: frozenset[int] = frozenset()


@dataclasses.dataclass(slots=True)
class _Counters:
    failed: int = 0
    aborted: int = 0
    protocol_errors: int = 0
    refused: int = 0
    reclaimed_nbytes: int = 0


class _Frontend(FrontendEnd):
    """A connected frontend: what its connection reports goes to the ring with its id."""

    def __init__(
        self, ring: Ring, client_id: int, peer: Peer, watch: ProcessWatch, incoming: RingMemory, outgoing: RingMemory
    ) -> None:
        super().__init__(ring.engine_end, client_id)
        self.ring = ring
        self.pid = peer.pid
        self.name = peer.hello.name
        self.connected = True
        self.calls: set[asyncio.Task[None]] = set()
        self.watch = watch
        self.kept: list[Goodbye] = []  # what it has said so far of what it will still use
        # A frontend that is stopped reads nothing, and is owed the ends of all that it has in flight.
        max_backlog_nbytes = ring.config.max_inflight * _FAILED_NBYTES + _OTHER_UNREAD_NBYTES
        self.link = Link(
            self,
            peer.socket,
            incoming,
            outgoing,
            ring.poller,
            max_backlog_nbytes=max_backlog_nbytes,
        )
        self.attach(self.link.writer, self.link.reader)

    def __str__(self) -> str:
        return f"client {self.client_id} ({self.name or 'unnamed'}, pid {self.pid})"

    def send(self, message: EngineMessage) -> None:
        self.link.send(message)

    def take_message(self, record: bytes) -> None:
        self.ring.message_received(self, decode_frontend_message(record))

    def peer_gave_up(self) -> None:
        self.ring.said_goodbye(self, Goodbye())

    def protocol_violated(self, error: RemoteProtocolError) -> None:
        self.ring.refuse_frontend(self, error)

    def connection_lost(self) -> None:
        self.ring.connection_lost(self)


class Ring(EngineCalls):
    """The engine's end. Made by :func:`serve`; iterate over it for claims, in order of arrival.

    Attributes:
        name: the engine's name.
        config: as configured.
        epoch: identity of this life of the engine.
        loop: the event loop it lives in.
    """

    def __init__(
        self,
        name: str,
        config: RingConfig,
        *,
        epoch: int,
        geometry: Geometry,
        memories: Memories,
        cuda: Cuda,
        listener: Listener,
        payload_type: Any,
        calls: Mapping[str, CallHandler],
    ) -> None:
        self.name = name
        self.config = config
        self.epoch = epoch
        self.loop = asyncio.get_running_loop()
        self.poller = Poller(self.loop, config.busy_poll_s)
        self._origin = Origin()
        self._slab = slab = memories.slab
        self._load_fd = memories.load_fd
        self._listener = listener
        self._geometry = geometry
        leasable = geometry.leasable_blocks
        self._book = book = EngineBook(
            geometry,
            EngineBookLimits(
                max_lease_blocks=_blocks(config.max_lease_nbytes, max(1, leasable // 8)),
                quota_blocks=_blocks(config.client_quota_nbytes, max(1, leasable * 3 // 4)),
                max_leases=config.max_leases,
                max_inflight=config.max_inflight,
                device_quota_blocks=max(1, geometry.device_blocks * 3 // 4),
                kept_blocks=_kept_blocks(config.kept_nbytes, leasable),
                max_kept=config.max_kept,
                max_pins=config.max_pins,
            ),
        )
        self._record_nbytes = largest_record_nbytes(int(config.message_ring_nbytes))
        self._inline_nbytes = int(config.inline_nbytes)
        self._max_payload_nbytes = int(config.max_payload_nbytes)
        self._packer = make_packer(config.max_tensors, self._max_payload_nbytes)
        self._copier = self.copier = Copier(_COPY_THREADS, int(config.copy_offload_nbytes))
        self._calls = dict(calls)
        self._frontends: dict[int, _Frontend] = {}
        self._client_ids = itertools.count(1)
        self._claimers: OrderedDict[asyncio.Future[None], None] = OrderedDict()
        self._reply_waiters: dict[int, asyncio.Future[ReplySlot]] = {}
        self._tickets = itertools.count(1)
        decoder = make_decoder(payload_type)
        self._host_claims = HostClaims(slab, memories.pinned, cuda, self._copier, decoder, config)
        self._device_claims = tuple(  # none or one
            DeviceClaims(cuda, device_slab, geometry.slab_nbytes, self._wake_for_deaths)
            for device_slab in memories.device_slabs
        )
        self._memories: tuple[ClaimedMemory, ...] = (self._host_claims, *self._device_claims)  # as the book numbers them
        self.engine_end = self._end = EngineEnd(
            self,
            book,
            self._host_claims.regions,
            slab.mapping,
            decoder,
            Claim,
            epoch=epoch,
            max_tensors=config.max_tensors,
            inline_nbytes=self._inline_nbytes,
            max_payload_nbytes=self._max_payload_nbytes,
            debug=config.debug,
            load=memories.load,
        )
        super().__init__(self._end)
        self._take_next: Callable[[], Claim | None] = self._end.take_next
        self.workers = Workers(self, self._end, slab, self._record_nbytes)
        self._handshakes: set[asyncio.Task[None]] = set()
        self._greeting = 0  # of those, who are no frontends yet
        self._counters = _Counters()
        self._closed = False
        self.loop.add_reader(self._host_claims.regions.bell, self._collect_deaths)
        self._accepting = self.loop.create_task(self._accept(), name=f"shmring-accept-{name}")
        self._accepting.add_done_callback(self._accepting_ended)

    @classmethod
    async def create(
        cls,
        name: str,
        config: RingConfig,
        *,
        payload_type: Any = Any,
        calls: Mapping[str, CallHandler] | None = None,
        cuda: Cuda | None = None,
        device_memory: DeviceMemory | None = None,
    ) -> Ring:
        """Takes the name, sweeps what a crash left, reserves the slab and listens. See :func:`serve`."""
        path = socket_path(name, config.socket_dir)
        geometry = Geometry.of(
            int(config.slab_nbytes),
            None if config.reply_nbytes is None else int(config.reply_nbytes),
            whole_nbytes(int(config.device_slab_nbytes)),
            page_nbytes=mmap.PAGESIZE,
        )
        epoch = secrets.randbits(63)
        listener = Listener.create(path, others_may_connect=config.allowed_uids is not None)
        cuda = cuda or TorchCuda()
        try:
            memories = await create_memories(name, geometry, epoch, config, cuda, device_memory or Driver())
        except BaseException:
            listener.close()
            raise
        try:
            return cls(
                name,
                config,
                epoch=epoch,
                geometry=geometry,
                memories=memories,
                cuda=cuda,
                listener=listener,
                payload_type=payload_type,
                calls=calls or {},
            )
        except BaseException:  # msgspec knows no such payload_type
            memories.close()
            listener.close()
            raise

    # -- claims ----------------------------------------------------------------------------------------------------

    async def claim_in_turn(self) -> Claim:
        """For :meth:`claim`: a request has to be waited for."""
        while True:
            self._check_open()
            if not self._claimers and (claim := self.claim_now()) is not None:
                return claim
            await self._request_arrived()
            self._check_open()
            if (claim := self._take_next()) is not None:
                if self._claimers:
                    self.request_arrived()
                return claim

    async def next_in_turn(self) -> Claim:
        """For the iteration over claims: a request has to be waited for."""
        try:
            return await self.claim_in_turn()
        except ClosedError:
            raise StopAsyncIteration from None

    def claim_nowait(self) -> Claim:
        """Claims the next request if there is one.

        Raises:
            WouldBlock: none is waiting (or others wait for it).
            ClosedError: the ring is closed.
        """
        self._check_open()
        claim = self.claim_now()
        if claim is None:
            raise WouldBlock("no request is waiting")
        return claim

    async def run(self, handler: Callable[[Claim], Awaitable[object]], max_concurrency: int = 64) -> None:
        """Handles claims until the ring is closed, one task a claim.

        A handler that raises fails its own request and is logged; the loop goes on. A handler whose request is aborted
        is cancelled. Cancelling ``run`` cancels the handlers, and their requests fail.

        Args:
            handler: called inside ``with claim:``.
            max_concurrency: handlers at a time; further requests wait unclaimed, where aborting them costs nothing.
        """
        if max_concurrency < 1:
            raise ValueError(f"max_concurrency must be at least 1, not {max_concurrency}")
        free = asyncio.Semaphore(max_concurrency)
        tasks: set[asyncio.Task[None]] = set()

        def finished(task: asyncio.Task[None], claim: Claim) -> None:
            tasks.discard(task)
            free.release()
            if not claim.released:  # cancelled before its first step, so it never entered its claim
                claim.fail(asyncio.CancelledError("the engine stopped"))

        try:
            while True:
                await free.acquire()
                try:
                    claim = await self.claim()
                except ClosedError:
                    break
                task = asyncio.create_task(self._handle(claim, handler))
                tasks.add(task)
                task.add_done_callback(functools.partial(finished, claim=claim))
            # The ring is closed, so every claim is aborted and its handler cancelled: see them out.
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _handle(self, claim: Claim, handler: Callable[[Claim], Awaitable[object]]) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            with claim:
                claim.on_abort(task.cancel)
                await handler(claim)
        except asyncio.CancelledError:
            if not claim.aborted:
                raise
        except Exception:  # noqa: BLE001 - a handler that raises ends its own request, and nothing else
            # The request has failed and its frontend knows; what is left is to tell whoever reads the log. As text: a
            # log handler that keeps the exception would keep its frames, and they the views of the request's slots.
            logger.error(
                "the handler of request %d of client %d failed\n%s", claim.request_id, claim.client_id, traceback.format_exc()
            )

    async def _request_arrived(self) -> None:
        future = self.loop.create_future()
        self._claimers[future] = None
        self._end.is_awaited = self._end.is_crowded = True
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.request_arrived()  # our turn came as we were cancelled: pass it on
            raise
        finally:
            self._claimers.pop(future, None)
            self._end.is_awaited = self._end.is_crowded = bool(self._claimers)

    def request_arrived(self) -> None:
        """Wakes the first claimer if there is something to claim; it wakes the next."""
        if not self._end.waiting_count:
            return
        for future in self._claimers:
            if not future.done():
                future.set_result(None)
                break
        self._end.is_awaited = False  # whom this wakes wakes the next

    def take_up_device(self, claim: Claim) -> Place:
        """For the end: a request has slots in device memory. Returns what makes their tensors."""
        [device_claims] = self._device_claims  # what has no fence has no such slots, and what has one was checked
        return device_claims.take_up(claim.client_id, claim.submit)

    def take_up_failed(self, claim: Claim, error: Exception, *, breaks_rules: bool) -> None:
        """For the end: a request can't be taken up.

        Args:
            claim: what it would have been.
            error: why.
            breaks_rules: whether its frontend has sent what nobody may send.
        """
        client_id, request_id = claim.client_id, claim.request_id
        self.carry_out(claim.release_slots())
        if breaks_rules:
            self.refuse_frontend(self._frontends[client_id], RemoteProtocolError(f"request {request_id}: {error}"))
            return
        kind: FailureKind = "invalid"
        if isinstance(error, CudaError):
            kind = "error"
            # As text: a log handler that keeps the error would keep its frames, and they the views of the request's slots.
            logger.error("request %d of client %d can't be taken up: %s", request_id, client_id, str(error))
        elif not isinstance(error, msgspec.ValidationError | RemoteProtocolError | StaleDescriptorError):
            text = "".join(traceback.format_exception(error))
            logger.error("decoding request %d of client %d failed\n%s", request_id, client_id, text)
        self._end_request(claim, RequestEvent.ERROR, kind, error)

    # -- workers ---------------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the workers that get messages, in order."""
        return self.workers.book.ranks

    async def wait_workers(self, count: int, timeout: float | None = None) -> tuple[int, ...]:
        """Waits until so many workers have joined.

        Args:
            count: workers.
            timeout: seconds.

        Returns:
            Their ranks, in order.

        Raises:
            TimeoutError: there were not as many in time.
            ClosedError: the ring is closed.
        """
        self._check_open()
        bound = asyncio.timeout(timeout)
        try:
            async with bound:
                await self.workers.wait(count)
        except TimeoutError:
            if not bound.expired():
                raise
            raise TimeoutError(f"waited {timeout:g} s for {count} workers, and there are {list(self.ranks)}") from None
        return self.ranks

    def broadcast(
        self, payload: object, *, to: Iterable[int] | None = None, timeout: float | None = None
    ) -> Awaitable[tuple[int, ...]]:
        """Sends a payload to workers, in the same order to all. Waits while one of them is too far behind.

        Tensors that lie in a slot of a claim that is in hand are sent from there; they keep the slot until the last worker has
        left the message. The others are copied, once for all workers.

        Args:
            payload: any msgspec-encodable object with tensors and arrays at any depth.
            to: ranks of the workers that get it; None: all that have joined.
            timeout: seconds to wait.

        Returns:
            The ranks that it went to, when awaited.

        Raises:
            WorkersBehindError: the time was over; a TimeoutError that names the workers. Nothing was sent.
            WorkerLostError: there is no worker of a rank in ``to``. Nothing was sent.
            TypeError: something in the payload can't be sent; the message names its path.
            CapacityError: what has to be copied can never fit ``broadcast_nbytes``, or a message.
            ClosedError: the ring is closed.
        """
        return self.workers.broadcast(payload, to, timeout)

    def broadcast_nowait(self, payload: object, *, to: Iterable[int] | None = None) -> tuple[int, ...]:
        """The same if nothing has to be waited for.

        Raises:
            WouldBlock: a worker is too far behind, others wait to send, or the message takes long to copy.
            WorkerLostError, TypeError, CapacityError, ClosedError: as :meth:`broadcast`.
        """
        return self.workers.broadcast_nowait(payload, to)

    def gather(self, payload: object, *, to: Iterable[int] | None = None, timeout: float | None = None) -> Awaitable[list[Any]]:
        """Sends a payload to workers as :meth:`broadcast` does, and waits for the reply of each.

        Args:
            payload, to: as of :meth:`broadcast`.
            timeout: seconds to wait, for both.

        Returns:
            Their replies in order of rank, when awaited.

        Raises:
            WorkersBehindError: the time was over; a TimeoutError that names the workers that had not replied.
            WorkerLostError: one of them has died, left or was dropped before it replied; or there is none of a rank in ``to``.
            WorkerFailedError: one of them failed with it: with its rank, and its error's type and text.
            TypeError, CapacityError, ClosedError: as :meth:`broadcast`.
        """
        return self.workers.gather(payload, to, timeout)

    def drop_worker(self, rank: int, reason: str = "the engine has dropped this worker") -> None:
        """Ends a worker's connection. It gets nothing more, and its rank is free; its ``receive`` raises ``ClosedError``.

        What it still reads comes back when it says so, or when its process is dead.

        Args:
            rank: which one.
            reason: what it is told.

        Raises:
            WorkerLostError: there is none of this rank.
            ClosedError: the ring is closed.
        """
        self._check_open()
        self.workers.drop(rank, self._fit(reason))

    # -- ending claims (for Claim) ------------------------------------------------------------------------------------

    async def upload(
        self, claim: Claim, device: torch.device | str | int, stream: Stream | None, check: Callable[[], object]
    ) -> Any:
        """Copies a claim's tensors to a device. See :meth:`Claim.to`.

        Args:
            check: raises if the claim was released while this waited: its slots may then be somebody else's.
        """
        return await self._host_claims.upload(claim, device, stream, check, self._given(claim, device, stream))

    def upload_nowait(self, claim: Claim, device: torch.device | str | int, stream: Stream | None) -> Any:
        """The same if nothing has to be waited for. See :meth:`Claim.to_nowait`."""
        return self._host_claims.upload_nowait(claim, device, stream, self._given(claim, device, stream))

    def _given(self, claim: Claim, device: torch.device | str | int, stream: Stream | None) -> Given:
        """Returns a claim's tensors in device memory, for whose fence the stream waits from now on."""
        if not claim.submit.content.fence:
            return NOTHING_GIVEN
        [device_claims] = self._device_claims
        return device_claims.give(claim.client_id, claim.submit, device, stream)

    def release_on_device(self, claim: Claim, copying: bool) -> list[bool]:
        """For the end: releases slots in device memory; returns which of a claim's slots drain.

        All of those do: a GPU may be at work on what nobody views any more.
        """
        [device_claims] = self._device_claims
        if self.config.debug and not copying and device_claims.is_viewed(claim.client_id, claim.submit):
            self.log_drain(claim)
        return device_claims.release(claim.client_id, claim.submit)

    def log_drain(self, claim: Claim) -> None:
        """For the end, in debug mode: a claim is released while views of it live."""
        tensors = ", ".join(f"{ref.dtype}{list(ref.shape)}" for ref in claim.submit.content.tensors)
        where = "".join(traceback.format_stack(limit=8)[:-1])
        logger.warning("request %d is left with living views of %s; left at\n%s", claim.request_id, tensors, where)

    def send_release(self, frontend: _Frontend, generations: Sequence[int]) -> None:
        """For the end: slots are their frontend's again."""
        frontend.link.send_listed(Release, generations)

    def call_soon(self, callbacks: Sequence[Callable[[], object]]) -> None:
        """For the end: callbacks of claims run from the loop, outside of the ring's event."""
        for callback in callbacks:
            self.loop.call_soon(callback)

    def end_claim(self, claim: Claim, event: RequestEvent, error: BaseException) -> None:
        """Ends a claim's request, and tells its frontend unless it was aborted."""
        self._end.forget_claim(claim.client_id, claim.request_id)
        self._end_request(claim, event, "timed_out" if event is RequestEvent.DEADLINE else "error", error)

    def _end_request(self, claim: Claim, event: RequestEvent, kind: FailureKind, error: BaseException) -> None:
        self.call_soon(claim.mark_ended())
        if self._book.end(claim.client_id, claim.request_id, event):
            self._counters.failed += 1
            self._frontends[claim.client_id].send(Failed(claim.request_id, kind, *self._describe(error)))

    def _describe(self, error: BaseException) -> tuple[str, str]:
        """Returns an error's type and text as they can travel, whatever is in them."""
        return type(error).__name__[:256], self._fit(str(error))

    def _fit(self, text: str) -> str:
        length = min(_MAX_ERROR_TEXT, self._record_nbytes // 8)  # one takes up to four bytes
        return text[:length].encode(errors="replace").decode()  # file names can hold what is no text

    # -- replies (for Claim) ------------------------------------------------------------------------------------------

    async def send_reply(self, claim: Claim, payload: object) -> None:
        """Sends a reply, waiting for space. See :meth:`Claim.reply`."""
        await self._send_packed(claim, self._pack_reply(payload), claim.send_reply)

    async def send_last_reply(self, claim: Claim, payload: object) -> None:
        """Sends a reply, waiting for space, and ends the request in the same message. See :meth:`Claim.done`."""
        await self._send_packed(claim, self._pack_reply(payload), claim.finish_with)

    async def _send_packed(self, claim: Claim, packed: Packed, send: Callable[[Packed, SlotRef | None], bool]) -> None:
        slot = await self._acquire_reply(claim, packed.slot_nbytes) if packed.slot_nbytes else None
        sent = False
        try:
            claim.check_running()
            if slot is not None:
                await self._copier.copy(packed, self._slab.mapping, self._slab.address + _content_start(slot))
            await self._writable(claim)
            while not (sent := send(packed, self._reply_ref(packed, slot))):
                self._frontends[claim.client_id].link.expect_space()
                await self._writable(claim)
        finally:
            if slot is not None and not sent:
                self.carry_out(self._book.discard_reply(claim.client_id, slot.generation))

    async def _writable(self, claim: Claim) -> None:
        """Waits while the frontend reads more slowly than it is written to; a claim may have ended meanwhile."""
        with contextlib.suppress(PeerLostError):  # then the claim is aborted
            await self._frontends[claim.client_id].link.drain()
        claim.check_running()

    def send_reply_nowait(self, claim: Claim, payload: object) -> None:
        """Sends a reply if nothing has to be waited for. See :meth:`Claim.reply_nowait`."""
        packed = self._pack_reply(payload)
        would_block = WouldBlock(f"client {claim.client_id} reads more slowly than it is written to")
        if not self._frontends[claim.client_id].link.can_write:
            raise would_block
        slot = self._book.acquire_reply(claim.client_id, packed.slot_nbytes) if packed.slot_nbytes else None
        if slot is None and packed.slot_nbytes:
            raise WouldBlock(f"no {packed.slot_nbytes} bytes of reply space are free")
        sent = False
        try:
            if slot is not None:
                self._copier.count_in_turn(packed.slot_nbytes)
                packed.copy_into(self._slab.address + _content_start(slot))
            sent = claim.send_reply(packed, self._reply_ref(packed, slot))
            if not sent:
                raise would_block
        finally:
            if slot is not None and not sent:
                self.carry_out(self._book.discard_reply(claim.client_id, slot.generation))

    def _reply_ref(self, packed: Packed, slot: ReplySlot | None) -> SlotRef | None:
        """Describes a reply's slot.

        A caller may keep all its replies, and wait for more: views of them must never hold all of the reserve.
        """
        if slot is None:
            return None
        is_short = self._book.reply_free_nbytes < self._geometry.reply_nbytes // 2
        lease_id = COPY_OUT if is_short else 0
        return SlotRef(lease_id, slot.start * BLOCK_NBYTES, packed.slot_nbytes, slot.generation)

    def _pack_reply(self, payload: object) -> Packed:
        self._check_open()
        return self._packer.pack(payload, self._inline_nbytes, self._record_nbytes)

    async def _acquire_reply(self, claim: Claim, nbytes: int) -> ReplySlot:
        slot = self._book.acquire_reply(claim.client_id, nbytes)
        if slot is not None:
            return slot
        ticket = next(self._tickets)
        future: asyncio.Future[ReplySlot] = self.loop.create_future()
        self._book.queue_reply(claim.client_id, ticket, nbytes)
        self._reply_waiters[ticket] = future
        give_up = functools.partial(_give_up, future, claim)
        claim.call_on_end(give_up)
        try:
            return await future
        except BaseException:
            self._reply_waiters.pop(ticket, None)
            self.carry_out(self._book.cancel_reply(ticket))
            if future.done() and not future.cancelled() and future.exception() is None:
                self.carry_out(self._book.discard_reply(claim.client_id, future.result().generation))
            raise
        finally:
            claim.forget_on_end(give_up)
            del future, give_up  # they hold their error, whose traceback holds this frame and its callers', and they views

    # -- effects -------------------------------------------------------------------------------------------------------

    def carry_out(self, effects: list[EngineEffect]) -> None:
        for effect in effects:  # which grow: what follows from one comes after the others, as it did in the book
            match effect:
                case Released(client_id, generations):
                    self._frontends[client_id].link.send_listed(Release, generations)
                case Granted(client_id, grant):
                    self._frontends[client_id].send(grant)
                case Answered(client_id, answer):
                    self._frontends[client_id].send(answer)
                case Recalled(client_id, lease_ids):
                    self._frontends[client_id].link.send_listed(LeaseRecall, lease_ids)
                case RequestAborted():
                    self._request_aborted(effect)
                case ReplyGranted(ticket, slot):
                    effects += self._reply_granted(ticket, slot)
                case Reclaimed(client_id, nbytes):
                    self._counters.reclaimed_nbytes += nbytes
                    logger.info("%s has gone: %d bytes reclaimed", self._frontends[client_id], nbytes)
                case ClientGone(client_id):
                    frontend = self._frontends.pop(client_id)
                    for device_claims in self._device_claims:
                        device_claims.gone(client_id)
                    frontend.watch.close()

    def _request_aborted(self, effect: RequestAborted) -> None:
        key = (effect.client_id, effect.request_id)
        self._counters.aborted += 1
        self._frontends[effect.client_id].send(Failed(effect.request_id, "aborted", "AbortedError", "aborted"))
        if not effect.was_running:
            self._end.forget_waiting(*key)
            return
        claim = self._end.forget_claim(*key)
        if claim is not None:
            self.call_soon(claim.mark_ended(aborted=True))

    def _reply_granted(self, ticket: int, slot: ReplySlot) -> list[EngineEffect]:
        future = self._reply_waiters.pop(ticket)
        if not future.done():
            future.set_result(slot)
            return []
        # Its waiter was cancelled in this very iteration, and has not run yet.
        client_id = next(c.client_id for c in self._book.clients.values() if slot.generation in c.replies)
        return self._book.discard_reply(client_id, slot.generation)

    def _wake_for_deaths(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left who could reuse anything
            self.loop.call_soon_threadsafe(self._collect_deaths)

    def _collect_deaths(self) -> None:
        for memory in self._memories:
            for key in memory.collect():
                self.carry_out(self._book.last_view_gone(*key))

    # -- frontends -------------------------------------------------------------------------------------------------------

    async def _accept(self) -> None:
        while True:
            try:
                connected, _ = await self.loop.sock_accept(self._listener.socket)
            except OSError as error:
                self._counters.refused += 1
                logger.warning("can't accept a frontend: %s; if there are too many open files, raise their limit", error)
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            task = self.loop.create_task(self._shake_hands(connected))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    def _accepting_ended(self, accepting: asyncio.Task[None]) -> None:
        if not accepting.cancelled():
            logger.critical("ring %r accepts no further frontends", self.name, exc_info=accepting.exception())

    async def _shake_hands(self, connected: socket.socket) -> None:
        """Admits a new connection, or refuses it; never lets its troubles out."""
        description = describe_peer(connected)
        try:
            connected.setblocking(False)
            if self._greeting >= self.config.max_clients + self.config.max_workers:
                refuse(connected, "the engine is busy with connections that say nothing")
                raise RemoteProtocolError("too many connections that say nothing")
            allowed = self.config.allowed_uids if self.config.allowed_uids is not None else frozenset({os.getuid()})
            self._greeting += 1
            try:
                async with asyncio.timeout(self.config.handshake_timeout_s):
                    peer = await greet(connected, allowed)
            finally:
                self._greeting -= 1
            if isinstance(peer.hello, Join):
                await self.workers.admit(peer)
            else:
                self._admit(peer, peer.hello)
        except (RemoteProtocolError, PeerLostError, SlabError, ClosedError, TimeoutError, OSError) as error:
            self._counters.refused += 1
            reason = "it sent no hello in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
            logger.warning("a connection of %s was refused: %s", description, reason)
            connected.close()
        except BaseException:
            connected.close()
            raise

    def _admit(self, peer: Peer, hello: Hello) -> None:
        """Makes a peer a frontend, and takes its pidfd over."""
        if len(self._frontends) >= self.config.max_clients:
            os.close(peer.pidfd)
            refuse(peer.socket, f"the engine has its max_clients ({self.config.max_clients}) frontends")
            raise RemoteProtocolError("too many frontends")
        client_id = next(self._client_ids)
        # First of all, so that there is no moment at which it could die unnoticed.
        watch = ProcessWatch(self.loop, peer.pidfd, lambda: self._frontend_died(frontend))
        try:
            frontend = self._make_welcome(client_id, peer, hello, watch)
        except BaseException:
            watch.close()
            raise
        try:
            frontend.link.start()
        except BaseException:
            frontend.link.abort()
            self.connection_lost(frontend)
            raise
        logger.info("%s is connected", frontend)

    def _make_welcome(self, client_id: int, peer: Peer, hello: Hello, watch: ProcessWatch) -> _Frontend:
        ring_nbytes = int(self.config.message_ring_nbytes)
        ring_fds = sealed_rings(ring_nbytes)
        try:
            to_frontend, to_engine = map_rings(ring_fds, ring_nbytes)
            base_lease = self._book.connect(client_id, hello.lease_nbytes)
            frontend = self._frontends[client_id] = _Frontend(self, client_id, peer, watch, to_engine, to_frontend)
            for device_claims in self._device_claims:
                device_claims.announced(client_id)
            try:
                slab_fds = self._slab.fd, self._slab.reply_fd
                send_welcome(peer, self._welcome(client_id, base_lease), slab_fds, ring_fds, self._load_fd)
            except BaseException:  # it never got the slab, so nothing of it needs a proof that it does not write
                self.said_goodbye(frontend, Goodbye())
                raise
            return frontend
        finally:
            for fd in ring_fds:
                os.close(fd)

    def _welcome(self, client_id: int, base_lease: Any) -> Welcome:
        config = self.config
        return Welcome(
            version=PROTOCOL_VERSION,
            epoch=self.epoch,
            client_id=client_id,
            slab_nbytes=self._geometry.slab_nbytes,
            block_nbytes=BLOCK_NBYTES,
            leasable_nbytes=self._geometry.leasable_blocks * BLOCK_NBYTES,
            max_inflight=config.max_inflight,
            max_calls=config.max_calls,
            max_leases=config.max_leases,
            message_ring_nbytes=int(config.message_ring_nbytes),
            max_record_nbytes=self._record_nbytes,
            inline_nbytes=self._inline_nbytes,
            max_payload_nbytes=self._max_payload_nbytes,
            max_tensors=config.max_tensors,
            base_lease=base_lease,
            device_slab=next((device_claims.handle for device_claims in self._device_claims), None),
            kept_nbytes=self._book.kept.max_blocks * BLOCK_NBYTES,
        )

    def message_received(self, frontend: _Frontend, message: FrontendMessage) -> None:
        """One message of a frontend, other than a submission, is one event."""
        client_id = frontend.client_id
        match message:
            case Abort(request_id):
                self.carry_out(self._book.abort(client_id, request_id))
            case LeaseRequest(token, nbytes, preferred_nbytes, memory, waits):
                self.carry_out(self._book.request_lease(client_id, token, nbytes, preferred_nbytes, memory, waits))
            case LeaseReturn(lease_ids):
                self.carry_out(self._book.return_leases(client_id, lease_ids))
            case ReplyRelease(generations):
                self.carry_out(self._book.release_replies(client_id, generations))
            case Find(token, key):
                self.carry_out(self._book.find(client_id, token, key))
            case Keep(token, key, lease_id, offset, nbytes, generation, is_copied, payload):
                check_kept(payload, nbytes, is_copied, self.config.max_tensors)
                slot = SlotRef(lease_id, offset, nbytes, generation)
                self.carry_out(self._book.keep(client_id, token, key, slot, is_copied, payload))
            case Unpin(generations):
                self.carry_out(self._book.unpin(client_id, generations))
            case Call():
                self._called(frontend, message)
            case Goodbye():
                self._hear_goodbye(frontend, message)
            case Hello():
                raise RemoteProtocolError("a connection says hello once")

    def _hear_goodbye(self, frontend: _Frontend, goodbye: Goodbye) -> None:
        frontend.kept.append(goodbye)
        if not goodbye.more:
            self.said_goodbye(frontend, *frontend.kept)
            return
        client = self._book.clients[frontend.client_id]
        named = sum(
            len(part.kept_lease_ids) + len(part.kept_reply_generations) + len(part.pinned_generations) for part in frontend.kept
        )
        there = len(client.leases) + len(client.replies) + len(client.pins) + MAX_FINDS  # what was refused may be named as well
        if not len(frontend.kept) <= named <= there:
            raise RemoteProtocolError("a goodbye in parts keeps more than there is, or nothing in one of them")

    def said_goodbye(self, frontend: _Frontend, *goodbyes: Goodbye) -> None:
        """A frontend uses nothing any more but what it names."""
        frontend.connected = False
        if not any(goodbye.maps_device_slab for goodbye in goodbyes):
            self._device_slab_unmapped(frontend)
        lease_ids = [lease_id for goodbye in goodbyes for lease_id in goodbye.kept_lease_ids]
        generations = [generation for goodbye in goodbyes for generation in goodbye.kept_reply_generations]
        pinned = [generation for goodbye in goodbyes for generation in goodbye.pinned_generations]
        self.carry_out(self._book.goodbye(frontend.client_id, lease_ids, generations, pinned))
        frontend.link.close()

    def _called(self, frontend: _Frontend, call: Call) -> None:
        if len(frontend.calls) >= self.config.max_calls:
            raise RemoteProtocolError(f"more than max_calls ({self.config.max_calls}) calls were made at a time")
        task = self.loop.create_task(self._answer_call(frontend, call))
        frontend.calls.add(task)
        task.add_done_callback(frontend.calls.discard)

    async def _answer_call(self, frontend: _Frontend, call: Call) -> None:
        try:
            handler = self._calls.get(call.method)
            if handler is None:
                raise LookupError(f"this engine has no method {call.method!r}; it has {sorted(self._calls)}")
            arguments = msgspec.msgpack.decode(call.arguments, type=list[Any])
            encoded = msgspec.msgpack.encode(await handler(*arguments))
            capacity = self._record_nbytes - _CALL_RESULT_NBYTES
            if len(encoded) > capacity:
                raise CapacityError(
                    f"the result takes {len(encoded)} bytes, and has to fit a message of {self._record_nbytes}",
                    needed=len(encoded),
                    capacity=capacity,
                )
            result = CallResult(call.call_id, encoded)
            with contextlib.suppress(PeerLostError):  # then it goes nowhere
                await frontend.link.drain()
        except Exception as error:
            # Whatever a method raises is its caller's to handle: it travels there, with its type.
            if not isinstance(error, LookupError | msgspec.MsgspecError):
                logger.error("the call %s of %s failed: %s: %s", call.method, frontend, type(error).__name__, error)
                logger.debug("it was raised here", exc_info=error)
            result = CallResult(call.call_id, b"", self._describe(error))
        # Before its frontend learns of it: that may make the next call before this task counts as ended.
        task = asyncio.current_task()
        assert task is not None
        frontend.calls.discard(task)
        frontend.send(result)

    def refuse_frontend(self, frontend: _Frontend, error: RemoteProtocolError) -> None:
        """Disconnects a frontend that broke the rules, and tells it why."""
        if not frontend.connected:
            return
        self._counters.protocol_errors += 1
        logger.warning("%s broke the protocol and is disconnected: %s", frontend, error)
        frontend.send(Refused(self._describe(error)[1]))
        frontend.link.close()
        self.connection_lost(frontend)

    def connection_lost(self, frontend: _Frontend) -> None:
        """A frontend's connection has ended: its memory is quarantined until its process is dead."""
        frontend.detach()
        for task in frontend.calls:
            task.cancel()
        if frontend.connected and frontend.client_id in self._frontends:
            frontend.connected = False
            self.carry_out(self._book.disconnect(frontend.client_id))

    def _frontend_died(self, frontend: _Frontend) -> None:
        frontend.connected = False
        frontend.link.abort()
        self._device_slab_unmapped(frontend)
        self.carry_out(self._book.died(frontend.client_id))

    def _device_slab_unmapped(self, frontend: _Frontend) -> None:
        for device_claims in self._device_claims:
            device_claims.unmapped(frontend.client_id)

    # -- the ring itself ---------------------------------------------------------------------------------------------------

    async def close(self, reason: str = "the engine is closing") -> None:
        """Ends all connections, aborts running requests, and gives the slab and the name up. A second call does nothing.

        Args:
            reason: what frontends are told.
        """
        if self._closed or self._origin.forked:
            return  # a forked child must not touch its parent's sockets
        self._closed = True
        self._end.is_open = False
        tasks = [self._accepting, *self._handshakes]
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            self._end_everything(self._fit(reason))
            await uninterrupted(self.loop.create_task(self._give_memory_up()))
        await asyncio.sleep(0)  # lets the links report their ends

    def _end_everything(self, reason: str) -> None:
        self._listener.close()
        self.workers.close(reason)
        for frontend in list(self._frontends.values()):
            if frontend.connected:
                frontend.send(Refused(reason))
                frontend.link.close()
                self.connection_lost(frontend)
            frontend.watch.close()
        for future in self._claimers:
            if not future.done():
                future.set_result(None)
        self._copier.close()

    async def _give_memory_up(self) -> None:
        """Gives each memory up when no GPU uses it any more, and unmaps the slab when it is not pinned any more."""
        try:
            for memory in self._memories:
                await memory.close()
        finally:
            self.loop.remove_reader(self._host_claims.regions.bell)
            self._end.detach()
            self._host_claims.unmap()
            os.close(self._load_fd)

    async def __aenter__(self) -> Ring:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def _check_open(self) -> None:
        if self._closed or self._origin.forked:
            raise self.closed_error()

    def closed_error(self) -> ClosedError:
        """For what is no method of this: why the ring can't be used."""
        if not self._origin.forked:
            return ClosedError(f"ring {self.name!r} is closed")
        return ClosedError(f"ring {self.name!r} belongs to process {self._origin.pid}, which forked this one; serve your own")

    def count_protocol_error(self) -> None:
        """For the workers: one of them broke the rules."""
        self._counters.protocol_errors += 1

    def statistics(self) -> RingStatistics:
        """Returns gauges of the present state, and counters since the start."""
        book, counters, fan_out = self._book, self._counters, self.workers.end
        connected = sum(client.connected for client in book.clients.values())
        memories: dict[str, Any] = {}
        for memory, lending in zip(self._memories, book.lendings, strict=True):
            memories |= memory.statistics(lending)
        return RingStatistics(
            epoch=self.epoch,
            slab_nbytes=self._geometry.slab_nbytes,
            leasable_nbytes=self._geometry.leasable_blocks * BLOCK_NBYTES,
            clients=connected,
            departed_clients=len(book.clients) - connected,
            lease_requests_waiting=book.waiting_lease_requests,
            waiting=self._end.waiting_count,
            running=self._end.running_count,
            slots_published=book.count_slots(EngineSlot.PUBLISHED),
            slots_claimed=book.count_slots(EngineSlot.CLAIMED),
            slots_draining=book.count_slots(EngineSlot.DRAINING),
            device_slots_in_use=book.count_device_slots(),
            reply_nbytes=self._geometry.reply_nbytes,
            reply_free_nbytes=book.reply_free_nbytes,
            replies_waiting=len(self._reply_waiters),
            late_aborts=book.late_aborts,
            stale_releases=book.stale_releases,
            submitted=self._end.submitted,
            finished=self._end.finished,
            replies=self._end.replies,
            received_nbytes=self._end.received_nbytes,
            reply_copies=self._end.reply_copies,
            reply_copied_nbytes=self._end.reply_copied_nbytes,
            kept=len(book.kept),
            kept_nbytes=book.kept.blocks * BLOCK_NBYTES,
            kept_pinned=len(book.kept) - len(book.kept.unpinned),
            kept_pinned_nbytes=(book.kept.blocks - book.kept.unpinned_blocks) * BLOCK_NBYTES,
            kept_capacity_nbytes=book.kept.max_blocks * BLOCK_NBYTES,
            kept_hits=book.kept.hits,
            kept_misses=book.kept.misses,
            kept_evictions=book.kept.evictions,
            workers=self.workers.statistics(),
            broadcasts=fan_out.broadcasts,
            gathers=fan_out.gathered,
            broadcasts_outstanding=fan_out.book.outstanding,
            broadcast_nbytes=self.workers.memory_nbytes,
            broadcast_free_nbytes=fan_out.book.free_blocks * BLOCK_NBYTES,
            broadcast_copied_nbytes=fan_out.copied_nbytes,
            broadcast_in_place_nbytes=fan_out.in_place_nbytes,
            late_answers=fan_out.late_answers,
            **dataclasses.asdict(counters),
            **memories,
        )


def _blocks(nbytes: int | str | None, default: int) -> int:
    return default if nbytes is None else blocks_for(int(nbytes))


def _kept_blocks(nbytes: int | str | None, leasable_blocks: int) -> int:
    return leasable_blocks // 2 if nbytes is None else min(int(nbytes) // BLOCK_NBYTES, leasable_blocks)


def _content_start(slot: ReplySlot) -> int:
    return slot.start * BLOCK_NBYTES + SLOT_HEADER_NBYTES


def _give_up(future: asyncio.Future[ReplySlot], claim: Claim) -> None:
    if not future.done():
        future.set_exception(claim.why_not_running())


class Serving:
    """What :func:`serve` returns: await it, or use it with ``async with``."""

    def __init__(self, create: Callable[[], Awaitable[Ring]]) -> None:
        self._create = create
        self._ring: Ring | None = None

    def __await__(self) -> Generator[Any, None, Ring]:
        return self._create().__await__()

    async def __aenter__(self) -> Ring:
        self._ring = await self._create()
        return self._ring

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._ring is not None
        await self._ring.close()


def serve(
    name: str,
    config: RingConfig | None = None,
    *,
    payload_type: Any = Any,
    calls: Mapping[str, CallHandler] | None = None,
    **overrides: Any,
) -> Serving:
    """Opens the engine's end of a ring: ``async with shmring.serve("vision", slab_nbytes="1GiB") as ring``.

    Args:
        name: what frontends connect to; one living engine of a user may have it.
        config: limits and sizes; ``overrides`` are fields of it.
        payload_type: a msgspec type that payloads are decoded into; plain objects if not given.
        calls: control calls that frontends may make, by name: coroutine functions of msgpack values.

    Raises:
        SlabError: there is no memory for the slab, or no space in ``/dev/shm``; or (``CudaError``) it can't be pinned with
            ``pin="on"``, or a GPU can't hold the device slab.
        LocalProtocolError: a living engine has this name.
        PermissionError: the socket's directory is not safe.
        ValueError, TypeError: a name, size or option is not valid.

    Source: objects that can be awaited or used with ``async with`` are how ``websockets`` does it.
    """
    settled = configured(RingConfig, config, overrides)
    return Serving(lambda: Ring.create(name, settled, payload_type=payload_type, calls=calls))
