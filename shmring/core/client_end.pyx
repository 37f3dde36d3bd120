"""A frontend's side: its work on every message.

Theory of operation. :class:`ClientEnd` has the book of its slots and the requests that are in flight. A payload is packed, its tensors
are copied to a slot (unless they lie in one), the slots are handed over in the book, and one record tells the engine. Records
from the engine end requests, release slots and bring replies. All of that is C, calls no event loop, and looks at no clock.

The *shell*, the :class:`~shmring.client.session.Session`, does the work that is rarer: waiting for space and for the engine,
copies that take long, leases, calls, slots in device memory, failures.

Invariants: a request is in ``pending`` from the time when its record is sent until its end comes; a slot is handed over by the
record that names it, or not at all.
"""

from collections import deque
from typing import Any

import msgspec

cimport cython
from cpython.object cimport PyObject
from libc.math cimport INFINITY
from libc.stdint cimport UINT64_MAX, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc

from shmring.core.dropped import give_back_soon, warn_of
from shmring.core.messages import COPY_OUT, KEPT_LEASE_ID, SlotRef
from shmring.door import shape_of
from shmring.errors import CapacityError, ClosedError, LocalProtocolError, RemoteError, RemoteProtocolError, StaleDescriptorError, fresh

cdef enum:
    _COPY_OUT = 1
    _FEW_SUBMITTED = 4
    _FADES = 16  # an observed turnover fades over about so many slots

#: Unread replies of one stream, before it fails: its consumer has stopped.
MAX_UNREAD_REPLIES: int = 65536

cdef uint64_t _NO_CACHE_IS_SO_LARGE = UINT64_MAX >> 2

assert COPY_OUT == _COPY_OUT


@cython.final
@cython.no_gc
cdef class CopiedReply:
    """A reply that was copied out of its slot when it came; the slot has gone back."""

    cdef Content content
    cdef ContentRegions regions  # of the copy


cdef class BaseSubmission:
    """A request in flight: its unread replies, and how it ended. ``Submission`` is a subclass.

    Attributes:
        request_id: as the wire numbers it.
        name: the caller's own name for it; may be empty.
        ended: whether no more replies will come (those that came may still be read).
    """

    cdef readonly uint64_t request_id
    cdef readonly str name
    cdef readonly bint ended
    cdef readonly ClientEnd _end
    # How it ended, if it did not finish.
    cdef readonly object _error  # type: Exception | None
    # Set as soon as a reply or the end comes; None: nobody waits.
    cdef readonly object _waiter  # type: asyncio.Future[None] | None
    cdef public bint _was_left    # whether its caller has seen its end, or has aborted it
    cdef readonly bint _on_gpu    # whether tensors of it lie in device memory, which may be gone with its engine
    cdef object _replies          # Contents and CopiedReplies that came and were not taken; None until the first
    cdef bint _has_given          # whether one was taken

    def next(self, reply_type=Any) -> Awaited[Any]:
        """Waits for the next reply.

        Args:
            reply_type: a msgspec type to decode it into.

        Returns:
            The reply, when awaited.

        Raises:
            StopAsyncIteration: the request is finished.
            RemoteError, AbortedError, EngineDeadError: how it ended otherwise.
            LocalProtocolError: another task waits for this request.
        """
        cdef _NextReply next_reply = _NextReply.__new__(_NextReply)
        next_reply.submission = self
        next_reply.reply_type = reply_type
        return next_reply

    def result(self, reply_type=Any) -> Awaited[Any]:
        """Waits for the one reply and the end.

        If the task that awaits this is cancelled, the request is aborted, as with ``request``: the caller wants no answer any
        more, and the engine would work for nobody. To wait for some time and then again, use :meth:`next` or :meth:`wait`,
        which abort nothing, or ``asyncio.shield``.

        Raises:
            RemoteError: the engine failed, or finished without a reply.
            LocalProtocolError: there was more than one reply; use :meth:`next` or ``stream``.
            AbortedError, EngineDeadError: how it ended otherwise.
        """
        cdef _OneReply one_reply = _OneReply.__new__(_OneReply)
        one_reply.submission = self
        one_reply.reply_type = reply_type
        return one_reply

    def wait(self) -> Awaited[None]:
        """Waits for the end: for requests that get no reply. If replies come, :meth:`next` returns them afterwards.

        Raises:
            RemoteError, AbortedError, EngineDeadError: how it ended, when awaited, unless it finished.
            LocalProtocolError: another task waits for this request.
        """
        cdef _UntilEnd until_end = _UntilEnd.__new__(_UntilEnd)
        until_end.submission = self
        return until_end

    def _need_not_wait(self) -> bool:
        """Whether a reply or the end has come, so that :meth:`next` returns or raises at once."""
        if not self.ended and not self._replies:
            self._end.hear()
        return self.ended or bool(self._replies)

    @property
    def has_replied(self) -> bool:
        """Whether a reply has come that was taken, or can be taken."""
        return self._has_given or bool(self._replies)

    cdef int check_error(self) except -1:
        """Its caller learns that it has ended: raises how, unless it finished."""
        self._was_left = True
        if self._error is not None:
            raise fresh(self._error)
        return 0

    def _give_up(self, error: Exception) -> None:
        """No more replies will be read: its caller gets this error."""
        self._finish(error)

    def _drop_replies(self) -> None:
        """Gives back the slots of unread replies, which will not be read."""
        while self._replies:
            reply = self._replies.popleft()
            if type(reply) is not CopiedReply:
                self._end.shell.release_replies([slot.generation for slot in (<Content>reply).slots])

    @property
    def _unread_slots(self) -> int:
        """How many unread replies came in slots: for each of them, the engine waits with a later one."""
        cdef int count = 0
        for reply in self._replies or ():
            count += type(reply) is CopiedReply or (<Content>reply).slot_count != 0
        return count

    cdef object _take_reply(self, object reply_type):
        """Takes the first unread reply, decoded."""
        cdef Content content
        cdef object decoder = self._end.decoder_of(reply_type)
        cdef object reply = self._replies[0]
        cdef bint is_copied = type(reply) is CopiedReply
        content = (<CopiedReply>reply).content if is_copied else <Content>reply
        if content.slot_count and content.slot_numbers.lease_id == _COPY_OUT and not self.ended:
            self._end.shell.reply_read(self.request_id)
        if not is_copied and content.slot_count and not self._end.is_usable():
            self._replies.clear()  # they lie in the engine's memory, or come after one that does
            self._end.shell.check_alive()
        self._replies.popleft()  # not before: if one of these fails, it is unread
        self._has_given = True
        return self._end._decode_copied(<CopiedReply>reply, decoder) if is_copied else self._end.decode_reply(content, decoder)

    def __del__(self) -> None:
        """It has ended, else its end would have it still: see :meth:`ClientEnd.dropped`."""
        if self._end is not None and self._end.is_usable() and self._is_missed():
            give_back_soon(self._end.shell.home.loop, self._give_back)

    cdef bint _is_missed(self) except -1:
        """Whether its caller has missed something: replies that keep space, or the reply or error that it was sent for."""
        if self._was_left:
            return bool(self._replies) and self._unread_slots
        return bool(self._replies) or self._error is not None

    def _give_back(self) -> None:
        """It was dropped: gives back the replies that were not read since."""
        if not self._end.is_usable() or not self._is_missed():
            return
        has_unread = bool(self._replies)
        self.abort()
        warn_of(f"request {self.request_id} was dropped{self._what_was_missed(has_unread)}", self)

    def _what_was_missed(self, bint has_unread) -> str:
        if has_unread:
            return " with unread replies; read them, or abort it"
        return f", and nobody saw how it failed ({type(self._error).__name__}: {self._error}); wait for it"

    def abort(self) -> None:
        """Gives the request up, if it has not ended, and its replies; for the subclass."""
        raise NotImplementedError

    cdef int _finish(self, object error) except -1:
        if self.ended:
            return 0
        self.ended = True
        self._error = error
        if error is not None:
            self._drop_replies()
        return self._wake()

    cdef int _wake(self) except -1:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        return 0


cdef class _Waiting(Awaited):
    """A task that waits for a request."""

    cdef BaseSubmission submission

    cdef PyObject* wait_for_more(self) except NULL:
        """Waits until a reply or the end comes."""
        cdef BaseSubmission submission = self.submission
        if submission._end._forks != forks():
            raise submission._end.home.closed_error()
        if submission._waiter is not None:
            raise LocalProtocolError(f"request {submission.request_id} is waited for by two tasks; let one of them do it")
        submission._waiter = submission._end.home.loop.create_future()
        return self.wait_in(submission._waiter)

    cdef PyObject* came(self, object result) except NULL:
        self.submission._waiter = None
        return self.happen()

    cdef int gave_up(self, type kind) except -1:
        self.submission._waiter = None
        return 0

    cdef int check_loop(self) except -1:
        self.submission._end.home.check_loop()
        return 0


@cython.final
cdef class _UntilEnd(_Waiting):
    """What :meth:`BaseSubmission.wait` returns."""

    cdef PyObject* happen(self) except NULL:
        cdef BaseSubmission submission = self.submission
        if not submission.ended:
            submission._end.hear()  # the reply may be in the ring, unread
        if not submission.ended:
            return self.wait_for_more()
        submission.check_error()
        return owned(None)


@cython.final
cdef class _NextReply(_Waiting):
    """What :meth:`BaseSubmission.next` returns."""

    cdef object reply_type

    cdef PyObject* happen(self) except NULL:
        cdef BaseSubmission submission = self.submission
        if not submission.ended and not submission._replies:
            submission._end.hear()  # the reply may be in the ring, unread
        if submission._replies:
            return owned(submission._take_reply(self.reply_type))
        if submission.ended:
            submission.check_error()
            return nothing_more()
        return self.wait_for_more()


@cython.final
cdef class _OneReply(_Waiting):
    """What :meth:`BaseSubmission.result` returns."""

    cdef object reply_type
    cdef object reply
    cdef bint has_reply

    cdef PyObject* happen(self) except NULL:
        cdef BaseSubmission submission = self.submission
        while True:
            if not submission.ended and not submission._replies:
                submission._end.hear()  # the reply, or the end, may be in the ring, unread
            if self.has_reply or not submission._replies:
                break
            self.reply = submission._take_reply(self.reply_type)
            self.has_reply = True
        if submission._replies:
            self.reply = None  # whoever keeps the error keeps no views
            submission.abort()
            raise LocalProtocolError(f"request {submission.request_id} has more than one reply; use stream() for such requests")
        if not submission.ended:
            return self.wait_for_more()
        reply, self.reply = self.reply, None
        submission._was_left = True
        if submission._error is not None:
            del reply
            raise fresh(submission._error)
        if not self.has_reply:  # that is a bug of the engine, and no reply of None
            raise RemoteError(
                "NoReply", f"the engine finished request {submission.request_id} without a reply; use stream() if that is meant"
            )
        return owned(reply)

    cdef int gave_up(self, type kind) except -1:
        self.submission._waiter, self.reply = None, None
        if kind is not GeneratorExit and kind is not RuntimeError:  # which say nothing of what the caller wants
            self.submission.abort()
        return 0


for _kind in (_UntilEnd, _NextReply, _OneReply):
    may_be_awaited(_kind)


cdef class BaseSlot:
    """Memory of the slab that a caller holds. ``Slot`` is a subclass, which also knows device memory.

    Attributes:
        nbytes: how many bytes of tensors it holds, alignment between them included.
    """

    cdef readonly uint64_t nbytes
    # None once the slot was left.
    cdef readonly ClientEnd _end  # type: ClientEnd | None
    cdef readonly ClientSlotRecord _record
    cdef readonly uint64_t _cursor  # bytes that are used
    cdef Region _lent_region  # that it is lent in device memory, and whoever lends it leaves; None: it is in host memory
    cdef Lent* _region        # NULL: left, or in device memory
    cdef uint64_t _address
    cdef readonly bint _drain  # whether its memory stays until its last view has died

    def __init__(self, ClientEnd end not None, ClientSlotRecord record not None, address: int, drain: bool) -> None:
        self._end = end
        self._record = record
        self.nbytes = record.nbytes
        self._address = address
        self._drain = drain

    def __dealloc__(self) -> None:
        if self._region != NULL:
            drop_region(self._region)

    def __del__(self) -> None:
        if self._end is None or not self._end.is_usable():
            return
        give_back_soon(self._end.shell.home.loop, self._give_back)

    def _give_back(self) -> None:
        """It was dropped, and was not left since."""
        if self._end is not None and self._end.is_usable():
            self._drain = True  # views of it may be alive
            self.close()
            warn_of(f"a slot of {self.nbytes} bytes was dropped before it was left; use `async with client.slot(...)`", self)

    cdef int _take(self, uint64_t nbytes, uint64_t* offset) except -1:
        """Reserves so many bytes, after those that were reserved before; -1 is an error, 1 means that they do not fit."""
        offset[0] = align(self._cursor)
        if nbytes > self.nbytes or offset[0] > self.nbytes - nbytes:
            return 1
        self._cursor = offset[0] + nbytes
        return 0

    def _hand_on(self) -> Slot:
        """Hands a slot in host memory on: its caller has left it from now on, and what is returned leaves it once more.

        Raises:
            ClosedError: it was left, or is in device memory.
        """
        cdef BaseSlot other
        if self._end is None or self._region == NULL:
            raise ClosedError("this slot was left, or is in device memory")
        other = new_instance(type(self), ())
        other.nbytes, other._record, other._cursor = self.nbytes, self._record, self._cursor
        other._address, other._drain = self._address, self._drain
        other._region, self._region = self._region, NULL
        other._end, self._end = self._end, None
        return other

    def _take_bytes(self, shape: Sequence[int], dtype: str, nbytes: int) -> int:
        """Reserves the bytes of a tensor; returns where they begin.

        Raises:
            CapacityError: there is no room for it.
        """
        cdef uint64_t offset
        if nbytes >= 1 << 62 or self._take(nbytes, &offset):
            offset = align(self._cursor)
            raise CapacityError(
                f"a {dtype} tensor of shape {tuple(shape)} needs {nbytes} bytes at {offset}, the slot has {self.nbytes}",
                needed=offset + nbytes,
                capacity=self.nbytes,
            )
        return offset

    def tensor(self, shape: tuple[int, ...] | list[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns an uninitialised, writable tensor in the slot, behind those it has handed out before.

        Args:
            shape: its shape.
            dtype: a torch dtype that can travel.

        Raises:
            CapacityError: the slot has no room left for it; :func:`shmring.nbytes_for` says how large a slot must be.
            ClosedError: the slot was left.
            TypeError: the dtype can't travel, or an extent is no integer.
            ValueError: an extent is negative, or there are too many.
        """
        cdef int64_t extents[MAX_DIMENSIONS]
        cdef tuple known, items
        cdef ClientEnd end = self._end
        cdef Lent* region
        cdef int ndim = 0
        cdef int overflow = 0
        cdef int64_t extent
        cdef uint64_t nbytes, offset
        items = shape if type(shape) is tuple else shape_of(shape)
        try:
            known = None if end is None else end._dtypes.get(dtype)
        except TypeError:  # it has no hash
            known = None
        if known is None:
            return self._other_tensor(items, dtype)
        nbytes = known[2]
        for item in items:
            if type(item) is not int:
                return self._other_tensor(items, dtype)
            extent = PyLong_AsLongLongAndOverflow(item, &overflow)
            if extent <= 0 or ndim == MAX_DIMENSIONS or multiply_overflows(nbytes, <uint64_t>extent, &nbytes):
                return self._other_tensor(items, dtype)
            extents[ndim] = extent
            ndim += 1
        # The shape may have been a generator, or an extent an object with code of its own, and that code may have left the slot.
        if not end.is_usable() or (self._region == NULL and self._lent_region is None) or self._take(nbytes, &offset):
            return self._other_tensor(items, dtype)
        region = self._region if self._lent_region is None else self._lent_region.lent()
        made = end._maker.view(region, offset, ndim, extents, known[0], known[1])
        if self._lent_region is not None:
            end.held.remember(self._address, made)
        return made

    def _other_tensor(self, shape: tuple[int, ...] | list[int], dtype: torch.dtype) -> torch.Tensor:
        """Makes an uncommon tensor, or raises an error that says why it can't be made; for the subclass."""
        raise NotImplementedError

    def _memory(self) -> RegionBytes:
        """Returns its bytes as a buffer that counts as a view.

        Raises:
            ClosedError: the slot was left, or is in device memory.
        """
        if self._region == NULL:
            raise ClosedError("this slot was left; views of it are made inside its block")
        return lend_bytes(self._region)

    def _view_at(self, offset: int, shape: Sequence[int], code: int, bits: int):
        """Returns a tensor in device memory, as :meth:`TensorMaker.tensor` makes it."""
        return self._end._maker.tensor(self._lent_region, offset, shape, code, bits)

    @property
    def _is_on_host(self) -> bool:
        """Whether it is a slot in host memory that was not left."""
        return self._region != NULL

    @property
    def _is_on_gpu(self) -> bool:
        """Whether it is a slot in device memory that was not left."""
        return self._lent_region is not None

    def close(self) -> None:
        """Leaves the slot: it is free again when the engine has released it, and drained if that was asked for.

        Views of it must not be used any more. Twice is once.
        """
        self._close()

    cdef int _close(self) except -1:
        cdef ClientEnd end = self._end
        if end is not None:
            self._end = None
            end._leave(self)
        return 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self._close()


cdef class ClientEnd(RecordHandler):
    """A frontend's side.

    Args:
        shell: is called for all work that is not done here.
        book: of slots in host memory.
        regions: of reply slots.
        mapping: the slab's.
        packer: of payloads.
        writer: of the ring to the engine.
        submission_type: a subclass of :class:`BaseSubmission`.
        slot_type: a subclass of :class:`BaseSlot`.
        maker: of torch tensors in slots.
        dtypes: DLPack's code and bits, and the bytes of an item, of the dtypes that it makes, by dtype.
        epoch: of this life of the engine.
        reply_key, slot_key: the first number of the keys of the regions of reply slots, and of slots that callers hold.
        max_tensors, max_values: how many tensors may be in a payload, and what its values may count.
        inline_nbytes: of tensors that travel in a record, at most.
        max_inflight: requests at a time.
        max_reply_inline_nbytes: of tensors in the record of a reply, at most.
        max_payload_nbytes: of a reply, tensors apart.
        debug: whether to tell the shell of slots that are left while views of them live.
        clock: that of the book's times.
        load: the engine's load; None: it is unknown.
        cache_nbytes: how many bytes the cache probably holds of those that were written last.

    Attributes:
        in_flight: requests that are, or are about to be.
        turnover_nbytes: bytes of all slots that go to the engine, from all its frontends, between the submission of a slot of
            this end and its release, this slot included: the largest recent number.
        reader: of the ring from the engine, which the shell reads; None: the end does not read by itself.
        found_full: whether :meth:`send_now` returned None because the ring is full.
        crowded: whether requests wait for their turn; the shell sets it.
        is_open: whether requests may be sent; the shell sets it.
        expects_expiry: whether the shell has a timer for leases that have been empty for long, and need not be called for
            another one.
        device_slots: the slots in device memory; the shell sets it.
        held: slots that callers hold.
        pinned: kept content that this client has pinned, by key.
        kept_hits: how often a caller looked for content that was pinned already.
        pending: requests in flight, by id.
    """

    cdef readonly object shell  # type: ClientShell
    cdef readonly Home home  # None while the garbage collector takes this end apart: what runs then asks the shell
    cdef int _forks          # of its home
    cdef readonly ClientBook book
    cdef readonly HeldSlots held
    cdef readonly dict pinned  # type: dict[bytes, Pin]
    cdef readonly uint64_t kept_hits
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
    cdef bint _has_unread        # dropped requests that may have replies in slots: the shell gives them back
    cdef public bint crowded
    cdef public bint is_open
    cdef public bint expects_expiry
    cdef public object device_slots
    cdef public LinkReader reader  # type: LinkReader | None
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

    def __init__(
        self,
        shell: ClientShell,
        ClientBook book not None,
        Regions regions not None,
        Mapping mapping not None,
        Packer packer not None,
        RecordWriter writer not None,
        submission_type: type[BaseSubmission],
        slot_type: type[BaseSlot],
        TensorMaker maker not None,
        dtypes: dict[torch.dtype, tuple[int, int, int]],
        clock: Callable[[], float],
        *,
        epoch: int,
        reply_key: int,
        max_tensors: int,
        max_values: int,
        inline_nbytes: int,
        max_inflight: int,
        max_reply_inline_nbytes: int,
        max_payload_nbytes: int,
        slot_key: int,
        debug: bool,
        LoadPage load=None,
        cache_nbytes: int = _NO_CACHE_IS_SO_LARGE,
    ) -> None:
        self.shell, self.home, self._forks = shell, shell.home, forks()
        self._load = load
        self._cache_nbytes = cache_nbytes
        self.book = book
        self.regions = regions
        self._mapping, self._slab_nbytes = mapping, mapping.mapped.nbytes
        self._packer = packer
        self._writer, self._record_nbytes = writer, writer.largest_record_nbytes
        self._submission_type = submission_type
        self._slot_type = slot_type
        self._maker = maker
        self._dtypes = dtypes
        self._slot_key = slot_key
        self._debug = debug
        self._clock = clock
        self.epoch = epoch
        self._reply_key = reply_key
        self._bounds = bounds_of(max_tensors, max_values)
        self._inline_nbytes = inline_nbytes
        self._max_inflight = max_inflight
        self._max_reply_inline_nbytes = max_reply_inline_nbytes
        self._max_payload_nbytes = max_payload_nbytes
        self.is_open = True
        self.held = HeldSlots()
        self.pinned = {}
        self.pending = Numbered()
        self._decoders = {}

    def detach(self) -> None:
        """The session has ended: no more records are written, and neither slab nor rings need stay mapped."""
        self._mapping, self._writer, self.reader = Mapping(-1, 0), None, None

    cdef bint is_usable(self) noexcept:
        """Whether requests may be sent from this process."""
        return self.is_open and self._writer is not None and self._forks == forks()

    cdef bint is_writable(self) noexcept:
        """Whether a request may be written to the ring now, if it finds room there."""
        return self.is_open and self._writer is not None and self._writer.is_writable()

    cdef bint hear(self) except -1:
        """Reads the records that have come: slots that the engine has released may be used again, and replies may be there.

        Returns:
            Whether this end may still be used: a record may have ended the session.
        """
        if self.reader is not None and self.is_usable() and self.reader.has_news():  # a forked child has no rings
            try:
                if not self.reader.hear(self):
                    self.shell.link.poll()
            except RemoteProtocolError as error:
                self.shell.link.violated(error)
            except MemoryError as error:
                self.shell.link.failed(error)
        return self.is_usable()

    cpdef PayloadDecoder decoder_of(self, reply_type):  # type: (Any) -> PayloadDecoder
        """Returns the decoder of payloads of a type, which is made once."""
        decoder = self._decoders.get(reply_type)
        if decoder is None:
            decoder = self._decoders[reply_type] = self.shell.decoder(reply_type)
        return decoder

    # -- kept content ------------------------------------------------------------------------------------------------

    # Other threads call the first of these. Each is one step for them: it runs no Python code, and keeps the interpreter's lock.

    def use_pinned(self, bytes key not None) -> Pin | None:
        """On any thread: returns what is pinned under a key, with one more user; None: nothing is."""
        cdef Pin pin = self.pinned.get(key)
        if pin is not None:
            pin.users += 1
            self.kept_hits += 1
        return pin

    def forget_unused(self, Pin pin not None) -> bool:
        """Forgets a pin without users and views, so that nobody can use it any more; returns whether it has."""
        if pin.users or pin.views:
            return False
        del self.pinned[pin.key]
        return True

    # -- slots -------------------------------------------------------------------------------------------------------

    cpdef object hold_now(self, object nbytes, bint drain, object device=None):  # type: (int, bool, torch.device | None) -> Any
        """Returns a slot for a caller; None if something has to be waited for, or the device slab can't be there.

        Raises:
            CapacityError: so much can never be had.
            CudaError: CUDA failed. The slot is free again.
        """
        if not self.is_usable():
            return None
        slot = self._hold_now(nbytes, drain, device)
        if slot is None and self.hear():  # the engine may have released enough memory
            slot = self._hold_now(nbytes, drain, device)
        return slot

    cdef object _hold_now(self, object nbytes, bint drain, object device):
        cdef ClientSlotRecord record
        if device is not None:
            return self.device_slots.hold_now(nbytes, device, drain)
        record = self.book.acquire_asked(nbytes, True)
        return None if record is None else self.hold(record, drain)

    cpdef object hold(self, ClientSlotRecord record, bint drain):
        """Hands a slot in host memory, which was acquired, to a caller. If that fails, the slot is free again."""
        try:
            return self._hold(record, drain)
        except BaseException:
            self.shell.give_up(record)
            raise

    cdef BaseSlot _hold(self, ClientSlotRecord record, bint drain):
        cdef BaseSlot slot = new_instance(self._slot_type, ())
        slot._record = record
        slot.nbytes = record.nbytes
        slot._drain = drain
        slot._region = self.regions.lend(
            self._mapping.mapped, record.start * BLOCK_NBYTES + SLOT_HEADER_NBYTES, record.nbytes, self._slot_key, <uintptr_t><void*>record
        )
        slot._address = <uint64_t>slot._region.address
        self.held.hold(record, slot._address, record.nbytes)
        slot._end = self  # last: an object that was not handed out has nothing to give back
        return slot

    def hold_lent(self, slot_type: type[BaseSlot], ClientSlotRecord record not None, Region region not None, drain: bool) -> Slot:
        """Hands an acquired slot in device memory to the caller.

        Args:
            slot_type: of the slot.
            record: of the slot.
            region: its bytes; ``device_slots`` leaves it.
            drain: as of :meth:`hold`.
        """
        cdef BaseSlot slot = slot_type(self, record, region.address, drain)
        slot._lent_region = region
        self.held.hold(record, slot._address, record.nbytes)
        return slot

    cdef int _leave(self, BaseSlot slot) except -1:
        cdef Lent* region = slot._region
        cdef bint is_worth_a_warning
        self.held.leave(slot._address)
        slot._region = NULL
        if slot._lent_region is not None:
            slot._lent_region = None
            self.device_slots.leave(slot._record, slot._drain)
            return 0
        if self._writer is None:
            drop_region(region)
            return 0
        is_worth_a_warning = self._debug and is_region_viewed(region)
        if slot._drain and leave_region(region):
            slot._record.viewed = True
            self.shell.slot_is_viewed(slot._record)
        elif not slot._drain:
            drop_region(region)
        effects = self.book.give_slot_up(slot._record, self._time_of(slot._record))
        if slot._record.lease is None:
            self.shell.kept_slot_left(slot._record)
        self._follow(effects)
        if is_worth_a_warning:
            self.shell.warn_of_views(slot._record)
        return 0

    cdef double _time_of(self, ClientSlotRecord slot) except -1:
        """The time of a slot's next event, if the book needs it: reading the clock takes as long as the book's own work."""
        return self._clock() if self.book.is_time_asked_for(slot) else 0.0

    cdef int _follow(self, list effects) except -1:
        """Carries out the effects of a slot that came back."""
        if effects or (not self.expects_expiry and self.book.has_further_leases() and self.book.earliest_expiry() != INFINITY):
            self.shell.carry_out(effects or [])
        return 0

    # -- turns -------------------------------------------------------------------------------------------------------

    cpdef bint begin(self) except -1:
        """Counts one more request as in flight; returns False if the limit is reached, or if other requests wait for their
        turn."""
        if self.crowded or self.in_flight >= self._max_inflight:
            return False
        self.in_flight += 1
        return True

    cpdef int end_flight(self) except -1:
        """A request is in flight no more."""
        self.in_flight -= 1
        if self.crowded:
            self.shell.flight_ended()
        return 0

    def pass_on(self) -> None:
        """For the shell: a request that has waited for its turn is in flight now."""
        self.in_flight += 1

    # -- requests go ---------------------------------------------------------------------------------------------------

    def pack(self, payload, ForEngine for_engine not None = NOTHING_TOLD) -> Packed:
        """Encodes a payload, and changes nothing. Code of the caller may run meanwhile and change something, so the state is
        checked afterwards.

        Args:
            payload: what to send.
            for_engine: what the engine is told beside it.

        Returns:
            The encoded payload for :meth:`send`. Its ``slots`` are the records of the held slots in which its tensors lie.

        Raises:
            TypeError, CapacityError: as :meth:`Packer.pack`.
            ClosedError, EngineDeadError: the session has ended, perhaps meanwhile.
        """
        return self._pack_or_raise(payload, self._inline_nbytes, self.held, for_engine)

    def pack_apart(self, payload) -> Packed:
        """Encodes a payload all of whose tensors are to be copied to one slot; otherwise as :meth:`pack`."""
        return self._pack_or_raise(payload, 0, None, NOTHING_TOLD)

    cdef Packed _pack_or_raise(self, object payload, uint64_t inline_nbytes, HeldSlots held, ForEngine for_engine):
        cdef Packed packed = self._pack(payload, inline_nbytes, held, for_engine)
        if packed is None:
            self.shell.check_alive()
        return packed

    cdef Packed _pack(self, object payload, uint64_t inline_nbytes, HeldSlots held, ForEngine for_engine):
        """Encodes a payload; None: this end may not be used any more. Code of the caller may have run, and ended the
        session."""
        cdef Packed packed = self._packer.pack(payload, inline_nbytes, self._record_nbytes, held)
        packed.choose_way(self.turnover_nbytes, self._cache_nbytes)
        packed.for_engine = for_engine
        return packed if self.is_usable() else None

    cpdef object submit_now(self, object payload, ForEngine for_engine, uint64_t most_nbytes):  # type: (object, ForEngine, int) -> Any
        """Packs and sends a payload, unless that has to wait.

        Args:
            payload: what to send.
            for_engine: what the engine is told beside it.
            most_nbytes: that may be copied now.

        Returns:
            The submission, which counts as in flight. None, and nothing was changed: the payload has to wait for the engine,
            for space, for its turn or for a long copy.

        Raises:
            TypeError, CapacityError: as :meth:`pack`.
        """
        cdef Packed packed
        if not self.is_writable():
            return None
        if self.in_flight >= self._max_inflight and not self.hear():
            return None
        if self.crowded or self.in_flight >= self._max_inflight:
            return None
        packed = self._pack(payload, self._inline_nbytes, self.held, for_engine)
        return None if packed is None else self.submit_packed(packed, most_nbytes)

    cdef object submit_packed(self, Packed packed, uint64_t most_nbytes):
        """Sends a payload that was packed just now; None, and nothing was changed: it has to wait."""
        if not self.is_writable():
            return None
        if packed.slot_nbytes and not self.hear():  # slots released just now are still in the cache
            return None
        if packed.slot_nbytes > most_nbytes or not self.begin():
            return None
        sent = None
        try:
            sent = self.send_now(packed, None)
        finally:
            if sent is None:
                self.end_flight()
        return sent

    def content_address(self, ClientSlotRecord slot not None) -> int:
        """Where a slot's content is in this process."""
        return self._content(slot)

    cdef uint64_t _content(self, ClientSlotRecord slot) except 0:
        return <uint64_t>self._mapping.at(slot.start * BLOCK_NBYTES + SLOT_HEADER_NBYTES, slot.nbytes)

    cpdef object send_now(self, Packed packed, object stream):  # type: (Packed, object) -> Any
        """Copies the tensors that have to be copied, and sends the payload.

        Returns:
            The submission; None if it has to wait for space or for the engine, and nothing was sent.

        Raises:
            CapacityError: so much space can never be had.
        """
        cdef ClientSlotRecord slot = None
        cdef Mapping mapping = self._mapping  # for as long as the copy takes, whatever ends meanwhile
        self.found_full = False
        if packed.slot_nbytes:
            slot = self.book.acquire_slot(packed.slot_nbytes, False)
            if slot is None:
                return None
        sent = None
        try:
            if slot is not None:
                packed.copy_into(self._content(slot))
                self.copied_into_slots += packed.slot_nbytes
            sent = self.send(packed, slot, stream)
        finally:
            if sent is None and slot is not None:
                self.shell.give_up(slot)
        return sent

    cpdef object send(self, Packed packed, ClientSlotRecord slot, object stream):  # type: (Packed, ClientSlotRecord | None, object) -> Any
        """Sends a payload whose tensors have been copied.

        Args:
            packed: from :meth:`pack`.
            slot: the record of the slot that it was copied to, if it needs one.
            stream: that the slots in device memory were written on; None: the current one.

        Returns:
            The submission; None if nothing was sent: the ring is full, a slot of its tensors has changed hands, or the session
            is over.
        """
        cdef SlotNumbers few[_FEW_SUBMITTED]
        cdef Outgoing request = outgoing(SUBMIT, 0)
        cdef BaseSubmission submission
        cdef ClientSlotRecord record
        cdef uint32_t count = <uint32_t>len(packed.slots) + (slot is not None), i = 0
        cdef uint64_t nbytes
        request.epoch, request.slots, request.in_place = self.epoch, few, <uint32_t>len(packed.slots)
        packed.fence = b""
        for record in packed.slots:
            if record.start * BLOCK_NBYTES >= self._slab_nbytes:
                if not self._may_send(packed, most_nbytes(&request, packed)):
                    return None  # before CUDA is asked for anything
                packed.fence = self.device_slots.record_fence(packed.slots, stream)
                break
        submission = new_instance(self._submission_type, ())
        submission._on_gpu = packed.fence != b""
        nbytes = most_nbytes(&request, packed)
        if not self._may_send(packed, nbytes):  # checked last: each call above may have run other code; none below does
            return None
        if count > _FEW_SUBMITTED:
            request.slots = <SlotNumbers*>malloc(count * sizeof(SlotNumbers))
            if request.slots == NULL:
                raise MemoryError
        try:
            for record in packed.slots:
                self._hand_over(record, request.slots + i)
                i += 1
            if slot is not None:
                self._hand_over(slot, request.slots + i)
            request.number = self._next_id = self._next_id + 1
            submission._end = self
            submission.request_id = self._next_id
            submission.name = packed.for_engine.request_id
            self.pending.put(self._next_id, submission)
            # The ring may be full after all: code that has run since may have written to it.
            publish(self._writer, self.shell, &request, packed, nbytes)
            for i in range(count):
                self.slot_nbytes_submitted += request.slots[i].nbytes
        finally:
            if request.slots != few:
                free(request.slots)
        self.submitted += 1
        self.in_place += packed.in_place
        self.in_place_nbytes += packed.in_place_nbytes
        self.copies += packed.copied
        self.copied_nbytes += packed.copied_nbytes
        self.inline_payloads += packed.copied != 0 and not packed.slot_nbytes
        return submission

    cdef bint _may_send(self, Packed packed, uint64_t nbytes) except -1:
        """Whether a payload may be sent now, with a record of so many bytes."""
        cdef ClientSlotRecord record
        if not self.is_writable():
            return False
        for record in packed.slots:
            if not record.is_submittable():
                return False
        try:
            self.found_full = not self._writer.has_room(<uint32_t>nbytes)
        except RemoteProtocolError as error:
            self.shell.link.break_off(error)
            return False
        return not self.found_full

    cdef int _hand_over(self, ClientSlotRecord record, SlotNumbers* numbers) except -1:
        """Makes a slot the engine's, and describes it."""
        numbers.offset = record.start * BLOCK_NBYTES
        numbers.nbytes = record.nbytes
        if record.lease is None:  # the engine keeps it, so it changes no hands
            numbers.lease_id, numbers.generation = KEPT_LEASE_ID, record.generation
            return 0
        numbers.lease_id = record.lease.lease_id
        if numbers.offset >= self._slab_nbytes:  # where there is no header
            numbers.generation = self.device_slots.submit(record)
            return 0
        numbers.generation = self.book.submit_slot(record, self.book)
        if not self._away or self._next_id - self._away_request > self._max_inflight:  # it may be kept there for ever
            self._away, self._away_request = numbers.generation, self._next_id
            self._away_since, self._sent_before = self._received(), self.slot_nbytes_submitted
        put_header(self._mapping.at(numbers.offset, SLOT_HEADER_NBYTES), <const char*>SLOT_MAGIC, numbers)
        return 0

    def hand_over(self, ClientSlotRecord record not None) -> SlotRef:
        """Makes a slot in host memory the engine's, and returns how a message describes it; for the shell."""
        cdef SlotNumbers numbers
        self._hand_over(record, &numbers)
        try:
            return SlotRef(numbers.lease_id, numbers.offset, numbers.nbytes, numbers.generation)
        except MemoryError:
            self.take_back((record.generation,))
            raise

    # -- what comes back -----------------------------------------------------------------------------------------------

    cdef bint handle_hot(self, const uint8_t* record, uint32_t nbytes) except -1:
        """Handles a reply, or the end of a request that is finished."""
        cdef Cursor cursor, released
        cdef Content content
        cdef uint64_t tag, members, request_id = 0, generation = 0, count = 0, i
        if not read_head(&cursor, record, nbytes, &tag, &members):
            return False
        if tag == REPLY:
            content = read_reply(&cursor, members, self._bounds, &request_id)
            self._deliver(request_id, content)
            return True
        if tag != DONE:
            return False
        content = read_done(&cursor, members, self._bounds, &request_id, &released, &count)
        if count:
            for i in range(count):
                read_unsigned(&released, &generation)
                self._release(generation)
            self._follow(self.book.serve())
        if content is not None:
            self._deliver(request_id, content)
        self._finished(request_id)
        return True

    def handle_message(self, bytes record not None, /) -> None:
        """Hands any other message to the shell."""
        self.shell.handle_message(record)

    cdef int _finished(self, uint64_t request_id) except -1:
        cdef BaseSubmission submission = self.forget(request_id)
        if not submission.ended:  # else it was aborted here before its end came
            self.finished += 1
            submission._finish(None)
        return 0

    cpdef int take_back(self, tuple released) except -1:  # type: (tuple[int, ...]) -> None
        """The engine has released the slots of these generations."""
        for generation in released:
            self._release(generation)
        return self._follow(self.book.serve())

    cdef int _release(self, uint64_t generation) except -1:
        """The engine has released a slot."""
        cdef PyObject* slot = self.book._with_engine.find(generation)
        if slot == NULL:  # it is none in host memory
            self.stale_releases += not self.device_slots.release(generation)
        else:
            if generation == self._away:
                # The engine may not have read yet what this end has sent.
                self._came_back(max(self._received() - self._away_since, self.slot_nbytes_submitted - self._sent_before))
            self.book.release_generation(generation, self._time_of(<ClientSlotRecord>slot))
        return 0

    cdef uint64_t _received(self) noexcept:
        return 0 if self._load is None else self._load.received()

    cdef void _came_back(self, uint64_t turnover_nbytes) noexcept:
        """The slot that was followed is back. Slots that return quickly are followed more often, so the largest turnover
        counts, and fades."""
        self._away = 0
        self.turnover_nbytes = max(turnover_nbytes, self.turnover_nbytes - self.turnover_nbytes // _FADES)

    cpdef BaseSubmission forget(self, uint64_t request_id):  # type: Any
        """A request has ended; returns its submission.

        Raises:
            RemoteProtocolError: it is not in flight.
        """
        cdef BaseSubmission submission = self.pending.take(request_id)
        if submission is None:
            raise RemoteProtocolError(f"request {request_id} ended, which is not in flight")
        self.end_flight()
        return submission

    cdef int _deliver(self, uint64_t request_id, Content content) except -1:
        """Keeps a reply for its caller, or gives its slot back if the request was dropped or aborted."""
        cdef BaseSubmission submission = self.pending.get(request_id)
        cdef SlotNumbers* slot
        if submission is None:
            raise RemoteProtocolError(f"a reply came to request {request_id}, which is not in flight")
        if content.inline_nbytes > self._max_reply_inline_nbytes:
            raise RemoteProtocolError(
                f"{content.inline_nbytes} bytes of tensors in a reply exceed inline_nbytes ({self._max_reply_inline_nbytes})"
            )
        if content.payload_nbytes > self._max_payload_nbytes:
            raise RemoteProtocolError(
                f"a reply of {content.payload_nbytes} bytes exceeds max_payload_nbytes ({self._max_payload_nbytes})"
            )
        if content.slot_count:  # one, since a reply names none but that of its copied bytes
            slot = content.slot_numbers
            if slot.offset % BLOCK_NBYTES or slot.offset < self.book.lease_end_nbytes \
                    or slot.offset + SLOT_HEADER_NBYTES + slot.nbytes > self._slab_nbytes:
                raise RemoteProtocolError(f"a reply's slot at {slot.offset} of {slot.nbytes} bytes is not where replies lie")
        self.replies += 1
        if not submission.ended:
            if submission._replies is None:
                submission._replies = deque()
            if len(submission._replies) < MAX_UNREAD_REPLIES:
                copied = None
                if content.slot_count and content.slot_numbers.lease_id == _COPY_OUT:
                    copied = self._copied_out(content)
                submission._replies.append(content if copied is None else copied)
                if content.slot_count and not self._has_unread:
                    self._has_unread = True
                    self.shell.expect_unread()
                return submission._wake()
            self.shell.abort(
                submission,
                CapacityError(
                    f"request {request_id} has {MAX_UNREAD_REPLIES} unread replies; read them, or abort it",
                    needed=MAX_UNREAD_REPLIES + 1,
                    capacity=MAX_UNREAD_REPLIES,
                ),
            )
        if content.slot_count:
            self._release_reply(content.slot_numbers.generation)
        return 0

    cdef CopiedReply _copied_out(self, Content content):
        """Copies a reply out of its slot, and gives the slot back; None: it stays there until it is read.

        So replies that nobody reads keep no space from others. The engine sends few of these to a request before its caller
        reads one (``ReplyRead``).
        """
        cdef SlotNumbers* slot = content.slot_numbers
        cdef CopiedReply copied = CopiedReply.__new__(CopiedReply)
        if not self._is_slot_of(slot):
            return None  # who reads it learns that
        copied.content = content
        copied.regions = regions_of(content, self._reply_key, self.regions, self._mapping)
        copied.regions.is_copied_out = True
        try:
            copied.regions.region(content.slot_count)
        except MemoryError:
            return None  # there may be more when it is read
        self.copied_nbytes += slot.nbytes
        self.reply_copies += 1
        self.reply_copied_nbytes += slot.nbytes
        self._release_reply(slot.generation)
        return copied

    cdef bint _is_slot_of(self, const SlotNumbers* slot) except -1:
        """Whether a reply's slot holds what the engine announced."""
        cdef uint64_t numbers[2]
        return read_header(self._mapping.at(slot.offset, SLOT_HEADER_NBYTES), <const char*>SLOT_MAGIC, &numbers[0], &numbers[1]) \
            and numbers[0] == slot.generation and numbers[1] == slot.nbytes

    @property
    def unread_slots(self) -> int:
        """How many unread replies of requests in flight came in slots."""
        return sum(submission._unread_slots for submission in self.pending.values())

    def dropped(self) -> list:
        """Returns the requests in flight that were dropped, and that have unread replies that came in slots.

        Such a reply may keep its space, for which others may wait, and its request may never end: the engine waits until it is
        read. The shell is called for the first unread reply (``expect_unread``), and again while there are any left. Other
        requests that were dropped go on: perhaps only the engine's work was wanted.
        """
        self._has_unread = self.unread_slots > 0
        if not self._has_unread:
            return []
        self.shell.expect_unread()
        return [lone for lone in self.pending.lone() if lone._unread_slots]

    cdef object _decode_copied(self, CopiedReply reply, PayloadDecoder decoder):
        """Decodes a reply that was copied out of its slot when it came. It is here, also when its engine has gone meanwhile."""
        cdef Content content = reply.content
        cdef uint64_t nbytes = content.payload_nbytes
        if not self.is_usable():
            self.shell.check_readable()
        if nbytes:
            content.check_payload(
                (reply.regions.region(content.slot_count).address + content.payload_offset)[:nbytes], self._bounds
            )
        try:
            return decoder.decode(reply.regions, None)
        except msgspec.ValidationError as error:
            raise _unexpected(error) from error

    def decode_reply(self, Content content not None, PayloadDecoder decoder not None):
        """Decodes a reply. Its slot goes back when its last view dies, or at once if it is copied out only now.

        A reply without a slot came in a message: it is here, also when its engine has gone meanwhile. One with a slot has been
        found to be here.

        Raises:
            RemoteError: it is not of the decoder's type.
            StaleDescriptorError: the reply's slot does not hold what the engine announced.
        """
        cdef ContentRegions regions = None
        cdef SlotNumbers* slot = content.slot_numbers
        cdef bint is_viewed = False
        cdef Mapping mapping = self._mapping
        if not self.is_usable():
            self.shell.check_readable()
        try:
            regions = regions_of(content, self._reply_key, self.regions, mapping)
            regions.is_copied_out = content.slot_count and slot.lease_id == _COPY_OUT
            if content.slot_count:
                if not self._is_slot_of(slot):
                    raise StaleDescriptorError(f"the reply slot at {slot.offset} is not generation {slot.generation}")
                if content.payload_nbytes:
                    content.check_payload(
                        mapping.at(slot.offset + SLOT_HEADER_NBYTES + content.payload_offset, content.payload_nbytes)
                        [:content.payload_nbytes],
                        self._bounds,
                    )
            reply = decoder.decode(regions, None)
            if regions.is_copied_out:
                self.reply_copies += 1
                self.reply_copied_nbytes += slot.nbytes
            else:
                is_viewed = content.slot_count and regions.is_viewed(0)
            return reply
        except msgspec.ValidationError as error:
            raise _unexpected(error) from error
        finally:
            if content.slot_count:
                if regions is not None:
                    regions.leave(0)
                if not is_viewed:
                    self._release_reply(slot.generation)

    cdef int _release_reply(self, uint64_t generation) except -1:
        """Gives the slot of a reply back that has no views."""
        try:
            self.shell.release_replies([generation])
        except MemoryError as error:
            self.shell.link.fail_soon(error)
        return 0


cdef object _unexpected(error):
    return RemoteError("UnexpectedReply", f"the reply is not of reply_type: {error}")
