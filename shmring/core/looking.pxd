"""The C interface of :mod:`shmring.core.looking`."""

from libc.stdint cimport uint32_t


cdef class Looking:
    cdef readonly uint32_t begun   # how often it has looked
    cdef double _until
    cdef uint32_t _left_out   # of the next times
    cdef uint32_t _vain       # times in a row, of those that count

    cdef bint begins(self, double seconds) noexcept nogil
    cdef bint goes_on(self) noexcept nogil
    cdef double moment(self) noexcept nogil
    cdef void has_looked(self, bint found) noexcept nogil


cdef double now_s() noexcept nogil  # of a clock that only grows
