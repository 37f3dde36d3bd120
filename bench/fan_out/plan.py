"""What ``bench fan-out`` measures of its ways: cases, the cells of each, and the targets."""

from __future__ import annotations

from collections.abc import Mapping

from bench.fan_out.measuring import Cell
from bench.fan_out.ways import ARENA, BACKS, CALLERS, IN_PLACE, MESSAGE_QUEUE, OURS, POLLING, PUBLISHED, WAYS
from bench.repetitions import Measured
from bench.results import format_nbytes
from bench.targets import Numbers, Target, medians, ratios

TITLES = {name: way.title for name, way in WAYS.items()}

STEP, SMALL, MIDDLE, LARGE = SIZES = (256, 4 << 10, 1 << 20, 64 << 20)
WORKERS = (1, 2, 4, 8)
CENTRAL = 4  # workers, of which most targets speak


#: Workers, and bytes of a message.
Case = tuple[int, int]


def title(case: Case) -> str:
    """Returns a case in words."""
    workers, nbytes = case
    return f"{format_nbytes(nbytes)} to {workers} worker{'s' * (workers > 1)}"


def measurable(subject: str, nbytes: int) -> bool:
    """Whether a subject is measured with tensors of this size: the arena takes what no chunk of the queue holds."""
    if nbytes == STEP:
        return WAYS[subject].gathers
    return not WAYS[subject].only_steps and (subject != ARENA or nbytes >= LARGE)


def planned(subject: str, workers: int, nbytes: int, seconds: float) -> Cell:
    """Returns what is measured of a subject in a case."""
    is_central = workers == CENTRAL and nbytes == SMALL
    return Cell(
        subject,
        workers,
        nbytes,
        seconds,
        steps=max(20, min(300, round(seconds * 600))) if nbytes < LARGE else 20,
        gathers=nbytes <= SMALL and WAYS[subject].gathers,
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
