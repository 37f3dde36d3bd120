"""What ``bench fan-out`` measures: subjects, cases and cells, what is found in each, and the targets of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from bench.repetitions import Measured
from bench.results import format_nbytes
from bench.targets import Numbers, Target, medians, ratios

OURS, POLLING, IN_PLACE = "shmring", "shmring-polling", "shmring-in-place"
CALLERS, BACKS = "shmring-callers", "shmring-rings-back"
MESSAGE_QUEUE, ARENA = "message-queue", "message-queue-arena"
QUEUES, PUBLISHED, ICEORYX2 = "torch-queues", "pyzmq-pub-sub", "iceoryx2"


class Subject(NamedTuple):
    """What is measured.

    Attributes:
        title: in words.
        gathers: whether it brings replies back.
        only_steps: it has no event loop, as engines with a loop of their own have them; measured with steps that carry nothing.
        needs: a module that must be there.
    """

    title: str
    gathers: bool = False
    only_steps: bool = False
    needs: str = ""


#: In the order of tables.
SUBJECTS = {
    OURS: Subject("shmring", gathers=True),
    POLLING: Subject("shmring, busy_poll_s", gathers=True),
    IN_PLACE: Subject("shmring, in a slot already"),
    CALLERS: Subject("shmring, served by callers", gathers=True, only_steps=True),
    BACKS: Subject("shmring, a ring back from each", gathers=True, only_steps=True),
    MESSAGE_QUEUE: Subject("vLLM MessageQueue", gathers=True, needs="vllm"),
    ARENA: Subject("vLLM MessageQueue, its arena", needs="vllm"),
    QUEUES: Subject("torch.multiprocessing queues"),
    PUBLISHED: Subject("pyzmq PUB/SUB", needs="zmq"),
    ICEORYX2: Subject("iceoryx2", needs="iceoryx2"),
}
TITLES = {name: subject.title for name, subject in SUBJECTS.items()}

STEP, SMALL, MIDDLE, LARGE = SIZES = (256, 4 << 10, 1 << 20, 64 << 20)
WORKERS = (1, 2, 4, 8)
CENTRAL = 4  # workers, of which most targets speak


#: Workers, and bytes of a message.
Case = tuple[int, int]


def title(case: Case) -> str:
    """Returns a case in words."""
    workers, nbytes = case
    return f"{format_nbytes(nbytes)} to {workers} worker{'s' * (workers > 1)}"


class Cell(msgspec.Struct, frozen=True):
    """One repetition of a case, of one subject.

    Attributes:
        subject: one of :data:`SUBJECTS`.
        workers: how many.
        nbytes: of the tensor in each message.
        seconds: of the flood, and of the gathers.
        steps: messages of the pace.
        gathers: whether replies are measured, too.
        sleeps: whether replies are measured after pauses, too.
        rests: whether it is measured what workers take when nothing comes.
        stops: whether one worker is stopped for a while.
    """

    subject: str
    workers: int
    nbytes: int
    seconds: float
    steps: int
    gathers: bool = False
    sleeps: bool = False
    rests: bool = False
    stops: bool = False


class Run(msgspec.Struct, frozen=True):
    """What was measured in a cell; None: that was not asked for.

    Attributes:
        per_s: messages a second of a flood, until the last worker has the last one.
        last_us: the median time from sending to the last worker, a message each 2 ms.
        engine_us, worker_us: CPU time of the engine, and of one worker, for each of those; the engine's pauses left out.
        gathers_per_s: how often in a second all replied, one gather after the other.
        gather_us: the median time of one.
        gather_engine_us: CPU time of the engine for one.
        asleep_us, asleep_engine_us: the same two of a gather after a pause in which whoever looks for messages has given up.
        awake_percent, idle_percent: CPU of all workers in the second after a message, and in the one after that, of one core.
        stopped_ratio: the median time to the last of the others while one worker is stopped, of that before.
    """

    per_s: float
    last_us: float
    engine_us: float
    worker_us: float
    gathers_per_s: float | None = None
    gather_us: float | None = None
    gather_engine_us: float | None = None
    asleep_us: float | None = None
    asleep_engine_us: float | None = None
    awake_percent: float | None = None
    idle_percent: float | None = None
    stopped_ratio: float | None = None


def measurable(subject: str, nbytes: int) -> bool:
    """Whether a subject is measured with tensors of this size: the arena takes what no chunk of the queue holds."""
    if nbytes == STEP:
        return SUBJECTS[subject].gathers
    return not SUBJECTS[subject].only_steps and (subject != ARENA or nbytes >= LARGE)


def planned(subject: str, workers: int, nbytes: int, seconds: float) -> Cell:
    """Returns what is measured of a subject in a case."""
    is_central = workers == CENTRAL and nbytes == SMALL
    return Cell(
        subject,
        workers,
        nbytes,
        seconds,
        steps=max(20, min(300, round(seconds * 600))) if nbytes < LARGE else 20,
        gathers=nbytes <= SMALL and SUBJECTS[subject].gathers,
        sleeps=nbytes == STEP,
        rests=is_central and subject in (OURS, MESSAGE_QUEUE),
        stops=is_central and subject == OURS,
    )


# -- targets -------------------------------------------------------------------------------------------------------------

_QUEUE = TITLES[MESSAGE_QUEUE]
_CASE = (CENTRAL, SMALL)  # of most targets about times


def _to(nbytes: int, *workers: int) -> dict[str, Case]:
    """Cases by their numbers of workers; all of them, if none are said."""
    return {str(count): (count, nbytes) for count in workers or WORKERS}


def _speed(at: str, limit: float, cases: Mapping[str, Case], theirs: str = MESSAGE_QUEUE) -> Target:
    return Target(f"messages/s of {TITLES[theirs]}", at, limit, "x", ratios(OURS, theirs, "per_s", cases))


def _sooner(what: str, limit: float, ours: str, theirs: str, number: str) -> Target:
    numbers = ratios(ours, theirs, number, {TITLES[ours]: _CASE})
    return Target(f"{what} of {TITLES[theirs]}", title(_CASE), limit, "x", numbers, at_least=False)


def _alone(what: str, limit: float, unit: str, number: str) -> Target:
    return Target(what, title(_CASE), limit, unit, medians(OURS, number, {TITLES[OURS]: _CASE}), at_least=False)


def _steady(measured: Measured) -> Numbers:
    """In place: the speed of small messages over that of large ones, or the other way round, whichever is more."""
    for name, times in ratios(IN_PLACE, IN_PLACE, "per_s", _to(SMALL), _to(LARGE))(measured):
        yield name, times and max(times, 1 / times)


_EVERY = {f"{format_nbytes(nbytes)} to {count}": (count, nbytes) for nbytes in (SMALL, MIDDLE, LARGE) for count in WORKERS}
_OF_A_STEP = {
    "a gather's p50": "gather_us",
    "a gather's engine CPU": "gather_engine_us",
    "a gather's p50, asleep,": "asleep_us",
    "a gather's engine CPU, asleep,": "asleep_engine_us",
}

#: In the order of the table.
TARGETS = (
    _speed("4 KB", 2, _to(SMALL)),
    _speed("1 MB", 1.5, _to(MIDDLE)),
    _speed("64 MB, 1 worker", 0.9, _to(LARGE, 1)),
    _speed("64 MB, 4 workers", 2, _to(LARGE, 4)),
    _speed("64 MB, 1 worker", 0.9, _to(LARGE, 1), ARENA),
    _speed("64 MB, 4 workers", 2, _to(LARGE, 4), ARENA),
    Target(
        f"messages/s in place, 4 KB to 64 MB, of {_QUEUE} at 1 MB", "any workers", 10, "x",
        ratios(IN_PLACE, MESSAGE_QUEUE, "per_s", _EVERY, {name: (count, MIDDLE) for name, (count, _) in _EVERY.items()}),
    ),
    Target("messages/s in place, 4 KB and 64 MB, of the other", "any workers", 1.5, "x", _steady, at_least=False),
    _sooner("p50 to the last worker, asleep,", 0.8, OURS, MESSAGE_QUEUE, "last_us"),
    _sooner("p50 to the last worker, polling,", 0.7, POLLING, MESSAGE_QUEUE, "last_us"),
    _sooner("p50 to the last worker, asleep,", 0.65, OURS, PUBLISHED, "last_us"),
    Target(
        f"gathers/s with busy_poll_s, of {_QUEUE}", "4 KB, 1, 2, 4 workers", 3, "x",
        ratios(POLLING, MESSAGE_QUEUE, "gathers_per_s", _to(SMALL, 1, 2, 4)),
    ),
    *(
        Target(
            f"{what} of {TITLES[ours]}, of {_QUEUE}", "a step, 1, 2, 4 workers", 1, "x",
            ratios(ours, MESSAGE_QUEUE, number, _to(STEP, 1, 2, 4)), at_least=False,
        )
        for ours in (CALLERS, BACKS)
        for what, number in _OF_A_STEP.items()
    ),
    _sooner("engine's CPU a message,", 0.4, OURS, MESSAGE_QUEUE, "engine_us"),
    _alone("CPU of the workers in the second after a message", 5, "%", "awake_percent"),
    _alone("CPU of the workers, idle", 1, "%", "idle_percent"),
    _alone("p50 of the others while one worker is stopped, of before", 1.1, "x", "stopped_ratio"),
)  # fmt: skip
