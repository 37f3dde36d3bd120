"""The book of kept tensors: found by identity, evicted by least recent use, told to drop exactly once."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shmring.integrations.vllm.kept import Book, Entry

MB = 1 << 20
_ids = itertools.count(1)


@dataclass
class Submission:
    """What stands for a claim at the ring."""

    request_id: int = field(default_factory=lambda: next(_ids))
    ended: bool = False


def tensor_of(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def keep(book: Book, tensor: torch.Tensor) -> Entry:
    assert book.make_room(tensor.nbytes)
    entry = book.add(tensor, Submission())
    book.used(entry)
    return entry


def test_a_tensor_is_found_and_another_is_not() -> None:
    book, tensor = Book(10 * MB), tensor_of(MB)
    entry = keep(book, tensor)
    assert book.find(tensor) is entry
    assert book.find(tensor_of(MB)) is None
    assert book.find(tensor.view(-1)) is None  # the same bytes, but another object, which may be anything later
    assert (book.nbytes, book.counts.hits) == (MB, 1)


def test_one_that_was_written_to_is_another() -> None:
    book, tensor = Book(10 * MB), tensor_of(MB)
    entry = keep(book, tensor)
    tensor.add_(1)
    assert book.find(tensor) is None
    assert book.take_drops() == [entry.submission.request_id]
    assert book.nbytes == 0


def test_one_that_has_died_is_dropped() -> None:
    book, tensor = Book(10 * MB), tensor_of(MB)
    request_id = keep(book, tensor).submission.request_id
    del tensor
    book.reap()
    assert (book.take_drops(), book.nbytes, book.counts.died) == ([request_id], 0, 1)


def test_an_entry_whose_request_has_ended_is_forgotten() -> None:
    book, tensor = Book(10 * MB), tensor_of(MB)
    entry = keep(book, tensor)
    entry.submission.ended = True  # type: ignore[misc]
    assert book.find(tensor) is None
    assert not book.has_drops


def test_the_least_recently_used_goes_first() -> None:
    book = Book(3 * MB)
    tensors = [tensor_of(MB) for _ in range(3)]
    entries = [keep(book, tensor) for tensor in tensors]
    found = book.find(tensors[0])
    assert found is not None
    book.used(found)
    assert book.make_room(MB)
    assert book.take_drops() == [entries[1].submission.request_id]


def test_what_a_message_names_that_is_being_made_stays() -> None:
    book, tensor = Book(MB), tensor_of(MB)
    entry = keep(book, tensor)
    assert book.find(tensor) is entry
    assert not book.make_room(MB)
    book.evict(MB)
    assert not book.has_drops
    book.used(entry)
    assert book.make_room(MB)
    assert book.take_drops() == [entry.submission.request_id]


def test_a_drop_does_not_overtake_a_message_that_is_being_made() -> None:
    book, tensor = Book(10 * MB), tensor_of(MB)
    entry = keep(book, tensor)
    assert book.find(tensor) is entry  # a message names it
    tensor.add_(1)
    assert book.find(tensor) is None  # another one finds that it has changed
    assert not book.has_drops
    book.used(entry)
    assert book.take_drops() == [entry.submission.request_id]


def test_one_larger_than_the_budget_is_not_kept_and_evicts_nothing() -> None:
    book, tensor = Book(MB), tensor_of(MB)
    keep(book, tensor)
    assert not book.make_room(2 * MB)
    assert len(book) == 1


def test_what_was_not_sent_is_to_be_sent_again() -> None:
    book = Book(MB)
    book.put_back([3, 4])
    assert book.take_drops() == [3, 4]
    assert book.take_drops() == []


class Books(RuleBasedStateMachine):
    """Whatever happens: an entry's number is dropped once, never while it is used, and the sizes add up."""

    def __init__(self) -> None:
        super().__init__()
        self.book = Book(8)
        self.tensors: list[torch.Tensor] = []
        self.used: list[Entry] = []
        self.told: list[int] = []
        self.open: set[int] = set()

    @rule(nbytes=st.integers(1, 5))
    def add(self, nbytes: int) -> None:
        tensor = tensor_of(nbytes)
        if self.book.make_room(nbytes):
            entry = self.book.add(tensor, Submission())
            self.tensors.append(tensor)
            self.used.append(entry)
            self.open.add(entry.submission.request_id)

    @precondition(lambda self: self.tensors)
    @rule(data=st.data())
    def find(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.tensors) - 1))  # a tensor that is drawn would not die in time
        entry = self.book.find(self.tensors[index])
        if entry is not None:
            self.used.append(entry)

    @precondition(lambda self: self.used)
    @rule()
    def end_use(self) -> None:
        self.book.used(self.used.pop(0))

    @precondition(lambda self: self.tensors)
    @rule()
    def write(self) -> None:
        self.tensors[0].add_(1)

    @precondition(lambda self: self.tensors)
    @rule()
    def die(self) -> None:
        self.tensors.pop(0)

    @rule(nbytes=st.integers(0, 8))
    def evict(self, nbytes: int) -> None:
        self.book.evict(nbytes)

    @rule()
    def tell(self) -> None:
        drops = self.book.take_drops()
        in_use = {entry.submission.request_id for entry in self.used}
        assert not in_use & set(drops)
        self.told += drops

    @invariant()
    def adds_up(self) -> None:
        self.book.reap()
        assert len(self.told) == len(set(self.told))
        assert set(self.told) <= self.open
        entries = self.book._entries.values()
        assert self.book.nbytes == sum(entry.nbytes for entry in entries) <= self.book.budget_nbytes
        assert not {entry.submission.request_id for entry in entries} & set(self.told)

    def teardown(self) -> None:
        for entry in self.used:
            self.book.used(entry)
        self.tensors.clear()
        self.book.reap()
        self.book.evict(8)
        self.tell_all()

    def tell_all(self) -> None:
        self.used.clear()
        self.tell()
        assert set(self.told) == self.open


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
