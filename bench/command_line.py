"""What the benchmarks' commands have in common: options, how a run is shown, an orderly end."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click
import msgspec
from rich.console import Console

from bench.children import BenchError, on_uvloop
from bench.columns import READING
from bench.machine import ROOT, Machine
from bench.plan import Plan, Runs
from bench.results import Findings, Table, write_json

FILE = click.Path(dir_okay=False, path_type=Path)
DIRECTORY = click.Path(file_okay=False, path_type=Path)

#: Of every command.
SETTINGS: dict[str, Any] = {"show_default": True, "help_option_names": ["-h", "--help"]}

_WHERE_RESULTS_GO = "--json"
_PIPE_WIDTH = 300  # what the widest table needs for none of its numbers to be cut

_Result = TypeVar("_Result")


# -- options -------------------------------------------------------------------------------------------------------------


def environment_of(program: str, title: str) -> Path:
    """Returns where a server that is not ours is installed, by the name of its program; raises BenchError if it is not."""
    environment = ROOT / f".venv-{program}"
    if not (environment / "bin" / program).exists():
        raise BenchError(f"{environment} has no {title}; `make test-{program}` makes an environment that has")
    return environment


def versions(environment: Path, *packages: str) -> str:
    """Returns the versions of packages in another environment, as a note says them."""
    program = f"import importlib.metadata as m; print(', '.join(n + ' ' + m.version(n) for n in {packages}))"
    return subprocess.check_output([environment / "bin" / "python", "-c", program], text=True).strip()


class Command(click.Command):
    """A command, and what it measures."""

    plan: Plan


def benchmark(plan: Plan) -> Callable[[Callable[..., None]], Command]:
    """Makes a command of a function that measures a plan: what there is then is stored, printed and judged.

    The function gets a run of the plan, and its own options. The command's name is the plan's mode. SIGTERM ends it in order,
    with all that it has started.
    """
    timing = plan.timing
    names = list(dict.fromkeys(itertools.chain.from_iterable(plan.cases.values())))
    options: list[click.Parameter] = [
        click.Option(["--json", "json_path"], type=FILE, help="Also write to this file."),
        click.Option(["--case", "cases"], multiple=True, help="Only cases whose titles begin so; repeatable."),
        click.Option(["--peer", "peers"], multiple=True, type=click.Choice(names), help="These and the first; repeatable."),
        click.Option(["--repetitions"], type=click.IntRange(min=1), default=timing.repetitions, help="Interleaved."),
    ]
    if timing.timed_s:
        kind = click.FloatRange(min=0.01)
        options.append(click.Option(["--seconds"], type=kind, default=timing.timed_s, help="Timed in each repetition."))

    def decorate(measure: Callable[..., None]) -> Command:
        @functools.wraps(measure)
        def run(
            json_path: Path | None,
            cases: Sequence[str],
            peers: Sequence[str],
            repetitions: int,
            seconds: float = 0.0,
            **own: Any,
        ) -> None:
            asked = timing._replace(repetitions=repetitions, timed_s=seconds)
            chosen = dataclasses.replace(plan.chosen(cases, peers), timing=asked)
            if not chosen.cases:
                raise click.UsageError(f"no case begins so; there are: {'; '.join(map(plan.title, plan.cases))}")
            # Of before the run: what it writes over may be a file of the checkout, which would differ from its commit then.
            told: dict[str, Any] = {"machine": Machine.here(), "command": typed()}

            def keep(findings: Findings) -> Findings:
                findings = msgspec.structs.replace(findings, **told)
                if json_path is not None:
                    write_json(findings, json_path)
                return findings

            signal.signal(signal.SIGTERM, terminated)
            runs = Runs(chosen, keep)
            measure(runs, **own)
            findings = keep(runs.findings())
            show(findings)
            conclude(findings)

        command = click.command(plan.mode, cls=Command, params=options)(run)
        command.plan = plan
        return command

    return decorate


# -- what is shown -------------------------------------------------------------------------------------------------------


def console() -> Console:
    """Returns stdout as what tables are printed to: whole in a file or a pipe, whatever the terminal is."""
    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)


def show(findings: Findings) -> None:
    """Prints a run: its tables, what is to be known of them, its targets, what is missing, and where it was measured."""
    stdout = console()
    for table in findings.tables:
        stdout.print(table.rich())
    stdout.print(READING, highlight=False)
    for note in findings.notes:
        stdout.print(note, highlight=False)
    if findings.targets:
        columns = ["target", "at", "asked", "measured", "", "detail"]
        rows = [(each.what, each.at, each.asked, each.measured, each.word, each.detail) for each in findings.targets]
        stdout.print(Table("targets", columns, rows, texts=tuple(columns)).rich())
    if findings.coverage is not None:
        if not findings.coverage.complete:
            stdout.print(findings.coverage.table().rich())
        stdout.print(f"{findings.coverage.summary()}.", highlight=False)
    if (machine := findings.machine) is not None:
        where = f"{machine.cpu}, {machine.cores} cores, {machine.memory_nbytes / 2**30:.0f} GiB; {machine.software}"
        stdout.print(f"{where}; shmring {machine.shmring}, commit {machine.commit}", highlight=False)


def conclude(findings: Findings) -> None:
    """Ends a command that was to measure and to judge: as it should, if nothing failed and no target was missed.

    A target that is missed as far as a decision says, and no further, does not count: who runs it can do nothing about that.
    """
    if failures := findings.failures:
        raise BenchError(f"{failures} measurements failed: see the table")
    if missed := sum(verdict.fails for verdict in findings.targets):
        raise click.ClickException(f"{missed} target{'s' * (missed > 1)} missed: see the table")


def until_terminated(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Runs a coroutine on a loop of its own. SIGTERM cancels it, as SIGINT does by itself, and then ends this process in order.

    :func:`terminated` raises. If that is inside the HTTP client, the client takes it for a failed request.
    """

    async def run() -> _Result:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await coroutine

    try:
        return on_uvloop(run())
    except asyncio.CancelledError:
        terminated(signal.SIGTERM, None)
    finally:
        signal.signal(signal.SIGTERM, terminated)


def terminated(number: int, frame: object) -> NoReturn:
    """An orderly exit: everything that was started is ended on the way out. A handler of signals."""
    sys.exit(128 + number)


def typed() -> str:
    """Returns the running command as it was typed, but for where its results go: how to measure again."""
    name = click.get_current_context().info_name
    words = iter(sys.argv[sys.argv.index(name) + 1 :] if name in sys.argv else ())
    kept = []
    for word in words:
        if word == _WHERE_RESULTS_GO:
            next(words, None)
        elif word.partition("=")[0] != _WHERE_RESULTS_GO:
            kept.append(word)
    return shlex.join(["python", "-m", "bench", str(name), *kept])
