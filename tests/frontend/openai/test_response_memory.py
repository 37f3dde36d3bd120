"""The memory of responses: who finds what, what goes when there is no room, and what is torn or dropped meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from shmring.frontend.openai import response_memory
from shmring.frontend.openai.response_memory import ResponseMemory

Open = Callable[..., ResponseMemory]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def open_part(clock: Clock) -> Iterator[Open]:
    """``open_part(1)``: a frontend's view of a memory of two parts of 64 KiB."""
    fd = ResponseMemory.create(128 << 10, 2)
    opened: list[ResponseMemory] = []

    def open_one(part: int = 0) -> ResponseMemory:
        opened.append(ResponseMemory(os.dup(fd), part, 60.0, clock))
        return opened[-1]

    yield open_one
    for memory in opened:
        memory.close()
    os.close(fd)


def test_all_frontends_find_what_one_has_kept_and_only_for_its_owner(open_part: Open) -> None:
    first, second = open_part(0), open_part(1)
    assert first.keep(b"me", "a", b"content")
    assert second.keep(b"me", "b", b"")
    for memory in (first, second):
        assert (memory.find(b"me", "a"), memory.find(b"me", "b")) == (b"content", b"")
        assert memory.find(b"you", "a") is None
        assert memory.find(b"m", "ea") is None
        assert memory.find(b"me", "c") is None


def test_any_frontend_drops_a_content_of_its_owner(open_part: Open) -> None:
    first, second = open_part(0), open_part(1)
    first.keep(b"me", "a", b"content")
    assert not second.drop(b"you", "a")
    assert first.find(b"me", "a") == b"content"
    assert second.drop(b"me", "a")
    assert not second.drop(b"me", "a")
    assert (first.find(b"me", "a"), second.find(b"me", "a")) == (None, None)


def test_a_drop_that_comes_too_late_means_nothing_to_what_is_there_now(open_part: Open) -> None:
    first, second = open_part(0), open_part(1)
    first.keep(b"me", "a", b"content")
    [place] = second._places_of(response_memory._key_of(b"me", "a"))
    first._make_room()
    first.keep(b"me", "b", b"other")
    key = response_memory._key_of(b"me", "a")
    second._memory[place + response_memory._DROPPED : place + response_memory._DROPPED + 16] = key
    assert second.find(b"me", "b") == b"other"


def test_what_is_too_old_is_not_found_and_goes_first(open_part: Open, clock: Clock) -> None:
    memory = open_part()
    largest = memory.largest_nbytes
    memory.keep(b"old", "a", b"x")
    clock.now += 59
    assert memory.find(b"old", "a") == b"x"
    for number in range(3):
        memory.keep(b"me", str(number), b"y" * largest)
    clock.now += 1
    assert memory.find(b"old", "a") is None
    for number in range(3, 12):
        memory.keep(b"me", str(number), b"y" * largest)
    assert b"old" not in set(memory._kept)
    assert memory.find(b"me", "11") == b"y" * largest


def test_who_has_most_loses_the_oldest(open_part: Open) -> None:
    memory = open_part()
    assert memory.keep(b"small", "a", b"kept")
    for number in range(40):
        assert memory.keep(b"large", str(number), b"%02d" % number * (memory.largest_nbytes // 2))
    assert memory.find(b"small", "a") == b"kept"
    there = [number for number in range(40) if memory.find(b"large", str(number)) is not None]
    assert there == list(range(40 - len(there), 40))
    assert 1 < len(there) < 5
    for number in range(1000):
        assert memory.keep(b"many", str(number), b"z")
    assert memory.find(b"many", "999") == b"z"
    assert memory.find(b"small", "a") == b"kept"


def test_what_is_too_large_is_not_kept(open_part: Open) -> None:
    memory = open_part()
    assert not memory.keep(b"me", "a", bytes(memory.largest_nbytes + 1))
    assert memory.keep(b"me", "b", bytes(memory.largest_nbytes))
    assert memory.find(b"me", "a") is None


def test_a_content_that_is_overwritten_while_it_is_read_is_gone(open_part: Open) -> None:
    first, second = open_part(0), open_part(1)
    first.keep(b"me", "a", b"content")
    place = first._contents
    first._memory[place : place + 1] = b"C"
    assert second.find(b"me", "a") is None


def test_another_frontend_goes_on_with_what_one_has_kept(open_part: Open) -> None:
    first = open_part(0)
    first.keep(b"me", "a", b"x" * 3000)
    first.keep(b"you", "b", b"y")
    first.drop(b"you", "b")
    again = open_part(0)
    assert again.find(b"me", "a") == b"x" * 3000
    for number in range(60):
        assert again.keep(b"them", str(number), b"z" * 900)
    assert again.find(b"me", "a") == b"x" * 3000
    assert again._free.free_units + sum(kept.units for of in again._kept.values() for kept in of.values()) == again._units


def test_room_is_made_for_more_than_one_content(clock: Clock) -> None:
    memory = ResponseMemory(ResponseMemory.create(4 << 20, 1), 0, 60.0, clock)
    made = []
    make_room = memory._make_room

    def count() -> None:
        made.append(len(memory._unused))
        make_room()

    memory._make_room = count  # type: ignore[method-assign]
    for number in range(3000):
        assert memory.keep(b"%d" % (number % 50), str(number), b"x" * 3000)
    assert memory.find(b"%d" % (2999 % 50), "2999") == b"x" * 3000
    assert 0 < len(made) < 300
    memory.close()
