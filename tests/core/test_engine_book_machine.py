"""The engine's book, compiled and in Python side by side, against a third: who owns each block, in one dict.

The model does not predict *where* the book puts a lease, nor whom it recalls for a window. It knows who waits in which
order, what may be granted and what must have been granted, and it mirrors slots, requests and replies exactly. At the
end of each example every client dies and every claim is released, and the slab must be wholly free.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shmring.core.effects import (
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
from shmring.core.geometry import BLOCK_NBYTES, GENERATION_BITS, EngineBookLimits, Geometry
from shmring.core.messages import HOST_MEMORY, SLOT_HEADER_NBYTES, LeaseGrant, SlotRef
from shmring.core.states import EngineSlot, Lease, RequestEvent
from shmring.errors import CapacityError, RemoteProtocolError
from tests.model.pairs import PairedEngineBook
from tests.model.state import plain
from tests.model.waiting import check_waiting

# As test_books_together: a crowded machine and the measuring of coverage each can double what this takes.
pytestmark = pytest.mark.timeout(400)

MAX_CLIENTS = 4
MAX_DEPARTURES = 4  # in one example; else most steps would be about clients that come and go
QUOTA = 6
MAX_LEASES = 3
MAX_LEASE = 4
MAX_INFLIGHT = 3


def longest_run(blocks: Iterable[int]) -> int:
    longest = length = 0
    last = -2
    for block in sorted(blocks):
        length = length + 1 if block == last + 1 else 1
        longest, last = max(longest, length), block
    return longest


@dataclasses.dataclass
class ModelLease:
    start: int
    blocks: int
    recalled: bool = False
    given_up: bool = False

    @property
    def range(self) -> set[int]:
        return set(range(self.start, self.start + self.blocks))


@dataclasses.dataclass
class ModelSlot:
    lease_id: int
    start: int
    blocks: int
    state: EngineSlot

    @property
    def range(self) -> set[int]:
        return set(range(self.start, self.start + self.blocks))


@dataclasses.dataclass
class ModelClient:
    connected: bool = True
    dead: bool = False
    leases: dict[int, ModelLease] = dataclasses.field(default_factory=dict)
    slots: dict[int, ModelSlot] = dataclasses.field(default_factory=dict)
    requests: dict[int, tuple[bool, list[int]]] = dataclasses.field(default_factory=dict)  # running?, generations
    replies: dict[int, ReplySlot] = dataclasses.field(default_factory=dict)
    unsent: set[int] = dataclasses.field(default_factory=set)
    last_n: int = 0
    last_request: int = -1
    last_token: int = 0

    @property
    def held(self) -> int:
        return sum(lease.blocks for lease in self.leases.values())

    @property
    def reply_held(self) -> int:
        return sum(slot.blocks for slot in self.replies.values())

    def live_in(self, lease_id: int) -> set[int]:
        return {block for slot in self.slots.values() if slot.lease_id == lease_id for block in slot.range}

    def provable(self) -> list[int]:
        """The leases that nobody can be using: their holder has gone, and no claim of ours reads them."""
        return [
            lease_id
            for lease_id, lease in self.leases.items()
            if not self.connected and (self.dead or lease.given_up) and not self.live_in(lease_id)
        ]


T = TypeVar("T")


class EngineBookMachine(RuleBasedStateMachine):
    """Events in any order, by up to four clients; their effects are checked one by one."""

    @initialize(
        leases=st.one_of(st.just([]), st.lists(st.integers(1, 3), min_size=3, max_size=3)),
        leasable=st.integers(2, 12),
        reply=st.integers(1, 6),
    )
    def create(self, leases: list[int], leasable: int, reply: int) -> None:
        """A slab that is free, or one that is wholly lent to three clients, with a fourth that has nothing."""
        leasable = sum(leases) or leasable
        self.geometry = Geometry(leasable_blocks=leasable, reply_blocks=reply)
        self.book = PairedEngineBook(self.geometry, EngineBookLimits(MAX_LEASE, QUOTA, MAX_LEASES, MAX_INFLIGHT))
        self.leasable = set(range(1, 1 + leasable))
        self.reserve = set(range(1 + leasable, 1 + leasable + reply))
        self.clients: dict[int, ModelClient] = {}
        self.wants: dict[int, tuple[int, int, int, bool]] = {}  # token, blocks, preferred, waits; by client, in order
        self.reply_wants: dict[int, tuple[int, int]] = {}  # by ticket: client, blocks; in order of arrival
        self.next_client = 1
        self.may_overtake = False
        self.next_ticket = 1
        self.last_reply = 0  # the newest generation
        self.departures = 0
        for blocks in [*leases, 1] if leases else [2, 2]:
            self.connect(blocks)

    # -- the model ---------------------------------------------------------------------------------------------------------

    def free(self) -> set[int]:
        held = (lease.range for client in self.clients.values() for lease in client.leases.values())
        return self.leasable.difference(*held)

    def free_replies(self) -> set[int]:
        slots = (slot for client in self.clients.values() for slot in client.replies.values())
        return self.reserve.difference(*(range(slot.start, slot.start + slot.blocks) for slot in slots))

    def over_quota(self, client_id: int, blocks: int) -> bool:
        client = self.clients[client_id]
        others = [c for i, c in self.clients.items() if i != client_id and (c.connected or c.leases)]
        return len(client.leases) >= MAX_LEASES or bool(others and client.leases and client.held + blocks > QUOTA)

    def reply_way(self, client_id: int, blocks: int) -> str:
        """How a reply may go, as far as shares are concerned."""
        client, left = self.clients[client_id], len(self.free_replies()) - blocks
        passing = sum(slot.blocks for slot in client.replies.values() if slot.is_copied_out)
        if client.reply_held + blocks <= left:
            return "stays"
        return "waits" if passing and passing + blocks > left else "passes"

    def reply_goes_before(self, other: tuple[int, int], client_id: int) -> bool:
        """Whether a reply that waits goes before a client's later one."""
        return not self.may_overtake and (self.reply_way(*other) != "waits" or other[0] == client_id)

    def take(self, grant: LeaseGrant, client_id: int) -> None:
        lease = ModelLease(grant.offset // BLOCK_NBYTES, grant.nbytes // BLOCK_NBYTES)
        assert (grant.offset, grant.nbytes) == (lease.start * BLOCK_NBYTES, lease.blocks * BLOCK_NBYTES)
        assert lease.range <= self.free()
        self.clients[client_id].leases[grant.lease_id] = lease

    def take_reply(self, client_id: int, blocks: int, slot: ReplySlot) -> None:
        assert slot.blocks == blocks
        assert set(range(slot.start, slot.start + blocks)) <= self.free_replies()
        assert self.reply_way(client_id, blocks) == ("passes" if slot.is_copied_out else "stays")
        self.clients[client_id].replies[slot.generation] = slot
        self.last_reply = max(self.last_reply, slot.generation)
        self.clients[client_id].unsent.add(slot.generation)

    def carry_out(self, effects: Sequence[EngineEffect], expected: Sequence[EngineEffect] = ()) -> None:
        """Applies effects to the model. Those on slots and requests must be the expected ones; the rest must be sound."""
        own = [effect for effect in effects if isinstance(effect, Released | RequestAborted)]
        assert own == list(expected)
        for effect in effects:
            match effect:
                case Granted(client_id, grant):
                    token, blocks, preferred, _ = self.wants.pop(client_id)
                    assert grant.token == token
                    assert grant.nbytes in {blocks * BLOCK_NBYTES, preferred * BLOCK_NBYTES}
                    assert not self.over_quota(client_id, grant.nbytes // BLOCK_NBYTES)
                    self.take(grant, client_id)
                case Recalled(client_id, lease_ids):
                    assert self.clients[client_id].connected
                    for lease_id in lease_ids:
                        lease = self.clients[client_id].leases[lease_id]
                        assert not lease.recalled
                        lease.recalled = True
                case ReplyGranted(ticket, slot):
                    client_id, blocks = self.reply_wants.pop(ticket)
                    self.take_reply(client_id, blocks, slot)
                case Reclaimed(client_id, nbytes):
                    client = self.clients[client_id]
                    freed = [client.leases.pop(lease_id) for lease_id in client.provable()]
                    assert nbytes == sum(lease.blocks for lease in freed) * BLOCK_NBYTES > 0
                case ClientGone(client_id):
                    client = self.clients.pop(client_id)
                    assert not client.connected
                    assert not client.leases
                    assert not client.replies

    # -- drawing -----------------------------------------------------------------------------------------------------------

    def connected(self) -> list[int]:
        return [client_id for client_id, client in self.clients.items() if client.connected]

    def draw_client(self, data: Any) -> tuple[int, ModelClient]:
        client_id = data.draw(st.sampled_from(self.connected()), label="client")
        return client_id, self.clients[client_id]

    def draw_from(self, data: Any, items: Iterable[T]) -> T:
        return data.draw(st.sampled_from(list(items)))  # type: ignore[no-any-return]

    def slots_in(self, *states: EngineSlot) -> list[tuple[int, int]]:
        return [(c, g) for c, client in self.clients.items() for g, slot in client.slots.items() if slot.state in states]

    def requests(self, running: bool) -> list[tuple[int, int]]:
        return [
            (c, r)
            for c, client in self.clients.items()
            for r, (is_running, _) in client.requests.items()
            if is_running == running
        ]

    # -- clients -----------------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.clients) < MAX_CLIENTS)
    @rule(blocks=st.integers(0, 6))
    def connect(self, blocks: int) -> None:
        client_id, self.next_client = self.next_client, self.next_client + 1
        wanted = min(max(1, blocks), MAX_LEASE)
        waited = any(waits for *_, waits in self.wants.values())
        wanted = 0 if waited else min(wanted, longest_run(self.free()))
        grant = self.book.connect(client_id, blocks * BLOCK_NBYTES)
        self.clients[client_id] = ModelClient()
        assert (grant is not None) == (wanted > 0)
        if grant is not None:
            assert (grant.token, grant.nbytes) == (0, wanted * BLOCK_NBYTES)
            self.take(grant, client_id)

    def leave(self, client_id: int) -> list[EngineEffect]:
        """The model's half of a disconnect; returns the effects it expects on requests."""
        self.departures += 1
        client = self.clients[client_id]
        expected: list[EngineEffect] = [RequestAborted(client_id, r, running) for r, (running, _) in client.requests.items()]
        client.slots = {g: slot for g, slot in client.slots.items() if slot.state is not EngineSlot.PUBLISHED}
        client.requests.clear()
        client.connected = False
        self.wants.pop(client_id, None)
        self.reply_wants = {ticket: want for ticket, want in self.reply_wants.items() if want[0] != client_id}
        return expected

    @precondition(lambda self: self.connected() and self.departures < MAX_DEPARTURES)
    @rule(data=st.data())
    def disconnect(self, data: Any) -> None:
        client_id, _ = self.draw_client(data)
        expected = self.leave(client_id)
        self.carry_out(self.book.disconnect(client_id), expected)

    @precondition(lambda self: self.connected() and self.departures < MAX_DEPARTURES)
    @rule(data=st.data())
    def goodbye(self, data: Any) -> None:
        client_id, client = self.draw_client(data)
        kept = data.draw(st.sets(st.sampled_from([*client.leases, 999])), label="kept leases")
        kept_replies = data.draw(st.sets(st.sampled_from([*client.replies, 999])), label="kept replies")
        for lease_id, lease in client.leases.items():
            lease.given_up = lease_id not in kept
        client.replies = {g: slot for g, slot in client.replies.items() if g in kept_replies | client.unsent}
        expected = self.leave(client_id)
        self.carry_out(self.book.goodbye(client_id, kept, kept_replies), expected)

    @precondition(lambda self: self.clients and self.departures < MAX_DEPARTURES)
    @rule(data=st.data())
    def die(self, data: Any) -> None:
        client_id = self.draw_from(data, self.clients)
        self.kill(client_id)

    @precondition(lambda self: len(self.connected()) < len(self.clients))
    @rule(data=st.data())
    def die_after_the_connection(self, data: Any) -> None:
        self.kill(self.draw_from(data, self.clients.keys() - set(self.connected())))

    def kill(self, client_id: int) -> None:
        client = self.clients[client_id]
        expected = self.leave(client_id) if client.connected else []
        client.dead = True
        client.replies = {g: slot for g, slot in client.replies.items() if g in client.unsent}
        self.carry_out(self.book.died(client_id), expected)
        assert client_id in self.clients or self.book.died(client_id) == []

    # -- leases ------------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.connected())
    @rule(
        data=st.data(),
        preferred=st.integers(0, 14),
        waits=st.sampled_from([True, True, False]),
        moments=st.sampled_from([0, 0, 3]),
    )
    def request_lease(self, data: Any, preferred: int, waits: bool, moments: int) -> None:
        client_id, client = self.draw_client(data)
        blocks = data.draw(st.one_of(st.integers(1, 2), st.integers(1, len(self.leasable) + 1)), label="blocks")
        client.last_token += 1
        if blocks > len(self.leasable):
            self.refuses(lambda: self.book.request_lease(client_id, client.last_token, blocks * BLOCK_NBYTES, 0))
            return
        self.wants[client_id] = (client.last_token, blocks, min(max(blocks, preferred), len(self.leasable)), waits)
        nbytes, preferred_nbytes = blocks * BLOCK_NBYTES, preferred * BLOCK_NBYTES
        effects = self.book.request_lease(client_id, client.last_token, nbytes, preferred_nbytes, HOST_MEMORY, waits)
        for effect in effects:
            if isinstance(effect, Recalled) and self.book.host._window is None:
                assert not waits
                live = [self.clients[effect.client_id].live_in(lease_id) for lease_id in effect.lease_ids]
                assert not any(live), "a wish recalls a lease that is in use"
        self.carry_out(effects)
        for _ in range(moments):
            self.pass_moment()

    @precondition(lambda self: self.wants)
    @rule(data=st.data())
    def withdraw_request(self, data: Any) -> None:
        client_id = self.draw_from(data, [*self.wants, *self.connected()])
        client = self.clients[client_id]
        client.last_token += 1
        self.wants.pop(client_id, None)
        self.carry_out(self.book.request_lease(client_id, client.last_token, 0, 0))

    @precondition(lambda self: any(self.clients[c].leases for c in self.connected()))
    @rule(data=st.data())
    def return_leases(self, data: Any) -> None:
        client_id = self.draw_from(data, [c for c in self.connected() if self.clients[c].leases])
        client = self.clients[client_id]
        lease_ids = data.draw(st.lists(st.sampled_from(list(client.leases)), min_size=1, max_size=3), label="leases")
        if any(client.live_in(lease_id) for lease_id in lease_ids):
            self.refuses(lambda: self.book.return_leases(client_id, lease_ids))
            return
        for lease_id in set(lease_ids):
            del client.leases[lease_id]
        self.carry_out(self.book.return_leases(client_id, lease_ids))

    @precondition(lambda self: any(waits for *_, waits in self.wants.values()))
    @rule()
    def moment_passes(self) -> None:
        self.pass_moment()

    def pass_moment(self) -> None:
        if self.book.is_awaited():
            self.carry_out(self.book.moment_passed())
            check_waiting(self.book.host)

    # -- requests and slots --------------------------------------------------------------------------------------------------

    def draw_slot(self, data: Any, client_id: int, taken: set[int]) -> tuple[SlotRef, ModelSlot] | None:
        """A slot in a free part of a lease of this client."""
        client = self.clients[client_id]
        places = [
            (lease_id, block)
            for lease_id, lease in client.leases.items()
            for block in lease.range - client.live_in(lease_id) - taken
        ]
        if not places:
            return None
        lease_id, start = self.draw_from(data, sorted(places))
        free = client.leases[lease_id].range - client.live_in(lease_id) - taken
        blocks = 1
        while start + blocks in free and data.draw(st.booleans(), label="longer"):
            blocks += 1
        client.last_n += data.draw(st.integers(1, 3), label="generation step")
        nbytes = blocks * BLOCK_NBYTES - SLOT_HEADER_NBYTES
        ref = SlotRef(lease_id, start * BLOCK_NBYTES, nbytes, client_id << GENERATION_BITS | client.last_n)
        return ref, ModelSlot(lease_id, start, blocks, EngineSlot.PUBLISHED)

    @precondition(lambda self: any(len(self.clients[c].requests) < MAX_INFLIGHT for c in self.connected()))
    @rule(data=st.data(), count=st.integers(0, 3), claim=st.booleans())
    def submit(self, data: Any, count: int, claim: bool) -> None:
        client_id = self.draw_from(data, [c for c in self.connected() if len(self.clients[c].requests) < MAX_INFLIGHT])
        client = self.clients[client_id]
        slots: dict[int, ModelSlot] = {}
        refs: list[SlotRef] = []
        for _ in range(count):
            drawn = self.draw_slot(data, client_id, {block for slot in slots.values() for block in slot.range})
            if drawn is not None:
                refs.append(drawn[0])
                slots[drawn[0].generation] = drawn[1]
        client.last_request += 1
        self.book.submit(client_id, client.last_request, refs)
        client.slots |= slots
        client.requests[client.last_request] = (False, list(slots))
        if claim:
            self.take_up(client_id, client.last_request)

    def refuses(self, event: Callable[[], object]) -> None:
        before = plain(self.book)
        with pytest.raises(RemoteProtocolError):
            event()
        assert plain(self.book) == before

    @precondition(lambda self: any(self.clients[c].leases for c in self.connected()))
    @rule(data=st.data(), beside=st.booleans())
    def submit_a_forgery(self, data: Any, beside: bool) -> None:
        client_id = self.draw_from(data, [c for c in self.connected() if self.clients[c].leases])
        client = self.clients[client_id]
        last_n = client.last_n
        good = self.draw_slot(data, client_id, set()) if beside else None
        taken = good[1].range if good else set()
        bad = self.draw_slot(data, client_id, taken)
        if bad is None:
            client.last_n = last_n
            return
        ref = bad[0]
        old = client_id << GENERATION_BITS | data.draw(st.integers(0, last_n), label="old")
        not_free = sorted(set(range(-1, 40)) - (client.leases[ref.lease_id].range - client.live_in(ref.lease_id) - taken))
        changes = self.draw_from(
            data,
            [
                {"generation": old},
                {"generation": ref.generation + (1 << GENERATION_BITS)},
                {"generation": client.last_n},
                {"lease_id": self.draw_from(data, sorted(set(range(60)) - set(client.leases)))},
                {"offset": ref.offset + data.draw(st.integers(1, BLOCK_NBYTES - 1))},
                {"offset": max(0, self.draw_from(data, not_free)) * BLOCK_NBYTES},
                {"nbytes": ref.nbytes + len(self.leasable) * BLOCK_NBYTES},
                {"nbytes": 2**62},
            ],
        )
        forged = SlotRef(**{name: getattr(ref, name) for name in ref.__struct_fields__} | changes)
        self.refuses(lambda: self.book.submit(client_id, client.last_request + 1, [*([good[0]] if good else []), forged]))
        client.last_n = last_n

    @precondition(lambda self: any(self.clients[c].last_request >= 0 for c in self.connected()))
    @rule(data=st.data())
    def submit_an_old_request(self, data: Any) -> None:
        client_id = self.draw_from(data, [c for c in self.connected() if self.clients[c].last_request >= 0])
        request_id = data.draw(st.integers(0, self.clients[client_id].last_request))
        self.refuses(lambda: self.book.submit(client_id, request_id, []))

    @precondition(lambda self: any(len(self.clients[c].requests) == MAX_INFLIGHT for c in self.connected()))
    @rule(data=st.data())
    def submit_too_many(self, data: Any) -> None:
        client_id = self.draw_from(data, [c for c in self.connected() if len(self.clients[c].requests) == MAX_INFLIGHT])
        self.refuses(lambda: self.book.submit(client_id, self.clients[client_id].last_request + 1, []))

    @precondition(lambda self: self.requests(running=False))
    @rule(data=st.data())
    def claim(self, data: Any) -> None:
        self.take_up(*self.draw_from(data, self.requests(running=False)))

    def take_up(self, client_id: int, request_id: int) -> None:
        client = self.clients[client_id]
        _, generations = client.requests[request_id]
        client.requests[request_id] = (True, generations)
        self.book.claim(client_id, request_id)
        for generation in generations:
            client.slots[generation].state = EngineSlot.CLAIMED

    @precondition(lambda self: self.requests(running=False) + self.requests(running=True))
    @rule(data=st.data(), event=st.sampled_from([RequestEvent.FINISH, RequestEvent.ERROR, RequestEvent.DEADLINE]))
    def end(self, data: Any, event: RequestEvent) -> None:
        waiting = self.requests(running=False) if event is not RequestEvent.FINISH else []
        candidates = self.requests(running=True) + waiting
        if not candidates:
            return
        client_id, request_id = self.draw_from(data, candidates)
        running, generations = self.clients[client_id].requests.pop(request_id)
        assert self.book.end(client_id, request_id, event)
        assert not self.book.end(client_id, request_id, event)
        if not running:
            for generation in generations:
                self.clients[client_id].slots[generation].state = EngineSlot.CLAIMED

    @precondition(lambda self: any(self.clients[c].requests for c in self.connected()))
    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        client_id = self.draw_from(data, [c for c in self.connected() if self.clients[c].requests])
        client = self.clients[client_id]
        request_id = self.draw_from(data, [*client.requests, 999])
        if request_id not in client.requests:
            assert self.book.abort(client_id, request_id) == []
            return
        running, generations = client.requests.pop(request_id)
        released = [g for g in generations if g in client.slots and client.slots[g].state is EngineSlot.PUBLISHED]
        expected: list[EngineEffect] = [RequestAborted(client_id, request_id, running)]
        if released:
            expected.append(Released(client_id, tuple(released)))
        for generation in released:
            del client.slots[generation]
        self.carry_out(self.book.abort(client_id, request_id), expected)

    def expected_release(self, client_id: int, released: Sequence[int]) -> list[EngineEffect]:
        return [Released(client_id, tuple(released))] if released and self.clients[client_id].connected else []

    @precondition(lambda self: self.slots_in(EngineSlot.CLAIMED))
    @rule(data=st.data())
    def release_slots(self, data: Any) -> None:
        client_id, _ = self.draw_from(data, self.slots_in(EngineSlot.CLAIMED))
        client = self.clients[client_id]
        claimed = [g for g, slot in client.slots.items() if slot.state is EngineSlot.CLAIMED]
        generations = data.draw(st.lists(st.sampled_from(claimed), min_size=1, unique=True), label="released")
        viewed = data.draw(st.sets(st.sampled_from(claimed)), label="viewed")
        for generation in generations:
            if generation in viewed:
                client.slots[generation].state = EngineSlot.DRAINING
            else:
                del client.slots[generation]
        expected = self.expected_release(client_id, [g for g in generations if g not in viewed])
        self.carry_out(self.book.release_slots(client_id, generations, viewed), expected)

    @precondition(lambda self: self.slots_in(EngineSlot.DRAINING))
    @rule(data=st.data())
    def last_view_gone(self, data: Any) -> None:
        self.drain(*self.draw_from(data, self.slots_in(EngineSlot.DRAINING)))

    def drain(self, client_id: int, generation: int) -> None:
        del self.clients[client_id].slots[generation]
        self.carry_out(self.book.last_view_gone(client_id, generation), self.expected_release(client_id, [generation]))

    # -- replies -------------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.connected())
    @rule(data=st.data())
    def acquire_reply(self, data: Any) -> None:
        client_id, _ = self.draw_client(data)
        blocks = data.draw(st.integers(1, len(self.reserve) + 1), label="blocks")
        nbytes = blocks * BLOCK_NBYTES - SLOT_HEADER_NBYTES
        if blocks > len(self.reserve):
            with pytest.raises(CapacityError):
                self.book.acquire_reply(client_id, nbytes)
            return
        overtakes = any(self.reply_goes_before(want, client_id) for want in self.reply_wants.values())
        fits = longest_run(self.free_replies()) >= blocks and self.reply_way(client_id, blocks) != "waits"
        slot = self.book.acquire_reply(client_id, nbytes)
        assert (slot is not None) == (fits and not overtakes)
        if slot is not None:
            self.take_reply(client_id, blocks, slot)
        else:
            self.book.queue_reply(client_id, self.next_ticket, nbytes)
            self.reply_wants[self.next_ticket] = (client_id, blocks)
            self.next_ticket += 1

    @rule(may_overtake=st.booleans())
    def let_overtake(self, may_overtake: bool) -> None:
        self.may_overtake = may_overtake
        self.carry_out(self.book.let_overtake(may_overtake))

    @precondition(lambda self: self.reply_wants)
    @rule(data=st.data())
    def cancel_reply(self, data: Any) -> None:
        ticket = self.draw_from(data, self.reply_wants)
        del self.reply_wants[ticket]
        self.carry_out(self.book.cancel_reply(ticket))

    @precondition(lambda self: any(client.unsent for client in self.clients.values()))
    @rule(data=st.data(), sent=st.booleans())
    def finish_reply(self, data: Any, sent: bool) -> None:
        self.settle_reply(
            *self.draw_from(data, [(c, g) for c, client in self.clients.items() for g in client.unsent]), sent=sent
        )

    def settle_reply(self, client_id: int, generation: int, *, sent: bool) -> None:
        """The engine has written a reply slot: it sends it, unless nobody is there to read it."""
        client = self.clients[client_id]
        client.unsent.remove(generation)
        if sent and client.connected:
            self.book.reply_sent(client_id, generation)
            return
        del client.replies[generation]
        self.carry_out(self.book.discard_reply(client_id, generation))

    @precondition(lambda self: any(self.clients[c].replies for c in self.connected()))
    @rule(data=st.data(), forged=st.booleans())
    def release_replies(self, data: Any, forged: bool) -> None:
        client_id = self.draw_from(data, [c for c in self.connected() if self.clients[c].replies])
        client = self.clients[client_id]
        sent = sorted(set(client.replies) - client.unsent)
        held = {generation for other in self.clients.values() for generation in other.replies}
        released = sorted(set(range(1, self.last_reply + 1)) - held)
        generations = data.draw(
            st.lists(st.sampled_from(sent + released), max_size=min(3, len(self.reserve))) if sent + released else st.just([])
        )
        if forged:
            others = sorted((held - set(sent)) | {0, self.last_reply + 1, 2**64 - 1})
            self.refuses(lambda: self.book.release_replies(client_id, [*generations, self.draw_from(data, others)]))
            return
        stale = self.book.stale_releases
        fresh = set(generations) & set(sent)
        for generation in fresh:
            del client.replies[generation]
        self.carry_out(self.book.release_replies(client_id, generations))
        assert self.book.stale_releases - stale == len(generations) - len(fresh)

    # -- what holds after each event -----------------------------------------------------------------------------------------

    @invariant()
    def the_book_is_sound(self) -> None:
        self.book.check()

    @invariant()
    def the_book_is_the_models(self) -> None:
        assert self.book.clients.keys() == self.clients.keys()
        for client_id, client in self.clients.items():
            record = self.book.clients[client_id]
            assert {i: (lease.start, lease.blocks) for i, lease in record.leases.items()} == {
                i: (lease.start, lease.blocks) for i, lease in client.leases.items()
            }
            assert {g: (slot.start, slot.blocks, slot.state) for g, slot in record.slots.items()} == {
                g: (slot.start, slot.blocks, slot.state) for g, slot in client.slots.items()
            }
            assert list(record.requests) == sorted(client.requests)
            assert record.replies == client.replies
            assert not client.provable(), "what is proven unused was not freed"
            assert client.connected or client.leases or client.replies, "who has nothing left was not forgotten"
        assert list(self.book.host._wants) == list(self.wants)
        assert list(self.book._reply_wants) == list(self.reply_wants)
        assert self.book.host.free_nbytes == len(self.free()) * BLOCK_NBYTES
        assert self.book.reply_free_nbytes == len(self.free_replies()) * BLOCK_NBYTES

    @invariant()
    def nobody_waits_for_a_lease_that_could_be_granted(self) -> None:
        window = self.book.host._window
        reserved = set(range(window.start, window.end)) if window is not None else set()
        eligible = [client_id for client_id, (_, blocks, *_) in self.wants.items() if not self.over_quota(client_id, blocks)]
        rests = {client_id for client_id, want in self.book.host._wants.items() if want.rest_moments}
        waiting = [client_id for client_id in eligible if self.wants[client_id][3] and client_id not in rests]
        if waiting:  # else a window may be left of one who was alone until just now
            assert window is not None, "the first who can't be served has no window"
            assert window.client_id in waiting
        assert window is None or window.blocks == self.wants[window.client_id][1]
        for client_id in eligible:
            usable = self.free() if window is not None and window.client_id == client_id else self.free() - reserved
            assert longest_run(usable) < self.wants[client_id][1]
        for client_id, client in self.clients.items():
            is_owner = window is not None and window.client_id == client_id
            for lease in client.leases.values():
                assert lease.recalled or is_owner or not client.connected or not lease.range & reserved, (
                    "a lease in the window was not recalled"
                )

    @invariant()
    def nobody_waits_for_a_reply_that_could_be_granted(self) -> None:
        before: list[tuple[int, int]] = []
        for client_id, blocks in self.reply_wants.values():
            if not any(self.reply_goes_before(other, client_id) for other in before):
                assert self.reply_way(client_id, blocks) == "waits" or longest_run(self.free_replies()) < blocks
            before.append((client_id, blocks))

    def teardown(self) -> None:
        if not hasattr(self, "book"):
            return
        for client_id in list(self.clients):
            self.kill(client_id)
        for client_id, generation in self.slots_in(EngineSlot.CLAIMED):
            del self.clients[client_id].slots[generation]
            self.carry_out(self.book.release_slots(client_id, [generation], ()))
        for client_id, generation in self.slots_in(EngineSlot.DRAINING):
            self.drain(client_id, generation)
        for client_id, client in list(self.clients.items()):
            for generation in list(client.unsent):
                self.settle_reply(client_id, generation, sent=True)
        self.book.check()
        assert self.book.clients == {}
        assert self.book.host.free_nbytes == len(self.leasable) * BLOCK_NBYTES
        assert self.book.reply_free_nbytes == len(self.reserve) * BLOCK_NBYTES
        assert self.book.waiting_lease_requests == 0
        assert (self.book._reply_wants, self.book.host._window) == ({}, None)
        assert [self.book.host.leased_nbytes(state) for state in Lease] == [0, 0, 0]


TestEngineBookMachine = EngineBookMachine.TestCase
TestEngineBookMachine.settings = settings(stateful_step_count=100)
