"""The C interface of :mod:`shmring.core.kept_book`."""

from libc.stdint cimport uint64_t

from shmring.core.records cimport KeptRecord


cdef class KeptBook:
    cdef public dict by_key           # KeptRecord
    cdef public dict by_generation    # KeptRecord
    cdef public object unpinned       # KeptRecord by generation, the least recently used first
    cdef public uint64_t hits
    cdef public uint64_t misses
    cdef public uint64_t evictions
    cdef public uint64_t blocks       # of all of it
    cdef public uint64_t unpinned_blocks
    cdef readonly uint64_t max_blocks
    cdef readonly uint64_t max_kept

    cdef int add(self, KeptRecord record) except -1
    cdef int pin(self, KeptRecord record) except -1
    cdef int unpin(self, KeptRecord record) except -1
    cdef int forget(self, KeptRecord record) except -1
    cdef bint may_take(self, uint64_t blocks) except -1
    cdef bint must_give(self, uint64_t blocks) except -1
