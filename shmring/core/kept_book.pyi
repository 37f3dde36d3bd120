from collections import OrderedDict

from shmring.core.geometry import EngineBookLimits
from shmring.core.records import KeptRecord

class KeptBook:
    by_key: dict[bytes, KeptRecord]
    by_generation: dict[int, KeptRecord]
    unpinned: OrderedDict[int, KeptRecord]
    hits: int
    misses: int
    evictions: int
    blocks: int
    unpinned_blocks: int
    @property
    def max_blocks(self) -> int: ...
    @property
    def max_kept(self) -> int: ...
    def __init__(self, limits: EngineBookLimits) -> None: ...
    def __len__(self) -> int: ...
    def check(self) -> None: ...
