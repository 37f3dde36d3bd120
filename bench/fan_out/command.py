"""``python -m bench fan-out``: the command, and what is made of a run."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from bench import columns, command_line
from bench.children import BenchError
from bench.columns import Column, compare
from bench.command_line import DIRECTORY
from bench.fan_out.host import Outcome
from bench.fan_out.measuring import Cell, Run
from bench.fan_out.plan import SIZES, TARGETS, TITLES, WORKERS, Case, measurable, planned, title
from bench.fan_out.ways import WAYS
from bench.machine import ROOT
from bench.modes import Timing
from bench.programs import Program
from bench.repetitions import Measured, Repetitions, median
from bench.results import Coverage, Findings, format_rate

_CELL_LIMIT_S = 150.0  # which ends it all: an engine gives its workers a minute


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
    """Returns what a run has found; ``left_out`` are sentences about what was not there to be measured."""
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


# -- the command -----------------------------------------------------------------------------------------------------------


class Host(Program):
    """A host of cells, in the environment of a Python."""

    def __init__(self, python: str) -> None:
        environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
        super().__init__([python, "-m", "bench.fan_out.host"], environment, _CELL_LIMIT_S)

    def play(self, cell: Cell) -> Run:
        """Measures a cell; raises BenchError if that failed."""
        outcome = self.order(cell, Outcome)
        if outcome.run is None:
            raise BenchError(outcome.error)
        return outcome.run


def _missing(environment: Path) -> dict[str, str]:
    """What can't be measured here, and why."""
    missing = {}
    for name, way in WAYS.items():
        if way.needs == "vllm":
            if (lacking := command_line.missing_program(environment, "vllm", "vLLM")) is not None:
                missing[name] = lacking
        elif way.needs and importlib.util.find_spec(way.needs) is None:
            missing[name] = f"{way.needs} is not installed"
    return missing


@command_line.benchmark("fan-out")
@command_line.repeatable("--workers", "workers", click.IntRange(1, 32), "Processes", "1, 2, 4, 8")
@command_line.size_option("256, 4KiB, 1MiB, 64MiB")
@command_line.repeatable("--subject", "subjects", WAYS, "What sends", "all that are there")
@click.option("--environment", default=ROOT / ".venv-vllm", type=DIRECTORY, help="Which has vLLM; see `make test-vllm`.")
def fan_out_command(
    timing: Timing, workers: tuple[int, ...], sizes: tuple[int, ...], subjects: tuple[str, ...], environment: Path
) -> Findings:
    """Messages to workers: how many a second, when the last worker has one, and what they cost.

    Ends with 1 if a target is missed, with 3 if something could not be measured.
    """
    missing = _missing(environment)
    if chosen := [subject for subject in subjects if subject in missing]:
        raise click.UsageError("; ".join(missing[subject] for subject in chosen))
    there = [subject for subject in WAYS if subject not in missing and (not subjects or subject in subjects)]
    cases = [(number, nbytes) for nbytes in sizes or SIZES for number in workers or WORKERS]
    of_cases = {case: [subject for subject in there if measurable(subject, case[1])] for case in cases}
    runs = Repetitions[Case, Run](of_cases, timing.repetitions, title)
    with (
        command_line.measuring(runs.steps) as progress,
        Host(sys.executable) as own,
        Host(str(environment / "bin" / "python")) as of_vllm,
    ):

        def play(case: Case, subject: str) -> Run:
            host = of_vllm if WAYS[subject].needs == "vllm" else own
            return host.play(planned(subject, *case, timing.timed_s))

        runs.measure(cases, play, progress, TITLES)
    return report(runs.measured, runs.coverage(), [] if subjects else list(dict.fromkeys(missing.values())))
