"""What a ring is doing now: the record that ``ring.inspect()`` and :func:`shmring.inspect` return, for who looks for a fault.

It is bounded: :data:`MAX_RUNS` and the other limits say how much of each list there is at most, and the counts beside say how
much there was.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

__all__ = [
    "MAX_CLIENTS",
    "MAX_ERRORS",
    "MAX_KEPT_SHOWN",
    "MAX_REQUESTS",
    "MAX_RUNS",
    "MAX_SNAPSHOT_NBYTES",
    "ClientSnapshot",
    "DroppedSnapshot",
    "ErrorSnapshot",
    "KeptSnapshot",
    "RequestSnapshot",
    "RingSnapshot",
    "Run",
    "SlotSnapshot",
    "WorkerSnapshot",
]

MAX_RUNS = 4096  # a page or a terminal shows no more
MAX_CLIENTS = 256
MAX_REQUESTS = 64
MAX_ERRORS = 16
MAX_KEPT_SHOWN = 64  # contents that are kept, and contents that have gone
MAX_SNAPSHOT_NBYTES = 4 << 20  # as JSON: ten times what the limits allow together

#: What a run of blocks is: lent and in no slot; a slot in one of its states; lent to a frontend whose connection has ended;
#: kept content, in use or not; the part for replies.
RunState = Literal["leased", "published", "claimed", "draining", "quarantined", "kept", "kept_pinned", "replies"]


class Run(msgspec.Struct, frozen=True, array_like=True):
    """Blocks in one state, side by side. Blocks in no run are free. A slot lies within the run of its lease.

    Attributes:
        start, blocks: where they are.
        state: what they are.
        client_id: whose they are; 0: the engine's.
        generation: of the slot; 0: it is none.
    """

    start: int
    blocks: int
    state: RunState
    client_id: int = 0
    generation: int = 0


class ClientSnapshot(msgspec.Struct, frozen=True):
    """A frontend.

    Attributes:
        client_id, name, pid: which one.
        state: ``quarantined``: its connection has ended, and its memory waits for the end of its process.
        leases, leased_nbytes: that it has.
        slots, requests, replies, pins: of it, at the engine.
        wants_nbytes, waits_s: the lease that it waits for, and for how long; 0: none.
    """

    client_id: int
    name: str
    pid: int
    state: Literal["connected", "quarantined"]
    leases: int
    leased_nbytes: int
    slots: int
    requests: int
    replies: int
    pins: int
    wants_nbytes: int = 0
    waits_s: float = 0.0


class RequestSnapshot(msgspec.Struct, frozen=True):
    """A request that has not ended. Its age is a second too small at most, and ten after a pause of the ring.

    Attributes:
        client_id, number: which one.
        name: its ``request_id=``.
        state: whether it was claimed.
        age_s: since it came.
        slots: the generations of its slots that the engine holds.
        nbytes: of those.
    """

    client_id: int
    number: int
    name: str
    state: Literal["waiting", "running"]
    age_s: float
    slots: list[int]
    nbytes: int


class SlotSnapshot(msgspec.Struct, frozen=True):
    """A slot that drains: it was left, and a view of it lives.

    Attributes:
        client_id, generation: which one.
        request: the name of the request that it came with, if that lived for a second.
        age_s: since it was first seen at the engine.
        nbytes: of it.
    """

    client_id: int
    generation: int
    request: str
    age_s: float
    nbytes: int


class WorkerSnapshot(msgspec.Struct, frozen=True):
    """A worker, as in :class:`shmring.WorkerStatistics`."""

    rank: int
    pid: int
    is_member: bool
    is_stopped: bool
    unacknowledged: int
    unacknowledged_nbytes: int


class KeptSnapshot(msgspec.Struct, frozen=True):
    """Content that is kept.

    Attributes:
        key: in hexadecimal digits; of a delivery, its name.
        nbytes: of it.
        pins: clients and requests that use it; 0: its memory is as good as free.
        hits: how often it was found.
        for_one: whether it is a delivery, for one taker: taken, or still to be taken.
    """

    key: str
    nbytes: int
    pins: int
    hits: int
    for_one: bool = False


class DroppedSnapshot(msgspec.Struct, frozen=True):
    """Content that has gone, since its memory was wanted.

    Attributes:
        key, nbytes, hits: as of :class:`KeptSnapshot`.
        why: ``content``: other content has taken its place, as so much or so many are kept as may be; ``lease``: a client has
            asked for memory.
        ago_s: how long ago; that may be a second too little, and ten after a pause of the ring.
    """

    key: str
    nbytes: int
    hits: int
    why: Literal["content", "lease"]
    ago_s: float


class ErrorSnapshot(msgspec.Struct, frozen=True):
    """Something that went wrong, and how long ago."""

    age_s: float
    text: str


class RingSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A ring at one moment.

    Attributes:
        name, epoch, pid: which life of which engine, in which process.
        time_s: of ``time.monotonic()``, for rates between two snapshots.
        block_nbytes, blocks, reply_blocks: how the slab is divided: replies lie at its end.
        runs, run_count: what lies where.
        clients, client_count: frontends; those that wait for memory come first.
        workers: that have joined.
        requests, request_count: the oldest requests first.
        draining, draining_count: slots that drain, the oldest first.
        errors: the last ones, the last one first.
        kept, kept_count: contents, the largest first.
        dropped: contents that have gone, the last one first.
        statistics: numbers of :class:`shmring.RingStatistics`, without its workers.
        program: what the engine's program says of itself. The server's: ``executor``, ``model``, ``paused`` (by an operator),
            ``running``, ``paused_requests`` and ``waiting`` (how many requests are in the step, have begun while others have
            their turn, and wait), ``seats`` (answers in a step, at most) and ``seats_taken``, ``step`` (what its thread does,
            and for how long), ``steps_s`` (of the last steps), ``spent_s`` (what steps were spent on, since the start),
            ``spending`` (of the last ``over_s`` seconds: the share of ``steps``, its ``parts``, the ``cause`` in words, and
            ``whose`` requests took most, if one caller's did), ``callers`` (who uses most and who has most requests, with
            ``owner``, ``seconds`` and ``share`` in the last ten seconds, ``minute_s`` and ``requests``) and ``requests``, some
            of each caller: each has its ``client_id`` and ``number`` as in the list above, its ``name``, its ``owner``, its
            ``state`` (``running``, ``paused`` or ``waiting``), its ``place`` in line, ``why`` it waits, ``age_s``,
            ``prompt_tokens``, ``tokens`` so far, and ``seconds`` that it took of steps. ``ended``, some of each caller's that
            have ended lately: ``ago_s``, its ``name`` and ``owner``, how it came to its ``end``, and the same numbers.
            ``loop_lag_s``: how late its loop was at most lately. That of a store: ``store``, with its ``name`` and
            ``pid``.
    """

    name: str
    epoch: int
    pid: int
    time_s: float
    block_nbytes: int
    blocks: int
    reply_blocks: int
    runs: list[Run]
    run_count: int
    clients: list[ClientSnapshot]
    client_count: int
    workers: list[WorkerSnapshot]
    requests: list[RequestSnapshot]
    request_count: int
    draining: list[SlotSnapshot]
    draining_count: int
    errors: list[ErrorSnapshot]
    statistics: dict[str, int | float]
    kept: list[KeptSnapshot] = []
    kept_count: int = 0
    dropped: list[DroppedSnapshot] = []
    program: dict[str, Any] = {}
