"""The C interface of :mod:`shmring.core.received`."""

cimport cython
from libc.stdint cimport uint8_t, uint32_t, uint64_t

from shmring.core.mapping cimport Mapping
from shmring.core.views cimport Kept, Lent, Regions, TensorMaker
from shmring.core.wire cimport Content


@cython.final
cdef class ContentRegions:
    cdef readonly Content content
    cdef readonly uint64_t client_id
    cdef Regions _regions
    cdef Mapping _mapping
    cdef Lent* _inline
    cdef Lent** _slots       # by number; NULL: no view was made yet
    cdef Lent* _few[2]
    cdef bint is_copied_out  # its views show copies of the slots, which may be given back at once
    cdef Kept* kept          # that its views keep, in place of being counted by the regions; NULL: those count them

    cdef Lent* region(self, uint32_t number) except NULL
    cdef bint leave(self, uint32_t slot) noexcept
    cdef bint is_viewed(self, uint32_t slot) noexcept


cdef ContentRegions regions_of(Content content, uint64_t client_id, Regions regions, Mapping mapping)


@cython.final
cdef class PayloadDecoder:
    cdef object _decode
    cdef TensorMaker _maker
    cdef object _other
    cdef uint8_t _codes[64]   # DLPack's, by the wire's number
    cdef uint8_t _bits[64]    # 0: this torch does not take it through DLPack
    cdef ContentRegions _content_regions
    cdef object _place

    cdef object decode(self, ContentRegions regions, object place)
