"""Kept content in the simulator: what is broken on purpose is found, with the fewest actions that show it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest

from shmring.client.kept import KeptContents
from shmring.core.client_book import ClientSlotRecord
from shmring.core.effects import EngineEffect
from shmring.core.messages import Found, NotKept, SlotRef
from tests.model import records
from tests.model.engine_book import EngineBook
from tests.model.kept_book import KeptBook
from tests.simulation import books
from tests.simulation.exploration import explore
from tests.simulation.failure import replay
from tests.simulation.walk import walk

MOST_STATES = 20_000  # in which an exploration must find what is broken on purpose

Patch = pytest.MonkeyPatch


def what_is_pinned_may_go(patch: Patch) -> None:
    def pin(book: KeptBook, kept: records.KeptRecord) -> None:
        kept.pins += 1  # and it stays among what goes when space is wanted

    def forget(book: KeptBook, kept: records.KeptRecord) -> None:
        del book.unpinned[kept.generation], book.by_generation[kept.generation], book.by_key[kept.key]

    patch.setattr(KeptBook, "pin", pin)
    patch.setattr(KeptBook, "forget", forget)


def a_request_pins_nothing(patch: Patch) -> None:
    use, unpin = EngineBook._use, EngineBook._unpin

    def mutated(book: EngineBook, client: records.ClientRecord, slot: SlotRef) -> records.EngineSlotRecord:
        record = use(book, client, slot)
        assert record.kept is not None
        unpin(book, record.kept)
        return record

    def give_back(book: EngineBook, slot: records.EngineSlotRecord) -> None:
        if slot.kept is None:
            assert slot.lease is not None
            slot.lease.live.remove(slot.start, slot.blocks)

    patch.setattr(EngineBook, "_use", mutated)
    patch.setattr(EngineBook, "_give_back", give_back)


def pins_go_with_the_connection(patch: Patch) -> None:
    disconnect = EngineBook.disconnect

    def mutated(book: EngineBook, client_id: int) -> list[EngineEffect]:
        book._drop_pins(book.clients[client_id], ())
        return disconnect(book, client_id)

    patch.setattr(EngineBook, "disconnect", mutated)


def the_dead_keep_their_pins(patch: Patch) -> None:
    drop_pins = EngineBook._drop_pins

    def mutated(book: EngineBook, client: records.ClientRecord, still_pinned: Collection[int]) -> None:
        if not client.dead:
            drop_pins(book, client, still_pinned)

    patch.setattr(EngineBook, "_drop_pins", mutated)


def a_slot_that_is_kept_is_nobodys_to_write(patch: Patch) -> None:
    slot_left = KeptContents.slot_left

    def mutated(contents: KeptContents, record: ClientSlotRecord) -> None:
        record.viewed = False  # as if no view of it could be alive
        slot_left(contents, record)

    patch.setattr(KeptContents, "slot_left", mutated)


def a_cancelled_lookup_keeps_its_pin(patch: Patch) -> None:
    def mutated(contents: KeptContents, answer: Found | NotKept) -> None:
        future, key, record = contents._answers.pop(answer.token)
        contents._asking.release()
        result = answer if isinstance(answer, NotKept) else contents._pinned(key, answer, record)
        if not future.done():
            future.set_result(result)

    patch.setattr(KeptContents, "answered", mutated)


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
        (what_is_pinned_may_go, "kept"),
        (a_request_pins_nothing, "kept"),
        (pins_go_with_the_connection, "kept by two"),
        (the_dead_keep_their_pins, "kept by two"),
        (a_slot_that_is_kept_is_nobodys_to_write, "kept"),
        (a_view_is_no_use, "kept"),
    ],
)
def test_what_is_broken_is_found_with_the_fewest_actions(
    monkeypatch: Patch, mutation: Callable[[Patch], Any], name: str
) -> None:
    monkeypatch.setattr(books, "chosen", books.MODELS)  # the compiled books can't be patched
    with pytest.MonkeyPatch.context() as patch:
        mutation(patch)
        found = explore(name, MOST_STATES)
        assert found.failure is not None
        print(f"{mutation.__name__}: {found.states} states, {len(found.failure.trace)} actions: {found.failure.text}")
        assert str(replay(found.failure)) == found.failure.text
    assert replay(found.failure) is None


@pytest.mark.slow  # the same
def test_a_pin_that_nobody_takes_back_is_found_by_a_walk() -> None:
    with pytest.MonkeyPatch.context() as patch:
        a_cancelled_lookup_keeps_its_pin(patch)
        walked = walk(100_000, seed=8)
        assert walked.failure is not None
        assert walked.failure.text == "content is pinned that nobody uses"
        assert str(replay(walked.failure)) == walked.failure.text
    assert replay(walked.failure) is None
