"""Two memories in one book: each is lent by itself, and what was lent is told apart by where it is."""

from __future__ import annotations

import random

import pytest

from shmring.core.compiled import ClientBook, EngineBook
from shmring.core.effects import Acquired, ClientGone, Granted, Recalled, Reclaimed, Send
from shmring.core.geometry import BLOCK_NBYTES, GENERATION_BITS, ClientBookLimits, EngineBookLimits, Geometry
from shmring.core.messages import DEVICE_MEMORY, HOST_MEMORY, SLOT_HEADER_NBYTES, LeaseGrant, LeaseRequest, SlotRef
from shmring.core.states import ClientSlot, EngineSlot, Lease
from shmring.errors import CapacityError, RemoteProtocolError
from tests.model.waiting import check_waiting
from tests.simulation.books import COMPILED, MODELS, Books
from tests.tables import for_each

pytestmark = pytest.mark.usefixtures("books")

START = 17  # one block of header, 12 to lease, 4 of replies
DEVICE = 16
FIRST_ID = 1 << 40


def make_engine_book(device: int = DEVICE, *, quota: int = 12, max_leases: int = 8) -> EngineBook:
    return EngineBook(
        Geometry(leasable_blocks=12, reply_blocks=4, device_blocks=device),
        EngineBookLimits(max_lease_blocks=4, quota_blocks=8, max_leases=max_leases, max_inflight=4, device_quota_blocks=quota),
    )


def ask(book: EngineBook, client: int, token: int, blocks: int, memory: int = DEVICE_MEMORY) -> list[LeaseGrant]:
    effects = book.request_lease(client, token, blocks * BLOCK_NBYTES, 0, memory)  # type: ignore[arg-type]
    return [effect.grant for effect in effects if isinstance(effect, Granted)]


def slot_in(grant: LeaseGrant, client: int, n: int, at: int = 0, blocks: int = 1) -> SlotRef:
    nbytes = blocks * BLOCK_NBYTES - SLOT_HEADER_NBYTES
    return SlotRef(grant.lease_id, grant.offset + at * BLOCK_NBYTES, nbytes, client << GENERATION_BITS | n)


def test_the_device_slab_begins_where_the_slab_ends() -> None:
    geometry = Geometry.of(17 * BLOCK_NBYTES, 4 * BLOCK_NBYTES, 16 * BLOCK_NBYTES)
    assert geometry == Geometry(leasable_blocks=12, reply_blocks=4, device_blocks=16)
    assert (geometry.slab_nbytes, geometry.device_start) == (17 * BLOCK_NBYTES, 17)
    assert Geometry.of(17 * BLOCK_NBYTES, None).device_blocks == 0


def test_leases_of_both_memories_are_told_apart_by_their_offset() -> None:
    book = make_engine_book()
    base = book.connect(1, BLOCK_NBYTES)
    assert base is not None
    assert base.offset == BLOCK_NBYTES, "a base lease is of host memory"
    [there] = ask(book, 1, 1, 3)
    [here] = ask(book, 1, 1, 2, HOST_MEMORY)
    assert (there.lease_id, there.offset, there.nbytes) == (FIRST_ID, START * BLOCK_NBYTES, 3 * BLOCK_NBYTES)
    assert here.offset < START * BLOCK_NBYTES
    assert (book.host.free_nbytes, book.lendings[1].free_nbytes) == (9 * BLOCK_NBYTES, 13 * BLOCK_NBYTES)
    assert book.host.leased_nbytes(Lease.LEASED) == book.lendings[1].leased_nbytes(Lease.LEASED) == 3 * BLOCK_NBYTES
    book.check()
    assert book.return_leases(1, [there.lease_id, here.lease_id, base.lease_id]) == []
    assert (book.host.free_nbytes, book.lendings[1].free_nbytes) == (12 * BLOCK_NBYTES, 16 * BLOCK_NBYTES)
    book.check()


def test_memory_that_is_not_there_cannot_be_asked_for() -> None:
    book = make_engine_book(0)
    book.connect(1, BLOCK_NBYTES)
    assert len(book.lendings) == 1
    with pytest.raises(RemoteProtocolError, match="this engine has no device slab"):
        ask(book, 1, 1, 1)
    book = make_engine_book()
    book.connect(1, BLOCK_NBYTES)
    with pytest.raises(RemoteProtocolError, match=r"a lease of 69632 bytes was requested of 65536"):
        ask(book, 1, 1, 17)


def test_who_waits_for_one_memory_does_not_wait_for_the_other() -> None:
    book = make_engine_book()
    for client in (1, 2):
        book.connect(client, BLOCK_NBYTES)
    [first] = ask(book, 1, 1, 12)
    effects = book.request_lease(2, 1, 8 * BLOCK_NBYTES, 0, DEVICE_MEMORY)
    assert effects == [Recalled(1, (first.lease_id,))]
    assert book.waiting_lease_requests == 1
    assert len(ask(book, 2, 2, 4, HOST_MEMORY)) == 1, "a window there closes nothing here"
    book.check()
    [effect] = book.return_leases(1, [first.lease_id])
    assert isinstance(effect, Granted)
    assert (effect.client_id, effect.grant.token, effect.grant.nbytes) == (2, 1, 8 * BLOCK_NBYTES)


def test_a_want_is_withdrawn_in_its_own_memory() -> None:
    book = make_engine_book()
    for client in (1, 2):
        book.connect(client, BLOCK_NBYTES)
    ask(book, 1, 1, 12)
    assert ask(book, 2, 1, 8) == []
    assert ask(book, 2, 1, 0, HOST_MEMORY) == []
    assert book.waiting_lease_requests == 1
    assert ask(book, 2, 2, 0) == []
    assert book.waiting_lease_requests == 0


def test_quotas_and_counts_of_leases_hold_in_each_memory() -> None:
    book = make_engine_book(quota=6, max_leases=2)
    for client in (1, 2):
        book.connect(client, BLOCK_NBYTES)
    assert len(ask(book, 1, 1, 4, HOST_MEMORY)) == 1
    [first] = ask(book, 1, 1, 4)
    assert ask(book, 1, 2, 4) == [], "four more would be over its quota"
    assert len(book.return_leases(1, [first.lease_id])) == 1
    assert len(ask(book, 1, 3, 1)) == 1
    assert ask(book, 1, 4, 1) == [], "it has two leases there"


def test_slots_in_device_memory_are_booked_like_any_other() -> None:
    book = make_engine_book()
    base = book.connect(1, BLOCK_NBYTES)
    assert base is not None
    [lease] = ask(book, 1, 1, 4)
    book.submit(1, 1, [slot_in(base, 1, 1), slot_in(lease, 1, 2, 0, 2), slot_in(lease, 1, 3, 2)])
    assert (book.count_slots(EngineSlot.PUBLISHED), book.count_device_slots()) == (3, 2)
    with pytest.raises(RemoteProtocolError, match="with a slot in use"):
        book.return_leases(1, [lease.lease_id])
    for forged, reason in (
        (slot_in(lease, 1, 4, 1), "overlaps a live slot"),
        (slot_in(lease, 1, 4, 4), "is not inside lease"),
        (slot_in(lease, 1, 2, 3), "is not a new one"),
        (slot_in(LeaseGrant(1, FIRST_ID + 1, lease.offset, lease.nbytes), 1, 4, 3), "does not hold"),
        (slot_in(LeaseGrant(1, base.lease_id, lease.offset, lease.nbytes), 1, 4, 3), "is not inside lease"),
    ):
        with pytest.raises(RemoteProtocolError, match=reason):
            book.submit(1, 2, [forged])
    book.claim(1, 1)
    own = 1 << GENERATION_BITS
    book.release_slots(1, [own | 1, own | 2, own | 3], {own | 2})
    assert book.count_device_slots() == 1
    book.last_view_gone(1, own | 2)
    book.check()


def test_a_frontend_that_disconnects_is_quarantined_in_both() -> None:
    book = make_engine_book()
    base = book.connect(1, BLOCK_NBYTES)
    book.connect(2, BLOCK_NBYTES)
    assert base is not None
    assert len(ask(book, 1, 1, 12)) == 1
    assert ask(book, 2, 1, 8) == []
    book.disconnect(1)
    assert book.lendings[1].leased_nbytes(Lease.QUARANTINED) == 12 * BLOCK_NBYTES
    book.check()
    effects = book.died(1)
    assert effects[:2] == [Reclaimed(1, 13 * BLOCK_NBYTES), ClientGone(1)]
    assert [effect.client_id for effect in effects if isinstance(effect, Granted)] == [2]
    book.check()


def test_a_goodbye_keeps_what_it_names_in_either_memory() -> None:
    book = make_engine_book()
    book.connect(1, BLOCK_NBYTES)
    [kept] = ask(book, 1, 1, 2)
    [given] = ask(book, 1, 2, 3)
    assert book.goodbye(1, {kept.lease_id}, ()) == [Reclaimed(1, 4 * BLOCK_NBYTES)]
    assert book.lendings[1].leased_nbytes(Lease.QUARANTINED) == 2 * BLOCK_NBYTES
    assert given.lease_id != kept.lease_id
    assert book.died(1) == [Reclaimed(1, 2 * BLOCK_NBYTES), ClientGone(1)]
    book.check()


@for_each("kind", [COMPILED, MODELS], ids=["compiled", "model"])
@for_each("damage", ["lose", "overlap"])
def test_check_finds_damage_there_too(kind: Books, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "EngineBook", kind.engine)
    book = make_engine_book()
    book.connect(1, BLOCK_NBYTES)
    grants = [ask(book, 1, token, 2)[0] for token in (1, 2)]
    book.check()
    device = book.lendings[1]
    if damage == "lose":
        device._free.allocate(1)
    else:
        book.clients[1].leases[grants[1].lease_id].start -= 1
    with pytest.raises(AssertionError):
        book.check()


def test_whatever_happens_no_block_of_either_memory_is_lost() -> None:
    """Random requests, returns, deaths, in both memories at once."""
    chance = random.Random(3)
    book = make_engine_book()
    clients = tokens = 0
    alive: list[int] = []
    for _ in range(1500):
        what, memory = chance.randrange(6), chance.choice((HOST_MEMORY, DEVICE_MEMORY))
        if what == 0 and len(alive) < 4:
            clients += 1
            alive.append(clients)
            book.connect(clients, BLOCK_NBYTES)
        elif what == 1 and alive and chance.random() < 0.3:
            client = alive.pop(chance.randrange(len(alive)))
            book.disconnect(client)
            book.check()
            book.died(client)
        elif what in (2, 3) and alive:
            tokens += 1
            ask(book, chance.choice(alive), tokens, chance.randint(0, 11), memory)
        elif alive:
            client = chance.choice(alive)
            book.return_leases(client, [lease for lease in book.clients[client].leases if chance.random() < 0.6])
        book.check()
    for client in alive:
        book.disconnect(client)
        book.died(client)
    assert (book.host.free_nbytes, book.lendings[1].free_nbytes) == (12 * BLOCK_NBYTES, DEVICE * BLOCK_NBYTES)
    assert (book.clients, book.waiting_lease_requests) == ({}, 0)


@for_each("seed", range(6))
def test_nobody_waits_beside_idle_memory_for_what_does_not_come(seed: int) -> None:
    """Three clients hold all of it; they and three others ask, use what they have, or say nothing while moments pass."""
    chance = random.Random(seed)
    book = make_engine_book()
    for client in range(1, 7):
        book.connect(client, 4 * BLOCK_NBYTES)
    numbers = dict.fromkeys(book.clients, 0)
    for _ in range(300):
        what, client = chance.randrange(8), chance.choice([*book.clients])
        leases = book.clients[client].leases
        if what < 2:
            numbers[client] += 1
            ask(book, client, numbers[client], chance.choice((1, 2, 3, 3, 8, 0)), HOST_MEMORY)
        elif what == 2:
            idle = [lease.lease_id for lease in leases.values() if not lease.live.units and lease.recalled]
            book.return_leases(client, idle)
        elif what == 3:
            empty = [lease for lease in leases.values() if not lease.live.units]
            if empty and len(book.clients[client].requests) < 4:
                numbers[client] += 1
                grant = LeaseGrant(0, empty[0].lease_id, empty[0].start * BLOCK_NBYTES, empty[0].blocks * BLOCK_NBYTES)
                book.submit(client, numbers[client], [slot_in(grant, client, numbers[client])])
        elif what == 4:
            for request_id in [*book.clients[client].requests]:
                book.abort(client, request_id)
        elif book.is_awaited():
            book.moment_passed()
            check_waiting(book.host)
        book.check()


# -- a frontend's books ------------------------------------------------------------------------------------------------


def make_books() -> tuple[ClientBook, ClientBook]:
    common = {"client_id": 1, "max_leases": 8, "lease_nbytes": 4 * BLOCK_NBYTES, "lease_idle_s": 5.0}
    host = ClientBookLimits(leasable_nbytes=12 * BLOCK_NBYTES, **common)  # type: ignore[arg-type]
    device = ClientBookLimits(
        leasable_nbytes=16 * BLOCK_NBYTES,
        memory=DEVICE_MEMORY,
        first_block=START,
        **common,  # type: ignore[arg-type]
    )
    return ClientBook(host), ClientBook(device)


def test_one_book_numbers_the_submissions_of_both() -> None:
    host, device = make_books()
    host.granted(LeaseGrant(0, 1, BLOCK_NBYTES, 4 * BLOCK_NBYTES), 0.0)
    device.granted(LeaseGrant(1, FIRST_ID, START * BLOCK_NBYTES, 4 * BLOCK_NBYTES), 0.0)
    slots = [book.acquire(100, held=True) for book in (device, host, device)]
    generations = [
        book.submit(slot, host) for book, slot in zip((device, host, device), slots, strict=True) if slot is not None
    ]
    assert generations == [(1 << GENERATION_BITS) + n for n in (1, 2, 3)]
    assert device.released(generations, 1.0)[1] == 1
    assert host.released(generations, 1.0)[1] == 2
    assert (device.count(ClientSlot.CACHED), host.count(ClientSlot.CACHED)) == (2, 1)
    for book in (host, device):
        book.check()


def test_a_book_asks_for_its_own_memory_and_takes_no_other() -> None:
    _, device = make_books()
    assert device.queue(1, 100, held=False) == [Send(LeaseRequest(1, BLOCK_NBYTES, 4 * BLOCK_NBYTES, DEVICE_MEMORY))]
    for start in (1, START - 1, 33):
        with pytest.raises(RemoteProtocolError, match="is no range of what is leased out"):
            device.granted(LeaseGrant(1, FIRST_ID, start * BLOCK_NBYTES, BLOCK_NBYTES), 0.0)
    [effect] = device.granted(LeaseGrant(1, FIRST_ID, START * BLOCK_NBYTES, BLOCK_NBYTES), 0.0)
    assert isinstance(effect, Acquired)
    assert effect.slot.offset == START * BLOCK_NBYTES
    with pytest.raises(CapacityError, match="raise its device_slab_nbytes"):
        device.acquire(16 * BLOCK_NBYTES, held=False)
