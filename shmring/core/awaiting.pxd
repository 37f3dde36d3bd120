"""The C interface of :mod:`shmring.core.awaiting`."""

from cpython.object cimport PyObject


cdef class Awaited:
    cdef object _inner       # what it waits in; None: nothing
    cdef bint _begun

    cdef PyObject* happen(self) except NULL
    cdef PyObject* came(self, object result) except NULL
    cdef int gave_up(self) except -1
    cdef int check_loop(self) except -1
    cdef PyObject* wait_in(self, object awaitable) except NULL


cdef PyObject* nothing_more() noexcept
cdef PyObject* owned(object result) noexcept
cdef int may_be_awaited(type kind) except -1
cdef int check_timeout(object timeout) except -1
