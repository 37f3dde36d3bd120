"""Lending one memory out in leases: the clients that wait for one, the clients that hold one, and the window.

A client has at most one request waiting in each memory. Requests are served in order of arrival, which is round robin over
clients. The first request that can't be served gets a *window*: the address range that is cheapest to empty. Its leases are
recalled, and it is closed to every other client until the request is granted or withdrawn. So small requests go on beside a
large one, but can't overtake it for ever. For each request behind the first, leases outside of the window are recalled if they
lie idle and would make room for it.

What is cheapest is decided by state (``_Price``), and by size only between ranges whose leases are in the same states: a lease
that lies idle (without live slots) is better than one in use, and one in use is better than one that was granted just now.
A frontend that is stopped, or writes into a slot that the engine has not heard of, does not answer a recall. A lease that was
recalled in vain is the last choice, and is not recalled again.

Nobody waits for the silence of one client while others would give their memory back. While a caller waits, the ring says when
another moment has passed (:meth:`Lending.moment_passed`; a moment is its to choose, the book has no clock). A lease whose
holder does not answer for two moments is *silent*. Then the window is chosen again, if there is a range in a better state, and
idle leases are recalled for the requests behind the first. The window never moves to a lease that was granted since it was
opened. So it moves only finitely often, and small requests can't overtake the large one for ever by taking what it leaves.

A window keeps its range from all others, so it is not kept for what does not come: when a second has passed since a lease in it
came back, and none is on its way, the request gives it up and *rests*. Others have their turn then. It rests for as long as it
has waited, and until there is a range whose holders answer; not so long if there is one whose leases lie idle or come back. It
has its turn in the line again then, and is twice as patient each time. So whatever ends in any bounded time is outlasted at last.
So a process that has stopped, a reader for whom a handler waits, and a client that wants more beside what it uses hold others up
for about as long as the request has waited already, and then these have their turn.

The owner's own leases in its window are not recalled. While a caller of the owner waits, the owner puts no slots into them, and
returns those that are empty; afterwards it goes on using them. A request for which no caller waits is a *wish*: it is granted
when there is room, and gets no window. If no request waits when a wish comes, and idle leases would make room for it, these are
recalled, whichever client has them. So idle clients keep no memory from busy ones, and a wish never recalls a lease in use.

The slab is lent out by one :class:`Lending`, a device slab by another. Both count blocks in one address space.

The cost of an event: a request behind other waiting requests is tried once, which is one search in the free runs. Free blocks
in the window are set apart from them (``_apart``), so that this search does not find them. Choosing a range takes one pass over
the leases by address. It is done once for a request, once for each grant or withdrawal that ends a window, and in each moment
once for each client that waits, if there are idle leases. Blocks that come back are offered to all waiting clients, which costs
nanoseconds for each one that they do not suffice for.
``tests/model/lending.py`` specifies the same without these optimisations.

A slot that the engine keeps leaves the lease that it was in (:meth:`Lending.carve`): from then on, the lease has a hole, into
which no slot can be put and which does not come back with the lease. So lent and kept memory is in *pieces*: ranges that do not
overlap. Unpinned kept content is as good as free: a request for a lease gets the range of the least recently used content, and
a window may lie over unpinned content. It does not lie over pinned content if another range can be had.

Invariants (:meth:`Lending.check`): free, lent and kept blocks add up, pieces do not overlap, and the counts are true.
"""

from libc.stdint cimport UINT64_MAX, int64_t, uint64_t
from libc.string cimport memcpy, memset

from shmring.core.effects import Granted, Recalled
from shmring.core.geometry import BLOCK_NBYTES as _BLOCK_NBYTES
from shmring.core.geometry import GENERATION_BITS as _GENERATION_BITS
from shmring.core.messages import DEVICE_MEMORY, HOST_MEMORY, LeaseGrant
from shmring.core.states import Lease, LeaseEvent
from shmring.errors import RemoteProtocolError

cdef enum:
    BLOCK_NBYTES = 4096        # of :mod:`shmring.core.geometry`
    GENERATION_BITS = 40
    LEASE_STATES = 3


cdef inline uint64_t blocks_for(uint64_t nbytes) noexcept nogil:
    """How many blocks so many bytes take, without a header: at least one."""
    return nbytes // BLOCK_NBYTES + (nbytes % BLOCK_NBYTES != 0 or nbytes == 0)


cdef inline uint64_t slot_blocks(uint64_t nbytes) noexcept nogil:
    """How many blocks a slot takes that has so many bytes of content behind its header."""
    # In two parts: nbytes with the header could exceed 64 bits.
    return nbytes // BLOCK_NBYTES + (nbytes % BLOCK_NBYTES + SLOT_HEADER_NBYTES + BLOCK_NBYTES - 1) // BLOCK_NBYTES


assert (_BLOCK_NBYTES, _GENERATION_BITS) == (BLOCK_NBYTES, GENERATION_BITS)
assert (HOST_MEMORY, DEVICE_MEMORY) == (HOST, DEVICE)

cdef int LEASE_FREE = Lease.FREE
cdef int QUARANTINED = Lease.QUARANTINED
cdef int GRANT = LeaseEvent.GRANT


cdef enum:
    # How many contents are tried, to make room for a lease by dropping the least recently used. Trying one takes half a
    # microsecond.
    MOST_TRIED = 128


cdef inline uint64_t _lent_blocks(LeaseRecord lease) noexcept:
    return lease.blocks - lease.kept_blocks


cdef enum:
    # After so many moments without an answer, a recalled lease is silent; for as many, a granted lease is granted just now.
    SILENT_AFTER = 2
    # A window waits for so many moments in vain at first. A frontend that writes is done in a second, as a rule.
    VAIN_MOMENTS = 40


cdef enum _Price:
    # What it costs to empty a piece, by its state; the worst first. A range is as good as the worst piece in it.
    MAY_NEVER_COME = 0  # a quarantined lease, which comes back when a process dies; pinned content
    LENT_SINCE          # lent since the window was opened
    NO_ANSWER           # recalled, and its holder does not answer: it is stopped, or busy with a slot
    GRANTED_NOW         # its holder waited for it, and is probably writing its first slot
    IN_USE              # it has live slots, or is the client's own
    RECALLED            # and its holder may still answer
    LIES_IDLE
    CAN_GO              # unpinned content
    PRICES


cdef inline int _worst(const uint64_t* counts) noexcept nogil:
    """The worst price of which there is a block; ``PRICES``: there is none."""
    cdef int price
    for price in range(PRICES):
        if counts[price]:
            return price
    return PRICES


cdef inline bint _is_less(const uint64_t* counts, const uint64_t* others) noexcept nogil:
    """Whether there is less of the worst, or as much of that and less of the next, and so on."""
    cdef int price
    for price in range(PRICES):
        if counts[price] != others[price]:
            return counts[price] < others[price]
    return False


cdef inline int _price_of(Piece piece, uint64_t client_id, uint64_t next_lease_id) noexcept:
    """What it costs to empty a piece for a client whose window was opened before this lease was granted."""
    cdef LeaseRecord lease = piece.lease
    if lease is None:
        return MAY_NEVER_COME if piece.kept.pins else CAN_GO
    if lease.state_number == QUARANTINED:
        return MAY_NEVER_COME
    if lease.lease_id >= next_lease_id:
        return LENT_SINCE
    if lease.client_id == client_id or lease.live.units != lease.kept_blocks:
        return IN_USE
    if lease.recalled:
        return RECALLED if lease.silent_moments < SILENT_AFTER else NO_ANSWER
    return GRANTED_NOW if lease.new_moments else LIES_IDLE


cdef class Lending:
    """The leases of one memory.

    Args:
        clients: of the engine, by id; shared by all of its lendings.
        limits: bounds per client.
        memory: which one.
        start, blocks: the range that is lent out, in blocks of the address space.
        first_lease_id: where its lease ids begin; those of two memories must not meet.
        contents: the content that is kept there; None: none ever is.
    """

    cdef readonly object limits  # type: EngineBookLimits
    cdef readonly int memory  # type: Memory
    cdef public dict clients  # type: dict[int, ClientRecord]
    cdef public RunAllocator _free
    cdef public dict _wants  # type: dict[int, LeaseWant]  # by client, in order of arrival
    cdef public Window _window  # type: Window | None
    cdef public list _apart  # type: list[tuple[int, int]]  # (start, blocks) of what is free in the window
    cdef public list _by_start  # type: list[Piece]  # every Piece, by address
    cdef public KeptBook contents  # type: KeptBook | None  # None: nothing is ever kept there
    cdef public uint64_t _next_lease_id
    cdef uint64_t _max_leases
    cdef uint64_t _quota_blocks
    cdef uint64_t _apart_blocks
    cdef uint64_t _blocks_in[LEASE_STATES]

    def __init__(
        self,
        dict clients: dict[int, ClientRecord],
        limits: EngineBookLimits,
        int memory: Memory,
        uint64_t start,
        uint64_t blocks,
        uint64_t first_lease_id,
        KeptBook contents=None,
    ):
        self.clients = clients
        self.limits = limits
        self.memory = memory
        self.contents = contents
        self._free = RunAllocator(start, blocks)
        self._wants, self._apart, self._by_start = {}, [], []
        self._next_lease_id = first_lease_id
        self._max_leases = limits.max_leases
        self._quota_blocks = limits.device_quota_blocks if memory == DEVICE else limits.quota_blocks

    @property
    def free_nbytes(self) -> int:
        """Free bytes that can be lent out."""
        return (self._free.free_units + self._apart_blocks) * BLOCK_NBYTES

    @property
    def waiting_lease_requests(self) -> int:
        """Clients that wait for a lease."""
        return len(self._wants)

    def leased_nbytes(self, int state: Lease) -> int:
        """Bytes in leases of this state."""
        return self._blocks_in[state] * BLOCK_NBYTES if state != LEASE_FREE else 0

    cdef bint is_awaited(self) except -1:
        """Whether a caller waits for a lease."""
        cdef LeaseWant want
        for want in self._wants.values():
            if want.waits:
                return True
        return False

    cdef object connect(self, ClientRecord client, uint64_t blocks):
        """Returns a base lease, smaller than asked for if less is free; None if no memory is free, or a client waits for it."""
        if self.is_awaited():
            return None
        self._make_room(blocks)
        blocks = min(blocks, self._free.largest())
        return self._lend(client, 0, self._free.take(blocks), blocks) if blocks else None

    cdef int ask(self, ClientRecord client, request: LeaseRequest, list effects) except -1:
        """A client asks for a lease; it replaces what the client asked for before, and 0 bytes withdraw that.

        If no caller waits for it, it is a wish: see the head of this file.

        Raises:
            RemoteProtocolError: it asks for more than can ever be granted.
        """
        cdef uint64_t nbytes = request.nbytes, blocks = blocks_for(nbytes)
        cdef bint waits = request.waits
        cdef LeaseWant want
        cdef ClientRecord owner
        if nbytes == 0:
            self._withdraw(client.client_id)
            return self.serve(effects)
        if blocks > self._free.length:
            raise RemoteProtocolError(f"a lease of {nbytes} bytes was requested of {self._free.length * BLOCK_NBYTES}")
        want = LeaseWant.__new__(LeaseWant)
        want.client_id, want.token, want.blocks, want.waits = client.client_id, request.token, blocks, waits
        want.preferred_blocks = min(max(blocks, blocks_for(request.preferred_nbytes)), self._free.length)
        want.patience = VAIN_MOMENTS
        self._wants[client.client_id] = want
        owner = None if self._window is None else self.clients[self._window.client_id]
        if owner is client and (self._window.blocks != blocks or not waits):
            self._close_window()
            self.serve(effects)
        elif owner is not None and self._is_over_quota(owner, (<LeaseWant>self._wants[owner.client_id]).blocks):
            self.serve(effects)
        elif self._serve_one(client, want, effects):  # the others were tried before
            self.serve(effects)
        if self._wants.get(client.client_id) is want and (waits or self._window is None):
            self._recall_idle(client, want, effects)
        return 0

    cdef int moment_passed(self, list effects) except -1:
        """Another moment has passed while callers wait: what does not answer is passed over."""
        cdef ClientRecord client
        cdef LeaseRecord lease
        cdef LeaseWant want
        cdef uint64_t too_many = UINT64_MAX  # blocks for which idle leases do not suffice
        cdef bint is_in_use, any_idle = False
        for client in self.clients.values():
            for lease in client.leases.values():
                if lease.memory == self.memory:
                    is_in_use = lease.live.units != lease.kept_blocks
                    lease.new_moments -= lease.new_moments > 0
                    lease.silent_moments += lease.recalled and not is_in_use and lease.silent_moments < SILENT_AFTER
                    any_idle |= not (lease.recalled or is_in_use or lease.new_moments)
        if self._move_window(effects) | self._wake():
            self.serve(effects)
        if not any_idle:
            return 0
        for want in list(self._wants.values()):
            if want.waits and want.blocks < too_many:
                if not self._recall_idle(<ClientRecord>self.clients[want.client_id], want, effects):
                    too_many = want.blocks
        return 0

    cdef int forget(self, ClientRecord client) except -1:
        """A client has gone: its request is forgotten. The window is chosen again, if it was that client's, or lies over a lease
        of it."""
        cdef Piece piece
        self._withdraw(client.client_id)
        if self._window is not None:
            for piece in self._pieces_in(self._window.start, self._window.blocks):
                if piece.lease is not None and piece.lease.client_id == client.client_id:
                    return self._close_window()
        return 0

    cdef int change(self, LeaseRecord lease, int event) except -1:
        """Makes a transition of a lease."""
        cdef int state = leases.advance(lease.state_number, event)
        self._blocks_in[lease.state_number] -= _lent_blocks(lease)
        lease.state_number = state
        self._blocks_in[state] += _lent_blocks(lease)
        return 0

    cdef int take_back(self, ClientRecord client, LeaseRecord lease) except -1:
        """Frees a lease's blocks. The caller must then serve the clients that wait for blocks."""
        cdef Py_ssize_t place = self._place_of(lease.start)
        cdef Piece piece
        del client.leases[lease.lease_id]
        client.blocks_in[self.memory] -= _lent_blocks(lease)
        client.leases_in[self.memory] -= 1
        while place < len(self._by_start):
            piece = <Piece>self._by_start[place]
            if piece.start >= lease.start + lease.blocks:
                break
            if piece.lease is not lease:  # it was granted where content was kept
                place += 1
                continue
            del self._by_start[place]
            self._free_run(piece.start, piece.blocks)
        if self.is_wanted(lease.start, lease.blocks):
            self._window.vain_moments = 0
        return 0

    # -- what is kept ------------------------------------------------------------------------------------------------

    cdef int carve(self, ClientRecord client, LeaseRecord lease, KeptRecord kept) except -1:
        """A range of a lease, with no other slot in it, is kept from now on."""
        cdef Py_ssize_t place = self._place_of(kept.start + 1) - 1
        cdef Piece piece = <Piece>self._by_start[place]
        cdef uint64_t end = kept.start + kept.blocks, piece_end = piece.start + piece.blocks
        cdef list pieces = []
        assert piece.lease is lease and piece.start <= kept.start and end <= piece_end
        if piece.start < kept.start:
            pieces.append(_piece(piece.start, kept.start - piece.start, lease, None))
        pieces.append(_piece(kept.start, kept.blocks, None, kept))
        if end < piece_end:
            pieces.append(_piece(end, piece_end - end, lease, None))
        self._by_start[place:place + 1] = pieces
        lease.kept_blocks += kept.blocks
        client.blocks_in[self.memory] -= kept.blocks
        self._blocks_in[lease.state_number] -= kept.blocks
        return 0

    cdef bint is_wanted(self, uint64_t start, uint64_t blocks) noexcept:
        """Whether a client waits for a range that overlaps this one."""
        return (
            self._window is not None
            and start < self._window.start + self._window.blocks and self._window.start < start + blocks
        )

    cdef int evict(self, KeptRecord kept, bint for_content) except -1:
        """Drops unpinned content, for other content or for a lease. The caller must then serve the clients that wait for
        blocks."""
        self._forget(kept, for_content)
        return self._free_run(kept.start, kept.blocks)

    cdef int _forget(self, KeptRecord kept, bint for_content=False) except -1:
        """Content is dropped; its blocks are the caller's."""
        cdef Py_ssize_t place = self._place_of(kept.start)
        assert (<Piece>self._by_start[place]).kept is kept
        del self._by_start[place]
        self.contents.forget(kept, for_content)
        return 0

    cdef bint _make_room(self, uint64_t blocks) except -1:
        """Drops the least recently used content that leaves a free run of so many blocks; returns whether there is such a run.

        It looks for the first content, in this order, with which there is such a run. Of the contents before it, it drops only
        those in that run.
        """
        cdef KeptRecord kept
        cdef list tried
        cdef bint is_taken
        cdef uint64_t start = 0, length = 0
        if self._free.largest() >= blocks:
            return True
        if self.contents is None or self._free.free_units + self.contents.unpinned_blocks < blocks:
            return False
        tried = []
        for kept in self.contents.unpinned.values():
            self._give(kept.start, kept.blocks)
            tried.append(kept)
            if self._free.largest() >= blocks or len(tried) == MOST_TRIED:
                break
        if self._free.largest() >= blocks:
            self._free.run_at_or_behind(kept.start, &start, &length)
        for kept in tried:
            if start <= kept.start and kept.start + kept.blocks <= start + length:
                self._forget(kept)
            else:
                is_taken = self._free.carve_run(kept.start, kept.blocks)
                assert is_taken, "what was given back is free"
        return length != 0

    # -- who gets a lease --------------------------------------------------------------------------------------------

    cdef int serve(self, list effects) except -1:
        """Grants what can be granted, in order of arrival; opens a window for the first that can't."""
        cdef bint begin_again = True
        cdef LeaseWant want
        while begin_again and self._wants:
            begin_again = False
            for want in list(self._wants.values()):
                if (
                    self._window is not None
                    and self._window.client_id != want.client_id
                    and want.blocks > self._free.largest()
                    and (self.contents is None or not self.contents.unpinned_blocks)
                ):
                    continue  # there is no room for it, and another client has the window: nothing can be done
                # When a window was closed: begin again with the first request, which the window may have kept out.
                begin_again = self._serve_one(<ClientRecord>self.clients[want.client_id], want, effects)
                if begin_again:
                    break
        return 0

    cdef bint _serve_one(self, ClientRecord client, LeaseWant want, list effects) except -1:
        """Serves a waiting request as far as possible; returns whether a window was closed."""
        cdef uint64_t start, blocks
        if self._is_over_quota(client, want.blocks):
            # It waits for memory that its own client returns, so no other request waits for it.
            if self._window is None or self._window.client_id != client.client_id:
                return False
            self._close_window()
            return True
        if self._take_run(client, want, &start, &blocks):
            effects.append(Granted(client.client_id, self._lend(client, want.token, start, blocks)))
            return self._withdraw(client.client_id)
        if self._window is None and want.waits and not want.rest_moments:
            self._cheapest_range(client.client_id, want.blocks, UINT64_MAX, &start)
            self._open_window(client, start, want.blocks, self._next_lease_id, effects)
            if self._apart_blocks == want.blocks and self._take_run(client, want, &start, &blocks):  # only content was there
                effects.append(Granted(client.client_id, self._lend(client, want.token, start, blocks)))
                return self._withdraw(client.client_id)
        return False

    cdef object _lend(self, ClientRecord client, uint64_t token, uint64_t start, uint64_t blocks):
        """Records a lease whose blocks were allocated; returns the effect for its holder."""
        cdef LeaseRecord lease = LeaseRecord.__new__(LeaseRecord)
        lease.lease_id = self._next_lease_id
        lease.client_id, lease.memory, lease.start, lease.blocks = client.client_id, self.memory, start, blocks
        lease.state_number = leases.advance(LEASE_FREE, GRANT)
        lease.live = TakenRuns()
        lease.new_moments = SILENT_AFTER * (token != 0)  # nobody waited for a base lease
        self._next_lease_id += 1
        self._by_start.insert(self._place_of(start), _piece(start, blocks, lease, None))
        client.leases[lease.lease_id] = lease
        client.blocks_in[self.memory] += blocks
        client.leases_in[self.memory] += 1
        self._blocks_in[lease.state_number] += blocks
        return LeaseGrant(token, lease.lease_id, start * BLOCK_NBYTES, blocks * BLOCK_NBYTES)

    cdef bint _withdraw(self, uint64_t client_id) except -1:
        """Forgets a client's request; returns whether its window was closed with it."""
        self._wants.pop(client_id, None)
        if self._window is None or self._window.client_id != client_id:
            return False
        self._close_window()
        return True

    cdef int _close_window(self) except -1:
        self._put_back()
        self._window = None
        return 0

    cdef bint _is_over_quota(self, ClientRecord client, uint64_t blocks) except -1:
        """Whether the client must first return memory. A client that is alone may hold everything, and each client may hold one
        lease.

        What it has pinned, and what it has delivered and nobody has taken, counts as if it held it.
        """
        cdef ClientRecord other
        cdef uint64_t held = client.blocks_in[self.memory]
        if client.leases_in[self.memory] >= self._max_leases:
            return True
        if not held:
            return False
        if self.memory == HOST:
            held += client.pinned_blocks + client.untaken_blocks
        if held + blocks <= self._quota_blocks:
            return False
        for other in self.clients.values():
            if other is not client and (other.connected or other.leases):
                return True
        return False

    cdef bint _take_run(self, ClientRecord client, LeaseWant want, uint64_t* start, uint64_t* blocks) except -1:
        """Allocates a run for a request from the free list, outside the window of another client; returns whether there was
        one."""
        cdef bint is_owner = self._window is not None and self._window.client_id == client.client_id
        cdef bint has_run
        if is_owner:
            self._put_back()
        has_run = self._take_free_run(client, want, start, blocks)
        if is_owner and not has_run:
            self._set_apart()
        return has_run

    cdef bint _take_free_run(self, ClientRecord client, LeaseWant want, uint64_t* start, uint64_t* blocks) except -1:
        cdef int64_t at = -1
        blocks[0] = want.preferred_blocks
        if not self._is_over_quota(client, want.preferred_blocks) and self._make_room(want.preferred_blocks):
            at = self._free.take(want.preferred_blocks)
        if at < 0 and want.blocks != want.preferred_blocks and self._make_room(want.blocks):
            # The least size is within its quota, the preferred size may not be.
            blocks[0] = want.blocks
            at = self._free.take(want.blocks)
        start[0] = <uint64_t>at
        return at >= 0

    cdef int _open_window(
        self, ClientRecord client, uint64_t start, uint64_t blocks, uint64_t next_lease_id, list effects
    ) except -1:
        """Opens a window: the leases in it are recalled, and its unpinned content is dropped."""
        self._window = Window.__new__(Window)
        self._window.client_id, self._window.start, self._window.blocks = client.client_id, start, blocks
        self._window.next_lease_id = next_lease_id
        self._evict_range(start, blocks)
        self._set_apart()
        return self._recall(client, start, blocks, effects)

    cdef bint _move_window(self, list effects) except -1:
        """Chooses the window again, if what it waits for does not come and a range in a better state can be had; gives it up, if
        that has been so for long. Returns whether. The caller must then serve the clients that wait."""
        cdef Window window = self._window
        cdef LeaseWant want
        cdef uint64_t counts[PRICES]
        cdef uint64_t start
        cdef int worst
        cdef Piece piece
        if window is None:
            return False
        memset(counts, 0, sizeof(counts))
        for piece in self._pieces_in(window.start, window.blocks):
            counts[_price_of(piece, window.client_id, window.next_lease_id)] += piece.blocks
        worst = _worst(counts)
        if worst >= RECALLED:
            return False
        if self._cheapest_range(window.client_id, window.blocks, window.next_lease_id, &start) <= worst:
            window.vain_moments += 1
            want = <LeaseWant>self._wants[window.client_id]
            if window.vain_moments < want.patience:
                return False
            want.rest_moments, want.patience = want.patience, 2 * want.patience
            self._close_window()
            return True
        self._close_window()
        self._open_window(
            <ClientRecord>self.clients[window.client_id], start, window.blocks, window.next_lease_id, effects
        )
        return True

    cdef bint _wake(self) except -1:
        """Has requests rest no longer that have rested for long, and those for which a range has come; returns whether there was
        one."""
        cdef LeaseWant want
        cdef uint64_t start
        cdef int worst
        cdef bint any_woken = False
        for want in self._wants.values():
            if want.rest_moments:
                worst = self._cheapest_range(want.client_id, want.blocks, UINT64_MAX, &start)
                if worst > (NO_ANSWER if want.rest_moments == 1 else IN_USE):
                    want.rest_moments, any_woken = 0, True
                else:
                    want.rest_moments -= want.rest_moments > 1
        return any_woken

    cdef int _evict_range(self, uint64_t start, uint64_t blocks) except -1:
        """Drops the unpinned content in a range."""
        cdef Piece piece
        if self.contents is None or not self.contents.unpinned_blocks:
            return 0
        for piece in self._pieces_in(start, blocks):
            if piece.kept is not None and not piece.kept.pins:
                self._forget(piece.kept)
                self._give(piece.start, piece.blocks)
        return 0

    cdef list _pieces_in(self, uint64_t start, uint64_t blocks):
        """Returns the pieces that have a block in a range, by address."""
        cdef Py_ssize_t first = self._place_of(start), last = self._place_of(start + blocks)
        cdef Piece before
        if first:
            before = <Piece>self._by_start[first - 1]
            first -= before.start + before.blocks > start
        return self._by_start[first:last]

    cdef bint _recall_idle(self, ClientRecord client, LeaseWant want, list effects) except -1:
        """Recalls idle leases that would make room for a request that has no window; returns False if they do not suffice."""
        cdef uint64_t start
        cdef ClientRecord owner = client if want.waits else None  # who waits gives its own idle leases back by itself
        if self._window is not None and self._window.client_id == client.client_id:
            return True
        if self._is_over_quota(client, want.blocks):
            return True
        if self._cheapest_range(0 if owner is None else owner.client_id, want.blocks, UINT64_MAX, &start) < LIES_IDLE:
            return False
        self._recall(owner, start, want.blocks, effects)
        return True

    cdef int _recall(self, ClientRecord owner, uint64_t start, uint64_t blocks, list effects) except -1:
        """Recalls the leases in a range, except for those of the client that asks."""
        cdef ClientRecord holder
        cdef LeaseRecord lease
        cdef Piece piece
        cdef list recalled
        cdef set leases = {piece.lease for piece in self._pieces_in(start, blocks)}
        for holder in self.clients.values():
            if holder is owner or not holder.connected or not holder.leases_in[self.memory]:
                continue
            recalled = []
            for lease in holder.leases.values():
                if lease in leases and not lease.recalled:
                    lease.recalled = True
                    lease.new_moments = 0
                    recalled.append(lease.lease_id)
            if recalled:
                effects.append(Recalled(holder.client_id, tuple(recalled)))
        return 0

    cdef int _cheapest_range(self, uint64_t client_id, uint64_t blocks, uint64_t next_lease_id, uint64_t* best) except -1:
        """Finds the range of so many blocks that is cheapest to empty for a client, and of several the lowest. It does not lie
        over the window of another client.

        A range that is moved up becomes cheaper only where it leaves a piece behind. So the lowest of the cheapest begins where the
        memory begins, or behind a piece, or behind that window. One pass over those places, and over the pieces that a range then
        enters and has left.

        Args:
            client_id: of the client; 0: it makes no difference whose the leases are.
            next_lease_id: leases from this one on were granted since the client's window was opened.

        Returns:
            The worst price of a piece in it; ``MAY_NEVER_COME`` also if all ranges lie over that window.
        """
        cdef uint64_t last_start = self._free.start + self._free.length - blocks, start = self._free.start, behind
        cdef uint64_t closed_start = 0, closed_end = 0
        cdef uint64_t counts[PRICES]
        cdef uint64_t least[PRICES]
        cdef Py_ssize_t count = len(self._by_start), left = 0, entered = 0
        cdef Piece piece
        if self._window is not None and self._window.client_id != client_id:
            closed_start, closed_end = self._window.start, self._window.start + self._window.blocks
        memset(counts, 0, sizeof(counts))
        memset(least, 0xff, sizeof(least))
        best[0] = start
        while start <= last_start:
            while entered < count:
                piece = <Piece>self._by_start[entered]
                if piece.start >= start + blocks:
                    break
                counts[_price_of(piece, client_id, next_lease_id)] += piece.blocks
                entered += 1
            if (start >= closed_end or start + blocks <= closed_start) and _is_less(counts, least):
                best[0] = start
                memcpy(least, counts, sizeof(counts))
            behind = UINT64_MAX
            if left < count:
                piece = <Piece>self._by_start[left]
                behind = piece.start + piece.blocks
            if start < closed_end < behind:
                start = closed_end
                continue
            start = behind
            if left == entered:  # there was a gap before it: the range begins after it without having entered it
                entered += 1
            elif left < count:
                counts[_price_of(piece, client_id, next_lease_id)] -= piece.blocks
            left += 1
        return _worst(least)

    cdef int _set_apart(self) except -1:
        """Takes the free blocks of the window out of the free list."""
        cdef uint64_t at = self._window.start, end = self._window.start + self._window.blocks, start = 0, blocks = 0
        cdef bint is_taken
        while self._free.run_at_or_behind(at, &start, &blocks) and start < end:
            blocks = min(start + blocks, end)
            start = max(start, at)
            blocks -= start
            is_taken = self._free.carve_run(start, blocks)
            assert is_taken, "the free runs changed under us"
            self._apart.append((start, blocks))
            self._apart_blocks += blocks
            at = start + blocks
        return 0

    cdef int _put_back(self) except -1:
        """Undoes :meth:`_set_apart`."""
        for start, blocks in self._apart:
            self._give(start, blocks)
        self._apart.clear()
        self._apart_blocks = 0
        return 0

    cdef int _free_run(self, uint64_t start, uint64_t blocks) except -1:
        """Gives blocks back: those in the window are set apart, the others are free."""
        cdef uint64_t end = start + blocks, inside_start = end, inside_end = end
        if self._window is not None:
            inside_start = min(end, max(start, self._window.start))
            inside_end = max(inside_start, min(end, self._window.start + self._window.blocks))
        if inside_start > start:
            self._give(start, inside_start - start)
        if inside_end > inside_start:
            self._apart.append((inside_start, inside_end - inside_start))
            self._apart_blocks += inside_end - inside_start
        if end > inside_end:
            self._give(inside_end, end - inside_end)
        return 0

    cdef int _give(self, uint64_t start, uint64_t blocks) except -1:
        cdef bint was_taken = self._free.give(start, blocks)
        assert was_taken, "what comes back is free already"
        return 0

    cdef Py_ssize_t _place_of(self, uint64_t start) except -1:
        """Returns the place of the first piece, by address, that does not begin before a block."""
        cdef Py_ssize_t low = 0, high = len(self._by_start), middle
        while low < high:
            middle = (low + high) >> 1
            if (<Piece>self._by_start[middle]).start < start:
                low = middle + 1
            else:
                high = middle
        return low

    def check(self) -> None:
        """Asserts the invariants of this memory: no block is lost, no two pieces overlap, and what is counted is true."""
        leases = [lease for client in self.clients.values() for lease in client.leases.values() if lease.memory == self.memory]
        contents = [] if self.contents is None else [*self.contents.by_generation.values()]
        pieces = [(piece.start, piece.blocks) for piece in self._by_start]
        kept_blocks = sum(kept.blocks for kept in contents)
        lent_blocks = sum(lease.blocks - lease.kept_blocks for lease in leases)
        assert self._free.free_units + self._apart_blocks + lent_blocks + kept_blocks == self._free.length, "a block is lost"
        assert sum(blocks for _, blocks in self._apart) == self._apart_blocks
        for lease in leases:
            own = [piece for piece in self._by_start if piece.lease is lease]
            assert sum(piece.blocks for piece in own) == lease.blocks - lease.kept_blocks, f"lease {lease.lease_id} lost a piece"
            assert all(lease.start <= piece.start and piece.start + piece.blocks <= lease.end for piece in own)
        assert all(piece.lease is None or piece.lease in leases for piece in self._by_start), "a piece outlives its lease"
        kept = [(piece.kept.start, piece.kept.blocks) for piece in self._by_start if piece.lease is None]
        assert kept == sorted((kept.start, kept.blocks) for kept in contents), "something kept is not where its piece is"
        if self.contents is not None:
            self.contents.check()
        if self._window is None:
            assert not self._apart, "something is set apart for nobody"
        else:
            assert self._window.client_id in self._wants, "a window is kept for nobody"
            for start, blocks in [*self._apart]:
                assert self._window.start <= start and start + blocks <= self._window.end
            for start, blocks in self._free.runs():
                assert start >= self._window.end or start + blocks <= self._window.start
            for kept in contents:
                assert kept.pins or kept.start >= self._window.end or kept.start + kept.blocks <= self._window.start
        end = self._free.start
        assert pieces == sorted(pieces)
        for start, blocks in sorted(pieces + self._apart + self._free.runs()):
            assert start >= end, f"what begins at block {start} overlaps something else"
            end = start + blocks
        assert end <= self._free.end
        for state in Lease:
            lent = sum(lease.blocks - lease.kept_blocks for lease in leases if lease.state is state)
            assert self.leased_nbytes(state) == lent * BLOCK_NBYTES
        for client in self.clients.values():
            own = [lease.blocks - lease.kept_blocks for lease in leases if lease.client_id == client.client_id]
            assert (client.leased_blocks[self.memory], client.lease_counts[self.memory]) == (sum(own), len(own))


cdef Piece _piece(uint64_t start, uint64_t blocks, LeaseRecord lease, KeptRecord kept):
    cdef Piece piece = Piece.__new__(Piece)
    piece.start, piece.blocks, piece.lease, piece.kept = start, blocks, lease, kept
    return piece
