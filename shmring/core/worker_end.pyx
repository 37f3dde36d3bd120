"""A worker's side: its engine's messages, read in place, and replies.

Theory of operation. A message comes as a record; its tensors are views of the engine's memory, which this process maps
read-only. A message is *acknowledged* when it has been left and the last view of it has died: then, and not before, the number
of the message is stored in this worker's page, with a release store, so that every read of its bytes comes before. This happens
on the thread that drops the last reference, with the interpreter's lock or without it, and no Python runs there. An engine that
waits for the message has written so into the page, and is rung. Each of the two makes a full fence after its store, and then
looks at the other's number.

A blocking worker waits here, too: it looks into the ring for a moment, sets its flag, and sleeps in the kernel until its engine
rings or dies. All of this is one call, because each microsecond delays a step at the last of many workers.

The page stays mapped, and the bell's descriptor open, until the last message was acknowledged: views outlive the worker that they
came from. A forked child acknowledges nothing; it does not have the page.

A hook that decodes a payload, or a signal handler in the middle of a wait, may close this end. So a call that waits or decodes
keeps references to the objects that it uses, and checks afterwards whether there is still a reader.

Invariant: a message is acknowledged once at most, and never while a view of it lives.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.exc cimport PyErr_CheckSignals, PyErr_SetFromErrno
from libc.errno cimport EINTR, errno
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from posix.unistd cimport close, dup

from shmring.core.dropped import warn_of
from shmring.errors import CapacityError, ClosedError, LocalProtocolError, RemoteProtocolError


cdef struct Page:
    # A worker's page, and how its engine is rung. Kept by the worker's end until that is closed, by a thread that sleeps, and by
    # each message that was not acknowledged.
    int32_t references
    int forks
    int bell          # a socket, closed with the last reference
    Mapped* mapped


cdef struct Acknowledgement:
    # Acknowledges a message when neither its owner nor a view keeps it any more.
    Owner owner         # the first member: see Owner
    Page* page
    uint64_t sequence
    uint32_t stamp


cdef enum:
    _RUNG = 8  # beside what that returns

cdef double _ROOM_S = 0.01  # a thread that waits for room looks this often, for another thread may have read its bell



# -- acknowledging, in C -----------------------------------------------------------------------------------------------------


cdef void _drop_page(Page* page) noexcept nogil:
    if drop_reference(&page.references):
        return
    if page.forks == forks():
        close(page.bell)
    drop_mapped(page.mapped)
    free(page)


cdef void _acknowledge(Owner* owner) noexcept nogil:
    """The last reference to a message has gone: acknowledges it."""
    cdef Acknowledgement* left = <Acknowledgement*>owner
    cdef Page* page = left.page
    cdef char* at
    cdef uint64_t wanted
    if page.forks == forks():
        at = page.mapped.address
        store_release_u64(at + AT_STAMPS + 8 * left.stamp, left.sequence)  # release: all reads of the message come before
        fence_full()  # before the look: the engine writes which message it waits for, fences, and looks at the stamps
        wanted = load_acquire_u64(at + AT_WANT)
        if wanted and left.sequence >= wanted and exchange_u64(at + AT_WANT, 0):
            send(page.bell, b"\0", 1, MSG_DONTWAIT | MSG_NOSIGNAL)
    _drop_page(page)
    free(left)


cdef class BaseMessage:
    """A message, from its receipt until it is left. The ``Message`` classes are subclasses.

    Attributes:
        sequence: its number, the same for all workers that get it.
        wants_reply: whether the engine waits for a reply of each worker.
        left: whether it was left.
        answered: whether it was replied to.
    """

    cdef readonly WorkerEnd _end
    cdef readonly uint64_t sequence
    cdef readonly bint wants_reply
    cdef readonly bint left
    cdef readonly bint answered
    cdef bint _is_in_hands                   # it was received
    cdef readonly bint _is_shared            # it is a shared claim, with a payload beside
    cdef Acknowledgement* _acknowledgement   # NULL: it was left
    cdef ContentRegions _regions
    cdef object _payload
    cdef object _beside
    cdef object __weakref__

    def __repr__(self) -> str:
        return f"<Message {self.sequence}{' that wants a reply' if self.wants_reply else ''}{', left' if self.left else ''}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, error: BaseException | None, traceback) -> None:
        self._leave(error)

    def leave(self) -> None:
        """Leaves it; a second call does nothing. If it wants a reply and had none, the engine is told that it failed."""
        self._leave(None)

    cdef int _leave(self, object error) except -1:
        if self._leave_end() and self.wants_reply and not self.answered:
            error = error or LocalProtocolError("the worker left the message without a reply")
            self._end.shell.fail_answer(self.sequence, error)
        return 0

    def __del__(self) -> None:
        if not self._is_in_hands or self.left:
            return
        if self._leave_end() and self.wants_reply and not self.answered:
            self._end.shell.fail_answer_later(
                self.sequence, LocalProtocolError("the worker dropped the message without a reply")
            )
        warn_of(f"message {self.sequence} was dropped before it was left; use `with message:`", self)

    def __dealloc__(self) -> None:
        if self._acknowledgement != NULL:
            drop_owner(&self._acknowledgement.owner)

    @property
    def payload(self):
        """The payload, its tensors viewed in place, to be read only. A view keeps the message unacknowledged, also after it was left.

        Raises:
            LocalProtocolError: the message was left.
            ClosedError: it belongs to the process that forked this one, which does not have its memory.
        """
        return self._shown(self._payload)

    @property
    def beside(self):
        """What the engine has sent beside a claim that it shares; None for any other message.

        Raises:
            LocalProtocolError, ClosedError: as :attr:`payload`.
        """
        return self._shown(self._beside)

    cdef object _shown(self, object what):
        cdef WorkerEnd end = self._end
        if end._forks != forks():
            raise end.home.closed_error()
        if self.left:
            raise LocalProtocolError(f"message {self.sequence} was left; keep what you need of its payload before")
        return what

    cdef bint _leave_end(self) except -1:
        """Acknowledged at once, or with the death of its last view. Returns False if it was left before."""
        cdef Acknowledgement* acknowledgement = self._acknowledgement
        cdef uint32_t slot
        if self.left:
            return False
        self.left = True
        self._payload = self._beside = None
        if self._regions is not None:
            for slot in range(self._regions.content.slot_count):
                self._regions.leave(slot)
            self._regions = None
        self._acknowledgement = NULL
        if acknowledgement != NULL:
            drop_owner(&acknowledgement.owner)
        return True


cdef class WorkerEnd:
    """See the head of this file.

    Args:
        shell: is called for all work that is not done here.
        reader, writer: of the rings from and to the engine.
        socket: the descriptor over which the engine is rung.
        mapping: the engine's memory: slab, replies, broadcasts.
        page: this worker's.
        decoder: of payloads.
        shared_decoder: of a pair of a claim's payload and what goes beside it.
        packer: of replies.
        message_type: a subclass of :class:`BaseMessage`.
        max_tensors, max_values: how many tensors may be in a payload, and what its values may count.
        max_payload_nbytes: of a payload.

    Attributes:
        received: messages so far.
    """

    cdef readonly RecordReader reader
    cdef readonly RecordWriter writer
    cdef readonly uint64_t received
    cdef readonly object shell  # type: WorkerShell
    cdef readonly Home home  # None while the garbage collector takes this end apart: what runs then asks the shell
    cdef int _forks          # of its home
    cdef Page* _page         # NULL when this is closed
    cdef Mapping _mapping
    cdef PayloadDecoder _decoder
    cdef PayloadDecoder _shared_decoder
    cdef Packer _packer
    cdef type _message_type
    cdef Bounds _bounds
    cdef uint64_t _max_payload_nbytes
    cdef uint64_t _last_sequence    # the number of the last message that was read from the ring
    cdef readonly Looking looking    # for messages, before it sleeps
    cdef bint _is_receiving  # a thread sleeps until a message comes
    cdef bytes _unopened     # a record for which there was no memory; None: there is none

    def __init__(
        self,
        shell: WorkerShell,
        RecordReader reader not None,
        RecordWriter writer not None,
        socket: int,
        Mapping mapping not None,
        Mapping page not None,
        PayloadDecoder decoder not None,
        PayloadDecoder shared_decoder not None,
        Packer packer not None,
        message_type: type[BaseMessage],
        *,
        max_tensors: int,
        max_values: int,
        max_payload_nbytes: int,
    ) -> None:
        cdef int bell
        assert page.mapped.nbytes == PAGE_NBYTES
        self.shell, self.home, self._forks = shell, shell.home, forks()
        self.reader, self.writer = reader, writer
        self._mapping = mapping
        self.looking = Looking()
        self._decoder, self._shared_decoder, self._packer = decoder, shared_decoder, packer
        self._message_type = message_type
        self._bounds, self._max_payload_nbytes = bounds_of(max_tensors, max_values), max_payload_nbytes
        bell = dup(socket)
        if bell < 0:
            PyErr_SetFromErrno(OSError)
        self._page = <Page*>malloc(sizeof(Page))
        if self._page == NULL:
            close(bell)
            raise MemoryError
        self._page.references = 1
        self._page.forks = forks()
        self._page.bell = bell
        self._page.mapped = page.mapped
        keep_mapped(page.mapped)

    def __dealloc__(self) -> None:
        if self._page != NULL:
            _drop_page(self._page)

    def close(self) -> None:
        """Leaves all messages that were not received; received ones stay until they are left. No more messages are received.

        Messages that the engine sends before it knows are never read from the ring, and so never acknowledged one by one: the
        page says that they were left. A second call does nothing, neither in the middle of the first one.
        """
        cdef RecordReader reader = self.reader
        cdef Page* page = self._page
        if reader is None:
            return
        self.reader = None
        try:
            if self._unopened is not None:
                self.leave_unread(self._unopened)
            while (record := reader.read()) is not None:
                self.leave_unread(record)
        except RemoteProtocolError:
            pass  # its engine has ended, or breaks the rules: then it does not wait for the rest
        if page.forks == forks():
            store_release_u64(page.mapped.address + AT_CLOSED, self._last_sequence + 1)
        self._mapping = Mapping(-1, 0)
        self.writer = None
        self._page = NULL
        _drop_page(page)

    def leave_unread(self, bytes record not None) -> None:
        """Leaves the message of a record without opening it."""
        cdef BaseMessage message = self._begin(record, None, None)
        if message is not None:
            message._leave_end()

    # -- messages ----------------------------------------------------------------------------------------------------

    def receive(self, pidfd: int, wait_s: float, busy_s: float):
        """Reads the next record, and waits for it if there is none.

        Args:
            pidfd: of the engine.
            wait_s: seconds; 0: it does not wait; less than 0: without end. A signal ends it sooner, as does a second.
            busy_s: how long it looks before it sleeps, or for a moment if that is longer and has helped before; less than 0:
                not at all. Between two looks it lets other processes run. If they keep the core for long, it sleeps at once,
                and so do the next waits: a sleeper gets the core back when it is rung, and a looking thread does not.

        Returns:
            A message; the bytes of a record of another kind; or, if there was no record, a number like that of
            :func:`receive_bells`, with ``ENDED`` also if the engine is dead. After that number, there may be a record. 0: no
            record came in time.

        Raises:
            RemoteProtocolError: the engine broke the rules.
            ClosedError: this end is closed; perhaps by a signal handler, while this waited.
            msgspec.ValidationError: the payload is not of the type that was asked for; the message was left.
        """
        cdef double wait = wait_s, busy = busy_s
        cdef double until = now_s() + wait
        cdef int heard
        while True:
            taken = self._take()
            if taken is not None:
                return taken
            if wait and self._look(busy, wait):
                continue
            heard = self._sleep(pidfd, wait, False)
            if heard != _RUNG:
                return heard
            if wait > 0:  # the bell was for a record that was read before the bell came: go on until the time is over
                wait = max(0.0, until - now_s())

    cdef object _take(self):
        """A message, the bytes of a record of another kind, or None."""
        cdef RecordReader reader = self.reader
        cdef uint32_t nbytes
        cdef uint64_t received = self.received
        cdef bytes record = self._unopened
        if reader is None:
            raise ClosedError("this end of a worker is closed")
        if record is None:
            if not reader.next_nbytes(&nbytes):
                return None
            record = PyBytes_FromStringAndSize(NULL, nbytes)
            reader.take(<uint8_t*>PyBytes_AS_STRING(record), nbytes)
            reader.wake_writer()
        self._unopened = None
        try:
            message = self._open(record)
        except MemoryError:
            if self.received == received:
                self._unopened = record
            raise
        return record if message is None else message

    def open(self, bytes record not None) -> BaseMessage | None:
        """Returns the message of a record; None: it is of another kind. Raises as :meth:`receive`."""
        return self._open(record)

    cdef BaseMessage _begin(self, bytes record, Content content, Mapping mapping):
        """Reads the head of a message, and its content if one is given; returns it with its acknowledgement, or None."""
        cdef Cursor cursor
        cdef Value value
        cdef uint64_t members, tag, sequence, stamp, flags, slots, i
        cdef Acknowledgement* acknowledgement
        cdef BaseMessage message
        cdef SlotNumbers* slot
        if not read_head(&cursor, <const uint8_t*>PyBytes_AS_STRING(record), PyBytes_GET_SIZE(record), &tag, &members) \
                or tag != BROADCAST:
            return None
        if members < 7 or not read_unsigned(&cursor, &sequence) or not read_unsigned(&cursor, &stamp) or stamp >= WINDOW \
                or not read_unsigned(&cursor, &flags) or not read_array(&cursor, &slots) or slots > self._bounds.tensors:
            raise RemoteProtocolError("a message to workers is not as this protocol has it")
        message = self._message_type.__new__(self._message_type)
        message._end, message.sequence = self, sequence
        self._last_sequence = sequence
        message.wants_reply, message._is_shared = (flags & WANTS_ANSWER) != 0, (flags & IS_SHARED) != 0
        if content is not None:
            content.reserve_slots(slots + 1)
            for i in range(slots):
                read_value(&cursor, &value)
                read_slot(&value, content.slot_numbers + i)
                content.slot_count += 1
            read_content(&cursor, content, members - 5, self._bounds)
            for i in range(content.slot_count):
                slot = content.slot_numbers + i
                if slot.offset + SLOT_HEADER_NBYTES + slot.nbytes > mapping.mapped.nbytes:
                    raise RemoteProtocolError(
                        f"a message's slot at {slot.offset} of {slot.nbytes} bytes exceeds the engine's memory"
                    )
        acknowledgement = <Acknowledgement*>malloc(sizeof(Acknowledgement))  # last: until then, the record can be read again
        if acknowledgement == NULL:
            raise MemoryError
        acknowledgement.owner.references = 1
        acknowledgement.owner.gone = _acknowledge
        acknowledgement.page, acknowledgement.sequence, acknowledgement.stamp = self._page, sequence, <uint32_t>stamp
        take_reference(&self._page.references)
        message._acknowledgement = acknowledgement
        return message

    cdef BaseMessage _open(self, bytes record):
        cdef Content content = Content.__new__(Content)
        cdef Mapping mapping = self._mapping  # this call keeps it alive
        cdef BaseMessage message
        cdef ContentRegions regions
        cdef SlotNumbers* slot
        if self.reader is None:
            raise ClosedError("this end of a worker is closed")
        message = self._begin(record, content, mapping)
        if message is None:
            return None
        self.received += 1  # from here on, it is read: the engine is told if this fails
        try:
            regions = message._regions = regions_of(content, 0, None, mapping)
            regions.owner = &message._acknowledgement.owner
            if content.payload_nbytes:
                slot = content.slot_numbers + content.slot_count - 1
                content.check_payload(
                    PyBytes_FromStringAndSize(
                        mapping.at(slot.offset + SLOT_HEADER_NBYTES + content.payload_offset, content.payload_nbytes),
                        content.payload_nbytes,
                    ),
                    self._bounds,
                )
            if not message._is_shared:
                message._payload = self._decoder.decode(regions, None)
            else:
                message._payload, message._beside = self._shared_decoder.decode(regions, None)
        except BaseException as error:
            message._leave(error)
            raise
        message._is_in_hands = True
        return message

    # -- replies -----------------------------------------------------------------------------------------------------

    def pack_answer(self, payload, sequence: int) -> bytes:
        """Returns a reply as a record, which may be longer than a record may be: then it is sent in parts.

        Raises:
            TypeError: something in the payload can't be sent.
            CapacityError: it is larger than any payload may be.
        """
        cdef Packed packed = self._packer.pack(payload, self._max_payload_nbytes, 4 * self._max_payload_nbytes)
        cdef Outgoing record
        if packed.slot_nbytes:
            raise CapacityError(
                f"a reply of {packed.slot_nbytes} bytes exceeds max_payload_nbytes ({self._max_payload_nbytes})",
                needed=packed.slot_nbytes, capacity=self._max_payload_nbytes,
            )
        record = outgoing(ANSWER, sequence)
        return record_bytes(&record, packed, most_nbytes(&record, packed))

    def mark_answered(self, BaseMessage message not None) -> bool:
        """A message has been replied to. Returns whether the engine gathers replies to it; a reply to a broadcast is dropped.

        Raises:
            LocalProtocolError: it was replied to before, or left.
        """
        if message.answered:
            raise LocalProtocolError(f"message {message.sequence} was replied to before")
        if message.left:
            raise LocalProtocolError(f"message {message.sequence} was left; reply to it before, inside its block")
        message.answered = True
        return message.wants_reply

    def unmark_answered(self, BaseMessage message not None) -> None:
        """Undoes that, since nothing was sent. If the message was left meanwhile, the engine is told that no reply will
        come."""
        message.answered = False
        if message.left:
            error = LocalProtocolError("the worker gave up replying, and left the message")
            self.shell.fail_answer(message.sequence, error)

    # -- waiting -----------------------------------------------------------------------------------------------------

    def wait_for_room(self, pidfd: int, wait_s: float) -> int:
        """Waits until the engine may have read records, or for a moment. Arguments and result as of :meth:`receive`."""
        cdef double wait = wait_s
        return self._sleep(pidfd, _ROOM_S if wait < 0 else min(wait, _ROOM_S), True) & ~_RUNG

    cdef bint _look(self, double seconds, double wait) except -1:
        """Looks, without the interpreter's lock, for so many seconds or for a moment; returns whether there is a record."""
        cdef RecordReader reader = self.reader
        cdef Looking looking = self.looking
        cdef bint is_news
        if seconds < 0:
            return False
        with nogil:
            seconds = max(seconds, looking.moment())
            is_news = reader.has_news()
            if not is_news and looking.begins(min(seconds, wait) if wait >= 0 else seconds):
                while not is_news and looking.goes_on():
                    is_news = reader.has_news()
            looking.has_looked(is_news)
        return is_news

    cdef int _sleep(self, int pidfd, double wait, bint is_for_room) except -1:
        """Sleeps, without the interpreter's lock. Returns as :meth:`receive`, or ``_RUNG``: the record or the room may be
        there."""
        cdef pollfd descriptors[2]
        cdef RecordReader reader = self.reader
        cdef Page* page = self._page
        # Rounded up: a little late is late, a little early is a second call. At most a second, so that signals are seen.
        cdef int patience = 1000 if wait < 0 or wait > 1 else <int>(wait * 1000 + 0.999)
        cdef int ready = 0, heard = 0, error = 0
        cdef bint is_news = False
        if reader is None or page == NULL:
            raise ClosedError("this end of a worker is closed")
        take_reference(&page.references)  # whoever closes this meanwhile does not close the bell
        try:
            descriptors[0].fd, descriptors[0].events = page.bell, POLLIN
            descriptors[1].fd, descriptors[1].events = pidfd, POLLIN
            if not is_for_room:
                self._is_receiving = True
            with nogil:
                if patience and not is_for_room:
                    is_news = not reader.fall_asleep()
                if not is_news:
                    ready = poll(descriptors, 2, patience)
                    error = errno
            if not is_for_room:
                self._is_receiving = False
            if is_news:
                return _RUNG
            if ready <= 0:
                if not is_for_room:
                    reader.stay_awake()
                if ready < 0 and error == EINTR:
                    PyErr_CheckSignals()
                return 0
            if descriptors[0].revents and not self._is_receiving:  # a receiving thread must not miss its bell
                heard = read_bells(page.bell, 1)
            if descriptors[1].revents:
                heard |= ENDED
            return heard or _RUNG
        finally:
            _drop_page(page)
