"""What is replayed: slots of drawn sizes that come one after another, and go again after drawn times.

Time is counted in arrivals. How long a slot stays grows with time, so that every trace fills any slab at last, and the first
slot that finds no place says how full the slab could get. A trace is drawn from its seed alone, and is the same for all
policies.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
import random
from collections.abc import Callable, Iterator, Mapping

LARGEST_NBYTES = 200 << 20
_LEAST_NBYTES = 64 << 10
_SIZES = "64 KB..200 MB log-uniform"  # of which each trace's seed is made

_ABORTED = 0.1  # of all slots: more than a server sees on a good day, fewer than on a bad one
_ABORTED_WITHIN = 2.0  # arrivals
_STORMS = 1.0  # while the slab's content comes and goes once, on average
_STORM_SHARE = 0.5  # of what is there
_FIRST_LOAD, _LAST_LOAD = 0.5, 1.5  # of the slab
_TURNOVERS = 6  # of the slab's content, between those two loads
_TAIL = 1.5  # Pareto's exponent: a finite mean, no finite variance
_MEAN_DRAWS = 20_000


def draw_size(chance: random.Random) -> int:
    """Returns a size in bytes."""
    return int(math.exp(chance.uniform(math.log(_LEAST_NBYTES), math.log(LARGEST_NBYTES))))


@functools.cache
def mean_nbytes() -> float:
    """Returns the mean of many sizes."""
    chance = random.Random("mean")
    return sum(draw_size(chance) for _ in range(_MEAN_DRAWS)) / _MEAN_DRAWS


@dataclasses.dataclass(frozen=True)
class Lifetime:
    """A distribution of how long slots stay, of which ``draw`` returns a time of the given mean; with abort storms or not."""

    title: str
    draw: Callable[[random.Random, float], float]
    storms: bool = False


LIFETIMES: Mapping[str, Lifetime] = {
    "fifo": Lifetime("in order", lambda chance, mean: mean),
    "storms": Lifetime("in order, abort storms", lambda chance, mean: mean, storms=True),
    "random": Lifetime("random", lambda chance, mean: chance.expovariate(1 / mean)),
    "heavy-tailed": Lifetime("heavy-tailed", lambda chance, mean: chance.paretovariate(_TAIL) * mean * (_TAIL - 1) / _TAIL),
}
"""By name."""


@dataclasses.dataclass(frozen=True, slots=True)
class Arrival:
    """The next slot of a trace; gone are earlier ones that go before it comes, by their numbers from 0."""

    nbytes: int
    gone: tuple[int, ...]


def trace(lifetime: Lifetime, slab_nbytes: int, seed: int) -> Iterator[Arrival]:
    """Yields slots until more are there than fit a slab of this size, however they were placed."""
    chance = random.Random(f"{seed}/{_SIZES}/{lifetime.title}")
    held = slab_nbytes / mean_nbytes()  # slots that fill the slab
    ends: list[tuple[float, int]] = []
    nbytes_of: dict[int, int] = {}
    live_nbytes = 0
    number = 0
    while live_nbytes <= slab_nbytes:
        gone = []
        while ends and ends[0][0] <= number:
            gone.append(heapq.heappop(ends)[1])
        if lifetime.storms and chance.random() < _STORMS / held:
            struck = {slot for _, slot in ends if chance.random() < _STORM_SHARE}
            gone += sorted(struck)
            ends = [end for end in ends if end[1] not in struck]
            heapq.heapify(ends)
        nbytes = draw_size(chance)
        yield Arrival(nbytes, tuple(gone))
        live_nbytes += nbytes - sum(nbytes_of.pop(slot) for slot in gone)
        nbytes_of[number] = nbytes
        load = min(_LAST_LOAD, _FIRST_LOAD + (_LAST_LOAD - _FIRST_LOAD) * number / (_TURNOVERS * held))
        stays = lifetime.draw(chance, load * held)
        if chance.random() < _ABORTED:
            stays = chance.uniform(0, _ABORTED_WITHIN)
        heapq.heappush(ends, (number + stays, number))
        number += 1
