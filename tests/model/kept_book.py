"""The model of ``core/kept_book.pyx``: the same content, without sums."""

from __future__ import annotations

from shmring.core.geometry import GENERATION_BITS, EngineBookLimits
from tests.model.records import ClientRecord, KeptRecord

_DROPPED_SHOWN = 64


class KeptBook:
    """The content that an engine keeps."""

    def __init__(self, limits: EngineBookLimits) -> None:
        self.max_blocks, self.max_kept = limits.kept_blocks, limits.max_kept
        self.by_key: dict[bytes, KeptRecord] = {}
        self.by_generation: dict[int, KeptRecord] = {}
        self.unpinned: dict[int, KeptRecord] = {}  # by generation, the least recently used first
        self.waits: dict[bytes, dict[int, int]] = {}  # tokens of the clients that wait for a key, by key and client
        self.dropped: list[tuple[bytes, int, int, bool]] = []  # what went last: key, bytes, hits, whether for other content
        self.hits = self.misses = self.refusals = self.taken = self.withdrawn = self.deliveries_dropped = 0
        self.evictions = self.evictions_for_content = self.evicted_nbytes = 0

    @property
    def blocks(self) -> int:
        """Of all of it."""
        return sum(kept.blocks for kept in self.by_generation.values())

    @property
    def unpinned_blocks(self) -> int:
        """Of what nobody has pinned."""
        return sum(kept.blocks for kept in self.unpinned.values())

    def untaken_of(self, client_id: int) -> list[KeptRecord]:
        """What a client has delivered, and nobody has taken."""
        return [kept for kept in self.by_key.values() if kept.for_one and kept.generation >> GENERATION_BITS == client_id]

    def add(self, kept: KeptRecord) -> None:
        """Keeps what nobody has pinned yet."""
        self.by_key[kept.key] = self.by_generation[kept.generation] = self.unpinned[kept.generation] = kept

    def take(self, kept: KeptRecord) -> None:
        """A delivery has its taker, who has pinned it: nobody else finds it."""
        del self.by_key[kept.key]
        kept.pins -= 1
        self.taken += 1

    def pin(self, kept: KeptRecord) -> None:
        """Whatever is pinned stays."""
        self.unpinned.pop(kept.generation, None)
        kept.pins += 1

    def unpin(self, kept: KeptRecord) -> None:
        """What has lost its last pin was used just now."""
        kept.pins -= 1
        if not kept.pins:
            self.unpinned[kept.generation] = kept

    def forget(self, kept: KeptRecord, for_content: bool) -> None:
        """What is not pinned goes: for other content, or for a lease."""
        assert not kept.pins
        del self.unpinned[kept.generation], self.by_generation[kept.generation]
        if self.by_key.get(kept.key) is kept:
            del self.by_key[kept.key]
        if kept.for_one:
            return
        self.evictions += 1
        self.evictions_for_content += for_content
        self.evicted_nbytes += kept.nbytes
        self.dropped = [*self.dropped, (kept.key, kept.nbytes, kept.hits, for_content)][-_DROPPED_SHOWN:]

    def wait(self, client: ClientRecord, token: int, key: bytes) -> None:
        """A client waits for a key that has no content."""
        client.waits[token] = key
        self.waits.setdefault(key, {})[client.client_id] = token

    def end_wait(self, client: ClientRecord, token: int) -> None:
        """A client's question is answered, or the client has gone."""
        key = client.waits.pop(token)
        del self.waits[key][client.client_id]
        if not self.waits[key]:
            del self.waits[key]
