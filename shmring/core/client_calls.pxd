"""The C interface of :mod:`shmring.core.client_calls`."""

from shmring.core.client_end cimport ClientEnd


cdef class ClientCalls:
    cdef ClientEnd _end      # None: no engine is attached
    cdef object _copier

    cdef object submit_now(self, object payload, str name)
