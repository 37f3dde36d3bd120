"""``python -m tests.chaos``: options in; a table and JSON out; the exit status says whether anything was lost."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import click
from rich.console import Console

from bench.command_line import FILE, SETTINGS, terminated
from tests.chaos import driver
from tests.chaos.account import Findings, account
from tests.chaos.plan import Plan, Sabotage
from tests.chaos.report import table, write_json
from tests.fleet.fleet import ChildError

_PIPE_WIDTH = 120  # of a table that goes into a file or a pipe


@click.command("chaos", context_settings=SETTINGS)
@click.option("--minutes", default=1.0, type=click.FloatRange(min=0.05), help="How long.")
@click.option("--seed", default=1, type=int, help="Of all that is drawn: faults, requests, contents.")
@click.option("--frontends", default=3, type=click.IntRange(1, 64), help="Processes that send.")
@click.option("--json", "json_path", default=None, type=FILE, help="Also write to this file.")
@click.option("--sabotage", default="", type=click.Choice(["", "corrupt", "leak", "lose"]), hidden=True)
def chaos_command(minutes: float, seed: int, frontends: int, json_path: Path | None, sabotage: Sabotage) -> None:
    """Processes killed, stopped and hung up under load; fails if anything is lost, corrupted or leaked."""
    signal.signal(signal.SIGTERM, terminated)
    quiet_limit_s = 2.0 if sabotage else 30.0  # what is lost on purpose is not waited for
    plan = Plan(minutes=minutes, seed=seed, frontends=frontends, quiet_limit_s=quiet_limit_s, sabotage=sabotage)
    found: list[Findings] = []
    try:
        asyncio.run(driver.run(plan, lambda line: click.echo(line, err=True), lambda seen: found.append(account(plan, seen))))
    except ChildError as error:
        raise click.ClickException(str(error)) from error
    [findings] = found
    Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH).print(table(findings))
    if json_path is not None:
        write_json(findings, json_path)
    for wrong in findings.wrongs:
        click.echo(wrong, err=True)
    if not findings.passed:
        raise click.ClickException("something was lost, corrupted, leaked or broken: see the table")
