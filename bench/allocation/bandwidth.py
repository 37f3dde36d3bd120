"""What reusing warm memory is worth: copies into the places that a policy gives out at light load.

At light load a policy could give the same memory out again and again, which is then still in the processor's cache, or go
round the whole slab, whose every line must come from memory before it is overwritten: slots of one size are in flight a few at
a time, in order, each copied into as it is placed. The slab is a shared mapping, as the real one is, touched before; the source
is one warm buffer, so that what differs is where a copy writes. Repetitions are interleaved and medians are reported.
"""

from __future__ import annotations

import ctypes
import mmap
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from bench.allocation.policies import POLICIES
from shmring.core.geometry import BLOCK_NBYTES, slot_blocks
from shmring.core.messages import SLOT_HEADER_NBYTES

__all__ = ["Bandwidth", "bandwidths"]

_LOOK_EVERY = 8  # copies between two looks at the clock, where they are short


class Bandwidth(msgspec.Struct, frozen=True, tag_field="kind", tag="bandwidth"):
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


def bandwidths(
    names: Sequence[str], nbytes: int, in_flight: int, slab_nbytes: int, repetitions: int, seconds: float
) -> list[Bandwidth]:
    """Measures copies into the places of policies, by name: slots of a size, so many live, in a slab larger than any cache."""
    rates: dict[str, list[float]] = {name: [] for name in names}
    flights = {name: _Flight(name, slab_nbytes // BLOCK_NBYTES, slot_blocks(nbytes), in_flight) for name in names}
    with mmap.mmap(-1, slab_nbytes) as slab:
        memory = np.frombuffer(slab, np.uint8)
        memory[:] = 1
        source = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)  # aligned as a tensor is
        source[:] = 1
        for _ in range(repetitions):
            for name, flight in flights.items():
                rates[name].append(_rate(memory, source, flight, seconds))
        del memory  # or the mapping could not be closed
    return [
        Bandwidth(name, nbytes, in_flight, len(flights[name].touched) * nbytes, statistics.median(rates[name]))
        for name in names
    ]


def _rate(memory: NDArray[np.uint8], source: NDArray[np.uint8], places: Iterator[int], seconds: float) -> float:
    """Copies to one place after another, for so long, and returns GB/s."""
    slots = int(memory.ctypes.data) + SLOT_HEADER_NBYTES
    start, nbytes = int(source.ctypes.data), source.nbytes
    copied = 0
    began = time.perf_counter()
    while (elapsed := time.perf_counter() - began) < seconds or not copied:
        for _ in range(_LOOK_EVERY):
            ctypes.memmove(slots + next(places) * BLOCK_NBYTES, start, nbytes)
        copied += _LOOK_EVERY * nbytes
    return copied / elapsed / 1e9
