"""``python -m bench allocator``: options in, tables and JSON out."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from bench.allocation import survey
from bench.command_line import SETTINGS, json_option, shown_progress
from bench.tables import deliver

__all__ = ["allocator_command"]


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
    deliver(findings, json_path)
