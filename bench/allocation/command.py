"""``python -m bench allocator``: options in, tables and JSON out."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.allocation import survey
from bench.allocation.findings import write_json

__all__ = ["allocator_command"]

_PIPE_WIDTH = 150  # of tables that go into a file or a pipe


@click.command("allocator", context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--quick", is_flag=True, help="Fewer traces and shorter copies: half a minute on an idle machine.")
@click.option("--seeds", default=None, type=click.IntRange(min=1), help="Traces of each kind.  [default: 300; quick: 15]")
@click.option(
    "--json", "json_path", default=None, type=click.Path(dir_okay=False, path_type=Path), help="Also write to this file."
)
def allocator_command(quick: bool, seeds: int | None, json_path: Path | None) -> None:
    """How full the slab gets, what placing a slot costs, and what reusing warm memory is worth, by policy."""
    plan = survey.Plan.quick() if quick else survey.Plan()
    if seeds is not None:
        plan = dataclasses.replace(plan, seeds=seeds)
    with _progress(survey.steps(plan)) as progress:
        findings = survey.run(plan, progress)
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    for table in findings.tables:
        console.print(table.rich())
    if json_path is not None:
        write_json(findings, json_path)


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
