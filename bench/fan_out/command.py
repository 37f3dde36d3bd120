"""``python -m bench fan-out``: messages to several workers, beside vLLM's MessageQueue.

The command starts a *host* (:mod:`.ways`) for each environment that is needed: its own, and vLLM's for the MessageQueue. A host
imports once, and forks an engine for each *cell*; the engine forks the workers. So all peers are measured by the same code
(:mod:`.measuring`), in processes that have nothing but their own peer open. How each sends and receives is in :mod:`.ways`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from bench import columns
from bench.children import BenchError
from bench.columns import Column
from bench.command_line import benchmark, environment_of
from bench.fan_out.measuring import Cell, Run
from bench.fan_out.ways import ARENA, IN_PLACE, MESSAGE_QUEUE, OURS, POLLING, WAYS
from bench.plan import Plan, Runs, Timing
from bench.programs import Program
from bench.repetitions import Measured, median
from bench.results import Status, format_nbytes, format_rate
from bench.targets import Numbers, Target, medians, ratios

_CELL_LIMIT_S = 150.0  # which ends it all: an engine gives its workers a minute

TITLES = {name: way.title for name, way in WAYS.items()}

SMALL, MIDDLE, LARGE = SIZES = (4 << 10, 1 << 20, 64 << 20)
WORKERS = (1, 2, 4, 8)
CENTRAL = 4  # workers, of which most targets speak


class Case(NamedTuple):
    """Workers, and bytes of a message."""

    workers: int
    nbytes: int

    @property
    def title(self) -> str:
        return f"{format_nbytes(self.nbytes)} to {self.workers} worker{'s' * (self.workers > 1)}"


def planned(subject: str, workers: int, nbytes: int, seconds: float) -> Cell:
    is_central = workers == CENTRAL and nbytes == SMALL
    return Cell(
        subject,
        workers,
        nbytes,
        seconds,
        steps=max(20, min(300, round(seconds * 600))) if nbytes < LARGE else 20,
        gathers=nbytes == SMALL and WAYS[subject].gathers,
        rests=is_central and subject in (OURS, MESSAGE_QUEUE),
    )


# -- targets -------------------------------------------------------------------------------------------------------------

_QUEUE = TITLES[MESSAGE_QUEUE]
_CASE = Case(CENTRAL, SMALL)  # of most targets about times


def _to(nbytes: int, *workers: int) -> dict[str, Case]:
    """Cases by their numbers of workers; all of them, if none are said."""
    return {str(count): Case(count, nbytes) for count in workers or WORKERS}


def _speed(at: str, limit: float, cases: Mapping[str, Case], theirs: str = MESSAGE_QUEUE) -> Target:
    return Target(f"messages/s of {TITLES[theirs]}", at, limit, "x", ratios(OURS, theirs, "per_s", cases))


def _sooner(what: str, limit: float, ours: str, theirs: str, number: str) -> Target:
    numbers = ratios(ours, theirs, number, {TITLES[ours]: _CASE})
    return Target(f"{what} of {TITLES[theirs]}", _CASE.title, limit, "x", numbers, at_least=False)


def _alone(what: str, limit: float, unit: str, number: str) -> Target:
    return Target(what, _CASE.title, limit, unit, medians(OURS, number, {TITLES[OURS]: _CASE}), at_least=False)


def _steady(measured: Measured) -> Numbers:
    """In place: the speed of small messages over that of large ones, or the other way round, whichever is more."""
    for name, times in ratios(IN_PLACE, IN_PLACE, "per_s", _to(SMALL), _to(LARGE))(measured):
        yield name, times and max(times, 1 / times)


_EVERY = {f"{format_nbytes(nbytes)} to {count}": Case(count, nbytes) for nbytes in SIZES for count in WORKERS}

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
        ratios(IN_PLACE, MESSAGE_QUEUE, "per_s", _EVERY, {name: Case(count, MIDDLE) for name, (count, _) in _EVERY.items()}),
    ),
    Target("messages/s in place, 4 KB and 64 MB, of the other", "any workers", 1.5, "x", _steady, at_least=False),
    _sooner("p50 to the last worker, asleep,", 0.8, OURS, MESSAGE_QUEUE, "last_us"),
    _sooner("p50 to the last worker, polling,", 0.7, POLLING, MESSAGE_QUEUE, "last_us"),
    Target(
        f"gathers/s with busy_poll_s, of {_QUEUE}", "4 KB, 1, 2, 4 workers", 3, "x",
        ratios(POLLING, MESSAGE_QUEUE, "gathers_per_s", _to(SMALL, 1, 2, 4)),
    ),
    _sooner("engine's CPU a message,", 0.4, OURS, MESSAGE_QUEUE, "engine_us"),
    _alone("CPU of the workers in the second after a message", 5, "%", "awake_percent"),
    _alone("CPU of the workers, idle", 1, "%", "idle_percent"),
)  # fmt: skip


# -- as people read it -----------------------------------------------------------------------------------------------------

_COLUMNS = (
    Column("messages/s", lambda row: format_rate(median(row.runs, "per_s") or 0.0)),
    columns.spread("least, most", "per_s"),
    columns.median("to the last, p50 us", "last_us"),
    columns.median("engine CPU us", "engine_us"),
    columns.median("a worker's CPU us", "worker_us"),
    columns.median("gathers/s", "gathers_per_s"),
    columns.median("a gather, p50 us", "gather_us"),
    columns.median("its engine CPU us", "gather_engine_us"),
    columns.median("awake %", "awake_percent", 1),
    columns.median("idle %", "idle_percent", 2),
)

PLAN = Plan(
    mode="fan-out",
    cases={  # the arena takes what no chunk of the queue holds
        Case(workers, nbytes): [subject for subject in WAYS if subject != ARENA or nbytes == LARGE]
        for nbytes in SIZES
        for workers in WORKERS
    },
    timing=Timing(6, 0.3),
    titles=TITLES,
    tables=columns.shown_as("a message to each of several workers", ("case", "peer"), _COLUMNS, TITLES),
    targets=TARGETS,
    notes=[
        "One message every 2 ms: the time until the last worker has it, and its CPU.",
        "Gathers follow each other at once.",
        "Awake, idle: CPU of all workers in the second after a message, and without messages, of one core.",
    ],
)


def host(python: str | Path) -> Program:
    """Returns a host of cells, in the environment of a Python."""
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    return Program([str(python), "-m", "bench.fan_out.ways"], environment, _CELL_LIMIT_S)


@benchmark(PLAN)
def fan_out_command(runs: Runs) -> None:
    """Messages to workers: how many a second, when the last worker has one, and what they cost."""
    python = Path(sys.executable)
    try:
        python = environment_of("vllm", "vLLM") / "bin" / "python"
    except BenchError as error:
        runs.fail(runs.cases, [subject for subject, way in WAYS.items() if way.of_vllm], str(error), Status.EXCLUDED)
    with host(sys.executable) as own, host(python) as of_vllm:

        def play(case: Case, subject: str) -> Run:
            its_host = of_vllm if WAYS[subject].of_vllm else own
            return its_host.order(planned(subject, *case, runs.plan.timing.timed_s), Run)

        runs.measure(play)
