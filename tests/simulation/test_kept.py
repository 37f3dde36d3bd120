"""Kept content in the simulator: what is broken on purpose is found, with the fewest actions that show it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from shmring.client.kept import KeptContents
from shmring.core.compiled import ClientSlotRecord, EngineBook
from shmring.core.effects import Answered, EngineEffect
from shmring.core.messages import Found, Keep, NotKept
from tests.simulation.exploration import explore
from tests.simulation.failure import replay
from tests.simulation.test_simulation import mutate
from tests.simulation.walk import walk

MOST_STATES = 20_000  # in which an exploration must find what is broken on purpose

Patch = pytest.MonkeyPatch


def pins_go_with_the_connection(patch: Patch) -> None:
    def disconnect(book: EngineBook, client_id: int) -> list[EngineEffect]:
        pins = book.clients[client_id].pins.items()
        effects = book.unpin(client_id, [generation for generation, count in pins for _ in range(count)])
        return effects + EngineBook.disconnect(book, client_id)

    mutate(patch, disconnect=disconnect)


def a_pin_counts_once(patch: Patch) -> None:
    """What a frontend pins again is unpinned when it takes one of its pins back."""

    def unpin(book: EngineBook, client_id: int, generations: Sequence[int]) -> list[EngineEffect]:
        pins = book.clients[client_id].pins
        named = dict.fromkeys(generations)
        return EngineBook.unpin(book, client_id, [generation for generation in named for _ in range(pins.get(generation, 1))])

    mutate(patch, unpin=unpin)


def a_slot_that_is_kept_is_nobodys_to_write(patch: Patch) -> None:
    slot_left = KeptContents.slot_left

    def mutated(contents: KeptContents, record: ClientSlotRecord) -> None:
        record.viewed = False  # as if no view of it could be alive
        slot_left(contents, record)

    patch.setattr(KeptContents, "slot_left", mutated)


def a_cancelled_lookup_keeps_its_pin(patch: Patch) -> None:
    def mutated(contents: KeptContents, answer: Found | NotKept) -> None:
        question = contents._answers.pop(answer.token)
        contents._asking.release()
        result = answer if isinstance(answer, NotKept) else contents._pinned(question.key, answer, question.record)
        if not question.place.done():
            question.place.set_result(result)

    patch.setattr(KeptContents, "answered", mutated)


def who_waits_is_answered_only_in_the_keepers_process(patch: Patch) -> None:
    def keep(book: EngineBook, client_id: int, content: Keep) -> list[EngineEffect]:
        effects = EngineBook.keep(book, client_id, content)
        return [effect for effect in effects if not isinstance(effect, Answered) or effect.client_id == client_id]

    mutate(patch, keep=keep)


def what_comes_when_all_have_left_stays_pinned(patch: Patch) -> None:
    came = KeptContents._came

    def mutated(contents: KeptContents, wait: Any, answer: Found | NotKept) -> None:
        if isinstance(answer, Found) and not wait.line:
            contents._pinned(wait.key, answer, None)
            del contents._waits[wait.key, wait.for_one], contents._waited[wait.token]
        else:
            came(contents, wait, answer)

    patch.setattr(KeptContents, "_came", mutated)


def a_view_is_no_use(patch: Patch) -> None:
    leave = KeptContents.leave

    def mutated(contents: KeptContents, pin: Any, content: Any) -> None:
        if content is not None:
            content.leave()
        leave(contents, pin, None)

    patch.setattr(KeptContents, "leave", mutated)


@pytest.mark.slow  # seconds of computing each
@pytest.mark.parametrize(
    ("mutation", "name"),
    [
        (pins_go_with_the_connection, "kept by two"),
        (a_slot_that_is_kept_is_nobodys_to_write, "kept"),
        (a_view_is_no_use, "kept"),
        (a_cancelled_lookup_keeps_its_pin, "asked"),
        (who_waits_is_answered_only_in_the_keepers_process, "waited for"),
        (what_comes_when_all_have_left_stays_pinned, "waited for"),
    ],
)
def test_what_is_broken_is_found_with_the_fewest_actions(mutation: Callable[[Patch], Any], name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        mutation(patch)
        found = explore(name, MOST_STATES)
        assert found.failure is not None
        print(f"{mutation.__name__}: {found.states} states, {len(found.failure.trace)} actions: {found.failure.text}")
        assert str(replay(found.failure)) == found.failure.text
    assert replay(found.failure) is None


@pytest.mark.slow  # the same
def test_a_pin_that_is_lost_is_found_by_a_walk() -> None:
    with pytest.MonkeyPatch.context() as patch:
        a_pin_counts_once(patch)
        walked = walk(100_000, seed=8)
        assert walked.failure is not None
        assert str(replay(walked.failure)) == walked.failure.text
    assert replay(walked.failure) is None
