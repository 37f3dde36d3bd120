"""Both books against each other: one engine, several frontends, and messages that arrive when they like.

Each direction of a connection keeps its order and nothing else. A frontend may close its connection, say goodbye or die
at any moment, and the engine may hear of a death before it has read what was sent last. An honest frontend must never be
accused, no process may lose memory that it may still write, nobody may wait for ever, and the slab must come home whole.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shmring.core import effects as engine_effects
from shmring.core.geometry import BLOCK_NBYTES, Geometry, LedgerLimits
from shmring.core.leasebook import Acquired, LeaseBook, LeaseBookLimits, Send, SlotRecord
from shmring.core.leasebook import Effect as FrontendEffect
from shmring.core.ledger import Ledger
from shmring.core.messages import (
    SLOT_HEADER_NBYTES,
    Abort,
    Content,
    EngineMessage,
    FrontendMessage,
    Goodbye,
    LeaseGrant,
    LeaseRecall,
    LeaseRequest,
    LeaseReturn,
    Release,
    Submit,
    decode_engine_message,
    decode_frontend_message,
    encode_message,
)
from shmring.core.states import ClientSlot, RequestEvent

LEASABLE = 12
MAX_FRONTENDS = 3
MAX_DEPARTURES = 3  # in one example; else most steps would be about frontends that come and go
IDLE_S = 5.0

T = TypeVar("T")


def content(blocks: int) -> int:
    return blocks * BLOCK_NBYTES - SLOT_HEADER_NBYTES


@dataclasses.dataclass
class Frontend:
    """A frontend's process: its book, its callers, and the two halves of its connection."""

    client_id: int
    book: LeaseBook
    alive: bool = True
    connected: bool = True  # as it sees it
    waiters: list[int] = dataclasses.field(default_factory=list)
    requests: set[int] = dataclasses.field(default_factory=set)  # waiters that submit what they get
    slots: list[SlotRecord] = dataclasses.field(default_factory=list)  # that its callers hold, or that are on their way
    next_request: int = 0
    to_engine: deque[bytes | None] = dataclasses.field(default_factory=deque)  # None: the end of the stream
    to_frontend: deque[bytes] = dataclasses.field(default_factory=deque)

    def send(self, message: FrontendMessage) -> None:
        self.to_engine.append(encode_message(message))

    def carry_out(self, effects: Sequence[FrontendEffect]) -> None:
        for effect in effects:
            match effect:
                case Send(message):
                    self.send(message)
                case Acquired(ticket, slot):
                    assert ticket == self.waiters.pop(0)
                    self.slots.append(slot)
                    if ticket in self.requests:
                        self.submit(slot)
                        self.carry_out(self.book.give_up(slot, 0.0))

    def submit(self, slot: SlotRecord) -> None:
        self.book.submit(slot)
        self.send(Submit(1, self.next_request, Content(b"", slots=(slot.ref(),))))
        self.next_request += 1

    def may_write(self) -> list[SlotRecord]:
        """Slots that code in this process can reach."""
        return [slot for slot in self.slots if slot.viewed or slot.state in (ClientSlot.WRITING, ClientSlot.CACHED)]


@dataclasses.dataclass
class Claim:
    client_id: int
    request_id: int
    generations: list[int]
    ended: bool = False


class TogetherMachine(RuleBasedStateMachine):
    """What callers, sockets, processes and the engine's handlers may do, in any order."""

    @initialize(quota=st.sampled_from([4, 8]), max_leases=st.integers(1, 3))
    def create(self, quota: int, max_leases: int) -> None:
        self.limits = LedgerLimits(max_lease_blocks=4, quota_blocks=quota, max_leases=max_leases, max_inflight=1000)
        self.ledger = Ledger(Geometry(leasable_blocks=LEASABLE, reply_blocks=1), self.limits)
        self.frontends: dict[int, Frontend] = {}  # those the engine has not forgotten
        self.waiting: dict[tuple[int, int], list[int]] = {}  # generations, by client and request
        self.claims: list[Claim] = []
        self.draining: list[tuple[int, int]] = []
        self.now = 0.0
        self.next_client = 1
        self.next_ticket = 1
        self.departures = 0
        self.connect(2, 2)
        self.connect(2, 2)

    # -- the engine ----------------------------------------------------------------------------------------------------------

    def carry_out(self, effects: Sequence[engine_effects.Effect]) -> None:
        for effect in effects:
            match effect:
                case engine_effects.Granted(client_id, grant):
                    self.tell(client_id, grant)
                case engine_effects.Recalled(client_id, lease_ids):
                    self.tell(client_id, LeaseRecall(lease_ids))
                case engine_effects.Released(client_id, generations):
                    self.tell(client_id, Release(generations))
                case engine_effects.RequestAborted(client_id, request_id, was_running):
                    assert was_running or self.waiting.pop((client_id, request_id)) is not None
                case engine_effects.ClientGone(client_id):
                    assert not self.frontends.pop(client_id).may_write()

    def tell(self, client_id: int, message: EngineMessage) -> None:
        self.frontends[client_id].to_frontend.append(encode_message(message))

    def hear(self, frontend: Frontend) -> None:
        """The engine reads one message of a frontend."""
        body = frontend.to_engine.popleft()
        client_id = frontend.client_id
        if body is None:
            self.engine_drops(frontend)
            return
        match decode_frontend_message(body):
            case LeaseRequest(token, nbytes, preferred_nbytes):
                self.carry_out(self.ledger.request_lease(client_id, token, nbytes, preferred_nbytes))
            case LeaseReturn(lease_ids):
                self.carry_out(self.ledger.return_leases(client_id, lease_ids))
            case Submit(_, request_id, submitted):
                self.ledger.submit(client_id, request_id, submitted.slots)
                self.waiting[client_id, request_id] = [slot.generation for slot in submitted.slots]
            case Abort(request_id):
                self.carry_out(self.ledger.abort(client_id, request_id))
            case Goodbye(kept_lease_ids):
                frontend.to_engine.clear()
                self.carry_out(self.ledger.goodbye(client_id, kept_lease_ids, ()))

    def engine_drops(self, frontend: Frontend) -> None:
        frontend.to_engine.clear()
        if self.engine_sees(frontend):
            self.carry_out(self.ledger.disconnect(frontend.client_id))

    def engine_sees(self, frontend: Frontend) -> bool:
        record = self.ledger.clients.get(frontend.client_id)
        return record is not None and record.connected

    # -- drawing -------------------------------------------------------------------------------------------------------------

    def draw_from(self, data: Any, items: Iterable[T]) -> T:
        return data.draw(st.sampled_from(list(items)))  # type: ignore[no-any-return]

    def connected(self) -> list[Frontend]:
        return [frontend for frontend in self.frontends.values() if frontend.connected]

    def draw_frontend(self, data: Any) -> Frontend:
        return self.frontends[data.draw(st.sampled_from([f.client_id for f in self.connected()]), label="client")]

    def draw_slot(self, data: Any, frontend: Frontend, *states: ClientSlot) -> SlotRecord | None:
        slots = [slot for slot in frontend.slots if slot.state in states]
        return slots[data.draw(st.integers(0, len(slots) - 1), label="slot")] if slots else None

    # -- processes -----------------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.frontends) < MAX_FRONTENDS)
    @rule(blocks=st.integers(1, 4), lease_blocks=st.integers(1, 4))
    def connect(self, blocks: int, lease_blocks: int) -> None:
        client_id, self.next_client = self.next_client, self.next_client + 1
        limits = LeaseBookLimits(
            client_id=client_id,
            slab_nbytes=self.ledger.geometry.slab_nbytes,
            leasable_nbytes=LEASABLE * BLOCK_NBYTES,
            max_leases=self.limits.max_leases,
            lease_nbytes=lease_blocks * BLOCK_NBYTES,
            lease_idle_s=IDLE_S,
        )
        frontend = self.frontends[client_id] = Frontend(client_id, LeaseBook(limits))
        base = self.ledger.connect(client_id, blocks * BLOCK_NBYTES)
        if base is not None:
            frontend.carry_out(frontend.book.granted(base, self.now))

    @precondition(lambda self: self.connected() and self.departures < MAX_DEPARTURES)
    @rule(data=st.data(), how=st.sampled_from(["close", "goodbye", "dropped by the engine", "die"]))
    def depart(self, data: Any, how: str) -> None:
        self.departures += 1
        frontend = self.draw_frontend(data)
        match how:
            case "close":
                frontend.connected = False
                frontend.to_engine.append(None)
            case "goodbye":
                self.goodbye(frontend)
            case "dropped by the engine":
                self.engine_drops(frontend)
                frontend.connected = False
            case "die":
                self.kill(frontend)

    def goodbye(self, frontend: Frontend) -> None:
        frontend.send(Goodbye(frontend.book.leases_in_use()))
        frontend.connected = False
        # Its callers take up no slot any more; what is being written and what is viewed stays in reach.
        frontend.slots = [slot for slot in frontend.slots if slot.viewed or slot.state is ClientSlot.WRITING]

    @precondition(lambda self: any(f.alive and not f.connected for f in self.frontends.values()))
    @rule(data=st.data())
    def die_later(self, data: Any) -> None:
        self.kill(self.frontends[self.draw_from(data, [i for i, f in self.frontends.items() if f.alive and not f.connected])])

    def kill(self, frontend: Frontend) -> None:
        if frontend.connected:
            frontend.to_engine.append(None)
        frontend.alive = frontend.connected = False
        frontend.slots.clear()

    @precondition(lambda self: any(not frontend.alive for frontend in self.frontends.values()))
    @rule(data=st.data())
    def notice_death(self, data: Any) -> None:
        self.bury(self.draw_from(data, [f.client_id for f in self.frontends.values() if not f.alive]))

    def bury(self, client_id: int) -> None:
        self.frontends[client_id].to_engine.clear()
        self.carry_out(self.ledger.died(client_id))

    # -- messages ------------------------------------------------------------------------------------------------------------

    @precondition(lambda self: any(frontend.to_engine for frontend in self.frontends.values()))
    @rule(data=st.data(), count=st.integers(1, 4))
    def deliver_to_engine(self, data: Any, count: int) -> None:
        client_id = self.draw_from(data, [f.client_id for f in self.frontends.values() if f.to_engine])
        frontend = self.frontends[client_id]
        for _ in range(min(count, len(frontend.to_engine))):
            if frontend.to_engine:
                self.hear(frontend)

    @precondition(lambda self: any(frontend.to_frontend for frontend in self.connected()))
    @rule(data=st.data(), count=st.integers(1, 4))
    def deliver_to_frontend(self, data: Any, count: int) -> None:
        client_id = self.draw_from(data, [f.client_id for f in self.connected() if f.to_frontend])
        for _ in range(min(count, len(self.frontends[client_id].to_frontend))):
            self.frontend_hears(self.frontends[client_id])

    def frontend_hears(self, frontend: Frontend) -> None:
        book = frontend.book
        match decode_engine_message(frontend.to_frontend.popleft()):
            case LeaseGrant() as grant:
                frontend.carry_out(book.granted(grant, self.now))
            case LeaseRecall(lease_ids):
                frontend.carry_out(book.recalled(lease_ids))
            case Release(generations):
                effects, unknown = book.released(generations, self.now)
                assert unknown == 0, "the engine released what it did not have"
                frontend.carry_out(effects)
                self.forget_free_slots(frontend)

    def forget_free_slots(self, frontend: Frontend) -> None:
        assert not any(slot.held or slot.viewed for slot in frontend.slots if slot.state is ClientSlot.FREE)
        frontend.slots = [slot for slot in frontend.slots if slot.state is not ClientSlot.FREE]

    # -- callers -------------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.connected())
    @rule(data=st.data(), blocks=st.integers(1, 6), held=st.booleans(), viewed=st.booleans(), send=st.booleans())
    def acquire(self, data: Any, blocks: int, held: bool, viewed: bool, send: bool) -> None:
        frontend = self.draw_frontend(data)
        slot = frontend.book.acquire(content(blocks), held=held)
        if slot is not None:
            frontend.slots.append(slot)
            slot.viewed = viewed
            if send:
                frontend.submit(slot)
        elif send:
            frontend.carry_out(frontend.book.wish(content(blocks)))

    @precondition(lambda self: self.connected())
    @rule(data=st.data(), blocks=st.integers(1, LEASABLE), held=st.booleans(), request=st.booleans())
    def queue(self, data: Any, blocks: int, held: bool, request: bool) -> None:
        frontend = self.draw_frontend(data)
        ticket, self.next_ticket = self.next_ticket, self.next_ticket + 1
        if request:
            frontend.requests.add(ticket)
        frontend.waiters.append(ticket)
        frontend.carry_out(frontend.book.queue(ticket, content(blocks), held=held))

    @precondition(lambda self: any(frontend.waiters for frontend in self.connected()))
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        client_id = self.draw_from(data, [f.client_id for f in self.connected() if f.waiters])
        frontend = self.frontends[client_id]
        ticket = self.draw_from(data, frontend.waiters)
        frontend.waiters.remove(ticket)
        frontend.carry_out(frontend.book.cancel(ticket))

    @precondition(lambda self: any(frontend.slots for frontend in self.connected()))
    @rule(data=st.data(), let_go=st.booleans())
    def submit(self, data: Any, let_go: bool) -> None:
        frontend = self.draw_frontend(data)
        slot = self.draw_slot(data, frontend, ClientSlot.WRITING, ClientSlot.CACHED)
        if slot is None:
            return
        frontend.submit(slot)
        if let_go:
            frontend.carry_out(frontend.book.give_up(slot, self.now))

    @precondition(lambda self: any(frontend.next_request for frontend in self.connected()))
    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        frontend = self.frontends[self.draw_from(data, [f.client_id for f in self.connected() if f.next_request])]
        frontend.send(Abort(data.draw(st.integers(0, frontend.next_request - 1), label="request")))

    @precondition(lambda self: any(frontend.slots for frontend in self.connected()))
    @rule(data=st.data())
    def give_up(self, data: Any) -> None:
        frontend = self.draw_frontend(data)
        slot = self.draw_slot(data, frontend, *ClientSlot)
        if slot is not None:
            self.let_go(frontend, slot)

    def let_go(self, frontend: Frontend, slot: SlotRecord) -> None:
        frontend.carry_out(frontend.book.give_up(slot, self.now))
        self.forget_free_slots(frontend)

    @precondition(lambda self: any(frontend.slots for frontend in self.connected()))
    @rule(data=st.data())
    def view(self, data: Any) -> None:
        slot = self.draw_slot(data, self.draw_frontend(data), ClientSlot.WRITING, ClientSlot.CACHED)
        if slot is not None:
            slot.viewed = True

    @precondition(lambda self: any(slot.viewed for frontend in self.connected() for slot in frontend.slots))
    @rule(data=st.data())
    def last_view_gone(self, data: Any) -> None:
        viewed = [(f.client_id, i) for f in self.connected() for i, slot in enumerate(f.slots) if slot.viewed]
        client_id, index = self.draw_from(data, viewed)
        self.unview(self.frontends[client_id], self.frontends[client_id].slots[index])

    def unview(self, frontend: Frontend, slot: SlotRecord) -> None:
        frontend.carry_out(frontend.book.last_view_gone(slot, self.now))
        self.forget_free_slots(frontend)

    @rule(seconds=st.sampled_from([1.0, IDLE_S]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for frontend in self.connected():
            frontend.carry_out(frontend.book.expire(self.now))

    @precondition(lambda self: any(frontend.to_engine for frontend in self.frontends.values()))
    @rule(data=st.data(), finish=st.booleans())
    def answer(self, data: Any, finish: bool) -> None:
        """The engine reads all that a frontend sent, and takes up each of its requests, or handles it at once."""
        client_id = self.draw_from(data, [f.client_id for f in self.frontends.values() if f.to_engine])
        self.read_all(self.frontends[client_id])
        for claim in [claim for claim in self.claims if claim.client_id == client_id and finish]:
            self.release_claim(claim, viewed=False)
            self.finish(claim)

    def read_all(self, frontend: Frontend) -> None:
        while frontend.to_engine:
            self.hear(frontend)
        for key in [key for key in self.waiting if key[0] == frontend.client_id]:
            self.take_up(*key)

    # -- handlers ------------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def claim(self, data: Any) -> None:
        self.take_up(*self.draw_from(data, self.waiting))

    def take_up(self, client_id: int, request_id: int) -> None:
        self.ledger.claim(client_id, request_id)
        self.claims.append(Claim(client_id, request_id, self.waiting.pop((client_id, request_id))))

    @precondition(lambda self: any(not claim.ended for claim in self.claims))
    @rule(data=st.data())
    def end(self, data: Any) -> None:
        index = self.draw_from(data, [i for i, claim in enumerate(self.claims) if not claim.ended])
        self.finish(self.claims[index])

    def finish(self, claim: Claim) -> None:
        self.ledger.end(claim.client_id, claim.request_id, RequestEvent.FINISH)
        claim.ended = True
        self.claims = [claim for claim in self.claims if claim.generations or not claim.ended]

    @precondition(lambda self: any(claim.generations for claim in self.claims))
    @rule(data=st.data(), viewed=st.booleans())
    def release(self, data: Any, viewed: bool) -> None:
        index = self.draw_from(data, [i for i, claim in enumerate(self.claims) if claim.generations])
        self.release_claim(self.claims[index], viewed)

    def release_claim(self, claim: Claim, viewed: bool) -> None:
        generations, claim.generations = claim.generations, []
        if not generations:
            return
        if viewed:
            self.draining += [(claim.client_id, generation) for generation in generations]
        self.carry_out(self.ledger.release_slots(claim.client_id, generations, generations if viewed else ()))
        self.claims = [claim for claim in self.claims if claim.generations or not claim.ended]

    @precondition(lambda self: self.draining)
    @rule(data=st.data())
    def drain(self, data: Any) -> None:
        self.draining.remove(slot := self.draw_from(data, self.draining))
        self.carry_out(self.ledger.last_view_gone(*slot))

    # -- what holds after each event -----------------------------------------------------------------------------------------

    @invariant()
    def both_books_are_sound(self) -> None:
        self.ledger.check()
        for frontend in self.connected():
            frontend.book.check()
            assert list(frontend.book._waiters) == frontend.waiters

    @invariant()
    def nobody_loses_memory_that_it_may_write(self) -> None:
        for frontend in self.frontends.values():
            lent = self.ledger.clients[frontend.client_id].leases
            for slot in frontend.may_write():
                lease = lent[slot.lease.lease_id]
                assert lease.start <= slot.start
                assert slot.start + slot.blocks <= lease.end

    @invariant()
    def a_frontend_holds_no_lease_that_the_engine_has_not_lent(self) -> None:
        for frontend in self.connected():
            if self.engine_sees(frontend):
                lent = self.ledger.clients[frontend.client_id].leases
                for lease_id, lease in frontend.book.leases.items():
                    assert (lent[lease_id].start, lent[lease_id].blocks) == (lease.slots.start, lease.slots.length)

    # -- the end -------------------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "ledger"):
            return
        for frontend in list(self.frontends.values()):
            # What one left behind may be quarantined until its process is dead. And now and then, one dies while it is served.
            if not frontend.connected or (frontend.client_id + self.departures) % 3 == 0:
                self.read_all(frontend)
                self.kill(frontend)
        for frontend in [frontend for frontend in self.frontends.values() if not frontend.alive]:
            self.bury(frontend.client_id)
        self.settle()
        for frontend in self.connected():
            assert not frontend.waiters, "somebody waits for ever"
            assert not frontend.slots
            self.goodbye(frontend)
        self.settle()
        assert self.ledger.clients == {}
        assert self.frontends == {}
        assert self.ledger.free_nbytes == LEASABLE * BLOCK_NBYTES
        assert self.ledger.waiting_lease_requests == 0

    def settle(self) -> None:
        """Delivers, handles, releases and gives up until nothing happens any more."""
        while True:
            busy = False
            for frontend in list(self.frontends.values()):
                while frontend.to_engine:
                    busy = True
                    self.hear(frontend)
                while frontend.connected and frontend.to_frontend:
                    busy = True
                    self.frontend_hears(frontend)
                for slot in [slot for slot in frontend.slots if frontend.connected]:
                    busy = busy or slot.held or slot.viewed or slot.state is ClientSlot.WRITING
                    if slot.viewed:
                        self.unview(frontend, slot)
                    self.let_go(frontend, slot)
            for key in list(self.waiting):
                self.take_up(*key)
            for claim in list(self.claims):
                busy = True
                self.release_claim(claim, viewed=False)
                self.finish(claim)
            for client_id, generation in self.draining:
                busy = True
                self.carry_out(self.ledger.last_view_gone(client_id, generation))
            self.draining.clear()
            self.both_books_are_sound()
            if not busy:
                return


TestTogetherMachine = TogetherMachine.TestCase
TestTogetherMachine.settings = settings(max_examples=150, stateful_step_count=100, deadline=None)
