"""The state of a simulation, as bytes to compare and as a copy to go on from.

Two worlds are the same state if nothing that can happen from now on tells them apart. Numbers that only name something
(clients, leases, generations, requests, tickets, tokens) grow for ever and are compared for identity only, so they are
named anew, in the order in which they are met. Time is reduced to which leases have been empty for long enough. Headers
are left out: one is written before it is read, or somebody wrote into memory that is not its own, which is a violation.

The books and shells keep private what this needs, and some of it stands only in what a task waits for, and in locals of its
coroutines. What is left out here would make two different states one. So one test compares what is written here with the
fields of the books, and another looks whether the same follows from states that are the same.
"""

from __future__ import annotations

from typing import Any, cast

import msgspec

from shmring.core.compiled import ClientRecord, EngineBook, Submit, Window
from shmring.core.messages import (
    Abort,
    Failed,
    Find,
    Found,
    Goodbye,
    Keep,
    LeaseGrant,
    LeaseRecall,
    LeaseRequest,
    LeaseReturn,
    NotKept,
    Refused,
    Release,
    ReplyRead,
    ReplyRelease,
    StopWaiting,
    Unpin,
    decode_engine_message,
    decode_frontend_message,
    encode_message,
)
from shmring.core.states import ClientSlot
from shmring.errors import RemoteProtocolError
from tests.model.inside import Done, Reply, has_reply, read_record
from tests.simulation.engine import Engine, Handling
from tests.simulation.frontend import IDLE_TICKS, Caller, Process, Session, Wants
from tests.simulation.injecting import Asked
from tests.simulation.loop import came_to, local_of, waited_for
from tests.simulation.names import Names
from tests.simulation.payloads import MAX_TENSORS
from tests.simulation.scenario import Kind, Violation
from tests.simulation.simulation import Simulation
from tests.simulation.wire import Wire
from tests.simulation.worker_state import FanOutEncoding

_encoder = msgspec.msgpack.Encoder()


class _Encoding:
    """Makes one simulation plain data; see the head of this file."""

    def __init__(self, simulation: Simulation) -> None:
        self._world = simulation
        self._pids = sorted(simulation.processes)
        self._clients = Names()  # of the living engine
        self._leases = Names()
        self._generations = Names()
        self._replies = Names()
        self._requests = Names()  # by client and number
        self._tickets = Names()  # of replies
        self._asked = Names()  # tokens of what is asked of kept content, by client and number

    def world(self) -> list[Any]:
        """Returns the whole of it: frontends first, so that their order is the one in which clients are named."""
        world = self._world
        disturbances = -1 if world.scenario.max_disturbances is None else world.disturbances
        processes = [self._process(world.processes[pid]) for pid in self._pids]
        workers = FanOutEncoding(world, self._clients, self._generations).workers()
        return [disturbances, processes, None if world.engine is None else self._engine(world.engine), workers]

    # -- frontends -----------------------------------------------------------------------------------------------------------

    def _process(self, process: Process) -> list[Any]:
        session = process.session
        former = [[self._client_of(session), self._reach(session)] for session in process.former]
        return [None if session is None else self._session(session), former, process.pace.value]

    def _client_of(self, session: Session) -> int:
        """The name of its client in the living engine; -1 for one of a former life."""
        engine = self._world.engine
        if engine is None or session.epoch != engine.epoch or session.client_id not in engine.clients:
            return -1
        return self._clients[session.client_id]

    def _session(self, session: Session) -> list[Any]:
        book, real, world = session.book, session.real, self._world
        leases = [
            [
                self._leases[lease.lease_id],
                lease.is_base,
                lease.slots.start,
                lease.slots.length,
                lease.slots.is_empty and not lease.is_base and lease.empty_since <= world.now - IDLE_TICKS,
                lease.recalled,
                [*lease.slots.runs()] if lease.kept_blocks else [],
            ]
            for lease in book.leases.values()
        ]
        waiters = [
            [waiter.held, waiter.nbytes, waiter.vain_moments, waiter.rest_moments, waiter.patience, place.done()]
            for place, waiter in book._waiters.items()
        ]
        client = self._client_of(session)
        return [
            client,
            leases,
            waiters,
            book._requested_nbytes,
            bool(book._requested_nbytes) and book._request_waits,
            book._wish_nbytes,
            self._reach(session),
            [[self._requests[session.client_id, request], *self._of(sent)] for request, sent in session.end.pending.items()],
            [
                [self._requests[session.client_id, request], *self._of(sent.submission)]
                for request, sent in session.sent.items()
            ],
            -1 if session.awaited is None else self._requests[session.client_id, session.awaited],
            self._kept_end(session),
            [self._caller(session, caller) for caller in session.callers],
            [[turn.done(), turn.cancelled()] for turn in (*real.sending._again, *real.sending._turns)],
            len(real.sending._again),
            session.loop.plain_ready([caller.task for caller in session.callers]),
            [] if Kind.TICK in world.scenario.without else session.loop.plain_timers(world.now),
            self._moments(session),
            0 if world.scenario.max_requests is None else session.submitted,
            # Of a living engine it comes with its client.
            self._wire(session.wire, session.client_id, book._token) if client < 0 else None,
        ]

    @staticmethod
    def _moments(session: Session) -> list[int]:
        """Whether another moment can pass, and how many have passed."""
        scenario = session.scenario
        if not scenario.stops or Kind.FRONTEND_MOMENT in scenario.without:
            return []
        return [bool(session.loop.moments), 0 if scenario.max_moments is None else session.moments]

    @staticmethod
    def _of(submission: Any) -> list[Any]:
        return [submission.ended, has_reply(submission), submission._unread_slots]

    def _caller(self, session: Session, caller: Caller) -> list[Any]:
        """What it wants, and what its task waits for."""
        future = waited_for(caller.task)
        places: list[Any] = [
            *session.real.host_slots._line,
            *session.real.sending._again,
            *session.real.sending._turns,
            *(question.place for question in session.real.kept._answers.values()),
            *(place for wait in session.real.kept._waits.values() for place in wait.line),
            *cast(Any, session.link.writable)._waiters,
        ]
        granted = session.granted(caller)
        copying = next((place for place, copying in enumerate(session.copies) if copying.task is caller.task), -1)
        unsent = session.unsent(caller)
        return [
            caller.wants.value,
            caller.detail,
            [slot.start for slot in caller.slots],
            caller.task.cancelling() > 0,
            caller.wants is Wants.REQUEST and session.is_in_flight(caller),
            places.index(future) if future in places else -1,
            future is not None and future.done(),
            -1 if granted is None else granted.start,
            copying,
            -1 if unsent is None else unsent.start,
            self._answered(caller),
        ]

    def _answered(self, caller: Caller) -> int:
        """The content that a caller was told of, and has not taken."""
        found = getattr(came_to(caller.task), "found", None)
        return -1 if found is None else self._generations[found.generation]

    def _kept_end(self, session: Session) -> list[Any]:
        """What it has pinned, and what it has asked for."""
        kept = session.real.kept
        answers = [
            [
                self._asked[session.client_id, token],
                question.key,
                question.place.done(),
                -1 if question.record is None else self._generations[question.record.generation],
            ]
            for token, question in kept._answers.items()
        ]
        pins = [
            [self._generations[generation], pin.count, pin.users, pin.views, pin.is_slots]
            for generation, pin in kept._pins.items()
        ]
        waits = [
            [self._asked[session.client_id, wait.token], wait.key, wait.is_ending, [place.done() for place in wait.line]]
            for wait in kept._waits.values()
        ]
        return [
            0 if session.scenario.max_asks is None else session.asks,
            answers,
            waits,
            pins,
            [self._generations[content.view.generation] for content in session.contents],
        ]

    def _reach(self, session: Session) -> list[Any]:
        held = [holding.record for holding in session.held]
        left = [view.record for view in session.views]
        slots = [
            [
                -1 if slot.lease is None else self._leases[slot.lease.lease_id],
                slot.start,
                slot.blocks,
                slot.state,
                slot.held,
                slot in held,
                slot in left,
                self._generations[slot.generation] if slot.state in (ClientSlot.SUBMITTED, ClientSlot.KEPT) else -1,
            ]
            for slot in session.slots
        ]
        views = [self._generations[view.generation] for view in session.kept_views]
        copies = [copying.start for copying in session.copies]
        replies = [[self._replies[reply.generation], reply.start, reply.blocks] for reply in session.replies]
        return [slots, copies, views, replies]

    # -- what is under way ---------------------------------------------------------------------------------------------------

    def _wire(self, wire: Wire, client_id: int, token: int) -> list[Any]:
        of_frontend = [
            # Whatever is forged is refused whatever it says.
            [-1] if body is wire.forged else self._of_frontend(body, client_id, token)
            for body in wire.to_engine
        ]
        return [
            wire.frontend_open,
            wire.engine_open,
            of_frontend,
            [self._of_engine(body, client_id, token) for body in wire.to_frontend],
        ]

    def _of_frontend(self, record: bytes, client_id: int, token: int) -> list[Any]:
        submit = read_record(record, MAX_TENSORS, from_engine=False)
        if isinstance(submit, Submit):
            slots = [
                [self._leases[slot.lease_id], slot.offset, slot.nbytes, self._generations[slot.generation]]
                for slot in submit.content.slots
            ]
            return [0, self._requests[client_id, submit.request_id], slots]
        message = decode_frontend_message(record)
        match message:
            case Abort(request_id):
                return [1, self._requests[client_id, request_id]]
            case LeaseRequest(asked, nbytes, preferred_nbytes, _, waits):
                return [2, token - asked, nbytes, preferred_nbytes, waits]
            case LeaseReturn(lease_ids):
                return [3, *map(self._leases.__getitem__, lease_ids)]
            case ReplyRelease(generations):
                return [4, *map(self._replies.__getitem__, generations)]
            case ReplyRead(request_ids):
                return [9, *(self._requests[client_id, request_id] for request_id in request_ids)]
            case Goodbye(lease_ids, generations, more=more, pinned_generations=pinned):
                kept = [*map(self._generations.__getitem__, pinned)]
                named = [[*map(self._leases.__getitem__, lease_ids)], [*map(self._replies.__getitem__, generations)], kept]
                return [5, more, *named]
            case Find(asked, key, waits):
                return [6, self._asked[client_id, asked], key, waits]
            case Keep(asked, key, lease_id, offset, nbytes, generation):
                slot = [self._leases[lease_id], offset, nbytes, self._generations[generation]]
                return [7, self._asked[client_id, asked], key, slot]
            case StopWaiting(tokens):
                return [10, *(self._asked[client_id, asked] for asked in tokens)]
            case Unpin(generations):
                return [8, *map(self._generations.__getitem__, generations)]
        raise TypeError(f"no frontend of a simulation sends a {type(message).__name__}")

    def _of_engine(self, record: bytes, client_id: int, token: int) -> list[Any]:
        answer = read_record(record, MAX_TENSORS, from_engine=True)
        if isinstance(answer, Reply | Done):
            content = answer.content
            slots = [] if content is None else content.slots
            replies = [[self._replies[slot.generation], slot.offset, slot.nbytes] for slot in slots]
            request = self._requests[client_id, answer.request_id]
            if isinstance(answer, Reply):
                return [3, request, replies]
            released = [*map(self._generations.__getitem__, answer.released)]
            return [4, request, released, None if content is None else replies]
        message = decode_engine_message(record)
        match message:
            case LeaseGrant(asked, lease_id, offset, nbytes):
                # Who has asked anew since only knows that it is not the one that was asked for last.
                return [0, min(token - asked, 1) if asked else -1, self._leases[lease_id], offset, nbytes]
            case LeaseRecall(lease_ids):
                return [1, *map(self._leases.__getitem__, lease_ids)]
            case Release(generations):
                return [2, *map(self._generations.__getitem__, generations)]
            case Failed(request_id):  # as an end that releases nothing: all ends are alike to a book
                return [4, self._requests[client_id, request_id], [], None]
            case Refused():
                return [5]
            case Found(asked, generation, offset, nbytes):
                return [6, self._asked[client_id, asked], self._generations[generation], offset, nbytes]
            case NotKept(asked, reason):
                return [7, self._asked[client_id, asked], reason]
        raise TypeError(f"no engine of a simulation sends a {type(message).__name__}")

    # -- the engine ----------------------------------------------------------------------------------------------------------

    def _engine(self, engine: Engine) -> list[Any]:
        book, window = engine.book, engine.book.host._window
        tokens = {
            session.client_id: session.book._token
            for process in self._world.processes.values()
            for session in (process.session, *process.former)
            if session is not None and session.epoch == engine.epoch
        }
        places = {id(self._world.processes[pid]): place for place, pid in enumerate(self._pids)}
        clients = []
        for client_id in sorted(engine.clients, key=self._clients.__getitem__):
            client = engine.clients[client_id]
            place, wire = places.get(id(client.process), -1), self._wire(client.wire, client_id, tokens.get(client_id, 0))
            said = [self._of_frontend(encode_message(part), client_id, 0) for part in client.frontend._goodbyes]
            is_buried, record = client.watch.has_fired, self._client(book.clients[client_id], window)
            clients.append([place, client.frontend.connected, is_buried, said, wire, record])
        return [
            clients,
            self._kept(book),
            [
                [
                    self._clients[client_id],
                    tokens.get(client_id, 0) - want.token,
                    want.blocks,
                    want.preferred_blocks,
                    want.waits,
                    want.rest_moments,
                    want.patience,
                ]
                for client_id, want in book.host._wants.items()
            ],
            [
                [
                    self._tickets[ticket],
                    self._clients[want.client_id],
                    want.blocks,
                    self._requests[want.client_id, want.request_id],
                ]
                for ticket, want in book._reply_wants.items()
            ],
            book._may_overtake,
            None if window is None else [self._clients[window.client_id], window.start, window.blocks, window.vain_moments],
            [[self._clients[client_id], self._requests[client_id, request]] for client_id, request in engine.end.waiting],
            [self._claim(engine, handling) for handling in engine.claims],
            [] if engine.fan_out is not None else engine.loop.plain_ready(engine.tasks),
            bool(engine.loop.moments),
            [
                [self._clients[each.client_id], each.connected, self._client(book.clients[each.client_id], window)]
                for each in engine.injecting.known
            ],
            [self._asked_here(asked) for asked in engine.injecting.asked],
            [
                [self._clients[draining.client_id], self._generations[draining.slot.generation], draining.view is not None]
                for draining in engine.draining
            ],
        ]

    def _asked_here(self, asked: Asked) -> list[Any]:
        """A request of the engine's own process, and what its caller waits for."""
        request, task, client_id = asked.request, asked.reading, asked.injector.client_id
        return [
            self._clients[client_id],
            self._requests[client_id, request.request_id],
            request.ended,
            type(request._error).__name__,
            request._news.is_set(),
            [reply.nbytes for reply in request._replies],
            [] if task is None else [task.cancelling() > 0, waited_for(task) is None or waited_for(task).done()],
        ]

    def _kept(self, book: EngineBook) -> list[Any]:
        names = self._generations
        contents = [
            [names[kept.generation], kept.key, kept.start, kept.blocks, kept.pins] for kept in book.kept.by_generation.values()
        ]
        waits = [[key, [self._clients[client_id] for client_id in tokens]] for key, tokens in book.kept.waits.items()]
        return [contents, [names[generation] for generation in book.kept.unpinned], waits]

    def _client(self, client: ClientRecord, window: Window | None) -> list[Any]:
        return [
            client.connected,
            client.dead,
            [[self._generations[generation], count] for generation, count in client.pins.items()],
            [
                [
                    self._leases[lease.lease_id],
                    lease.start,
                    lease.blocks,
                    lease.state,
                    lease.recalled,
                    lease.given_up,
                    lease.kept_blocks,
                    lease.new_moments,
                    lease.silent_moments,
                    window is not None and lease.lease_id >= window.next_lease_id,
                ]
                for lease in client.leases.values()
            ],
            [
                [
                    self._generations[slot.generation],
                    -1 if slot.lease is None else self._leases[slot.lease.lease_id],
                    -1 if slot.kept is None else self._generations[slot.kept.generation],
                    slot.start,
                    slot.blocks,
                    slot.state,
                ]
                for slot in client.slots.values()
            ],
            [
                [
                    self._requests[client.client_id, number],
                    request.state,
                    request.unread_replies,
                    *map(self._generations.__getitem__, request.generations),
                ]
                for number, request in client.requests.items()
            ],
            [
                [
                    *(self._replies[slot.generation], slot.start, slot.blocks, slot.is_copied_out),
                    slot.generation in client.unsent_replies,
                ]
                for slot in client.replies.values()
            ],
        ]

    def _claim(self, engine: Engine, handling: Handling) -> list[Any]:
        claim, task = handling.claim, handling.replying
        return [
            self._clients[claim.client_id],
            self._requests[claim.client_id, claim.request_id],
            claim.released,
            claim.aborted,
            claim.ended,
            handling.replies,
            handling.is_left,
            [] if claim.released else [self._generations[slot.generation] for slot in handling.slots],
            [] if task is None else [handling.is_last, task.cancelling() > 0, *self._replying(engine, handling, task)],
        ]

    def _replying(self, engine: Engine, handling: Handling, task: Any) -> list[Any]:
        """What the task of a handler waits for."""
        future = waited_for(task)
        ticket = next((place for place in engine.end.book._reply_wants if place is future), None)
        slot = handling.reply_slot
        return [
            future is None,
            future is not None and future.done(),
            -1 if ticket is None else self._tickets[ticket],
            -1 if slot is None else self._replies[slot.generation],
            local_of(task, "send_in_turn", "slot") is None,  # it was granted, and is not written yet
            next((place for place, copying in enumerate(engine.copier.running) if copying.task is task), -1),
        ]


def encode(simulation: Simulation) -> bytes:
    """Returns bytes that are equal for two simulations of one scenario exactly if they are in the same state.

    Raises:
        Violation: a record is under way that nobody can read.
    """
    try:
        return _encoder.encode(_Encoding(simulation).world())
    except RemoteProtocolError as error:
        raise Violation(f"an honest end has sent what nobody can read: {error}") from error


# -- copies ------------------------------------------------------------------------------------------------------------------


def duplicate(simulation: Simulation) -> Simulation:
    """Returns a copy that shares nothing that changes: a world to which the same happened."""
    copied = Simulation(simulation.scenario)
    for action in simulation.trace:
        copied.happen(action)
    return copied
