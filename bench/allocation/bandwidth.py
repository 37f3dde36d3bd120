"""What reusing warm memory is worth: copies into the places that a policy gives out at light load.

At light load a policy could give the same memory out again and again, which is then still in the processor's cache, or go
round the whole slab, whose every line must come from memory before it is overwritten. First the two extremes, then the
policies: slots of one size in flight a few at a time, in order, each copied into as it is placed.

The slab is a shared mapping of the same kind of memory as the real one (shmem), touched before. Sources are one buffer of the
size of a slot, so the copy reads what is as warm as it can be: what differs is where it writes. Repetitions are interleaved
and medians are reported.
"""

from __future__ import annotations

import ctypes
import mmap
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from bench.allocation.policies import POLICIES
from shmring.core.geometry import BLOCK_NBYTES, slot_blocks
from shmring.core.messages import SLOT_HEADER_NBYTES

__all__ = ["Bandwidth", "Extremes", "bandwidths", "extremes"]

_LOOK_EVERY = 8  # copies between two looks at the clock, where they are short


class Extremes(msgspec.Struct, frozen=True):
    """Copies of a size into one slot again and again, and into slots all around the slab; medians, GB/s."""

    nbytes: int
    same_slot_gb_per_s: float
    rotating_gb_per_s: float


class Bandwidth(msgspec.Struct, frozen=True):
    """Copies of a size into the places of a policy, with so many in flight.

    Attributes:
        touched_nbytes: of the slab that were written to in all; what the cache would have to hold.
        gb_per_s: median.
    """

    policy: str
    nbytes: int
    in_flight: int
    touched_nbytes: int
    gb_per_s: float


class _Slab:
    """Shared memory to copy into, and a buffer to copy from."""

    def __init__(self, nbytes: int, largest_nbytes: int) -> None:
        self.blocks = nbytes // BLOCK_NBYTES
        self._mapping = mmap.mmap(-1, nbytes)
        self._array = np.frombuffer(self._mapping, np.uint8)
        self._array[:] = 1
        self._source = np.ones(largest_nbytes + 64, np.uint8)
        self.address = int(self._array.ctypes.data)
        self.source_address = (int(self._source.ctypes.data) + 63) // 64 * 64

    def close(self) -> None:
        del self._array
        self._mapping.close()

    def rate(self, places: Iterator[int], nbytes: int, seconds: float) -> float:
        """Copies so many bytes to one place after another, for so long, and returns GB/s."""
        copied = 0
        started = time.perf_counter()
        while (elapsed := time.perf_counter() - started) < seconds or not copied:
            for _ in range(_LOOK_EVERY):
                ctypes.memmove(self.address + next(places) * BLOCK_NBYTES + SLOT_HEADER_NBYTES, self.source_address, nbytes)
            copied += _LOOK_EVERY * nbytes
        return copied / elapsed / 1e9


def extremes(sizes: Sequence[int], slab_nbytes: int, repetitions: int, seconds: float) -> list[Extremes]:
    """Measures copies into one slot, and around the slab.

    Args:
        sizes: of a copy, in bytes.
        slab_nbytes: larger than the processor's caches.
        repetitions: of each, interleaved.
        seconds: of each repetition.
    """
    slab = _Slab(slab_nbytes, max(sizes))
    try:
        rates: Mapping[tuple[int, bool], list[float]] = {(size, rotates): [] for size in sizes for rotates in (False, True)}
        rings = {size: _around(slab.blocks, slot_blocks(size)) for size in sizes}
        for _ in range(repetitions):
            for (size, rotates), measured in rates.items():
                measured.append(slab.rate(rings[size] if rotates else _always(0), size, seconds))
    finally:
        slab.close()
    return [Extremes(size, statistics.median(rates[size, False]), statistics.median(rates[size, True])) for size in sizes]


def bandwidths(
    names: Sequence[str], nbytes: int, in_flight: int, slab_nbytes: int, repetitions: int, seconds: float
) -> list[Bandwidth]:
    """Measures copies into the places of policies; see :func:`extremes` for the arguments.

    Args:
        names: keys of :data:`bench.allocation.policies.POLICIES`.
        nbytes: of a slot.
        in_flight: slots that are live at a time; the oldest is freed before the next is placed.
    """
    slab = _Slab(slab_nbytes, nbytes)
    try:
        rates: Mapping[str, list[float]] = {name: [] for name in names}
        flights = {name: _Flight(name, slab.blocks, slot_blocks(nbytes), in_flight) for name in names}
        for _ in range(repetitions):
            for name, flight in flights.items():
                rates[name].append(slab.rate(flight, nbytes, seconds))
    finally:
        slab.close()
    return [
        Bandwidth(name, nbytes, in_flight, len(flights[name].touched) * nbytes, statistics.median(rates[name]))
        for name in names
    ]


class _Flight(Iterator[int]):
    """The places that a policy gives out, a few live at a time."""

    def __init__(self, name: str, slab_blocks: int, blocks: int, in_flight: int) -> None:
        self.policy = POLICIES[name].create(0, slab_blocks, blocks)
        self.blocks = blocks
        self.in_flight = in_flight
        self.live: deque[int] = deque()
        self.touched: set[int] = set()

    def __next__(self) -> int:
        if len(self.live) == self.in_flight:
            self.policy.free(self.live.popleft(), self.blocks)
        start = self.policy.allocate(self.blocks)
        assert start is not None, "at light load everything fits"
        self.live.append(start)
        self.touched.add(start)
        return start


def _always(place: int) -> Iterator[int]:
    while True:
        yield place


def _around(slab_blocks: int, blocks: int) -> Iterator[int]:
    while True:
        yield from range(0, slab_blocks - blocks + 1, blocks)
