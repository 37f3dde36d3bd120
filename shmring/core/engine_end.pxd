"""The C interface of :mod:`shmring.core.engine_end`."""

from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from shmring.core.engine_book cimport EngineBook
from shmring.core.load cimport LoadPage
from shmring.core.mapping cimport Mapping
from shmring.core.message_ring cimport RecordReader, RecordTaker, RecordWriter
from shmring.core.payload cimport Packed
from shmring.core.received cimport ContentRegions, PayloadDecoder
from shmring.core.records cimport ClientRecord, RequestRecord
from shmring.core.views cimport Regions
from shmring.core.wire cimport Bounds, Content, SlotNumbers, Submit


cdef class FrontendEnd(RecordTaker):
    cdef readonly EngineEnd end
    cdef readonly uint64_t client_id
    cdef ClientRecord record
    cdef RecordWriter _writer
    cdef RecordReader _reader
    cdef Line _costly        # of its requests that take long to claim; None: there was none so far


cdef class Line:
    cdef ClaimEnd first
    cdef ClaimEnd last

    cdef int append(self, ClaimEnd claim) except -1
    cdef int withdraw(self, ClaimEnd claim) except -1


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
    cdef bint _is_known      # to the end, by these two
    cdef bint _is_costly     # it waits in its frontend's line
    cdef uint64_t _client_id
    cdef uint64_t _request_id
    cdef PyObject* _other    # in the same list of the table
    cdef ClaimEnd _after     # that waits behind it
    cdef PyObject* _before   # that waits before it; Py_None: none does

    cdef int _finish(self) except -1


cdef class EngineEnd:
    cdef readonly object shell
    cdef readonly EngineBook book
    cdef readonly Regions regions
    cdef readonly uint64_t waiting_count
    cdef readonly bint is_turn_over
    cdef int64_t _turn_left  # what may still be claimed in this turn
    cdef Line _line          # of those that wait, and are quick to claim
    cdef list _costly        # frontends that have others: the next one's turn comes first
    cdef uint32_t _overtaken # how many were claimed while costly ones waited
    cdef PyObject** _claims  # those that wait, and those that were taken up and have not ended
    cdef uint64_t _lists     # of them
    cdef uint64_t _known     # claims in them
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
    cdef Bounds _bounds
    cdef Mapping _mapping
    cdef LoadPage _load
    cdef PayloadDecoder _decoder
    cdef type _claim_type
    cdef bint _debug

    cdef int _append(self, ClaimEnd claim) except -1
    cdef int _withdraw(self, ClaimEnd claim) except -1
    cdef ClaimEnd _next(self)
    cdef int _charge(self, Content content) except -1
    cdef int _know(self, ClaimEnd claim) except -1
    cdef int _spread(self, uint64_t lists) except -1
    cdef PyObject** _list_of(self, uint64_t client_id, uint64_t request_id) noexcept
    cdef ClaimEnd _find(self, uint64_t client_id, uint64_t request_id)
    cdef void _unknow(self, ClaimEnd claim) noexcept
    cdef bint is_usable(self) noexcept
    cdef int hear(self) except -1
    cdef void _publish_load(self) noexcept
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
    cdef bint _finish(self, ClaimEnd claim, Packed reply, slot) except -1
