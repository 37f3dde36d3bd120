"""What holds after every action, and when everybody has gone.

The books assert their own invariants (``check``). Here it is compared with what is true outside of them: which code of
which process can reach which block, what a handler reads, what a caller waits for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shmring.core.compiled import ClientRecord, KeptRecord
from shmring.core.geometry import BLOCK_NBYTES, slot_blocks
from shmring.core.states import ClientSlot, EngineSlot, Lease
from tests.model.inside import has_reply, largest_run, slots_here, slots_with_engine, takes
from tests.simulation.engine import Engine
from tests.simulation.frontend import Pace, Session, Wants
from tests.simulation.loop import waited_for
from tests.simulation.payloads import require_intact
from tests.simulation.scenario import require

if TYPE_CHECKING:
    from tests.simulation.fan_out import FanOut
    from tests.simulation.simulation import Simulation


def check_memory(simulation: Simulation) -> None:
    """No byte has two owners: nobody may write what somebody else writes, reads, or was lent."""
    engine = simulation.engine
    if engine is None:
        return
    owners: dict[int, tuple[int, int]] = {}  # client and generation, by block
    _check_slots(engine, owners)
    for process in simulation.processes.values():
        for session in process.sessions():
            if session.epoch == engine.epoch:
                _check_session(engine, session, owners)


def _check_slots(engine: Engine, owners: dict[int, tuple[int, int]]) -> None:
    """What the engine will read or reads is what its book says, inside leases of its client, and nowhere twice."""
    count = 0
    for (client_id, _), waiting in engine.end.waiting.items():
        for slot in waiting._submit.content.slots:
            count += 1
            _own(engine, client_id, slot.generation, EngineSlot.PUBLISHED, owners)
    for handling in engine.claims:
        for slot in handling.slots if not handling.claim.released else ():
            count += 1
            _own(engine, handling.client_id, slot.generation, EngineSlot.CLAIMED, owners)
    for draining in engine.draining:
        count += 1
        _own(engine, draining.client_id, draining.slot.generation, EngineSlot.DRAINING, owners)
    clients = engine.book.clients.values()
    _check_unsent(engine)
    live = sum(len(client.slots) for client in clients)
    require(live == count, f"the book has {live} live slots, handlers and views have {count}")


def _check_unsent(engine: Engine) -> None:
    """Reply slots that are not sent are those of the handlers that are about to send, and of no others."""
    unsent = set()
    for handling in engine.claims:
        slot = handling.reply_slot
        if slot is not None:
            unsent.add(slot.generation)
            slots = engine.book.clients[handling.client_id].unsent_replies
            require(slot.generation in slots, "a reply is written into a slot that was taken away")
    booked = {generation for client in engine.book.clients.values() for generation in client.unsent_replies}
    require(booked == unsent, "a reply slot is kept for nobody")


def _own(engine: Engine, client_id: int, generation: int, state: EngineSlot, owners: dict[int, tuple[int, int]]) -> None:
    client = engine.book.clients.get(client_id)
    slot = client.slots.get(generation) if client is not None else None
    require(slot is not None and slot.state is state, f"a slot that is {state.name} is something else in the book")
    assert client is not None
    assert slot is not None
    if slot.kept is not None:
        _own_kept(engine, slot.kept, owners)
        return
    assert slot.lease is not None
    lease = client.leases.get(slot.lease.lease_id)
    require(
        lease is not None and lease.start <= slot.start and slot.start + slot.blocks <= lease.end,
        "a live slot is in no lease of its client",
    )
    for block in range(slot.start, slot.start + slot.blocks):
        require(block not in owners, "two live slots overlap")
        owners[block] = (client_id, generation)


def _own_kept(engine: Engine, kept: KeptRecord, owners: dict[int, tuple[int, int]]) -> None:
    """Content that a request has: many may have it, and it has not gone."""
    require(engine.book.kept.by_generation.get(kept.generation) is kept, "content has gone that a request has")
    for block in range(kept.start, kept.start + kept.blocks):
        require(owners.setdefault(block, (0, kept.generation)) == (0, kept.generation), "content is somebody's to write")


def _check_session(engine: Engine, session: Session, owners: dict[int, tuple[int, int]]) -> None:
    client = engine.book.clients.get(session.client_id)
    for slot in session.slots:
        if slot.lease is None:
            _check_pin(engine, client, slot.generation, slot.start, slot.blocks, owners)
            continue
        lease = client.leases.get(slot.lease.lease_id) if client is not None else None
        require(
            lease is not None and lease.start <= slot.start and slot.start + slot.blocks <= lease.end,
            "memory was taken back that its process can still write",
        )
        for kept in engine.book.kept.unpinned.values():
            require(
                kept.start + kept.blocks <= slot.start or slot.start + slot.blocks <= kept.start,
                "content that may go at any time can still be written by who gave it",
            )
        mine = (session.client_id, slot.generation if slot.state is ClientSlot.SUBMITTED else 0)
        for block in range(slot.start, slot.start + slot.blocks):
            owner = owners.get(block)
            # The engine may keep it, and have it in requests of others, though who gave it has not heard of that.
            is_kept = owner == (0, mine[1]) and slot.state is ClientSlot.SUBMITTED
            require(owner is None or owner == mine or is_kept, "memory can be written that somebody else reads or writes")
            if is_kept:
                continue
            # Whoever comes next must not have it, but for what the engine keeps already and its giver has not heard of.
            owners[block] = mine if slot.state is ClientSlot.SUBMITTED else (session.client_id, -1)
    for pin in session.real.kept._pins.values():
        _check_pin(engine, client, pin.found.generation, pin.record.start, pin.record.blocks, owners)
        require(
            client is not None and client.pins[pin.found.generation] >= pin.count, "a frontend has more pins than the engine"
        )
    for view in session.kept_views:
        _check_pin(engine, client, view.generation, view.start, view.blocks, owners)
    for view in (*session.kept_views, *(content.view for content in session.contents)):
        require_intact(view.payload, view.payload[0])
    for reply in session.replies:
        booked = None if client is None else client.replies.get(reply.generation)
        is_there = booked is not None and (booked.start, booked.blocks) == (reply.start, reply.blocks)
        require(is_there, "a reply was taken back that can still be read")
    if not session.ended and client is not None and client.connected:
        _check_leases(client, session)
        _check_submitted(engine, client, session)


def _check_pin(
    engine: Engine, client: ClientRecord | None, generation: int, start: int, blocks: int, owners: dict[int, tuple[int, int]]
) -> None:
    """What somebody may read of kept content is there, pinned, and nobody's to write."""
    content = engine.book.kept.by_generation.get(generation)
    is_there = content is not None and (content.start, content.blocks) == (start, blocks)
    require(is_there and client is not None and generation in client.pins, "what is pinned has gone")
    for block in range(start, start + blocks):
        _, owner = owners.get(block, (0, generation))
        require(owner == generation, "what is pinned is somebody's to write")


def _check_leases(client: ClientRecord, session: Session) -> None:
    for lease_id, held in session.book.leases.items():
        lease = client.leases.get(lease_id)
        require(
            lease is not None and (lease.start, lease.blocks) == (held.slots.start, held.slots.length),
            "a frontend has a lease that the engine has not lent",
        )


def _check_submitted(engine: Engine, client: ClientRecord, session: Session) -> None:
    """What a frontend has handed over, the engine has, or a record says so that is under way, in whichever direction."""
    there = {*client.slots, *engine.book.kept.by_generation}
    records = (*session.wire.to_engine, *session.wire.to_frontend)
    for generation in slots_with_engine(session.book).keys() - there:
        named = generation.to_bytes(8, "big"), generation.to_bytes(8, "little")  # as an int of msgpack, and in a slot's numbers
        require(any(name in record for record in records for name in named), "a submitted slot is lost")


def check_books(simulation: Simulation) -> None:
    """Each book is sound in itself, adds up, and is about the requests and waiters that there are."""
    for process in simulation.processes.values():
        if process.session is not None:
            _check_book(process.session)
    engine = simulation.engine
    if engine is None:
        return
    book = engine.book
    book.check()
    require(book.stale_releases == 0, "a frontend gave a reply slot back twice")
    lent = book.host.leased_nbytes(Lease.LEASED) + book.host.leased_nbytes(Lease.QUARANTINED)
    lent += book.kept.blocks * BLOCK_NBYTES
    require(book.host.free_nbytes + lent == engine.scenario.leasable_blocks * BLOCK_NBYTES, "the slab does not add up")
    require(book.clients.keys() == engine.shell._frontends.keys(), "the ring and its book have different clients")
    engine.injecting.check()
    for handling in engine.claims:
        require(handling.claim.released == handling.is_released, "a claim was released by nobody")
    running = {(handling.client_id, handling.request_id) for handling in engine.claims if not handling.claim.ended}
    booked = {(client_id, request) for client_id, client in book.clients.items() for request in client.requests}
    require(running == engine.end.claims.keys(), "a claim is in no hands, or the reverse")
    require(booked == running | engine.end.waiting.keys(), "a request is in the book and in no hands, or the reverse")
    replies = [slot for client in book.clients.values() for slot in client.replies.values()]
    reply_blocks = {block for slot in replies for block in range(slot.start, slot.start + slot.blocks)}
    require(len(reply_blocks) == sum(slot.blocks for slot in replies), "two reply slots overlap")
    in_replies = (engine.scenario.reply_blocks - len(reply_blocks)) * BLOCK_NBYTES
    require(book.reply_free_nbytes == in_replies, "the reply reserve does not add up")


def _check_book(session: Session) -> None:
    book, slots = session.book, session.real.host_slots
    book.check()
    waiting = [waited_for(caller.task) for caller in session.callers]
    ungiven = {place for place in slots._line if not place.done()}
    cancelled = {place for place in slots._line if place.cancelled()}  # and has not run yet: what comes for it goes back
    require(ungiven <= book._waiters.keys() <= ungiven | cancelled, "a waiter is in the book and is nobody, or the reverse")
    require(all(place in waiting for place in book._waiters), "a waiter is in line whom nobody knows")
    for waiter in session.may_be_served():
        blocks = slot_blocks(waiter.nbytes)
        usable = [largest_run(lease.slots) for lease in book.leases.values() if takes(book, lease, blocks)]
        require(blocks > max(usable, default=0), "who waits in line could be served")
    require(session.ended or not book.waiting or bool(session.loop.moments), "no moment passes while somebody waits for a slot")
    _check_callers_slots(session)
    counted: Any = session.end
    require(counted.stale_releases == 0, "the engine released a slot that it did not have")
    begun = sum(caller.wants is Wants.REQUEST and session.is_in_flight(caller) for caller in session.callers)
    require(session.end.in_flight == len(session.end.pending) + begun, "requests in flight do not add up")


def _check_callers_slots(session: Session) -> None:
    """What callers have is in the book, and what is in the book somebody has."""
    book = session.book
    sent = slots_with_engine(book).values()
    booked = {*sent, *slots_here(book)}
    reached = session.reached
    require(all(slot in booked for slot in reached if slot.lease is not None), "a caller has a slot that is free")
    starts = [slot.start for slot in session.real.sending.copies.values()]
    require(all(copying.start in starts for copying in session.copies), "a copy is made to a slot of nobody")
    unsent = [slot for caller in session.callers if (slot := session.unsent(caller)) is not None]
    require(len(unsent) == len(set(unsent)), "two payloads are in one slot")
    for slot in booked.difference(reached, sent):
        require(not slot.held or slot.state is ClientSlot.DRAINING, "a slot is held by nobody")
        if slot.state is ClientSlot.DRAINING:
            is_read = any(slot in caller.slots for caller in session.callers)
            require(is_read or session.loop.is_heard("_collect_deaths"), "a slot drains that nobody reads")
        else:
            require(slot in unsent, "a slot is kept for a payload of nobody")


def check_workers(simulation: Simulation) -> None:
    """What a living worker may read is what was sent to it, is the engine's to keep, and is nobody's to write."""
    fan_out = simulation.engine.fan_out if simulation.engine is not None else None
    if simulation.engine is None or fan_out is None:
        return
    fan_out.truth.check()
    for worker in simulation.workers:
        if worker.epoch == simulation.epoch:
            for sequence in worker.reachable():
                require(fan_out.truth.has(worker, sequence), "a message was taken back that a worker may still read")
            worker.check_intact()


def check_nobody_is_held_up(simulation: Simulation) -> None:
    """Everybody who goes on has done all that can be done: whoever still waits does so for what those have that do not.

    These may have stopped, or be silent: their memory is in use, and is theirs. Nothing else may be kept from others by that.
    """
    engine = simulation.engine
    for process in simulation.processes.values():
        session = process.session
        if session is None or process.pace is not Pace.GOES or session.awaited not in session.sent:
            continue
        has_come = has_reply(session.sent[session.awaited].submission)
        are_unread = any(has_reply(sent.submission) for sent in session.sent.values())
        require(has_come or not are_unread, "a reply waits for replies to its own client, which reads it first")
    if engine is None:
        return
    _check_leases_are_lent(simulation, engine)
    _check_replies_are_sent(engine)
    if engine.fan_out is not None:
        _check_messages_are_sent(engine.fan_out)


def _check_leases_are_lent(simulation: Simulation, engine: Engine) -> None:
    """Whoever waits for a lease waits for memory that is in use; a window over such memory has been given up in time.

    So does who waits for a slot behind others of its process, unless other clients wait as well, for whom windows may be open.
    """
    lending = engine.book.host
    sessions = {
        process.session.client_id: process.session
        for process in simulation.processes.values()
        if process.session is not None and process.pace is not Pace.STOPPED and process.session.epoch == engine.epoch
    }
    used: set[int] = set()
    for client_id, client in engine.book.clients.items():
        session = sessions.get(client_id)
        for lease in client.leases.values():
            held = None if session is None else session.book.leases.get(lease.lease_id)
            if not client.connected or held is None or not held.slots.is_empty or lease.kept_blocks:
                used.update(range(lease.start, lease.end))
    for kept in engine.book.kept.by_generation.values():
        if kept.pins:
            used.update(range(kept.start, kept.start + kept.blocks))
    first = simulation.scenario.geometry.LEASABLE_START
    end = first + simulation.scenario.leasable_blocks

    def is_idle(blocks: int) -> bool:
        return any(used.isdisjoint(range(start, start + blocks)) for start in range(first, end - blocks + 1))

    for client_id, want in lending._wants.items():
        is_free = want.waits and not _is_bound(engine, client_id, want.blocks) and is_idle(want.blocks)
        require(not is_free, "a client waits for a lease beside idle memory")
    if len(lending._wants) > 1:
        return
    for client_id, session in sessions.items():
        for waiter in session.book._waiters.values() if client_id in engine.book.clients else ():
            blocks = slot_blocks(waiter.nbytes)
            require(_is_bound(engine, client_id, blocks) or not is_idle(blocks), "a caller waits for a slot beside idle memory")


def _is_bound(engine: Engine, client_id: int, blocks: int) -> bool:
    """Whether a client must first return memory of its own."""
    client, limits = engine.book.clients[client_id], engine.book.limits
    held = sum(lease.blocks - lease.kept_blocks for lease in client.leases.values())
    held += sum(engine.book.kept.by_generation[generation].blocks for generation in client.pins)
    return len(client.leases) >= limits.max_leases or (bool(client.leases) and held + blocks > limits.quota_blocks)


def _check_replies_are_sent(engine: Engine) -> None:
    """Whatever waits for reply space waits for what a client has not read, or views."""
    scenario = engine.scenario
    first = scenario.geometry.LEASABLE_START + scenario.leasable_blocks
    used = {
        block
        for client in engine.book.clients.values()
        for slot in client.replies.values()
        for block in range(slot.start, slot.start + slot.blocks)
    }
    last = first + scenario.reply_blocks
    for want in engine.book._reply_wants.values():
        idle = [start for start in range(first, last - want.blocks + 1) if used.isdisjoint(range(start, start + want.blocks))]
        require(not idle, "a reply waits beside reply space that is free")


def _check_messages_are_sent(fan_out: FanOut) -> None:
    """A message waits for the workers that it goes to, for earlier messages to these, and for memory; for nothing else."""
    held_up = {worker.rank for worker in fan_out.workers.values() if worker.process.has_stopped}
    for call in sorted(fan_out.calls, key=lambda call: call.begun):
        ranks = {*fan_out.book.ranks} if call.to is None else {*call.to}
        if call.sequence:
            continue
        require(
            not ranks.isdisjoint(held_up) or fan_out.truth.free_run < call.blocks,
            "a message waits for a worker to which it does not go",
        )
        held_up |= ranks


def _check_workers_end(fan_out: FanOut) -> None:
    """All workers have died."""
    fan_out.look()
    fan_out.follow()
    book = fan_out.book
    require(
        not book.workers() and not fan_out.workers and not fan_out.connections, "a worker that is dead is still in the book"
    )
    require(not book.outstanding, "a message is kept by a worker that is dead")
    require(book.free_blocks == fan_out.engine.scenario.broadcast_blocks, "the memory of broadcasts did not come home whole")
    require(not fan_out.end.gathers, "replies are waited for that nobody asked for")
    require(not fan_out.end.is_crowded, "somebody has the turn to send who does not send")


def check_end(simulation: Simulation) -> None:
    """Everybody has gone, and everything has come home."""
    engine = simulation.engine
    if engine is None:
        return
    if engine.fan_out is not None:
        _check_workers_end(engine.fan_out)
    book, scenario = engine.book, engine.scenario
    require(not book.clients and not engine.clients, "a client that has gone is still in the book")
    in_hand = engine.end.waiting or engine.end.claims or engine.claims or engine.draining
    require(not in_hand, "a request of nobody is still in hand")
    require(len(book.kept.unpinned) == len(book.kept.by_generation), "what nobody uses is pinned")
    kept_nbytes = book.kept.blocks * BLOCK_NBYTES
    require(book.host.free_nbytes + kept_nbytes == scenario.leasable_blocks * BLOCK_NBYTES, "the slab did not come home whole")
    require(book.reply_free_nbytes == scenario.reply_blocks * BLOCK_NBYTES, "the reply reserve did not come home whole")
    require(book.waiting_lease_requests == 0, "a lease request of nobody is waiting")
