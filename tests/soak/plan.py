"""What a run does: phases of different load, one after another, again and again."""

from __future__ import annotations

import enum

import msgspec

FEWEST_CYCLES = 5  # one to warm up, and at least one in each quarter of the others
_MORE_CYCLES = 12  # in a longer run: three in each quarter give a median
_LONGEST_PHASE_S = 20.0  # an hour then has 30 cycles
_SHORTEST_PHASE_S = 0.1


class Phase(enum.Enum):
    """What frontends do for a while."""

    SMALL = "small requests"
    LARGE = "large tensors"
    STREAMS = "streams"
    ABORTS = "abort storm"
    RECONNECTS = "reconnects"
    IDLE = "idle"


class Sabotage(enum.Enum):
    """What a test of the harness breaks on purpose, to see that it is found."""

    MEMORY = "memory"
    DESCRIPTORS = "descriptors"
    SLAB = "slab"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to do.

    Attributes:
        cycles: how often all phases are gone through. The first warms up and is not judged.
        phase_s: length of a phase.
        frontends: processes that send.
        interval_s: between two samples.
        slab_nbytes, reply_nbytes: of the engine. Small beside the load, so that frontends wait for memory in every cycle.
        lease_nbytes: of a frontend; large tensors need further leases, which come and go.
        large_nbytes: the largest tensor.
        seed: of all that is drawn.
        sabotages: what to break on purpose.
    """

    cycles: int
    phase_s: float
    frontends: int = 3
    interval_s: float = 1.0
    slab_nbytes: int = 256 << 20
    reply_nbytes: int = 32 << 20
    lease_nbytes: int = 8 << 20
    large_nbytes: int = 32 << 20
    seed: int = 1
    sabotages: tuple[Sabotage, ...] = ()

    @classmethod
    def of(cls, minutes: float, frontends: int = 3, seed: int = 1, sabotages: tuple[Sabotage, ...] = ()) -> Plan:
        """Divides a time into cycles and phases; short runs are sampled more often, so that every phase is seen."""
        cycle_s = minutes * 60 / _MORE_CYCLES
        phase_s = min(_LONGEST_PHASE_S, max(_SHORTEST_PHASE_S, cycle_s / len(Phase)))
        return cls(
            cycles=max(FEWEST_CYCLES, round(minutes * 60 / (phase_s * len(Phase)))),
            phase_s=phase_s,
            frontends=frontends,
            interval_s=min(1.0, phase_s / 4),
            seed=seed,
            sabotages=sabotages,
        )

    @property
    def lease_idle_s(self) -> float:
        """After which an empty lease goes back: within an idle phase."""
        return min(5.0, self.phase_s / 4)
