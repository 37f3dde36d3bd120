"""Both books where memory is short: who gives way, and what a crowd of requests costs.

An engine and its frontends without the processes around them: what one book wants to send is heard by the other at once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import pytest

from shmring.core.compiled import ClientBook, ClientSlotRecord, EngineBook
from shmring.core.effects import Acquired, ClientEffect, EngineEffect, Granted, Recalled, Send
from shmring.core.geometry import BLOCK_NBYTES, ClientBookLimits, EngineBookLimits, Geometry
from shmring.core.messages import SLOT_HEADER_NBYTES, LeaseRequest
from shmring.core.states import RequestEvent

REPLY_BLOCKS = 4
LEASE_BLOCKS = 16


def content(blocks: int) -> int:
    return blocks * BLOCK_NBYTES - SLOT_HEADER_NBYTES


class World:
    """An engine's book, and those of its frontends."""

    def __init__(self, leasable: int, clients: int) -> None:
        self.engine = EngineBook(
            Geometry(leasable, REPLY_BLOCKS),
            EngineBookLimits(max_lease_blocks=leasable, quota_blocks=leasable * 3 // 4, max_leases=64, max_inflight=256),
        )
        self.books: dict[int, ClientBook] = {}
        self.acquired: dict[int, ClientSlotRecord] = {}
        self.requests = 0
        for client_id in range(1, clients + 1):
            self.books[client_id] = ClientBook(
                ClientBookLimits(
                    client_id,
                    leasable_nbytes=leasable * BLOCK_NBYTES,
                    max_leases=64,
                    lease_nbytes=LEASE_BLOCKS * BLOCK_NBYTES,
                    lease_idle_s=5.0,
                )
            )
            grant = self.engine.connect(client_id, LEASE_BLOCKS * BLOCK_NBYTES)
            if grant is not None:
                self.exchange([Granted(client_id, grant)])

    def exchange(self, engine: Sequence[EngineEffect] = (), client_id: int = 0, client: Sequence[ClientEffect] = ()) -> None:
        """Carries out what both books want, and what follows from that."""
        of_engine, of_clients = deque(engine), deque((client_id, effect) for effect in client)
        while of_engine or of_clients:
            if of_engine:
                match of_engine.popleft():
                    case Granted(to, grant):
                        of_clients += [(to, effect) for effect in self.books[to].granted(grant, 0.0)]
                    case Recalled(to, lease_ids):
                        of_clients += [(to, effect) for effect in self.books[to].recalled(lease_ids)]
                continue
            sender, wanted = of_clients.popleft()
            match wanted:
                case Acquired(ticket, slot):
                    self.acquired[ticket] = slot
                case Send(LeaseRequest() as request):
                    of_engine += self.engine.request_lease(sender, request)
                case Send(message):
                    of_engine += self.engine.return_leases(sender, message.lease_ids)
        self.engine.check()

    def try_slot(self, client_id: int, blocks: int) -> ClientSlotRecord | None:
        """Takes a slot if there is one now, else wishes for a lease, as ``submit_nowait`` does."""
        book = self.books[client_id]
        slot = book.acquire(content(blocks), held=False)
        if slot is None:
            self.exchange((), client_id, book.prefetch(content(blocks)))
        return slot

    def wait_for_slot(self, client_id: int, blocks: int) -> ClientSlotRecord | None:
        """Queues for a slot, and returns it if that brought it at once."""
        book = self.books[client_id]
        slot = book.acquire(content(blocks), held=False)
        if slot is None:
            self.exchange((), client_id, book.queue(1, content(blocks), held=False))
            slot = self.acquired.pop(1, None)
        return slot

    def submit(self, client_id: int, slot: ClientSlotRecord) -> int:
        """Hands a slot to the engine; returns the number of the request."""
        self.requests += 1
        self.books[client_id].submit(slot)
        self.engine.submit(client_id, self.requests, [slot.ref()])
        return self.requests

    def finish(self, client_id: int, request_id: int) -> None:
        """The engine works a request off, and its slots come back."""
        generations = self.engine.clients[client_id].requests[request_id].generations
        self.engine.claim(client_id, request_id)
        self.engine.end(client_id, request_id, RequestEvent.FINISH)
        self.engine.release_slots(client_id, generations, ())
        effects, unknown = self.books[client_id].released(generations, 0.0)
        assert unknown == 0
        self.exchange((), client_id, effects)


@pytest.mark.usefixtures("books")
def test_after_a_refusal_the_clients_own_memory_goes_on_being_used() -> None:
    """A burst in which one is too large: the engine used to recall the client's lease then, and refused all that followed."""
    world = World(leasable=32, clients=1)
    slots = [world.try_slot(1, 2)]
    assert slots[0] is not None
    world.submit(1, slots[0])
    assert world.try_slot(1, 31) is None  # it can't be had beside that one
    slots += [world.try_slot(1, 2) for _ in range(7)]
    assert all(slots), "refused beside free memory"


@pytest.mark.usefixtures("books")
def test_who_does_not_wait_finds_room_at_the_second_try_where_it_lies_idle_in_his_own_lease() -> None:
    world = World(leasable=32, clients=1)
    assert world.try_slot(1, 31) is None
    assert world.try_slot(1, 31) is not None


@pytest.mark.usefixtures("books")
@pytest.mark.parametrize("waits", [False, True], ids=["does not wait", "waits"])
def test_idle_clients_keep_no_memory_from_a_busy_one(waits: bool) -> None:
    """Their base leases have the whole slab; they go back when somebody needs the memory."""
    world = World(leasable=128, clients=9)
    assert world.engine.host.free_nbytes == 0
    assert not world.books[9].leases
    if waits:
        assert world.wait_for_slot(9, 100) is not None
    else:
        assert world.try_slot(9, 100) is None
        assert world.try_slot(9, 100) is not None


@pytest.mark.usefixtures("books")
def test_a_client_that_is_at_work_keeps_its_lease_from_one_that_does_not_wait() -> None:
    world = World(leasable=32, clients=2)
    slots = [world.try_slot(client_id, 2) for client_id in (1, 2)]
    for client_id, slot in enumerate(slots, start=1):
        assert slot is not None
        world.submit(client_id, slot)
    assert world.try_slot(2, 20) is None
    assert world.try_slot(1, 2) is not None, "its lease was recalled"


def test_a_crowd_of_lease_requests_is_served_in_no_time() -> None:
    """A thousand clients wait for a lease, and a thousand give theirs back; each message used to cost milliseconds."""
    count = 1000
    engine = EngineBook(Geometry(2 * count, REPLY_BLOCKS), EngineBookLimits(1, quota_blocks=10, max_leases=8, max_inflight=1))
    grants = [engine.connect(client_id, BLOCK_NBYTES) for client_id in range(1, 2 * count + 1)]
    began_s = time.process_time()
    for client_id in range(1, count + 1):
        engine.request_lease(client_id, LeaseRequest(1, 2 * BLOCK_NBYTES))
    for client_id, grant in enumerate(grants[count:], start=count + 1):
        assert grant is not None
        engine.return_leases(client_id, [grant.lease_id])
    assert time.process_time() - began_s < 1.0
    engine.check()
