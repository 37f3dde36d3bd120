"""The life cycles: every pair of a state and an event, legal or not."""

from __future__ import annotations

import enum
from typing import Any

import pytest

from shmring.core.compiled import ClientBook, watch
from shmring.core.geometry import ClientBookLimits
from shmring.core.messages import LeaseGrant
from shmring.core.states import (
    TABLES,
    ClientSlot,
    ClientSlotEvent,
    EngineSlot,
    EngineSlotEvent,
    Lease,
    LeaseEvent,
    Request,
    RequestEvent,
    advance,
)
from shmring.errors import LocalProtocolError
from tests.tables import for_each

# The design's arrows, written a second time: state -event-> state.
ARROWS = {
    "client_slot": """
        FREE ACQUIRE WRITING
        WRITING SUBMIT SUBMITTED, WRITING DISCARD FREE, WRITING DISCARD_VIEWED DRAINING
        SUBMITTED RELEASE FREE, SUBMITTED RELEASE_RETAINED CACHED, SUBMITTED RELEASE_VIEWED DRAINING
        SUBMITTED ABORT SUBMITTED, SUBMITTED KEEP KEPT
        CACHED SUBMIT SUBMITTED, CACHED EVICT FREE, CACHED EVICT_VIEWED DRAINING
        DRAINING LAST_VIEW_GONE FREE
    """,
    "engine_slot": """
        PUBLISHED CLAIM CLAIMED, PUBLISHED ABORT RELEASED
        CLAIMED RELEASE RELEASED, CLAIMED RELEASE_VIEWED DRAINING, CLAIMED ABORT CLAIMED
        DRAINING LAST_VIEW_GONE RELEASED, DRAINING ABORT DRAINING
    """,
    "lease": """
        FREE GRANT LEASED
        LEASED RETURN FREE, LEASED DISCONNECT QUARANTINED
        QUARANTINED PROOF FREE
    """,
    "request": """
        WAITING SCHEDULE RUNNING, WAITING ABORT ABORTED, WAITING DEADLINE TIMED_OUT, WAITING ERROR FAILED
        RUNNING FINISH FINISHED, RUNNING ABORT ABORTED, RUNNING DEADLINE TIMED_OUT, RUNNING ERROR FAILED
    """,
}
KINDS: dict[str, tuple[type[enum.IntEnum], type[enum.IntEnum]]] = {
    "client_slot": (ClientSlot, ClientSlotEvent),
    "engine_slot": (EngineSlot, EngineSlotEvent),
    "lease": (Lease, LeaseEvent),
    "request": (Request, RequestEvent),
}
INITIAL = {
    "client_slot": ClientSlot.FREE,
    "engine_slot": EngineSlot.PUBLISHED,
    "lease": Lease.FREE,
    "request": Request.WAITING,
}
TERMINAL: dict[str, set[enum.IntEnum]] = {
    "client_slot": {ClientSlot.KEPT},
    "engine_slot": {EngineSlot.RELEASED},
    "lease": set(),
    "request": {Request.FINISHED, Request.ABORTED, Request.FAILED, Request.TIMED_OUT},
}


def arrows(name: str) -> dict[tuple[str, str], str]:
    lines = ARROWS[name].replace(",", "\n").split("\n")
    words = [line.split() for line in lines if line.strip()]
    return {(state, event): target for state, event, target in words}


PAIRS = [(name, state, event) for name, (states, events) in KINDS.items() for state in states for event in events]


@for_each(("name", "state", "event"), PAIRS)
def test_an_event_leads_where_the_design_says_or_is_refused(name: str, state: Any, event: Any) -> None:
    target = arrows(name).get((state.name, event.name))
    if target is not None:
        assert advance(TABLES[name], state, event) is KINDS[name][0][target]
        return
    with pytest.raises(LocalProtocolError, match=rf"{type(state).__name__} {state.name}: {event.name} is not allowed"):
        advance(TABLES[name], state, event)


@for_each("name", KINDS)
def test_a_table_lists_each_state_and_nothing_else(name: str) -> None:
    states, events = KINDS[name]
    assert list(TABLES[name]) == list(states)
    assert all(isinstance(event, events) for row in TABLES[name].values() for event in row)
    assert TABLES.keys() == KINDS.keys()


@for_each("name", KINDS)
def test_every_state_can_be_reached(name: str) -> None:
    reached, todo = set(), {INITIAL[name]}
    while todo:
        state = todo.pop()
        reached.add(state)
        todo |= set(TABLES[name][state].values()) - reached
    assert reached == set(KINDS[name][0])


@for_each("name", KINDS)
def test_only_the_named_states_are_final(name: str) -> None:
    assert {state for state, row in TABLES[name].items() if not row} == TERMINAL[name]


def test_an_illegal_event_leaves_the_state_of_its_caller_alone() -> None:
    state = Lease.FREE
    with pytest.raises(LocalProtocolError):
        state = advance(TABLES["lease"], state, LeaseEvent.RETURN)
    assert state is Lease.FREE


def test_who_watches_is_told_of_a_transition_before_it_is_made() -> None:
    told: list[tuple[Any, ...]] = []
    book = ClientBook(ClientBookLimits(1, 4 << 12, 2 << 12, 1, 2 << 12, 1.0))
    book.granted(LeaseGrant(0, 1, 1 << 12, 2 << 12), 0.0)
    watch(lambda *transition: told.append(transition))
    try:
        slot = book.acquire(1, held=False)
        assert slot is not None
        book.submit(slot)
    finally:
        watch(None)
    assert told == [
        ("client_slot", ClientSlot.FREE, ClientSlotEvent.ACQUIRE),
        ("client_slot", ClientSlot.WRITING, ClientSlotEvent.SUBMIT),
    ]
