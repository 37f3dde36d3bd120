"""``shmring inspect`` and ``shmring top``: what an engine is doing, in a terminal."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable

import click
import msgspec
from rich.console import Console, ConsoleRenderable, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shmring.client.inspecting import inspect
from shmring.engine.settings import MAX_ENGINES, engine_names
from shmring.errors import ShmringError
from shmring.snapshot import RingSnapshot, Run
from shmring.transport.listener import socket_path

__all__ = ["print_once", "view", "watch"]

_EACH_S = 1.0
_BAR_ROWS = 4
_OLD_S = 30.0  # from which a request or a slot is marked
_MOST_ROWS = 12
_PLAIN_WIDTH = 120  # where the output is no terminal
# Of each state: its colour, and its letter, which says the same where there are no colours.
_STATES = {
    "free": ("bright_black", "."),
    "leased": ("blue", "l"),
    "published": ("yellow", "s"),
    "claimed": ("cyan", "c"),
    "draining": ("red", "d"),
    "quarantined": ("magenta", "q"),
    "kept": ("green", "k"),
    "kept_pinned": ("bold green", "K"),
    "replies": ("bright_magenta", "r"),
}
_MEANINGS = {
    "published": "submitted",
    "draining": "left, still viewed",
    "kept_pinned": "kept, in use",
    "replies": "for replies",
}


def print_once(name: str, socket_dir: str | None, *, as_json: bool) -> int:
    """Prints a snapshot; returns the exit code."""
    try:
        snapshot = asyncio.run(inspect(name, socket_dir=socket_dir))
    except (ShmringError, OSError, ValueError, TimeoutError) as error:
        click.echo(f"shmring inspect: {_reason(error, name, socket_dir)}", err=True)
        return 1
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(snapshot)))
    else:
        Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH).print(view(snapshot, None))
    return 0


def watch(name: str, socket_dir: str | None) -> int:
    """Shows snapshots until Ctrl-C, also while there is no engine; returns the exit code."""
    try:
        asyncio.run(_watch(name, socket_dir))
    except KeyboardInterrupt:
        return 0
    except ValueError as error:
        click.echo(f"shmring top: {error}", err=True)
    return 1


async def _watch(name: str, socket_dir: str | None) -> None:
    console, before = Console(), None
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            try:
                snapshot = await inspect(name, socket_dir=socket_dir)
                live.update(view(snapshot, before, console.width), refresh=True)
                before = snapshot
            except (ShmringError, OSError, TimeoutError) as error:
                live.update(Text(_reason(error, name, socket_dir), "red"), refresh=True)
            await asyncio.sleep(_EACH_S)


def _reason(error: Exception, name: str, socket_dir: str | None) -> str:
    path = socket_path(name, socket_dir)
    engines = [each for each in engine_names(name, MAX_ENGINES) if path.with_name(f"{each}.sock").exists()]
    if engines and not path.exists():
        return f"the server {name} has several engines: name one of {', '.join(engines)}"
    return str(error) or "the engine does not answer: its loop does not run"


def view(snapshot: RingSnapshot, before: RingSnapshot | None, width: int = _PLAIN_WIDTH) -> Group:
    """Returns what a terminal shows of a snapshot.

    Args:
        snapshot: of now.
        before: an earlier one of the same engine, for rates.
        width: of the terminal.
    """
    parts: list[ConsoleRenderable] = [
        _head(snapshot, before),
        _bar(snapshot, width),
        _legend(),
        _requests(snapshot),
        _clients(snapshot),
    ]
    if snapshot.draining:
        parts.insert(4, _draining(snapshot))
    if snapshot.workers:
        rows = ([f"{each.rank}", f"{each.pid}", f"{each.unacknowledged}"] for each in snapshot.workers)
        parts.append(_table(["worker", "pid", "behind"], rows))
    if snapshot.errors:
        parts.append(_table(["ago", "error"], ([_seconds(each.age_s), each.text] for each in snapshot.errors[:5])))
    return Group(*parts)


def _head(snapshot: RingSnapshot, before: RingSnapshot | None) -> Text:
    now, program = snapshot.statistics, snapshot.program
    texts = [f"{snapshot.name} (pid {snapshot.pid})", f"{now['running']} running, {now['waiting']} not yet claimed"]
    if "waiting" in program:
        texts.append(f"{program['waiting']} wait for a step")
    if before is not None and before.epoch == snapshot.epoch and snapshot.time_s > before.time_s:
        seconds = snapshot.time_s - before.time_s
        texts.append(f"{(now['finished'] - before.statistics['finished']) / seconds:.0f} requests/s")
        texts.append(f"{(now['received_nbytes'] - before.statistics['received_nbytes']) / seconds / 1e6:.1f} MB/s")
    if steps := sorted(program.get("steps_s", ())):
        texts.append(f"steps p50 {1e3 * steps[len(steps) // 2]:.1f} ms")
    if step := program.get("step"):
        texts.append(f"in {step['what']} for {_seconds(step['age_s'])}")
    memory = ", ".join(f"{_mib(now[f'{part}_nbytes'])} {part}" for part in ("free", "leased", "kept", "quarantined"))
    return Text("   ".join(texts) + f"\nof {_mib(snapshot.blocks * snapshot.block_nbytes)}: {memory}\n")


def _bar(snapshot: RingSnapshot, width: int) -> Text:
    """The slab, row after row, a letter for each part of it; slots lie on their leases."""
    cells = ["free"] * (width * _BAR_ROWS)
    per = snapshot.blocks / len(cells)
    for run in sorted(snapshot.runs, key=_is_slot):
        first = int(run.start / per)
        last = max(first + 1, int((run.start + run.blocks) / per))
        cells[first:last] = [run.state] * (min(last, len(cells)) - first)
    text = Text()
    for row in range(_BAR_ROWS):
        for state in cells[row * width : (row + 1) * width]:
            colour, letter = _STATES[state]
            text.append(letter, colour)
        text.append("\n")
    return text


def _is_slot(run: Run) -> bool:
    return run.generation != 0


def _legend() -> Text:
    text = Text()
    for state, (colour, letter) in _STATES.items():
        text.append(f"{letter} {_MEANINGS.get(state, state)}  ", colour)
    text.append("\n")
    return text


def _requests(snapshot: RingSnapshot) -> Table:
    rows = (
        [_seconds(each.age_s), each.state, each.name or f"number {each.number}", f"{each.client_id}", _mib(each.nbytes)]
        for each in snapshot.requests[:_MOST_ROWS]
    )
    old = [each.age_s > _OLD_S and each.nbytes > 0 for each in snapshot.requests]
    return _table(["age", "state", f"request ({snapshot.request_count})", "frontend", "in slots"], rows, old)


def _draining(snapshot: RingSnapshot) -> Table:
    rows = (
        [_seconds(each.age_s), each.request or "unknown", f"{each.client_id}", _mib(each.nbytes)]
        for each in snapshot.draining[:_MOST_ROWS]
    )
    old = [each.age_s > _OLD_S for each in snapshot.draining]
    return _table(["age", f"left and still viewed ({snapshot.draining_count})", "frontend", "memory"], rows, old)


def _clients(snapshot: RingSnapshot) -> Table:
    rows = (
        [
            f"{each.client_id} {each.name}",
            each.state,
            f"{each.pid}",
            f"{_mib(each.leased_nbytes)} in {each.leases}",
            f"{each.slots}",
            f"{each.requests}",
            f"{_mib(each.wants_nbytes)}, {_seconds(each.waits_s)}" if each.wants_nbytes else "",
        ]
        for each in snapshot.clients[:_MOST_ROWS]
    )
    worrying = [each.state != "connected" or each.wants_nbytes > 0 for each in snapshot.clients]
    headings = [f"frontend ({snapshot.client_count})", "state", "pid", "leased", "slots", "requests", "waits for"]
    return _table(headings, rows, worrying)


def _table(headings: list[str], rows: Iterable[list[str]], marked: Iterable[bool] = ()) -> Table:
    table = Table(*headings, box=None, header_style="dim", padding=(0, 2, 0, 0))
    marks = list(marked)
    for number, row in enumerate(rows):
        # Text: what callers have sent is no markup.
        table.add_row(*map(Text, row), style="red" if number < len(marks) and marks[number] else None)
    return table


def _seconds(seconds: float) -> str:
    return "< 1 s" if seconds < 1 else f"{seconds:.0f} s"


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.1f} MiB"
