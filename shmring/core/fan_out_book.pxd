"""The C interface of :mod:`shmring.core.fan_out_book`, and the layout of a worker's page."""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from shmring.core.blocks cimport RunAllocator
from shmring.core.message_ring cimport RecordReader, RecordTaker, RecordWriter
from shmring.core.views cimport Lent

cdef enum:
    WINDOW = 256          # messages that may be outstanding, and stamps in a page
    MAX_WORKERS = 64      # places: bits of a mask
    AT_WANT = 0           # u64, the engine's: it waits for the acknowledgement of a message of this number or later; else 0
    AT_CLOSED = 1024      # u64, the worker's: it has closed, and left whatever has this number or a later one; 0: it has not
    AT_STAMPS = 2048      # u64 each, the worker's: the number of the last message that it has left, of those with this stamp
    PAGE_NBYTES = 4096


cdef struct Outstanding:
    # A message that somebody may still read.
    uint64_t sequence      # 0: none
    uint64_t pending       # places of those who have not left it
    int64_t start          # blocks that it has in the memory of broadcasts
    uint64_t blocks        # 0: none
    uint64_t nbytes        # that it keeps, wherever they are
    Lent** regions         # slots of claims that it keeps, as a view would
    uint32_t region_count
    int older              # stamps of its neighbours in age; -1: none
    int newer


cdef class WorkerRecord:
    cdef readonly uint64_t rank
    cdef readonly int place
    cdef readonly bint is_member
    cdef readonly bint is_gone
    cdef readonly uint32_t unacknowledged
    cdef readonly uint64_t unacknowledged_nbytes
    cdef readonly uint64_t sent
    cdef RecordWriter writer   # None: it gets nothing
    cdef RecordReader reader   # None: nothing is read of it, or somebody else sees to that
    cdef RecordTaker taker     # of what is read
    cdef object _page
    cdef uint8_t* _at


cdef class FanOutBook:
    cdef readonly uint32_t backlog
    cdef readonly uint32_t max_workers
    cdef readonly uint64_t next_sequence
    cdef readonly uint32_t outstanding
    cdef readonly tuple ranks        # of members, in order
    cdef public list gone            # records of those who have left for good since somebody looked
    cdef RunAllocator _memory        # None: nothing is reserved yet
    cdef uint64_t _blocks
    cdef Outstanding _messages[WINDOW]
    cdef int _unused[WINDOW]
    cdef int _unused_count
    cdef int _oldest
    cdef int _newest
    cdef list _places
    cdef dict _members               # by rank
    cdef uint64_t _member_mask
    cdef int _forks                  # of the process whose pages these are

    cdef WorkerRecord at_place(self, int place)
    cdef uint64_t mask_of(self, object ranks) except? 0
    cdef uint64_t members(self) noexcept
    cdef int64_t take_blocks(self, uint64_t blocks) except -2
    cdef int give_blocks(self, int64_t start, uint64_t blocks) except -1
    cdef bint has_place(self, uint64_t mask) except -1
    cdef int next_stamp(self) noexcept
    cdef uint64_t publish_to(
        self, uint64_t mask, int64_t start, uint64_t blocks, uint64_t nbytes, Lent** regions, uint32_t region_count
    ) except 0
    cdef int sweep_oldest(self) except -1
    cdef int _look_at(self, int stamp) except -1
    cdef bint _has_closed_before(self, WorkerRecord worker, uint64_t sequence) noexcept
    cdef int _strike(self, Outstanding* message, int stamp, WorkerRecord worker) except -1
    cdef int _free(self, int stamp) except -1
    cdef int _forget_if_done(self, WorkerRecord worker) except -1
    cdef uint64_t _crowded(self, uint64_t mask) except? 0
    cdef bint want_place(self, uint64_t mask) except -1
    cdef bint _want_first(self, bint of_slots) except -1
    cdef int _want(self, const uint64_t* wanted) except -1
    cdef tuple ranks_of(self, uint64_t mask)
