"""A frontend's book: one story a case, one event a line, and behind it all that the book says then.

Numbers are blocks. Of the slab, the blocks 1 to 24 can be lent, in leases of 4 as a rule. ``base=4``: the engine has lent lease
1, the blocks 1 to 4. Slots are ``a``, ``b``, ... in the order in which they are had: ``takes 2`` is a caller that has one of
two blocks or nothing, ``7 waits for 2`` one that waits in line with ticket 7. What is submitted is 1, 2, ... The book asks the
engine for leases: ``asks 3``, or ``asks 3 or 4`` if it prefers four; ``wishes 3`` if nobody waits. ``waiting 5 2``: there is
one block, which is taken, and 1 and 2 wait. ``look``: all slots, free blocks, leases with views in them, and when a lease has
been empty for long enough. Random events are in test_client_book_machine.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from shmring.core.compiled import ClientBook, ClientSlotRecord
from shmring.core.effects import Acquired, ClientEffect, Send
from shmring.core.geometry import BLOCK_NBYTES, GENERATION_BITS, ClientBookLimits
from shmring.core.messages import SLOT_HEADER_NBYTES, LeaseGrant, LeaseRequest, LeaseReturn, SlotRef
from shmring.core.states import ClientSlot
from shmring.errors import CapacityError, RemoteProtocolError
from tests.core.stories import tell
from tests.model.pairs import PairedClientBook
from tests.model.state import plain
from tests.simulation.books import COMPILED, MODELS, Books
from tests.tables import for_each

STORIES = {
    "a lease that was granted can be used": """
        base=4; look -> 4 of 4 free
        takes 3 -> a at 1+3
        look -> a writing, 1 of 4 free""",
    "a grant may reach to the end of what can be lent": "base=24; look -> 24 of 24 free",
    "what is lent already is not granted again": """
        base=4; lent 1 at 10+2 -> refused: is lent already
        lent 2 at 4+1 -> refused: is lent already
        lent 2 at 1+1 -> refused: is lent already
        lent 2 at 4+8 -> refused: is lent already
        lent 2 at 1+24 -> refused: is lent already""",
    "where a slot became the engine's another lease may lie, and nothing else may": """
        base=4; takes 1 1 1 -> a at 1+1, b at 2+1, c at 3+1
        b c submitted -> 1 2
        kept 1 ->
        lent 2 at 1+1 -> refused: is lent already
        lent 2 at 3+1 -> refused: is lent already
        lent 2 at 4+1 -> refused: is lent already
        lent 2 at 2+1 ->""",
    "a recalled lease that is empty goes back at once": """
        base=4; recalled 1 -> returns 1
        look -> 0 of 0 free
        recalled 1 ->""",
    "a recalled lease in use takes no slot, and goes back when it is empty": """
        base=4; takes 1 1 -> a at 1+1, b at 2+1
        recalled 1 77 ->
        takes 1 -> nothing
        a dropped ->
        b dropped -> returns 1""",
    "a further lease that was empty for long goes back": """
        base=4; lent 2 at 10+4 for 9 ->
        look -> 8 of 8 free, expiry in 5
        4 seconds ->
        1 seconds -> returns 2
        look -> 4 of 4 free""",
    "the base lease stays however long it is empty": """
        base=4; look -> 4 of 4 free
        1000000 seconds ->
        look -> 4 of 4 free""",
    "a lease is idle since its last slot left it": """
        lent 2 at 10+4 for 9 ->
        takes 1 -> a at 10+1
        1000 seconds ->
        look -> a writing, 3 of 4 free
        a dropped ->
        look -> 4 of 4 free, expiry in 5
        4 seconds ->
        1 seconds -> returns 2""",
    "a lease is idle since its last slot was released, or its last view has gone": """
        lent 2 at 10+4 for 9 ->
        takes 1 1 -> a at 10+1, b at 11+1
        b viewed ->
        a submitted -> 1
        1 seconds ->
        released 1 ->
        b dropped ->
        1 seconds ->
        look -> b draining, 3 of 4 free, 2 in use
        b unviewed ->
        look -> 4 of 4 free, expiry in 5""",
    "idle leases expire each in its time, and return together": """
        lent 2 at 8+4 for 9 ->
        1 seconds ->
        lent 3 at 12+4 for 9 ->
        1 seconds ->
        lent 4 at 16+4 for 9 ->
        look -> 12 of 12 free, expiry in 3
        4 seconds -> returns 2 3
        look -> 4 of 4 free, expiry in 1""",
    "released out of order nothing is blocked": """
        base=3; takes 1 1 1 -> a at 1+1, b at 2+1, c at 3+1
        a b c submitted -> 1 2 3
        released 2 ->
        takes 1 -> d at 2+1
        released 3 1 ->
        takes 1 1 -> e at 1+1, f at 3+1""",
    "without a lease that fits nothing is taken, and nothing is asked for": """
        base=2; takes 3 -> nothing
        look -> 2 of 2 free""",
    "a waiter that fits is served at once": """
        base=4; 5 waits for 2 held -> 5 gets a at 1+2 held
        look -> a writing, 2 of 4 free""",
    "a waiter that does not fit asks for a lease": """
        base=2 taken=2; 5 waits for 1 -> asks 1 or 4
        lent 2 at 10+4 -> 5 gets b at 10+1""",
    "a need of half a lease prefers a whole one, and a larger one is sized exactly": """
        1 waits for 1 -> asks 1 or 4
        1 leaves -> withdraws
        2 waits for 2 -> asks 2 or 4
        2 leaves -> withdraws
        3 waits for 3 -> asks 3
        3 leaves -> withdraws
        4 waits for 4 -> asks 4
        4 leaves -> withdraws
        5 waits for 9 -> asks 9""",
    "nobody overtakes the first who waits": """
        base=4; takes 2 1 -> a at 1+2, b at 3+1
        1 waits for 3 -> asks 3
        2 waits for 1 ->
        takes 1 -> nothing
        b dropped ->
        lent 2 at 10+3 -> 1 gets c at 10+3, 2 gets d at 3+1""",
    "who leaves the line passes the turn on": """
        base=4 taken=2; 1 waits for 3 -> asks 3
        2 waits for 2 ->
        1 leaves -> 2 gets b at 3+2, withdraws
        1 leaves ->""",
    "who leaves behind the first changes nothing for it": """
        base=1 taken=1; 1 waits for 2 -> asks 2 or 4
        2 waits for 5 ->
        2 leaves ->
        lent 2 at 10+4 -> 1 gets b at 10+2""",
    "the need of the next replaces the request of the first": """
        base=1 taken=1; 1 waits for 3 -> asks 3
        2 waits for 5 ->
        1 leaves -> asks 5""",
    "the next with the same need keeps the request": """
        base=1 taken=1; 1 waits for 3 -> asks 3
        2 waits for 3 ->
        1 leaves ->
        lent 2 at 10+3 -> 2 gets b at 10+3""",
    "after a grant the next who waits asks again": """
        base=1 taken=1; 1 waits for 3 -> asks 3
        2 waits for 3 ->
        lent 2 at 10+3 -> 1 gets b at 10+3, asks 3""",
    "a grant that crossed a newer request does not answer it": """
        base=1 taken=1; 1 waits for 2 -> asks 2 or 4
        2 waits for 5 ->
        1 leaves -> asks 5
        lent 2 at 10+4 for 1 -> returns 2
        lent 3 at 10+5 for 2 -> 2 gets b at 10+5""",
    "a grant that crossed its withdrawal is kept until it is idle": """
        base=1 taken=1; 1 waits for 2 -> asks 2 or 4
        1 leaves -> withdraws
        lent 2 at 10+4 for 1 ->
        takes 2 -> b at 10+2""",
    "while somebody waits what is empty goes back, the base lease too": """
        base=2 taken=2; lent 2 at 10+2 for 9 ->
        1 waits for 4 -> returns 2, asks 4
        a dropped -> returns 1
        look -> 0 of 0 free
        lent 3 at 1+4 -> 1 gets b at 1+4""",
    "a lease for a large slot takes one that is nearly as large, and smaller ones where no other lease can be had": """
        base=1 taken=1 max_leases=3; lent 2 at 10+10 for 9 ->
        takes 8 -> nothing
        takes 9 -> b at 10+9
        b dropped ->
        lent 3 at 5+1 for 9 ->
        takes 8 -> c at 10+8""",
    "no more leases are asked for than a client may hold": """
        base=2 taken=2 max_leases=2; lent 2 at 10+2 for 9 ->
        takes 2 -> b at 10+2
        1 waits for 2 ->
        2 waits for 2 ->
        a dropped -> 1 gets c at 1+2""",
    "at max_leases what is needed is asked for when a lease has gone back": """
        base=2 taken=2 max_leases=1; 1 waits for 3 ->
        a dropped -> returns 1, asks 3""",
    "a prefetch asks for a lease without waiting": """
        base=2 taken=2; prefetches 3 -> wishes 3
        prefetches 3 ->
        lent 2 at 10+3 ->
        takes 3 -> b at 10+3""",
    "a prefetch is fulfilled once": """
        base=2 taken=2; prefetches 3 -> wishes 3
        lent 2 at 10+3 ->
        takes 3 -> b at 10+3
        b dropped ->
        5 seconds -> returns 2
        recalled 99 ->""",
    "who waits comes before a prefetch": """
        base=2 taken=2; prefetches 3 -> wishes 3
        1 waits for 4 -> asks 4
        lent 2 at 10+4 -> 1 gets b at 10+4""",
    "who waits for what was wished for says so": """
        base=2 taken=2; prefetches 3 -> wishes 3
        1 waits for 3 -> asks 3
        1 leaves -> wishes 3""",
    "a lease of the preferred size is used though that is no whole number of blocks": """
        lease_bytes=1 base=5 taken=5; 1 waits for 1 -> asks 1 or 5
        lent 2 at 6+5 -> 1 gets b at 6+1""",
    "who waits in vain lets smaller ones pass": """
        waiting 5 2; a moment passes ->
        a moment passes -> asks 2
        lent 2 at 10+2 -> 2 gets b at 10+2, asks 5
        lent 3 at 12+5 -> 1 gets c at 12+5""",
    "smaller ones that come later pass as well, and nobody passes them": """
        waiting 5 2; 2 moments pass -> asks 2
        lent 2 at 10+2 -> 2 gets b at 10+2, asks 5
        3 waits for 3 -> asks 3
        takes 1 -> nothing""",
    "who lets others pass takes what fits": """
        waiting 5 2; 2 moments pass -> asks 2
        lent 2 at 10+5 for 1 -> 1 gets b at 10+5""",
    "who wants as much or more does not pass": """
        waiting 10 11 10 4; 2 moments pass -> asks 4
        lent 2 at 2+4 -> 4 gets b at 2+4, asks 10
        lent 3 at 6+11 -> 1 gets c at 6+10, asks 11""",
    "alone or before larger ones one has its turn as long as one likes": """
        waiting 5 5; 50 moments pass ->
        3 waits for 2 ->
        a moment passes -> asks 2
        a moment passes ->
        a moment passes -> asks 5""",
    "for those behind who has the turn time stands still": """
        waiting 5 3 2; 2 moments pass -> asks 3
        2 moments pass -> asks 5
        3 moments pass ->
        a moment passes -> asks 2
        a moment passes ->
        a moment passes -> asks 3
        a moment passes ->
        a moment passes -> asks 5""",
    "each turn and each rest is twice as long as the last": """
        waiting 5 2; a moment passes ->
        a moment passes -> asks 2
        a moment passes ->
        a moment passes -> asks 5
        3 moments pass ->
        a moment passes -> asks 2
        3 moments pass ->
        a moment passes -> asks 5
        7 moments pass ->
        a moment passes -> asks 2
        7 moments pass ->
        a moment passes -> asks 5
        15 moments pass ->
        a moment passes -> asks 2
        15 moments pass ->
        a moment passes -> asks 5""",
    "who rests and leaves passes nothing on": """
        waiting 5 6 2; 2 moments pass -> asks 2
        1 leaves -> asks 6
        2 moments pass -> asks 2""",
    "who has the turn and leaves gives it back": """
        waiting 5 3 2; 2 moments pass -> asks 3
        2 leaves -> asks 2
        3 leaves -> asks 5
        1 leaves -> withdraws
        3 moments pass ->""",
    "what is empty goes back while somebody rests": """
        waiting 5 2; 2 moments pass -> asks 2
        lent 2 at 10+2 -> 2 gets b at 10+2, asks 5
        b dropped -> returns 2""",
    "a wish waits for who rests": """
        waiting 5 2; 2 moments pass -> asks 2
        prefetches 1 ->
        1 leaves ->
        2 leaves -> wishes 1""",
    "no moment passes for nobody": """
        base=4; a moment passes ->
        look -> 4 of 4 free""",
    "generations grow": """
        base=4; takes 1 1 1 -> a at 1+1, b at 2+1, c at 3+1
        a b c submitted -> 1 2 3
        released 1 2 3 ->
        takes 1 -> d at 1+1
        d submitted -> 4""",
    "a slot that was released is free again": """
        base=1 taken=1; a submitted -> 1
        look -> a submitted, 0 of 1 free
        released 1 ->
        look -> 1 of 1 free""",
    "a release serves the first who waits": """
        base=1 taken=1; a submitted -> 1
        7 waits for 1 -> asks 1 or 4
        released 1 -> 7 gets b at 1+1, withdraws""",
    "stale and doubled releases are counted and do nothing": """
        base=4; takes 1 1 -> a at 1+1, b at 2+1
        a b submitted -> 1 2
        released 1 1 5 999999 -> 3 unknown
        released 1 -> 1 unknown
        look -> b submitted, 3 of 4 free""",
    "a held slot that is released is cached, and can be submitted again": """
        base=1; holds 1 -> a at 1+1 held
        a submitted -> 1
        released 1 ->
        look -> a cached, 0 of 1 free
        a submitted -> 2
        look -> a submitted, 0 of 1 free
        released 1 -> 1 unknown
        look -> a submitted, 0 of 1 free""",
    "a slot that is given up while it is written is free, and given up once": """
        base=1; holds 1 -> a at 1+1 held
        a dropped ->
        look -> 1 of 1 free
        a dropped ->
        look -> 1 of 1 free""",
    "a slot that is given up while the engine has it comes back with its release": """
        base=1; holds 1 -> a at 1+1 held
        a submitted -> 1
        a dropped ->
        look -> a submitted, 0 of 1 free
        released 1 ->
        look -> 1 of 1 free""",
    "a cached slot that is given up is free": """
        base=1; holds 1 -> a at 1+1 held
        a submitted -> 1
        released 1 ->
        7 waits for 1 -> asks 1 or 4
        a dropped -> 7 gets b at 1+1, withdraws""",
    "a viewed slot that is discarded drains until its last view has gone": """
        base=2 taken=2; a viewed ->
        a dropped ->
        look -> a draining, 0 of 2 free, 1 in use
        a dropped ->
        7 waits for 2 -> asks 2 or 4
        a unviewed -> 7 gets b at 1+2, withdraws
        look -> b writing, 0 of 2 free""",
    "a viewed slot that is released drains until its last view has gone": """
        base=2 taken=2; a viewed ->
        a submitted -> 1
        released 1 ->
        look -> a draining, 0 of 2 free, 1 in use
        a dropped ->
        7 waits for 2 -> asks 2 or 4
        a unviewed -> 7 gets b at 1+2, withdraws
        look -> b writing, 0 of 2 free""",
    "a viewed slot that is evicted drains until its last view has gone": """
        base=2; holds 2 -> a at 1+2 held
        a viewed ->
        a submitted -> 1
        released 1 ->
        a dropped ->
        look -> a draining, 0 of 2 free, 1 in use
        a dropped ->
        7 waits for 2 -> asks 2 or 4
        a unviewed -> 7 gets b at 1+2, withdraws
        look -> b writing, 0 of 2 free""",
    "a view that dies before its slot leaves changes nothing": """
        base=1 taken=1; a viewed ->
        a unviewed ->
        look -> a writing, 0 of 1 free
        a dropped ->
        look -> 1 of 1 free""",
    "only what was written or cached is submitted": """
        base=4; takes 1 1 1 -> a at 1+1, b at 2+1, c at 3+1
        b submitted -> 1
        c viewed ->
        c dropped ->
        a dropped ->
        a submitted -> refused: FREE: SUBMIT is
        b submitted -> refused: SUBMITTED: SUBMIT is
        c submitted -> refused: DRAINING: SUBMIT is""",
    "leases in use are those in which this process may still write": """
        lent 2 at 4+1 for 9 ->
        lent 3 at 6+1 for 9 ->
        lent 4 at 8+1 for 9 ->
        lent 5 at 10+1 for 9 ->
        lent 6 at 12+1 for 9 ->
        takes 1 1 1 1 1 -> a at 4+1, b at 6+1, c at 8+1, d at 10+1, e at 12+1
        b submitted -> 1
        c viewed ->
        c submitted -> 2
        d viewed ->
        d dropped ->
        e dropped ->
        look -> a writing, b submitted, c submitted, d draining, 1 of 5 free, 4 in use, 5 in use, expiry in 5""",
    "a lease all of which is kept goes back": """
        base=4 taken=4; lent 2 at 8+1 for 7 ->
        takes 1 -> b at 8+1
        a b submitted -> 1 2
        kept 2 -> returns 2
        kept 1 -> returns 1
        look -> 0 of 0 free""",
    "a slot that was split is the slots that it was split in": """
        base=4; holds 3 -> a at 1+3 held
        a split 1 2 -> b at 1+1 held, c at 2+2 held
        look -> b writing, c writing, 1 of 4 free""",
}


def content(blocks: int) -> int:
    """Bytes that fill a slot of so many blocks."""
    return blocks * BLOCK_NBYTES - SLOT_HEADER_NBYTES


class Teller:
    """Carries a story's events out."""

    def __init__(self, sizes: str, book_of: Callable[..., Any] = PairedClientBook) -> None:
        words = sizes.split()
        number = {name: int(value) for name, _, value in (word.partition("=") for word in words if "=" in word)}
        waiting = [int(word) for word in words[1:]] if words[:1] == ["waiting"] else []
        if waiting:
            number = {"base": 1, "taken": 1, "lease": 1}
        limits = ClientBookLimits(
            client_id=1,
            leasable_nbytes=24 * BLOCK_NBYTES,
            max_leases=number.get("max_leases", 8),
            lease_nbytes=number.get("lease", 4) * BLOCK_NBYTES + number.get("lease_bytes", 0),
            lease_idle_s=5.0,
        )
        self.book = book_of(limits)
        self.now = 100.0
        self.slots: dict[str, ClientSlotRecord] = {}
        self.token = 0
        if "base" in number:
            self.say(f"lent 1 at 1+{number['base']} for 0")
        if "taken" in number:
            self.say(f"takes {number['taken']}")
        for ticket, blocks in enumerate(waiting, 1):
            self.say(f"{ticket} waits for {blocks}")

    def say(self, event: str) -> str:
        """Has something happen; returns what the book says."""
        words = event.split()
        verb = next(word for word in words if not word.isdigit() and word not in self.slots)
        slots = [self.slots[word] for word in words if word in self.slots]
        numbers = [int(word) for word in words if word.isdigit()]
        book, now = self.book, self.now
        effects: Sequence[ClientEffect] = []
        match verb:
            case "lent":
                start, blocks = map(int, words[3].split("+"))
                token = numbers[-1] if "for" in words else book._token
                effects = book.granted(LeaseGrant(token, numbers[0], start * BLOCK_NBYTES, blocks * BLOCK_NBYTES), now)
            case "takes" | "holds":
                had = [book.acquire(content(blocks), held=verb == "holds") for blocks in numbers]
                return ", ".join("nothing" if slot is None else self.named(slot) for slot in had)
            case "waits":
                effects = book.queue(numbers[0], content(numbers[1]), held="held" in words)
            case "leaves":
                effects = book.cancel(numbers[0])
            case "prefetches":
                effects = book.prefetch(content(numbers[0]))
            case "submitted":
                numbers = [book.submit(slot) - (1 << GENERATION_BITS) for slot in slots]
                for slot in slots:
                    assert slot.ref() == SlotRef(slot.lease.lease_id, slot.offset, slot.nbytes, slot.generation)
                return " ".join(map(str, numbers))
            case "released":
                effects, unknown = book.released([number + (1 << GENERATION_BITS) for number in numbers], now)
                return self.told([*effects, *([f"{unknown} unknown"] if unknown else [])])
            case "dropped":
                effects = [effect for slot in slots for effect in book.give_up(slot, now)]
            case "viewed":
                slots[0].viewed = True
            case "unviewed":
                effects = book.last_view_gone(slots[0], now)
            case "kept":
                effects = book.kept(numbers[0] + (1 << GENERATION_BITS), now)
            case "split":
                return ", ".join(map(self.named, book.split(slots[0], [content(blocks) for blocks in numbers])))
            case "recalled":
                effects = book.recalled(numbers)
            case "moment" | "moments":
                effects = [effect for _ in range(*numbers or [1]) for effect in book.moment_passed()]
            case "seconds":
                self.now += numbers[0]
                effects = book.expire(self.now)
            case "look":
                return self.look()
        book.check()
        return self.told(effects)

    def look(self) -> str:
        book = self.book
        there = {name: slot for name, slot in self.slots.items() if slot.state not in (ClientSlot.FREE, ClientSlot.KEPT)}
        states = [slot.state for slot in there.values()]
        assert [book.count(state) for state in ClientSlot] == [states.count(state) for state in ClientSlot]
        draining = [slot.blocks for slot in there.values() if slot.state is ClientSlot.DRAINING]
        assert book.draining_nbytes() == sum(draining) * BLOCK_NBYTES
        said = [f"{name} {slot.state.name}".lower() for name, slot in there.items()]
        said += [f"{book.free_nbytes // BLOCK_NBYTES} of {book.leased_nbytes // BLOCK_NBYTES} free"]
        said += [f"{lease_id} in use" for lease_id in book.leases_in_use()]
        expiry = book.next_expiry()
        return ", ".join([*said, *([f"expiry in {expiry - self.now:g}"] if expiry is not None else [])])

    def named(self, slot: ClientSlotRecord) -> str:
        """A slot that is new, by a name of its own, and where it is."""
        name = next(letter for letter in "abcdefghij" if letter not in self.slots)
        self.slots[name] = slot
        assert (slot.offset, slot.nbytes) == (slot.start * BLOCK_NBYTES, content(slot.blocks))
        assert slot.state is ClientSlot.WRITING
        return f"{name} at {slot.start}+{slot.blocks}{' held' if slot.held else ''}"

    def told(self, effects: Sequence[ClientEffect | str]) -> str:
        return ", ".join(effect if isinstance(effect, str) else self.told_one(effect) for effect in effects)

    def told_one(self, effect: ClientEffect) -> str:
        match effect:
            case Acquired(ticket, slot):
                return f"{ticket} gets {self.named(slot)}"
            case Send(LeaseReturn(lease_ids)):
                return f"returns {' '.join(map(str, lease_ids))}"
            case Send(LeaseRequest(token, nbytes, preferred, 0, waits)):
                self.token += 1
                assert token == self.token
                blocks, preferred = nbytes // BLOCK_NBYTES, -(-preferred // BLOCK_NBYTES)
                if not nbytes:
                    return "withdraws"
                return f"{'asks' if waits else 'wishes'} {blocks}" + (f" or {preferred}" if preferred != blocks else "")
        raise NotImplementedError(effect)


@for_each("story", STORIES.values(), ids=STORIES)
def test_stories(story: str) -> None:
    tell(story, Teller)


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
    teller = Teller("base=4")
    before = plain(teller.book)
    with pytest.raises(RemoteProtocolError, match=r"lease 9 .* is no range"):
        teller.book.granted(LeaseGrant(0, 9, offset, nbytes), teller.now)
    assert plain(teller.book) == before


def test_what_can_never_fit_fails_at_once() -> None:
    book = Teller("base=4").book
    too_much = content(24) + 1
    before = plain(book)
    for event in (book.acquire, lambda nbytes, held: book.queue(1, nbytes, held=held)):
        with pytest.raises(CapacityError, match="raise its slab_nbytes") as caught:
            event(too_much, held=False)
        assert (caught.value.needed, caught.value.capacity) == (too_much, content(24))
    book.check_capacity(content(24))
    assert plain(book) == before


def test_a_slot_has_room_for_its_header() -> None:
    slot = Teller("base=2").book.acquire(BLOCK_NBYTES, held=False)
    assert slot.blocks == 2


@for_each("kept_for", [1, 3, 10, 40])
def test_a_stream_of_small_ones_does_not_overtake_a_large_one_for_ever(kept_for: int) -> None:
    """There are twelve blocks. Small slots come in each moment, and each is kept for a while."""
    teller = Teller("base=12")
    teller.say("takes 3 3 3 3")
    book = teller.book
    leaves = dict(zip(teller.slots.values(), itertools.count(1), strict=False))  # when
    book.queue(0, content(12), held=False)
    is_lent, is_wanted, passed = True, True, 0
    for moment in range(1, 12 * kept_for + 12):
        effects = book.queue(moment, content(3), held=False) + book.moment_passed()
        for slot in [slot for slot, when in leaves.items() if when <= moment]:
            del leaves[slot]
            effects += book.give_up(slot, teller.now)
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
                again = LeaseGrant(book._token, moment + 1, BLOCK_NBYTES, 12 * BLOCK_NBYTES)
                effects += book.granted(again, teller.now)
    pytest.fail("the large one was never served")


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
def test_check_finds_a_damaged_book(kind: Books, damage: Callable[[ClientBook, ClientSlotRecord], None]) -> None:
    teller = Teller("base=4", kind.client)
    teller.say("takes 1 1")
    teller.say("b submitted")
    damage(teller.book, teller.slots["a"])
    with pytest.raises(AssertionError):
        teller.book.check()
