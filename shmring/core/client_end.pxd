"""The C interface of :mod:`shmring.core.client_end`."""

from libc.stdint cimport uint32_t, uint64_t

from shmring.core.client_book cimport ClientBook, ClientSlotRecord
from shmring.core.held_slots cimport HeldSlots
from shmring.core.load cimport LoadPage
from shmring.core.mapping cimport Mapping
from shmring.core.message_ring cimport RecordReader, RecordTaker, RecordWriter
from shmring.core.numbered cimport Numbered
from shmring.core.payload cimport Packed, Packer
from shmring.core.received cimport PayloadDecoder
from shmring.core.views cimport Lent, Regions, TensorMaker
from shmring.core.wire cimport Bounds, Content, Done, SlotNumbers


cdef class SubmissionEnd:
    cdef readonly ClientEnd end
    cdef readonly uint64_t request_id
    cdef readonly str name
    cdef readonly bint ended
    cdef readonly object error
    cdef public object waiter
    cdef public bint was_left
    cdef object _replies      # Contents that came and were not taken; None until the first

    cdef bint _is_missed(self) except -1
    cdef int _wake(self) except -1
    cdef int _end(self, object error) except -1


cdef class SlotEnd:
    cdef readonly ClientEnd end
    cdef readonly ClientSlotRecord record
    cdef readonly uint64_t nbytes
    cdef readonly uint64_t cursor
    cdef public object device_memory
    cdef Lent* _region        # NULL: left, or in device memory
    cdef uint64_t _address
    cdef bint _drain

    cdef int _take(self, uint64_t nbytes, uint64_t* offset) except -1
    cdef int _close(self) except -1


cdef class ClientEnd(RecordTaker):
    cdef readonly object shell
    cdef readonly ClientBook book
    cdef readonly HeldSlots held
    cdef readonly Regions regions
    cdef readonly Numbered pending
    cdef readonly uint64_t epoch
    cdef readonly uint64_t submitted
    cdef readonly uint64_t finished
    cdef readonly uint64_t replies
    cdef readonly uint64_t in_place
    cdef readonly uint64_t in_place_nbytes
    cdef readonly uint64_t inline_payloads
    cdef readonly uint64_t copies
    cdef readonly uint64_t copied_nbytes
    cdef readonly uint64_t slot_nbytes_submitted
    cdef readonly uint64_t reply_copies
    cdef readonly uint64_t reply_copied_nbytes
    cdef readonly uint64_t stale_releases
    cdef readonly uint64_t in_flight
    cdef readonly uint64_t turnover_nbytes
    cdef readonly bint found_full
    cdef bint _has_unread        # replies in slots, perhaps: the shell looks after them
    cdef public bint crowded
    cdef public bint is_open
    cdef public bint expects_expiry
    cdef public object device_slots
    cdef public RecordReader reader
    cdef dict _decoders
    cdef object _clock
    cdef type _slot_type
    cdef TensorMaker _maker
    cdef dict _dtypes
    cdef uint64_t _slot_key
    cdef bint _debug
    cdef uint64_t _max_inflight
    cdef uint64_t _max_reply_inline_nbytes
    cdef uint64_t _max_payload_nbytes
    cdef Mapping _mapping
    cdef uint64_t _slab_nbytes
    cdef uint32_t _record_nbytes
    cdef Packer _packer
    cdef RecordWriter _writer
    cdef type _submission_type
    cdef uint64_t copied_into_slots  # bytes, by this end itself
    cdef LoadPage _load
    cdef uint64_t _cache_nbytes
    cdef uint64_t _away          # generation of the slot that is followed; 0: none
    cdef uint64_t _away_since    # what the engine had received when it went
    cdef uint64_t _sent_before   # what this end had sent
    cdef uint64_t _away_request  # with which it went
    cdef uint64_t _next_id
    cdef uint64_t _reply_key
    cdef uint64_t _inline_nbytes
    cdef Bounds _bounds

    cdef int _hand_over(self, ClientSlotRecord record, SlotNumbers* numbers) except -1
    cdef uint64_t _content(self, ClientSlotRecord slot) except 0
    cdef bint is_usable(self) noexcept
    cdef bint is_forked(self) noexcept
    cdef bint is_writable(self) noexcept
    cdef bint hear(self) except -1
    cpdef object hold(self, ClientSlotRecord record, bint drain)
    cpdef bint begin(self) except -1
    cpdef int leave(self) except -1
    cpdef object send_now(self, Packed packed, str name, object stream)
    cpdef object send(self, Packed packed, ClientSlotRecord slot, str name, object stream)
    cpdef SubmissionEnd forget(self, uint64_t request_id)
    cpdef PayloadDecoder decoder_of(self, object reply_type)
    cpdef object submit_now(self, object payload, str name, uint64_t most_nbytes)
    cpdef object hold_now(self, object nbytes, bint drain)
    cdef Packed _pack(self, object payload, uint64_t inline_nbytes, HeldSlots held)
    cdef Packed _pack_or_raise(self, object payload, uint64_t inline_nbytes, HeldSlots held)
    cdef bint _may_send(self, Packed packed, uint64_t nbytes) except -1
    cdef int _leave(self, SlotEnd slot) except -1
    cdef double _time_of(self, ClientSlotRecord slot) except -1
    cdef int _follow(self, list effects) except -1
    cpdef int take_back(self, tuple released) except -1
    cdef int _release(self, uint64_t generation) except -1
    cdef uint64_t _received(self) noexcept
    cdef void _came_back(self, uint64_t turnover_nbytes) noexcept
    cdef bint _take_message(self, object message) except -1
    cdef int _done(self, Done done) except -1
    cdef int _finished(self, uint64_t request_id) except -1
    cdef int _deliver(self, uint64_t request_id, Content content) except -1
