"""What placing a slot costs: time per operation with so many slots live.

An operation is one allocation or one free; slots of log-uniform sizes come and go at random, and the free runs between them
are as many as that leaves. Counted is the time of the thread on its core, so that what else the machine does is not in it;
batches of the subjects are interleaved, and their median is reported.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from bench.allocation.leased import LoneBook
from bench.allocation.policies import POLICIES, Contender, Policy
from bench.allocation.traces import SIZES, Sizes
from shmring.core.geometry import slot_blocks

__all__ = ["SUBJECTS", "Cost", "costs"]

_BATCH_S = 0.02  # of processor time; batches are as long as that at any speed, so that a slow subject takes no minutes
_FEWEST_STEPS = 20

SUBJECTS: Mapping[str, Contender] = {
    **POLICIES,
    "book": Contender("shmring: lease book, 1 lease", lambda start, length, largest: LoneBook(length, 1)),
    "book-many": Contender("shmring: lease book, 100 leases", lambda start, length, largest: LoneBook(length, 100), slack=3.0),
}
"""What is timed, by name: the policies, and the lease book that a frontend's every slot goes through."""


class Cost(msgspec.Struct, frozen=True, tag_field="kind", tag="cost"):
    """What an operation of a subject costs with so many slots live; median, minimum and maximum over batches."""

    subject: str
    live: int
    median_us: float
    minimum_us: float
    maximum_us: float


class _Run:
    """A subject with its live slots."""

    def __init__(self, contender: Contender, sizes: Sizes, live: int) -> None:
        self.chance = random.Random(f"speed/{live}")
        self.sizes = sizes
        # Room for the largest beside what is live on average, or ten slots may not fit.
        length = int(contender.slack * live * slot_blocks(int(sizes.mean_nbytes))) + 8 * slot_blocks(sizes.largest_nbytes)
        self.policy = contender.create(1, length, slot_blocks(sizes.largest_nbytes))
        self.places = [self.place() for _ in range(live)]
        self.step_s = 1e-3
        self.batches_us: list[float] = []
        self.batch(live)  # until the gaps are those of slots that have come and gone
        self.batches_us.clear()

    def place(self) -> tuple[int, int]:
        while True:
            blocks = slot_blocks(self.sizes.draw(self.chance))
            start = self.policy.allocate(blocks)
            if start is not None:
                return start, blocks  # else a smaller one is tried: nothing is measured here

    def batch(self, steps: int) -> None:
        """Frees a slot and places another, so many times; what can't be placed at once ends the batch, and is replaced.

        A batch that ended with its first step says nothing, and is repeated.
        """
        done = 0
        while not done:
            victims = [self.chance.randrange(len(self.places)) for _ in range(steps)]
            blocks = [slot_blocks(self.sizes.draw(self.chance)) for _ in range(steps)]
            done, elapsed_s = _swap(self.policy, self.places, victims, blocks)
            if done < steps:
                self.places[victims[done]] = self.place()
        self.step_s = elapsed_s / done
        self.batches_us.append(self.step_s / 2 * 1e6)


def _swap(policy: Policy, places: list[tuple[int, int]], victims: Sequence[int], lengths: Sequence[int]) -> tuple[int, float]:
    """The timed loop: nothing but the policy and what one needs to call it."""
    allocate, free = policy.allocate, policy.free
    started = time.thread_time()
    for done, (victim, length) in enumerate(zip(victims, lengths, strict=True)):
        free(*places[victim])
        start = allocate(length)
        if start is None:
            return done, time.thread_time() - started
        places[victim] = start, length
    return len(victims), time.thread_time() - started


def costs(names: Sequence[str], live: int, batches: int, progress: Callable[[str], None]) -> list[Cost]:
    """Returns what an operation costs, over so many batches of each subject, with a line before each is filled."""
    runs = {}
    for name in names:
        progress(f"time: {SUBJECTS[name].title}, {live:,} slots live")
        runs[name] = _Run(SUBJECTS[name], SIZES["log-uniform"], live)
    for _ in range(batches):
        for run in runs.values():
            run.batch(max(_FEWEST_STEPS, int(_BATCH_S / run.step_s)))
    return [
        Cost(name, live, statistics.median(run.batches_us), min(run.batches_us), max(run.batches_us))
        for name, run in runs.items()
    ]
