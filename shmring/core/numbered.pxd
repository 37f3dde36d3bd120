"""The C interface of :mod:`shmring.core.numbered`."""

from cpython.object cimport PyObject
from libc.stdint cimport uint64_t


cdef struct Entry:
    uint64_t number
    PyObject* item     # NULL: nothing is here


cdef class Numbered:
    cdef Entry* _entries
    cdef uint64_t _mask      # of a power of two
    cdef int _shift          # of a product, so that a place is left
    cdef uint64_t count
    cdef object _unused      # without a member that is an object, no collector would look at this

    cdef PyObject* find(self, uint64_t number) noexcept
    cpdef int put(self, uint64_t number, object item) except -1
    cpdef object take(self, uint64_t number)
    cdef int _grow(self) except -1
