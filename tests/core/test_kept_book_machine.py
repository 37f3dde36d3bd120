"""Kept content in the engine's book, compiled and in Python side by side, and what must hold of it whatever happens.

The pair compares every event and the whole state. What is known here besides: who has pinned what, and which slots of requests
are kept content. What is pinned stays where it is, with its bytes its own; what is not is as good as free to whoever asks for a
lease. At the end everybody dies: what is left is kept, pinned by nobody, and all of it gives way to one lease.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shmring.core.effects import Answered, ClientGone, EngineEffect, Granted, Released
from shmring.core.geometry import BLOCK_NBYTES, GENERATION_BITS, EngineBookLimits, Geometry
from shmring.core.messages import HOST_MEMORY, KEPT_LEASE_ID, SLOT_HEADER_NBYTES, Found, NotKept, SlotRef
from shmring.core.states import EngineSlot, RequestEvent
from shmring.errors import RemoteProtocolError
from tests.model.pairs import PairedEngineBook
from tests.model.state import plain

MAX_CLIENTS = 4
MAX_CLIENTS_EVER = 8  # in one example; else most steps would be about clients that come and go
MAX_PINS = 4
MAX_KEPT = 5

#: Where an example begins if not with an empty book: so much is kept as may be, all of it pinned, and one more was given; or
#: somebody waits for a range beside which something is kept. With how many blocks are lent out, and how many may be kept.
STARTS = {"all pinned": (10, 10), "beside a window": (3, 3)}
KEYS = [bytes([letter]) * 32 for letter in b"abcdefg"]

T = TypeVar("T")


def content(blocks: int) -> int:
    return blocks * BLOCK_NBYTES - SLOT_HEADER_NBYTES


def longest_run(blocks: set[int]) -> int:
    longest = length = 0
    last = -2
    for block in sorted(blocks):
        length = length + 1 if block == last + 1 else 1
        longest, last = max(longest, length), block
    return longest


@dataclasses.dataclass
class Client:
    pins: Counter[int] = dataclasses.field(default_factory=Counter)
    uses: dict[int, int] = dataclasses.field(default_factory=dict)  # generation of the content, by number of the slot
    last_n: int = 0
    last_request: int = 0
    connected: bool = True


class KeptBookMachine(RuleBasedStateMachine):
    """Up to four clients that keep, find, send and leave content under memory pressure."""

    @initialize(leasable=st.integers(4, 14), kept=st.integers(0, 10), start=st.sampled_from(["empty", *STARTS]))
    def create(self, leasable: int, kept: int, start: str) -> None:
        """Begins with an empty book, or where few random steps lead: see :data:`STARTS`."""
        leasable, kept = STARTS.get(start, (leasable, kept))
        limits = EngineBookLimits(
            max_lease_blocks=4,
            quota_blocks=max(1, leasable * 3 // 4),
            max_leases=3,
            max_inflight=3,
            kept_blocks=min(kept, leasable),
            max_kept=MAX_KEPT,
            max_pins=MAX_PINS,
        )
        self.leasable = leasable
        self.book = PairedEngineBook(Geometry(leasable_blocks=leasable, reply_blocks=1), limits)
        self.clients: dict[int, Client] = {}
        self.next_client = self.next_token = 1
        if start == "all pinned":
            self.connect(4)
            self.connect(4)
            for number in range(MAX_KEPT + 1):
                self.give(1 + number % 2, KEYS[number], number // 2)
        elif start == "beside a window":
            self.connect(1)
            self.book.return_leases(1, list(self.book.clients[1].leases))
            self.connect(2)
            self.give(2, KEYS[0], 0)
            self.unpin_all(2)
            self.carry_out(self.book.request_lease(1, self.token(), 2 * BLOCK_NBYTES, 0, HOST_MEMORY, True))
            assert len(self.book.kept) == 1
        else:
            self.connect(2)
            self.connect(2)

    # -- what is known -------------------------------------------------------------------------------------------------------

    def connected(self) -> list[int]:
        return [client_id for client_id, client in self.clients.items() if client.connected]

    def draw_client(self, data: Any) -> tuple[int, Client]:
        client_id = data.draw(st.sampled_from(self.connected()), label="client")
        return client_id, self.clients[client_id]

    def draw_from(self, data: Any, items: Iterable[T]) -> T:
        return data.draw(st.sampled_from(list(items)))  # type: ignore[no-any-return]

    def token(self) -> int:
        self.next_token += 1
        return self.next_token

    def pinned(self) -> Counter[int]:
        """How many clients and slots of requests have each content."""
        pins: Counter[int] = Counter()
        for client in self.clients.values():
            pins.update(set(+client.pins))
            pins.update(client.uses.values())
        return pins

    def carry_out(self, effects: Sequence[EngineEffect]) -> None:
        for effect in effects:
            if isinstance(effect, ClientGone):
                client = self.clients.pop(effect.client_id)
                assert not client.connected
                assert not client.uses, "a client is forgotten whose slots are still read"
                assert not +client.pins, "a client is forgotten that may still read what it has pinned"
            elif isinstance(effect, Granted):
                start, blocks = effect.grant.offset // BLOCK_NBYTES, effect.grant.nbytes // BLOCK_NBYTES
                for kept in self.book.kept.by_generation.values():
                    assert kept.start + kept.blocks <= start or start + blocks <= kept.start, "what is kept was lent"

    def answer_of(self, effects: Sequence[EngineEffect], token: int) -> Found | NotKept:
        [answer] = [effect.answer for effect in effects if isinstance(effect, Answered)]
        assert answer.token == token
        return answer

    # -- clients -------------------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.clients) < MAX_CLIENTS)
    @rule(blocks=st.integers(0, 6))
    def connect(self, blocks: int) -> None:
        client_id, self.next_client = self.next_client, self.next_client + 1
        self.clients[client_id] = Client()
        self.book.connect(client_id, blocks * BLOCK_NBYTES)

    def leave(self, client: Client) -> None:
        client.connected = False

    @precondition(lambda self: self.connected() and self.next_client <= MAX_CLIENTS_EVER)
    @rule(data=st.data(), is_polite=st.booleans())
    def disconnect(self, data: Any, is_polite: bool) -> None:
        client_id, client = self.draw_client(data)
        self.leave(client)
        self.forget_published(client_id)
        if is_polite:
            still = data.draw(st.sets(st.sampled_from([*+client.pins, 7])), label="still viewed")
            client.pins = Counter({generation: count for generation, count in client.pins.items() if generation in still})
            self.carry_out(self.book.goodbye(client_id, (), (), still))
        else:
            self.carry_out(self.book.disconnect(client_id))

    def forget_published(self, client_id: int) -> None:
        slots = self.book.clients[client_id].slots
        uses = self.clients[client_id].uses
        for number in list(uses):
            if slots[number].state is EngineSlot.PUBLISHED:
                del uses[number]

    @precondition(lambda self: self.clients and self.next_client <= MAX_CLIENTS_EVER)
    @rule(data=st.data())
    def die(self, data: Any) -> None:
        self.kill(self.draw_from(data, self.clients))

    def kill(self, client_id: int) -> None:
        client = self.clients[client_id]
        if client.connected:
            self.forget_published(client_id)
        self.leave(client)
        client.pins.clear()
        self.carry_out(self.book.died(client_id))

    # -- leases --------------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.connected())
    @rule(data=st.data(), preferred=st.integers(0, 8), waits=st.booleans())
    def request_lease(self, data: Any, preferred: int, waits: bool) -> None:
        client_id, _ = self.draw_client(data)
        blocks = data.draw(st.integers(0, self.leasable), label="blocks")
        nbytes, preferred_nbytes = blocks * BLOCK_NBYTES, preferred * BLOCK_NBYTES
        self.carry_out(self.book.request_lease(client_id, self.token(), nbytes, preferred_nbytes, HOST_MEMORY, waits))

    @precondition(lambda self: self.connected())
    @rule(data=st.data())
    def return_leases(self, data: Any) -> None:
        client_id, _ = self.draw_client(data)
        leases = self.book.clients[client_id].leases.values()
        empty = [lease.lease_id for lease in leases if lease.live.units == lease.kept_blocks]
        self.carry_out(self.book.return_leases(client_id, empty))

    # -- what is kept --------------------------------------------------------------------------------------------------------

    def draw_slot(self, data: Any, client_id: int) -> SlotRef | None:
        """A slot in a free part of a lease of this client."""
        places = []
        for lease in self.book.clients[client_id].leases.values():
            taken = {block for start, blocks in lease.live.runs() for block in range(start, start + blocks)}
            free = set(range(lease.start, lease.start + lease.blocks)) - taken
            places += [(lease.lease_id, start, free) for start in sorted(free)]
        if not places:
            return None
        lease_id, start, free = self.draw_from(data, places)
        blocks = 1
        while start + blocks in free and data.draw(st.booleans(), label="longer"):
            blocks += 1
        client = self.clients[client_id]
        client.last_n += 1
        generation = client_id << GENERATION_BITS | client.last_n
        return SlotRef(lease_id, start * BLOCK_NBYTES, content(blocks), generation)

    @precondition(lambda self: self.connected())
    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def find(self, data: Any, key: bytes) -> None:
        client_id, client = self.draw_client(data)
        token = self.token()
        kept = self.book.kept.by_key.get(key)
        answer = self.answer_of(self.book.find(client_id, token, key), token)
        if kept is None:
            assert answer == NotKept(token, "absent")
        elif client.pins.total() >= MAX_PINS:
            assert answer == NotKept(token, "pins")
        else:
            assert isinstance(answer, Found)
            assert (answer.generation, answer.offset, answer.nbytes) == (
                kept.generation,
                kept.start * BLOCK_NBYTES,
                kept.nbytes,
            )
            client.pins[answer.generation] += 1

    @precondition(lambda self: self.connected())
    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def keep(self, data: Any, key: bytes) -> None:
        client_id, _ = self.draw_client(data)
        slot = self.draw_slot(data, client_id)
        if slot is not None:
            self.give_slot(client_id, key, slot)

    def give(self, client_id: int, key: bytes, at: int) -> None:
        """A client keeps one block of its only lease."""
        [lease] = self.book.clients[client_id].leases.values()
        client = self.clients[client_id]
        client.last_n += 1
        generation = client_id << GENERATION_BITS | client.last_n
        self.give_slot(client_id, key, SlotRef(lease.lease_id, (lease.start + at) * BLOCK_NBYTES, content(1), generation))

    def give_slot(self, client_id: int, key: bytes, slot: SlotRef) -> None:
        client = self.clients[client_id]
        token = self.token()
        there = self.book.kept.by_key.get(key)
        pinned = self.pinned()
        effects = self.book.keep(client_id, token, key, slot, False, b"\xc0")
        answer = self.answer_of(effects, token)
        released = [effect for effect in effects if isinstance(effect, Released)]
        assert bool(released) == (not isinstance(answer, Found) or answer.generation != slot.generation)
        assert all(generation in self.book.kept.by_generation for generation in pinned), "what was pinned has gone"
        if isinstance(answer, NotKept):
            assert answer.reason != "absent"
            assert (answer.reason == "pins") == (client.pins.total() >= MAX_PINS)
        else:
            assert answer.generation == (slot.generation if there is None else there.generation)
            client.pins[answer.generation] += 1
        self.carry_out(effects)

    @precondition(lambda self: any(+self.clients[c].pins for c in self.connected()))
    @rule(data=st.data(), forged=st.booleans())
    def unpin(self, data: Any, forged: bool) -> None:
        client_id = self.draw_from(data, [c for c in self.connected() if +self.clients[c].pins])
        client = self.clients[client_id]
        generations = data.draw(st.lists(st.sampled_from(sorted(client.pins.elements())), min_size=1), label="unpinned")
        generations = list((Counter(generations) & client.pins).elements())
        if forged:
            generations += [self.draw_from(data, [*client.pins, 0, 1 << 63])] * (MAX_PINS + 1)
            self.refuses(lambda: self.book.unpin(client_id, generations))
            return
        client.pins = client.pins - Counter(generations)
        self.carry_out(self.book.unpin(client_id, generations))

    def unpin_all(self, client_id: int) -> None:
        pins, self.clients[client_id].pins = self.clients[client_id].pins, Counter()
        self.carry_out(self.book.unpin(client_id, list(pins.elements())))

    def refuses(self, event: Callable[[], object]) -> None:
        before = plain(self.book)
        with pytest.raises(RemoteProtocolError):
            event()
        assert plain(self.book) == before

    def ref(self, generation: int) -> SlotRef:
        kept = self.book.kept.by_generation[generation]
        return SlotRef(KEPT_LEASE_ID, kept.start * BLOCK_NBYTES, kept.nbytes, generation)

    @precondition(lambda self: self.connected())
    @rule(data=st.data(), claim=st.booleans(), beside=st.booleans())
    def submit(self, data: Any, claim: bool, beside: bool) -> None:
        """Kept content, once or more often, and a slot of its own beside."""
        client_id, client = self.draw_client(data)
        record = self.book.clients[client_id]
        if len(record.requests) >= 3:
            return
        generations = data.draw(st.lists(st.sampled_from(sorted(+client.pins)), max_size=2)) if +client.pins else []
        slots = [self.ref(generation) for generation in generations]
        slot = self.draw_slot(data, client_id) if beside else None
        if slot is not None:
            slots.insert(data.draw(st.integers(0, len(slots))), slot)
        client.last_request += 1
        before = set(record.slots)
        self.book.submit(client_id, client.last_request, slots)
        for number in set(record.slots) - before:
            kept = record.slots[number].kept
            if kept is not None:
                client.uses[number] = kept.generation
        if claim:
            self.book.claim(client_id, client.last_request)

    @precondition(lambda self: self.connected() and len(self.book.kept))
    @rule(data=st.data(), beside=st.booleans())
    def send_what_is_not_pinned(self, data: Any, beside: bool) -> None:
        client_id, client = self.draw_client(data)
        refs = [self.ref(generation) for generation in self.book.kept.by_generation]
        own = [ref for ref in refs if client.pins[ref.generation]]
        wrong = [ref for ref in refs if not client.pins[ref.generation]]
        wrong += [SlotRef(0, ref.offset, ref.nbytes + 1, ref.generation) for ref in own]
        wrong += [SlotRef(0, ref.offset + BLOCK_NBYTES, ref.nbytes, ref.generation) for ref in own]
        wrong += [
            SlotRef(0, ref.offset, ref.nbytes, ref.generation + 1) for ref in own if ref.generation + 1 not in client.pins
        ]
        before = [self.draw_from(data, own)] if own and beside else []
        slots = [*before, self.draw_from(data, wrong)]
        self.refuses(lambda: self.book.submit(client_id, client.last_request + 1, slots))

    def requests(self) -> list[tuple[int, int]]:
        return [(c, r) for c in self.connected() for r in self.book.clients[c].requests]

    @precondition(lambda self: self.requests())
    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        client_id, request_id = self.draw_from(data, self.requests())
        effects = self.book.abort(client_id, request_id)
        self.forget_gone(client_id)
        self.carry_out(effects)

    def forget_gone(self, client_id: int) -> None:
        """Slots of kept content that have just been released."""
        slots = self.book.clients[client_id].slots if client_id in self.book.clients else {}
        client = self.clients[client_id]
        client.uses = {number: generation for number, generation in client.uses.items() if number in slots}

    @precondition(lambda self: self.requests())
    @rule(data=st.data())
    def end(self, data: Any) -> None:
        client_id, request_id = self.draw_from(data, self.requests())
        self.book.end(client_id, request_id, RequestEvent.ERROR)

    def slots_in(self, state: EngineSlot) -> list[tuple[int, int]]:
        return [(c, g) for c, client in self.book.clients.items() for g, slot in client.slots.items() if slot.state is state]

    @precondition(lambda self: self.slots_in(EngineSlot.CLAIMED))
    @rule(data=st.data(), is_viewed=st.booleans())
    def release(self, data: Any, is_viewed: bool) -> None:
        client_id, number = self.draw_from(data, self.slots_in(EngineSlot.CLAIMED))
        self.released(client_id, self.book.release_slots(client_id, [number], {number} if is_viewed else ()), number)

    def released(self, client_id: int, effects: Sequence[EngineEffect], number: int) -> None:
        is_kept = number in self.clients[client_id].uses
        assert not is_kept or not any(isinstance(effect, Released) for effect in effects), (
            "kept content is nobody's to get back"
        )
        self.forget_gone(client_id)
        self.carry_out(effects)

    @precondition(lambda self: self.slots_in(EngineSlot.DRAINING))
    @rule(data=st.data())
    def last_view_gone(self, data: Any) -> None:
        client_id, number = self.draw_from(data, self.slots_in(EngineSlot.DRAINING))
        self.released(client_id, self.book.last_view_gone(client_id, number), number)

    # -- what holds after each event -----------------------------------------------------------------------------------------

    @invariant()
    def pins_are_what_is_known(self) -> None:
        assert {c: dict(client.pins) for c, client in self.book.clients.items()} == {
            c: dict(+client.pins) for c, client in self.clients.items()
        }
        pinned = self.pinned()
        kept = self.book.kept.by_generation
        assert pinned.keys() <= kept.keys(), "what is pinned has gone"
        assert {generation: record.pins for generation, record in kept.items() if record.pins} == dict(pinned)

    @invariant()
    def bounds_hold(self) -> None:
        assert len(self.book.kept) <= MAX_KEPT
        assert self.book.kept.blocks <= self.book.limits.kept_blocks
        assert all(client.pins.total() <= MAX_PINS for client in self.clients.values())

    @invariant()
    def nobody_waits_for_what_is_only_kept(self) -> None:
        host, window = self.book.host, self.book.host._window
        free = {block for start, blocks in [*host._free.runs(), *host._apart] for block in range(start, start + blocks)}
        kept = self.book.kept.unpinned.values()
        usable = free | {block for record in kept for block in range(record.start, record.start + record.blocks)}
        if window is not None:
            assert not any(window.start < record.start + record.blocks and record.start < window.end for record in kept)
        reserved = set(range(window.start, window.end)) if window is not None else set()
        for client_id, want in host._wants.items():
            client = self.book.clients[client_id]
            others = any(o is not client and (o.connected or o.leases) for o in self.book.clients.values())
            held = client.leased_blocks[0]
            is_over = len(client.leases) >= 3 or (
                held > 0 and others and held + client.pinned_blocks + want.blocks > self.book.limits.quota_blocks
            )
            mine = window is not None and window.client_id == client_id
            assert is_over or longest_run(usable if mine else usable - reserved) < want.blocks, (
                f"client {client_id} waits in vain"
            )

    def teardown(self) -> None:
        if not hasattr(self, "book"):
            return
        for client_id in list(self.clients):
            self.kill(client_id)
        for client_id, number in self.slots_in(EngineSlot.CLAIMED):
            self.released(client_id, self.book.release_slots(client_id, [number], ()), number)
        for client_id, number in self.slots_in(EngineSlot.DRAINING):
            self.released(client_id, self.book.last_view_gone(client_id, number), number)
        assert self.book.clients == {}
        kept = self.book.kept
        assert len(kept.unpinned) == len(kept), "what a dead client had pinned is pinned for ever"
        assert self.book.host.free_nbytes + kept.blocks * BLOCK_NBYTES == self.leasable * BLOCK_NBYTES
        self.book.connect(99, BLOCK_NBYTES)
        [lease_id] = self.book.clients[99].leases
        self.book.return_leases(99, [lease_id])
        effects = self.book.request_lease(99, 1, self.leasable * BLOCK_NBYTES, 0)
        assert [type(effect) for effect in effects] == [Granted], "what is kept is in somebody's way"
        assert len(kept) == 0


TestKeptBookMachine = KeptBookMachine.TestCase
TestKeptBookMachine.settings = settings(stateful_step_count=60)
