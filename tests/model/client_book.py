"""The model of ``core/client_book.pyx``: what a frontend's book does, in plain Python, flat and without speed.

It has the same methods, effects, errors and fields. ``tests/model/pairs.py`` runs the two side by side.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Sequence

from shmring.core.effects import Acquired, ClientEffect, Send
from shmring.core.geometry import BLOCK_NBYTES, GENERATION_BITS, ClientBookLimits, blocks_for, slot_blocks
from shmring.core.messages import DEVICE_MEMORY, SLOT_HEADER_NBYTES, LeaseGrant, LeaseRequest, LeaseReturn, SlotRef
from shmring.core.states import CLIENT_SLOT, ClientSlot, ClientSlotEvent, advance
from shmring.errors import CapacityError, RemoteProtocolError
from tests.model.blocks import RunAllocator


@dataclasses.dataclass(slots=True, eq=False)
class HeldLease:
    lease_id: int
    is_base: bool
    slots: RunAllocator
    empty_since: float
    recalled: bool = False
    kept_blocks: int = 0  # of it, that have become the engine's

    @property
    def is_empty(self) -> bool:
        """Whether no slot is in it."""
        return self.slots.free_units == self.slots.length - self.kept_blocks


@dataclasses.dataclass(slots=True, eq=False)
class ClientSlotRecord:
    lease: HeldLease | None
    start: int
    blocks: int
    nbytes: int
    state: ClientSlot
    held: bool
    viewed: bool = False
    generation: int = 0

    @property
    def offset(self) -> int:
        """Where its header stands in the slab, in bytes."""
        return self.start * BLOCK_NBYTES

    def ref(self) -> SlotRef:
        """How a message describes it."""
        assert self.lease is not None
        return SlotRef(self.lease.lease_id, self.offset, self.nbytes, self.generation)


@dataclasses.dataclass(slots=True, eq=False)
class Waiter:
    nbytes: int
    held: bool
    vain_moments: int = 0  # of its turn, as many as its patience at most
    rest_moments: int = 0  # so many more it lets those pass that want less
    patience: int = 2  # so many moments its turn lasts, where somebody behind it wants less


class ClientBook:
    """A frontend's book for one connection. Every method is one event; the returned effects are the caller's next duty."""

    def __init__(self, limits: ClientBookLimits) -> None:
        self.limits = limits
        self.leases: dict[int, HeldLease] = {}
        self._waiters: dict[int, Waiter] = {}  # by ticket, in order of arrival
        self._submitted: dict[int, ClientSlotRecord] = {}  # by generation
        self._others: set[ClientSlotRecord] = set()  # WRITING, CACHED, DRAINING
        self._token = 0
        self._requested_nbytes = 0  # of the lease request that is outstanding
        self._request_waits = False  # whether it says that a caller waits
        self._wish_nbytes = 0  # what a caller wanted that did not wait; 0: nothing
        self._next_generation = (limits.client_id << GENERATION_BITS) + 1

    # -- leases ----------------------------------------------------------------------------------------------------

    def granted(self, grant: LeaseGrant, now: float) -> list[ClientEffect]:
        """The engine lends a range.

        Raises:
            RemoteProtocolError: it is not a range of what is leased out, or is lent already.
        """
        start, misaligned = divmod(grant.offset, BLOCK_NBYTES)
        blocks, ragged = divmod(grant.nbytes, BLOCK_NBYTES)
        end_nbytes = self.limits.first_block * BLOCK_NBYTES + self.limits.leasable_nbytes
        outside = start < self.limits.first_block or grant.offset + grant.nbytes > end_nbytes
        if misaligned or ragged or outside or blocks < 1:
            raise RemoteProtocolError(
                f"lease {grant.lease_id} [{grant.offset}, +{grant.nbytes}) is no range of what is leased out"
            )
        if grant.lease_id in self.leases or self.has(start, blocks):
            raise RemoteProtocolError(f"lease {grant.lease_id} [{grant.offset}, +{grant.nbytes}) is lent already")
        self.leases[grant.lease_id] = HeldLease(grant.lease_id, grant.token == 0, RunAllocator(start, blocks), now)
        if grant.token == self._token:
            self._requested_nbytes = self._wish_nbytes = 0
        return self._serve_waiters()

    def has(self, start: int, blocks: int) -> bool:
        """Whether some of these blocks are in a lease of ours, and have not become the engine's (:meth:`kept`)."""
        ours = [run for lease in self.leases.values() for run in lease.slots.runs()]
        ours += [(slot.start, slot.blocks) for slot in self._slots() if slot.lease is not None]
        return any(first < start + blocks and start < first + length for first, length in ours)

    def recalled(self, lease_ids: Collection[int]) -> list[ClientEffect]:
        """The engine wants leases back: nothing more is allocated in them, and each goes back as soon as it is empty."""
        for lease_id in lease_ids:
            lease = self.leases.get(lease_id)
            if lease is not None:  # else our return and the recall have crossed
                lease.recalled = True
        return self._serve_waiters()

    def expire(self, now: float) -> list[ClientEffect]:
        """Returns further leases that have been empty for long enough."""
        deadline = now - self.limits.lease_idle_s
        idle = [lease for lease in self._spare_leases() if lease.empty_since <= deadline]
        return self._return(idle)

    def next_expiry(self) -> float | None:
        """When :meth:`expire` has something to do at the earliest; None if nothing is spare."""
        return min((lease.empty_since + self.limits.lease_idle_s for lease in self._spare_leases()), default=None)

    def _spare_leases(self) -> list[HeldLease]:
        return [lease for lease in self.leases.values() if lease.is_empty and not lease.is_base]

    def _return(self, leases: Sequence[HeldLease]) -> list[ClientEffect]:
        for lease in leases:
            del self.leases[lease.lease_id]
        return [Send(LeaseReturn(tuple(lease.lease_id for lease in leases)))] if leases else []

    # -- acquiring -------------------------------------------------------------------------------------------------

    def acquire(self, nbytes: int, *, held: bool) -> ClientSlotRecord | None:
        """Takes a slot for ``nbytes`` of content now; None if that would overtake a waiter or needs a lease.

        Raises:
            CapacityError: it is larger than what the engine can lease out.
        """
        self.check_capacity(nbytes)
        return None if self._waiters else self._allocate(nbytes, held)

    def queue(self, ticket: int, nbytes: int, *, held: bool) -> list[ClientEffect]:
        """Waits in line for a slot; :class:`Acquired` with this ticket comes as an effect of this or a later event."""
        self.check_capacity(nbytes)
        self._waiters[ticket] = Waiter(nbytes, held)
        return self._serve_waiters()

    def prefetch(self, nbytes: int) -> list[ClientEffect]:
        """Asks for a lease for a caller that did not find a slot and does not wait, so that its next try may find one."""
        self._wish_nbytes = nbytes
        return self._serve_waiters()

    def cancel(self, ticket: int) -> list[ClientEffect]:
        """Leaves the line, and passes the turn on."""
        self._waiters.pop(ticket, None)
        return self._serve_waiters()

    def moment_passed(self) -> list[ClientEffect]:
        """Another moment has passed while callers wait."""
        asks = self._who_asks()
        before = itertools.takewhile(lambda waiter: waiter is not asks or waiter.rest_moments, self._waiters.values())
        rests = [waiter for waiter in before if waiter.rest_moments]  # for the others time stands still
        if asks is not None and not asks.rest_moments:
            waiters = list(self._waiters.values())
            behind = waiters[waiters.index(asks) + 1 :]
            asks.vain_moments = min(asks.vain_moments + 1, asks.patience)
            if asks.vain_moments == asks.patience and any(
                slot_blocks(waiter.nbytes) < slot_blocks(asks.nbytes) for waiter in behind
            ):
                asks.rest_moments, asks.vain_moments, asks.patience = asks.patience, 0, 2 * asks.patience
        for waiter in rests:
            waiter.rest_moments -= 1
        return self._serve_waiters()

    def _is_held_back(self, waiter: Waiter) -> bool:
        """Whether a waiter wants as much as one before it that rests, or more."""
        before = itertools.takewhile(lambda other: other is not waiter, self._waiters.values())
        return any(other.rest_moments and slot_blocks(other.nbytes) <= slot_blocks(waiter.nbytes) for other in before)

    def _who_asks(self) -> Waiter | None:
        """For whom the lease request stands, where nobody can be served: who has the turn; or else the first, who rests."""
        may = [waiter for waiter in self._waiters.values() if not waiter.rest_moments and not self._is_held_back(waiter)]
        return next(iter([*may, *self._waiters.values()]), None)

    def check_capacity(self, nbytes: int) -> None:
        """Raises :class:`CapacityError` if a slot for ``nbytes`` can never be had."""
        if nbytes < 0:
            raise ValueError(f"a slot has at least 0 bytes, not {nbytes}")
        if nbytes + SLOT_HEADER_NBYTES > self.limits.leasable_nbytes:
            capacity = self.limits.leasable_nbytes - SLOT_HEADER_NBYTES
            option = "device_slab_nbytes" if self.limits.memory == DEVICE_MEMORY else "slab_nbytes"
            raise CapacityError(
                f"{nbytes} bytes can never fit: the engine leases out {capacity} bytes there; raise its {option}",
                needed=nbytes,
                capacity=capacity,
            )

    def _allocate(self, nbytes: int, held: bool) -> ClientSlotRecord | None:
        blocks = slot_blocks(nbytes)
        for lease in self.leases.values():
            if not self.takes(lease, blocks) or (start := lease.slots.allocate(blocks)) is None:
                continue
            state = advance(CLIENT_SLOT, ClientSlot.FREE, ClientSlotEvent.ACQUIRE)
            slot = ClientSlotRecord(lease, start, blocks, nbytes, state, held)
            self._others.add(slot)
            return slot
        return None

    def takes(self, lease: HeldLease, blocks: int) -> bool:
        """Whether a slot of so many blocks is put into this lease, if there is room.

        Into a further one that was sized for a large slot only one that is worth it: such a lease must go back whole, so small
        ones, which could stand anywhere, do not hold it; unless no further lease can be had.
        """
        if lease.recalled:
            return False
        whole = lease.slots.length
        common = lease.is_base or whole <= blocks_for(self.limits.lease_nbytes)
        return common or 9 * whole <= 10 * blocks or len(self.leases) >= self.limits.max_leases

    def _serve_waiters(self) -> list[ClientEffect]:
        """Serves waiters in order; asks for, withdraws and returns leases as the one needs that asks."""
        effects: list[ClientEffect] = []
        for ticket, waiter in list(self._waiters.items()):
            if self._is_held_back(waiter):
                continue
            slot = self._allocate(waiter.nbytes, waiter.held)
            if slot is not None:
                del self._waiters[ticket]
                effects.append(Acquired(ticket, slot))  # type: ignore[arg-type]  # the record of the model
            elif not waiter.rest_moments:
                break
        asks = self._who_asks()
        # What is empty can't hold what it needs, or it would have it.
        effects += self._return(
            [lease for lease in self.leases.values() if lease.is_empty and (lease.recalled or asks is not None)]
        )
        needed = self._wish_nbytes if asks is None else asks.nbytes
        nbytes = slot_blocks(needed) * BLOCK_NBYTES if asks is not None or needed else 0
        return effects + self._request_lease(nbytes, asks is not None)

    def _request_lease(self, nbytes: int, waits: bool) -> list[ClientEffect]:
        """Makes the outstanding lease request what is needed; 0 withdraws it."""
        if nbytes == self._requested_nbytes and (not nbytes or waits == self._request_waits):
            return []
        if nbytes and len(self.leases) >= self.limits.max_leases:
            return []
        self._token += 1
        self._requested_nbytes, self._request_waits = nbytes, waits
        # Large ones are sized exactly: half of a lease would stay unused beside them.
        preferred = self.limits.lease_nbytes if 2 * nbytes <= self.limits.lease_nbytes else nbytes
        memory = self.limits.memory
        return [Send(LeaseRequest(self._token, nbytes, preferred if nbytes else 0, memory, waits or not nbytes))]

    # -- using -----------------------------------------------------------------------------------------------------

    def submit(self, slot: ClientSlotRecord, numbers: ClientBook | None = None) -> int:
        """Hands a slot to the engine, and returns the generation under which it goes.

        Args:
            slot: of this book.
            numbers: the book that numbers the submissions of a client that has two; None: this one.

        Raises:
            LocalProtocolError: it is not WRITING or CACHED. Nothing was changed.
        """
        slot.state = advance(CLIENT_SLOT, slot.state, ClientSlotEvent.SUBMIT)
        numbers = self if numbers is None else numbers
        slot.generation = numbers._next_generation
        numbers._next_generation += 1
        self._others.discard(slot)
        self._submitted[slot.generation] = slot
        return slot.generation

    def released(self, generations: Collection[int], now: float) -> tuple[list[ClientEffect], int]:
        """The engine hands slots back.

        Returns:
            The effects, and how many of the generations were not ours to begin with (a late or doubled release).
        """
        return self.released_at([(generation, now) for generation in generations])

    def released_at(self, released: Collection[tuple[int, float]]) -> tuple[list[ClientEffect], int]:
        """The same, each at a time of its own."""
        unknown = 0
        for generation, now in released:
            slot = self._submitted.pop(generation, None)
            if slot is None:
                unknown += 1
            elif slot.held:
                self._others.add(slot)
                slot.state = advance(CLIENT_SLOT, slot.state, ClientSlotEvent.RELEASE_RETAINED)
            else:
                self._leave(slot, ClientSlotEvent.RELEASE, ClientSlotEvent.RELEASE_VIEWED, now)
        return self._serve_waiters(), unknown

    def give_up(self, slot: ClientSlotRecord, now: float) -> list[ClientEffect]:
        """The caller lets a slot go. If the engine still has it, it comes back with its release. A second call does nothing."""
        slot.held = False
        if slot.state is ClientSlot.WRITING:
            self._leave(slot, ClientSlotEvent.DISCARD, ClientSlotEvent.DISCARD_VIEWED, now)
        elif slot.state is ClientSlot.CACHED:
            self._leave(slot, ClientSlotEvent.EVICT, ClientSlotEvent.EVICT_VIEWED, now)
        else:
            return []
        return self._serve_waiters()

    def last_view_gone(self, slot: ClientSlotRecord, now: float) -> list[ClientEffect]:
        """The last view of a slot has died in this process."""
        slot.viewed = False
        if slot.state is not ClientSlot.DRAINING:
            return []
        self._others.discard(slot)
        self._free(slot, advance(CLIENT_SLOT, slot.state, ClientSlotEvent.LAST_VIEW_GONE), now)
        return self._serve_waiters()

    def kept(self, generation: int, now: float) -> list[ClientEffect]:
        """The engine keeps what was submitted under this generation: its blocks are in no lease of ours any more.

        Raises:
            RemoteProtocolError: nothing of ours was.
        """
        slot = self._submitted.pop(generation, None)
        if slot is None:
            raise RemoteProtocolError(f"the engine keeps slot {generation}, which it does not have")
        slot.state = advance(CLIENT_SLOT, slot.state, ClientSlotEvent.KEEP)
        lease, slot.lease = slot.lease, None
        assert lease is not None
        lease.kept_blocks += slot.blocks
        lease.empty_since = now
        gone = [lease] if lease.kept_blocks == lease.slots.length else []
        return self._return(gone) + self._serve_waiters()

    def split(self, slot: ClientSlotRecord, sizes: Sequence[int]) -> list[ClientSlotRecord]:
        """Makes slots of these sizes out of one that is being written, in its memory and in this order."""
        starts = itertools.accumulate(map(slot_blocks, sizes), initial=slot.start)
        parts = [
            ClientSlotRecord(slot.lease, start, slot_blocks(nbytes), nbytes, ClientSlot.WRITING, slot.held)
            for start, nbytes in zip(starts, sizes, strict=False)
        ]
        self._others.discard(slot)
        self._others.update(parts)
        slot.state = ClientSlot.FREE
        return parts

    def _leave(self, slot: ClientSlotRecord, event: ClientSlotEvent, event_viewed: ClientSlotEvent, now: float) -> None:
        state = advance(CLIENT_SLOT, slot.state, event_viewed if slot.viewed else event)
        self._others.discard(slot)
        if state is ClientSlot.DRAINING:
            slot.state = state
            self._others.add(slot)
        else:
            self._free(slot, state, now)

    def _free(self, slot: ClientSlotRecord, state: ClientSlot, now: float) -> None:
        assert slot.lease is not None
        slot.state = state
        slot.lease.slots.free(slot.start, slot.blocks)
        if slot.lease.is_empty:
            slot.lease.empty_since = now

    # -- what there is ---------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Callers in line for a slot."""
        return len(self._waiters)

    @property
    def leased_nbytes(self) -> int:
        """Bytes in leases of this client."""
        return sum(lease.slots.length - lease.kept_blocks for lease in self.leases.values()) * BLOCK_NBYTES

    @property
    def free_nbytes(self) -> int:
        """Bytes of them that are in no slot."""
        return sum(lease.slots.free_units for lease in self.leases.values()) * BLOCK_NBYTES

    def count(self, state: ClientSlot) -> int:
        """Slots in this state."""
        return sum(slot.state is state for slot in self._slots())

    def draining_nbytes(self) -> int:
        """Bytes that only live views keep from being used."""
        return sum(slot.blocks for slot in self._others if slot.state is ClientSlot.DRAINING) * BLOCK_NBYTES

    def leases_in_use(self) -> tuple[int, ...]:
        """Leases in which this process may still write: those of slots that are viewed."""
        return tuple(sorted({slot.lease.lease_id for slot in self._slots() if slot.viewed and slot.lease is not None}))

    def _slots(self) -> list[ClientSlotRecord]:
        return [*self._submitted.values(), *self._others]

    def check(self) -> None:
        """Asserts the invariants of the book; for tests, and for closing."""
        for lease in self.leases.values():
            slots = sorted((slot for slot in self._slots() if slot.lease is lease), key=lambda slot: slot.start)
            taken = lease.kept_blocks + sum(slot.blocks for slot in slots)
            assert lease.slots.length - lease.slots.free_units == taken, "a block is lost"
            assert all(a.start + a.blocks <= b.start for a, b in itertools.pairwise(slots)), "slots overlap"
        for slot in self._slots():
            assert slot.state is not ClientSlot.FREE
            assert slot.lease is not None
            assert self.leases.get(slot.lease.lease_id) is slot.lease, "a slot outlives its lease"
            assert (slot.state is ClientSlot.SUBMITTED) == (self._submitted.get(slot.generation) is slot)
