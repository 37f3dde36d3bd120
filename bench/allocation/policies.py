"""Ways of placing slots in a range of blocks: shmring's own, and those that others use.

A policy places a number of blocks somewhere in a range, and takes the place back. All count in the blocks of the slab
(4 KiB) and get the same numbers of them, a slot's header included, so that they differ in the placing alone. The others are
written for comparison, as plainly as their behaviour allows: what they cost in time is not what they would cost in C.

Invariants: places of one policy are disjoint and inside its range; what was freed can be placed again.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Protocol

from shmring.core.blocks import RunAllocator

__all__ = [
    "POLICIES",
    "BinnedFit",
    "Buddy",
    "Compacting",
    "Contender",
    "FirstFit",
    "FixedSlots",
    "NextFit",
    "Policy",
]


class Policy(Protocol):
    """Places runs of blocks. :class:`~shmring.core.blocks.RunAllocator` is one."""

    def allocate(self, length: int) -> int | None:
        """Returns the first block of a place for ``length`` blocks; None if there is none."""

    def free(self, start: int, length: int) -> None:
        """Takes back what :meth:`allocate` returned for this length."""


class _AddressOrdered:
    """Free runs in one list by address, merged at once, searched from one end to the other."""

    def __init__(self, start: int, length: int) -> None:
        self.starts = [start]
        self.lengths = [length]

    def free(self, start: int, length: int) -> None:
        position = bisect_left(self.starts, start)
        end = start + length
        if position < len(self.starts) and self.starts[position] == end:
            length += self.lengths.pop(position)
            del self.starts[position]
        if position and self.starts[position - 1] + self.lengths[position - 1] == start:
            self.lengths[position - 1] += length
        else:
            self.starts.insert(position, start)
            self.lengths.insert(position, length)

    def take(self, position: int, length: int) -> int:
        """Takes the lower end of a free run."""
        start = self.starts[position]
        if self.lengths[position] == length:
            del self.starts[position], self.lengths[position]
        else:
            self.starts[position] += length
            self.lengths[position] -= length
        return start


class FirstFit(_AddressOrdered):
    """The lowest free run that is long enough."""

    def allocate(self, length: int) -> int | None:
        for position, free in enumerate(self.lengths):
            if free >= length:
                return self.take(position, length)
        return None


class NextFit(_AddressOrdered):
    """The first free run that is long enough behind the last place: a ring's cursor, which skips what is in use."""

    def __init__(self, start: int, length: int) -> None:
        super().__init__(start, length)
        self.cursor = start

    def allocate(self, length: int) -> int | None:
        first = bisect_left(self.starts, self.cursor)
        for position in (*range(first, len(self.starts)), *range(first)):
            if self.lengths[position] >= length:
                start = self.take(position, length)
                self.cursor = start + length
                return start
        return None


class BinnedFit:
    """Free runs in bins of eight to the octave; any run of the first bin of which every run is long enough.

    Rounded, a place is as long as its bin's runs at least are, instead of exactly what was asked for.

    Source: TLSF (Masmano et al., 2004) for two levels of bins, the first that is not empty being found by its bit; Mooncake's
    offset allocator, after Aaltonen's, for eight bins to the octave and for rounded lengths.
    """

    def __init__(self, start: int, length: int, *, rounded: bool) -> None:
        self.rounded = rounded
        self.bins: dict[int, dict[int, None]] = {}  # starts of the runs in it, the last freed last
        self.filled = 0  # a bit for each bin that holds something
        self.length_at: dict[int, int] = {}
        self.start_before: dict[int, int] = {}  # by end of a free run
        self._insert(start, length)

    def allocate(self, length: int) -> int | None:
        least_bin = _bin_above(length)
        fitting = self.filled >> least_bin
        if not fitting:
            return None
        number = least_bin + (fitting & -fitting).bit_length() - 1
        start = next(reversed(self.bins[number]))
        run = self._remove(start)
        taken = _bin_length(least_bin) if self.rounded else length
        if run > taken:
            self._insert(start + taken, run - taken)
        return start

    def free(self, start: int, length: int) -> None:
        if self.rounded:
            length = _bin_length(_bin_above(length))
        if start + length in self.length_at:
            length += self._remove(start + length)
        if start in self.start_before:
            start = self.start_before[start]
            length += self._remove(start)
        self._insert(start, length)

    def _insert(self, start: int, length: int) -> None:
        number = _bin_below(length)
        self.bins.setdefault(number, {})[start] = None
        self.filled |= 1 << number
        self.length_at[start] = length
        self.start_before[start + length] = start

    def _remove(self, start: int) -> int:
        length = self.length_at.pop(start)
        del self.start_before[start + length]
        number = _bin_below(length)
        del self.bins[number][start]
        if not self.bins[number]:
            self.filled &= ~(1 << number)
        return length


_EXACT_BINS = 16  # lengths that have a bin each; from there on, eight to the octave


def _bin_below(length: int) -> int:
    """The last bin whose length is at most this."""
    if length < _EXACT_BINS:
        return length
    shift = length.bit_length() - 4
    return 8 * shift + (length >> shift)


def _bin_length(number: int) -> int:
    """The least length of a bin's runs."""
    if number < _EXACT_BINS:
        return number
    shift = number // 8 - 1
    return (number - 8 * shift) << shift


def _bin_above(length: int) -> int:
    """The first bin whose length is at least this."""
    number = _bin_below(length)
    return number if _bin_length(number) == length else number + 1


class Buddy:
    """Powers of two, split in halves and merged with their other half only.

    Source: vLLM's ``tensor_memory_pool`` rounds to powers of two in the same way.
    """

    def __init__(self, start: int, length: int) -> None:
        self.start = start
        self.free_at: list[set[int]] = [set() for _ in range(length.bit_length())]
        offset = 0
        for order in reversed(range(length.bit_length())):  # a range that is no power of two: the largest that it is made of
            if length >> order & 1:
                self.free_at[order].add(offset)
                offset += 1 << order

    def allocate(self, length: int) -> int | None:
        least_order = (length - 1).bit_length()
        for order in range(least_order, len(self.free_at)):
            if self.free_at[order]:
                offset = self.free_at[order].pop()
                for half in range(least_order, order):
                    self.free_at[half].add(offset + (1 << half))
                return self.start + offset
        return None

    def free(self, start: int, length: int) -> None:
        offset, order = start - self.start, (length - 1).bit_length()
        while order + 1 < len(self.free_at) and (other := offset ^ 1 << order) in self.free_at[order]:
            self.free_at[order].remove(other)
            offset = min(offset, other)
            order += 1
        self.free_at[order].add(offset)


class FixedSlots:
    """Slots of one size, that of the largest request; the one freed last goes first."""

    def __init__(self, start: int, length: int, largest: int) -> None:
        self.slots = [start + number * largest for number in reversed(range(length // largest))]

    def allocate(self, length: int) -> int | None:
        return self.slots.pop() if self.slots else None

    def free(self, start: int, length: int) -> None:
        self.slots.append(start)


class Compacting:
    """No policy, but what none can exceed: everything is moved together all the time, which nobody can do under readers."""

    def __init__(self, start: int, length: int) -> None:
        self.start = start
        self.free_blocks = length

    def allocate(self, length: int) -> int | None:
        if length > self.free_blocks:
            return None
        self.free_blocks -= length
        return self.start

    def free(self, start: int, length: int) -> None:
        self.free_blocks += length


@dataclasses.dataclass(frozen=True)
class Contender:
    """A policy in the comparison.

    Attributes:
        create: called with the first block of a range, its length and the longest run that will be asked for.
        slack: range over what is live in it that lets the policy work without failing, where its time is measured.
    """

    title: str
    create: Callable[[int, int, int], Policy]
    slack: float = 1.25


POLICIES: Mapping[str, Contender] = {
    "shmring": Contender("shmring", lambda start, length, largest: RunAllocator(start, length)),
    "first-fit": Contender("first fit", lambda start, length, largest: FirstFit(start, length)),
    "next-fit": Contender("next fit (cursor)", lambda start, length, largest: NextFit(start, length), slack=2.0),
    "tlsf": Contender("bins (TLSF)", lambda start, length, largest: BinnedFit(start, length, rounded=False), slack=1.5),
    "rounded-bins": Contender(
        "bins, rounded (Mooncake)", lambda start, length, largest: BinnedFit(start, length, rounded=True), slack=2.0
    ),
    "buddy": Contender("buddy (vLLM pool)", lambda start, length, largest: Buddy(start, length), slack=4.0),
    "fixed": Contender("slots of the largest", FixedSlots, slack=16.0),
}
"""What is compared, by name."""
