"""Loads and stores of memory that other threads read and write at the same time. ``atomics.h`` says what each of them
orders."""

from libc.stdint cimport int32_t, uint32_t, uint64_t

cdef extern from "atomics.h" nogil:
    void store_release_u64(void* at, uint64_t value)
    void store_relaxed_u32(void* at, uint32_t value)
    void store_relaxed_u64(void* at, uint64_t value)
    uint64_t load_acquire_u64(const void* at)
    uint32_t load_relaxed_u32(const void* at)
    uint64_t load_relaxed_u64(const void* at)
    uint32_t exchange_u32(void* at, uint32_t value)
    uint64_t exchange_u64(void* at, uint64_t value)
    void fence_full()
    void take_reference(int32_t* count)
    int32_t drop_reference(int32_t* count)
    int32_t count_references(const int32_t* count)
    void* load_top(void** top)
    bint push_top(void** top, void** seen, void* item)
    void* take_stack(void** top, void* instead)
