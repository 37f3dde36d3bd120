"""``python -m bench fan-out``: what is made of a run, its targets, and the command.

Ratios are taken within each repetition, and their median counts. Where a target spans several cases, the worst of them
decides.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click
import msgspec

from bench import columns, command_line
from bench.children import BenchError
from bench.columns import Column, compare
from bench.command_line import DIRECTORY
from bench.fan_out.host import Outcome
from bench.fan_out.plan import (
    ARENA,
    BACKS,
    CALLERS,
    CENTRAL,
    IN_PLACE,
    LARGE,
    MESSAGE_QUEUE,
    MIDDLE,
    OURS,
    POLLING,
    PUBLISHED,
    SIZES,
    SMALL,
    STEP,
    SUBJECTS,
    TITLES,
    WORKERS,
    Run,
    measurable,
    planned,
)
from bench.machine import ROOT
from bench.modes import Timing
from bench.programs import Program
from bench.repetitions import Measured, Repetitions, median
from bench.results import Coverage, Findings, format_nbytes, format_rate
from bench.targets import Numbers, Target, medians, ratios

_CELL_LIMIT_S = 150.0  # which ends it all: an engine gives its workers a minute
_QUICK_WORKERS = (1, 4)


#: Workers, and bytes of a message.
Case = tuple[int, int]


def title(case: Case) -> str:
    """Returns a case in words."""
    workers, nbytes = case
    return f"{format_nbytes(nbytes)} to {workers} worker{'s' * (workers > 1)}"


_COLUMNS = (
    Column("messages/s", lambda row: format_rate(median(row.runs, "per_s") or 0.0)),
    columns.spread("least, most", "per_s"),
    columns.median("to the last, p50 us", "last_us"),
    columns.median("engine CPU us", "engine_us"),
    columns.median("a worker's CPU us", "worker_us"),
    columns.median("gathers/s", "gathers_per_s"),
    columns.median("a gather, p50 us", "gather_us"),
    columns.median("its engine CPU us", "gather_engine_us"),
    columns.median("asleep, p50 us", "asleep_us"),
    columns.median("asleep, engine CPU us", "asleep_engine_us"),
)


def report(measured: Measured, coverage: Coverage, left_out: Sequence[str] = ()) -> Findings:
    """Returns what a run has found.

    Args:
        measured: the runs.
        coverage: what was planned.
        left_out: what was not there to be measured, in sentences.
    """
    notes = [
        "One message every 2 ms: the time until the last worker has it, and its CPU. Medians of interleaved repetitions.",
        "Gathers follow each other at once. Where workers sleep, there is one every 1.2 s.",
        *(f"Not measured: {sentence}." for sentence in left_out),
        *_rests(measured),
    ]
    return Findings(
        mode="fan-out",
        tables=[compare("a message to each of several workers", ("case", "peer"), measured, _COLUMNS, TITLES, title)],
        notes=notes,
        targets=[target.judge(measured) for target in TARGETS],
        coverage=coverage,
    )


def _rests(measured: Measured) -> Iterator[str]:
    for case, found in measured.items():
        for subject, runs in found.items():
            awake, idle = median(runs, "awake_percent"), median(runs, "idle_percent")
            if awake is not None and idle is not None:
                yield (
                    f"{TITLES[subject]}: {case[0]} workers take {awake:.1f} % of a core in the second after a message, "
                    f"and {idle:.2f} % without messages."
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


# -- the command -----------------------------------------------------------------------------------------------------------


class Host(Program):
    """A host of cells, in the environment of a Python."""

    def __init__(self, python: str) -> None:
        environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
        super().__init__([python, "-m", "bench.fan_out.host"], environment, _CELL_LIMIT_S)

    def play(self, cell: msgspec.Struct) -> Run:
        """Measures a cell.

        Raises:
            BenchError: that failed.
        """
        outcome = self.order(cell, Outcome)
        if outcome.run is None:
            raise BenchError(outcome.error)
        return outcome.run


def _missing(environment: Path) -> dict[str, str]:
    """What can't be measured here, and why."""
    missing = {}
    for name, subject in SUBJECTS.items():
        if subject.needs == "vllm":
            if (lacking := command_line.missing_program(environment, "vllm", "vLLM")) is not None:
                missing[name] = lacking
        elif subject.needs and importlib.util.find_spec(subject.needs) is None:
            missing[name] = f"{subject.needs} is not installed"
    return missing


@command_line.benchmark("fan-out", quick="1 and 4 workers, one repetition of 0.3 s; under four minutes.")
@click.option("--workers", multiple=True, type=click.IntRange(1, 32), help="Repeatable.  [default: 1, 2, 4, 8; 1, 4 if quick]")
@command_line.size_option(
    "--size", "sizes", item_nbytes=1, item="an item", text="Of a tensor; repeatable.  [default: 256, 4KiB, 1MiB, 64MiB]"
)
@click.option(
    "--subject", "subjects", multiple=True, type=click.Choice(list(SUBJECTS)), help="Repeatable.  [default: all that are there]"
)
@click.option("--environment", default=ROOT / ".venv-vllm", type=DIRECTORY, help="Which has vLLM; see `make test-vllm`.")
def fan_out_command(
    timing: Timing,
    quick: bool,
    workers: tuple[int, ...],
    sizes: tuple[int, ...],
    subjects: tuple[str, ...],
    environment: Path,
) -> Findings:
    """Messages to workers: how many a second, when the last worker has one, and what they cost.

    Ends with 1 if a target is missed, with 3 if something could not be measured.
    """
    missing = _missing(environment)
    if chosen := [subject for subject in subjects if subject in missing]:
        raise click.UsageError("; ".join(missing[subject] for subject in chosen))
    there = [subject for subject in SUBJECTS if subject not in missing and (not subjects or subject in subjects)]
    counts = workers or (_QUICK_WORKERS if quick else WORKERS)
    cases = [(number, nbytes) for nbytes in sizes or SIZES for number in counts]
    of_cases = {case: [subject for subject in there if measurable(subject, case[1])] for case in cases}
    runs = Repetitions[Case, Run](of_cases, timing.repetitions, title)
    with (
        command_line.measuring(runs.steps) as progress,
        Host(sys.executable) as own,
        Host(str(environment / "bin" / "python")) as of_vllm,
    ):

        def play(case: Case, subject: str) -> Run:
            host = of_vllm if SUBJECTS[subject].needs == "vllm" else own
            return host.play(planned(subject, *case, timing.timed_s))

        runs.measure(cases, play, progress, TITLES)
    return report(runs.measured, runs.coverage(), [reason for name, reason in missing.items() if not subjects])
