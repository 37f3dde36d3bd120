"""A frontend's process and its sessions: the real lease book, and around it what ``shmring.client.session`` adds.

The duties of a session are written again here as it has them, for a caller that may be anywhere between two awaits: a
cancelled waiter that has not run yet, a copy under way, a slot that was left with living views. What is not simulated is
what a book can't see: bytes, threads, deadlines.

A process can outlive its session, and so can views of its slots: they stay in :attr:`Session.slots` until they die, as
memory that the process may still write.
"""

from __future__ import annotations

import dataclasses
from bisect import insort
from collections.abc import Iterator, Sequence

from shmring.core.client_book import ClientBook, ClientSlotRecord
from shmring.core.effects import Acquired, ClientEffect, Send
from shmring.core.geometry import BLOCK_NBYTES, GENERATION_BITS, ClientBookLimits
from shmring.core.messages import (
    SLOT_HEADER_NBYTES,
    Abort,
    Content,
    Done,
    Failed,
    FrontendMessage,
    Goodbye,
    LeaseGrant,
    LeaseRecall,
    LeaseRequest,
    LeaseReturn,
    Refused,
    Release,
    Reply,
    ReplyRelease,
    SlotRef,
    Submit,
    decode_engine_message,
)
from shmring.core.states import ClientSlot
from tests.simulation import books
from tests.simulation.scenario import Action, Forgery, Kind, Scenario, require
from tests.simulation.wire import Headers, Wire

__all__ = ["IDLE_TICKS", "HeldReply", "Process", "Session", "content_nbytes"]

#: After which an empty lease goes back, on the simulation's clock.
IDLE_TICKS = 1.0

_UNSUBMITTED = (ClientSlot.WRITING, ClientSlot.CACHED)
_NO_LEASE = 2**40  # no engine lends so many
_NO_REPLY = 2**40  # nor sends so many replies


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


class Session:
    """One connection to one life of an engine."""

    def __init__(self, scenario: Scenario, epoch: int, client_id: int, wire: Wire, headers: Headers) -> None:
        self.scenario = scenario
        self.epoch = epoch
        self.client_id = client_id
        self.wire = wire
        self.headers = headers
        self.book: ClientBook = books.chosen.client(
            ClientBookLimits(
                client_id=client_id,
                slab_nbytes=scenario.geometry.slab_nbytes,
                leasable_nbytes=scenario.leasable_blocks * BLOCK_NBYTES,
                max_leases=scenario.max_leases,
                lease_nbytes=scenario.lease_blocks * BLOCK_NBYTES,
                lease_idle_s=IDLE_TICKS,
            )
        )
        self.ended = False
        self.waiters: dict[int, Waiter] = {}  # by ticket, in order
        self.slots: list[ClientSlotRecord] = []  # all that are not free; after the end, those that the process can reach
        self.views: list[ClientSlotRecord] = []  # those that were left, and that code can still reach, whatever the book thinks
        self.pending: dict[int, bool] = {}  # by request: whether its caller has given it up
        self.replies: list[HeldReply] = []
        self.next_ticket = 1
        self.next_request = 1
        self.last_token = 0
        self.last_sent: SlotRef | None = None

    # -- what comes ----------------------------------------------------------------------------------------------------------

    def hear(self, now: float) -> None:
        """Reads one message of the engine."""
        match decode_engine_message(self.wire.to_frontend.popleft()):
            case LeaseGrant() as grant:
                self.carry_out(self.book.granted(grant, now), now)
            case LeaseRecall(lease_ids):
                self.carry_out(self.book.recalled(lease_ids), now)
            case Release(generations):
                effects, unknown = self.book.released(generations, now)
                require(unknown == 0, "the engine released a slot that it did not have")
                self.carry_out(effects, now)
            case Reply(request_id, content):
                self._replied(request_id, content)
            case Done(request_id) | Failed(request_id):
                require(request_id in self.pending, "a request ended twice, or one that was never submitted")
                del self.pending[request_id]
            case Refused():
                self.end()

    def _replied(self, request_id: int, content: Content) -> None:
        require(request_id in self.pending, "a reply came to a request that has ended")
        if self.pending[request_id]:
            if content.slots:
                self.wire.tell_engine(ReplyRelease(tuple(slot.generation for slot in content.slots)))
            return
        for slot in content.slots:
            header = (slot.generation, slot.nbytes)
            require(self.headers.get(slot.offset) == header, "a reply's slot was overwritten before it was read")
            self.replies.append(
                HeldReply(slot.generation, slot.offset // BLOCK_NBYTES, (slot.nbytes + SLOT_HEADER_NBYTES) // BLOCK_NBYTES)
            )

    def carry_out(self, effects: Sequence[ClientEffect], now: float) -> None:
        """Does what the book asks for."""
        refused: list[ClientSlotRecord] = []
        for effect in effects:
            match effect:
                case Send(message):
                    self.send(message)
                case Acquired(ticket, slot):
                    require(ticket == next(iter(self.waiters), None), "a waiter was overtaken")
                    if self.waiters.pop(ticket).cancelled:
                        refused.append(slot)
                    else:
                        self._take(slot)
        # Only now: an event in the midst of these effects would send its lease request before an older one.
        for slot in refused:
            self.carry_out(self.book.give_up(slot, now), now)
        self.slots = [slot for slot in self.slots if slot.state is not ClientSlot.FREE or slot in self.views]

    def send(self, message: LeaseRequest | LeaseReturn) -> None:
        """Sends what the book asks for; the engine goes by the last request that it reads."""
        if isinstance(message, LeaseRequest):
            require(message.token > self.last_token, "a lease request is sent after a newer one")
            self.last_token = message.token
        self.wire.tell_engine(message)

    def _take(self, slot: ClientSlotRecord) -> None:
        """A caller has a slot. By address: in which order they were taken makes no difference to anybody."""
        insort(self.slots, slot, key=lambda slot: slot.start)

    # -- callers -------------------------------------------------------------------------------------------------------------

    def acquire(self, blocks: int, *, held: bool, now: float) -> None:
        """A caller wants a slot, and waits in line if there is none."""
        slot = self.book.acquire(content_nbytes(blocks), held=held)
        if slot is not None:
            self._take(slot)
            return
        ticket, self.next_ticket = self.next_ticket, self.next_ticket + 1
        self.waiters[ticket] = Waiter(held, blocks)
        self.carry_out(self.book.queue(ticket, content_nbytes(blocks), held=held), now)

    def attempt(self, blocks: int, now: float) -> None:
        """A caller takes a slot if one is free, and else asks for a lease in passing."""
        slot = self.book.acquire(content_nbytes(blocks), held=True)
        if slot is not None:
            self._take(slot)
        else:
            self.carry_out(self.book.prefetch(content_nbytes(blocks)), now)

    def cancel(self, index: int) -> None:
        """The task of a waiter is cancelled; it will run later."""
        list(self.waiters.values())[index].cancelled = True

    def cancelled(self, index: int, now: float) -> None:
        """The task of a cancelled waiter runs."""
        ticket = list(self.waiters)[index]
        del self.waiters[ticket]
        self.carry_out(self.book.cancel(ticket), now)

    def submit(self, slots: Sequence[ClientSlotRecord]) -> None:
        """Hands slots to the engine as one request."""
        request_id, self.next_request = self.next_request, self.next_request + 1
        for slot in slots:
            self.headers[slot.offset] = (self.book.submit(slot), slot.nbytes)
            self.last_sent = slot.ref()
        self.pending[request_id] = False
        self.wire.tell_engine(Submit(self.epoch, request_id, Content(b"", slots=tuple(slot.ref() for slot in slots))))

    def submittable(self) -> list[int]:
        """Positions of the slots that callers hold and may submit."""
        return [index for index, slot in enumerate(self.slots) if slot.held and slot.state in _UNSUBMITTED]

    def submit_held(self, index: int, with_next: int) -> None:
        """A caller submits a held slot as it is, or two."""
        positions = self.submittable()
        chosen = positions[positions.index(index) :][: 1 + with_next]
        self.submit([self.slots[position] for position in chosen])

    def leave(self, index: int, is_viewed: int, now: float) -> None:
        """A caller leaves a slot; with living views it drains."""
        slot = self.slots[index]
        slot.viewed = bool(is_viewed)
        if is_viewed:
            self.views.append(slot)
        self.carry_out(self.book.give_up(slot, now), now)

    def view_dies(self, index: int, now: float) -> None:
        """The last view of a slot that was left dies."""
        self.views.remove(self.slots[index])
        self.carry_out(self.book.last_view_gone(self.slots[index], now), now)

    def abort(self, index: int) -> None:
        """A caller gives a request up."""
        request_id = list(self.pending)[index]
        self.pending[request_id] = True
        self.wire.tell_engine(Abort(request_id))

    def drop_reply(self, index: int) -> None:
        """The last view of a reply dies, or a caller drops it unread."""
        self.wire.tell_engine(ReplyRelease((self.replies.pop(index).generation,)))

    # -- the end -------------------------------------------------------------------------------------------------------------

    def goodbye(self, replies_viewed: int) -> None:
        """Closes in order: what this process can still reach is named."""
        for slot in self.slots:
            # Its caller has not left it, or it is being copied to, and that may go on.
            slot.viewed = slot.viewed or slot.held or slot.state is ClientSlot.WRITING
        for index, given_up in enumerate(self.pending.values()):
            if not given_up:
                self.abort(index)
        while self.replies and not replies_viewed:
            self.drop_reply(0)
        self.wire.tell_engine(Goodbye(self.book.leases_in_use(), tuple(reply.generation for reply in self.replies)))
        self.end()

    def end(self) -> None:
        """The session is over: whatever waits in it fails, and what is left is what living code of the process can reach."""
        self.ended = True
        self.wire.close_frontend()
        self.waiters.clear()
        self.pending.clear()
        self.slots = [slot for slot in self.slots if slot.held or slot.state is ClientSlot.WRITING or slot in self.views]

    def let_go(self, index: int) -> None:
        """Code of the process lets a slot or a reply go; the engine can't hear of it."""
        if index < len(self.slots):
            del self.slots[index]
        else:
            del self.replies[index - len(self.slots)]

    # -- breaking the rules --------------------------------------------------------------------------------------------------

    def forgery(self, kind: Forgery, other_lease: SlotRef | None) -> FrontendMessage | None:
        """Returns a message that must be refused, or None if this session can't make it.

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
                return Submit(self.epoch - 1, self.next_request, Content(b""))
            case Forgery.OLD_REQUEST:
                return Submit(self.epoch, self.next_request - 1, Content(b"")) if self.next_request > 1 else None
            case Forgery.RETURN_OF_ANOTHER:
                return LeaseReturn((other_lease.lease_id if other_lease is not None else _NO_LEASE,))
            case Forgery.REPLY_OF_ANOTHER:
                return ReplyRelease((_NO_REPLY,))
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
        return Submit(self.epoch, self.next_request, Content(b"", slots=sound)) if len(sound) == len(slots) else None

    # -- what can happen -----------------------------------------------------------------------------------------------------

    def enabled(self, pid: int, now: float) -> Iterator[Action]:
        """Yields what its callers and its connection can do now."""
        scenario, wire = self.scenario, self.wire
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
        if len(wire.to_engine) >= scenario.max_queue:
            return  # its callers wait until the engine has read
        for index in range(len(self.replies)):
            yield Action(Kind.DROP_REPLY, pid, index)
        for index, given_up in enumerate(self.pending.values()):
            if not given_up:
                yield Action(Kind.ABORT, pid, index)
        yield from self._enabled_for_slots(pid)

    def _enabled_for_slots(self, pid: int) -> Iterator[Action]:
        scenario = self.scenario
        copying = 0
        for index, slot in enumerate(self.slots):
            if slot.state is ClientSlot.WRITING and not slot.held:
                copying += 1
                yield Action(Kind.SEND, pid, index)
        wanting = copying + sum(not waiter.is_held for waiter in self.waiters.values())
        may_request = len(self.pending) + wanting < scenario.max_inflight and (
            scenario.max_requests is None or self.next_request + wanting <= scenario.max_requests
        )
        if may_request:
            held = self.submittable()
            for position, index in enumerate(held):
                yield Action(Kind.SUBMIT, pid, index)
                if position + 1 < len(held):
                    yield Action(Kind.SUBMIT, pid, index, 1)
        if len(self.slots) + len(self.waiters) < scenario.max_slots:
            for blocks in scenario.slot_blocks:
                yield Action(Kind.ACQUIRE, pid, blocks)
                yield Action(Kind.TRY, pid, blocks)
                if may_request:
                    yield Action(Kind.REQUEST, pid, blocks)


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
        self.former = [session for session in self.former if session.slots or session.replies]

    def crash(self) -> None:
        """Dies: the kernel closes its socket, and none of its code can reach anything."""
        self.alive = False
        if self.session is not None:
            self.session.wire.close_frontend()
        self.session = None
        self.former.clear()

    def sessions(self) -> list[Session]:
        """All of which something may be in reach."""
        return self.former if self.session is None else [self.session, *self.former]
