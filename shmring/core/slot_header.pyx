"""The header before the content of a slot: magic, generation and size, so that a claim can check that the slot is the announced
one.

The content begins on a cache line, and each tensor in it on one of its own.
"""

from libc.stdint cimport uint64_t
from libc.string cimport memcmp, memcpy

from shmring.core.messages import SLOT_HEADER_NBYTES as _SLOT_HEADER_NBYTES
from shmring.core.messages import SLOT_MAGIC as _SLOT_MAGIC
from shmring.core.messages import TENSOR_ALIGNMENT as _TENSOR_ALIGNMENT

cdef enum:  # for C, which takes no constants from Python
    SLOT_HEADER_NBYTES = 64  # magic, generation and bytes; the rest of it is free
    TENSOR_ALIGNMENT = 64
    MAGIC_NBYTES = 8

assert (_SLOT_HEADER_NBYTES, _TENSOR_ALIGNMENT) == (SLOT_HEADER_NBYTES, TENSOR_ALIGNMENT)

cdef bytes SLOT_MAGIC = _SLOT_MAGIC


cdef inline uint64_t align(uint64_t nbytes) noexcept nogil:
    """Rounds up to where the next tensor may start."""
    return (nbytes + TENSOR_ALIGNMENT - 1) & ~<uint64_t>(TENSOR_ALIGNMENT - 1)


cdef inline void put_header(char* at, const char* magic, const SlotNumbers* slot) noexcept nogil:
    memcpy(at, magic, MAGIC_NBYTES)
    memcpy(at + 8, &slot.generation, 8)
    memcpy(at + 16, &slot.nbytes, 8)


cdef inline bint read_header(const char* at, const char* magic, uint64_t* generation, uint64_t* nbytes) noexcept nogil:
    """Reads a header once, since another process may be writing it; returns False if there is none."""
    cdef char header[24]
    memcpy(header, at, 24)
    memcpy(generation, header + 8, 8)
    memcpy(nbytes, header + 16, 8)
    return not memcmp(header, magic, MAGIC_NBYTES)
