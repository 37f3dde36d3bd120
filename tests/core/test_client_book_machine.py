"""A frontend's book, compiled and in Python side by side, against a plain model: who has each block.

The engine grants, recalls and releases as it likes. Whoever is overtaken rests, or waits with one that rests and wants no more.
At the end of each example everything is given up and the engine grants what is asked for: every waiter must be served.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shmring.core.compiled import ClientSlotRecord
from shmring.core.effects import Acquired, ClientEffect, Send
from shmring.core.geometry import BLOCK_NBYTES, GENERATION_BITS, ClientBookLimits
from shmring.core.messages import SLOT_HEADER_NBYTES, LeaseGrant, LeaseRequest, LeaseReturn
from shmring.core.states import ClientSlot
from tests.model.pairs import PairedClientBook

LEASABLE = 16
MAX_LEASES = 4
LEASE_BLOCKS = 4
IDLE_S = 5.0

T = TypeVar("T")


def content(blocks: int) -> int:
    return blocks * BLOCK_NBYTES - SLOT_HEADER_NBYTES


def runs(blocks: Iterable[int]) -> list[tuple[int, int]]:
    """The maximal runs of a set of blocks, as (start, length)."""
    maximal_runs: list[tuple[int, int]] = []
    for block in sorted(blocks):
        if maximal_runs and sum(maximal_runs[-1]) == block:
            maximal_runs[-1] = (maximal_runs[-1][0], maximal_runs[-1][1] + 1)
        else:
            maximal_runs.append((block, 1))
    return maximal_runs


def fits(free: Iterable[int], blocks: int) -> bool:
    return any(length >= blocks for _, length in runs(free))


@dataclasses.dataclass
class ModelLease:
    blocks: set[int]
    is_base: bool
    empty_since: float
    recalled: bool = False


class ClientBookMachine(RuleBasedStateMachine):
    """The callers of one frontend, and its engine."""

    @initialize(base=st.integers(0, LEASE_BLOCKS))
    def create(self, base: int) -> None:
        limits = ClientBookLimits(
            client_id=3,
            leasable_nbytes=LEASABLE * BLOCK_NBYTES,
            max_leases=MAX_LEASES,
            lease_nbytes=LEASE_BLOCKS * BLOCK_NBYTES,
            lease_idle_s=IDLE_S,
        )
        self.book = PairedClientBook(limits)
        self.now = 0.0
        self.leases: dict[int, ModelLease] = {}
        self.slots: dict[ClientSlotRecord, ClientSlot] = {}  # all that are not free
        self.waiters: dict[int, int] = {}  # blocks, by ticket, in order
        self.request: LeaseRequest | None = None  # outstanding at the engine
        self.crossed: LeaseRequest | None = None  # granted by the engine before it saw that it was replaced
        self.prefetched_blocks = 0
        self.last_token = 0
        self.last_generation = 3 << GENERATION_BITS
        self.next_ticket = 1
        self.next_lease = 1
        if base:
            self.grant(LeaseRequest(0, base * BLOCK_NBYTES), 1, base)

    # -- the model ---------------------------------------------------------------------------------------------------------

    def used(self, lease_id: int) -> set[int]:
        slots = (slot for slot in self.slots if slot.lease.lease_id == lease_id)
        return {block for slot in slots for block in range(slot.start, slot.start + slot.blocks)}

    def free_in(self, lease_id: int) -> set[int]:
        return self.leases[lease_id].blocks - self.used(lease_id)

    def can_acquire(self, blocks: int) -> bool:
        return any(
            fits(self.free_in(i), blocks) and self.suits(lease, blocks)
            for i, lease in self.leases.items()
            if not lease.recalled
        )

    def suits(self, lease: ModelLease, blocks: int) -> bool:
        """Whether a lease is for slots of any size, or for large ones and this is one; or there can be no other."""
        if lease.is_base or len(lease.blocks) <= LEASE_BLOCKS or len(self.leases) >= MAX_LEASES:
            return True
        return 10 * blocks >= 9 * len(lease.blocks)

    def free_at_engine(self) -> set[int]:
        return set(range(1, 1 + LEASABLE)).difference(*(lease.blocks for lease in self.leases.values()))

    def took(self, slot: ClientSlotRecord, blocks: int) -> None:
        """Checks a slot that the book handed out, and enters it."""
        lease = self.leases[slot.lease.lease_id]
        assert slot.blocks == blocks
        assert not lease.recalled
        assert set(range(slot.start, slot.start + blocks)) <= self.free_in(slot.lease.lease_id)
        assert slot.state is ClientSlot.WRITING
        self.slots[slot] = ClientSlot.WRITING

    def left(self, slot: ClientSlotRecord) -> None:
        """A slot has been let go: it drains while it is viewed, else it is free."""
        if slot.viewed:
            self.slots[slot] = ClientSlot.DRAINING
        else:
            del self.slots[slot]
            self.leases[slot.lease.lease_id].empty_since = self.now

    def carry_out(self, effects: Sequence[ClientEffect]) -> None:
        for effect in effects:
            match effect:
                case Acquired(ticket, slot):
                    may = [*self.may_be_served()]
                    assert ticket in may, "somebody was overtaken"
                    assert all(self.rests(other) for other in may[: may.index(ticket)]), "somebody was overtaken in its turn"
                    self.took(slot, self.waiters.pop(ticket))
                case Send(LeaseReturn(lease_ids)):
                    assert lease_ids
                    for lease_id in lease_ids:
                        assert not self.used(lease_id)
                        del self.leases[lease_id]
                case Send(LeaseRequest(token, nbytes, preferred) as request):
                    assert token == self.last_token + 1
                    assert preferred >= nbytes
                    assert request.waits == (not nbytes or bool(self.waiters))
                    former = (self.request.nbytes, self.request.waits) if self.request is not None else (0, True)
                    assert (nbytes, request.waits) != former, "that was asked for already"
                    self.last_token = token
                    self.crossed = self.request
                    self.request = request if nbytes else None

    def rests(self, ticket: int) -> bool:
        return ticket in self.book._waiters and self.book._waiters[ticket].rest_moments > 0

    def may_be_served(self) -> Iterator[int]:
        """Yields who is served as soon as there is room: those that rest, who wants less than these, and who has the turn."""
        least = LEASABLE + 1
        for ticket, blocks in self.waiters.items():
            if blocks < least:
                yield ticket
                if not self.rests(ticket):
                    return
                least = blocks

    def draw_from(self, data: Any, items: Iterable[T]) -> T:
        return data.draw(st.sampled_from(list(items)))  # type: ignore[no-any-return]

    def in_state(self, *states: ClientSlot) -> list[ClientSlotRecord]:
        return [slot for slot, state in self.slots.items() if state in states]

    # -- the callers -------------------------------------------------------------------------------------------------------

    @rule(blocks=st.integers(1, 8), held=st.booleans(), prefetch=st.booleans(), send=st.booleans())
    def acquire(self, blocks: int, held: bool, prefetch: bool, send: bool) -> None:
        expected = not self.waiters and self.can_acquire(blocks)
        slot = self.book.acquire(content(blocks), held=held)
        assert (slot is not None) == expected
        if slot is not None:
            self.took(slot, blocks)
            if send:
                self.submit_slot(slot)
        elif prefetch:
            self.prefetched_blocks = blocks
            self.carry_out(self.book.prefetch(content(blocks)))

    @rule(blocks=st.integers(1, LEASABLE), held=st.booleans())
    def queue(self, blocks: int, held: bool) -> None:
        ticket, self.next_ticket = self.next_ticket, self.next_ticket + 1
        self.waiters[ticket] = blocks
        self.carry_out(self.book.queue(ticket, content(blocks), held=held))

    @precondition(lambda self: self.waiters)
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        ticket = self.draw_from(data, self.waiters)
        del self.waiters[ticket]
        self.carry_out(self.book.cancel(ticket))

    @precondition(lambda self: len(self.waiters) > 1)
    @rule(moments=st.sampled_from([1, 1, 2, 5]))
    def moments_pass(self, moments: int) -> None:
        for _ in range(moments):
            self.carry_out(self.book.moment_passed())

    @precondition(lambda self: self.in_state(ClientSlot.WRITING, ClientSlot.CACHED))
    @rule(data=st.data())
    def submit(self, data: Any) -> None:
        self.submit_slot(self.draw_from(data, self.in_state(ClientSlot.WRITING, ClientSlot.CACHED)))

    def submit_slot(self, slot: ClientSlotRecord) -> None:
        generation = self.book.submit(slot)
        assert generation > self.last_generation
        assert generation >> GENERATION_BITS == 3
        self.last_generation = generation
        self.slots[slot] = ClientSlot.SUBMITTED

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def give_up(self, data: Any) -> None:
        self.give_up_slot(self.draw_from(data, self.slots))

    def give_up_slot(self, slot: ClientSlotRecord) -> None:
        if self.slots[slot] in (ClientSlot.WRITING, ClientSlot.CACHED):
            self.left(slot)
        self.carry_out(self.book.give_up(slot, self.now))
        assert not slot.held

    @precondition(lambda self: self.in_state(ClientSlot.WRITING, ClientSlot.SUBMITTED, ClientSlot.CACHED))
    @rule(data=st.data())
    def view(self, data: Any) -> None:
        self.draw_from(data, self.in_state(ClientSlot.WRITING, ClientSlot.SUBMITTED, ClientSlot.CACHED)).viewed = True

    @precondition(lambda self: any(slot.viewed for slot in self.slots))
    @rule(data=st.data())
    def last_view_gone(self, data: Any) -> None:
        self.unview(self.draw_from(data, [slot for slot in self.slots if slot.viewed]))

    def unview(self, slot: ClientSlotRecord) -> None:
        if self.slots[slot] is ClientSlot.DRAINING:
            del self.slots[slot]
            self.leases[slot.lease.lease_id].empty_since = self.now
        self.carry_out(self.book.last_view_gone(slot, self.now))

    # -- the engine --------------------------------------------------------------------------------------------------------

    @rule(data=st.data())
    def release(self, data: Any) -> None:
        generations = [slot.generation for slot in self.in_state(ClientSlot.SUBMITTED)]
        stale = [self.last_generation + 1, 0, 7]
        self.release_generations(data.draw(st.lists(st.sampled_from(generations + stale), max_size=4), label="released"))

    def release_generations(self, generations: list[int]) -> None:
        ours = {slot.generation: slot for slot in self.in_state(ClientSlot.SUBMITTED)}
        for generation in ours.keys() & set(generations):
            slot = ours[generation]
            if slot.held:
                self.slots[slot] = ClientSlot.CACHED
            else:
                self.left(slot)
        effects, unknown = self.book.released(generations, self.now)
        assert unknown == len(generations) - len(ours.keys() & set(generations))
        self.carry_out(effects)

    @precondition(lambda self: self.request)
    @rule(data=st.data(), generous=st.booleans())
    def grant_request(self, data: Any, generous: bool) -> None:
        self.answer(data, self.request, generous)

    @precondition(lambda self: self.crossed)
    @rule(data=st.data(), generous=st.booleans())
    def grant_what_was_replaced(self, data: Any, generous: bool) -> None:
        self.answer(data, self.crossed, generous)

    def answer(self, data: Any, request: LeaseRequest | None, generous: bool) -> None:
        assert request is not None
        blocks = (request.preferred_nbytes if generous else request.nbytes) // BLOCK_NBYTES
        places = [start + i for start, length in runs(self.free_at_engine()) for i in range(length - blocks + 1)]
        if places and len(self.leases) < MAX_LEASES:
            self.grant(request, self.draw_from(data, places), blocks)

    def grant(self, request: LeaseRequest, start: int, blocks: int) -> None:
        lease_id, self.next_lease = self.next_lease, self.next_lease + 1
        self.leases[lease_id] = ModelLease(set(range(start, start + blocks)), request.token == 0, self.now)
        if request is self.request:
            self.request, self.prefetched_blocks = None, 0
        else:
            self.crossed = None
        grant = LeaseGrant(request.token, lease_id, start * BLOCK_NBYTES, blocks * BLOCK_NBYTES)
        self.carry_out(self.book.granted(grant, self.now))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def recall(self, data: Any) -> None:
        self.recall_leases(data.draw(st.lists(st.sampled_from([*self.leases, 999]), min_size=1, max_size=3), label="leases"))

    def recall_leases(self, lease_ids: list[int]) -> None:
        for lease_id in lease_ids:
            if lease_id in self.leases:
                self.leases[lease_id].recalled = True
        self.carry_out(self.book.recalled(lease_ids))

    @rule(seconds=st.sampled_from([0.0, 1.0, IDLE_S]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        idle = {i for i in self.spare() if self.leases[i].empty_since + IDLE_S <= self.now}
        when = self.book.next_expiry()
        assert (when is not None and when <= self.now) == bool(idle)
        self.carry_out(self.book.expire(self.now))
        assert not idle & self.leases.keys()
        assert self.book.next_expiry() == min((self.leases[i].empty_since + IDLE_S for i in self.spare()), default=None)

    def spare(self) -> set[int]:
        return {i for i, lease in self.leases.items() if not lease.is_base and not self.used(i)}

    # -- what holds after each event -----------------------------------------------------------------------------------------

    @invariant()
    def the_book_is_sound(self) -> None:
        self.book.check()

    @invariant()
    def the_book_is_the_models(self) -> None:
        assert self.book.leases.keys() == self.leases.keys()
        assert set(self.book._slots()) == set(self.slots)
        assert {slot: slot.state for slot in self.slots} == self.slots
        assert list(self.book._waiters) == list(self.waiters)
        assert self.book.leased_nbytes == sum(len(lease.blocks) for lease in self.leases.values()) * BLOCK_NBYTES
        assert self.book.free_nbytes == sum(len(self.free_in(i)) for i in self.leases) * BLOCK_NBYTES

    @invariant()
    def nobody_waits_in_vain(self) -> None:
        if self.waiters:
            may = [*self.may_be_served()]
            assert not any(self.can_acquire(self.waiters[ticket]) for ticket in may), "a waiter could be served"
            blocks = self.waiters[may[0] if self.rests(may[-1]) else may[-1]]  # whose turn it is, or of all that rest the first
            request = self.request
            is_requested = request is not None and request.waits and request.nbytes == blocks * BLOCK_NBYTES
            assert is_requested or len(self.leases) >= MAX_LEASES, "nobody asks for what is needed"
        elif not self.prefetched_blocks:
            assert self.request is None, "a lease is asked for that nobody needs"

    @invariant()
    def nothing_is_kept_that_somebody_else_may_need(self) -> None:
        for lease_id, lease in self.leases.items():
            assert self.used(lease_id) or not (lease.recalled or self.waiters)

    def teardown(self) -> None:
        if not hasattr(self, "book"):
            return
        for _ in range(1 + len(self.waiters)):
            for slot in list(self.slots):
                self.give_up_slot(slot)
            self.release_generations([slot.generation for slot in self.in_state(ClientSlot.SUBMITTED)])
            for slot in [slot for slot in self.slots if slot.viewed]:
                self.unview(slot)
            while self.request is not None and self.waiters:
                blocks = self.request.nbytes // BLOCK_NBYTES
                place = next((start for start, length in runs(self.free_at_engine()) if length >= blocks), None)
                if place is None:
                    break
                self.grant(self.request, place, blocks)
        assert not self.waiters, "a waiter was never served"
        assert not self.slots
        self.recall_leases(list(self.leases))
        assert not self.leases
        assert self.book.free_nbytes == 0


TestClientBookMachine = ClientBookMachine.TestCase
TestClientBookMachine.settings = settings(stateful_step_count=100)
