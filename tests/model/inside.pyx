"""What tests ask of the compiled core that Python does not see: its readers and writers of records, and what it keeps to itself.

Records are read and written by the ends themselves, each with all left out that an end needs for anything else.
"""

from collections import namedtuple

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.math cimport INFINITY
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from shmring.core.compiled cimport (
    CLIENT_SLOT_STATES, ENGINE_SLOT_STATES, LEASE_STATES, Bounds, BaseClaim, ClientBook, ClientEnd, ClientSlotRecord, Content, ContentRegions,
    EngineBook, EngineEnd, BaseFrontend, Lending, Lent, Mapping, Packed, PayloadDecoder, Placement, LinkReader, Poller, RecordHandler, RecordWriter, Regions,
    RunAllocator, SlotNumbers, Submit, TensorMaker, Awaited, BaseSubmission, ForEngine, HeldLease,
)

from shmring.core.compiled import MAX_VALUES, Numbered, ring_nbytes
from shmring.core.geometry import ClientBookLimits
from shmring.core.states import ClientSlot

#: What :func:`read_record` returns of an engine's records.
Reply = namedtuple("Reply", "request_id content")
Done = namedtuple("Done", "request_id released content")

cdef uint64_t _IN_DEVICE_MEMORY = 1 << 30  # blocks: a slot that begins there


cdef Bounds _bounds_of(max_tensors, max_values):
    cdef Bounds bounds
    bounds.tensors, bounds.values = max_tensors, max_values
    return bounds


cdef int _describe(slot, SlotNumbers* numbers) except -1:
    numbers.lease_id, numbers.offset, numbers.nbytes, numbers.generation = slot.lease_id, slot.offset, slot.nbytes, slot.generation
    return 0


class _Shell:
    """The shell of both ends, and their link."""

    def __init__(self, fence=b""):
        self.link, self.fence, self.queued = self, fence, []

    def record_fence(self, slots, stream):
        return self.fence

    def queue(self, record):
        self.queued.append(record)

    def break_off(self, error):
        raise error


# -- what is read ----------------------------------------------------------------------------------------------------------------


cdef class _HearingEngine(EngineEnd):
    """An engine's end that keeps the submission which it is handed."""

    cdef Submit heard

    cdef int _submit(self, BaseFrontend frontend, Submit submit) except -1:
        self.heard = submit
        return 0


cdef class _HearingClient(ClientEnd):
    """A frontend's end that keeps what a record says."""

    cdef list released
    cdef Content content
    cdef object delivered_to
    cdef object finished_request

    cdef int _release(self, uint64_t generation) except -1:
        self.released.append(generation)
        return 0

    cdef int _follow(self, list effects) except -1:
        return 0

    cdef int _deliver(self, uint64_t request_id, Content content) except -1:
        self.delivered_to, self.content = request_id, content
        return 0

    cdef int _finished(self, uint64_t request_id) except -1:
        self.finished_request = request_id
        return 0


def read_record(bytes record not None, max_tensors, max_values=MAX_VALUES, *, bint from_engine):
    """Reads a record as the end that it is for; None: it is another message."""
    cdef _HearingClient client
    cdef _HearingEngine engine
    cdef BaseFrontend frontend
    cdef const uint8_t* data = <const uint8_t*>PyBytes_AS_STRING(record)
    if not from_engine:
        engine = _HearingEngine.__new__(_HearingEngine)
        engine._bounds = _bounds_of(max_tensors, max_values)
        frontend = BaseFrontend.__new__(BaseFrontend)
        frontend.end = engine
        return engine.heard if frontend.handle_hot(data, PyBytes_GET_SIZE(record)) else None
    client = _HearingClient.__new__(_HearingClient)
    client._bounds = _bounds_of(max_tensors, max_values)
    client.book = ClientBook(ClientBookLimits(1, 1 << 20, 4, 4096, 1.0))
    client.released = []
    if not client.handle_hot(data, PyBytes_GET_SIZE(record)):
        return None
    if client.finished_request is None:
        return Reply(client.delivered_to, client.content)
    assert client.delivered_to in (None, client.finished_request)
    return Done(client.finished_request, tuple(client.released), client.content)


def take_payload(Content content not None, bytes payload not None, max_tensors, max_values=MAX_VALUES):
    """Has a content take the payload that lies in its slot."""
    content.check_payload(payload, _bounds_of(max_tensors, max_values))


def open_content(Content content not None, client_id, Regions regions, Mapping mapping):
    """Returns the regions of a content, of which none is viewed yet."""
    cdef ContentRegions opened = ContentRegions.__new__(ContentRegions)
    opened.content, opened.client_id, opened._regions, opened._mapping = content, client_id, regions, mapping
    opened._slots = <Lent**>malloc((content.slot_count + 1) * sizeof(Lent*))
    if opened._slots == NULL:
        raise MemoryError
    memset(opened._slots, 0, (content.slot_count + 1) * sizeof(Lent*))
    return opened


def leave_content(ContentRegions opened not None):
    """Leaves the slots of a content; returns whether each is viewed."""
    cdef uint32_t slot
    return [opened.leave(slot) for slot in range(opened.content.slot_count)]


def decode_content(
    PayloadDecoder decoder not None, Content content not None, client_id, Regions regions, Mapping mapping, Placement placement=None
):
    """Decodes a content, and leaves its slots. Returns the payload, and whether each slot is viewed."""
    opened = open_content(content, client_id, regions, mapping)
    payload = decoder.decode(opened, placement)
    return payload, leave_content(opened)


# -- what is written -------------------------------------------------------------------------------------------------------------


cdef class _SendingClient(ClientEnd):
    """A frontend's end that hands over the slots that it is told."""

    cdef list slots

    cdef int _hand_over(self, ClientSlotRecord record, SlotNumbers* numbers) except -1:
        return _describe(self.slots.pop(0), numbers)


cdef class _SendingEngine(EngineEnd):
    """An engine's end that lends the reply slot that it is told."""

    cdef int _lend_reply(self, BaseClaim claim, slot, SlotNumbers* numbers) except -1:
        return 0 if slot is None else _describe(slot, numbers)


cdef BaseFrontend _frontend(RecordWriter writer):
    cdef BaseFrontend frontend = BaseFrontend.__new__(_Frontend)
    frontend._writer = writer
    frontend.link = _Shell()
    return frontend


class _Frontend(BaseFrontend):
    """One that has a link."""


def write_submit(RecordWriter writer not None, Packed packed not None, epoch, request_id, str name, bytes fence, slots):
    """Writes a submission.

    Args:
        writer: of the ring to the engine.
        packed: whose region 0 has been copied to the last slot, if it needs one.
        epoch, request_id, name: as in the record.
        fence: of slots in device memory, if some are in place.
        slots: ``SlotRef`` of each, those in place first.

    Returns:
        Whether there was room in the ring.
    """
    cdef _SendingClient client = _SendingClient.__new__(_SendingClient)
    cdef ClientSlotRecord copied = ClientSlotRecord.__new__(ClientSlotRecord) if packed.slot_nbytes else None
    cdef ClientSlotRecord record
    client.shell = client.device_slots = _Shell(fence)
    client._writer, client._submission_type, client.pending = writer, BaseSubmission, Numbered()
    client.is_open, client.epoch, client._next_id, client.slots = True, epoch, <uint64_t>request_id - 1, list(slots)
    client._slab_nbytes = 1 << 40
    held, packed.slots = packed.slots, []
    try:
        for _ in range(len(slots) - (copied is not None)):
            record = ClientSlotRecord.__new__(ClientSlotRecord)
            record.held, record.state, record.start = True, ClientSlot.WRITING, _IN_DEVICE_MEMORY if fence else 0
            packed.slots.append(record)
        packed.for_engine = ForEngine(request_id=name)
        return client.send(packed, copied, None) is not None
    finally:
        packed.slots, client.pending = held, None


def write_reply(RecordWriter writer not None, Packed packed not None, request_id, slot):
    """Writes a reply; returns whether there was room in the ring. ``slot``: of region 0, or None."""
    cdef _SendingEngine engine = _SendingEngine.__new__(_SendingEngine)
    cdef BaseClaim claim = BaseClaim.__new__(BaseClaim)
    claim._end, claim._frontend, claim._submit = engine, _frontend(writer), Submit.__new__(Submit)
    claim._submit.request_id = request_id
    return engine.send_reply(claim, packed, slot)


def write_done(RecordWriter writer not None, request_id, released, Packed reply=None, slot=None):
    """Writes the end of a request; returns whether there was room in the ring. ``slot``: of the last reply's region 0, or None."""
    cdef _SendingEngine engine = _SendingEngine.__new__(_SendingEngine)
    cdef SlotNumbers numbers
    frontend = _frontend(writer)
    cdef uint64_t* generations = <uint64_t*>malloc((len(released) + 1) * sizeof(uint64_t))
    if generations == NULL:
        raise MemoryError
    try:
        for i, generation in enumerate(released):
            generations[i] = generation
        if slot is not None:
            _describe(slot, &numbers)
        engine._send_done(frontend, request_id, generations, <uint32_t>len(released), reply, &numbers)
        return not frontend.link.queued
    finally:
        free(generations)


# -- what is kept ----------------------------------------------------------------------------------------------------------------


cdef class ColdTaker(RecordHandler):
    """Takes no record in C, and counts how often it is asked to."""

    cdef readonly int asked

    cdef bint handle_hot(self, const uint8_t* record, uint32_t nbytes) except -1:
        self.asked += 1
        return False


class _Ending:
    """A link that is told of the end of its ring."""

    def ended(self):
        pass


def deliver(LinkReader reader not None, take):
    """Takes what has come, as a link does in its turn, and raises what the link would be told of; returns how many records."""
    reader.attend(Poller(None), _Ending(), take, RecordWriter(bytearray(ring_nbytes(64)), -1), busy_poll_s=0)
    reader.records_left = 64
    return reader._deliver(INFINITY)


def say_awake(LinkReader reader not None):
    """Says that a reader has turns, though nobody gives it any."""
    reader.awake = True


def hear(LinkReader reader not None, RecordHandler taker not None):
    """Takes what has come, as an end does that looks for it between two turns."""
    say_awake(reader)
    return reader.hear(taker)


def hold_reader(LinkReader reader not None):
    """A reader takes nothing, and has no turns, until :func:`let_read`: as if it were another process's, in the middle of a record."""
    reader.is_reading = True
    reader._forks += 1


def let_read(LinkReader reader not None):
    reader.is_reading = False
    reader._forks -= 1


cdef class LinkInPython(LinkReader):
    """A link of a poller; what it does in its turns is written in Python."""

    cdef bint take_turn(self, double now) except -1:
        return self.has_turn(now)

    cdef bint falls_asleep(self, double now, bint at_once, bint others_look) except -1:
        self.awake = not self.may_sleep(now, at_once)
        return not self.awake


cdef class ToldAfterTurns(LinkReader):
    """A reader that says after each turn, and before it may fall asleep, whether it has found something."""

    cdef public object told

    cdef bint take_turn(self, double now) except -1:
        cdef bint found = LinkReader.take_turn(self, now)
        if self.told is not None:
            self.told(found)
        return found


def largest_run(RunAllocator allocator not None):
    """Length of the largest free run; 0 when full."""
    return allocator.largest()


def uses_table(TensorMaker maker not None):
    """Whether tensors are made by the table of C functions that it was given."""
    return maker._to_python != NULL


def slots_with_engine(ClientBook book not None):
    """The slots that the engine has, by generation."""
    return dict(book._with_engine.items())


def slots_here(ClientBook book not None):
    """Those that it does not have."""
    return set(book._here.values())


def counts_of(book):
    """What a book counts as it goes, of what there is: by state, and else."""
    cdef ClientBook client
    cdef Lending lending
    cdef EngineBook engine
    if isinstance(book, ClientBook):
        client = book
        return tuple(client._slots_in), client._recalls, client._draining_blocks, client._base_leases
    if isinstance(book, Lending):
        lending = book
        return tuple(lending._blocks_in), lending._apart_blocks
    engine = book
    return tuple(engine._slots_in), engine._device_slots


def miscount(book, states, *others):
    """Has a book count something else, in the order of :func:`counts_of`."""
    cdef ClientBook client
    cdef Lending lending
    cdef EngineBook engine
    cdef int state
    if isinstance(book, ClientBook):
        client = book
        client._recalls, client._draining_blocks, client._base_leases = others
        for state in range(CLIENT_SLOT_STATES):
            client._slots_in[state] = states[state]
    elif isinstance(book, Lending):
        lending = book
        [lending._apart_blocks] = others
        for state in range(LEASE_STATES):
            lending._blocks_in[state] = states[state]
    else:
        engine = book
        [engine._device_slots] = others
        for state in range(ENGINE_SLOT_STATES):
            engine._slots_in[state] = states[state]


# -- what waits, and what has come -----------------------------------------------------------------------------------------------


def inner_of(awaited):
    """What an awaited operation waits in; None: nothing, or it is none."""
    return (<Awaited>awaited)._inner if isinstance(awaited, Awaited) else None


def has_reply(BaseSubmission submission not None):
    """Whether there is an unread reply, of those that were heard of."""
    return bool(submission._replies)


def has_news(LinkReader reader not None):
    """Whether there are unread records."""
    return reader.has_news()


def takes(ClientBook book not None, HeldLease lease not None, blocks):
    """Whether a slot of so many blocks is put into a lease, if there is room."""
    return book.takes(lease, blocks)


def spans_of(Placement placement not None):
    """The copies of a placement: region, start, end, and target."""
    cdef uint32_t i
    runs = []
    for i in range(placement.run_count):
        runs.append((placement.runs[i].region, placement.runs[i].start, placement.runs[i].end, placement.runs[i].target))
    return runs
