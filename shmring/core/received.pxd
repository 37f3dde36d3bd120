"""The C interface of :mod:`shmring.core.received`."""

cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport uint8_t, uint32_t, uint64_t

from shmring.core.mapping cimport Mapping
from shmring.core.msgpack cimport Cursor
from shmring.core.views cimport Lent, Owner, Regions, TensorMaker
from shmring.core.wire cimport Content, TensorNumbers

cdef enum:
    _KEPT_KEYS = 64
    _KEPT_KEY_NBYTES = 32


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
    cdef Owner* owner        # that its views keep, in place of being counted by the regions; NULL: those count them

    cdef Lent* region(self, uint32_t number) except NULL
    cdef bint leave(self, uint32_t slot) noexcept
    cdef bint is_viewed(self, uint32_t slot) noexcept


cdef ContentRegions regions_of(Content content, uint64_t client_id, Regions regions, Mapping mapping)


@cython.final
cdef class PayloadDecoder:
    cdef bint _is_plain
    cdef PyObject* _keys[_KEPT_KEYS]  # texts that were keys, each owned; NULL: none yet
    cdef object _decode
    cdef TensorMaker _maker
    cdef object _other
    cdef uint8_t _codes[64]   # DLPack's, by the wire's number
    cdef uint8_t _bits[64]    # 0: this torch does not take it through DLPack
    cdef ContentRegions _content_regions
    cdef object _place

    cdef object _value(self, ContentRegions regions, Cursor* cursor, int depth)
    cdef object _map(self, ContentRegions regions, Cursor* cursor, uint64_t count, int depth)
    cdef object _array(self, ContentRegions regions, Cursor* cursor, uint64_t count, int depth)
    cdef object _key(self, const uint8_t* data, uint64_t nbytes)
    cdef object _tensor(self, ContentRegions regions, TensorNumbers* tensor)
    cdef object decode(self, ContentRegions regions, object place)
    cdef object _decode_with_msgspec(self, ContentRegions regions, object place)
