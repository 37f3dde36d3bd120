"""The C interface of :mod:`shmring.core.message_ring`, and the layout of a message ring."""

from libc.stdint cimport uint8_t, uint32_t, uint64_t

cdef enum:
    # Offsets in the memory of a message ring; what one end writes has a cache line of its own.
    AT_TAIL = 0           # u64, the writer's: bytes published since the ring was made
    AT_HEAD = 64          # u64, the reader's: bytes taken since the ring was made
    AT_READER_SLEEPS = 128  # u32: set by the reader, cleared by whoever wakes it
    AT_WRITER_WAITS = 192   # u32: set by the writer, cleared by whoever wakes it
    AT_RECORDS = 4096
    LENGTH_NBYTES = 4     # a record is its length and then its bytes, up to the next multiple of 8
    STEP = 8


cdef class RecordWriter:
    cdef readonly uint64_t bells
    cdef readonly uint32_t largest_record_nbytes
    cdef public bint blocked
    cdef public bint told
    cdef int _forks
    cdef object _memory
    cdef uint8_t* _at
    cdef uint64_t _capacity
    cdef uint64_t _tail       # what this end has published; never read from the ring
    cdef uint64_t _head       # the reader's, as last read and checked
    cdef uint64_t _reserved   # what a record that is being written will take, a skip before it included
    cdef int _bell

    cdef uint8_t* reserve(self, uint32_t nbytes) except? NULL
    cdef bint is_writable(self) noexcept nogil
    cdef bint is_forked(self) noexcept nogil
    cdef bint has_room(self, uint32_t nbytes) except -1
    cdef void commit(self) noexcept nogil
    cdef bint wake_reader(self) noexcept nogil
    cdef bint _look_at_head(self) noexcept nogil
    cdef uint64_t _needed(self, uint32_t nbytes) noexcept nogil


cdef int read_bells(int connected, int most_reads) noexcept nogil  # see take_bells


cdef class RecordTaker:
    cdef bint take_hot(self, const uint8_t* record, uint32_t nbytes) except -1


cdef class RecordReader:
    cdef readonly uint64_t bells
    cdef object _memory
    cdef uint8_t* _at
    cdef uint64_t _capacity
    cdef uint64_t _head       # what this end has taken; never read from the ring
    cdef uint32_t _largest_record_nbytes
    cdef int _bell
    cdef public bint awake
    cdef public bint is_reading
    cdef public bint heard
    cdef public uint32_t records_left
    cdef readonly uint64_t delivered
    cdef readonly bint late
    cdef readonly bint stopped
    cdef bint _is_ending
    cdef uint8_t* _copy         # of the record that a RecordTaker has; NULL: none had one
    cdef uint64_t _left_nbytes  # that are delivered before the end

    cdef int _make_copy(self) except -1
    cdef bint hear(self, RecordTaker taker) except -1
    cdef bint has_news(self) noexcept nogil
    cdef int next_nbytes(self, uint32_t* nbytes) except -1
    cdef void take(self, uint8_t* to, uint32_t nbytes) noexcept nogil
    cdef bint wake_writer(self) noexcept nogil
    cdef bint fall_asleep(self) noexcept nogil
    cdef void stay_awake(self) noexcept nogil
