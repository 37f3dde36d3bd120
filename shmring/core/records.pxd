"""The C interface of :mod:`shmring.core.records`."""

from libc.stdint cimport int64_t, uint64_t

from shmring.core.blocks cimport TakenRuns

cdef enum:
    HOST = 0    # the two memories, as messages number them
    DEVICE = 1
    MEMORIES = 2


cdef class LeaseRecord:
    cdef public uint64_t lease_id
    cdef public uint64_t client_id
    cdef public int memory
    cdef public uint64_t start
    cdef public uint64_t blocks
    cdef public TakenRuns live      # which blocks of it are in live slots
    cdef public bint recalled
    cdef public bint given_up       # by its holder's goodbye
    cdef public uint64_t kept_blocks  # of its range, that have become the engine's: see :mod:`.kept_book`
    cdef int state_number


cdef class KeptRecord:
    cdef public uint64_t generation  # of the slot that it was
    cdef public bytes key
    cdef public uint64_t start
    cdef public uint64_t blocks
    cdef public uint64_t nbytes
    cdef public bint is_copied       # its tensors are in region 0, else in region 1
    cdef public bytes payload        # msgpack, as the wire has it
    cdef public uint64_t pins        # clients that have it pinned, and slots of requests that are this


cdef class Piece:
    cdef public uint64_t start
    cdef public uint64_t blocks
    cdef public LeaseRecord lease   # None: what is there is kept
    cdef public KeptRecord kept     # None: what is there is lent


cdef class EngineSlotRecord:
    cdef public uint64_t generation
    cdef public LeaseRecord lease
    cdef public uint64_t start
    cdef public uint64_t blocks
    cdef public KeptRecord kept     # what it is, if that is kept; it is in no lease then
    cdef int state_number


cdef class RequestRecord:
    cdef public uint64_t request_id
    cdef public list slots          # of EngineSlotRecord; None: it has none
    cdef int state_number


cdef class LeaseWant:
    cdef public uint64_t client_id
    cdef public uint64_t token
    cdef public uint64_t blocks
    cdef public uint64_t preferred_blocks
    cdef public bint waits          # whether a caller waits for it


cdef class ReplyWant:
    cdef public uint64_t client_id
    cdef public uint64_t blocks


cdef class ClientRecord:
    cdef public uint64_t client_id
    cdef public uint64_t last_generation
    cdef public int64_t last_request_id
    cdef public bint connected
    cdef public bint dead
    cdef public uint64_t reply_blocks
    cdef public dict leases         # LeaseRecord by id
    cdef public dict slots          # EngineSlotRecord by generation
    cdef public dict requests       # RequestRecord by id
    cdef public dict replies        # ReplySlot by generation
    cdef public set unsent_replies  # generations: the engine itself is still writing them
    cdef public dict pins           # how often it has pinned what is kept, by generation
    cdef public uint64_t pin_count  # of them
    cdef public uint64_t pinned_blocks
    cdef uint64_t blocks_in[MEMORIES]
    cdef uint64_t leases_in[MEMORIES]


cdef class Window:
    cdef public uint64_t client_id
    cdef public uint64_t start
    cdef public uint64_t blocks
