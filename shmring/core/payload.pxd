"""The C interface of :mod:`shmring.core.payload`."""

cimport cython
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from shmring.core.dlpack cimport DLPackExchangeAPI, DLTensor
from shmring.core.held_slots cimport HeldSlots
from shmring.core.message_ring cimport RecordWriter
from shmring.core.wire cimport Bounds, SlotNumbers


cdef struct Growing:
    # Bytes that are being written, and are moved to the heap when they are too many for where they begin.
    uint8_t* start
    uint8_t* at
    uint8_t* end
    bint is_on_heap
    bint is_foreign    # whether msgspec wrote some of them


cdef struct TensorMemory:
    # Functions of torch's own C interface, which return 0 if they succeed, and how far into a tensor's object the tensor is that they take.
    int (*storage_nbytes)(void*, int64_t*) noexcept
    int (*storage_offset)(void*, int64_t*) noexcept
    int (*data_address)(void*, void**) noexcept
    uint64_t place


@cython.final
cdef class Part:
    cdef readonly object source
    cdef readonly tuple shape
    cdef readonly bytes spelling
    cdef readonly uint64_t nbytes
    cdef readonly uint64_t location    # of its bytes, if they are contiguous memory that can be taken as they are; else 0
    cdef readonly uint64_t address     # the same, if that is host memory
    cdef readonly uint64_t offset
    cdef readonly uint32_t region
    cdef readonly uint8_t dtype
    cdef readonly bint is_in_place
    cdef uint64_t storage_nbytes       # that its tensor's storage must have for as long as it is copied from; 0: it is not asked


@cython.final
cdef class Packed:
    cdef readonly bytes payload
    cdef readonly list parts
    cdef public list slots
    cdef readonly uint64_t copied_nbytes
    cdef readonly uint64_t in_place_nbytes
    cdef readonly uint32_t copied
    cdef readonly uint32_t in_place
    cdef readonly uint64_t region_nbytes    # of region 0
    cdef readonly uint64_t slot_nbytes      # of the slot that region 0 needs; 0: it travels in the record
    cdef readonly uint64_t payload_offset   # in that slot, if the payload travels there
    cdef readonly bint is_payload_in_slot
    cdef bint goes_past_cache               # whether what is large is copied to the slot past the cache
    cdef uint64_t _max_payload_nbytes
    cdef TensorMemory _memory
    cdef object _copy_strided
    cdef object _copy_past_cache
    cdef object _copy_into_cache

    cdef int lay_out(self, uint64_t inline_nbytes, uint64_t largest_record_nbytes, uint32_t slots) except -1
    cpdef int copy_into(self, uint64_t address) except -1
    cdef int copy_to(self, uint8_t* to, bint without_lock) except -1
    cdef void choose_way(self, uint64_t turnover_nbytes, uint64_t cache_nbytes) noexcept
    cdef int make_contiguous(self) except -1
    cdef int _look_again(self, Part part) except -1
    cdef uint64_t content_nbytes(self) noexcept
    cdef uint32_t content_members(self) noexcept
    cdef uint8_t* put_content(self, uint8_t* to, SlotNumbers* slot) noexcept


@cython.final
cdef class Packer:
    cdef Bounds _bounds
    cdef uint64_t _max_payload_nbytes
    cdef tuple _tensor_types
    cdef DLPackExchangeAPI* _table
    cdef TensorMemory _memory
    cdef object _is_negative
    cdef object _describe
    cdef object _copy_strided
    cdef object _copy_past_cache
    cdef object _copy_into_cache
    cdef object _explain
    cdef object _encode
    cdef Packed _packed   # that is being made
    cdef HeldSlots _held

    cpdef Packed pack(self, object payload, uint64_t inline_nbytes, uint64_t largest_record_nbytes, HeldSlots held=*)
    cdef Part _tensor(self, tensor, DLTensor* described)
    cdef uint64_t _storage_nbytes(self, tensor, uint64_t last, uint64_t item_nbytes) noexcept
    cdef int _place(self, Part part) except -1
    cdef int _put(self, Growing* out, object value, int depth) except -1
    cdef int _put_foreign(self, Growing* out, object value) except -1
    cdef int _put_text(self, Growing* out, str value) except -1
    cdef int _put_int(self, Growing* out, object value) except -1
    cdef int _put_dict(self, Growing* out, dict value, int depth) except -1
    cdef int _put_list(self, Growing* out, list value, int depth) except -1
    cdef int _put_tuple(self, Growing* out, tuple value, int depth) except -1
    cdef int _put_tensor(self, Growing* out, object value) except -1


cdef uint8_t* put_slot(uint8_t* to, SlotNumbers* slot) noexcept nogil
cdef uint64_t submit_nbytes(Packed packed, uint64_t epoch, uint64_t request_id, str name, bytes fence, uint32_t count) except 0
cdef bytes submit_record(
    Packed packed, uint64_t epoch, uint64_t request_id, str name, bytes fence, SlotNumbers* slots, uint32_t count
)
cdef bint put_submit(
    RecordWriter writer, uint64_t nbytes, Packed packed, uint64_t epoch, uint64_t request_id, str name, bytes fence, SlotNumbers* slots, uint32_t count
) except -1
cdef uint64_t reply_nbytes(Packed packed, uint64_t request_id) except 0
cdef bytes reply_record(Packed packed, uint64_t request_id, SlotNumbers* slot)
cdef bint put_reply(RecordWriter writer, Packed packed, uint64_t request_id, SlotNumbers* slot) except -1
cdef bint put_done(
    RecordWriter writer, uint64_t request_id, const uint64_t* released, uint32_t count, Packed reply, SlotNumbers* slot
) except -1
cdef bytes done_record(uint64_t request_id, const uint64_t* released, uint32_t count, Packed reply, SlotNumbers* slot)
