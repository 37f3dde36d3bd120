"""The content that the engine keeps to be sent again: by key, with its pins, and in the order in which it is dropped.

Theory of operation. A slot that a frontend gives the engine to keep is the engine's: its blocks leave the frontend's lease, and
nobody's death takes them away. Any frontend finds it by its key. A frontend that finds it has it *pinned* until it gives the
pin back or is dead. A request that uses it pins it as well, until its claim was left and the last view has died. Content
without a pin stays until its memory is wanted: for a request for a lease, that memory is as good as free (``lending.pyx``), the
least recently used content first. So no request ever waits for unpinned content.

A client may wait for a key that has no content. Its question is answered when content comes: in the same event that keeps it,
so what a client has waited for is pinned for it before anything can drop it. A client has one such question for a key.

A *delivery* is content for one: the first client that looks for its name, or waits for it, takes it. From then on nobody else
finds it, and when that client has given its pin back, it goes. Before that, the engine itself has it pinned, so nothing that was
delivered gives way to anything; meanwhile it counts for its sender, which delivers as much as it may pin. Of two with one name that nobody has taken, the later one stands. Names and keys are never equal
(:func:`_booked`).

This book has the contents. :class:`Lending` knows where they lie, and :class:`EngineBook` which clients have pinned them.

Invariants (:meth:`KeptBook.check`): ``unpinned`` has exactly the contents without a pin, and no delivery; the sums are true, and
within the bounds; nobody waits for a key that has content.
"""

from collections import OrderedDict

from libc.stdint cimport uint64_t

cdef enum:
    DROPPED_SHOWN = 64  # contents that went last: more than an operator reads, some 10 KiB


cdef class KeptBook:
    """The content that an engine keeps.

    Args:
        limits: the engine's.

    Attributes:
        hits, misses: how often a frontend looked for a key, and found it or not.
        evictions, evicted_nbytes: contents that were dropped because their memory was wanted, and their bytes.
        evictions_for_content: of them, those that made room for other content; all others made room for a lease.
        refusals: contents that were not kept, or found and not pinned, because of a limit, or since the engine drains.
        taken, withdrawn: deliveries that a client has taken; and those that their sender has taken back.
        deliveries_dropped: those that the engine has dropped: a later one stands under their name, or nobody has taken them.
        waits: the tokens of the clients that wait for a key, by key and client.
        dropped: the contents that went last: key, bytes, how often each was found, and whether it made room for content.
    """

    cdef public dict by_key  # type: dict[bytes, KeptRecord]
    cdef public dict by_generation  # type: dict[int, KeptRecord]
    cdef public dict untaken  # type: dict[int, KeptRecord]  # deliveries that have no taker, by generation
    cdef public object unpinned  # type: OrderedDict[int, KeptRecord]  # by generation, the least recently used first
    cdef public uint64_t hits
    cdef public uint64_t misses
    cdef public dict waits  # type: dict[bytes, dict[int, int]]
    cdef public list dropped  # type: list[tuple[bytes, int, int, bool]]
    cdef public uint64_t evictions
    cdef public uint64_t evicted_nbytes
    cdef public uint64_t evictions_for_content
    cdef public uint64_t refusals
    cdef public uint64_t taken
    cdef public uint64_t withdrawn
    cdef public uint64_t deliveries_dropped
    cdef public uint64_t blocks       # of all of it
    cdef public uint64_t unpinned_blocks
    cdef readonly uint64_t max_blocks
    cdef readonly uint64_t max_kept

    def __init__(self, limits: EngineBookLimits):
        self.by_key, self.by_generation, self.untaken, self.unpinned = {}, {}, {}, OrderedDict()
        self.waits, self.dropped = {}, []
        self.max_blocks, self.max_kept = limits.kept_blocks, limits.max_kept

    def __len__(self) -> int:
        return len(self.by_generation)

    cdef int add(self, KeptRecord record) except -1:
        """Keeps content, which has its first pin already."""
        self.by_key[record.key] = self.by_generation[record.generation] = record
        self.blocks += record.blocks
        return 0

    cdef int pin(self, KeptRecord record) except -1:
        """Content gets a pin: it stays."""
        if not record.pins:
            del self.unpinned[record.generation]
            self.unpinned_blocks -= record.blocks
        record.pins += 1
        return 0

    cdef int unpin(self, KeptRecord record) except -1:
        """Content has lost its last pin. It counts as used just now."""
        assert record.pins, "a pin is given back twice"
        record.pins -= 1
        if not record.pins:
            self.unpinned[record.generation] = record
            self.unpinned_blocks += record.blocks
        return 0

    cdef int deliver(self, KeptRecord record, ClientRecord sender) except -1:
        """A delivery is there for its taker: the engine has it pinned."""
        self.pin(record)
        self.untaken[record.generation] = sender.untaken[record.generation] = record
        sender.untaken_blocks += record.blocks
        return 0

    cdef int is_untaken_no_more(self, KeptRecord record, ClientRecord sender) except -1:
        """A delivery has a taker, or goes. ``sender``: None, if it has gone."""
        del self.untaken[record.generation]
        if sender is not None:
            del sender.untaken[record.generation]
            sender.untaken_blocks -= record.blocks
        return 0

    cdef int take(self, KeptRecord record) except -1:
        """A delivery has its taker, which has pinned it: nobody else finds it."""
        del self.by_key[record.key]
        record.pins -= 1
        self.taken += 1
        return 0

    cdef int forget(self, KeptRecord record, bint for_content) except -1:
        """Content without a pin is dropped.

        Args:
            for_content: whether other content takes its place; otherwise somebody wants the memory for a lease.
        """
        del self.unpinned[record.generation]
        del self.by_generation[record.generation]
        self.blocks -= record.blocks
        self.unpinned_blocks -= record.blocks
        if self.by_key.get(record.key) is record:
            del self.by_key[record.key]
        if record.for_one:  # nobody could find it any more
            return 0
        self.evictions += 1
        self.evictions_for_content += for_content
        self.evicted_nbytes += record.nbytes
        self.dropped.append((record.key, record.nbytes, record.hits, for_content))
        if len(self.dropped) > DROPPED_SHOWN:
            del self.dropped[0]
        return 0

    cdef int wait(self, ClientRecord client, token, bytes key) except -1:
        """A client waits for a key that has no content."""
        client.waits[token] = key
        self.waits.setdefault(key, {})[client.client_id] = token
        return 0

    cdef int end_wait(self, ClientRecord client, token) except -1:
        """A client's question is answered, or the client has gone."""
        cdef dict tokens
        key = client.waits.pop(token)
        tokens = <dict>self.waits[key]
        del tokens[client.client_id]
        if not tokens:
            del self.waits[key]
        return 0

    cdef bint may_keep(self, uint64_t blocks, KeptRecord replaced) except -1:
        """Whether so many more blocks can be kept, if all unpinned content is dropped, and a delivery that these replace."""
        cdef uint64_t pinned = len(self.by_generation) - len(self.unpinned)
        cdef uint64_t pinned_blocks = self.blocks - self.unpinned_blocks
        if replaced is not None:
            pinned -= 1
            pinned_blocks -= replaced.blocks
        return pinned < self.max_kept and pinned_blocks + blocks <= self.max_blocks

    cdef bint must_give(self, uint64_t blocks) except -1:
        """Whether content has to be dropped before so many more blocks are kept."""
        return self.blocks + blocks > self.max_blocks or <uint64_t>len(self.by_generation) >= self.max_kept

    def check(self) -> None:
        """Asserts the invariants."""
        records = list(self.by_generation.values())
        there = [record for record in records if self.by_key.get(record.key) is record]
        assert len(there) == len(self.by_key) and all([record.for_one for record in records if record not in there])
        assert all([record.pins for record in records if record.for_one]), "a delivery stays, and nobody has it pinned"
        assert self.untaken == {record.generation: record for record in there if record.for_one}
        assert sorted(self.unpinned) == sorted([record.generation for record in records if not record.pins])
        assert self.blocks == sum([record.blocks for record in records]) <= self.max_blocks
        assert self.unpinned_blocks == sum([record.blocks for record in self.unpinned.values()])
        assert len(records) <= self.max_kept
        assert not self.waits.keys() & self.by_key.keys(), "somebody waits for content that is there"
        assert all(self.waits.values()), "nobody waits for a key, which is not forgotten"
        assert len(self.dropped) == min(self.evictions, DROPPED_SHOWN)
