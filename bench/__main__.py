"""``python -m bench``: the benchmarks. Progress goes to stderr, tables go to stdout."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import click
from rich.console import Console

from bench import faults, plots, report
from bench.allocation.command import allocator_command
from bench.command_line import DIRECTORY, SETTINGS, console, terminated
from bench.commands import quick_command, transport_command
from bench.gpu.command import gpu_command
from bench.request.command import request_command
from bench.serving.command import serve_command
from bench.simulation.command import simulate_command
from bench.soak.command import soak_command

_ROOT = Path(__file__).resolve().parents[1]
_PIPE_WIDTH = 120  # of a table that goes into a file or a pipe
_FILE = click.Path(dir_okay=False, path_type=Path)


@click.group(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
def main() -> None:
    """Measures shmring beside what would be taken instead, in one run."""


for command in (
    transport_command,
    request_command,
    serve_command,
    allocator_command,
    gpu_command,
    soak_command,
    quick_command,
    simulate_command,
):
    main.add_command(command)


@main.command("report", context_settings=SETTINGS)
@click.option("--results", "results_directory", default=_ROOT / "bench" / "results", type=DIRECTORY, help="JSON of all modes.")
@click.option("--docs", "docs_directory", default=_ROOT / "docs", type=DIRECTORY, help="Where benchmarks.md goes.")
def report_command(results_directory: Path, docs_directory: Path) -> None:
    """Builds docs/benchmarks.md and its plots from stored results, and says what is missing in each."""
    try:
        console(_PIPE_WIDTH).print(report.status(results_directory))
        click.echo(report.build(results_directory, docs_directory), err=True)
    except (report.ReportError, plots.MissingPlotter) as error:
        raise click.ClickException(str(error)) from error


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
    signal.signal(signal.SIGTERM, terminated)
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


if __name__ == "__main__":
    main(prog_name="python -m bench")
