"""The C interface of :mod:`shmring.core.transitions`."""

from libc.stdint cimport int8_t

cdef enum:
    MAX_STATES = 8
    MAX_EVENTS = 16


cdef class Transitions:
    cdef readonly str name
    cdef readonly object table
    cdef tuple _states
    cdef tuple _events
    cdef int8_t _next[MAX_STATES][MAX_EVENTS]

    cdef int after(self, int state, int event) except -1
    cdef int advance(self, int state, int event) except -1
    cdef object state(self, int number)


cdef Transitions engine_slots
cdef Transitions client_slots
cdef Transitions leases
cdef Transitions requests
