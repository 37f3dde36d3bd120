"""A table of objects by numbers that count up: requests in flight, by their ids.

A dict does the same and takes four times as long: it makes an int of each number, hashes it and asks the ints whether they are equal.
Here the place of an object is computed: its number times the golden ratio, of which the upper bits are the place in the table.
If that place is taken, the next free one is used. The table is at least twice as large as the number of objects. This spreads
numbers that count up evenly and far from each other. So they hardly ever meet, and the place after a removed object is mostly
empty.

Invariant: between the computed place of a number and its entry, no entry is empty. So removing an object closes the gap.

Source: hashing by multiplication, D. E. Knuth, "The Art of Computer Programming", volume 3, 6.4.
"""

cimport cython
from cpython.object cimport PyObject, PyTypeObject, visitproc
from cpython.ref cimport Py_INCREF
from libc.stdint cimport uint64_t
from libc.stdlib cimport calloc, free


cdef struct Entry:
    uint64_t number
    PyObject* item     # NULL: the entry is empty


cdef enum:
    _FIRST_BITS = 6  # of the first size

cdef uint64_t _GOLDEN = 0x9E3779B97F4A7C15


@cython.final
cdef class Numbered:
    """See the head of this file."""

    cdef Entry* _entries
    cdef uint64_t _mask      # of a power of two
    cdef int _shift          # of a product, so that a place is left
    cdef uint64_t count
    cdef object _unused      # without a member that is an object, the garbage collector would not visit this

    def __cinit__(self):
        self._entries = <Entry*>calloc(1 << _FIRST_BITS, sizeof(Entry))
        if self._entries == NULL:
            raise MemoryError
        self._shift, self._mask = 64 - _FIRST_BITS, (1 << _FIRST_BITS) - 1

    def __dealloc__(self):
        _clear(<PyObject*>self)
        free(self._entries)

    def __len__(self) -> int:
        return self.count

    def __contains__(self, number: int) -> bool:
        return self.find(number) != NULL

    def __iter__(self) -> Iterator[int]:
        return iter([number for number, _ in self.items()])

    def __getitem__(self, number: int):
        cdef PyObject* item = self.find(number)
        if item == NULL:
            raise KeyError(number)
        return <object>item

    cpdef object get(self, uint64_t number):  # type: (int) -> Any
        """Returns the object with this number; None if there is none."""
        cdef PyObject* item = self.find(number)
        return None if item == NULL else <object>item

    def items(self) -> list[tuple[int, Any]]:
        """Returns all entries, as pairs and in order of their numbers."""
        cdef uint64_t place
        items = []
        for place in range(self._mask + 1):
            if self._entries[place].item != NULL:
                items.append((self._entries[place].number, <object>self._entries[place].item))
        items.sort(key=_number_of)
        return items

    def values(self) -> list:
        """Returns all objects, in order of their numbers."""
        return [item for _, item in self.items()]

    def lone(self) -> list:
        """Returns the objects to which only this table refers."""
        cdef uint64_t place
        items = []
        for place in range(self._mask + 1):
            if self._entries[place].item != NULL and references_of(self._entries[place].item) == 1:
                items.append(<object>self._entries[place].item)
        return items

    def clear(self) -> None:
        """Removes all objects."""
        _clear(<PyObject*>self)

    cdef PyObject* find(self, uint64_t number) noexcept:
        """Returns the object with this number, as a borrowed reference; NULL if there is none."""
        cdef uint64_t place = number * _GOLDEN >> self._shift
        while self._entries[place].item != NULL:
            if self._entries[place].number == number:
                return self._entries[place].item
            place = (place + 1) & self._mask
        return NULL

    cdef int make_ready(self) except -1:
        """After this, the next :meth:`put` allocates nothing."""
        if 2 * (self.count + 1) > self._mask:
            self._grow()
        return 0

    cpdef int put(self, uint64_t number, object item) except -1:  # type: (int, object) -> None
        """Adds an object under a new number."""
        cdef uint64_t place
        self.make_ready()
        place = number * _GOLDEN >> self._shift
        while self._entries[place].item != NULL:
            place = (place + 1) & self._mask
        Py_INCREF(item)
        self._entries[place].number, self._entries[place].item = number, <PyObject*>item
        self.count += 1
        return 0

    cpdef object take(self, uint64_t number):
        """Removes the object with this number, and returns it; None if there is none."""
        cdef uint64_t place = number * _GOLDEN >> self._shift, gap
        cdef PyObject* found
        while self._entries[place].item != NULL and self._entries[place].number != number:
            place = (place + 1) & self._mask
        found = self._entries[place].item
        if found == NULL:
            return None
        self.count -= 1
        gap = place
        while True:
            place = (place + 1) & self._mask
            if self._entries[place].item == NULL:
                break
            # It may move back to the gap unless its own place lies behind that.
            if ((place - (self._entries[place].number * _GOLDEN >> self._shift)) & self._mask) >= ((place - gap) & self._mask):
                self._entries[gap] = self._entries[place]
                gap = place
        self._entries[gap].item = NULL
        item = <object>found
        drop_object(found)
        return item

    cdef int _grow(self) except -1:
        cdef Entry* old = self._entries
        cdef uint64_t old_mask = self._mask, place, to
        cdef Entry* larger = <Entry*>calloc(2 * (old_mask + 1), sizeof(Entry))
        if larger == NULL:
            raise MemoryError
        self._entries, self._mask = larger, 2 * old_mask + 1
        self._shift -= 1
        for place in range(old_mask + 1):
            if old[place].item != NULL:
                to = old[place].number * _GOLDEN >> self._shift
                while larger[to].item != NULL:
                    to = (to + 1) & self._mask
                larger[to] = old[place]
        free(old)
        return 0


def _number_of(pair):
    return pair[0]


cdef int _traverse(PyObject* self, visitproc visit, void* argument) noexcept:
    """The type's ``tp_traverse``: the garbage collector finds cycles through this table like those through a dict."""
    cdef Numbered table = <Numbered>self
    cdef uint64_t place
    cdef int stop
    for place in range(table._mask + 1):
        if table._entries[place].item != NULL:
            stop = visit(table._entries[place].item, argument)
            if stop:
                return stop
    return 0


cdef int _clear(PyObject* self) noexcept:
    """The type's ``tp_clear``."""
    cdef Numbered table = <Numbered>self
    cdef uint64_t place
    cdef PyObject* item
    if table._entries != NULL:
        table.count = 0
        for place in range(table._mask + 1):
            item, table._entries[place].item = table._entries[place].item, NULL
            if item != NULL:
                drop_object(item)
    return 0


(<CollectedType*><PyObject*>Numbered).tp_traverse = <traverseproc><void*>_traverse
(<CollectedType*><PyObject*>Numbered).tp_clear = <inquiry><void*>_clear
