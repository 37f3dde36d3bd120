"""What is replayed: slots of drawn sizes that come one after another, and go again after drawn times.

Time is counted in arrivals. How long a slot stays grows with time, so that the slots that are there at once would take from
half of the slab up to more than all of it: every trace fills any slab at last, after the slab's content has come and gone
four or five times, and the first slot that finds no place says how full the slab could get. A trace is drawn from its seed
alone, and is the same for all policies.

Some slots are aborted: they go within two arrivals. In a storm of aborts, half of everything that is there goes at once.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
import random
from collections.abc import Callable, Iterator, Mapping

KIB, MIB = 1 << 10, 1 << 20

_ABORTED = 0.1  # of all slots: more than a server sees on a good day, fewer than on a bad one
_ABORTED_WITHIN = 2.0  # arrivals
_STORMS = 1.0  # while the slab's content comes and goes once, on average
_STORM_SHARE = 0.5  # of what is there
_FIRST_LOAD, _LAST_LOAD = 0.5, 1.5  # of the slab
_TURNOVERS = 6  # of the slab's content, between those two loads
_TAIL = 1.5  # Pareto's exponent: a finite mean, no finite variance
_MEAN_DRAWS = 20_000


def _log_uniform(chance: random.Random, low: int, high: int) -> int:
    return int(math.exp(chance.uniform(math.log(low), math.log(high))))


def _mixed(chance: random.Random) -> int:
    """What a multimodal server is sent: mostly pictures, some recordings, few clips."""
    kind = chance.random()
    if kind < 0.6:  # pictures, decoded and scaled: 0.5 to 10 MB
        return _log_uniform(chance, 512 * KIB, 10 * MIB)
    if kind < 0.85:  # spectrograms of seconds to a minute: 100 KB to 2 MB
        return _log_uniform(chance, 100 * KIB, 2 * MIB)
    return _log_uniform(chance, 10 * MIB, 150 * MIB)  # clips: 8 to 64 frames


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A distribution of sizes, of which ``draw`` returns one in bytes."""

    title: str
    draw: Callable[[random.Random], int]
    largest_nbytes: int

    @functools.cached_property
    def mean_nbytes(self) -> float:
        chance = random.Random("mean")
        return sum(self.draw(chance) for _ in range(_MEAN_DRAWS)) / _MEAN_DRAWS


SIZES: Mapping[str, Sizes] = {
    "log-uniform": Sizes("64 KB..200 MB log-uniform", lambda chance: _log_uniform(chance, 64 * KIB, 200 * MIB), 200 * MIB),
    "uniform": Sizes("64 KB..200 MB uniform", lambda chance: chance.randint(64 * KIB, 200 * MIB), 200 * MIB),
    "mix": Sizes("pictures, recordings, clips", _mixed, 150 * MIB),
}
"""By name."""


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


def trace(sizes: Sizes, lifetime: Lifetime, slab_nbytes: int, seed: int) -> Iterator[Arrival]:
    """Yields slots until more are there than fit a slab of this size, however they were placed."""
    chance = random.Random(f"{seed}/{sizes.title}/{lifetime.title}")
    held = slab_nbytes / sizes.mean_nbytes  # slots that fill the slab
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
        nbytes = sizes.draw(chance)
        yield Arrival(nbytes, tuple(gone))
        live_nbytes += nbytes - sum(nbytes_of.pop(slot) for slot in gone)
        nbytes_of[number] = nbytes
        load = min(_LAST_LOAD, _FIRST_LOAD + (_LAST_LOAD - _FIRST_LOAD) * number / (_TURNOVERS * held))
        stays = lifetime.draw(chance, load * held)
        if chance.random() < _ABORTED:
            stays = chance.uniform(0, _ABORTED_WITHIN)
        heapq.heappush(ends, (number + stays, number))
        number += 1
