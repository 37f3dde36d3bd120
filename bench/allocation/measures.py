"""What is measured of who places slots: how full a slab gets, and what an operation costs.

**Fill** (:func:`first_failures`, :func:`evicting`) is the bytes that were asked for over the slab's: what headers, rounding and
gaps take is lost. At the first failure the slab is as full as the policy can make it with what has come and gone before; many
seeds give a mean, a 1st percentile and a minimum. A trace's next slot may be a large one, so even a slab whose content could be
moved together is not quite full then: that is the limit beside the policies. It is one of the mean: on a single trace a policy
that fails earlier, at a smaller slot, may be fuller than one that fails later.

**Time** (:func:`costs`) is that of one allocation or one free, with so many slots live; slots of log-uniform sizes come and go
at random, and the free runs between them are as many as that leaves. Counted is the time of the thread on its core, so that
what else the machine does is not in it; batches of the subjects are interleaved, and their median is reported.
"""

from __future__ import annotations

import array
import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from bench.allocation.leased import Leased, lone_book
from bench.allocation.traces import Lifetime, Sizes, trace
from shmring.core.compiled import RunAllocator
from shmring.core.geometry import BLOCK_NBYTES, slot_blocks

_FIRST = 1  # the first leasable block; the header is before it
_EVICTING_SLAB_NBYTES = 2 << 30
_EVICTING_SIZES = (1 << 10, 64 << 20)
_BATCH_S = 0.02  # of processor time; batches are as long as that at any speed, so that a slow subject takes no minutes
_FEWEST_STEPS = 20


class Policy(Protocol):
    """Places runs of blocks, a slot's header included. :class:`~shmring.core.compiled.RunAllocator` is one.

    Places are disjoint and inside its range; what was freed can be placed again.
    """

    def allocate(self, length: int) -> int | None:
        """Returns the first block of a place for ``length`` blocks; None if there is none."""

    def free(self, start: int, length: int) -> None:
        """Takes back what :meth:`allocate` returned for this length."""


class Limit:
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
class Subject:
    """Who places slots.

    Attributes:
        create: called with the first block of a range, and its length.
        slack: range over what is live in it that lets it work without failing, where its time is measured.
        fills, evicts, timed: whether its fill at the first failure is measured, its fill by Mooncake's method, its time.
    """

    title: str
    create: Callable[[int, int], Policy]
    slack: float = 1.25
    fills: bool = True
    evicts: bool = True
    timed: bool = False


OURS, LIMIT = "shmring", "limit"

POLICIES: Mapping[str, Subject] = {
    OURS: Subject("shmring", RunAllocator, timed=True),
    "leases-1": Subject("shmring, leases of 1 frontend", lambda start, length: Leased(length, 1)),
    # There a place that one frontend has freed may not be the next one's, and evicting would not end.
    "leases-3": Subject("shmring, leases of 3 frontends", lambda start, length: Leased(length, 3), evicts=False),
    LIMIT: Subject("limit: moved together", Limit),
    "book": Subject(
        "shmring: lease book, 1 lease", lambda start, length: lone_book(length, 1), fills=False, evicts=False, timed=True
    ),
    "book-many": Subject(
        "shmring: lease book, 100 leases", lambda start, length: lone_book(length, 100), slack=3.0, fills=False, evicts=False,
        timed=True,
    ),
}  # fmt: skip
"""By name."""


# -- fill ----------------------------------------------------------------------------------------------------------------


def shares(filled: Sequence[float]) -> dict[str, float]:
    """Returns mean, 1st percentile and minimum of how full a slab got, as shares of it, and how many samples there are."""
    ordered = sorted(filled)
    return {
        "mean": statistics.fmean(ordered), "p1": ordered[len(ordered) // 100], "minimum": ordered[0], "samples": len(ordered)
    }  # fmt: skip


def first_failures(
    subject: Subject, sizes: Sizes, lifetime: Lifetime, slab_nbytes: int, seeds: Sequence[int]
) -> dict[str, float]:
    """Returns how full a slab gets over many traces, each replayed until a slot finds no place."""
    return shares([_first_failure(subject, sizes, lifetime, slab_nbytes, seed) for seed in seeds])


def _first_failure(subject: Subject, sizes: Sizes, lifetime: Lifetime, slab_nbytes: int, seed: int) -> float:
    policy = subject.create(_FIRST, slab_nbytes // BLOCK_NBYTES)
    places: dict[int, tuple[int, int, int]] = {}
    live_nbytes = 0
    for number, arrival in enumerate(trace(sizes, lifetime, slab_nbytes, seed)):
        for gone in arrival.gone:
            start, blocks, nbytes = places.pop(gone)
            policy.free(start, blocks)
            live_nbytes -= nbytes
        blocks = slot_blocks(arrival.nbytes)
        place = policy.allocate(blocks)
        if place is None:
            return live_nbytes / slab_nbytes
        places[number] = (place, blocks, arrival.nbytes)
        live_nbytes += arrival.nbytes
    raise AssertionError("a trace ends when more is live than the slab holds, and all of it was placed")


def evicting(subject: Subject, placements: int, seed: int) -> dict[str, float]:
    """Returns how full a slab stays where others at random are thrown out for what finds no place, after every placement.

    The first twentieth of the placements is not counted.

    Source: Mooncake's ``allocator_bench``: 2 GiB, sizes of 1 KiB to 64 MiB, a million placements.
    """
    chance = random.Random(f"{seed}/evicting")
    policy = subject.create(_FIRST, _EVICTING_SLAB_NBYTES // BLOCK_NBYTES)
    live: list[tuple[int, int, int]] = []
    live_nbytes = 0
    filled = []
    for number in range(placements):
        nbytes = chance.randint(*_EVICTING_SIZES)
        blocks = slot_blocks(nbytes)
        while (place := policy.allocate(blocks)) is None:
            victim = chance.randrange(len(live))
            live[victim], live[-1] = live[-1], live[victim]
            start, length, freed_nbytes = live.pop()
            policy.free(start, length)
            live_nbytes -= freed_nbytes
        live.append((place, blocks, nbytes))
        live_nbytes += nbytes
        if number >= placements // 20:
            filled.append(live_nbytes / _EVICTING_SLAB_NBYTES)
    return shares(filled)


# -- time ----------------------------------------------------------------------------------------------------------------


class _Timed:
    """A subject with its live slots."""

    def __init__(self, subject: Subject, sizes: Sizes, live: int) -> None:
        self._chance = random.Random(f"speed/{live}")
        self._sizes = sizes
        # Room for the largest beside what is live on average, or ten slots may not fit.
        length = int(subject.slack * live * slot_blocks(int(sizes.mean_nbytes))) + 8 * slot_blocks(sizes.largest_nbytes)
        self._policy = subject.create(_FIRST, length)
        places = [self._place() for _ in range(live)]
        # No tuples: one that is taken out of thousands is in no cache, which would be counted as the policy's time.
        self._starts, self._lengths = (array.array("Q", numbers) for numbers in zip(*places, strict=True))
        self.step_s = 1e-3
        self.batches_us: list[float] = []
        self.batch(live)  # until the gaps are those of slots that have come and gone
        self.batches_us.clear()

    def _place(self) -> tuple[int, int]:
        while True:
            blocks = slot_blocks(self._sizes.draw(self._chance))
            start = self._policy.allocate(blocks)
            if start is not None:
                return start, blocks  # else a smaller one is tried: nothing is measured here

    def batch(self, steps: int) -> None:
        """Frees a slot and places another, so many times; what can't be placed at once ends the batch, and is replaced.

        A batch that ended with its first step says nothing, and is repeated.
        """
        done = 0
        while not done:
            victims = [self._chance.randrange(len(self._starts)) for _ in range(steps)]
            blocks = [slot_blocks(self._sizes.draw(self._chance)) for _ in range(steps)]
            done, elapsed_s = _swap(self._policy, self._starts, self._lengths, victims, blocks)
            if done < steps:
                self._starts[victims[done]], self._lengths[victims[done]] = self._place()
        self.step_s = elapsed_s / done
        self.batches_us.append(self.step_s / 2 * 1e6)


def _swap(
    policy: Policy, starts: array.array[int], lengths: array.array[int], victims: Sequence[int], wanted: Sequence[int]
) -> tuple[int, float]:
    """The timed loop: nothing but the policy and what one needs to call it."""
    allocate, free = policy.allocate, policy.free
    started = time.thread_time()
    for done, (victim, length) in enumerate(zip(victims, wanted, strict=True)):
        free(starts[victim], lengths[victim])
        start = allocate(length)
        if start is None:
            return done, time.thread_time() - started
        starts[victim] = start
        lengths[victim] = length
    return len(victims), time.thread_time() - started


def costs(subjects: Sequence[Subject], sizes: Sizes, live: int, batches: int) -> list[dict[str, float]]:
    """Returns what an operation costs each subject in microseconds: median, minimum and maximum over so many batches."""
    timed = [_Timed(subject, sizes, live) for subject in subjects]
    for _ in range(batches):
        for subject in timed:
            subject.batch(max(_FEWEST_STEPS, int(_BATCH_S / subject.step_s)))
    return [
        {"median_us": statistics.median(all_us), "minimum_us": min(all_us), "maximum_us": max(all_us)}
        for all_us in (subject.batches_us for subject in timed)
    ]
