"""The C interface of :mod:`shmring.core.lending`."""

from libc.stdint cimport uint64_t

from shmring.core.blocks cimport RunAllocator
from shmring.core.kept_book cimport KeptBook
from shmring.core.records cimport ClientRecord, KeptRecord, LeaseRecord, LeaseWant, Window

cdef enum:
    BLOCK_NBYTES = 4096        # of :mod:`shmring.core.geometry`
    SLOT_HEADER_NBYTES = 64    # of :mod:`shmring.core.messages`
    LEASE_STATES = 3


cdef inline uint64_t blocks_for(uint64_t nbytes) noexcept nogil:
    """As in :mod:`shmring.core.geometry`, for any number that fits."""
    return nbytes // BLOCK_NBYTES + (nbytes % BLOCK_NBYTES != 0 or nbytes == 0)


cdef inline uint64_t slot_blocks(uint64_t nbytes) noexcept nogil:
    """As in :mod:`shmring.core.geometry`, for any number that fits."""
    return nbytes // BLOCK_NBYTES + (nbytes % BLOCK_NBYTES + SLOT_HEADER_NBYTES + BLOCK_NBYTES - 1) // BLOCK_NBYTES


cdef class Lending:
    cdef readonly object limits
    cdef readonly int memory
    cdef public dict clients
    cdef public RunAllocator _free
    cdef public dict _wants         # LeaseWant by client, in order of arrival
    cdef public Window _window
    cdef public list _apart         # (start, blocks) of what is free in the window
    cdef public list _by_start      # every Piece, by address
    cdef public KeptBook contents   # None: nothing is ever kept there
    cdef public uint64_t _next_lease_id
    cdef uint64_t _max_leases
    cdef uint64_t _quota_blocks
    cdef uint64_t _apart_blocks
    cdef uint64_t _blocks_in[LEASE_STATES]

    cdef object connect(self, ClientRecord client, uint64_t blocks)
    cdef int ask(
        self, ClientRecord client, uint64_t token, uint64_t nbytes, uint64_t preferred_nbytes, bint waits, list effects
    ) except -1
    cdef int forget(self, uint64_t client_id) except -1
    cdef int change(self, LeaseRecord lease, int event) except -1
    cdef int take_back(self, ClientRecord client, LeaseRecord lease) except -1
    cdef int carve(self, ClientRecord client, LeaseRecord lease, KeptRecord kept) except -1
    cdef bint is_wanted(self, uint64_t start, uint64_t blocks) noexcept
    cdef int evict(self, KeptRecord kept) except -1
    cdef int _forget(self, KeptRecord kept) except -1
    cdef bint _make_room(self, uint64_t blocks) except -1
    cdef int _evict_range(self, uint64_t start, uint64_t blocks) except -1
    cdef list _pieces_in(self, uint64_t start, uint64_t blocks)
    cdef int serve(self, list effects) except -1
    cdef object _lend(self, ClientRecord client, uint64_t token, uint64_t start, uint64_t blocks)
    cdef bint _serve_one(self, ClientRecord client, LeaseWant want, list effects) except -1
    cdef bint _withdraw(self, uint64_t client_id) except -1
    cdef int _close_window(self) except -1
    cdef bint _is_over_quota(self, ClientRecord client, uint64_t blocks) except -1
    cdef bint _take_run(self, ClientRecord client, LeaseWant want, uint64_t* start, uint64_t* blocks) except -1
    cdef bint _take_free_run(self, ClientRecord client, LeaseWant want, uint64_t* start, uint64_t* blocks) except -1
    cdef int _open_window(self, ClientRecord client, uint64_t blocks, list effects) except -1
    cdef int _recall_idle(self, uint64_t blocks, list effects) except -1
    cdef int _recall(self, ClientRecord owner, uint64_t start, uint64_t blocks, list effects) except -1
    cdef bint _cheapest_range(self, uint64_t blocks, bint idle_only, uint64_t* best) except -1
    cdef int _set_apart(self) except -1
    cdef int _put_back(self) except -1
    cdef int _free_run(self, uint64_t start, uint64_t blocks) except -1
    cdef int _give(self, uint64_t start, uint64_t blocks) except -1
    cdef Py_ssize_t _place_of(self, uint64_t start) except -1
