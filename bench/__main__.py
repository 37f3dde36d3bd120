"""``python -m bench``: the benchmarks. Progress goes to stderr, tables go to stdout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click

from bench import report
from bench.allocation.command import allocator_command
from bench.command_line import DIRECTORY, SETTINGS
from bench.cost import cost_command
from bench.fan_out.command import fan_out_command
from bench.far.command import far_command
from bench.gpu.command import gpu_command
from bench.isolation.command import isolation_command
from bench.machine import ROOT
from bench.omni.command import omni_command
from bench.ray.command import ray_command
from bench.request import request_command
from bench.serving.command import serve_command
from bench.sglang.command import sglang_command
from bench.steps import steps_command
from bench.transport import quick_command, transport_command
from bench.vllm.command import embeds_command, encoders_command, vllm_command, workers_command


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
    far_command,
    allocator_command,
    gpu_command,
    vllm_command,
    workers_command,
    encoders_command,
    embeds_command,
    sglang_command,
    omni_command,
    ray_command,
    steps_command,
    quick_command,
):
    main.add_command(command)


#: What a release measures: all that needs no GPU and no server of others.
OF_A_RELEASE = ("transport", "request", "fan-out", "cost", "allocator", "isolation", "serve", "steps")


_results = click.option("--results", default=ROOT / "bench" / "results", type=DIRECTORY, help="The JSON of all modes.")
_docs = click.option("--docs", default=ROOT / "docs", type=DIRECTORY, help="Where the pages go.")


@main.command("all")
@_results
@_docs
def all_command(results: Path, docs: Path) -> None:
    """Measures what a release claims, one after the other, stores it, and builds the pages; 40 minutes on two idle cores.

    Ends with 1 if a command ended with something else than 0: a missed target does not keep the others from being measured.
    """
    codes = {}
    for name in OF_A_RELEASE:
        command = [sys.executable, "-m", "bench", name, "--json", str(results / f"{name}.json")]
        codes[name] = subprocess.run(command, check=False).returncode
        if codes[name] in (0, 1):
            for older in results.glob(f"{name}-*.json"):  # parts of it, by themselves
                older.unlink()
    report.build(results, docs)
    if ended := [f"{name} with {code}" for name, code in codes.items() if code]:
        raise click.ClickException(f"ended: {', '.join(ended)}")


@main.command("report")
@_results
@_docs
def report_command(results: Path, docs: Path) -> None:
    """Builds docs/benchmarks.md, the pages in docs/benchmarks/, and the README's plot, from stored results."""
    for path in report.build(results, docs):
        click.echo(path)


if __name__ == "__main__":
    if not sys.flags.safe_path and sys.path[0] == os.getcwd():
        del sys.path[0]  # processes that are started inherit it, and would import what lies in the user's working directory
    main(prog_name="python -m bench")
