"""What an engine has really sent to its workers, beside what its book believes, and beside the model of that book.

The model hears of everything from outside: who joined, who was told that it gets nothing more, which records came to which
connection, what stands in the pages. Only how far the book has looked at the pages is the book's own choice: it looks at the
oldest messages first, so there is one number of them after which model and book agree, or there is none and they differ.
"""

from __future__ import annotations

import dataclasses
import struct
from typing import TYPE_CHECKING, Any

import msgspec

from shmring.core.geometry import BLOCK_NBYTES, slot_blocks
from shmring.core.messages import TENSOR_EXTENSION
from tests.model.fan_out_book import FanOutModel
from tests.simulation.scenario import require

if TYPE_CHECKING:
    from tests.simulation.fan_out import EngineWorker, FanOut
    from tests.simulation.worker import WorkerProcess

_BROADCAST = 120  # the tag of a message to workers
_SLOT_EXTENSION = TENSOR_EXTENSION - 1
_IS_SHARED = 2
_AT_CLOSED, _AT_STAMPS = 1024, 2048


@dataclasses.dataclass(slots=True, eq=False)
class Call:
    """A task that sends a message.

    Attributes:
        number: which its message carries.
        to: ranks; None: all.
        gathers: whether it waits for replies.
        blocks: that it copies, unless it shows slots.
        slots: of claims that it shows; client and generation.
        contents: that lie in these slots, of those that the engine keeps. While it waits, it may show them by another claim.
        begun: its place among the calls whose task has run; 0: it has not.
        sequence: of its message; 0: it was not sent.
        ranks: whom that went to.
    """

    number: int
    to: tuple[int, ...] | None
    gathers: bool
    blocks: int = 0
    task: Any = None
    awaitable: Any = None  # of that task
    claim: Any = None  # that is shared
    outer: Any = None  # the task whose code sends it, as that packs a message of its own
    slots: tuple[tuple[int, int], ...] = ()
    contents: frozenset[int] = frozenset()
    is_cancelled: bool = False
    begun: int = 0
    sequence: int = 0
    ranks: tuple[int, ...] = ()

    @property
    def waits_to_send(self) -> bool:
        """Whether nobody who began later may send to its workers before it."""
        return bool(self.begun) and not self.sequence and not self.task.done() and not self.task.cancelling()

    def meets(self, other: Call) -> bool:
        """Whether both go to one worker, perhaps."""
        return self.to is None or other.to is None or not set(self.to).isdisjoint(other.to)


@dataclasses.dataclass(slots=True, eq=False)
class Sent:
    """A message that somebody may still read."""

    sequence: int
    stamp: int
    call: Call
    start: int  # in the memory of broadcasts
    blocks: int
    slots: tuple[tuple[int, int], ...]


def stamp_in(page: Any, stamp: int) -> int:
    """Returns what a worker's page says of a stamp."""
    number: int = struct.unpack_from("<Q", page, _AT_STAMPS + 8 * stamp)[0]
    return number


class FanOutTruth:
    """See the head of this file.

    Attributes:
        model: of the book.
        sent: messages that are outstanding, by number.
        by_number: all calls.
        taken: memory of the calls that are about to be sent, by their tasks: start and blocks.
    """

    def __init__(self, fan_out: FanOut, max_workers: int) -> None:
        self._fan_out = fan_out
        scenario = fan_out.engine.scenario
        self.model = FanOutModel(scenario.worker_backlog, max_workers, scenario.broadcast_blocks)
        self.sent: dict[int, Sent] = {}
        self.by_number: dict[int, Call] = {}
        self.taken: dict[Any, tuple[int, int]] = {}
        self._numbers: dict[int, EngineWorker] = {}  # by number of their join, of all that the model knows
        self._begun = 0

    # -- what happens --------------------------------------------------------------------------------------------------------

    def joined(self, worker: EngineWorker) -> None:
        """A worker has come."""
        worker.process.number = self.model.join(worker.rank)
        self._numbers[worker.process.number] = worker

    def died(self, worker: EngineWorker) -> None:
        """The engine was told that a worker is dead."""
        self.model.died(worker.process.number)

    def begins(self, task: object) -> None:
        """A task is about to run."""
        for call in self._fan_out.calls:
            if call.task is task and not call.begun:
                self._begun += 1
                call.begun = self._begun

    def is_new(self, task: object) -> bool:
        """Whether a task is one of a call, and has not run."""
        return any(call.task is task and not call.begun for call in self._fan_out.calls)

    @property
    def free_run(self) -> int:
        """Blocks of the largest piece of memory in which nothing lies."""
        in_use = [(sent.start, sent.blocks) for sent in self.sent.values() if sent.blocks] + [*self.taken.values()]
        largest = free_from = 0
        for start, blocks in sorted([*in_use, (self._fan_out.engine.scenario.broadcast_blocks, 0)]):
            largest, free_from = max(largest, start - free_from), start + blocks
        return largest

    def took_memory(self, task: object, start: int, nbytes: int) -> None:
        """A call has memory, and has copied to it."""
        self.taken[task] = start, slot_blocks(nbytes)

    def returned(self, call: Call) -> None:
        """A call has returned: what it had and did not send is free."""
        self.taken.pop(call.task, None)

    def check_result(self, call: Call, result: Any) -> None:
        """Looks at what a call has returned."""
        expected: Any = call.ranks
        if call.gathers:
            expected = [[call.number, rank] for rank in call.ranks]
            result = [answer[:2] for answer in result]
        require(result == expected, f"a call returned {result}, and was to return {expected}")

    def follow(self) -> None:
        """The engine may have done something: the model does the same."""
        for number, worker in self._numbers.items():
            if number in self.model.workers and self.model.workers[number].is_member and not worker.record.is_member:
                self.model.part(number)
        arrived: dict[int, list[EngineWorker]] = {}
        records: dict[int, list[Any]] = {}
        for worker in self._fan_out.connections:
            for record in worker.towards.arrived:
                content = msgspec.msgpack.decode(record)
                if content[0] == _BROADCAST:
                    arrived.setdefault(content[1], []).append(worker)
                    records[content[1]] = content
                    if worker.process.receives:
                        worker.process.expected.append(content[1])
            worker.towards.arrived.clear()
        for sequence in sorted(arrived):
            self._published(records[sequence], arrived[sequence])

    def _published(self, record: list[Any], workers: list[EngineWorker]) -> None:
        _, sequence, stamp, flags, in_place, copied, payload = record
        call = self.by_number[payload[1][0] if flags & _IS_SHARED else payload[0]]
        require(not call.sequence, "a message was sent twice")
        for other in self._fan_out.calls:
            if other.task is call.outer:
                continue  # it was not in line yet
            is_first = other is call or not other.waits_to_send or other.begun > call.begun > 0
            require(is_first or not call.meets(other), "a call was overtaken")
        readers = self.model.members(self.model.ranks if call.to is None else call.to)
        require(
            {worker.process.number for worker in workers} == {reader.number for reader in readers}, "not all have the message"
        )
        start = blocks = 0
        if isinstance(copied, msgspec.msgpack.Ext) and copied.code == _SLOT_EXTENSION:
            _, offset, nbytes, _ = struct.unpack("<4Q", bytes(copied.data))
            start, blocks = (offset - self._fan_out.engine.slab.nbytes) // BLOCK_NBYTES, slot_blocks(nbytes)
        for task, (taken_start, _) in tuple(self.taken.items()):
            if taken_start == start and blocks:
                require(task is call.task, "a message lies where somebody else was copying to")
                del self.taken[task]
        call.sequence, call.ranks = sequence, tuple(sorted(reader.rank for reader in readers))
        slots = tuple(self._slot(struct.unpack("<4Q", bytes(described.data))[3]) for described in in_place)
        self.sent[sequence] = Sent(sequence, stamp, call, start, blocks, slots)
        self.model.free_blocks -= blocks
        require(self.model.publish(call.ranks, blocks) == sequence, "messages are numbered as nobody expects")

    def _slot(self, generation: int) -> tuple[int, int]:
        """The slot of a claim from which a message is read: kept content lies in those of several."""
        clients = self._fan_out.engine.book.clients.items()
        holders = [client_id for client_id, client in clients if generation in client.slots]
        require(len(holders) == 1, "a message is read from a slot of no claim")
        return holders[0], generation

    def look(self) -> None:
        """Compares the two; finds how far the book has looked."""
        for sequence in sorted(self.model.messages):
            if self._agrees():
                break
            for number in sorted(self.model.messages[sequence].readers):
                worker = self._numbers[number]
                if stamp_in(worker.page, self.sent[sequence].stamp) == sequence or self._has_closed(worker, sequence):
                    self.model.left(number, sequence)
        require(self._agrees(), "the book of the workers is not what its model says")
        self.sent = {sequence: sent for sequence, sent in self.sent.items() if sequence in self.model.messages}
        self._numbers = {number: worker for number, worker in self._numbers.items() if number in self.model.workers}

    def _has_closed(self, worker: EngineWorker, sequence: int) -> bool:
        closed = struct.unpack_from("<Q", worker.page, _AT_CLOSED)[0]
        return not worker.record.is_member and 0 < closed <= sequence

    def _agrees(self) -> bool:
        book, model = self._fan_out.book, self.model
        taken = sum(blocks for _, blocks in self.taken.values())
        if (book.outstanding, book.ranks, book.free_blocks) != (len(model.messages), model.ranks, model.free_blocks - taken):
            return False
        if len(book.workers()) != len(model.workers):
            return False
        for number, worker in model.workers.items():
            record = self._numbers[number].record
            if (record.is_member, record.unacknowledged) != (worker.is_member, len(worker.unread)):
                return False
        return True

    # -- what must hold ------------------------------------------------------------------------------------------------------

    def has(self, process: WorkerProcess, sequence: int) -> bool:
        """Whether the engine knows that a worker may still read a message."""
        message = self.model.messages.get(sequence)
        return message is not None and process.number in message.readers

    def holds(self, client_id: int, generation: int) -> bool:
        """Whether a message keeps the slot of a claim: one that is read, or one that waits to be sent."""
        waiting = [call for call in self._fan_out.calls if not call.sequence]
        slots = [*(sent.slots for sent in self.sent.values()), *(call.slots for call in waiting)]
        if any((client_id, generation) in of_message for of_message in slots):
            return True
        content = self._fan_out.engine.content_of(client_id, generation)
        return content is not None and any(content in call.contents for call in waiting)

    def check(self) -> None:
        """The book is sound, and no two messages lie in the same place."""
        book = self._fan_out.book
        if not self.taken:
            book.check()
        runs = [(sent.start, sent.blocks) for sent in self.sent.values() if sent.blocks]
        runs += self.taken.values()
        end = 0
        for start, blocks in sorted(runs):
            require(start >= end, "two messages to workers overlap")
            end = start + blocks
        clients = self._fan_out.engine.book.clients
        for sent in self.sent.values():
            for client_id, generation in sent.slots:
                require(
                    client_id in clients and generation in clients[client_id].slots,
                    "a slot was released that a worker may still read",
                )
