"""What an engine keeps, at the edges: as much as may be kept, all of it pinned, and beside a range that somebody waits for.

Sizes are in blocks; the model test is in test_kept_book_machine.py.
"""

from __future__ import annotations

import pytest

from shmring.core.compiled import EngineBook
from shmring.core.effects import Answered, EngineEffect, Granted, Recalled
from shmring.core.geometry import BLOCK_NBYTES, GENERATION_BITS, EngineBookLimits, Geometry
from shmring.core.messages import SLOT_HEADER_NBYTES, Found, LeaseGrant, NotKept, SlotRef
from tests.tables import for_each

pytestmark = pytest.mark.usefixtures("books")

MAX_KEPT = 3


def make_book(leasable: int) -> EngineBook:
    limits = EngineBookLimits(
        max_lease_blocks=leasable,
        quota_blocks=leasable,
        max_leases=4,
        max_inflight=4,
        kept_blocks=leasable,
        max_kept=MAX_KEPT,
        max_pins=8,
    )
    return EngineBook(Geometry(leasable_blocks=leasable, reply_blocks=1), limits)


def connect(book: EngineBook, client: int, blocks: int) -> LeaseGrant:
    grant = book.connect(client, blocks * BLOCK_NBYTES)
    assert grant is not None
    assert grant.nbytes == blocks * BLOCK_NBYTES
    return grant


def keep(book: EngineBook, client: int, grant: LeaseGrant, at: int) -> Found | NotKept:
    """A client gives the block ``at`` of its lease to keep."""
    generation = client << GENERATION_BITS | at + 1
    slot = SlotRef(grant.lease_id, grant.offset + at * BLOCK_NBYTES, BLOCK_NBYTES - SLOT_HEADER_NBYTES, generation)
    return answer_in(book.keep(client, at, b"%032d" % at, slot, False, b"\xc0"))


def answer_in(effects: list[EngineEffect]) -> Found | NotKept:
    [answer] = [effect.answer for effect in effects if isinstance(effect, Answered)]
    return answer


def test_where_as_many_are_pinned_as_may_be_kept_another_one_is_not_kept() -> None:
    book = make_book(leasable=8)
    grant = connect(book, 1, 8)
    kept = [keep(book, 1, grant, at) for at in range(MAX_KEPT)]
    assert all(isinstance(answer, Found) for answer in kept)
    assert keep(book, 1, grant, MAX_KEPT) == NotKept(MAX_KEPT, "full")
    assert len(book.kept.by_key) == MAX_KEPT
    assert isinstance(kept[1], Found)
    book.unpin(1, [kept[1].generation])
    assert isinstance(keep(book, 1, grant, MAX_KEPT + 1), Found), "it takes the place of what nobody has pinned"
    assert sorted(book.kept.by_key) == [b"%032d" % at for at in (0, 2, MAX_KEPT + 1)]
    book.check()


@for_each("is_before", [True, False], ids=["before it", "behind it"])
def test_what_is_kept_beside_a_range_that_somebody_waits_for_stays(is_before: bool) -> None:
    """The range that is cheapest to empty is a lease of one block and the free block on its other side."""
    book = make_book(leasable=3)
    book.return_leases(3, [connect(book, 3, 1).lease_id])
    lower = connect(book, 2, 2 if is_before else 1)
    if is_before:
        owner, grant, at = 2, lower, 0
    else:
        owner, grant, at = 1, connect(book, 1, 2), 1
        book.return_leases(2, [lower.lease_id])
    found = keep(book, owner, grant, at)
    assert isinstance(found, Found)
    book.unpin(owner, [found.generation])
    effects = book.request_lease(3, 1, 2 * BLOCK_NBYTES, 0)
    assert effects == [Recalled(owner, (grant.lease_id,))]
    assert [*book.kept.by_generation] == [found.generation], "it is in nobody's way"
    effects = book.return_leases(owner, [grant.lease_id])
    assert [effect.client_id for effect in effects if isinstance(effect, Granted)] == [3]
    assert [*book.kept.by_generation] == [found.generation]
    book.check()
