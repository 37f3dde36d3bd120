"""The engine's book of its workers, compiled, against the model in Python; workers write to their pages whatever they like."""

from __future__ import annotations

import dataclasses
import itertools
import os
import struct
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shmring.core.compiled import LARGEST_BACKLOG, WORKER_PAGE_NBYTES, FanOutBook, WorkerRecord
from shmring.errors import CapacityError, RankTakenError, WorkerLostError
from tests.model.fan_out_book import FanOutModel

MAX_WORKERS = 4
RANKS = st.integers(0, 5)
AT_WANT, AT_CLOSED, AT_STAMPS = 0, 1024, 2048


@dataclasses.dataclass
class Joined:
    """A worker: its record in the book, its page, and what it was sent, by number."""

    record: WorkerRecord
    page: bytearray
    stamps: dict[int, int] = dataclasses.field(default_factory=dict)
    is_dead: bool = False


def stamp(page: bytearray, place: int, number: int) -> None:
    struct.pack_into("<Q", page, AT_STAMPS + 8 * place, number)


class FanOutMachine(RuleBasedStateMachine):
    """Events in any order; a stamp counts when the book looks, and not before."""

    @initialize(backlog=st.integers(1, 4), blocks=st.integers(1, 12))
    def create(self, backlog: int, blocks: int) -> None:
        self.book, self.model = FanOutBook(backlog, MAX_WORKERS), FanOutModel(backlog, MAX_WORKERS, blocks)
        self.book.reserve(blocks)
        self.workers: dict[int, Joined] = {}
        self.runs: dict[int, tuple[int, int]] = {}  # of outstanding messages: where they are
        self.said: list[tuple[int, int]] = []  # acknowledgements at which the book has not looked yet

    def look(self) -> None:
        """The book has looked at the pages of all that are not gone."""
        for number, sequence in self.said:
            self.model.left(number, sequence)
        self.said.clear()
        for number in list(self.model.workers):
            self.model.closed(number, struct.unpack_from("<Q", self.workers[number].page, AT_CLOSED)[0])
        self.runs = {sequence: run for sequence, run in self.runs.items() if sequence in self.model.messages}

    # -- workers -----------------------------------------------------------------------------------------------------

    @rule(rank=RANKS)
    def join(self, rank: int) -> None:
        page = bytearray(WORKER_PAGE_NBYTES)
        try:
            number = self.model.join(rank)
        except (RankTakenError, CapacityError) as error:
            with pytest.raises(type(error)):
                self.book.join(rank, page)
            return
        self.workers[number] = Joined(self.book.join(rank, page), page)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def part(self, data: Any) -> None:
        number = data.draw(st.sampled_from(sorted(self.workers)))
        self.book.part(self.workers[number].record)
        self.model.part(number)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def die(self, data: Any) -> None:
        number = data.draw(st.sampled_from(sorted(self.workers)))
        joined = self.workers[number]
        joined.is_dead = True
        self.said = [(who, sequence) for who, sequence in self.said if who != number]
        self.book.died(joined.record)
        self.model.died(number)
        self.runs = {sequence: run for sequence, run in self.runs.items() if sequence in self.model.messages}

    # -- messages ----------------------------------------------------------------------------------------------------

    @rule(ranks=st.sets(RANKS, min_size=1, max_size=3) | st.none(), blocks=st.integers(0, 5))
    def publish(self, ranks: set[int] | None, blocks: int) -> None:
        to = sorted(self.model.ranks if ranks is None else ranks)
        missing = sorted(set(to) - set(self.model.ranks))
        if missing:
            with pytest.raises(WorkerLostError, check=lambda error: error.ranks == tuple(missing)):
                self.book.can_publish(to)
            return
        may = self.model.can_publish(to)
        assert self.book.can_publish(to) == may
        if not to or not may:
            return
        start = 0
        if blocks:
            taken = self.book.take(blocks)
            if taken is None:
                longest = self.longest_free_run()
                assert longest < blocks
                return
            start = taken
            for other, length in self.runs.values():
                assert start + blocks <= other or other + length <= start, "memory that somebody reads was given out"
            self.model.free_blocks -= blocks
        sequence, place = self.book.publish(to, start, blocks, 4096 * blocks)
        assert sequence == self.model.publish(to, blocks)
        for number, joined in self.workers.items():
            if number in self.model.messages[sequence].readers:
                assert place not in [p for s, p in joined.stamps.items() if s in self.model.workers[number].unread]
                joined.stamps[sequence] = place
                if struct.unpack_from("<Q", joined.page, AT_STAMPS + 8 * place)[0] == sequence:
                    self.said.append((number, sequence))  # it said so before it had it, and is believed about itself
        if blocks:
            self.runs[sequence] = start, blocks

    def longest_free_run(self) -> int:
        taken = {block for start, length in self.runs.values() for block in range(start, start + length)}
        free = longest = 0
        for block in range(self.model.free_blocks + len(taken)):
            free = 0 if block in taken else free + 1
            longest = max(longest, free)
        return longest

    @precondition(lambda self: any(joined.stamps for joined in self.workers.values()))
    @rule(data=st.data())
    def leave(self, data: Any) -> None:
        """A worker leaves a message: one that it has, or one that it has left before."""
        number = data.draw(st.sampled_from(sorted(n for n, joined in self.workers.items() if joined.stamps)))
        joined = self.workers[number]
        sequence = data.draw(st.sampled_from(sorted(joined.stamps)))
        if joined.is_dead or number not in self.model.workers:
            return
        if any(s > sequence and p == joined.stamps[sequence] for s, p in joined.stamps.items()):
            return  # a later message has its stamp: an honest worker says nothing there any more
        stamp(joined.page, joined.stamps[sequence], sequence)
        self.said.append((number, sequence))

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), place=st.integers(0, LARGEST_BACKLOG - 1), number=st.integers(0, 2**64 - 1) | st.integers(0, 20))
    def write_anything(self, data: Any, place: int, number: int) -> None:
        """The number of a message that this worker has, or gets, at its stamp, says that it was left; else it says nothing."""
        who = data.draw(st.sampled_from(sorted(self.workers)))
        joined = self.workers[who]
        if who not in self.model.workers:
            return
        self.sweep()  # so that nothing is said there that the book has not seen
        stamp(joined.page, place, number)
        if joined.stamps.get(number) == place:
            self.said.append((who, number))

    @precondition(lambda self: self.model.workers)
    @rule(data=st.data(), first=st.integers(0, 20))
    def close(self, data: Any, first: int) -> None:
        """A worker says that it takes no message from this one on; whatever it says, it is about itself."""
        who = data.draw(st.sampled_from(sorted(self.model.workers)))
        struct.pack_into("<Q", self.workers[who].page, AT_CLOSED, first)

    @rule()
    def sweep(self) -> None:
        before = len(self.model.messages)
        freed = self.book.sweep()
        self.look()
        assert freed == before - len(self.model.messages)

    @precondition(lambda self: self.model.ranks)
    @rule()
    def want(self) -> None:
        """Who waits asks exactly those who stand in the way, and is told whether something came back meanwhile."""
        before = len(self.model.messages)
        ranks = self.book.ranks
        laggards = self.book.laggards(ranks)
        crowded = {w.rank for w in self.model.workers.values() if w.is_member and len(w.unread) >= self.model.backlog}
        assert set(laggards) == crowded
        must_wait = self.book.want(ranks)
        self.look()
        assert must_wait == (len(self.model.messages) == before)
        for joined in self.workers.values():
            wanted = struct.unpack_from("<Q", joined.page, AT_WANT)[0]
            if joined.record.rank in crowded and joined.record.is_member and must_wait:
                assert wanted, "somebody is waited for who was not asked to ring"
            struct.pack_into("<Q", joined.page, AT_WANT, 0)

    # -- always --------------------------------------------------------------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "book"):
            return
        self.book.check()
        assert self.book.ranks == self.model.ranks
        assert self.book.outstanding == len(self.model.messages)
        assert self.book.free_blocks == self.model.free_blocks
        living = {id(self.workers[number].record) for number in self.model.workers}
        assert {id(record) for record in self.book.workers()} == living
        for number, worker in self.model.workers.items():
            record = self.workers[number].record
            assert (record.is_member, record.unacknowledged) == (worker.is_member, len(worker.unread))
            assert record.unacknowledged_nbytes == 4096 * sum(self.model.messages[each].blocks for each in worker.unread)
        for number, joined in self.workers.items():
            assert joined.record.is_gone == (number not in self.model.workers)

    def teardown(self) -> None:
        if not hasattr(self, "book"):
            return
        for joined in self.workers.values():
            self.book.died(joined.record)
        assert (self.book.outstanding, self.book.workers()) == (0, [])
        self.book.check()


TestFanOutBook = FanOutMachine.TestCase


def book_with(*ranks: int) -> tuple[FanOutBook, list[bytearray]]:
    book, pages = FanOutBook(4, MAX_WORKERS), [bytearray(WORKER_PAGE_NBYTES) for _ in ranks]
    book.reserve(4)
    for rank, page in zip(ranks, pages, strict=True):
        book.join(rank, page)
    return book, pages


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_messages_come_back_in_any_order(order: tuple[int, ...]) -> None:
    book, [page] = book_with(0)
    [record] = book.workers()
    sent = [book.publish([0], book.take(1), 1, 4096) for _ in order]
    for left, number in enumerate(order, 1):
        sequence, place = sent[number]
        stamp(page, place, sequence)
        assert book.sweep() == 1
        assert (record.unacknowledged, record.unacknowledged_nbytes) == (3 - left, 4096 * (3 - left))
        assert book.memory_laggards() == ((0,) if left < 3 else ())
        book.check()
    assert book.free_blocks == 4


def test_who_waits_looks_again_after_it_has_said_so() -> None:
    """A worker that had left its message before it could know would never ring."""
    book, [page] = book_with(0)
    sequence, place = book.publish([0], book.take(4), 4)
    assert book.want_memory()
    stamp(page, place, sequence)
    assert not book.want_memory()
    assert book.free_blocks == 4


def test_of_two_who_wait_neither_takes_the_others_bell() -> None:
    """One waits for memory, one for place; whoever is asked for less is rung for, and the other asks anew then."""
    book, [page] = book_with(0)
    first, _ = book.publish([0], book.take(4), 4)
    for _ in range(3):
        book.publish([0])
    assert book.want_memory()
    assert struct.unpack_from("<Q", page, AT_WANT) == (first,)
    assert book.want([0])
    assert struct.unpack_from("<Q", page, AT_WANT) == (first,)


def test_a_forked_child_believes_no_page_and_asks_nobody() -> None:
    """It does not have the pages: where they were, nothing is mapped, or something else is."""
    book, page = FanOutBook(1, MAX_WORKERS), bytearray(WORKER_PAGE_NBYTES)
    book.join(0, page)
    sequence, number = book.publish([0])
    stamp(page, number, sequence)
    child = os.fork()
    if not child:
        swept = book.sweep()
        book.want([0])
        wants = struct.unpack_from("<Q", page, AT_WANT)[0]
        os._exit(10 if (swept, wants, book.outstanding) == (0, 0, 1) else 20)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 10
    assert book.sweep() == 1


def test_a_stamp_that_is_no_messages_number_says_nothing() -> None:
    book, [page] = book_with(0)
    sequence, place = book.publish([0])
    for number in (sequence - 1, sequence + 1, 2**64 - 1):
        stamp(page, place, number)
        assert book.sweep() == 0
    stamp(page, place, sequence)
    assert book.sweep() == 1


def test_a_worker_that_has_closed_keeps_no_message_that_was_sent_since() -> None:
    """It says from which number on it takes none; what has that number is the first of them."""
    book, [page] = book_with(0)
    [worker] = book.workers()
    first, second = [book.publish([0])[0] for _ in range(2)]
    struct.pack_into("<Q", page, AT_CLOSED, second)
    assert book.sweep() == 0, "it may have closed and not parted: then it is asked again"
    book.part(worker)
    assert book.sweep() == 1
    assert (worker.unacknowledged, worker.is_gone) == (1, False)
    struct.pack_into("<Q", page, AT_CLOSED, first)
    assert book.sweep() == 1
    assert worker.is_gone
