"""What the engine keeps to be sent again: content by key, what of it is pinned, and what goes next.

Theory of operation. A slot that a frontend gives the engine to keep is the engine's: its blocks leave the frontend's lease, and
nobody's death takes them away. It is found by its key, by any frontend. Whoever finds it has it *pinned* until it says otherwise or
is dead; a request that has it pins it as well, until its claim was left and the last view has died. What nobody has pinned stays
for as long as nobody wants its memory: whoever asks for a lease gets it as if it were free (``lending.pyx``), the least recently
used first. So nothing ever waits for what is only kept.

This book says what there is. :class:`Lending` knows where it lies, and :class:`EngineBook`
who has pinned it.

Invariants (:meth:`KeptBook.check`): what has no pin is in ``unpinned``, and nothing else is; the sums are true, and within the bounds.
"""

from collections import OrderedDict

from libc.stdint cimport uint64_t


cdef class KeptBook:
    """The content that an engine keeps.

    Args:
        limits: the engine's.

    Attributes:
        hits, misses: how often somebody looked for a key, and found it or not.
        evictions: content that has gone because its memory was wanted.
    """

    cdef public dict by_key  # type: dict[bytes, KeptRecord]
    cdef public dict by_generation  # type: dict[int, KeptRecord]
    cdef public object unpinned  # type: OrderedDict[int, KeptRecord]  # by generation, the least recently used first
    cdef public uint64_t hits
    cdef public uint64_t misses
    cdef public uint64_t evictions
    cdef public uint64_t blocks       # of all of it
    cdef public uint64_t unpinned_blocks
    cdef readonly uint64_t max_blocks
    cdef readonly uint64_t max_kept

    def __init__(self, limits: EngineBookLimits):
        self.by_key, self.by_generation, self.unpinned = {}, {}, OrderedDict()
        self.max_blocks, self.max_kept = limits.kept_blocks, limits.max_kept

    def __len__(self) -> int:
        return len(self.by_generation)

    cdef int add(self, KeptRecord record) except -1:
        """Keeps what has a first pin already."""
        self.by_key[record.key] = self.by_generation[record.generation] = record
        self.blocks += record.blocks
        return 0

    cdef int pin(self, KeptRecord record) except -1:
        """Whatever is pinned stays."""
        if not record.pins:
            del self.unpinned[record.generation]
            self.unpinned_blocks -= record.blocks
        record.pins += 1
        return 0

    cdef int unpin(self, KeptRecord record) except -1:
        """What has lost its last pin was used just now."""
        assert record.pins, "a pin is given back twice"
        record.pins -= 1
        if not record.pins:
            self.unpinned[record.generation] = record
            self.unpinned_blocks += record.blocks
        return 0

    cdef int forget(self, KeptRecord record) except -1:
        """What is not pinned goes."""
        del self.unpinned[record.generation]
        del self.by_generation[record.generation]
        del self.by_key[record.key]
        self.blocks -= record.blocks
        self.unpinned_blocks -= record.blocks
        self.evictions += 1
        return 0

    cdef bint may_keep(self, uint64_t blocks) except -1:
        """Whether so much more can be kept, if what is not pinned goes."""
        if <uint64_t>(len(self.by_generation) - len(self.unpinned)) >= self.max_kept:
            return False
        return self.blocks - self.unpinned_blocks + blocks <= self.max_blocks

    cdef bint must_give(self, uint64_t blocks) except -1:
        """Whether something has to go before so much more is kept."""
        return self.blocks + blocks > self.max_blocks or <uint64_t>len(self.by_generation) >= self.max_kept

    def check(self) -> None:
        """Asserts the invariants."""
        records = list(self.by_generation.values())
        assert sorted(self.by_key) == sorted([record.key for record in records])
        assert all([self.by_key[record.key] is record for record in records])
        assert sorted(self.unpinned) == sorted([record.generation for record in records if not record.pins])
        assert self.blocks == sum([record.blocks for record in records]) <= self.max_blocks
        assert self.unpinned_blocks == sum([record.blocks for record in self.unpinned.values()])
        assert len(records) <= self.max_kept
