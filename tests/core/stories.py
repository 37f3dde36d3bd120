"""Tests of books as stories: one story a case, one event a line, and behind it all that the book says then.

A story begins with sizes, if it needs others than usual: ``quota=4; 1 connects 4 -> 1 gets 1 at 1+4``. What is ``refused`` has
changed nothing. Numbers are blocks; ``4+2`` are the blocks 4 and 5.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import pytest

from shmring.core.effects import (
    Answered,
    ClientGone,
    Granted,
    Recalled,
    Reclaimed,
    Released,
    ReplyGranted,
    ReplySlot,
    RequestAborted,
)
from shmring.core.geometry import BLOCK_NBYTES, GENERATION_BITS, EngineBookLimits, Geometry, slot_blocks
from shmring.core.messages import (
    DEVICE_MEMORY,
    HOST_MEMORY,
    KEPT_LEASE_ID,
    SLOT_HEADER_NBYTES,
    Found,
    LeaseGrant,
    LeaseRequest,
    Memory,
    NotKept,
    SlotRef,
)
from shmring.core.states import Lease, RequestEvent
from shmring.errors import CapacityError, LocalProtocolError, RemoteProtocolError
from tests.model.pairs import PairedEngineBook
from tests.model.state import plain
from tests.records import keep_of


class Teller(Protocol):
    """Carries a story's events out."""

    book: Any

    def say(self, event: str) -> str:
        """Has something happen; returns what the book says."""


def tell(story: str, teller_of: Callable[[str], Teller]) -> None:
    """Tells a story, and compares each line."""
    sizes, _, events = story.rpartition("; ") if "; " in story else ("", "", story)
    teller = teller_of(sizes)
    for line in filter(None, map(str.strip, events.splitlines())):
        event, expected = map(str.strip, line.split("->"))
        if expected.startswith("refused"):
            before = plain(teller.book)
            with pytest.raises((RemoteProtocolError, LocalProtocolError, CapacityError), match=expected.partition(": ")[2]):
                teller.say(event)
            assert plain(teller.book) == before, event
        else:
            assert f"{event} -> {teller.say(event)}" == f"{event} -> {expected}"


_FIRST_DEVICE_LEASE_ID = 1 << 40

#: How a story may begin.
SCENES = {
    "submitted": ["1 connects 4", "2 connects 4", "1 submits 5 1@1 2@4"],
    "running": ["1 connects 4", "2 connects 4", "1 submits 5 1@1 2@4", "1 runs 5"],
    # Of eight blocks for replies, two clients have two each; the first waits for five, and the second for one.
    "crowded": ["2 replies 2", "1 replies 2", "1 replies 5 as 7", "2 replies 1 as 8"],
}


class EngineTeller:
    """The engine's book. A book lends the blocks from 1 on: 12, unless the story begins with other sizes.

    ``clients=2``: clients 1 and 2 have connected, and have one block each. ``full 2 2``: all is lent, two blocks to client 1
    and two to client 2, by leases 3 and 4; clients 8 and 9 hold nothing. ``the moment passes``: of those that pass while
    somebody waits. ``1 uses 3`` is a request with a slot in lease 3, which ``1 aborts`` ends; ``1 submits 5 1@4 2@6+2`` is
    request 5 with slots 1 and 2, in block 4 and from block 6 on. ``1 asks 3 there``: in device memory, whose leases are ``d0``,
    ``d1``, ...
    ``1 replies 2``: the engine sends client 1 a reply of two blocks, or, as 7, queues for it with ticket 7; for 5, as one to
    request 5. ``writes``: it has not sent it yet. ``2 awaits a``: client 2 waits for content; ``1 delivers 1@1 as a``,
    ``2 takes a``, ``2 expects a``, ``1 recalls a``: of deliveries; ``a ages``: the engine drops one; ``the end comes``: the
    engine drains. ``look``: all slots, and how many blocks are free, quarantined, kept, pinned, and free for replies.
    """

    def __init__(self, sizes: str, book_of: Callable[..., Any] = PairedEngineBook) -> None:
        words = sizes.split()
        number = {name: int(value) for name, _, value in (word.partition("=") for word in words if "=" in word)}
        blocks = [int(word) for word in words[1:] if "=" not in word] if words[:1] == ["full"] else []
        limits = EngineBookLimits(
            max_lease_blocks=number.get("max_lease", 100 if blocks else 4),
            quota_blocks=number.get("quota", 100 if blocks else 8),
            max_leases=number.get("max_leases", 8),
            max_inflight=number.get("max_inflight", 4),
            kept_blocks=number.get("kept", 0),
            max_kept=number.get("max_kept", 4),
            max_pins=number.get("max_pins", 4),
            pinned_blocks=number.get("pinned", 100),
            max_waits=number.get("max_waits", 4),
            device_quota_blocks=number.get("device_quota", 12),
        )
        leasable, reply, device = number.get("leasable", sum(blocks) or 12), number.get("reply", 4), number.get("device", 0)
        self.book = book_of(Geometry(leasable_blocks=leasable, reply_blocks=reply, device_blocks=device), limits)
        self.tokens = 0
        self.grants: dict[int, LeaseGrant] = {}
        self.kept: dict[str, SlotRef] = {}
        self.asked: dict[tuple[int, str], int] = {}  # the last token for which a client has looked for a key
        bare = [f"{client} is bare" for client in (8, 9) if blocks]
        scene = [event for word in words for event in SCENES.get(word, [])]
        connect = [f"{client} connects {n}" for client, n in enumerate(blocks or [1] * number.get("clients", 0), 1)]
        for event in [*bare, *connect, *scene]:
            self.say(event)

    def say(self, event: str) -> str:
        """Has something happen; returns what the book says."""
        if event == "look":
            return self.look()
        who, verb, *rest = event.split()
        client = int(who) if who.isdigit() else 0
        said = numbers_behind(rest)
        numbers = [number for numbers in said.values() for number in numbers]
        memory: Memory = DEVICE_MEMORY if "there" in rest else HOST_MEMORY
        nbytes, book = BLOCK_NBYTES, self.book
        self.tokens += 1
        effects: Any = []
        match verb:
            case "connects":
                grant = book.connect(client, numbers[0] * nbytes)
                effects = [] if grant is None else [Granted(client, grant)]
            case "is":
                effects = book.return_leases(client, [book.connect(client, nbytes).lease_id])
            case "asks" | "wishes":
                needed, preferred = numbers[0], [*numbers, 0][1]
                waits = verb == "asks"
                request = LeaseRequest(self.tokens, needed * nbytes, preferred * nbytes, memory, waits)
                effects = book.request_lease(client, request)
            case "withdraws":
                effects = book.request_lease(client, LeaseRequest(self.tokens, 0, memory=memory))
            case "returns":
                effects = book.return_leases(client, numbers)
            case "uses":
                effects = book.submit(client, 1, [self.slot(client, f"1@{self.grants[numbers[0]].offset // nbytes}")])
            case "submits":
                effects = book.submit(client, numbers[0], [self.slot(client, word) for word in rest[1:]])
            case "runs":
                effects = book.claim(client, numbers[0])
            case "ends" | "fails" | "expires":
                event_of = {"ends": RequestEvent.FINISH, "fails": RequestEvent.ERROR, "expires": RequestEvent.DEADLINE}
                effects = ["told"] if book.end(client, numbers[0], event_of[verb]) else []
            case "aborts":
                effects = book.abort(client, [*numbers, 1][0])
            case "releases":
                released, viewed = ([generation_of(client, number) for number in said[word]] for word in ("", "viewed"))
                effects = book.release_slots(client, released, viewed)
            case "unviews":
                effects = book.last_view_gone(client, generation_of(client, numbers[0]))
            case "disconnects":
                effects = book.disconnect(client)
            case "leaves":
                pins = [generation_of(client, number) for number in said["pins"]]
                effects = book.goodbye(client, said["but"], said["replies"], pins)
            case "moment":
                effects = book.moment_passed()
            case "moments":
                effects = [effect for _ in range(client) for effect in book.moment_passed()]
            case "dies":
                effects = book.died(client)
            case "replies" | "writes":
                effects = self.reply(client, numbers[0], *said["for"] or [-1], said["as"], is_sent=verb == "replies")
            case "sends":
                effects = book.reply_sent(client, numbers[0])
            case "discards":
                effects = book.discard_reply(client, numbers[0])
            case "frees":
                effects = book.release_replies(client, numbers)
            case "reads":
                effects = book.replies_read(client, numbers)
            case "cancels":
                effects = book.cancel_reply(client)  # a ticket
            case "first":
                effects = book.let_overtake(rest[0] == "waits")
            case "keeps" | "delivers":
                key, slot = rest[-1].encode() * 32, self.slot(client, rest[0])
                effects = book.keep(client, keep_of(self.tokens, key, slot, for_one=verb == "delivers"))
            case "finds" | "awaits" | "takes" | "expects":
                key, waits, for_one = rest[0].encode() * 32, verb in ("awaits", "expects"), verb in ("takes", "expects")
                effects = book.find(client, self.tokens, key, waits, for_one)
                self.asked[client, rest[0]] = self.tokens
            case "recalls":
                effects = book.withdraw(client, [word.encode() * 32 for word in rest])
            case "ages":
                effects = book.drop_untaken([self.kept[who].generation])
            case "stops":
                effects = book.stop_waiting(client, [self.asked[client, word] for word in rest])
            case "end":
                book.drain()
            case "unpins":
                effects = book.unpin(client, [self.kept[word].generation for word in rest])
            case _:
                raise NotImplementedError(event)
        book.check()
        return ", ".join(map(self.told, effects or []))

    def slot(self, client: int, word: str) -> SlotRef:
        """``2@4+3``: its slot 2, the blocks from 4 to 6, in the lease that they were granted in; a letter is kept content."""
        if word in self.kept:
            return self.kept[word]
        number, _, place = word.partition("@")
        start, blocks = [*map(int, place.split("+")), 1][:2]
        offset, nbytes = start * BLOCK_NBYTES, blocks * BLOCK_NBYTES - SLOT_HEADER_NBYTES
        granted = [grant.lease_id for grant in self.grants.values() if 0 <= offset - grant.offset < grant.nbytes]
        lease_id = [*self.book.clients[client].leases, *granted][-1]
        return SlotRef(lease_id, offset, nbytes, generation_of(client, int(number)))

    def reply(self, client: int, blocks: int, request_id: int, ticket: list[int], *, is_sent: bool) -> list[Any]:
        nbytes = blocks * BLOCK_NBYTES - SLOT_HEADER_NBYTES
        slot = self.book.acquire_reply(client, nbytes, request_id)
        if slot is None and ticket:
            self.book.queue_reply(client, *ticket, nbytes, request_id)
        elif slot is not None and is_sent:
            self.book.reply_sent(client, slot.generation)
        return ["waits" if slot is None else slot]

    def look(self) -> str:
        states = [
            f"{client_id} has {number % (1 << GENERATION_BITS)} {slot.state.name.lower()}"
            for client_id, client in self.book.clients.items()
            for number, slot in client.slots.items()
        ]
        kept, counts = self.book.kept, {}
        for lending, where in zip(self.book.lendings, ("", " there"), strict=False):
            counts[f"free{where}"] = lending.free_nbytes // BLOCK_NBYTES
            counts[f"quarantined{where}"] = lending.leased_nbytes(Lease.QUARANTINED) // BLOCK_NBYTES
        counts |= {"kept": kept.blocks, "pinned": kept.blocks - kept.unpinned_blocks}
        counts |= {"for replies": self.book.reply_free_nbytes // BLOCK_NBYTES, "waiting": self.book.waiting_lease_requests}
        counts |= {"late aborts": self.book.late_aborts, "stale releases": self.book.stale_releases}
        counts |= {"slots there": self.book.count_device_slots()}
        return ", ".join([*states, *(f"{count} {name}" for name, count in counts.items() if count)])

    def told(self, effect: object) -> str:
        match effect:
            case str():
                return effect
            case Granted(client, grant):
                self.grants[grant.lease_id] = grant
                return f"{client} gets {named(grant.lease_id)} at {grant.offset // BLOCK_NBYTES}+{grant.nbytes // BLOCK_NBYTES}"
            case Recalled(client, lease_ids):
                return f"{client} recalled {' '.join(map(named, lease_ids))}"
            case Reclaimed(client, nbytes):
                return f"{client} reclaimed {nbytes // BLOCK_NBYTES}"
            case ClientGone(client):
                return f"{client} gone"
            case RequestAborted(client, request_id, was_running):
                return f"{client} aborted {request_id}{' running' if was_running else ''}"
            case Released(client, generations):
                assert all(generation >> GENERATION_BITS == client for generation in generations)
                return f"{client} released {' '.join(str(generation % (1 << GENERATION_BITS)) for generation in generations)}"
            case ReplySlot(number, start, blocks, is_copied_out, request_id):
                copied, to = " to copy" if is_copied_out else "", "" if request_id < 0 else f" for {request_id}"
                return f"reply {number} at {start}+{blocks}{copied}{to}"
            case ReplyGranted(ticket, slot):
                return f"{ticket} gets {self.told(slot)}"
            case Answered(client, Found(_, number, offset, nbytes)):
                letter = chr(self.book.kept.by_generation[number].key[0])
                self.kept[letter] = SlotRef(KEPT_LEASE_ID, offset, nbytes, number)
                return f"{client} has {letter} at {offset // BLOCK_NBYTES}+{slot_blocks(nbytes)}"
            case Answered(client, NotKept(_, reason)):
                return f"{client} has none: {reason}"
        raise NotImplementedError(effect)


def numbers_behind(words: list[str]) -> Mapping[str, list[int]]:
    """The numbers behind each word; those before the first word are behind the empty one."""
    numbers: dict[str, list[int]] = collections.defaultdict(list)
    last = ""
    for word in words:
        digits = word.removeprefix("d")
        if digits.isdigit():
            numbers[last].append(int(digits) + (_FIRST_DEVICE_LEASE_ID if word != digits else 0))
        else:
            last = word
    return numbers


def named(lease_id: int) -> str:
    """What a story calls a lease."""
    return str(lease_id) if lease_id < _FIRST_DEVICE_LEASE_ID else f"d{lease_id - _FIRST_DEVICE_LEASE_ID}"


def generation_of(client: int, number: int) -> int:
    """Of a client's slot, or what a number is that is no client's."""
    return client << GENERATION_BITS | number
