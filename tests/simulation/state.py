"""The state of a simulation, as bytes to compare and as a copy to go on from.

Two worlds are the same state if nothing that can happen from now on tells them apart. Numbers that only name something
(clients, leases, generations, requests, tickets, tokens) grow for ever and are compared for identity only, so they are
named anew, in the order in which they are met. Time is reduced to which leases have been empty for long enough. Headers
are left out: one is written before it is read, or somebody wrote into memory that is not its own, which is a violation.

The books keep private what this needs. A field of theirs that is left out here would make two different states one, so a
test compares what is written here with the fields that there are.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import OrderedDict, deque
from collections.abc import Callable
from types import NoneType
from typing import Any, TypeVar

import msgspec

from shmring.core import blocks
from shmring.core.client_book import ClientBook
from shmring.core.engine_book import EngineBook
from shmring.core.lending import Lending
from shmring.core.messages import (
    Abort,
    Done,
    EngineMessage,
    Failed,
    FrontendMessage,
    Goodbye,
    LeaseGrant,
    LeaseRecall,
    LeaseRequest,
    LeaseReturn,
    Refused,
    Release,
    Reply,
    ReplyRelease,
    Submit,
    decode_engine_message,
    decode_frontend_message,
)
from shmring.core.records import ClientRecord
from shmring.core.states import ClientSlot
from tests.model import blocks as model_blocks
from tests.model.state import DERIVED, FIELDS
from tests.simulation.engine import Claim, Engine, ReplyWaiter
from tests.simulation.frontend import IDLE_TICKS, Process, Session
from tests.simulation.simulation import Simulation
from tests.simulation.wire import Wire

__all__ = ["duplicate", "encode"]

_encoder = msgspec.msgpack.Encoder()


class _Names(dict[Any, int]):
    """Names for what has only an identity, in the order in which it is met."""

    def __missing__(self, key: Any) -> int:
        name = self[key] = len(self)
        return name


class _Encoding:
    """Makes one simulation plain data; see the head of this file."""

    def __init__(self, simulation: Simulation) -> None:
        self._world = simulation
        self._pids = sorted(simulation.processes)
        self._clients = _Names()  # of the living engine
        self._leases = _Names()
        self._generations = _Names()
        self._replies = _Names()
        self._requests = _Names()  # by client and number
        self._tickets = _Names()  # of replies

    def world(self) -> list[Any]:
        """Returns the whole of it: frontends first, so that their order is the one in which clients are named."""
        world = self._world
        disturbances = -1 if world.scenario.max_disturbances is None else world.disturbances
        processes = [self._process(world.processes[pid]) for pid in self._pids]
        return [disturbances, processes, None if world.engine is None else self._engine(world.engine)]

    # -- frontends -----------------------------------------------------------------------------------------------------------

    def _process(self, process: Process) -> list[Any]:
        session = process.session
        former = [[self._client_of(session), self._reach(session)] for session in process.former]
        return [None if session is None else self._session(session), former]

    def _client_of(self, session: Session) -> int:
        """The name of its client in the living engine; -1 for one of a former life."""
        engine = self._world.engine
        if engine is None or session.epoch != engine.epoch or session.client_id not in engine.clients:
            return -1
        return self._clients[session.client_id]

    def _session(self, session: Session) -> list[Any]:
        book = session.book
        ready = self._world.now - IDLE_TICKS
        leases = [
            [
                self._leases[lease.lease_id],
                lease.is_base,
                lease.slots.start,
                lease.slots.length,
                lease.slots.is_empty and not lease.is_base and lease.empty_since <= ready,
                lease.recalled,
            ]
            for lease in book.leases.values()
        ]
        waiters = [[waiter.is_held, waiter.cancelled, waiter.blocks] for waiter in session.waiters.values()]
        client = self._client_of(session)
        return [
            client,
            leases,
            waiters,
            book._requested_nbytes,
            bool(book._requested_nbytes) and book._request_waits,
            book._wish_nbytes,
            self._reach(session),
            [[self._requests[session.client_id, request], given_up] for request, given_up in session.pending.items()],
            0 if self._world.scenario.max_requests is None else session.next_request,
            # Of a living engine it comes with its client.
            self._wire(session.wire, session.client_id, book._token) if client < 0 else None,
        ]

    def _reach(self, session: Session) -> list[Any]:
        slots = [
            [
                self._leases[slot.lease.lease_id],
                slot.start,
                slot.blocks,
                slot.state,
                slot.held,
                slot in session.views,
                self._generations[slot.generation] if slot.state is ClientSlot.SUBMITTED else -1,
            ]
            for slot in session.slots
        ]
        return [slots, [[self._replies[reply.generation], reply.start, reply.blocks] for reply in session.replies]]

    # -- what is under way ---------------------------------------------------------------------------------------------------

    def _wire(self, wire: Wire, client_id: int, token: int) -> list[Any]:
        of_frontend = [
            # Whatever is forged is refused whatever it says.
            [-1] if body is wire.forged else self._of_frontend(decode_frontend_message(body), client_id, token)
            for body in wire.to_engine
        ]
        return [
            wire.frontend_open,
            wire.engine_open,
            of_frontend,
            [self._of_engine(decode_engine_message(body), client_id, token) for body in wire.to_frontend],
        ]

    def _of_frontend(self, message: FrontendMessage, client_id: int, token: int) -> list[Any]:
        match message:
            case Submit(_, request_id, content):
                slots = [
                    [self._leases[slot.lease_id], slot.offset, slot.nbytes, self._generations[slot.generation]]
                    for slot in content.slots
                ]
                return [0, self._requests[client_id, request_id], slots]
            case Abort(request_id):
                return [1, self._requests[client_id, request_id]]
            case LeaseRequest(asked, nbytes, preferred_nbytes, _, waits):
                return [2, token - asked, nbytes, preferred_nbytes, waits]
            case LeaseReturn(lease_ids):
                return [3, *map(self._leases.__getitem__, lease_ids)]
            case ReplyRelease(generations):
                return [4, *map(self._replies.__getitem__, generations)]
            case Goodbye(lease_ids, generations):
                return [5, [*map(self._leases.__getitem__, lease_ids)], [*map(self._replies.__getitem__, generations)]]
        raise TypeError(f"no frontend of a simulation sends a {type(message).__name__}")

    def _of_engine(self, message: EngineMessage, client_id: int, token: int) -> list[Any]:
        match message:
            case LeaseGrant(asked, lease_id, offset, nbytes):
                return [0, token - asked if asked else -1, self._leases[lease_id], offset, nbytes]
            case LeaseRecall(lease_ids):
                return [1, *map(self._leases.__getitem__, lease_ids)]
            case Release(generations):
                return [2, *map(self._generations.__getitem__, generations)]
            case Reply(request_id, content):
                slots = [[self._replies[slot.generation], slot.offset, slot.nbytes] for slot in content.slots]
                return [3, self._requests[client_id, request_id], slots]
            case Done(request_id) | Failed(request_id):  # all ends are alike to a book
                return [4, self._requests[client_id, request_id]]
            case Refused():
                return [5]
        raise TypeError(f"no engine of a simulation sends a {type(message).__name__}")

    # -- the engine ----------------------------------------------------------------------------------------------------------

    def _engine(self, engine: Engine) -> list[Any]:
        book, window = engine.book, engine.book.host._window
        tokens = {
            process.session.client_id: process.session.book._token
            for process in self._world.processes.values()
            if process.session is not None and process.session.epoch == engine.epoch
        }
        places = {id(self._world.processes[pid]): place for place, pid in enumerate(self._pids)}
        clients = []
        for client_id in sorted(engine.clients, key=self._clients.__getitem__):
            client = engine.clients[client_id]
            place, wire = places.get(id(client.process), -1), self._wire(client.wire, client_id, tokens.get(client_id, 0))
            clients.append([place, client.connected, client.buried, wire, self._client(book.clients[client_id])])
        return [
            clients,
            [
                [
                    self._clients[client_id],
                    tokens.get(client_id, 0) - want.token,
                    want.blocks,
                    want.preferred_blocks,
                    want.waits,
                ]
                for client_id, want in book.host._wants.items()
            ],
            [[self._tickets[ticket], self._clients[want.client_id], want.blocks] for ticket, want in book._reply_wants.items()],
            None if window is None else [self._clients[window.client_id], window.start, window.blocks],
            [[self._clients[client_id], self._requests[client_id, request]] for client_id, request in engine.waiting],
            [self._claim(claim) for claim in engine.claims],
            [[self._clients[client_id], self._generations[slot.generation]] for client_id, slot in engine.draining],
        ]

    def _client(self, client: ClientRecord) -> list[Any]:
        return [
            client.connected,
            client.dead,
            [
                [self._leases[lease.lease_id], lease.start, lease.blocks, lease.state, lease.recalled, lease.given_up]
                for lease in client.leases.values()
            ],
            [
                [self._generations[slot.generation], self._leases[slot.lease.lease_id], slot.start, slot.blocks, slot.state]
                for slot in client.slots.values()
            ],
            [
                [
                    self._requests[client.client_id, number],
                    request.state,
                    *map(self._generations.__getitem__, request.generations),
                ]
                for number, request in client.requests.items()
            ],
            [
                [self._replies[slot.generation], slot.start, slot.blocks, slot.generation in client.unsent_replies]
                for slot in client.replies.values()
            ],
        ]

    def _claim(self, claim: Claim) -> list[Any]:
        reply = claim.reply
        return [
            self._clients[claim.client_id],
            self._requests[claim.client_id, claim.request_id],
            claim.released,
            claim.aborted,
            claim.replies,
            [] if claim.released else [self._generations[slot.generation] for slot in claim.slots],
            None
            if reply is None
            else [self._tickets[reply.ticket], reply.cancelled]
            if isinstance(reply, ReplyWaiter)
            else self._replies[reply.generation],
        ]


def encode(simulation: Simulation) -> bytes:
    """Returns bytes that are equal for two simulations of one scenario exactly if they are in the same state."""
    return _encoder.encode(_Encoding(simulation).world())


# -- copies ------------------------------------------------------------------------------------------------------------------

_Book = TypeVar("_Book")
_Copy = Callable[[Any, dict[int, Any]], Any]
_ATOMS = frozenset({int, bool, str, bytes, float, NoneType})
_copies: dict[type, _Copy] = {}  # how each type is copied, found once


def duplicate(simulation: Simulation) -> Simulation:
    """Returns a copy that shares nothing that changes. (``copy.deepcopy`` does as much, at ten times the price.)"""
    copied: Simulation = _duplicate(simulation, {})
    return copied


def _duplicate(value: Any, memo: dict[int, Any]) -> Any:
    kind = type(value)
    copy = _copies.get(kind)
    if copy is None:
        copy = _copies[kind] = _copy_of(kind)
    return copy(value, memo)


def _copy_of(kind: type) -> _Copy:
    if issubclass(kind, int | str | bytes | float | NoneType | enum.Enum | msgspec.Struct | frozenset):
        return _same
    if dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen:  # type: ignore[attr-defined] # no public name
        return _same
    if kind is dict or kind is OrderedDict:
        return _copy_dict
    if kind in (blocks.RunAllocator, model_blocks.RunAllocator):
        return _copy_allocator
    if kind in (blocks.TakenRuns, model_blocks.TakenRuns):
        return _copy_taken
    if kind is EngineBook:
        return _copy_engine_book
    if kind is ClientBook:
        return _copy_client_book
    if kind is Lending:
        return _copy_lending
    if kind in (list, tuple, set, deque):
        return lambda value, memo: kind(_duplicate(item, memo) for item in value)
    names: tuple[str, ...] = getattr(kind, "__slots__", ())
    if kind.__module__.startswith("shmring.core.") and kind.__name__ in FIELDS:  # it is compiled
        names = FIELDS[kind.__name__] + DERIVED.get(kind.__name__, ())
    return lambda value, memo: _copy_object(value, names or tuple(vars(value)), memo)


def _same(value: Any, memo: dict[int, Any]) -> Any:
    return value


def _copy_allocator(value: Any, memo: dict[int, Any]) -> Any:
    copied = type(value)(value.start, value.length)
    copied.carve(value.start, value.length)
    for start, length in value.runs():
        copied.free(start, length)
    return copied


def _copy_taken(value: Any, memo: dict[int, Any]) -> Any:
    copied = type(value)()
    for start, length in value.runs():
        copied.add(start, length)
    return copied


def _copy_engine_book(value: EngineBook, memo: dict[int, Any]) -> EngineBook:
    return _fill(EngineBook(value.geometry, value.limits), value, memo)


def _copy_client_book(value: ClientBook, memo: dict[int, Any]) -> ClientBook:
    return _fill(ClientBook(value.limits), value, memo)


def _copy_lending(value: Lending, memo: dict[int, Any]) -> Lending:
    free = value._free
    return _fill(Lending(value.clients, value.limits, value.memory, free.start, free.length, 1), value, memo)


def _copy_dict(value: dict[Any, Any], memo: dict[int, Any]) -> dict[Any, Any]:
    copied: dict[Any, Any] | None = memo.get(id(value))  # headers are shared by an engine and its frontends
    if copied is None:
        copied = memo[id(value)] = type(value)()
        for key, item in value.items():
            copied[key] = _duplicate(item, memo)
    return copied


def _fill(copied: _Book, value: _Book, memo: dict[int, Any]) -> _Book:
    """Makes a new compiled book the copy of another, bounds excepted, which it has."""
    for name in FIELDS[type(value).__name__] + DERIVED[type(value).__name__]:
        setattr(copied, name, _duplicate(getattr(value, name), memo))
    return copied


def _copy_object(value: Any, names: tuple[str, ...], memo: dict[int, Any]) -> Any:
    copied = memo.get(id(value))
    if copied is None:
        kind: Any = type(value)
        copied = memo[id(value)] = kind.__new__(kind)
        for name in names:
            item = getattr(value, name)
            setattr(copied, name, item if type(item) in _ATOMS else _duplicate(item, memo))
    return copied
