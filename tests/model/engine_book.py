"""The model of ``core/engine_book.pyx``: what the engine's book does, in plain Python. It is short, not fast.

It has the same methods, effects, errors and fields. ``tests/model/pairs.py`` runs the two side by side.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from shmring.core.effects import (
    Answered,
    ClientGone,
    EngineEffect,
    Reclaimed,
    Released,
    ReplyGranted,
    ReplySlot,
    RequestAborted,
)
from shmring.core.geometry import (
    BLOCK_NBYTES,
    GENERATION_BITS,
    EngineBookLimits,
    Geometry,
    blocks_for,
    slot_blocks,
)
from shmring.core.messages import (
    DEVICE_MEMORY,
    HOST_MEMORY,
    KEPT_LEASE_ID,
    SLOT_HEADER_NBYTES,
    Found,
    Keep,
    LeaseGrant,
    LeaseRequest,
    NotKept,
    NotKeptReason,
    SlotRef,
)
from shmring.core.states import (
    ENGINE_SLOT,
    LEASE,
    REQUEST,
    EngineSlot,
    EngineSlotEvent,
    Lease,
    LeaseEvent,
    Request,
    RequestEvent,
    advance,
)
from shmring.errors import CapacityError, RemoteProtocolError
from tests.model.blocks import RunAllocator
from tests.model.kept_book import KeptBook
from tests.model.lending import Lending
from tests.model.records import ClientRecord, EngineSlotRecord, KeptRecord, LeaseRecord, ReplyWant, RequestRecord

#: Ids of leases in device memory begin here: no engine grants as many leases in the slab.
_FIRST_DEVICE_LEASE_ID = 1 << 40
#: Numbers of slots that are kept content begin here: no generation of a client is as large.
_FIRST_USE = 1 << 63


#: Of a request, that its client copies out and its caller has not read.
_UNREAD_REPLIES = 2


def _booked(key: bytes, for_one: bool) -> bytes:
    """The key that the book has: the name of a delivery is none of content for all."""
    return key + b"1" if for_one else key


def _found(token: int, kept: KeptRecord) -> Found:
    return Found(token, kept.generation, kept.start * BLOCK_NBYTES, kept.nbytes, kept.is_copied, kept.payload)


class EngineBook:
    """The engine's book. Every method is one event; the returned effects are the caller's next duty, in order."""

    def __init__(self, geometry: Geometry, limits: EngineBookLimits) -> None:
        self.geometry = geometry
        self.limits = limits
        self.clients: dict[int, ClientRecord] = {}
        self.kept = KeptBook(limits)
        start, blocks = geometry.LEASABLE_START, geometry.leasable_blocks
        self.host = Lending(self.clients, limits, HOST_MEMORY, start, blocks, 1, self.kept)
        self._next_use = _FIRST_USE
        self._owes_service = False  # whether a pin has gone, so that waiting clients must be served
        self._is_draining = False
        self.lendings = [self.host]  # by the number of their memory
        if geometry.device_blocks:
            start, blocks = geometry.device_start, geometry.device_blocks
            self.lendings.append(Lending(self.clients, limits, DEVICE_MEMORY, start, blocks, _FIRST_DEVICE_LEASE_ID))
        self._replies = RunAllocator(geometry.reply_start, geometry.reply_blocks)
        self._reply_wants: dict[int, ReplyWant] = {}  # by ticket, in order of arrival
        self._may_overtake = False  # whether a reply that finds no room lets those behind it pass
        self._next_reply_generation = 1
        self._lent_replies: set[int] = set()  # generations, of all clients
        self.late_aborts = 0  # aborts of requests that had ended: messages cross
        self.stale_releases = 0  # releases of reply slots that had been given back before

    # -- clients ---------------------------------------------------------------------------------------------------

    def connect(self, client_id: int, lease_nbytes: int) -> LeaseGrant | None:
        """A frontend said hello. Returns its base lease, or None if none can be had now (it may ask later)."""
        assert client_id not in self.clients, "client ids are never reused"
        client = self.clients[client_id] = ClientRecord(client_id, last_generation=client_id << GENERATION_BITS)
        return self.host.connect(client, min(blocks_for(lease_nbytes), self.limits.max_lease_blocks))

    def goodbye(
        self, client_id: int, kept_lease_ids: Collection[int], kept_replies: Collection[int], still_pinned: Collection[int] = ()
    ) -> list[EngineEffect]:
        """A frontend says goodbye: it uses no memory of the slab any more, except for the memory that it names.

        A goodbye is a release of all other memory, which needs no proof of death. Disconnects the client.
        """
        client = self._connected(client_id)
        self._drop_reply_wants(client_id)
        self._drop_pins(client, still_pinned)
        kept_leases, kept_replies = frozenset(kept_lease_ids), frozenset(kept_replies)
        for lease in client.leases.values():
            lease.given_up = lease.lease_id not in kept_leases
        effects = self.release_replies(client_id, [g for g in self._sent_replies(client) if g not in kept_replies])
        return effects + self.disconnect(client_id)

    def disconnect(self, client_id: int) -> list[EngineEffect]:
        """A connection ended. Its requests are aborted and its leases quarantined: its process may still be writing."""
        client = self._connected(client_id)
        effects: list[EngineEffect] = []
        for request_id in list(client.requests):
            effects += self._abort(client, request_id)
        client.connected = False
        for token in list(client.waits):
            self.kept.end_wait(client, token)
        for lending in self.lendings:
            lending.forget(client)
        self._drop_reply_wants(client_id)
        for lease in client.leases.values():
            lease.state = advance(LEASE, lease.state, LeaseEvent.DISCONNECT)
        # The aborts have released slots. No frontend is left to be told.
        effects = [effect for effect in effects if not isinstance(effect, Released)]
        effects += self._reclaim(client) + self._serve_wants()
        self._owes_service = False
        return effects + self._serve_reply_wants()

    def died(self, client_id: int) -> list[EngineEffect]:
        """The kernel says that the client's process is dead: its memory is free again, unless a reader of ours holds it.

        Or the socket has ended after a goodbye: the client uses no memory any more that the goodbye named.
        """
        client = self.clients.get(client_id)
        if client is None:
            return []
        client.dead = True
        return self.disconnect(client_id) if client.connected else self._reclaim(client)

    def _reclaim(self, client: ClientRecord) -> list[EngineEffect]:
        """Frees the memory of a disconnected client that is proven unused. Forgets the client when the last of it is free."""
        if client.connected or client.client_id not in self.clients:
            return []
        effects: list[EngineEffect] = []
        if client.dead:
            effects += self.release_replies(client.client_id, self._sent_replies(client))
            self._drop_pins(client, ())
        nbytes = 0
        for lease in list(client.leases.values()):
            if lease.live.units == lease.kept_blocks and (client.dead or lease.given_up):
                lease.state = advance(LEASE, lease.state, LeaseEvent.PROOF)
                nbytes += (lease.blocks - lease.kept_blocks) * BLOCK_NBYTES
                self._return_lease(client, lease)
        if nbytes:
            effects.append(Reclaimed(client.client_id, nbytes))
        if not client.leases and not client.replies and not client.pins and not client.slots:
            del self.clients[client.client_id]
            effects.append(ClientGone(client.client_id))
            effects += self._serve_reply_wants()  # a client that is alone now has no quota
        return effects + (self._serve_wants() if nbytes else []) + self._served()

    def _connected(self, client_id: int) -> ClientRecord:
        client = self.clients[client_id]
        assert client.connected, f"client {client_id} is disconnected already"
        return client

    # -- leases ----------------------------------------------------------------------------------------------------

    def request_lease(self, client_id: int, request: LeaseRequest) -> list[EngineEffect]:
        """A client asks for a lease. This replaces its waiting request for the same memory. 0 bytes only withdraw that request.

        If the client has ``max_leases`` leases, the request waits until it returns one: the request may have crossed the last
        grant.

        Raises:
            RemoteProtocolError: it asks for more than can ever be granted, or there is no such memory.
        """
        self._connected(client_id)
        if request.memory >= len(self.lendings):
            raise RemoteProtocolError(f"client {client_id} asks for device memory, and this engine has no device slab")
        return self.lendings[request.memory].ask(client_id, request)

    def return_leases(self, client_id: int, lease_ids: Collection[int]) -> list[EngineEffect]:
        """A client gives leases back.

        Raises:
            RemoteProtocolError: it does not hold one of them, or a slot of one is in use.
        """
        client = self._connected(client_id)
        if len(lease_ids) > 2 * self.limits.max_leases:
            raise RemoteProtocolError(
                f"{len(lease_ids)} leases were returned at once, and max_leases is {self.limits.max_leases}"
            )
        leases = []
        for lease_id in dict.fromkeys(lease_ids):
            lease = client.leases.get(lease_id)
            if lease is None:
                raise RemoteProtocolError(f"lease {lease_id} was returned by client {client_id}, which does not hold it")
            if lease.live.units != lease.kept_blocks:
                raise RemoteProtocolError(f"lease {lease_id} was returned with a slot in use")
            leases.append(lease)
        for lease in leases:
            lease.state = advance(LEASE, lease.state, LeaseEvent.RETURN)
            self._return_lease(client, lease)
        return self._serve_wants()

    def moment_passed(self) -> list[EngineEffect]:
        """Another moment has passed while clients wait for leases."""
        return [effect for lending in self.lendings for effect in lending.moment_passed()]

    def is_awaited(self) -> bool:
        """Whether a caller waits for a lease, in either memory."""
        return any(lending.is_awaited() for lending in self.lendings)

    def _return_lease(self, client: ClientRecord, lease: LeaseRecord) -> None:
        self.lendings[lease.memory].take_back(client, lease)

    def _serve_wants(self) -> list[EngineEffect]:
        return [effect for lending in self.lendings for effect in lending.serve()]

    # -- requests and their slots ------------------------------------------------------------------------------------

    def submit(self, client_id: int, request_id: int, slots: Sequence[SlotRef]) -> None:
        """A client hands a request with its slots over.

        Raises:
            RemoteProtocolError: a slot does not lie in a lease of this client, or overlaps a live slot; or the request's number
                is not new, or there are too many requests; or kept content is not pinned. Nothing was changed.
        """
        client = self._connected(client_id)
        if request_id <= client.last_request_id:
            raise RemoteProtocolError(f"request {request_id} was submitted after request {client.last_request_id}")
        if len(client.requests) >= self.limits.max_inflight:
            raise RemoteProtocolError(f"more than max_inflight ({self.limits.max_inflight}) requests were submitted")
        slot_records = self._publish_all(client, slots)
        client.last_request_id = request_id
        client.requests[request_id] = RequestRecord(request_id, slot_records, Request.WAITING)

    def _publish_all(self, client: ClientRecord, slots: Sequence[SlotRef]) -> list[EngineSlotRecord]:
        """All of a request's slots are published, or none."""
        last_generation = client.last_generation
        records: list[EngineSlotRecord] = []
        try:
            for slot in slots:
                if slot.lease_id == KEPT_LEASE_ID:
                    records.append(self._use(client, slot))
                    continue
                records.append(self._publish(client, slot, last_generation))
                last_generation = slot.generation
        except RemoteProtocolError:
            for record in records:
                if record.kept is None:
                    self._give_back(record)
                else:
                    self.kept.unpin(record.kept)  # the request's pin; its client has one of its own
                    self._next_use -= 1
            raise
        client.last_generation = last_generation
        client.slots |= {record.generation: record for record in records}
        for record in records:
            if record.lease is not None:
                record.lease.new_moments = 0
        return records

    def _publish(self, client: ClientRecord, slot: SlotRef | Keep, last_generation: int) -> EngineSlotRecord:
        if slot.generation >> GENERATION_BITS != client.client_id or slot.generation <= last_generation:
            raise RemoteProtocolError(f"generation {slot.generation} is not a new one of client {client.client_id}")
        lease = client.leases.get(slot.lease_id)
        if lease is None:
            raise RemoteProtocolError(f"a slot is in lease {slot.lease_id}, which client {client.client_id} does not hold")
        start, misaligned = divmod(slot.offset, BLOCK_NBYTES)
        blocks = slot_blocks(slot.nbytes)
        if misaligned or start < lease.start or start + blocks > lease.end:
            raise RemoteProtocolError(
                f"a slot at {slot.offset} of {slot.nbytes} bytes is not inside lease {lease.lease_id} "
                f"[{lease.start * BLOCK_NBYTES}, {lease.end * BLOCK_NBYTES})"
            )
        if not lease.live.add(start, blocks):
            raise RemoteProtocolError(f"a slot at {slot.offset} of {slot.nbytes} bytes overlaps a live slot")
        return EngineSlotRecord(slot.generation, lease, start, blocks, EngineSlot.PUBLISHED)

    def claim(self, client_id: int, request_id: int) -> None:
        """The engine claims a waiting request."""
        client = self.clients[client_id]
        request = client.requests[request_id]
        request.state = advance(REQUEST, request.state, RequestEvent.SCHEDULE)
        self._claim_slots(request)

    def _claim_slots(self, request: RequestRecord) -> None:
        for slot in request.slots:
            slot.state = advance(ENGINE_SLOT, slot.state, EngineSlotEvent.CLAIM)

    def end(self, client_id: int, request_id: int, event: RequestEvent) -> bool:
        """The engine has ended a request: FINISH, ERROR or DEADLINE.

        Its slots are claimed until :meth:`release_slots`, also those of a request that ended before it was claimed.

        Returns:
            Whether the frontend must be told of the end; False if the request had ended before (it was aborted meanwhile).
        """
        client = self.clients.get(client_id)
        request = client.requests.get(request_id) if client is not None else None
        if client is None or request is None:
            return False
        was_waiting = request.state is Request.WAITING
        request.state = advance(REQUEST, request.state, event)
        if was_waiting:
            self._claim_slots(request)
        del client.requests[request_id]
        return True

    def abort(self, client_id: int, request_id: int) -> list[EngineEffect]:
        """A client aborts a request. An unknown one has ended already, which is no error: the messages crossed."""
        client = self._connected(client_id)
        effects = self._abort(client, request_id)
        return effects + self._served() if effects else []

    def _abort(self, client: ClientRecord, request_id: int) -> list[EngineEffect]:
        request = client.requests.pop(request_id, None)
        if request is None:
            self.late_aborts += 1
            return []
        was_running = request.state is Request.RUNNING
        request.state = advance(REQUEST, request.state, RequestEvent.ABORT)
        released = []
        for slot in request.slots:
            if slot.state is EngineSlot.RELEASED:
                continue  # its claim has released it already
            slot.state = advance(ENGINE_SLOT, slot.state, EngineSlotEvent.ABORT)
            if slot.state is EngineSlot.RELEASED:
                released += self._forget_slot(client, slot)
        effects: list[EngineEffect] = [RequestAborted(client.client_id, request_id, was_running)]
        if released:
            effects.append(Released(client.client_id, tuple(released)))
        return effects

    def release_slots(self, client_id: int, generations: Sequence[int], viewed: Collection[int]) -> list[EngineEffect]:
        """The engine is done with claimed slots; those in ``viewed`` still have live views and drain first."""
        client = self.clients[client_id]
        changes = []
        for generation in dict.fromkeys(generations):
            slot = client.slots[generation]
            event = EngineSlotEvent.RELEASE_VIEWED if generation in viewed else EngineSlotEvent.RELEASE
            changes.append((slot, advance(ENGINE_SLOT, slot.state, event)))
        released = []
        for slot, state in changes:
            slot.state = state
            if state is EngineSlot.RELEASED:
                released += self._forget_slot(client, slot)
        return self._after_release(client, released)

    def last_view_gone(self, client_id: int, generation: int) -> list[EngineEffect]:
        """The last view of a draining slot has died."""
        client = self.clients[client_id]
        slot = client.slots[generation]
        slot.state = advance(ENGINE_SLOT, slot.state, EngineSlotEvent.LAST_VIEW_GONE)
        return self._after_release(client, self._forget_slot(client, slot))

    def _after_release(self, client: ClientRecord, released: Sequence[int]) -> list[EngineEffect]:
        if client.connected:
            return ([Released(client.client_id, tuple(released))] if released else []) + self._served()
        return self._reclaim(client) + self._served()

    def _forget_slot(self, client: ClientRecord, slot: EngineSlotRecord) -> list[int]:
        """Returns the generations of which the client must be told: its own slot, but not a use of kept content."""
        del client.slots[slot.generation]
        self._give_back(slot)
        return [slot.generation] if slot.kept is None else []

    def _give_back(self, slot: EngineSlotRecord) -> None:
        if slot.kept is not None:
            self._unpin(slot.kept)
        else:
            assert slot.lease is not None
            slot.lease.live.remove(slot.start, slot.blocks)

    # -- what is kept ------------------------------------------------------------------------------------------------

    def find(self, client_id: int, token: int, key: bytes, waits: bool = False, for_one: bool = False) -> list[EngineEffect]:
        """A client looks for kept content: if it is there, it is pinned once more for the client. If it is not, the answer
        says so; or, if the client waits, it comes with the content or when the client stops waiting.

        Raises:
            RemoteProtocolError: it waits for this key already, or for as many as it may, or by this token. Nothing was changed.
        """
        client = self._connected(client_id)
        key = _booked(key, for_one)
        kept = self.kept.by_key.get(key)
        if kept is not None:
            return [Answered(client_id, self._answer_to(client, token, kept)), *self._served()]
        if not waits:
            self.kept.misses += 1
            return [Answered(client_id, NotKept(token, "absent"))]
        if token in client.waits or key in client.waits.values():
            raise RemoteProtocolError(f"client {client_id} waits for content twice, by one token or for one key")
        if len(client.waits) >= self.limits.max_waits:
            raise RemoteProtocolError(f"client {client_id} waits for more than {self.limits.max_waits} keys")
        self.kept.wait(client, token, key)
        return []

    def stop_waiting(self, client_id: int, tokens: Sequence[int]) -> list[EngineEffect]:
        """A client waits no more for the answers to these questions. One that was answered meanwhile is no error."""
        client = self._connected(client_id)
        waited = [token for token in dict.fromkeys(tokens) if token in client.waits]
        for token in waited:
            self.kept.end_wait(client, token)
        self.kept.misses += len(waited)
        return [Answered(client_id, NotKept(token, "absent")) for token in waited]

    def _answer_to(self, client: ClientRecord, token: int, kept: KeptRecord) -> Found | NotKept:
        """Pins content for a client that has looked for it, if it may; returns the answer."""
        if not self._may_pin(client, kept, kept.blocks):
            self.kept.refusals += 1
            return NotKept(token, "pins")
        self.kept.hits += 1
        kept.hits += 1
        found = self._pinned(client, token, kept)
        if kept.for_one:
            self.kept.take(kept)
            self._owes_service = self.host.waiting_lease_requests > 0  # it counts no more for its sender
        return found

    def _may_pin(self, client: ClientRecord, kept: KeptRecord | None, blocks: int) -> bool:
        """Whether a client may pin content of so many blocks once more; None: it is not kept yet."""
        if sum(client.pins.values()) >= self.limits.max_pins:
            return False
        pinned = sum(self.kept.by_generation[generation].blocks for generation in client.pins)
        return (kept is not None and kept.generation in client.pins) or pinned + blocks <= self.limits.pinned_blocks

    def keep(self, client_id: int, content: Keep) -> list[EngineEffect]:
        """A client hands a slot over, to be kept and pinned for it. If the key has content already, that is pinned instead.
        Clients that wait for the key have it from now on.

        Raises:
            RemoteProtocolError: it is not a slot that was lent to this client, or it is in device memory. Nothing was changed.
        """
        client = self._connected(client_id)
        record = self._publish(client, content, client.last_generation)
        lease = record.lease
        assert lease is not None
        if lease.memory == DEVICE_MEMORY:
            self._give_back(record)
            raise RemoteProtocolError("what is kept is in host memory")
        client.last_generation = content.generation
        lease.new_moments = 0
        key = _booked(content.key, content.for_one)
        there, replaced = self.kept.by_key.get(key), None
        if content.for_one:
            there, replaced = None, there
        reason = self._why_not_kept(client, record, there, content.for_one, replaced)
        if reason is not None or there is not None:
            self._give_back(record)
            if there is not None and reason is None:
                answer: Found | NotKept = self._pinned(client, content.token, there)
            else:
                assert reason is not None
                self.kept.refusals += 1
                answer = NotKept(content.token, reason)
            return [Released(client_id, (content.generation,)), Answered(client_id, answer)]
        if replaced is not None:
            self._unpin(replaced)
            self.kept.deliveries_dropped += 1
        while self.kept.blocks + record.blocks > self.kept.max_blocks or len(self.kept.by_generation) >= self.kept.max_kept:
            self.host.evict(next(iter(self.kept.unpinned.values())), for_content=True)
        kept = KeptRecord(
            *(content.generation, key, record.start, record.blocks, content.nbytes, content.is_copied, content.payload),
            for_one=content.for_one,
        )
        self.host.carve(lease, kept)
        self.kept.add(kept)
        if content.for_one:
            self.kept.pin(kept)  # until it has a taker
            effects: list[EngineEffect] = [Answered(client_id, _found(content.token, kept))]
        else:
            effects = [Answered(client_id, self._pinned(client, content.token, kept))]
        for waiting_id, token in list(self.kept.waits.get(key, {}).items()):
            if self.kept.by_key.get(key) is kept:
                waiting = self.clients[waiting_id]
                self.kept.end_wait(waiting, token)
                effects.append(Answered(waiting_id, self._answer_to(waiting, token, kept)))
        self._owes_service = False
        return effects + self.host.serve()

    def withdraw(self, client_id: int, names: Sequence[bytes]) -> list[EngineEffect]:
        """A client takes its deliveries back that nobody has taken: those of these names, or without names all of them."""
        self._connected(client_id)
        own = self.kept.untaken_of(client_id)
        booked = [_booked(name, True) for name in names]
        for kept in own:
            if not names or kept.key in booked:
                self._unpin(kept)
                self.kept.withdrawn += 1
        return self._served()

    def untaken(self) -> list[KeptRecord]:
        """The deliveries that have no taker."""
        return [kept for kept in self.kept.by_key.values() if kept.for_one]

    def drop_untaken(self, generations: Collection[int]) -> list[EngineEffect]:
        """The engine drops deliveries that nobody has taken for long."""
        for kept in self.untaken():
            if kept.generation in generations:
                self._unpin(kept)
                self.kept.deliveries_dropped += 1
        return self._served()

    def _why_not_kept(
        self,
        client: ClientRecord,
        slot: EngineSlotRecord,
        there: KeptRecord | None,
        for_one: bool,
        replaced: KeptRecord | None,
    ) -> NotKeptReason | None:
        if self._is_draining:
            return "ends"
        if there is None and (slot.blocks > self.kept.max_blocks or slot.blocks > self.limits.pinned_blocks):
            return "large"
        if for_one:
            untaken = [kept for kept in self.kept.untaken_of(client.client_id) if kept is not replaced]
            blocks = sum(kept.blocks for kept in untaken) + slot.blocks
            may_pin = len(untaken) < self.limits.max_pins and blocks <= self.limits.pinned_blocks
        else:
            may_pin = self._may_pin(client, there, slot.blocks if there is None else there.blocks)
        if not may_pin:
            return "pins"
        if there is not None:
            return None
        pinned = [kept for kept in self.kept.by_generation.values() if kept.pins and kept is not replaced]
        is_full = len(pinned) >= self.kept.max_kept
        is_full = is_full or sum(kept.blocks for kept in pinned) + slot.blocks > self.kept.max_blocks
        return "full" if is_full or self.host.is_wanted(slot.start, slot.blocks) else None

    def _pinned(self, client: ClientRecord, token: int, kept: KeptRecord) -> Found:
        """Pins content once more for a client. Returns the message that says so to the client."""
        client.pins[kept.generation] = client.pins.get(kept.generation, 0) + 1
        if client.pins[kept.generation] == 1:
            self.kept.pin(kept)
        return _found(token, kept)

    def drain(self) -> None:
        """The engine is about to end: it keeps nothing more."""
        self._is_draining = True

    def unpin(self, client_id: int, generations: Sequence[int]) -> list[EngineEffect]:
        """A client gives pins back, one for each time that a generation is named.

        Raises:
            RemoteProtocolError: it does not have so many. Nothing was changed.
        """
        client = self._connected(client_id)
        left = dict(client.pins)
        for generation in generations:
            if not left.get(generation, 0):
                raise RemoteProtocolError(f"client {client_id} takes back a pin of {generation}, which it does not have")
            left[generation] -= 1
        for generation in dict.fromkeys(generations):
            client.pins[generation] = left[generation]
            if not left[generation]:
                del client.pins[generation]
                self._unpin(self.kept.by_generation[generation])
        return self._served()

    def _served(self) -> list[EngineEffect]:
        """Serves the clients that wait for a lease, if a pin has gone."""
        owes, self._owes_service = self._owes_service, False
        return self.host.serve() if owes else []

    def _drop_pins(self, client: ClientRecord, still_pinned: Collection[int]) -> None:
        for generation in [generation for generation in client.pins if generation not in still_pinned]:
            del client.pins[generation]
            self._unpin(self.kept.by_generation[generation])

    def _unpin(self, kept: KeptRecord) -> None:
        self.kept.unpin(kept)
        if not kept.pins and (kept.for_one or self.host.is_wanted(kept.start, kept.blocks)):
            self.host.evict(kept)
        self._owes_service = self.host.waiting_lease_requests > 0

    def _use(self, client: ClientRecord, slot: SlotRef) -> EngineSlotRecord:
        """Returns the record of a request's use of kept content. The use is one more pin."""
        kept = self.kept.by_generation.get(slot.generation)
        if kept is None or slot.generation not in client.pins:
            raise RemoteProtocolError(
                f"client {client.client_id} sends kept content {slot.generation}, which it has not pinned"
            )
        if slot.offset != kept.start * BLOCK_NBYTES or slot.nbytes != kept.nbytes:
            raise RemoteProtocolError(f"kept content {slot.generation} is not {slot.nbytes} bytes at {slot.offset}")
        self.kept.pin(kept)
        use, self._next_use = self._next_use, self._next_use + 1
        return EngineSlotRecord(use, None, kept.start, kept.blocks, EngineSlot.PUBLISHED, kept)

    # -- replies -----------------------------------------------------------------------------------------------------

    def acquire_reply(self, client_id: int, nbytes: int, request_id: int = -1) -> ReplySlot | None:
        """Acquires a reply slot for a client now; None if that would overtake a waiter, or does not fit now.

        Raises:
            CapacityError: it is larger than the whole reserve.
        """
        want = ReplyWant(client_id, self._reply_blocks(nbytes), request_id)
        if any(self._goes_before(other, want) for other in self._reply_wants.values()):
            return None
        return self._acquire_reply(want)

    def _goes_before(self, other: ReplyWant, want: ReplyWant) -> bool:
        """Whether a reply that waits goes before another one that comes later."""
        if other.client_id == want.client_id and other.request_id == want.request_id >= 0:
            return True
        match self._reply_way(other):
            case "unread":
                return False
            case "waits":
                return other.client_id == want.client_id and not self._may_overtake
            case _:
                return not self._may_overtake

    def queue_reply(self, client_id: int, ticket: int, nbytes: int, request_id: int = -1) -> None:
        """Queues for a reply slot; :class:`ReplyGranted` with this ticket comes as an effect of some later event."""
        client = self._connected(client_id)
        self._reply_wants[ticket] = ReplyWant(client.client_id, self._reply_blocks(nbytes), request_id)

    def let_overtake(self, may_overtake: bool) -> list[EngineEffect]:
        """Says whether a reply that finds no room lets those behind it pass."""
        self._may_overtake = may_overtake
        return self._serve_reply_wants()

    def replies_read(self, client_id: int, request_ids: Sequence[int]) -> list[EngineEffect]:
        """A client's callers have read replies that it has copied out, one for each time that a request is named.

        Raises:
            RemoteProtocolError: so many were not sent. Nothing was changed.
        """
        client = self.clients[client_id]
        for request_id in request_ids:
            request = client.requests.get(request_id)
            is_too_much = request is not None and request_ids.count(request_id) > request.unread_replies
            if request_id > client.last_request_id or is_too_much:
                raise RemoteProtocolError(f"client {client_id} has read a reply to request {request_id} that was not sent")
        for request_id in request_ids:
            if request_id in client.requests:
                client.requests[request_id].unread_replies -= 1
        return self._serve_reply_wants()

    def cancel_reply(self, ticket: int) -> list[EngineEffect]:
        """Leaves the queue of :meth:`queue_reply`, and passes the turn on."""
        self._reply_wants.pop(ticket, None)
        return self._serve_reply_wants()

    def release_replies(self, client_id: int, generations: Sequence[int]) -> list[EngineEffect]:
        """A client gives reply slots back. A slot that was given back before is only counted.

        Raises:
            RemoteProtocolError: it never had one of them, or one was not sent to it yet, or these are more slots than there are
                blocks. Nothing was changed.
        """
        client = self.clients[client_id]
        if len(generations) > self.geometry.reply_blocks:
            raise RemoteProtocolError(
                f"{len(generations)} reply slots were released at once, and the reserve has {self.geometry.reply_blocks} blocks"
            )
        for generation in generations:
            if generation in client.unsent_replies or (generation not in client.replies and not self._was_released(generation)):
                raise RemoteProtocolError(f"reply slot {generation} was released by client {client_id}, which does not hold it")
        for generation in generations:
            if generation in client.replies:
                self._free_reply(client, generation)
            else:
                self.stale_releases += 1
        return self._serve_reply_wants()

    def _was_released(self, generation: int) -> bool:
        """Whether a reply slot was lent out once and nobody holds it now. Generations are never used again."""
        return 0 < generation < self._next_reply_generation and generation not in self._lent_replies

    def reply_sent(self, client_id: int, generation: int) -> None:
        """A reply slot has been written, and belongs to its client from now on."""
        self.clients[client_id].unsent_replies.remove(generation)

    def discard_reply(self, client_id: int, generation: int) -> list[EngineEffect]:
        """The engine has stopped writing a reply slot that it will not send."""
        client = self.clients[client_id]
        client.unsent_replies.remove(generation)
        slot = client.replies[generation]
        request = client.requests.get(slot.request_id)
        if request is not None and slot.is_copied_out:
            request.unread_replies = max(0, request.unread_replies - 1)
        self._free_reply(client, generation)
        return self._serve_reply_wants() + self._reclaim(client)

    def _free_reply(self, client: ClientRecord, generation: int) -> None:
        slot = client.replies.pop(generation)
        self._lent_replies.remove(generation)
        self._replies.free(slot.start, slot.blocks)

    def _sent_replies(self, client: ClientRecord) -> list[int]:
        return [generation for generation in client.replies if generation not in client.unsent_replies]

    def _drop_reply_wants(self, client_id: int) -> None:
        for ticket in [ticket for ticket, want in self._reply_wants.items() if want.client_id == client_id]:
            del self._reply_wants[ticket]

    def _reply_blocks(self, nbytes: int) -> int:
        blocks = slot_blocks(nbytes)
        if blocks > self.geometry.reply_blocks:
            capacity = self.geometry.reply_blocks * BLOCK_NBYTES - SLOT_HEADER_NBYTES
            raise CapacityError(
                f"a reply of {nbytes} bytes can never fit the reply reserve of {capacity}; raise reply_nbytes",
                needed=nbytes,
                capacity=capacity,
            )
        return blocks

    def _reply_way(self, want: ReplyWant) -> Literal["stays", "passes", "waits", "unread"]:
        """How a reply may go: it stays in its slot, or its client copies it out. Or it waits: for its client to give more of
        the reserve back, or for a caller to read an earlier reply to the same request."""
        client, left = self.clients[want.client_id], self._replies.free_units - want.blocks
        if client.reply_blocks + want.blocks <= left:
            return "stays"
        request = client.requests.get(want.request_id)
        if request is not None and request.unread_replies >= _UNREAD_REPLIES:
            return "unread"
        return "passes" if not client.passing_blocks or client.passing_blocks + want.blocks <= left else "waits"

    def _acquire_reply(self, want: ReplyWant) -> ReplySlot | None:
        way = self._reply_way(want)
        start = self._replies.allocate(want.blocks) if way in {"stays", "passes"} else None
        if start is None:
            return None
        slot = ReplySlot(self._next_reply_generation, start, want.blocks, way == "passes", want.request_id)
        self._next_reply_generation += 1
        client = self.clients[want.client_id]
        client.replies[slot.generation] = slot
        self._lent_replies.add(slot.generation)
        client.unsent_replies.add(slot.generation)
        if way == "passes" and want.request_id in client.requests:
            client.requests[want.request_id].unread_replies += 1
        return slot

    def _serve_reply_wants(self) -> list[EngineEffect]:
        effects: list[EngineEffect] = []
        before: list[ReplyWant] = []  # those that go on waiting
        for ticket, want in list(self._reply_wants.items()):
            slot = None if any(self._goes_before(other, want) for other in before) else self._acquire_reply(want)
            if slot is None:
                before.append(want)
                continue
            del self._reply_wants[ticket]
            effects.append(ReplyGranted(ticket, slot))
        return effects

    # -- what there is -------------------------------------------------------------------------------------------------

    @property
    def waiting_lease_requests(self) -> int:
        """Clients that wait for a lease, in either memory."""
        return sum(lending.waiting_lease_requests for lending in self.lendings)

    @property
    def reply_free_nbytes(self) -> int:
        """Free bytes of the reply reserve."""
        return self._replies.free_units * BLOCK_NBYTES

    def count_slots(self, state: EngineSlot) -> int:
        """Slots in this state, of all clients and in either memory."""
        return sum(slot.state is state for client in self.clients.values() for slot in client.slots.values())

    def count_device_slots(self) -> int:
        """Slots in device memory that the engine holds in any state."""
        slots = [slot for client in self.clients.values() for slot in client.slots.values()]
        return sum(slot.lease is not None and slot.lease.memory == DEVICE_MEMORY for slot in slots)

    def check(self) -> None:
        """Asserts the invariants of the book; for tests, and for closing."""
        for lending in self.lendings:
            lending.check()
        replies = sum(slot.blocks for client in self.clients.values() for slot in client.replies.values())
        assert self._replies.free_units + replies == self.geometry.reply_blocks, "a reply block is lost"
        for client in self.clients.values():
            assert client.connected or not client.requests, "a request outlives its connection"
            for lease in client.leases.values():
                expected = Lease.LEASED if client.connected else Lease.QUARANTINED
                assert lease.state is expected, f"lease {lease.lease_id} is {lease.state.name}"
                slots = [slot for slot in client.slots.values() if slot.lease is lease]
                assert lease.live.units == lease.kept_blocks + sum(slot.blocks for slot in slots)
            end = 0
            for slot in sorted(client.slots.values(), key=lambda slot: slot.start):
                if slot.lease is None:
                    continue
                assert slot.start >= end, f"slot {slot.generation} overlaps another"
                assert slot.lease.start <= slot.start
                assert slot.start + slot.blocks <= slot.lease.end
                assert client.leases.get(slot.lease.lease_id) is slot.lease, "a live slot is in no lease of its client"
                end = slot.start + slot.blocks
