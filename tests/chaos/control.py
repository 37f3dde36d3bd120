"""What the driver says to its processes, and what they answer: one message at a time over a pipe, as msgpack.

Each question has one answer, in order. A process whose driver has gone reads the end of the file, and ends.
"""

from __future__ import annotations

import msgspec

from tests.chaos.plan import Plan


class Assignment(msgspec.Struct, frozen=True):
    """What a process is told at its start.

    Attributes:
        plan: of the run.
        index: which engine, frontend or worker it is.
        life: for the how manyeth time.
        names: of the engines.
        socket_dir: where their sockets and locks are.
        journal: the path of its own.
    """

    plan: Plan
    index: int
    life: int
    names: tuple[str, ...]
    socket_dir: str
    journal: str


class _Message(msgspec.Struct, frozen=True):
    """A message."""


# from the driver


class Open(_Message, frozen=True, tag="open"):
    """Connect, and begin to send."""


class Storm(_Message, frozen=True, tag="storm"):
    """Abort all that is in flight, again and again, for this long."""

    seconds: float


class Flood(_Message, frozen=True, tag="flood"):
    """Send large requests only, for this long."""

    seconds: float


class HangUp(_Message, frozen=True, tag="hang up"):
    """Drop the connection without a word, and go on writing to the memory of before."""


class Hoard(_Message, frozen=True, tag="hoard"):
    """Have many requests answered whose replies nobody reads for this long. Answered when they are sent."""

    seconds: float


class Probe(_Message, frozen=True, tag="probe"):
    """Send each engine a small request. Answered when they have ended."""


class Leave(_Message, frozen=True, tag="leave"):
    """Say goodbye in the middle of everything, and end."""


class Quiet(_Message, frozen=True, tag="quiet"):
    """Send nothing more, and say what has not ended within this time."""

    seconds: float


class Close(_Message, frozen=True, tag="close"):
    """Say goodbye."""


Question = Open | Storm | Flood | HangUp | Hoard | Probe | Leave | Quiet | Close


# to the driver


class Ready(_Message, frozen=True, tag="ready"):
    """It is done."""


class QuietReport(_Message, frozen=True, tag="quiet report"):
    """Nothing is sent any more.

    Attributes:
        unfinished: numbers of requests that have no end.
        slots_in_use: of the client's book.
        replies_held: reply slots of which views live.
    """

    unfinished: list[int]
    slots_in_use: int
    replies_held: int


Answer = Ready | QuietReport
