"""The slots that a frontend's callers hold, by their addresses in this process.

A tensor of a payload whose bytes lie in one of them is sent from there. Slots that the engine has at the moment do not count:
reading such a slot is safe, so its tensor is copied, but submitting it a second time is not safe.

Mostly a slot is held only until it is filled and submitted, so few are held at a time. The last few are in a list that is
searched one by one. Older ones are in a second place, sorted by address.

Invariant: no two of them overlap; each is in one of the two places.
"""

from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memmove

cdef enum:
    RECENT = 8


cdef struct Held:
    uint64_t address
    uint64_t nbytes
    PyObject* record  # owned
    PyObject* tensor  # owned: the last one that was made in it; NULL: none


cdef bint _is_submittable(object record) except -1:
    if type(record) is ClientSlotRecord:
        return (<ClientSlotRecord>record).is_submittable()
    return record.is_submittable()


cdef class HeldSlots:
    """See the head of this file."""

    cdef Held _recent[RECENT]
    cdef uint32_t _recent_count
    cdef SortedKeys _addresses  # of the others
    cdef dict _slots           # (record, bytes of content) of the others, by address of content

    def __init__(self) -> None:
        self._addresses = SortedKeys()
        self._slots = {}

    def __dealloc__(self) -> None:
        cdef uint32_t i
        for i in range(self._recent_count):
            drop_object(self._recent[i].record)
            drop_object_unless_null(self._recent[i].tensor)

    def __len__(self) -> int:
        return len(self._slots) + self._recent_count

    def __iter__(self) -> Iterator[ClientSlotRecord]:
        """Yields the records."""
        cdef uint32_t i
        records = [record for record, _ in self._slots.values()]
        for i in range(self._recent_count):
            records.append(<object>self._recent[i].record)
        return iter(records)

    cpdef int hold(self, object record, uint64_t address, uint64_t nbytes) except -1:  # type: (ClientSlotRecord, int, int) -> None
        """A caller holds a slot.

        Args:
            record: of the slot; ``is_submittable()`` says whether it may be submitted now.
            address, nbytes: of its content.
        """
        cdef Held* held
        if self._recent_count == RECENT:
            held = self._recent
            self._addresses.make_ready()
            self._slots[held.address] = (<object>held.record, held.nbytes)
            self._addresses.insert(held.address)
            self._forget_recent(0)
        held = &self._recent[self._recent_count]
        self._recent_count += 1
        held.address, held.nbytes, held.record, held.tensor = address, nbytes, <PyObject*>record, NULL
        Py_INCREF(record)
        return 0

    def overlaps(self, uint64_t address, uint64_t nbytes) -> bool:
        """Whether at least one of these bytes lies in a held slot."""
        cdef uint64_t start, end = address + max(nbytes, 1)
        cdef Held* held
        cdef uint32_t i
        for i in range(self._recent_count):
            held = &self._recent[i]
            if held.address < end and address < held.address + max(held.nbytes, 1):
                return True
        if not self._slots or not self._addresses.last_below(end, &start):
            return False
        _, held_nbytes = self._slots[start]
        return address < start + max(held_nbytes, 1)

    cpdef int leave(self, uint64_t address) except -1:
        """A caller has left the slot at this address."""
        cdef uint32_t i
        for i in range(self._recent_count):
            if self._recent[i].address == address:
                self._forget_recent(i)
                return 0
        del self._slots[address]
        self._addresses.remove(address)
        return 0

    cdef void _forget_recent(self, uint32_t place) noexcept:
        cdef Held gone = self._recent[place]
        self._recent_count -= 1
        memmove(&self._recent[place], &self._recent[place + 1], (self._recent_count - place) * sizeof(Held))
        drop_object(gone.record)
        drop_object_unless_null(gone.tensor)

    cdef void remember(self, uint64_t address, object tensor) noexcept:
        """A tensor was made in the slot at this address. torch does not negate its bytes when it reads them.

        It is kept for as long as the slot is held, so that no other object gets its address.
        """
        cdef PyObject* before
        cdef uint32_t i
        for i in range(self._recent_count):
            if self._recent[i].address == address:
                Py_INCREF(tensor)
                before, self._recent[i].tensor = self._recent[i].tensor, <PyObject*>tensor
                drop_object_unless_null(before)
                break

    cdef bint has_made(self, object tensor, uint64_t address) noexcept:
        """Whether this is the last tensor that :meth:`remember` got for a held slot, and its bytes are still there.

        If a caller has set the tensor's data, its bytes may be elsewhere and be negated.
        """
        cdef uint32_t i
        for i in range(self._recent_count):
            if self._recent[i].tensor == <PyObject*>tensor:
                return address - self._recent[i].address < self._recent[i].nbytes
        return False

    cdef bint find(self, uint64_t address, uint64_t nbytes, uint32_t* region, uint64_t* offset, list found) except -1:
        """Finds the slot in which bytes lie, if they may be submitted from there.

        Args:
            address, nbytes: of the bytes.
            region: set to the number of the slot in ``found``, from 1 on.
            offset: set to where they are in its content.
            found: the slots of one payload, by record; a new one is added.
        """
        cdef uint64_t start, content_nbytes
        cdef object record = None
        cdef Held* held
        cdef uint32_t i
        for i in range(self._recent_count):
            held = &self._recent[i]
            if address - held.address < held.nbytes:  # otherwise it lies before or after it: the numbers are unsigned
                start, content_nbytes, record = held.address, held.nbytes, <object>held.record
                break
        else:
            if not self._slots or not self._addresses.last_below(address + 1, &start):
                return False
            record, slot_nbytes = self._slots[start]
            content_nbytes = slot_nbytes
        if address - start > content_nbytes or nbytes > content_nbytes - (address - start) or not _is_submittable(record):
            return False
        offset[0] = address - start
        for i in range(<uint32_t>len(found)):
            if found[i] is record:
                region[0] = i + 1
                return True
        found.append(record)
        region[0] = <uint32_t>len(found)
        return True
