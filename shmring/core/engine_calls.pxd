"""The C interface of :mod:`shmring.core.engine_calls`."""

from shmring.core.engine_end cimport EngineEnd
from shmring.core.looking cimport Looking


cdef class EngineCalls:
    cdef EngineEnd _end
    cdef double _look_s
    cdef Looking _looking

    cpdef object claim_now(self)
    cdef object look(self)
