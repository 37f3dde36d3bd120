"""A frontend's book, compiled and in Python side by side: callers, and an engine that does as it likes.

What follows, the model says (:mod:`tests.model.pairs`). What is asked for here besides: nobody waits for what is free, what is
needed is asked for, and nothing is kept that somebody else may need. At the end everything is given up and the engine grants
what is asked for: every waiter must be served.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shmring.core.compiled import ClientSlotRecord
from shmring.core.effects import ClientEffect, Send
from shmring.core.geometry import BLOCK_NBYTES, ClientBookLimits, slot_blocks
from shmring.core.messages import LeaseGrant, LeaseRequest
from shmring.core.states import ClientSlot
from shmring.errors import LocalProtocolError, RemoteProtocolError
from tests.core.test_engine_book_machine import content, happens_to
from tests.model.pairs import PairedClientBook

LEASABLE = 16
MAX_LEASES = 4
LEASE_BLOCKS = 4
IDLE_S = 5.0
UNASKED = 1 << 32  # no request has this token


class ClientBookMachine(RuleBasedStateMachine):
    """The callers of one frontend, and its engine."""

    @initialize(
        leases=st.lists(st.integers(1, LEASE_BLOCKS), max_size=3),
        waiting=st.one_of(st.just([]), st.lists(st.integers(1, 8), min_size=2, max_size=4)),
    )
    def create(self, leases: list[int], waiting: list[int]) -> None:
        """With nothing, or with a base lease, or with further ones; and with callers that wait, or none."""
        limits = ClientBookLimits(
            client_id=3,
            leasable_nbytes=LEASABLE * BLOCK_NBYTES,
            max_leases=MAX_LEASES,
            lease_nbytes=LEASE_BLOCKS * BLOCK_NBYTES,
            lease_idle_s=IDLE_S,
        )
        self.book = PairedClientBook(limits)
        self.model = self.book.model
        self.now = 0.0
        self.request: LeaseRequest | None = None  # outstanding at the engine
        self.crossed: LeaseRequest | None = None  # granted by the engine before it saw that it was replaced
        self.number = 0  # of tickets and leases
        for number, blocks in enumerate(leases):
            self.grant(LeaseRequest(UNASKED if number else 0, 0), self.places(blocks)[0], blocks)
        for blocks in waiting:
            self.queue(blocks, False)

    def next_number(self) -> int:
        self.number += 1
        return self.number

    def carry_out(self, effects: Sequence[ClientEffect]) -> None:
        """The engine hears what the book asks for."""
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, LeaseRequest):
                self.crossed, self.request = self.request, effect.message if effect.message.nbytes else None

    def slots(self, *states: ClientSlot) -> list[ClientSlotRecord]:
        slots = sorted(self.book._slots(), key=lambda slot: (slot.start, slot.generation))
        return [slot for slot in slots if slot.state in states or not states]

    def places(self, blocks: int) -> list[int]:
        """Where the engine can lend so many blocks."""
        lent = {b for lease in self.model.leases.values() for b in range(lease.slots.start, lease.slots.end)}
        return [start for start in range(1, 2 + LEASABLE - blocks) if not lent & {*range(start, start + blocks)}]

    # -- the callers -------------------------------------------------------------------------------------------------------

    @rule(blocks=st.integers(1, 3) | st.integers(1, 8), held=st.booleans(), prefetch=st.booleans(), send=st.booleans())
    def acquire(self, blocks: int, held: bool, prefetch: bool, send: bool) -> None:
        slot = self.book.acquire(content(blocks), held=held)
        if slot is not None and send:
            self.book.submit(slot)
        elif slot is None and prefetch:
            self.carry_out(self.book.prefetch(content(blocks)))

    @precondition(lambda self: self.model.waiting < 4)
    @rule(blocks=st.integers(1, 4) | st.integers(1, LEASABLE), held=st.booleans())
    def queue(self, blocks: int, held: bool) -> None:
        self.carry_out(self.book.queue(self.next_number(), content(blocks), held=held))

    @happens_to(lambda self: self.model._waiters)
    def cancel(self, draw: Any, ticket: int) -> None:
        self.carry_out(self.book.cancel(ticket))

    @precondition(lambda self: self.model.waiting > 1)
    @rule(moments=st.sampled_from([1, 2, 2, 5]))
    def moments_pass(self, moments: int) -> None:
        for _ in range(moments):
            self.carry_out(self.book.moment_passed())

    @happens_to(slots)
    def submit(self, draw: Any, slot: ClientSlotRecord) -> None:
        with contextlib.suppress(LocalProtocolError):
            self.book.submit(slot)

    @happens_to(lambda self: [slot for slot in self.slots(ClientSlot.WRITING) if slot.blocks > 1 and not slot.viewed])
    def split(self, draw: Any, slot: ClientSlotRecord) -> None:
        self.book.split(slot, [content(1), content(slot.blocks - 1)])

    @happens_to(slots)
    def give_up(self, draw: Any, slot: ClientSlotRecord) -> None:
        self.carry_out(self.book.give_up(slot, self.now))

    @happens_to(lambda self: self.slots(ClientSlot.WRITING, ClientSlot.SUBMITTED, ClientSlot.CACHED))
    def view(self, draw: Any, slot: ClientSlotRecord) -> None:
        slot.viewed = True

    @happens_to(lambda self: [slot for slot in self.slots() if slot.viewed])
    def last_view_gone(self, draw: Any, slot: ClientSlotRecord) -> None:
        self.carry_out(self.book.last_view_gone(slot, self.now))

    # -- the engine --------------------------------------------------------------------------------------------------------

    @happens_to(lambda self: self.slots(ClientSlot.SUBMITTED))
    def release(self, draw: Any, slot: ClientSlotRecord) -> None:
        """This one, and others or what it does not have."""
        ours = [slot.generation for slot in self.slots(ClientSlot.SUBMITTED)]
        stale = [self.model._next_generation, 0, 7]
        more = draw(st.lists(st.sampled_from(ours + stale), max_size=3))
        self.carry_out(self.book.released([slot.generation, *more], self.now)[0])

    @happens_to(lambda self: self.slots(ClientSlot.SUBMITTED))
    def keep(self, draw: Any, slot: ClientSlotRecord) -> None:
        with contextlib.suppress(RemoteProtocolError):
            self.carry_out(self.book.kept(slot.generation + draw(st.sampled_from([0, 0, 0, 1000])), self.now))

    @happens_to(lambda self: [request for request in (self.request, self.crossed) if request])
    def answer(self, draw: Any, request: LeaseRequest) -> None:
        """What is free, or now and then what is lent already, or not all there."""
        blocks = (request.preferred_nbytes if draw(st.booleans()) else request.nbytes) // BLOCK_NBYTES
        if len(self.model.leases) < MAX_LEASES:
            self.grant(request, draw(st.sampled_from([*self.places(blocks), 1, LEASABLE])), blocks)

    def grant(self, request: LeaseRequest, start: int, blocks: int) -> None:
        grant = LeaseGrant(request.token, self.next_number(), start * BLOCK_NBYTES, blocks * BLOCK_NBYTES)
        try:
            effects = self.book.granted(grant, self.now)
        except RemoteProtocolError:
            return
        self.request = None if request is self.request else self.request
        self.crossed = None if request is self.crossed else self.crossed
        self.carry_out(effects)

    @happens_to(lambda self: self.model.leases)
    def recall(self, draw: Any, lease_id: int) -> None:
        more = draw(st.lists(st.sampled_from([*self.model.leases, 999]), max_size=2))
        self.carry_out(self.book.recalled([lease_id, *more]))

    @precondition(lambda self: self.model.leases)
    @rule(seconds=st.sampled_from([0.0, 1.0, IDLE_S]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.carry_out(self.book.expire(self.now))
        expiry = self.book.next_expiry()
        assert expiry is None or expiry > self.now

    # -- what holds after each event -----------------------------------------------------------------------------------------

    @invariant()
    def nobody_waits_in_vain(self) -> None:
        assert self.model.cancel(-1) == [], "nobody has that ticket, and something follows"
        asks = self.model._who_asks()
        if asks is not None:
            request = self.request
            is_requested = request is not None and request.waits and request.nbytes == slot_blocks(asks.nbytes) * BLOCK_NBYTES
            assert is_requested or len(self.model.leases) >= MAX_LEASES, "nobody asks for what is needed"
        elif not self.model._wish_nbytes:
            assert self.request is None, "a lease is asked for that nobody needs"

    @invariant()
    def nothing_is_kept_that_somebody_else_may_need(self) -> None:
        for lease in self.model.leases.values():
            assert not lease.is_empty or not (lease.recalled or self.model.waiting)

    def teardown(self) -> None:
        if not hasattr(self, "book"):
            return
        for _ in range(1 + self.model.waiting):
            for slot in self.slots():
                self.carry_out(self.book.give_up(slot, self.now))
            self.carry_out(self.book.released([slot.generation for slot in self.slots(ClientSlot.SUBMITTED)], self.now)[0])
            for slot in self.slots(ClientSlot.DRAINING):
                self.carry_out(self.book.last_view_gone(slot, self.now))
            while self.request is not None and self.model.waiting:
                blocks = self.request.nbytes // BLOCK_NBYTES
                places = self.places(blocks)
                if not places:
                    break
                self.grant(self.request, places[0], blocks)
        assert not self.model.waiting, "a waiter was never served"
        assert not self.slots()
        self.book.recalled(list(self.model.leases))
        assert not self.book.leases
        assert self.book.free_nbytes == 0


TestClientBookMachine = ClientBookMachine.TestCase
TestClientBookMachine.settings = settings(stateful_step_count=100)
