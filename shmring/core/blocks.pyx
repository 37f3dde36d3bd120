"""Allocating contiguous runs of units in a range.

Theory of operation: the free runs are kept twice, ordered by address (so that a freed run finds its neighbours and merges
with them at once) and ordered by length (so that the best fit is one search). A run is one 64-bit key in either order, its
start in one half and its length in the other. Best fit, lowest address first: a run that was just freed at its exact size
is the first candidate for the next request of that size, and its memory is still in the cache.

Used by both books: the engine's (blocks of the slab into leases), and a frontend's (blocks of a lease into slots).
:class:`TakenRuns` holds runs that a peer has chosen: with it, the engine checks that no published slot overlaps another.

Invariants: free runs are disjoint, never empty and never adjacent; both orders hold the same runs; ``free_units`` is
their sum. ``tests/model/blocks.py`` specifies this in plain Python, and the tests compare the two.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

cdef enum:
    HALF = 32  # bits of a key for a start, and for a length: 2**32 blocks of 4 KiB are 16 TiB

cdef uint64_t LOW = 0xFFFFFFFF


cdef inline uint64_t _key(uint64_t high, uint64_t low) noexcept nogil:
    return high << HALF | low


cdef list _runs_of(SortedKeys by_start):
    cdef uint64_t key = 0
    runs = []
    while by_start.first_from(key, &key):
        runs.append((key >> HALF, key & LOW))
        key += 1
    return runs


cdef class RunAllocator:
    """Allocates contiguous runs out of ``[start, start + length)``; the caller decides what a unit is.

    Args:
        start: first unit of the range.
        length: number of units, at least 1. ``start + length`` is below 2**32.

    Raises:
        ValueError: there is no such range.
    """

    cdef readonly uint64_t start
    cdef readonly uint64_t length
    cdef readonly uint64_t free_units
    cdef SortedKeys _by_start
    cdef SortedKeys _by_length

    def __init__(self, start: int, length: int) -> None:
        if start < 0 or length < 1 or start + length > LOW:
            raise ValueError(
                f"a range has a start of at least 0 and a length of at least 1, and ends below 2**32, not {start} and {length}"
            )
        self.start = start
        self.length = self.free_units = length
        self._by_start, self._by_length = SortedKeys(), SortedKeys()
        self._by_start.make_ready()
        self._by_length.make_ready()
        self._add(self.start, self.length)

    @property
    def end(self) -> int:
        """The first unit after the range."""
        return self.start + self.length

    @property
    def is_empty(self) -> bool:
        """Whether nothing is allocated."""
        return self.free_units == self.length

    def runs(self) -> list[tuple[int, int]]:
        """Returns the free runs as ``(start, length)``, by address."""
        return _runs_of(self._by_start)

    def allocate(self, length: int) -> int | None:
        """Takes the shortest free run that fits, and returns its start; ``None`` if none fits.

        Raises:
            ValueError: the length is below 1.
        """
        if length < 1:
            raise ValueError(f"a run has a length of at least 1, not {length}")
        cdef int64_t start = self.take(length) if length <= self.free_units else -1
        return None if start < 0 else start

    def carve(self, start: int, length: int) -> bool:
        """Takes exactly ``[start, start + length)``; returns False, and takes nothing, unless all of it is free."""
        return length >= 1 and self.start <= start and start + length <= self.end and self.carve_run(start, length)

    def free(self, start: int, length: int) -> None:
        """Gives ``[start, start + length)`` back and merges it with its free neighbours.

        Raises:
            ValueError: part of it is outside the range or free already. Nothing was changed.
        """
        if length < 1 or start < self.start or start + length > self.end or not self.give(start, length):
            raise ValueError(f"[{start}, {start + length}) is not allocated in [{self.start}, {self.end})")

    cdef int64_t take(self, uint64_t length) except -2:
        """Takes the shortest free run of this length, at least 1, or more, and returns its start; -1 if none fits."""
        cdef uint64_t key, start, run_length
        if length > LOW or not self._by_length.first_from(_key(length, 0), &key):
            return -1
        self._by_start.make_ready()
        self._by_length.make_ready()
        start, run_length = key & LOW, key >> HALF
        if run_length > length:
            self._by_start.replace(_key(start, run_length), _key(start + length, run_length - length))
            self._by_length.exchange(key, _key(run_length - length, start + length))
        else:
            self._by_start.remove(_key(start, run_length))
            self._by_length.remove(key)
        self.free_units -= length
        return <int64_t>start

    cdef bint carve_run(self, uint64_t start, uint64_t length) except -1:
        """Takes a run that lies in the range; returns False, and takes nothing, unless all of it is free."""
        cdef uint64_t key, run_start, run_length
        if not self._by_start.last_below(_key(start + 1, 0), &key):
            return False
        run_start, run_length = key >> HALF, key & LOW
        if start + length > run_start + run_length:
            return False
        self._by_start.make_ready()
        self._by_length.make_ready()
        self._drop(run_start, run_length)
        if start > run_start:
            self._add(run_start, start - run_start)
        if run_start + run_length > start + length:
            self._add(start + length, run_start + run_length - start - length)
        self.free_units -= length
        return True

    cdef bint give(self, uint64_t start, uint64_t length) except -1:
        """Gives a run that lies in the range back; returns False, and changes nothing, if part of it is free."""
        cdef uint64_t before = 0, after = 0, end = start + length, freed = length
        cdef bint has_before = self._by_start.last_below(_key(start, 0), &before)
        cdef bint has_after = self._by_start.first_from(_key(start, 0), &after)
        if (has_before and (before >> HALF) + (before & LOW) > start) or (has_after and end > after >> HALF):
            return False
        self._by_start.make_ready()
        self._by_length.make_ready()
        cdef bint joins_before = has_before and (before >> HALF) + (before & LOW) == start
        cdef bint joins_after = has_after and after >> HALF == end
        if joins_after:
            length += after & LOW
        if joins_before:
            start, length = before >> HALF, length + (before & LOW)
            if joins_after:
                self._by_start.remove(after)
                self._by_length.remove(_key(after & LOW, end))
            self._by_start.replace(before, _key(start, length))
            self._by_length.exchange(_key(before & LOW, start), _key(length, start))
        elif joins_after:
            self._by_start.replace(after, _key(start, length))
            self._by_length.exchange(_key(after & LOW, end), _key(length, start))
        else:
            self._by_start.insert(_key(start, length))
            self._by_length.insert(_key(length, start))
        self.free_units += freed
        return True

    cdef uint64_t largest(self) noexcept nogil:
        """Length of the largest free run; 0 when full."""
        cdef uint64_t key
        return key >> HALF if self._by_length.last_below(<uint64_t>-1, &key) else 0

    cdef bint run_at_or_behind(self, uint64_t unit, uint64_t* start, uint64_t* length) noexcept nogil:
        """Finds the first free run that ends behind a unit; returns whether there is one."""
        cdef uint64_t key
        if not self._by_start.last_below(_key(unit + 1, 0), &key) or (key >> HALF) + (key & LOW) <= unit:
            if not self._by_start.first_from(_key(unit + 1, 0), &key):
                return False
        start[0], length[0] = key >> HALF, key & LOW
        return True

    cdef void _add(self, uint64_t start, uint64_t length) noexcept nogil:
        self._by_start.insert(_key(start, length))
        self._by_length.insert(_key(length, start))

    cdef void _drop(self, uint64_t start, uint64_t length) noexcept nogil:
        self._by_start.remove(_key(start, length))
        self._by_length.remove(_key(length, start))


cdef class TakenRuns:
    """Runs that a peer has chosen, of which no two may overlap: the live slots of a lease, as the engine sees them.

    Attributes:
        units: the sum of their lengths.
    """

    cdef readonly uint64_t units
    cdef SortedKeys _by_start

    def __init__(self) -> None:
        self._by_start = SortedKeys()

    def add(self, start: int, length: int) -> bool:
        """Takes ``[start, start + length)``; returns False, and takes nothing, if it overlaps what is taken.

        Raises:
            ValueError: it is no run of at least one unit that ends below 2**32.
        """
        if start < 0 or length < 1 or start + length > LOW:
            raise ValueError(f"[{start}, {start + length}) is no run that ends below 2**32")
        return self.take(start, length)

    def remove(self, start: int, length: int) -> None:
        """Gives a run back, exactly as it was taken.

        Raises:
            ValueError: it is not taken. Nothing was changed.
        """
        if start < 0 or length < 1 or start + length > LOW or not self.give(start, length):
            raise ValueError(f"[{start}, {start + length}) is not taken")

    def runs(self) -> list[tuple[int, int]]:
        """Returns what is taken as ``(start, length)``, by address."""
        return _runs_of(self._by_start)

    cdef bint take(self, uint64_t start, uint64_t length) except -1:
        """Takes a run that ends below 2**32; returns False, and takes nothing, if part of it is taken."""
        cdef uint64_t before, after
        if self._by_start.last_below(_key(start + 1, 0), &before) and (before >> HALF) + (before & LOW) > start:
            return False
        if self._by_start.first_from(_key(start, 0), &after) and after >> HALF < start + length:
            return False
        self._by_start.make_ready()
        self._by_start.insert(_key(start, length))
        self.units += length
        return True

    cdef bint give(self, uint64_t start, uint64_t length) noexcept nogil:
        """Gives a run back, exactly as it was taken; returns False, and changes nothing, if it is not taken."""
        if not self._by_start.remove(_key(start, length)):
            return False
        self.units -= length
        return True
