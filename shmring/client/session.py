"""A frontend's connection to one life of an engine: its socket, its mapping of the slab, its book.

Theory of operation: :class:`Session` is the asyncio shell around the :class:`~shmring.core.client_end.ClientEnd`, as the ring
is around the engine's end. It ends for good when the engine's connection or process ends; a client that reconnects
makes a new one. Everything that waits in it then fails with the reason, and slots of it are dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from shmring.cancellation import uninterrupted
from shmring.client.kept import KeptContents
from shmring.client.slot import Slot
from shmring.client.submission import Submission
from shmring.config import ClientConfig
from shmring.core.client_book import ClientBook, ClientSlotRecord
from shmring.core.client_end import ClientEnd, SubmissionEnd
from shmring.core.effects import Acquired, ClientEffect
from shmring.core.geometry import ClientBookLimits
from shmring.core.load import LoadPage
from shmring.core.mapping import Mapping
from shmring.core.message_ring import RingMemory, largest_record_nbytes
from shmring.core.messages import (
    PROTOCOL_VERSION,
    Abort,
    Call,
    CallResult,
    Failed,
    Found,
    Goodbye,
    Hello,
    LeaseGrant,
    LeaseRecall,
    LeaseRequest,
    LeaseReturn,
    NotKept,
    Refused,
    Release,
    ReplyRelease,
    Welcome,
    decode_engine_message,
)
from shmring.core.payload import Packed
from shmring.core.views import Regions
from shmring.errors import (
    AbortedError,
    CapacityError,
    ClosedError,
    EngineDeadError,
    PeerLostError,
    RemoteError,
    RemoteProtocolError,
    ShmringError,
    SlabError,
    WouldBlock,
    fresh,
)
from shmring.forks import Origin
from shmring.gpu.cuda import Cuda, CudaError, Stream
from shmring.gpu.device import DeviceMemory, DeviceSlab, Fence
from shmring.gpu.device_slots import DeviceSlots
from shmring.memory.copier import Copier
from shmring.memory.slab import Slab
from shmring.memory.tensors import make_decoder, make_packer, slot_dtypes
from shmring.memory.views import TENSOR_MAKER
from shmring.transport.endpoint import AttachedEngine, attach_engine, give_up
from shmring.transport.link import Link
from shmring.transport.liveness import ProcessWatch
from shmring.transport.load import map_load_page
from shmring.transport.polling import Poller
from shmring.transport.rings import map_rings

__all__ = ["ClientCounters", "Session"]

logger = logging.getLogger("shmring.client")

_MAX_BACKLOG_NBYTES = 16 << 20  # an abort for each request, and ids of leases and replies, are far less
_CALL_NBYTES = 1280  # at most, of a call around its arguments
_DRAIN_WARNING_S = 1.0  # a caller that waits this long while views keep slots is told so in the log
_TOUCHED_AT_ONCE_NBYTES = 64 << 20  # some 15 ms of a copying thread's time
_CLOSED = "this client was closed"
_READS_SLOWLY = "the engine reads more slowly than it is written to"
_GOODBYE_TIMEOUT_S = 1.0  # for the engine to read our last messages
_OF_SLOTS, _OF_REPLIES, _OF_KEPT = 0, 1, 2  # what a region is of


@dataclass(slots=True)
class ClientCounters:
    """Counters that outlive a session; see :class:`~shmring.statistics.ClientStatistics`."""

    submitted: int = 0
    finished: int = 0
    failed: int = 0
    aborted: int = 0
    copies: int = 0
    copied_nbytes: int = 0
    in_place: int = 0
    in_place_nbytes: int = 0
    inline_payloads: int = 0
    slot_nbytes_submitted: int = 0
    replies: int = 0
    reply_copies: int = 0
    reply_copied_nbytes: int = 0
    stale_releases: int = 0
    reconnections: int = 0
    kept_hits: int = 0
    kept_misses: int = 0

    def with_those_of(self, end: ClientEnd) -> ClientCounters:
        """Returns the sum of these and what a session's end has counted."""
        counted = {field.name: getattr(end, field.name, 0) for field in dataclasses.fields(self)}
        return ClientCounters(**{name: getattr(self, name) + count for name, count in counted.items()})


class Session:
    """See the head of this file. Made by :meth:`open`."""

    decoder = staticmethod(make_decoder)  # for the end, which keeps those that it has asked for

    def __init__(
        self,
        config: ClientConfig,
        counters: ClientCounters,
        copier: Copier,
        cuda: Cuda,
        device_memory: DeviceMemory,
        engine_name: str,
        engine: AttachedEngine,
        slab: Slab,
        regions: Regions,
        rings: Sequence[RingMemory],
        load: LoadPage,
        watch: ProcessWatch,
        on_lost: Callable[[Session], object],
    ) -> None:
        welcome = engine.welcome
        self.loop = asyncio.get_running_loop()
        self.config = config
        self.counters = counters
        self.engine_name = engine_name
        self.welcome = welcome
        self.load = load
        self.error: ShmringError | None = None
        self._copier = copier
        self._cuda = cuda
        self._device_memory = device_memory
        self._slab = slab
        self._regions = regions  # by _OF_SLOTS and the id of a record, or by _OF_REPLIES or _OF_KEPT and a generation
        self._on_lost = on_lost
        self._origin = Origin()
        self.book = ClientBook(
            ClientBookLimits(
                client_id=welcome.client_id,
                slab_nbytes=welcome.slab_nbytes,
                leasable_nbytes=welcome.leasable_nbytes,
                max_leases=welcome.max_leases,
                lease_nbytes=int(config.lease_nbytes),
                lease_idle_s=config.lease_idle_s,
            )
        )
        self.device: DeviceSlots | None = None  # from the first slot in device memory on
        self._opening_device: asyncio.Task[DeviceSlots] | None = None
        self._turns: deque[asyncio.Future[None]] = deque()  # of requests that wait until fewer are in flight
        self._calls_in_flight = asyncio.Semaphore(welcome.max_calls)
        self._calls: dict[int, asyncio.Future[bytes]] = {}
        self._ids = itertools.count(1)
        self._slot_waiters: dict[int, asyncio.Future[ClientSlotRecord]] = {}
        self._lease_ranges: dict[int, tuple[int, int]] = {}
        self._viewed: dict[int, ClientSlotRecord] = {}  # by id: left by their caller, still viewed
        self._expiry: asyncio.TimerHandle | None = None
        self._touching: asyncio.Task[None] | None = None
        self._copies: dict[asyncio.Future[None], ClientSlotRecord] = {}  # that are being made, or wait for their turn
        self._ended = self.loop.create_future()
        self._closing = False
        from_engine, to_engine = rings
        self.link = Link(
            self,
            engine.socket,
            from_engine,
            to_engine,
            Poller(self.loop, config.busy_poll_s),
            max_backlog_nbytes=_MAX_BACKLOG_NBYTES,
        )
        self.end = ClientEnd(
            self,
            self.book,
            regions,
            slab.mapping,
            make_packer(welcome.max_tensors, welcome.max_payload_nbytes),
            self.link.writer,
            Submission,
            Slot,
            TENSOR_MAKER,
            slot_dtypes(),
            self.loop.time,
            epoch=welcome.epoch,
            reply_key=_OF_REPLIES,
            max_tensors=welcome.max_tensors,
            inline_nbytes=min(int(config.inline_nbytes), welcome.inline_nbytes),
            max_inflight=welcome.max_inflight,
            max_reply_inline_nbytes=welcome.inline_nbytes,
            max_payload_nbytes=welcome.max_payload_nbytes,
            slot_key=_OF_SLOTS,
            debug=config.debug,
        )
        self.end.reader = self.link.reader
        self.take_record = self.end
        self.kept = KeptContents(self, _OF_KEPT)
        self._watch = watch
        self.loop.add_reader(regions.bell, self._collect_deaths)

    @classmethod
    async def open(
        cls,
        path: Path,
        config: ClientConfig,
        name: str,
        counters: ClientCounters,
        copier: Copier,
        cuda: Cuda,
        device_memory: DeviceMemory,
        on_lost: Callable[[Session], object],
    ) -> Session:
        """Attaches to the engine at a path.

        Raises:
            EngineDeadError: nobody listens there.
            RemoteProtocolError: the engine refuses this client.
            SlabError: its slab can't be mapped.
        """
        engine_uids = config.engine_uids if config.engine_uids is not None else frozenset({os.getuid()})
        engine = await attach_engine(path, Hello(PROTOCOL_VERSION, int(config.lease_nbytes), name), engine_uids)
        try:
            session = cls._attach(path.stem, engine, config, counters, copier, cuda, device_memory, on_lost)
        except BaseException:
            give_up(engine.socket)
            engine.socket.close()
            raise
        if config.prefault and not config.map_leased_only:
            session._touching = session.loop.create_task(session._touch_slab())
        return session

    @classmethod
    def _attach(
        cls,
        engine_name: str,
        engine: AttachedEngine,
        config: ClientConfig,
        counters: ClientCounters,
        copier: Copier,
        cuda: Cuda,
        device_memory: DeviceMemory,
        on_lost: Callable[[Session], object],
    ) -> Session:
        """Takes all but the socket over, and that as well if it succeeds."""
        with contextlib.ExitStack() as undo:
            watch = ProcessWatch(asyncio.get_running_loop(), engine.pidfd, lambda: session._engine_died())
            undo.callback(watch.close)
            slab, rings, load = _map(engine)
            undo.callback(slab.close)
            regions = Regions()
            undo.callback(regions.close)
            session = cls(
                config, counters, copier, cuda, device_memory, engine_name, engine, slab, regions, rings, load, watch, on_lost
            )
            undo.pop_all()
        try:
            if config.map_leased_only:
                slab.protect(0, engine.welcome.slab_nbytes, readable=True, writable=False)
            if engine.welcome.base_lease is not None:
                session._add_lease(engine.welcome.base_lease)
            session.link.start()
        except BaseException:
            give_up(engine.socket)
            session._lose(ClosedError("this client did not attach"))
            raise
        return session

    # -- what the connection reports -----------------------------------------------------------------------------------

    def take_message(self, record: bytes) -> None:
        """A message came that is no reply and no end of a request that has finished."""
        message = decode_engine_message(record)
        match message:
            case Failed(request_id):
                self._request_failed(request_id, message)
            case Release(generations):
                self.take_released(generations)
            case LeaseGrant():
                self._add_lease(message)
            case LeaseRecall(lease_ids):
                self.carry_out(self.book.recalled(lease_ids))
                if self.device is not None:  # neither book minds ids that are the other's
                    self.carry_out(self.device.book.recalled(lease_ids))
            case Found() | NotKept():
                self.kept.answered(message)
            case CallResult():
                self._call_ended(message)
            case Refused(reason):
                self._lose(self._dead(f"ended the connection: {reason}"))
            case Welcome():
                raise RemoteProtocolError("an engine says welcome once")

    def take_released(self, generations: Sequence[int]) -> None:
        """The engine hands slots back."""
        if self.device is not None:
            effects, generations = self.device.released(generations, self.loop.time())
            self.carry_out(effects)
        effects, unknown = self.book.released(generations, self.loop.time())
        self.counters.stale_releases += unknown
        self.carry_out(effects)

    def peer_gave_up(self) -> None:
        """An engine does not attach."""
        self.protocol_violated(RemoteProtocolError("what came over the socket is no bell"))

    def protocol_violated(self, error: RemoteProtocolError) -> None:
        """The engine broke the rules: it is as good as dead to us."""
        logger.error("the engine broke the protocol: %s", error)
        self._lose(self._dead(f"broke the protocol: {error}"))

    def connection_lost(self) -> None:
        """The connection has ended."""
        self._lose(self._dead("closed the connection, or died"))
        if not self._ended.done():
            self._ended.set_result(None)

    def _engine_died(self) -> None:
        self.link.read_last_words()  # which may say why
        self._lose(self._dead("has died"))

    def _dead(self, how: str) -> EngineDeadError:
        return EngineDeadError(f"the engine {self.engine_name!r} {how}", engine=self.engine_name)

    def _lose(self, error: ShmringError) -> None:
        """Ends the session: whatever waits in it fails with this error."""
        if self.error is not None:
            return
        self.error = ClosedError(_CLOSED) if self._closing else error
        self.end.is_open = False
        self._watch.close()
        self.loop.remove_reader(self._regions.bell)
        self._regions.close()
        self.link.abort()
        if self._expiry is not None:
            self._expiry.cancel()
        if self._touching is not None:
            self._touching.cancel()
        for submission in list(self.end.pending.values()):
            self.end.forget(submission.request_id)
            if not submission.ended:
                self.counters.failed += 1
            submission.give_up(self._fresh_error())
        futures: list[asyncio.Future[Any]] = [*self._slot_waiters.values(), *self._calls.values(), *self.kept.lose()]
        for _ in self._calls:
            self._calls_in_flight.release()
        self._slot_waiters.clear()
        self._calls.clear()
        for future in futures:
            if not future.done():
                future.set_exception(self._fresh_error())
        self._slab.close()
        self.end.detach()
        if self.device is not None:
            self.device.abandon()
        self._on_lost(self)

    @property
    def is_usable(self) -> bool:
        """Whether this process may use this session now."""
        return self.error is None and not self._closing and not self._origin.forked

    @property
    def regions(self) -> Regions:
        """Of what callers view."""
        return self._regions

    @property
    def mapping(self) -> Mapping:
        """The slab's."""
        return self._slab.mapping

    def next_id(self) -> int:
        """Returns a number that nothing else of this session has."""
        return next(self._ids)

    def check_alive(self) -> None:
        """Raises unless this process may use this session now.

        Raises:
            ClosedError: it was closed, or belongs to the process that forked this one.
            EngineDeadError: its engine has gone.
        """
        if self._origin.forked:
            raise ClosedError(f"this client belongs to process {self._origin.pid}, which forked this one; connect again here")
        if self.error is not None:
            raise self._fresh_error()
        if self._closing:
            raise ClosedError(_CLOSED)

    def _fresh_error(self) -> ShmringError:
        assert self.error is not None
        return fresh(self.error)

    # -- leases and slots ------------------------------------------------------------------------------------------------

    def _add_lease(self, grant: LeaseGrant) -> None:
        """Takes a lease into the book of its memory."""
        device = self.device if grant.offset >= self.welcome.slab_nbytes else None
        effects = (self.book if device is None else device.book).granted(grant, self.loop.time())
        if self.config.map_leased_only and device is None:
            self._slab.protect(grant.offset, grant.nbytes, readable=True, writable=True)
            self._lease_ranges[grant.lease_id] = (grant.offset, grant.nbytes)
        self.carry_out(effects)

    async def _touch_slab(self) -> None:
        """Maps the slab's pages, off the loop and beside whatever else goes on, so that no copy pays for their first use.

        All of them, whoever leases them now: so this process's resident memory is the same from here on.
        """
        for offset in range(0, self._slab.nbytes, _TOUCHED_AT_ONCE_NBYTES):
            nbytes = min(_TOUCHED_AT_ONCE_NBYTES, self._slab.nbytes - offset)
            try:
                await self._copier.run(functools.partial(self._slab.prefault, offset, nbytes))
            except SlabError as error:
                logger.warning("the slab's pages are mapped on first use, which is slower: %s", error)
                return

    async def prefaulted(self) -> None:
        """Waits until that is over, however it ended."""
        if self._touching is not None:
            await asyncio.wait([self._touching])

    def carry_out(self, effects: list[ClientEffect]) -> None:
        if self.error is not None:
            return  # the slab is unmapped, and whoever waited has been told
        for effect in effects:  # which grow: what follows from one comes after the others, as it did in the book
            if isinstance(effect, Acquired):
                future = self._slot_waiters.pop(effect.ticket)
                if not future.done():
                    future.set_result(effect.slot)
                else:  # its waiter was cancelled in this very iteration, and has not run yet
                    effects += self._book_of(effect.slot).give_up(effect.slot, self.loop.time())
                continue
            if self.config.map_leased_only and isinstance(effect.message, LeaseReturn):
                for lease_id in self._lease_ranges.keys() & set(effect.message.lease_ids):  # none in device memory
                    self._protect(*self._lease_ranges.pop(lease_id))
            self._send_effect(effect.message)
        self._plan_expiry()

    def _protect(self, offset: int, nbytes: int) -> None:
        """A lease goes back, and must not be written from now on; but another may be where a slot of it was kept."""
        self._slab.protect(offset, nbytes, readable=True, writable=False)
        for start, length in self._lease_ranges.values():
            if start < offset + nbytes and offset < start + length:
                self._slab.protect(start, length, readable=True, writable=True)

    def _send_effect(self, message: LeaseRequest | LeaseReturn) -> None:
        if isinstance(message, LeaseReturn):
            self.link.send_listed(LeaseReturn, message.lease_ids)
        else:
            self.link.send(message)

    def _plan_expiry(self) -> None:
        if self._expiry is not None:
            return
        when = self.book.next_expiry()
        if self.device is not None and (first := self.device.book.next_expiry()) is not None:
            when = first if when is None else min(when, first)
        if when is not None:
            self._expiry = self.loop.call_at(when, self._expire)
            self.end.expects_expiry = True

    def _expire(self) -> None:
        self._expiry = None
        self.end.expects_expiry = False
        self.carry_out(self.book.expire(self.loop.time()))
        if self.device is not None:
            self.carry_out(self.device.book.expire(self.loop.time()))

    def _book_of(self, record: ClientSlotRecord) -> ClientBook:
        return self.device.book if self.device is not None and self.device.has(record) else self.book

    async def acquire(self, nbytes: int, *, held: bool, book: ClientBook | None = None) -> ClientSlotRecord:
        """Waits in line for a slot, in host memory or that of another book."""
        book = self.book if book is None else book
        slot = book.acquire(nbytes, held=held)
        if slot is not None:
            return slot
        ticket = next(self._ids)
        future: asyncio.Future[ClientSlotRecord] = self.loop.create_future()
        self._slot_waiters[ticket] = future
        warning = self.loop.call_later(_DRAIN_WARNING_S, self._warn_of_draining, book, nbytes)
        self.carry_out(book.queue(ticket, nbytes, held=held))
        try:
            slot = await future
            self.check_alive()  # it may have been lost between the grant and now
            return slot
        except BaseException:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.carry_out(book.give_up(future.result(), self.loop.time()))
            elif self._slot_waiters.pop(ticket, None) is not None:
                self.carry_out(book.cancel(ticket))
            raise
        finally:
            warning.cancel()
            del future  # it holds its error, whose traceback holds this frame and its callers', and they the payload

    def _warn_of_draining(self, book: ClientBook, nbytes: int) -> None:
        if book.draining_nbytes():
            logger.warning(
                "waiting for %d bytes while %d bytes of slots that were left are kept by living views; del them, or leave "
                "the function that holds them",
                nbytes,
                book.draining_nbytes(),
            )

    def acquire_nowait(self, nbytes: int, *, held: bool, ask: bool = True, book: ClientBook | None = None) -> ClientSlotRecord:
        """Takes a slot if none has to be waited for; else asks for a lease in passing, if it may, and raises WouldBlock."""
        book = self.book if book is None else book
        slot = book.acquire(nbytes, held=held)
        if slot is None:
            raise self._no_space(nbytes, book, ask=ask)
        return slot

    def _no_space(self, nbytes: int, book: ClientBook, *, ask: bool) -> WouldBlock:
        """Returns the error for a caller that does not wait, and asks for a lease, so that its next try may succeed."""
        if ask:
            self.carry_out(book.prefetch(nbytes))
        return WouldBlock(f"no {nbytes} bytes are free in this client's leases; await the waiting twin of this call")

    def hold(self, record: ClientSlotRecord, *, drain: bool) -> Slot:
        """Hands an acquired slot to the caller."""
        slot: Slot
        if self.device is None or not self.device.has(record):
            slot = self.end.hold(record, drain)
            return slot
        try:
            memory = self.device.anchor(record)
        except BaseException:  # CUDA has to make the view
            self.carry_out(self._book_of(record).give_up(record, self.loop.time()))
            raise
        slot = Slot(self.end, record, memory.data_ptr(), drain)
        slot.device_memory = memory
        self.end.held.hold(record, memory.data_ptr(), record.nbytes)
        return slot

    def leave_device_slot(self, record: ClientSlotRecord, drain: bool) -> None:
        """For the end: the caller leaves a slot in device memory."""
        if self.error is not None:
            return
        assert self.device is not None
        if self.config.debug and self.device.is_viewed(record):
            self.warn_of_views(record)
        self.carry_out(self.device.leave(record, drain=drain, now=self.loop.time()))

    def can_keep(self, record: ClientSlotRecord) -> bool:
        """Whether the engine can keep a slot: one in host memory that it does not keep already."""
        return record.lease is not None and record.offset < self.welcome.slab_nbytes

    def kept_slot_left(self, record: ClientSlotRecord) -> None:
        """For the end: the caller has left a slot that the engine keeps."""
        if self.error is None:
            self.kept.slot_left(record)

    def slot_is_viewed(self, record: ClientSlotRecord) -> None:
        """For the end: a slot was left that is kept until the last view of it has died."""
        self._viewed[id(record)] = record

    def warn_of_views(self, record: ClientSlotRecord) -> None:
        """For the end, in debug mode: a slot is left while views of it live."""
        logger.warning("a slot of %d bytes was left with living views", record.nbytes, stack_info=True)

    def _wake_for_deaths(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left who could reuse anything
            self.loop.call_soon_threadsafe(self._collect_deaths)

    def _collect_deaths(self) -> None:
        if self.error is not None:
            if self.device is not None:
                self.device.close_soon()
            return
        if self.device is not None:
            self.carry_out(self.device.collect(self.loop.time()))
        replies = []
        for kind, key in self._regions.collect():
            if kind == _OF_SLOTS:
                record = self._viewed.pop(key)
                self.carry_out(self.book.last_view_gone(record, self.loop.time()))
                if record.lease is None:
                    self.kept.slot_views_gone(record)
            elif kind == _OF_KEPT:
                self.kept.views_gone(key)
            else:
                replies.append(key)
        self.release_replies(replies)

    # -- device memory -----------------------------------------------------------------------------------------------------

    async def open_device(self) -> DeviceSlots:
        """Attaches to the engine's device slab, once.

        Raises:
            CudaError: this process can't have it. The next call tries again.
        """
        if self.device is not None:
            return self.device
        opening = self._opening_device
        if opening is None:
            opening = self._opening_device = self.loop.create_task(self._attach_device())
            opening.add_done_callback(self._device_opened)
        try:
            device = await asyncio.shield(opening)
        except CudaError as error:
            raise fresh(error) from None  # others may be waiting for the same
        self.check_alive()
        return device

    async def _attach_device(self) -> DeviceSlots:
        handle = self.welcome.device
        assert handle is not None
        slab = await self._copier.run(functools.partial(DeviceSlab.attach, self._cuda, self._device_memory, handle))
        device = DeviceSlots(
            self._cuda,
            slab,
            self.welcome,
            lease_nbytes=int(self.config.lease_nbytes),
            lease_idle_s=self.config.lease_idle_s,
            wake=self._wake_for_deaths,
        )
        self.device = device
        self.end.has_device = True
        if self.error is not None:  # lost meanwhile
            device.abandon()
        return device

    def _device_opened(self, opening: asyncio.Task[DeviceSlots]) -> None:
        self._opening_device = None
        if not opening.cancelled():
            opening.exception()  # retrieved, though everybody who waited for it may have gone

    # -- requests ----------------------------------------------------------------------------------------------------------

    async def submit(self, payload: object, name: str) -> Submission:
        """Packs and sends a payload, waiting for space, for a request's turn, and for an engine that reads."""
        # Of now: while this waits, another task may make another stream the current one.
        stream = self.device.current_stream() if self.device is not None else None
        self.link.poll()  # what the engine has released meanwhile may be used again
        if self._copier.copied_in_turn:
            await asyncio.sleep(0)  # the turn of whoever else is in this loop
        if not self.end.begin():
            await self._turn()
        try:
            while True:
                self.check_alive()
                packed, in_place = self.end.pack(payload)
                submission = self._send_now(packed, in_place, name, stream, self._copier.at_once_nbytes)
                if submission is None:
                    submission = await self._send_in_turn(packed, in_place, name, stream)
                if submission is not None:
                    return submission
        except BaseException:
            self.end.leave()
            raise

    async def _turn(self) -> None:
        """Waits until this request may be in flight, which it then is."""
        turn = self.loop.create_future()
        self._turns.append(turn)
        self.end.crowded = True
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.end.leave()  # its turn came as it was cancelled: the next one's
            raise

    def request_left(self) -> None:
        """For the end: fewer requests are in flight, and others wait for that."""
        while self._turns:
            turn = self._turns.popleft()
            if not turn.done():  # else it was cancelled
                self.end.pass_on()
                turn.set_result(None)
                break
        self.end.crowded = bool(self._turns)

    def _send_now(
        self, packed: Packed, in_place: list[ClientSlotRecord], name: str, stream: Stream | None, copy_limit_nbytes: float
    ) -> Submission | None:
        """Sends what was just packed; None if something has to be waited for: the engine, space, or a long copy."""
        if not self.link.can_write or packed.slot_nbytes > copy_limit_nbytes:
            return None
        self._copier.count_in_turn(packed.slot_nbytes)
        sent: Submission | None
        if self.device is None:
            sent = self.end.send_now(packed, in_place, name, b"")
            return sent
        fence = self.device.record_fence(in_place, stream)
        return self._fenced(fence, in_place, self.end.send_now(packed, in_place, name, _handle(fence)))

    def _fenced(self, fence: Fence | None, in_place: list[ClientSlotRecord], sent: Submission | None) -> Submission | None:
        """Keeps the fence of a submission until its slots in device memory have come back."""
        if self.device is not None and fence is not None:
            if sent is None:
                self.device.unused(fence)
            else:
                self.device.submitted([record.generation for record in in_place if self.device.has(record)], fence)
        return sent

    async def _send_in_turn(
        self, packed: Packed, in_place: list[ClientSlotRecord], name: str, stream: Stream | None
    ) -> Submission | None:
        """Sends a payload when its copy's turn has come; None if a slot that it lies in has changed hands while we waited.

        The slot is taken after that, so that it is the one that was released last, which is still in the cache.
        """
        await self._copier.turn(packed.slot_nbytes)
        self.check_alive()
        submission = self._send_now(packed, in_place, name, stream, self._copier.offload_nbytes)
        if submission is None:
            submission = await self._send_when_possible(packed, in_place, name, stream)
        return submission

    async def _send_when_possible(
        self,
        packed: Packed,
        in_place: list[ClientSlotRecord],
        name: str,
        stream: Stream | None,
        slot: ClientSlotRecord | None = None,
    ) -> Submission | None:
        """Sends a payload; None if a slot that it lies in has changed hands while we waited for space.

        Args:
            slot: to copy it to, if there is one already.
        """
        if packed.slot_nbytes and slot is None:
            slot = await self.acquire(packed.slot_nbytes, held=False)
        submission: Submission | None = None
        try:
            if slot is not None:
                await self.copy(packed, slot)
            while submission is None and all(record.is_submittable() for record in in_place):
                await self.writable()
                self.check_alive()
                fence = self.device.record_fence(in_place, stream) if self.device is not None else None
                sent = self.end.send(packed, in_place, slot, name, _handle(fence))
                submission = self._fenced(fence, in_place, sent)
                if submission is None and self.link.can_write:
                    self.link.expect_space()
            return submission
        finally:
            if slot is not None and submission is None:
                self.give_up(slot)

    def give_up(self, slot: ClientSlotRecord) -> None:
        """Frees a slot that was taken for a payload which is not sent."""
        self.carry_out(self.book.give_up(slot, self.loop.time()))

    async def copy(self, packed: Packed, slot: ClientSlotRecord) -> None:
        """Copies a payload into a slot; for :meth:`close` to know of."""
        copying = self.loop.create_future()
        self._copies[copying] = slot
        try:
            await self._copier.copy(packed, self._slab.mapping, self.end.content_address(slot))
        finally:
            del self._copies[copying]
            copying.set_result(None)

    async def writable(self) -> None:
        """Waits while the engine reads more slowly than it is written to."""
        with contextlib.suppress(PeerLostError):  # the session says why
            await self.link.drain()

    def submit_nowait(self, payload: object, name: str, *, ask: bool) -> Submission:
        """Sends a payload if nothing has to be waited for; the copy is made in the loop."""
        self._begin_nowait()
        try:
            return self._send_nowait(*self.end.pack(payload), name, ask=ask)
        except BaseException:
            self.end.leave()
            raise

    async def submit_unless_full(self, payload: object, name: str, *, ask: bool) -> Submission:
        """As :meth:`submit_nowait`, for a loop that several threads wait for: a long copy is made on a thread."""
        self._begin_nowait()
        try:
            packed, in_place = self.end.pack(payload)
            if packed.slot_nbytes <= self._copier.offload_nbytes:
                return self._send_nowait(packed, in_place, name, ask=ask)
            slot = self.acquire_nowait(packed.slot_nbytes, held=False, ask=ask)
            submission = await self._send_when_possible(packed, in_place, name, None, slot)
            if submission is None:
                raise WouldBlock("a slot that the payload lies in was submitted by somebody else while the rest was copied")
            return submission
        except BaseException:
            self.end.leave()
            raise

    def find_held(self, payload: object) -> tuple[bool, bool]:
        """Returns whether tensors of a payload lie in slots that callers hold here, and whether some of those are on a GPU.

        Raises:
            TypeError, CapacityError: the payload can't be sent.
        """
        if not len(self.end.held):
            return False, False
        _, records = self.end.pack(payload)
        return bool(records), self.device is not None and any(map(self.device.has, records))

    def _begin_nowait(self) -> None:
        """A request is in flight from here on; raises if it would have to wait for that, or for the engine."""
        self.check_alive()
        self.link.poll()
        self.check_alive()  # what came may have been its end
        if not self.end.begin():
            raise WouldBlock(f"{self.welcome.max_inflight} requests are in flight, the engine takes no more (max_inflight)")
        if not self.link.can_write:
            self.end.leave()
            raise WouldBlock(_READS_SLOWLY)

    def _send_nowait(self, packed: Packed, in_place: list[ClientSlotRecord], name: str, *, ask: bool) -> Submission:
        submission = self._send_now(packed, in_place, name, None, math.inf)
        if submission is None and self.end.found_full:
            self.link.expect_space()
            raise WouldBlock(_READS_SLOWLY)
        if submission is None:
            raise self._no_space(packed.slot_nbytes, self.book, ask=ask)
        return submission

    def why_not_sent(self) -> str:
        """Says what somebody waits for who has a payload to send, or wants a slot."""
        if self.book.waiting or (self.device is not None and self.device.book.waiting):
            book = self.book
            reason = f"space: {book.free_nbytes} of the {book.leased_nbytes} bytes that this client has leased are free"
            kept_nbytes = book.draining_nbytes()
            if kept_nbytes:
                reason += f", {kept_nbytes} bytes of slots that were left are kept by living views of them"
            if self.end.held:
                reason += f", and callers hold {len(self.end.held)} slots"
            return f"{reason}; the engine leases out what no other client uses"
        if self._turns:
            return f"its turn: {self.end.in_flight} requests are in flight, and the engine takes no more (max_inflight)"
        if not self.link.can_write:
            return f"room in the message ring: {_READS_SLOWLY}"
        return "a copy of its tensors, which waits behind others"

    def why_no_reply(self) -> str:
        """Says what somebody waits for whose request was sent."""
        held = self.reply_slots_held
        reason = f"the engine's reply; {self.end.in_flight} requests of this client are in flight"
        return reason + (f", and views of {held} earlier replies are alive, which keep their space" if held else "")

    def submit_on_device(self, record: ClientSlotRecord) -> int:
        """For the end: hands a slot in device memory over, and returns its generation."""
        assert self.device is not None
        return self.device.book.submit(record, self.book)

    def abort(self, submission: SubmissionEnd, error: Exception) -> None:
        """Gives a request up: its caller gets ``error``, the engine is told, its slots come back when it releases them."""
        if submission.ended:
            return
        submission.give_up(error)
        self.counters.aborted += 1
        if submission.request_id in self.end.pending:
            self.link.send(Abort(submission.request_id))

    def _request_failed(self, request_id: int, failure: Failed) -> None:
        submission = self.end.forget(request_id)
        if submission.ended:
            return  # aborted here before its end came
        if failure.kind == "aborted":
            self.counters.aborted += 1
            name = submission.name or request_id
            submission.give_up(AbortedError(f"request {request_id} was aborted", request_id=name))
        else:
            self.counters.failed += 1
            is_timeout = failure.kind == "timed_out"
            submission.give_up(TimeoutError(failure.message) if is_timeout else RemoteError(failure.type_name, failure.message))

    # -- replies -------------------------------------------------------------------------------------------------------------

    def release_replies(self, generations: Sequence[int]) -> None:
        """Gives reply slots back that nobody views."""
        if generations and self.error is None:
            self.link.send_listed(ReplyRelease, generations)

    @property
    def reply_slots_held(self) -> int:
        """Reply slots that living views keep."""
        return sum(kind == _OF_REPLIES for kind, _ in self._regions.living())

    # -- calls -----------------------------------------------------------------------------------------------------------------

    async def call(self, method: str, arguments: tuple[object, ...]) -> Any:
        """Calls a method of the engine and waits for its result."""
        encoded = msgspec.msgpack.encode(arguments)
        capacity = self.welcome.max_record_nbytes - _CALL_NBYTES
        if len(encoded) > capacity:
            raise CapacityError(
                f"the arguments of {method} take {len(encoded)} bytes, and have to fit a message of "
                f"{self.welcome.max_record_nbytes}",
                needed=len(encoded),
                capacity=capacity,
            )
        await self._calls_in_flight.acquire()  # until the engine has answered, whether or not somebody still waits for it
        try:
            await self.writable()
            self.check_alive()
        except BaseException:
            self._calls_in_flight.release()
            raise
        call_id = next(self._ids)
        future = self._calls[call_id] = self.loop.create_future()
        self.link.send(Call(call_id, method, encoded))
        try:
            return msgspec.msgpack.decode(await future)
        finally:
            del future  # it holds its error, whose traceback holds this frame

    def _call_ended(self, result: CallResult) -> None:
        future = self._calls.pop(result.call_id, None)
        if future is None:
            raise RemoteProtocolError(f"call {result.call_id} ended, which is not in flight")
        self._calls_in_flight.release()
        if future.done():
            return  # its caller stopped waiting
        if result.error is not None:
            future.set_exception(RemoteError(*result.error))
        else:
            future.set_result(result.result)

    # -- the end ---------------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Says goodbye: what nobody in this process uses any more goes back at once."""
        if self.error is not None:
            return
        self._closing = True
        self.end.is_open = False
        for submission in list(self.end.pending.values()):
            self.abort(submission, ClosedError(_CLOSED))
        maps_device_slab = self.device is not None or self._opening_device is not None
        try:
            try:
                if self._copies:  # whoever waits for one learns that this is closed, and gives its slot up
                    await asyncio.wait(self._copies, timeout=_GOODBYE_TIMEOUT_S)
                if self.welcome.device is not None and self.error is None:
                    maps_device_slab = await self._leave_device()
            finally:  # also when this is cancelled
                if self.error is None:  # else it was lost meanwhile
                    self._say_goodbye(maps_device_slab)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_GOODBYE_TIMEOUT_S):
                    await asyncio.shield(self._ended)
        finally:
            self._lose(ClosedError(_CLOSED))

    def _say_goodbye(self, maps_device_slab: bool) -> None:
        for record in (*self.end.held, *self._copies.values()):
            record.viewed = True  # its caller has not left it, or a thread not ended, and may still write
        kept = self.book.leases_in_use() + (self.device.book.leases_in_use() if self.device is not None else ())
        replies = [generation for kind, generation in self._regions.living() if kind == _OF_REPLIES]
        for lease_ids in self.link.split(kept):
            self.link.send(Goodbye(lease_ids, more=True))
        for generations in self.link.split(replies):
            self.link.send(Goodbye((), generations, more=True))
        for generations in self.link.split(self.kept.in_use()):
            self.link.send(Goodbye((), (), more=True, pinned_generations=generations))
        self.link.send(Goodbye(maps_device_slab=maps_device_slab))
        self.link.close()

    async def _leave_device(self) -> bool:
        """Unmaps the device slab when the GPU is done with what this process queued; returns whether it is still mapped."""
        if self._opening_device is not None:
            await asyncio.wait([self._opening_device])
        if self.device is None:
            return False
        is_unmapped = await uninterrupted(self.loop.create_task(self.device.close()))
        self._collect_deaths()
        return not is_unmapped


def _map(engine: AttachedEngine) -> tuple[Slab, Sequence[RingMemory], LoadPage]:
    """Maps what an engine passed, and closes the descriptors."""
    welcome = engine.welcome
    try:
        try:
            record_nbytes = largest_record_nbytes(welcome.message_ring_nbytes)
            if welcome.max_record_nbytes != record_nbytes or welcome.inline_nbytes > record_nbytes // 2:
                raise RemoteProtocolError("the engine's limits of messages do not fit the size of its message rings")
            rings = map_rings(engine.ring_fds, welcome.message_ring_nbytes)
            load = map_load_page(engine.load_fd)
        except BaseException:
            for fd in engine.slab_fds:
                os.close(fd)
            raise
        reply_nbytes = welcome.slab_nbytes - welcome.block_nbytes - welcome.leasable_nbytes
        return Slab.attach(engine.slab_fds, welcome.slab_nbytes, reply_nbytes, welcome.epoch), rings, load
    finally:
        for fd in (*engine.ring_fds, engine.load_fd):
            os.close(fd)


def _handle(fence: Fence | None) -> bytes:
    return b"" if fence is None else fence.handle
