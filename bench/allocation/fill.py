"""How full a slab gets before a slot finds no place.

Fill is the bytes that were asked for over the slab's: what headers, rounding and gaps take is lost. At the first failure the
slab is as full as the policy can make it with what has come and gone before; many seeds give a mean, a 1st percentile and a
minimum. A trace's next slot may be a large one, so even a slab whose content could be moved together is not quite full then:
that is the limit beside the policies. It is one of the mean: on a single trace a policy that fails earlier, at a smaller slot,
may be fuller than one that fails later.

:func:`evicting` is Mooncake's method, so that numbers can be laid beside theirs: 2 GiB, sizes of 1 KiB to 64 MiB, and where
one finds no place, others at random are thrown out until it does; fill is looked at after every slot that was placed.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

import msgspec

from bench.allocation.policies import Contender
from bench.allocation.traces import Lifetime, Sizes, trace
from shmring.core.geometry import BLOCK_NBYTES, slot_blocks

__all__ = ["Fill", "evicting", "fills"]

_FIRST = 1  # the first leasable block; the header is before it
_EVICTING_SLAB_NBYTES = 2 << 30
_EVICTING_SIZES = (1 << 10, 64 << 20)


class Fill(msgspec.Struct, frozen=True):
    """How full a slab got, as shares of it: mean, 1st percentile and minimum of so many samples."""

    mean: float
    p1: float
    minimum: float
    samples: int

    @classmethod
    def of(cls, shares: Sequence[float]) -> Fill:
        ordered = sorted(shares)
        return cls(statistics.fmean(ordered), ordered[len(ordered) // 100], ordered[0], len(ordered))

    def __str__(self) -> str:
        return f"{self.mean:.1%} / {self.p1:.1%} / {self.minimum:.1%}"


def _first_failure(contender: Contender, sizes: Sizes, lifetime: Lifetime, slab_nbytes: int, seed: int) -> float:
    """Replays a trace until a slot finds no place, and returns how full the slab is then."""
    policy = contender.create(_FIRST, slab_nbytes // BLOCK_NBYTES, slot_blocks(sizes.largest_nbytes))
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


def fills(contender: Contender, sizes: Sizes, lifetime: Lifetime, slab_nbytes: int, seeds: Sequence[int]) -> Fill:
    """Returns how full a slab gets over many traces."""
    return Fill.of([_first_failure(contender, sizes, lifetime, slab_nbytes, seed) for seed in seeds])


def evicting(contender: Contender, placements: int, seed: int) -> Fill:
    """Returns how full a slab stays by Mooncake's method; the first twentieth of the placements is not counted.

    Source: Mooncake's ``allocator_bench``, which counts a million of them.
    """
    chance = random.Random(f"{seed}/evicting")
    policy = contender.create(_FIRST, _EVICTING_SLAB_NBYTES // BLOCK_NBYTES, slot_blocks(_EVICTING_SIZES[1]))
    live: list[tuple[int, int, int]] = []
    live_nbytes = 0
    shares = []
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
            shares.append(live_nbytes / _EVICTING_SLAB_NBYTES)
    return Fill.of(shares)
