"""The model of ``core/kept_book.pyx``: the same content, without sums."""

from __future__ import annotations

from shmring.core.geometry import EngineBookLimits
from tests.model.records import KeptRecord


class KeptBook:
    """The content that an engine keeps."""

    def __init__(self, limits: EngineBookLimits) -> None:
        self.max_blocks, self.max_kept = limits.kept_blocks, limits.max_kept
        self.by_key: dict[bytes, KeptRecord] = {}
        self.by_generation: dict[int, KeptRecord] = {}
        self.unpinned: dict[int, KeptRecord] = {}  # by generation, the least recently used first
        self.hits = self.misses = self.evictions = 0

    @property
    def blocks(self) -> int:
        """Of all of it."""
        return sum(kept.blocks for kept in self.by_generation.values())

    @property
    def unpinned_blocks(self) -> int:
        """Of what nobody has pinned."""
        return sum(kept.blocks for kept in self.unpinned.values())

    def add(self, kept: KeptRecord) -> None:
        """Keeps what nobody has pinned yet."""
        self.by_key[kept.key] = self.by_generation[kept.generation] = self.unpinned[kept.generation] = kept

    def pin(self, kept: KeptRecord) -> None:
        """Whatever is pinned stays."""
        self.unpinned.pop(kept.generation, None)
        kept.pins += 1

    def unpin(self, kept: KeptRecord) -> None:
        """What has lost its last pin was used just now."""
        kept.pins -= 1
        if not kept.pins:
            self.unpinned[kept.generation] = kept

    def forget(self, kept: KeptRecord) -> None:
        """What is not pinned goes."""
        assert not kept.pins
        del self.unpinned[kept.generation], self.by_generation[kept.generation], self.by_key[kept.key]
        self.evictions += 1
