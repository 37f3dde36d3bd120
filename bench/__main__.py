"""``python -m bench``: the benchmarks. Progress goes to stderr, tables go to stdout."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from bench import report
from bench.allocation.command import allocator_command
from bench.command_line import DIRECTORY, SETTINGS, console
from bench.cost import cost_command
from bench.fan_out.command import fan_out_command
from bench.gpu.command import gpu_command
from bench.isolation.command import isolation_command
from bench.machine import ROOT
from bench.ray.command import ray_command
from bench.request.command import request_command
from bench.serving.command import serve_command
from bench.sglang.command import sglang_command
from bench.steps import steps_command
from bench.transport import quick_command, transport_command
from bench.vllm.command import vllm_command


@click.group(context_settings=SETTINGS)
def main() -> None:
    """Measures shmring beside what would be taken instead, in one run.

    A command ends with 1 if a target is missed, and with 3 if something could not be measured.
    """


for command in (
    transport_command,
    cost_command,
    request_command,
    serve_command,
    isolation_command,
    fan_out_command,
    allocator_command,
    gpu_command,
    vllm_command,
    sglang_command,
    ray_command,
    steps_command,
    quick_command,
):
    main.add_command(command)


@main.command("report")
@click.option("--results", "results_directory", default=ROOT / "bench" / "results", type=DIRECTORY, help="JSON of all modes.")
@click.option("--docs", "docs_directory", default=ROOT / "docs", type=DIRECTORY, help="Where benchmarks.md goes.")
def report_command(results_directory: Path, docs_directory: Path) -> None:
    """Builds docs/benchmarks.md and its plots from stored results, and says what is missing in each."""
    console().print(report.status(results_directory).rich())
    click.echo(report.build(results_directory, docs_directory), err=True)


if __name__ == "__main__":
    if not sys.flags.safe_path and sys.path[0] == os.getcwd():
        del sys.path[0]  # processes that are started inherit it, and would import what lies in the user's working directory
    main(prog_name="python -m bench")
