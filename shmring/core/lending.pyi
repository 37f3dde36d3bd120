from shmring.core.blocks import RunAllocator
from shmring.core.geometry import EngineBookLimits
from shmring.core.kept_book import KeptBook
from shmring.core.messages import Memory
from shmring.core.records import ClientRecord, LeaseWant, Piece, Window
from shmring.core.states import Lease

class Lending:
    @property
    def limits(self) -> EngineBookLimits: ...
    @property
    def memory(self) -> Memory: ...
    clients: dict[int, ClientRecord]
    _free: RunAllocator
    _wants: dict[int, LeaseWant]
    _window: Window | None
    _apart: list[tuple[int, int]]
    _by_start: list[Piece]
    contents: KeptBook | None
    _next_lease_id: int
    def __init__(
        self,
        clients: dict[int, ClientRecord],
        limits: EngineBookLimits,
        memory: Memory,
        start: int,
        blocks: int,
        first_lease_id: int,
        contents: KeptBook | None = None,
    ) -> None: ...
    @property
    def free_nbytes(self) -> int: ...
    @property
    def waiting_lease_requests(self) -> int: ...
    def leased_nbytes(self, state: Lease) -> int: ...
    def check(self) -> None: ...
