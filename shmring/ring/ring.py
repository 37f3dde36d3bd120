"""The engine's end of the transport.

Theory of operation: :class:`Ring` is the asyncio shell around the :class:`~shmring.core.compiled.EngineEnd`, which does what
happens with every message. Here is what happens less often: somebody waits for a claim, requests are aborted or fail, the ring
closes. Parts of it are frontends (``frontend.py``) and how they come (``handshakes.py``), replies that wait for space
(``replies.py``), workers (``workers.py``), and each memory in which slots are handed over (``host_claims.py``). There is no
``await`` between reading the book and acting on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import mmap
import os
import secrets
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import msgspec
import torch

from shmring.cancellation import uninterrupted
from shmring.config import RingConfig
from shmring.core.compiled import EngineBook, EngineCalls, EngineEnd, Origin, largest_record_nbytes
from shmring.core.effects import (
    Answered,
    ClientGone,
    EngineEffect,
    Granted,
    Recalled,
    Reclaimed,
    Released,
    ReplyGranted,
    RequestAborted,
)
from shmring.core.geometry import BLOCK_NBYTES, EngineBookLimits, Geometry, blocks_for
from shmring.core.messages import (
    SLOT_HEADER_NBYTES,
    Failed,
    FailureKind,
    LeaseRecall,
    Release,
)
from shmring.core.printable import printable_lines
from shmring.core.states import EngineSlot, RequestEvent
from shmring.errors import (
    AbortedError,
    ClosedError,
    RemoteProtocolError,
    StaleDescriptorError,
    WouldBlock,
)
from shmring.gpu.cuda import Cuda, CudaError, Stream, TorchCuda
from shmring.gpu.device import DeviceMemory, whole_nbytes
from shmring.gpu.device_claims import DeviceClaims
from shmring.gpu.driver import Driver
from shmring.gpu.layout import NOTHING_GIVEN, Given
from shmring.line import Line
from shmring.memory.copier import Copier
from shmring.memory.living import lent_tensors, report
from shmring.memory.tensors import make_decoder
from shmring.memory.views import Place
from shmring.ring import limits
from shmring.ring.claim import Claim
from shmring.ring.frontend import CallHandler, Frontend, fit_text
from shmring.ring.handling import handle_batches, handle_claims
from shmring.ring.handshakes import Handshakes
from shmring.ring.host_claims import ClaimedMemory, HostClaims
from shmring.ring.replies import Replies
from shmring.ring.reserve import Reserved, reserve
from shmring.ring.workers import Workers
from shmring.statistics import RingStatistics
from shmring.transport.endpoint import Listener, socket_path
from shmring.transport.loops import check_loop
from shmring.transport.polling import Poller

__all__ = ["Ring"]

logger = logging.getLogger("shmring.ring")

_COPY_THREADS = 2  # for replies, which are small beside requests
_DRAINED_LOOK_S = 0.005  # whether requests in hand have ended: between two looks
_LOOK_S = 0.00005  # for a request, before the loop goes on, if this engine polls busily: what one takes to come back


@dataclasses.dataclass(slots=True)
class _Counters:
    failed: int = 0
    aborted: int = 0
    protocol_errors: int = 0
    reclaimed_nbytes: int = 0


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
        reserved: Reserved,
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
        self._slab = slab = reserved.slab
        self._load_fd = reserved.load_fd
        self._geometry = geometry
        leasable = geometry.leasable_blocks
        self._book = book = EngineBook(
            geometry,
            EngineBookLimits(
                max_lease_blocks=_blocks(config.max_lease_nbytes, max(1, leasable // 8)),
                quota_blocks=_blocks(config.client_quota_nbytes, max(1, leasable * 3 // 4)),
                max_leases=limits.MAX_LEASES,
                max_inflight=config.max_inflight,
                device_quota_blocks=max(1, geometry.device_blocks * 3 // 4),
                kept_blocks=_kept_blocks(config.kept_nbytes, leasable),
                max_kept=limits.MAX_KEPT,
                max_pins=limits.MAX_PINS,
            ),
        )
        self.record_nbytes = largest_record_nbytes(int(config.message_ring_nbytes))
        self.call_handlers = dict(calls)
        self.copier = Copier(_COPY_THREADS, limits.COPY_OFFLOAD_NBYTES)
        self._frontends: dict[int, Frontend] = {}
        self._claimers: Line[None] = Line()
        decoder = make_decoder(payload_type)
        self._host_claims = HostClaims(slab, reserved.pinned, cuda, self.copier, decoder, config)
        self._device_claims = tuple(  # none or one
            DeviceClaims(cuda, device_slab, geometry.slab_nbytes, self._wake_for_deaths)
            for device_slab in reserved.device_slabs
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
            max_values=config.max_values,
            inline_nbytes=int(config.inline_nbytes),
            max_payload_nbytes=int(config.max_payload_nbytes),
            debug=config.debug,
            load=reserved.load,
        )
        super().__init__(self._end, min(config.busy_poll_s, _LOOK_S))
        self._take_next: Callable[[], Claim | None] = self._end.take_next
        self.replies = Replies(self, geometry, slab, self.copier)
        self.workers = Workers(self, self._end, slab, self.record_nbytes)
        self._counters = _Counters()
        self._closed = False
        self._is_draining = False  # nothing more is claimed
        self.loop.add_reader(self._host_claims.regions.bell, self._collect_deaths)
        self._handshakes = Handshakes(self, listener, geometry, slab, reserved.load_fd, self._device_claims, self._frontends)

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
            reserved = await reserve(name, geometry, epoch, config, cuda, device_memory or Driver())
        except BaseException:
            listener.close()
            raise
        try:
            return cls(
                name,
                config,
                epoch=epoch,
                geometry=geometry,
                reserved=reserved,
                cuda=cuda,
                listener=listener,
                payload_type=payload_type,
                calls=calls or {},
            )
        except BaseException:  # msgspec knows no such payload_type
            reserved.close()
            listener.close()
            raise

    # -- claims ----------------------------------------------------------------------------------------------------

    async def claim_in_turn(self) -> Claim:
        """For :meth:`claim`: a request has to be waited for."""
        self.check_loop()
        while True:
            self._check_claiming()
            if not self._claimers and (claim := self.claim_now()) is not None:
                return claim
            await self._request_arrived()
            self._check_claiming()
            if (claim := self._take_next()) is not None:
                if self._claimers:
                    self.request_arrived()
                return claim

    def _check_claiming(self) -> None:
        self.check_open()
        if self._is_draining:
            raise ClosedError(f"ring {self.name!r} is draining: it claims nothing more")

    async def next_in_turn(self) -> Claim:
        """For the iteration over claims: a request has to be waited for."""
        try:
            return await self.claim_in_turn()
        except ClosedError:
            self.check_process()
            raise StopAsyncIteration from None

    async def claim_lingering(self, most: int, linger_s: float) -> list[Claim]:
        """For :meth:`claim_many`: more is waited for once the first has come."""
        claims = await self.claim_many(most)
        end_s = self.loop.time() + linger_s
        try:
            with contextlib.suppress(TimeoutError, ClosedError):  # what has come is handed out
                async with asyncio.timeout_at(end_s):
                    while len(claims) < most:
                        claims += await self.claim_many(most - len(claims))
        except BaseException:
            for claim in claims:
                claim.fail(asyncio.CancelledError("who claimed the request was cancelled"))
            raise
        return claims

    def claim_nowait(self) -> Claim:
        """Claims the next request if there is one.

        Raises:
            WouldBlock: none is waiting, others wait for it, or so much was claimed that the loop is to have a turn before.
            ClosedError: the ring is closed.
        """
        self._check_claiming()
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

        Raises:
            ClosedError: the ring belongs to the process that forked this one.
        """
        self.check_process()
        await handle_claims(self, handler, max_concurrency)

    async def run_batches(
        self, handler: Callable[[list[Claim]], Awaitable[Sequence[object]]], most: int, *, linger_s: float = 0.0
    ) -> None:
        """Handles claims in batches until the ring is closed, one batch at a time: for models, to which a batch is one call.

        The replies to a batch are sent while the next one is handled, each of them as the last of its request. A handler that
        raises fails the requests of its batch and is logged; the loop goes on. A request that is aborted meanwhile stays in its
        batch (``claim.aborted`` says so), and its reply is dropped.

        Args:
            handler: called with 1 to ``most`` claims in order of arrival; returns as many replies.
            most, linger_s: as of :meth:`claim_many`.

        Raises:
            ClosedError: the ring belongs to the process that forked this one.
        """
        self.check_process()
        await handle_batches(self, handler, most, linger_s)

    async def _request_arrived(self) -> None:
        self._end.is_awaited = self._end.is_crowded = True
        try:
            await self._claimers.wait(lambda _: self.request_arrived())
            self._end.begin_turn()
        finally:
            self._end.is_awaited = bool(self._claimers)
            self._end.is_crowded = self._end.is_awaited or self._is_draining

    def request_arrived(self) -> None:
        """Wakes the first claimer if there is something to claim; it wakes the next."""
        if not self._end.waiting_count or self._end.is_turn_over:
            return
        self._claimers.give_first(None)
        self._end.is_awaited = False  # whom this wakes wakes the next

    def let_others_run(self) -> None:
        """For the end: so much was claimed that nothing more is until the loop has had a turn."""
        self.loop.call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        if not self._closed:
            self._end.begin_turn()
            self.request_arrived()

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
            frontend = claim.frontend  # which may be forgotten here: what decoded the payload may have heard of its end
            assert isinstance(frontend, Frontend)
            frontend.protocol_violated(RemoteProtocolError(f"request {request_id}: {error}"))
            return
        kind: FailureKind = "invalid"
        if isinstance(error, CudaError):
            kind = "error"
            # As text: a log handler that keeps the error would keep its frames, and they the views of the request's slots.
            logger.error("request %d of client %d can't be taken up: %s", request_id, client_id, str(error))
        elif not isinstance(error, msgspec.ValidationError | RemoteProtocolError | StaleDescriptorError | AbortedError):
            text = printable_lines("".join(traceback.format_exception(error)))
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
        self.check_open()
        self.check_loop()
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
            TypeError: something in the payload can't be sent; the message names its path. Or ``to`` is no list of ranks, or
                ``timeout`` no number.
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
            WorkersBehindError: the time was over; a TimeoutError that names the workers. ``sent`` says whether they have the
                message and had not replied, or nothing was sent.
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
        self.check_open()
        self.workers.drop(rank, fit_text(reason, self.record_nbytes))

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
        lent = lent_tensors(claim.submit.content, self._slab.address, SLOT_HEADER_NBYTES)
        logger.warning("request %d is left with living views of its payload; it was %s", claim.request_id, report(lent))

    def send_release(self, frontend: Frontend, generations: Sequence[int]) -> None:
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
        frontend = claim.frontend
        assert isinstance(frontend, Frontend)
        description = frontend.describe(error)  # before anything is noted: it runs the error's code
        self.call_soon(claim.mark_ended())
        if self._book.end(claim.client_id, claim.request_id, event):
            self._counters.failed += 1
            frontend.send(Failed(claim.request_id, kind, *description))

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
                    effects += self.replies.granted(ticket, slot)
                case Reclaimed(client_id, nbytes):
                    self._counters.reclaimed_nbytes += nbytes
                    logger.info("%s has gone: %d bytes reclaimed", self._frontends[client_id], nbytes)
                case ClientGone(client_id):
                    frontend = self._frontends.pop(client_id)
                    for device_claims in self._device_claims:
                        device_claims.gone(client_id)
                    frontend.forget()

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

    def _wake_for_deaths(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left who could reuse anything
            self.loop.call_soon_threadsafe(self._collect_deaths)

    def _collect_deaths(self) -> None:
        for memory in self._memories:
            for key in memory.collect():
                self.carry_out(self._book.last_view_gone(*key))

    def client_lost(self, client_id: int) -> None:
        """Nothing more comes from a frontend; for a subclass."""

    def device_slab_unmapped(self, client_id: int) -> None:
        """For a frontend: it does not map the device slab, or is dead."""
        for device_claims in self._device_claims:
            device_claims.unmapped(client_id)

    # -- the ring itself ---------------------------------------------------------------------------------------------------

    async def drain(self, timeout: float | None = None) -> bool:
        """Claims nothing any more, and waits for the requests in hand to end: before :meth:`close`, for a stop in good order.

        Whoever claims gets :class:`ClosedError`, and loops over claims end, as with a closed ring. Requests that nobody has
        claimed wait until then; a client of several engines sends them to another one (``retry``).

        Args:
            timeout: seconds.

        Returns:
            Whether all of them have ended.

        Raises:
            ClosedError: the ring is closed.
        """
        self.check_open()
        self.check_loop()
        self._is_draining = self._end.is_crowded = True
        self._claimers.give_all(None)
        end_s = math.inf if timeout is None else self.loop.time() + timeout
        while self._end.running_count and not self._closed:
            if self.loop.time() >= end_s:
                return False
            await asyncio.sleep(_DRAINED_LOOK_S)
        return True

    async def close(self, reason: str = "the engine is closing") -> None:
        """Ends all connections, aborts running requests, and gives the slab and the name up. A second call does nothing.

        Args:
            reason: what frontends are told.
        """
        if self._closed or self._origin.forked:
            return  # a forked child must not touch its parent's sockets
        self.check_loop()
        self._closed = True
        self._end.is_open = False
        try:
            await self._handshakes.close()
        finally:
            self._end_everything(fit_text(reason, self.record_nbytes))
            await uninterrupted(self.loop.create_task(self._give_memory_up()))
        await asyncio.sleep(0)  # lets the links report their ends

    def _end_everything(self, reason: str) -> None:
        self.workers.close(reason)
        for frontend in list(self._frontends.values()):
            if frontend.connected:
                frontend.dismiss(reason)
            frontend.forget()
        self._claimers.give_all(None)
        self.copier.close()

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

    def check_open(self) -> None:
        """Raises :class:`ClosedError` unless the ring may be used in this process."""
        if self._closed or self._origin.forked:
            raise self.closed_error()

    def check_loop(self) -> None:
        """Raises :class:`LocalProtocolError` in another loop than the ring's; :class:`ClosedError` in a forked child."""
        self.check_process()
        check_loop(self.loop, f"this ring {self.name!r}")

    def check_process(self) -> None:
        """Raises :class:`ClosedError` in a forked child."""
        if self._origin.forked:
            raise self.closed_error()

    def closed_error(self) -> ClosedError:
        """For what is no method of this: why the ring can't be used."""
        if not self._origin.forked:
            return ClosedError(f"ring {self.name!r} is closed")
        return self._origin.stray(f"ring {self.name!r}", "serve your own")

    def count_protocol_error(self) -> None:
        """A frontend or a worker broke the rules."""
        self._counters.protocol_errors += 1

    def statistics(self) -> RingStatistics:
        """Returns gauges of the present state, and counters since the start.

        Raises:
            ClosedError: the ring belongs to the process that forked this one.
        """
        self.check_process()
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
            replies_waiting=len(self.replies),
            refused=self._handshakes.refused,
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
