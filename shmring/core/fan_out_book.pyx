"""The book of an engine's messages to its workers: which worker still reads which message, and which memory may be used again.

Theory of operation: sans-I/O, like the other books. A *worker* has a rank, which its caller chooses, and a *place*, which is a
bit in masks. A message goes to several workers at once. It keeps the memory that it shows (a run of blocks in the memory of
broadcasts, slots of claims) until each of them has left it or is dead.

A worker acknowledges messages in a page of its own, which only this worker and the engine map, and which is new with each join.
For each of the ``WINDOW`` stamps, the page has the number of the last message with that stamp that the worker has left. A
message gets a stamp that no outstanding message has. The number at its stamp counts only if it equals the message's number, and
only for that worker; any other number is ignored. So, whatever a worker writes, it can only acknowledge its own messages. The
masks are in the engine's own memory.

An acknowledgement rings no bell: the engine looks at the pages (:meth:`FanOutBook.sweep`) when it publishes the next message.
An engine that waits writes so into the pages of the workers that it waits for (``want_*``), looks once more, and then waits for
a bell. One bell is rung for all waiting tasks: each asks again. ``tests/model/acknowledgements.pml`` is this protocol in
Promela.

A worker that *parts* gets nothing more. Its messages stay outstanding until it has acknowledged them or is proven dead: the end
of its connection, or being dropped, proves nothing. A worker that has closed never reads messages that were sent later, and
never acknowledges them one by one. So it writes into its page the number of the first such message.

A forked child does not have the pages: a copy of this book there reads no page and writes none.

Messages may be left in any order: a message that a worker keeps for long holds its own stamp and memory, and not those of later
messages.

Invariants (:meth:`FanOutBook.check`): an outstanding message is pending at a worker; a worker's counts are those of its pending
messages, and no more than ``backlog``; free and reserved blocks add up; a place is free when its worker has parted and has no
pending message.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memset

from shmring.errors import CapacityError, RankTakenError, WorkerLostError

cdef enum:
    WINDOW = 256          # messages that may be outstanding, and stamps in a page
    MAX_WORKERS = 64      # places: bits of a mask
    AT_WANT = 0           # u64, the engine's: it waits for the acknowledgement of a message of this number or later; else 0
    AT_CLOSED = 1024      # u64, the worker's: it has closed, and left whatever has this number or a later one; 0: it has not
    AT_STAMPS = 2048      # u64 each, the worker's: the number of the last message that it has left, of those with this stamp
    PAGE_NBYTES = 4096


cdef struct Outstanding:
    # A message that a worker may still read.
    uint64_t sequence      # 0: none
    uint64_t pending       # places of the workers that have not left it
    int64_t start          # blocks that it has in the memory of broadcasts
    uint64_t blocks        # 0: none
    uint64_t nbytes        # that it keeps, wherever they are
    Lent** regions         # slots of claims that it keeps, as a view would
    uint32_t region_count
    int older              # stamps of its neighbours in age; -1: none
    int newer


cdef enum:
    PATIENCE = 4  # a short look goes on over so many messages that are still being read

WORKER_PAGE_NBYTES: int = PAGE_NBYTES
LARGEST_BACKLOG: int = WINDOW


cdef class WorkerRecord:
    """A worker, as the engine's book has it.

    Attributes:
        rank: the caller's name for it.
        place: its bit.
        is_member: whether it gets messages.
        is_gone: whether it has parted and has no pending message.
        unacknowledged, unacknowledged_nbytes: messages that it has not left, and what they keep.
        sent: messages so far.
    """

    cdef readonly uint64_t rank
    cdef readonly int place
    cdef readonly bint is_member
    cdef readonly bint is_gone
    cdef readonly uint32_t unacknowledged
    cdef readonly uint64_t unacknowledged_nbytes
    cdef readonly uint64_t sent
    cdef RecordWriter writer   # None: it gets nothing
    cdef LinkReader reader   # None: it is not read, or the shell reads it
    cdef RecordHandler taker     # of the payloads that are read
    cdef object _page
    cdef uint8_t* _at


cdef class FanOutBook:
    """See the head of this file.

    Args:
        backlog: messages that a worker may have that it has not left.
        max_workers: at a time, including those that have parted and are not gone.

    Attributes:
        next_sequence: of the next message; they count from 1.
        outstanding: messages that a worker may still read.
        ranks: of the members, in order.
        gone: workers that are gone; the shell removes them.
    """

    cdef readonly uint32_t backlog
    cdef readonly uint32_t max_workers
    cdef readonly uint64_t next_sequence
    cdef readonly uint32_t outstanding
    cdef readonly tuple ranks  # type: tuple[int, ...]  # of members, in order
    cdef public list gone  # type: list[WorkerRecord]  # records of those who have left for good since somebody looked
    cdef RunAllocator _memory        # None: no memory is reserved yet
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

    def __init__(self, backlog: int, max_workers: int) -> None:
        cdef int stamp
        assert 1 <= backlog <= WINDOW and 1 <= max_workers <= MAX_WORKERS
        self.backlog, self.max_workers = backlog, max_workers
        self.next_sequence = 1
        self.ranks = ()
        self.gone = []
        self._places = [None] * MAX_WORKERS
        self._members = {}
        self._oldest = self._newest = -1
        memset(self._messages, 0, sizeof(self._messages))
        for stamp in range(WINDOW):
            self._unused[stamp] = WINDOW - 1 - stamp
        self._unused_count = WINDOW
        self._forks = forks()

    def __dealloc__(self) -> None:
        cdef int stamp
        cdef uint32_t i
        for stamp in range(WINDOW):
            for i in range(self._messages[stamp].region_count):
                drop_region(self._messages[stamp].regions[i])
            free(self._messages[stamp].regions)

    def reserve(self, blocks: int) -> None:
        """There is memory for copied tensors, counted in blocks."""
        assert self._memory is None, "it is reserved once"
        self._blocks = blocks
        self._memory = RunAllocator(0, blocks)

    # -- workers come and go -----------------------------------------------------------------------------------------

    def member(self, rank: int) -> WorkerRecord | None:
        """Returns the member of a rank, or None."""
        return self._members.get(rank)

    def workers(self) -> list[WorkerRecord]:
        """Returns all workers that are not gone, in order of their places."""
        return [worker for worker in self._places if worker is not None]

    def join(self, rank: int, page: Buffer, writer: RecordWriter | None = None) -> WorkerRecord:
        """A worker has joined; it gets the messages that are published from now on.

        Args:
            rank: the caller's name for it.
            page: a writable buffer of ``WORKER_PAGE_NBYTES``, all zero.
            writer: of the ring to it.

        Returns:
            Its record.

        Raises:
            RankTakenError: there is a member of this rank.
            CapacityError: there are as many workers as there may be.
        """
        cdef WorkerRecord worker
        cdef Py_buffer buffer
        cdef int place
        if rank in self._members:
            raise RankTakenError(f"there is a worker of rank {rank}", rank=rank)
        for place in range(self.max_workers):
            if self._places[place] is None:
                break
        else:
            raise CapacityError(
                f"the engine has {self.max_workers} workers, and takes no more", needed=self.max_workers + 1, capacity=self.max_workers
            )
        worker = WorkerRecord.__new__(WorkerRecord)
        worker.rank, worker.place, worker.is_member, worker.writer = rank, place, True, writer
        worker._page = memoryview(page)
        PyObject_GetBuffer(worker._page, &buffer, PyBUF_SIMPLE | PyBUF_WRITABLE)
        worker._at = <uint8_t*>buffer.buf
        PyBuffer_Release(&buffer)  # the view, which the record keeps, holds the memory
        assert worker._page.nbytes == PAGE_NBYTES
        self._places[place] = worker
        self._members[rank] = worker
        self._member_mask |= <uint64_t>1 << place
        self.ranks = tuple(sorted(self._members))
        return worker

    def part(self, WorkerRecord worker not None) -> None:
        """The worker gets no more messages; its messages stay outstanding. A second call does nothing."""
        if worker.is_member:
            worker.is_member = False
            worker.writer = worker.reader = worker.taker = None
            del self._members[worker.rank]
            self._member_mask &= ~(<uint64_t>1 << worker.place)
            self.ranks = tuple(sorted(self._members))
        self._forget_if_done(worker)

    def died(self, WorkerRecord worker not None) -> None:
        """The kernel says that the worker's process is dead: the memory of its messages comes back."""
        cdef int stamp = self._oldest, newer
        if worker.is_gone:
            return
        self.part(worker)
        while stamp >= 0 and worker.unacknowledged:
            newer = self._messages[stamp].newer
            if self._messages[stamp].pending & <uint64_t>1 << worker.place:
                self._strike(&self._messages[stamp], stamp, worker)
            stamp = newer
        self._forget_if_done(worker)

    cdef int _forget_if_done(self, WorkerRecord worker) except -1:
        if worker.is_member or worker.unacknowledged or worker.is_gone:
            return 0
        worker.is_gone = True
        self._places[worker.place] = None
        worker._page, worker._at = None, NULL
        self.gone.append(worker)
        return 0

    cdef WorkerRecord at_place(self, int place):
        return <WorkerRecord>self._places[place]

    cdef uint64_t members(self) noexcept:
        """The mask of all members."""
        return self._member_mask

    cdef uint64_t mask_of(self, object ranks) except? 0:
        """The mask of members by their ranks.

        Raises:
            WorkerLostError: there is no member of a rank.
        """
        cdef uint64_t mask = 0
        missing = []
        for rank in ranks:
            worker = self._members.get(rank)
            if worker is None:
                missing.append(rank)
            else:
                mask |= <uint64_t>1 << (<WorkerRecord>worker).place
        if missing:
            raise self.no_workers(missing)
        return mask

    def no_workers(self, ranks: Sequence[int]) -> WorkerLostError:
        """Makes the error for ranks of which there is no worker."""
        listed = ", ".join(map(str, ranks))
        return WorkerLostError(f"there is no worker of rank {listed} (any more, or yet); there are {list(self.ranks)}", ranks=ranks)

    cdef tuple ranks_of(self, uint64_t mask):
        ranks = []
        while mask:
            ranks.append((<WorkerRecord?>self._places[lowest_bit(mask)]).rank)
            mask &= mask - 1
        return tuple(sorted(ranks))

    # -- messages ----------------------------------------------------------------------------------------------------

    cdef int64_t reserve_blocks(self, uint64_t blocks) except -2:
        """Reserves memory for a message that is not published yet; -1: there is none now."""
        return self._memory.take(blocks)

    cdef int give_blocks(self, int64_t start, uint64_t blocks) except -1:
        self._memory.give(start, blocks)
        return 0

    def take(self, blocks: int) -> int | None:
        """Reserves memory for a message; returns its first block, or None: there is none now."""
        start = self.reserve_blocks(blocks)
        return None if start < 0 else start

    def give(self, start: int, blocks: int) -> None:
        """Reserved memory is not used after all."""
        self.give_blocks(start, blocks)

    cdef bint has_place(self, uint64_t mask) except -1:
        """Whether one more message may go to these workers."""
        if not self._unused_count:
            return False
        while mask:
            if (<WorkerRecord>self._places[lowest_bit(mask)]).unacknowledged >= self.backlog:
                return False
            mask &= mask - 1
        return True

    def can_publish(self, ranks: Iterable[int]) -> bool:
        """Whether one more message may go to the workers of these ranks."""
        return self.has_place(self.mask_of(ranks))

    cdef int next_stamp(self) noexcept:
        """The stamp of the message that is published next."""
        return self._unused[self._unused_count - 1]

    cdef uint64_t publish_to(
        self, uint64_t mask, int64_t start, uint64_t blocks, uint64_t nbytes, Lent** regions, uint32_t region_count
    ) except 0:
        """A message goes to members that have room for it; returns its number.

        Args:
            mask: the members that get it; not empty.
            start, blocks: memory that was reserved for it.
            nbytes: that it keeps in all.
            regions: slots that it keeps, with a reference to each; the book owns the array and the references from now on.
        """
        cdef Outstanding* message
        cdef WorkerRecord worker
        cdef uint64_t left = mask
        cdef int stamp
        assert mask and not mask & ~self._member_mask and self._unused_count
        self._unused_count -= 1
        stamp = self._unused[self._unused_count]
        message = &self._messages[stamp]
        message.sequence, message.pending = self.next_sequence, mask
        message.start, message.blocks, message.nbytes = start, blocks, nbytes
        message.regions, message.region_count = regions, region_count
        message.older, message.newer = self._newest, -1
        if self._newest >= 0:
            self._messages[self._newest].newer = stamp
        else:
            self._oldest = stamp
        self._newest = stamp
        self.outstanding += 1
        self.next_sequence += 1
        while left:
            worker = <WorkerRecord>self._places[lowest_bit(left)]
            worker.unacknowledged += 1
            worker.unacknowledged_nbytes += nbytes
            worker.sent += 1
            left &= left - 1
        return message.sequence

    def publish(self, ranks: Iterable[int], start: int = 0, blocks: int = 0, nbytes: int = 0) -> tuple[int, int]:
        """A message goes to workers that have room for it; returns its number and its stamp."""
        cdef int stamp = self.next_stamp()
        return self.publish_to(self.mask_of(ranks), start, blocks, nbytes, NULL, 0), stamp

    # -- what comes back ---------------------------------------------------------------------------------------------

    def sweep(self) -> int:
        """Looks at all outstanding messages; returns how many came back."""
        cdef uint32_t before = self.outstanding
        cdef int stamp = self._oldest, newer
        while stamp >= 0:
            newer = self._messages[stamp].newer
            self._look_at(stamp)
            stamp = newer
        return before - self.outstanding

    cdef int sweep_oldest(self) except -1:
        """Looks at the oldest messages, and stops after a few that are still being read."""
        cdef int stamp = self._oldest, newer, patience = PATIENCE
        while stamp >= 0 and patience:
            newer = self._messages[stamp].newer
            if self._look_at(stamp):
                patience -= 1
            stamp = newer
        return 0

    cdef int _look_at(self, int stamp) except -1:
        """Reads the stamps of a message; returns whether the message is still outstanding."""
        cdef Outstanding* message = &self._messages[stamp]
        cdef uint64_t left = message.pending
        cdef WorkerRecord worker
        if self._forks != forks():
            return True
        while left:
            worker = <WorkerRecord>self._places[lowest_bit(left)]
            left &= left - 1
            # Acquire: the worker's reads of the message come before its stamp.
            if load_acquire_u64(worker._at + AT_STAMPS + 8 * stamp) == message.sequence \
                    or (not worker.is_member and self._has_closed_before(worker, message.sequence)):
                self._strike(message, stamp, worker)
        return message.sequence != 0

    cdef bint _has_closed_before(self, WorkerRecord worker, uint64_t sequence) noexcept:
        """Whether a worker that has parted will never read a message, since it had closed before the message was sent."""
        cdef uint64_t closed = load_acquire_u64(worker._at + AT_CLOSED)
        return closed != 0 and closed <= sequence

    cdef int _strike(self, Outstanding* message, int stamp, WorkerRecord worker) except -1:
        """A worker has left a message, or is dead."""
        message.pending &= ~(<uint64_t>1 << worker.place)
        worker.unacknowledged -= 1
        worker.unacknowledged_nbytes -= message.nbytes
        if not message.pending:
            self._free(stamp)
        return self._forget_if_done(worker)

    cdef int _free(self, int stamp) except -1:
        cdef Outstanding* message = &self._messages[stamp]
        cdef Lent** regions = message.regions
        cdef uint32_t count = message.region_count, i
        if message.blocks:
            self._memory.give(message.start, message.blocks)
        if message.older >= 0:
            self._messages[message.older].newer = message.newer
        else:
            self._oldest = message.newer
        if message.newer >= 0:
            self._messages[message.newer].older = message.older
        else:
            self._newest = message.older
        message.sequence = 0
        message.regions, message.region_count = NULL, 0
        self._unused[self._unused_count] = stamp
        self._unused_count += 1
        self.outstanding -= 1
        for i in range(count):
            drop_region(regions[i])
        free(regions)
        return 0

    # -- waiting -----------------------------------------------------------------------------------------------------

    cdef int _want(self, const uint64_t* wanted) except -1:
        """Writes to pages, and looks once more; returns whether a message came back meanwhile.

        Args:
            wanted: by place, the message whose acknowledgement is waited for; 0: none of that worker.
        """
        cdef uint8_t* at
        cdef uint64_t earlier
        cdef int place
        if self._forks != forks():
            return False
        for place in range(MAX_WORKERS):
            if wanted[place]:
                at = (<WorkerRecord>self._places[place])._at + AT_WANT
                earlier = load_acquire_u64(at)  # of another waiting task, which is rung for as well
                store_release_u64(at, min(earlier, wanted[place]) if earlier else wanted[place])
        fence_full()  # before the look: a worker stores its stamp, fences, and looks which message is wanted
        return self.sweep() > 0

    cdef uint64_t _crowded(self, uint64_t mask) except? 0:
        """Returns which of these workers have no room for one more message; 0: all have room."""
        cdef uint64_t crowded = 0, bit
        if not self._unused_count:
            return self._messages[self._oldest].pending
        while mask:
            bit = mask & (0 - mask)
            if (<WorkerRecord>self._places[lowest_bit(mask)]).unacknowledged >= self.backlog:
                crowded |= bit
            mask &= mask - 1
        return crowded

    cdef bint want_place(self, uint64_t mask) except -1:
        """Asks the workers without room for one more message to ring when they have left half of their messages.

        It does not wait for the next acknowledgement, because then each one would wake the engine.

        Returns:
            False: a message came back meanwhile, so the caller looks again before it waits.
        """
        cdef uint64_t wanted[MAX_WORKERS]
        cdef uint32_t seen[MAX_WORKERS]
        cdef uint64_t crowded = self._crowded(mask), left
        cdef int stamp = self._oldest, place
        memset(wanted, 0, sizeof(wanted))
        memset(seen, 0, sizeof(seen))
        while stamp >= 0:
            left = self._messages[stamp].pending & crowded
            while left:
                place = lowest_bit(left)
                seen[place] += 1
                if 2 * seen[place] <= (<WorkerRecord>self._places[place]).unacknowledged + 1:
                    wanted[place] = self._messages[stamp].sequence
                left &= left - 1
            stamp = self._messages[stamp].newer
        return not self._want(wanted)

    cdef bint _want_first(self, bint of_slots) except -1:
        cdef uint64_t wanted[MAX_WORKERS]
        cdef uint64_t left
        cdef int stamp = self._oldest, place
        memset(wanted, 0, sizeof(wanted))
        while stamp >= 0:
            if self._messages[stamp].region_count if of_slots else self._messages[stamp].blocks:
                left = self._messages[stamp].pending
                while left:
                    place = lowest_bit(left)
                    if not wanted[place]:
                        wanted[place] = self._messages[stamp].sequence
                    left &= left - 1
            stamp = self._messages[stamp].newer
        return not self._want(wanted)

    def want(self, ranks: Iterable[int]) -> bool:
        """Asks the workers of these ranks that have no room for one more message to ring; returns as :meth:`want_place`."""
        return self.want_place(self.mask_of(ranks))

    def want_memory(self) -> bool:
        """Asks workers to ring when they leave a message with memory of broadcasts; returns as :meth:`want_place`."""
        return self._want_first(False)

    def want_slots(self) -> bool:
        """Asks workers to ring when they leave a message that keeps slots of claims; returns as :meth:`want_place`."""
        return self._want_first(True)

    def laggards(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Returns the ranks of the workers, among these, that have no room for one more message, in order."""
        return self.ranks_of(self._crowded(self.mask_of(ranks)))

    def memory_laggards(self) -> tuple[int, ...]:
        """Returns the ranks of the workers that still read the oldest message with memory of broadcasts."""
        cdef int stamp = self._oldest
        while stamp >= 0 and not self._messages[stamp].blocks:
            stamp = self._messages[stamp].newer
        return () if stamp < 0 else self.ranks_of(self._messages[stamp].pending)

    def holds_slots(self) -> bool:
        """Whether an outstanding message keeps slots of claims."""
        cdef int stamp = self._oldest
        while stamp >= 0:
            if self._messages[stamp].region_count:
                return True
            stamp = self._messages[stamp].newer
        return False

    @property
    def free_blocks(self) -> int:
        """Free blocks of the memory of broadcasts."""
        return 0 if self._memory is None else self._memory.free_units

    def check(self) -> None:
        """Asserts the invariants; for tests. All reserved memory must belong to published messages."""
        cdef int stamp = self._oldest
        cdef uint64_t blocks = 0, last = 0
        cdef uint32_t count = 0
        counts, nbytes = {}, {}
        while stamp >= 0:
            message = self._messages[stamp]
            assert message.pending and message.sequence > last
            last = message.sequence
            blocks += message.blocks
            count += 1
            for place in range(MAX_WORKERS):
                if message.pending >> place & 1:
                    assert self._places[place] is not None, "a message is pending at nobody"
                    counts[place] = counts.get(place, 0) + 1
                    nbytes[place] = nbytes.get(place, 0) + message.nbytes
            stamp = self._messages[stamp].newer
        assert count == self.outstanding and self._unused_count + count == WINDOW
        assert self.free_blocks + blocks == self._blocks, "a block is lost"
        for worker in self.workers():
            assert worker.unacknowledged == counts.get(worker.place, 0) <= self.backlog
            assert worker.unacknowledged_nbytes == nbytes.get(worker.place, 0)
            assert worker.is_member or worker.unacknowledged, "a place is kept for nobody"
            assert worker.is_member == (self._members.get(worker.rank) is worker)
        assert self.ranks == tuple(sorted(self._members))
