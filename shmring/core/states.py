"""Every life cycle of shmring, as data.

Theory of operation: a life cycle is a table ``{state: {event: next state}}``. :func:`advance` is the only way from one
state to another; what a table does not list is illegal, raises :class:`~shmring.errors.LocalProtocolError` and changes
nothing. Everything that affects a transition is in this file; the effects of a transition are in the two books
(:mod:`.engine_book`, the engine's, and :mod:`.client_book`, a frontend's).

The idea of a protocol as tables with one function that walks them is h11's.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, TypeVar

from shmring.errors import LocalProtocolError

__all__ = [
    "ClientSlot",
    "ClientSlotEvent",
    "EngineSlot",
    "EngineSlotEvent",
    "Lease",
    "LeaseEvent",
    "Request",
    "RequestEvent",
    "CLIENT_SLOT",
    "ENGINE_SLOT",
    "LEASE",
    "REQUEST",
    "TABLES",
    "advance",
]


class ClientSlot(enum.IntEnum):
    """A slot in the frontend's book."""

    FREE = 0
    WRITING = 1
    SUBMITTED = 2
    CACHED = 3  # released by the engine while the frontend still holds it: its content is intact
    DRAINING = 4  # left, but a view of it is still alive in this process
    KEPT = 5  # its content is the engine's from now on, and its blocks are in no lease


class ClientSlotEvent(enum.IntEnum):
    ACQUIRE = 0
    SUBMIT = 1
    DISCARD = 2
    DISCARD_VIEWED = 3
    RELEASE = 4
    RELEASE_RETAINED = 5
    RELEASE_VIEWED = 6
    ABORT = 7
    EVICT = 8
    EVICT_VIEWED = 9
    LAST_VIEW_GONE = 10
    KEEP = 11


class EngineSlot(enum.IntEnum):
    """A slot in the engine's book."""

    PUBLISHED = 0
    CLAIMED = 1
    DRAINING = 2  # released, but a view of it is still alive in the engine
    RELEASED = 3


class EngineSlotEvent(enum.IntEnum):
    CLAIM = 0
    RELEASE = 1
    RELEASE_VIEWED = 2
    LAST_VIEW_GONE = 3
    ABORT = 4


class Lease(enum.IntEnum):
    """A lease in the engine's book."""

    FREE = 0
    LEASED = 1
    QUARANTINED = 2  # its frontend is disconnected but not proven dead


class LeaseEvent(enum.IntEnum):
    GRANT = 0
    RETURN = 1
    DISCONNECT = 2
    PROOF = 3  # the kernel has reported its holder's death, or the goodbye did not name it; and no slot of it is in use


class Request(enum.IntEnum):
    """A request in the engine's book."""

    WAITING = 0
    RUNNING = 1
    FINISHED = 2
    ABORTED = 3
    FAILED = 4
    TIMED_OUT = 5


class RequestEvent(enum.IntEnum):
    SCHEDULE = 0
    FINISH = 1
    ABORT = 2
    ERROR = 3
    DEADLINE = 4


CLIENT_SLOT: Mapping[ClientSlot, Mapping[ClientSlotEvent, ClientSlot]] = {
    ClientSlot.FREE: {ClientSlotEvent.ACQUIRE: ClientSlot.WRITING},
    ClientSlot.WRITING: {
        ClientSlotEvent.SUBMIT: ClientSlot.SUBMITTED,
        ClientSlotEvent.DISCARD: ClientSlot.FREE,
        ClientSlotEvent.DISCARD_VIEWED: ClientSlot.DRAINING,
    },
    ClientSlot.SUBMITTED: {
        ClientSlotEvent.RELEASE: ClientSlot.FREE,
        ClientSlotEvent.RELEASE_RETAINED: ClientSlot.CACHED,
        ClientSlotEvent.RELEASE_VIEWED: ClientSlot.DRAINING,
        ClientSlotEvent.ABORT: ClientSlot.SUBMITTED,  # an abort gives no slot back: only the engine's Release does
        ClientSlotEvent.KEEP: ClientSlot.KEPT,
    },
    ClientSlot.CACHED: {
        ClientSlotEvent.SUBMIT: ClientSlot.SUBMITTED,
        ClientSlotEvent.EVICT: ClientSlot.FREE,
        ClientSlotEvent.EVICT_VIEWED: ClientSlot.DRAINING,
    },
    ClientSlot.DRAINING: {ClientSlotEvent.LAST_VIEW_GONE: ClientSlot.FREE},
    ClientSlot.KEPT: {},
}

ENGINE_SLOT: Mapping[EngineSlot, Mapping[EngineSlotEvent, EngineSlot]] = {
    EngineSlot.PUBLISHED: {
        EngineSlotEvent.CLAIM: EngineSlot.CLAIMED,
        EngineSlotEvent.ABORT: EngineSlot.RELEASED,
    },
    EngineSlot.CLAIMED: {
        EngineSlotEvent.RELEASE: EngineSlot.RELEASED,
        EngineSlotEvent.RELEASE_VIEWED: EngineSlot.DRAINING,
        EngineSlotEvent.ABORT: EngineSlot.CLAIMED,  # only marked: its slots are read until its step ends
    },
    EngineSlot.DRAINING: {
        EngineSlotEvent.LAST_VIEW_GONE: EngineSlot.RELEASED,
        EngineSlotEvent.ABORT: EngineSlot.DRAINING,
    },
    EngineSlot.RELEASED: {},
}

LEASE: Mapping[Lease, Mapping[LeaseEvent, Lease]] = {
    Lease.FREE: {LeaseEvent.GRANT: Lease.LEASED},
    Lease.LEASED: {
        LeaseEvent.RETURN: Lease.FREE,
        LeaseEvent.DISCONNECT: Lease.QUARANTINED,
    },
    Lease.QUARANTINED: {LeaseEvent.PROOF: Lease.FREE},
}

REQUEST: Mapping[Request, Mapping[RequestEvent, Request]] = {
    Request.WAITING: {
        RequestEvent.SCHEDULE: Request.RUNNING,
        RequestEvent.ABORT: Request.ABORTED,
        RequestEvent.DEADLINE: Request.TIMED_OUT,
        RequestEvent.ERROR: Request.FAILED,
    },
    Request.RUNNING: {
        RequestEvent.FINISH: Request.FINISHED,
        RequestEvent.ABORT: Request.ABORTED,
        RequestEvent.DEADLINE: Request.TIMED_OUT,
        RequestEvent.ERROR: Request.FAILED,
    },
    Request.FINISHED: {},
    Request.ABORTED: {},
    Request.FAILED: {},
    Request.TIMED_OUT: {},
}

TABLES: Mapping[str, Mapping[Any, Mapping[Any, Any]]] = {
    "client_slot": CLIENT_SLOT,
    "engine_slot": ENGINE_SLOT,
    "lease": LEASE,
    "request": REQUEST,
}

_State = TypeVar("_State", bound=enum.IntEnum)
_Event = TypeVar("_Event", bound=enum.IntEnum)


def advance(table: Mapping[_State, Mapping[_Event, _State]], state: _State, event: _Event) -> _State:
    """Returns the state that ``event`` leads to from ``state``.

    Raises:
        LocalProtocolError: the table has no such transition. Nothing was changed.
    """
    try:
        return table[state][event]
    except KeyError:
        raise LocalProtocolError(f"{type(state).__name__} {state.name}: {event.name} is not allowed here") from None
