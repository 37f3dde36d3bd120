"""The C interface of :mod:`shmring.core.client_book`.

For what happens to every message. Methods that return a list return None if nothing follows.
"""

from libc.stdint cimport uint64_t

from shmring.core.blocks cimport RunAllocator
from shmring.core.numbered cimport Numbered

cdef enum:
    SLOT_STATES = 6


cdef class HeldLease:
    cdef public uint64_t lease_id
    cdef public bint is_base
    cdef public RunAllocator slots
    cdef public double empty_since
    cdef public bint recalled
    cdef public uint64_t kept_blocks   # of it, that have become the engine's

    cdef bint is_empty(self) noexcept


cdef class ClientSlotRecord:
    cdef public HeldLease lease
    cdef public uint64_t start
    cdef public uint64_t blocks
    cdef public uint64_t nbytes
    cdef public uint64_t generation
    cdef public bint held
    cdef public bint viewed
    cdef int state_number

    cpdef bint is_submittable(self) noexcept


cdef class Waiter:
    cdef public uint64_t nbytes
    cdef public bint held


cdef class ClientBook:
    cdef readonly object limits
    cdef public dict leases               # HeldLease by id
    cdef public dict _waiters             # Waiter by ticket, in order of arrival
    cdef Numbered _with_engine            # ClientSlotRecord by generation: SUBMITTED
    cdef Numbered _here                   # by start: WRITING, CACHED, DRAINING
    cdef public uint64_t _token
    cdef public uint64_t _requested_nbytes  # of the lease request that is outstanding
    cdef public bint _request_waits       # whether it says that a caller waits
    cdef public uint64_t _wish_nbytes     # what a caller wanted that did not wait; 0: nothing
    cdef public uint64_t _next_generation
    cdef object _capacity_nbytes
    cdef uint64_t lease_end_nbytes        # where the memory that is leased out ends in the address space
    cdef uint64_t _max_leases
    cdef uint64_t _lease_nbytes
    cdef uint64_t _common_blocks
    cdef double _lease_idle_s
    cdef uint64_t _base_leases            # of those that are held
    cdef uint64_t _recalls                # leases that were recalled and are still held
    cdef uint64_t _slots_in[SLOT_STATES]
    cdef uint64_t _draining_blocks

    cdef ClientSlotRecord acquire_slot(self, uint64_t nbytes, bint held)
    cdef ClientSlotRecord take_slot(self, uint64_t nbytes, bint held)
    cdef uint64_t submit_slot(self, ClientSlotRecord slot, ClientBook numbers) except 0
    cdef bint release_generation(self, uint64_t generation, double now) except -1
    cdef list give_slot_up(self, ClientSlotRecord slot, double now)
    cdef list view_gone(self, ClientSlotRecord slot, double now)
    cdef bint is_time_asked_for(self, ClientSlotRecord slot) noexcept
    cdef bint has_further_leases(self) noexcept
    cdef double earliest_expiry(self) noexcept
    cdef list serve(self)
    cdef bint _takes(self, HeldLease lease, uint64_t blocks) noexcept
    cdef int _move(self, ClientSlotRecord slot, int event) except -1
    cdef int _leave(self, ClientSlotRecord slot, int event, double now) except -1
    cdef int _return(self, list leases, list effects) except -1
    cdef int _request_lease(self, uint64_t nbytes, bint waits, list effects) except -1
