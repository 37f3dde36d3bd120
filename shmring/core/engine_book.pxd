"""The C interface of :mod:`shmring.core.engine_book`.

For what happens to every message: the caller finds the client once (:meth:`EngineBook.client_of`) and passes records on.
Methods that return a list return None if nothing follows.
"""

from libc.stdint cimport uint8_t, uint64_t

from shmring.core.blocks cimport RunAllocator
from shmring.core.lending cimport Lending
from shmring.core.kept_book cimport KeptBook
from shmring.core.records cimport ClientRecord, EngineSlotRecord, KeptRecord, LeaseRecord, ReplyWant, RequestRecord
from shmring.core.wire cimport SlotNumbers

cdef enum:
    GENERATION_BITS = 40       # of :mod:`shmring.core.geometry`
    SLOT_STATES = 4
    KEPT_LEASE = 0             # lease id of a slot that is kept content


cdef class EngineBook:
    cdef readonly object geometry
    cdef readonly object limits
    cdef public dict clients               # ClientRecord by id
    cdef public list lendings              # Lending by the number of its memory
    cdef public Lending host               # the first of them
    cdef readonly KeptBook kept
    cdef public uint64_t _next_use         # number of the next slot that is kept content
    cdef public uint64_t late_aborts       # of requests that had ended: messages cross
    cdef public uint64_t stale_releases    # of reply slots that had been given back
    cdef public RunAllocator _replies
    cdef public dict _reply_wants          # ReplyWant by ticket, in order of arrival
    cdef public uint64_t _next_reply_generation
    cdef public set _lent_replies          # generations, of all clients
    cdef uint64_t _max_inflight
    cdef uint64_t _reply_reserve_blocks
    cdef uint64_t _slots_in[SLOT_STATES]
    cdef uint64_t _device_slots
    cdef uint64_t _max_pins
    cdef bint _owes_service                # to those who wait for a lease: a pin has gone

    cdef ClientRecord client_of(self, uint64_t client_id)
    cdef RequestRecord submit_slots(self, ClientRecord client, uint64_t request_id, const SlotNumbers* slots, Py_ssize_t count)
    cdef int claim_request(self, RequestRecord request) except -1
    cdef int end_request(self, ClientRecord client, RequestRecord request, int event) except -1
    cdef list abort_request(self, ClientRecord client, uint64_t request_id)
    cdef list release_request(
        self, ClientRecord client, RequestRecord request, const uint8_t* viewed, uint64_t* released, Py_ssize_t* count
    )
    cdef list release_viewed(self, ClientRecord client, EngineSlotRecord slot)
    cdef EngineSlotRecord _publish(self, ClientRecord client, const SlotNumbers* slot, uint64_t last_generation)
    cdef int _claim_slots(self, RequestRecord request) except -1
    cdef int _move(self, ClientRecord client, EngineSlotRecord slot, int event) except -1
    cdef ClientRecord _connected(self, uint64_t client_id)
    cdef int _disconnect(self, ClientRecord client, list effects) except -1
    cdef int _reclaim(self, ClientRecord client, list effects) except -1
    cdef Lending _lending(self, LeaseRecord lease)
    cdef int _take_back(self, ClientRecord client, LeaseRecord lease) except -1
    cdef int _serve_wants(self, list effects) except -1
    cdef str _why_not_kept(self, ClientRecord client, EngineSlotRecord slot, bint is_there)
    cdef int _pin(self, ClientRecord client, KeptRecord kept) except -1
    cdef int _take_pins_back(self, ClientRecord client, generation, uint64_t count) except -1
    cdef int _drop_pins(self, ClientRecord client, still_pinned) except -1
    cdef int _unpin(self, KeptRecord kept) except -1
    cdef list _served(self, list effects)
    cdef EngineSlotRecord _use(self, ClientRecord client, const SlotNumbers* slot)
    cdef int _release_replies(self, ClientRecord client, generations, list effects) except -1
    cdef int _free_reply(self, ClientRecord client, generation) except -1
    cdef list _sent_replies(self, ClientRecord client)
    cdef int _drop_reply_wants(self, ClientRecord client) except -1
    cdef uint64_t _reply_blocks_for(self, nbytes) except 0
    cdef bint _is_over_reply_quota(self, ReplyWant want) except -1
    cdef object _take_reply(self, ReplyWant want)
    cdef int _serve_reply_wants(self, list effects) except -1
