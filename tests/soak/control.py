"""What the driver asks its processes, and what they answer: one message at a time over a pipe, as msgpack."""

from __future__ import annotations

import msgspec

from tests.soak.plan import Phase, Plan


class Assignment(msgspec.Struct, frozen=True):
    """What a process is told at its start; ``index`` is -1 for the engine."""

    plan: Plan
    name: str
    socket_dir: str
    index: int


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Begin a phase."""

    phase: Phase


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End the phase: begin nothing new, and see what was begun to its end."""


class Look(msgspec.Struct, frozen=True, tag="look"):
    """Say what you see of yourself."""


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """Close everything, and end."""


Question = Begin | Stop | Look | Leave


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """It is done."""


class Seen(msgspec.Struct, frozen=True, tag="seen", kw_only=True):
    """What a process sees of itself.

    Attributes:
        lag_s: the longest that its loop has kept a timer waiting since the last look.
        requests: answered so far; of a frontend.
        nbytes: bytes of tensors in them, both ways.
        aborted: given up so far.
        failures: what should not have happened, in words.
        slots_in_use: slots that the engine holds, or that the frontend has in any state.
        leased_nbytes, quarantined_nbytes: of the slab; of the engine.
        reply_slots_nbytes: of the reply reserve in use; of the engine.
        busy: requests that wait or run.
    """

    lag_s: float = 0.0
    requests: int = 0
    nbytes: int = 0
    aborted: int = 0
    failures: list[str] = []
    slots_in_use: int = 0
    leased_nbytes: int = 0
    quarantined_nbytes: int = 0
    reply_slots_nbytes: int = 0
    busy: int = 0


Answer = Ended | Seen
