"""What the model of the engine's book writes down: leases, slots, requests, waiters, clients."""

from __future__ import annotations

import dataclasses

from shmring.core.effects import ReplySlot
from shmring.core.states import EngineSlot, Lease, Request
from tests.model.blocks import TakenRuns

__all__ = ["ClientRecord", "EngineSlotRecord", "KeptRecord", "LeaseRecord", "LeaseWant", "ReplyWant", "RequestRecord", "Window"]


@dataclasses.dataclass(slots=True, eq=False)
class LeaseRecord:
    lease_id: int
    client_id: int
    memory: int
    start: int
    blocks: int
    state: Lease
    live: TakenRuns  # which blocks of it are in live slots
    recalled: bool = False
    given_up: bool = False  # by its holder's goodbye
    kept_blocks: int = 0  # of its range, that have become the engine's
    new_moments: int = 0  # so many more moments it counts as granted just now
    silent_moments: int = 0  # of those that have passed since its recall, how many without a live slot in it

    @property
    def end(self) -> int:
        return self.start + self.blocks


@dataclasses.dataclass(slots=True, eq=False)
class KeptRecord:
    generation: int
    key: bytes
    start: int
    blocks: int
    nbytes: int
    is_copied: bool
    payload: bytes
    pins: int = 0  # clients that have it pinned, and slots of requests that are this
    hits: int = 0  # how often a client has found it
    for_one: bool = False  # it is a delivery


@dataclasses.dataclass(slots=True, eq=False)
class EngineSlotRecord:
    generation: int
    lease: LeaseRecord | None
    start: int
    blocks: int
    state: EngineSlot
    kept: KeptRecord | None = None  # what it is, if that is kept; it is in no lease then


@dataclasses.dataclass(slots=True, eq=False)
class RequestRecord:
    request_id: int
    slots: list[EngineSlotRecord]
    state: Request
    unread_replies: int = 0  # that its client copies out, and that its caller has not read

    @property
    def generations(self) -> tuple[int, ...]:
        return tuple(slot.generation for slot in self.slots)


@dataclasses.dataclass(slots=True, eq=False)
class LeaseWant:
    client_id: int
    token: int
    blocks: int
    preferred_blocks: int
    waits: bool
    rest_moments: int = 0  # so many more it rests, the last one until somebody answers: it has given its window up
    patience: int = 40  # so many moments it waits in vain before it gives a window up


@dataclasses.dataclass(slots=True, eq=False)
class ReplyWant:
    client_id: int
    blocks: int
    request_id: int


@dataclasses.dataclass(slots=True, eq=False)
class ClientRecord:
    client_id: int
    last_generation: int
    last_request_id: int = -1
    connected: bool = True
    dead: bool = False
    leases: dict[int, LeaseRecord] = dataclasses.field(default_factory=dict)
    slots: dict[int, EngineSlotRecord] = dataclasses.field(default_factory=dict)
    requests: dict[int, RequestRecord] = dataclasses.field(default_factory=dict)
    replies: dict[int, ReplySlot] = dataclasses.field(default_factory=dict)
    unsent_replies: set[int] = dataclasses.field(default_factory=set)  # the engine itself is still writing them
    pins: dict[int, int] = dataclasses.field(default_factory=dict)  # how often it has pinned what is kept, by generation
    waits: dict[int, bytes] = dataclasses.field(default_factory=dict)  # keys for which it waits, by the token of its question

    def leases_in(self, memory: int) -> list[LeaseRecord]:
        """Its leases in this memory."""
        return [lease for lease in self.leases.values() if lease.memory == memory]

    @property
    def reply_blocks(self) -> int:
        """Blocks of the reply reserve that it holds."""
        return sum(slot.blocks for slot in self.replies.values())

    @property
    def passing_blocks(self) -> int:
        """Of them, those that it copies out."""
        return sum(slot.blocks for slot in self.replies.values() if slot.is_copied_out)


@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """The range kept for the first lease request that could not be served."""

    client_id: int
    start: int
    blocks: int
    next_lease_id: int  # leases from this one on were granted since it was opened
    vain_moments: int = 0  # that have passed since a lease in it came back, and nothing was on its way

    @property
    def end(self) -> int:
        return self.start + self.blocks

    def overlaps(self, start: int, end: int) -> bool:
        """Whether a range has a block in it."""
        return start < self.end and self.start < end
