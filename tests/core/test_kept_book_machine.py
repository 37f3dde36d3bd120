"""Kept content in the engine's book, compiled and in Python side by side: clients keep, find, send and leave it.

What is pinned stays where it is, with its bytes its own; what is not is as good as free to whoever asks for a lease. At the end
everybody dies: what is left is kept, pinned by nobody, and all of it gives way to one lease.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant
from msgspec.structs import replace

from shmring.core.effects import Answered
from shmring.core.geometry import BLOCK_NBYTES, EngineBookLimits, Geometry
from shmring.core.messages import KEPT_LEASE_ID, Found, LeaseRequest, SlotRef
from tests.core.test_engine_book_machine import BookMachine, content, happens_to
from tests.model.records import ClientRecord
from tests.records import keep_of

MAX_PINS = 4
MAX_KEPT = 5
MAX_WAITS = 2

#: Where an example begins if not with an empty book: so much is kept as may be, all of it pinned, and one more was given; or
#: somebody waits for a range beside which something is kept. With how many blocks are lent out, and how many may be kept.
STARTS = {"all pinned": (10, 10), "beside a window": (3, 3)}
KEYS = [bytes([letter]) * 32 for letter in b"abcdefg"]


class KeptBookMachine(BookMachine):
    """Under memory pressure."""

    @initialize(
        leasable=st.integers(4, 14),
        kept=st.integers(0, 10),
        pinned=st.sampled_from([100, 2]),
        start=st.sampled_from(["empty", *STARTS]),
    )
    def create(self, leasable: int, kept: int, pinned: int, start: str) -> None:
        """Begins with an empty book, or where few random steps lead: see :data:`STARTS`."""
        leasable, kept = STARTS.get(start, (leasable, kept))
        pinned = 100 if start in STARTS else pinned
        limits = EngineBookLimits(
            max_lease_blocks=4,
            quota_blocks=max(1, leasable * 3 // 4),
            max_leases=3,
            max_inflight=3,
            kept_blocks=min(kept, leasable),
            max_kept=MAX_KEPT,
            max_pins=MAX_PINS,
            pinned_blocks=pinned,
            max_waits=MAX_WAITS,
        )
        self.begin(Geometry(leasable_blocks=leasable, reply_blocks=1), limits)
        if start == "all pinned":
            self.connect(4)
            self.connect(4)
            for number in range(MAX_KEPT + 1):
                self.give(1 + number % 2, KEYS[number], number // 2)
        elif start == "beside a window":
            self.connect(1)
            self.book.return_leases(1, list(self.clients[1].leases))
            self.connect(2)
            self.give(2, KEYS[0], 0)
            self.book.unpin(2, [*self.clients[2].pins])
            self.book.request_lease(1, LeaseRequest(self.next_number(), 2 * BLOCK_NBYTES))
            assert len(self.book.kept) == 1
        else:
            self.connect(2)
            self.connect(2)

    def give(self, client_id: int, key: bytes, at: int) -> None:
        """A client keeps one block of its only lease."""
        client = self.clients[client_id]
        [lease] = client.leases.values()
        slot = SlotRef(lease.lease_id, (lease.start + at) * BLOCK_NBYTES, content(1), client.last_generation + 1)
        self.book.keep(client_id, keep_of(self.next_number(), key, slot))

    @happens_to(lambda self: self.connected() if self.model.kept.by_key else [])
    def find(self, draw: Any, client: ClientRecord) -> None:
        booked = draw(st.sampled_from([*self.model.kept.by_key] * 4 + KEYS))
        self.book.find(client.client_id, self.next_number(), booked[:32], False, len(booked) > 32)

    @happens_to(BookMachine.connected)
    def wait(self, draw: Any, client: ClientRecord) -> None:
        """For what is not there, as a rule; now and then by the token of another question, or for a key once more."""
        tokens = [self.next_number()] * 4 + [*client.waits]
        keys = [key for key in KEYS if key not in client.waits.values()] * 2 + KEYS
        key, for_one = draw(st.sampled_from(keys)), draw(st.booleans())
        self.happen("find", client.client_id, draw(st.sampled_from(tokens)), key, True, for_one)

    @happens_to(lambda self: [client for client in self.connected() if client.waits])
    def stop_waiting(self, draw: Any, client: ClientRecord) -> None:
        tokens = draw(st.lists(st.sampled_from([*client.waits, 0, self.number]), max_size=3))
        self.book.stop_waiting(client.client_id, tokens)

    @happens_to(BookMachine.connected)
    def keep(self, draw: Any, client: ClientRecord) -> None:
        slot = self.draw_slot(draw, client)
        if slot is not None:
            pinned = self.pins().keys()
            booked = KEYS + [key + b"1" for key in KEYS]
            waits = {key: {client for client, other in self.clients.items() if key in other.waits.values()} for key in booked}
            key, is_copied, for_one = draw(st.sampled_from(KEYS)), draw(st.booleans()), draw(st.booleans())
            to_keep = keep_of(self.next_number(), key, slot, is_copied, for_one)
            effects = self.book.keep(client.client_id, to_keep)
            assert pinned <= self.model.kept.by_generation.keys(), "what was pinned has gone"
            answers = [effect.answer for effect in effects if isinstance(effect, Answered)]
            is_there = slot.generation in self.model.kept.by_generation
            assert isinstance(answers[0], Found) or not is_there
            told = {effect.client_id for effect in effects[1:] if isinstance(effect, Answered)}
            if for_one:
                takers = [answer for answer in answers[1:] if isinstance(answer, Found)]
                assert len(takers) <= 1
                assert not is_there or takers or told >= waits[key + b"1"], "a delivery lies there, and who waits is not told"
            else:
                assert told >= waits[key] - {client.client_id} or key not in self.model.kept.by_key, "who waits is not told"

    @happens_to(lambda self: self.connected() if self.book.untaken() else [])
    def withdraw(self, draw: Any, client: ClientRecord) -> None:
        names = [kept.key[:32] for kept in self.model.untaken()] + KEYS[:2]
        self.book.withdraw(client.client_id, draw(st.lists(st.sampled_from(names), max_size=3)))

    @happens_to(lambda self: self.book.untaken())
    def drop_untaken(self, draw: Any, kept: Any) -> None:
        self.book.drop_untaken(
            [kept.generation, *draw(st.lists(st.sampled_from([*self.model.kept.by_generation]), max_size=2))]
        )

    @happens_to(lambda self: ["it"] if self.model.kept.evictions > 3 and not self.model._is_draining else [])
    def drain(self, draw: Any, _: str) -> None:
        """Late, since nothing more is kept then."""
        self.book.drain()

    @happens_to(lambda self: [client for client in self.connected() if client.pins])
    def unpin(self, draw: Any, client: ClientRecord) -> None:
        """As many as it has, or fewer; or one that it does not have."""
        pins = draw(st.permutations([generation for generation, count in client.pins.items() for _ in range(count)]))
        forged = draw(st.sampled_from([[], [], [], pins[:1], [0], [1 << 63]]))
        self.happen("unpin", client.client_id, (pins if forged else pins[draw(st.integers(0, len(pins) - 1)) :]) + forged)

    def ref(self, generation: int) -> SlotRef:
        kept = self.model.kept.by_generation[generation]
        return SlotRef(KEPT_LEASE_ID, kept.start * BLOCK_NBYTES, kept.nbytes, generation)

    @happens_to(lambda self: [client for client in self.connected() if client.pins])
    def submit_what_is_kept(self, draw: Any, client: ClientRecord) -> None:
        """Once or more often, and slots of its own beside."""
        refs = [self.ref(generation) for generation in draw(st.lists(st.sampled_from([*client.pins]), max_size=2))]
        self.submit_slots(draw, client, draw(st.permutations(self.draw_slots(draw, client, 1) + refs)))

    @happens_to(lambda self: self.connected() if self.model.kept.by_key else [])
    def submit_what_may_not_be_pinned(self, draw: Any, client: ClientRecord) -> None:
        refs = [self.ref(generation) for generation in self.model.kept.by_generation]
        ref = draw(st.sampled_from(refs))
        change = draw(st.sampled_from([{}, {"nbytes": 1}, {"offset": BLOCK_NBYTES}, {"generation": 1}]))
        ref = replace(ref, **{field: getattr(ref, field) + more for field, more in change.items()})
        before = draw(st.lists(st.sampled_from([self.ref(generation) for generation in client.pins] or [ref]), max_size=1))
        self.submit_slots(draw, client, [*before, ref])

    def pins(self) -> Counter[int]:
        """How many clients and slots of requests have each content."""
        pins: Counter[int] = Counter()
        for client in self.clients.values():
            pins.update(client.pins.keys())
            pins.update(slot.kept.generation for slot in client.slots.values() if slot.kept is not None)
        return pins

    @invariant()
    def what_is_pinned_stays(self) -> None:
        pins = self.pins() + Counter(kept.generation for kept in self.book.untaken())
        assert {generation: kept.pins for generation, kept in self.model.kept.by_generation.items() if kept.pins} == pins

    @invariant()
    def nobody_waits_for_what_is_there(self) -> None:
        waited = {key for client in self.clients.values() for key in client.waits.values()}
        assert not waited & self.model.kept.by_key.keys()
        assert all(client.connected or not client.waits for client in self.clients.values())

    @invariant()
    def bounds_hold(self) -> None:
        assert len(self.book.kept) <= MAX_KEPT
        assert self.book.kept.blocks <= self.book.limits.kept_blocks
        assert all(sum(client.pins.values()) <= MAX_PINS for client in self.clients.values())
        assert all(len(client.waits) <= MAX_WAITS for client in self.clients.values())


TestKeptBookMachine = KeptBookMachine.TestCase
TestKeptBookMachine.settings = settings(stateful_step_count=80)
