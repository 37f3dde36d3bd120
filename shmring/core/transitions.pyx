"""The tables of :mod:`.states`, as arrays that compiled code looks things up in.

Only the tables say which transitions are allowed: the arrays are filled from them when this module is imported. If an array has
no transition, :func:`~shmring.core.states.advance` raises the error.
"""

import cython

from libc.stdint cimport int8_t

from shmring.core.states import (
    CLIENT_SLOT,
    ENGINE_SLOT,
    LEASE,
    REQUEST,
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

cdef enum:
    MAX_STATES = 8
    MAX_EVENTS = 16

cdef enum:
    NOT_ALLOWED = -1

cdef object _watcher = None


def watch(watcher: Callable[[str, Any, Any], object] | None) -> None:
    """Has a function called before each transition, with the table's name, the state and the event; None ends that.

    For tests, which can thus end a process at any point of any life cycle.
    """
    global _watcher
    _watcher = watcher


@cython.final
cdef class Transitions:
    """One table.

    Args:
        name: of the table.
        table, states, events: from :mod:`.states`; states and events are numbered from 0 on.
    """

    cdef readonly str name
    cdef readonly object table
    cdef tuple _states
    cdef tuple _events
    cdef int8_t _next[MAX_STATES][MAX_EVENTS]

    def __init__(self, name, table, states, events):
        self.name, self.table, self._states, self._events = name, table, tuple(states), tuple(events)
        assert len(self._states) <= MAX_STATES and len(self._events) <= MAX_EVENTS
        for state in range(MAX_STATES):
            for event in range(MAX_EVENTS):
                self._next[state][event] = NOT_ALLOWED
        for number, state in enumerate(self._states):
            assert state == number, "states are numbered in order"
            for event, following in table.get(state, {}).items():
                self._next[state][event] = following

    cdef inline int after(self, int state, int event) except -1:
        """Returns the state that an event leads to. Raises LocalProtocolError if it is not allowed."""
        assert <unsigned int>state < MAX_STATES and <unsigned int>event < MAX_EVENTS
        cdef int following = self._next[state][event]
        if following == NOT_ALLOWED:
            return advance(self.table, self._states[state], self._events[event])  # which raises
        return following

    cdef inline int advance(self, int state, int event) except -1:
        """Returns the state that an event leads to, and tells the watcher: the caller makes the transition now."""
        cdef int following = self.after(state, event)
        if _watcher is not None:
            _watcher(self.name, self._states[state], self._events[event])
        return following

    cdef object state(self, int number):
        """Returns the member of the enumeration of states."""
        return self._states[number]


cdef Transitions engine_slots = Transitions("engine_slot", ENGINE_SLOT, EngineSlot, EngineSlotEvent)
cdef Transitions client_slots = Transitions("client_slot", CLIENT_SLOT, ClientSlot, ClientSlotEvent)
cdef Transitions leases = Transitions("lease", LEASE, Lease, LeaseEvent)
cdef Transitions requests = Transitions("request", REQUEST, Request, RequestEvent)
