"""A frontend's book: slots in its leases, the state of each slot, and the callers that wait for one.

Theory of operation: sans-I/O, like the engine's ``engine_book.pyx``. A method takes an event (and ``now``, where time matters),
changes the book and returns effects that the client must carry out in order: send this message, wake that waiter. Slots
are allocated inside leases with no message and no lock. While a waiter waits for a lease, all empty leases go back to the
engine, since the slot that it needs did not fit into them. So two frontends that wait for each other's memory can't both keep
it.

Waiters are served in order. The lease request, of which there is one at a time, stands for the first that finds no slot, and
those behind it wait. What it waits for may not come: a process that has stopped keeps its memory. So it has a bounded patience.
When that is used up, and somebody behind it wants fewer blocks, it *rests* for as long as it has waited, and lets those pass
that want less. It still takes what fits, and the request stands for it if it stands for nobody else; who wants as much or more
waits with it. Then it has its turn again, and is twice as patient each time. So whatever ends in any bounded time is outlasted,
and a stream of small ones can't overtake a large one for ever. For those behind the waiter whose turn it is, time stands still.
Otherwise two that are equally patient could take turns, and a third one would never have one.

The client says when another moment has passed (:meth:`ClientBook.moment_passed`); a moment is its to choose, the book has no
clock. While somebody rests, an event looks at each waiter; otherwise it looks at the first only.

A slot is *held* while the caller has it (inside ``async with client.slot()``) and *viewed* while a view of it is alive in
this process; it becomes free only when it is neither, nor with the engine. A held slot that the engine has released is
CACHED: its content is intact and it can be submitted again.

Slots in device memory have a book of their own. A generation must not mean two slots of one client, so one of the two books
numbers the slots of both.

The methods for every message have an entry in C. If they return a list of effects, they return None for an empty one.
``tests/model/client_book.py`` specifies the book in plain Python, and the tests compare the two.

The book does not trust the engine. It checks that a lease lies in the leasable memory and overlaps no other lease. So no slot
lies where another process writes, or where this process can't write.

Invariants (:meth:`ClientBook.check`): slots of a lease are disjoint, and so are leases, except for blocks that became the
engine's; a free slot is in no list; at most one lease request is outstanding.
"""

import cython

from libc.math cimport INFINITY
from libc.stdint cimport UINT64_MAX, int64_t, uint64_t

from shmring.core.effects import Acquired, Send
from shmring.core.messages import DEVICE_MEMORY, LeaseRequest, LeaseReturn, SlotRef
from shmring.core.states import ClientSlot, ClientSlotEvent
from shmring.errors import CapacityError, RemoteProtocolError

cdef enum:
    CLIENT_SLOT_STATES = 6

assert len(ClientSlot) == CLIENT_SLOT_STATES

cdef int CLIENT_SLOT_FREE = ClientSlot.FREE
cdef int WRITING = ClientSlot.WRITING
cdef int SUBMITTED = ClientSlot.SUBMITTED
cdef int CACHED = ClientSlot.CACHED
cdef int DRAINING = ClientSlot.DRAINING
cdef int ACQUIRE = ClientSlotEvent.ACQUIRE
cdef int CLIENT_SUBMIT = ClientSlotEvent.SUBMIT
cdef int DISCARD = ClientSlotEvent.DISCARD
cdef int DISCARD_VIEWED = ClientSlotEvent.DISCARD_VIEWED
cdef int CLIENT_RELEASE = ClientSlotEvent.RELEASE
cdef int RELEASE_RETAINED = ClientSlotEvent.RELEASE_RETAINED
cdef int CLIENT_RELEASE_VIEWED = ClientSlotEvent.RELEASE_VIEWED
cdef int EVICT = ClientSlotEvent.EVICT
cdef int EVICT_VIEWED = ClientSlotEvent.EVICT_VIEWED
cdef int CLIENT_LAST_VIEW_GONE = ClientSlotEvent.LAST_VIEW_GONE
cdef int KEPT = ClientSlot.KEPT
cdef int KEEP = ClientSlotEvent.KEEP

cdef enum:
    # A lease that was sized for one large slot gets only slots of at least this share of its size. By ``bench allocator``:
    # without this rule, slabs are 78 % full before a slot has to wait; with a share of 0.5, 85 %; with 0.9, 91 %. Slots of one
    # stream of equal or nearly equal sizes go on using their lease without asking.
    LARGE_SHARE = 9
    OF_LARGE = 10

cdef enum:
    # So many moments end before a waiter rests for the first time. Its turn may have come at the end of the first of them.
    FIRST_PATIENCE = 2


@cython.final
cdef class HeldLease:
    """A lease of ours; in blocks of the slab."""

    cdef public uint64_t lease_id
    cdef public bint is_base
    cdef public RunAllocator slots
    cdef public double empty_since
    cdef public bint recalled
    cdef public uint64_t kept_blocks   # of it, that have become the engine's

    cdef bint is_empty(self) noexcept:
        """Whether no slot is in it."""
        return self.slots.free_units == self.slots.length - self.kept_blocks


@cython.final
@cython.freelist(256)
@cython.no_gc
cdef class ClientSlotRecord:
    """A slot: ``start`` and ``blocks`` in blocks of the slab, ``nbytes`` of content behind its header."""

    cdef public HeldLease lease  # type: HeldLease | None
    cdef public uint64_t start
    cdef public uint64_t blocks
    cdef public uint64_t nbytes
    cdef public uint64_t generation
    cdef public bint held
    cdef public bint viewed
    cdef int state_number

    @property
    def state(self) -> ClientSlot:
        return client_slots.state(self.state_number)

    @state.setter
    def state(self, int state):
        self.state_number = state

    @property
    def offset(self) -> int:
        """Where its header stands in the slab, in bytes."""
        return self.start * BLOCK_NBYTES

    cpdef bint is_submittable(self) noexcept:
        """Whether its holder may submit it now: the engine does not have it, or keeps it and this client has it pinned."""
        return self.state_number == KEPT or (self.held and (self.state_number == WRITING or self.state_number == CACHED))

    def ref(self) -> SlotRef:
        """How a message describes it."""
        return SlotRef(self.lease.lease_id, self.start * BLOCK_NBYTES, self.nbytes, self.generation)


@cython.final
cdef class Waiter:
    """A caller that waits for a slot."""

    cdef public uint64_t nbytes
    cdef public bint held
    cdef public uint64_t vain_moments  # of its turn, as many as its patience at most
    cdef public uint64_t rest_moments  # so many more it lets those pass that want less
    cdef public uint64_t patience      # so many moments its turn lasts, where somebody behind it wants less


cdef class ClientBook:
    """A frontend's book for one connection. Every method is one event; the returned effects are the caller's next duty."""

    cdef readonly object limits  # type: ClientBookLimits
    cdef public dict leases  # type: dict[int, HeldLease]  # by id
    cdef public dict _waiters  # type: dict[Any, Waiter]  # by ticket, in order of arrival
    cdef Numbered _with_engine            # ClientSlotRecord by generation: SUBMITTED
    cdef Numbered _here                   # by start: WRITING, CACHED, DRAINING
    cdef public uint64_t _token
    cdef public uint64_t _requested_nbytes  # of the lease request that is outstanding
    cdef public bint _request_waits       # whether it says that a caller waits
    cdef public uint64_t _wish_nbytes     # what a caller wanted that did not wait; 0: nothing
    cdef public uint64_t _next_generation
    cdef int64_t _capacity_nbytes
    cdef uint64_t lease_end_nbytes        # where the memory that is leased out ends in the address space
    cdef uint64_t _max_leases
    cdef uint64_t _lease_nbytes
    cdef uint64_t _common_blocks
    cdef double _lease_idle_s
    cdef uint64_t _base_leases            # of those that are held
    cdef uint64_t _recalls                # leases that were recalled and are still held
    cdef uint64_t _slots_in[CLIENT_SLOT_STATES]
    cdef uint64_t _draining_blocks

    def __init__(self, limits: ClientBookLimits):
        self.limits = limits
        self.leases, self._waiters = {}, {}
        self._with_engine, self._here = Numbered(), Numbered()
        self._next_generation = (limits.client_id << GENERATION_BITS) + 1
        self._capacity_nbytes = limits.leasable_nbytes - SLOT_HEADER_NBYTES
        self.lease_end_nbytes = limits.first_block * BLOCK_NBYTES + limits.leasable_nbytes
        self._max_leases, self._lease_nbytes = limits.max_leases, limits.lease_nbytes
        self._common_blocks = blocks_for(self._lease_nbytes)
        self._lease_idle_s = limits.lease_idle_s

    # -- leases ----------------------------------------------------------------------------------------------------

    def granted(self, grant: LeaseGrant, double now) -> list[ClientEffect]:
        """The engine lends a range.

        Raises:
            RemoteProtocolError: it is not a range of what is leased out, or is lent already.
        """
        cdef HeldLease lease
        start, misaligned = divmod(grant.offset, BLOCK_NBYTES)
        blocks, ragged = divmod(grant.nbytes, BLOCK_NBYTES)
        outside = start < self.limits.first_block or grant.offset + grant.nbytes > self.lease_end_nbytes
        if misaligned or ragged or outside or blocks < 1:
            raise RemoteProtocolError(
                f"lease {grant.lease_id} [{grant.offset}, +{grant.nbytes}) is no range of what is leased out"
            )
        if grant.lease_id in self.leases or self.has(start, blocks):
            raise RemoteProtocolError(f"lease {grant.lease_id} [{grant.offset}, +{grant.nbytes}) is lent already")
        lease = HeldLease.__new__(HeldLease)
        lease.lease_id, lease.is_base, lease.slots = grant.lease_id, grant.token == 0, RunAllocator(start, blocks)
        lease.empty_since = now
        self._base_leases += lease.is_base
        self.leases[lease.lease_id] = lease
        if grant.token == self._token:
            self._requested_nbytes = self._wish_nbytes = 0
        return self.serve() or []

    def has(self, uint64_t start, uint64_t blocks) -> bool:
        """Whether some of these blocks are in a lease of ours, and have not become the engine's (:meth:`kept`)."""
        cdef HeldLease lease
        cdef ClientSlotRecord slot
        cdef uint64_t end = start + blocks
        for lease in self.leases.values():
            if not lease.slots.start < end or not start < lease.slots.start + lease.slots.length:
                continue
            if not lease.kept_blocks:
                return True
            runs = [(slot.start, slot.blocks) for slot in self._slots() if slot.lease is lease] + lease.slots.runs()
            if any([first < end and start < first + length for first, length in runs]):
                return True
        return False

    def recalled(self, lease_ids: Collection[int]) -> list[ClientEffect]:
        """The engine recalls leases: no more slots are allocated in them, and each goes back as soon as it is empty."""
        cdef HeldLease lease
        for lease_id in lease_ids:
            lease = self.leases.get(lease_id)
            if lease is not None and not lease.recalled:  # else our return and the recall have crossed
                lease.recalled = True
                self._recalls += 1
        return self.serve() or []

    def expire(self, double now) -> list[ClientEffect]:
        """Returns further leases that have been empty for long enough."""
        cdef HeldLease lease
        cdef double deadline = now - self._lease_idle_s
        cdef list idle = [], effects = []
        for lease in self.leases.values():
            if not lease.is_base and lease.is_empty() and lease.empty_since <= deadline:
                idle.append(lease)
        self._return(idle, effects)
        return effects

    def next_expiry(self) -> float | None:
        """When :meth:`expire` can return a lease at the earliest; None if there is no spare lease."""
        cdef double first = self.earliest_expiry()
        return None if first == INFINITY else first

    cdef bint is_time_asked_for(self, ClientSlotRecord slot) noexcept:
        """Whether the next event of a slot needs its time: one that empties a further lease does."""
        cdef HeldLease lease = slot.lease
        return lease is not None and not lease.is_base and lease.slots.free_units + slot.blocks == lease.slots.length - lease.kept_blocks

    cdef bint has_further_leases(self) noexcept:
        """Whether there is a lease beside the base lease; such a one may expire."""
        return <uint64_t>len(self.leases) > self._base_leases

    cdef double earliest_expiry(self) noexcept:
        """When a lease may be returned at the earliest; infinite if there is no spare lease."""
        cdef HeldLease lease
        cdef double first = INFINITY
        for lease in self.leases.values():
            if not lease.is_base and lease.is_empty() and lease.empty_since < first:
                first = lease.empty_since
        return first if first == INFINITY else first + self._lease_idle_s

    cdef int _return(self, list leases, list effects) except -1:
        cdef HeldLease lease
        for lease in leases:
            del self.leases[lease.lease_id]
            self._recalls -= lease.recalled
            self._base_leases -= lease.is_base
        if leases:
            effects.append(Send(LeaseReturn(tuple([lease.lease_id for lease in leases]))))
        return 0

    # -- acquiring -------------------------------------------------------------------------------------------------

    def acquire(self, nbytes: int, *, bint held) -> ClientSlotRecord | None:
        """Acquires a slot for ``nbytes`` of content now; None if that would overtake a waiter or needs a lease.

        Raises:
            CapacityError: it is larger than what the engine can lease out.
        """
        return self.acquire_asked(nbytes, held)

    cdef ClientSlotRecord acquire_asked(self, object nbytes, bint held):
        """Acquires a slot of any number of bytes that a caller has asked for, if that needs no waiting."""
        if not 0 <= nbytes <= self._capacity_nbytes:
            self.check_capacity(nbytes)
        return self.acquire_slot(nbytes, held)

    cdef ClientSlotRecord acquire_slot(self, uint64_t nbytes, bint held):
        """Acquires a slot; None if that would overtake a waiter or needs a lease."""
        if <int64_t>nbytes > self._capacity_nbytes:
            self.check_capacity(nbytes)
        return None if self._waiters else self.find_slot(nbytes, held)

    def queue(self, ticket, nbytes: int, *, bint held) -> list[ClientEffect]:
        """Waits in line for a slot; :class:`Acquired` with this ticket comes as an effect of this or a later event."""
        cdef Waiter waiter = Waiter.__new__(Waiter)
        self.check_capacity(nbytes)
        waiter.nbytes, waiter.held, waiter.patience = nbytes, held, FIRST_PATIENCE
        self._waiters[ticket] = waiter
        return self.serve() or []

    def prefetch(self, uint64_t nbytes) -> list[ClientEffect]:
        """Asks for a lease for a caller that did not find a slot and does not wait, so that its next try may find one.

        This is a wish: it stands until it is granted, and recalls only leases that lie idle.
        """
        self._wish_nbytes = nbytes
        return self.serve() or []

    def cancel(self, ticket) -> list[ClientEffect]:
        """Leaves the line, and passes the turn on."""
        self._waiters.pop(ticket, None)
        return self.serve() or []

    def moment_passed(self) -> list[ClientEffect]:
        """Another moment has passed while callers wait. The client says so as long as there is one that is :attr:`waiting`."""
        cdef Waiter waiter, first = None
        cdef uint64_t blocks, least = UINT64_MAX
        cdef bint is_awaited = False  # whether somebody behind the first wants less
        for waiter in self._waiters.values():
            blocks = slot_blocks(waiter.nbytes)
            if blocks >= least:
                continue
            if first is not None:
                is_awaited = True
                break
            least = blocks
            if waiter.rest_moments:
                waiter.rest_moments -= 1
            else:
                first = waiter
        if first is not None:
            first.vain_moments += first.vain_moments < first.patience
            if is_awaited and first.vain_moments == first.patience:
                first.rest_moments, first.vain_moments, first.patience = first.patience, 0, 2 * first.patience
        return self.serve() or []

    def check_capacity(self, nbytes: int) -> None:
        """Raises :class:`CapacityError` if a slot for ``nbytes`` can never be had."""
        if nbytes < 0:
            raise ValueError(f"a slot has at least 0 bytes, not {nbytes}")
        if nbytes > self._capacity_nbytes:
            option = "device_slab_nbytes" if self.limits.memory == DEVICE_MEMORY else "slab_nbytes"
            raise CapacityError(
                f"{nbytes} bytes can never fit: the engine leases out {self._capacity_nbytes} bytes there; raise its {option}",
                needed=nbytes,
                capacity=self._capacity_nbytes,
            )

    cdef ClientSlotRecord find_slot(self, uint64_t nbytes, bint held):
        """Allocates a slot, even if callers wait; None if there is no room for it. The caller has checked the size."""
        cdef uint64_t blocks = slot_blocks(nbytes)
        cdef int64_t start
        cdef HeldLease lease
        cdef ClientSlotRecord slot
        for lease in self.leases.values():
            if lease.slots.free_units < blocks or not self.takes(lease, blocks):
                continue
            slot = ClientSlotRecord.__new__(ClientSlotRecord)
            self._here.make_ready()
            start = lease.slots.take(blocks)  # from here on, nothing is allocated
            if start < 0:
                continue
            slot.lease, slot.start, slot.blocks, slot.nbytes, slot.held = lease, start, blocks, nbytes, held
            slot.state_number = CLIENT_SLOT_FREE
            self._move(slot, ACQUIRE)
            self._here.put(slot.start, slot)
            return slot
        return None

    cdef bint takes(self, HeldLease lease, uint64_t blocks) noexcept:
        """Whether a slot of so many blocks is put into this lease, if there is room.

        A further lease that was sized for a large slot takes no small ones: it must go back whole, and small slots fit into any
        lease. The exception is a client that can have no further lease.
        """
        if lease.recalled:
            return False
        return (
            lease.is_base
            or lease.slots.length <= self._common_blocks
            or LARGE_SHARE * lease.slots.length <= OF_LARGE * blocks
            or <uint64_t>len(self.leases) >= self._max_leases
        )

    cdef list serve(self):
        """Serves waiters in order. Asks for, withdraws and returns leases as the first one that is not served, and does not rest,
        needs it."""
        cdef Waiter waiter, first = None
        cdef HeldLease lease
        cdef ClientSlotRecord slot
        cdef list effects, served, spare
        cdef uint64_t needed = 0, blocks, least = UINT64_MAX  # of those that rest
        if not (self._waiters or self._wish_nbytes or self._requested_nbytes or self._recalls):
            return None
        effects, served, spare = [], [], []
        for ticket, waiter in self._waiters.items():
            blocks = slot_blocks(waiter.nbytes)
            if blocks >= least:
                continue
            slot = self.find_slot(waiter.nbytes, waiter.held)
            if slot is not None:
                served.append(ticket)
                effects.append(Acquired(ticket, slot))
            elif waiter.rest_moments:
                least = blocks
            else:
                first = waiter
                break
        for ticket in served:
            del self._waiters[ticket]
        if first is None and self._waiters:
            first = next(iter(self._waiters.values()))
        # Its slot fits into no empty lease, or it would have it.
        for lease in self.leases.values():
            if lease.is_empty() and (lease.recalled or first is not None):
                spare.append(lease)
        self._return(spare, effects)
        if first is not None:
            needed = slot_blocks(first.nbytes) * BLOCK_NBYTES
        elif self._wish_nbytes:
            needed = slot_blocks(self._wish_nbytes) * BLOCK_NBYTES
        self._request_lease(needed, first is not None, effects)
        return effects

    cdef int _request_lease(self, uint64_t nbytes, bint waits, list effects) except -1:
        """Makes the outstanding lease request what is needed; 0 withdraws it."""
        cdef uint64_t preferred
        if nbytes == self._requested_nbytes and (not nbytes or waits == self._request_waits):
            return 0
        if nbytes and <uint64_t>len(self.leases) >= self._max_leases:
            return 0
        self._token += 1
        self._requested_nbytes, self._request_waits = nbytes, waits
        # Large ones are sized exactly: half of a lease would stay unused beside them.
        preferred = self._lease_nbytes if 2 * nbytes <= self._lease_nbytes else nbytes
        request = LeaseRequest(self._token, nbytes, preferred if nbytes else 0, self.limits.memory, waits or not nbytes)
        effects.append(Send(request))
        return 0

    # -- using -----------------------------------------------------------------------------------------------------

    def submit(self, ClientSlotRecord slot not None, ClientBook numbers=None) -> int:
        """Hands a slot to the engine, and returns the generation under which it goes.

        Args:
            slot: of this book.
            numbers: the book that numbers the submissions of a client that has two; None: this one.

        Raises:
            LocalProtocolError: it is not WRITING or CACHED. Nothing was changed.
        """
        return self.submit_slot(slot, self if numbers is None else numbers)

    cdef uint64_t submit_slot(self, ClientSlotRecord slot, ClientBook numbers) except 0:
        """Hands a slot to the engine, under the next generation of the book that numbers."""
        self._move(slot, CLIENT_SUBMIT)
        slot.generation = numbers._next_generation
        numbers._next_generation += 1
        self._here.take(slot.start)
        self._with_engine.put(slot.generation, slot)
        return slot.generation

    def released(self, generations: Collection[int], double now) -> tuple[list[ClientEffect], int]:
        """The engine has released slots.

        Returns:
            The effects, and how many of the generations were not with the engine (a late or doubled release).
        """
        cdef Py_ssize_t unknown = 0
        for generation in generations:
            unknown += not self.release_generation(generation, now)
        return self.serve() or [], unknown

    def kept(self, uint64_t generation, double now) -> list[ClientEffect]:
        """The engine keeps what was submitted under this generation: its blocks are in no lease of ours any more.

        Raises:
            RemoteProtocolError: no slot of ours was.
        """
        cdef ClientSlotRecord slot = self._with_engine.take(generation)
        cdef HeldLease lease
        cdef list effects = []
        if slot is None:
            raise RemoteProtocolError(f"the engine keeps slot {generation}, which it does not have")
        self._move(slot, KEEP)
        lease, slot.lease = slot.lease, None
        lease.kept_blocks += slot.blocks
        lease.empty_since = now
        if lease.kept_blocks == lease.slots.length:  # nothing is left of it
            self._return([lease], effects)
        return effects + (self.serve() or [])

    def split(self, ClientSlotRecord slot not None, sizes: Sequence[int]) -> list[ClientSlotRecord]:
        """Makes slots of these sizes out of one that is being written, in its memory and in this order.

        Its ``nbytes`` are those that :func:`~shmring.core.geometry.nbytes_for_slots` says.
        """
        cdef ClientSlotRecord part
        cdef uint64_t start = slot.start
        cdef list parts = []
        assert slot.state_number == WRITING and sizes and sum([slot_blocks(nbytes) for nbytes in sizes]) == slot.blocks
        self._here.take(start)
        for nbytes in sizes:
            part = ClientSlotRecord.__new__(ClientSlotRecord)
            part.lease, part.start, part.nbytes, part.held = slot.lease, start, nbytes, slot.held
            part.blocks = slot_blocks(part.nbytes)
            part.state_number = CLIENT_SLOT_FREE
            self._move(part, ACQUIRE)
            self._here.put(part.start, part)
            start += part.blocks
            parts.append(part)
        self._slots_in[WRITING] -= 1
        slot.state_number = CLIENT_SLOT_FREE
        return parts

    cdef bint release_generation(self, uint64_t generation, double now) except -1:
        """The engine has released a slot; returns whether the slot was ours. The caller must then :meth:`serve`."""
        cdef ClientSlotRecord slot = self._with_engine.take(generation)
        if slot is None:
            return False
        if slot.held:
            self._here.put(slot.start, slot)
            self._move(slot, RELEASE_RETAINED)
        else:
            self._leave(slot, CLIENT_RELEASE_VIEWED if slot.viewed else CLIENT_RELEASE, now)
        return True

    def give_up(self, ClientSlotRecord slot not None, double now) -> list[ClientEffect]:
        """The caller leaves a slot. If the engine still has it, it comes back with its release. A second call does nothing."""
        return self.give_slot_up(slot, now) or []

    cdef list give_slot_up(self, ClientSlotRecord slot, double now):
        """The caller leaves a slot; returns the effects, or None."""
        slot.held = False
        if slot.state_number == WRITING:
            self._leave(slot, DISCARD_VIEWED if slot.viewed else DISCARD, now)
        elif slot.state_number == CACHED:
            self._leave(slot, EVICT_VIEWED if slot.viewed else EVICT, now)
        else:
            return None
        return self.serve()

    def last_view_gone(self, ClientSlotRecord slot not None, double now) -> list[ClientEffect]:
        """The last view of a slot has died in this process."""
        return self.view_gone(slot, now) or []

    cdef list view_gone(self, ClientSlotRecord slot, double now):
        """The last view of a slot has died here; returns the effects, or None."""
        slot.viewed = False
        if slot.state_number != DRAINING:
            return None
        self._leave(slot, CLIENT_LAST_VIEW_GONE, now)
        return self.serve()

    cdef int _leave(self, ClientSlotRecord slot, int event, double now) except -1:
        """A slot was left: it drains while it is viewed, otherwise its blocks are free."""
        cdef bint was_taken
        if self._move(slot, event) == DRAINING:
            if self._here.find(slot.start) == NULL:
                self._here.put(slot.start, slot)
            return 0
        self._here.take(slot.start)
        was_taken = slot.lease.slots.give(slot.start, slot.blocks)
        assert was_taken, "a slot has no blocks in its lease"
        if slot.lease.is_empty():
            slot.lease.empty_since = now
        return 0

    cdef int _move(self, ClientSlotRecord slot, int event) except -1:
        """Makes a transition of a slot, and returns its new state."""
        cdef int state = client_slots.advance(slot.state_number, event)
        self._slots_in[slot.state_number] -= slot.state_number != CLIENT_SLOT_FREE
        self._draining_blocks -= slot.blocks * (slot.state_number == DRAINING)
        slot.state_number = state
        self._slots_in[state] += state != CLIENT_SLOT_FREE and state != KEPT
        self._draining_blocks += slot.blocks * (state == DRAINING)
        return state

    # -- what there is ---------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Callers in line for a slot."""
        return len(self._waiters)

    @property
    def leased_nbytes(self) -> int:
        """Bytes in leases of this client."""
        return sum([lease.slots.length - lease.kept_blocks for lease in self.leases.values()]) * BLOCK_NBYTES

    @property
    def free_nbytes(self) -> int:
        """Bytes of them that are in no slot."""
        return sum([lease.slots.free_units for lease in self.leases.values()]) * BLOCK_NBYTES

    def count(self, int state: ClientSlot) -> int:
        """Slots in this state."""
        return self._slots_in[state]

    def draining_nbytes(self) -> int:
        """Bytes that only live views keep from being used."""
        return self._draining_blocks * BLOCK_NBYTES

    def leases_in_use(self) -> tuple[int, ...]:
        """Leases in which this process may still write: those of slots that are viewed."""
        return tuple(sorted({slot.lease.lease_id for slot in self._slots() if slot.viewed}))

    def _slots(self) -> list[ClientSlotRecord]:
        return self._with_engine.values() + self._here.values()

    def check(self) -> None:
        """Asserts the invariants of the book; for tests, and for closing."""
        cdef ClientSlotRecord slot
        slots = self._slots()
        assert self._recalls == sum(lease.recalled for lease in self.leases.values()), "a recall is forgotten"
        assert self._base_leases == sum(lease.is_base for lease in self.leases.values())
        assert list(self._slots_in) == [sum(slot.state is state for slot in slots) for state in ClientSlot]
        assert self._draining_blocks == sum(slot.blocks for slot in slots if slot.state is ClientSlot.DRAINING)
        for lease in self.leases.values():
            runs = sorted([(slot.start, slot.blocks) for slot in slots if slot.lease is lease] + lease.slots.runs())
            assert sum(blocks for _, blocks in runs) + lease.kept_blocks == lease.slots.length, "a block is lost"
            end = lease.slots.start
            for start, blocks in runs:
                assert start == end or (lease.kept_blocks and start > end), "slots overlap, or what is free is in a slot"
                end = start + blocks
        for slot in slots:
            assert slot.state_number != CLIENT_SLOT_FREE
            assert self.leases.get(slot.lease.lease_id) is slot.lease, "a slot outlives its lease"
            assert (slot.state_number == SUBMITTED) == (self._with_engine.get(slot.generation) is slot)
            assert (slot.state_number != SUBMITTED) == (self._here.get(slot.start) is slot)
