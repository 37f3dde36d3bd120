"""The engine's side towards its workers: its work on every message to them, and on every reply.

Theory of operation. A message is packed once. Tensors that lie in slots of claims that are in hand stay there, and the message keeps
those slots as a view would; the others are copied once, into the record or into the memory of broadcasts, which only the engine can
write. Then the record goes to the message ring of each worker in one step. So the order is the same for all, and a message goes
to all workers or to none. Workers that sleep are rung.

This file never waits. If a message finds no memory, no place, or no room in a ring, or takes long to copy, the *shell*
(:mod:`shmring.ring.workers`) puts its sender in line, and calls back here.

A reply for which no gather waits (any more) is counted. A record that can't be true ends that worker's connection. Replies are
read in C, like submissions. An engine that polls busily looks for the replies to its gather before it lets its loop go on, for
a moment at most: a turn of the loop takes longer than workers that poll need to reply.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc

from shmring.errors import (
    CapacityError, LocalProtocolError, RemoteProtocolError, WorkerFailedError, WorkerLostError, WorkersBehindError,
)

cdef enum:
    BROADCAST = 120     # tags of the records that are read and written here and in worker_end
    ANSWER = 32
    WANTS_ANSWER = 1    # flags of a message
    IS_SHARED = 2       # its payload is an array of a claim's payload and the payload beside it



cdef class ClaimedSlots(HeldSlots):
    """The slots of claims that are in hand, for a :class:`Packer`. The table is made when the first tensor of a message is
    looked up.

    If code of the payload claims a request after that, while the message is encoded, its slots are not in the table, and its
    tensors are copied.

    Args:
        end: whose claims.
        address, nbytes: of the slab.
    """

    cdef EngineEnd _end
    cdef uint64_t _address
    cdef uint64_t _nbytes
    cdef BaseClaim _last      # the claim of the last tensor that was found
    cdef bint _is_filled     # the slots of all claims in hand are in HeldSlots' table, by address

    def __init__(self, EngineEnd end not None, address: int, nbytes: int) -> None:
        super().__init__()
        self._end = end
        self._address, self._nbytes = address, nbytes

    cdef bint find(self, uint64_t address, uint64_t nbytes, uint32_t* region, uint64_t* offset, list found) except -1:
        cdef BaseClaim claim
        cdef uint64_t start
        if address - self._address >= self._nbytes:
            return False
        if self._last is not None and self._find_in(self._last, address, nbytes, region, offset, found):
            return True
        if not self._is_filled:
            self._fill()
        if not self._addresses.last_below(address + 1, &start):
            return False
        claim = self._slots[start]
        if not self._find_in(claim, address, nbytes, region, offset, found):
            return False
        self._last = claim
        return True

    cdef int _fill(self) except -1:
        """Writes the addresses of the slots of all claims into the table."""
        cdef BaseClaim claim
        cdef uint64_t start
        cdef uint32_t i
        claims = self._end.claims  # making the dictionary may run the garbage collector, and so a finaliser that sends; nothing below can
        self._is_filled = True
        for claim in claims.values():
            for i in range(0 if claim._regions is None else claim._regions.content.slot_count):
                start = self._address + claim._regions.content.slot_numbers[i].offset + SLOT_HEADER_NBYTES
                if start not in self._slots:  # kept content may be in several claims
                    self._addresses.make_ready()
                    self._addresses.insert(start)
                    self._slots[start] = claim
        return 0

    cdef int look_in(self, BaseClaim claim) except -1:
        """Looks in this claim first. It may be in hand although its request has ended, because its frontend aborted it."""
        self._last = claim
        return 0

    cdef int rest(self) except -1:
        """Keeps no claim alive any longer: a claim that is dropped fails its request, with a warning."""
        self._last = None
        if self._is_filled:
            self._is_filled = False
            self._addresses, self._slots = SortedKeys(), {}
        return 0

    cdef bint _find_in(
        self, BaseClaim claim, uint64_t address, uint64_t nbytes, uint32_t* region, uint64_t* offset, list found
    ) except -1:
        cdef SlotNumbers* slot
        cdef uint64_t start
        cdef uint32_t i, place
        if claim._regions is None:
            return False  # it was released
        for i in range(claim._regions.content.slot_count):
            slot = claim._regions.content.slot_numbers + i
            start = self._address + slot.offset + SLOT_HEADER_NBYTES
            if address < start or address - start > slot.nbytes or nbytes > slot.nbytes - (address - start):
                continue
            slot_of_claim = (claim, i)
            for place in range(<uint32_t>len(found)):
                if found[place] == slot_of_claim:
                    break
            else:
                place = <uint32_t>len(found)
                found.append(slot_of_claim)
            region[0] = place + 1
            offset[0] = address - start
            return True
        return False


cdef class JoinedWorker(RecordHandler):
    """A worker: the part that every reply needs. ``Worker`` of the shell is a subclass.

    Args:
        end: that it belongs to.

    Attributes:
        record: its record, once its connection is there.
    """

    cdef readonly FanOutEnd end
    cdef readonly WorkerRecord record    # None: its connection is not there yet

    def __init__(self, FanOutEnd end not None) -> None:
        self.end = end

    def attach(self, WorkerRecord record not None, LinkReader reader not None) -> None:
        """Its connection is there. The shell reads its ring, too."""
        self.record = record
        record.reader, record.taker = reader, self

    cdef bint handle_hot(self, const uint8_t* record, uint32_t nbytes) except -1:
        return self.end._handle_answer(self.record, record, nbytes)

    def handle_answer(self, bytes record not None) -> bool:
        """Handles a reply of any length; returns False if the record is no reply."""
        return self.end._handle_answer(self.record, <const uint8_t*>PyBytes_AS_STRING(record), <uint64_t>PyBytes_GET_SIZE(record))

@cython.final
@cython.no_gc
cdef class Parcel:
    """A message that is on its way to the rings of workers.

    Attributes:
        packed: its content; None once it was discarded.
        to: ranks of the workers that get it; None: all.
        sequence: its number, once it was published; 0: it was not, or went to nobody.
        is_copied: whether its copies were made.
    """

    cdef readonly Packed packed
    cdef readonly object to  # type: Sequence[int] | None  # ranks; None: all
    cdef readonly uint64_t sequence
    cdef uint32_t flags
    cdef int64_t start
    cdef uint64_t blocks
    cdef readonly bint is_copied
    cdef bint had_memory         # for copied tensors
    cdef uint64_t nbytes         # that it keeps
    cdef SlotNumbers* slots      # in place; and then that of region 0
    cdef Lent** regions          # of those in place
    cdef uint32_t slot_count

    def __cinit__(self) -> None:
        self.start = -1

    def __dealloc__(self) -> None:
        self.drop()
        free(self.slots)

    cdef void drop(self) noexcept:
        """Lets go of its payload and tensors: an error's traceback may keep this object for long."""
        cdef uint32_t i
        if self.regions != NULL:
            for i in range(self.slot_count):
                if self.regions[i] != NULL:
                    drop_region(self.regions[i])
            free(self.regions)
        self.regions, self.slot_count, self.packed = NULL, 0, None

    @property
    def needs_memory(self) -> bool:
        """Whether it waits for memory of broadcasts, or did when it was given up."""
        return self.blocks != 0 and not self.had_memory


cdef class FanOutEnd:
    """See the head of this file.

    Args:
        shell: waits for this end, and is told of workers that break the rules.
        end: of this engine: its claims and its slab.
        book: of its workers.
        packer, decoder: of payloads.
        slab: where it is mapped.
        inline_nbytes: of tensors in a record, at most.
        record_nbytes: of a record, at most.
        at_once_nbytes: copies of no more than this are made at once.
        max_tensors, max_values: how many tensors may be in a payload, and what its values may count.
        look_s: how long it looks for replies before it waits for them. Nothing else runs in the loop meanwhile.

    Attributes:
        is_crowded: whether senders wait, and some of them come first (``shell.is_behind``); the shell sets it.
        is_open: whether messages may be sent; the shell sets it.
        broadcasts, gathered, copied_nbytes, in_place_nbytes, late_answers: counted so far.
    """

    cdef readonly object shell  # type: BroadcastShell
    cdef readonly Home home  # None while the garbage collector takes this end apart: what runs then asks the shell
    cdef int _forks          # of its home
    cdef readonly FanOutBook book
    cdef public bint is_crowded
    cdef public bint is_open
    cdef readonly dict gathers  # type: dict[int, Gathering]  # by number of their message
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
    cdef Looking _looking   # for replies

    def __init__(
        self,
        shell: BroadcastShell,
        EngineEnd end not None,
        FanOutBook book not None,
        Packer packer not None,
        PayloadDecoder decoder not None,
        Mapping slab not None,
        *,
        inline_nbytes: int,
        record_nbytes: int,
        at_once_nbytes: int,
        max_tensors: int,
        max_values: int,
        look_s: float = 0.0,
    ) -> None:
        self.shell, self.home, self._forks = shell, shell.home, forks()
        self.book = book
        self.is_open = True
        self.gathers = {}
        self._end = end
        self._slots = ClaimedSlots(end, slab.address, slab.nbytes)
        self._packer, self._decoder = packer, decoder
        self._slab_nbytes = slab.nbytes
        self._inline_nbytes, self._record_nbytes = inline_nbytes, record_nbytes
        self._at_once_nbytes = at_once_nbytes
        self._bounds = bounds_of(max_tensors, max_values)
        self._look_s = look_s
        self._looking = Looking()

    def reserve(self, Mapping memory not None) -> None:
        """There is memory for broadcasts."""
        self._memory = memory
        self.book.reserve(memory.nbytes // BLOCK_NBYTES)

    def close(self) -> None:
        """No more messages are sent, and no memory need stay mapped."""
        self.is_open = False
        self._memory = None

    # -- sending -----------------------------------------------------------------------------------------------------

    def broadcast(
        self, payload, to: Sequence[int] | None, timeout: float | None, *, BaseClaim claim=None
    ) -> Awaitable[tuple[int, ...]]:
        """Sends a payload to workers when awaited. ``claim``: the claim that is shared; ``payload`` goes beside its payload."""
        cdef Broadcasting sending
        timeout = right_timeout(timeout)
        sending = Broadcasting.__new__(Broadcasting)
        sending.end, sending.payload, sending.to, sending.timeout = self, payload, to, timeout
        sending.claim = claim
        return sending

    def gather(self, payload, to: Sequence[int] | None, timeout: float | None) -> Awaitable[list[Any]]:
        """Sends a payload to workers and waits for their replies when awaited."""
        cdef Gathering gathering
        timeout = right_timeout(timeout)
        gathering = Gathering.__new__(Gathering)
        gathering.end, gathering.payload, gathering.to, gathering.timeout = self, payload, to, timeout
        return gathering

    def send_now(self, payload, to: Sequence[int] | None, *, BaseClaim claim=None) -> tuple[int, ...] | None:
        """Sends a payload if it need not wait. ``claim``: as of :meth:`broadcast`.

        Returns:
            The ranks that it went to; None if it would have to wait.
        """
        cdef Parcel parcel = self._pack(payload, to, 0, claim)
        if self._send_at_once(parcel):
            return self.book.ranks if to is None else to
        self.discard(parcel)
        return None

    def ask_now(self, payload, to: Sequence[int] | None) -> Gathering | None:
        """Sends the message of a :meth:`gather` if only its replies have to be waited for.

        Returns:
            The gathering: call its :meth:`Gathering.look` or :meth:`Gathering.expect`, and in the end :meth:`Gathering.forget`.
            None if the message itself would have to wait.
        """
        cdef Gathering gathering = self.gather(payload, to, None)
        gathering._begun = True
        gathering.payload = None
        gathering.parcel = self._pack(payload, to, WANTS_ANSWER, None)
        if not self._send_at_once(gathering.parcel):
            self.discard(gathering.parcel)
            return None
        if gathering.parcel.sequence:
            gathering._sent()
        else:
            gathering.answers = []
        return gathering

    cdef int _check_open(self) except -1:
        if not self.is_open or self._forks != forks():
            raise self.home.closed_error()
        return 0

    cdef Parcel _pack(self, object payload, object to, uint32_t flags, BaseClaim shared):
        cdef Parcel parcel
        cdef BaseClaim claim
        cdef SlotNumbers* slot
        cdef uint32_t count, place, i
        self._check_open()
        parcel = Parcel.__new__(Parcel)
        parcel.to, parcel.flags = to, flags if shared is None else flags | IS_SHARED
        if to is not None:
            self.book.mask_of(to)
        self._slots.look_in(shared)
        try:
            parcel.packed = self._packer.pack(payload, self._inline_nbytes, self._record_nbytes, self._slots)
        except TypeError as error:
            if shared is None:
                raise
            raise _of_shared(error) from None
        finally:
            self._slots.rest()
        self._check_open()  # code of the caller may have run, and closed this; or left a claim: see below
        found, parcel.packed.slots = parcel.packed.slots, ()  # keeps no claim alive: see HeldSlots
        if parcel.packed.slot_nbytes:
            parcel.blocks = slot_blocks(parcel.packed.slot_nbytes)
            if self._memory is not None and parcel.blocks > self._memory.mapped.nbytes // BLOCK_NBYTES:
                capacity = self._memory.mapped.nbytes - SLOT_HEADER_NBYTES
                raise CapacityError(
                    f"a message that copies {parcel.packed.slot_nbytes} bytes can never fit the memory of broadcasts; "
                    "raise broadcast_nbytes, or send tensors that lie in a claim's slot",
                    needed=parcel.packed.slot_nbytes, capacity=capacity,
                )
        count = <uint32_t>len(found)
        parcel.nbytes = parcel.blocks * BLOCK_NBYTES
        parcel.slots = <SlotNumbers*>malloc((count + 1) * sizeof(SlotNumbers))
        if parcel.slots == NULL:
            raise MemoryError
        if count:
            parcel.regions = <Lent**>malloc(count * sizeof(Lent*))
            if parcel.regions == NULL:
                raise MemoryError
            for place in range(count):
                claim, i = found[place]
                if claim._regions is None:
                    raise LocalProtocolError(
                        f"request {claim.request_id} was released while a message with tensors of it was encoded; share it before"
                    )
                slot = claim._regions.content.slot_numbers + i
                parcel.slots[place] = slot[0]
                parcel.slots[place].lease_id = 0
                parcel.nbytes += slot.nbytes
                parcel.regions[place] = claim._regions.region(i + 1)
                hold_region(parcel.regions[place])
                parcel.slot_count += 1
        return parcel

    def reserve_memory(self, Parcel parcel not None) -> bool:
        """Reserves memory for its copies, if it needs any; False: there is none now."""
        if not parcel.packed.slot_nbytes or parcel.start >= 0:
            return True
        if self._memory is None:
            return True  # there are no workers
        parcel.start = self.book.reserve_blocks(parcel.blocks)
        if parcel.start < 0 and self.book.sweep():
            parcel.start = self.book.reserve_blocks(parcel.blocks)
        parcel.had_memory = parcel.start >= 0
        return parcel.had_memory

    def address_of(self, Parcel parcel not None) -> int:
        """The address for its copies; 0: it has none."""
        if parcel.start < 0:
            return 0
        return <uint64_t>self._memory.at(parcel.start * BLOCK_NBYTES + SLOT_HEADER_NBYTES, parcel.packed.slot_nbytes)

    def copied(self, Parcel parcel not None) -> None:
        """It has been copied."""
        parcel.is_copied = True

    def discard(self, Parcel parcel not None) -> None:
        """It is not sent after all, or was sent. No thread may still be writing to its memory."""
        if parcel.start >= 0:
            self.book.give_blocks(parcel.start, parcel.blocks)
            parcel.start = -1
        if parcel.packed is not None:
            parcel.packed.parts = ()  # it may be kept itself, by a frame of a copy that was cancelled
        parcel.drop()

    def publish(self, Parcel parcel not None) -> bool:
        """Sends a message whose copies were made; False: there is no place, or no room in a ring.

        Raises:
            WorkerLostError: one of its workers is no worker any more.
        """
        if not self._has_room(self._mask(parcel), parcel):
            return False
        self._publish(self._mask(parcel), parcel)  # without workers that have broken the rules
        return True

    cdef uint64_t _mask(self, Parcel parcel) except? 0:
        return self.book.members() if parcel.to is None else self.book.mask_of(parcel.to)

    cdef bint _send_at_once(self, Parcel parcel) except -1:
        cdef Mapping memory = self._memory  # for as long as the copy takes, whatever ends meanwhile
        cdef uint64_t mask
        cdef bint is_sent
        if parcel.packed.slot_nbytes > self._at_once_nbytes or (self.is_crowded and self.shell.is_behind(parcel)):
            return False
        self.book.sweep_oldest()
        mask = self._mask(parcel)
        if not mask:
            return True
        if not self._has_room(mask, parcel):
            return False
        mask = self._mask(parcel)  # without workers that have broken the rules
        if not self.reserve_memory(parcel):
            return False
        if parcel.start < 0:
            self._publish(mask, parcel)
            return True
        try:
            parcel.packed.copy_to(
                <uint8_t*>memory.at(parcel.start * BLOCK_NBYTES + SLOT_HEADER_NBYTES, parcel.packed.slot_nbytes), False
            )
            parcel.is_copied = True
            is_sent = self.publish(parcel)  # checked again: copying a tensor that is not contiguous runs torch's code
        except BaseException:
            self.discard(parcel)
            raise
        if is_sent and parcel.start >= 0:  # no worker is left to get it
            self.discard(parcel)
        return is_sent

    cdef uint64_t _record(self, Parcel parcel) except 0:
        """How long its record is, at most."""
        return FIELDS_NBYTES + parcel.slot_count * <uint64_t>SLOT_NBYTES + parcel.packed.most_nbytes()

    cdef bint _has_room(self, uint64_t mask, Parcel parcel) except -1:
        """Whether there is place for it, and room in every ring. A ring with an impossible count is not asked further."""
        cdef WorkerRecord worker
        cdef uint32_t nbytes = <uint32_t>self._record(parcel)
        if not self.book.has_place(mask):
            self.book.sweep()
            if not self.book.has_place(mask):
                return False
        while mask:
            worker = self.book.at_place(lowest_bit(mask))
            mask &= mask - 1
            try:
                if worker.writer is None:
                    continue
                if not worker.writer.is_writable() or not worker.writer.has_room(nbytes):
                    return False
            except RemoteProtocolError as error:
                self.shell.worker_violated(worker, error)
        return True

    cdef int _publish(self, uint64_t mask, Parcel parcel) except -1:
        """Sends a message for which there is place, and room in every ring. No Python runs between the first record and the
        last."""
        cdef WorkerRecord worker
        cdef RecordWriter writer
        cdef uint64_t left, sequence
        cdef uint32_t nbytes, slots = parcel.slot_count, i
        cdef int stamp
        cdef bint is_told = False
        cdef uint8_t* to
        if not mask:
            return 0
        stamp = self.book.next_stamp()
        nbytes = <uint32_t>self._record(parcel)
        sequence = self.book.next_sequence
        if parcel.start >= 0:
            parcel.slots[slots].lease_id = 0
            parcel.slots[slots].offset = self._slab_nbytes + <uint64_t>parcel.start * BLOCK_NBYTES
            parcel.slots[slots].nbytes = parcel.packed.slot_nbytes
            parcel.slots[slots].generation = sequence
        left = mask
        while left:
            worker = self.book.at_place(lowest_bit(left))
            writer = worker.writer
            to = writer.reserve(nbytes)
            assert to != NULL, "there was room just now"
            to = put_array(to, 5 + parcel.packed.content_members())
            to = put_unsigned(put_unsigned(to, BROADCAST), sequence)
            to = put_unsigned(to, stamp)
            to = put_array(put_unsigned(to, parcel.flags), slots)
            for i in range(slots):
                to = put_slot(to, parcel.slots + i)
            writer.commit(parcel.packed.put_content(to, parcel.slots + slots))
            left &= left - 1
        self.book.publish_to(mask, max(parcel.start, 0), parcel.blocks if parcel.start >= 0 else 0, parcel.nbytes, parcel.regions, slots)
        parcel.sequence, parcel.start = sequence, -1
        parcel.regions, parcel.slot_count = NULL, 0
        if parcel.flags & WANTS_ANSWER:
            self.gathered += 1
        else:
            self.broadcasts += 1
        self.copied_nbytes += parcel.packed.copied_nbytes
        self.in_place_nbytes += parcel.packed.in_place_nbytes
        left = mask
        while left:
            worker = self.book.at_place(lowest_bit(left))
            worker.writer.wake_reader()
            if parcel.flags & WANTS_ANSWER and worker.writer.told and (not is_told or not worker.reader.awake):
                self.shell.expects_replies(worker)
                is_told = True
            left &= left - 1
        if slots:
            self.shell.slots_are_kept()
        if self.is_crowded:
            self.shell.look_again()
        return 0

    # -- replies -----------------------------------------------------------------------------------------------------

    cdef bint _handle_answer(self, WorkerRecord worker, const uint8_t* record, uint64_t nbytes) except -1:
        """A record came from a worker; returns False if it is no reply.

        Raises:
            RemoteProtocolError: it broke the rules.
        """
        cdef Cursor cursor
        cdef uint64_t members, tag, sequence
        cdef Content content
        cdef Gathering gathering
        if not read_head(&cursor, record, nbytes, &tag, &members) or tag != ANSWER:
            return False
        if members != 4 or not read_unsigned(&cursor, &sequence):
            raise RemoteProtocolError("a reply is to no message")
        content = Content.__new__(Content)
        read_content(&cursor, content, members - 2, self._bounds)
        if content.slot_count:
            raise RemoteProtocolError("a worker has no slots to reply from")
        gathering = self._gathering(worker, sequence)
        if gathering is not None:
            try:
                answer = self._decoder.decode(regions_of(content, 0, None, None), None)
            except RemoteProtocolError:
                raise
            except Exception as error:
                gathering._fail(error)
            else:
                gathering._take(worker, answer)
        return True

    def handle_failure(self, WorkerRecord worker not None, sequence: int, type_name: str, message: str) -> None:
        """A worker has no reply to a message.

        Raises:
            RemoteProtocolError: it broke the rules.
        """
        gathering = self._gathering(worker, sequence)
        if gathering is not None:
            gathering._fail(WorkerFailedError(type_name, message, rank=worker.rank))

    cdef Gathering _gathering(self, WorkerRecord worker, uint64_t sequence):
        """Returns the gathering that waits for a worker's reply to a message; None: none does any more."""
        cdef Gathering gathering
        if not sequence or sequence >= self.book.next_sequence:
            raise RemoteProtocolError(f"a reply is to message {sequence}, and there was none")
        gathering = self.gathers.get(sequence)
        if gathering is None or not gathering.expected >> worker.place & 1:
            if gathering is not None:
                raise RemoteProtocolError(f"a worker replied to message {sequence} twice, or did not get it")
            self.late_answers += 1
        return gathering

    def lost(self, WorkerRecord worker not None, reason: str) -> None:
        """No reply will come from a worker any more."""
        cdef Gathering gathering
        for gathering in list(self.gathers.values()):
            if gathering.expected >> worker.place & 1:
                gathering._fail(WorkerLostError(
                    f"worker {worker.rank} {reason} before it replied to message {gathering.parcel.sequence}", ranks=(worker.rank,)
                ))


cdef object _of_shared(object error):
    """Changes the path in an error to the one that the caller knows: a shared claim is packed as a pair of payloads."""
    text = str(error)
    for place, name in (("payload[0]", "payload"), ("payload[1]", "beside")):
        if text.startswith(place):
            return TypeError(name + text[len(place):])
    return error


@cython.final
cdef class Broadcasting(Awaited):  # type: Awaited[tuple[int, ...]]
    """Sends a message to workers."""

    cdef FanOutEnd end
    cdef object payload
    cdef object to
    cdef object timeout
    cdef BaseClaim claim          # the claim that is shared; None: none

    cdef PyObject* happen(self) except NULL:
        payload, claim = self.payload, self.claim
        self.payload = self.claim = None  # whatever follows: a task keeps this object for as long as somebody has its error
        cdef Parcel parcel = self.end._pack(payload, self.to, 0, claim)
        if self.end._send_at_once(parcel):
            return self.came(None)
        return self.wait_in(self.end.shell.send_in_turn(parcel, self.timeout))

    cdef PyObject* came(self, object result) except NULL:
        return owned(self.end.book.ranks if self.to is None else self.to)


@cython.final
cdef class Gathering(Awaited):  # type: Awaited[list[Any]]
    """Sends a message to workers and waits for their replies."""

    cdef FanOutEnd end
    cdef object payload
    cdef object to
    cdef object timeout
    cdef Parcel parcel
    cdef object future
    cdef object timer
    cdef readonly uint64_t expected   # places of the workers that have not replied
    cdef list answers                 # in order of rank
    cdef uint8_t _orders[MAX_WORKERS] # by place, where in that a reply goes
    cdef object _error                # why a reply will not come; None: all may come

    cdef PyObject* happen(self) except NULL:
        payload, self.payload = self.payload, None
        self.parcel = self.end._pack(payload, self.to, WANTS_ANSWER, None)
        if not self.end._send_at_once(self.parcel):
            return self.wait_in(self.end.shell.gather_in_turn(self, self.parcel, self.timeout))
        if not self.parcel.sequence:
            return owned([])
        self._sent()
        if self.end._looking.begins(self.end._look_s):
            self._look()
            if self._error is not None or not self.expected:
                error = self._error
                self.forget()
                if error is not None:
                    raise error
                return owned(self.answers)
        loop = self.end.home.loop
        self.future = loop.create_future()
        if self.timeout is not None:
            self.timer = loop.call_later(self.timeout, self.time_out)
        return self.wait_in(self.future)

    def sent(self, future: asyncio.Future[None], timer: asyncio.TimerHandle | None) -> None:
        """For the shell: the message was sent, and the shell waits for this future. ``timer``: ends the wait; may be None."""
        self.future, self.timer = future, timer
        if self.parcel.sequence:
            self._sent()
        else:
            self.answers = []
            future.set_result(None)

    # -- for a thread that waits itself; see FanOutEnd.ask_now -------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether all workers have replied, or one will not."""
        return self._error is not None or not self.expected

    def look(self, seconds: float) -> None:
        """Reads replies as they come, for so many seconds, or for a moment if that is longer and has helped before."""
        cdef FanOutBook book = self.end.book
        cdef Looking looking = self.end._looking
        cdef uint64_t left = self.expected
        cdef double duration = max(<double>seconds, looking.moment())
        cdef WorkerRecord worker
        cdef list roused
        if self.is_over:
            return
        if looking.begins(duration):
            roused = []
            while left:
                worker = book.at_place(lowest_bit(left))
                left &= left - 1
                if worker is not None and worker.reader is not None:
                    worker.reader.stay_awake()
                    worker.reader.is_roused = True
                    worker.reader.records_left = max(worker.reader.records_left, 1)  # the awaited reply
                    roused.append(worker)
            try:
                self._look()
            finally:
                for worker in roused:
                    self._let_sleep(worker)
        looking.has_looked(self.is_over)

    cdef int _let_sleep(self, WorkerRecord worker) except -1:
        """The worker rings again, if no other call looks into its ring."""
        cdef LinkReader reader = worker.reader
        if reader is None:
            return 0  # its connection has ended
        reader.is_roused = False
        if not reader.awake and not reader.fall_asleep():
            self.end.shell.expects_replies(worker)  # it has published a record just now: its link gets turns again
        return 0

    def expect(self, future: Any, timeout: float | None, timer: asyncio.TimerHandle | None) -> None:
        """Sets this future, or an object like one, when the gathering is over. ``timer``: see :meth:`time_out`; may be None."""
        self.future, self.timeout, self.timer = future, timeout, timer

    def result(self) -> list[Any]:
        """Returns the replies, in order of rank. Raises the error if one of them will not come."""
        if self._error is not None:
            raise self._error
        return self.answers

    cdef int _sent(self) except -1:
        cdef FanOutBook book = self.end.book
        cdef WorkerRecord worker
        cdef uint8_t order = 0
        ranks = book.ranks if self.to is None else sorted(set(self.to))
        for rank in ranks:
            worker = <WorkerRecord?>book.member(rank)
            self._orders[worker.place] = order
            self.expected |= <uint64_t>1 << worker.place
            order += 1
        self.answers = [None] * order
        self.end.gathers[self.parcel.sequence] = self
        return 0

    cdef int _look(self) except -1:
        """Reads replies as they come, for a moment; lets other processes run whenever there is none."""
        cdef FanOutEnd end = self.end
        cdef FanOutBook book = end.book
        cdef WorkerRecord worker
        cdef Looking looking = end._looking
        cdef uint64_t left
        cdef bint is_news, goes_on
        while True:
            left, is_news = self.expected, False
            while left and self._error is None:
                worker = book.at_place(lowest_bit(left))
                left &= left - 1
                if worker is None or worker.reader is None or not worker.reader.has_news():
                    continue
                is_news = True
                if not worker.reader.records_left:
                    return 0  # its link has used up its share of this turn
                try:
                    if not worker.reader.hear(worker.taker):
                        return 0  # the poller does that
                except RemoteProtocolError as error:
                    end.shell.worker_violated(worker, error)
            if not self.expected or self._error is not None:
                return 0
            if not is_news:
                with nogil:
                    goes_on = looking.goes_on()
                if not goes_on:
                    return 0

    cdef int _take(self, WorkerRecord worker, object answer) except -1:
        """A reply came."""
        self.answers[self._orders[worker.place]] = answer
        self.expected &= ~(<uint64_t>1 << worker.place)
        return 0 if self.expected else self._end()

    cdef int _fail(self, object error) except -1:
        """A reply will not come."""
        if self._error is None:
            self._error = error
            self._end()
        return 0

    cdef int _end(self) except -1:
        if self.future is not None and not self.future.done():
            if self._error is None:
                self.future.set_result(None)
            else:
                self.future.set_exception(self._error)
        return 0

    def missing(self) -> tuple[int, ...]:
        """Ranks of the workers that have not replied."""
        return self.end.book.ranks_of(self.expected)

    def time_out(self) -> None:
        """The time is over."""
        if self.future.done():
            return  # in this turn of the loop; workers that have not replied may be gone
        ranks = self.missing()
        self._fail(WorkersBehindError(
            f"waited {self.timeout:g} s for the replies of workers {', '.join(map(str, ranks))}, which have the message, and gave up",
            ranks=ranks, sent=True,
        ))

    cdef PyObject* came(self, object result) except NULL:
        self.forget()
        return owned(self.answers)

    cdef int gave_up(self, type kind) except -1:
        self.forget()
        return 0

    cdef int check_loop(self) except -1:
        self.end.home.check_loop()
        return 0

    def forget(self) -> None:
        """The caller no longer waits."""
        if self.parcel is not None:
            self.end.gathers.pop(self.parcel.sequence, None)
        if self.timer is not None:
            self.timer.cancel()
        self.timer = self.future = self._error = None


may_be_awaited(Broadcasting)
may_be_awaited(Gathering)
