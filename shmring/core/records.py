"""What the engine's book writes down: leases, slots, requests, waiters, clients. Only the :mod:`.ledger` changes them."""

from __future__ import annotations

import dataclasses

from shmring.core.blocks import TakenRuns
from shmring.core.effects import ReplySlot
from shmring.core.states import EngineSlot, Lease, Request

__all__ = ["ClientRecord", "LeaseRecord", "LeaseWant", "ReplyWant", "RequestRecord", "SlotRecord", "Window"]


@dataclasses.dataclass(slots=True, eq=False)
class LeaseRecord:
    lease_id: int
    start: int
    blocks: int
    state: Lease
    live: TakenRuns  # which blocks of it are in live slots
    recalled: bool = False
    given_up: bool = False  # by its holder's goodbye

    @property
    def end(self) -> int:
        return self.start + self.blocks


@dataclasses.dataclass(slots=True, eq=False)
class SlotRecord:
    generation: int
    lease: LeaseRecord
    start: int
    blocks: int
    state: EngineSlot


@dataclasses.dataclass(slots=True, eq=False)
class RequestRecord:
    state: Request
    generations: tuple[int, ...]


@dataclasses.dataclass(slots=True, eq=False)
class LeaseWant:
    token: int
    blocks: int
    preferred_blocks: int


@dataclasses.dataclass(slots=True, eq=False)
class ReplyWant:
    client_id: int
    blocks: int


@dataclasses.dataclass(slots=True, eq=False)
class ClientRecord:
    client_id: int
    last_generation: int
    last_request_id: int = -1
    connected: bool = True
    dead: bool = False
    leased_blocks: list[int] = dataclasses.field(default_factory=lambda: [0, 0])  # by memory
    reply_blocks: int = 0
    leases: dict[int, LeaseRecord] = dataclasses.field(default_factory=dict)
    slots: dict[int, SlotRecord] = dataclasses.field(default_factory=dict)
    requests: dict[int, RequestRecord] = dataclasses.field(default_factory=dict)
    replies: dict[int, ReplySlot] = dataclasses.field(default_factory=dict)
    unsent_replies: set[int] = dataclasses.field(default_factory=set)  # the engine itself is still writing them


@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """The range kept for the first lease request that could not be served."""

    client_id: int
    start: int
    blocks: int

    @property
    def end(self) -> int:
        return self.start + self.blocks

    def overlaps(self, start: int, end: int) -> bool:
        return start < self.end and self.start < end
