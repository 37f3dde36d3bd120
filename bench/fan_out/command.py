"""``python -m bench fan-out``: progress goes to stderr, tables go to stdout."""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import click
import msgspec

from bench import command_line
from bench.children import BenchError
from bench.command_line import ROOT, finish
from bench.fan_out.host import Outcome
from bench.fan_out.plan import ARENA, FOREIGN, SIZES, SPINNING_RING, SUBJECTS, TITLES, WORKERS, Run, measurable, planned
from bench.fan_out.report import Case, draw, report, title
from bench.modes import MODES
from bench.results import Repetitions
from shmring.processes.process import Process

__all__ = ["Host", "fan_out_command"]

_MODE = MODES["fan-out"]
_START_LIMIT_S = 180.0
_GRACE_S = 5.0
_CELL_LIMIT_S = 150.0  # which ends it all: an engine gives its workers a minute
_QUICK_WORKERS = (1, 4)


class Host:
    """A host of cells, in an environment of its own. It is started again after a cell that did not end.

    Args:
        kind: what it plays: ``own`` or ``foreign``.
        python: of its environment.
    """

    def __init__(self, kind: str, python: str) -> None:
        self._command = [python, "-m", "bench.fan_out.host", kind]
        self._process: Process | None = None
        self._control: Connection

    def start(self) -> None:
        """Starts it, unless it runs.

        Raises:
            BenchError: it does not start.
        """
        if self._process is None:
            environment = os.environ | {
                "PYTHONPATH": str(ROOT),
                "VLLM_LOGGING_LEVEL": "ERROR",
                "OMP_NUM_THREADS": "1",
            }
            self._control, control = multiprocessing.Pipe()
            command = [*self._command, str(control.fileno())]
            self._process = Process.start(
                command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment,
                pass_fds=[control.fileno()], start_new_session=True,
            )  # fmt: skip
            control.close()
            if not self._control.poll(_START_LIMIT_S) or self._heard() != b"ready":
                self.end()
                raise BenchError(f"{' '.join(self._command)} does not start")

    def play(self, cell: msgspec.Struct) -> Run:
        """Measures a cell.

        Raises:
            BenchError: that failed.
        """
        self.start()
        with contextlib.suppress(OSError):
            self._control.send_bytes(msgspec.json.encode(cell))
        if not self._control.poll(_CELL_LIMIT_S) or not (answer := self._heard()):
            self.end()
            raise BenchError("it did not end in time, or its host has died")
        outcome = msgspec.json.decode(answer, type=Outcome)
        if outcome.run is None:
            raise BenchError(outcome.error)
        return outcome.run

    def _heard(self) -> bytes:
        """What the host says; nothing if it has ended."""
        try:
            return self._control.recv_bytes()
        except (EOFError, OSError):
            return b""

    def end(self) -> None:
        """Ends it, and all that it has forked. Twice is once."""
        if self._process is None:
            return
        process, self._process = self._process, None
        with process:
            self._control.close()  # which ends it, if it waits for a cell
            with contextlib.suppress(TimeoutError):
                process.wait(_GRACE_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def _hosts(environment: Path) -> Iterator[tuple[Host, Host]]:
    """Yields the host of what is installed here, and that of the MessageQueue or what stands for it."""
    python = environment / "bin" / "python"
    hosts = Host("own", sys.executable), Host("foreign", str(python) if python.exists() else sys.executable)
    try:
        yield hosts
    finally:
        for host in hosts:
            host.end()


def _missing(environment: Path) -> dict[str, str]:
    """What can't be measured here, and why."""
    lacking = command_line.missing_vllm(environment)
    missing = {SPINNING_RING: "the MessageQueue is there"} if lacking is None else {}
    for name, subject in SUBJECTS.items():
        if subject.needs == "vllm" and lacking is not None:
            missing[name] = lacking
        elif subject.needs not in ("", "vllm") and importlib.util.find_spec(subject.needs) is None:
            missing[name] = f"{subject.needs} is not installed"
    return missing


@click.command("fan-out", context_settings=command_line.SETTINGS)
@click.option("--quick", is_flag=True, help="1 and 4 workers, one repetition of 0.3 s; under four minutes.")
@click.option("--workers", multiple=True, type=click.IntRange(1, 32), help="Repeatable.  [default: 1, 2, 4, 8; 1, 4 if quick]")
@command_line.size_option(
    "--size", "sizes", item_nbytes=1, item="an item", text="Of a tensor; repeatable.  [default: 256, 4KiB, 1MiB, 64MiB]"
)
@click.option(
    "--subject", "subjects", multiple=True, type=click.Choice(list(SUBJECTS)), help="Repeatable.  [default: all that are there]"
)
@command_line.repetitions_option("Of each case, interleaved.", _MODE)
@command_line.seconds_option(_MODE)
@command_line.environment_option
@command_line.json_option
@command_line.plot_option()
def fan_out_command(
    quick: bool,
    workers: tuple[int, ...],
    sizes: tuple[int, ...],
    subjects: tuple[str, ...],
    repetitions: int | None,
    seconds: float | None,
    environment: Path,
    json_path: Path | None,
    plot_stem: Path | None,
) -> None:
    """Messages to workers: how many a second, when the last worker has one, and what they cost.

    Ends with 1 if a target is missed, with 3 if something could not be measured.
    """
    missing = _missing(environment)
    if chosen := [subject for subject in subjects if subject in missing]:
        raise click.UsageError("; ".join(missing[subject] for subject in chosen))
    there = [subject for subject in SUBJECTS if subject not in missing and (not subjects or subject in subjects)]
    counts = workers or (_QUICK_WORKERS if quick else WORKERS)
    cases = [(number, nbytes) for nbytes in sizes or SIZES for number in counts]
    timing = _MODE.timing(quick, repetitions, seconds)
    of_cases = {case: [subject for subject in there if measurable(subject, case[1])] for case in cases}
    runs = Repetitions[Case, Run](of_cases, timing.repetitions, lambda case: title(*case))
    with command_line.measuring(runs.steps) as progress, _hosts(environment) as hosts:

        def play(case: Case, subject: str) -> Run:
            return hosts[subject in (*FOREIGN, ARENA)].play(planned(subject, *case, timing.timed_s))

        runs.measure(cases, play, progress, TITLES)
    left_out = [missing[subject] for subject in missing if not subjects and subject != SPINNING_RING]
    findings = report(runs.measured, runs.coverage(), left_out)
    finish(findings, json_path, plot_stem, draw)
