"""The memory in which all frontends of a server keep what callers may ask for again: a conversation's next request may reach
another frontend.

Each frontend has a part of it, which only it writes: an index of entries, and their contents behind it. All frontends read all
parts. There is no lock, and no message. A reader copies an entry and its content, and believes them if the content has the
hash that the entry names: what is overwritten meanwhile, on whatever processor, is as if it were gone. Only to drop an entry,
any frontend writes: into a field of the entry, the key of what it drops. If the entry has another key by then, that means
nothing.

Entries are found by a hash of their owner and their name, so nobody finds what is another's. If space is wanted, what is too
old goes first. Then who has most of a part loses the oldest of it: a caller who fills the memory takes nothing from others.

The memory is a file without a name, which the supervisor makes: it is gone with the last process. What a frontend has kept
stays when another one takes its place.
"""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import mmap
import os
import struct
import time
from collections import OrderedDict
from collections.abc import Callable

from shmring.core.compiled import RunAllocator

__all__ = ["ResponseMemory"]

_HEAD = struct.Struct("<QQ")  # parts, and bytes of each; behind it, up to the first part, is nothing
_HEAD_NBYTES = 4096
_HASH_NBYTES = 16
_NO_KEY = bytes(_HASH_NBYTES)

# Key, owner, hash of the content, the key of what was dropped; the content's place and length in bytes, and when it was made.
_ENTRY = struct.Struct("<16s16s16s16sQQd8x")
_DROPPED = 48  # where that field is

_UNIT_NBYTES = 1024  # of contents: those of a chat have a few
_UNITS_PER_ENTRY = 4
_LARGEST_SHARE = 4  # of a part, which a content takes at most
_ROOM_SHARE = 64  # of a part, which is free when room was made


@dataclasses.dataclass(slots=True)
class _Kept:
    """What this frontend has kept: which entry it has, when it was made, and the units of its content."""

    entry: int
    made_at: float
    start: int
    units: int


class ResponseMemory:
    """A frontend's view of the memory.

    Args:
        fd: of the memory, which this object keeps.
        part: this frontend's.
        lifetime_s: how long contents are kept.
        clock: which all frontends have.
    """

    def __init__(self, fd: int, part: int, lifetime_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._memory = mmap.mmap(fd, 0)
        os.close(fd)
        parts: tuple[int, int] = _HEAD.unpack_from(self._memory)
        self._parts, self._part_nbytes = parts
        self._entries = self._part_nbytes // (_ENTRY.size + _UNITS_PER_ENTRY * _UNIT_NBYTES)
        contents_nbytes = self._part_nbytes - self._entries * _ENTRY.size
        self._units = contents_nbytes // _UNIT_NBYTES
        self._index = self._index_of(part)
        self._contents = self._index + self._entries * _ENTRY.size
        self._lifetime_s, self._clock = lifetime_s, clock
        self._free = RunAllocator(0, self._units)
        self._unused = list(range(self._entries))
        self._kept: dict[bytes, OrderedDict[bytes, _Kept]] = {}  # by owner and key, oldest first
        self._held: dict[bytes, int] = {}  # units, by owner
        self._take_over()

    @staticmethod
    def create(nbytes: int, parts: int) -> int:
        """Makes the memory; returns its descriptor.

        Args:
            nbytes: of all contents; the kernel has memory for those that were written.
            parts: frontends.
        """
        part_nbytes = max(nbytes // parts, 64 << 10) // mmap.PAGESIZE * mmap.PAGESIZE
        fd = os.memfd_create("shmring-responses")
        os.ftruncate(fd, _HEAD_NBYTES + parts * part_nbytes)
        os.pwrite(fd, _HEAD.pack(parts, part_nbytes), 0)
        return fd

    @property
    def largest_nbytes(self) -> int:
        """The largest content that can be kept."""
        return self._units // _LARGEST_SHARE * _UNIT_NBYTES

    def keep(self, owner: bytes, name: str, content: bytes) -> bool:
        """Keeps a content, unless it is too large; returns whether it does.

        Args:
            owner: who alone finds it.
            name: no other content of the owner's has it.
            content: any bytes.
        """
        if len(content) > self.largest_nbytes:
            return False
        units = max(1, -(-len(content) // _UNIT_NBYTES))
        while not self._unused or (start := self._free.allocate(units)) is None:
            self._make_room()
        entry = self._unused.pop()
        place = self._contents + start * _UNIT_NBYTES
        self._memory[place : place + len(content)] = content
        key, account, made_at = _key_of(owner, name), _hash(owner), self._clock()
        _ENTRY.pack_into(
            self._memory, self._place_of(entry), _NO_KEY, account, _hash(content), _NO_KEY, place, len(content), made_at
        )
        self._memory[self._place_of(entry) : self._place_of(entry) + _HASH_NBYTES] = key  # from now on it is found
        self._note(account, key, _Kept(entry, made_at, start, units))
        return True

    def find(self, owner: bytes, name: str) -> bytes | None:
        """Returns the content of a name; None: its owner has none, or not any more."""
        key = _key_of(owner, name)
        for place in self._places_of(key):
            found, _, check, dropped, start, nbytes, made_at = _ENTRY.unpack_from(self._memory, place)
            content = self._memory[start : start + nbytes] if nbytes <= self._part_nbytes else b""
            is_there = found == key and dropped != key and made_at + self._lifetime_s > self._clock()
            if is_there and _hash(content) == check:
                return content
        return None

    def drop(self, owner: bytes, name: str) -> bool:
        """Drops a content; returns whether it was there."""
        was_there = self.find(owner, name) is not None
        key = _key_of(owner, name)
        for place in self._places_of(key):
            self._memory[place + _DROPPED : place + _DROPPED + _HASH_NBYTES] = key
        return was_there

    def close(self) -> None:
        """Lets go of the memory."""
        self._memory.close()

    def _take_over(self) -> None:
        """Goes on with what the frontend that had this part before has kept."""
        found = []
        for entry in range(self._entries):
            key, account, _, _, place, nbytes, made_at = _ENTRY.unpack_from(self._memory, self._place_of(entry))
            if key != _NO_KEY:
                start = (place - self._contents) // _UNIT_NBYTES
                found.append((made_at, account, key, _Kept(entry, made_at, start, max(1, -(-nbytes // _UNIT_NBYTES)))))
        for _, account, key, kept in sorted(found, key=lambda each: each[0]):
            self._free.carve(kept.start, kept.units)
            self._unused.remove(kept.entry)
            self._note(account, key, kept)

    def _make_room(self) -> None:
        """Forgets what is too old, or else of whoever has most the oldest, until some room is left."""
        oldest_at, is_done = self._clock() - self._lifetime_s, False
        for account, contents in [*self._kept.items()]:
            while contents and next(iter(contents.values())).made_at <= oldest_at:
                self._forget(account)
                is_done = True
        held = [(-units, account) for account, units in self._held.items()]
        heapq.heapify(held)
        while held and not (is_done and self._has_room()):
            account = held[0][1]
            self._forget(account)
            is_done = True
            if account in self._held:
                heapq.heapreplace(held, (-self._held[account], account))
            else:
                heapq.heappop(held)

    def _has_room(self) -> bool:
        return self._free.free_units >= self._units // _ROOM_SHARE and len(self._unused) >= self._entries // _ROOM_SHARE

    def _forget(self, account: bytes) -> None:
        """Forgets the oldest content of an owner."""
        _, kept = self._kept[account].popitem(last=False)
        self._held[account] -= kept.units
        if not self._kept[account]:
            del self._kept[account], self._held[account]
        place = self._place_of(kept.entry)
        self._memory[place : place + _HASH_NBYTES] = _NO_KEY
        self._free.free(kept.start, kept.units)
        self._unused.append(kept.entry)

    def _note(self, account: bytes, key: bytes, kept: _Kept) -> None:
        self._kept.setdefault(account, OrderedDict())[key] = kept
        self._held[account] = self._held.get(account, 0) + kept.units

    def _places_of(self, key: bytes) -> list[int]:
        """Returns where the entries of a key are, in all parts."""
        places = []
        for part in range(self._parts):
            first = place = self._index_of(part)
            end = first + self._entries * _ENTRY.size
            while (place := self._memory.find(key, place, end)) >= 0:
                if (place - first) % _ENTRY.size == 0:
                    places.append(place)
                place += 1
        return places

    def _index_of(self, part: int) -> int:
        return _HEAD_NBYTES + part * self._part_nbytes

    def _place_of(self, entry: int) -> int:
        return self._index + entry * _ENTRY.size


def _hash(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_HASH_NBYTES).digest()


def _key_of(owner: bytes, name: str) -> bytes:
    return _hash(b"%d " % len(owner) + owner + name.encode())
