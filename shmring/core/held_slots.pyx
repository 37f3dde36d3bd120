"""The slots that a frontend's callers hold, by where they are in this process.

A tensor of a payload whose bytes lie in one of them is sent from there. Slots that the engine has at the moment do not count: reading
them is safe, so the tensor is copied, but submitting them twice is not.

Invariant: no two of them overlap.
"""

from libc.stdint cimport uint32_t, uint64_t

from shmring.core.sorted_keys cimport SortedKeys


cdef class HeldSlots:
    """See the head of this file."""

    def __init__(self) -> None:
        self._addresses = SortedKeys()
        self._slots = {}
        self.found = []

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self):
        """Yields the records."""
        for record, _ in self._slots.values():
            yield record

    cpdef int hold(self, object record, uint64_t address, uint64_t nbytes) except -1:
        """A caller holds a slot.

        Args:
            record: of the slot; ``is_submittable()`` says whether it may be submitted now.
            address, nbytes: of its content.
        """
        self._addresses.make_ready()
        self._slots[address] = (record, nbytes)
        self._addresses.insert(address)
        return 0

    cpdef int leave(self, uint64_t address) except -1:
        """A caller has left the slot at this address."""
        del self._slots[address]
        self._addresses.remove(address)
        return 0

    cpdef int forget(self) except -1:
        """Begins a new list of what was found."""
        self.found = []  # not the same one: who has packed a payload may still have that
        return 0

    cdef bint find(self, uint64_t address, uint64_t nbytes, uint32_t* region, uint64_t* offset) except -1:
        """Finds the slot in which bytes lie, if they may be submitted from there.

        Args:
            address, nbytes: of the bytes.
            region: set to the number of the slot in ``found``, from 1 on.
            offset: set to where they are in its content.
        """
        cdef uint64_t start
        cdef uint64_t content_nbytes
        if not self._slots or not self._addresses.last_below(address + 1, &start):
            return False
        record, slot_nbytes = self._slots[start]
        content_nbytes = slot_nbytes
        if address - start > content_nbytes or nbytes > content_nbytes - (address - start) or not record.is_submittable():
            return False
        if record not in self.found:
            self.found.append(record)
        region[0] = <uint32_t>(self.found.index(record) + 1)
        offset[0] = address - start
        return True
