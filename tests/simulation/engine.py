"""One life of an engine: the real end and book, and around them what ``shmring.ring`` adds.

The duties of a ring are written again here as it has them, for handlers that may be anywhere between two awaits: waiting
for reply space, copying a reply, cancelled but not run yet, gone with views of a request's slots still alive.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shmring.core import engine_end
from shmring.core.effects import (
    Answered,
    ClientGone,
    EngineEffect,
    Granted,
    Recalled,
    Released,
    ReplyGranted,
    ReplySlot,
    RequestAborted,
)
from shmring.core.engine_book import EngineBook
from shmring.core.geometry import BLOCK_NBYTES
from shmring.core.messages import (
    KEPT_LEASE_ID,
    SLOT_HEADER_NBYTES,
    Abort,
    EngineMessage,
    Failed,
    FailureKind,
    Find,
    Goodbye,
    Keep,
    LeaseGrant,
    LeaseRecall,
    LeaseRequest,
    LeaseReturn,
    Refused,
    Release,
    ReplyRelease,
    SlotRef,
    Unpin,
    decode_frontend_message,
)
from shmring.core.states import RequestEvent
from shmring.core.views import Regions
from shmring.errors import RemoteProtocolError
from tests.simulation import books, ends
from tests.simulation.fan_out import FanOut
from tests.simulation.frontend import Process, content_nbytes
from tests.simulation.payloads import (
    DECODER,
    INLINE_NBYTES,
    MAX_PAYLOAD_NBYTES,
    MAX_TENSORS,
    PACKER,
    payload_of,
    require_intact,
)
from tests.simulation.scenario import Action, Kind, Scenario, require
from tests.simulation.wire import Wire, open_slab

__all__ = ["Claim", "Engine"]

if TYPE_CHECKING:
    _FrontendEnd = engine_end.FrontendEnd
    _ClaimEnd = engine_end.ClaimEnd
else:
    _FrontendEnd = _ClaimEnd = object  # compiled or not: see Engine

_ENDINGS = (Kind.FINISH, Kind.FAIL, Kind.TIME_OUT)


class Client(_FrontendEnd):
    """A connection, as the engine has it."""

    def __init__(self, engine: Engine, client_id: int, process: Process) -> None:
        super().__init__(engine.end, client_id)
        self.engine = weakref.proxy(engine)
        self.process = process
        self.wire = Wire(engine.scenario.max_queue)
        self.link = self.wire.towards_frontend
        self.connected = True
        self.buried = False  # its pidfd has fired
        self.attach(self.link.writer)

    def take_message(self, record: bytes) -> None:
        self.engine.message_received(self, record)

    def tell(self, message: EngineMessage) -> None:
        """Sends a message."""
        self.link.send(message)


@dataclasses.dataclass(slots=True, eq=False)
class ReplyWaiter:
    """A handler that waits for a reply slot."""

    ticket: int
    cancelled: bool = False  # but it has not run since


class Claim(_ClaimEnd):
    """A request, and from its claim on what a handler does with it.

    Attributes:
        reply: a slot for a reply: waited for, or being written.
        replies: sent so far.
    """

    reply: ReplyWaiter | ReplySlot | None = None
    replies = 0

    @functools.cached_property
    def slots(self) -> tuple[SlotRef, ...]:
        """Its slots, in the order of its tensors; those that are kept content with the numbers that the book has given them."""
        request = self.end.book.clients[self.client_id].requests[self.request_id]
        slots = self.submit.content.slots
        return tuple(
            slot if slot.lease_id != KEPT_LEASE_ID else SlotRef(slot.lease_id, slot.offset, slot.nbytes, number)
            for slot, number in zip(slots, request.generations, strict=True)
        )

    def __del__(self) -> None:
        """Whole states are dropped here: nothing is to come back."""


class _CompiledClient(Client, engine_end.FrontendEnd):
    pass


class _CompiledClaim(Claim, engine_end.ClaimEnd):
    pass


class _ModelClient(Client, ends.FrontendEnd):  # type: ignore[misc, override] # to types, a client is of the compiled end
    pass


class _ModelClaim(Claim, ends.ClaimEnd):  # type: ignore[misc, override] # the same
    pass


@dataclasses.dataclass(slots=True, eq=False)
class Draining:
    """A slot that was released with a view of it alive, or with a message to workers that shows it."""

    client_id: int
    slot: SlotRef
    view: Any  # None: only workers may still read it


class Engine:
    """One life of an engine, with its slab."""

    def __init__(self, scenario: Scenario, epoch: int) -> None:
        self.scenario = scenario
        self.epoch = epoch
        chosen = books.chosen
        self.book: EngineBook = chosen.engine(scenario.geometry, scenario.limits)
        self.slab_fd, self.slab = open_slab(scenario.geometry.slab_nbytes)
        self.regions = Regions()
        self._client_type = _CompiledClient if chosen.are_ends_compiled else _ModelClient
        self.end: engine_end.EngineEnd = chosen.engine_end(
            weakref.proxy(self),
            self.book,
            self.regions,
            self.slab,
            DECODER,
            _CompiledClaim if chosen.are_ends_compiled else _ModelClaim,
            epoch=epoch,
            max_tensors=MAX_TENSORS,
            inline_nbytes=INLINE_NBYTES,
            max_payload_nbytes=MAX_PAYLOAD_NBYTES,
            debug=False,
        )
        self.end.is_awaited = True
        self.clients: dict[int, Client] = {}
        self.claims: list[Claim] = []  # in the hands of handlers, whether or not they can still be answered
        self.draining: list[Draining] = []
        self.next_client = 1
        self.next_ticket = 1
        self.fan_out = FanOut(self) if scenario.workers and chosen.are_ends_compiled else None
        os.close(self.slab_fd)

    # -- connections ---------------------------------------------------------------------------------------------------------

    def connect(self, process: Process, base_blocks: int) -> tuple[int, Wire, LeaseGrant | None]:
        """Admits a frontend."""
        client_id, self.next_client = self.next_client, self.next_client + 1
        grant = self.book.connect(client_id, base_blocks * BLOCK_NBYTES)
        client = self.clients[client_id] = self._client_type(self, client_id, process)
        return client_id, client.wire, grant

    def connect_in_vain(self, process: Process, base_blocks: int) -> None:
        """A frontend is gone before it was welcomed: it never got the slab."""
        client_id, _, _ = self.connect(process, base_blocks)
        self._ends(self.clients[client_id])
        self.carry_out(self.book.goodbye(client_id, (), ()))

    def disconnect(self, client_id: int) -> None:
        """A connection has ended; what it brought and was not read is lost."""
        client = self.clients[client_id]
        if client.connected:
            self._ends(client)
            self.carry_out(self.book.disconnect(client_id))

    def bury(self, client_id: int) -> None:
        """A process is dead, as the kernel says."""
        client = self.clients[client_id]
        client.buried = True
        self._ends(client)
        self.carry_out(self.book.died(client_id))

    def _ends(self, client: Client) -> None:
        client.connected = False
        client.wire.close_engine()
        client.detach()

    def die(self) -> None:
        """The engine's process ends, and with it its sockets."""
        for client in self.clients.values():
            client.wire.close_engine()
        self.close()

    def close(self) -> None:
        """Lets go of everything that refers to everything else."""
        self.end.is_open = False
        if self.fan_out is not None:
            self.fan_out.close()
        self.claims.clear()
        self.draining.clear()
        for key in tuple(self.end.waiting):
            self.end.forget_waiting(*key)
        for key in tuple(self.end.claims):
            self.end.forget_claim(*key)
        self.regions.close()

    # -- what comes ----------------------------------------------------------------------------------------------------------

    def hear(self, client_id: int) -> None:
        """Reads one record of a frontend."""
        client = self.clients[client_id]
        wire = client.wire
        record = wire.towards_engine.take()
        try:
            client.take_record(record)
        except RemoteProtocolError as error:
            require(record is wire.forged, f"an honest frontend is accused: {error}")
            client.tell(Refused(str(error)))
            self.disconnect(client_id)
        else:
            require(record is not wire.forged, "a forged message was accepted")

    def message_received(self, client: Client, record: bytes) -> None:
        """A frontend has sent what is no submission."""
        client_id = client.client_id
        match decode_frontend_message(record):
            case Abort(request_id):
                self.carry_out(self.book.abort(client_id, request_id))
            case LeaseRequest(token, nbytes, preferred_nbytes, memory, waits):
                self.carry_out(self.book.request_lease(client_id, token, nbytes, preferred_nbytes, memory, waits))
            case LeaseReturn(lease_ids):
                self.carry_out(self.book.return_leases(client_id, lease_ids))
            case ReplyRelease(generations):
                self.carry_out(self.book.release_replies(client_id, generations))
            case Find(token, key):
                self.carry_out(self.book.find(client_id, token, key))
            case Keep(token, key, lease_id, offset, nbytes, generation, is_copied, payload):
                slot = SlotRef(lease_id, offset, nbytes, generation)
                self.carry_out(self.book.keep(client_id, token, key, slot, is_copied, payload))
            case Unpin(generations):
                self.carry_out(self.book.unpin(client_id, generations))
            case Goodbye(kept_lease_ids, kept_reply_generations, pinned_generations=pinned):
                self._ends(client)
                self.carry_out(self.book.goodbye(client_id, kept_lease_ids, kept_reply_generations, pinned))

    # -- for the end ---------------------------------------------------------------------------------------------------------

    def request_arrived(self) -> None:
        """A handler waits for each, and may take it up whenever it likes."""
        _ = next(reversed(self.end.waiting.values())).slots  # which the book forgets with the request

    def take_up_failed(self, claim: Claim, error: Exception, *, breaks_rules: bool) -> None:
        """A request could not be taken up."""
        require(False, f"an honest request can't be taken up: {error}")

    def send_release(self, client: Client, generations: Sequence[int]) -> None:
        """Slots are their frontend's again."""
        client.tell(Release(tuple(generations)))

    def call_soon(self, callbacks: Sequence[object]) -> None:
        """Handlers are told in another way."""
        assert not callbacks

    def carry_out(self, effects: Sequence[EngineEffect]) -> None:
        """Does what the book asks for."""
        for effect in effects:
            match effect:
                case Released(client_id, generations):
                    self.clients[client_id].tell(Release(generations))
                case Granted(client_id, grant):
                    self.clients[client_id].tell(grant)
                case Recalled(client_id, lease_ids):
                    self.clients[client_id].tell(LeaseRecall(lease_ids))
                case Answered(client_id, answer):
                    self.clients[client_id].tell(answer)
                case RequestAborted():
                    self._request_aborted(effect)
                case ReplyGranted(ticket, slot):
                    self._reply_granted(ticket, slot)
                case ClientGone(client_id):
                    del self.clients[client_id]

    def _request_aborted(self, effect: RequestAborted) -> None:
        key = (effect.client_id, effect.request_id)
        self.clients[effect.client_id].tell(Failed(effect.request_id, "aborted", "AbortedError", ""))
        if not effect.was_running:
            self.end.forget_waiting(*key)
            return
        claim = self.end.forget_claim(*key)
        require(claim is not None, "a request was aborted twice")
        assert claim is not None
        claim.mark_ended(aborted=True)
        if isinstance(claim.reply, ReplyWaiter):
            claim.reply.cancelled = True

    def _reply_granted(self, ticket: int, slot: ReplySlot) -> None:
        claim = next(claim for claim in self.claims if isinstance(claim.reply, ReplyWaiter) and claim.reply.ticket == ticket)
        assert isinstance(claim.reply, ReplyWaiter)
        if claim.reply.cancelled:
            self.carry_out(self.book.discard_reply(claim.client_id, slot.generation))
        else:
            claim.reply = slot

    # -- handlers ------------------------------------------------------------------------------------------------------------

    def claim(self) -> None:
        """A handler takes up the request that has waited longest."""
        expected = next(iter(self.end.waiting))
        claim = self.end.take_next()
        require((claim.client_id, claim.request_id) == expected, "a request was overtaken")
        require_intact(claim.payload, claim.request_id)
        self.claims.append(claim)

    def release(self, index: int, viewed: int) -> None:
        """A handler releases its slots; those in the mask ``viewed`` drain."""
        claim = self.claims[index]
        self._keep_views(claim, viewed)
        self.carry_out(claim.release_slots())
        self._keep_shared(claim)

    def _keep_views(self, claim: Claim, viewed: int) -> None:
        if claim.released:
            return
        require_intact(claim.payload, claim.request_id)
        _, *arrays = claim.payload
        for position, slot in enumerate(claim.slots):
            if viewed >> position & 1:
                self.draining.append(Draining(claim.client_id, slot, arrays[position]))

    def _keep_shared(self, claim: Claim) -> None:
        """What workers may still read of a claim that was released drains as well."""
        client = self.book.clients.get(claim.client_id)
        draining = [draining.slot for draining in self.draining]
        for slot in claim.slots:
            if client is not None and slot.generation in client.slots and slot not in draining:
                self.draining.append(Draining(claim.client_id, slot, None))

    def leave(self, index: int, viewed: int) -> None:
        """A handler leaves its claim, and the request is finished."""
        claim = self._left(index)
        self._keep_views(claim, viewed)
        claim.finish()
        self._keep_shared(claim)

    def fail(self, index: int, event: RequestEvent) -> None:
        """A handler leaves its claim with an error."""
        claim = self._left(index)
        self._keep_views(claim, 0)
        self.carry_out(claim.release_slots())
        self._keep_shared(claim)
        if claim.ended:
            return
        key = (claim.client_id, claim.request_id)
        self.end.forget_claim(*key)
        claim.mark_ended()
        if self.book.end(*key, event):
            kind: FailureKind = "timed_out" if event is RequestEvent.DEADLINE else "error"
            self.clients[claim.client_id].tell(Failed(claim.request_id, kind, "", ""))

    def _left(self, index: int) -> Claim:
        claim = self.claims.pop(index)
        client = self.book.clients.get(claim.client_id)
        is_booked = client is not None and claim.request_id in client.requests
        require(claim.ended or is_booked, "a request had ended without its claim being told")
        return claim

    def reply(self, index: int, blocks: int, is_last: int) -> None:
        """A handler replies: in the record, or in a slot that it may have to wait for."""
        claim = self.claims[index]
        claim.replies += 1
        if not blocks:
            self._send(index, None, 0, is_last)
            return
        claim.reply = self.book.acquire_reply(claim.client_id, content_nbytes(blocks))
        if claim.reply is None:
            claim.reply = ReplyWaiter(self.next_ticket)
            self.next_ticket += 1
            self.book.queue_reply(claim.client_id, claim.reply.ticket, content_nbytes(blocks))

    def send_reply(self, index: int, is_last: int) -> None:
        """A reply is copied into its slot and sent."""
        slot, self.claims[index].reply = self.claims[index].reply, None
        assert isinstance(slot, ReplySlot)
        self._send(index, slot, content_nbytes(slot.blocks), is_last)

    def _send(self, index: int, slot: ReplySlot | None, nbytes: int, is_last: int) -> None:
        """Sends a reply; the last one finishes its request in the same record."""
        claim = self.claims[index]
        arrays = [np.zeros(nbytes, np.uint8)] if nbytes else []
        largest_nbytes = self.clients[claim.client_id].link.largest_nbytes
        packed = PACKER.pack(payload_of(arrays, claim.request_id), INLINE_NBYTES, largest_nbytes)
        ref: SlotRef | None = None
        if slot is not None:
            ref = SlotRef(0, slot.start * BLOCK_NBYTES, packed.slot_nbytes, slot.generation)
            packed.copy_into(self.slab.address + ref.offset + SLOT_HEADER_NBYTES)
        if is_last:
            self._left(index)
            self._keep_views(claim, 0)
            claim.finish_with(packed, ref)
            self._keep_shared(claim)
        else:
            require(claim.send_reply(packed, ref), "a reply found no room where there is room")

    def cancel_reply(self, index: int) -> None:
        """A handler is cancelled while it waits for reply space, or does not send what it copied."""
        claim = self.claims[index]
        if isinstance(claim.reply, ReplyWaiter):
            claim.reply.cancelled = True
            return
        assert claim.reply is not None
        slot, claim.reply = claim.reply, None
        self.carry_out(self.book.discard_reply(claim.client_id, slot.generation))

    def reply_cancelled(self, index: int) -> None:
        """A handler that was cancelled while it waited runs."""
        claim = self.claims[index]
        waiter, claim.reply = claim.reply, None
        assert isinstance(waiter, ReplyWaiter)
        self.carry_out(self.book.cancel_reply(waiter.ticket))

    def view_dies(self, index: int) -> None:
        """The last view of a slot that was released dies in the engine."""
        self.draining[index].view = None
        self.collect()

    def collect(self) -> None:
        """Slots that nobody reads any more have drained: those, and no others."""
        dead = {(draining.client_id, draining.slot.generation): draining for draining in self.draining}
        for key in self.regions.collect():
            require(key in dead and dead[key].view is None, "the death of a view is reported as another's")
            self.draining.remove(dead[key])
            self.carry_out(self.book.last_view_gone(*key))
        truth = None if self.fan_out is None else self.fan_out.truth
        for draining in self.draining:
            is_read = truth is not None and truth.holds(draining.client_id, draining.slot.generation)
            require(draining.view is not None or is_read, "a slot drains that nobody reads")

    def follow(self) -> None:
        """Something has happened here: what it means for workers, and for slots that they read."""
        if self.fan_out is not None:
            self.fan_out.follow()
            self.collect()

    # -- what can happen -----------------------------------------------------------------------------------------------------

    def enabled(self) -> Iterator[Action]:
        """Yields what can happen in the engine and at its end of the connections."""
        for position, client in enumerate(self.clients.values()):
            if client.connected:
                if client.wire.to_engine:
                    yield Action(Kind.TO_ENGINE, position)
                if not client.wire.frontend_open:
                    yield Action(Kind.ENGINE_SEES_END, position)
                else:
                    yield Action(Kind.ENGINE_HANGS_UP, position)
            if not client.process.alive and not client.buried:
                yield Action(Kind.PIDFD_FIRES, position)
        if self.end.waiting:
            yield Action(Kind.CLAIM)
        for index, claim in enumerate(self.claims):
            yield from self._enabled_for_claim(index, claim)
        for index, draining in enumerate(self.draining):
            if draining.view is not None:
                yield Action(Kind.ENGINE_VIEW_DIES, index)
        if self.fan_out is not None:
            yield from self.fan_out.enabled()

    def _enabled_for_claim(self, index: int, claim: Claim) -> Iterable[Action]:
        if isinstance(claim.reply, ReplyWaiter):
            return (Action(Kind.REPLY_CANCELLED if claim.reply.cancelled else Kind.CANCEL_REPLY, index),)
        room = self.clients[claim.client_id].link.can_write if not claim.aborted else False
        ends = (0, 1) if self.scenario.max_disturbances is None else (0,)  # elsewhere an end is a record of its own
        if claim.reply is not None:
            sends = [Action(Kind.SEND_REPLY, index, 0, is_last) for is_last in ends if room]
            return [Action(Kind.CANCEL_REPLY, index), *sends]
        actions = [Action(kind, index) for kind in (_ENDINGS[:1] if claim.aborted else _ENDINGS)]
        if not claim.released:
            masks = range(1 << len(claim.slots))
            actions += [Action(Kind.RELEASE, index, 0, mask) for mask in masks]
            actions += [Action(Kind.FINISH, index, 0, mask) for mask in masks[1:] if len(ends) > 1]
        if claim.aborted or claim.replies == self.scenario.max_replies:
            return actions
        if room:
            actions += [Action(Kind.REPLY, index, blocks) for blocks in self.scenario.reply_blocks_wanted]
            if 0 in self.scenario.reply_blocks_wanted and len(ends) > 1:
                actions.append(Action(Kind.REPLY, index, 0, 1))
        return actions
