"""The C interface of :mod:`shmring.core.mapping`."""

from libc.stdint cimport int32_t, uint64_t


cdef struct Mapped:
    # Memory that stays mapped as long as anybody has a reference to it.
    int32_t references
    int forks         # of the process that mapped it: in a forked child it is not ours to unmap
    char* address
    uint64_t nbytes
    int socket        # is shut down and closed when this is unmapped; -1: none


cdef void keep_mapped(Mapped* mapped) noexcept nogil
cdef void leave_mapped(Mapped* mapped) noexcept nogil
cdef char* place_in(const Mapped* mapped, uint64_t offset, uint64_t nbytes) except NULL


cdef class Mapping:
    cdef Mapped* mapped  # never NULL

    cdef char* at(self, uint64_t offset, uint64_t nbytes) except NULL
    cdef char* _place(self, uint64_t offset, uint64_t nbytes) except? NULL
