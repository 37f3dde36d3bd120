"""A frontend's connection to one life of an engine: its socket, its mapping of the slab, its beginning and its end.

Theory of operation: :class:`Session` is the asyncio shell around the :class:`~shmring.core.compiled.ClientEnd`, as the ring
is around the engine's end. It ends for good when the engine's connection or process ends; a client that reconnects
makes a new one. Then all calls that wait in it fail with the reason, and its slots are dead. Its parts do the work in between:
slots in each memory (``memory/slots.py``), payloads that wait to be sent (``sending.py``), calls, kept content. Each part is
given the objects that it uses, and not the session.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from shmring.client.calls import CallsInFlight
from shmring.client.counters import ClientCounters
from shmring.client.kept import KeptContents
from shmring.client.life import SessionLife
from shmring.client.sending import Sending
from shmring.client.slot import DeviceSlot, Slot
from shmring.client.submission import Submission
from shmring.config import ClientConfig
from shmring.core.compiled import (
    BaseSubmission,
    ClientEnd,
    ClientSlotRecord,
    LoadPage,
    Mapping,
    Packed,
    Regions,
    RingMemory,
)
from shmring.core.loggers import logger_of
from shmring.core.messages import (
    PROTOCOL_VERSION,
    Abort,
    CallResult,
    Failed,
    Found,
    Goodbye,
    Hello,
    LeaseGrant,
    LeaseRecall,
    NotKept,
    Refused,
    Release,
    ReplyRead,
    ReplyRelease,
    Welcome,
    decode_engine_message,
)
from shmring.core.printable import printable, printable_lines
from shmring.core.welcome import check_welcome
from shmring.errors import (
    AbortedError,
    ClosedError,
    EngineDeadError,
    RemoteError,
    RemoteProtocolError,
    ShmringError,
    SlabError,
)
from shmring.gpu.behind import Behind
from shmring.gpu.cuda import Cuda
from shmring.gpu.device import DeviceMemory
from shmring.gpu.device_slots import DeviceSlots
from shmring.memory.copier import Copier
from shmring.memory.copying import cache_nbytes
from shmring.memory.living import Lent, report
from shmring.memory.slab import Slab
from shmring.memory.slots import HostSlots, Slots
from shmring.memory.tensors import make_decoder, make_packer, slot_dtypes
from shmring.memory.views import TENSOR_MAKER
from shmring.transport.endpoint import AttachedEngine, attach_engine, give_up
from shmring.transport.link import Link
from shmring.transport.liveness import ProcessWatch
from shmring.transport.load import map_load_page
from shmring.transport.loops import poller_of
from shmring.transport.rings import map_rings

__all__ = ["Session"]

logger = logger_of("shmring.client")

_MAX_BACKLOG_NBYTES = 16 << 20  # an abort for each request, and ids of leases and replies, are far less
_TOUCHED_AT_ONCE_NBYTES = 64 << 20  # some 15 ms of a copying thread's time
_GOODBYE_TIMEOUT_S = 1.0  # for the engine to read our last messages
_UNREAD_S = 0.25  # after a reply that lies in a slot came, and from then on as long as there are any
_OF_SLOTS, _OF_REPLIES, _OF_KEPT, _OF_GPU = 0, 1, 2, 3  # the kind of a region


class Session:
    """See the head of this file; the :class:`~shmring.core.shells.ClientShell` of its end. Made by :meth:`open`.

    Attributes:
        life: of the engine.
        home, loop, config, engine_name, welcome: those of ``life``.
        load: the engine's published load.
    """

    is_far = False
    decoder = staticmethod(make_decoder)  # for the end, which keeps the decoders that it has asked for

    def __init__(
        self,
        life: SessionLife,
        copier: Copier,
        cuda: Cuda,
        device_memory: DeviceMemory,
        connected: socket.socket,
        slab: Slab,
        regions: Regions,
        rings: Sequence[RingMemory],
        load: LoadPage,
        watch: ProcessWatch,
        on_lost: Callable[[Session], object],
    ) -> None:
        self.life = life
        self.home, self.loop = life.home, life.loop
        self.config = config = life.config
        self.engine_name = life.engine_name
        self.welcome = welcome = life.welcome
        self.load = load
        self._copier = copier
        self._slab = slab
        # By _OF_SLOTS and the id of a record, by _OF_REPLIES or _OF_KEPT and a generation, or by _OF_GPU and a number.
        self._regions = regions
        self._on_lost = on_lost
        self._touching: asyncio.Task[None] | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._ended = self.loop.create_future()
        from_engine, to_engine = rings
        self.link: Link = Link(
            self,
            connected,
            from_engine,
            to_engine,
            poller_of(self.loop),
            max_backlog_nbytes=_MAX_BACKLOG_NBYTES,
            busy_poll_s=config.busy_poll_s,
        )
        self.host_slots: HostSlots = HostSlots(self, slab)
        self.device_slots: DeviceSlots = DeviceSlots(self, life.engine_name, cuda, device_memory, copier, DeviceSlot)
        self.slots: tuple[Slots, ...] = (self.host_slots, self.device_slots)
        self.end: ClientEnd = ClientEnd(
            self,
            self.host_slots.book,
            regions,
            slab.mapping,
            make_packer(welcome.max_tensors, welcome.max_payload_nbytes, welcome.max_values),
            self.link.writer,
            Submission,
            Slot,
            TENSOR_MAKER,
            slot_dtypes(),
            self.loop.time,
            epoch=welcome.epoch,
            reply_key=_OF_REPLIES,
            max_tensors=welcome.max_tensors,
            max_values=welcome.max_values,
            inline_nbytes=min(int(config.inline_nbytes), welcome.inline_nbytes),
            max_inflight=welcome.max_inflight,
            max_reply_inline_nbytes=welcome.inline_nbytes,
            max_payload_nbytes=welcome.max_payload_nbytes,
            slot_key=_OF_SLOTS,
            debug=config.debug,
            load=load,
            cache_nbytes=cache_nbytes(),
        )
        self.end.reader = self.link.reader
        self.end.device_slots = self.device_slots
        self.handle_record = self.end
        self.sending = Sending(
            life, self.end, self.link, self.host_slots, self.device_slots, copier, slab, lambda: len(self.kept)
        )
        self.calls = CallsInFlight(life, self.link, self.sending)
        behind = Behind(cuda, regions, _OF_GPU, self.loop)
        self.kept: KeptContents = KeptContents(
            life, self.end, self.link, self.host_slots, self.sending, slab, load, behind, _OF_KEPT
        )
        # What a shell has, and other objects do.
        self.check_alive, self.check_readable = life.check_alive, life.check_readable
        self.carry_out, self.give_up = self.host_slots.carry_out, self.host_slots.give_up
        self.slot_is_viewed, self.flight_ended = self.host_slots.left_viewed, self.sending.flight_ended
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
            EngineDeadError: no engine listens there.
            RemoteProtocolError: the engine refuses this client.
            SlabError: its slab can't be mapped.
        """
        engine_uids = config.engine_uids if config.engine_uids is not None else frozenset({os.getuid()})
        engine = await attach_engine(path, Hello(PROTOCOL_VERSION, int(config.lease_nbytes), name), engine_uids)
        try:
            life = SessionLife(path.stem, engine.welcome, config, counters)
            session = cls._attach(life, engine, copier, cuda, device_memory, on_lost)
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
        life: SessionLife,
        engine: AttachedEngine,
        copier: Copier,
        cuda: Cuda,
        device_memory: DeviceMemory,
        on_lost: Callable[[Session], object],
    ) -> Session:
        """Takes everything but the socket over, and the socket as well if this succeeds."""
        with contextlib.ExitStack() as undo:
            watch = ProcessWatch(life.loop, engine.pidfd, lambda: session._engine_died())
            undo.callback(watch.close)
            slab, rings, load = _map(engine)
            undo.callback(slab.close)
            regions = Regions()
            undo.callback(regions.close)
            session = cls(life, copier, cuda, device_memory, engine.socket, slab, regions, rings, load, watch, on_lost)
            undo.pop_all()
        try:
            if life.config.map_leased_only:
                slab.protect(0, engine.welcome.slab_nbytes, readable=True, writable=False)
            if engine.welcome.base_lease is not None:
                session._granted(engine.welcome.base_lease)
            session.link.start()
        except BaseException:
            give_up(engine.socket)
            session._lose(ClosedError("this client did not attach"))
            raise
        return session

    # -- what the connection reports -----------------------------------------------------------------------------------

    def handle_message(self, record: bytes) -> None:
        """Handles all messages but replies and the ends of finished requests."""
        message = decode_engine_message(record)
        match message:
            case Failed(request_id):
                self._request_failed(request_id, message)
            case Release(generations):
                self.end.take_back(generations)
            case LeaseGrant():
                self._granted(message)
            case LeaseRecall(lease_ids):
                for slots in self.slots:
                    slots.recalled(lease_ids)
            case Found() | NotKept():
                self.kept.answered(message)
            case CallResult():
                self.calls.ended(message)
            case Refused(reason):
                self._lose(self._dead(f"ended the connection: {printable(reason)}"))
            case Welcome():
                raise RemoteProtocolError("Welcome was sent a second time")

    def peer_gave_up(self) -> None:
        """An engine does not attach."""
        self.protocol_violated(RemoteProtocolError("what came over the socket is no bell"))

    def protocol_violated(self, error: RemoteProtocolError) -> None:
        """The engine broke the rules: the session treats it as dead."""
        self._lose(self._dead(f"broke the protocol: {error}"))
        logger.error("the engine broke the protocol: %s", error)

    def failed(self, error: BaseException) -> None:
        """This process has failed in the middle of what the engine says, or is to be told: it says goodbye."""
        if self.life.error is not None:
            return
        try:
            self._say_goodbye()
        finally:
            how = f"this client has failed in the middle of a message: {type(error).__name__}: {printable(str(error))}"
            self._lose(self._dead(f"is not attached any more: {how}"))
        logger.error(
            "the connection to %r has ended: this client has failed in the middle of a message",
            self.engine_name,
            exc_info=error,
        )

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
        """Ends the session: all calls that wait in it fail with this error."""
        if self.life.error is not None:
            return
        self.life.error = self.life.home.closed_error() if self.life.home.is_closed else error
        self.end.is_open = False
        self._watch.close()
        self.loop.remove_reader(self._regions.bell)
        self._regions.close()
        self.link.abort()
        waiting = [*self.sending.lose(), *(future for slots in self.slots for future in slots.lose())]
        if self._unread is not None:
            self._unread.cancel()
        for submission in list(self.end.pending.values()):
            self.end.forget(submission.request_id)
            if not submission.ended:
                self.life.counters.failed += 1
            submission._give_up(self.life.fresh_error())
        for future in (*waiting, *self.calls.lose(), *self.kept.lose()):
            if not future.done():
                future.set_exception(self.life.fresh_error())
        self._slab.close()
        self.end.detach()
        self._on_lost(self)

    @property
    def error(self) -> ShmringError | None:
        """Why this has ended; None: it has not."""
        return self.life.error

    @property
    def mapping(self) -> Mapping:
        """The slab's."""
        return self._slab.mapping

    # -- slots ---------------------------------------------------------------------------------------------------------------

    def _granted(self, grant: LeaseGrant) -> None:
        slots = self.device_slots if grant.offset >= self.welcome.slab_nbytes else self.host_slots
        slots.granted(grant)

    async def _touch_slab(self) -> None:
        """Maps the slab's pages on a thread, so that no copy pays for their first use.

        It maps all of them, also those that others lease now: so this process's resident memory stays the same from here on.
        """
        for offset in range(0, self._slab.nbytes, _TOUCHED_AT_ONCE_NBYTES):
            if not self.life.is_usable:
                return
            nbytes = min(_TOUCHED_AT_ONCE_NBYTES, self._slab.nbytes - offset)
            try:
                await self._copier.run(functools.partial(self._slab.prefault, offset, nbytes))
            except (SlabError, ClosedError) as error:
                if self.life.is_usable:  # otherwise it was unmapped meanwhile
                    logger.warning("the slab's pages are mapped on first use, which is slower: %s", error)
                return

    async def prefaulted(self) -> None:
        """Waits until that is over."""
        if self._touching is not None:
            await asyncio.wait([self._touching])

    def kept_slot_left(self, record: ClientSlotRecord) -> None:
        """The caller has left a slot that the engine keeps."""
        if self.life.error is None:
            self.kept.slot_left(record)

    def warn_of_views(self, record: ClientSlotRecord) -> None:
        """In debug mode: a slot is left while views of it live."""
        lent = [Lent("slot", self.end.content_address(record), record.nbytes)]
        logger.warning("a slot of %d bytes was left with living views; it was %s", record.nbytes, report(lent))

    def _collect_deaths(self) -> None:
        if self.life.error is not None:
            return
        replies = []
        for kind, key in self._regions.collect():
            if kind == _OF_SLOTS:
                record = self.host_slots.views_gone(key)
                if record.lease is None:
                    self.kept.slot_views_gone(record)
            elif kind == _OF_KEPT:
                self.kept.views_gone(key)
            elif kind == _OF_GPU:
                self.kept.gpu_came(key)
            else:
                replies.append(key)
        self.release_replies(replies)

    def find_held(self, payload: object) -> tuple[Packed, bool] | None:
        """Looks for tensors of a payload in slots that callers hold here.

        Returns:
            If there are some, the payload as it is sent from here, and whether some of those slots are on a GPU.

        Raises:
            TypeError, CapacityError: the payload can't be sent.
        """
        packed = self.end.pack(payload) if len(self.end.held) else None
        return (packed, any(map(self.device_slots.has, packed.slots))) if packed is not None and packed.slots else None

    def why_no_reply(self) -> str:
        """Says for what a sent request is waiting."""
        held = self.reply_slots_held
        unread = self.end.unread_slots
        reason = f"the engine's reply; {self.end.in_flight} requests of this client are in flight"
        if held:
            reason += f", and views of {held} earlier replies are alive, which keep their space"
        if unread:
            reason += f", and {unread} replies were not read, which keep their space"
        return reason

    def abort(self, submission: BaseSubmission, error: Exception) -> None:
        """Aborts a request: its caller gets ``error``, the engine is told, and its slots come back when the engine releases
        them."""
        if submission.ended:
            return
        submission._give_up(error)
        self.life.counters.aborted += 1
        if submission.request_id in self.end.pending:
            self.link.send(Abort(submission.request_id))

    def _request_failed(self, request_id: int, failure: Failed) -> None:
        submission = self.end.forget(request_id)
        if submission.ended:
            return  # aborted here before its end came
        if failure.kind == "aborted":
            self.life.counters.aborted += 1
            name = submission.name or request_id
            submission._give_up(AbortedError(f"request {request_id} was aborted", request_id=name))
        else:
            self.life.counters.failed += 1
            type_name, text = printable(failure.type_name), printable_lines(failure.message)
            submission._give_up(TimeoutError(text) if failure.kind == "timed_out" else RemoteError(type_name, text))

    # -- replies -------------------------------------------------------------------------------------------------------------

    def release_replies(self, generations: Sequence[int]) -> None:
        """Gives reply slots back that have no views."""
        if generations and self.life.error is None:
            self.link.send_listed(ReplyRelease, generations)

    def reply_read(self, request_id: int) -> None:
        """A caller has read a reply that was copied out, and its request has not ended."""
        if self.life.error is None:
            self.link.send(ReplyRead((request_id,)))

    def expect_unread(self) -> None:
        """Replies lie in slots until they are read. What was dropped before that is found a while later."""
        self._unread = self.loop.call_later(_UNREAD_S, self._give_dropped_back)

    def _give_dropped_back(self) -> None:
        if not self.life.is_usable:
            return
        for submission in self.end.dropped():
            self.loop.call_soon(submission._give_back)  # each by itself: where warnings are errors, it raises

    @property
    def reply_slots_held(self) -> int:
        """Reply slots that living views keep."""
        return sum(kind == _OF_REPLIES for kind, _ in self._regions.living())

    # -- the end ---------------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Says goodbye: unused memory goes back at once, the rest when the last of it is left.

        What was handed over is kept before, if the GPU and the engine are in time.
        """
        if self.life.error is not None:
            return
        try:
            try:
                try:
                    if handed_over := self.kept.handed_over():
                        await asyncio.wait(handed_over, timeout=_GOODBYE_TIMEOUT_S)
                finally:
                    self.life.home.is_closed = True
                    self.end.is_open = False
                    for submission in list(self.end.pending.values()):
                        self.abort(submission, self.life.home.closed_error())
                if self.sending.copies:  # waiting callers learn that this is closed, and give their slots up
                    await asyncio.wait(self.sending.copies, timeout=_GOODBYE_TIMEOUT_S)
                if self.life.error is None:
                    await self.device_slots.close()
            finally:  # also when this is cancelled
                if self.life.error is None:  # otherwise it was lost meanwhile
                    self._say_goodbye()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_GOODBYE_TIMEOUT_S):
                    await asyncio.shield(self._ended)
                    await self.prefaulted()
        finally:
            self._lose(self.life.home.closed_error())

    def _say_goodbye(self) -> None:
        for record in (*self.end.held, *self.sending.copies.values()):
            record.viewed = True  # its caller has not left it, or its thread has not ended: they may still write
        kept = [lease_id for slots in self.slots for lease_id in slots.book.leases_in_use()]
        replies = [generation for kind, generation in self._regions.living() if kind == _OF_REPLIES]
        pinned = self.kept.in_use()
        for lease_ids in self.link.split(kept):
            self.link.send(Goodbye(lease_ids, more=True))
        for generations in self.link.split(replies):
            self.link.send(Goodbye((), generations, more=True))
        for generations in self.link.split(pinned):
            self.link.send(Goodbye((), (), more=True, pinned_generations=generations))
        # The named memory may be used as long as the slab is mapped, which may be longer than the loop lives.
        lingers = bool(kept or replies or pinned)
        self.link.send(Goodbye(maps_device_slab=self.device_slots.is_mapped, lingers=lingers))
        self.link.close(self._hand_socket_on if lingers else None)

    def _hand_socket_on(self, connected: socket.socket) -> None:
        self._slab.mapping.end_with(connected.detach())


def _map(engine: AttachedEngine) -> tuple[Slab, Sequence[RingMemory], LoadPage]:
    """Maps the memory that an engine passed, and closes the descriptors."""
    welcome = engine.welcome
    try:
        try:
            check_welcome(welcome)
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
