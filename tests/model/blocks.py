"""Contiguous runs of units in a range, and who may have which.

Theory of operation: the free runs are kept twice, ordered by address (so that a freed run finds its neighbours and merges
with them at once) and ordered by length (so that the best fit is one bisection). Both orders are plain sorted lists: at
the ten thousand runs a slab may fall into, moving the tail of a list is a memmove of tens of kilobytes, cheaper than any
tree in Python. Best fit, lowest address first: a run that was just freed at its exact size is the first candidate for the
next request of that size, and its memory is still in the cache.

Used by the models of both books. :class:`TakenRuns` is for the runs that a peer chose: no published slot overlaps another.

Invariants: free runs are disjoint, never empty and never adjacent; both orders hold the same runs; ``free_units`` is
their sum.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

_START_BITS = 40  # of a key, the length being above them; 2**40 blocks of 4 KiB are 4 PiB
_START_MASK = (1 << _START_BITS) - 1


class RunAllocator:
    """Allocates contiguous runs out of ``[start, start + length)``; units are whatever the caller counts in.

    Args:
        start: first unit of the range.
        length: number of units, at least 1.
    """

    __slots__ = ("_by_length", "_length_at", "_starts", "free_units", "length", "start")

    def __init__(self, start: int, length: int) -> None:
        if start < 0 or length < 1:
            raise ValueError(f"a range needs a start of at least 0 and a length of at least 1, not {start} and {length}")
        assert start + length <= _START_MASK, "a key holds 40 bits of a start"
        self.start = start
        self.length = length
        self.free_units = length
        self._starts = [start]
        self._length_at = {start: length}
        self._by_length = [length << _START_BITS | start]  # one int each: they compare faster than tuples

    @property
    def end(self) -> int:
        """The first unit behind the range."""
        return self.start + self.length

    @property
    def is_empty(self) -> bool:
        """Whether nothing is allocated."""
        return self.free_units == self.length

    @property
    def largest_run(self) -> int:
        """Length of the largest free run; 0 when full."""
        return self._by_length[-1] >> _START_BITS if self._by_length else 0

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yields the free runs as ``(start, length)``, by address."""
        for start in self._starts:
            yield start, self._length_at[start]

    def allocate(self, length: int) -> int | None:
        """Takes the shortest free run that fits, and returns its start; ``None`` if none fits."""
        if length < 1:
            raise ValueError(f"a run has a length of at least 1, not {length}")
        position = bisect_left(self._by_length, length << _START_BITS)
        if position == len(self._by_length):
            return None
        key = self._by_length.pop(position)
        run_length, start = key >> _START_BITS, key & _START_MASK
        del self._length_at[start]
        place = bisect_left(self._starts, start)
        if run_length == length:
            del self._starts[place]
        else:
            rest = start + length
            self._starts[place] = rest  # still in order: what is behind it is behind the whole run
            self._length_at[rest] = run_length - length
            insort(self._by_length, run_length - length << _START_BITS | rest)
        self.free_units -= length
        return start

    def carve(self, start: int, length: int) -> bool:
        """Takes exactly ``[start, start + length)``; returns False, and takes nothing, unless all of it is free."""
        run = self._free_run_around(start)
        if length < 1 or run is None or start + length > run[0] + run[1]:
            return False
        self._take(run[0], run[1], start, length)
        return True

    def free(self, start: int, length: int) -> None:
        """Gives ``[start, start + length)`` back and merges it with its free neighbours.

        Raises:
            ValueError: part of it is outside the range or free already. Nothing was changed.
        """
        position = bisect_left(self._starts, start)
        before = self._starts[position - 1] if position else None
        after = self._starts[position] if position < len(self._starts) else None
        if (
            length < 1
            or start < self.start
            or start + length > self.end
            or (before is not None and before + self._length_at[before] > start)
            or (after is not None and start + length > after)
        ):
            raise ValueError(f"[{start}, {start + length}) is not allocated in [{self.start}, {self.end})")
        self.free_units += length
        joins_before = before is not None and before + self._length_at[before] == start
        if after is not None and start + length == after:
            length += self._forget_length(after)
            if joins_before:
                del self._starts[position]
            else:
                self._starts[position] = start
        elif not joins_before:
            self._starts.insert(position, start)
        if joins_before:
            assert before is not None
            length += self._forget_length(before)
            start = before
        self._length_at[start] = length
        insort(self._by_length, length << _START_BITS | start)

    def _free_run_around(self, unit: int) -> tuple[int, int] | None:
        position = bisect_right(self._starts, unit)
        if not position:
            return None
        start = self._starts[position - 1]
        length = self._length_at[start]
        return (start, length) if unit < start + length else None

    def _take(self, run_start: int, run_length: int, start: int, length: int) -> None:
        self._remove(run_start)
        if start > run_start:
            self._insert(run_start, start - run_start)
        if run_start + run_length > start + length:
            self._insert(start + length, run_start + run_length - start - length)
        self.free_units -= length

    def _insert(self, start: int, length: int) -> None:
        insort(self._starts, start)
        self._length_at[start] = length
        insort(self._by_length, length << _START_BITS | start)

    def _remove(self, start: int) -> None:
        del self._starts[bisect_left(self._starts, start)]
        self._forget_length(start)

    def _forget_length(self, start: int) -> int:
        length = self._length_at.pop(start)
        del self._by_length[bisect_left(self._by_length, length << _START_BITS | start)]
        return length


class TakenRuns:
    """Runs that somebody else chose, and of which no two may overlap: the live slots of a lease, as the engine sees them.

    Attributes:
        units: the sum of their lengths.
    """

    __slots__ = ("_ends", "_starts", "units")

    def __init__(self) -> None:
        self._starts: list[int] = []  # in order, and so are the ends
        self._ends: list[int] = []
        self.units = 0

    def add(self, start: int, length: int) -> bool:
        """Takes ``[start, start + length)``; returns False, and takes nothing, if it overlaps what is taken."""
        end = start + length
        place = bisect_right(self._starts, start)
        if (place and self._ends[place - 1] > start) or (place < len(self._starts) and self._starts[place] < end):
            return False
        self._starts.insert(place, start)
        self._ends.insert(place, end)
        self.units += length
        return True

    def remove(self, start: int, length: int) -> None:
        """Gives a run back, exactly as it was taken.

        Raises:
            ValueError: it is not taken. Nothing was changed.
        """
        place = bisect_left(self._starts, start)
        if place == len(self._starts) or self._starts[place] != start or self._ends[place] != start + length:
            raise ValueError(f"[{start}, {start + length}) is not taken")
        del self._starts[place], self._ends[place]
        self.units -= length

    def runs(self) -> list[tuple[int, int]]:
        """Returns what is taken as ``(start, length)``, by address."""
        return [(start, end - start) for start, end in zip(self._starts, self._ends, strict=True)]
