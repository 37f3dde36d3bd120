"""``python -m tests.suspensions``: interrupts each call at each of its suspensions, in each way, on both loops."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

import click

from tests.conftest import BOTH_LOOPS
from tests.simulation.command import quiet
from tests.suspensions.calls import CALLS, HANDLERS
from tests.suspensions.interrupting import Interruption
from tests.suspensions.trying import Trial, small_limits

_NAMES = [*CALLS, *HANDLERS]


@click.command("suspensions")
@click.option("--call", "names", multiple=True, type=click.Choice(_NAMES), help="Which; repeatable.  [default: all]")
def suspensions_command(names: tuple[str, ...]) -> None:
    """Each call is interrupted at each of its suspensions; afterwards nothing may be left of it."""
    began_s, times = time.monotonic(), 0
    for name in names or _NAMES:
        for loop, factory in BOTH_LOOPS.items():
            for how in Interruption:
                with (
                    quiet(),
                    tempfile.TemporaryDirectory() as directory,
                    small_limits(),
                    asyncio.Runner(loop_factory=factory) as runner,
                ):
                    count = runner.run(Trial(name, Path(directory)).each(how))
                times += count
                click.echo(f"{name}, {loop}, {how.value}: interrupted at {count} suspensions", err=True)
    click.echo(f"{times:,} interruptions, and nothing was left of any, {time.monotonic() - began_s:,.0f} s")
