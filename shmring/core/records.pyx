"""What the engine's book writes down: leases, slots, requests, waiters, clients. Only :mod:`.engine_book` and :mod:`.lending` change them.

All fields can be read and written from Python, so that tests can look at a book, copy it and damage it.
"""

import cython

from shmring.core.transitions cimport engine_slots, leases, requests


@cython.final
cdef class LeaseRecord:
    @property
    def state(self):
        return leases.state(self.state_number)

    @state.setter
    def state(self, int state):
        self.state_number = state

    @property
    def end(self):
        return self.start + self.blocks


@cython.final
@cython.no_gc
cdef class KeptRecord:
    """Content that the engine keeps."""


@cython.final
@cython.no_gc
cdef class Piece:
    """A range that is lent or kept, as a whole."""


@cython.final
@cython.freelist(256)
@cython.no_gc
cdef class EngineSlotRecord:
    @property
    def state(self):
        return engine_slots.state(self.state_number)

    @state.setter
    def state(self, int state):
        self.state_number = state


@cython.final
@cython.freelist(256)
@cython.no_gc
cdef class RequestRecord:
    @property
    def state(self):
        return requests.state(self.state_number)

    @state.setter
    def state(self, int state):
        self.state_number = state

    @property
    def generations(self):
        """Of its slots, in order, whether or not they have been released."""
        cdef EngineSlotRecord slot
        return () if self.slots is None else tuple([slot.generation for slot in self.slots])


@cython.final
cdef class LeaseWant:
    pass


@cython.final
cdef class ReplyWant:
    pass


@cython.final
cdef class ClientRecord:
    def __cinit__(self):
        self.last_request_id = -1
        self.connected = True
        self.leases, self.slots, self.requests, self.replies, self.unsent_replies = {}, {}, {}, {}, set()
        self.pins = {}

    @property
    def leased_blocks(self):
        """Blocks in its leases, by memory."""
        return tuple(self.blocks_in)

    @leased_blocks.setter
    def leased_blocks(self, blocks):
        self.blocks_in[HOST], self.blocks_in[DEVICE] = blocks

    @property
    def lease_counts(self):
        """How many leases it has, by memory."""
        return tuple(self.leases_in)

    @lease_counts.setter
    def lease_counts(self, counts):
        self.leases_in[HOST], self.leases_in[DEVICE] = counts


@cython.final
cdef class Window:
    """The range kept for the first lease request that could not be served."""

    @property
    def end(self):
        return self.start + self.blocks
