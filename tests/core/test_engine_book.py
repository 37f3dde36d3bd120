"""The engine's book: unit tests of each behaviour. The model test is in test_engine_book_machine.py.

Sizes are in blocks. A book of ``book(leasable=12)`` lends the blocks 1 to 12; its reply reserve follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from shmring.core.compiled import EngineBook
from shmring.core.effects import (
    Answered,
    ClientGone,
    EngineEffect,
    Granted,
    Recalled,
    Reclaimed,
    Released,
    ReplyGranted,
    ReplySlot,
    RequestAborted,
)
from shmring.core.geometry import BLOCK_NBYTES, GENERATION_BITS, EngineBookLimits, Geometry, blocks_for, slot_blocks
from shmring.core.messages import KEPT_LEASE_ID, SLOT_HEADER_NBYTES, Found, LeaseGrant, SlotRef
from shmring.core.states import EngineSlot, Lease, RequestEvent
from shmring.errors import CapacityError, LocalProtocolError, RemoteProtocolError
from tests.model.state import plain
from tests.simulation.books import COMPILED, MODELS, Books
from tests.tables import for_each

ONE_SLOT = BLOCK_NBYTES - SLOT_HEADER_NBYTES


pytestmark = pytest.mark.usefixtures("books")


def make_book(
    leasable: int = 12, reply: int = 4, *, max_lease: int = 4, quota: int = 8, max_leases: int = 8, max_inflight: int = 4
) -> EngineBook:
    return EngineBook(
        Geometry(leasable_blocks=leasable, reply_blocks=reply),
        EngineBookLimits(max_lease_blocks=max_lease, quota_blocks=quota, max_leases=max_leases, max_inflight=max_inflight),
    )


def connect(book: EngineBook, client: int, blocks: int = 1) -> LeaseGrant:
    grant = book.connect(client, blocks * BLOCK_NBYTES)
    assert grant is not None
    return grant


def connect_bare(book: EngineBook, *clients: int) -> None:
    """Connects clients that give their base lease back at once."""
    for client in clients:
        book.return_leases(client, [connect(book, client).lease_id])


def ask(book: EngineBook, client: int, token: int, blocks: int, preferred: int = 0) -> list[EngineEffect]:
    return book.request_lease(client, token, blocks * BLOCK_NBYTES, preferred * BLOCK_NBYTES)


def grant_of(client: int, token: int, lease_id: int, start: int, blocks: int) -> Granted:
    return Granted(client, LeaseGrant(token, lease_id, start * BLOCK_NBYTES, blocks * BLOCK_NBYTES))


def lease_ids(effects: Sequence[EngineEffect]) -> list[int]:
    return [effect.grant.lease_id for effect in effects if isinstance(effect, Granted)]


def generation(client: int, n: int) -> int:
    return client << GENERATION_BITS | n


def slot_in(grant: LeaseGrant, client: int, n: int, at: int = 0, blocks: int = 1) -> SlotRef:
    """The ``n``-th slot of a client, ``at`` blocks into a lease."""
    nbytes = blocks * BLOCK_NBYTES - SLOT_HEADER_NBYTES
    return SlotRef(grant.lease_id, grant.offset + at * BLOCK_NBYTES, nbytes, generation(client, n))


def refuses(error: type[Exception], match: str, book: EngineBook, event: Callable[[], object]) -> None:
    """The event is refused with this reason, and the book is as it was."""
    before = plain(book)
    with pytest.raises(error, match=match):
        event()
    assert plain(book) == before


# -- geometry ----------------------------------------------------------------------------------------------------------------


def test_a_slab_is_a_header_leases_and_a_sixteenth_for_replies() -> None:
    geometry = Geometry.of(64 * BLOCK_NBYTES, None)
    assert (geometry.leasable_blocks, geometry.reply_blocks, geometry.reply_start) == (59, 4, 60)
    assert geometry.slab_nbytes == 64 * BLOCK_NBYTES


def test_the_reply_reserve_is_at_least_a_block_and_rounded_up() -> None:
    assert Geometry.of(4 * BLOCK_NBYTES, None).reply_blocks == 1
    assert Geometry.of(64 * BLOCK_NBYTES, 0).reply_blocks == 1
    assert Geometry.of(64 * BLOCK_NBYTES, BLOCK_NBYTES + 1).reply_blocks == 2


def test_what_is_less_than_a_block_at_the_end_is_left_out() -> None:
    assert Geometry.of(5 * BLOCK_NBYTES - 1, BLOCK_NBYTES).slab_nbytes == 4 * BLOCK_NBYTES


@for_each(("blocks", "reply_nbytes"), [(0, None), (2, None), (5, 4 * BLOCK_NBYTES), (5, 1 << 40)])
def test_a_slab_without_room_for_leases_is_refused(blocks: int, reply_nbytes: int | None) -> None:
    with pytest.raises(ValueError, match="make slab_nbytes at least"):
        Geometry.of(blocks * BLOCK_NBYTES, reply_nbytes)


def test_the_smallest_slab_has_one_block_of_each() -> None:
    assert Geometry.of(3 * BLOCK_NBYTES, None) == Geometry(leasable_blocks=1, reply_blocks=1)


def test_with_larger_pages_the_reply_reserve_begins_where_a_page_does() -> None:
    page_nbytes = 16 * BLOCK_NBYTES
    geometry = Geometry.of(1000 * BLOCK_NBYTES, 10 * BLOCK_NBYTES, page_nbytes=page_nbytes)
    assert (geometry.reply_start, geometry.reply_blocks, geometry.device_start) == (976, 24, 1000)
    assert Geometry.of(1000 * BLOCK_NBYTES, 24 * BLOCK_NBYTES, page_nbytes=page_nbytes) == geometry
    assert Geometry.of(17 * BLOCK_NBYTES, 0, page_nbytes=page_nbytes) == Geometry(leasable_blocks=15, reply_blocks=1)
    with pytest.raises(ValueError, match=f"make slab_nbytes at least {17 * BLOCK_NBYTES}"):
        Geometry.of(16 * BLOCK_NBYTES, 0, page_nbytes=page_nbytes)


def test_a_slot_needs_room_for_its_header() -> None:
    assert [blocks_for(nbytes) for nbytes in (0, 1, BLOCK_NBYTES, BLOCK_NBYTES + 1)] == [1, 1, 1, 2]
    assert [slot_blocks(nbytes) for nbytes in (0, ONE_SLOT, ONE_SLOT + 1, ONE_SLOT + BLOCK_NBYTES)] == [1, 1, 2, 2]


# -- leases: who gets which is told in test_leases_as_stories.py ---------------------------------------------------------------


def test_a_client_id_is_never_used_twice() -> None:
    book = make_book()
    connect(book, 1)
    with pytest.raises(AssertionError, match="never reused"):
        book.connect(1, BLOCK_NBYTES)


def test_who_asks_for_nothing_has_a_base_lease_of_a_block() -> None:
    book = make_book()
    assert connect(book, 1, 0).nbytes == BLOCK_NBYTES


# -- submitting ---------------------------------------------------------------------------------------------------------------


def test_a_submission_publishes_its_slots() -> None:
    book = make_book()
    base = connect(book, 1, 4)
    book.submit(1, 0, [slot_in(base, 1, 1), slot_in(base, 1, 2, at=1, blocks=3)])
    assert book.count_slots(EngineSlot.PUBLISHED) == 2
    book.check()


def test_a_request_may_have_no_slot_and_numbers_may_be_left_out() -> None:
    book = make_book()
    base = connect(book, 1, 4)
    book.submit(1, 3, [])
    book.submit(1, 9, [slot_in(base, 1, 5), slot_in(base, 1, 1000, at=1)])
    book.check()


def test_a_released_slot_can_be_published_again_under_a_new_generation() -> None:
    book = make_book()
    base = connect(book, 1)
    for n in range(1, 5):
        book.submit(1, n, [slot_in(base, 1, n)])
        assert book.abort(1, n)[1] == Released(1, (generation(1, n),))


def forge(**changes: Any) -> Callable[[SlotRef], SlotRef]:
    return lambda slot: SlotRef(**{name: getattr(slot, name) for name in slot.__struct_fields__} | changes)


FORGED_SLOTS = {
    "an old generation": (forge(generation=generation(1, 1)), "not a new one"),
    "the generation before the last": (forge(generation=generation(1, 2)), "not a new one"),
    "another client's generation": (forge(generation=generation(2, 9)), "not a new one of client 1"),
    "generation 0": (forge(generation=0), "not a new one"),
    "a reply's generation": (forge(generation=3), "not a new one"),
    "a huge generation": (forge(generation=2**64 - 1), "not a new one"),
    "another client's lease": (forge(lease_id=2), "does not hold"),
    "no lease": (forge(lease_id=0), "has not pinned"),
    "a lease that was never granted": (forge(lease_id=2**62), "does not hold"),
    "an offset inside a block": (forge(offset=2 * BLOCK_NBYTES + 64), "not inside lease"),
    "the slab's header": (forge(offset=0), "not inside lease"),
    "another client's blocks": (forge(offset=5 * BLOCK_NBYTES), "not inside lease"),
    "the reply reserve": (forge(offset=13 * BLOCK_NBYTES), "not inside lease"),
    "far outside": (forge(offset=2**62), "not inside lease"),
    "a block beyond the lease's end": (forge(offset=4 * BLOCK_NBYTES, nbytes=ONE_SLOT + 1), "not inside lease"),
    "a huge slot": (forge(nbytes=2**62), "not inside lease"),
    "a live slot's block": (forge(offset=1 * BLOCK_NBYTES), "overlaps a live slot"),
    "a live slot's block at its end": (
        forge(offset=2 * BLOCK_NBYTES, nbytes=ONE_SLOT + 2 * BLOCK_NBYTES),
        "overlaps a live slot",
    ),
}


def submitted_book() -> tuple[EngineBook, LeaseGrant]:
    """Client 1 holds the blocks 1 to 4, with slots 1 and 2 live in its blocks 1 and 4; client 2 holds 5 to 8."""
    book = make_book()
    base = connect(book, 1, 4)
    connect(book, 2, 4)
    book.submit(1, 5, [slot_in(base, 1, 1), slot_in(base, 1, 2, at=3)])
    return book, base


@pytest.mark.parametrize("kind", FORGED_SLOTS)
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "behind a good slot"])
def test_a_forged_slot_is_refused_and_nothing_is_changed(kind: str, beside: bool) -> None:
    book, base = submitted_book()
    forgery, reason = FORGED_SLOTS[kind]
    good = [slot_in(base, 1, 3, at=1)] if beside else []
    bad = forgery(slot_in(base, 1, 4, at=2))
    refuses(RemoteProtocolError, reason, book, lambda: book.submit(1, 6, [*good, bad]))
    book.submit(1, 6, [slot_in(base, 1, 3, at=1), slot_in(base, 1, 4, at=2)])


def test_slots_of_one_submission_may_not_overlap_or_share_a_generation() -> None:
    book, base = submitted_book()
    third, fourth = slot_in(base, 1, 3, at=1), slot_in(base, 1, 4, at=1)
    refuses(RemoteProtocolError, "overlaps", book, lambda: book.submit(1, 6, [third, fourth]))
    refuses(RemoteProtocolError, "not a new one", book, lambda: book.submit(1, 6, [third, slot_in(base, 1, 3, at=2)]))
    refuses(RemoteProtocolError, "not a new one", book, lambda: book.submit(1, 6, [slot_in(base, 1, 4, at=2), third]))


@for_each("request_id", [0, 4, 5])
def test_a_request_id_is_never_used_twice(request_id: int) -> None:
    book, _ = submitted_book()
    refuses(RemoteProtocolError, "after request 5", book, lambda: book.submit(1, request_id, []))
    book.abort(1, 5)
    refuses(RemoteProtocolError, "after request 5", book, lambda: book.submit(1, request_id, []))


def test_requests_in_flight_are_bounded() -> None:
    book = make_book(max_inflight=2)
    connect(book, 1)
    book.submit(1, 0, [])
    book.submit(1, 1, [])
    refuses(RemoteProtocolError, r"max_inflight \(2\)", book, lambda: book.submit(1, 2, []))
    book.claim(1, 0)
    refuses(RemoteProtocolError, r"max_inflight \(2\)", book, lambda: book.submit(1, 2, []))
    book.end(1, 0, RequestEvent.FINISH)
    book.submit(1, 2, [])


def test_a_returned_lease_takes_no_slot() -> None:
    book, base = submitted_book()
    book.abort(1, 5)
    book.return_leases(1, [base.lease_id])
    refuses(RemoteProtocolError, "does not hold", book, lambda: book.submit(1, 6, [slot_in(base, 1, 3)]))


# -- claiming, releasing, aborting ---------------------------------------------------------------------------------------------

FIRST, SECOND = generation(1, 1), generation(1, 2)


def claimed_book() -> EngineBook:
    book, _ = submitted_book()
    book.claim(1, 5)
    assert book.count_slots(EngineSlot.CLAIMED) == 2
    return book


def test_a_claimed_request_is_released_slot_by_slot() -> None:
    book = claimed_book()
    assert book.release_slots(1, [FIRST], ()) == [Released(1, (FIRST,))]
    assert book.release_slots(1, [SECOND], ()) == [Released(1, (SECOND,))]
    assert book.end(1, 5, RequestEvent.FINISH)
    book.check()


def test_a_request_may_end_before_its_slots_are_released() -> None:
    book = claimed_book()
    assert book.end(1, 5, RequestEvent.ERROR)
    assert book.count_slots(EngineSlot.CLAIMED) == 2
    assert book.release_slots(1, [FIRST, SECOND], ()) == [Released(1, (FIRST, SECOND))]


def test_a_slot_with_live_views_drains_before_it_is_released() -> None:
    book = claimed_book()
    assert book.release_slots(1, [FIRST, SECOND], {SECOND}) == [Released(1, (FIRST,))]
    assert book.count_slots(EngineSlot.DRAINING) == 1
    assert book.last_view_gone(1, SECOND) == [Released(1, (SECOND,))]
    assert book.count_slots(EngineSlot.DRAINING) == 0


def test_releasing_nothing_says_nothing() -> None:
    book = claimed_book()
    assert book.release_slots(1, [], ()) == []
    assert book.release_slots(1, [FIRST], [FIRST]) == []


def test_a_slot_named_twice_is_released_once() -> None:
    book = claimed_book()
    assert book.release_slots(1, [FIRST, FIRST], ()) == [Released(1, (FIRST,))]
    book.check()


def test_an_abort_of_a_waiting_request_releases_its_slots() -> None:
    book, _ = submitted_book()
    assert book.abort(1, 5) == [RequestAborted(1, 5, was_running=False), Released(1, (FIRST, SECOND))]
    assert book.end(1, 5, RequestEvent.FINISH) is False
    book.check()


def test_an_abort_of_a_running_request_releases_nothing_until_its_claim_does() -> None:
    book = claimed_book()
    assert book.abort(1, 5) == [RequestAborted(1, 5, was_running=True)]
    assert book.count_slots(EngineSlot.CLAIMED) == 2
    assert book.end(1, 5, RequestEvent.FINISH) is False
    assert book.release_slots(1, [FIRST, SECOND], ()) == [Released(1, (FIRST, SECOND))]


def test_an_abort_leaves_alone_what_is_released_or_drains_already() -> None:
    book = claimed_book()
    book.release_slots(1, [FIRST, SECOND], {SECOND})
    assert book.abort(1, 5) == [RequestAborted(1, 5, was_running=True)]
    assert book.count_slots(EngineSlot.DRAINING) == 1
    assert book.last_view_gone(1, SECOND) == [Released(1, (SECOND,))]


def test_an_abort_without_slots_says_only_that() -> None:
    book = make_book()
    connect(book, 1)
    book.submit(1, 0, [])
    assert book.abort(1, 0) == [RequestAborted(1, 0, was_running=False)]


def test_an_abort_that_crossed_the_end_is_no_offence() -> None:
    book = claimed_book()
    book.end(1, 5, RequestEvent.FINISH)
    before = plain(book)
    assert book.abort(1, 5) == []
    assert book.abort(1, 2**62) == []
    assert book.late_aborts == 2
    book.late_aborts = 0
    assert plain(book) == before, "but for the count"


@pytest.mark.parametrize("event", [RequestEvent.ERROR, RequestEvent.DEADLINE])
def test_a_request_that_ends_before_it_was_claimed_still_gives_its_slots_back(event: RequestEvent) -> None:
    book, _ = submitted_book()
    assert book.end(1, 5, event)
    assert book.release_slots(1, [FIRST, SECOND], ()) == [Released(1, (FIRST, SECOND))]
    book.check()


def test_what_no_table_allows_is_refused() -> None:
    book, _ = submitted_book()
    refuses(LocalProtocolError, "WAITING: FINISH", book, lambda: book.end(1, 5, RequestEvent.FINISH))
    refuses(LocalProtocolError, "PUBLISHED: RELEASE ", book, lambda: book.release_slots(1, [FIRST], ()))
    refuses(LocalProtocolError, "PUBLISHED: LAST_VIEW_GONE", book, lambda: book.last_view_gone(1, FIRST))
    book.claim(1, 5)
    refuses(LocalProtocolError, "RUNNING: SCHEDULE", book, lambda: book.claim(1, 5))
    refuses(LocalProtocolError, "CLAIMED: LAST_VIEW_GONE", book, lambda: book.last_view_gone(1, FIRST))
    book.release_slots(1, [SECOND], {SECOND})
    refuses(LocalProtocolError, "DRAINING: RELEASE ", book, lambda: book.release_slots(1, [FIRST, SECOND], ()))
    refuses(LocalProtocolError, "DRAINING: RELEASE_VIEWED", book, lambda: book.release_slots(1, [FIRST, SECOND], {SECOND}))


def test_the_end_of_a_request_whose_client_has_gone_owes_no_reply() -> None:
    book = make_book()
    connect_bare(book, 1)
    book.submit(1, 0, [])
    assert book.disconnect(1) == [RequestAborted(1, 0, was_running=False), ClientGone(1)]
    assert book.end(1, 0, RequestEvent.FINISH) is False


# -- disconnect, death, goodbye ------------------------------------------------------------------------------------------------


def test_a_disconnect_aborts_and_quarantines_and_frees_nothing() -> None:
    book, _ = submitted_book()
    assert book.disconnect(1) == [RequestAborted(1, 5, was_running=False)]  # nobody is there to be told of the release
    assert book.count_slots(EngineSlot.PUBLISHED) == 0
    assert book.host.leased_nbytes(Lease.QUARANTINED) == 4 * BLOCK_NBYTES
    assert book.host.free_nbytes == 4 * BLOCK_NBYTES
    book.check()


def test_a_death_frees_what_was_quarantined() -> None:
    book, _ = submitted_book()
    book.disconnect(1)
    assert book.died(1) == [Reclaimed(1, 4 * BLOCK_NBYTES), ClientGone(1)]
    assert book.host.leased_nbytes(Lease.QUARANTINED) == 0
    assert list(book.clients) == [2]
    book.check()


def test_a_death_without_a_disconnect_is_both() -> None:
    book, _ = submitted_book()
    assert book.died(1) == [RequestAborted(1, 5, was_running=False), Reclaimed(1, 4 * BLOCK_NBYTES), ClientGone(1)]


def test_a_second_death_says_nothing() -> None:
    book = make_book()
    connect(book, 1)
    book.died(1)
    assert book.died(1) == []
    assert book.died(77) == []


def test_a_client_without_leases_is_gone_with_its_connection() -> None:
    book = make_book()
    connect_bare(book, 1)
    assert book.disconnect(1) == [ClientGone(1)]
    assert book.clients == {}


def test_a_dead_clients_lease_waits_for_the_claim_that_reads_it() -> None:
    book, base = submitted_book()
    [further] = lease_ids(ask(book, 1, 1, 2))
    book.claim(1, 5)
    assert book.died(1) == [RequestAborted(1, 5, was_running=True), Reclaimed(1, 2 * BLOCK_NBYTES)]
    assert (base.lease_id, further) == (1, 3)
    assert book.host.leased_nbytes(Lease.QUARANTINED) == 4 * BLOCK_NBYTES
    book.check()
    assert book.release_slots(1, [FIRST, SECOND], {SECOND}) == []
    assert book.last_view_gone(1, SECOND) == [Reclaimed(1, 4 * BLOCK_NBYTES), ClientGone(1)]
    book.check()


def test_a_claim_released_between_disconnect_and_death_frees_nothing() -> None:
    book = claimed_book()
    book.disconnect(1)
    assert book.release_slots(1, [FIRST, SECOND], ()) == []
    assert book.host.leased_nbytes(Lease.QUARANTINED) == 4 * BLOCK_NBYTES
    assert book.died(1) == [Reclaimed(1, 4 * BLOCK_NBYTES), ClientGone(1)]


def test_a_goodbye_gives_up_everything_at_once() -> None:
    book, _ = submitted_book()
    assert book.goodbye(1, (), ()) == [
        RequestAborted(1, 5, was_running=False),
        Reclaimed(1, 4 * BLOCK_NBYTES),
        ClientGone(1),
    ]


def test_a_goodbye_keeps_the_leases_it_names_until_death() -> None:
    book = make_book()
    connect(book, 1)
    [further] = lease_ids(ask(book, 1, 1, 2))
    assert book.goodbye(1, [further, 99], [99]) == [Reclaimed(1, BLOCK_NBYTES)]
    assert book.host.leased_nbytes(Lease.QUARANTINED) == 2 * BLOCK_NBYTES
    assert book.died(1) == [Reclaimed(1, 2 * BLOCK_NBYTES), ClientGone(1)]


def test_a_goodbye_frees_a_lease_only_when_no_claim_reads_it() -> None:
    book = claimed_book()
    assert book.goodbye(1, (), ()) == [RequestAborted(1, 5, was_running=True)]
    assert book.release_slots(1, [FIRST], ()) == []
    assert book.release_slots(1, [SECOND], ()) == [Reclaimed(1, 4 * BLOCK_NBYTES), ClientGone(1)]


def test_a_disconnected_client_can_do_nothing_more() -> None:
    book, _ = submitted_book()
    book.disconnect(1)
    for event in (
        lambda: book.disconnect(1),
        lambda: book.goodbye(1, (), ()),
        lambda: book.submit(1, 9, []),
        lambda: book.abort(1, 5),
        lambda: book.request_lease(1, 1, 1, 1),
        lambda: book.return_leases(1, [1]),
        lambda: book.queue_reply(1, 1, 1),
    ):
        refuses(AssertionError, "disconnected already", book, event)


# -- replies -------------------------------------------------------------------------------------------------------------------


def take_reply(book: EngineBook, client: int, blocks: int) -> ReplySlot:
    """Takes and sends a reply slot."""
    slot = book.acquire_reply(client, blocks * BLOCK_NBYTES - SLOT_HEADER_NBYTES)
    assert slot is not None
    book.reply_sent(client, slot.generation)
    return slot


def queue_reply(book: EngineBook, client: int, ticket: int, blocks: int) -> None:
    """As the ring does it: now if possible, else in the queue."""
    nbytes = blocks * BLOCK_NBYTES - SLOT_HEADER_NBYTES
    assert book.acquire_reply(client, nbytes) is None
    book.queue_reply(client, ticket, nbytes)


def test_a_reply_slot_comes_from_the_reserve() -> None:
    book = make_book(leasable=12, reply=8)
    connect(book, 1)
    assert take_reply(book, 1, 3) == ReplySlot(generation=1, start=13, blocks=3)
    assert take_reply(book, 1, 1) == ReplySlot(generation=2, start=16, blocks=1)
    assert book.reply_free_nbytes == 4 * BLOCK_NBYTES
    assert book.host.free_nbytes == 11 * BLOCK_NBYTES
    book.check()


def test_a_reply_larger_than_the_reserve_can_never_fit() -> None:
    book = make_book(reply=4)
    connect(book, 1)
    capacity = 4 * BLOCK_NBYTES - SLOT_HEADER_NBYTES
    for event in (lambda: book.acquire_reply(1, capacity + 1), lambda: book.queue_reply(1, 1, capacity + 1)):
        refuses(CapacityError, "raise reply_nbytes", book, event)
    with pytest.raises(CapacityError) as caught:
        book.acquire_reply(1, capacity + 1)
    assert (caught.value.needed, caught.value.capacity) == (capacity + 1, capacity)
    assert book.acquire_reply(1, capacity) is not None


def test_a_reply_waits_for_space() -> None:
    book = make_book(reply=4)
    connect(book, 1)
    slot = take_reply(book, 1, 3)
    queue_reply(book, 1, 7, 2)
    assert book.release_replies(1, [slot.generation]) == [ReplyGranted(7, ReplySlot(2, slot.start, 2))]
    book.check()


def crowded_book() -> tuple[EngineBook, ReplySlot]:
    """Two clients with two blocks each, and four are free; the first of them waits for five, and the second for one."""
    book = make_book(reply=8)
    connect(book, 1)
    connect(book, 2)
    take_reply(book, 2, 2)
    slot = take_reply(book, 1, 2)
    queue_reply(book, 1, 7, 5)
    queue_reply(book, 2, 8, 1)
    return book, slot


def test_nobody_overtakes_the_first_who_waits_for_space() -> None:
    book, slot = crowded_book()
    effects = book.release_replies(1, [slot.generation])
    assert [(effect.ticket, effect.slot.blocks) for effect in effects if isinstance(effect, ReplyGranted)] == [(7, 5), (8, 1)]


def test_space_that_is_too_small_for_the_first_goes_to_nobody_else() -> None:
    book = make_book(reply=8)
    connect(book, 1)
    connect(book, 2)
    slots = [take_reply(book, 2, 1) for _ in range(4)]
    queue_reply(book, 1, 7, 6)
    queue_reply(book, 2, 8, 1)
    assert book.release_replies(2, [slots[3].generation]) == []
    effects = book.release_replies(2, [slots[2].generation])
    assert [(effect.ticket, effect.slot.blocks) for effect in effects if isinstance(effect, ReplyGranted)] == [(7, 6)]


def test_smaller_replies_pass_one_that_finds_no_room_if_they_are_let() -> None:
    book, slot = crowded_book()
    assert book.let_overtake(True) == [ReplyGranted(8, ReplySlot(3, 17, 1))]
    assert book.acquire_reply(2, 1) == ReplySlot(4, 18, 1, is_copied_out=True)
    assert book.let_overtake(False) == []
    assert book.acquire_reply(2, 1) is None, "the one of five blocks comes first again"
    assert book.release_replies(1, [slot.generation]) == []
    book.check()


def test_cancelling_a_wait_passes_the_turn_on() -> None:
    book, _ = crowded_book()
    assert book.cancel_reply(7) == [ReplyGranted(8, ReplySlot(3, 17, 1))]
    assert book.cancel_reply(7) == []


def test_a_client_may_not_release_a_reply_that_is_not_its_own() -> None:
    book = make_book(reply=4)
    connect(book, 1)
    connect(book, 2)
    mine, other = take_reply(book, 1, 1), take_reply(book, 2, 1)
    for forged in ([other.generation], [mine.generation, other.generation], [mine.generation, 99], [0], [2**64 - 1]):
        refuses(RemoteProtocolError, "does not hold", book, partial(book.release_replies, 1, forged))
    book.release_replies(1, [mine.generation, mine.generation])  # named twice, released once
    assert book.stale_releases == 1
    assert book.release_replies(1, [mine.generation]) == []
    assert book.release_replies(2, [mine.generation]) == []  # it never had it, but nobody has it now
    assert book.stale_releases == 3
    assert book.reply_free_nbytes == 3 * BLOCK_NBYTES
    book.check()


def test_no_more_replies_are_released_at_once_than_there_are_blocks() -> None:
    book = make_book(reply=4)
    connect(book, 1)
    old = take_reply(book, 1, 1).generation
    assert book.release_replies(1, [old] * 4) == []
    refuses(RemoteProtocolError, "5 reply slots were released at once", book, lambda: book.release_replies(1, [old] * 5))


def test_a_client_may_not_release_a_reply_that_is_still_being_written() -> None:
    book = make_book(reply=4)
    connect(book, 1)
    slot = book.acquire_reply(1, 1)
    assert slot is not None
    refuses(RemoteProtocolError, "does not hold", book, lambda: book.release_replies(1, [slot.generation]))
    book.reply_sent(1, slot.generation)
    book.release_replies(1, [slot.generation])
    assert book.reply_free_nbytes == 4 * BLOCK_NBYTES


def test_a_reply_that_is_not_sent_after_all_is_free_again() -> None:
    book = make_book(reply=4)
    connect(book, 1)
    slot = book.acquire_reply(1, 4 * BLOCK_NBYTES - SLOT_HEADER_NBYTES)
    assert slot is not None
    queue_reply(book, 1, 7, 1)
    assert book.discard_reply(1, slot.generation) == [ReplyGranted(7, ReplySlot(2, 13, 1))]
    book.check()


def test_a_client_holds_as_much_as_it_leaves_free_and_copies_half_of_that_out() -> None:
    """So it never has all, also if it is alone: another one may come."""
    book = make_book(reply=16)
    connect(book, 1)
    ways = []
    while (slot := book.acquire_reply(1, 1)) is not None:
        book.reply_sent(1, slot.generation)
        ways.append(slot.is_copied_out)
    assert ways == [False] * 8 + [True] * 4
    connect(book, 2)
    ways = []
    while (slot := book.acquire_reply(2, 1)) is not None:
        ways.append(slot.is_copied_out)
    assert ways == [False] * 2 + [True], "of the four that are left"
    connect(book, 3)
    assert book.acquire_reply(3, 1) is not None
    book.check()


def test_one_reply_is_always_granted_however_large() -> None:
    book = make_book(reply=4)
    connect(book, 1)
    connect(book, 2)
    take_reply(book, 1, 4)


def test_a_client_that_has_its_share_lets_others_pass() -> None:
    book = make_book(reply=16)
    connect(book, 1)
    connect(book, 2)
    for _ in range(12):
        take_reply(book, 1, 1)
    queue_reply(book, 1, 7, 1)
    slot = take_reply(book, 2, 2)
    queue_reply(book, 2, 8, 4)
    assert book.release_replies(2, [slot.generation]) == [ReplyGranted(8, ReplySlot(14, 25, 4, is_copied_out=True))]
    book.check()


def test_the_replies_of_one_client_keep_their_order() -> None:
    """A large one would never come, if smaller ones of its client always went first."""
    book = make_book(reply=16)
    connect(book, 1)
    take_reply(book, 1, 6)
    passing = take_reply(book, 1, 3)
    queue_reply(book, 1, 7, 5)
    queue_reply(book, 1, 8, 1)  # which might pass
    granted = book.release_replies(1, [passing.generation])
    assert [effect.ticket for effect in granted if isinstance(effect, ReplyGranted)] == [7]
    assert book.acquire_reply(1, 1) is None
    book.check()


def requesting_book(reply: int, requests: int = 1) -> EngineBook:
    """A book with a client, whose requests 1, 2, ... run."""
    book = make_book(reply=reply)
    connect(book, 1)
    for request_id in range(1, requests + 1):
        book.submit(1, request_id, [])
        book.claim(1, request_id)
    return book


def copy_out(book: EngineBook, request_id: int) -> None:
    """A reply of the whole reserve, which comes to its client, and is copied there."""
    slot = book.acquire_reply(1, book.geometry.reply_blocks * BLOCK_NBYTES - SLOT_HEADER_NBYTES, request_id)
    assert slot is not None
    assert (slot.is_copied_out, slot.request_id) == (True, request_id)
    book.reply_sent(1, slot.generation)
    book.release_replies(1, [slot.generation])


def test_two_replies_to_a_request_are_copied_out_before_a_caller_reads_one() -> None:
    """A client's memory is bounded by that, and a caller who reads slowly holds its own request up, and no other."""
    book = requesting_book(reply=4, requests=2)
    copy_out(book, 1)
    copy_out(book, 1)
    assert book.acquire_reply(1, 3 * BLOCK_NBYTES, 1) is None
    book.queue_reply(1, 7, 3 * BLOCK_NBYTES, 1)
    assert book.acquire_reply(1, 1, 1) is None, "replies to a request keep their order"
    copy_out(book, 2)
    slot = ReplySlot(4, 13, 4, is_copied_out=True, request_id=1)
    assert book.replies_read(1, [1]) == [ReplyGranted(7, slot)]
    assert book.discard_reply(1, 4) == [], "it was not sent after all"
    copy_out(book, 1)


def test_a_reply_that_stays_in_its_slot_need_not_be_read() -> None:
    book = requesting_book(reply=8)
    for _ in range(4):
        slot = book.acquire_reply(1, 1, 1)
        assert slot is not None
        assert not slot.is_copied_out
    assert book.clients[1].requests[1].unread_replies == 0


def test_no_more_replies_are_read_than_were_sent() -> None:
    book = requesting_book(reply=4)
    copy_out(book, 1)
    for forged in ([1, 1], [1, 2], [2], [2**64 - 1]):
        refuses(RemoteProtocolError, "that was not sent", book, partial(book.replies_read, 1, forged))
    assert book.replies_read(1, [1]) == []
    book.end(1, 1, RequestEvent.FINISH)
    assert book.replies_read(1, [1, 1]) == [], "it had ended: the messages crossed"


def test_what_a_dead_client_had_goes_to_those_that_wait() -> None:
    book = make_book(reply=4)
    connect(book, 1)
    connect_bare(book, 2)
    take_reply(book, 2, 2)
    take_reply(book, 2, 1)
    queue_reply(book, 1, 7, 2)
    assert book.disconnect(2) == []
    assert ReplyGranted(7, ReplySlot(3, 13, 2)) in book.died(2)


def test_a_disconnect_takes_its_waits_with_it_and_passes_the_turn_on() -> None:
    book = make_book(reply=4)
    for client in (1, 2, 3):
        connect(book, client)
    take_reply(book, 3, 3)
    queue_reply(book, 1, 7, 2)
    queue_reply(book, 2, 8, 1)
    assert book.disconnect(1) == [ReplyGranted(8, ReplySlot(2, 16, 1, is_copied_out=True))]
    book.check()


def test_a_disconnected_clients_replies_stay_until_its_death() -> None:
    book = make_book(reply=4)
    connect_bare(book, 1)
    take_reply(book, 1, 3)
    assert book.disconnect(1) == []
    assert book.reply_free_nbytes == BLOCK_NBYTES
    assert book.died(1) == [ClientGone(1)]
    assert book.reply_free_nbytes == 4 * BLOCK_NBYTES


def test_a_reply_that_is_being_written_outlives_its_dead_client() -> None:
    book = make_book(reply=4)
    connect_bare(book, 1)
    slot = book.acquire_reply(1, 1)
    assert slot is not None
    assert book.died(1) == []
    assert book.reply_free_nbytes == 3 * BLOCK_NBYTES
    assert book.discard_reply(1, slot.generation) == [ClientGone(1)]
    assert book.reply_free_nbytes == 4 * BLOCK_NBYTES


def test_a_goodbye_gives_replies_back_but_those_it_names() -> None:
    book = make_book(reply=4)
    connect_bare(book, 1)
    kept, given = take_reply(book, 1, 1), take_reply(book, 1, 2)
    assert book.goodbye(1, (), [kept.generation, 99]) == []
    assert book.reply_free_nbytes == 3 * BLOCK_NBYTES
    assert given.generation not in book.clients[1].replies
    assert book.died(1) == [ClientGone(1)]
    book.check()


def test_a_goodbye_grants_nothing_to_its_client() -> None:
    book = make_book(reply=4)
    connect_bare(book, 1)
    take_reply(book, 1, 3)
    queue_reply(book, 1, 7, 2)
    assert book.goodbye(1, (), ()) == [ClientGone(1)]
    assert book.reply_free_nbytes == 4 * BLOCK_NBYTES


# -- what there is -------------------------------------------------------------------------------------------------------------


def lose_a_block(book: EngineBook) -> None:
    book.host._free.allocate(1)


def lose_a_reply_block(book: EngineBook) -> None:
    book._replies.allocate(1)


def overlap_leases(book: EngineBook) -> None:
    book.clients[2].leases[2].start = 2


def leave_the_leasable_part(book: EngineBook) -> None:
    book.clients[2].leases[2].start = 12


def keep_a_request(book: EngineBook) -> None:
    book.clients[1].connected = False


def forget_a_quarantine(book: EngineBook) -> None:
    book.clients[2].leases[2].state = Lease.QUARANTINED


def forget_a_slot(book: EngineBook) -> None:
    slots = book.clients[1].slots
    (slots.pop if isinstance(slots, dict) else slots.take)(FIRST)


def move_a_slot(book: EngineBook) -> None:
    book.clients[1].slots[FIRST].start = 4


def move_a_slot_out(book: EngineBook) -> None:
    book.clients[1].slots[SECOND].start = 5


@for_each("kind", [COMPILED, MODELS], ids=["compiled", "model"])
@for_each(
    "damage",
    [
        lose_a_block,
        lose_a_reply_block,
        overlap_leases,
        leave_the_leasable_part,
        keep_a_request,
        forget_a_quarantine,
        forget_a_slot,
        move_a_slot,
        move_a_slot_out,
    ],
)
def test_check_finds_a_damaged_book(kind: Books, damage: Callable[[EngineBook], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "EngineBook", kind.engine)
    book, _ = submitted_book()
    book.check()
    damage(book)
    with pytest.raises(AssertionError):
        book.check()


# -- what is kept ------------------------------------------------------------------------------------------------------------


def make_keeping_book(leasable: int = 12, kept: int = 8) -> EngineBook:
    limits = EngineBookLimits(
        max_lease_blocks=leasable, quota_blocks=leasable, max_leases=8, max_inflight=4, kept_blocks=kept, max_kept=4, max_pins=4
    )
    return EngineBook(Geometry(leasable_blocks=leasable, reply_blocks=1), limits)


def keep(book: EngineBook, client: int, slot: SlotRef) -> SlotRef:
    """A client gives a slot to keep; returns how a request names it."""
    key = slot.generation.to_bytes(32, "little")
    [answer] = [effect.answer for effect in book.keep(client, 1, key, slot, False, b"\xc0") if isinstance(effect, Answered)]
    assert isinstance(answer, Found)
    return SlotRef(KEPT_LEASE_ID, answer.offset, answer.nbytes, answer.generation)


def test_a_submission_that_is_refused_pins_nothing() -> None:
    book = make_keeping_book()
    grant = connect(book, 1, 4)
    kept = keep(book, 1, slot_in(grant, 1, 1))
    behind = slot_in(grant, 1, 2, at=4)
    refuses(RemoteProtocolError, "is not inside lease", book, lambda: book.submit(1, 1, [kept, kept, behind]))
    book.check()


def test_pins_are_taken_back_as_often_as_they_are_named() -> None:
    book = make_keeping_book()
    kept = keep(book, 1, slot_in(connect(book, 1, 4), 1, 1))
    for token in range(3):
        book.find(1, token, kept.generation.to_bytes(32, "little"))
    book.unpin(1, [kept.generation] * 2)
    book.check()
    book.unpin(1, [kept.generation] * 2)
    assert not book.clients[1].pins
    book.check()


def test_who_waits_for_the_memory_of_content_has_it_when_its_last_pin_goes() -> None:
    book = make_keeping_book(leasable=4)
    grant = connect(book, 1, 4)
    kept = keep(book, 1, slot_in(grant, 1, 1, blocks=2))
    assert book.connect(2, BLOCK_NBYTES) is None
    assert ask(book, 2, 1, 3) == [Recalled(1, (grant.lease_id,))]
    assert book.return_leases(1, [grant.lease_id]) == []
    [granted] = book.unpin(1, [kept.generation])
    assert isinstance(granted, Granted)
    assert (granted.client_id, granted.grant.nbytes) == (2, 3 * BLOCK_NBYTES)
    book.check()


def test_as_much_of_the_oldest_content_goes_as_new_content_needs() -> None:
    book = make_keeping_book(kept=3)
    grant = connect(book, 1, 8)
    for n in (1, 2, 3):
        book.unpin(1, [keep(book, 1, slot_in(grant, 1, n, at=n)).generation])
    keep(book, 1, slot_in(grant, 1, 4, at=4, blocks=2))
    assert [generation(1, n) in book.kept.by_generation for n in (1, 2, 3, 4)] == [False, False, True, True]
    book.check()


def test_content_that_was_used_last_goes_last() -> None:
    book = make_keeping_book(kept=2)
    grant = connect(book, 1, 8)
    first, second = [keep(book, 1, slot_in(grant, 1, n, at=n)) for n in (1, 2)]
    book.unpin(1, [second.generation])
    book.unpin(1, [first.generation])
    keep(book, 1, slot_in(grant, 1, 3, at=3))
    assert generation(1, 1) in book.kept.by_generation
    assert generation(1, 2) not in book.kept.by_generation


def test_content_that_begins_where_a_window_ends_is_in_nobodys_way() -> None:
    """It stays when its last pin goes, and there is room for more of it."""
    book = make_keeping_book(leasable=6)
    lower, upper = connect(book, 1, 2), connect(book, 2, 4)
    kept = keep(book, 2, slot_in(upper, 2, 1))
    book.submit(2, 1, [slot_in(upper, 2, 2, at=1, blocks=3)])
    assert book.connect(3, BLOCK_NBYTES) is None
    assert ask(book, 3, 1, 2) == [Recalled(1, (lower.lease_id,))], "the window is what is cheapest to empty"
    assert book.unpin(2, [kept.generation]) == []
    assert [*book.kept.by_generation] == [kept.generation]
    book.check()


# -- the smallest ------------------------------------------------------------------------------------------------------------


def test_each_slot_of_a_request_is_left_by_itself() -> None:
    book = make_book()
    grant = connect(book, 1, 4)
    book.submit(1, 1, [slot_in(grant, 1, 1), slot_in(grant, 1, 2, at=1)])
    book.claim(1, 1)
    assert book.release_slots(1, [generation(1, 1), generation(1, 2)], {generation(1, 2)}) == [Released(1, (generation(1, 1),))]
    assert book.count_slots(EngineSlot.DRAINING) == 1
