"""``python -m tests.simulation``: walks, explores, or runs a failure again."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import click
import msgspec
from rich.console import Console
from rich.table import Table

from tests.simulation import books
from tests.simulation.exploration import EXPLORATIONS, Exploration, explore
from tests.simulation.failure import Failure, replay
from tests.simulation.walk import Walk, walk

_PROGRESS_S = 5.0  # between two lines
_PIPE_WIDTH = 120  # of a table that goes into a file or a pipe
_FILE = click.Path(dir_okay=False, path_type=Path)

_Result = TypeVar("_Result", Walk, Exploration)


class _Explored(msgspec.Struct):
    explorations: list[Exploration]
    failure: Failure | None


class _Saved(msgspec.Struct):
    """What ``--replay`` needs of a file that ``--json`` wrote."""

    failure: Failure | None


@click.command("simulate")
@click.option("--steps", default=1_000_000, type=click.IntRange(min=1), help="Of the random walk.")
@click.option("--seed", default=1, type=click.IntRange(min=0), help="Of the random walk.")
@click.option("--exhaustive", is_flag=True, help="Visit every state of small scenarios instead.")
@click.option(
    "--scenario", "names", multiple=True, type=click.Choice(list(EXPLORATIONS)), help="To explore; repeatable.  [default: all]"
)
@click.option("--max-states", default=2_000_000, type=click.IntRange(min=1), help="At which an exploration gives up.")
@click.option("--replay", "replay_path", default=None, type=_FILE, help="Run the failure again that --json wrote to this file.")
@click.option("--json", "json_path", default=None, type=_FILE, help="Also write to this file.")
def simulate_command(
    steps: int,
    seed: int,
    exhaustive: bool,
    names: tuple[str, ...],
    max_states: int,
    replay_path: Path | None,
    json_path: Path | None,
) -> None:
    """An engine and its frontends in one deterministic process, every invariant checked after every step."""
    # Every trace of an exploration is run again from its beginning, and models make that four times as slow.
    is_walk = not (exhaustive or names)
    with quiet(), books.choosing(books.PAIRS if is_walk and books.chosen == books.COMPILED else books.chosen):
        _simulate(steps, seed, exhaustive=exhaustive, names=names, max_states=max_states, replayed=replay_path, saved=json_path)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """The product says nothing of all that happens to connections meanwhile."""
    logger = logging.getLogger("shmring")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


def _simulate(
    steps: int,
    seed: int,
    *,
    exhaustive: bool,
    names: tuple[str, ...],
    max_states: int,
    replayed: Path | None,
    saved: Path | None,
) -> None:
    result: Walk | _Explored
    if replayed is not None:
        _replay(replayed)
        return
    if exhaustive or names:
        result = _explore(names or tuple(EXPLORATIONS), max_states)
        _console().print(_explored_table(result.explorations))
    else:
        result = walk(steps, seed, _Progress[Walk](_walked), injectors=1, stops=True)
        _console().print(_walk_table(result))
    if saved is not None:
        saved.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
    if result.failure is not None:
        _report(result)


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)


def _report(result: Walk | _Explored) -> None:
    """Says what did not hold, and ends with status 1."""
    assert result.failure is not None
    if isinstance(result, Walk):
        click.echo(f"seed {result.seed}, episode {result.failed_episode}, step {result.failed_step}", err=True)
    for line in result.failure.lines():
        click.echo(line, err=True)
    raise SystemExit(1)


def _replay(path: Path) -> None:
    try:
        failure = msgspec.json.decode(path.read_bytes(), type=_Saved).failure
    except (OSError, msgspec.MsgspecError) as error:
        raise click.ClickException(f"{path}: {error}") from error
    if failure is None:
        raise click.ClickException(f"{path} is of a run in which everything held")
    violation = replay(failure)
    if violation is None:
        click.echo(f"it holds now: {failure.text}")
        return
    for line in msgspec.structs.replace(failure, text=str(violation)).lines():
        click.echo(line, err=True)
    raise SystemExit(1)


def _explore(names: Sequence[str], max_states: int) -> _Explored:
    explored = _Explored([], None)
    for name in names:
        exploration = explore(name, max_states, _Progress[Exploration](_found))
        explored.explorations.append(exploration)
        if exploration.failure is not None:
            explored.failure = exploration.failure
            break
    return explored


class _Progress(Generic[_Result]):
    """Shows a line on stderr now and then."""

    def __init__(self, describe: Callable[[_Result], str]) -> None:
        self.describe: Callable[[_Result], str] = describe
        self.next_s = time.monotonic() + _PROGRESS_S

    def __call__(self, result: _Result) -> None:
        if time.monotonic() >= self.next_s:
            self.next_s = time.monotonic() + _PROGRESS_S
            click.echo(self.describe(result), err=True)


def _walked(result: Walk) -> str:
    return f"{result.steps:,} steps, {result.states:,} states, {result.steps_per_s:,.0f} steps/s"


def _found(result: Exploration) -> str:
    return f"{result.name}: {result.states:,} states, {result.transitions:,} transitions, depth {result.depth}"


def _walk_table(result: Walk) -> Table:
    table = Table(
        title=f"random walk, seed {result.seed}: {result.steps:,} steps, all invariants checked after each",
        caption=f"{result.states:,} states, {result.episodes:,} episodes settled with everything come home, "
        f"{result.seconds:,.0f} s, {result.steps_per_s:,.0f} steps/s",
    )
    table.add_column("action")
    table.add_column("times", justify="right")
    for kind, count in result.actions.items():
        table.add_row(str(kind), f"{count:,}")
    return table


def _explored_table(results: Sequence[Exploration]) -> Table:
    table = Table(title="all states, breadth first, all invariants checked in each")
    table.add_column("scenario")
    for column in ("complete", "states", "transitions", "depth", "settled from", "seconds"):
        table.add_column(column, justify="right")
    for exploration in results:
        numbers = (exploration.states, exploration.transitions, exploration.depth, exploration.settled)
        complete = "yes" if exploration.complete else "no"
        table.add_row(exploration.name, complete, *(f"{number:,}" for number in numbers), f"{exploration.seconds:,.1f}")
    return table
