"""An API server's book of kept tensors: what an engine core holds of this process, found again by a tensor's identity.

vLLM's processor cache returns the same tensor for a picture that it has seen. The first time, the tensor is submitted to
the slab as a claim that the engine core leaves open; from then on messages only name that claim. To drop it, its number
travels in the message stream itself, with the next reference or in a call of its own: the engine core decodes that stream
in order, so a drop can't overtake a reference, and the API server need not know when requests end. (Their views keep the slot
for as long as they need it.)

Invariants: an entry is in the book until it is dropped or its submission ends; ``nbytes`` is the sum of the entries; an
entry that is used (a message that names it is being made) is not evicted; the number of a dropped entry is in ``drops``
until somebody takes it to send it.

No asyncio, no vLLM and no torch in here: what a tensor is, is what has its attributes.
"""

from __future__ import annotations

import collections
import dataclasses
import weakref
from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["Book", "Entry", "OpenRequest"]

_MAX_ENTRIES = 1024  # each is a request in flight at the ring, which allows more


class OpenRequest(Protocol):
    """What stands for a kept tensor at the ring: a :class:`~shmring.Submission`."""

    @property
    def request_id(self) -> int: ...
    @property
    def ended(self) -> bool: ...


class Entry:
    """A tensor that the engine core keeps.

    Attributes:
        submission: its open request at the ring.
        nbytes: its size.
        uses: messages that name it and are being made.
        checksum: of its bytes, where checksums are compared.
    """

    __slots__ = ("__weakref__", "checksum", "identity", "key", "nbytes", "reference", "submission", "uses")

    def __init__(self, tensor: Any, submission: OpenRequest, dead: collections.deque[Entry]) -> None:
        self.key = id(tensor)
        self.identity = identity_of(tensor)
        self.nbytes: int = tensor.nbytes
        self.submission = submission
        self.uses = 0
        self.checksum = 0
        this = weakref.ref(self)

        def died(_: object) -> None:  # in whatever thread that happens
            entry = this()
            if entry is not None:
                dead.append(entry)

        self.reference = weakref.ref(tensor, died)

    def is_of(self, tensor: Any) -> bool:
        """Whether it is that tensor, unchanged."""
        return self.reference() is tensor and self.identity == identity_of(tensor)


def identity_of(tensor: Any) -> tuple[object, ...]:
    """What changes when a tensor's bytes are others: where they are, how they are read, and torch's count of writes."""
    version = None if tensor.is_inference() else tensor._version  # torch counts no writes to inference tensors
    return tensor.data_ptr(), version, tensor.shape, tensor.stride(), tensor.dtype


@dataclasses.dataclass(slots=True)
class BookCounts:
    """What has happened to entries.

    Attributes:
        hits: references that took no copy.
        evicted: dropped for space.
        died: dropped because the processor cache let them go.
    """

    hits: int = 0
    evicted: int = 0
    died: int = 0


class Book:
    """See the head of this file.

    Attributes:
        budget_nbytes: what the entries may take together.
        nbytes: what they take.
        counts: what has happened.
    """

    def __init__(self, budget_nbytes: int) -> None:
        self.budget_nbytes = budget_nbytes
        self.nbytes = 0
        self.counts = BookCounts()
        self._entries: collections.OrderedDict[int, Entry] = collections.OrderedDict()  # by a tensor's id; the latest used last
        self._dead: collections.deque[Entry] = collections.deque()
        self._drops: list[int] = []

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, tensor: Any) -> Entry | None:
        """Returns the entry of a tensor, for a message that is being made: the caller says :meth:`used` when it is."""
        self.reap()
        entry = self._entries.get(id(tensor))
        if entry is None:
            return None
        if entry.submission.ended or not entry.is_of(tensor):
            self._remove(entry)
            return None
        self._entries.move_to_end(entry.key)
        self.counts.hits += 1
        entry.uses += 1
        return entry

    def make_room(self, nbytes: int) -> bool:
        """Evicts what was not used for longest until so much more fits; returns whether it does."""
        self.reap()
        if nbytes > self.budget_nbytes:
            return False
        return self._evict(lambda: self.nbytes + nbytes <= self.budget_nbytes and len(self._entries) < _MAX_ENTRIES)

    def evict(self, nbytes: int) -> None:
        """Gives at least so much back, or all that is not in use: the slab is full, and copies go first."""
        most = self.nbytes - nbytes
        self._evict(lambda: self.nbytes <= most)

    def add(self, tensor: Any, submission: OpenRequest) -> Entry:
        """Enters a tensor that was just submitted, for a message that is being made, as :meth:`find` does."""
        before = self._entries.get(id(tensor))
        if before is not None:
            self._remove(before)
        entry = Entry(tensor, submission, self._dead)
        entry.uses = 1
        self._entries[entry.key] = entry
        self.nbytes += entry.nbytes
        return entry

    def used(self, entry: Entry) -> None:
        """A message that names it was made, or given up."""
        entry.uses -= 1
        if not entry.uses and self._entries.get(entry.key) is not entry:
            self._tell(entry)  # it was removed meanwhile

    def reap(self) -> None:
        """Drops tensors that have died."""
        while self._dead:
            entry = self._dead.popleft()
            if self._entries.get(entry.key) is entry:
                self.counts.died += 1
                self._remove(entry)

    def take_drops(self) -> list[int]:
        """Returns the numbers that the engine core is to be told of; the caller sends them, or puts them back."""
        drops, self._drops = self._drops, []
        return drops

    def put_back(self, drops: list[int]) -> None:
        """They were not sent."""
        self._drops += drops

    @property
    def has_drops(self) -> bool:
        """Whether the engine core is to be told of some."""
        return bool(self._drops)

    def _evict(self, is_enough: Callable[[], bool]) -> bool:
        if is_enough():
            return True
        for entry in list(self._entries.values()):
            if is_enough():
                return True
            if not entry.uses:
                self.counts.evicted += 1
                self._remove(entry)
        return is_enough()

    def _remove(self, entry: Entry) -> None:
        del self._entries[entry.key]
        self.nbytes -= entry.nbytes
        if not entry.uses:  # else a message that names it is still to be sent, and the drop must not overtake it
            self._tell(entry)

    def _tell(self, entry: Entry) -> None:
        if not entry.submission.ended:  # else the ring has ended it, and its slot is back
            self._drops.append(entry.submission.request_id)
