"""The C interface of :mod:`shmring.core.load`."""

from libc.stdint cimport uint8_t, uint64_t


cdef class LoadPage:
    cdef uint8_t* _at
    cdef bint _is_writable
    cdef int _forks

    cdef void put(self, uint64_t in_flight, uint64_t waiting, uint64_t received_nbytes) noexcept nogil
    cdef uint64_t received(self) noexcept
