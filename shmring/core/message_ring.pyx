"""A message ring: a buffer in shared memory that carries records from one writer to one reader.

Theory of operation. Both ends count bytes since the ring was made: the writer in the *tail*, the reader in the *head*. The
writer copies a record behind the tail and then publishes the tail with a release store; the reader loads it with acquire,
so that it sees the whole record, copies the record out, and publishes the head in the same way: only then may the writer use
that place again. Each side keeps its own count privately, and checks that the other's count is possible: a head that moves back
or passes the tail, a tail that is more than the ring holds, and a length beyond what was published are a
:class:`~shmring.errors.RemoteProtocolError`. A record is copied out before it is parsed, so that checked bytes cannot change
afterwards.

A record does not wrap. If it would, the length ``SKIP`` stands in its place, and the record begins at the start of the ring.

Sleeping and waking. Under load, neither side makes a system call. A reader with nothing to read sets a flag that it sleeps,
then *looks again*, and only then waits for a bell: one byte on the socket. A writer publishes, and only then looks whether the
reader sleeps. On each side, there is a full fence between the two steps, so that at least one side sees the step of the other:
either the reader sees the record or the writer sees that it must ring. The same holds, the other way round, for a writer that
waits for space. An exchange clears the flag, so that a sleeper is woken once. Bells may be rung later than records are
published (several records, one look), but before the writer itself sleeps or ends. ``tests/model/message_ring.pml`` is this
protocol in Promela; ``make verify`` has spin search every interleaving of it, with stores delayed as x86 and ARM may delay
them.

A bell is sent without waiting: a full socket has enough bells, and a reader notices when the peer of a socket has gone. A
socket that is about to be closed is not rung (``mute``): its number may soon be another file's.

Invariants: head <= tail <= head + capacity; both are multiples of 8; everything from head to tail is whole records and skips.

Source: the private copy of the other's count is rigtorp's SPSCQueue's; the two looks around a fence are io_uring's
(IORING_SQ_NEED_WAKEUP).
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.exc cimport PyErr_SetFromErrno
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from shmring.errors import CapacityError, RemoteProtocolError

cdef enum:
    # Offsets in the memory of a message ring; what one end writes has a cache line of its own.
    AT_TAIL = 0           # u64, the writer's: bytes published since the ring was made
    AT_HEAD = 64          # u64, the reader's: bytes taken since the ring was made
    AT_READER_SLEEPS = 128  # u32: set by the reader, cleared by whoever wakes it
    AT_WRITER_WAITS = 192   # u32: set by the writer, cleared by whoever wakes it
    AT_RECORDS = 4096
    LENGTH_NBYTES = 4     # a record is its length and then its bytes, up to the next multiple of 8
    _SENT_IN_TURN = 64    # as many small replies take less than a millisecond
    STEP = 8

cdef uint32_t SKIP = 0xFFFFFFFF

#: The most of any record: unread records are bounded by the ring, and a larger payload travels in a slot.
cdef uint32_t _LARGEST_RECORD_NBYTES = 64 << 10

LARGEST_RECORD_NBYTES: int = _LARGEST_RECORD_NBYTES

cpdef enum:  # what :func:`receive_bells` has found, added up
    ENDED = 1
    GAVE_UP = 2
    FOREIGN = 4

#: A frontend that gives up while it attaches sends this instead of a bell: it uses none of the memory that it was lent.
GIVING_UP: bytes = b"\1"

cdef enum:
    BELLS_NBYTES = 4096  # more than can be there, if they are bells: the kernel keeps a few hundred bytes sent one by one
    MOST_READS = 16  # of other things, at a time


def receive_bells(connected: int) -> int:
    """Reads the bytes that have come over a socket, without waiting.

    It reads to the end in one call: a loop may report only once that a socket has ended (uvloop, if the peer left bells
        unread).

    Args:
        connected: the descriptor of the socket.

    Returns:
        0, or a sum: ``ENDED``, the connection has ended; ``GAVE_UP``, there was ``GIVING_UP``; ``FOREIGN``, there was another
        byte that is no bell.
    """
    return read_bells(connected, MOST_READS)


cdef int read_bells(int connected, int most_reads) noexcept nogil:
    cdef char bytes_read[BELLS_NBYTES]
    cdef ssize_t nbytes, index
    cdef int found = 0
    while most_reads:
        most_reads -= 1
        nbytes = recv(connected, bytes_read, BELLS_NBYTES, MSG_DONTWAIT)
        if nbytes < 0:
            if errno == EINTR:
                continue
            return found if errno == EAGAIN else found | 1
        if nbytes == 0:
            return found | 1
        for index in range(nbytes):
            if bytes_read[index]:
                found |= 2 if bytes_read[index] == 1 else 4
    return found


def ring_nbytes(capacity_nbytes: int) -> int:
    """Returns the bytes of memory that a message ring takes.

    Args:
        capacity_nbytes: of records, lengths and skips together; a power of two from 64 to 2**30.

    Raises:
        ValueError: the capacity is none of these.
    """
    if not 64 <= capacity_nbytes <= 1 << 30 or capacity_nbytes & (capacity_nbytes - 1):
        raise ValueError(f"a message ring has a power of two of bytes from 64 to 2**30, not {capacity_nbytes}")
    return AT_RECORDS + capacity_nbytes


cdef inline uint64_t _up(uint64_t nbytes) noexcept nogil:
    return (nbytes + STEP - 1) & ~<uint64_t>(STEP - 1)


cdef uint32_t _largest_record(uint64_t capacity) noexcept nogil:
    """A quarter of the ring: a record that has to skip to the start takes the room of two, and the rest is room for other
    records."""
    return <uint32_t>min(<uint64_t>_LARGEST_RECORD_NBYTES, capacity // 4)


def largest_record_nbytes(capacity_nbytes: int) -> int:
    """Returns the length of the longest record that a ring of a capacity carries."""
    return min(_LARGEST_RECORD_NBYTES, capacity_nbytes // 4)


@cython.final
cdef class RingMemory:
    """The memory of a ring, mapped. It is unmapped when this object goes; forked children do not have it.

    Python's own mapping would keep a descriptor as long, and an engine has two rings for each frontend.

    Args:
        fd: of :func:`ring_nbytes` bytes; it may be closed afterwards.
        capacity_nbytes: see there.

    Raises:
        OSError: it can't be mapped.
    """
    cdef void* _at
    cdef Py_ssize_t _nbytes

    def __cinit__(self, fd: int, capacity_nbytes: int) -> None:
        self._nbytes = ring_nbytes(capacity_nbytes)
        self._at = mmap(NULL, self._nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0)
        if self._at == MAP_FAILED:
            self._at = NULL
            PyErr_SetFromErrno(OSError)
        if madvise(self._at, self._nbytes, MADV_DONTFORK):
            PyErr_SetFromErrno(OSError)

    def __dealloc__(self) -> None:
        if self._at != NULL:
            munmap(self._at, self._nbytes)

    def __getbuffer__(self, Py_buffer* buffer, int flags) -> None:
        PyBuffer_FillInfo(buffer, self, self._at, self._nbytes, 0, flags)


cdef object _view(memory, uint8_t** at, uint64_t* capacity):
    """Holds a writable buffer; returns the view that keeps it, and sets its address and capacity."""
    view = memoryview(memory)
    if view.readonly:
        raise ValueError("a message ring needs writable memory: each end writes its own count")
    ring_nbytes(view.nbytes - AT_RECORDS)
    cdef Py_buffer buffer
    PyObject_GetBuffer(view, &buffer, PyBUF_SIMPLE | PyBUF_WRITABLE)
    at[0] = <uint8_t*>buffer.buf
    capacity[0] = <uint64_t>view.nbytes - AT_RECORDS
    PyBuffer_Release(&buffer)  # the view, which this end keeps, holds the memory
    return view


cdef class RecordWriter:
    """The writing end.

    Args:
        memory: a writable buffer of :func:`ring_nbytes` bytes, all zero when the ring is made.
        bell: the descriptor of the socket to the reader's process.

    Attributes:
        largest_record_nbytes: of one record.
        bells: how often it has rung.
        blocked: whether senders wait for room already; the user of the ring sets it.
        told: whether the user of the ring wants to know of each record that is published here.
    """

    cdef readonly uint64_t bells
    cdef readonly uint32_t largest_record_nbytes
    cdef public bint blocked
    cdef public bint told
    cdef uint32_t _sent_in_turn
    cdef int _forks
    cdef object _memory
    cdef uint8_t* _at
    cdef uint64_t _capacity
    cdef uint64_t _tail       # what this end has published; never read from the ring
    cdef uint64_t _head       # the reader's, as last read and checked
    cdef uint64_t _reserved   # what is skipped before the record that is being written
    cdef uint8_t* _place      # of that record
    cdef int _bell

    def __init__(self, memory: Buffer, bell: int) -> None:
        self._memory = _view(memory, &self._at, &self._capacity)
        self.largest_record_nbytes = _largest_record(self._capacity)
        self._bell = bell
        self._forks = forks()

    def write(self, record: Buffer) -> bool:
        """Publishes a record; returns False, and writes nothing, if the ring is full. Call :meth:`ring_bell` afterwards.

        Raises:
            CapacityError: it is longer than a record may be.
            RemoteProtocolError: the reader's count is impossible.
        """
        cdef Py_buffer source
        cdef uint8_t* to
        PyObject_GetBuffer(record, &source, PyBUF_SIMPLE)
        try:
            to = self.reserve(<uint32_t>min(source.len, SKIP))
            if to == NULL:
                return False
            memcpy(to, source.buf, source.len)
            self.commit(to + source.len)
            return True
        finally:
            PyBuffer_Release(&source)

    def ring_bell(self) -> bool:
        """Wakes the reader if it sleeps; returns whether it did. Call it once after publishing, before this side sleeps or
        ends."""
        return self.wake_reader()

    def mute(self) -> None:
        """Rings no more: the socket is about to be closed."""
        self._bell = -1

    def wait_for_space(self, nbytes: int) -> bool:
        """Sets the flag that this side waits for room for a record of ``nbytes``; returns False if there is room after all.

        After True the caller waits for a bell, and tries again.

        Raises:
            RemoteProtocolError: the reader's count is impossible.
        """
        store_relaxed_u32(self._at + AT_WRITER_WAITS, 1)
        fence_full()  # before the second look: the reader publishes its head, fences, and looks at this flag
        if not self._look_at_head():
            raise RemoteProtocolError("the reader of a message ring has taken more than was published")
        if self._tail + self._needed(<uint32_t>nbytes) - self._head <= self._capacity:
            store_relaxed_u32(self._at + AT_WRITER_WAITS, 0)
            return False
        return True

    cpdef bint has_turn(self) noexcept:
        """Whether a sender that may wait sends now; each asks before it sends.

        Now and then it gives the loop a turn first, though there is room, and calls :meth:`begin_turn`. Otherwise a reader that reads
        as fast as this side writes would keep all others in the loop waiting.
        """
        self._sent_in_turn += 1
        return self._sent_in_turn <= _SENT_IN_TURN

    cpdef void begin_turn(self) noexcept:  # type: () -> None
        """The loop has had a turn, or is about to."""
        self._sent_in_turn = 0

    @property
    def unread_nbytes(self) -> int:
        """How many bytes are unread, if the reader's count can be true; in a forked child, as of the fork."""
        if not self.is_forked():
            self._look_at_head()
        return self._tail - self._head

    @property
    def taken_nbytes(self) -> int:
        """How many bytes the reader has read since the ring was made, as of the last look."""
        return self._head

    cdef bint is_writable(self) noexcept nogil:
        """Whether no sender waits for room, and this is the process that the ring is mapped in: a forked child has no ring."""
        return not self.blocked and self._forks == forks()

    cdef bint is_forked(self) noexcept nogil:
        """Whether this is another process, forked from the one in which the ring is mapped."""
        return self._forks != forks()

    cdef uint64_t _needed(self, uint32_t nbytes) noexcept nogil:
        """The room that a record takes at the tail, with the skip before it."""
        cdef uint64_t needed = _up(LENGTH_NBYTES + <uint64_t>nbytes)
        cdef uint64_t to_end = self._capacity - (self._tail & (self._capacity - 1))
        return needed if needed <= to_end else to_end + needed

    cdef bint has_room(self, uint32_t nbytes) except -1:
        """Whether a record of ``nbytes`` could be written now.

        Raises:
            CapacityError: it is longer than a record may be.
            RemoteProtocolError: the reader's count is impossible.
        """
        return self.reserve(nbytes) != NULL

    cdef bint _look_at_head(self) noexcept nogil:
        """Reads the reader's count; returns False if it can't be true."""
        cdef uint64_t head = load_acquire_u64(self._at + AT_HEAD)  # acquire: its reads of that place come before our writes
        if head - self._head > self._tail - self._head or head & (STEP - 1):
            return False
        self._head = head
        return True

    cdef uint8_t* reserve(self, uint32_t nbytes) except? NULL:
        """Returns where a record of ``nbytes`` at most is to be written before :meth:`commit`; NULL without an error if the ring is full.

        Nothing is published yet: a reservation that is not committed is forgotten by the next one.
        """
        cdef uint64_t needed, position, to_end
        if nbytes > self.largest_record_nbytes:
            raise CapacityError(
                f"a record of {nbytes} bytes is longer than {self.largest_record_nbytes}",
                needed=nbytes, capacity=self.largest_record_nbytes,
            )
        needed = self._needed(nbytes)
        if self._tail + needed - self._head > self._capacity:
            if not self._look_at_head():
                raise RemoteProtocolError("the reader of a message ring has taken more than was published")
            if self._tail + needed - self._head > self._capacity:
                return NULL
        position = self._tail & (self._capacity - 1)
        to_end = self._capacity - position
        if needed > to_end:
            store_relaxed_u32(self._at + AT_RECORDS + position, SKIP)
            position = 0
        self._place = self._at + AT_RECORDS + position + LENGTH_NBYTES
        self._reserved = needed - _up(LENGTH_NBYTES + <uint64_t>nbytes)
        return self._place

    cdef void end_record(self, const uint8_t* end) noexcept nogil:
        """What was written where :meth:`reserve` said ends here."""
        cdef uint32_t nbytes = <uint32_t>(end - self._place)
        store_relaxed_u32(self._place - LENGTH_NBYTES, nbytes)
        self._reserved += _up(LENGTH_NBYTES + <uint64_t>nbytes)

    cdef void commit(self, const uint8_t* end) noexcept nogil:
        """Publishes what was written where :meth:`reserve` said, up to this end."""
        self.end_record(end)
        self._tail += self._reserved
        store_release_u64(self._at + AT_TAIL, self._tail)  # release: a reader that sees the tail sees the record

    cdef bint wake_reader(self) noexcept nogil:
        fence_full()  # after the tail, before the look: the reader sets the flag, fences, and looks at the tail
        if not load_relaxed_u32(self._at + AT_READER_SLEEPS) or not exchange_u32(self._at + AT_READER_SLEEPS, 0):
            return False
        self.bells += 1
        send(self._bell, b"\0", 1, MSG_DONTWAIT | MSG_NOSIGNAL)
        return True


cdef class RecordHandler:
    """Handles records, in C those kinds that come with every message; for the subclass."""

    cdef uint64_t copied_nbytes  # while records were handled, and not counted by their reader so far; the subclass counts them

    cdef bint handle_hot(self, const uint8_t* record, uint32_t nbytes) except -1:
        """Handles a record, which is only there during the call; returns False if it is for :meth:`handle_message`."""
        return False

    def handle_message(self, record: bytes, /) -> None:
        """Handles a record of any other kind; for the subclass.

        Raises:
            RemoteProtocolError: it breaks the rules.
        """
        raise NotImplementedError

    def handle_record(self, bytes record not None, /) -> None:
        """Handles any record.

        Raises:
            RemoteProtocolError: it breaks the rules.
        """
        if not self.handle_hot(<const uint8_t*>PyBytes_AS_STRING(record), <uint32_t>PyBytes_GET_SIZE(record)):
            self.handle_message(record)

    def __call__(self, record: bytes, /) -> None:
        """Handles any record: a handler is what a reader calls."""
        self.handle_record(record)


cdef class RecordReader:
    """The reading end.

    Args:
        memory: a writable buffer of :func:`ring_nbytes` bytes, the same memory as the writer's.
        bell: the descriptor of the socket to the writer's process.

    Attributes:
        bells: how often it has rung.
    """

    cdef readonly uint64_t bells
    cdef object _memory
    cdef uint8_t* _at
    cdef uint64_t _capacity
    cdef uint64_t _head       # how much this side has read; never read from the ring
    cdef uint32_t _largest_record_nbytes
    cdef int _bell

    def __init__(self, memory: Buffer, bell: int) -> None:
        self._memory = _view(memory, &self._at, &self._capacity)
        self._largest_record_nbytes = _largest_record(self._capacity)
        self._bell = bell

    def read(self) -> bytes | None:
        """Reads the next record; None if there is none. Call :meth:`ring_bell` once after a batch of them.

        Raises:
            RemoteProtocolError: the writer's count, or a length, is impossible.
        """
        cdef uint32_t nbytes
        if not self.next_nbytes(&nbytes):
            return None
        record = PyBytes_FromStringAndSize(NULL, nbytes)
        self.take(<uint8_t*>PyBytes_AS_STRING(record), nbytes)
        return record

    cdef bint has_news(self) noexcept nogil:
        """Whether there are unread records."""
        return load_acquire_u64(self._at + AT_TAIL) != self._head

    def ring_bell(self) -> bool:
        """Wakes the writer if it waits for space; returns whether it did. Call it once after reading, before this side
        sleeps."""
        return self.wake_writer()

    def sleep(self) -> bool:
        """Sets the flag that this side sleeps; returns False if there is a record to read after all.

        After True the caller waits for a bell. It need not clear the flag when it is awake: one bell too many does no harm.
        """
        return self.fall_asleep()

    def wake(self) -> None:
        """Clears the flag that this side sleeps: it looks for later records without a bell."""
        self.stay_awake()

    def mute(self) -> None:
        """Rings no more: the socket is about to be closed."""
        self._bell = -1

    cdef int next_nbytes(self, uint32_t* nbytes) except -1:
        """Finds the next record; returns 0 if there is none, else 1 and its length."""
        cdef uint64_t tail = load_acquire_u64(self._at + AT_TAIL), published = tail - self._head, to_end
        cdef uint32_t length
        if not published:
            return 0
        if published > self._capacity or tail & (STEP - 1):
            raise RemoteProtocolError("the writer of a message ring has published more than it holds")
        to_end = self._capacity - (self._head & (self._capacity - 1))
        length = load_relaxed_u32(self._at + AT_RECORDS + self._capacity - to_end)
        if length == SKIP:
            if to_end >= published:
                raise RemoteProtocolError("a message ring ends with a skip")
            self._head += to_end
            published -= to_end
            to_end = self._capacity
            length = load_relaxed_u32(self._at + AT_RECORDS)
        if length > self._largest_record_nbytes or _up(LENGTH_NBYTES + <uint64_t>length) > min(published, to_end):
            raise RemoteProtocolError(f"a record of {length} bytes is longer than what was published")
        nbytes[0] = length
        return 1

    cdef void take(self, uint8_t* to, uint32_t nbytes) noexcept nogil:
        """Copies the record that :meth:`next_nbytes` has found, and gives its place back."""
        memcpy(to, self._at + AT_RECORDS + (self._head & (self._capacity - 1)) + LENGTH_NBYTES, nbytes)
        self._head += _up(LENGTH_NBYTES + <uint64_t>nbytes)
        store_release_u64(self._at + AT_HEAD, self._head)  # release: the copy is made before the writer uses the place again

    cdef bint wake_writer(self) noexcept nogil:
        fence_full()  # after the head, before the look: the writer sets the flag, fences, and looks at the head
        if not load_relaxed_u32(self._at + AT_WRITER_WAITS) or not exchange_u32(self._at + AT_WRITER_WAITS, 0):
            return False
        self.bells += 1
        send(self._bell, b"\0", 1, MSG_DONTWAIT | MSG_NOSIGNAL)
        return True

    cdef void stay_awake(self) noexcept nogil:
        store_relaxed_u32(self._at + AT_READER_SLEEPS, 0)

    cdef bint fall_asleep(self) noexcept nogil:
        store_relaxed_u32(self._at + AT_READER_SLEEPS, 1)
        fence_full()  # before the second look: the writer publishes its tail, fences, and looks at this flag
        if load_acquire_u64(self._at + AT_TAIL) != self._head:
            store_relaxed_u32(self._at + AT_READER_SLEEPS, 0)
            return False
        return True
