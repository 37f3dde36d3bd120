"""``python -m bench``: the benchmarks. Progress goes to stderr, tables go to stdout."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import faults, report, transport
from bench.messages import ITEM_NBYTES
from bench.peers import PEERS
from bench.processes import BenchError
from bench.simulation.command import simulate_command
from shmring.config import parse_nbytes

_PIPE_WIDTH = 120  # of a table that goes into a file or a pipe


@click.group(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
def main() -> None:
    """Measures shmring beside what would be taken instead, in one run."""


class _Size(click.ParamType[int]):
    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            nbytes = parse_nbytes(value)  # type: ignore[arg-type] # it says itself what it can't take
        except (ValueError, TypeError) as error:
            self.fail(str(error), param, ctx)
        if nbytes < ITEM_NBYTES or nbytes % ITEM_NBYTES:
            self.fail(f"{value} is not a positive multiple of {ITEM_NBYTES} bytes, the size of a float32", param, ctx)
        return nbytes


main.add_command(simulate_command)

_SIZES = ("64KiB", "1MiB", "16MiB")
_FILE = click.Path(dir_okay=False, path_type=Path)


@main.command("transport")
@click.option("--quick", is_flag=True, help="5 repetitions of 0.2 s each, in under 90 s, instead of 7 of 1 s.")
@click.option(
    "--size", "sizes", multiple=True, type=_Size(), default=("64KiB", "1MiB", "16MiB"), help="Of a tensor; repeatable."
)
@click.option(
    "--peer", "peers", multiple=True, type=click.Choice(list(PEERS)), help="Beside shmring; repeatable.  [default: all]"
)
@click.option("--window", default=16, type=click.IntRange(1, 1024), help="Messages in flight.")
@click.option("--repetitions", default=None, type=click.IntRange(min=1), help="Of each peer and size, interleaved.")
@click.option("--seconds", default=None, type=click.FloatRange(min=0.01), help="Timed in each repetition.")
@click.option(
    "--json", "json_path", default=None, type=click.Path(dir_okay=False, path_type=Path), help="Also write to this file."
)
def transport_command(
    quick: bool,
    sizes: tuple[int, ...],
    peers: tuple[str, ...],
    window: int,
    repetitions: int | None,
    seconds: float | None,
    json_path: Path | None,
) -> None:
    """One-way messages between two processes, every one checked."""
    signal.signal(signal.SIGTERM, _terminated)
    plan = transport.Plan(
        peers=[name for name in PEERS if not peers or name in peers or name == transport.BASELINE],
        sizes=sizes,
        repetitions=repetitions or (5 if quick else 7),
        timed_s=seconds or (0.2 if quick else 1.0),
        warm_up_s=0.1 if quick else 0.25,
        window=window,
    )
    try:
        with _progress(transport.steps(plan)) as progress:
            results = transport.run(plan, progress)
    except BenchError as error:
        raise click.ClickException(str(error)) from error
    Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH).print(report.transport_table(results))
    if json_path is not None:
        report.write_json(results, json_path)


@main.command("faults")
@click.option("--minutes", default=1.0, type=click.FloatRange(min=0.05), help="How long.")
@click.option("--seed", default=1, type=int, help="Of all that is drawn: faults, requests, contents.")
@click.option("--frontends", default=3, type=click.IntRange(1, 64), help="Processes that send.")
@click.option("--json", "json_path", default=None, type=_FILE, help="Also write to this file.")
@click.option("--plot", "plot_stem", default=None, type=_FILE, help="Also draw FILE.png and FILE.svg.")
@click.option("--sabotage", default="", type=click.Choice(["", "corrupt", "leak", "lose"]), hidden=True)
def faults_command(
    minutes: float, seed: int, frontends: int, json_path: Path | None, plot_stem: Path | None, sabotage: faults.Sabotage
) -> None:
    """Processes killed, stopped and hung up under load; fails if anything is lost, corrupted or leaked."""
    signal.signal(signal.SIGTERM, _terminated)
    quiet_limit_s = 2.0 if sabotage else 30.0  # what is lost on purpose is not waited for
    plan = faults.Plan(minutes=minutes, seed=seed, frontends=frontends, quiet_limit_s=quiet_limit_s, sabotage=sabotage)
    try:
        if plot_stem is not None:
            faults.check_plotter()
        findings = faults.run(plan, lambda line: click.echo(line, err=True))
    except (faults.ChildError, faults.MissingPlotter) as error:
        raise click.ClickException(str(error)) from error
    Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH).print(faults.table(findings))
    if json_path is not None:
        faults.write_json(findings, json_path)
    if plot_stem is not None:
        faults.write_plot(findings, plot_stem)
    for wrong in findings.wrongs:
        click.echo(wrong, err=True)
    if not findings.passed:
        raise click.ClickException("something was lost, corrupted, leaked or broken: see the table")


@contextlib.contextmanager
def _progress(steps: int) -> Iterator[Callable[[str], None]]:
    """Yields what shows a line for each step on stderr: a bar to a person, plain lines to a log."""
    if not sys.stderr.isatty():
        yield lambda line: click.echo(line, err=True)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=steps, completed=-1)  # a line is about what comes, not what is done
        yield lambda line: progress.update(task, description=line, advance=1)


def _terminated(number: int, frame: object) -> NoReturn:
    """An orderly exit: everything that was started is ended on the way out."""
    sys.exit(128 + number)


if __name__ == "__main__":
    main(prog_name="python -m bench")
