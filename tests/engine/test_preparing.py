"""What is prepared before steps and beside them: where, in which order, and what is left of it."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from concurrent.futures import Future

import pytest

from shmring.engine.executors import preparing
from shmring.engine.executors.preparing import MEDIA, TEXTS, Preparing, thread_for


class Held:
    """Work that waits until it may go on, and what it works on."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        assert self.may_end.wait(60)
        return threading.current_thread().name.rpartition("_")[0]


def test_media_and_long_texts_have_a_thread_each_and_a_step_goes_on() -> None:
    assert thread_for(10**6, has_media=True) == MEDIA
    assert thread_for(16 << 10, has_media=False) is None
    assert thread_for((16 << 10) + 1, has_media=False) == TEXTS
    prepared = Preparing[str]()
    works = {1: Held(), 2: Held()}
    for number, thread in ((1, MEDIA), (2, TEXTS)):
        prepared.begin(number, works[number], 20_000, thread)
        assert works[number].begun.wait(60)
        assert prepared.take(number) is None
        assert number in prepared
    assert prepared.has_room(16 << 10), "what threads do takes nothing of a step"
    prepared.wait([1, 2])  # a little
    for work in works.values():
        work.may_end.set()
    found: dict[int, str | None] = {1: None, 2: None}
    while not all(found.values()):
        prepared.wait([number for number in found if found[number] is None])
        found = {number: found[number] or prepared.take(number) for number in found}
    assert found == {1: "shmring-media", 2: "shmring-texts"}
    assert (1 in prepared, 2 in prepared, prepared.take(1)) == (False, False, None)


def test_a_step_makes_so_much_text_into_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "_LONG_CHARACTERS", 100)
    prepared = Preparing[int]()
    assert prepared.has_room(1000), "the first one is taken in any case"
    for number, (characters, has_room_for) in enumerate([(60, 40), (40, 0)]):
        prepared.begin(number, lambda characters=characters: characters, characters, None)  # type: ignore[misc]
        assert prepared.take(number) == characters
        assert prepared.has_room(has_room_for)
        assert not prepared.has_room(has_room_for + 1)
    prepared.begin_step()
    assert prepared.has_room(100)


def test_an_error_is_raised_where_the_result_is_taken_or_where_the_work_is_done() -> None:
    def fail() -> int:
        raise ValueError("it is bad")

    prepared = Preparing[int]()
    with pytest.raises(ValueError, match="it is bad"):
        prepared.begin(1, fail, 0, None)
    assert 1 not in prepared
    prepared.begin(1, fail, 0, MEDIA)
    while not prepared._jobs[1].future.done():
        prepared.wait([1])
    with pytest.raises(ValueError, match="it is bad"):
        prepared.take(1)
    assert 1 not in prepared


def test_what_was_given_up_is_not_prepared_and_leaves_nothing() -> None:
    prepared = Preparing[str]()
    runs, waits, follows = Held(), Held(), Held()
    begun = [each.begun for each in (runs, waits)]
    may_end = runs.may_end
    for number, work in enumerate((runs, waits, follows)):
        prepared.begin(number, work, 0, TEXTS)
    assert begun[0].wait(60)
    gone = weakref.ref(waits)
    del work, waits
    prepared.forget(1)
    gc.collect()
    assert gone() is None, "the queue of the thread does not keep it"
    prepared.forget(0)  # which runs
    may_end.set()
    follows.may_end.set()
    while (found := prepared.take(2)) is None:
        prepared.wait([2])
    assert found == "shmring-texts"
    assert not begun[1].is_set()
    prepared.begin(3, Held(), 0, MEDIA)
    prepared.close()
    assert 3 not in prepared


def test_something_else_may_be_awaited_as_well() -> None:
    prepared = Preparing[str]()
    held = Held()
    prepared.begin(1, held, 0, MEDIA)
    other: Future[None] = Future()
    other.set_result(None)
    prepared.wait([1], [other])
    assert prepared.take(1) is None
    held.may_end.set()


def test_a_thread_is_shared_by_owner_and_paid_for() -> None:
    prepared, order = Preparing[str](), list[str]()
    first = Held()

    def note(name: str) -> str:
        order.append(name)
        return name

    prepared.begin(0, first, 0, TEXTS, "many")
    assert first.begun.wait(60)
    for number in range(1, 4):
        prepared.begin(number, functools.partial(note, f"many {number}"), 0, TEXTS, "many")
    prepared.begin(4, functools.partial(note, "few"), 0, TEXTS, "few")
    first.may_end.set()
    for number in range(5):
        while prepared.take(number) is None:
            prepared.wait([number])
        assert 0 < prepared.take_seconds(number) < 5
        assert prepared.take_seconds(number) == 0
    assert order == ["few", "many 1", "many 2", "many 3"]
    prepared.begin(5, lambda: "in the step", 0, None)
    assert (prepared.take(5), prepared.take_seconds(5)) == ("in the step", 0)
