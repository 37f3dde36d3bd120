"""The C interface of :mod:`shmring.core.held_slots`."""

from cpython.object cimport PyObject
from libc.stdint cimport uint32_t, uint64_t

from shmring.core.sorted_keys cimport SortedKeys

cdef enum:
    RECENT = 8


cdef struct Held:
    uint64_t address
    uint64_t nbytes
    PyObject* record  # owned
    PyObject* tensor  # owned: the last one that was made in it; NULL: none


cdef class HeldSlots:
    cdef Held _recent[RECENT]
    cdef uint32_t _recent_count
    cdef SortedKeys _addresses  # of the others
    cdef dict _slots           # (record, bytes of content) of the others, by address of content

    cpdef int hold(self, object record, uint64_t address, uint64_t nbytes) except -1
    cpdef int leave(self, uint64_t address) except -1
    cdef void remember(self, uint64_t address, object tensor) noexcept
    cdef bint has_made(self, object tensor, uint64_t address) noexcept
    cdef void _forget_recent(self, uint32_t place) noexcept
    cdef bint find(self, uint64_t address, uint64_t nbytes, uint32_t* region, uint64_t* offset, list found) except -1
