"""The C interface of :mod:`shmring.core.sorted_keys`."""

from libc.stdint cimport uint32_t, uint64_t

cdef enum:
    CHUNK_KEYS = 128  # a kilobyte: moving half of it takes some 20 ns, and ten thousand keys are eighty chunks
    MAX_SPLITS = 2    # chunks that are kept ready: no change of a book inserts more keys than this into one list


cdef struct Chunk:
    uint64_t first  # of the keys, here too: who looks for a chunk reads these alone, in one piece of memory
    uint64_t* keys  # in order, at least one
    uint32_t count


cdef class SortedKeys:
    cdef Chunk* chunks
    cdef uint32_t count
    cdef uint32_t capacity
    cdef uint64_t* ready[MAX_SPLITS]

    cdef int make_ready(self) except -1
    cdef void insert(self, uint64_t key) noexcept nogil
    cdef bint remove(self, uint64_t key) noexcept nogil
    cdef void exchange(self, uint64_t key, uint64_t by) noexcept nogil
    cdef void replace(self, uint64_t key, uint64_t by) noexcept nogil
    cdef bint first_from(self, uint64_t key, uint64_t* found) noexcept nogil
    cdef bint last_below(self, uint64_t key, uint64_t* found) noexcept nogil
    cdef uint32_t _chunk_of(self, uint64_t key) noexcept nogil
    cdef void _drop_chunk(self, uint32_t place) noexcept nogil
