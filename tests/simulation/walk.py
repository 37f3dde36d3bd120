"""A random walk from a seed: which actions, how often, and what a failure comes down to.

Theory of operation: a walk is made of episodes, each in a scenario of its own and drawn from the seed and its number
alone, so a failure needs one episode to be seen again. First a kind of action is drawn, by weight, then one of the
enabled actions of that kind. All invariants are checked after every action; at the end of an episode everything is
settled. What fails is shortened: pieces of its trace are left out for as long as what is left fails in the same words.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from random import Random

import msgspec

from tests.simulation.crash import Crash, in_child
from tests.simulation.failure import Failure, shorten
from tests.simulation.scenario import Action, Kind, Scenario, Violation
from tests.simulation.simulation import Simulation
from tests.simulation.state import encode

_EPISODE_STEPS = (50, 300, 1000, 3000)  # short ones begin often, long ones grow old

# Relative to each other. What begins something is rarer than what brings it on, or all would be full all the time; what
# ends a connection is rare, or none would grow old. Few forgeries get as far as the check that they are made for.
WEIGHTS: Mapping[Kind, float] = {
    Kind.CONNECT: 3, Kind.CONNECT_FAILS: 0.5, Kind.GOODBYE: 0.15, Kind.HANG_UP: 0.04, Kind.CRASH: 0.06,
    Kind.LET_GO: 0.3, Kind.FRONTEND_SEES_END: 1, Kind.ENGINE_SEES_END: 1, Kind.ENGINE_HANGS_UP: 0.03,
    Kind.PIDFD_FIRES: 0.5, Kind.ENGINE_DIES: 0.02, Kind.ENGINE_STARTS: 1, Kind.TO_ENGINE: 30, Kind.TO_FRONTEND: 30,
    Kind.FORGE: 0.3, Kind.ACQUIRE: 3, Kind.REQUEST: 8, Kind.REQUEST_NOW: 4, Kind.TRY: 1, Kind.CANCEL: 1,
    Kind.FRONTEND_TURN: 30, Kind.FRONTEND_TIMER: 10, Kind.COPIED: 12, Kind.SUBMIT: 8, Kind.LEAVE: 4, Kind.VIEW_DIES: 4,
    Kind.TENSOR: 20, Kind.KEEP: 12, Kind.FIND: 0.7, Kind.WAIT_KEPT: 0.7, Kind.UNPIN: 3, Kind.KEPT_VIEW_DIES: 4,
    Kind.SEND_KEPT: 8,
    Kind.ABORT: 2, Kind.READ: 12, Kind.FORGET: 1, Kind.DROP_REPLY: 2, Kind.CLAIM: 14, Kind.RELEASE: 4, Kind.FINISH: 8,
    Kind.FAIL: 1, Kind.TIME_OUT: 1, Kind.REPLY: 6, Kind.REPLY_NOW: 3, Kind.REPLY_COPIED: 8, Kind.CANCEL_REPLY: 1,
    Kind.ENGINE_VIEW_DIES: 4, Kind.TICK: 3,
    Kind.WORKER_JOINS: 1, Kind.WORKER_CLOSES: 0.06, Kind.WORKER_SEES_END: 1, Kind.WORKER_DIES: 0.06, Kind.RECEIVE: 12,
    Kind.LEAVE_MESSAGE: 10, Kind.MESSAGES_VIEW_DIES: 4, Kind.ANSWER: 6, Kind.BROADCAST: 4, Kind.SHARE: 4,
    Kind.CANCEL_CALL: 0.5, Kind.TURN: 20, Kind.TIMER: 0.5, Kind.FROM_WORKER: 10, Kind.WORKERS_BELL: 4,
    Kind.ENGINE_SEES_WORKERS_END: 1, Kind.WORKER_IS_DEAD: 0.5, Kind.DROP_WORKER: 0.06,
    Kind.STOP: 0.3, Kind.FALL_SILENT: 0.3, Kind.GO_ON: 2, Kind.AWAIT: 2, Kind.WORKER_STOPS: 0.3, Kind.WORKER_GOES_ON: 1,
    Kind.MOMENT: 0.5, Kind.FRONTEND_MOMENT: 1,
    Kind.INJECTOR: 3, Kind.CLOSE_INJECTOR: 0.06, Kind.INJECT: 6, Kind.READ_INJECTED: 8, Kind.GIVE_UP_INJECTED: 1,
}  # fmt: skip


_INSIDE = 0.005  # then half of the calls that something can happen in have nothing there, about


class Walk(msgspec.Struct):
    """What a walk has done.

    Attributes:
        steps: actions that were applied; all invariants were checked after each.
        actions: how often each kind happened.
        episodes: how many were settled, with everything come home.
        states: how many different ones were met, as :mod:`.state` tells them apart.
        failed_episode, failed_step: where the failure showed.
    """

    seed: int
    steps: int = 0
    actions: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(Kind, 0))
    episodes: int = 0
    states: int = 0
    seconds: float = 0.0
    failed_episode: int | None = None
    failed_step: int | None = None
    failure: Failure | None = None

    @property
    def steps_per_s(self) -> float:
        return self.steps / self.seconds if self.seconds else 0.0


def walk(
    steps: int,
    seed: int,
    progress: Callable[[Walk], object] = lambda walked: None,
    *,
    in_the_midst: bool = True,
    injectors: int = 0,
    stops: bool = False,
) -> Walk:
    """Walks until so many steps are done or something does not hold.

    Args:
        steps: actions to apply.
        seed: what everything is drawn from.
        progress: called after each episode with what was walked so far.
        in_the_midst: whether something may happen in the midst of calls. Without that, what is found has fewer actions.
        injectors: of each engine's own process, at a time. Without them, likewise.
        stops: whether processes stop, fall silent and go on, and callers await one reply before all others. Likewise.
    """
    try:
        return in_child(lambda: _walked(steps, seed, progress, in_the_midst, injectors, stops), Walk)
    except Crash as crash:
        walked = Walk(seed, failure=shorten(Failure.of(crash)))
        walked.steps = walked.failed_step = len(crash.trace)
        return walked


def _walked(steps: int, seed: int, progress: Callable[[Walk], object], in_the_midst: bool, injectors: int, stops: bool) -> Walk:
    walked = Walk(seed)
    states: set[int] = set()
    started = time.perf_counter()
    while walked.steps < steps and walked.failure is None:
        _episode(walked, steps - walked.steps, states, in_the_midst, injectors, stops)
        walked.states, walked.seconds = len(states), time.perf_counter() - started
        progress(walked)
    return walked


def _episode(walked: Walk, max_steps: int, states: set[int], in_the_midst: bool, injectors: int, stops: bool) -> None:
    random = Random(f"{walked.seed}:{walked.episodes}")
    scenario = msgspec.structs.replace(Scenario.draw(random), injectors=injectors, stops=stops)
    if not in_the_midst:
        scenario = msgspec.structs.replace(scenario, looks=False, in_code=frozenset())
    steps = min(random.choice(_EPISODE_STEPS), max_steps)
    trace: list[Action] = []
    settles = False
    simulation = Simulation(scenario)
    try:
        while len(trace) < steps:
            action = choose(random, simulation.enabled())
            trace.append(action)
            simulation.apply(action)
            states.add(hash(encode(simulation)))
        settles = True
        simulation.settle()
        walked.episodes += 1
    except Violation as violation:
        walked.failed_episode, walked.failed_step = walked.episodes, len(trace)
        walked.failure = shorten(Failure(str(violation), scenario, tuple(trace), settles))
    finally:
        simulation.close()
    walked.steps += len(trace)
    for kind, count in Counter(action.kind for action in trace).items():
        walked.actions[kind] += count


def choose(random: Random, actions: Sequence[Action]) -> Action:
    """Draws a kind by its weight, then one of its actions."""
    by_kind: dict[tuple[Kind, ...], list[Action]] = {}
    for action in actions:
        by_kind.setdefault(action.kinds, []).append(action)
    kinds = list(by_kind)
    return random.choice(by_kind[random.choices(kinds, [_weight(*kinds) for kinds in kinds])[0]])


def _weight(kind: Kind, inside: Kind | None = None) -> float:
    """Of a kind, and of what happens inside: that is rare if either is."""
    return WEIGHTS[kind] if inside is None else _INSIDE * WEIGHTS[kind] * WEIGHTS[inside]
