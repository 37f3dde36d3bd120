"""A lease book on its own, called in C as the ends of a ring call it."""

from libc.stdint cimport uint64_t

from shmring.core.compiled cimport BLOCK_NBYTES, SLOT_HEADER_NBYTES, ClientBook, ClientSlotRecord


cdef class CalledBook:
    """What is allocated is acquired and submitted; what is freed comes back from the engine.

    Its places are the generations of slots, which are what the engine sends back.
    """

    cdef readonly ClientBook book

    def __init__(self, ClientBook book not None):
        self.book = book

    def allocate(self, uint64_t length):
        """Returns the generation of a slot of so many blocks, its header included; None if there is no room for it."""
        cdef ClientSlotRecord slot = self.book.acquire_slot(length * BLOCK_NBYTES - SLOT_HEADER_NBYTES, False)
        return None if slot is None else self.book.submit_slot(slot, self.book)

    def free(self, uint64_t generation, uint64_t length):
        """The engine releases what was submitted under this generation."""
        self.book.release_generation(generation, 0.0)
        self.book.serve()
