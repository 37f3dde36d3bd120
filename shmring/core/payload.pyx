"""Sending payloads: encoding them, finding their tensors, and writing the record.

Theory of operation. Common payloads are encoded here: dicts, lists and tuples of text, bytes, numbers and tensors. Any other
value in them is encoded by msgspec, which calls back for types that it does not know. Both write the same bytes for the same
value. A tensor becomes an extension that says where its bytes will be. That is known at once: in a slot of the caller, if they
lie in one already, or at the next cache line of region 0. Nothing is copied yet: if the payload can't be sent, nothing has
changed. :class:`Packed` then says how many bytes of a slot it needs, and writes the record when it has been given them; small
tensors are copied straight into the record.

This file does not know torch and numpy. Tensors of exactly the given types are described by DLPack. The function ``describe``
describes all other values, and ``copy_strided`` copies tensors that are not contiguous.

Invariants: regions of two parts never overlap; a part that is in place is not copied; between reserving a record and publishing
it no Python object is made, since that might start a garbage collection, and a finaliser that writes to the same ring.

Source: msgpack with tensors out of band, and hooks that collect them, is an idea of vLLM's (``v1/serial_utils.py``).
"""

import msgspec
from msgspec.msgpack import Ext

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_Next
from cpython.float cimport PyFloat_AS_DOUBLE
from cpython.list cimport PyList_GET_SIZE
from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_GetPointer
from cpython.tuple cimport PyTuple_Check, PyTuple_GET_SIZE
from cpython.unicode cimport PyUnicode_AsUTF8AndSize
from libc.stdint cimport UINT64_MAX, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memset

from shmring.core.messages import DLPACK_CODES, TORCH_ITEM_NBYTES
from shmring.errors import CapacityError, RemoteProtocolError


cdef struct Growing:
    # Bytes that are being written: first into a small buffer, and on the heap when they no longer fit there.
    uint8_t* start
    uint8_t* at
    uint8_t* end
    bint is_on_heap
    bint is_foreign    # whether msgspec wrote some of them


cdef struct TensorMemory:
    # Functions of torch's, of which those of its C interface return 0 if they succeed; and the offset of their argument in a
    # tensor's object.
    int (*storage_nbytes)(void*, int64_t*) noexcept
    int (*storage_offset)(void*, int64_t*) noexcept
    int (*data_address)(void*, void**) noexcept
    uint8_t (*is_negative)(void*) noexcept  # whether a tensor is negated lazily, when it is read: DLPack does not say this
    uint64_t place


cdef enum:
    _COMPLEX = 5   # DLPack's code of complex numbers

cdef enum:
    SLOT_NBYTES = SLOT_EXTENSION_NBYTES + 3
    _BEYOND_CACHE_NBYTES = 4 << 20  # copies of so much go past the cache, unless the slot is known to be in it
    _LARGE_NBYTES = 1 << 20     # copies of so much, if the slot is known not to be in it; below, streaming gained nothing
    _PART_NBYTES = 64 << 10     # shorter tensors in such a slot go into the cache: a call takes 0.3 us
    _WITHOUT_LOCK_NBYTES = 256 << 10  # a copy of so much lets other threads run; handing the lock over costs some microseconds
    _FEW_NBYTES = 1024          # a payload that is longer is encoded on the heap
    _MOST_NESTED = 200          # what is nested more deeply is for msgspec, and for the check of what it writes
    _PLAIN_DIMENSIONS = 8       # a peer refuses no tensor of so few dimensions and of less than 1 TiB
    _COUNT_SHIFT = 2            # values encoded here count at most 4 a byte: an empty array
    _HEAD_NBYTES = FOR_ENGINE_NBYTES + 367  # at most, of a record apart from its payload, its slots and what is copied into it
    FIELDS_NBYTES = 64          # at most, of a record's own fields, apart from texts and lists
    _CONTENT_NBYTES = 64        # at most, of what is around a content

cdef Py_ssize_t _TOO_LONG_NBYTES = <Py_ssize_t>1 << 32  # for msgpack: msgspec says so
cdef uint64_t _PLAIN_NBYTES = <uint64_t>1 << 40

#: The wire's number of a dtype, by DLPack's code and the bytes of an item; 0: none.
cdef uint8_t _NUMBERS[16][17]
memset(_NUMBERS, 0, sizeof(_NUMBERS))


cdef int _know_dtypes() except -1:
    for number, name in enumerate(DTYPES):
        if name is not None:
            _NUMBERS[DLPACK_CODES[name]][TORCH_ITEM_NBYTES[name]] = number
    return 0

_know_dtypes()

cdef dict _DTYPE_NUMBERS = {name: number for number, name in enumerate(DTYPES) if name is not None}


cdef int _grow(Growing* out, uint64_t nbytes) except -1:
    cdef uint64_t used = out.at - out.start, capacity = max(2 * <uint64_t>(out.end - out.start), used + nbytes)
    cdef uint8_t* larger = <uint8_t*>(realloc(out.start, capacity) if out.is_on_heap else malloc(capacity))
    if larger == NULL:
        raise MemoryError
    if not out.is_on_heap:
        memcpy(larger, out.start, used)
    out.start, out.at, out.end, out.is_on_heap = larger, larger + used, larger + capacity, True
    return 0


cdef inline int make_room(Growing* out, uint64_t nbytes) except -1:
    """Makes sure that so many bytes can be written."""
    if <uint64_t>(out.end - out.at) < nbytes:
        return _grow(out, nbytes)
    return 0


cdef inline int put_bytes(Growing* out, const char* data, uint64_t nbytes) noexcept:
    memcpy(out.at, data, nbytes)
    out.at += nbytes
    return 0


cdef int _put_float(Growing* out, double value) except -1:
    cdef uint64_t bits
    make_room(out, 9)
    memcpy(&bits, &value, 8)
    out.at[0] = 0xCB
    out.at = put_big_endian(out.at + 1, bits, 8)
    return 0


@cython.final
@cython.no_gc
@cython.freelist(64)
cdef class Part:
    """A tensor or array of a payload that is being sent.

    Args:
        source: what is sent; kept alive until it is.
        dtype: torch's name, or numpy's spelling.
        shape: its extents.
        nbytes: of its items.
        address: of its bytes, if they are contiguous memory that can be copied as it is; otherwise 0.
        is_on_host: whether that is host memory.
    """

    cdef readonly object source
    cdef readonly tuple shape
    cdef readonly bytes spelling
    cdef readonly uint64_t nbytes
    cdef readonly uint64_t location    # of its bytes, if they are contiguous memory that can be copied as it is; otherwise 0
    cdef readonly uint64_t address     # the same, if that is host memory
    cdef readonly uint64_t offset
    cdef readonly uint32_t region
    cdef readonly uint8_t dtype
    cdef readonly bint is_in_place
    cdef uint64_t storage_nbytes       # the least size of its tensor's storage, until it was copied; 0: not checked

    def __init__(self, source, dtype: str, shape: tuple[int, ...], nbytes: int, *, address: int, is_on_host: bool) -> None:
        self.source = source
        self.dtype = _DTYPE_NUMBERS.get(dtype, 0)
        self.spelling = b"" if self.dtype else dtype.encode("ascii")
        self.shape = shape
        self.nbytes = nbytes
        self.location = address
        self.address = address if is_on_host else 0


@cython.final
cdef class Packer:
    """Encodes payloads.

    Args:
        max_tensors: the most tensors a payload may hold.
        max_payload_nbytes: of a payload, tensors apart.
        max_values: what its values may count (see ``wire.pyx``).
        tensor_types: exact types of tensors that DLPack's table of functions describes.
        table: that table, ``__dlpack_c_exchange_api__``; None: there is none, and ``describe`` is asked.
        tensor_memory: the numbers of a :cpp:struct:`TensorMemory`, in its order; DLPack does not say how large a storage is. None: as
            without a table.
        describe: called with any other value; returns a :class:`Part`, or what to encode in its place. ``TypeError``: it
            can't be sent.
        copy_strided: ``copy_strided(part, address)`` copies a part whose bytes are not contiguous host memory.
        copy_past_cache, copy_into_cache: ``copy(to, from, nbytes)``, for tensors of a megabyte and more, and for all but short
            tensors in long slots.
        explain: ``explain(payload, error)`` returns the error to raise for a payload that could not be encoded.
    """

    cdef Bounds _bounds
    cdef uint64_t _max_payload_nbytes
    cdef tuple _tensor_types
    cdef DLPackExchangeAPI* _table
    cdef TensorMemory _memory
    cdef object _describe
    cdef object _copy_strided
    cdef object _copy_past_cache
    cdef object _copy_into_cache
    cdef object _explain
    cdef object _encode
    cdef Packed _packed   # the payload that is being encoded
    cdef HeldSlots _held

    def __init__(
        self,
        max_tensors: int,
        max_payload_nbytes: int,
        max_values: int,
        tensor_types: tuple[type, ...],
        table,
        tensor_memory: tuple[int, int, int, int, int] | None,
        describe: Callable[[object], object],
        copy_strided: Callable[[Part, int], object],
        copy_past_cache: Callable[[int, int, int], object],
        copy_into_cache: Callable[[int, int, int], object],
        explain: Callable[[object, Exception], Exception],
    ) -> None:
        self._bounds = bounds_of(max_tensors, max_values)
        self._max_payload_nbytes = max_payload_nbytes
        self._tensor_types = tensor_types
        cdef uint64_t numbers[5]
        if table is not None and tensor_memory is not None:
            self._table = <DLPackExchangeAPI*>PyCapsule_GetPointer(table, "dlpack_exchange_api")
            if self._table.header.version.major != 1:
                self._table = NULL
            numbers[0], numbers[1], numbers[2], numbers[3], numbers[4] = tensor_memory
            memcpy(&self._memory, numbers, sizeof(numbers))
        self._describe = describe
        self._copy_strided = copy_strided
        self._copy_past_cache, self._copy_into_cache = copy_past_cache, copy_into_cache
        self._explain = explain
        self._encode = msgspec.msgpack.Encoder(enc_hook=self._encode_foreign).encode

    cpdef Packed pack(self, object payload, uint64_t inline_nbytes, uint64_t largest_record_nbytes, HeldSlots held=None):  # type: (object, int, int, HeldSlots | None) -> Packed
        """Encodes a payload. Synchronous, copies no tensor, and changes nothing.

        Code of the caller may run meanwhile (a property that is encoded), and do anything: end the session, leave a slot, pack
        another payload here. So read all state again afterwards.

        Args:
            payload: any msgspec-encodable object holding tensors and arrays at any depth.
            inline_nbytes: tensors of so many bytes or fewer travel in the record, if there is room.
            largest_record_nbytes: of one record.
            held: slots of the caller, from which tensors are sent that lie in them.

        Raises:
            TypeError: something in it can't be sent; the message names its path.
            CapacityError: it holds more tensors than the peer accepts, its values count more, or it is larger than any payload may be.
        """
        cdef Packed packed = Packed.__new__(Packed)
        cdef Packed outer = self._packed
        cdef HeldSlots outer_held = self._held
        cdef Growing out
        cdef uint8_t few[_FEW_NBYTES]
        cdef Bounds found
        packed._copy_strided = self._copy_strided
        packed._copy_past_cache, packed._copy_into_cache = self._copy_past_cache, self._copy_into_cache
        packed._max_payload_nbytes = self._max_payload_nbytes
        packed._memory = self._memory
        self._packed, self._held = packed, held
        out.start = out.at = few
        out.end = few + sizeof(few)
        out.is_on_heap = out.is_foreign = False
        try:
            self._put(&out, payload, 0)
            packed.payload = PyBytes_FromStringAndSize(<const char*>out.start, out.at - out.start)
        except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
            raise self._explain(payload, error) from None
        finally:
            self._packed, self._held = outer, outer_held
            if out.is_on_heap:
                free(out.start)
        cdef uint32_t count = len(packed.parts)
        if count > self._bounds.tensors:
            raise CapacityError(
                f"the payload holds {count} tensors, the engine takes {self._bounds.tensors} (max_tensors)",
                needed=count, capacity=self._bounds.tensors,
            )
        if out.is_foreign or <uint64_t>PyBytes_GET_SIZE(packed.payload) > self._bounds.values >> _COUNT_SHIFT:
            try:
                found = measure(packed.payload, bounds_of(self._bounds.tensors, UINT64_MAX))
            except RemoteProtocolError as error:
                raise TypeError(f"payload can't be sent: {error}") from None
            if found.values > self._bounds.values:
                raise too_many_values("the payload", found.values, self._bounds.values)
            if found.tensors != count:
                raise TypeError(
                    f"payload can't be sent: its extensions of type {TENSOR_EXTENSION} stand for tensors; use another type"
                )
        packed.lay_out(inline_nbytes, largest_record_nbytes, <uint32_t>len(packed.slots))
        return packed

    def encode(self, payload) -> bytes:
        """Tries to encode a value; for code that explains why a payload can't be sent."""
        cdef Packed outer = self._packed
        self._packed = Packed.__new__(Packed)
        try:
            return self._encode(payload)
        finally:
            self._packed = outer

    cdef int _put(self, Growing* out, object value, int depth) except -1:
        """Encodes a value as msgspec does, or has msgspec do it."""
        kind = type(value)
        if kind is str:
            return self._put_text(out, <str>value)
        if kind is int:
            return self._put_int(out, value)
        if kind is float:
            return _put_float(out, PyFloat_AS_DOUBLE(value))
        if kind is dict:
            return self._put_dict(out, <dict>value, depth)
        if kind is list:
            return self._put_list(out, <list>value, depth)
        # A named tuple is a tuple; a class with a metaclass may be something else to msgspec.
        if kind is tuple or (PyTuple_Check(value) and type(kind) is type):
            return self._put_tuple(out, <tuple>value, depth)
        if value is None or kind is bool:
            make_room(out, 1)
            out.at[0] = 0xC0 if value is None else 0xC3 if value is True else 0xC2
            out.at += 1
            return 0
        if kind is bytes and PyBytes_GET_SIZE(value) < _TOO_LONG_NBYTES:
            make_room(out, 5 + <uint64_t>PyBytes_GET_SIZE(value))
            out.at = put_sized_head(out.at, PyBytes_GET_SIZE(value), 0xC4)
            return put_bytes(out, PyBytes_AS_STRING(value), PyBytes_GET_SIZE(value))
        if self._table != NULL and kind in self._tensor_types:
            return self._put_tensor(out, value)
        return self._put_foreign(out, value)

    cdef int _put_foreign(self, Growing* out, object value) except -1:
        """Has msgspec encode a value. Its output is checked afterwards: it may be nested deeply, and hold extensions."""
        cdef bytes encoded = self._encode(value)
        out.is_foreign = True
        make_room(out, PyBytes_GET_SIZE(encoded))
        return put_bytes(out, PyBytes_AS_STRING(encoded), PyBytes_GET_SIZE(encoded))

    cdef int _put_text(self, Growing* out, str value) except -1:
        cdef Py_ssize_t nbytes = 0
        cdef const char* text = PyUnicode_AsUTF8AndSize(value, &nbytes)
        if nbytes >= _TOO_LONG_NBYTES:
            return self._put_foreign(out, value)
        make_room(out, 5 + <uint64_t>nbytes)
        if nbytes < 32:
            out.at[0] = <uint8_t>(0xA0 | nbytes)
            out.at += 1
        else:
            out.at = put_sized_head(out.at, nbytes, 0xD9)
        return put_bytes(out, text, nbytes)

    cdef int _put_int(self, Growing* out, object value) except -1:
        cdef int overflow = 0
        cdef int64_t number = PyLong_AsLongLongAndOverflow(value, &overflow)
        if overflow:
            return self._put_foreign(out, value)
        make_room(out, 9)
        out.at = put_int(out.at, number)
        return 0

    cdef int _put_dict(self, Growing* out, dict value, int depth) except -1:
        cdef Py_ssize_t place = 0, left = len(value)
        cdef PyObject* key
        cdef PyObject* member
        if depth >= _MOST_NESTED:
            return self._put_foreign(out, value)
        while PyDict_Next(value, &place, &key, &member):
            if type(<object>key) is not str:
                return self._put_foreign(out, value)
        make_room(out, 5)
        out.at = put_count(out.at, left, 0x80, 0xDE)
        place = 0
        while PyDict_Next(value, &place, &key, &member):
            name, inner = <object>key, <object>member  # held, since code of the tensor may run
            self._put_text(out, <str>name)
            self._put(out, inner, depth + 1)
            left -= 1
        if left:
            raise TypeError("a dict changed while it was encoded")
        return 0

    cdef int _put_list(self, Growing* out, list value, int depth) except -1:
        cdef Py_ssize_t count = PyList_GET_SIZE(value), place = 0
        if depth >= _MOST_NESTED:
            return self._put_foreign(out, value)
        make_room(out, 5)
        out.at = put_count(out.at, count, 0x90, 0xDC)
        while place < PyList_GET_SIZE(value):
            inner = <object>PyList_GET_ITEM(value, place)
            self._put(out, inner, depth + 1)
            place += 1
        if place != count:
            raise TypeError("a list changed while it was encoded")
        return 0

    cdef int _put_tuple(self, Growing* out, tuple value, int depth) except -1:
        cdef Py_ssize_t count = PyTuple_GET_SIZE(value), place
        if depth >= _MOST_NESTED:
            return self._put_foreign(out, value)
        make_room(out, 5)
        out.at = put_count(out.at, count, 0x90, 0xDC)
        for place in range(count):
            self._put(out, <object>PyTuple_GET_ITEM(value, place), depth + 1)
        return 0

    cdef int _put_tensor(self, Growing* out, object value) except -1:
        cdef DLTensor tensor
        cdef Part part = self._tensor(value, &tensor)
        if part is None or tensor.ndim > _PLAIN_DIMENSIONS or not 0 < part.nbytes < _PLAIN_NBYTES:
            return self._put_foreign(out, value)
        self._place(part)
        make_room(out, 3 + TENSOR_HEAD_NBYTES + 8 * _PLAIN_DIMENSIONS)
        out.at = put_extension_head(out.at, TENSOR_EXTENSION, <uint8_t>(TENSOR_HEAD_NBYTES + 8 * tensor.ndim))
        out.at = put_tensor(out.at, part.region, part.offset, part.nbytes, part.dtype, tensor.ndim, tensor.shape)
        return 0

    cdef int _place(self, Part part) except -1:
        """Decides where the bytes of a part will be."""
        cdef Packed packed = self._packed
        if type(packed.parts) is tuple:
            packed.parts = []
        (<list>packed.parts).append(part)
        if not part.nbytes:
            return 0
        if part.location and self._held is not None:
            if type(packed.slots) is tuple:
                packed.slots = []
            if self._held.find(part.location, part.nbytes, &part.region, &part.offset, <list>packed.slots):
                part.is_in_place = True
                packed.in_place += 1
                packed.in_place_nbytes += part.nbytes
                return 0
        part.offset = align(packed.region_nbytes)
        packed.region_nbytes = part.offset + part.nbytes
        packed.copied += 1
        packed.copied_nbytes += part.nbytes
        return 0

    def _encode_foreign(self, value):
        cdef Part part
        cdef DLTensor tensor
        kind = type(value)
        part = None
        if self._table != NULL and kind in self._tensor_types:
            part = self._tensor(value, &tensor)
        described = None
        if part is None:
            described = self._describe(value)
            if type(described) is not Part:
                return described
            part = <Part>described
        self._place(part)
        if described is None:
            data = tensor_extension(part.region, part.offset, part.nbytes, part.dtype, b"", tensor.ndim, tensor.shape)
            is_plain = tensor.ndim <= _PLAIN_DIMENSIONS
        else:
            data = _described_extension(part)
            is_plain = len(part.shape) <= _PLAIN_DIMENSIONS
        if not is_plain or not 0 < part.nbytes < _PLAIN_NBYTES:
            _check_extension(data)
        return Ext(TENSOR_EXTENSION, data)

    cdef Part _tensor(self, tensor, DLTensor* described):
        """Describes a dense tensor with all of its bytes, in host memory or made in a slot, by DLPack; None for any other."""
        cdef Part part
        cdef uint64_t nbytes, last = 0
        cdef int64_t stride = 1, step
        cdef bint is_plain = True
        cdef uint64_t address
        cdef bint is_on_host
        cdef int i
        try:
            self._table.dltensor_from_py_object(<void*>tensor, described)
        except (RuntimeError, BufferError):
            return None
        address = <uint64_t>described.data + described.byte_offset
        is_on_host = described.device.device_type == ON_CPU
        if not is_on_host and (self._held is None or not self._held.has_made(tensor, address)):
            return None
        if described.dtype.lanes != 1 or described.dtype.code >= 16 or described.dtype.bits > 128 \
                or described.ndim > MAX_DIMENSIONS:
            return None
        part = Part.__new__(Part)
        part.dtype = _NUMBERS[described.dtype.code][described.dtype.bits >> 3]
        if not part.dtype:
            return None
        nbytes = described.dtype.bits >> 3
        for i in range(described.ndim - 1, -1, -1):
            step = stride if described.strides == NULL else described.strides[i]
            if step != stride and described.shape[i] > 1:
                is_plain = False
            stride *= described.shape[i]
            last += <uint64_t>(described.shape[i] - 1) * <uint64_t>step
            if multiply_overflows(nbytes, <uint64_t>described.shape[i], &nbytes):
                return None  # one that was expanded
        if nbytes:
            part.storage_nbytes = self._storage_nbytes(tensor, last, described.dtype.bits >> 3)
            if not part.storage_nbytes or described.data == NULL:
                return None
        part.source = tensor
        part.spelling = b""
        part.nbytes = nbytes
        # DLPack does not report torch's lazy negation and conjugation.
        if is_plain and not self._memory.is_negative(<uint8_t*><void*>tensor + self._memory.place) \
                and (described.dtype.code != _COMPLEX or not tensor.is_conj()):
            part.location = address
            part.address = address if is_on_host else 0
        return part

    cdef uint64_t _storage_nbytes(self, tensor, uint64_t last, uint64_t item_nbytes) noexcept:
        """Returns how many bytes of its storage a tensor needs, up to its last item; 0: the storage has fewer.

        FSDP frees the storage of parameters and leaves their shape; the memory there may then belong to other objects.
        """
        cdef void* inner = <uint8_t*><void*>tensor + self._memory.place
        cdef int64_t has_nbytes = 0, offset = 0
        cdef uint64_t needed
        if self._memory.storage_nbytes(inner, &has_nbytes) or self._memory.storage_offset(inner, &offset):
            return 0
        if multiply_overflows(<uint64_t>offset + last + 1, item_nbytes, &needed):
            return 0
        return needed if needed <= <uint64_t>has_nbytes else 0


cdef bytes _described_extension(Part part):
    cdef int64_t extents[MAX_DIMENSIONS]
    cdef int i, ndim = len(part.shape)
    if ndim > MAX_DIMENSIONS:
        raise TypeError(f"a tensor has {ndim} dimensions, more than {MAX_DIMENSIONS}")
    for i in range(ndim):
        extents[i] = part.shape[i]
    return tensor_extension(part.region, part.offset, part.nbytes, part.dtype, part.spelling, ndim, extents)


cdef int _check_extension(bytes data) except -1:
    """Refuses a tensor that the peer would refuse; the peer would end the connection."""
    cdef TensorNumbers tensor
    read_tensor(<const uint8_t*>PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data), &tensor)
    tensor.offset = 0
    try:
        check_tensor(&tensor, tensor.nbytes)
    except RemoteProtocolError as error:
        raise TypeError(str(error)) from None
    return 0


@cython.final
@cython.no_gc
@cython.freelist(64)
cdef class Packed:
    """An encoded payload whose tensors are not yet where they will be sent from.

    Attributes:
        payload: msgpack, with extensions for the tensors.
        parts: the tensors, in its order.
        slots: the caller's slots in which tensors lie, in the order of their regions; in a frontend, their records.
        region_nbytes: the bytes that copied tensors need in one region.
        slot_nbytes: of the slot that it needs; 0: everything travels in the record.
        copied, in_place: how many tensors are copied, and how many are sent in place.
        copied_nbytes, in_place_nbytes: bytes of both, what lies between them not included.
        content: where its tensors were copied to, if that is memory of its own: who sends it sets this.
    """

    cdef readonly bytes payload
    cdef readonly object parts  # type: Sequence[Part]  # this and the next are lists as soon as there is one
    cdef public object slots  # type: Sequence[Any]
    cdef public object content
    cdef readonly uint64_t copied_nbytes
    cdef readonly uint64_t in_place_nbytes
    cdef readonly uint32_t copied
    cdef readonly uint32_t in_place
    cdef readonly uint64_t region_nbytes    # of region 0
    cdef readonly uint64_t slot_nbytes      # of the slot that region 0 needs; 0: it travels in the record
    cdef readonly uint64_t payload_offset   # in that slot, if the payload travels there
    cdef readonly bint is_payload_in_slot
    cdef bint goes_past_cache               # whether large tensors are copied to the slot past the cache
    cdef uint64_t _max_payload_nbytes
    cdef TensorMemory _memory
    cdef object _copy_strided
    cdef object _copy_past_cache
    cdef object _copy_into_cache
    cdef ForEngine for_engine  # of a request
    cdef bytes fence           # behind what was written to slots in device memory

    def __cinit__(self) -> None:
        self.parts = self.slots = ()
        self.for_engine, self.fence = NOTHING_TOLD, b""

    cdef int lay_out(self, uint64_t inline_nbytes, uint64_t largest_record_nbytes, uint32_t slots) except -1:
        """Decides whether tensors and payload travel in the record or in a slot."""
        cdef uint64_t payload_nbytes = PyBytes_GET_SIZE(self.payload)
        cdef uint64_t record_nbytes = _HEAD_NBYTES + <uint64_t>SLOT_NBYTES * slots
        if payload_nbytes > self._max_payload_nbytes:
            raise CapacityError(
                f"a payload of {payload_nbytes} bytes, tensors apart, exceeds max_payload_nbytes ({self._max_payload_nbytes}); "
                "send bulk data as tensors (numpy.frombuffer makes one of bytes), which travel in slots",
                needed=payload_nbytes, capacity=self._max_payload_nbytes,
            )
        if record_nbytes > largest_record_nbytes:
            raise CapacityError(
                f"tensors in {slots} slots do not fit one message",
                needed=record_nbytes, capacity=largest_record_nbytes,
            )
        if self.region_nbytes <= inline_nbytes and record_nbytes + self.region_nbytes + payload_nbytes <= largest_record_nbytes:
            self.slot_nbytes = 0
        elif record_nbytes + payload_nbytes <= largest_record_nbytes:
            self.slot_nbytes = self.region_nbytes
        else:
            self.is_payload_in_slot = True
            self.payload_offset = align(self.region_nbytes)
            self.slot_nbytes = self.payload_offset + payload_nbytes
        self.goes_past_cache = self.slot_nbytes >= _BEYOND_CACHE_NBYTES  # as far as is known
        return 0

    cpdef int copy_into(self, uint64_t address) except -1:
        """Copies the tensors, and a payload that travels with them, to a slot's content at an address. May run on any
        thread."""
        return self.copy_to(<uint8_t*>address, self.slot_nbytes >= _WITHOUT_LOCK_NBYTES)

    cdef int copy_to(self, uint8_t* to, bint without_lock) except -1:
        cdef Part part
        for part in self.parts:
            if part.is_in_place or not part.nbytes:
                continue
            self._look_again(part)
            if not part.address:
                self._copy_strided(part, <uint64_t>to + part.offset)
            elif part.nbytes >= _LARGE_NBYTES or (part.nbytes >= _PART_NBYTES and self.slot_nbytes >= _BEYOND_CACHE_NBYTES):
                copy = self._copy_past_cache if self.goes_past_cache else self._copy_into_cache
                copy(<uint64_t>to + part.offset, part.address, part.nbytes)
            elif without_lock:
                with nogil:
                    memcpy(to + part.offset, <const void*>part.address, part.nbytes)
            else:
                memcpy(to + part.offset, <const void*>part.address, part.nbytes)
        if self.is_payload_in_slot:
            memcpy(to + self.payload_offset, PyBytes_AS_STRING(self.payload), PyBytes_GET_SIZE(self.payload))
        return 0

    cdef void choose_way(self, uint64_t turnover_nbytes, uint64_t cache_nbytes) noexcept:
        """Decides which copies go past the cache, by the bytes that are written between two uses of a slot (0: unknown) and the
        cache's size.

        When as much as the cache was written, half of a slot is often still in it; after twice as much, nearly nothing.
        """
        if self.slot_nbytes >= _BEYOND_CACHE_NBYTES:
            self.goes_past_cache = turnover_nbytes == 0 or turnover_nbytes + self.slot_nbytes > cache_nbytes
        else:
            self.goes_past_cache = turnover_nbytes >= 2 * cache_nbytes

    cdef int make_contiguous(self) except -1:
        """Called before a record is written: tensors that are copied into it must be contiguous, since no Python may run
        meanwhile."""
        cdef Part part
        for part in self.parts:
            if part.is_in_place or not part.nbytes:
                continue
            self._look_again(part)
            if not part.address:
                contiguous = PyBytes_FromStringAndSize(NULL, part.nbytes)
                self._copy_strided(part, <uint64_t>PyBytes_AS_STRING(contiguous))
                part.source = contiguous
                part.address = <uint64_t>PyBytes_AS_STRING(contiguous)
                part.storage_nbytes = 0
        return 0

    cdef int _look_again(self, Part part) except -1:
        """The payload may have waited since it was packed: its tensor must still have its memory, at the same address."""
        cdef void* inner
        cdef void* address = NULL
        cdef int64_t has_nbytes = 0
        if not part.storage_nbytes:
            return 0
        inner = <uint8_t*><void*>part.source + self._memory.place
        if self._memory.storage_nbytes(inner, &has_nbytes) or <uint64_t>has_nbytes < part.storage_nbytes \
                or self._memory.data_address(inner, &address) or (part.address and <uint64_t>address != part.address):
            raise TypeError("a tensor of the payload can't be sent: its memory was freed or replaced while it waited to be copied")
        return 0

    cdef uint64_t most_nbytes(self) except 0:
        """The most that :meth:`put_content` writes, with ``for_engine`` and fence. What it copies is contiguous from now on."""
        cdef uint64_t nbytes = _CONTENT_NBYTES + self.for_engine.most_nbytes() + PyBytes_GET_SIZE(self.fence)
        if not self.slot_nbytes:
            self.make_contiguous()
            nbytes += self.region_nbytes
        return nbytes if self.is_payload_in_slot else nbytes + PyBytes_GET_SIZE(self.payload)

    cdef uint32_t content_members(self) noexcept:
        return 4 if self.is_payload_in_slot else 2

    cdef uint8_t* put_content(self, uint8_t* to, SlotNumbers* slot) noexcept:
        """Writes ``copied, payload`` or ``copied, nil, offset, nbytes``.

        Args:
            to: where.
            slot: that of region 0, if there is one.
        """
        cdef Part part
        cdef uint64_t end = 0
        cdef uint8_t* region
        if self.slot_nbytes:
            to = put_slot(to, slot)
        elif self.region_nbytes:
            region = to = put_binary_head(to, self.region_nbytes)
            for part in self.parts:
                if part.is_in_place or not part.nbytes:
                    continue
                memset(region + end, 0, part.offset - end)  # old bytes must not be sent
                memcpy(region + part.offset, <const void*>part.address, part.nbytes)
                end = part.offset + part.nbytes
            to += self.region_nbytes
        else:
            to = put_nil(to)
        if self.is_payload_in_slot:
            to = put_unsigned(put_nil(to), self.payload_offset)
            return put_unsigned(to, PyBytes_GET_SIZE(self.payload))
        memcpy(to, PyBytes_AS_STRING(self.payload), PyBytes_GET_SIZE(self.payload))
        return to + PyBytes_GET_SIZE(self.payload)


cdef uint8_t* put_slot(uint8_t* to, SlotNumbers* slot) noexcept nogil:
    to = put_extension_head(to, SLOT_EXTENSION, SLOT_EXTENSION_NBYTES)
    to = put_little_endian(to, slot.lease_id, 8)
    to = put_little_endian(to, slot.offset, 8)
    to = put_little_endian(to, slot.nbytes, 8)
    return put_little_endian(to, slot.generation, 8)


cdef struct Outgoing:
    # A record that carries a payload, or tells of an end, before it is written.
    uint64_t tag
    uint64_t epoch              # of a submission
    uint64_t number             # of the request, or of the message that is answered
    SlotNumbers* slots          # of a submission, those in place; then that of region 0, if there is one
    uint32_t in_place
    const uint64_t* released    # of an end: generations
    uint32_t released_count


cdef inline Outgoing outgoing(uint64_t tag, uint64_t number) noexcept nogil:
    cdef Outgoing record
    memset(&record, 0, sizeof(record))
    record.tag, record.number = tag, number
    return record


cdef uint64_t most_nbytes(Outgoing* record, Packed packed) except 0:
    """How long a record is, at most. What it copies is contiguous from now on."""
    cdef uint64_t nbytes = FIELDS_NBYTES + <uint64_t>SLOT_NBYTES * record.in_place + 9 * <uint64_t>record.released_count
    return nbytes if packed is None else nbytes + packed.most_nbytes()


cdef uint8_t* put_record(uint8_t* to, Outgoing* record, Packed packed) noexcept:
    """Writes a record; returns where it ends."""
    cdef uint32_t members = 0 if packed is None else packed.content_members(), i
    if record.tag == SUBMIT:
        to = put_unsigned(put_array(to, FOR_ENGINE_MEMBERS + 5 + members), SUBMIT)
        to = put_unsigned(put_unsigned(to, record.epoch), record.number)
        to = packed.for_engine.put(to)
        to = put_binary(to, PyBytes_AS_STRING(packed.fence), PyBytes_GET_SIZE(packed.fence))
        to = put_array(to, record.in_place)
        for i in range(record.in_place):
            to = put_slot(to, record.slots + i)
    elif record.tag == DONE:
        to = put_unsigned(put_unsigned(put_array(to, 3 + members), DONE), record.number)
        to = put_array(to, record.released_count)
        for i in range(record.released_count):
            to = put_unsigned(to, record.released[i])
    else:
        to = put_unsigned(put_unsigned(put_array(to, 2 + members), record.tag), record.number)
    return to if packed is None else packed.put_content(to, record.slots + record.in_place)


cdef bytes record_bytes(Outgoing* record, Packed packed, uint64_t nbytes):
    """Returns a record, of ``nbytes`` at most."""
    cdef PyObject* kept = new_bytes(NULL, nbytes)
    cdef uint8_t* to = <uint8_t*>PyBytes_AS_STRING(<object>kept)
    resize_bytes(&kept, put_record(to, record, packed) - to)
    result = <object>kept
    drop_object(kept)
    return result


cdef int publish(RecordWriter writer, object owner, Outgoing* record, Packed packed, uint64_t nbytes) except -1:
    """Sends a record of ``nbytes`` at most. The link keeps it until there is room, if the ring is full or there is none any more.

    Args:
        writer: None: there is no ring.
        owner: of the link.
    """
    cdef uint8_t* to = NULL
    if writer is not None and writer.is_writable():
        to = writer.reserve(<uint32_t>nbytes)
    if to == NULL:
        owner.link.queue(record_bytes(record, packed, nbytes))
        return 0
    writer.commit(put_record(to, record, packed))
    writer.wake_reader()
    if writer.told:
        owner.link.published()
    return 0
