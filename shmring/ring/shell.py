"""The inside of :class:`~shmring.ring.ring.Ring`: all work of an engine that is rarer than a message.

Theory of operation: :class:`Shell` is the asyncio shell around the :class:`~shmring.core.compiled.EngineEnd`, which does the
work on every message. The rarer events are here: requests are aborted or fail, the ring drains, or closes. Its
parts are frontends (``frontend.py``) and how they connect (``handshakes.py``), replies that wait for space (``replies.py``),
workers (``workers.py``), and each memory in which slots are handed over (``host_claims.py``). Each part is given the objects
that it uses, and not the shell. There is no ``await`` between reading the book and acting on it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context
from typing import Any

import msgspec
import torch

from shmring.cancellation import uninterrupted
from shmring.config import RingConfig
from shmring.core.compiled import BaseClaim, EngineBook, EngineEnd, Placement, Submit
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
from shmring.core.loggers import logger_of
from shmring.core.messages import MAX_WAITS, SLOT_HEADER_NBYTES, Failed, FailureKind, LeaseRecall, Release
from shmring.core.printable import printable, printable_lines
from shmring.core.states import EngineSlot, RequestEvent
from shmring.errors import AbortedError, ClosedError, RemoteProtocolError, StaleDescriptorError
from shmring.gpu.cuda import Cuda, CudaError, Stream, cuda_index
from shmring.gpu.device_claims import DeviceClaims
from shmring.gpu.upload import NOTHING_GIVEN, Given
from shmring.memory.bundles import Bundle
from shmring.memory.copier import Copier
from shmring.memory.living import lent_tensors, report
from shmring.memory.tensors import make_decoder, make_packer
from shmring.ring import limits
from shmring.ring.frontend import CallHandler, Frontend, fit_text
from shmring.ring.handshakes import Handshakes
from shmring.ring.host_claims import ClaimedMemory, HostClaims
from shmring.ring.injecting import Injector
from shmring.ring.inspection import Inspection
from shmring.ring.life import RingLife
from shmring.ring.moments import Moments
from shmring.ring.replies import Replies
from shmring.ring.reserve import Reserved
from shmring.ring.untaken import Untaken
from shmring.ring.workers import Workers
from shmring.statistics import RingStatistics, counts_of
from shmring.transport.listener import Listener

__all__ = ["Shell"]

logger = logger_of("shmring.ring")

_COPY_THREADS = 2  # for replies, which are small beside requests
_READ_S = 1.0  # for the last replies in slots to be read, which can't be read any more when the engine has gone
_DRAINED_LOOK_S = 0.005  # between two checks whether requests in hand have ended


@dataclasses.dataclass(slots=True)
class _Counters:
    failed: int = 0
    aborted: int = 0
    reclaimed_nbytes: int = 0


class Shell:
    """See the head of this file; the :class:`~shmring.core.shells.EngineShell` of its end. Lives in a loop.

    Args:
        life: of this engine.
        geometry: of the slab.
        reserved: memory, taken over.
        cuda: how to call CUDA.
        listener: accepts frontends and workers; taken over.
        payload_type: that payloads are decoded into.
        calls: control calls, by name.
        claim_type: the class of claims.

    Attributes:
        life: see above.
        loop: that of ``life``.
        end: does the work on every message.
        decoder: of payloads.
        replies: that are on their way.
        workers: that have joined.
        uploads: copies of claims to GPUs.
        untaken: deliveries that nobody takes.
        inspection: what the ring is doing, for people.
        on_drain: called when the ring begins to drain.
    """

    def __init__(
        self,
        life: RingLife,
        *,
        geometry: Geometry,
        reserved: Reserved,
        cuda: Cuda,
        listener: Listener,
        payload_type: Any,
        calls: Mapping[str, CallHandler],
        claim_type: type[BaseClaim],
    ) -> None:
        config = life.config
        self.life = life
        self.home, self.loop = life.home, life.loop
        self._slab = slab = reserved.slab
        self._load_fd = reserved.load_fd
        self._load = reserved.load
        self._geometry = geometry
        self._book = EngineBook(geometry, _limits(config, geometry))
        self._copier = copier = Copier(_COPY_THREADS, life.offload_nbytes)
        self._frontends: dict[int, Frontend | Injector] = {}
        self._cuda = cuda
        self._payload_type = payload_type
        self._counters = _Counters()
        self.on_drain: Callable[[], object] = lambda: None
        self.decoder = make_decoder(payload_type)
        self._host_claims = HostClaims(slab, reserved.pinned, cuda, copier, config)
        self._device_claims = tuple(  # none or one
            DeviceClaims(cuda, device_slab, geometry.slab_nbytes, self._collect_deaths) for device_slab in reserved.device_slabs
        )
        self._memories: tuple[ClaimedMemory, ...] = (self._host_claims, *self._device_claims)  # as the book numbers them
        self.uploads = self._host_claims.uploads
        self.end = end = EngineEnd(
            self,
            self._book,
            self._host_claims.regions,
            slab.mapping,
            self.decoder,
            claim_type,
            epoch=life.epoch,
            max_tensors=config.max_tensors,
            max_values=config.max_values,
            inline_nbytes=int(config.inline_nbytes),
            max_payload_nbytes=int(config.max_payload_nbytes),
            debug=config.debug,
            load=reserved.load,
            packer=make_packer(config.max_tensors, int(config.max_payload_nbytes), config.max_values),
            record_nbytes=life.record_nbytes,
            copier=copier,
        )
        self.replies = Replies(life, end, geometry, slab, copier, self.carry_out)
        self.workers = Workers(life, end, slab, copier)
        self._moments = Moments(life, self._book, self.carry_out)
        self.untaken = Untaken(life, self._book, self.carry_out)
        self.loop.add_reader(self._host_claims.regions.bell, self._collect_deaths)
        make_frontend = functools.partial(
            Frontend,
            life,
            end,
            dict(calls),
            self._device_claims,
            self._moments,
            self.untaken,
            self.carry_out,
            self.client_lost,
        )
        self._handshakes = Handshakes(
            life,
            self._book,
            listener,
            geometry,
            slab,
            reserved.load_fd,
            self._device_claims,
            self._frontends,
            make_frontend,
            self.workers.admit,
            lambda: msgspec.json.encode(self.inspection.inspect()),
        )
        self.inspection: Inspection = Inspection(life, self._book, end, geometry, self._frontends, self.statistics)

    # -- claims ----------------------------------------------------------------------------------------------------

    def check_claiming(self) -> None:
        """Raises :class:`ClosedError` unless requests may be claimed."""
        self.life.home.check_open()
        if self.end.is_draining:
            raise ClosedError(f"ring {self.life.name!r} is draining: it claims nothing more")

    def let_others_run(self) -> None:
        """The loop must have a turn before more requests are claimed."""
        self.loop.call_soon(self.end.begin_turn)

    def injector(self, name: str) -> Injector:
        """See :meth:`Ring.injector`."""
        self.life.home.enter()
        client_id = self._handshakes.next_client_id()
        lease = self._book.connect(client_id, 0)
        if lease is not None:  # the smallest there is: it needs none
            self.carry_out(self._book.return_leases(client_id, (lease.lease_id,)))
        injector = Injector(self.life, self.end, self.carry_out, self._geometry.reply_nbytes, client_id, printable(name))
        self._frontends[client_id] = injector
        return injector

    def open_bundle(self, bundle: Bundle) -> Any:
        """Decodes the payload of a request of this process's own."""
        return bundle.open(self._payload_type)

    async def move_bundle(self, bundle: Bundle, device: torch.device | str | int) -> Any:
        """Decodes such a payload with its tensors copied to a GPU, on a thread."""
        target = torch.device("cuda", cuda_index(self._cuda, device))
        return await self._copier.run(lambda: bundle.open(self._payload_type, lambda tensor: tensor.to(target)))

    def claim_on_device(self, client_id: int, submit: Submit) -> Placement:
        """A request has slots in device memory. Returns where their tensors are made."""
        [device_claims] = self._device_claims  # a submission without a fence has no such slots, and a fence was checked
        return device_claims.claim(client_id, submit)

    def claim_failed(self, claim: BaseClaim, error: Exception, *, breaks_rules: bool) -> None:
        """A request can't be claimed.

        Args:
            claim: its claim.
            error: why.
            breaks_rules: whether its frontend has broken the rules.
        """
        client_id, request_id = claim.client_id, claim.request_id
        self.end.release(claim)
        if breaks_rules:
            # The frontend may be forgotten here: decoding the payload may have read its end.
            self.end.frontend_of(claim).protocol_violated(RemoteProtocolError(f"request {request_id}: {error}"))
            return
        is_cuda = isinstance(error, CudaError)
        self._end_request(claim, RequestEvent.ERROR, "error" if is_cuda else "invalid", error)
        if is_cuda:
            # Logged as text: a log handler that keeps the error would keep its frames, and so the views of the request's slots.
            logger.error(
                "request %d of client %d can't be taken up: %s",
                request_id,
                client_id,
                str(error),
                extra={"request_id": claim.name},
            )
        elif not isinstance(error, msgspec.ValidationError | RemoteProtocolError | StaleDescriptorError | AbortedError):
            text = printable_lines("".join(traceback.format_exception(error)))
            logger.error(
                "decoding request %d of client %d failed\n%s", request_id, client_id, text, extra={"request_id": claim.name}
            )

    # -- ending claims (for Claim) ------------------------------------------------------------------------------------

    def given(self, client_id: int, submit: Submit, device: torch.device | str | int, stream: Stream | None) -> Given:
        """Returns a claim's slots in device memory. The stream waits for their fence from now on."""
        if not submit.content.fence:
            return NOTHING_GIVEN
        [device_claims] = self._device_claims
        return device_claims.give(client_id, submit, device, stream)

    def current_stream(self) -> int:
        """Returns the number of the stream that this thread computes on, on the GPU of the device slab."""
        [device_claims] = self._device_claims
        return device_claims.current_stream()

    def use_on_device(self, client_id: int, submit: Submit, stream: int) -> None:
        """A claim's slots in device memory are used on one more stream, which waits for their fence."""
        [device_claims] = self._device_claims
        device_claims.use(client_id, submit, stream)

    def release_on_device(self, client_id: int, submit: Submit, copying: bool) -> list[bool]:
        """Releases slots in device memory; returns which of a claim's slots drain."""
        [device_claims] = self._device_claims
        if self.life.config.debug and not copying and device_claims.is_viewed(client_id, submit):
            self.log_drain(submit)
        return device_claims.release(client_id, submit)

    def log_drain(self, submit: Submit) -> None:
        """In debug mode: a claim is released while views of it live."""
        lent = lent_tensors(submit.content, self._slab.address, SLOT_HEADER_NBYTES)
        why = report(lent)
        logger.warning(
            "request %d is left with living views of its payload; it was %s",
            submit.request_id,
            why,
            extra={"request_id": submit.for_engine.request_id},
        )

    def refuse(self, claim: BaseClaim) -> None:
        """Raises the error that says why a request can't be answered any more."""
        raise self.life.ended_error(claim)

    def send_release(self, frontend: Frontend, generations: Sequence[int]) -> None:
        """Slots go back to their frontend."""
        frontend.link.send_listed(Release, generations)

    def call_soon(self, ours: Sequence[Callable[[], object]], callers: Sequence[tuple[Callable[[], object], Context]]) -> None:
        """Callbacks of claims run from the loop, outside of the ring's event. Those of callers have contexts."""
        for callback in ours:
            self.loop.call_soon(callback)
        for callback, context in callers:
            self.loop.call_soon(callback, context=context)

    def end_claim(self, claim: BaseClaim, event: RequestEvent, error: BaseException) -> None:
        """Ends a claim's request, and tells its frontend unless it was aborted."""
        self._end_request(claim, event, "timed_out" if event is RequestEvent.DEADLINE else "error", error)

    def _end_request(self, claim: BaseClaim, event: RequestEvent, kind: FailureKind, error: BaseException) -> None:
        frontend = self.end.frontend_of(claim)
        failed = Failed(claim.request_id, kind, *frontend.describe(error))  # first: it runs code of the error
        try:
            self.end.forget_claim(claim.client_id, claim.request_id)
            self.end.mark_ended(claim)
            if self._book.end(claim.client_id, claim.request_id, event):
                self._counters.failed += 1
                frontend.send(failed)
        except MemoryError as lacking:
            self.end.fail_soon(claim, lacking)
            raise

    # -- effects -------------------------------------------------------------------------------------------------------

    def carry_out(self, effects: list[EngineEffect]) -> None:
        for effect in effects:  # the list grows: effects of an effect come after the others, in the order of the book
            match effect:
                case RequestAborted():
                    self._request_aborted(effect)
                case Released(client_id, generations):
                    self._frontends[client_id].link.send_listed(Release, generations)
                case Granted(client_id, grant):
                    self._frontends[client_id].link.send(grant)
                case Answered(client_id, answer):
                    self._frontends[client_id].link.send(answer)
                case Recalled(client_id, lease_ids):
                    self._frontends[client_id].link.send_listed(LeaseRecall, lease_ids)
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
            self.end.forget_waiting(*key)
            return
        claim = self.end.forget_claim(*key)
        if claim is not None:
            self.end.mark_ended(claim, aborted=True)

    def _collect_deaths(self) -> None:
        for memory in self._memories:
            for key in memory.collect():
                self.carry_out(self._book.last_view_gone(*key))

    def client_lost(self, client_id: int) -> None:
        """No more records come from a frontend; for a subclass."""

    # -- the ring itself ---------------------------------------------------------------------------------------------------

    async def drain(self, timeout: float | None, *, claiming: bool) -> bool:
        """See :meth:`Ring.drain`."""
        self.life.home.enter()
        self._load.drain()
        self._book.drain()
        self.on_drain()
        if not claiming:
            self.end.wake_all(drains=True)
        end_s = math.inf if timeout is None else self.loop.time() + timeout
        read_by_s = self.loop.time() + _READ_S
        while not self.life.home.is_closed:
            now_s = self.loop.time()
            if self.end.running_count or (claiming and self.end.waiting_count):
                read_by_s = now_s + _READ_S
            elif not claiming or now_s >= read_by_s or self._book.reply_free_nbytes == self._geometry.reply_nbytes:
                break
            if now_s >= end_s:
                return False
            await asyncio.sleep(_DRAINED_LOOK_S)
        self.end.wake_all(drains=True)  # what comes from now on is sent to another engine, if its client may do that
        return True

    async def close(self, reason: str) -> None:
        """See :meth:`Ring.close`."""
        if self.life.home.is_closed or self.life.home.forked:
            return  # a forked child must not touch its parent's sockets
        self.life.home.check_loop()
        self.life.home.is_closed = True
        self.end.is_open = False
        self.inspection.close()
        self._moments.close()
        self.untaken.close()
        try:
            await self._handshakes.close()
        finally:
            self._end_everything(fit_text(reason, self.life.record_nbytes))
            await uninterrupted(self.loop.create_task(self._give_memory_up()))
        await asyncio.sleep(0)  # lets the links report their ends

    def _end_everything(self, reason: str) -> None:
        self.workers.close(reason)
        for frontend in list(self._frontends.values()):
            if frontend.connected:
                frontend.dismiss(reason)
            frontend.forget()
        self.end.wake_all()
        self._copier.close()

    async def _give_memory_up(self) -> None:
        """Gives each memory up when no GPU uses it any more, and unmaps the slab when it is not pinned any more."""
        try:
            for memory in self._memories:
                await memory.close()
        finally:
            self.loop.remove_reader(self._host_claims.regions.bell)
            self.end.detach()
            self._host_claims.unmap()
            os.close(self._load_fd)

    def statistics(self) -> RingStatistics:
        """See :meth:`Ring.statistics`."""
        self.life.home.check_process()
        book, fan_out = self._book, self.workers.end
        connected = sum(client.connected for client in book.clients.values())
        memories: dict[str, Any] = {}
        for memory, lending in zip(self._memories, book.lendings, strict=True):
            memories |= memory.statistics(lending)
        return RingStatistics(
            epoch=self.life.epoch,
            slab_nbytes=self._geometry.slab_nbytes,
            leasable_nbytes=self._geometry.leasable_blocks * BLOCK_NBYTES,
            clients=connected,
            departed_clients=len(book.clients) - connected,
            lease_requests_waiting=book.waiting_lease_requests,
            waiting=self.end.waiting_count,
            running=self.end.running_count,
            slots_published=book.count_slots(EngineSlot.PUBLISHED),
            slots_claimed=book.count_slots(EngineSlot.CLAIMED),
            slots_draining=book.count_slots(EngineSlot.DRAINING),
            device_slots_in_use=book.count_device_slots(),
            reply_nbytes=self._geometry.reply_nbytes,
            replies_waiting=len(self.replies),
            kept=len(book.kept),
            kept_nbytes=book.kept.blocks * BLOCK_NBYTES,
            kept_pinned=len(book.kept) - len(book.kept.unpinned),
            kept_pinned_nbytes=(book.kept.blocks - book.kept.unpinned_blocks) * BLOCK_NBYTES,
            kept_capacity_nbytes=book.kept.max_blocks * BLOCK_NBYTES,
            kept_hits=book.kept.hits,
            kept_misses=book.kept.misses,
            kept_evictions=book.kept.evictions,
            kept_evictions_for_content=book.kept.evictions_for_content,
            kept_evicted_nbytes=book.kept.evicted_nbytes,
            kept_refusals=book.kept.refusals,
            kept_waits=sum(map(len, book.kept.waits.values())),
            deliveries_untaken=len(book.kept.untaken),
            deliveries_taken=book.kept.taken,
            deliveries_withdrawn=book.kept.withdrawn,
            deliveries_dropped=book.kept.deliveries_dropped,
            workers=self.workers.statistics(),
            gathers=fan_out.gathered,
            broadcasts_outstanding=fan_out.book.outstanding,
            broadcast_nbytes=self.workers.memory_nbytes,
            broadcast_free_nbytes=fan_out.book.free_blocks * BLOCK_NBYTES,
            broadcast_copied_nbytes=fan_out.copied_nbytes,
            broadcast_in_place_nbytes=fan_out.in_place_nbytes,
            **counts_of(RingStatistics, self.end, book, fan_out, self._counters, self.life, self._handshakes),
            **memories,
        )


def _limits(config: RingConfig, geometry: Geometry) -> EngineBookLimits:
    leasable = geometry.leasable_blocks
    return EngineBookLimits(
        max_lease_blocks=_blocks(config.max_lease_nbytes, max(1, leasable // 8)),
        quota_blocks=_blocks(config.client_quota_nbytes, max(1, leasable * 3 // 4)),
        max_leases=limits.MAX_LEASES,
        max_inflight=config.max_inflight,
        device_quota_blocks=max(1, geometry.device_blocks * 3 // 4),
        kept_blocks=_kept_blocks(config.kept_nbytes, leasable),
        max_kept=limits.MAX_KEPT,
        max_pins=limits.MAX_PINS,
        pinned_blocks=_blocks(config.client_pinned_nbytes, leasable),
        max_waits=MAX_WAITS,
    )


def _blocks(nbytes: int | str | None, default: int) -> int:
    return default if nbytes is None else blocks_for(int(nbytes))


def _kept_blocks(nbytes: int | str | None, leasable_blocks: int) -> int:
    return leasable_blocks // 2 if nbytes is None else min(int(nbytes) // BLOCK_NBYTES, leasable_blocks)
