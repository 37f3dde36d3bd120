"""What is prepared before steps and beside them: where, in which order, and what is left of it."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable

import pytest

from shmring.engine.executors import preparing
from shmring.engine.executors.preparing import FORMS, LATER, MEDIA, TEXTS, Preparing, Stage, Stages, thread_for
from shmring.engine.executors.shared_threads import Job


class Held:
    """Work that waits until it may go on, and what it works on."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        assert self.may_end.wait(60)
        return threading.current_thread().name.rpartition("_")[0]


def begin(prepared: Preparing[str], number: int, work: Callable[[], str], thread: str, owner: str = "") -> None:
    prepared.begin(number, owner, prepared.on_thread(thread, owner, work))
    assert prepared.take(number) is None


def taken(prepared: Preparing[str], number: int) -> str:
    while (found := prepared.take(number)) is None:
        prepared.wait([number])
    return found


def test_media_and_long_texts_have_a_thread_each_and_a_step_goes_on() -> None:
    assert thread_for(10**6, has_media=True) == MEDIA
    assert thread_for(16 << 10, has_media=False) is None
    assert thread_for((16 << 10) + 1, has_media=False) == TEXTS
    prepared = Preparing[str]()
    works = {1: Held(), 2: Held()}
    for number, thread in ((1, MEDIA), (2, TEXTS)):
        begin(prepared, number, works[number], thread)
        assert works[number].begun.wait(60)
        assert prepared.take(number) is None
        assert number in prepared
    prepared.wait([1, 2])  # a little
    for work in works.values():
        work.may_end.set()
    assert [taken(prepared, number) for number in (1, 2)] == ["shmring-media", "shmring-texts"]
    assert (1 in prepared, 2 in prepared, prepared.take(1)) == (False, False, None)


def test_a_step_makes_so_much_text_into_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "_LONG_CHARACTERS", 100)
    prepared = Preparing[int]()

    def read(characters: int) -> Stages[int]:
        yield from prepared.room_for("", characters)
        return characters

    for number, characters in enumerate([1000, 60, 40, 100]):
        prepared.begin(number, "", read(characters))
    found = []
    for _ in range(3):
        prepared.begin_step()
        found.append([prepared.take(number) for number in range(4) if number in prepared])
        prepared.wait([])
    assert found == [[1000, None, None, None], [60, 40, None], [100]], "the first one is taken in any case"


def test_one_owner_has_less_of_a_step_that_others_are_in() -> None:
    prepared = Preparing[int]()

    def read(owner: str, characters: int) -> Stages[int]:
        yield from prepared.room_for(owner, characters)
        return characters

    def steps(owners: set[str], requests: list[tuple[str, int]]) -> list[list[int]]:
        """Which requests were read in each step."""
        for number, (owner, characters) in enumerate(requests):
            prepared.begin(number, owner, read(owner, characters))
        found = []
        while any(number in prepared for number in range(len(requests))):
            prepared.begin_step(owners)
            found.append([number for number in range(len(requests)) if prepared.take(number) is not None])
        return found

    short = [("a", 10)] * 9
    assert steps({"a"}, short) == [[*range(9)]]
    assert steps({"a", "b"}, short) == [[0, 1, 2, 3], [4, 5, 6, 7], [8]], "a prompt costs something, however short it is"
    assert steps({"a", "b"}, [*short[:5], ("b", 10)]) == [[0, 1, 2, 3, 5], [4]]
    assert steps({"b"}, [("a", 9000), ("a", 10), ("b", 3000), ("b", 4000)]) == [[0, 2, 3], [1]]
    assert steps({"a", "b"}, [("a", 3000), ("a", 3000), ("a", 3000)]) == [[0, 1], [2]]


def test_a_request_passes_its_stages_and_says_what_it_waits_for() -> None:
    prepared, dear, held = Preparing[str](), Job("a", lambda: None), Held()

    def stages() -> Stages[str]:
        yield Stage(dear, FORMS, pays_first=True)
        yield LATER
        return (yield from prepared.on_thread(TEXTS, "a", held, keeps_inputs=False))

    prepared.begin(1, "a", stages())
    assert prepared.take(1) is None
    assert prepared.stage_of(1) == Stage(dear, FORMS, pays_first=True)
    dear.run()
    dear.seconds = 7.0
    assert prepared.take(1) is None
    assert prepared.stage_of(1) == Stage(dear, FORMS, pays_first=True), "it pays in this step, and goes on in the next one"
    assert prepared.take_seconds(1) == {"forms": 7.0}
    assert prepared.take(1) is None
    assert prepared.stage_of(1) is LATER
    assert prepared.take(1) is None
    stage = prepared.stage_of(1)
    assert stage is not None
    assert (stage.keeps_inputs, stage.part) == (False, "preparing")
    held.may_end.set()
    assert taken(prepared, 1) == "shmring-texts"
    assert [*prepared.take_seconds(1)] == ["forms", "preparing"]
    assert (prepared.stage_of(1), prepared.take_seconds(1)) == (None, {})


def test_an_error_is_raised_where_the_request_goes_on() -> None:
    def fail() -> str:
        raise ValueError("it is bad")

    prepared = Preparing[str]()
    begin(prepared, 1, fail, MEDIA)
    with pytest.raises(ValueError, match="it is bad"):
        taken(prepared, 1)
    assert 1 not in prepared


def test_what_was_given_up_is_not_prepared_and_leaves_nothing() -> None:
    prepared = Preparing[str]()
    runs, waits, follows = Held(), Held(), Held()
    begun = [each.begun for each in (runs, waits)]
    may_end = runs.may_end
    for number, work in enumerate((runs, waits, follows)):
        begin(prepared, number, work, TEXTS)
    assert begun[0].wait(60)
    gone = weakref.ref(waits)
    del work, waits
    prepared.forget(1)
    gc.collect()
    assert gone() is None, "the queue of the thread does not keep it"
    prepared.forget(0)  # which runs
    may_end.set()
    follows.may_end.set()
    assert taken(prepared, 2) == "shmring-texts"
    assert not begun[1].is_set()
    begin(prepared, 3, Held(), MEDIA)
    prepared.close()
    assert 3 not in prepared


def test_a_thread_is_shared_by_owner_and_paid_for() -> None:
    prepared, order = Preparing[str](), list[str]()
    first = Held()

    def note(name: str) -> str:
        order.append(name)
        return name

    begin(prepared, 0, first, TEXTS, "many")
    assert first.begun.wait(60)
    for number in range(1, 4):
        begin(prepared, number, functools.partial(note, f"many {number}"), TEXTS, "many")
    begin(prepared, 4, functools.partial(note, "few"), TEXTS, "few")
    first.may_end.set()
    for number in range(5):
        taken(prepared, number)
        assert 0 < prepared.take_seconds(number)["preparing"] < 5
        assert prepared.take_seconds(number) == {}
    assert order == ["few", "many 1", "many 2", "many 3"]
