"""The records of the engine's book: leases, slots, requests, waiters, clients. Only ``engine_book.pyx`` and ``lending.pyx``
change them.

All fields can be read and written from Python, so that tests can look at a book, copy it and damage it.
"""

import cython

from libc.stdint cimport int64_t, uint64_t

cdef enum:
    HOST = 0    # the two memories, as messages number them
    DEVICE = 1
    MEMORIES = 2


@cython.final
cdef class LeaseRecord:
    cdef public uint64_t lease_id
    cdef public uint64_t client_id
    cdef public int memory
    cdef public uint64_t start
    cdef public uint64_t blocks
    cdef public TakenRuns live      # which blocks of it are in live slots
    cdef public bint recalled
    cdef public bint given_up       # the holder's goodbye has named it
    cdef public uint64_t kept_blocks  # blocks of its range that have become the engine's: see ``kept_book.pyx``
    cdef public int new_moments     # so many more moments it counts as granted just now; 0: a slot of it has come, or nobody waited
    cdef public int silent_moments  # of those that have passed since its recall, how many without a live slot in it
    cdef int state_number

    @property
    def state(self) -> Lease:
        return leases.state(self.state_number)

    @state.setter
    def state(self, int state):
        self.state_number = state

    @property
    def end(self) -> int:
        return self.start + self.blocks


@cython.final
@cython.no_gc
cdef class KeptRecord:
    """Content that the engine keeps."""

    cdef public uint64_t generation  # of the slot that it was
    cdef public bytes key
    cdef public uint64_t start
    cdef public uint64_t blocks
    cdef public uint64_t nbytes
    cdef public bint is_copied       # its tensors are in region 0, else in region 1
    cdef public bytes payload        # msgpack, as the wire has it
    cdef public uint64_t pins        # pins of clients, and uses in requests; of a delivery without a taker, one of the engine
    cdef public uint64_t hits        # how often a client has found it
    cdef public bint for_one         # it is a delivery


@cython.final
@cython.no_gc
cdef class Piece:
    """A range that is lent or kept, as a whole."""

    cdef public uint64_t start
    cdef public uint64_t blocks
    cdef public LeaseRecord lease  # type: LeaseRecord | None  # None: what is there is kept
    cdef public KeptRecord kept  # type: KeptRecord | None  # None: what is there is lent


@cython.final
@cython.freelist(256)
@cython.no_gc
cdef class EngineSlotRecord:
    cdef public uint64_t generation
    cdef public LeaseRecord lease  # type: LeaseRecord | None
    cdef public uint64_t start
    cdef public uint64_t blocks
    cdef public KeptRecord kept  # type: KeptRecord | None  # its content, if the slot is kept content; then it is in no lease
    cdef int state_number

    @property
    def state(self) -> EngineSlot:
        return engine_slots.state(self.state_number)

    @state.setter
    def state(self, int state):
        self.state_number = state


@cython.final
@cython.freelist(256)
@cython.no_gc
cdef class RequestRecord:
    cdef public uint64_t request_id
    cdef public tuple slots  # type: tuple[EngineSlotRecord, ...]
    cdef public uint64_t unread_replies  # that its client copies out, and that its caller has not read
    cdef int state_number

    @property
    def state(self) -> Request:
        return requests.state(self.state_number)

    @state.setter
    def state(self, int state):
        self.state_number = state

    @property
    def generations(self) -> tuple[int, ...]:
        """Of its slots, in order, whether or not they have been released."""
        cdef EngineSlotRecord slot
        return tuple([slot.generation for slot in self.slots])


@cython.final
cdef class LeaseWant:
    cdef public uint64_t client_id
    cdef public uint64_t token
    cdef public uint64_t blocks
    cdef public uint64_t preferred_blocks
    cdef public bint waits          # whether a caller waits for it
    cdef public uint64_t rest_moments  # so many more it rests, the last one until somebody answers: it has given its window up
    cdef public uint64_t patience      # so many moments it waits in vain before it gives a window up


@cython.final
cdef class ReplyWant:
    cdef public uint64_t client_id
    cdef public uint64_t blocks
    cdef public int64_t request_id


@cython.final
cdef class ClientRecord:
    cdef public uint64_t client_id
    cdef public uint64_t last_generation
    cdef public int64_t last_request_id
    cdef public bint connected
    cdef public bint dead
    cdef public uint64_t reply_blocks
    cdef public uint64_t passing_blocks  # of them, that it copies out
    cdef public dict leases  # type: dict[int, LeaseRecord]  # by id
    cdef public Numbered slots     # EngineSlotRecords, by generation
    cdef public Numbered requests  # RequestRecords, by id
    cdef public dict replies  # type: dict[int, ReplySlot]  # by generation
    cdef public set unsent_replies  # type: set[int]  # generations: the engine itself is still writing them
    cdef public dict pins  # type: dict[int, int]  # how often it has pinned each content, by generation
    cdef public uint64_t pin_count  # of them
    cdef public uint64_t pinned_blocks
    cdef public dict waits  # type: dict[int, bytes]  # keys of content for which it waits, by the token of its question
    cdef public dict untaken  # type: dict[int, KeptRecord]  # what it has delivered and nobody has taken, by generation
    cdef public uint64_t untaken_blocks
    cdef uint64_t blocks_in[MEMORIES]
    cdef uint64_t leases_in[MEMORIES]

    def __cinit__(self):
        self.last_request_id = -1
        self.connected = True
        self.leases, self.slots, self.requests, self.replies, self.unsent_replies = {}, Numbered(), Numbered(), {}, set()
        self.pins, self.waits, self.untaken = {}, {}, {}

    @property
    def leased_blocks(self) -> tuple[int, ...]:
        """Blocks in its leases, by memory."""
        return tuple(self.blocks_in)

    @leased_blocks.setter
    def leased_blocks(self, blocks):
        self.blocks_in[HOST], self.blocks_in[DEVICE] = blocks

    @property
    def lease_counts(self) -> tuple[int, ...]:
        """How many leases it has, by memory."""
        return tuple(self.leases_in)

    @lease_counts.setter
    def lease_counts(self, counts):
        self.leases_in[HOST], self.leases_in[DEVICE] = counts


@cython.final
cdef class Window:
    """The range kept for the first lease request that could not be served."""

    cdef public uint64_t client_id
    cdef public uint64_t start
    cdef public uint64_t blocks
    cdef public uint64_t next_lease_id  # when it was opened: leases from this one on were granted since
    cdef public uint64_t vain_moments   # that have passed since a lease in it came back, and nothing was on its way

    @property
    def end(self) -> int:
        return self.start + self.blocks
