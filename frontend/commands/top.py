"""``shmring inspect`` and ``shmring top``: what an engine is doing, in a terminal."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import sys
import textwrap
from collections.abc import Iterable
from datetime import datetime
from typing import Any

import click
import msgspec
from rich.cells import cell_len
from rich.console import Console, ConsoleRenderable, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shmring.client.inspecting import inspect
from shmring.engine.settings import MAX_ENGINES, engine_names
from shmring.errors import ShmringError
from shmring.snapshot import RingSnapshot, Run
from shmring.transport.listener import socket_path

__all__ = ["print_once", "screen_of", "view", "watch"]

_EACH_S = 1.0
_BAR_ROWS = 4
_OLD_S = 30.0  # from which a request or a slot is marked
_MOST_ROWS = 64
_MOST_ERRORS = 5
_HIGH = 24  # lines of a terminal in which the slab has all its rows
_GAP = 2  # between two columns
_SAYS_MORE = 2  # of a table that is cut: with more lines, the last one says how much is not shown
_LEAST_LONG = 12  # of a name that is cut; below that, a column is left out
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
    except ValueError as error:  # it can't be a name
        click.echo(f"shmring inspect: {error}", err=True)
        return 1
    except (ShmringError, OSError, TimeoutError) as error:
        click.echo(f"shmring inspect: {_reason(error, name, socket_dir)}", err=True)
        return 1
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(snapshot)))
    else:
        console = Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
        console.print(view(snapshot, console.width))
    return 0


def watch(name: str, socket_dir: str | None) -> int:
    """Shows snapshots until Ctrl-C, also while there is no engine; without a terminal, a line for each engine and second.

    Returns:
        The exit code.

    Raises:
        KeyboardInterrupt: that was it.
    """
    console = Console()
    try:
        asyncio.run(_watch(name, socket_dir, console) if console.is_interactive else _print_lines(name, socket_dir))
    except BrokenPipeError:  # whoever read the lines has gone
        return 0
    except ValueError as error:
        click.echo(f"shmring top: {error}", err=True)
    return 1


async def _watch(name: str, socket_dir: str | None, console: Console) -> None:
    before: dict[str, RingSnapshot | str] = {}
    with Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            now = await _look(name, socket_dir)
            width, height = console.size
            each_height = max(1, height // len(now))
            parts = [
                Text(seen, "red") if isinstance(seen, str) else screen_of(seen, _earlier(before, engine), width, each_height)
                for engine, seen in now.items()
            ]
            live.update(Group(*parts[:height]), refresh=True)
            before |= now
            await asyncio.sleep(_EACH_S)


async def _print_lines(name: str, socket_dir: str | None) -> None:
    before: dict[str, RingSnapshot | str] = {}
    while True:
        now = await _look(name, socket_dir)
        for engine, seen in now.items():
            text = seen
            if not isinstance(seen, str):
                text = ", ".join([*_figures(seen, _earlier(before, engine)), *_greatest(seen), _memory(seen)])
            click.echo(f"{datetime.now().astimezone().isoformat(timespec='seconds')} {text}")
        before |= now
        await asyncio.sleep(_EACH_S)


async def _look(name: str, socket_dir: str | None) -> dict[str, RingSnapshot | str]:
    """Returns a snapshot of each engine of a server, or a text that says why there is none."""
    seen: dict[str, RingSnapshot | str] = {}
    for engine in _engines_of(name, socket_dir) or [name]:
        try:
            seen[engine] = await inspect(engine, socket_dir=socket_dir)
        except (ShmringError, OSError, TimeoutError) as error:
            seen[engine] = f"{engine}: {_reason(error, engine, socket_dir)}"
    return seen


def _earlier(before: dict[str, RingSnapshot | str], engine: str) -> RingSnapshot | None:
    snapshot = before.get(engine)
    return snapshot if isinstance(snapshot, RingSnapshot) else None


def _engines_of(name: str, socket_dir: str | None) -> list[str]:
    """Returns the engines of a server that has several; nothing, if there is one of this name."""
    path = socket_path(name, socket_dir)
    if path.exists():
        return []
    return [each for each in engine_names(name, MAX_ENGINES) if path.with_name(f"{each}.sock").exists()]


def _reason(error: Exception, name: str, socket_dir: str | None) -> str:
    if engines := _engines_of(name, socket_dir):
        return f"the server {name} has several engines: name one of {', '.join(engines)}"
    return str(error) or "the engine does not answer: its loop does not run"


def view(snapshot: RingSnapshot, width: int = _PLAIN_WIDTH) -> Group:
    """Returns all of a snapshot, however many lines it has, and no text is cut."""
    bar = _bar(snapshot, width, _BAR_ROWS)
    parts: list[ConsoleRenderable] = [*_head(snapshot, None, width), bar, *_legend(snapshot, width)]
    for table in _tables(snapshot):
        parts += [Text(), table.drawn()]
    return Group(*parts)


def screen_of(snapshot: RingSnapshot, before: RingSnapshot | None, width: int, height: int) -> Group:
    """Returns what fits a terminal: no line is longer, and each table has some of its rows.

    Args:
        snapshot: of now.
        before: an earlier one of the same engine, for rates.
        width, height: of the terminal, in characters.
    """
    is_high = height >= (2 * _HIGH if _is_server(snapshot.program) else _HIGH)  # a server has more to say
    head = [*_head(snapshot, before, width), _bar(snapshot, width, _BAR_ROWS if is_high else 1)]
    head += _legend(snapshot, width)
    tables = _tables(snapshot)
    left = height - sum(len(part.plain.splitlines()) for part in head)
    shown = [0] * len(tables)  # lines of each table, its headings included
    while left > 0 and (smaller := [index for index, table in enumerate(tables) if shown[index] <= len(table.rows)]):
        # One line after the other, to the table that has the fewest; the first one counts most.
        index = min(smaller, key=lambda index: shown[index])
        lines = 1 if shown[index] or not tables[index].rows else 2  # headings alone say nothing
        if lines > left:
            break
        shown[index] += lines
        left -= lines
    drawn = [table.drawn(width, lines - 1) for table, lines in zip(tables, shown, strict=True) if lines]
    return Group(*head[:height], *drawn)


def _figures(snapshot: RingSnapshot, before: RingSnapshot | None) -> list[str]:
    now, program = snapshot.statistics, snapshot.program
    texts = [f"{snapshot.name} (pid {snapshot.pid})"]
    if _is_server(program):
        texts += [f"{program['running']} running", f"{program['seats_taken']} of {program['seats']} seats taken"]
        texts += [f"{program['preparing_requests']} preparing"] if program["preparing_requests"] else []
        texts += [f"{program['paused_requests']} paused", f"{program['waiting']} waiting in line"]
        texts += [f"{program['preparing']} being prepared in frontends"] if program["preparing"] else []
    else:
        texts.append(f"{now['running']} running")
    texts.append(f"{now['waiting']} not yet taken up")
    if before is not None and before.epoch == snapshot.epoch and snapshot.time_s > before.time_s:
        seconds = snapshot.time_s - before.time_s
        texts.append(f"{(now['finished'] - before.statistics['finished']) / seconds:.0f} requests/s")
        texts.append(f"{(now['received_nbytes'] - before.statistics['received_nbytes']) / seconds / 1e6:.1f} MB/s")
    if steps := sorted(program.get("steps_s", ())):
        texts.append(f"steps p50 {1e3 * steps[len(steps) // 2]:.1f} ms")
    if step := program.get("step"):
        texts.append(f"in {step['what']} for {_seconds(step['age_s'])}")
    if "loop_lag_s" in program:
        texts.append(f"loop late by {1e3 * program['loop_lag_s']:.0f} ms")
        texts += [f"that of {title} by {1e3 * lag_s:.0f} ms" for title, (lag_s, _) in program["frontend_lags"].items()]
    return texts


def _is_server(program: dict[str, Any]) -> bool:
    """Whether an engine of our server says what it does. Other programs may say anything."""
    return "spending" in program


def _memory(snapshot: RingSnapshot) -> str:
    parts = (f"{_mib(snapshot.statistics[f'{part}_nbytes'])} {part}" for part in ("free", "leased", "kept", "quarantined"))
    return f"of {_mib(snapshot.blocks * snapshot.block_nbytes)}: {', '.join(parts)}"


def _head(snapshot: RingSnapshot, before: RingSnapshot | None, width: int) -> list[Text]:
    memory = [Text(part) for part in re.split("(?<=[:,]) ", _memory(snapshot))]
    spending = snapshot.program["spending"] if _is_server(snapshot.program) else None
    cause = textwrap.wrap(f"{spending['cause']} {spending['whose']}", width) if spending is not None else []
    figures = _packed([Text(text) for text in _figures(snapshot, before)], width, 3)
    return [*figures, *(Text(line, "bold") for line in cause), *_packed(memory, width, 1)]


def _greatest(snapshot: RingSnapshot) -> list[str]:
    """What takes most of the time, and the caller who costs most."""
    if not _is_server(snapshot.program):
        return []
    parts, callers = snapshot.program["spending"]["parts"], snapshot.program["callers"]
    texts = [f"{parts[0]['share']:.0%} of the time {parts[0]['what']}"] if parts else []
    return texts + ([f"{callers[0]['share']:.0%} of what requests took for {callers[0]['owner']}"] if callers else [])


def _packed(parts: Iterable[Text], width: int, gap: int) -> list[Text]:
    """Returns lines of whole parts."""
    lines: list[Text] = []
    for part in parts:
        if lines and lines[-1].cell_len + gap + part.cell_len <= width:
            lines[-1].append(" " * gap).append_text(part)
        else:
            part.truncate(width, overflow="ellipsis")
            lines.append(part)
    return lines


def _bar(snapshot: RingSnapshot, width: int, rows: int) -> Text:
    """The slab, row after row, a letter for each part of it; slots lie on their leases."""
    cells = ["free"] * (width * rows)
    per = snapshot.blocks / len(cells)
    for run in sorted(snapshot.runs, key=_is_slot):
        first = int(run.start / per)
        last = max(first + 1, int((run.start + run.blocks) / per))
        cells[first:last] = [run.state] * (min(last, len(cells)) - first)
    text = Text()
    for row in range(rows):
        text.append("\n" if row else "")
        for state in cells[row * width : (row + 1) * width]:
            colour, letter = _STATES[state]
            text.append(letter, colour)
    return text


def _is_slot(run: Run) -> bool:
    return run.generation != 0


def _legend(snapshot: RingSnapshot, width: int) -> list[Text]:
    """What the letters mean that there are."""
    there = {"free", *(run.state for run in snapshot.runs)}
    texts = [
        Text(f"{letter} {_MEANINGS.get(state, state)}", colour) for state, (colour, letter) in _STATES.items() if state in there
    ]
    return _packed(texts, width, 2)


@dataclasses.dataclass(frozen=True, slots=True)
class _Table:
    """A table, one column of which has texts of any length.

    Attributes:
        headings: of the columns.
        rows: as many as there are in the snapshot, or the first ones.
        marked: for each row, whether it is worth a look.
        long: the column of texts of any length.
        spare: columns that are left out where there is no room, the first one first.
        urgent: rows that come first where not all are shown.
        count: of all rows, also those that the snapshot has not; 0: it has all.
    """

    headings: list[str]
    rows: list[list[str]]
    marked: list[bool]
    long: int
    spare: tuple[int, ...] = ()
    urgent: tuple[int, ...] = ()
    count: int = 0

    def drawn(self, width: int | None = None, rows: int = _MOST_ROWS) -> Table:
        """Returns it, for a terminal.

        Args:
            width: that it has; its long texts are cut then. None: as much as it needs.
            rows: the most that are shown.
        """
        indices = list(range(len(self.rows)))
        is_cut = rows < len(indices)
        if is_cut:
            indices.sort(key=lambda index: index not in self.urgent)
            indices = indices[: rows - 1 if rows > _SAYS_MORE else rows]
        more = max(self.count, len(self.rows)) - len(indices)
        shown = [self.rows[index] for index in indices]
        columns, long_width = list(range(len(self.headings))), 0
        widths = [max(cell_len(row[index]) for row in [self.headings, *shown]) for index in columns]
        if width is not None:
            spare = list(self.spare)
            while True:
                long_width = width - sum(widths[index] + _GAP for index in columns if index != self.long)
                if long_width >= min(widths[self.long], _LEAST_LONG) or not spare:
                    break
                columns.remove(spare.pop(0))
        table = Table(box=None, header_style="dim", padding=(0, _GAP, 0, 0), pad_edge=False)
        for index in columns:
            is_long = width is not None and index == self.long
            table.add_column(
                self.headings[index],
                no_wrap=width is not None,
                overflow="ellipsis" if is_long else "fold",
                max_width=max(1, long_width) if is_long else None,
            )
        for index, row in zip(indices, shown, strict=True):
            # Text: what callers have sent is no markup.
            table.add_row(*(Text(row[column]) for column in columns), style="red" if self.marked[index] else None)
        if is_cut and rows > _SAYS_MORE:
            text = Text(f"... {more} more: shmring inspect", "dim")
            table.add_row(*(text if column == self.long else Text() for column in columns))
        return table


def _tables(snapshot: RingSnapshot) -> list[_Table]:
    """Returns the tables of what there is, the most important first."""
    if _is_server(snapshot.program):
        return [_requests_of_server(snapshot), _callers(snapshot), _spending(snapshot), *_tables_of_ring(snapshot)]
    if "store" in snapshot.program:
        return [*_contents(snapshot), *_tables_of_ring(snapshot)]
    return [_requests_of_ring(snapshot), *_tables_of_ring(snapshot)]


def _requests_of_server(snapshot: RingSnapshot) -> _Table:
    """Requests as the scheduler knows them."""
    program = snapshot.program
    count = sum(program[state] for state in ("running", "preparing_requests", "paused_requests", "waiting"))
    rows = [
        [
            each["name"] or f"number {each['number']}",
            f"{each['state']} {each['place'] or ''}".rstrip(),
            each["why"],
            each["owner"],
            f"{each['prompt_tokens'] or ''}",
            f"{each['tokens'] or ''}",
            _taken(each["seconds"]),
            _seconds(each["age_s"]),
        ]
        for each in program["requests"]
    ]
    headings = [
        f"request ({count})",
        "state, place",
        "what it waits for, or does",
        "caller",
        "prompt",
        "tokens",
        "took",
        "age",
    ]
    waiting = tuple(index for index, each in enumerate(program["requests"]) if each["place"])
    return _Table(headings, rows, [False] * len(rows), long=0, spare=(4, 7, 2, 5), urgent=waiting, count=count)


def _requests_of_ring(snapshot: RingSnapshot) -> _Table:
    return _Table(
        ["age", "state", f"request ({snapshot.request_count})", "frontend", "in slots"],
        [
            [_seconds(each.age_s), each.state, each.name or f"number {each.number}", f"{each.client_id}", _mib(each.nbytes)]
            for each in snapshot.requests
        ],
        [each.age_s > _OLD_S and each.nbytes > 0 for each in snapshot.requests],
        long=2,
        spare=(3,),
    )


def _callers(snapshot: RingSnapshot) -> _Table:
    rows = [
        [
            each["owner"],
            _taken(each["seconds"]),
            _taken(each["beside_s"]),
            _taken(each["decoding_s"]),
            f"{each['share']:.0%}",
            _taken(each["minute_s"]),
            f"{each['requests']}",
        ]
        for each in snapshot.program["callers"]
    ]
    headings = ["caller", "in steps, last 10 s", "beside them", "in decoders", "share", "all, last minute", "requests"]
    return _Table(headings, rows, [False] * len(rows), long=0, spare=(5, 3, 6))


def _spending(snapshot: RingSnapshot) -> _Table:
    spending = snapshot.program["spending"]
    shares = [*spending["parts"], {"what": "no step ran", "share": 1 - spending["steps"]}]
    rows = [[f"{part['share']:.0%}", part["what"]] for part in shares]
    return _Table(["share", f"of the last {spending['over_s']:.0f} s"], rows, [False] * len(rows), long=1)


def _contents(snapshot: RingSnapshot) -> list[_Table]:
    """What a store keeps, and what has gone."""
    rows = [
        [_mib(each.nbytes), f"{each.pins}", f"{each.hits}", "one" if each.for_one else "all", each.key]
        for each in snapshot.kept
    ]
    kept = _Table(
        ["memory", "in use by", "found", "for", f"content ({snapshot.kept_count})"],
        rows,
        [False] * len(rows),
        long=4,
        count=snapshot.kept_count,
    )
    why = {"content": "other content", "lease": "what is written"}
    rows = [[_seconds(each.ago_s), _mib(each.nbytes), f"{each.hits}", why[each.why], each.key] for each in snapshot.dropped]
    dropped = _Table(["ago", "memory", "found", "made room for", "content that has gone"], rows, [False] * len(rows), long=4)
    return [kept, *([dropped] if rows else [])]


def _tables_of_ring(snapshot: RingSnapshot) -> list[_Table]:
    draining = _Table(
        ["age", f"left and still viewed ({snapshot.draining_count})", "frontend", "memory"],
        [
            [_seconds(each.age_s), each.request or "unknown", f"{each.client_id}", _mib(each.nbytes)]
            for each in snapshot.draining
        ],
        [each.age_s > _OLD_S for each in snapshot.draining],
        long=1,
        spare=(2,),
    )
    clients = _Table(
        [f"frontend ({snapshot.client_count})", "state", "pid", "leased", "slots", "requests", "waits for"],
        [
            [
                f"{each.name or 'unnamed'} (client {each.client_id})",
                each.state,
                f"{each.pid}",
                f"{_mib(each.leased_nbytes)} in {each.leases}",
                f"{each.slots}",
                f"{each.requests}",
                f"{_mib(each.wants_nbytes)}, {_seconds(each.waits_s)}" if each.wants_nbytes else "",
            ]
            for each in snapshot.clients
        ],
        [each.state != "connected" or each.wants_nbytes > 0 for each in snapshot.clients],
        long=0,
        spare=(4, 5, 2, 3),
    )
    rows = [[f"{each.rank}", f"{each.pid}", f"{each.unacknowledged}"] for each in snapshot.workers]
    workers = _Table(["worker", "pid", "behind"], rows, [False] * len(rows), long=0)
    rows = [[_seconds(each.age_s), each.text] for each in snapshot.errors[:_MOST_ERRORS]]
    errors = _Table(["ago", "error of the engine"], rows, [False] * len(rows), long=1)
    return [clients, *(table for table in (draining, errors, workers) if table.rows)]


def _seconds(seconds: float) -> str:
    return "< 1 s" if seconds < 1 else f"{seconds:.0f} s"


def _taken(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.1f} MiB"
