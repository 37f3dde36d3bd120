"""Two memories in one book: each is lent by itself, and what was lent is told apart by where it is."""

from __future__ import annotations

import random

import pytest

from shmring.core.compiled import ClientBook
from shmring.core.effects import Acquired, Send
from shmring.core.geometry import BLOCK_NBYTES, GENERATION_BITS, ClientBookLimits, Geometry
from shmring.core.messages import DEVICE_MEMORY, LeaseGrant, LeaseRequest, SlotRef
from shmring.core.states import ClientSlot
from shmring.errors import CapacityError, RemoteProtocolError
from tests.core.stories import EngineTeller, tell
from tests.model.waiting import check_waiting
from tests.simulation.books import COMPILED, MODELS, Books
from tests.tables import for_each

pytestmark = pytest.mark.usefixtures("books")

START = 17  # one block of header, 12 to lease, 4 of replies
FIRST_ID = 1 << 40

STORIES = {
    "leases of both memories are told apart by where they are": """
        device=16 clients=1; 1 asks 3 there -> 1 gets d0 at 17+3
        1 asks 2 -> 1 gets 2 at 2+2
        look -> 9 free, 13 free there, 4 for replies
        1 returns d0 2 1 ->
        look -> 12 free, 16 free there, 4 for replies""",
    "memory that is not there can't be asked for": "clients=1; 1 asks 1 there -> refused: this engine has no device slab",
    "more than there is can't be asked for": """
        device=16 clients=1; 1 asks 17 there -> refused: a lease of 69632 bytes was requested of 65536
        1 asks 16 there -> 1 gets d0 at 17+16""",
    "who waits for one memory does not wait for the other": """
        device=16 clients=2; 1 asks 12 there -> 1 gets d0 at 17+12
        2 asks 8 there -> 1 recalled d0
        look -> 10 free, 4 free there, 4 for replies, 1 waiting
        2 asks 4 -> 2 gets 3 at 3+4
        1 returns d0 -> 2 gets d1 at 17+8""",
    "a request is withdrawn in its own memory": """
        device=16 clients=2; 1 asks 12 there -> 1 gets d0 at 17+12
        2 asks 8 there -> 1 recalled d0
        2 withdraws ->
        look -> 10 free, 4 free there, 4 for replies, 1 waiting
        2 withdraws there ->
        look -> 10 free, 4 free there, 4 for replies""",
    "quotas and counts of leases hold in each memory": """
        device=16 device_quota=6 max_leases=2 clients=2; 1 asks 4 -> 1 gets 3 at 3+4
        1 asks 4 there -> 1 gets d0 at 17+4
        1 asks 4 there ->
        1 returns d0 -> 1 gets d1 at 17+4
        1 asks 1 there -> 1 gets d2 at 21+1
        1 asks 1 there ->""",
    "slots in device memory are booked like any other": """
        device=16 clients=1; 1 asks 4 there -> 1 gets d0 at 17+4
        1 submits 1 1@1 2@17+2 3@19 ->
        look -> 1 has 1 published, 1 has 2 published, 1 has 3 published, 11 free, 12 free there, 4 for replies, 2 slots there
        1 returns d0 -> refused: with a slot in use
        1 submits 2 4@18 -> refused: overlaps a live slot
        1 submits 2 4@21 -> refused: is not inside lease
        1 submits 2 2@20 -> refused: is not a new one
        1 runs 1 ->
        1 releases 1 2 3 viewed 2 -> 1 released 1 3
        look -> 1 has 2 draining, 11 free, 12 free there, 4 for replies, 1 slots there
        1 unviews 2 -> 1 released 2
        look -> 11 free, 12 free there, 4 for replies""",
    "who disconnects is quarantined in both": """
        device=16 clients=2; 1 asks 12 there -> 1 gets d0 at 17+12
        2 asks 8 there -> 1 recalled d0
        1 disconnects ->
        look -> 10 free, 1 quarantined, 4 free there, 12 quarantined there, 4 for replies, 1 waiting
        1 dies -> 1 reclaimed 13, 1 gone, 2 gets d1 at 17+8""",
    "a goodbye keeps what it names in either memory": """
        device=16 clients=1; 1 asks 2 there -> 1 gets d0 at 17+2
        1 asks 3 there -> 1 gets d1 at 19+3
        1 leaves but d0 -> 1 reclaimed 4
        look -> 12 free, 14 free there, 2 quarantined there, 4 for replies
        1 dies -> 1 reclaimed 2, 1 gone""",
}


@for_each("story", STORIES.values(), ids=STORIES)
def test_stories(story: str) -> None:
    tell(story, EngineTeller)


def test_the_device_slab_begins_where_the_slab_ends() -> None:
    geometry = Geometry.of(17 * BLOCK_NBYTES, 4 * BLOCK_NBYTES, 16 * BLOCK_NBYTES)
    assert geometry == Geometry(leasable_blocks=12, reply_blocks=4, device_blocks=16)
    assert (geometry.slab_nbytes, geometry.device_start) == (17 * BLOCK_NBYTES, 17)
    assert Geometry.of(17 * BLOCK_NBYTES, None).device_blocks == 0


@for_each("kind", [COMPILED, MODELS], ids=["compiled", "model"])
@for_each("damage", ["lose", "overlap"])
def test_check_finds_damage_there_too(kind: Books, damage: str) -> None:
    teller = EngineTeller("device=16 clients=1", kind.engine)
    teller.say("1 asks 2 there")
    teller.say("1 asks 2 there")
    book = teller.book
    device = book.lendings[1]
    if damage == "lose":
        device._free.allocate(1)
    else:
        book.clients[1].leases[FIRST_ID + 1].start -= 1
    with pytest.raises(AssertionError):
        book.check()


@for_each("seed", range(6))
def test_nobody_waits_beside_idle_memory_for_what_does_not_come(seed: int) -> None:
    """Three clients hold all of it; they and three others ask, use what they have, or say nothing while moments pass."""
    chance = random.Random(seed)
    book = EngineTeller("").book
    for client in range(1, 7):
        book.connect(client, 4 * BLOCK_NBYTES)
    numbers = dict.fromkeys(book.clients, 0)
    for _ in range(300):
        what, client = chance.randrange(8), chance.choice([*book.clients])
        leases = book.clients[client].leases
        if what < 2:
            numbers[client] += 1
            book.request_lease(client, LeaseRequest(numbers[client], chance.choice((1, 2, 3, 3, 8, 0)) * BLOCK_NBYTES))
        elif what == 2:
            idle = [lease.lease_id for lease in leases.values() if not lease.live.units and lease.recalled]
            book.return_leases(client, idle)
        elif what == 3:
            empty = [lease for lease in leases.values() if not lease.live.units]
            if empty and len(book.clients[client].requests) < 4:
                numbers[client] += 1
                offset, generation = empty[0].start * BLOCK_NBYTES, client << GENERATION_BITS | numbers[client]
                book.submit(client, numbers[client], [SlotRef(empty[0].lease_id, offset, 64, generation)])
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
    host = ClientBookLimits(leasable_nbytes=12 * BLOCK_NBYTES, **common)
    device = ClientBookLimits(
        leasable_nbytes=16 * BLOCK_NBYTES,
        memory=DEVICE_MEMORY,
        first_block=START,
        **common,
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
