"""What the benchmarks' commands have in common: options, how a run is shown, an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Coroutine, Generator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click
import msgspec
from rich.console import Console

from bench.children import BenchError, on_uvloop
from bench.columns import READING
from bench.machine import ROOT, Machine
from bench.repetitions import Timing
from bench.results import Coverage, Findings, Table, format_nbytes, write_json
from shmring.door import parse_nbytes

FILE = click.Path(dir_okay=False, path_type=Path)
DIRECTORY = click.Path(file_okay=False, path_type=Path)

#: Of every command.
SETTINGS: dict[str, Any] = {"show_default": True, "help_option_names": ["-h", "--help"]}

_WHERE_RESULTS_GO = "--json"
_PIPE_WIDTH = 300  # what the widest table needs for none of its numbers to be cut

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Result = TypeVar("_Result")
#: Returns what it has found, or yields what there is so far, again and again; then the last one counts.
_Measure = Callable[..., Findings | Generator[Findings, None, None]]


class NotMeasured(click.ClickException):
    """Something could not be measured. A target that was measured and missed ends a command with 1, and this with 3."""

    exit_code = 3


class MissingPlotter(NotMeasured):
    """matplotlib is not installed."""


def check_plotter() -> None:
    """Raises :class:`MissingPlotter` where no plot can be drawn."""
    try:
        import matplotlib  # noqa: F401 # only asked for
    except ImportError:
        raise MissingPlotter("a plot needs matplotlib: pip install -e '.[bench]' in a checkout of shmring") from None


# -- options -------------------------------------------------------------------------------------------------------------


def repeatable(option: str, name: str, kind: Any, text: str, default: str = "all") -> Callable[[_Function], _Function]:
    """An option that may be given several times: of a type that click knows, or one of these names."""
    kind = click.Choice(list(kind)) if isinstance(kind, Collection) else kind
    return click.option(option, name, multiple=True, type=kind, help=f"{text}; repeatable.  [default: {default}]")


def size_option(default: str, item_nbytes: int = 1) -> Callable[[_Function], _Function]:
    """Sizes of a tensor, such as 64KiB, each of which is a positive multiple of some item's."""

    def size(value: str) -> int:
        try:
            nbytes = parse_nbytes(value)
        except (ValueError, TypeError) as error:
            raise click.BadParameter(str(error)) from None
        if nbytes < item_nbytes or nbytes % item_nbytes:
            raise click.BadParameter(f"{value} is not a positive multiple of {item_nbytes} bytes")
        return nbytes

    return repeatable("--size", "sizes", size, "Of a tensor", default)


def environment_option(program: str, title: str) -> Callable[[_Function], _Function]:
    """Where a server that is not ours is installed, by the name of its program."""

    def there(context: click.Context, option: click.Parameter, environment: Path) -> Path:
        if (missing := missing_program(environment, program, title)) is not None:
            raise click.UsageError(missing)
        return environment

    text = f"Which has {title}; see `make test-{program}`."
    default = ROOT / f".venv-{program}"
    return click.option("--environment", default=default, type=DIRECTORY, callback=there, help=text)


def missing_program(environment: Path, program: str, title: str) -> str | None:
    """Returns that an environment lacks a program, and what to do about it; None if it has it."""
    if (environment / "bin" / program).exists():
        return None
    return f"{environment} has no {title}; `make test-{program}` makes an environment that has"


def versions(environment: Path, *packages: str) -> str:
    """Returns the versions of packages in another environment, as a note says them."""
    program = f"import importlib.metadata as m; print(', '.join(n + ' ' + m.version(n) for n in {packages}))"
    return subprocess.check_output([environment / "bin" / "python", "-c", program], text=True).strip()


def benchmark(mode: str, default: Timing | None = None) -> Callable[[_Measure], click.Command]:
    """Makes a command of a function that measures: what it returns is stored, printed and judged.

    It has the function's options, and those of all commands, from which ``timing`` follows if it has a default. SIGTERM ends it
    in order, with all processes of the run.
    """
    own: list[click.Parameter] = [click.Option(["--json", "json_path"], type=FILE, help="Also write to this file.")]
    if default is not None and default.timed_s:
        text = f"Timed in each repetition.  [default: {default.timed_s:g}]"
        own.append(click.Option(["--seconds"], type=click.FloatRange(min=0.01), help=text))
    if default is not None:
        text = f"Of each case, interleaved.  [default: {default.repetitions}]"
        own.append(click.Option(["--repetitions"], type=click.IntRange(min=1), help=text))

    def decorate(measure: _Measure) -> click.Command:
        @functools.wraps(measure)
        def run(json_path: Path | None, repetitions: int | None = None, seconds: float | None = None, **options: Any) -> None:
            if default is not None:
                options["timing"] = default.asked(repetitions, seconds)
            # Of before the run: what it writes over may be a file of the checkout, which would differ from its commit then.
            told: dict[str, Any] = {"machine": Machine.here(), "command": typed()}
            signal.signal(signal.SIGTERM, terminated)
            try:
                found = measure(**options)
                with contextlib.closing((one for one in (found,)) if isinstance(found, Findings) else found) as parts:
                    for findings in parts:
                        findings = msgspec.structs.replace(findings, **told)
                        if json_path is not None:
                            write_json(findings, json_path)
            except BenchError as error:
                raise NotMeasured(str(error)) from error
            show(findings)
            conclude(findings)

        return click.command(mode, params=[*own])(run)

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
            stdout.print(gaps_table(findings.coverage).rich())
        stdout.print(f"{findings.coverage.summary()}.", highlight=False)
    if findings.machine is not None:
        stdout.print(machine_line(findings.machine), highlight=False)


def gaps_table(coverage: Coverage) -> Table:
    columns = ["case", "without", "what became of it"]
    return Table("missing", columns, list(coverage.lines()), texts=tuple(columns))


def machine_line(machine: Machine) -> str:
    commit = f", commit {machine.commit}" if machine.commit else ""
    return (
        f"{machine.cpu}, {machine.cores} cores, {machine.memory_nbytes / 2**30:.0f} GiB of memory, last-level cache "
        f"{format_nbytes(machine.cache_nbytes)}; Linux {machine.kernel}, {machine.libc}, Python {machine.python}, torch "
        f"{machine.torch}, numpy {machine.numpy}, msgspec {machine.msgspec}, uvloop {machine.uvloop}; shmring "
        f"{machine.shmring}{commit}"
    )


def conclude(findings: Findings) -> None:
    """Ends a command that was to measure and to judge: as it should, if nothing failed and no target was missed.

    A target that is missed as far as a decision says, and no further, does not count: who runs it can do nothing about that.
    """
    if failures := findings.failures:
        raise NotMeasured(f"{failures} measurements failed: see the table")
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
