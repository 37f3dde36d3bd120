"""The links of one event loop: how each of them reads its ring, and how they take turns. They look in each turn of the loop,
one after the other and within a budget.

A link is *awake* as long as records keep coming: it looks again in the next turn of the loop, and its peer need not ring. When
nothing has come for as long as being woken would take, it falls asleep. So there are no system calls under load, and none of
ours in an idle process.

Looking costs less than sleeping if the next record comes soon: to wake a sleeper, one side rings and the kernel wakes the
other, which takes both of them tens of microseconds. So a link looks for about as long before it sleeps. Its cost is then never
more than a small multiple of the cost of the best choice. A turn that finds nothing first lets other processes run, one of
which may be about to answer, and looks once more: what came meanwhile need not wait for the loop's next turn. If no process
wanted the core the last time, only a second such turn in a row does so. A link that has looked in vain several times in a row
sleeps at once, since its peer takes longer, and tries again now and then.

While the loop looks for some links, looking for another one costs it next to nothing. So a link that waits among many stays
awake for a number of such turns: the turns of a busy client come late to each of its links, but they come.

Two ends that both sleep answer each other slowly *because* they sleep. Each of them would find out if it looked for longer than
its peer takes to be woken and to answer; if it looked for less, it would look in vain for ever, and both would stay in that
state. So the time to look is that of a peer that has to be woken, with room for its answer.

If other processes want the cores, a yield takes as long as they run: milliseconds, if they compute. A process that is rung gets
its core back at once, but a process that has yielded does not. So the time of long yields is added up. If it is more for each
record than being woken would take, all links sleep at once for a while, also those that poll busily.

The budget. A turn ends after a set time, and the links that have not had theirs come first in the next one. In a turn, a link
delivers so many records, or for so long: whichever is over first. Other links wait for the time that a link takes. The cost of
a record depends on its request and on the books, so a count of records alone is not enough. The type of a record bounds the
cost of a single one.

Busy polling (``busy_poll_s``). A program can spend a core to save the time of being woken: for so long after a message of such
a link, in either direction, no link of the loop falls asleep, whether or not that has helped before.

Source: spinning for as long as blocking would cost is from Karlin, Li, Manasse and Owicki, "Empirical Studies of Competitive
Spinning for a Shared-Memory Multiprocessor" (1991). Busy polling is the kernel's idea (``net.core.busy_poll``), and that of
vLLM's ``shm_broadcast``, whose readers spin for a second.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc

from shmring.errors import RemoteProtocolError

cdef enum:
    _TURN_RECORDS = 64    # of a link: as many small requests take about a millisecond
    _VAIN_VIGILS = 4      # in a row, after which a link sleeps at once
    _VIGIL_RETRY = 32     # so many times, before it looks again
    _VIGIL_TURNS = 256    # that others have anyway: to look in so many takes a link about as long as being woken
    _LOST_RECORDS = 1024  # see below
    _SHORT_RECORDS = 8    # that are delivered in C between two looks at the clock
    # A longer record has a long payload, since tensors in a record are short: checking 60,000 values takes 0.2 ms.
    _LONG_NBYTES = 16 << 10
    _LONG_COPIES_NBYTES = 1 << 20  # copied in 0.05 to 0.1 ms
    _SHARE_SHIFT = 12  # a long record counts as one for each 4 KiB: so 64 of them take a millisecond, long or short

cdef double _LINK_S = 0.001      # of a turn, for one link
cdef double _TURN_S = 0.004      # for all of them together: what an event loop is expected to take anyway
cdef double _VIGIL_S = 0.0002    # to wake a peer whose core sleeps, too, takes up to 0.05 ms, and to copy a megabyte for an answer as long
cdef double _SWITCH_S = 0.000003 # a yield to nobody takes half a microsecond, and one to somebody at least two switches of context
cdef double _YIELD_S = 0.001     # a longer yield was used by others: a peer that is about to answer gives the core back sooner
cdef double _LOST_S = 0.02       # after so much time of it, or so many records, the links decide whether yielding is worth it
cdef double _WAKE_S = 0.00008    # that may be lost for a record: the time of sleeping and being woken, for both sides
cdef double _CROWDED_S = 0.25    # for which links sleep at once, if it is not

#: Records that a link delivers in a turn, at most.
RECORDS_IN_TURN: int = _TURN_RECORDS
#: Seconds of a turn: for one link, and for all of them together.
LINK_S: float = _LINK_S
TURN_S: float = _TURN_S
#: For how long a link looks after a record, how many times in vain, and how often it tries again.
VIGIL_S: float = _VIGIL_S
VAIN_VIGILS: int = _VAIN_VIGILS
VIGIL_RETRY: int = _VIGIL_RETRY
VIGIL_TURNS: int = _VIGIL_TURNS

cdef class Poller


@cython.final
cdef class Vigil:
    """How long one link looks for its next record before it sleeps; see the head of this file.

    Attributes:
        until: when it ends, if no other link has the loop look meanwhile.
    """

    cdef readonly double until
    cdef uint32_t _vain
    cdef uint32_t _turns_left  # in which it looks beside others
    cdef bint _is_over

    cpdef void begin(self, double now) noexcept:  # type: (float) -> None
        """A record came."""
        if not self._is_over:
            self._vain = 0
        self._is_over = True
        if self._vain < _VAIN_VIGILS or not self._vain % _VIGIL_RETRY:
            self._is_over, self.until, self._turns_left = False, now + _VIGIL_S, _VIGIL_TURNS

    cpdef bint is_over(self, double now, bint others_look) noexcept:  # type: (float, bool) -> bool
        """Whether to sleep now. ``others_look``: the loop has turns anyway, for links that were begun later."""
        if not self._is_over:
            if now < self.until:
                return False
            if others_look and self._turns_left:
                self._turns_left -= 1
                return False
        self._is_over = True
        self._vain += 1
        return True


cdef class LinkReader(RecordReader):
    """The reading end of a link: it delivers what comes, in the turns that its poller gives it and between them, and sleeps.

    Args:
        memory, bell: as of :class:`RecordReader`.

    Attributes:
        awake: whether the poller gives it turns.
        stopped: whether no more records are delivered.
    """

    cdef readonly bint awake
    cdef readonly bint stopped
    cdef bint is_reading        # records are being delivered at the moment
    cdef bint is_roused         # a caller looks into the ring without the poller's turns; that caller sets it
    cdef uint32_t records_left  # that may be delivered until the next turn. Where no clock is read, a long record counts as several
    cdef bint _heard            # records were delivered outside of a turn
    cdef bint _is_ending
    cdef uint64_t _left_nbytes  # bytes to deliver before the end
    cdef int _forks
    cdef uint8_t* _copy         # of the record that a RecordHandler has; NULL: none had one
    cdef RecordHandler _taker   # None: the records are for _take
    cdef object _take
    cdef object _link
    cdef RecordWriter _writer
    cdef Poller _poller
    cdef double _busy_poll_s
    cdef Vigil _vigil
    cdef LinkReader _next       # in the poller's line
    cdef uint32_t _unnoted      # records that the poller does not know of

    def __init__(self, memory: Buffer, bell: int) -> None:
        RecordReader.__init__(self, memory, bell)
        self.records_left = _TURN_RECORDS
        self._forks = forks()
        self._vigil = Vigil()

    def __dealloc__(self) -> None:
        free(self._copy)

    def attend(
        self, Poller poller not None, link: Any, take: Callable[[bytes], object], RecordWriter writer not None, *, busy_poll_s: float
    ) -> None:
        """Says who has what comes. It has no turns before :meth:`rouse`.

        Args:
            poller: of the loop.
            link: is told what follows. ``violated(error)``: the peer broke the rules, or ``take`` says so. ``failed(error)``: this
                side has failed in the middle of a record. ``ended()``: the peer's last words were delivered. ``flush()``: in each
                turn while the writer is blocked.
            take: called with each record; a :class:`RecordHandler` is called in C.
            writer: of the link's other ring.
            busy_poll_s: for how long after a message no link of the loop falls asleep.
        """
        self._poller, self._link, self._writer, self._busy_poll_s = poller, link, writer, busy_poll_s
        self._taker = take if isinstance(take, RecordHandler) else None
        self._take = take

    def leave(self) -> None:
        """Delivers no more, for good, and keeps nobody."""
        self.stopped = True
        self._link = self._take = self._taker = self._writer = None

    def stop(self) -> None:
        """Delivers no more records."""
        self.stopped = True

    def expect_the_end(self) -> None:
        """The writer has gone. It can have published at most a whole ring by then: delivers no more than that."""
        if not self._is_ending:
            self._is_ending, self._left_nbytes = True, self._capacity

    def read_last_words(self) -> None:
        """Delivers all that the writer had published, without a budget: its process is dead."""
        self.expect_the_end()
        while not self.stopped and not self.is_reading and self._link is not None:
            self.records_left = _TURN_RECORDS
            if not self._read(self._poller.now()):
                break

    # -- awake and asleep ------------------------------------------------------------------------------------------------

    def rouse(self) -> None:
        """Has turns from the loop's next one on, if it had none."""
        if not self.awake and self._link is not None:
            self.awake = True
            self._poller.append(self)
            self._poller.arm()

    def expect_answer(self) -> None:
        """A message was sent, of a link that polls busily: stays awake for what answers it."""
        if self._link is not None:
            self._poller.extend(self._busy_poll_s)
            if not self.awake:
                self.stay_awake()
                self.rouse()

    cdef bint take_turn(self, double now) except -1:
        """Delivers what came since the last turn, and returns whether anything did."""
        cdef bint heard = self._heard
        if self.stopped or self._forks != forks():
            return False
        self.records_left = _TURN_RECORDS
        self._heard = False
        if self._writer.blocked:
            self._link.flush()
        if not self.stopped and self.has_news() and self._read(now):
            return True
        if heard:
            self._came(now)
        return heard

    cdef bint falls_asleep(self, double now, bint at_once, bint others_look) except -1:
        """Nothing came in this turn: returns whether it sleeps now, and needs no further turn.

        Args:
            at_once: whether looking any longer is of no use.
            others_look: as of :meth:`Vigil.is_over`.
        """
        if not self.stopped and self._forks == forks():
            if self._is_ending:
                self._link.ended()
            elif not (at_once or self._vigil.is_over(now, others_look)) or not self.fall_asleep():
                return False
        self.awake = False
        return True

    cdef int _came(self, double now) except -1:
        """A record came: the next one may be about to."""
        self._vigil.begin(now)
        self._poller.looks_until = max(self._poller.looks_until, self._vigil.until)
        self._poller.records += self._unnoted
        self._unnoted = 0
        self._poller.extend(self._busy_poll_s)
        return 0

    # -- what comes --------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Delivers the records that have come, within this turn's budget. A caller that would wait for a message calls this
        first."""
        if self._link is None or self.stopped or self._forks != forks():
            return
        if self.is_reading or not self.records_left or not self.has_news():
            return
        if self._read(self._poller.now()) and not self.stopped:
            self.rouse()

    cdef bint _read(self, double now) except -1:
        """Delivers records, and says what follows from them; returns whether there was one."""
        cdef Py_ssize_t count
        link = self._link
        self.is_reading = True
        try:
            count = self._deliver(now + _LINK_S)
            if count:
                self.wake_writer()
        except RemoteProtocolError as error:
            count = 1
            link.violated(error)
        except BaseException as error:  # the link raises it again if it is no failure of this side
            count = 1
            link.failed(error)
        finally:
            self.is_reading = False
        if count:
            self._came(now)
        return count > 0

    cdef Py_ssize_t _deliver(self, double deadline) except -1:
        """Hands records over until there are no more, or the budget is used up; returns how many there were.

        The clock is read after each record; after short ones that are handled in C, only every eighth time.

        Args:
            deadline: after which this ends.

        Raises:
            RemoteProtocolError: as :meth:`read`, or from the handler.
        """
        cdef Py_ssize_t count = 0
        cdef uint32_t nbytes
        cdef RecordHandler taker = self._taker
        take = self._take
        if taker is not None:
            self._make_copy()
        while self.records_left and not self.stopped and self.next_nbytes(&nbytes):
            if self._is_ending:
                if nbytes + LENGTH_NBYTES > self._left_nbytes:
                    self.stopped = True
                    self._link.ended()  # those were the last words
                    break
                self._left_nbytes -= nbytes + LENGTH_NBYTES
            count += 1
            self.records_left -= 1
            self._unnoted += 1
            if taker is None:
                record = PyBytes_FromStringAndSize(NULL, nbytes)
                self.take(<uint8_t*>PyBytes_AS_STRING(record), nbytes)
                take(record)
            else:
                self.take(self._copy, nbytes)
                if taker.handle_hot(self._copy, nbytes):
                    if count % _SHORT_RECORDS and nbytes < _LONG_NBYTES and taker.copied_nbytes < _LONG_COPIES_NBYTES:
                        continue
                    taker.copied_nbytes = 0
                else:
                    taker.handle_message(PyBytes_FromStringAndSize(<const char*>self._copy, nbytes))
            if self._poller.now() > deadline:
                self.records_left = 0
        return count

    cdef int _make_copy(self) except -1:
        """Makes room for a copy of a record."""
        if self._copy == NULL:
            self._copy = <uint8_t*>malloc(self._largest_record_nbytes)
            if self._copy == NULL:
                raise MemoryError
        return 0

    cdef bint hear(self, RecordHandler taker) except -1:
        """Reads the records that have come, before the next turn, and within the budget that is left of this turn.

        Returns:
            False if :meth:`look` has to do that: it is asleep, is delivering at the moment, or has ended.

        Raises:
            RemoteProtocolError: as :meth:`read`, or from the handler.
        """
        cdef uint32_t nbytes
        cdef bint is_hot = True
        cdef LinkReader kept = self  # kept by this call: a record may end the connection, and then all others let go of it
        if not (self.awake or self.is_roused) or self.is_reading or self.stopped or self._is_ending:
            return False
        self._make_copy()
        self.is_reading = True
        try:
            while is_hot and self.records_left and not self.stopped and taker.copied_nbytes < _LONG_COPIES_NBYTES \
                    and self.next_nbytes(&nbytes):
                self.records_left -= min(self.records_left, 1 if nbytes < _LONG_NBYTES else nbytes >> _SHARE_SHIFT)
                self._unnoted += 1
                self._heard = True
                self.take(self._copy, nbytes)
                is_hot = taker.handle_hot(self._copy, nbytes)
                if not is_hot:  # it may be long work: the records after it wait for the next call, or turn
                    taker.handle_message(PyBytes_FromStringAndSize(<const char*>self._copy, nbytes))
        finally:
            kept.is_reading = False
        self.wake_writer()
        return True


cdef class Poller:
    """Gives the links of a loop their turns. What the loop calls is this object.

    Args:
        loop: which one.
        clock: seconds, instead of the kernel's monotonic clock: for tests.
        give_way: lets other processes run, instead of a yield: for tests.

    Attributes:
        home: the process and the loop in which the ends that it gives turns may be used; it refuses what is called elsewhere.
        is_due: whether there will be a turn in the loop's next one.
        turns: how many there were.
        records: that links have delivered. It starts again when it has been looked at.
    """

    cdef readonly bint is_due
    cdef readonly uint64_t turns
    cdef public uint64_t records
    cdef readonly Home home
    cdef object _loop
    cdef object _clock
    cdef object _give_way
    cdef double looks_until    # the end of the last vigil that a link has begun
    cdef double _busy_until
    cdef double _crowded_until
    cdef double _lost_s
    cdef LinkReader _first     # the line of those that are awake
    cdef LinkReader _last
    cdef uint32_t _awake_count
    cdef bint _found_nothing   # in its last turn
    cdef bint _others_ran      # during the last yield
    cdef object __weakref__

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        clock: Callable[[], float] | None = None,
        give_way: Callable[[], object] | None = None,
    ) -> None:
        self.home = Home("this end of a ring", "connect again here", loop)
        self._loop, self._clock, self._give_way = loop, clock, give_way
        self._others_ran = True

    cdef double now(self) except? -1:
        return now_s() if self._clock is None else <double>self._clock()

    cdef int append(self, LinkReader link) except -1:
        """A link is awake: it stands behind the others."""
        link._next = None
        if self._last is None:
            self._first = link
        else:
            self._last._next = link
        self._last = link
        self._awake_count += 1
        return 0

    cdef LinkReader _take_first(self):
        cdef LinkReader link = self._first
        self._first, link._next = link._next, None
        if self._first is None:
            self._last = None
        self._awake_count -= 1
        return link

    cpdef int extend(self, double seconds) except -1:  # type: (float) -> None
        """A message came, or was sent: no link falls asleep for so long."""
        if seconds:
            self._busy_until = max(self._busy_until, self.now() + seconds)
        return 0

    cdef int arm(self) except -1:
        """There is a turn in the loop's next one."""
        if not self.is_due:
            try:
                self._loop.call_soon(self)
            except RuntimeError:  # the loop is closed: this call runs in another one
                self.home.pass_loop()
                raise
            self.is_due = True
        return 0

    def __call__(self) -> None:
        """Gives the links that are awake their turns."""
        cdef bint had_records
        self.is_due = False
        self.turns += 1
        try:
            had_records = self._give_turns()
            if self._first is not None and not had_records and (self._found_nothing or self._others_ran):
                self._yield()
                if self._has_news():
                    had_records = self._give_turns()
            self._found_nothing = not had_records
        finally:
            if self._first is not None:
                self.arm()

    cdef bint _give_turns(self) except -1:
        """Gives each link that is awake a turn, until the time is over; returns whether one had records."""
        cdef LinkReader link
        cdef uint32_t left = self._awake_count
        cdef bint had_records = False, is_awake
        cdef double now = self.now()
        cdef double turn_end = now + _TURN_S
        cdef bint is_crowded = now < self._crowded_until
        while left:
            left -= 1
            link = self._take_first()
            is_awake = True  # also if it raises: then it has further turns
            try:
                if link.take_turn(now):
                    had_records = True
                else:
                    is_awake = (now < self._busy_until and not is_crowded) or not link.falls_asleep(
                        now, is_crowded, now < self.looks_until
                    )
            finally:
                if is_awake:
                    self.append(link)
            if left:
                now = self.now()
                if now > turn_end:
                    break
        return had_records

    cdef bint _has_news(self) noexcept:
        """Whether there is something to read for a link that is awake."""
        cdef LinkReader link = self._first
        while link is not None:
            if link.has_news():
                return True
            link = link._next
        return False

    cdef int _yield(self) except -1:
        """Lets other processes run, one of which may be about to answer."""
        cdef double now = self.now(), seconds
        if self._give_way is None:
            with nogil:
                sched_yield()
        else:
            self._give_way()
        seconds = self.now() - now
        self._others_ran = seconds > _SWITCH_S
        if seconds > _YIELD_S:
            self._add_lost(seconds, now + seconds)
        return 0

    cdef int _add_lost(self, double seconds, double now) except -1:
        """A yield took long, since others had the core. If such yields take more than waking would, links sleep at once for a
        while."""
        self._lost_s += seconds
        if self._lost_s > _LOST_S or self.records > _LOST_RECORDS:
            if self._lost_s > self.records * _WAKE_S:
                self._crowded_until = now + _CROWDED_S
            self._lost_s, self.records = 0.0, 0
        return 0
