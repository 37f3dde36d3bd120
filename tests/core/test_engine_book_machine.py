"""The engine's book, compiled and in Python side by side: any events, by up to four clients, in any order.

What may happen next is drawn from the book's own records. What follows, the model says: :mod:`tests.model.pairs` compares each
outcome and the whole state, and what is refused must have changed nothing. What is asked for here besides does not depend on
how a book chooses: nobody waits for what could be had, who has nothing left is forgotten, and all memory is free at the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shmring.core.effects import Granted
from shmring.core.geometry import BLOCK_NBYTES, GENERATION_BITS, EngineBookLimits, Geometry
from shmring.core.messages import SLOT_HEADER_NBYTES, LeaseRequest, Memory, SlotRef
from shmring.core.states import EngineSlot, Lease, RequestEvent
from shmring.errors import CapacityError, LocalProtocolError, RemoteProtocolError
from tests.model.pairs import PairedEngineBook
from tests.model.records import ClientRecord, LeaseRecord
from tests.model.waiting import check_granted, check_waiting

# As test_books_together: a crowded machine and the measuring of coverage each can double what this takes.
pytestmark = pytest.mark.timeout(400)

MAX_CLIENTS = 4
MAX_DEPARTURES = 4  # in one example; else most steps would be about clients that come and go
MAX_LEASES = 3
MAX_INFLIGHT = 3
UNKNOWN = 999  # a lease, a request, or a reply that there is not

Machine = TypeVar("Machine", bound="BookMachine")
Choice = TypeVar("Choice")


def happens_to(choices: Callable[[Machine], Iterable[Choice]]) -> Callable[[Callable[[Machine, Any, Choice], None]], Any]:
    """Makes a rule of what happens to one of these; it does not happen as long as there is none."""

    def decorate(event: Callable[[Machine, Any, Choice], None]) -> Any:
        def happen(self: Machine, data: Any) -> None:
            event(self, data.draw, data.draw(st.sampled_from(list(choices(self)))))

        happen.__name__ = event.__name__
        return precondition(lambda self: any(True for _ in choices(self)))(rule(data=st.data())(happen))

    return decorate


def content(blocks: int) -> int:
    return blocks * BLOCK_NBYTES - SLOT_HEADER_NBYTES


def is_empty(lease: LeaseRecord) -> bool:
    return lease.live.units == lease.kept_blocks


class BookMachine(RuleBasedStateMachine):
    """Clients that come and go, their leases, and their requests."""

    def begin(self, geometry: Geometry, limits: EngineBookLimits) -> None:
        self.book = PairedEngineBook(geometry, limits)
        self.model = self.book.model
        self.clients = self.model.clients
        self.number = 0  # of tokens, tickets and clients
        self.departures = 0

    def happen(self, event: str, *arguments: Any) -> Any:
        """Both books do the same; None if they refuse it."""
        with contextlib.suppress(RemoteProtocolError, LocalProtocolError, CapacityError):
            return getattr(self.book, event)(*arguments)

    def next_number(self) -> int:
        self.number += 1
        return self.number

    # -- what there is -----------------------------------------------------------------------------------------------------

    def connected(self) -> list[ClientRecord]:
        return [client for client in self.clients.values() if client.connected]

    def who_may_go(self, *, is_dead: bool = False) -> list[ClientRecord]:
        if self.departures >= MAX_DEPARTURES:
            return []
        return [client for client in self.clients.values() if client.connected or is_dead]

    def requests(self) -> list[tuple[int, int]]:
        return [(client.client_id, request_id) for client in self.clients.values() for request_id in client.requests]

    def slots_in(self, state: EngineSlot) -> list[tuple[int, int]]:
        return [(c, n) for c, client in self.clients.items() for n, slot in client.slots.items() if slot.state is state]

    # -- clients -----------------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.clients) < MAX_CLIENTS)
    @rule(blocks=st.integers(0, 6))
    def connect(self, blocks: int) -> None:
        self.book.connect(self.next_number(), blocks * BLOCK_NBYTES)

    @happens_to(lambda self: self.who_may_go())
    def disconnect(self, draw: Any, client: ClientRecord) -> None:
        self.departures += 1
        self.book.disconnect(client.client_id)

    @happens_to(lambda self: self.who_may_go())
    def goodbye(self, draw: Any, client: ClientRecord) -> None:
        self.departures += 1
        kept = [draw(st.sets(st.sampled_from([*ids, UNKNOWN]))) for ids in (client.leases, client.replies, client.pins)]
        self.book.goodbye(client.client_id, *kept)

    @happens_to(lambda self: self.who_may_go(is_dead=True))
    def die(self, draw: Any, client: ClientRecord) -> None:
        self.departures += 1
        self.book.died(client.client_id)

    @happens_to(lambda self: self.clients.keys() - {client.client_id for client in self.connected()})
    def die_after_the_connection(self, draw: Any, client_id: int) -> None:
        self.book.died(client_id)

    # -- leases ------------------------------------------------------------------------------------------------------------

    @happens_to(connected)
    def request_lease(self, draw: Any, client: ClientRecord) -> None:
        memory: Memory = draw(st.sampled_from([0, 0, 0, 1])) if len(self.model.lendings) > 1 else 0
        most = self.book.geometry.leasable_blocks + 1
        blocks = draw(st.one_of(st.integers(1, 2), st.integers(0, most)))
        preferred, waits = draw(st.integers(0, most)), draw(st.sampled_from([True, True, False]))
        request = LeaseRequest(self.next_number(), blocks * BLOCK_NBYTES, preferred * BLOCK_NBYTES, memory, waits)
        self.happen("request_lease", client.client_id, request)
        for _ in range(draw(st.sampled_from([0, 0, 3]))):
            self.pass_moment()

    @happens_to(lambda self: [lease for client in self.connected() for lease in client.leases.values() if is_empty(lease)])
    def return_leases(self, draw: Any, lease: LeaseRecord) -> None:
        """Others of its client that are empty besides; now and then, any at all."""
        all_leases = [other for client in self.clients.values() for other in client.leases.values()]
        ids = [other.lease_id for other in all_leases if other.client_id == lease.client_id and is_empty(other)]
        if not draw(st.integers(0, 4)):
            ids = [*(other.lease_id for other in all_leases), UNKNOWN]
        self.happen("return_leases", lease.client_id, [lease.lease_id, *draw(st.lists(st.sampled_from(ids), max_size=2))])

    @precondition(lambda self: self.book.is_awaited())
    @rule()
    def moment_passes(self) -> None:
        self.pass_moment()

    def pass_moment(self) -> None:
        if self.book.is_awaited():
            self.book.moment_passed()
            check_waiting(self.model.host)

    # -- requests and slots --------------------------------------------------------------------------------------------------

    def draw_slot(self, draw: Any, client: ClientRecord, taken: Iterable[int] = (), number: int = 1) -> SlotRef | None:
        """A slot in a free part of a lease of this client."""
        free_in = {}
        for lease in client.leases.values():
            live = {block for start, blocks in lease.live.runs() for block in range(start, start + blocks)}
            free_in[lease.lease_id] = set(range(lease.start, lease.end)) - live - {*taken}
        places = [(lease_id, start) for lease_id, free in free_in.items() for start in sorted(free)]
        if not places:
            return None
        lease_id, start = draw(st.sampled_from(places))
        blocks = 1
        while start + blocks in free_in[lease_id] and draw(st.booleans()):
            blocks += 1
        return SlotRef(lease_id, start * BLOCK_NBYTES, content(blocks), client.last_generation + number)

    def draw_slots(self, draw: Any, client: ClientRecord, most: int) -> list[SlotRef]:
        slots: list[SlotRef] = []
        taken: set[int] = set()
        for number in range(1, 1 + draw(st.integers(0, most))):
            slot = self.draw_slot(draw, client, taken, 2 * number)
            if slot is not None:
                slots.append(slot)
                start = slot.offset // BLOCK_NBYTES
                taken |= {*range(start, start + (slot.nbytes + SLOT_HEADER_NBYTES) // BLOCK_NBYTES)}
        return slots

    @happens_to(lambda self: [client for client in self.connected() if len(client.requests) < MAX_INFLIGHT])
    def submit(self, draw: Any, client: ClientRecord) -> None:
        self.submit_slots(draw, client, self.draw_slots(draw, client, 3))

    def submit_slots(self, draw: Any, client: ClientRecord, slots: list[SlotRef]) -> None:
        """As a new request; if it is refused nothing follows."""
        request_id = client.last_request_id + 1
        self.happen("submit", client.client_id, request_id, slots)
        if request_id in client.requests and draw(st.booleans()):
            self.book.claim(client.client_id, request_id)

    @happens_to(lambda self: [client for client in self.connected() if client.leases])
    def forge(self, draw: Any, client: ClientRecord) -> None:
        """One slot is changed, or the request's number is an old one. What is sound in spite of it is taken."""
        slots = self.draw_slots(draw, client, 2)
        request_id = client.last_request_id + 1
        if slots and draw(st.integers(0, 3)):
            slot = slots[-1]
            forgeries = {
                "generation": [*(client.client_id << GENERATION_BITS | draw(st.integers(0, 9)),), client.last_generation],
                "lease_id": range(60),
                "offset": [slot.offset + draw(st.integers(1, BLOCK_NBYTES - 1)), *range(0, 40 * BLOCK_NBYTES, BLOCK_NBYTES)],
                "nbytes": [slot.nbytes + self.book.geometry.leasable_blocks * BLOCK_NBYTES, 2**62],
            }
            forgeries["generation"] += [slot.generation + (1 << GENERATION_BITS), slots[0].generation]
            field = draw(st.sampled_from([*forgeries]))
            slots[-1] = msgspec.structs.replace(slot, **{field: draw(st.sampled_from(forgeries[field]))})
        else:
            request_id = draw(st.integers(0, request_id))
        self.happen("submit", client.client_id, request_id, slots)

    @happens_to(requests)
    def claim(self, draw: Any, request: tuple[int, int]) -> None:
        """One that waits; one that runs already is refused."""
        self.happen("claim", *request)

    @happens_to(requests)
    def end(self, draw: Any, request: tuple[int, int]) -> None:
        self.happen("end", *request, draw(st.sampled_from([RequestEvent.FINISH, RequestEvent.ERROR, RequestEvent.DEADLINE])))
        assert request in self.requests() or not self.book.end(*request, RequestEvent.ERROR)

    @happens_to(lambda self: [client for client in self.connected() if client.requests])
    def abort(self, draw: Any, client: ClientRecord) -> None:
        self.book.abort(client.client_id, draw(st.sampled_from([*client.requests, UNKNOWN])))

    @happens_to(lambda self: sorted({client_id for client_id, _ in self.slots_in(EngineSlot.CLAIMED)}))
    def release_slots(self, draw: Any, client_id: int) -> None:
        claimed = [number for owner, number in self.slots_in(EngineSlot.CLAIMED) if owner == client_id]
        numbers = draw(st.lists(st.sampled_from(claimed), min_size=1, unique=True))
        self.book.release_slots(client_id, numbers, draw(st.sets(st.sampled_from(claimed))))

    @happens_to(lambda self: self.slots_in(EngineSlot.DRAINING))
    def last_view_gone(self, draw: Any, slot: tuple[int, int]) -> None:
        self.book.last_view_gone(*slot)

    # -- what holds after each event -----------------------------------------------------------------------------------------

    @invariant()
    def nobody_waits_for_a_lease_that_could_be_granted(self) -> None:
        for lending in self.model.lendings:
            check_granted(lending)

    @invariant()
    def nobody_waits_for_a_reply_that_could_be_granted(self) -> None:
        assert self.model.cancel_reply(0) == [], "nobody has that ticket, and somebody is served"

    @invariant()
    def what_is_proven_unused_is_free(self) -> None:
        for client in self.clients.values():
            for lease in client.leases.values():
                is_unused = is_empty(lease) and (client.dead or lease.given_up)
                assert client.connected or not is_unused
            has_something = client.leases or client.slots or client.replies or client.pins
            assert client.connected or has_something, "who has nothing left was not forgotten"
            assert not (client.dead and client.replies.keys() - client.unsent_replies), "the dead read no replies"

    def teardown(self) -> None:
        if not hasattr(self, "book"):
            return
        for client_id in list(self.clients):
            self.book.died(client_id)
        for client_id, number in self.slots_in(EngineSlot.CLAIMED):
            self.book.release_slots(client_id, [number], ())
        for client_id, number in self.slots_in(EngineSlot.DRAINING):
            self.book.last_view_gone(client_id, number)
        for client_id, client in list(self.clients.items()):
            for generation in list(client.unsent_replies):
                self.book.discard_reply(client_id, generation)
        self.book.drop_untaken([kept.generation for kept in self.book.untaken()])
        assert self.book.clients == {}
        for lending in self.book.lendings:
            assert [lending.leased_nbytes(state) for state in Lease] == [0, 0, 0]
            assert (lending._window, lending.waiting_lease_requests) == (None, 0)
        geometry = self.book.geometry
        kept = self.book.kept
        assert self.book.reply_free_nbytes == geometry.reply_blocks * BLOCK_NBYTES
        assert self.book.host.free_nbytes == (geometry.leasable_blocks - kept.blocks) * BLOCK_NBYTES
        assert len(kept.unpinned) == len(kept), "what a dead client had pinned is pinned for ever"
        self.book.connect(self.next_number(), BLOCK_NBYTES)
        self.book.return_leases(self.number, list(self.clients[self.number].leases))
        [granted] = self.book.request_lease(self.number, LeaseRequest(1, geometry.leasable_blocks * BLOCK_NBYTES))
        assert isinstance(granted, Granted), "what is kept is in somebody's way"


class EngineBookMachine(BookMachine):
    """Their replies besides, and a second memory."""

    @initialize(
        leases=st.one_of(st.just([]), st.lists(st.integers(1, 3), min_size=3, max_size=3)),
        leasable=st.integers(2, 12),
        reply=st.integers(1, 6),
        device=st.sampled_from([0, 0, 6]),
    )
    def create(self, leases: list[int], leasable: int, reply: int, device: int) -> None:
        """A slab that is free, or one that is wholly lent to three clients, with a fourth that has nothing."""
        limits = EngineBookLimits(
            max_lease_blocks=4, quota_blocks=6, max_leases=MAX_LEASES, max_inflight=MAX_INFLIGHT, device_quota_blocks=4
        )
        self.begin(Geometry(leasable_blocks=sum(leases) or leasable, reply_blocks=reply, device_blocks=device), limits)
        for blocks in [*leases, 1] if leases else [2, 2]:
            self.connect(blocks)

    @happens_to(BookMachine.connected)
    def acquire_reply(self, draw: Any, client: ClientRecord) -> None:
        nbytes = content(draw(st.integers(1, self.book.geometry.reply_blocks + 1)))
        request_id = draw(st.sampled_from([-1, *client.requests]))
        if self.happen("acquire_reply", client.client_id, nbytes, request_id) is None:
            self.happen("queue_reply", client.client_id, self.next_number(), nbytes, request_id)

    @happens_to(lambda self: [client for client in self.connected() if client.requests])
    def replies_read(self, draw: Any, client: ClientRecord) -> None:
        ids = [request_id for request_id, request in client.requests.items() for _ in range(request.unread_replies)]
        read = [draw(st.sampled_from(ids))] if ids else []
        read += draw(st.sampled_from([[], [], [], ids[:1], [*client.requests][:1], [UNKNOWN]]))
        self.happen("replies_read", client.client_id, read)

    @precondition(lambda self: self.model._reply_wants or self.model._may_overtake)
    @rule(may_overtake=st.booleans())
    def let_overtake(self, may_overtake: bool) -> None:
        self.book.let_overtake(may_overtake)

    @happens_to(lambda self: self.model._reply_wants)
    def cancel_reply(self, draw: Any, ticket: int) -> None:
        self.book.cancel_reply(ticket)

    @happens_to(lambda self: [(client, g) for client in self.clients.values() for g in sorted(client.unsent_replies)])
    def finish_reply(self, draw: Any, reply: tuple[ClientRecord, int]) -> None:
        """The engine has written a reply slot: it sends it, unless nobody is there to read it."""
        client, generation = reply
        is_sent = client.connected and draw(st.booleans())
        self.happen("reply_sent" if is_sent else "discard_reply", client.client_id, generation)

    @happens_to(lambda self: [client for client in self.connected() if client.replies])
    def release_replies(self, draw: Any, client: ClientRecord) -> None:
        """Its own as a rule; or once more, or one that it never had, or has not yet."""
        own = [generation for generation in client.replies if generation not in client.unsent_replies]
        any_other = [*range(self.model._next_reply_generation + 1), 2**64 - 1]
        some = st.sampled_from(own) | st.sampled_from(any_other) if own else st.sampled_from(any_other)
        self.happen("release_replies", client.client_id, draw(st.lists(some, max_size=3)))


TestEngineBookMachine = EngineBookMachine.TestCase
TestEngineBookMachine.settings = settings(stateful_step_count=100)
