"""Records: the bytes of the messages that every request sends, and the checks of received bytes.

Theory of operation. A record is one msgpack array whose first member is its tag. The records of the hot path are read and written
here, in C: submissions, replies, and the ends of requests that are finished. The rest are msgspec structs of :mod:`.messages`. A payload stands in its
record as it is, any msgpack value, in which a tensor is an extension that says where its bytes are, of which dtype and shape. So
any msgpack reader shows what lies in a ring, and ``docs/protocol.md`` is enough to write another end.

*Region 0* has the bytes of all tensors that were copied: it stands in the record, or is a slot that the record names. A tensor
that lies in a slot of its sender already is in region ``n``, the ``n``-th of the record's other slots.

A reader has its own copy of a record's bytes: checked bytes can't change afterwards. Everything is checked before any of it is
used: each length against the bytes that are left, each tensor against its region, the number of tensors, how deeply a payload
is nested, what its values count, and that nothing follows. The checks are not recursive, and no product overflows. A wrong
record raises :class:`~shmring.errors.RemoteProtocolError`. The engine's book checks whether the slots belong to the sender.

The cost of a value. The number of bytes is no price: sixteen million empty arrays fit into 16 MiB, and make a gigabyte of
objects. So the values of a payload are counted, by the time to check, decode and free them. The table was measured with as many
of each value as the default of 524,288 allows, on a busy machine (2.6 GHz), with the garbage collector paused, as it is then
(``received.pyx``):

===================================  =======  ==============  =========  ================
value                                counts   nanoseconds     bytes      the most of them
===================================  =======  ==============  =========  ================
a number, a truth value, nil         1        20 to 57        40         524,288: 30 ms
text, bytes                          4        25 to 125       60 + n     131,072: 16 ms
an array                             4        70 to 115       64         131,072: 15 ms
a map, without its members           4        20 to 100       64 to 232  131,072: 6 ms
an extension (tensors: max_tensors)  8        40 to 220       100        65,536: 14 ms
8 bytes of text that is not ASCII    1        3 to 40         8 to 32    4 MiB: 3 to 20 ms
a key, beside its text               0        170 in a large  16         104,856: 18 ms
a key of n that is no text           n / 128  at most n / 10             8,000: 6 ms
===================================  =======  ==============  =========  ================

So a count of 1 means at most 40 nanoseconds, on a machine that is not busy, and 40 bytes. A key that is not text costs more: a
sender can choose numbers with equal hashes, and then each of n keys is compared with all others: 100,000 took 2.6 s.

A payload that is too long for a record lies in the slot of the copied bytes, behind them. Other processes may still write
there, so it is copied out when the request is claimed, and checked then.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport UINT32_MAX, UINT64_MAX, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from shmring.config import RingConfig
from shmring.core.messages import MAX_LISTED as _MAX_LISTED
from shmring.core.messages import TENSOR_EXTENSION as _TENSOR_EXTENSION
from shmring.core.messages import TORCH_ITEM_NBYTES, SlotRef, TensorRef, item_nbytes
from shmring.errors import CapacityError, RemoteProtocolError

cdef enum:
    SUBMIT = 2                # the tags of the records that are read and written here
    REPLY = 103
    DONE = 104
    SLOT_EXTENSION = 82
    TENSOR_EXTENSION = 83
    SLOT_EXTENSION_NBYTES = 32
    TENSOR_HEAD_NBYTES = 20   # of a tensor extension, before its shape
    MAX_DIMENSIONS = 64       # numpy and torch both stop there
    MAX_SPELLING_NBYTES = 64

assert _TENSOR_EXTENSION == TENSOR_EXTENSION


cdef struct Bounds:           # of a payload
    uint32_t tensors
    uint64_t values           # what its values count: see wire.pyx


cdef struct SlotNumbers:
    uint64_t lease_id
    uint64_t offset
    uint64_t nbytes
    uint64_t generation


cdef struct TensorNumbers:
    uint64_t offset
    uint64_t nbytes
    uint32_t region
    uint8_t dtype             # as in DTYPES; 0: spelled
    uint8_t ndim
    const uint8_t* shape      # ndim little-endian u64
    const uint8_t* spelling
    uint32_t spelling_nbytes


#: torch's dtypes by their number on the wire, from 1 on; 0 stands for a dtype of numpy's, which is spelled out.
DTYPES: tuple[str | None, ...] = (None, *TORCH_ITEM_NBYTES)

#: What the values of a payload may count where nobody says otherwise.
MAX_VALUES: int = RingConfig.max_values

cpdef enum:
    MAX_DEPTH = 256  # of a payload: more than any real payload has, and less than Python's own decoders can follow

#: No number of a descriptor is larger, so that sums of two of them can't overflow.
cdef uint64_t _MAX_NUMBER = <uint64_t>1 << 62

cdef uint64_t MAX_LISTED = _MAX_LISTED

#: What a value counts, by its kind (see above).
cdef uint8_t _COUNTS[9]
for _kind, _count in ((NIL, 1), (UNSIGNED, 1), (OTHER, 1), (TEXT, 4), (BINARY, 4), (ARRAY, 4), (MAP, 4), (EXTENSION, 8)):
    _COUNTS[<int>_kind] = _count

cdef enum:
    _PAIRS_SHIFT = 7   # a key that is no text counts a 128th of its map's pairs
    _TEXT_SHIFT = 3    # text that is not ASCII counts an eighth of its bytes
    _SHORT_TEXT_NBYTES = 16  # which its four cover

cdef uint8_t _ITEM_NBYTES[64]
cdef int _DTYPE_COUNT = len(DTYPES)
for _code, _name in enumerate(DTYPES):
    _ITEM_NBYTES[_code] = 0 if _name is None else TORCH_ITEM_NBYTES[_name]

cdef dict _spelled_nbytes = {}  # item sizes by numpy's spellings that came; bounded, since peers send them


cdef int _spelled_item_nbytes(const uint8_t* spelling, uint32_t nbytes) except -1:
    """Item size of a dtype that is spelled out; 0: unknown."""
    cdef bytes spelled = PyBytes_FromStringAndSize(<const char*>spelling, nbytes)
    size = _spelled_nbytes.get(spelled)
    if size is None:
        text = spelled.decode("ascii", "replace")
        size = 0 if text in TORCH_ITEM_NBYTES else item_nbytes(text) or 0  # those have numbers
        if len(_spelled_nbytes) >= 1024:
            _spelled_nbytes.clear()
        _spelled_nbytes[spelled] = size
    return size


cdef bint read_tensor(const uint8_t* data, uint64_t nbytes, TensorNumbers* tensor) noexcept nogil:
    """Finds the parts of a tensor extension; returns False if they are not as long as it is."""
    cdef uint64_t shape_nbytes
    if nbytes < TENSOR_HEAD_NBYTES:
        return False
    tensor.region = <uint32_t>read_little_endian(data, 2)
    tensor.dtype = data[2]
    tensor.ndim = data[3]
    tensor.offset = read_little_endian(data + 4, 8)
    tensor.nbytes = read_little_endian(data + 12, 8)
    shape_nbytes = 8 * <uint64_t>tensor.ndim
    if tensor.ndim > MAX_DIMENSIONS or nbytes < TENSOR_HEAD_NBYTES + shape_nbytes:
        return False
    tensor.shape = data + TENSOR_HEAD_NBYTES
    tensor.spelling = tensor.shape + shape_nbytes
    nbytes -= TENSOR_HEAD_NBYTES + shape_nbytes
    tensor.spelling_nbytes = <uint32_t>nbytes
    return nbytes <= MAX_SPELLING_NBYTES and (nbytes == 0) == (tensor.dtype != 0)


cdef uint8_t* put_tensor(
    uint8_t* to, uint32_t region, uint64_t offset, uint64_t nbytes, uint8_t dtype, int ndim, const int64_t* shape
) noexcept nogil:
    """Writes the content of a tensor's extension, but for a dtype that is spelled; returns where it ends."""
    cdef int i
    to = put_little_endian(to, region, 2)
    to[0] = dtype
    to[1] = <uint8_t>ndim
    to = put_little_endian(to + 2, offset, 8)
    to = put_little_endian(to, nbytes, 8)
    for i in range(ndim):
        to = put_little_endian(to, <uint64_t>shape[i], 8)
    return to


cdef bytes tensor_extension(
    uint32_t region, uint64_t offset, uint64_t nbytes, uint8_t dtype, bytes spelling, int ndim, const int64_t* shape
):
    """Returns the content of a tensor's extension."""
    cdef Py_ssize_t spelling_nbytes = PyBytes_GET_SIZE(spelling)
    cdef bytes data = PyBytes_FromStringAndSize(NULL, TENSOR_HEAD_NBYTES + 8 * ndim + spelling_nbytes)
    cdef uint8_t* to = put_tensor(<uint8_t*>PyBytes_AS_STRING(data), region, offset, nbytes, dtype, ndim, shape)
    memcpy(to, PyBytes_AS_STRING(spelling), spelling_nbytes)
    return data


cdef object _tensor_ref(TensorNumbers* tensor, uint32_t region):
    cdef int i
    shape = tuple([read_little_endian(tensor.shape + 8 * i, 8) for i in range(tensor.ndim)])
    if tensor.dtype:
        dtype = DTYPES[tensor.dtype] if tensor.dtype < _DTYPE_COUNT else f"number {tensor.dtype}"
    else:
        dtype = PyBytes_FromStringAndSize(<const char*>tensor.spelling, tensor.spelling_nbytes).decode("ascii", "replace")
    return TensorRef(region, tensor.offset, tensor.nbytes, dtype, shape)


cdef object tensor_ref(TensorNumbers* tensor, Content content):
    """A tensor as ``TensorRef``: ``region`` 0 is inline, ``n`` is ``content.slots[n - 1]``."""
    return _tensor_ref(tensor, content.slot_of(tensor.region))


def tensor_of(data: bytes) -> TensorRef:
    """Returns the tensor that an extension stands for, of which all is checked but that it lies inside of its region.

    Raises:
        RemoteProtocolError: it is no such extension, or its dtype, shape and size do not agree.
    """
    cdef TensorNumbers tensor
    if not read_tensor(<const uint8_t*>PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data), &tensor):
        raise RemoteProtocolError("a tensor's extension is not as long as it says")
    check_tensor(&tensor, UINT64_MAX)
    return _tensor_ref(&tensor, tensor.region)


cdef int check_tensor(TensorNumbers* tensor, uint64_t region_nbytes) except -1:
    """Raises unless dtype, shape and size agree and lie inside a region of so many bytes."""
    cdef uint64_t item, nbytes, bound, extent
    cdef int i
    if tensor.dtype:
        item = _ITEM_NBYTES[tensor.dtype] if tensor.dtype < _DTYPE_COUNT else 0
    else:
        item = _spelled_item_nbytes(tensor.spelling, tensor.spelling_nbytes)
    if not item:
        raise RemoteProtocolError(f"a tensor has the unknown dtype {_tensor_ref(tensor, 0).dtype!r}")
    nbytes = bound = item
    for i in range(tensor.ndim):
        extent = read_little_endian(tensor.shape + 8 * i, 8)
        # Checked without the extents that are 0, which would hide the others: no view of such a shape can be made.
        if multiply_overflows(bound, extent or 1, &bound) or bound >= _MAX_NUMBER:
            raise RemoteProtocolError(f"a tensor of shape {_tensor_ref(tensor, 0).shape} is larger than any memory")
        nbytes *= extent
    if nbytes != tensor.nbytes:
        ref = _tensor_ref(tensor, 0)
        raise RemoteProtocolError(f"a {ref.dtype} tensor of shape {ref.shape} does not have {ref.nbytes} bytes")
    if tensor.dtype and tensor.offset % item:
        raise RemoteProtocolError(
            f"a {_tensor_ref(tensor, 0).dtype} tensor at offset {tensor.offset} is not aligned to its items"
        )
    if nbytes and (tensor.offset > region_nbytes or nbytes > region_nbytes - tensor.offset):
        raise RemoteProtocolError(
            f"a tensor at [{tensor.offset}, {tensor.offset + nbytes}) exceeds its region of {region_nbytes} bytes"
        )
    return 0


cdef bint _is_ascii(const uint8_t* data, uint64_t nbytes) noexcept nogil:
    cdef uint64_t eight, seen = 0
    cdef const uint8_t* end = data + nbytes
    while data + 8 <= end:
        memcpy(&eight, data, 8)
        seen |= eight
        data += 8
    while data < end:
        seen |= data[0]
        data += 1
    return not seen & <uint64_t>0x8080808080808080


cdef int walk(Cursor* cursor, Content content, Bounds bounds, Bounds* found) except -1:
    """Checks one payload: that it is whole and not nested too deeply, and each tensor in it. The cursor is behind it then.

    Args:
        cursor: at the payload.
        content: whose regions its tensors are in; None: only the nesting is checked.
        bounds: the most tensors, and the most that its values may count.
        found: set to how many there are.
    """
    cdef uint64_t left[MAX_DEPTH]  # members that are still to come, at each depth
    cdef uint64_t key_counts[MAX_DEPTH]  # what a key that is not text counts there
    cdef uint64_t values = 0
    cdef int depth = 0
    cdef Value value
    cdef TensorNumbers tensor
    cdef Kind kind
    found.tensors = 0
    left[0] = 1
    key_counts[0] = 0
    while True:
        while not left[depth]:
            if not depth:
                found.values = values
                return 0
            depth -= 1
        left[depth] -= 1
        kind = read_value(cursor, &value)
        if kind == TRUNCATED:
            raise RemoteProtocolError("a payload is not msgpack, or is cut off")
        values += _COUNTS[<int>kind]
        if kind == TEXT:
            if value.nbytes > _SHORT_TEXT_NBYTES and not _is_ascii(value.data, value.nbytes):
                values += value.nbytes >> _TEXT_SHIFT
        elif left[depth] & 1:  # a key of a map: its value is to come
            values += key_counts[depth]
        if values > bounds.values:
            raise RemoteProtocolError(f"the values of a payload count more than max_values ({bounds.values})")
        if kind == ARRAY or kind == MAP:
            if value.number > <uint64_t>(cursor.end - cursor.at) >> (kind == MAP):
                raise RemoteProtocolError("a payload is not msgpack, or is cut off")
            if not value.number:
                continue
            depth += 1
            if depth == MAX_DEPTH:
                raise RemoteProtocolError(f"a payload is nested more than {MAX_DEPTH} deep")
            left[depth] = value.number << (kind == MAP)
            key_counts[depth] = value.number >> _PAIRS_SHIFT if kind == MAP else 0
        elif kind == EXTENSION and value.type == TENSOR_EXTENSION:
            found.tensors += 1
            if found.tensors > bounds.tensors:
                raise RemoteProtocolError(f"a payload holds more tensors than max_tensors ({bounds.tensors})")
            if not read_tensor(value.data, value.nbytes, &tensor):
                raise RemoteProtocolError("a tensor's extension is not as long as it says")
            if content is None:
                continue
            if tensor.region > content.slot_count - content.is_copied_to_slot:
                raise RemoteProtocolError(
                    f"a tensor is in region {tensor.region} of {content.slot_count - content.is_copied_to_slot}"
                )
            check_tensor(&tensor, content.region_nbytes(tensor.region))


cdef Bounds bounds_of(max_tensors, max_values) except *:
    """Both bounds of a payload."""
    cdef Bounds bounds
    bounds.tensors, bounds.values = max_tensors, max_values
    return bounds


cdef Bounds measure(bytes payload, Bounds bounds) except *:
    """Returns how many tensors a payload holds and what its values count. Raises as :func:`check_payload`."""
    cdef Cursor cursor
    cdef Bounds found
    cursor.at = <const uint8_t*>PyBytes_AS_STRING(payload)
    cursor.end = cursor.at + PyBytes_GET_SIZE(payload)
    walk(&cursor, None, bounds, &found)
    if cursor.at != cursor.end:
        raise RemoteProtocolError("something follows a payload")
    return found


def check_payload(payload: bytes, max_tensors: int, max_values: int = MAX_VALUES) -> int:
    """Returns how many tensors a payload holds; nothing else of them is checked.

    Raises:
        RemoteProtocolError: it is not one msgpack value, is nested too deeply, holds too many tensors, or its values count too much.
    """
    return measure(payload, bounds_of(max_tensors, max_values)).tensors


cdef object too_many_values(str what, uint64_t count, uint64_t max_values):
    """Returns the error for a payload that the peer would refuse."""
    return CapacityError(
        f"the values of {what} count {count}, and max_values is {max_values}; send many numbers as a tensor, which is one value",
        needed=count, capacity=max_values,
    )


def check_count(what: str, payload: bytes, max_values: int) -> None:
    """Checks a payload of this process that is about to be sent.

    Args:
        what: the name of the payload, for the error.
        payload: encoded.
        max_values: what its values may count.

    Raises:
        CapacityError: its values count more.
        RemoteProtocolError: it is nested too deeply.
    """
    cdef Bounds found = measure(payload, bounds_of(UINT32_MAX, UINT64_MAX))
    if found.values > <uint64_t>max_values:
        raise too_many_values(what, found.values, max_values)


@cython.final
@cython.freelist(64)
cdef class Content:
    """A payload, and where its tensors are.

    Attributes:
        payload: msgpack with an extension for each tensor; empty until :meth:`check_payload` if it lies in a slot.
        tensor_count: how many tensors are in it.
        value_count: what its values count.
        inline: the bytes of region 0, if they came in the record.
        is_copied_to_slot: whether region 0 is the last of the slots.
        fence: the handle of the event behind what was written to slots in device memory; may be empty.
        payload_offset, payload_nbytes: where the payload lies in the last slot; 0 bytes if it came in the record.
    """

    cdef readonly bytes payload
    cdef readonly bytes fence
    cdef readonly uint32_t tensor_count
    cdef readonly uint64_t value_count
    cdef readonly uint64_t payload_offset   # in the slot of the copied bytes, if payload_nbytes
    cdef readonly uint64_t payload_nbytes
    cdef readonly bint is_copied_to_slot    # region 0 is the last slot, else the inline bytes
    cdef uint32_t slot_count
    cdef uint64_t inline_nbytes
    cdef Lent* inline_region                # with the bytes of tensors that travelled in the record; NULL: none did
    cdef SlotNumbers* slot_numbers
    cdef SlotNumbers few_slots[2]

    def __cinit__(self) -> None:
        self.slot_numbers = self.few_slots
        self.payload = self.fence = b""

    def __dealloc__(self) -> None:
        if self.inline_region != NULL:
            drop_region(self.inline_region)
        if self.slot_numbers != self.few_slots:
            free(self.slot_numbers)

    @property
    def inline(self) -> bytes:
        """The bytes of tensors that travelled in the record."""
        return b"" if self.inline_region == NULL else PyBytes_FromStringAndSize(self.inline_region.address, self.inline_nbytes)

    cdef int reserve_slots(self, uint64_t count) except -1:
        if count > 2:
            self.slot_numbers = <SlotNumbers*>malloc(count * sizeof(SlotNumbers))
            if self.slot_numbers == NULL:
                self.slot_numbers = self.few_slots
                raise MemoryError
        return 0

    cdef uint64_t region_nbytes(self, uint32_t region) noexcept nogil:
        """Bytes of a region, by its number on the wire; there is one of that number."""
        if region:
            return self.slot_numbers[region - 1].nbytes
        return self.slot_numbers[self.slot_count - 1].nbytes if self.is_copied_to_slot else self.inline_nbytes

    cdef uint32_t slot_of(self, uint32_t region) noexcept nogil:
        """The number of a region's slot, from 1 on, by its number on the wire; 0: it is inline."""
        return self.slot_count if not region and self.is_copied_to_slot else region

    @property
    def slots(self) -> tuple[SlotRef, ...]:
        """The slots as ``SlotRef``: those that tensors were written to in place, then that of the copied bytes."""
        cdef uint32_t i
        cdef SlotNumbers* slot
        slots = []
        for i in range(self.slot_count):
            slot = self.slot_numbers + i
            slots.append(SlotRef(slot.lease_id, slot.offset, slot.nbytes, slot.generation))
        return tuple(slots)

    @property
    def tensors(self) -> tuple[TensorRef, ...]:
        """The tensors as ``TensorRef``, in the order of the payload; ``region`` 0 is inline, ``n`` is ``slots[n - 1]``."""
        cdef Cursor cursor
        cdef Value value
        cdef TensorNumbers tensor
        refs = []
        cursor.at = <const uint8_t*>PyBytes_AS_STRING(self.payload)
        cursor.end = cursor.at + PyBytes_GET_SIZE(self.payload)
        while len(refs) < self.tensor_count and read_value(&cursor, &value) != TRUNCATED:
            if value.kind == EXTENSION and value.type == TENSOR_EXTENSION:
                read_tensor(value.data, value.nbytes, &tensor)
                refs.append(tensor_ref(&tensor, self))
        return tuple(refs)

    cdef int check_payload(self, bytes payload, Bounds bounds) except -1:
        """Takes a private copy of a payload that lies in a slot, and checks it.

        Raises:
            RemoteProtocolError: it is no payload of this content.
        """
        cdef Cursor cursor
        cursor.at = <const uint8_t*>PyBytes_AS_STRING(payload)
        cursor.end = cursor.at + PyBytes_GET_SIZE(payload)
        self.walk_payload(&cursor, bounds)
        if cursor.at != cursor.end:
            raise RemoteProtocolError("something follows a payload")
        self.payload = payload
        return 0

    cdef int walk_payload(self, Cursor* cursor, Bounds bounds) except -1:
        """Checks this content's payload, and notes its tensors and counts. The cursor is behind it then."""
        cdef Bounds found
        walk(cursor, self, bounds, &found)
        self.tensor_count, self.value_count = found.tensors, found.values
        return 0


@cython.final
@cython.no_gc
@cython.freelist(64)
cdef class Submit:
    """Hands a payload and its slots to the engine."""

    cdef readonly uint64_t epoch
    cdef readonly uint64_t request_id
    cdef readonly ForEngine for_engine
    cdef readonly Content content


cdef int read_slot(Value* value, SlotNumbers* slot) except -1:
    if value.kind != EXTENSION or value.type != SLOT_EXTENSION or value.nbytes != SLOT_EXTENSION_NBYTES:
        raise wrong("a slot is described in another way")
    slot.lease_id = read_little_endian(value.data, 8)
    slot.offset = read_little_endian(value.data + 8, 8)
    slot.nbytes = read_little_endian(value.data + 16, 8)
    slot.generation = read_little_endian(value.data + 24, 8)
    if slot.lease_id > _MAX_NUMBER or slot.offset > _MAX_NUMBER or slot.nbytes > _MAX_NUMBER:
        raise wrong("a number of a slot is larger than any memory")
    return 0


cdef int read_content(Cursor* cursor, Content content, uint64_t members, Bounds bounds) except -1:
    """Reads ``copied, payload`` or ``copied, nil, offset, nbytes``, the last members of a record."""
    cdef Value value
    cdef Kind kind = read_value(cursor, &value)
    cdef const uint8_t* payload
    cdef uint64_t slot_nbytes
    if kind == BINARY:
        content.inline_region = copy_region(value.data, value.nbytes)
        content.inline_nbytes = value.nbytes
    elif kind == EXTENSION:
        read_slot(&value, content.slot_numbers + content.slot_count)
        content.slot_count += 1
        content.is_copied_to_slot = True
    elif kind != NIL:
        raise wrong("copied bytes are described in another way")
    if members == 2:
        payload = cursor.at
        content.walk_payload(cursor, bounds)
        content.payload = PyBytes_FromStringAndSize(<const char*>payload, cursor.at - payload)
    elif (
        members != 4 or read_value(cursor, &value) != NIL
        or not read_unsigned(cursor, &content.payload_offset) or not read_unsigned(cursor, &content.payload_nbytes)
    ):
        raise wrong("a payload is described in another way")
    else:
        slot_nbytes = content.region_nbytes(0) if content.is_copied_to_slot else 0  # region 0 is what was copied
        if not content.payload_nbytes or content.payload_offset > slot_nbytes \
                or content.payload_nbytes > slot_nbytes - content.payload_offset:
            raise RemoteProtocolError("a payload exceeds the slot that it lies in")
    if cursor.at != cursor.end:
        raise wrong("something follows it")
    return 0


cdef bint read_head(Cursor* cursor, const uint8_t* record, uint64_t nbytes, uint64_t* tag, uint64_t* members) noexcept nogil:
    """Begins to read a record; returns False if it is no message.

    Args:
        cursor: set behind the tag.
        tag: set to the message's.
        members: set to how many the record has, with the tag.
    """
    cursor.at, cursor.end = record, record + nbytes
    return read_array(cursor, members) and members[0] and read_unsigned(cursor, tag)


cdef Submit read_submit(Cursor* cursor, uint64_t members, Bounds bounds):
    """Reads a submission behind its tag."""
    cdef Submit submit = Submit.__new__(Submit)
    cdef Content content = Content.__new__(Content)
    cdef Value value
    cdef uint64_t slots
    cdef uint64_t i
    submit.content = content
    if members != FOR_ENGINE_MEMBERS + 7 and members != FOR_ENGINE_MEMBERS + 9:
        raise wrong("it has too few or too many fields")
    if not read_unsigned(cursor, &submit.epoch) or not read_unsigned(cursor, &submit.request_id) \
            or submit.request_id > _MAX_NUMBER:
        raise wrong("its epoch or request id is no number")
    submit.for_engine = read_for_engine(cursor)
    if read_value(cursor, &value) != BINARY or value.nbytes > 64:
        raise wrong("its fence is no event")
    if value.nbytes:
        content.fence = PyBytes_FromStringAndSize(<const char*>value.data, value.nbytes)
    if not read_array(cursor, &slots):
        raise wrong("its slots are no array")
    if slots > bounds.tensors:
        raise RemoteProtocolError(f"tensors in {slots} slots exceed max_tensors ({bounds.tensors})")
    content.reserve_slots(slots + 1)
    for i in range(slots):
        read_value(cursor, &value)
        read_slot(&value, content.slot_numbers + i)
        content.slot_count += 1
    read_content(cursor, content, members - FOR_ENGINE_MEMBERS - 5, bounds)
    return submit


cdef Content read_reply(Cursor* cursor, uint64_t members, Bounds bounds, uint64_t* request_id):
    """Reads a reply behind its tag; ``request_id`` is set to the request that it answers."""
    cdef Content content = Content.__new__(Content)
    if members < 4 or not read_unsigned(cursor, request_id):
        raise wrong("a reply is of no request")
    read_content(cursor, content, members - 2, bounds)
    return content


cdef Content read_done(
    Cursor* cursor, uint64_t members, Bounds bounds, uint64_t* request_id, Cursor* released, uint64_t* count
):
    """Reads the end of a request behind its tag; returns its last reply, or None.

    Slots that are handed back with it need no ``Release`` of their own.

    Args:
        request_id: set to the request that is finished.
        released, count: set to where their generations are, numbers all of them, and to how many there are.
    """
    cdef Content content = None
    cdef uint64_t generation, i
    if members < 3 or not read_unsigned(cursor, request_id) or not read_array(cursor, count):
        raise wrong("an end is of no request")
    if count[0] > MAX_LISTED:
        raise wrong("it lists too many generations")
    released[0] = cursor[0]
    for i in range(count[0]):
        if not read_unsigned(cursor, &generation):
            raise wrong("a generation is no number")
    if members > 3:
        content = Content.__new__(Content)
        read_content(cursor, content, members - 3, bounds)
    elif cursor.at != cursor.end:
        raise wrong("something follows it")
    return content
