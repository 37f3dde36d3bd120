from shmring.core.blocks import TakenRuns
from shmring.core.effects import ReplySlot
from shmring.core.states import EngineSlot, Lease, Request

class LeaseRecord:
    lease_id: int
    client_id: int
    memory: int
    start: int
    blocks: int
    state: Lease
    live: TakenRuns
    recalled: bool
    given_up: bool
    kept_blocks: int
    @property
    def end(self) -> int: ...

class KeptRecord:
    generation: int
    key: bytes
    start: int
    blocks: int
    nbytes: int
    is_copied: bool
    payload: bytes
    pins: int

class Piece:
    start: int
    blocks: int
    lease: LeaseRecord | None
    kept: KeptRecord | None

class EngineSlotRecord:
    generation: int
    lease: LeaseRecord | None
    kept: KeptRecord | None
    start: int
    blocks: int
    state: EngineSlot

class RequestRecord:
    request_id: int
    slots: list[EngineSlotRecord] | None
    state: Request
    @property
    def generations(self) -> tuple[int, ...]: ...

class LeaseWant:
    client_id: int
    token: int
    blocks: int
    preferred_blocks: int
    waits: bool

class ReplyWant:
    client_id: int
    blocks: int

class ClientRecord:
    client_id: int
    last_generation: int
    last_request_id: int
    connected: bool
    dead: bool
    leased_blocks: tuple[int, ...]
    lease_counts: tuple[int, ...]
    reply_blocks: int
    leases: dict[int, LeaseRecord]
    slots: dict[int, EngineSlotRecord]
    requests: dict[int, RequestRecord]
    replies: dict[int, ReplySlot]
    unsent_replies: set[int]
    pins: dict[int, int]
    pin_count: int
    pinned_blocks: int

class Window:
    client_id: int
    start: int
    blocks: int
    @property
    def end(self) -> int: ...
