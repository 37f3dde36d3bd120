"""Every state of a small scenario, breadth first.

Theory of operation: a state is known by a digest of its bytes (:mod:`.state`) and kept as its parent and the action that
led from there; to go on from it, the actions from the beginning are applied again, so that memory does not grow with the
size of a world. The first trace to a failure is therefore a shortest one. All invariants are checked in each state, and
each state in which no message is under way is settled: so nobody waits for ever in any of them (from a state with messages
under way, delivering them leads to one without).

What bounds the space: the numbers of the scenario, and no disturbances beyond ``max_disturbances``. Where messages are sent
voluntarily, ``max_queue`` bounds them; what the books send because of what they hear is never held back.
"""

from __future__ import annotations

import functools
import hashlib
import time
from array import array
from collections.abc import Callable, Mapping
from contextlib import closing

import msgspec

from tests.simulation.crash import Crash, in_child
from tests.simulation.failure import Failure
from tests.simulation.scenario import DISTURBANCES, Action, Kind, Scenario, Sending, Violation
from tests.simulation.simulation import Simulation
from tests.simulation.state import encode

_DIGEST_NBYTES = 16  # two of ten million states collide once in 10**24 runs
_PROGRESS_STATES = 5000

_NEVER = frozenset(
    {
        Kind.FORGE, Kind.ENGINE_DIES, Kind.CONNECT, Kind.CONNECT_FAILS, Kind.ACQUIRE, Kind.TRY, Kind.TICK, Kind.FAIL,
        Kind.TIME_OUT, Kind.REQUEST_NOW, Kind.FORGET, Kind.WAIT_KEPT,
    }
)  # fmt: skip

_SMALL = Scenario(
    leasable_blocks=3,
    reply_blocks=1,
    max_lease_blocks=1,
    quota_blocks=2,
    max_leases=2,
    max_inflight=2,
    base_blocks=1,
    lease_blocks=1,
    processes=2,
    slot_blocks=(1,),
    reply_blocks_wanted=(),
    max_slots=2,
    max_queue=2,
    max_requests=2,
    max_replies=1,
    max_disturbances=1,
    without=_NEVER,
)
#: Actions of frontends; an exploration that is about workers leaves them out.
_OF_FRONTENDS = frozenset({Kind.GOODBYE, Kind.HANG_UP, Kind.CRASH, Kind.ENGINE_HANGS_UP, Kind.ABORT, Kind.CANCEL})
_SMALLER = msgspec.structs.replace(_SMALL, leasable_blocks=2, max_requests=1, max_slots=1)

#: All that goes wrong, but the end of a connection.
_DISTURBANCES_BUT_ENDS = DISTURBANCES - {Kind.HANG_UP, Kind.ENGINE_HANGS_UP}

#: One frontend, for what happens in the midst of its calls.
_ALONE = msgspec.structs.replace(_SMALLER, processes=1, copies_wait=False)

#: Content of one block, which may be kept under one key.
_WITH_CONTENT = msgspec.structs.replace(_SMALLER, kept_blocks=1, keys=1, max_asking=1, max_held=1, max_asks=1, max_queue=1)

#: Workers, and every turn of the engine's loop.
_WITH_WORKERS = msgspec.structs.replace(_SMALLER, workers=2, joined_workers=2, copies_wait=False, turns_wait=True)

#: What is explored, by name. The first two are two frontends, three blocks and two requests each; the others are smaller
#: and bring in what those leave out.
EXPLORATIONS: Mapping[str, Scenario] = {
    # Slots of one and of two blocks, so that leases are waited for, recalled and returned; all goes its straight way.
    "requests": msgspec.structs.replace(_SMALL, slot_blocks=(1, 2), max_disturbances=0),
    # Slots of one block, and at any one moment one thing that goes wrong: an abort, a cancelled task, a view that stays
    # alive, the end of a connection or of a process.
    "disturbed": _SMALL,
    # Two blocks: whoever wants both waits for the other's lease.
    "crowded": msgspec.structs.replace(_SMALLER, slot_blocks=(1, 2)),
    # A reserve of one block, which both want for a reply.
    "replies": msgspec.structs.replace(_SMALLER, slot_blocks=(1, 2), reply_blocks_wanted=(1,)),
    # A caller that drops a request, of which a reply may lie unread in its slot where a larger one is to go.
    "dropped": msgspec.structs.replace(
        _SMALLER,
        processes=1,
        reply_blocks=2,
        reply_blocks_wanted=(1, 2),
        max_replies=2,
        turns_wait=True,
        without=(_NEVER | _OF_FRONTENDS | {Kind.CANCEL_REPLY, Kind.RELEASE}) - {Kind.FORGET, Kind.TICK},
    ),
    # Slots that callers hold, submit again, and leave with living views.
    "held": msgspec.structs.replace(
        _SMALLER, slot_blocks=(1, 2), max_disturbances=0, without=_NEVER - {Kind.ACQUIRE} | {Kind.REQUEST}
    ),
    # Callers that do not wait, and leases that nobody uses.
    "idle": msgspec.structs.replace(
        _SMALLER, leasable_blocks=3, max_disturbances=0, without=_NEVER - {Kind.TRY, Kind.TICK} | {Kind.REQUEST}
    ),
    # Two workers and two messages, for which there is memory of one block, and place for one at each worker.
    "workers": msgspec.structs.replace(
        _WITH_WORKERS,
        processes=0,
        broadcast_blocks=1,
        broadcast_blocks_wanted=(0, 1),
        worker_backlog=1,
        max_calls=2,
        sendings=(Sending.WAITS,),
        without=_NEVER | {Kind.WORKER_JOINS},
    ),
    # A message to which both reply, or one of them, or none.
    "gathered": msgspec.structs.replace(
        _WITH_WORKERS,
        processes=0,
        broadcast_blocks_wanted=(0,),
        max_calls=1,
        sendings=(Sending.GATHER,),
        without=_NEVER | {Kind.WORKER_JOINS},
    ),
    # A worker that comes again, or late, while messages are sent.
    "joining": msgspec.structs.replace(
        _WITH_WORKERS,
        processes=0,
        joined_workers=1,
        broadcast_blocks=1,
        broadcast_blocks_wanted=(1,),
        worker_backlog=2,
        max_calls=2,
        max_disturbances=1,
        sendings=(Sending.WAITS,),
        without=_NEVER,
    ),
    # One request, whose claim is shared with two workers.
    "shared": msgspec.structs.replace(
        _WITH_WORKERS,
        processes=1,
        broadcast_blocks=1,
        broadcast_blocks_wanted=(),
        worker_backlog=1,
        max_calls=1,
        sendings=(Sending.WAITS,),
        without=_NEVER | _OF_FRONTENDS | {Kind.WORKER_JOINS},
    ),
    # Content in the one block that may be kept, which goes when another is kept, or when somebody wants the block.
    "kept": msgspec.structs.replace(
        _WITH_CONTENT,
        processes=1,
        keys=2,
        max_asks=2,
        max_disturbances=0,
        without=_NEVER - {Kind.ACQUIRE} | {Kind.REQUEST, Kind.SUBMIT},
    ),
    # Callers that give up while the answer is under way, once.
    "asked": msgspec.structs.replace(
        _WITH_CONTENT,
        processes=1,
        max_asking=2,
        max_asks=3,
        max_queue=2,
        without=(_NEVER | DISTURBANCES | {Kind.REQUEST, Kind.SUBMIT, Kind.SEND_KEPT}) - {Kind.ACQUIRE, Kind.CANCEL},
    ),
    # Content for which callers of two frontends wait, one of whom gives up, or whose connection ends, while it is kept.
    "waited for": msgspec.structs.replace(
        _WITH_CONTENT,
        without=(_NEVER | DISTURBANCES | {Kind.REQUEST, Kind.SUBMIT, Kind.SEND_KEPT, Kind.FIND, Kind.UNPIN, Kind.LEAVE})
        - {Kind.ACQUIRE, Kind.WAIT_KEPT, Kind.CANCEL, Kind.ENGINE_HANGS_UP},
    ),
    # One that gives up, and waits again while the engine answers.
    "waited for again": msgspec.structs.replace(
        _WITH_CONTENT,
        processes=1,
        max_asking=2,
        max_asks=3,
        without=(_NEVER | DISTURBANCES | {Kind.REQUEST, Kind.SUBMIT, Kind.SEND_KEPT, Kind.FIND})
        - {Kind.ACQUIRE, Kind.WAIT_KEPT, Kind.CANCEL},
    ),
    # One content, which one frontend keeps and both find and send, until one of them dies, or its connection ends.
    "kept by two": msgspec.structs.replace(
        _WITH_CONTENT,
        without=(_NEVER | DISTURBANCES | {Kind.REQUEST, Kind.SUBMIT, Kind.UNPIN, Kind.LEAVE})
        - {Kind.ACQUIRE, Kind.CRASH, Kind.ENGINE_HANGS_UP},
    ),
    # Callers that find in their own call what is under way: releases, grants, and the end of the connection.
    "looking": msgspec.structs.replace(
        _ALONE,
        max_inflight=1,
        max_requests=2,
        turns_wait=True,
        looks=True,
        without=_NEVER - {Kind.ACQUIRE} | _DISTURBANCES_BUT_ENDS,
    ),
    # The same of slots that they hold.
    "looking for slots": msgspec.structs.replace(
        _ALONE, max_slots=2, looks=True, without=_NEVER - {Kind.ACQUIRE} | _DISTURBANCES_BUT_ENDS | {Kind.REQUEST, Kind.SUBMIT}
    ),
    # The same of recalls: another wants the block.
    "looking for recalls": msgspec.structs.replace(
        _SMALLER, leasable_blocks=1, quota_blocks=1, looks=True, max_disturbances=0, without=_NEVER - {Kind.REQUEST_NOW}
    ),
    # The same of replies.
    "looking for replies": msgspec.structs.replace(
        _ALONE,
        reply_blocks_wanted=(0, 1),
        max_replies=2,
        looks=True,
        without=_NEVER - {Kind.REQUEST_NOW} | {Kind.CANCEL, Kind.CANCEL_REPLY},
    ),
    # Handlers that find in their own call what is under way.
    "claiming": msgspec.structs.replace(_SMALLER, copies_wait=False, looks=True, without=_NEVER),
    # Code of a payload that is copied, which has its session end, or sends another one, or has a reply come.
    "code": msgspec.structs.replace(
        _ALONE,
        max_requests=2,
        in_code=frozenset({Kind.TO_FRONTEND, Kind.HANG_UP, Kind.REQUEST_NOW, Kind.ABORT}),
        without=_NEVER - {Kind.REQUEST_NOW} | _DISTURBANCES_BUT_ENDS - {Kind.ABORT},
    ),
    # The same of one that lies in slots, which its code leaves, or sends another beside it.
    "code in slots": msgspec.structs.replace(
        _ALONE,
        max_requests=2,
        max_slots=2,
        in_code=frozenset({Kind.REQUEST_NOW, Kind.LEAVE}),
        without=_NEVER - {Kind.ACQUIRE, Kind.REQUEST_NOW} | DISTURBANCES | {Kind.REQUEST, Kind.TENSOR, Kind.CLAIM},
    ),
    # The same where the payload is then copied on a thread, and its caller gives up meanwhile.
    "code before copies": msgspec.structs.replace(
        _ALONE,
        leasable_blocks=2,
        max_slots=2,
        copies_wait=True,
        in_code=frozenset({Kind.LEAVE}),
        without=_NEVER - {Kind.ACQUIRE} | (DISTURBANCES - {Kind.CANCEL}) | {Kind.REQUEST, Kind.TENSOR, Kind.CLAIM},
    ),
    # Code of a shape, which leaves the slot, or has the session end.
    "code of shapes": msgspec.structs.replace(
        _ALONE,
        in_code=frozenset({Kind.LEAVE, Kind.HANG_UP, Kind.TO_FRONTEND}),
        without=_NEVER - {Kind.ACQUIRE} | _DISTURBANCES_BUT_ENDS | {Kind.REQUEST, Kind.SUBMIT},
    ),
    # Code of a reply that leaves its claim, or has its frontend go.
    "code of handlers": msgspec.structs.replace(
        _ALONE,
        reply_blocks_wanted=(0, 1),
        in_code=frozenset({Kind.FINISH, Kind.FAIL, Kind.RELEASE, Kind.REPLY_NOW, Kind.TO_ENGINE, Kind.ENGINE_HANGS_UP}),
        without=_NEVER - {Kind.FAIL} | DISTURBANCES - {Kind.ENGINE_HANGS_UP, Kind.ABORT, Kind.RELEASE},
    ),
    # The same of a message to workers, and of a worker's reply.
    "code of messages": msgspec.structs.replace(
        _WITH_WORKERS,
        processes=1,
        workers=1,
        joined_workers=1,
        broadcast_blocks_wanted=(),
        worker_backlog=1,
        max_calls=1,
        sendings=(Sending.NOW,),
        in_code=frozenset({Kind.FINISH, Kind.RELEASE, Kind.SHARE, Kind.DROP_WORKER}),
        without=_NEVER | _OF_FRONTENDS | {Kind.WORKER_JOINS, Kind.REPLY},
    ),
    "code of answers": msgspec.structs.replace(
        _WITH_WORKERS,
        processes=0,
        workers=1,
        joined_workers=1,
        broadcast_blocks_wanted=(0,),
        max_calls=1,
        sendings=(Sending.GATHER,),
        in_code=frozenset({Kind.LEAVE_MESSAGE, Kind.WORKER_CLOSES}),
        without=_NEVER | {Kind.WORKER_JOINS},
    ),
    # And of content that is kept.
    "code of content": msgspec.structs.replace(
        _WITH_CONTENT,
        processes=1,
        copies_wait=False,
        in_code=frozenset({Kind.LEAVE, Kind.UNPIN, Kind.HANG_UP, Kind.TO_FRONTEND}),
        without=_NEVER - {Kind.ACQUIRE} | _DISTURBANCES_BUT_ENDS | {Kind.REQUEST, Kind.SUBMIT, Kind.CLAIM},
    ),
    # A request of the engine's own process, whose handler replies more than is read, and the next one.
    "injected": msgspec.structs.replace(
        _ALONE,
        processes=0,
        injectors=1,
        max_inflight=1,
        reply_blocks_wanted=(1,),
        max_replies=3,
        turns_wait=True,
        without=_NEVER | _OF_FRONTENDS | {Kind.RELEASE},
    ),
    # A frontend that has stopped for good, in whatever place it is, beside one that is idle and one that wants a lease.
    "stopped": msgspec.structs.replace(
        _SMALLER,
        quota_blocks=1,
        max_leases=1,
        max_queue=1,
        processes=3,
        connected=3,
        stops=True,
        may_stop=1,
        copies_wait=False,
        max_disturbances=0,
        without=(
            _NEVER
            | _OF_FRONTENDS
            | {Kind.REQUEST, Kind.SUBMIT, Kind.TENSOR, Kind.VIEW_DIES, Kind.FALL_SILENT, Kind.GO_ON, Kind.FRONTEND_MOMENT}
        )
        - {Kind.ACQUIRE},
    ),
    # Callers of one frontend that want a block, two or three, beside one that never leaves its slot.
    "overtaken": msgspec.structs.replace(
        _SMALLER,
        processes=1,
        leasable_blocks=3,
        quota_blocks=3,
        max_leases=3,
        slot_blocks=(1, 2, 3),
        max_slots=4,
        max_queue=1,
        max_moments=9,
        stops=True,
        copies_wait=False,
        max_disturbances=0,
        without=(
            (_NEVER | _OF_FRONTENDS | {Kind.REQUEST, Kind.SUBMIT, Kind.TENSOR, Kind.LEAVE, Kind.STOP, Kind.FALL_SILENT})
            | {Kind.MOMENT}
        )
        - {Kind.ACQUIRE},
    ),
    # A caller that reads one of two replies before the other, or none, and a reserve with room for one.
    "unread": msgspec.structs.replace(
        _SMALLER,
        processes=1,
        leasable_blocks=2,
        max_slots=2,
        max_requests=2,
        max_replies=1,
        reply_blocks_wanted=(1,),
        copies_wait=False,
        turns_wait=True,
        stops=True,
        max_disturbances=0,
        without=_NEVER | {Kind.STOP, Kind.RELEASE, Kind.GOODBYE, Kind.FRONTEND_MOMENT},
    ),
    # A worker that has stopped, beside one to whom others are sent.
    "stopped worker": msgspec.structs.replace(
        _WITH_WORKERS,
        processes=0,
        stops=True,
        broadcast_blocks_wanted=(0,),
        worker_backlog=1,
        max_calls=3,
        max_disturbances=0,
        sendings=(Sending.WAITS,),
        without=_NEVER | {Kind.WORKER_JOINS},
    ),
    # Frontends that come again, and engines that die and start.
    "lives": msgspec.structs.replace(_SMALLER, without=_NEVER - {Kind.CONNECT, Kind.CONNECT_FAILS, Kind.ENGINE_DIES}),
}


class Exploration(msgspec.Struct):
    """What an exploration has found.

    Attributes:
        name: of the scenario.
        complete: every state that the scenario allows was visited; False where ``max_states`` ended it, or a failure.
        states, transitions: visited states, and actions tried from them.
        depth: actions from the beginning to the furthest state; all that need fewer were visited in any case.
        settled: states from which everything was settled.
        failure: what did not hold, with a shortest trace to it.
    """

    name: str
    complete: bool = False
    states: int = 0
    transitions: int = 0
    depth: int = 0
    settled: int = 0
    seconds: float = 0.0
    failure: Failure | None = None


def explore(name: str, max_states: int, progress: Callable[[Exploration], object] = lambda found: None) -> Exploration:
    """Visits every state of a scenario, or ``max_states`` of them.

    Args:
        name: of one of :data:`EXPLORATIONS`.
        max_states: where to give up; each takes some 150 bytes and a few milliseconds, more the further it is.
        progress: called now and then with what was found so far.
    """
    try:
        return in_child(lambda: _explored(name, max_states, progress), Exploration)
    except Crash as crash:
        return Exploration(name, failure=Failure.of(crash))


def _explored(name: str, max_states: int, progress: Callable[[Exploration], object]) -> Exploration:
    exploration = _Explorer(name)
    started = time.perf_counter()
    found = exploration.found
    while exploration.goes_on() and found.states < max_states:
        exploration.visit()
        if exploration.visited % _PROGRESS_STATES == 0:
            found.seconds = time.perf_counter() - started
            progress(found)
    found.complete = found.failure is None and not exploration.goes_on()
    found.seconds = time.perf_counter() - started
    return found


class _Explorer:
    """The states that were reached, in the order in which they were; the first ``visited`` of them have been gone on from."""

    def __init__(self, name: str) -> None:
        self.found = Exploration(name)
        self.scenario = EXPLORATIONS[name]
        self.visited = 0
        self._parents = array("q")
        self._depths = array("H")
        self._actions: list[Action | None] = []  # which led from the parent; None to the beginning
        self._seen: set[bytes] = set()
        with closing(self._world([])) as simulation:
            self._enter(simulation, -1, None)

    def goes_on(self) -> bool:
        """Whether there is a state to go on from."""
        return self.visited < len(self._actions) and self.found.failure is None

    def visit(self) -> None:
        """Tries every action from the next state, and enters the states that are new."""
        state, self.visited = self.visited, self.visited + 1
        trace = self._trace(state)
        world: Simulation | None = self._world(trace)
        assert world is not None
        actions = world.enabled()
        if world.is_quiet() or not actions:
            self.found.settled += 1
            with closing(world):
                self._try(world.settle, trace, settles=True)
            world = None  # else the first action happens in it
        if self.found.failure is not None:
            return
        for action in actions:
            with closing(world or self._world(trace)) as following:
                world = None
                self.found.transitions += 1
                self._try(functools.partial(following.happen, action), [*trace, action])
                self._try(functools.partial(self._look_at, following, state, action), [*trace, action])
            if self.found.failure is not None:
                return

    def _look_at(self, world: Simulation, parent: int, action: Action) -> None:
        if self.found.failure is None and self._enter(world, parent, action):
            world.check()

    def _world(self, trace: list[Action]) -> Simulation:
        """Returns a world to which this has happened."""
        simulation = Simulation(self.scenario)
        for action in trace:
            simulation.happen(action)
        return simulation

    def _enter(self, simulation: Simulation, parent: int, action: Action | None) -> bool:
        """Writes a state down; returns whether it is new."""
        digest = hashlib.blake2b(encode(simulation), digest_size=_DIGEST_NBYTES).digest()
        if digest in self._seen:
            return False
        self._seen.add(digest)
        depth = self._depths[parent] + 1 if action is not None else 0
        self._parents.append(parent)
        self._depths.append(depth)
        self._actions.append(action)
        self.found.states += 1
        self.found.depth = max(self.found.depth, depth)
        return True

    def _trace(self, state: int) -> list[Action]:
        trace: list[Action] = []
        while (action := self._actions[state]) is not None:
            trace.append(action)
            state = self._parents[state]
        return trace[::-1]

    def _try(self, event: Callable[[], None], trace: list[Action], *, settles: bool = False) -> None:
        try:
            event()
        except Violation as violation:
            self.found.failure = Failure(str(violation), self.scenario, tuple(trace), settles)
