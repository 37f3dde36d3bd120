"""One life of an engine: the real book, and around it what ``shmring.ring`` and ``shmring.ring.claim`` add.

The duties of a ring are written again here as it has them, for handlers that may be anywhere between two awaits: waiting
for reply space, copying a reply, cancelled but not run yet, gone with views of a request's slots still alive.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from shmring.core.effects import (
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
    Abort,
    Content,
    Done,
    Failed,
    FailureKind,
    Goodbye,
    LeaseGrant,
    LeaseRecall,
    LeaseRequest,
    LeaseReturn,
    Refused,
    Release,
    Reply,
    ReplyRelease,
    SlotRef,
    Submit,
    decode_frontend_message,
)
from shmring.core.states import RequestEvent
from shmring.errors import RemoteProtocolError
from tests.simulation import books
from tests.simulation.frontend import Process, content_nbytes
from tests.simulation.scenario import Action, Kind, Scenario, require
from tests.simulation.wire import Headers, Wire

__all__ = ["Claim", "Engine"]

_ENDINGS = (Kind.FINISH, Kind.FAIL, Kind.TIME_OUT)


@dataclasses.dataclass(slots=True, eq=False)
class Client:
    """A connection, as the engine has it."""

    process: Process
    wire: Wire
    connected: bool = True
    buried: bool = False  # its pidfd has fired


@dataclasses.dataclass(slots=True, eq=False)
class ReplyWaiter:
    """A handler that waits for a reply slot."""

    ticket: int
    cancelled: bool = False  # but it has not run since


@dataclasses.dataclass(slots=True, eq=False)
class Claim:
    """A request in a handler's hands."""

    client_id: int
    request_id: int
    slots: tuple[SlotRef, ...]
    released: bool = False
    aborted: bool = False
    reply: ReplyWaiter | ReplySlot | None = None  # waited for, or being written
    replies: int = 0


class Engine:
    """One life of an engine, with its slab."""

    def __init__(self, scenario: Scenario, epoch: int) -> None:
        self.scenario = scenario
        self.epoch = epoch
        self.book: EngineBook = books.chosen.engine(scenario.geometry, scenario.limits)
        self.headers: Headers = {}
        self.clients: dict[int, Client] = {}
        self.waiting: OrderedDict[tuple[int, int], tuple[SlotRef, ...]] = OrderedDict()
        self.claims: list[Claim] = []
        self.draining: list[tuple[int, SlotRef]] = []
        self.next_client = 1
        self.next_ticket = 1

    # -- connections ---------------------------------------------------------------------------------------------------------

    def connect(self, process: Process, base_blocks: int) -> tuple[int, Wire, LeaseGrant | None]:
        """Admits a frontend."""
        client_id, self.next_client = self.next_client, self.next_client + 1
        grant = self.book.connect(client_id, base_blocks * BLOCK_NBYTES)
        wire = Wire()
        self.clients[client_id] = Client(process, wire)
        return client_id, wire, grant

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

    def die(self) -> None:
        """The engine's process ends, and with it its sockets."""
        for client in self.clients.values():
            client.wire.close_engine()

    # -- what comes ----------------------------------------------------------------------------------------------------------

    def hear(self, client_id: int) -> None:
        """Reads one message of a frontend."""
        wire = self.clients[client_id].wire
        body = wire.to_engine.popleft()
        try:
            self._heard(client_id, body)
        except RemoteProtocolError as error:
            require(body is wire.forged, f"an honest frontend is accused: {error}")
            wire.tell_frontend(Refused(str(error)))
            self.disconnect(client_id)
        else:
            require(body is not wire.forged, "a forged message was accepted")

    def _heard(self, client_id: int, body: bytes) -> None:
        match decode_frontend_message(body):
            case Submit(epoch, request_id, content):
                if epoch != self.epoch:
                    raise RemoteProtocolError(f"request {request_id} is of epoch {epoch}, this is {self.epoch}")
                self.book.submit(client_id, request_id, content.slots)
                self.waiting[client_id, request_id] = content.slots
            case Abort(request_id):
                self.carry_out(self.book.abort(client_id, request_id))
            case LeaseRequest(token, nbytes, preferred_nbytes, memory, waits):
                self.carry_out(self.book.request_lease(client_id, token, nbytes, preferred_nbytes, memory, waits))
            case LeaseReturn(lease_ids):
                self.carry_out(self.book.return_leases(client_id, lease_ids))
            case ReplyRelease(generations):
                self.carry_out(self.book.release_replies(client_id, generations))
            case Goodbye(kept_lease_ids, kept_reply_generations):
                self._ends(self.clients[client_id])
                self.carry_out(self.book.goodbye(client_id, kept_lease_ids, kept_reply_generations))

    def carry_out(self, effects: Sequence[EngineEffect]) -> None:
        """Does what the book asks for."""
        for effect in effects:
            match effect:
                case Released(client_id, generations):
                    self.clients[client_id].wire.tell_frontend(Release(generations))
                case Granted(client_id, grant):
                    self.clients[client_id].wire.tell_frontend(grant)
                case Recalled(client_id, lease_ids):
                    self.clients[client_id].wire.tell_frontend(LeaseRecall(lease_ids))
                case RequestAborted():
                    self._request_aborted(effect)
                case ReplyGranted(ticket, slot):
                    self._reply_granted(ticket, slot)
                case ClientGone(client_id):
                    del self.clients[client_id]

    def _request_aborted(self, effect: RequestAborted) -> None:
        key = (effect.client_id, effect.request_id)
        self.clients[effect.client_id].wire.tell_frontend(Failed(effect.request_id, "aborted", "AbortedError", ""))
        if not effect.was_running:
            del self.waiting[key]
            return
        claim = next(claim for claim in self.claims if (claim.client_id, claim.request_id) == key)
        require(not claim.aborted, "a request was aborted twice")
        claim.aborted = True
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
        (client_id, request_id), slots = self.waiting.popitem(last=False)
        self.book.claim(client_id, request_id)
        for slot in slots:
            self.book.verify(*self.headers[slot.offset], slot)
        self.claims.append(Claim(client_id, request_id, slots))

    def release(self, index: int, viewed: int) -> None:
        """A handler releases its slots; those in the mask ``viewed`` drain."""
        claim = self.claims[index]
        claim.released = True
        draining = [slot for position, slot in enumerate(claim.slots) if viewed >> position & 1]
        self.draining += [(claim.client_id, slot) for slot in draining]
        if claim.slots:
            generations = [slot.generation for slot in claim.slots]
            left = {slot.generation for slot in draining}
            self.carry_out(self.book.release_slots(claim.client_id, generations, left))

    def end(self, index: int, event: RequestEvent) -> None:
        """A handler leaves its claim."""
        if not self.claims[index].released:
            self.release(index, 0)
        claim = self.claims.pop(index)
        if claim.aborted:
            return
        owed = self.book.end(claim.client_id, claim.request_id, event)
        require(owed, "a request had ended without its claim being told")
        wire = self.clients[claim.client_id].wire
        if event is RequestEvent.FINISH:
            wire.tell_frontend(Done(claim.request_id))
        else:
            kind: FailureKind = "timed_out" if event is RequestEvent.DEADLINE else "error"
            wire.tell_frontend(Failed(claim.request_id, kind, "", ""))

    def reply(self, index: int, blocks: int) -> None:
        """A handler replies: in the message, or in a slot that it may have to wait for."""
        claim = self.claims[index]
        claim.replies += 1
        if not blocks:
            self.clients[claim.client_id].wire.tell_frontend(Reply(claim.request_id, Content(b"")))
            return
        claim.reply = self.book.acquire_reply(claim.client_id, content_nbytes(blocks))
        if claim.reply is None:
            claim.reply = ReplyWaiter(self.next_ticket)
            self.next_ticket += 1
            self.book.queue_reply(claim.client_id, claim.reply.ticket, content_nbytes(blocks))

    def send_reply(self, index: int) -> None:
        """A reply has been copied into its slot."""
        claim = self.claims[index]
        slot, claim.reply = claim.reply, None
        assert isinstance(slot, ReplySlot)
        ref = SlotRef(0, slot.start * BLOCK_NBYTES, content_nbytes(slot.blocks), slot.generation)
        self.headers[ref.offset] = (ref.generation, ref.nbytes)
        self.book.reply_sent(claim.client_id, slot.generation)
        self.clients[claim.client_id].wire.tell_frontend(Reply(claim.request_id, Content(b"", slots=(ref,))))

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
        client_id, slot = self.draining.pop(index)
        self.carry_out(self.book.last_view_gone(client_id, slot.generation))

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
        if self.waiting:
            yield Action(Kind.CLAIM)
        for index, claim in enumerate(self.claims):
            yield from self._enabled_for_claim(index, claim)
        for index in range(len(self.draining)):
            yield Action(Kind.ENGINE_VIEW_DIES, index)

    def _enabled_for_claim(self, index: int, claim: Claim) -> Iterable[Action]:
        if isinstance(claim.reply, ReplyWaiter):
            return (Action(Kind.REPLY_CANCELLED if claim.reply.cancelled else Kind.CANCEL_REPLY, index),)
        if claim.reply is not None:
            return [Action(kind, index) for kind in (Kind.CANCEL_REPLY, Kind.SEND_REPLY)[: 1 + (not claim.aborted)]]
        actions = [Action(kind, index) for kind in (_ENDINGS[:1] if claim.aborted else _ENDINGS)]
        if not claim.released:
            actions += [Action(Kind.RELEASE, index, 0, mask) for mask in range(1 << len(claim.slots))]
        if claim.aborted or claim.replies == self.scenario.max_replies:
            return actions
        if len(self.clients[claim.client_id].wire.to_frontend) < self.scenario.max_queue:
            actions += [Action(Kind.REPLY, index, blocks) for blocks in self.scenario.reply_blocks_wanted]
        return actions
