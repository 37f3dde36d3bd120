"""Payloads that came: decoding them, and views of the regions that their tensors are in.

msgspec decodes a payload and asks for each extension; a tensor becomes a view of its region, which is opened with the first view
of it. :class:`ContentRegions` are the regions of one content: who is done with it leaves each of its slots, and learns whether
views of that slot are still alive. Everything was checked when the content came (:mod:`.wire`); a content that has not been
checked must not come here.

What torch and numpy are is not known here: torch tensors are made by the maker that is handed in, everything else (arrays, tensors
without content, dtypes that DLPack does not carry) by a function that is handed in.
"""

import msgspec
from msgspec.msgpack import Ext

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING
from cpython.ref cimport PyObject
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from shmring.core.mapping cimport Mapping
from shmring.core.msgpack cimport read_little_endian
from shmring.core.views cimport (
    Lent, RegionBytes, Regions, TensorMaker, copy_region, drop_region, is_region_viewed, keeping_region, leave_region, lend_bytes,
)
from shmring.core.wire cimport MAX_DIMENSIONS, TENSOR_EXTENSION, Content, SlotNumbers, TensorNumbers, read_tensor, tensor_ref

from shmring.core.messages import SLOT_HEADER_NBYTES
from shmring.errors import RemoteProtocolError

cdef extern from "Python.h":
    Py_buffer* PyMemoryView_GET_BUFFER(object view)

cdef enum:
    _SLOT_HEADER_NBYTES = 64
    _FEW = 2

assert _SLOT_HEADER_NBYTES == SLOT_HEADER_NBYTES


@cython.final
@cython.no_gc
@cython.freelist(64)
cdef class ContentRegions:
    """The regions of one content, until they are left."""

    def __dealloc__(self) -> None:
        cdef uint32_t slot
        if self._inline != NULL:
            drop_region(self._inline)
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
                if self._inline == NULL:
                    self._inline = copy_region(PyBytes_AS_STRING(content.inline), content.inline_nbytes)
                return self._inline
            number = content.slot_count
        slot = number - 1
        if self._slots[slot] == NULL:
            numbers = content.slot_numbers + slot
            if self.is_copied_out:
                self._slots[slot] = copy_region(self._mapping.mapped.address + numbers.offset + _SLOT_HEADER_NBYTES, numbers.nbytes)
                return self._slots[slot]
            if self.kept != NULL:
                self._slots[slot] = keeping_region(
                    self._mapping.mapped, numbers.offset + _SLOT_HEADER_NBYTES, numbers.nbytes, self.kept
                )
                return self._slots[slot]
            self._slots[slot] = self._regions.lend(
                self._mapping.mapped, numbers.offset + _SLOT_HEADER_NBYTES, numbers.nbytes, self.client_id, numbers.generation
            )
        return self._slots[slot]

    def memory(self, number: int) -> RegionBytes:
        """Returns the bytes of a region as a buffer that counts as a view. ``number``: as in ``TensorRef``."""
        if number and number == self.content.slot_count and self.content.is_copied_to_slot:
            number = 0
        return lend_bytes(self.region(number))

    cdef bint is_viewed(self, uint32_t slot) noexcept:
        """Whether a view of a slot is alive."""
        return self._slots[slot] != NULL and is_region_viewed(self._slots[slot])

    cdef bint leave(self, uint32_t slot) noexcept:
        """Makes no further views of a slot; returns whether views are alive, of whose death the regions will tell."""
        cdef Lent* region = self._slots[slot]
        self._slots[slot] = NULL
        return region != NULL and leave_region(region)


cdef ContentRegions regions_of(Content content, uint64_t client_id, Regions regions, Mapping mapping):
    cdef ContentRegions made = ContentRegions.__new__(ContentRegions)
    made.content = content
    made.client_id = client_id
    made._regions = regions
    made._mapping = mapping
    if content.slot_count <= _FEW:
        made._slots = made._few
    else:
        made._slots = <Lent**>malloc(content.slot_count * sizeof(Lent*))
        if made._slots == NULL:
            raise MemoryError
        memset(made._slots, 0, content.slot_count * sizeof(Lent*))
    return made


cdef class PayloadDecoder:
    """Decodes payloads into plain objects, or into a msgspec type.

    Args:
        payload_type: what to decode into; ``Any`` gives dicts, lists, numbers, text and tensors.
        convert: msgspec's ``dec_hook``.
        maker: of torch tensors.
        dtypes: (DLPack's code, bits) by the wire's number; None: ``other`` makes tensors of that dtype.
        other: ``other(ref, memory)`` makes what the maker does not: an array, or a tensor of a dtype without a code. ``memory``:
            the region as a buffer; None if there are no bytes.
    """

    def __init__(self, payload_type, convert, TensorMaker maker not None, dtypes, other) -> None:
        self._decode = msgspec.msgpack.Decoder(payload_type, ext_hook=self._decode_extension, dec_hook=convert).decode
        self._maker = maker
        self._other = other
        for number, dtype in enumerate(dtypes):
            if dtype is not None:
                self._codes[number], self._bits[number] = dtype

    cdef object decode(self, ContentRegions regions, object place):
        """Returns the payload of a content whose tensors were checked.

        Args:
            regions: of the content.
            place: ``place(ref)`` makes tensors in place of views, those for which it does not return None. May be None.

        Raises:
            RemoteProtocolError: it is not msgpack that Python can hold.
            msgspec.ValidationError: it is not of ``payload_type``.
        """
        cdef ContentRegions outer = self._content_regions
        cdef object outer_place = self._place
        self._content_regions, self._place = regions, place
        try:
            return self._decode(regions.content.payload)
        except msgspec.ValidationError:
            raise
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise RemoteProtocolError(f"a payload is not msgpack: {error}") from error
        finally:
            self._content_regions, self._place = outer, outer_place

    def decode_again(self, ContentRegions regions not None, place):
        """Decodes a payload with tensors that ``place(ref)`` makes, for a content that was decoded before.

        Raises:
            RemoteProtocolError, msgspec.ValidationError: as the first time, and what ``place`` raises.
        """
        return self.decode(regions, place)

    def _decode_extension(self, int code, data):
        cdef TensorNumbers tensor
        cdef int64_t shape[MAX_DIMENSIONS]
        cdef Py_buffer* buffer
        cdef ContentRegions regions = self._content_regions
        cdef Lent* region
        cdef int i
        if code != TENSOR_EXTENSION:
            return Ext(code, bytes(data))
        buffer = PyMemoryView_GET_BUFFER(data)
        if regions is None or not read_tensor(<const uint8_t*>buffer.buf, buffer.len, &tensor):
            raise RemoteProtocolError("a tensor outside of a payload that was checked")
        if self._place is not None:
            placed = self._place(tensor_ref(&tensor, regions.content))
            if placed is not None:
                return placed
        if not tensor.nbytes:
            return self._other(tensor_ref(&tensor, regions.content), None)
        region = regions.region(tensor.region)
        if not tensor.dtype or not self._bits[tensor.dtype]:
            return self._other(tensor_ref(&tensor, regions.content), lend_bytes(region))
        for i in range(tensor.ndim):
            shape[i] = <int64_t>read_little_endian(tensor.shape + 8 * i, 8)
        return self._maker.view(region, tensor.offset, tensor.ndim, shape, self._codes[tensor.dtype], self._bits[tensor.dtype])


def decode_content(PayloadDecoder decoder not None, Content content not None, client_id: int, Regions regions, Mapping mapping, place=None):
    """Decodes a content, and leaves its slots; for tests. Returns the payload, and whether each slot is viewed."""
    cdef ContentRegions opened = regions_of(content, client_id, regions, mapping)
    cdef uint32_t slot
    payload = decoder.decode(opened, place)
    return payload, [opened.leave(slot) for slot in range(content.slot_count)]
