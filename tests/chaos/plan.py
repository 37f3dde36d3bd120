"""What a run does, drawn from its seed before anything starts: which fault happens when, to whom, and for how long.

The run is a row of phases. In each, every frontend sends requests while the faults of the phase happen; at its end all
goes quiet, and the books must balance. Two runs of one seed have the same phases, faults and requests; how the processes
interleave is the machine's.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Mapping
from typing import Literal

import msgspec

#: What a test of the harness breaks on purpose, to see that it is found.
Sabotage = Literal["", "corrupt", "leak", "lose"]


class Fault(enum.Enum):
    """What can happen to a process."""

    KILL_FRONTEND = "a frontend is killed"
    KILL_ENGINE = "an engine is killed, and starts again"
    STOP_FRONTEND = "a frontend is stopped for a while"
    STOP_ENGINE = "an engine is stopped for a while"
    HANG_UP = "a frontend hangs up, writes on, and is killed"
    LEAVE = "a frontend leaves in the middle of its requests"
    ABORT_STORM = "a frontend aborts all it has in flight, often"
    FULL_SLAB = "all ask for more memory than there is"
    KILL_WORKER = "a worker is killed"
    STOP_WORKER = "a worker is stopped for a while"


#: How often each happens, beside the others.
_WEIGHTS: Mapping[Fault, int] = {
    Fault.KILL_FRONTEND: 30,
    Fault.KILL_ENGINE: 10,
    Fault.STOP_FRONTEND: 12,
    Fault.STOP_ENGINE: 6,
    Fault.HANG_UP: 12,
    Fault.LEAVE: 6,
    Fault.ABORT_STORM: 12,
    Fault.FULL_SLAB: 12,
    Fault.KILL_WORKER: 12,
    Fault.STOP_WORKER: 8,
}

#: Seconds that each lasts: the shortest and the longest. For a killed engine: until the next is started.
_DURATIONS: Mapping[Fault, tuple[float, float]] = {
    Fault.KILL_FRONTEND: (0.0, 0.3),
    Fault.KILL_ENGINE: (0.0, 0.3),
    Fault.STOP_FRONTEND: (0.05, 2.0),
    Fault.STOP_ENGINE: (0.05, 1.0),
    Fault.HANG_UP: (0.1, 1.5),
    Fault.LEAVE: (0.0, 0.3),
    Fault.ABORT_STORM: (0.2, 1.0),
    Fault.FULL_SLAB: (0.5, 2.0),
    Fault.KILL_WORKER: (0.0, 0.3),
    Fault.STOP_WORKER: (0.05, 1.0),
}


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to do.

    Attributes:
        minutes: how long, the quiet ends of the phases included.
        seed: of everything that is drawn.
        engines: that requests are divided between.
        frontends: processes that send.
        workers: requests that each of them has under way.
        readers: worker processes of the engine, to which it shares some claims.
        pause_s: mean pause of a worker between two requests. It keeps the machine below saturation, where latencies would
            measure the queue for a core.
        phase_s: length of a phase; a short run has shorter ones, so that there are always some.
        fault_interval_s: mean time between two faults.
        slab_nbytes, reply_nbytes: of each engine. Small, so that it fills up, and large enough that it is not always full.
        lease_nbytes: of a frontend, so that further leases come and go all the time.
        quiet_limit_s: until everything that was asked must have ended, once nothing happens any more.
        sabotage: what to break on purpose.
    """

    minutes: float
    seed: int
    engines: int = 2
    frontends: int = 3
    workers: int = 6
    readers: int = 2
    pause_s: float = 0.08
    phase_s: float = 15.0
    fault_interval_s: float = 0.9
    slab_nbytes: int = 24 << 20
    reply_nbytes: int = 4 << 20
    lease_nbytes: int = 2 << 20
    quiet_limit_s: float = 30.0
    sabotage: Sabotage = ""


class Event(msgspec.Struct, frozen=True):
    """A fault that will happen.

    Attributes:
        at_s: seconds after the start of its phase.
        fault: what.
        frontend, engine: to which, where it happens to one.
        duration_s: for how long.
    """

    at_s: float
    fault: Fault
    frontend: int
    duration_s: float
    engine: int = 0


class Phase(msgspec.Struct, frozen=True):
    """A part of the run: ``seconds`` of load with these faults, in order."""

    seconds: float
    events: tuple[Event, ...]


def phases(plan: Plan) -> list[Phase]:
    """Returns the phases of a run; the same for the same plan."""
    total_s = plan.minutes * 60
    count = max(1, round(total_s / min(plan.phase_s, max(3.0, total_s / 4))))
    return [Phase(total_s / count, tuple(_events(plan, number, total_s / count))) for number in range(count)]


def _events(plan: Plan, number: int, seconds: float) -> list[Event]:
    chance = random.Random(f"{plan.seed}/phase/{number}")
    events: list[Event] = []
    at_s = chance.expovariate(1 / plan.fault_interval_s)
    while at_s < seconds:
        fault = chance.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
        frontend, engine = chance.randrange(plan.frontends), chance.randrange(plan.engines)
        events.append(Event(at_s, fault, frontend, chance.uniform(*_DURATIONS[fault]), engine))
        at_s += chance.expovariate(1 / plan.fault_interval_s)
    return events
