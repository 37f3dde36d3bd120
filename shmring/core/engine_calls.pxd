"""The C interface of :mod:`shmring.core.engine_calls`."""

from shmring.core.engine_end cimport EngineEnd


cdef class EngineCalls:
    cdef EngineEnd _end

    cpdef object claim_now(self)
