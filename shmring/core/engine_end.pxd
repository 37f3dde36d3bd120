"""The C interface of :mod:`shmring.core.engine_end`."""

from libc.stdint cimport uint32_t, uint64_t

from shmring.core.engine_book cimport EngineBook
from shmring.core.load cimport LoadPage
from shmring.core.mapping cimport Mapping
from shmring.core.message_ring cimport RecordReader, RecordWriter
from shmring.core.payload cimport Packed
from shmring.core.received cimport ContentRegions, PayloadDecoder
from shmring.core.records cimport ClientRecord, RequestRecord
from shmring.core.views cimport Regions
from shmring.core.wire cimport Content, SlotNumbers, Submit


cdef class FrontendEnd:
    cdef readonly EngineEnd end
    cdef readonly uint64_t client_id
    cdef ClientRecord record
    cdef RecordWriter _writer
    cdef RecordReader _reader


cdef class ClaimEnd:
    cdef readonly EngineEnd end
    cdef readonly FrontendEnd frontend
    cdef readonly Submit submit
    cdef readonly uint64_t nbytes
    cdef readonly bint released
    cdef readonly bint ended
    cdef readonly bint aborted
    cdef RequestRecord request
    cdef ContentRegions regions
    cdef object _payload
    cdef list _abort_callbacks
    cdef list _end_callbacks
    cdef object __weakref__
    cdef bint _is_in_hands   # it was taken up


cdef class EngineEnd:
    cdef readonly object shell
    cdef readonly EngineBook book
    cdef readonly Regions regions
    cdef readonly object waiting
    cdef readonly dict claims   # weak references
    cdef public bint is_awaited
    cdef public bint is_crowded
    cdef public bint is_open
    cdef list _frontends
    cdef int _forks
    cdef readonly uint64_t epoch
    cdef readonly uint64_t submitted
    cdef readonly uint64_t finished
    cdef readonly uint64_t replies
    cdef readonly uint64_t received_nbytes
    cdef readonly uint64_t reply_copies
    cdef readonly uint64_t reply_copied_nbytes
    cdef uint64_t _slab_nbytes
    cdef uint64_t _inline_nbytes
    cdef uint64_t _max_payload_nbytes
    cdef uint32_t _max_tensors
    cdef Mapping _mapping
    cdef LoadPage _load
    cdef PayloadDecoder _decoder
    cdef type _claim_type
    cdef bint _debug
    cdef object _device      # whether there is a device slab; None: there is not

    cdef bint is_usable(self) noexcept
    cdef int hear(self) except -1
    cpdef int publish_load(self) except -1
    cpdef object take_next(self)
    cdef int _submit(self, FrontendEnd frontend, Submit submit) except -1
    cdef ClaimEnd _take_up(self, ClaimEnd claim)
    cdef bytes _payload_in_slot(self, Content content)
    cdef int _check_headers(self, ClaimEnd claim) except -1
    cdef list _release(self, ClaimEnd claim, bint copying, uint64_t* released, Py_ssize_t* count)
    cdef int _lend_reply(self, ClaimEnd claim, slot, SlotNumbers* numbers) except -1
    cdef bint _send_reply(self, ClaimEnd claim, Packed reply, slot) except -1
    cdef int _count_reply(self, Packed reply) noexcept
    cdef int _send_done(
        self, FrontendEnd frontend, uint64_t request_id, uint64_t* released, uint32_t count, Packed reply, SlotNumbers* slot
    ) except -1
    cdef int _finish(self, ClaimEnd claim, Packed reply, SlotNumbers* slot) except -1
