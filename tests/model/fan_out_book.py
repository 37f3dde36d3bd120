"""What the engine's book of its workers does, in plain Python and without speed: who still reads what.

It says nothing of where in memory a message is put, nor which stamp it gets; the compiled book decides, and the tests check
that nothing which is in use is given out again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from shmring.errors import CapacityError, RankTakenError, WorkerLostError

WINDOW = 256  # messages that may be outstanding


@dataclasses.dataclass
class Worker:
    """A worker that has joined and is not gone."""

    number: int  # of its join: a rank may be used again
    rank: int
    is_member: bool = True
    unread: set[int] = dataclasses.field(default_factory=set)  # messages that it has not left


@dataclasses.dataclass
class Message:
    """A message that somebody may still read."""

    blocks: int
    readers: set[int]  # by number of their join


class FanOutModel:
    """See the head of this file.

    Args:
        backlog: messages that a worker may have that it has not left.
        max_workers: at a time.
        blocks: of memory.
    """

    def __init__(self, backlog: int, max_workers: int, blocks: int) -> None:
        self.backlog, self.max_workers = backlog, max_workers
        self.free_blocks = blocks
        self.workers: dict[int, Worker] = {}
        self.messages: dict[int, Message] = {}
        self.next_sequence = 1
        self._joins = 0

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the members, in order."""
        return tuple(sorted(worker.rank for worker in self.workers.values() if worker.is_member))

    def join(self, rank: int) -> int:
        """A worker has come; returns the number of its join."""
        if rank in self.ranks:
            raise RankTakenError("taken", rank=rank)
        if len(self.workers) == self.max_workers:
            raise CapacityError("full", needed=self.max_workers + 1, capacity=self.max_workers)
        self._joins += 1
        self.workers[self._joins] = Worker(self._joins, rank)
        return self._joins

    def part(self, number: int) -> None:
        """It gets nothing more; what it has stays with it."""
        if number in self.workers:
            self.workers[number].is_member = False
            self._forget_if_done(number)

    def died(self, number: int) -> None:
        """Nobody reads what only it was reading."""
        if number in self.workers:
            self.part(number)
            for sequence in tuple(self.workers[number].unread if number in self.workers else ()):
                self.left(number, sequence)

    def members(self, ranks: Iterable[int]) -> list[Worker]:
        """The members of these ranks."""
        missing = sorted(set(ranks) - set(self.ranks))
        if missing:
            raise WorkerLostError("none", ranks=missing)
        return [worker for worker in self.workers.values() if worker.is_member and worker.rank in set(ranks)]

    def can_publish(self, ranks: Iterable[int]) -> bool:
        """Whether one more message may go to these."""
        return len(self.messages) < WINDOW and all(len(worker.unread) < self.backlog for worker in self.members(ranks))

    def publish(self, ranks: Iterable[int], blocks: int) -> int:
        """A message goes to these; its blocks were taken before."""
        readers = self.members(ranks)
        sequence = self.next_sequence
        self.next_sequence += 1
        self.messages[sequence] = Message(blocks, {worker.number for worker in readers})
        for worker in readers:
            worker.unread.add(sequence)
        return sequence

    def left(self, number: int, sequence: int) -> None:
        """A worker has left a message: what it says twice, or of a message that is not its own, says nothing."""
        message = self.messages.get(sequence)
        if message is None or number not in message.readers:
            return
        message.readers.remove(number)
        self.workers[number].unread.remove(sequence)
        if not message.readers:
            self.free_blocks += message.blocks
            del self.messages[sequence]
        self._forget_if_done(number)

    def closed(self, number: int, first: int) -> None:
        """A worker says that it has closed, and takes nothing from this message on: that counts when it has parted."""
        worker = self.workers.get(number)
        if first and worker is not None and not worker.is_member:
            for sequence in sorted(worker.unread):
                if sequence >= first:
                    self.left(number, sequence)

    def _forget_if_done(self, number: int) -> None:
        worker = self.workers[number]
        if not worker.is_member and not worker.unread:
            del self.workers[number]
