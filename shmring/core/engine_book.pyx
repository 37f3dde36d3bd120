"""The engine's book: which client holds which part of the slab, and which memory may be reused.

Theory of operation: sans-I/O. The ring calls a method for each event (a message came, a connection ended, the kernel
reported a death, the last view died); the method checks everything first, then changes the book, then returns the
effects, which the ring must carry out in order: messages to send, waiters to wake. An event that the book refuses raises
and changes nothing. The book trusts no peer: each number of a message is compared with the leases and slots of that peer, and
such numbers are added up only after a check that the sum can't overflow.

The slab is counted in blocks::

    | 0: header | leasable ...                          | reply reserve ... | device slab: leasable ... |

A device slab, if there is one, is another memory in the same address space: the offset of a lease says in which memory it lies.
Leases are lent in each by the rules of ``lending.pyx``.

Generations: a client numbers its submissions ``client_id << 40 | n`` with n growing. So one comparison refuses replays, and no
generation is used twice in one engine's life. Reply slots are numbered the same way by the book (client 0).

The methods for every message have an entry in C: the caller finds the client once (:meth:`EngineBook.client_of`) and passes its
record. If they return a list of effects, they return None for an empty one. The methods for Python do the same with ids.
``tests/model/engine_book.py`` specifies the book in plain Python, and the tests compare the two.

Kept content (``kept_book.pyx``) is found, pinned and handed over here. The book counts the pins of each client; they end when
the client gives them back, says goodbye or dies, as its leases do. A client that waits for a key stops when its connection ends.
A delivery has one pin of the engine until it has its taker, and counts for its sender until then. A request names kept content as a slot of lease 0. The book makes a
record for each such use, like that of any other slot, with a number of its own, so that one content can be in many requests.

Invariants (:meth:`EngineBook.check` asserts them): free, leased and quarantined blocks add up; every live slot lies inside a lease
of its client; no two live slots overlap; a client that is gone and whose slots are all released holds nothing.
"""

from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_New, PyTuple_SET_ITEM
from libc.stdint cimport INT64_MAX, int64_t, uint8_t, uint64_t
from libc.stdlib cimport free, malloc

from shmring.core.effects import Answered, ClientGone, Reclaimed, Released, ReplyGranted, ReplySlot, RequestAborted
from shmring.core.messages import KEPT_LEASE_ID, Found, NotKept
from shmring.core.states import EngineSlot, EngineSlotEvent, Lease, LeaseEvent, Request, RequestEvent
from shmring.errors import CapacityError, RemoteProtocolError

cdef enum:
    ENGINE_SLOT_STATES = 4
    KEPT_LEASE = 0   # lease id of a slot that is kept content

assert len(EngineSlot) == ENGINE_SLOT_STATES
assert KEPT_LEASE_ID == KEPT_LEASE

cdef enum:  # how a reply may go
    UNREAD           # not before a caller has read an earlier one to the same request
    WAITS            # not before its client has given back more of the reserve
    PASSES           # its client copies it out of the slot when it comes
    STAYS            # in its slot, until its last view is gone

cdef enum:
    FEW_SLOTS = 16  # slots of one request for which no memory is allocated
    UNREAD_REPLIES = 2  # of a request, that its client copies out: one for its caller, and one that is on its way meanwhile

cdef int PUBLISHED = EngineSlot.PUBLISHED
cdef int CLAIMED = EngineSlot.CLAIMED
cdef int RELEASED = EngineSlot.RELEASED
cdef int CLAIM = EngineSlotEvent.CLAIM
cdef int ENGINE_RELEASE = EngineSlotEvent.RELEASE
cdef int ENGINE_RELEASE_VIEWED = EngineSlotEvent.RELEASE_VIEWED
cdef int ENGINE_LAST_VIEW_GONE = EngineSlotEvent.LAST_VIEW_GONE
cdef int ABORT_SLOT = EngineSlotEvent.ABORT
cdef int WAITING = Request.WAITING
cdef int RUNNING = Request.RUNNING
cdef int SCHEDULE = RequestEvent.SCHEDULE
cdef int ABORT = RequestEvent.ABORT
cdef int RETURN = LeaseEvent.RETURN
cdef int DISCONNECT = LeaseEvent.DISCONNECT
cdef int PROOF = LeaseEvent.PROOF

#: Numbers of slots that are kept content begin here: no generation of a client is as large.
cdef uint64_t FIRST_USE = <uint64_t>1 << 63

#: Ids of leases in device memory begin here: no engine grants as many leases in the slab.
cdef uint64_t FIRST_DEVICE_LEASE_ID = <uint64_t>1 << 40


cdef int _read_slots(slots, SlotNumbers* numbers) except -1:
    """Copies the slots that a message names."""
    for slot in slots:
        numbers.lease_id, numbers.offset = slot.lease_id, slot.offset
        numbers.nbytes, numbers.generation = slot.nbytes, slot.generation
        numbers += 1
    return 0


cdef class EngineBook:
    """The engine's book. Every method is one event; the returned effects are the caller's next duty, in order.

    Attributes:
        clients: those that are connected, or whose memory is still held, by id.
        lendings: the leases of each memory: of the slab, and of the device slab if there is one.
        host: the first of them.
        kept: what is kept in the slab.
    """

    cdef readonly object geometry  # type: Geometry
    cdef readonly object limits  # type: EngineBookLimits
    cdef public dict clients  # type: dict[int, ClientRecord]  # by id
    cdef public list lendings  # type: list[Lending]  # by the number of its memory
    cdef public Lending host               # the first of them
    cdef readonly KeptBook kept
    cdef public uint64_t _next_use         # number of the next slot that is kept content
    cdef public uint64_t late_aborts       # aborts of requests that had ended: messages cross
    cdef public uint64_t stale_releases    # releases of reply slots that had been given back before
    cdef public RunAllocator _replies
    cdef public dict _reply_wants  # type: dict[int, ReplyWant]  # by ticket, in order of arrival
    cdef public bint _may_overtake         # whether a reply that finds no room lets those behind it pass
    cdef public uint64_t _next_reply_generation
    cdef public set _lent_replies  # type: set[int]  # generations, of all clients
    cdef uint64_t _max_inflight
    cdef uint64_t _reply_reserve_blocks
    cdef uint64_t _slots_in[ENGINE_SLOT_STATES]
    cdef uint64_t _device_slots
    cdef uint64_t _max_pins
    cdef uint64_t _most_pinned_blocks      # of a client
    cdef uint64_t _max_waits
    cdef readonly bint _is_draining        # whether nothing more is kept
    cdef bint _owes_service                # whether a pin has gone, so that waiting clients must be served

    def __init__(self, geometry: Geometry, limits: EngineBookLimits):
        self.geometry, self.limits = geometry, limits
        self.clients = {}
        self.kept = KeptBook(limits)
        self.host = Lending(self.clients, limits, HOST, geometry.LEASABLE_START, geometry.leasable_blocks, 1, self.kept)
        self._next_use = FIRST_USE
        self.lendings = [self.host]
        if geometry.device_blocks:
            first_lease_id = FIRST_DEVICE_LEASE_ID
            self.lendings.append(
                Lending(self.clients, limits, DEVICE, geometry.device_start, geometry.device_blocks, first_lease_id)
            )
        self._replies = RunAllocator(geometry.reply_start, geometry.reply_blocks)
        self._reply_wants, self._lent_replies = {}, set()
        self._next_reply_generation = 1
        self._max_inflight, self._reply_reserve_blocks = limits.max_inflight, geometry.reply_blocks
        self._max_pins, self._most_pinned_blocks = limits.max_pins, limits.pinned_blocks
        self._max_waits = limits.max_waits

    # -- clients ---------------------------------------------------------------------------------------------------

    cdef ClientRecord client_of(self, uint64_t client_id):
        """Returns a client that is connected, or whose memory is still held.

        Raises:
            KeyError: there is none of this id.
        """
        return <ClientRecord>self.clients[client_id]

    cdef ClientRecord _connected(self, uint64_t client_id):
        cdef ClientRecord client = <ClientRecord>self.clients[client_id]
        assert client.connected, f"client {client_id} is disconnected already"
        return client

    def connect(self, uint64_t client_id, uint64_t lease_nbytes) -> LeaseGrant | None:
        """A frontend said hello. Returns its base lease, or None if none can be had now (it may ask later)."""
        assert client_id not in self.clients, "client ids are never reused"
        cdef ClientRecord client = ClientRecord.__new__(ClientRecord)
        client.client_id, client.last_generation = client_id, client_id << GENERATION_BITS
        self.clients[client_id] = client
        return self.host.connect(client, min(blocks_for(lease_nbytes), <uint64_t>self.limits.max_lease_blocks))

    def goodbye(
        self,
        uint64_t client_id,
        kept_lease_ids: Collection[int],
        kept_replies: Collection[int],
        still_pinned: Collection[int] = (),
    ) -> list[EngineEffect]:
        """A frontend says goodbye: it uses no memory of the slab any more, except for the memory that it names.

        A goodbye is a release of all other memory, which needs no proof of death. Disconnects the client.
        """
        cdef ClientRecord client = self._connected(client_id)
        cdef LeaseRecord lease
        cdef list effects = []
        self._drop_reply_wants(client)
        kept_leases, kept_replies = frozenset(kept_lease_ids), frozenset(kept_replies)
        self._drop_pins(client, frozenset(still_pinned))
        for lease in client.leases.values():
            lease.given_up = lease.lease_id not in kept_leases
        self._release_replies(client, [g for g in self._sent_replies(client) if g not in kept_replies], effects)
        self._disconnect(client, effects)
        return effects

    def disconnect(self, uint64_t client_id) -> list[EngineEffect]:
        """A connection ended. Its requests are aborted and its leases quarantined: its process may still be writing."""
        cdef list effects = []
        self._disconnect(self._connected(client_id), effects)
        return effects

    cdef int _disconnect(self, ClientRecord client, list effects) except -1:
        cdef LeaseRecord lease
        cdef Lending lending
        for request_id in list(client.requests):
            for effect in self.abort_request(client, request_id):
                if type(effect) is not Released:  # no frontend is left to be told
                    effects.append(effect)
        client.connected = False
        for token in list(client.waits):
            self.kept.end_wait(client, token)
        for lending in self.lendings:
            lending.forget(client)
        self._drop_reply_wants(client)
        for lease in client.leases.values():
            self._lending(lease).change(lease, DISCONNECT)
        self._reclaim(client, effects)
        self._serve_wants(effects)
        self._owes_service = False
        self._serve_reply_wants(effects)
        return 0

    def died(self, uint64_t client_id) -> list[EngineEffect]:
        """The kernel says that the client's process is dead: its memory is free again, unless a reader of ours holds it.

        Or the socket has ended after a goodbye: the client uses no memory any more that the goodbye named.
        """
        cdef ClientRecord client = self.clients.get(client_id)
        cdef list effects = []
        if client is None:
            return effects
        client.dead = True
        if client.connected:
            self._disconnect(client, effects)
        else:
            self._reclaim(client, effects)
        return effects

    cdef int _reclaim(self, ClientRecord client, list effects) except -1:
        """Frees the memory of a disconnected client that is proven unused, and forgets the client with its last piece."""
        cdef LeaseRecord lease
        cdef uint64_t blocks = 0
        if client.connected or client.client_id not in self.clients:
            return 0
        if client.dead:
            self._release_replies(client, self._sent_replies(client), effects)
            self._drop_pins(client, frozenset())
        for lease in list(client.leases.values()):
            if lease.live.units == lease.kept_blocks and (client.dead or lease.given_up):
                self._lending(lease).change(lease, PROOF)
                blocks += lease.blocks - lease.kept_blocks
                self._return_lease(client, lease)
        if blocks:
            effects.append(Reclaimed(client.client_id, blocks * BLOCK_NBYTES))
        if not client.leases and not client.replies and not client.pins and not client.slots.count:
            del self.clients[client.client_id]
            effects.append(ClientGone(client.client_id))
        if blocks:
            self._serve_wants(effects)
        self._served(effects)
        return 0

    # -- leases ----------------------------------------------------------------------------------------------------

    def request_lease(self, uint64_t client_id, request: LeaseRequest) -> list[EngineEffect]:
        """A client asks for a lease; it replaces what the client asked for before there, and 0 bytes withdraw that.

        If the client has ``max_leases`` leases, the request waits until it returns one: the request may have crossed the last
            grant.

        Raises:
            RemoteProtocolError: it asks for more than can ever be granted, or there is no such memory.
        """
        cdef ClientRecord client = self._connected(client_id)
        cdef list effects = []
        cdef int memory = request.memory
        if memory >= len(self.lendings):
            raise RemoteProtocolError(f"client {client_id} asks for device memory, and this engine has no device slab")
        (<Lending>self.lendings[memory]).ask(client, request, effects)
        return effects

    def return_leases(self, uint64_t client_id, lease_ids: Collection[int]) -> list[EngineEffect]:
        """A client gives leases back.

        Raises:
            RemoteProtocolError: it does not hold one of them, or a slot of one is in use, or these are more leases than it can
                hold.
        """
        cdef ClientRecord client = self._connected(client_id)
        cdef LeaseRecord lease
        cdef list leases = [], effects = []
        if len(lease_ids) > MEMORIES * self.limits.max_leases:
            raise RemoteProtocolError(f"{len(lease_ids)} leases were returned at once, and max_leases is {self.limits.max_leases}")
        for lease_id in dict.fromkeys(lease_ids):
            lease = client.leases.get(lease_id)
            if lease is None:
                raise RemoteProtocolError(f"lease {lease_id} was returned by client {client_id}, which does not hold it")
            if lease.live.units != lease.kept_blocks:
                raise RemoteProtocolError(f"lease {lease_id} was returned with a slot in use")
            leases.append(lease)
        for lease in leases:
            self._lending(lease).change(lease, RETURN)
            self._return_lease(client, lease)
        self._serve_wants(effects)
        return effects

    def moment_passed(self) -> list[EngineEffect]:
        """Another moment has passed while clients wait for leases. The ring says so as long as :meth:`is_awaited`.

        What does not answer is passed over, so that nobody waits for a silent client while others would give memory back.
        """
        cdef Lending lending
        cdef list effects = []
        for lending in self.lendings:
            lending.moment_passed(effects)
        return effects

    def is_awaited(self) -> bool:
        """Whether a caller waits for a lease, in either memory. Only :meth:`request_lease` makes one wait."""
        cdef Lending lending
        for lending in self.lendings:
            if lending.is_awaited():
                return True
        return False

    cdef Lending _lending(self, LeaseRecord lease):
        return <Lending>self.lendings[lease.memory]

    cdef int _return_lease(self, ClientRecord client, LeaseRecord lease) except -1:
        return self._lending(lease).take_back(client, lease)

    cdef int _serve_wants(self, list effects) except -1:
        cdef Lending lending
        for lending in self.lendings:
            lending.serve(effects)
        return 0

    # -- requests and their slots ------------------------------------------------------------------------------------

    def submit(self, uint64_t client_id, uint64_t request_id, slots: Sequence[SlotRef]) -> None:
        """A client hands a request with its slots over.

        Raises:
            RemoteProtocolError: a slot does not lie in a lease of this client, or overlaps a live slot. Nothing was changed.
        """
        cdef SlotNumbers few[FEW_SLOTS]
        cdef SlotNumbers* many
        cdef Py_ssize_t count = len(slots)
        if count <= FEW_SLOTS:
            _read_slots(slots, few)
            self.submit_slots(self._connected(client_id), request_id, few, count)
            return
        many = <SlotNumbers*>malloc(count * sizeof(SlotNumbers))
        if many == NULL:
            raise MemoryError
        try:
            _read_slots(slots, many)
            self.submit_slots(self._connected(client_id), request_id, many, count)
        finally:
            free(many)

    cdef RequestRecord submit_slots(self, ClientRecord client, uint64_t request_id, const SlotNumbers* slots, Py_ssize_t count):
        """A connected client hands over a request: all of its slots are published, or none."""
        cdef uint64_t last_generation = client.last_generation
        cdef RequestRecord request = RequestRecord.__new__(RequestRecord)
        cdef EngineSlotRecord slot
        cdef tuple records = PyTuple_New(count) if count else ()
        cdef Py_ssize_t place, published = 0
        if request_id > INT64_MAX or <int64_t>request_id <= client.last_request_id:
            raise RemoteProtocolError(f"request {request_id} was submitted after request {client.last_request_id}")
        if client.requests.count >= self._max_inflight:
            raise RemoteProtocolError(f"more than max_inflight ({self.limits.max_inflight}) requests were submitted")
        try:
            while published < count:
                if slots[published].lease_id == KEPT_LEASE:
                    slot = self._use(client, &slots[published])
                else:
                    slot = self._publish(client, &slots[published], last_generation)
                    last_generation = slots[published].generation
                Py_INCREF(slot)
                PyTuple_SET_ITEM(records, published, slot)
                published += 1
                client.slots.put(slot.generation, slot)
            client.requests.put(request_id, request)
        except BaseException:
            for place in range(published):
                slot = <EngineSlotRecord>records[place]
                client.slots.take(slot.generation)
                if slot.kept is None:
                    slot.lease.live.give(slot.start, slot.blocks)
                else:
                    self.kept.unpin(slot.kept)  # whose client has it pinned
                    self._next_use -= 1
            raise
        self._slots_in[PUBLISHED] += count
        for slot in records:
            if slot.kept is None:
                self._device_slots += slot.lease.memory == DEVICE
                slot.lease.new_moments = 0
        client.last_generation = last_generation
        client.last_request_id = <int64_t>request_id
        request.request_id, request.slots, request.state_number = request_id, records, WAITING
        return request

    cdef EngineSlotRecord _publish(self, ClientRecord client, const SlotNumbers* slot, uint64_t last_generation):
        """Returns the record of a slot whose blocks are marked in its lease. The record is in no other list yet."""
        cdef uint64_t start = slot.offset // BLOCK_NBYTES, blocks = slot_blocks(slot.nbytes)
        cdef LeaseRecord lease
        cdef EngineSlotRecord record
        if slot.generation >> GENERATION_BITS != client.client_id or slot.generation <= last_generation:
            raise RemoteProtocolError(f"generation {slot.generation} is not a new one of client {client.client_id}")
        lease = client.leases.get(slot.lease_id)
        if lease is None:
            raise RemoteProtocolError(f"a slot is in lease {slot.lease_id}, which client {client.client_id} does not hold")
        # Both are below 2**53: their sum does not overflow.
        if slot.offset % BLOCK_NBYTES or start < lease.start or start + blocks > lease.start + lease.blocks:
            raise RemoteProtocolError(
                f"a slot at {slot.offset} of {slot.nbytes} bytes is not inside lease {lease.lease_id} "
                f"[{lease.start * BLOCK_NBYTES}, {(lease.start + lease.blocks) * BLOCK_NBYTES})"
            )
        record = EngineSlotRecord.__new__(EngineSlotRecord)
        if not lease.live.take(start, blocks):
            raise RemoteProtocolError(f"a slot at {slot.offset} of {slot.nbytes} bytes overlaps a live slot")
        record.generation, record.lease, record.start, record.blocks = slot.generation, lease, start, blocks
        record.state_number = PUBLISHED
        return record

    def claim(self, uint64_t client_id, uint64_t request_id) -> None:
        """The engine claims a waiting request."""
        self.claim_request(<RequestRecord>(<ClientRecord>self.clients[client_id]).requests[request_id])

    cdef int claim_request(self, RequestRecord request) except -1:
        """The engine begins with a waiting request, and claims its slots."""
        request.state_number = requests.advance(request.state_number, SCHEDULE)
        return self._claim_slots(request)

    cdef int _claim_slots(self, RequestRecord request) except -1:
        cdef EngineSlotRecord slot
        for slot in request.slots:
            self._move(None, slot, CLAIM)
        return 0

    cdef int _move(self, ClientRecord client, EngineSlotRecord slot, int event) except -1:
        """Makes a transition of a slot, and forgets the slot if it is released then. Returns its new state."""
        cdef int state = engine_slots.advance(slot.state_number, event)
        cdef bint was_taken
        self._slots_in[slot.state_number] -= 1
        slot.state_number = state
        if state != RELEASED:
            self._slots_in[state] += 1
            return state
        client.slots.take(slot.generation)
        if slot.kept is not None:
            self._unpin(slot.kept)
            return state
        self._device_slots -= slot.lease.memory == DEVICE
        was_taken = slot.lease.live.give(slot.start, slot.blocks)
        assert was_taken, "a live slot has no blocks in its lease"
        return state

    def end(self, uint64_t client_id, uint64_t request_id, int event: RequestEvent) -> bool:
        """The engine has ended a request: FINISH, ERROR or DEADLINE.

        Its slots are claimed until :meth:`release_slots`, also those of a request that ended before it was claimed.

        Returns:
            Whether the frontend must be told of the end; False if the request had ended before (it was aborted meanwhile).
        """
        cdef ClientRecord client = self.clients.get(client_id)
        cdef RequestRecord request = None if client is None else client.requests.get(request_id)
        if request is None:
            return False
        self.end_request(client, request, event)
        return True

    cdef int end_request(self, ClientRecord client, RequestRecord request, int event) except -1:
        """The engine ends a request that has not ended."""
        cdef bint was_waiting = request.state_number == WAITING
        request.state_number = requests.advance(request.state_number, event)
        if was_waiting:
            self._claim_slots(request)
        client.requests.take(request.request_id)
        return 0

    def abort(self, uint64_t client_id, uint64_t request_id) -> list[EngineEffect]:
        """A client aborts a request. An unknown one has ended already, which is no error: the messages crossed."""
        effects = self.abort_request(self._connected(client_id), request_id)
        return [] if effects is None else self._served(effects)

    cdef list abort_request(self, ClientRecord client, uint64_t request_id):
        """A connected client aborts a request; returns the effects, or None if it has ended already."""
        cdef RequestRecord request = client.requests.take(request_id)
        cdef EngineSlotRecord slot
        cdef list effects, released = []
        if request is None:
            self.late_aborts += 1
            return None
        effects = [RequestAborted(client.client_id, request_id, request.state_number == RUNNING)]
        request.state_number = requests.advance(request.state_number, ABORT)
        for slot in request.slots:
            if slot.state_number == RELEASED:
                continue  # its claim has released the slots already
            if self._move(client, slot, ABORT_SLOT) == RELEASED and slot.kept is None:
                released.append(slot.generation)
        if released:
            effects.append(Released(client.client_id, tuple(released)))
        return effects

    def release_slots(self, uint64_t client_id, generations: Sequence[int], viewed: Collection[int]) -> list[EngineEffect]:
        """The engine is done with claimed slots; those in ``viewed`` still have live views and drain first."""
        cdef ClientRecord client = <ClientRecord>self.clients[client_id]
        cdef EngineSlotRecord slot
        cdef list slots, released
        slots, released = [], []
        for generation in generations if len(generations) < 2 else dict.fromkeys(generations):
            slot = <EngineSlotRecord>client.slots[generation]
            engine_slots.after(slot.state_number, ENGINE_RELEASE_VIEWED if generation in viewed else ENGINE_RELEASE)
            slots.append(slot)
        for slot in slots:
            if viewed and slot.generation in viewed:
                self._move(client, slot, ENGINE_RELEASE_VIEWED)
            else:
                self._move(client, slot, ENGINE_RELEASE)
                if slot.kept is None:
                    released.append(slot.generation)
        if client.connected:
            return self._served([Released(client_id, tuple(released))] if released else [])
        slots = []
        self._reclaim(client, slots)
        return slots

    cdef list release_request(
        self, ClientRecord client, RequestRecord request, const uint8_t* viewed, uint64_t* released, Py_ssize_t* count
    ):
        """The engine is done with the slots of a request that was claimed; slots that are viewed drain.

        Args:
            viewed: for each of its slots, in order, whether it drains; NULL: none does.
            released: has room for all of its slots; filled with the generations of which its client is to be told.
            count: how many those are. 0 if the client has gone.
        """
        cdef EngineSlotRecord slot
        cdef Py_ssize_t place = 0
        cdef list effects = None
        count[0] = 0
        for slot in request.slots:
            if slot.state_number != CLAIMED and slot.state_number != PUBLISHED:
                pass  # released or draining already, by itself
            elif viewed != NULL and viewed[place]:
                self._move(client, slot, ENGINE_RELEASE_VIEWED)
            else:
                self._move(client, slot, ENGINE_RELEASE)
                released[count[0]] = slot.generation
                count[0] += slot.kept is None  # its client has its own pin, and need not be told
            place += 1
        if not client.connected:
            count[0] = 0
            effects = []
            self._reclaim(client, effects)
        return self._served(effects)

    def last_view_gone(self, uint64_t client_id, uint64_t generation) -> list[EngineEffect]:
        """The last view of a draining slot has died."""
        cdef ClientRecord client = <ClientRecord>self.clients[client_id]
        effects = self.release_viewed(client, <EngineSlotRecord>client.slots[generation])
        return [Released(client_id, (generation,))] if effects is None else effects

    cdef list release_viewed(self, ClientRecord client, EngineSlotRecord slot):
        """The last view of a draining slot has died; None: its client is connected, and is to be told of it."""
        cdef list effects
        self._move(client, slot, ENGINE_LAST_VIEW_GONE)
        if client.connected:
            return None if slot.kept is None else self._served([])
        effects = []
        self._reclaim(client, effects)
        return effects

    # -- what is kept ------------------------------------------------------------------------------------------------

    def find(
        self, uint64_t client_id, uint64_t token, bytes key, bint waits=False, bint for_one=False
    ) -> list[EngineEffect]:
        """A client looks for kept content: if it is there, it is pinned once more for the client.

        Args:
            client_id: which one.
            token: of its question.
            key: of the content.
            waits: whether the answer, if the content is not there, waits for it; or until the client stops waiting.
            for_one: whether it looks for a delivery, which it takes. The key is its name.

        Raises:
            RemoteProtocolError: it waits for this key already, or for as many as it may, or by this token. Nothing was changed.
        """
        cdef ClientRecord client = self._connected(client_id)
        cdef KeptRecord kept
        key = _booked(key, for_one)
        kept = self.kept.by_key.get(key)
        if kept is not None:
            return self._served([Answered(client_id, self._answer_to(client, token, kept))])
        if not waits:
            self.kept.misses += 1
            return [Answered(client_id, NotKept(token, "absent"))]
        if token in client.waits or client_id in self.kept.waits.get(key, ()):
            raise RemoteProtocolError(f"client {client_id} waits for content twice, by one token or for one key")
        if <uint64_t>len(client.waits) >= self._max_waits:
            raise RemoteProtocolError(f"client {client_id} waits for more than {self._max_waits} keys")
        self.kept.wait(client, token, key)
        return []

    def stop_waiting(self, uint64_t client_id, tokens: Sequence[int]) -> list[EngineEffect]:
        """A client waits no more for the answers to these questions. One that was answered meanwhile is no error."""
        cdef ClientRecord client = self._connected(client_id)
        cdef list effects = []
        for token in tokens:
            if token in client.waits:
                self.kept.end_wait(client, token)
                self.kept.misses += 1
                effects.append(Answered(client_id, NotKept(token, "absent")))
        return effects

    cdef object _answer_to(self, ClientRecord client, token, KeptRecord kept):
        """Pins content for a client that has looked for it, if it may; returns the answer."""
        if not self._may_pin(client, kept, kept.blocks):
            self.kept.refusals += 1
            return NotKept(token, "pins")
        self.kept.hits += 1
        kept.hits += 1
        self._pin(client, kept)
        if kept.for_one:
            self._untaken_no_more(kept)
            self.kept.take(kept)
        return _found(token, kept)

    cdef int _untaken_no_more(self, KeptRecord kept) except -1:
        """A delivery counts no more for its sender. The caller must then serve the clients that wait for memory."""
        self.kept.is_untaken_no_more(kept, self.clients.get(kept.generation >> GENERATION_BITS))
        self._owes_service = self.host.waiting_lease_requests != 0
        return 0

    cdef int _give_up(self, KeptRecord kept) except -1:
        """A delivery that nobody has taken goes. The caller must then serve the clients that wait for memory."""
        self._untaken_no_more(kept)
        return self._unpin(kept)

    cdef bint _may_pin(self, ClientRecord client, KeptRecord kept, uint64_t blocks) except -1:
        """Whether a client may pin content of so many blocks once more; None: it is not kept yet."""
        if client.pin_count >= self._max_pins:
            return False
        if kept is not None and kept.generation in client.pins:
            return True
        return client.pinned_blocks + blocks <= self._most_pinned_blocks

    def keep(self, uint64_t client_id, content: Keep) -> list[EngineEffect]:
        """A client hands a slot over, to be kept and pinned for it. Of two contents with one key, the first is kept, and both
        clients get that. Clients that wait for the key have it from now on, in the order in which they began to wait.

        A delivery is not pinned for its client. The first client that waits for its name takes it. It replaces one of this name
        that nobody has taken, which goes, unless the new one is not kept.

        Args:
            content: its payload was checked.

        Raises:
            RemoteProtocolError: it is not a slot that was lent to this client, or it is in device memory. Nothing was changed.
        """
        cdef ClientRecord client = self._connected(client_id)
        cdef SlotNumbers numbers
        cdef EngineSlotRecord record
        cdef KeptRecord kept, replaced
        cdef list effects
        _read_slots((content,), &numbers)
        record = self._publish(client, &numbers, client.last_generation)
        if record.lease.memory == DEVICE:
            record.lease.live.give(record.start, record.blocks)
            raise RemoteProtocolError("what is kept is in host memory")
        client.last_generation = record.generation
        record.lease.new_moments = 0
        key = _booked(content.key, content.for_one)
        kept = self.kept.by_key.get(key)
        kept, replaced = (None, kept) if content.for_one else (kept, None)
        reason = self._why_not_kept(client, record, kept, content.for_one, replaced)
        if reason is not None or kept is not None:
            record.lease.live.give(record.start, record.blocks)
            effects = [Released(client_id, (record.generation,))]
            if reason is not None:
                self.kept.refusals += 1
                effects.append(Answered(client_id, NotKept(content.token, reason)))
                return effects
            self._pin(client, kept)
            effects.append(Answered(client_id, _found(content.token, kept)))
            return effects
        if replaced is not None:
            self._give_up(replaced)
            self.kept.deliveries_dropped += 1
        while self.kept.must_give(record.blocks):
            self.host.evict(<KeptRecord>next(iter(self.kept.unpinned.values())), True)
        kept = KeptRecord.__new__(KeptRecord)
        kept.generation, kept.key, kept.for_one = record.generation, key, content.for_one
        kept.payload, kept.is_copied = content.payload, content.is_copied
        kept.start, kept.blocks, kept.nbytes = record.start, record.blocks, numbers.nbytes
        self.host.carve(client, record.lease, kept)
        self.kept.unpinned[kept.generation] = kept
        self.kept.unpinned_blocks += kept.blocks
        self.kept.add(kept)
        if kept.for_one:
            self.kept.deliver(kept, client)
        else:
            self._pin(client, kept)
        effects = [Answered(client_id, _found(content.token, kept))]
        for waiting_id, token in list(self.kept.waits.get(key, {}).items()):
            client = self._connected(waiting_id)
            self.kept.end_wait(client, token)
            effects.append(Answered(waiting_id, self._answer_to(client, token, kept)))
            if key not in self.kept.by_key:  # it has its taker
                break
        self._owes_service = False
        self.host.serve(effects)
        return effects

    def withdraw(self, uint64_t client_id, names: Sequence[bytes]) -> list[EngineEffect]:
        """A client takes its deliveries back that nobody has taken: those of these names, or without names all of them."""
        cdef ClientRecord client = self._connected(client_id)
        cdef KeptRecord kept
        wanted = [self.kept.by_key.get(_booked(name, True)) for name in names] if names else list(client.untaken.values())
        for kept in dict.fromkeys(wanted):
            if kept is not None and kept.generation in client.untaken:
                self._give_up(kept)
                self.kept.withdrawn += 1
        return self._served([])

    def untaken(self) -> list[KeptRecord]:
        """Returns the deliveries that have no taker."""
        return list(self.kept.untaken.values())

    def drop_untaken(self, generations: Collection[int]) -> list[EngineEffect]:
        """The engine drops deliveries that nobody has taken for long."""
        cdef KeptRecord kept
        for generation in dict.fromkeys(generations):
            kept = self.kept.untaken.get(generation)
            if kept is not None:
                self._give_up(kept)
                self.kept.deliveries_dropped += 1
        return self._served([])

    cdef str _why_not_kept(
        self, ClientRecord client, EngineSlotRecord slot, KeptRecord there, bint for_one, KeptRecord replaced
    ):
        """Returns why a slot is not kept, for the message; None: it is kept, or there is other content with the key already.

        Args:
            replaced: the delivery that goes if this one is kept; None: none does.
        """
        if self._is_draining:
            return "ends"
        if there is None and slot.blocks > min(self.kept.max_blocks, self._most_pinned_blocks):
            return "large"
        if for_one:
            may_pin = self._may_deliver(client, slot.blocks, replaced)
        else:
            may_pin = self._may_pin(client, there, slot.blocks if there is None else there.blocks)
        if not may_pin:
            return "pins"
        if there is not None:
            return None
        if self.host.is_wanted(slot.start, slot.blocks) or not self.kept.may_keep(slot.blocks, replaced):
            return "full"
        return None

    cdef bint _may_deliver(self, ClientRecord client, uint64_t blocks, KeptRecord replaced) except -1:
        """Whether a client may deliver so many blocks: of what it has delivered, as much may be untaken as it may pin."""
        cdef uint64_t count = len(client.untaken), untaken_blocks = client.untaken_blocks
        if replaced is not None and replaced.generation in client.untaken:
            count -= 1
            untaken_blocks -= replaced.blocks
        return count < self._max_pins and untaken_blocks + blocks <= self._most_pinned_blocks

    def drain(self) -> None:
        """The engine is about to end: it keeps nothing more. What is kept can be found."""
        self._is_draining = True

    def unpin(self, uint64_t client_id, generations: Sequence[int]) -> list[EngineEffect]:
        """A client gives pins back, one for each time that a generation is named.

        Raises:
            RemoteProtocolError: it does not have so many. Nothing was changed.
        """
        cdef ClientRecord client = self._connected(client_id)
        cdef list effects = []
        cdef dict counts = {}
        for generation in generations:
            counts[generation] = counts.get(generation, 0) + 1
            if counts[generation] > client.pins.get(generation, 0):
                raise RemoteProtocolError(f"client {client_id} takes back a pin of {generation}, which it does not have")
        for generation, count in counts.items():
            self._return_pins(client, generation, count)
        return self._served(effects)

    cdef int _pin(self, ClientRecord client, KeptRecord kept) except -1:
        """Pins content once more for a client."""
        count = client.pins.get(kept.generation, 0)
        client.pins[kept.generation] = count + 1
        client.pin_count += 1
        if not count:
            client.pinned_blocks += kept.blocks
            self.kept.pin(kept)
        return 0

    cdef int _return_pins(self, ClientRecord client, generation, uint64_t count) except -1:
        cdef KeptRecord kept = <KeptRecord>self.kept.by_generation[generation]
        client.pin_count -= count
        if client.pins[generation] > count:
            client.pins[generation] -= count
            return 0
        del client.pins[generation]
        client.pinned_blocks -= kept.blocks
        return self._unpin(kept)

    cdef int _drop_pins(self, ClientRecord client, still_pinned) except -1:
        """A client has gone: its pins go, except for the contents that it may still view."""
        for generation, count in list(client.pins.items()):
            if generation not in still_pinned:
                self._return_pins(client, generation, count)
        return 0

    cdef int _unpin(self, KeptRecord kept) except -1:
        """The caller must then serve the clients that wait for memory (:meth:`_served`)."""
        self.kept.unpin(kept)
        if not kept.pins and (kept.for_one or self.host.is_wanted(kept.start, kept.blocks)):
            self.host.evict(kept, False)
        self._owes_service = self.host.waiting_lease_requests != 0
        return 0

    cdef list _served(self, list effects):
        """Serves the clients that wait for a lease, if a pin has gone."""
        if not self._owes_service:
            return effects
        self._owes_service = False
        if effects is None:
            effects = []
        self.host.serve(effects)
        return effects

    cdef EngineSlotRecord _use(self, ClientRecord client, const SlotNumbers* slot):
        """Returns the record of a request's use of kept content, which is pinned once more with it."""
        cdef KeptRecord kept = self.kept.by_generation.get(slot.generation)
        cdef EngineSlotRecord record
        if kept is None or slot.generation not in client.pins:
            raise RemoteProtocolError(f"client {client.client_id} sends kept content {slot.generation}, which it has not pinned")
        if slot.offset != kept.start * BLOCK_NBYTES or slot.nbytes != kept.nbytes:
            raise RemoteProtocolError(f"kept content {slot.generation} is not {slot.nbytes} bytes at {slot.offset}")
        record = EngineSlotRecord.__new__(EngineSlotRecord)
        self.kept.pin(kept)
        record.generation, record.kept, record.start, record.blocks = self._next_use, kept, kept.start, kept.blocks
        record.state_number = PUBLISHED
        self._next_use += 1
        return record

    # -- replies -----------------------------------------------------------------------------------------------------

    def acquire_reply(self, uint64_t client_id, nbytes: int, int64_t request_id=-1) -> ReplySlot | None:
        """Acquires a reply slot for a client now; None if that would overtake a waiter, or does not fit now.

        Args:
            request_id: the request that it answers.

        Raises:
            CapacityError: it is larger than the whole reserve.
        """
        cdef ReplyWant want = self._reply_want(client_id, request_id, nbytes), other
        for other in self._reply_wants.values():
            if self._goes_before(other, want, self._reply_way(other)):
                return None
        return self._acquire_reply(want)

    cdef bint _goes_before(self, ReplyWant other, ReplyWant want, int way) except -1:
        """Whether a reply that waits goes before another one that comes later. ``way``: of the one that waits."""
        if other.client_id == want.client_id and other.request_id == want.request_id >= 0:
            return True  # the replies to a request keep their order
        if self._may_overtake or way == UNREAD:
            return False
        return way != WAITS or other.client_id == want.client_id

    def queue_reply(self, uint64_t client_id, ticket, nbytes: int, int64_t request_id=-1) -> None:
        """Queues for a reply slot; :class:`ReplyGranted` with this ticket comes as an effect of some later event."""
        self._connected(client_id)
        self._reply_wants[ticket] = self._reply_want(client_id, request_id, nbytes)

    cdef ReplyWant _reply_want(self, uint64_t client_id, int64_t request_id, nbytes):
        cdef ReplyWant want = ReplyWant.__new__(ReplyWant)
        want.client_id, want.request_id, want.blocks = client_id, request_id, self._reply_blocks_for(nbytes)
        return want

    def let_overtake(self, bint may_overtake) -> list[EngineEffect]:
        """Says whether a reply that finds no room lets smaller ones behind it pass. Otherwise it would wait as long as there are
        smaller ones; but who holds the room for which it waits may be silent, so the others must not wait as long as it does."""
        cdef list effects = []
        self._may_overtake = may_overtake
        self._serve_reply_wants(effects)
        return effects

    def replies_read(self, uint64_t client_id, request_ids: Sequence[int]) -> list[EngineEffect]:
        """A client's callers have read replies that it has copied out, one for each time that a request is named.

        A request that has ended is no error: the messages crossed.

        Raises:
            RemoteProtocolError: so many were not sent. Nothing was changed.
        """
        cdef ClientRecord client = <ClientRecord>self.clients[client_id]
        cdef RequestRecord request
        cdef dict counts = {}
        cdef list effects = []
        for request_id in request_ids:
            counts[request_id] = counts.get(request_id, 0) + 1
        for request_id, count in counts.items():
            request = client.requests.get(request_id)
            if request_id > client.last_request_id or (request is not None and count > request.unread_replies):
                raise RemoteProtocolError(f"client {client_id} has read a reply to request {request_id} that was not sent")
        for request_id, count in counts.items():
            request = client.requests.get(request_id)
            if request is not None:
                request.unread_replies -= count
        self._serve_reply_wants(effects)
        return effects

    def cancel_reply(self, ticket) -> list[EngineEffect]:
        """Leaves that queue, and passes the turn on."""
        cdef list effects = []
        self._reply_wants.pop(ticket, None)
        self._serve_reply_wants(effects)
        return effects

    def release_replies(self, uint64_t client_id, generations: Sequence[int]) -> list[EngineEffect]:
        """A client gives reply slots back. A slot that was given back before is only counted.

        Raises:
            RemoteProtocolError: it never had one of them, or these are more slots than there are blocks. Nothing was changed.
        """
        cdef list effects = []
        if <uint64_t>len(generations) > self._reply_reserve_blocks:
            raise RemoteProtocolError(
                f"{len(generations)} reply slots were released at once, and the reserve has {self._reply_reserve_blocks} blocks"
            )
        self._release_replies(<ClientRecord>self.clients[client_id], generations, effects)
        return effects

    cdef int _release_replies(self, ClientRecord client, generations, list effects) except -1:
        for generation in generations:
            if generation in client.replies:
                is_known = generation not in client.unsent_replies
            else:  # generations are never used again: this one was lent out once, and is not held now
                is_known = 0 < generation < self._next_reply_generation and generation not in self._lent_replies
            if not is_known:
                raise RemoteProtocolError(
                    f"reply slot {generation} was released by client {client.client_id}, which does not hold it"
                )
        for generation in generations:
            if generation in client.replies:
                self._free_reply(client, generation)
            else:
                self.stale_releases += 1
        return self._serve_reply_wants(effects)

    def reply_sent(self, uint64_t client_id, generation: int) -> None:
        """A reply slot has been written, and belongs to its client from now on."""
        (<ClientRecord>self.clients[client_id]).unsent_replies.remove(generation)

    def discard_reply(self, uint64_t client_id, generation: int) -> list[EngineEffect]:
        """The engine has stopped writing a reply slot that it will not send."""
        cdef ClientRecord client = <ClientRecord>self.clients[client_id]
        cdef RequestRecord request
        cdef list effects = []
        client.unsent_replies.remove(generation)
        slot = client.replies[generation]
        request = client.requests.get(<uint64_t><int64_t>slot.request_id)  # -1: of none
        if request is not None and slot.is_copied_out and request.unread_replies:
            request.unread_replies -= 1
        self._free_reply(client, generation)
        self._serve_reply_wants(effects)
        self._reclaim(client, effects)
        return effects

    cdef int _free_reply(self, ClientRecord client, generation) except -1:
        slot = client.replies.pop(generation)
        self._lent_replies.remove(generation)
        client.reply_blocks -= <uint64_t>slot.blocks
        if slot.is_copied_out:
            client.passing_blocks -= <uint64_t>slot.blocks
        self._replies.free(slot.start, slot.blocks)
        return 0

    cdef list _sent_replies(self, ClientRecord client):
        return [generation for generation in client.replies if generation not in client.unsent_replies]

    cdef int _drop_reply_wants(self, ClientRecord client) except -1:
        cdef ReplyWant want
        for ticket, want in list(self._reply_wants.items()):
            if want.client_id == client.client_id:
                del self._reply_wants[ticket]
        return 0

    cdef uint64_t _reply_blocks_for(self, nbytes) except 0:
        capacity = self._reply_reserve_blocks * BLOCK_NBYTES - SLOT_HEADER_NBYTES
        if nbytes > capacity:
            raise CapacityError(
                f"a reply of {nbytes} bytes can never fit the reply reserve of {capacity}; raise reply_nbytes",
                needed=nbytes,
                capacity=capacity,
            )
        return slot_blocks(nbytes)

    cdef int _reply_way(self, ReplyWant want) except -1:
        """How a reply may go, as far as shares are concerned.

        A client may hold as much of the reserve as it leaves free, and the replies that it copies out may take as much as they
        leave free beside that; one such reply may always go. So no client ever has all of the reserve, and several that are
        silent leave less and less of it free, but never nothing.

        A client that copies replies out holds their slots for a moment, unless it is silent. The caller may be slow, so only
        some unread replies of a request are copied out: its next one waits until a caller has read one of them.

        Source: Choudhury and Hahne, Dynamic queue length thresholds for shared-memory packet switches, 1998.
        """
        cdef ClientRecord client = <ClientRecord>self.clients[want.client_id]
        cdef RequestRecord request
        cdef uint64_t free = self._replies.free_units, left = free - want.blocks
        if want.blocks <= free and client.reply_blocks + want.blocks <= left:
            return STAYS
        request = client.requests.get(<uint64_t>want.request_id)  # -1: of none
        if request is not None and request.unread_replies >= UNREAD_REPLIES:
            return UNREAD
        if not client.passing_blocks or (want.blocks <= free and client.passing_blocks + want.blocks <= left):
            return PASSES
        return WAITS

    cdef object _acquire_reply(self, ReplyWant want):
        cdef int way = self._reply_way(want)
        cdef int64_t start = self._replies.take(want.blocks) if way > WAITS else -1
        cdef ClientRecord client
        cdef RequestRecord request
        if start < 0:
            return None
        client = None
        generation = None
        try:
            generation = self._next_reply_generation
            client = <ClientRecord>self.clients[want.client_id]
            slot = ReplySlot(generation, start, want.blocks, way == PASSES, want.request_id)
            client.replies[generation] = slot
            self._lent_replies.add(generation)
            client.unsent_replies.add(generation)
        except MemoryError:
            if client is not None:
                client.replies.pop(generation, None)
                client.unsent_replies.discard(generation)
            self._lent_replies.discard(generation)
            self._replies.give(<uint64_t>start, want.blocks)
            raise
        self._next_reply_generation += 1
        client.reply_blocks += want.blocks
        if way == PASSES:
            client.passing_blocks += want.blocks
            request = client.requests.get(<uint64_t>want.request_id)  # -1: of none
            if request is not None:
                request.unread_replies += 1
        return slot

    cdef int _serve_reply_wants(self, list effects) except -1:
        cdef ReplyWant want
        cdef set clients = set(), requests = set()  # some of whose replies go on waiting
        cdef int way
        if not self._reply_wants:
            return 0
        for ticket, want in list(self._reply_wants.items()):
            if want.client_id in clients or (want.request_id >= 0 and (want.client_id, want.request_id) in requests):
                continue
            slot = self._acquire_reply(want)
            if slot is not None:
                del self._reply_wants[ticket]
                effects.append(ReplyGranted(ticket, slot))
                continue
            requests.add((want.client_id, want.request_id))
            way = UNREAD if self._may_overtake else self._reply_way(want)
            if way > WAITS:
                break  # the first that needs space is not overtaken
            if way == WAITS:
                clients.add(want.client_id)
        return 0

    # -- what there is -------------------------------------------------------------------------------------------------

    @property
    def waiting_lease_requests(self) -> int:
        """Clients that wait for a lease, in either memory."""
        return sum([lending.waiting_lease_requests for lending in self.lendings])

    @property
    def reply_free_nbytes(self) -> int:
        """Free bytes of the reply reserve."""
        return self._replies.free_units * BLOCK_NBYTES

    def count_slots(self, int state: EngineSlot) -> int:
        """Slots in this state, of all clients and in either memory."""
        return self._slots_in[state]

    def count_device_slots(self) -> int:
        """Slots in device memory that the engine holds in any state."""
        return self._device_slots

    def check(self) -> None:
        """Asserts the invariants of the book; for tests, and for closing."""
        for lending in self.lendings:
            lending.check()
        replies = sum(slot.blocks for client in self.clients.values() for slot in client.replies.values())
        assert self._replies.free_units + replies == self.geometry.reply_blocks, "a reply block is lost"
        slots = [slot for client in self.clients.values() for slot in client.slots.values()]
        assert list(self._slots_in) == [sum(slot.state is state for slot in slots) for state in EngineSlot]
        assert self._device_slots == sum(slot.kept is None and slot.lease.memory == DEVICE for slot in slots)
        for kept in self.kept.by_generation.values():
            pins = sum(kept.generation in client.pins for client in self.clients.values())
            is_untaken = kept.for_one and self.kept.by_key.get(kept.key) is kept
            assert kept.pins == pins + sum(slot.kept is kept for slot in slots) + is_untaken, "a pin is nobody's, or is not counted"
        assert sum(map(len, self.kept.waits.values())) == sum(len(client.waits) for client in self.clients.values())
        assert not self._owes_service, "a pin has gone, and nobody was served"
        for client in self.clients.values():
            assert client.reply_blocks == sum(slot.blocks for slot in client.replies.values())
            assert client.passing_blocks == sum(slot.blocks for slot in client.replies.values() if slot.is_copied_out)
            assert client.connected or not client.requests, "a request outlives its connection"
            assert client.pin_count == sum(client.pins.values()) <= self._max_pins
            assert client.pinned_blocks == sum(self.kept.by_generation[generation].blocks for generation in client.pins)
            assert client.pinned_blocks <= self._most_pinned_blocks
            own = {number: kept for number, kept in self.kept.untaken.items() if number >> GENERATION_BITS == client.client_id}
            assert client.untaken == own and <uint64_t>len(own) <= self._max_pins
            assert client.untaken_blocks == sum(kept.blocks for kept in own.values()) <= self._most_pinned_blocks
            assert client.connected or not client.waits, "who has gone waits for a key"
            assert all(self.kept.waits[key][client.client_id] == token for token, key in client.waits.items())
            assert <uint64_t>len(client.waits) <= self._max_waits
            for lease in client.leases.values():
                expected = Lease.LEASED if client.connected else Lease.QUARANTINED
                assert lease.state is expected, f"lease {lease.lease_id} is {lease.state.name}"
                in_lease = [(slot.start, slot.blocks) for slot in client.slots.values() if slot.lease is lease]
                assert all(run in lease.live.runs() for run in in_lease), "a live slot has no blocks in its lease"
                assert lease.live.units == lease.kept_blocks + sum(blocks for _, blocks in in_lease)
            end = 0
            for slot in sorted([slot for slot in client.slots.values() if slot.kept is None], key=lambda slot: slot.start):
                assert slot.start >= end, f"slot {slot.generation} overlaps another"
                assert slot.lease.start <= slot.start and slot.start + slot.blocks <= slot.lease.end
                assert client.leases.get(slot.lease.lease_id) is slot.lease, "a live slot is in no lease of its client"
                end = slot.start + slot.blocks


cdef bytes _booked(bytes key, bint for_one):
    """Returns the key that the book has: the name of a delivery is none of content for all."""
    return key + b"1" if for_one else key


cdef object _found(uint64_t token, KeptRecord kept):
    """The message that tells a client of content."""
    return Found(token, kept.generation, kept.start * BLOCK_NBYTES, kept.nbytes, kept.is_copied, kept.payload)
