"""``python -m bench gpu``: progress goes to stderr, tables go to stdout. Ends with 2 where no GPU can be measured."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from bench import command_line
from bench.gpu import device
from bench.gpu.copies import WAYS
from bench.gpu.handovers import ROUTES
from bench.gpu.plan import Plan, run, steps
from bench.gpu.report import draw, report
from bench.tables import finish

__all__ = ["gpu_command"]

_WAYS, _ROUTES = click.Choice(list(WAYS)), click.Choice(list(ROUTES))


class _NoGpu(click.ClickException):
    """Nothing went wrong: there is nothing to measure."""

    exit_code = 2


@click.command("gpu", context_settings=command_line.SETTINGS)
@click.option("--quick", is_flag=True, help="The sizes that targets are about, 3 repetitions, in a minute.")
@command_line.size_option(
    "--size",
    "sizes",
    item_nbytes=device.MIN_NBYTES,
    item="its marks",
    text="Of a tensor; repeatable.  [default: 64KiB to 256MiB]",
)
@click.option("--from", "ways", multiple=True, type=_WAYS, help="To the GPU; repeatable.  [default: all]")
@click.option("--by", "routes", multiple=True, type=_ROUTES, help="Between processes; repeatable.  [default: all]")
@command_line.repetitions_option("Interleaved.  [default: 7; 3 if quick]")
@command_line.json_option
@command_line.plot_option()
def gpu_command(quick: bool, json_path: Path | None, plot_stem: Path | None, **choices: Any) -> None:
    """From a slot to the GPU: bandwidth, how long the loop is held up, and hand-overs between processes.

    Fails if something could not be measured, or if a target is missed; with 2 where there is no GPU.
    """
    if (reason := device.missing()) is not None:
        raise _NoGpu(reason)
    chosen = {name: value for name, value in choices.items() if value}
    plan = dataclasses.replace(Plan.quick() if quick else Plan(), **chosen)
    with command_line.measuring(steps(plan)) as progress:
        findings = report(run(plan, progress))
    finish(findings, json_path, plot_stem, draw)
