"""The engine's side: its work on every message.

Theory of operation. :class:`EngineEnd` has the book, the requests that wait, and the claims. A record that a frontend has written
comes to its :class:`BaseFrontend`; a submission is checked and booked here, and waits. To claim it, this end checks the headers
of its slots and decodes its payload into views. Leaving the claim releases its slots and finishes the request; one record tells
the frontend of both. All of that is C, calls no event loop, and looks at no clock.

The *shell*, the :class:`~shmring.ring.shell.Shell`, does the work that is rarer: other messages, failures, aborts, replies,
slots in device memory, and waking tasks that wait for a claim. It calls back here and into the book.

Bytes in the slab prove nothing against a frontend, since any process with the slab may have written them: a wrong header, or a
wrong payload in a slot, fails that one request. A wrong record in a frontend's own ring ends its connection.

The cost of claims is bounded in each turn of the loop. The cost of a payload is the sum of what its values count
(``wire.pyx``). When the claimed payloads have cost two milliseconds, no more requests are claimed until the loop has had a
turn. A request is *costly* if its payload costs more than half a millisecond, or lies in a slot. Costly requests wait in a line
of their frontend's own, and those lines are served in turn, one request each. The other requests wait in one line, in order of
arrival, and go first; but after 64 of them, one costly request is claimed. So a frontend with many costly requests delays
itself, and not its neighbours.

A request of this process's own (:meth:`EngineEnd.inject`) has no slots: its payload is a :class:`~shmring.memory.bundles.Bundle`,
whose tensors lie anywhere in this process. It stands in the same lines. Its frontend is *local*: it has no message rings, and is
told of replies and ends by calls.

Invariants: a request is in ``waiting`` or in ``claims`` or has ended; a claim releases its slots once, and ends its request once; a
frontend is in ``_costly``, once, if requests are in its own line.
"""

cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc

from contextvars import Context, copy_context

from shmring.core.dropped import give_back_soon, warn_of
from shmring.core.states import Request, RequestEvent
from shmring.door import check_callable
from shmring.core.messages import COPY_OUT, SlotRef
from shmring.errors import AbortedError, LocalProtocolError, RemoteProtocolError, StaleDescriptorError

cdef enum:
    _FEW_RELEASED = 4
    _FIRST_LISTS = 64  # of claims; a power of two, doubled when there are more claims than that
    _MANY = 64  # released slots in the record of an end; more go in records of their own
    # A value counts at most 40 ns. Copying and checking 128 bytes of text takes as long.
    _TURN_COUNT = 65536   # in a turn: 2 ms, as long as half a thousand small requests take
    _CLAIM_COUNT = 64     # a claim without its payload
    _LIGHT_COUNT = 16384  # 0.5 ms
    _LIGHT_NBYTES = 4096  # a payload in a slot was not counted yet, and may count more
    _NBYTES_SHIFT = 7
    _OVERTAKING = 64      # the most quick requests that go before a costly one: together they take less time than it

cdef int _FINISH = list(RequestEvent).index(RequestEvent.FINISH)
cdef int _RUNNING = list(Request).index(Request.RUNNING)

cdef object _RELEASED = object()


cdef class BaseFrontend(RecordHandler):
    """A frontend: the part that every message needs. ``Frontend`` is a subclass.

    Args:
        end: that it belongs to.
        client_id: in its book.
        is_local: whether it is a part of this process, with no rings. Then the subclass has ``replied(request_id, packed)`` and
            ``finished(request_id, packed or None)``, which are called in place of records.

    Attributes:
        link: sends all other records, and keeps records that find the ring full; the subclass has it.
    """

    cdef readonly EngineEnd end
    cdef readonly uint64_t client_id
    cdef readonly bint is_local
    cdef ClientRecord record
    cdef RecordWriter _writer
    cdef LinkReader _reader
    cdef Line _costly        # the line of its costly requests; None: it had none so far

    def __init__(self, EngineEnd end not None, client_id: int, *, bint is_local=False) -> None:
        self.end = end
        self.client_id = client_id
        self.is_local = is_local

    def attach(self, RecordWriter writer=None, LinkReader reader=None) -> None:
        """Its connection is there.

        Args:
            writer: of the ring to it; None: it is local.
            reader: of the ring from it, which the shell reads; None: this end does not read by itself.
        """
        self.record = self.end.book.client_of(self.client_id)
        self._writer = writer
        self._reader = reader
        if reader is not None:
            self.end._frontends.append(self)

    def detach(self) -> None:
        """Its connection has ended: no more records are written, and its rings need not stay mapped."""
        if self._reader is not None:
            self.end._frontends.remove(self)
        self._writer, self._reader = None, None

    cdef bint handle_hot(self, const uint8_t* record, uint32_t nbytes) except -1:
        """Handles a submission."""
        cdef Cursor cursor
        cdef uint64_t tag, members
        if not read_head(&cursor, record, nbytes, &tag, &members) or tag != SUBMIT:
            return False
        self.end._submit(self, read_submit(&cursor, members, self.end._bounds))
        return True


@cython.final
cdef class Line:
    """Requests that wait, in order of arrival."""

    cdef BaseClaim first
    cdef BaseClaim last

    cdef int append(self, BaseClaim claim) except -1:
        """A request waits, behind the others."""
        claim._before = <PyObject*>self.last
        if self.last is None:
            self.first = claim
        else:
            self.last._after = claim
        self.last = claim
        return 0

    cdef int withdraw(self, BaseClaim claim) except -1:
        """A request waits no more."""
        cdef BaseClaim before = <BaseClaim>claim._before, after = claim._after
        if before is None:
            self.first = after
        else:
            before._after = after
        if after is None:
            self.last = before
        else:
            after._before = <PyObject*>before
        claim._after, claim._before = None, <PyObject*>None
        return 0


@cython.no_gc_clear
@cython.trashcan(True)
cdef class BaseClaim:
    """A request, from its submission to its end. ``Claim`` is a subclass.

    The :class:`EngineEnd` does the work; the subclass has the calls for users.

    Attributes:
        nbytes: of its slots.
        released: whether its slots were released, or will be when their copy to a GPU is over.
        ended: whether nothing more may be sent in answer to it.
        aborted: whether its frontend gave it up, or has gone.
    """

    cdef readonly EngineEnd _end
    cdef readonly Submit _submit
    cdef readonly ContentRegions _regions  # of its content, until it is released
    cdef readonly uint64_t nbytes
    cdef readonly bint released
    cdef readonly bint ended
    cdef readonly bint aborted
    cdef public bint _gave_place_up  # by its handler, while it waited to reply; it has not taken one again
    cdef BaseFrontend _frontend
    cdef RequestRecord _request
    cdef object _payload
    cdef readonly object _bundle  # of a request of this process's own, until it is released; else None
    cdef list _abort_callbacks
    cdef list _end_callbacks
    cdef object __weakref__
    cdef bint _is_in_hands   # it was claimed
    cdef bint _is_known      # its end knows it by these two
    cdef bint _is_costly     # it waits in its frontend's line
    cdef uint64_t _client_id
    cdef uint64_t _request_id
    cdef PyObject* _other    # in the same list of the table
    cdef BaseClaim _after     # the request that waits behind it
    cdef PyObject* _before   # the request that waits before it; Py_None: none

    @property
    def client_id(self) -> int:
        """The frontend, as this engine numbers its connections."""
        return self._frontend.client_id

    @property
    def request_id(self) -> int:
        """The request, as that frontend numbers its submissions."""
        return self._submit.request_id

    @property
    def for_engine(self) -> ForEngine:
        """What its caller has told the engine besides the payload."""
        return self._submit.for_engine

    @property
    def name(self) -> str:
        """The caller's own name for the request; may be empty."""
        return self._submit.for_engine.request_id

    @property
    def payload(self):
        """The payload, its tensors viewed in place. Views taken from it keep their slot after the claim is left.

        Tensors in slots of the device slab are on its GPU, to be used on the stream that was this thread's current one when the
        request was claimed: it waits for what their frontend has queued. A further stream that is to use them must wait for
        it, and it for that stream before the last view is dropped.

        Raises:
            LocalProtocolError: the claim has released it.
            ClosedError: it belongs to the process that forked this one, which does not have its memory.
        """
        if self._end._forks != forks():
            raise self._end.home.closed_error()
        if self._payload is _RELEASED:
            raise LocalProtocolError(
                f"request {self._submit.request_id} was released; keep what you need of its payload before"
            )
        return self._payload

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, error: BaseException | None, traceback) -> bool:
        if error is None:
            self._end.finish(self)
            return False
        self.fail(error)
        return isinstance(error, AbortedError) and self.aborted and error.request_id == self._submit.request_id

    def fail(self, error: BaseException) -> None:
        """For the subclass."""
        raise NotImplementedError

    def on_abort(self, callback: Callable[[], object], *, context: Context | None = None) -> None:
        """Calls back in the loop when the request is aborted; at once if it was.

        Args:
            callback: what to call.
            context: of context variables, in which it is called; None: a copy of the present one.
        """
        if not callable(callback):
            check_callable(callback, "callback")
        if self.aborted:
            callback() if context is None else context.run(callback)
            return
        if self._abort_callbacks is None:
            self._abort_callbacks = []
        self._abort_callbacks.append((callback, copy_context() if context is None else context))

    def __dealloc__(self) -> None:
        if self._is_known:  # so its end is there: nothing clears a claim's references before this
            self._end._unknow(self)

    def __del__(self) -> None:
        if not self._is_in_hands or (self.ended and self.released) or not self._end.is_usable():
            return
        give_back_soon(self._end.shell.home.loop, self._give_back)

    def _give_back(self) -> None:
        """It was dropped, and has not ended since."""
        if not (self.ended and self.released) and self._end.is_usable():
            self.fail(LocalProtocolError("the engine dropped the request without an answer"))
            warn_of(f"request {self._submit.request_id} was dropped before its claim was left; use `with claim:`", self)


cdef list _listed(const uint64_t* numbers, Py_ssize_t count):
    """Returns numbers as a list; not by a comprehension: see ``tests/integration/programs/out_of_memory.py``."""
    cdef list made = [None] * count
    cdef Py_ssize_t place
    for place in range(count):
        made[place] = numbers[place]
    return made


cdef class EngineEnd:
    """The engine's side.

    Args:
        shell: is called for all work that is not done here.
        book: of this engine.
        regions: of its slots.
        mapping: the slab's.
        decoder: of payloads.
        claim_type: a subclass of :class:`BaseClaim`.
        epoch: of this life of the engine.
        max_tensors, max_values: how many tensors may be in a payload, and what its values may count.
        inline_nbytes: of tensors in a record, at most.
        max_payload_nbytes: of a payload, tensors apart.
        load: the page in which frontends read how much is in flight here; None: there is none.
        packer: of replies; None: there are none.
        record_nbytes: of a reply's record, at most.
        copier: gives copies of replies their turns.
        debug: whether to tell the shell of slots that are released while views of them live.

    Attributes:
        on_arrival: called when requests have come that can be claimed; None: tasks wait in line for them. The shell sets it.
        is_open: whether requests may be claimed; the shell sets it.
        is_draining: whether no more requests are claimed, and those in hand go on.
        is_turn_over: whether no request is claimed until the loop has had a turn. Then the shell calls :meth:`begin_turn`.
        submitted, finished, replies, received_nbytes: counted so far.
    """

    cdef readonly object shell  # type: EngineShell
    cdef readonly Home home  # None while the garbage collector takes this end apart: what runs then asks the shell
    cdef int _forks          # of its home
    cdef readonly EngineBook book
    cdef readonly Regions regions
    cdef readonly uint64_t waiting_count
    cdef readonly bint is_turn_over
    cdef int64_t _turn_left  # the cost that may still be claimed in this turn
    cdef Line _line          # of those that wait, and are quick to claim
    cdef list _costly        # frontends with costly requests, in the order of their turns
    cdef uint32_t _overtaken # how many were claimed while costly ones waited
    cdef PyObject** _claims  # waiting requests, and claimed ones that have not ended
    cdef uint64_t _lists     # of them
    cdef uint64_t _known     # claims in them
    cdef dict _claimers      # the places of tasks that wait for a request, in order: until they run, also of those that were woken
    cdef bint _is_awaited    # no task was woken since the last one came, or went
    cdef public object on_arrival  # type: Callable[[], object] | None
    cdef public bint is_open
    cdef readonly bint is_draining
    cdef list _frontends
    cdef readonly uint64_t epoch
    cdef readonly uint64_t submitted
    cdef readonly uint64_t finished
    cdef bint lacks_space    # reply_now() has not sent a reply, since no reply space is free
    cdef Packer _packer
    cdef uint64_t _record_nbytes
    cdef object _copier
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

    def __init__(
        self,
        shell: EngineShell,
        EngineBook book not None,
        Regions regions not None,
        Mapping mapping not None,
        PayloadDecoder decoder not None,
        claim_type: type[BaseClaim],
        *,
        epoch: int,
        max_tensors: int,
        max_values: int,
        inline_nbytes: int,
        max_payload_nbytes: int,
        debug: bool,
        LoadPage load=None,
        Packer packer=None,
        record_nbytes: int = 0,
        copier=None,
    ) -> None:
        self.shell, self.home, self._forks = shell, shell.home, forks()
        self._packer, self._record_nbytes, self._copier = packer, record_nbytes, copier
        self.book = book
        self.regions = regions
        self._mapping = mapping
        self._slab_nbytes = mapping.mapped.nbytes
        self._decoder = decoder
        self._claim_type = claim_type
        self.epoch = epoch
        self._bounds = bounds_of(max_tensors, max_values)
        self._inline_nbytes = inline_nbytes
        self._max_payload_nbytes = max_payload_nbytes
        self._debug = debug
        self._load = load
        self._lists = _FIRST_LISTS
        self._claims = <PyObject**>calloc(self._lists, sizeof(PyObject*))
        if self._claims == NULL:
            raise MemoryError
        self.is_open = True
        self._turn_left = _TURN_COUNT
        self._line = Line()
        self._costly = []
        self._frontends = []
        self._claimers = {}

    def detach(self) -> None:
        """The ring is closed: no request is claimed any more, and the slab need not stay mapped."""
        self._mapping = Mapping(-1, 0)

    cdef bint is_usable(self) noexcept:
        """Whether this may be used in this process."""
        return self.is_open and self._forks == forks()

    cdef bint may_claim(self) noexcept:
        """Whether requests may be claimed in this process."""
        return self.is_usable() and not self.is_draining

    # -- requests come -----------------------------------------------------------------------------------------------

    cdef int hear(self) except -1:
        """Reads the records of all frontends, sooner than the loop would."""
        cdef BaseFrontend frontend
        cdef Py_ssize_t place = 0
        while place < len(self._frontends):  # there may be fewer meanwhile
            frontend = self._frontends[place]
            place += 1
            if frontend._reader is not None and frontend._reader.has_news():
                try:
                    if not frontend._reader.hear(frontend):
                        frontend.link.poll()
                except RemoteProtocolError as error:
                    frontend.link.violated(error)
                except MemoryError as error:
                    frontend.link.failed(error)
        return 0

    cdef int _submit(self, BaseFrontend frontend, Submit submit) except -1:
        cdef Content content = submit.content
        cdef BaseClaim claim
        cdef bint is_on_device = False
        cdef uint32_t i
        if submit.epoch != self.epoch:
            raise RemoteProtocolError(f"request {submit.request_id} is of epoch {submit.epoch:016x}, this is {self.epoch:016x}")
        if content.inline_nbytes > self._inline_nbytes:
            raise RemoteProtocolError(
                f"{content.inline_nbytes} bytes of tensors in a message exceed inline_nbytes ({self._inline_nbytes})"
            )
        if content.payload_nbytes > self._max_payload_nbytes:
            raise RemoteProtocolError(
                f"a payload of {content.payload_nbytes} bytes exceeds max_payload_nbytes ({self._max_payload_nbytes})"
            )
        for i in range(content.slot_count):
            is_on_device = is_on_device or content.slot_numbers[i].offset >= self._slab_nbytes
        if is_on_device and not content.fence:
            raise RemoteProtocolError("a slot in device memory came without the event of who wrote it")
        if content.fence and not is_on_device:
            raise RemoteProtocolError("an event came without a slot in device memory")
        claim = new_instance(self._claim_type, ())
        claim._request = self.book.submit_slots(frontend.record, submit.request_id, content.slot_numbers, content.slot_count)
        claim._end = self
        claim._frontend = frontend
        claim._submit = submit
        claim._client_id, claim._request_id = frontend.client_id, submit.request_id
        claim._is_costly = content.value_count > _LIGHT_COUNT or content.payload_nbytes > _LIGHT_NBYTES
        for i in range(content.slot_count):
            claim.nbytes += content.slot_numbers[i].nbytes
            if content.slot_numbers[i].lease_id == KEPT_LEASE:  # content can be in many requests: the book numbers each use
                content.slot_numbers[i].generation = (<EngineSlotRecord>claim._request.slots[i]).generation
                self.received_nbytes -= content.slot_numbers[i].nbytes
        self.received_nbytes += claim.nbytes
        return self._arrived(claim)

    cdef int _arrived(self, BaseClaim claim) except -1:
        self.submitted += 1
        self._append(claim)
        if self._is_awaited or self.on_arrival is not None:
            self.wake_next()
        return 0

    def inject(self, BaseFrontend frontend not None, request_id: int, ForEngine for_engine not None, bundle: Bundle) -> None:
        """Submits a request of this process's own, behind those that have come.

        Args:
            frontend: a local one.
            request_id: above all of its earlier ones.
            for_engine: what its caller tells this engine.
            bundle: its payload.

        Raises:
            RemoteProtocolError: more than ``max_inflight`` requests, or a payload that breaks a bound of this engine. Nothing was
                submitted.
        """
        cdef BaseClaim claim
        cdef Submit submit
        cdef Content content
        cdef bytes payload = bundle.payload
        if <uint64_t>PyBytes_GET_SIZE(payload) > self._max_payload_nbytes:
            raise RemoteProtocolError(
                f"a payload of {len(payload)} bytes exceeds max_payload_nbytes ({self._max_payload_nbytes})"
            )
        content = Content.__new__(Content)
        content.payload, content.value_count = payload, measure(payload, self._bounds).values
        submit = Submit.__new__(Submit)
        submit.epoch, submit.request_id, submit.for_engine, submit.content = self.epoch, request_id, for_engine, content
        claim = new_instance(self._claim_type, ())
        claim._request = self.book.submit_slots(frontend.record, request_id, content.slot_numbers, 0)
        claim._end, claim._frontend, claim._submit, claim._bundle = self, frontend, submit, bundle
        claim._client_id, claim._request_id = frontend.client_id, request_id
        claim._is_costly = content.value_count > _LIGHT_COUNT
        self._arrived(claim)

    cdef void _publish_load(self) noexcept:
        """Publishes how much is in flight here."""
        if self._load is not None:
            self._load.put(self._known, self.waiting_count, self.received_nbytes)

    cpdef object claim_now(self):  # type: Claim | None
        """Claims the next request; None if there is none, if tasks wait for one, or if the loop must have a turn first."""
        if not self.may_claim() or self._claimers:
            return None
        if not self.waiting_count:
            self.hear()
        return self.claim_next() if self.is_open else None

    cpdef object claim_next(self):  # type: Claim | None
        """Claims the next request that can be claimed; None if none waits, or the turn is over."""
        cdef BaseClaim claim, taken
        while not self.is_turn_over:
            claim = self._next()
            if claim is None:
                break
            self._withdraw(claim)
            taken = self._claim(claim)
            self._charge(claim._submit.content)
            if taken is not None:
                return taken
        return None

    cdef BaseClaim _next(self):
        """The request that is claimed next; None if none waits."""
        cdef BaseFrontend frontend
        if not self._costly:
            return self._line.first
        if self._line.first is not None and self._overtaken < _OVERTAKING:
            self._overtaken += 1
            return self._line.first
        self._overtaken = 0
        frontend = self._costly.pop(0)
        self._costly.append(frontend)
        return frontend._costly.first

    cdef int _charge(self, Content content) except -1:
        """A request was claimed, or could not be claimed: both took time."""
        cdef uint64_t nbytes = max(<uint64_t>PyBytes_GET_SIZE(content.payload), content.payload_nbytes)
        self._turn_left -= _CLAIM_COUNT + content.value_count + (nbytes >> _NBYTES_SHIFT)
        if self._turn_left <= 0:
            self.shell.let_others_run()  # first: a turn that is over for good would be the end of the ring
            self.is_turn_over = True
        return 0

    def begin_turn(self) -> None:
        """The loop has had a turn."""
        if self.is_open:
            self.allow_more()
            self.wake_next()

    cdef void allow_more(self) noexcept:
        """A turn of the loop begins."""
        self._turn_left = _TURN_COUNT
        self.is_turn_over = False

    # -- tasks that wait for a request ---------------------------------------------------------------------------------

    cdef object enter_line(self):
        """A task waits for a request: returns its place, a future that is done when it is woken."""
        place = self.home.loop.create_future()
        self._claimers[place] = None
        self._is_awaited = True
        return place

    cdef int leave_line(self, place) except -1:
        """A task that has waited runs again."""
        del self._claimers[place]
        self._is_awaited = len(self._claimers) != 0
        return 0

    cdef int wake_next(self) except -1:
        """Wakes the first waiting task if a request can be claimed; that task wakes the next."""
        if not self.waiting_count or self.is_turn_over:
            return 0
        if self.on_arrival is not None:
            self.on_arrival()
            return 0
        for place in self._claimers:
            if not place.done():
                place.set_result(None)
                break
        self._is_awaited = False
        return 0

    def wake_all(self, *, bint drains=False) -> None:
        """The ring is closed, or claims nothing more (``drains``): all that wait for a request learn this."""
        self.is_draining = self.is_draining or drains
        for place in self._claimers:
            if not place.done():
                place.set_result(None)

    cdef int _append(self, BaseClaim claim) except -1:
        """A request waits, behind the others."""
        cdef BaseFrontend frontend = claim._frontend
        cdef Line line = self._line
        if claim._is_costly:
            if frontend._costly is None:
                frontend._costly = Line()
            line = frontend._costly
            if line.first is None:
                self._costly.append(frontend)
        self._know(claim)  # from here on, nothing is allocated
        line.append(claim)
        self.waiting_count += 1
        self._publish_load()
        return 0

    cdef int _withdraw(self, BaseClaim claim) except -1:
        """A request waits no more."""
        cdef BaseFrontend frontend = claim._frontend
        if not claim._is_costly:
            self._line.withdraw(claim)
        else:
            frontend._costly.withdraw(claim)
            if frontend._costly.first is None:
                self._costly.remove(frontend)
        self.waiting_count -= 1
        self._unknow(claim)
        return 0

    def forget_waiting(self, client_id: int, request_id: int) -> None:
        """A request has ended that was not claimed."""
        cdef BaseClaim claim = self._find(client_id, request_id)
        if claim is None:
            raise KeyError((client_id, request_id))
        self._withdraw(claim)

    def forget_claim(self, client_id: int, request_id: int):
        """A claimed request has ended; returns its claim, or None if there is none (any more)."""
        cdef BaseClaim claim = self._find(client_id, request_id)
        if claim is not None:
            self._unknow(claim)
        return claim

    # Claims by client and request: a table of lists, without references. A claim that is dropped takes itself out.

    cdef int _know(self, BaseClaim claim) except -1:
        cdef PyObject** place
        if self._known >= self._lists:
            self._spread(2 * self._lists)
        place = self._list_of(claim._client_id, claim._request_id)
        claim._other, place[0] = place[0], <PyObject*>claim
        claim._is_known = True
        self._known += 1
        self._publish_load()
        return 0

    cdef int _spread(self, uint64_t lists) except -1:
        cdef PyObject** former = self._claims
        cdef PyObject** place
        cdef PyObject* claim
        cdef uint64_t i, former_lists = self._lists
        self._claims = <PyObject**>calloc(lists, sizeof(PyObject*))
        if self._claims == NULL:
            self._claims = former  # whose lists become longer
            return 0
        self._lists = lists
        for i in range(former_lists):
            while former[i] != NULL:
                claim = former[i]
                former[i] = (<BaseClaim>claim)._other
                place = self._list_of((<BaseClaim>claim)._client_id, (<BaseClaim>claim)._request_id)
                (<BaseClaim>claim)._other, place[0] = place[0], claim
        free(former)
        return 0

    cdef PyObject** _list_of(self, uint64_t client_id, uint64_t request_id) noexcept:
        return &self._claims[(31 * client_id + request_id) & (self._lists - 1)]

    cdef BaseClaim _find(self, uint64_t client_id, uint64_t request_id):
        cdef PyObject* claim = self._list_of(client_id, request_id)[0]
        while claim != NULL:
            if (<BaseClaim>claim)._request_id == request_id and (<BaseClaim>claim)._client_id == client_id:
                return <BaseClaim>claim
            claim = (<BaseClaim>claim)._other
        return None

    cdef void _unknow(self, BaseClaim claim) noexcept:
        cdef PyObject** place
        if not claim._is_known:
            return
        claim._is_known = False
        self._known -= 1
        place = self._list_of(claim._client_id, claim._request_id)
        while place[0] != <PyObject*>claim:
            place = &(<BaseClaim>place[0])._other
        place[0] = claim._other
        self._publish_load()

    def __dealloc__(self) -> None:
        free(self._claims)

    @property
    def waiting(self) -> dict[tuple[int, int], Any]:
        """Requests that wait, by client and request: the quick ones in order of arrival, then the costly ones of each frontend."""
        cdef BaseClaim claim
        cdef BaseFrontend frontend
        cdef Line line
        waiting = {}
        for line in [self._line, *[frontend._costly for frontend in self._costly]]:
            claim = line.first
            while claim is not None:
                waiting[claim._client_id, claim._request_id] = claim
                claim = claim._after
        return waiting

    @property
    def claims(self) -> dict[tuple[int, int], Any]:
        """Claimed requests that have not ended, by client and request."""
        cdef PyObject* claim
        cdef uint64_t i
        cdef BaseClaim taken
        in_hands = []
        for i in range(self._lists):  # no collection may run here, since it could end a claim; making a tuple can start one
            claim = self._claims[i]
            while claim != NULL:
                if (<BaseClaim>claim)._is_in_hands:
                    in_hands.append(<BaseClaim>claim)
                claim = (<BaseClaim>claim)._other
        claims = {}
        for taken in in_hands:
            claims[taken._client_id, taken._request_id] = taken
        return claims

    @property
    def running_count(self) -> int:
        """Claimed requests that have not ended, and whose claim was not dropped."""
        return self._known - self.waiting_count

    cdef BaseClaim _claim(self, BaseClaim claim):
        cdef Content content = claim._submit.content
        cdef bint is_payload_shared = content.payload_nbytes != 0
        self.book.claim_request(claim._request)
        try:
            claim._regions = regions_of(content, claim._frontend.client_id, self.regions, self._mapping)
            self._check_headers(claim)
            if is_payload_shared:
                content.check_payload(self._payload_in_slot(content), self._bounds)
            placement = None
            if content.fence:
                placement = self.shell.claim_on_device(claim._client_id, claim._submit)
            if claim._bundle is None:
                claim._payload = self._decoder.decode(claim._regions, placement)
            else:
                claim._payload = self.shell.open_bundle(claim._bundle)
            if claim._request.state_number != _RUNNING:  # a hook of the payload's type has read the abort
                raise AbortedError(
                    f"request {claim._submit.request_id} was aborted while it was taken up", request_id=claim._submit.request_id
                )
        except RemoteProtocolError as error:
            self.shell.claim_failed(claim, error, breaks_rules=not is_payload_shared and not claim._frontend.is_local)
            return None
        except Exception as error:
            self.shell.claim_failed(claim, error, breaks_rules=False)
            return None
        self._know(claim)
        claim._is_in_hands = True
        return claim

    cdef bytes _payload_in_slot(self, Content content):
        cdef SlotNumbers* slot = content.slot_numbers + content.slot_count - 1
        return PyBytes_FromStringAndSize(
            self._mapping.at(slot.offset + SLOT_HEADER_NBYTES + content.payload_offset, content.payload_nbytes), content.payload_nbytes
        )

    cdef int _check_headers(self, BaseClaim claim) except -1:
        """Compares the headers in shared memory with the accepted descriptors; each header is read once."""
        cdef SlotNumbers* slot
        cdef uint64_t numbers[2]
        cdef uint32_t i
        for i in range(claim._submit.content.slot_count):
            slot = claim._submit.content.slot_numbers + i
            if slot.offset >= self._slab_nbytes or slot.lease_id == KEPT_LEASE:
                continue  # there are no headers in device memory, and the book knows kept content
            if not read_header(self._mapping.at(slot.offset, SLOT_HEADER_NBYTES), <const char*>SLOT_MAGIC, &numbers[0], &numbers[1]):
                raise StaleDescriptorError(f"at {slot.offset} stands no slot's header, where generation {slot.generation} was to be")
            if numbers[0] != slot.generation or numbers[1] != slot.nbytes:
                raise StaleDescriptorError(
                    f"the slot at {slot.offset} holds generation {numbers[0]} with {numbers[1]} bytes, "
                    f"not generation {slot.generation} with {slot.nbytes}"
                )
        return 0

    # -- what is done with a claim -----------------------------------------------------------------------------------

    def frontend_of(self, BaseClaim claim not None) -> Frontend:
        """Returns the frontend of the request; the frontend may be forgotten here."""
        return claim._frontend

    cpdef int check_running(self, BaseClaim claim) except -1:  # type: (BaseClaim) -> None
        """Raises unless the request can still be answered.

        Raises:
            AbortedError: the frontend gave it up, or has gone.
            LocalProtocolError: it has ended.
        """
        if claim.ended:
            self.shell.refuse(claim)
        return 0

    cpdef object finish(self, BaseClaim claim):  # type: None
        """Releases the slots, and tells the frontend that the request is finished, unless it has ended."""
        if claim.ended:
            self.release(claim)
        else:
            self._finish(claim, None, None)

    def release(self, BaseClaim claim not None, *, copying: bool = False) -> None:
        """Releases the slots; twice is once.

        Args:
            copying: whether a copy of them is under way, which counts as a view.
        """
        cdef uint64_t few[_FEW_RELEASED]
        cdef uint64_t* released = few
        cdef Py_ssize_t count = 0
        cdef list effects
        if claim.released:
            return
        if claim._submit.content.slot_count > _FEW_RELEASED:
            released = <uint64_t*>malloc(claim._submit.content.slot_count * sizeof(uint64_t))
            if released == NULL:
                raise MemoryError
        try:
            effects = self._release(claim, copying, released, &count)
            if count:
                self.shell.send_release(claim._frontend, _listed(released, count))
        except MemoryError as error:
            self.fail_soon(claim, error)
            raise
        finally:
            if released != few:
                free(released)
        if effects:
            self.shell.carry_out(effects)

    def fail_soon(self, BaseClaim claim not None, error: BaseException) -> None:
        """This end has failed in the middle of a request's end or of its release: see :meth:`Link.failed`."""
        if not claim._frontend.is_local:
            claim._frontend.link.fail_soon(error)

    def mark_ended(self, BaseClaim claim not None, *, aborted: bool = False) -> None:
        """No more replies may be sent; the callbacks for this are called soon."""
        ended, on_abort = claim._end_callbacks, claim._abort_callbacks
        claim._abort_callbacks = claim._end_callbacks = None
        claim.ended = True
        claim.aborted = claim.aborted or aborted
        if ended or (on_abort and aborted):
            self.shell.call_soon(ended or [], on_abort or [] if aborted else [])

    def call_on_end(self, BaseClaim claim not None, callback: Callable[[], object]) -> None:
        """Keeps a callback for the request's end, however it ends."""
        if claim._end_callbacks is None:
            claim._end_callbacks = []
        claim._end_callbacks.append(callback)

    def forget_on_end(self, BaseClaim claim not None, callback: Callable[[], object]) -> None:
        """Forgets such a callback, if it was not called yet."""
        if claim._end_callbacks and callback in claim._end_callbacks:
            claim._end_callbacks.remove(callback)

    # -- replies -----------------------------------------------------------------------------------------------------

    cpdef Packed pack_reply(self, BaseClaim claim, object payload):
        """Encodes a reply. The payload's own code may end the request: who sends it looks at that again.

        Raises:
            AbortedError, LocalProtocolError: the request has ended.
            TypeError, CapacityError: the payload can't be sent.
            ClosedError: the ring may not be used here.
        """
        self.check_running(claim)
        if not self.is_usable():
            raise self.home.closed_error()
        return self._packer.pack(payload, self._inline_nbytes, self._record_nbytes)

    cdef bint reply_now(self, BaseClaim claim, Packed reply, bint is_last, bint copies_long) except -1:
        """Sends a reply to another process, if that needs no waiting; returns whether it did.

        Args:
            is_last: whether it finishes the request: see :meth:`finish_with`.
            copies_long: whether its copy may take as long as it takes, and not only what is left of this turn of the loop.
        """
        cdef BaseFrontend frontend = claim._frontend
        cdef bint is_sent = False
        if frontend._writer is None or not frontend._writer.is_writable():
            return False
        if not reply.slot_nbytes:
            return self.finish_with(claim, reply, None) if is_last else self.send_reply(claim, reply, None)
        if not copies_long and reply.slot_nbytes > self._copier.at_once_nbytes:
            return False
        slot = self.book.acquire_reply(claim._client_id, reply.slot_nbytes, claim._request_id)
        self.lacks_space = slot is None
        if slot is None:
            return False
        try:
            self._copier.count_in_turn(reply.slot_nbytes)
            ref = reply_ref(reply, slot)
            reply.copy_into(<uint64_t>self._mapping.at(ref.offset, SLOT_HEADER_NBYTES) + SLOT_HEADER_NBYTES)
            is_sent = self.finish_with(claim, reply, ref) if is_last else self.send_reply(claim, reply, ref)
        finally:
            if not is_sent:
                self.shell.carry_out(self.book.discard_reply(claim._client_id, slot.generation))
        return is_sent

    cdef int _lend_reply(self, BaseClaim claim, slot, SlotNumbers* numbers) except -1:
        """A reply slot is its frontend's from now on."""
        if slot is None:
            return 0
        numbers.lease_id, numbers.offset, numbers.nbytes, numbers.generation = slot.lease_id, slot.offset, slot.nbytes, slot.generation
        put_header(self._mapping.at(numbers.offset, SLOT_HEADER_NBYTES), <const char*>SLOT_MAGIC, numbers)
        self.book.reply_sent(claim._frontend.client_id, slot.generation)
        return 0

    cpdef bint send_reply(self, BaseClaim claim, Packed reply, object slot) except -1:  # type: (BaseClaim, Packed, SlotRef | None) -> bool
        """Sends a reply.

        Args:
            reply: packed, and copied to its slot if it needs one.
            slot: ``SlotRef`` of that, or None.

        Returns:
            Whether it was sent; False: the ring is full.

        Raises:
            AbortedError, LocalProtocolError: the request has ended.
        """
        cdef BaseFrontend frontend = claim._frontend
        cdef SlotNumbers numbers
        cdef Outgoing record = outgoing(REPLY, claim._submit.request_id)
        cdef uint64_t nbytes
        self.check_running(claim)  # code may have run since the caller's check
        if frontend.is_local:
            frontend.replied(record.number, reply)
            self._count_reply(reply)
            return True
        record.slots = &numbers
        nbytes = most_nbytes(&record, reply)
        try:
            if frontend._writer is None or not frontend._writer.is_writable() or not frontend._writer.has_room(<uint32_t>nbytes):
                return False
        except RemoteProtocolError as error:
            frontend.link.break_off(error)
            return False
        self._lend_reply(claim, slot, &numbers)
        publish(frontend._writer, frontend, &record, reply, nbytes)
        self._count_reply(reply)
        return True

    cpdef bint finish_with(self, BaseClaim claim, Packed reply, object slot) except -1:  # type: (BaseClaim, Packed, SlotRef | None) -> bool
        """Sends a last reply, releases the slots and finishes the request, in one record. The caller knows that there is room
        for it.

        Args:
            reply, slot: as of :meth:`send_reply`.

        Returns:
            Whether it was sent; False: the request was aborted while its slots were released.

        Raises:
            AbortedError, LocalProtocolError: the request has ended.
        """
        self.check_running(claim)
        return self._finish(claim, reply, slot)

    cdef int _count_reply(self, Packed reply) noexcept:
        self.replies += 1
        self.reply_copies += reply.copied
        self.reply_copied_nbytes += reply.copied_nbytes
        return 0

    # -- claims end --------------------------------------------------------------------------------------------------

    cdef list _release(self, BaseClaim claim, bint copying, uint64_t* released, Py_ssize_t* count):
        """Releases a claim's slots in the book; those that are viewed drain. ``released``: the generations of which the
        frontend is told."""
        cdef uint8_t few[_FEW_RELEASED]
        cdef uint8_t* viewed = few
        cdef uint32_t slots = claim._submit.content.slot_count, i
        cdef bint is_any_viewed = False
        count[0] = 0
        if claim.released:
            return None
        claim.released = True
        claim._payload = _RELEASED
        claim._bundle = None
        if not slots:
            claim._regions = None
            return None
        if slots > _FEW_RELEASED:
            viewed = <uint8_t*>malloc(slots)
            if viewed == NULL:
                raise MemoryError
        try:
            for i in range(slots):
                viewed[i] = claim._regions is not None and claim._regions.leave(i)  # None: there was no memory for them
                is_any_viewed = is_any_viewed or viewed[i]
            if claim._submit.content.fence:
                for i, drains in enumerate(self.shell.release_on_device(claim._client_id, claim._submit, copying)):
                    viewed[i] = viewed[i] or drains
            if is_any_viewed and self._debug and not copying:
                self.shell.log_drain(claim._submit)
            claim._regions = None  # which keep the slab mapped
            return self.book.release_request(claim._frontend.record, claim._request, viewed, released, count)
        finally:
            if viewed != few:
                free(viewed)

    cdef bint _finish(self, BaseClaim claim, Packed reply, slot) except -1:
        """Releases and finishes a request that has not ended: one record tells its frontend.

        Releasing drops the payload, which may run its code: so this checks afterwards whether the request still runs.
        """
        cdef BaseFrontend frontend = claim._frontend
        cdef SlotNumbers numbers
        cdef bint is_sent = False
        cdef uint64_t few[_FEW_RELEASED]
        cdef uint64_t* released = few
        cdef Py_ssize_t count = 0
        cdef list effects
        if claim._submit.content.slot_count > _FEW_RELEASED:
            released = <uint64_t*>malloc(claim._submit.content.slot_count * sizeof(uint64_t))
            if released == NULL:
                raise MemoryError
        try:
            claim.ended = True
            self._unknow(claim)
            effects = self._release(claim, False, released, &count)
            if count > _MANY or (count and claim._request.state_number != _RUNNING):
                self.shell.send_release(frontend, _listed(released, count))
                count = 0
            if claim._request.state_number == _RUNNING:  # otherwise it was aborted meanwhile, and its frontend knows
                self.book.end_request(frontend.record, claim._request, _FINISH)
                self.finished += 1
                if reply is not None:
                    self._lend_reply(claim, slot, &numbers)
                    self._count_reply(reply)
                self._send_done(frontend, claim._submit.request_id, released, <uint32_t>count, reply, &numbers)
                is_sent = True
        except MemoryError as error:
            self.fail_soon(claim, error)
            raise
        finally:
            if released != few:
                free(released)
        if effects:
            self.shell.carry_out(effects)
        if claim._end_callbacks:
            self.mark_ended(claim)
        claim._abort_callbacks = None
        return is_sent

    cdef int _send_done(
        self, BaseFrontend frontend, uint64_t request_id, uint64_t* released, uint32_t count, Packed reply, SlotNumbers* slot
    ) except -1:
        cdef Outgoing record = outgoing(DONE, request_id)
        if frontend.is_local:
            frontend.finished(request_id, reply)
            return 0
        record.slots, record.released, record.released_count = slot, released, count
        try:
            publish(frontend._writer, frontend, &record, reply, most_nbytes(&record, reply))
        except RemoteProtocolError as error:
            frontend.link.break_off(error)
        return 0


def reply_ref(Packed reply not None, slot: ReplySlot | None) -> SlotRef | None:
    """Returns how a message describes a reply's slot."""
    if slot is None:
        return None
    return SlotRef(COPY_OUT if slot.is_copied_out else 0, slot.start * BLOCK_NBYTES, reply.slot_nbytes, slot.generation)
