"""The C interface of :mod:`shmring.core.views`."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t

from shmring.core.dlpack cimport DLManagedTensorVersioned
from shmring.core.mapping cimport Mapped


cdef enum:
    MAX_VIEW_DIMENSIONS = 64  # of numpy and of torch


cdef struct Departures:
    # Where regions go whose last view has died, and the bell that says so. Lives until its owner and the last region have gone.
    int32_t references
    int forks           # of the process that made it: a forked child does not ring
    int bell            # an eventfd
    void* top           # of the stack of regions that have departed; CLOSED when nobody collects them any more
    Lent* draining      # regions that were left while viewed and were not collected; the owner's thread only
    uint64_t count      # of them


cdef struct Owner:
    # What regions keep, and are told of when the last of them has gone. Its first member, so that `gone` knows the rest.
    int32_t references
    void (*gone)(Owner*) noexcept nogil   # frees it; on any thread, with the interpreter's lock or without


cdef struct Lent:
    # A region: memory that views may show. Its owner has one reference, and each view one.
    int32_t references
    bint is_told             # whether its owner wants to hear that the last view has died
    char* address
    uint64_t nbytes
    uint64_t key_high, key_low
    Departures* departures   # NULL: nobody is ever told
    Mapped* mapped           # kept as long as the region; NULL: memory of its own, or of somebody who looks after it
    Owner* owner               # the same of something else; NULL: nothing
    Lent* next               # on the stack
    Lent* before             # in the list of draining ones
    Lent* after


cdef void leave_owner(Owner* owner) noexcept nogil
cdef Lent* keeping_region(Mapped* mapped, uint64_t offset, uint64_t nbytes, Owner* owner) except NULL
cdef void hold_region(Lent* region) noexcept nogil
cdef void drop_region(Lent* region) noexcept nogil
cdef bint leave_region(Lent* region) noexcept
cdef bint is_region_viewed(const Lent* region) noexcept nogil
cdef Lent* copy_region(const void* data, uint64_t nbytes) except NULL


cdef class Regions:
    cdef Departures* _departures  # NULL: closed

    cdef Departures* _open(self) except NULL
    cdef Lent* lend(self, Mapped* mapped, uint64_t offset, uint64_t nbytes, uint64_t key_high, uint64_t key_low) except NULL


cdef class Region:
    cdef Lent* _lent  # NULL: left

    cdef Lent* lent(self) except NULL


cdef class RegionBytes:
    cdef Lent* _lent


cdef RegionBytes lend_bytes(Lent* region)


cdef class TensorMaker:
    cdef object _from_dlpack
    cdef object _capsule  # keeps the table
    cdef int (*_to_python)(DLManagedTensorVersioned*, void**) except -1

    cdef object view(
        self, Lent* region, uint64_t offset, int ndim, const int64_t* shape, uint8_t code, uint8_t bits
    )
