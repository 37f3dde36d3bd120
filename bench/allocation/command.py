"""``python -m bench allocator``: options in, tables and JSON out."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click
import msgspec

from bench.allocation import survey
from bench.command_line import SETTINGS, console, json_option, shown_progress, typed
from bench.results import write_json
from bench.tables import show

__all__ = ["allocator_command"]

_PIPE_WIDTH = 150  # of tables that go into a file or a pipe


@click.command("allocator", context_settings=SETTINGS)
@click.option("--quick", is_flag=True, help="Fewer traces and shorter copies: half a minute on an idle machine.")
@click.option("--seeds", default=None, type=click.IntRange(min=1), help="Traces of each kind.  [default: 300; quick: 15]")
@json_option
def allocator_command(quick: bool, seeds: int | None, json_path: Path | None) -> None:
    """How full the slab gets, what placing a slot costs, and what reusing warm memory is worth, by policy."""
    plan = survey.Plan.quick() if quick else survey.Plan()
    if seeds is not None:
        plan = dataclasses.replace(plan, seeds=seeds)
    with shown_progress(survey.steps(plan)) as progress:
        findings = survey.run(plan, progress)
    show(findings, console(_PIPE_WIDTH))
    if json_path is not None:
        write_json(msgspec.structs.replace(findings, command=typed()), json_path)
