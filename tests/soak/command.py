"""``python -m tests.soak``: options in; tables and JSON out; the exit status says whether anything grew."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import click
import msgspec
from rich.console import Console

from bench.command_line import FILE, SETTINGS, terminated
from bench.results import write_json
from tests.fleet.fleet import ChildError
from tests.soak import driver, report
from tests.soak.plan import Plan, Sabotage
from tests.soak.verdict import judge

_PIPE_WIDTH = 150  # of tables that go into a file or a pipe
_SABOTAGES = click.Choice([sabotage.value for sabotage in Sabotage])


@click.command("soak", context_settings=SETTINGS)
@click.option("--minutes", default=60.0, type=click.FloatRange(min=0.05), help="How long.")
@click.option("--frontends", default=3, type=click.IntRange(1, 64), help="Processes that send.")
@click.option("--seed", default=1, type=int, help="Of all that is drawn.")
@click.option("--json", "json_path", default=None, type=FILE, help="Also write to this file.")
@click.option("--sabotage", "sabotages", multiple=True, type=_SABOTAGES, hidden=True)
def soak_command(
    minutes: float,
    frontends: int,
    seed: int,
    json_path: Path | None,
    sabotages: tuple[str, ...],
) -> None:
    """Load in a loop of phases; fails if memory or descriptors grow, or if the slab does not come home."""
    signal.signal(signal.SIGTERM, terminated)
    plan = Plan.of(minutes, frontends, seed, tuple(Sabotage(name) for name in sabotages))
    try:
        seen = asyncio.run(driver.run(plan, lambda line: click.echo(line, err=True)))
    except ChildError as error:
        raise click.ClickException(str(error)) from error
    checks = judge(seen)
    result = report.findings(plan, seen, checks)
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    for table in result.tables:
        console.print(table.rich())
    if json_path is not None:
        command = f"python -m tests.soak --minutes {minutes:g} --frontends {frontends} --seed {seed}"
        write_json(msgspec.structs.replace(result, command=command), json_path)
    if not all(check.passed for check in checks):
        raise click.ClickException("something grew, did not come home or failed: see the table")
