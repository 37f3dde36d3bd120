"""The C interface of :mod:`shmring.core.blocks`."""

from libc.stdint cimport int64_t, uint64_t

from shmring.core.sorted_keys cimport SortedKeys


cdef class RunAllocator:
    cdef readonly uint64_t start
    cdef readonly uint64_t length
    cdef readonly uint64_t free_units
    cdef SortedKeys _by_start
    cdef SortedKeys _by_length

    cdef int64_t take(self, uint64_t length) except -2
    cdef bint take_at(self, uint64_t start, uint64_t length) except -1
    cdef bint give(self, uint64_t start, uint64_t length) except -1
    cdef uint64_t largest(self) noexcept nogil
    cdef bint run_at_or_behind(self, uint64_t unit, uint64_t* start, uint64_t* length) noexcept nogil
    cdef void _add(self, uint64_t start, uint64_t length) noexcept nogil
    cdef void _drop(self, uint64_t start, uint64_t length) noexcept nogil


cdef class TakenRuns:
    cdef readonly uint64_t units
    cdef SortedKeys _by_start

    cdef bint take(self, uint64_t start, uint64_t length) except -1
    cdef bint give(self, uint64_t start, uint64_t length) noexcept nogil
