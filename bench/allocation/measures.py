"""What is measured of who places slots: how full a slab gets, and what an operation costs.

**Fill** (:func:`first_failure`) is the bytes that were asked for over the slab's: what headers, rounding and gaps take is
lost. At the first failure the slab is as full as the policy can make it with what has come and gone before. The limit beside
the policies is one of the mean: on a single trace a policy that fails earlier, at a smaller slot, may be fuller than one that
fails later.

**Time** (:class:`Timed`) is that of one allocation or one free, with so many slots live; slots come and go at random, and the
free runs between them are as many as that leaves. Counted is the time of the thread on its core, so that what else the machine
does is not in it.
"""

from __future__ import annotations

import array
import random
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from bench.allocation.leased import Leased
from bench.allocation.traces import LARGEST_NBYTES, Lifetime, draw_size, mean_nbytes, trace
from shmring.core.compiled import RunAllocator
from shmring.core.geometry import BLOCK_NBYTES, slot_blocks

_FIRST = 1  # the first leasable block; the header is before it
_BATCH_S = 0.02  # of processor time; batches are as long as that at any speed, so that a slow subject takes no minutes
_FEWEST_STEPS = 20
_SLACK = 1.25  # range over what is live in it that lets a subject work without failing, where its time is measured


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


class Subject(NamedTuple):
    """Who places slots; ``create`` is called with the first block of a range, and its length."""

    title: str
    create: Callable[[int, int], Policy]


OURS, LIMIT = "shmring", "limit"
LEASED = {
    "leases-1": Subject("shmring, leases of 1 frontend", lambda start, length: Leased(length, 1)),
    "leases-3": Subject("shmring, leases of 3 frontends", lambda start, length: Leased(length, 3)),
}
#: Whose fill is measured, by name.
FILLED = {OURS: Subject("shmring", RunAllocator), **LEASED, LIMIT: Subject("limit: moved together", Limit)}


# -- fill ----------------------------------------------------------------------------------------------------------------


def first_failure(create: Callable[[int, int], Policy], lifetime: Lifetime, slab_nbytes: int, seed: int) -> float:
    """Returns how full a slab gets in a trace, which is replayed until a slot finds no place."""
    policy = create(_FIRST, slab_nbytes // BLOCK_NBYTES)
    places: dict[int, tuple[int, int, int]] = {}
    live_nbytes = 0
    for number, arrival in enumerate(trace(lifetime, slab_nbytes, seed)):
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


# -- time ----------------------------------------------------------------------------------------------------------------


class Timed:
    """The allocator with so many live slots."""

    def __init__(self, live: int) -> None:
        self._chance = random.Random(f"speed/{live}")
        # Room for the largest beside what is live on average, or ten slots may not fit.
        length = int(_SLACK * live * slot_blocks(int(mean_nbytes()))) + 8 * slot_blocks(LARGEST_NBYTES)
        self._policy = RunAllocator(_FIRST, length)
        places = [self._place() for _ in range(live)]
        # No tuples: one that is taken out of thousands is in no cache, which would be counted as the policy's time.
        self._starts, self._lengths = (array.array("Q", numbers) for numbers in zip(*places, strict=True))
        self._step_s = 1e-3
        self._batch(live)  # until the gaps are those of slots that have come and gone

    def _place(self) -> tuple[int, int]:
        while True:
            blocks = slot_blocks(draw_size(self._chance))
            start = self._policy.allocate(blocks)
            if start is not None:
                return start, blocks  # else a smaller one is tried: nothing is measured here

    def batch_us(self) -> float:
        """Returns the microseconds of an operation, over some thousands of them."""
        self._batch(max(_FEWEST_STEPS, int(_BATCH_S / self._step_s)))
        return self._step_s / 2 * 1e6

    def _batch(self, steps: int) -> None:
        """Frees a slot and places another, so many times; what can't be placed at once ends the batch, and is replaced.

        A batch that ended with its first step says nothing, and is repeated.
        """
        done = 0
        while not done:
            victims = [self._chance.randrange(len(self._starts)) for _ in range(steps)]
            blocks = [slot_blocks(draw_size(self._chance)) for _ in range(steps)]
            done, elapsed_s = _swap(self._policy, self._starts, self._lengths, victims, blocks)
            if done < steps:
                self._starts[victims[done]], self._lengths[victims[done]] = self._place()
        self._step_s = elapsed_s / done


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
