"""Arithmetic that C has no operator for."""

from libc.stdint cimport uint64_t

cdef extern from * nogil:
    """
    #define multiply_overflows(a, b, product) __builtin_mul_overflow(a, b, product)
    #define lowest_bit(mask) __builtin_ctzll(mask)
    """
    bint multiply_overflows(uint64_t a, uint64_t b, uint64_t* product)  # else it is in ``product``
    int lowest_bit(uint64_t mask)
