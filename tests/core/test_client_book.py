"""A frontend's book: unit tests of each behaviour. The model test is in test_client_book_machine.py.

Sizes are in blocks; the book under test belongs to client 1 of a slab of 32 blocks, of which 24 can be leased.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from shmring.core.compiled import ClientBook, ClientSlotRecord
from shmring.core.effects import Acquired, ClientEffect, Send
from shmring.core.geometry import BLOCK_NBYTES, GENERATION_BITS, ClientBookLimits
from shmring.core.messages import SLOT_HEADER_NBYTES, LeaseGrant, LeaseRequest, LeaseReturn, SlotRef
from shmring.core.states import ClientSlot
from shmring.errors import CapacityError, LocalProtocolError, RemoteProtocolError
from tests.model.state import plain
from tests.simulation.books import COMPILED, MODELS, Books
from tests.tables import for_each

pytestmark = pytest.mark.usefixtures("books")

NOW = 100.0
IDLE_S = 5.0


def make_book(*, max_leases: int = 8, lease_blocks: int = 4) -> ClientBook:
    """A book without a lease."""
    limits = ClientBookLimits(
        client_id=1,
        leasable_nbytes=24 * BLOCK_NBYTES,
        max_leases=max_leases,
        lease_nbytes=lease_blocks * BLOCK_NBYTES,
        lease_idle_s=IDLE_S,
    )
    return ClientBook(limits)


def grant(
    book: ClientBook, lease_id: int, start: int, blocks: int, *, token: int | None = None, now: float = NOW
) -> list[ClientEffect]:
    """The engine grants what was asked for last, or what ``token`` says (0: the base lease)."""
    token = book._token if token is None else token
    return book.granted(LeaseGrant(token, lease_id, start * BLOCK_NBYTES, blocks * BLOCK_NBYTES), now)


def base_book(blocks: int = 4, **options: int) -> ClientBook:
    """A book with a base lease: number 1, the blocks from 1 on."""
    book = make_book(**options)
    assert grant(book, 1, 1, blocks, token=0) == []
    return book


def content(blocks: int) -> int:
    """Bytes that fill a slot of so many blocks."""
    return blocks * BLOCK_NBYTES - SLOT_HEADER_NBYTES


def take(book: ClientBook, blocks: int = 1, *, held: bool = False) -> ClientSlotRecord:
    slot = book.acquire(content(blocks), held=held)
    assert slot is not None
    book.check()
    return slot


def submitted(book: ClientBook, blocks: int = 1, *, held: bool = False) -> ClientSlotRecord:
    slot = take(book, blocks, held=held)
    book.submit(slot)
    return slot


def asks(token: int, blocks: int, preferred: int | None = None) -> Send:
    preferred = blocks if preferred is None else preferred
    return Send(LeaseRequest(token, blocks * BLOCK_NBYTES, preferred * BLOCK_NBYTES))


def wishes(token: int, blocks: int) -> Send:
    """Asks for a lease that nobody waits for."""
    return Send(LeaseRequest(token, blocks * BLOCK_NBYTES, blocks * BLOCK_NBYTES, waits=False))


def gives_back(*lease_ids: int) -> Send:
    return Send(LeaseReturn(lease_ids))


def tickets(effects: Sequence[ClientEffect]) -> list[int]:
    return [effect.ticket for effect in effects if isinstance(effect, Acquired)]


def refuses(error: type[Exception], match: str, book: ClientBook, event: Callable[[], object]) -> None:
    before = plain(book)
    with pytest.raises(error, match=match):
        event()
    assert plain(book) == before


# -- leases --------------------------------------------------------------------------------------------------------------------


def test_a_granted_lease_can_be_used() -> None:
    book = base_book(4)
    assert (book.leased_nbytes, book.free_nbytes) == (4 * BLOCK_NBYTES, 4 * BLOCK_NBYTES)
    slot = take(book, 3)
    assert (slot.start, slot.blocks, slot.nbytes, slot.offset) == (1, 3, content(3), BLOCK_NBYTES)
    assert (book.leased_nbytes, book.free_nbytes) == (4 * BLOCK_NBYTES, BLOCK_NBYTES)


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [
        (0, BLOCK_NBYTES),
        (64, BLOCK_NBYTES),
        (BLOCK_NBYTES, 0),
        (BLOCK_NBYTES, BLOCK_NBYTES + 1),
        (BLOCK_NBYTES, 25 * BLOCK_NBYTES),
        (25 * BLOCK_NBYTES, BLOCK_NBYTES),  # where replies lie
        (2**62, BLOCK_NBYTES),
    ],
)
def test_a_grant_outside_the_leasable_memory_is_refused(offset: int, nbytes: int) -> None:
    book = base_book()
    refuses(RemoteProtocolError, "lease 9 .* is no range", book, lambda: book.granted(LeaseGrant(0, 9, offset, nbytes), NOW))


def test_a_grant_may_reach_to_the_end_of_the_leasable_memory() -> None:
    assert grant(make_book(), 1, 1, 24, token=0) == []


@pytest.mark.parametrize(("lease_id", "start", "blocks"), [(1, 10, 2), (2, 4, 1), (2, 1, 1), (2, 4, 8), (2, 1, 24)])
def test_what_is_lent_already_is_not_granted_again(lease_id: int, start: int, blocks: int) -> None:
    book = base_book(4)
    again = LeaseGrant(0, lease_id, start * BLOCK_NBYTES, blocks * BLOCK_NBYTES)
    refuses(RemoteProtocolError, "is lent already", book, lambda: book.granted(again, NOW))


def test_where_a_slot_became_the_engines_another_lease_may_lie_and_nothing_else_may() -> None:
    book = base_book(4)
    first, kept, third = take(book), submitted(book), submitted(book)
    book.kept(kept.generation, NOW)
    for start in (first.start, third.start, third.start + 1):  # a slot here, one with the engine, and what is free
        again = LeaseGrant(9, 2, start * BLOCK_NBYTES, BLOCK_NBYTES)
        refuses(RemoteProtocolError, "is lent already", book, lambda again=again: book.granted(again, NOW))
    assert grant(book, 2, kept.start, 1, token=9) == []
    book.check()


def test_a_recalled_lease_that_is_empty_goes_back_at_once() -> None:
    book = base_book()
    assert book.recalled([1]) == [gives_back(1)]
    assert book.leases == {}
    assert book.recalled([1]) == []  # the recall and the return may cross


def test_a_recalled_lease_in_use_takes_no_slot_and_goes_back_when_empty() -> None:
    book = base_book()
    first, second = take(book), take(book)
    assert book.recalled([1, 77]) == []
    assert book.acquire(1, held=False) is None
    assert book.give_up(first, NOW) == []
    assert book.give_up(second, NOW) == [gives_back(1)]
    book.check()


def test_a_further_lease_that_was_empty_for_long_goes_back() -> None:
    book = base_book()
    grant(book, 2, 10, 4, token=9, now=NOW)
    assert book.next_expiry() == NOW + IDLE_S
    assert book.expire(NOW + IDLE_S - 0.1) == []
    assert book.expire(NOW + IDLE_S) == [gives_back(2)]
    assert list(book.leases) == [1]


def test_the_base_lease_stays_however_long_it_is_empty() -> None:
    book = base_book()
    assert book.next_expiry() is None
    assert book.expire(NOW + 1e9) == []


def test_a_lease_is_idle_since_its_last_slot_left_it() -> None:
    book = make_book()
    grant(book, 2, 10, 4, token=9, now=NOW)
    slot = take(book)
    assert book.next_expiry() is None
    assert book.expire(NOW + 1000) == []
    book.give_up(slot, NOW + 20)
    assert book.next_expiry() == NOW + 20 + IDLE_S
    assert book.expire(NOW + IDLE_S) == []
    assert book.expire(NOW + 20 + IDLE_S) == [gives_back(2)]


def test_idle_leases_expire_each_in_its_time_and_return_together() -> None:
    book = make_book()
    for lease_id, now in ((2, NOW), (3, NOW + 1), (4, NOW + 2)):
        grant(book, lease_id, 4 * lease_id, 4, token=9, now=now)
    assert book.next_expiry() == NOW + IDLE_S
    assert book.expire(NOW + IDLE_S + 1) == [gives_back(2, 3)]
    assert book.next_expiry() == NOW + 2 + IDLE_S


# -- acquiring -----------------------------------------------------------------------------------------------------------------


def test_a_slot_is_where_the_message_says() -> None:
    book = base_book()
    take(book)
    slot = take(book, 2)
    assert book.submit(slot) == (1 << GENERATION_BITS) + 1
    assert slot.ref() == SlotRef(1, 2 * BLOCK_NBYTES, content(2), (1 << GENERATION_BITS) + 1)


def test_out_of_order_release_blocks_nothing() -> None:
    book = base_book(3)
    first, second, third = (submitted(book) for _ in range(3))
    book.released([second.generation], NOW)
    assert take(book).start == second.start
    book.released([third.generation, first.generation], NOW)
    assert {take(book).start, take(book).start} == {first.start, third.start}


def test_without_a_lease_that_fits_nothing_is_taken_and_nothing_is_asked() -> None:
    book = base_book(2)
    before = plain(book)
    assert book.acquire(content(3), held=False) is None
    assert plain(book) == before


def test_what_can_never_fit_fails_at_once() -> None:
    book = base_book()
    too_much = content(24) + 1
    for event in (lambda: book.acquire(too_much, held=False), lambda: book.queue(1, too_much, held=False)):
        refuses(CapacityError, "raise its slab_nbytes", book, event)
    with pytest.raises(CapacityError) as caught:
        book.check_capacity(too_much)
    assert (caught.value.needed, caught.value.capacity) == (too_much, content(24))
    book.check_capacity(content(24))


def test_a_waiter_that_fits_is_served_at_once() -> None:
    book = base_book()
    [effect] = book.queue(5, content(2), held=True)
    assert isinstance(effect, Acquired)
    assert (effect.ticket, effect.slot.blocks, effect.slot.held, effect.slot.state) == (5, 2, True, ClientSlot.WRITING)
    assert book.waiting == 0


def test_a_waiter_that_does_not_fit_asks_for_a_lease() -> None:
    book = base_book(2)
    take(book, 2)
    assert book.queue(5, content(1), held=False) == [asks(1, 1, preferred=4)]
    assert book.waiting == 1
    assert tickets(grant(book, 2, 10, 4)) == [5]
    assert book.waiting == 0


@for_each(("blocks", "preferred"), [(1, 4), (2, 4), (3, 3), (4, 4), (9, 9)])
def test_a_small_need_prefers_a_whole_lease_and_a_large_one_is_sized_exactly(blocks: int, preferred: int) -> None:
    assert make_book(lease_blocks=4).queue(1, content(blocks), held=False) == [asks(1, blocks, preferred)]


def test_nobody_overtakes_the_first_who_waits() -> None:
    book = base_book(4)
    keep, other = take(book, 2), take(book, 1)
    book.queue(1, content(3), held=False)
    assert book.queue(2, content(1), held=False) == []  # one block is free
    assert book.acquire(content(1), held=False) is None
    assert book.give_up(other, NOW) == []
    assert tickets(grant(book, 2, 10, 3)) == [1, 2]
    book.give_up(keep, NOW)
    book.check()


def test_a_cancelled_waiter_passes_its_turn_on() -> None:
    book = base_book(4)
    take(book, 2)
    assert book.queue(1, content(3), held=False) == [asks(1, 3)]
    assert book.queue(2, content(2), held=False) == []
    effects = book.cancel(1)
    assert tickets(effects) == [2]
    assert effects[1:] == [asks(2, 0)]  # nobody needs the lease any more
    assert book.cancel(1) == []


def test_a_cancelled_waiter_behind_the_first_changes_nothing_for_it() -> None:
    book = base_book(1)
    take(book)
    assert book.queue(1, content(2), held=False) == [asks(1, 2, preferred=4)]
    assert book.queue(2, content(5), held=False) == []
    assert book.cancel(2) == []
    assert tickets(grant(book, 2, 10, 4)) == [1]


def test_the_next_waiters_need_replaces_the_request_of_the_first() -> None:
    book = base_book(1)
    take(book)
    book.queue(1, content(3), held=False)
    book.queue(2, content(5), held=False)
    assert book.cancel(1) == [asks(2, 5)]


def test_the_next_waiter_with_the_same_need_keeps_the_request() -> None:
    book = base_book(1)
    take(book)
    book.queue(1, content(3), held=False)
    book.queue(2, content(3), held=False)
    assert book.cancel(1) == []
    assert tickets(grant(book, 2, 10, 3)) == [2]


def test_after_a_grant_the_next_waiter_asks_again() -> None:
    book = base_book(1)
    take(book)
    book.queue(1, content(3), held=False)
    book.queue(2, content(3), held=False)
    effects = grant(book, 2, 10, 3)
    assert tickets(effects) == [1]
    assert effects[1:] == [asks(2, 3)]


def test_a_grant_that_crossed_a_newer_request_does_not_answer_it() -> None:
    book = base_book(1)
    take(book)
    book.queue(1, content(2), held=False)
    book.queue(2, content(5), held=False)
    assert book.cancel(1) == [asks(2, 5)]
    assert grant(book, 2, 10, 4, token=1) == [gives_back(2)]  # too small for who is first now
    assert tickets(grant(book, 3, 10, 5, token=2)) == [2]


def test_a_grant_that_crossed_its_withdrawal_is_kept_until_it_is_idle() -> None:
    book = base_book(1)
    take(book)
    book.queue(1, content(2), held=False)
    assert book.cancel(1) == [asks(2, 0)]
    assert grant(book, 2, 10, 4, token=1) == []
    assert take(book, 2).lease.lease_id == 2


def test_while_somebody_waits_what_is_empty_goes_back() -> None:
    book = base_book(2)
    slot = take(book, 2)
    grant(book, 2, 10, 2, token=9)
    assert book.queue(1, content(4), held=False) == [gives_back(2), asks(1, 4)]
    assert book.give_up(slot, NOW) == [gives_back(1)]  # the base lease too: it could not hold what is needed
    assert book.leases == {}
    assert tickets(grant(book, 3, 1, 4)) == [1]
    book.check()


def test_no_more_leases_are_asked_for_than_a_client_may_hold() -> None:
    book = base_book(2, max_leases=2)
    slot = take(book, 2)
    grant(book, 2, 10, 2, token=9)
    take(book, 2)
    assert book.queue(1, content(2), held=False) == []
    assert book.queue(2, content(2), held=False) == []
    assert tickets(book.give_up(slot, NOW)) == [1]


def test_at_max_leases_the_need_is_asked_for_when_a_lease_has_gone_back() -> None:
    book = base_book(2, max_leases=1)
    slot = take(book, 2)
    assert book.queue(1, content(3), held=False) == []
    assert book.give_up(slot, NOW) == [gives_back(1), asks(1, 3)]


def test_a_prefetch_asks_for_a_lease_without_waiting() -> None:
    book = base_book(2)
    take(book, 2)
    assert book.prefetch(content(3)) == [wishes(1, 3)]
    assert book.prefetch(content(3)) == []
    assert book.waiting == 0
    assert grant(book, 2, 10, 3) == []
    assert take(book, 3).lease.lease_id == 2


def test_a_prefetch_is_fulfilled_once() -> None:
    book = base_book(2)
    take(book, 2)
    book.prefetch(content(3))
    grant(book, 2, 10, 3)
    slot = take(book, 3)
    assert book.give_up(slot, NOW) == []
    assert book.expire(NOW + IDLE_S) == [gives_back(2)]
    assert book.recalled([]) == []


def test_a_waiter_comes_before_a_prefetch() -> None:
    book = base_book(2)
    take(book, 2)
    assert book.prefetch(content(3)) == [wishes(1, 3)]
    assert book.queue(1, content(4), held=False) == [asks(2, 4)]
    assert tickets(grant(book, 2, 10, 4)) == [1]


def test_who_waits_for_what_was_wished_for_says_that_he_waits() -> None:
    book = base_book(2)
    take(book, 2)
    assert book.prefetch(content(3)) == [wishes(1, 3)]
    assert book.queue(1, content(3), held=False) == [asks(2, 3)]
    assert book.cancel(1) == [wishes(3, 3)]


# -- who waits for what does not come ------------------------------------------------------------------------------------------


def pass_moments(book: ClientBook, moments: int) -> list[ClientEffect]:
    effects = [effect for _ in range(moments) for effect in book.moment_passed()]
    book.check()
    return effects


def waiting_book(*blocks: int) -> ClientBook:
    """A book with one block, which is taken, and waiters 1, 2, ... for so many blocks."""
    book = base_book(1, lease_blocks=1)
    take(book)
    for ticket, wanted in enumerate(blocks, 1):
        book.queue(ticket, content(wanted), held=False)
    return book


def test_who_waits_in_vain_lets_smaller_ones_pass() -> None:
    book = waiting_book(5, 2)
    assert pass_moments(book, 1) == []
    assert pass_moments(book, 1) == [asks(2, 2)]  # in the place of what the first waits for
    assert tickets(grant(book, 2, 10, 2)) == [2]
    assert book.waiting == 1


def test_who_lets_others_pass_asks_where_nobody_else_does() -> None:
    book = waiting_book(5, 2)
    pass_moments(book, 2)
    assert grant(book, 2, 10, 2)[1:] == [asks(3, 5)]
    assert tickets(grant(book, 3, 12, 5)) == [1]


def test_smaller_ones_that_come_later_pass_as_well() -> None:
    book = waiting_book(5, 2)
    pass_moments(book, 2)
    grant(book, 2, 10, 2)
    assert book.queue(3, content(3), held=False) == [asks(4, 3)]
    assert book.acquire(content(1), held=False) is None, "who waits in line comes first all the same"


def test_who_lets_others_pass_takes_what_fits() -> None:
    book = waiting_book(5, 2)
    pass_moments(book, 2)
    assert tickets(grant(book, 2, 10, 5, token=1)) == [1], "that crossed the request of the smaller one"


def test_who_wants_as_much_or_more_does_not_pass() -> None:
    book = waiting_book(10, 11, 10, 4)
    assert pass_moments(book, 2) == [asks(2, 4)]
    effects = grant(book, 2, 2, 4)
    assert tickets(effects) == [4]
    assert effects[1:] == [asks(3, 10)]
    assert tickets(grant(book, 3, 6, 11)) == [1], "the second wanted all of it"


def test_who_waits_alone_or_before_larger_ones_has_its_turn_as_long_as_it_likes() -> None:
    book = waiting_book(5, 5)
    assert pass_moments(book, 50) == []
    book.queue(3, content(2), held=False)
    assert pass_moments(book, 1) == [asks(2, 2)], "it has waited for long already"
    assert pass_moments(book, 1) == []
    assert pass_moments(book, 1) == [asks(3, 5)]


def test_for_those_behind_who_has_the_turn_time_stands_still() -> None:
    """Else the second would have used its patience up whenever the first has its turn again, and the third never had one."""
    book = waiting_book(5, 3, 2)
    assert pass_moments(book, 2) == [asks(2, 3)]
    assert pass_moments(book, 2) == [asks(3, 5)]  # the second begins to rest
    assert pass_moments(book, 3) == []
    assert pass_moments(book, 1) == [asks(4, 2)]
    assert pass_moments(book, 1) == []
    assert pass_moments(book, 1) == [asks(5, 3)]  # it has rested
    assert pass_moments(book, 1) == []
    assert pass_moments(book, 1) == [asks(6, 5)]


def test_each_turn_and_each_rest_is_twice_as_long_as_the_last() -> None:
    book = waiting_book(5, 2)
    for moments in (2, 4, 8, 16):
        assert pass_moments(book, moments - 1) == []
        [request] = pass_moments(book, 1)
        assert request == asks(book._token, 2), "it rests"
        assert pass_moments(book, moments - 1) == []
        [request] = pass_moments(book, 1)
        assert request == asks(book._token, 5), "it has its turn"


@for_each("kept_for", [1, 3, 10, 40])
def test_a_stream_of_small_ones_does_not_overtake_a_large_one_for_ever(kept_for: int) -> None:
    """There are twelve blocks. Small slots come in each moment, and each is kept for a while."""
    book = base_book(12)
    slots = [take(book, 3) for _ in range(4)]
    leaves = dict(zip(slots, itertools.count(1), strict=False))  # when
    book.queue(0, content(12), held=False)
    is_lent, is_wanted, passed = True, True, 0
    for moment in range(1, 12 * kept_for + 12):
        effects = book.queue(moment, content(3), held=False) + pass_moments(book, 1)
        for slot in [slot for slot, when in leaves.items() if when <= moment]:
            del leaves[slot]
            effects += book.give_up(slot, NOW)
        while effects:
            match effects.pop(0):
                case Acquired(0, _):
                    assert kept_for == 1 or passed, "others have passed it before"
                    return
                case Acquired(_, slot):
                    leaves[slot] = moment + kept_for
                    passed += 1
                case Send(LeaseReturn()):
                    is_lent = False
                case Send(LeaseRequest(_, nbytes)):
                    is_wanted = nbytes > 0
            if is_wanted and not is_lent:
                is_wanted, is_lent = False, True
                effects += grant(book, moment + 1, 1, 12)
    pytest.fail("the large one was never served")


def test_who_rests_and_leaves_passes_nothing_on() -> None:
    book = waiting_book(5, 6, 2)
    pass_moments(book, 2)
    assert book.cancel(1) == [asks(3, 6)], "the second has the turn that waited with the first"
    assert pass_moments(book, 2) == [asks(4, 2)]


def test_whoever_has_the_turn_and_leaves_gives_it_back() -> None:
    book = waiting_book(5, 3, 2)
    pass_moments(book, 2)
    assert book.cancel(2) == [asks(3, 2)]
    assert book.cancel(3) == [asks(4, 5)]
    assert book.cancel(1) == [asks(5, 0)]
    assert pass_moments(book, 3) == []


def test_what_is_empty_goes_back_while_somebody_rests() -> None:
    book = waiting_book(5, 2)
    pass_moments(book, 2)
    [acquired, *_] = grant(book, 2, 10, 2)
    assert isinstance(acquired, Acquired)
    assert book.give_up(acquired.slot, NOW) == [gives_back(2)]


def test_a_wish_waits_for_who_rests() -> None:
    book = waiting_book(5, 2)
    pass_moments(book, 2)
    assert book.prefetch(content(1)) == []
    assert book.cancel(1) == []
    assert book.cancel(2) == [wishes(3, 1)]


def test_no_moment_passes_for_nobody() -> None:
    book = base_book()
    before = plain(book)
    assert book.moment_passed() == []
    assert plain(book) == before


# -- using ---------------------------------------------------------------------------------------------------------------------


def test_generations_grow_and_are_the_clients_own() -> None:
    book = base_book(4)
    generations = [submitted(book).generation for _ in range(3)]
    assert generations == [(1 << GENERATION_BITS) + n for n in (1, 2, 3)]
    book.released(generations, NOW)
    assert submitted(book).generation == (1 << GENERATION_BITS) + 4


def test_a_released_slot_is_free_again() -> None:
    book = base_book(1)
    slot = submitted(book)
    assert (book.count(ClientSlot.SUBMITTED), book.free_nbytes) == (1, 0)
    assert book.released([slot.generation], NOW) == ([], 0)
    assert (slot.state, book.free_nbytes) == (ClientSlot.FREE, BLOCK_NBYTES)
    book.check()


def test_a_release_serves_the_first_waiting_caller() -> None:
    book = base_book(1)
    slot = submitted(book)
    book.queue(7, content(1), held=False)
    effects, unknown = book.released([slot.generation], NOW)
    assert (tickets(effects), unknown) == ([7], 0)


def test_stale_and_doubled_releases_are_counted_and_do_nothing() -> None:
    book = base_book(4)
    slot, other = submitted(book), submitted(book)
    assert book.released([slot.generation, slot.generation, 5, 2**64 - 1], NOW) == ([], 3)
    assert book.released([slot.generation], NOW) == ([], 1)
    assert other.state is ClientSlot.SUBMITTED
    assert book.free_nbytes == 3 * BLOCK_NBYTES
    book.check()


def test_a_held_slot_that_is_released_is_cached_and_can_be_submitted_again() -> None:
    book = base_book(1)
    slot = submitted(book, held=True)
    first = slot.generation
    assert book.released([first], NOW) == ([], 0)
    assert (slot.state, book.count(ClientSlot.CACHED), book.free_nbytes) == (ClientSlot.CACHED, 1, 0)
    assert book.submit(slot) > first
    assert (slot.state, book.count(ClientSlot.CACHED)) == (ClientSlot.SUBMITTED, 0)
    assert book.released([first], NOW) == ([], 1)  # the old generation means it no more
    book.check()


def test_a_slot_given_up_while_it_is_written_is_free() -> None:
    book = base_book(1)
    slot = take(book, held=True)
    assert book.give_up(slot, NOW) == []
    assert (slot.state, book.free_nbytes) == (ClientSlot.FREE, BLOCK_NBYTES)
    assert book.give_up(slot, NOW) == []  # twice is once
    assert book.free_nbytes == BLOCK_NBYTES
    book.check()


def test_a_slot_given_up_while_the_engine_has_it_comes_back_with_its_release() -> None:
    book = base_book(1)
    slot = submitted(book, held=True)
    assert book.give_up(slot, NOW) == []
    assert slot.state is ClientSlot.SUBMITTED
    assert book.released([slot.generation], NOW) == ([], 0)
    assert slot.state is ClientSlot.FREE


def test_a_cached_slot_given_up_is_free() -> None:
    book = base_book(1)
    slot = submitted(book, held=True)
    book.released([slot.generation], NOW)
    book.queue(7, content(1), held=False)
    assert tickets(book.give_up(slot, NOW)) == [7]
    book.check()


@for_each("way", ["discarded", "released", "evicted"])
def test_a_slot_that_is_viewed_drains_until_its_last_view_has_gone(way: str) -> None:
    book = base_book(2)
    slot = take(book, 2, held=way == "evicted")
    slot.viewed = True
    if way != "discarded":
        book.submit(slot)
        book.released([slot.generation], NOW)
    if way != "released":
        book.give_up(slot, NOW)
    assert (slot.state, book.count(ClientSlot.DRAINING)) == (ClientSlot.DRAINING, 1)
    assert (book.draining_nbytes(), book.free_nbytes) == (2 * BLOCK_NBYTES, 0)
    book.check()
    assert book.give_up(slot, NOW) == []
    book.queue(7, content(2), held=False)
    assert tickets(book.last_view_gone(slot, NOW)) == [7]
    assert (slot.state, book.draining_nbytes()) == (ClientSlot.FREE, 0)
    book.check()


def test_a_view_that_dies_before_its_slot_leaves_changes_nothing() -> None:
    book = base_book(1)
    slot = take(book)
    slot.viewed = True
    assert book.last_view_gone(slot, NOW) == []
    assert slot.state is ClientSlot.WRITING
    book.give_up(slot, NOW)
    assert slot.state is ClientSlot.FREE


def test_only_what_was_written_or_cached_is_submitted() -> None:
    book = base_book(4)
    gone, sent, draining = take(book), submitted(book), take(book)
    book.give_up(gone, NOW)
    draining.viewed = True
    book.give_up(draining, NOW)
    for slot in (gone, sent, draining):
        refuses(LocalProtocolError, f"{slot.state.name}: SUBMIT", book, partial(book.submit, slot))


def test_a_lease_empty_time_is_when_its_last_slot_left() -> None:
    book = make_book()
    grant(book, 2, 10, 4, token=9, now=NOW)
    sent, viewed = submitted(book), take(book)
    viewed.viewed = True
    book.released([sent.generation], NOW + 1)
    book.give_up(viewed, NOW + 2)
    assert book.next_expiry() is None
    book.last_view_gone(viewed, NOW + 3)
    assert book.next_expiry() == NOW + 3 + IDLE_S


def test_a_lease_of_the_preferred_size_is_used_though_that_is_no_whole_number_of_blocks() -> None:
    """The engine lends whole blocks. A lease that is refused as too large would be returned and asked for again, for ever."""
    limits = ClientBookLimits(1, 24 * BLOCK_NBYTES, 8, 4 * BLOCK_NBYTES + 1, IDLE_S)
    book = ClientBook(limits)
    grant(book, 1, 1, 5, token=0)
    take(book, 5)
    [request] = book.queue(1, content(1), held=False)
    assert isinstance(request, Send)
    [acquired] = grant(book, 2, 6, 5)
    assert isinstance(acquired, Acquired)


def test_leases_in_use_are_those_this_process_may_still_write() -> None:
    book = make_book()
    for lease_id in (2, 3, 4, 5, 6):
        grant(book, lease_id, 2 * lease_id, 1, token=9)
    slots = {slot.lease.lease_id: slot for slot in (take(book) for _ in range(5))}
    book.submit(slots[3])  # the engine's
    slots[4].viewed = True
    book.submit(slots[4])  # the engine's, but viewed here
    slots[5].viewed = True
    book.give_up(slots[5], NOW)  # draining
    book.give_up(slots[6], NOW)  # free
    assert book.leases_in_use() == (4, 5), "the first was never written to, or its writer has said that it is viewed"


def test_counts_are_by_state() -> None:
    book = base_book(4)
    take(book)
    submitted(book)
    submitted(book)
    assert [book.count(state) for state in ClientSlot] == [0, 1, 2, 0, 0, 0]


# -- check ---------------------------------------------------------------------------------------------------------------------


def lose_a_block(book: ClientBook, _: ClientSlotRecord) -> None:
    book.leases[1].slots.allocate(1)


def overlap(book: ClientBook, slot: ClientSlotRecord) -> None:
    slot.start += 1


def keep_a_free_slot(book: ClientBook, slot: ClientSlotRecord) -> None:
    slot.state = ClientSlot.FREE


def lose_its_lease(book: ClientBook, _: ClientSlotRecord) -> None:
    del book.leases[1]


def mistake_its_state(book: ClientBook, slot: ClientSlotRecord) -> None:
    slot.state = ClientSlot.SUBMITTED


@for_each("kind", [COMPILED, MODELS], ids=["compiled", "model"])
@for_each("damage", [lose_a_block, overlap, keep_a_free_slot, lose_its_lease, mistake_its_state])
def test_check_finds_a_damaged_book(
    kind: Books, damage: Callable[[ClientBook, ClientSlotRecord], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "ClientBook", kind.client)
    book = base_book(4)
    slot = take(book)
    submitted(book)
    book.check()
    damage(book, slot)
    with pytest.raises(AssertionError):
        book.check()


# -- what is kept, and what is split ---------------------------------------------------------------------------------------


def test_a_slot_has_room_for_its_header() -> None:
    book = base_book(blocks=2)
    slot = book.acquire(BLOCK_NBYTES, held=False)
    assert slot is not None
    assert (slot.blocks, book.free_nbytes) == (2, 0)


def test_a_lease_all_of_which_is_kept_goes_back() -> None:
    book = base_book()
    grant(book, 2, 8, 1, token=7)
    base, other = [submitted(book, blocks) for blocks in (4, 1)]
    assert book.kept(other.generation, NOW) == [Send(LeaseReturn((2,)))]
    assert book.kept(base.generation, NOW) == [Send(LeaseReturn((1,)))]
    assert (book.leased_nbytes, dict(book.leases)) == (0, {})
    book.check()


def test_a_slot_that_was_split_is_the_slots_that_it_was_split_in() -> None:
    book = base_book()
    parts = book.split(take(book, 3, held=True), [content(1), content(2)])
    assert [(part.start, part.blocks) for part in parts] == [(1, 1), (2, 2)]
    assert book.count(ClientSlot.WRITING) == 2
    book.check()
