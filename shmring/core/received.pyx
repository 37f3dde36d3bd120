"""Receiving payloads: decoding them, and views of the regions that their tensors are in.

Common payloads are decoded here: maps with keys of text, arrays, numbers, text, bytes and tensors. msgspec decodes payloads
with other values, and payloads that are decoded into a msgspec type; it calls back for each extension. Both decoders make the
same values. A tensor becomes a view of its region, which is opened with the first view of it. :class:`ContentRegions` are the
regions of one content. When the content is no longer needed, each of its slots is left, which returns whether views of that
slot are still alive. The content was checked when it came (``wire.pyx``); an unchecked content must not come here.

This file does not know torch and numpy: the maker that is handed in makes torch tensors, and a function that is handed in makes
the rest (arrays, tensors without content, dtypes that DLPack does not have).
"""

from typing import Any

import msgspec
from msgspec.msgpack import Ext

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_SetItem
from cpython.list cimport PyList_New, PyList_SET_ITEM
from cpython.long cimport PyLong_FromUnsignedLongLong
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF, Py_XDECREF
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport UINT32_MAX, int8_t, int16_t, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memcpy, memset

from shmring.errors import RemoteProtocolError

cdef enum:
    _KEPT_KEYS = 64
    _KEPT_KEY_NBYTES = 32

cdef enum:
    _FEW_REGIONS = 2
    _PAUSING_COUNT = 2048  # from about as many arrays on as the collector's first threshold

cdef object _OTHERWISE = object()


cdef bint pause_collector(uint64_t value_count) noexcept:
    """Pauses the garbage collector while many values are decoded; returns whether it is to be enabled again.

    It would go through all objects of the process several times, although no decoded value is garbage yet: 60,000 empty arrays
    took 8 ms instead of 2, a million 720 instead of 45. It is paused for as long as one payload takes. Other threads seldom run
    then (only where a caller's own code converts values), and lose little if they do: if two threads pause it, it is enabled
    again early; and if a thread disables it meanwhile, that is undone.
    """
    return value_count > _PAUSING_COUNT and PyGC_Disable()


def decode_values(encoded: bytes, max_values: int) -> object:
    """Decodes values without tensors, such as the arguments of a call.

    Raises:
        RemoteProtocolError: they are not one msgpack value, or count more than this.
        msgspec.MsgspecError: they are not msgpack that Python can hold.
    """
    cdef bint is_paused = pause_collector(measure(encoded, bounds_of(UINT32_MAX, max_values)).values)
    try:
        return msgspec.msgpack.decode(encoded)
    finally:
        if is_paused:
            PyGC_Enable()


@cython.final
@cython.no_gc
@cython.freelist(64)
cdef class ContentRegions:
    """The regions of one content, until they are left."""

    cdef readonly Content content
    cdef readonly uint64_t client_id
    cdef Regions _regions
    cdef Mapping _mapping
    cdef Lent** _slots       # by number, less one; NULL: no view was made yet, or it was left
    cdef Lent* _few[2]
    cdef bint is_copied_out  # its views show copies of the slots, which may be given back at once
    cdef Owner* owner        # kept by its views, which the regions then do not count; NULL: the regions count the views

    def __dealloc__(self) -> None:
        cdef uint32_t slot
        if self._slots == NULL:
            return
        for slot in range(self.content.slot_count):
            if self._slots[slot] != NULL:
                drop_region(self._slots[slot])
        if self._slots != self._few:
            free(self._slots)

    cdef Lent* region(self, uint32_t number) except NULL:
        """The region of this number on the wire, for a view to be made of it."""
        cdef Content content = self.content
        cdef SlotNumbers* numbers
        cdef uint32_t slot
        if not number:
            if not content.is_copied_to_slot:
                return content.inline_region
            number = content.slot_count
        slot = number - 1
        if self._slots[slot] == NULL:
            numbers = content.slot_numbers + slot
            if self.is_copied_out:
                self._slots[slot] = copy_region(self._mapping.at(numbers.offset + SLOT_HEADER_NBYTES, numbers.nbytes), numbers.nbytes)
                return self._slots[slot]
            if self.owner != NULL:
                self._slots[slot] = keeping_region(
                    self._mapping.mapped, numbers.offset + SLOT_HEADER_NBYTES, numbers.nbytes, self.owner
                )
                return self._slots[slot]
            self._slots[slot] = self._regions.lend(
                self._mapping.mapped, numbers.offset + SLOT_HEADER_NBYTES, numbers.nbytes, self.client_id, numbers.generation
            )
        return self._slots[slot]

    def memory(self, number: int) -> RegionBytes:
        """Returns the bytes of a region as a buffer that counts as a view. ``number``: as in ``TensorRef``."""
        return lend_bytes(self.region(number))

    cdef bint is_viewed(self, uint32_t slot) noexcept:
        """Whether a view of a slot is alive."""
        return self._slots[slot] != NULL and is_region_viewed(self._slots[slot])

    cdef bint leave(self, uint32_t slot) noexcept:
        """Makes no further views of a slot; returns whether views are alive, whose death the regions will report."""
        cdef Lent* region = self._slots[slot]
        self._slots[slot] = NULL
        return region != NULL and leave_region(region)


cdef ContentRegions regions_of(Content content, uint64_t client_id, Regions regions, Mapping mapping):
    cdef ContentRegions made = ContentRegions.__new__(ContentRegions)
    made.content = content
    made.client_id = client_id
    made._regions = regions
    made._mapping = mapping
    if content.slot_count <= _FEW_REGIONS:
        made._slots = made._few
    else:
        made._slots = <Lent**>malloc(content.slot_count * sizeof(Lent*))
        if made._slots == NULL:
            raise MemoryError
        memset(made._slots, 0, content.slot_count * sizeof(Lent*))
    return made


cdef object _scalar(uint8_t head, Value* value):
    """A negative number, a truth value or a float, of which the head is given."""
    cdef uint64_t bits
    cdef double number
    cdef float short_number
    cdef uint32_t short_bits
    if head >= 0xE0:
        return <int64_t><int8_t>head
    if head == 0xC2:
        return False
    if head == 0xC3:
        return True
    bits = read_big_endian(value.data, <int>value.nbytes)
    if head == 0xCB:
        memcpy(&number, &bits, 8)
        return number
    if head == 0xCA:
        short_bits = <uint32_t>bits
        memcpy(&short_number, &short_bits, 4)
        return <double>short_number
    if value.nbytes == 1:
        return <int64_t><int8_t>bits
    if value.nbytes == 2:
        return <int64_t><int16_t>bits
    if value.nbytes == 4:
        return <int64_t><int32_t>bits
    return <int64_t>bits


@cython.final
cdef class PayloadDecoder:
    """Decodes payloads into plain objects, or into a msgspec type.

    Args:
        payload_type: what to decode into; ``Any`` gives dicts, lists, numbers, text and tensors.
        convert: msgspec's ``dec_hook``.
        maker: of torch tensors.
        dtypes: (DLPack's code, bits) by the wire's number; None: ``other`` makes tensors of that dtype.
        other: ``other(ref, memory)`` makes an array, or a tensor of a dtype without a code, which the maker does not make.
            ``memory``: the region as a buffer; None if there are no bytes.
        on_gpu: ``on_gpu(dtype)`` returns DLPack's code and bits of any other dtype, and the dtype to view such a tensor as, or
            None. It returns None if no tensor on a GPU has that dtype.
    """

    cdef bint _is_plain
    cdef PyObject* _keys[_KEPT_KEYS]  # texts that were keys, each owned; NULL: none yet
    cdef object _decode
    cdef TensorMaker _maker
    cdef object _other
    cdef object _on_gpu
    cdef uint8_t _codes[64]   # DLPack's, by the wire's number
    cdef uint8_t _bits[64]    # 0: this torch does not take it through DLPack
    cdef ContentRegions _content_regions
    cdef Placement _placement

    def __init__(
        self,
        payload_type,
        convert: Callable[[Any, Any], Any],
        TensorMaker maker not None,
        dtypes: Sequence[tuple[int, int] | None],
        other: Callable[[TensorRef, RegionBytes | None], Any],
        on_gpu: Callable[[str], tuple[int, int, torch.dtype | None] | None],
    ) -> None:
        self._is_plain = payload_type is Any
        self._decode = msgspec.msgpack.Decoder(payload_type, ext_hook=self._decode_extension, dec_hook=convert).decode
        self._maker = maker
        self._other = other
        self._on_gpu = on_gpu
        for number, dtype in enumerate(dtypes):
            if dtype is not None:
                self._codes[number], self._bits[number] = dtype

    cdef object decode(self, ContentRegions regions, Placement placement):
        """Returns the payload of a content whose tensors were checked.

        Args:
            regions: of the content.
            placement: where its tensors are made; None: they are views of where they lie.

        Raises:
            RemoteProtocolError: it is not msgpack that Python can hold.
            msgspec.ValidationError: it is not of ``payload_type``.
        """
        cdef Cursor cursor
        cdef bint is_paused = pause_collector(regions.content.value_count)
        cdef ContentRegions outer = self._content_regions
        cdef Placement outer_placement = self._placement
        self._content_regions, self._placement = regions, placement
        try:
            if self._is_plain:
                cursor.at = <const uint8_t*>PyBytes_AS_STRING(regions.content.payload)
                cursor.end = cursor.at + PyBytes_GET_SIZE(regions.content.payload)
                decoded = self._value(regions, &cursor, 0)
                if decoded is not _OTHERWISE:
                    return decoded
            return self._decode_with_msgspec(regions)
        finally:
            self._content_regions, self._placement = outer, outer_placement
            if is_paused:
                PyGC_Enable()

    cdef object _decode_with_msgspec(self, ContentRegions regions):
        try:
            return self._decode(regions.content.payload)
        except msgspec.ValidationError:
            raise
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise RemoteProtocolError(f"a payload is not msgpack: {error}") from error

    def decode_again(self, ContentRegions regions not None, Placement placement not None):
        """Decodes the payload of a content once more, with its tensors made in another place.

        Raises:
            RemoteProtocolError, msgspec.ValidationError: as the first time.
        """
        return self.decode(regions, placement)

    cdef object _value(self, ContentRegions regions, Cursor* cursor, int depth):
        """Decodes the next value; returns ``_OTHERWISE`` if msgspec has to decode something in it."""
        cdef Value value
        cdef TensorNumbers tensor
        cdef uint8_t head
        cdef Kind kind
        if depth > MAX_DEPTH or cursor.at >= cursor.end:
            return _OTHERWISE
        head = cursor.at[0]
        kind = read_value(cursor, &value)
        if kind == UNSIGNED:
            return PyLong_FromUnsignedLongLong(value.number)
        if kind == TEXT:
            try:
                return PyUnicode_DecodeUTF8(<const char*>value.data, value.nbytes, NULL)
            except UnicodeDecodeError:
                return _OTHERWISE
        if kind == MAP:
            return self._map(regions, cursor, value.number, depth)
        if kind == ARRAY:
            return self._array(regions, cursor, value.number, depth)
        if kind == EXTENSION:
            if value.type != TENSOR_EXTENSION or not read_tensor(value.data, value.nbytes, &tensor):
                return _OTHERWISE
            return self._tensor(regions, &tensor)
        if kind == NIL:
            return None
        if kind == BINARY:
            return PyBytes_FromStringAndSize(<const char*>value.data, value.nbytes)
        if kind == OTHER:
            return _scalar(head, &value)
        return _OTHERWISE

    cdef object _map(self, ContentRegions regions, Cursor* cursor, uint64_t count, int depth):
        cdef Value value
        cdef uint64_t i
        made = {}
        for i in range(count):
            if read_value(cursor, &value) != TEXT:
                return _OTHERWISE
            key = self._key(value.data, value.nbytes)
            if key is None:
                return _OTHERWISE
            member = self._value(regions, cursor, depth + 1)
            if member is _OTHERWISE:
                return _OTHERWISE
            PyDict_SetItem(made, key, member)
        return made

    cdef object _array(self, ContentRegions regions, Cursor* cursor, uint64_t count, int depth):
        cdef uint64_t i
        cdef list made
        if count > <uint64_t>(cursor.end - cursor.at):
            return _OTHERWISE
        made = PyList_New(count)
        for i in range(count):
            member = self._value(regions, cursor, depth + 1)
            if member is _OTHERWISE:
                return _OTHERWISE
            Py_INCREF(member)
            PyList_SET_ITEM(made, i, member)
        return made

    cdef object _key(self, const uint8_t* data, uint64_t nbytes):
        """The text of a key, which has mostly come before; None if it is not UTF-8."""
        cdef PyObject** known
        cdef bint is_kept = 0 < nbytes <= _KEPT_KEY_NBYTES
        if is_kept:
            known = &self._keys[(data[0] + 7 * data[nbytes - 1] + 31 * nbytes) % _KEPT_KEYS]
            if known[0] != NULL and <uint64_t>PyUnicode_GET_LENGTH(<object>known[0]) == nbytes \
                    and not memcmp(PyUnicode_DATA(<object>known[0]), data, nbytes):
                return <object>known[0]
        try:
            key = PyUnicode_DecodeUTF8(<const char*>data, nbytes, NULL)
        except UnicodeDecodeError:
            return None
        if is_kept and PyUnicode_IS_ASCII(key):  # whose bytes are those of its text
            Py_INCREF(key)
            Py_XDECREF(known[0])
            known[0] = <PyObject*>key
        return key

    def __dealloc__(self) -> None:
        cdef int i
        for i in range(_KEPT_KEYS):
            Py_XDECREF(self._keys[i])

    def _decode_extension(self, int code, data):
        cdef TensorNumbers tensor
        cdef Py_buffer* buffer
        cdef ContentRegions regions = self._content_regions
        if code != TENSOR_EXTENSION:
            return Ext(code, bytes(data))
        buffer = PyMemoryView_GET_BUFFER(data)
        if regions is None or not read_tensor(<const uint8_t*>buffer.buf, buffer.len, &tensor):
            raise RemoteProtocolError("a tensor outside of a payload that was checked")
        return self._tensor(regions, &tensor)

    cdef object _tensor(self, ContentRegions regions, TensorNumbers* tensor):
        """Makes a tensor where the placement says; without one, as a view of its bytes where they are."""
        if self._placement is not None:
            return self._placed(regions, tensor, self._placement)
        return self._viewed(regions, tensor)

    cdef object _viewed(self, ContentRegions regions, TensorNumbers* tensor):
        cdef Lent* region
        if not tensor.nbytes:
            return self._other(tensor_ref(tensor, regions.content), None)
        region = regions.region(tensor.region)
        if not tensor.dtype or not self._bits[tensor.dtype]:
            return self._other(tensor_ref(tensor, regions.content), lend_bytes(region))
        return self._view(region, tensor.offset, tensor, self._codes[tensor.dtype], self._bits[tensor.dtype])

    cdef object _view(self, Lent* region, uint64_t offset, TensorNumbers* tensor, uint8_t code, uint8_t bits):
        cdef int64_t shape[MAX_DIMENSIONS]
        cdef int i
        for i in range(tensor.ndim):
            shape[i] = <int64_t>read_little_endian(tensor.shape + 8 * i, 8)
        return self._maker.view(region, offset, tensor.ndim, shape, code, bits)

    cdef object _gpu_dtype(self, TensorNumbers* tensor, Content content, uint8_t* code, uint8_t* bits):
        """Sets DLPack's code and bits of a tensor on a GPU; returns the dtype to view it as then, or None. ``_OTHERWISE``: no
        GPU has its dtype."""
        if tensor.dtype and self._bits[tensor.dtype]:
            code[0], bits[0] = self._codes[tensor.dtype], self._bits[tensor.dtype]
            return None
        known = self._on_gpu(tensor_ref(tensor, content).dtype)
        if known is None:
            return _OTHERWISE
        code[0], bits[0], dtype = known
        return dtype

    cdef bint is_for_gpu(self, TensorNumbers* tensor, Content content) except -1:
        """Whether a GPU can have a tensor."""
        cdef uint8_t code, bits
        return self._gpu_dtype(tensor, content, &code, &bits) is not _OTHERWISE

    cdef object _placed(self, ContentRegions regions, TensorNumbers* tensor, Placement placement):
        cdef Region region = placement.given.get(regions.content.slot_of(tensor.region))
        cdef uint64_t at = tensor.offset
        cdef uint8_t code = 0, bits = 0
        if region is None and not placement.is_copied:
            return self._viewed(regions, tensor)
        dtype = self._gpu_dtype(tensor, regions.content, &code, &bits)
        if region is not None:
            if not tensor.dtype or dtype is _OTHERWISE:
                raise RemoteProtocolError(f"a {tensor_ref(tensor, regions.content).dtype} tensor can't be in device memory")
        elif dtype is _OTHERWISE:
            view = self._viewed(regions, tensor)
            return view.copy()
        elif placement.target is not None:
            region = placement.target
            if tensor.nbytes:
                at = placement.find(regions.content.slot_of(tensor.region), at)
        else:  # without content, where nothing is copied
            region = next(iter(placement.given.values()))
        made = self._view(region.lent(), at if tensor.nbytes else 0, tensor, code, bits)
        return made if dtype is None else made.view(dtype)
