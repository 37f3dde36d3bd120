"""A frontend's process and its sessions: the real end and book, and around them what ``shmring.client.session`` adds.

The duties of a session are written again here as it has them, for a caller that may be anywhere between two awaits: a
cancelled waiter that has not run yet, a copy under way, a slot that was left with living views. What is not simulated is
what an end can't see: threads, deadlines.

A process can outlive its session, and so can views of its slots: they stay in :attr:`Session.slots` until they die, as
memory that the process may still write.
"""

from __future__ import annotations

import dataclasses
import weakref
from bisect import insort
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shmring.core import client_end
from shmring.core.client_book import ClientBook, ClientSlotRecord
from shmring.core.effects import Acquired, ClientEffect, Send
from shmring.core.geometry import BLOCK_NBYTES, GENERATION_BITS, ClientBookLimits
from shmring.core.mapping import Mapping
from shmring.core.messages import (
    SLOT_HEADER_NBYTES,
    Abort,
    Failed,
    Found,
    Goodbye,
    LeaseGrant,
    LeaseRecall,
    LeaseRequest,
    LeaseReturn,
    NotKept,
    Refused,
    Release,
    ReplyRelease,
    SlotRef,
    decode_engine_message,
    encode_message,
)
from shmring.core.received import PayloadDecoder
from shmring.core.states import ClientSlot
from shmring.core.views import Regions
from shmring.core.wire import Done, Reply, read_record
from shmring.errors import AbortedError
from shmring.memory.tensors import slot_dtypes
from shmring.memory.views import TENSOR_MAKER
from tests.records import submit_of
from tests.simulation import books, ends
from tests.simulation.kept import KeptEnd
from tests.simulation.payloads import (
    DECODER,
    INLINE_NBYTES,
    MAX_PAYLOAD_NBYTES,
    MAX_TENSORS,
    PACKER,
    payload_of,
    require_intact,
)
from tests.simulation.scenario import Action, Forgery, Kind, Scenario, require
from tests.simulation.wire import Wire

__all__ = ["IDLE_TICKS", "HeldReply", "Process", "Session", "content_nbytes"]

#: After which an empty lease goes back, on the simulation's clock.
IDLE_TICKS = 1.0

_UNSUBMITTED = (ClientSlot.WRITING, ClientSlot.CACHED)
_NO_LEASE = 2**40  # no engine lends so many
_NO_REPLY = 2**40  # nor sends so many replies
_OF_SLOTS, _OF_REPLIES = 0, 1  # the first number of the keys of regions


def content_nbytes(blocks: int) -> int:
    """Returns what a slot of so many blocks can hold behind its header."""
    return blocks * BLOCK_NBYTES - SLOT_HEADER_NBYTES


@dataclasses.dataclass(slots=True, eq=False)
class Waiter:
    """A task that waits for a slot: to hold it, or to copy a payload into it."""

    is_held: bool
    blocks: int
    cancelled: bool = False  # but it has not run since


@dataclasses.dataclass(slots=True, eq=False)
class HeldReply:
    """A reply in a slot that this process may read; in blocks of the slab."""

    generation: int
    start: int
    blocks: int
    view: Any


if TYPE_CHECKING:
    _SubmissionEnd = client_end.SubmissionEnd
else:
    _SubmissionEnd = object  # compiled or not: see Session


class Submission(_SubmissionEnd):
    """A request in flight."""

    def __del__(self) -> None:
        """Whole states are dropped here: nothing is to come back."""


class _CompiledSubmission(Submission, client_end.SubmissionEnd):
    pass


class _ModelSubmission(Submission, ends.SubmissionEnd):  # type: ignore[misc, override] # to types, a submission is of the compiled end
    pass


class Session:
    """One connection to one life of an engine."""

    def __init__(self, scenario: Scenario, epoch: int, client_id: int, wire: Wire, slab: Mapping) -> None:
        self.scenario = scenario
        self.epoch = epoch
        self.client_id = client_id
        self.wire = wire
        self.link = wire.towards_engine
        self.slab = slab
        self.regions = Regions()
        chosen = books.chosen
        self.book: ClientBook = chosen.client(
            ClientBookLimits(
                client_id=client_id,
                slab_nbytes=scenario.geometry.slab_nbytes,
                leasable_nbytes=scenario.leasable_blocks * BLOCK_NBYTES,
                max_leases=scenario.max_leases,
                lease_nbytes=scenario.lease_blocks * BLOCK_NBYTES,
                lease_idle_s=IDLE_TICKS,
            )
        )
        self.now = 0.0  # of the event that is happening
        shell = weakref.proxy(self)
        self.end: client_end.ClientEnd = chosen.client_end(
            shell,
            self.book,
            self.regions,
            slab,
            PACKER,
            self.link.writer,
            _CompiledSubmission if chosen.are_ends_compiled else _ModelSubmission,
            client_end.SlotEnd,
            TENSOR_MAKER,
            slot_dtypes(),
            lambda: shell.now,
            epoch=epoch,
            reply_key=_OF_REPLIES,
            max_tensors=MAX_TENSORS,
            inline_nbytes=INLINE_NBYTES,
            max_inflight=scenario.max_inflight,
            max_reply_inline_nbytes=INLINE_NBYTES,
            max_payload_nbytes=MAX_PAYLOAD_NBYTES,
            slot_key=_OF_SLOTS,
            debug=False,
        )
        self.ended = False
        self.waiters: dict[int, Waiter] = {}  # by ticket, in order
        self.slots: list[ClientSlotRecord] = []  # all that are not free; after the end, those that the process can reach
        self.views: list[ClientSlotRecord] = []  # those that were left, and that code can still reach, whatever the book thinks
        self.pending: dict[int, Submission] = self.end.pending  # in flight, whether or not their callers have given them up
        self.replies: list[HeldReply] = []
        self.kept = KeptEnd(self)
        self.next_ticket = 1
        self.next_request = 1
        self.last_token = 0
        self.last_sent: SlotRef | None = None

    # -- what comes ----------------------------------------------------------------------------------------------------------

    def hear(self) -> None:
        """Reads one record of the engine, and takes the reply that it brings."""
        record = self.wire.towards_frontend.take()
        message = read_record(record, MAX_TENSORS, from_engine=True)
        is_answer = isinstance(message, Reply | Done)
        submission = self.pending.get(message.request_id) if isinstance(message, Reply | Done) else None
        self.end.take_record(record)
        self._forget_free()
        if is_answer and submission is not None and submission.has_reply:
            assert isinstance(message, Reply | Done)
            assert message.content is not None
            self._take_reply(submission, message.content.slots)

    def _take_reply(self, submission: Submission, slots: Sequence[SlotRef]) -> None:
        payload = submission.take_reply(DECODER)
        require_intact(payload, submission.request_id)
        for slot, array in zip(slots, payload[1:], strict=True):
            start, blocks = slot.offset // BLOCK_NBYTES, (slot.nbytes + SLOT_HEADER_NBYTES) // BLOCK_NBYTES
            self.replies.append(HeldReply(slot.generation, start, blocks, array))

    # -- for the end ---------------------------------------------------------------------------------------------------------

    def take_message(self, record: bytes) -> None:
        """A message came that is no reply and no end of a request that has finished."""
        match decode_engine_message(record):
            case LeaseGrant() as grant:
                self.carry_out(self.book.granted(grant, self.now))
            case LeaseRecall(lease_ids):
                self.carry_out(self.book.recalled(lease_ids))
            case Release(generations):
                effects, unknown = self.book.released(generations, self.now)
                require(unknown == 0, "the engine released a slot that it did not have")
                self.carry_out(effects)
            case Found() | NotKept() as answer:
                self.kept.contents.answered(answer)
                self._forget_kept()
            case Failed(request_id):
                self.end.forget(request_id).give_up(AbortedError("", request_id=request_id))
            case Refused():
                self.leave_engine()

    def release_replies(self, generations: Sequence[int]) -> None:
        """Reply slots go back."""
        if generations:
            self.link.send(ReplyRelease(tuple(generations)))

    def expect_unread(self) -> None:
        """Replies are taken at once."""

    def decoder(self, reply_type: object) -> PayloadDecoder:
        """Decodes payloads of a type; there is one."""
        return DECODER

    def check_alive(self) -> None:
        """Raises unless the session may be used."""
        require(not self.ended, "a session was used after its end")

    def give_up(self, slot: ClientSlotRecord) -> None:
        """A slot was taken for a payload that is not sent."""
        self.carry_out(self.book.give_up(slot, self.now))

    def carry_out(self, effects: Sequence[ClientEffect]) -> None:
        """Does what the book asks for."""
        refused: list[ClientSlotRecord] = []
        for effect in effects:
            match effect:
                case Send(message):
                    self.send(message)
                case Acquired(ticket, slot):
                    require(ticket == next(iter(self.waiters), None), "a waiter was overtaken")
                    waiter = self.waiters.pop(ticket)
                    if waiter.cancelled:
                        refused.append(slot)
                        self._gives_up(waiter)
                    else:
                        self._take(slot)
        # Only now: an event in the midst of these effects would send its lease request before an older one.
        for slot in refused:
            self.carry_out(self.book.give_up(slot, self.now))
        self._forget_free()

    def _forget_free(self) -> None:
        self.slots = [slot for slot in self.slots if slot.state is not ClientSlot.FREE or slot in self.views]

    def _forget_kept(self) -> None:
        """What the engine keeps, and nobody here has as a slot any more, is content like any other."""
        self.slots = [slot for slot in self.slots if slot.lease is not None or slot.held or slot in self.views]

    def send(self, message: LeaseRequest | LeaseReturn) -> None:
        """Sends what the book asks for; the engine goes by the last request that it reads."""
        if isinstance(message, LeaseRequest):
            require(message.token > self.last_token, "a lease request is sent after a newer one")
            self.last_token = message.token
        self.link.send(message)

    def _take(self, slot: ClientSlotRecord) -> None:
        """A caller has a slot. By address: in which order they were taken makes no difference to anybody."""
        insort(self.slots, slot, key=lambda slot: slot.start)
        if slot.held:
            self.end.held.hold(slot, self.end.content_address(slot), slot.nbytes)

    # -- callers -------------------------------------------------------------------------------------------------------------

    def acquire(self, blocks: int, *, held: bool) -> None:
        """A caller wants a slot, to hold or for a request, and waits in line if there is none."""
        require(held or self.end.begin(), "a request has no turn where fewer than max_inflight are in flight")
        slot = self.book.acquire(content_nbytes(blocks), held=held)
        if slot is not None:
            self._take(slot)
            return
        ticket, self.next_ticket = self.next_ticket, self.next_ticket + 1
        self.waiters[ticket] = Waiter(held, blocks)
        self.carry_out(self.book.queue(ticket, content_nbytes(blocks), held=held))

    def attempt(self, blocks: int) -> None:
        """A caller takes a slot if one is free, and else asks for a lease in passing."""
        slot = self.book.acquire(content_nbytes(blocks), held=True)
        if slot is not None:
            self._take(slot)
        else:
            self.carry_out(self.book.prefetch(content_nbytes(blocks)))

    def cancel(self, index: int) -> None:
        """The task of a waiter is cancelled; it will run later."""
        list(self.waiters.values())[index].cancelled = True

    def cancelled(self, index: int) -> None:
        """The task of a cancelled waiter runs."""
        ticket = list(self.waiters)[index]
        self._gives_up(self.waiters.pop(ticket))
        self.carry_out(self.book.cancel(ticket))

    def _gives_up(self, waiter: Waiter) -> None:
        if not waiter.is_held:
            self.end.leave()

    def request_now(self, blocks: int) -> None:
        """A caller sends a payload if nothing has to be waited for, and else asks for a lease in passing."""
        nbytes = content_nbytes(blocks)
        submission = self.end.submit_now(payload_of([np.zeros(nbytes, np.uint8)], self.next_request), "", nbytes)
        if submission is None:
            self.carry_out(self.book.prefetch(nbytes))
            return
        require(not self.waiters, "a waiter was overtaken")
        self.next_request += 1
        [slot] = (slot for slot in self.book._submitted.values() if slot not in self.slots)
        self._take(slot)
        self.last_sent = slot.ref()

    def send_copied(self, index: int) -> None:
        """A payload has been copied into its slot: it is sent."""
        slot = self.slots[index]
        packed, in_place = self.end.pack(payload_of([np.zeros(slot.nbytes, np.uint8)], self.next_request))
        require(packed.slot_nbytes == slot.nbytes, "a payload needs another slot than was acquired for it")
        packed.copy_into(self.end.content_address(slot))
        submission = self.end.send(packed, in_place, slot, "", None)
        require(submission is not None, "a submission found no room where there is room")
        self.next_request += 1
        self.last_sent = slot.ref()

    def array(self, slot: ClientSlotRecord) -> np.ndarray[Any, Any]:
        """What a caller writes to in a slot that it holds."""
        return np.frombuffer(memoryview(self.slab), np.uint8, slot.nbytes, slot.start * BLOCK_NBYTES + SLOT_HEADER_NBYTES)

    def submittable(self) -> list[int]:
        """Positions of the slots that callers hold and may submit."""
        return [index for index, slot in enumerate(self.slots) if slot.held and slot.state in _UNSUBMITTED]

    def submit_held(self, index: int, with_next: int) -> None:
        """A caller submits a held slot as it is, or two."""
        positions = self.submittable()
        chosen = positions[positions.index(index) :][: 1 + with_next]
        slots = [self.slots[position] for position in chosen]
        packed, in_place = self.end.pack(payload_of([self.array(slot) for slot in slots], self.next_request))
        require(in_place == slots, "arrays in held slots are sent from somewhere else")
        require(self.end.begin(), "a request has no turn where fewer than max_inflight are in flight")
        submission = self.end.send(packed, in_place, None, "", None)
        require(submission is not None, "a submission found no room where there is room")
        self.next_request += 1
        self.last_sent = slots[-1].ref()

    def leave(self, index: int, is_viewed: int) -> None:
        """A caller leaves a slot; with living views it drains."""
        slot = self.slots[index]
        if slot.held:
            self.end.held.leave(self.end.content_address(slot))
        else:
            self.end.leave()  # it was for a request
        slot.viewed = bool(is_viewed)
        if is_viewed:
            self.views.append(slot)
        self.carry_out(self.book.give_up(slot, self.now))
        if slot.lease is None:
            self.kept.contents.slot_left(slot)
            self._forget_kept()

    def send_kept(self, index: int, with_slot: int) -> None:
        """A caller sends a request with content that it holds, from where that lies, alone or with a held slot."""
        slots = [self.slots[with_slot]] if with_slot >= 0 else []
        payload = payload_of([self.array(slot) for slot in slots], self.next_request)
        packed, in_place = self.end.pack([*payload, self.kept.open[index].kept.payload])
        require(len(in_place) == len(slots) + 1 and not packed.copied, "content is sent from somewhere else than where it lies")
        require(self.end.begin(), "a request has no turn where fewer than max_inflight are in flight")
        submission = self.end.send(packed, in_place, None, "", None)
        require(submission is not None, "a submission found no room where there is room")
        self.next_request += 1

    def view_dies(self, index: int) -> None:
        """The last view of a slot that was left dies."""
        slot = self.slots[index]
        self.views.remove(slot)
        self.carry_out(self.book.last_view_gone(slot, self.now))
        if slot.lease is None:
            self.kept.contents.slot_views_gone(slot)
            self._forget_kept()

    def expire(self) -> None:
        """The timer of idle leases fires."""
        self.carry_out(self.book.expire(self.now))

    def abort(self, index: int) -> None:
        """A caller gives a request up."""
        submission = list(self.pending.values())[index]
        submission.give_up(AbortedError("", request_id=submission.request_id))
        self.link.send(Abort(submission.request_id))

    def drop_reply(self, index: int) -> None:
        """The last view of a reply dies."""
        generation = self.replies.pop(index).generation
        [key] = self.regions.collect()
        require(key == (_OF_REPLIES, generation), "the death of a view is reported as another's")
        self.release_replies([generation])

    # -- the end -------------------------------------------------------------------------------------------------------------

    def goodbye(self, replies_viewed: int) -> None:
        """Closes in order: what this process can still reach is named."""
        for slot in self.slots:
            # Its caller has not left it, or it is being copied to, and that may go on.
            slot.viewed = slot.viewed or slot.held or slot.state is ClientSlot.WRITING
        for index, submission in enumerate(self.pending.values()):
            if not submission.ended:
                self.abort(index)
        while self.replies and not replies_viewed:
            self.drop_reply(0)
        generations = sorted(generation for kind, generation in self.regions.living() if kind == _OF_REPLIES)
        require(
            generations == sorted(reply.generation for reply in self.replies), "a goodbye keeps other replies than are viewed"
        )
        pinned = tuple(self.kept.contents.in_use())
        self.link.send(Goodbye(self.book.leases_in_use(), tuple(generations), pinned_generations=pinned))
        self.leave_engine()

    def leave_engine(self) -> None:
        """The session is over: whatever waits in it fails, and what is left is what living code of the process can reach."""
        self.ended = True
        self.wire.close_frontend()
        self.waiters.clear()
        self.pending.clear()
        self.kept.lose()
        self.end.detach()
        self.regions.close()
        self.slots = [slot for slot in self.slots if slot.held or slot.state is ClientSlot.WRITING or slot in self.views]

    def let_go(self, index: int) -> None:
        """Code of the process lets a slot or a reply go; the engine can't hear of it."""
        for reach in (self.slots, self.replies, self.kept.views):
            if index < len(reach):
                del reach[index]
                return
            index -= len(reach)

    # -- breaking the rules --------------------------------------------------------------------------------------------------

    def forgery(self, kind: Forgery, other_lease: SlotRef | None) -> bytes | None:
        """Returns a record that must be refused, or None if this session can't make it.

        Args:
            kind: which.
            other_lease: a place in what was lent to somebody else.
        """
        fresh = (self.client_id << GENERATION_BITS) + (1 << (GENERATION_BITS - 1))
        own = behind = None
        for lease in self.book.leases.values():
            start = next((start for start, _ in lease.slots.runs()), lease.slots.start)  # where nothing else is wrong
            own = SlotRef(lease.lease_id, start * BLOCK_NBYTES, content_nbytes(1), fresh)
            behind = _changed(own, offset=lease.slots.end * BLOCK_NBYTES)
        slots: tuple[SlotRef | None, ...]
        match kind:
            case Forgery.OLD_EPOCH:
                return self._forged(self.next_request, epoch=self.epoch - 1)
            case Forgery.OLD_REQUEST:
                return self._forged(self.next_request - 1) if self.next_request > 1 else None
            case Forgery.RETURN_OF_ANOTHER:
                return encode_message(LeaseReturn((other_lease.lease_id if other_lease is not None else _NO_LEASE,)))
            case Forgery.REPLY_OF_ANOTHER:
                return encode_message(ReplyRelease((_NO_REPLY,)))
            case Forgery.OLD_GENERATION:
                slots = (own and self.last_sent and _changed(own, generation=self.last_sent.generation),)
            case Forgery.LEASE_OF_ANOTHER:
                slots = (other_lease and _changed(other_lease, generation=fresh),)
            case Forgery.BEHIND_THE_LEASE:
                slots = (behind,)
            case Forgery.OVERLAP:
                slots = (own, own and _changed(own, generation=fresh + 1))
            case Forgery.GENERATION_OF_ANOTHER:
                slots = (own and _changed(own, generation=fresh + (1 << GENERATION_BITS)),)
        sound = tuple(slot for slot in slots if slot is not None)
        return self._forged(self.next_request, sound) if len(sound) == len(slots) else None

    def _forged(self, request_id: int, slots: Sequence[SlotRef] = (), epoch: int | None = None) -> bytes:
        return submit_of([], None, slots, epoch=self.epoch if epoch is None else epoch, request_id=request_id)

    # -- what can happen -----------------------------------------------------------------------------------------------------

    def enabled(self, pid: int, now: float) -> Iterator[Action]:
        """Yields what its callers and its connection can do now."""
        wire = self.wire
        if wire.to_frontend:
            yield Action(Kind.TO_FRONTEND, pid)
        if not wire.engine_open:
            yield Action(Kind.FRONTEND_SEES_END, pid)
        for index, waiter in enumerate(self.waiters.values()):
            yield Action(Kind.CANCELLED if waiter.cancelled else Kind.CANCEL, pid, index)
        expiry = self.book.next_expiry()
        if expiry is not None and expiry <= now:
            yield Action(Kind.EXPIRE, pid)
        for index, slot in enumerate(self.slots):
            if slot.held:
                yield Action(Kind.LEAVE, pid, index)
                yield Action(Kind.LEAVE, pid, index, 1)
            elif slot.state is ClientSlot.WRITING:
                yield Action(Kind.GIVE_UP, pid, index)
            elif slot in self.views:
                yield Action(Kind.VIEW_DIES, pid, index)
        yield from self.kept.enabled(pid, can_write=self.link.can_write)
        if not self.link.can_write:
            return  # its callers wait until the engine has read
        for index in range(len(self.replies)):
            yield Action(Kind.DROP_REPLY, pid, index)
        for index, submission in enumerate(self.pending.values()):
            if not submission.ended:
                yield Action(Kind.ABORT, pid, index)
        yield from self._enabled_for_slots(pid)

    def wanting(self) -> int:
        """Requests that are not sent yet: their payloads are copied, or wait for a slot."""
        copying = sum(slot.state is ClientSlot.WRITING and not slot.held for slot in self.slots)
        return copying + sum(not waiter.is_held for waiter in self.waiters.values())

    def _enabled_for_slots(self, pid: int) -> Iterator[Action]:
        scenario = self.scenario
        for index, slot in enumerate(self.slots):
            if slot.state is ClientSlot.WRITING and not slot.held:
                yield Action(Kind.SEND, pid, index)
        wanting = self.wanting()
        may_request = len(self.pending) + wanting < scenario.max_inflight and (
            scenario.max_requests is None or self.next_request + wanting <= scenario.max_requests
        )
        if may_request:
            held = self.submittable()
            for position, index in enumerate(held):
                yield Action(Kind.SUBMIT, pid, index)
                if position + 1 < len(held):
                    yield Action(Kind.SUBMIT, pid, index, 1)
            for content in range(len(self.kept.open)):
                yield Action(Kind.SEND_KEPT, pid, content)
                if held:
                    yield Action(Kind.SEND_KEPT, pid, content, 1 + held[0])
        if len(self.slots) + len(self.waiters) < scenario.max_slots:
            for blocks in scenario.slot_blocks:
                yield Action(Kind.ACQUIRE, pid, blocks)
                yield Action(Kind.TRY, pid, blocks)
                if may_request:
                    yield Action(Kind.REQUEST, pid, blocks)
                    yield Action(Kind.REQUEST_NOW, pid, blocks)


def _changed(slot: SlotRef, *, offset: int | None = None, generation: int | None = None) -> SlotRef:
    return SlotRef(
        slot.lease_id,
        slot.offset if offset is None else offset,
        slot.nbytes,
        slot.generation if generation is None else generation,
    )


@dataclasses.dataclass(slots=True, eq=False)
class Process:
    """A frontend's process: at most one session at a time, and views of those that have ended."""

    alive: bool = True
    session: Session | None = None
    former: list[Session] = dataclasses.field(default_factory=list)

    def retire(self) -> None:
        """Puts the ended session away, for as long as something of it is in reach."""
        assert self.session is not None
        self.former.append(self.session)
        self.session = None
        self.forget()

    def forget(self) -> None:
        """Forgets former sessions of which nothing is in reach."""
        self.former = [session for session in self.former if session.slots or session.replies or session.kept.views]

    def crash(self) -> None:
        """Dies: the kernel closes its socket, and none of its code can reach anything."""
        self.alive = False
        if self.session is not None:
            self.session.leave_engine()
        self.session = None
        self.former.clear()

    def sessions(self) -> list[Session]:
        """All of which something may be in reach."""
        return self.former if self.session is None else [self.session, *self.former]
