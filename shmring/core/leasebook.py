"""A frontend's book: slots in its leases, who waits for one, and what each slot is being used for.

Theory of operation: sans-I/O, like the engine's :mod:`.ledger`. A method takes an event (and ``now``, where time matters),
changes the book and returns effects that the client must carry out in order: send this message, wake that waiter. Slots
are allocated inside leases with no message and no lock. Waiters are served strictly in order; while the first waits for
a lease, everything that is empty goes back to the engine (it could not hold what the first needs), so two frontends that
wait for each other's memory can't both keep it.

A slot is *held* while the caller has it (inside ``async with client.slot()``) and *viewed* while a view of it is alive in
this process; it becomes free only when it is neither, nor with the engine. A held slot that the engine has released is
CACHED: its content is intact and it can be submitted again.

Invariants (:meth:`LeaseBook.check`): slots of a lease are disjoint; a free slot is in no list; at most one lease request
is outstanding.

Slots in device memory have a book of their own. A generation must not mean two slots of one client, so one book numbers those
of both.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Sequence

from shmring.core.blocks import RunAllocator
from shmring.core.geometry import BLOCK_NBYTES, GENERATION_BITS, Geometry, blocks_for, slot_blocks
from shmring.core.messages import (
    DEVICE_MEMORY,
    HOST_MEMORY,
    SLOT_HEADER_NBYTES,
    LeaseGrant,
    LeaseRequest,
    LeaseReturn,
    Memory,
    SlotRef,
)
from shmring.core.states import CLIENT_SLOT, ClientSlot, ClientSlotEvent, advance
from shmring.errors import CapacityError, RemoteProtocolError

__all__ = ["Acquired", "Effect", "HeldLease", "LeaseBook", "LeaseBookLimits", "Send", "SlotRecord"]


#: How much of a lease that was sized for one large slot a later one must take, to be worth holding it. By ``bench
#: allocator``: with 0 slabs are 78 % full before a slot has to wait, with 0.5 it is 85 %, with 0.9 it is 91 %. Slots of
#: one stream of equal or nearly equal sizes go on using their lease without asking.
_LARGE_LEASE_SHARE = 0.9


@dataclasses.dataclass(frozen=True, slots=True)
class LeaseBookLimits:
    """What bounds this book: the engine's limits, and how this client sizes and keeps its leases.

    ``first_block`` and ``slab_nbytes`` are where leases of this ``memory`` begin and end in the engine's address space.
    """

    client_id: int
    slab_nbytes: int
    leasable_nbytes: int
    max_leases: int
    lease_nbytes: int
    lease_idle_s: float
    memory: Memory = HOST_MEMORY
    first_block: int = Geometry.LEASABLE_START


@dataclasses.dataclass(slots=True, eq=False)
class HeldLease:
    """A lease of ours; in blocks of the slab."""

    lease_id: int
    is_base: bool
    slots: RunAllocator
    empty_since: float
    recalled: bool = False


@dataclasses.dataclass(slots=True, eq=False)
class SlotRecord:
    """A slot: ``start`` and ``blocks`` in blocks of the slab, ``nbytes`` of content behind its header."""

    lease: HeldLease
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
        return SlotRef(self.lease.lease_id, self.offset, self.nbytes, self.generation)


@dataclasses.dataclass(frozen=True, slots=True)
class Send:
    """Send this message to the engine."""

    message: LeaseRequest | LeaseReturn


@dataclasses.dataclass(frozen=True, slots=True)
class Acquired:
    """The waiter that queued with this ticket has its slot."""

    ticket: int
    slot: SlotRecord


Effect = Send | Acquired


@dataclasses.dataclass(frozen=True, slots=True)
class Waiter:
    nbytes: int
    held: bool


class LeaseBook:
    """A frontend's book for one connection. Every method is one event; the returned effects are the caller's next duty."""

    def __init__(self, limits: LeaseBookLimits) -> None:
        self.limits = limits
        self.leases: dict[int, HeldLease] = {}
        self._waiters: dict[int, Waiter] = {}  # by ticket, in order of arrival
        self._submitted: dict[int, SlotRecord] = {}  # by generation
        self._others: set[SlotRecord] = set()  # WRITING, CACHED, DRAINING
        self._recalls = 0  # leases that were recalled and are still held
        self._token = 0
        self._requested_nbytes = 0  # of the lease request that is outstanding
        self._prefetch_nbytes = 0  # bytes that a caller wanted that did not wait; 0: none
        self._next_generation = (limits.client_id << GENERATION_BITS) + 1

    # -- leases ----------------------------------------------------------------------------------------------------

    def granted(self, grant: LeaseGrant, now: float) -> list[Effect]:
        """The engine lends a range.

        Raises:
            RemoteProtocolError: it is not a range of the slab.
        """
        start, misaligned = divmod(grant.offset, BLOCK_NBYTES)
        blocks, ragged = divmod(grant.nbytes, BLOCK_NBYTES)
        outside = start < self.limits.first_block or grant.offset + grant.nbytes > self.limits.slab_nbytes
        if misaligned or ragged or outside or blocks < 1:
            raise RemoteProtocolError(f"lease {grant.lease_id} [{grant.offset}, +{grant.nbytes}) is no range of the slab")
        self.leases[grant.lease_id] = HeldLease(grant.lease_id, grant.token == 0, RunAllocator(start, blocks), now)
        if grant.token == self._token:
            self._requested_nbytes = self._prefetch_nbytes = 0
        return self._serve_waiters()

    def recalled(self, lease_ids: Collection[int]) -> list[Effect]:
        """The engine wants leases back: nothing more is allocated in them, and each goes back as soon as it is empty."""
        for lease_id in lease_ids:
            lease = self.leases.get(lease_id)
            if lease is not None and not lease.recalled:  # else our return and the recall have crossed
                lease.recalled = True
                self._recalls += 1
        return self._serve_waiters()

    def expire(self, now: float) -> list[Effect]:
        """Returns further leases that have been empty for long enough."""
        deadline = now - self.limits.lease_idle_s
        idle = [lease for lease in self._spare_leases() if lease.empty_since <= deadline]
        return self._return(idle)

    def next_expiry(self) -> float | None:
        """When :meth:`expire` has something to do at the earliest; None if nothing is spare."""
        first: float | None = None
        for lease in self.leases.values():  # after each release: most often there is one, the base lease
            if not lease.is_base and lease.slots.is_empty and (first is None or lease.empty_since < first):
                first = lease.empty_since
        return None if first is None else first + self.limits.lease_idle_s

    def _spare_leases(self) -> Iterator[HeldLease]:
        return (lease for lease in self.leases.values() if lease.slots.is_empty and not lease.is_base)

    def _return(self, leases: Sequence[HeldLease]) -> list[Effect]:
        for lease in leases:
            del self.leases[lease.lease_id]
            self._recalls -= lease.recalled
        return [Send(LeaseReturn(tuple(lease.lease_id for lease in leases)))] if leases else []

    # -- acquiring -------------------------------------------------------------------------------------------------

    def acquire(self, nbytes: int, *, held: bool) -> SlotRecord | None:
        """Takes a slot for ``nbytes`` of content now; None if that would overtake a waiter or needs a lease.

        Raises:
            CapacityError: it is larger than what the engine can lease out.
        """
        self.check_capacity(nbytes)
        return None if self._waiters else self._allocate(nbytes, held)

    def queue(self, ticket: int, nbytes: int, *, held: bool) -> list[Effect]:
        """Waits in line for a slot; :class:`Acquired` with this ticket comes as an effect of this or a later event."""
        self.check_capacity(nbytes)
        self._waiters[ticket] = Waiter(nbytes, held)
        return self._serve_waiters()

    def prefetch(self, nbytes: int) -> list[Effect]:
        """Asks for a lease for a caller that did not find a slot and does not wait, so that its next try may find one."""
        self._prefetch_nbytes = nbytes
        return self._serve_waiters()

    def cancel(self, ticket: int) -> list[Effect]:
        """Leaves the line, and passes the turn on."""
        self._waiters.pop(ticket, None)
        return self._serve_waiters()

    def check_capacity(self, nbytes: int) -> None:
        """Raises :class:`CapacityError` if a slot for ``nbytes`` can never be had."""
        if nbytes + SLOT_HEADER_NBYTES > self.limits.leasable_nbytes:
            capacity = self.limits.leasable_nbytes - SLOT_HEADER_NBYTES
            option = "device_slab_nbytes" if self.limits.memory == DEVICE_MEMORY else "slab_nbytes"
            raise CapacityError(
                f"{nbytes} bytes can never fit: the engine leases out {capacity} bytes there; raise its {option}",
                needed=nbytes,
                capacity=capacity,
            )

    def _allocate(self, nbytes: int, held: bool) -> SlotRecord | None:
        blocks = slot_blocks(nbytes)
        for lease in self.leases.values():
            if not self.takes(lease, blocks) or (start := lease.slots.allocate(blocks)) is None:
                continue
            state = advance(CLIENT_SLOT, ClientSlot.FREE, ClientSlotEvent.ACQUIRE)
            slot = SlotRecord(lease, start, blocks, nbytes, state, held)
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
        return common or _LARGE_LEASE_SHARE * whole <= blocks or len(self.leases) >= self.limits.max_leases

    def _serve_waiters(self) -> list[Effect]:
        """Serves waiters in order; asks for, withdraws and returns leases as the first of the rest needs."""
        if not (self._waiters or self._prefetch_nbytes or self._requested_nbytes or self._recalls):
            return []
        effects: list[Effect] = []
        while self._waiters:
            ticket, waiter = next(iter(self._waiters.items()))
            slot = self._allocate(waiter.nbytes, waiter.held)
            if slot is None:
                break
            del self._waiters[ticket]
            effects.append(Acquired(ticket, slot))
        first = next(iter(self._waiters.values()), None)
        needed = self._prefetch_nbytes if first is None else first.nbytes
        # What is empty can't hold what the first waiter needs, or it would have it.
        effects += self._return(
            [lease for lease in self.leases.values() if lease.slots.is_empty and (lease.recalled or first is not None)]
        )
        return effects + self._request_lease(slot_blocks(needed) * BLOCK_NBYTES if first is not None or needed else 0)

    def _request_lease(self, nbytes: int) -> list[Effect]:
        """Makes the outstanding lease request what is needed; 0 withdraws it."""
        if nbytes == self._requested_nbytes or (nbytes and len(self.leases) >= self.limits.max_leases):
            return []
        self._token += 1
        self._requested_nbytes = nbytes
        # Large ones are sized exactly: half of a lease would stay unused beside them.
        preferred = self.limits.lease_nbytes if 2 * nbytes <= self.limits.lease_nbytes else nbytes
        return [Send(LeaseRequest(self._token, nbytes, preferred if nbytes else 0, self.limits.memory))]

    # -- using -----------------------------------------------------------------------------------------------------

    def submit(self, slot: SlotRecord, numbers: LeaseBook | None = None) -> int:
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

    def released(self, generations: Collection[int], now: float) -> tuple[list[Effect], int]:
        """The engine hands slots back.

        Returns:
            The effects, and how many of the generations were not ours to begin with (a late or doubled release).
        """
        unknown = 0
        for generation in generations:
            slot = self._submitted.pop(generation, None)
            if slot is None:
                unknown += 1
            elif slot.held:
                self._others.add(slot)
                slot.state = advance(CLIENT_SLOT, slot.state, ClientSlotEvent.RELEASE_RETAINED)
            else:
                self._leave(slot, ClientSlotEvent.RELEASE, ClientSlotEvent.RELEASE_VIEWED, now)
        return self._serve_waiters(), unknown

    def give_up(self, slot: SlotRecord, now: float) -> list[Effect]:
        """The caller lets a slot go. If the engine still has it, it comes back with its release. A second call does nothing."""
        slot.held = False
        if slot.state is ClientSlot.WRITING:
            self._leave(slot, ClientSlotEvent.DISCARD, ClientSlotEvent.DISCARD_VIEWED, now)
        elif slot.state is ClientSlot.CACHED:
            self._leave(slot, ClientSlotEvent.EVICT, ClientSlotEvent.EVICT_VIEWED, now)
        else:
            return []
        return self._serve_waiters()

    def last_view_gone(self, slot: SlotRecord, now: float) -> list[Effect]:
        """The last view of a slot has died in this process."""
        slot.viewed = False
        if slot.state is not ClientSlot.DRAINING:
            return []
        self._others.discard(slot)
        self._free(slot, advance(CLIENT_SLOT, slot.state, ClientSlotEvent.LAST_VIEW_GONE), now)
        return self._serve_waiters()

    def _leave(self, slot: SlotRecord, event: ClientSlotEvent, event_viewed: ClientSlotEvent, now: float) -> None:
        state = advance(CLIENT_SLOT, slot.state, event_viewed if slot.viewed else event)
        self._others.discard(slot)
        if state is ClientSlot.DRAINING:
            slot.state = state
            self._others.add(slot)
        else:
            self._free(slot, state, now)

    def _free(self, slot: SlotRecord, state: ClientSlot, now: float) -> None:
        slot.state = state
        slot.lease.slots.free(slot.start, slot.blocks)
        slot.lease.empty_since = now

    # -- what there is ---------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Callers in line for a slot."""
        return len(self._waiters)

    @property
    def leased_nbytes(self) -> int:
        """Bytes in leases of this client."""
        return sum(lease.slots.length for lease in self.leases.values()) * BLOCK_NBYTES

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
        return tuple(sorted({slot.lease.lease_id for slot in self._slots() if slot.viewed}))

    def _slots(self) -> Iterator[SlotRecord]:
        yield from self._submitted.values()
        yield from self._others

    def check(self) -> None:
        """Asserts the invariants of the book; for tests, and for closing."""
        assert self._recalls == sum(lease.recalled for lease in self.leases.values()), "a recall is forgotten"
        for lease in self.leases.values():
            slots = sorted((slot for slot in self._slots() if slot.lease is lease), key=lambda slot: slot.start)
            assert lease.slots.length - lease.slots.free_units == sum(slot.blocks for slot in slots), "a block is lost"
            assert all(a.start + a.blocks <= b.start for a, b in itertools.pairwise(slots)), "slots overlap"
        for slot in self._slots():
            assert slot.state is not ClientSlot.FREE
            assert self.leases.get(slot.lease.lease_id) is slot.lease, "a slot outlives its lease"
            assert (slot.state is ClientSlot.SUBMITTED) == (self._submitted.get(slot.generation) is slot)
