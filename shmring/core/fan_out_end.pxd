"""The C interface of :mod:`shmring.core.fan_out_end`, and what a message to workers says beside its content."""

cimport cython
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from shmring.core.awaiting cimport Awaited
from shmring.core.engine_end cimport ClaimEnd, EngineEnd
from shmring.core.fan_out_book cimport MAX_WORKERS, FanOutBook, WorkerRecord
from shmring.core.held_slots cimport HeldSlots
from shmring.core.looking cimport Looking
from shmring.core.mapping cimport Mapping
from shmring.core.message_ring cimport RecordTaker
from shmring.core.payload cimport Packed, Packer
from shmring.core.received cimport PayloadDecoder
from shmring.core.views cimport Lent
from shmring.core.wire cimport Bounds, SlotNumbers

cdef enum:
    BROADCAST = 120     # tags of the records that are read and written here and in worker_end
    ANSWER = 32
    WANTS_ANSWER = 1    # flags of a message
    IS_SHARED = 2       # its payload is an array of a claim's and of what goes beside it


cdef class ClaimedSlots(HeldSlots):
    cdef EngineEnd _end
    cdef uint64_t _address
    cdef uint64_t _nbytes
    cdef ClaimEnd _last      # in which something was found last

    cdef int look_in(self, ClaimEnd claim) except -1
    cdef int rest(self) except -1
    cdef bint _find_in(
        self, ClaimEnd claim, uint64_t address, uint64_t nbytes, uint32_t* region, uint64_t* offset, list found
    ) except -1


cdef class JoinedWorker(RecordTaker):
    cdef readonly FanOutEnd end
    cdef readonly WorkerRecord record    # None: its connection is not there yet


@cython.final
cdef class Parcel:
    cdef readonly Packed packed
    cdef readonly object to      # ranks; None: all
    cdef readonly uint64_t sequence
    cdef uint32_t flags
    cdef int64_t start
    cdef uint64_t blocks
    cdef readonly bint is_copied
    cdef bint had_memory         # for what is copied
    cdef uint64_t nbytes         # that it keeps
    cdef SlotNumbers* slots      # in place; and then that of region 0
    cdef Lent** regions          # of those in place
    cdef uint32_t slot_count

    cdef void drop(self) noexcept


cdef class FanOutEnd:
    cdef readonly object shell
    cdef readonly FanOutBook book
    cdef public bint is_crowded
    cdef public bint is_open
    cdef readonly dict gathers           # by number of their message
    cdef readonly uint64_t broadcasts
    cdef readonly uint64_t gathered
    cdef readonly uint64_t copied_nbytes
    cdef readonly uint64_t in_place_nbytes
    cdef readonly uint64_t late_answers
    cdef EngineEnd _end
    cdef ClaimedSlots _slots
    cdef Packer _packer
    cdef PayloadDecoder _decoder
    cdef Mapping _memory
    cdef uint64_t _slab_nbytes
    cdef uint64_t _inline_nbytes
    cdef uint64_t _record_nbytes
    cdef uint64_t _at_once_nbytes
    cdef Bounds _bounds
    cdef double _look_s
    cdef int _forks         # of the process that may send
    cdef Looking _looking   # for replies

    cdef bint _take_answer(self, WorkerRecord worker, const uint8_t* record, uint64_t nbytes) except -1
    cdef Gathering _gathering(self, WorkerRecord worker, uint64_t sequence)
    cdef Parcel _pack(self, object payload, object to, uint32_t flags, ClaimEnd shared)
    cdef int _check_open(self) except -1
    cdef uint64_t _mask(self, Parcel parcel) except? 0
    cdef bint _send_at_once(self, Parcel parcel) except -1
    cdef bint _has_room(self, uint64_t mask, Parcel parcel) except -1
    cdef uint64_t _record(self, Parcel parcel, int stamp) except 0
    cdef int _publish(self, uint64_t mask, Parcel parcel) except -1


@cython.final
cdef class Broadcasting(Awaited):
    cdef FanOutEnd end
    cdef object payload
    cdef object to
    cdef object timeout
    cdef ClaimEnd claim          # whose payload it is; None: a message of the engine's own


@cython.final
cdef class Gathering(Awaited):
    cdef FanOutEnd end
    cdef object payload
    cdef object to
    cdef object timeout
    cdef Parcel parcel
    cdef object future
    cdef object timer
    cdef readonly uint64_t expected   # places of those who have not replied
    cdef list answers                 # in order of rank
    cdef uint8_t _orders[MAX_WORKERS] # by place, where in that a reply goes
    cdef object _error                # why one will not come; None: it may

    cdef int _sent(self) except -1
    cdef int _look(self) except -1
    cdef int _take(self, WorkerRecord worker, object answer) except -1
    cdef int _fail(self, object error) except -1
    cdef int _end(self) except -1
