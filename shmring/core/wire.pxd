"""The C interface of :mod:`shmring.core.wire`."""

cimport cython
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from shmring.core.msgpack cimport Cursor, Value

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


@cython.final

cdef class Content:
    cdef readonly bytes payload
    cdef readonly bytes fence
    cdef readonly bytes inline
    cdef readonly uint32_t tensor_count
    cdef readonly uint64_t value_count
    cdef readonly uint64_t payload_offset   # in the slot of the copied bytes, if payload_nbytes
    cdef readonly uint64_t payload_nbytes
    cdef readonly bint is_copied_to_slot    # region 0 is the last slot, else the inline bytes
    cdef uint32_t slot_count
    cdef uint64_t inline_nbytes
    cdef SlotNumbers* slot_numbers
    cdef SlotNumbers few_slots[2]

    cdef uint64_t region_nbytes(self, uint32_t region) noexcept nogil
    cdef int reserve_slots(self, uint64_t count) except -1
    cdef int check_payload(self, bytes payload, Bounds bounds) except -1
    cdef int walk_payload(self, Cursor* cursor, Bounds bounds) except -1


@cython.final
cdef class Submit:
    cdef readonly uint64_t epoch
    cdef readonly uint64_t request_id
    cdef readonly str name
    cdef readonly Content content


@cython.final
cdef class Reply:
    cdef readonly uint64_t request_id
    cdef readonly Content content


@cython.final
cdef class Done:
    cdef readonly uint64_t request_id
    cdef readonly tuple released
    cdef readonly Content content


cdef bint read_tensor(const uint8_t* data, uint64_t nbytes, TensorNumbers* tensor) noexcept nogil
cdef uint8_t* put_tensor(
    uint8_t* to, uint32_t region, uint64_t offset, uint64_t nbytes, uint8_t dtype, int ndim, const int64_t* shape
) noexcept nogil
cdef bytes tensor_extension(
    uint32_t region, uint64_t offset, uint64_t nbytes, uint8_t dtype, bytes spelling, int ndim, const int64_t* shape
)
cdef int check_tensor(TensorNumbers* tensor, uint64_t region_nbytes) except -1
cdef object read_hot_record(const uint8_t* record, uint32_t nbytes, Bounds bounds, bint from_engine)
cdef int walk(Cursor* cursor, Content content, Bounds bounds, Bounds* found) except -1
cdef Bounds bounds_of(max_tensors, max_values) except *
cdef object too_many_values(str what, uint64_t count, uint64_t max_values)
cdef Bounds measure(bytes payload, Bounds bounds) except *
cdef object tensor_ref(TensorNumbers* tensor, Content content)
cdef Submit read_submit_record(const uint8_t* record, uint32_t nbytes, Bounds bounds)
cdef bint read_plain_done(const uint8_t* record, uint32_t nbytes, uint64_t* request_id, Cursor* released, uint64_t* count) except -1
cdef int read_slot(Value* value, SlotNumbers* slot) except -1
cdef int read_content(Cursor* cursor, Content content, uint64_t members, Bounds bounds) except -1
