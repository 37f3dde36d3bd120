"""``shmring inspect`` and ``shmring top``: an engine in a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import io
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from click.testing import CliRunner
from rich.cells import cell_len
from rich.console import Console

import shmring
from shmring.engine.protocol import ChatMessage, GenerateRequest, SamplingParams, TextPart
from shmring.engine.scheduler import SchedulerConfig
from shmring.frontend.cli import main
from shmring.frontend.commands import top
from tests.waiting import eventually

ROOT = Path(__file__).resolve().parents[3]
ESCAPE = re.compile(r"\x1b(?:\[[0-9;?]*[a-zA-Z]|[()][A-Z0-9])")


def shown(snapshot: shmring.RingSnapshot, before: shmring.RingSnapshot | None = None) -> str:
    return "\n".join(lines_of(snapshot, 120, 40, before))


def lines_of(snapshot: shmring.RingSnapshot, width: int, height: int, before: shmring.RingSnapshot | None = None) -> list[str]:
    """Returns the lines that a terminal shows; more columns than it has would wrap them."""
    return printed(top.screen_of(snapshot, before, width, height), 10 * width)


def printed(what: Any, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(what)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]  # it is a StringIO


async def run(*arguments: str) -> Any:
    return await asyncio.to_thread(CliRunner().invoke, main, list(arguments))


async def test_json_is_the_snapshot(serve: Any, connect: Any, socket_dir: Path) -> None:
    ring = await serve()
    await connect()
    result = await run("inspect", ring.name, "--socket-dir", str(socket_dir), "--json")
    assert result.exit_code == 0, result.output
    assert msgspec.convert(json.loads(result.stdout), shmring.RingSnapshot).runs == ring.inspect().runs


async def test_a_stuck_slot_and_its_request_are_shown(serve: Any, connect: Any, socket_dir: Path) -> None:
    ring = await serve(slab_nbytes="4MiB")
    client = await connect(description="the [red]frontend")
    answers = [
        asyncio.create_task(client.request({"x": torch.zeros(100_000)}, request_id=f"request-{number}")) for number in range(2)
    ]
    first, second = await ring.claim(), await ring.claim()
    ring.inspect()
    with first:
        kept = first.payload["x"]
        await first.reply(1)
    result = await run("inspect", ring.name, "--socket-dir", str(socket_dir))
    assert result.exit_code == 0, result.output
    for part in ("1 running", "request-1", "left and still viewed (1)", "request-0", "the [red]frontend (client 1)", "0.4 MiB"):
        assert part in result.stdout, result.stdout
    bar = result.stdout.splitlines()[3:7]
    assert {"d", "c", "r", "."} <= set("".join(bar))
    with second:
        await second.reply(2)
    await asyncio.gather(*answers)
    del first, second, kept


async def test_rates_are_of_the_time_between(serve: Any) -> None:
    ring = await serve()
    before = ring.inspect()
    later = msgspec.structs.replace(
        before, time_s=before.time_s + 2, statistics=before.statistics | {"finished": 10, "received_nbytes": 4_000_000}
    )
    assert "5 requests/s   2.0 MB/s" in shown(later, before)
    assert "requests/s" not in shown(later)
    assert "requests/s" not in shown(later, msgspec.structs.replace(before, epoch=before.epoch + 1))


async def test_the_server_s_steps_are_shown(serve: Any) -> None:
    ring = await serve()
    ring.add_to_snapshots(lambda: {"steps_s": [0.001, 0.002, 0.5], "step": {"what": "a step", "age_s": 61.0}})
    text = shown(ring.inspect())
    assert "steps p50 2.0 ms" in text
    assert "in a step for 61 s" in text


async def test_what_can_not_be_a_name_is_one_line(socket_dir: Path) -> None:
    for command in ("inspect", "top"):
        result = await run(command, "a/b", "--socket-dir", str(socket_dir))
        assert result.exit_code == 1
        assert result.stderr.startswith(f"shmring {command}: 'a/b' can't name an engine: ")
        assert result.stderr.count("\n") == 1


async def test_without_an_engine_it_says_why(socket_dir: Path) -> None:
    result = await run("inspect", "nobody", "--socket-dir", str(socket_dir))
    assert result.exit_code == 1
    assert "no engine listens" in result.stderr


async def test_a_server_with_several_engines_has_none_of_its_own_name(socket_dir: Path, serve: Any) -> None:
    await serve(name="two-0")
    await serve(name="two-1")
    result = await run("inspect", "two", "--socket-dir", str(socket_dir))
    assert (result.exit_code, result.stderr) == (
        1,
        "shmring inspect: the server two has several engines: name one of two-0, two-1\n",
    )


async def test_a_server_says_where_requests_stand_who_costs_most_and_what_takes_the_time(
    open_core: Any, socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await open_core({"step_s": 0.02, "tokens": 100_000}, scheduler_config=SchedulerConfig(max_num_seqs=1))
    core = engine.core
    monkeypatch.setattr(core, "_parts_s", lambda: {"choosing": 0.75 * core.metrics.step_seconds})

    async def ask(owner: str, name: str) -> None:
        question = GenerateRequest([ChatMessage("user", [TextPart("Hi")])], [], SamplingParams(), owner=owner)
        async for _ in engine.client.generate(question, request_id=name):
            pass

    asked = []
    for count, (owner, name) in enumerate((("al[red]ice", "first"), ("al[red]ice", "[i]second\x1b[2J"), ("bob", "third")), 1):
        asked.append(asyncio.create_task(ask(owner, name)))
        await eventually(lambda count=count: len(core._scheduler.all()) == count)
        await eventually(lambda count=count: core.metrics.step_seconds > count)  # whoever came first has used most
    result = await run("inspect", "core", "--socket-dir", str(socket_dir))
    snapshot = core.ring.inspect()
    for task in asked:
        task.cancel()
    await asyncio.wait(asked)
    assert result.exit_code == 0, result.output
    text = result.stdout
    assert "1 running   1 of 1 seats taken   1 paused   1 waiting in line   0 not yet taken up" in text
    assert re.search(r"loop late by \d+ ms", text)
    assert "Choosing tokens takes" in text.replace("\n", " ")
    assert re.search(
        r"^request \(3\) +state, place +what it waits for, or does +caller +prompt +tokens +took +age *$",
        text,
        re.MULTILINE,
    )
    assert re.search(
        r"^\[i\]second\\x1b\[2J +waiting 1 +all seats are taken +al\[red\]ice +0\.00 s +\d+ s *$", text, re.MULTILINE
    )
    first = re.search(
        r"^first +(?:running|paused +others have their turn) +al\[red\]ice +(\d+) +(\d+) +[0-9.]+ s +\d+ s", text, re.MULTILINE
    )
    assert first is not None, text
    assert int(first[1]) > 0
    assert int(first[2]) > 0
    assert re.search(
        r"^caller +in steps, last 10 s +beside them +in decoders +share +all, last minute +requests *\n"
        r"al\[red\]ice +[0-9.]+ s +0\.00 s +[0-9.]+ s +\d+% +[0-9.]+ s +2 *\n"
        r"bob +[0-9.]+ s +0\.00 s +[0-9.]+ s +\d+% +[0-9.]+ s +1 *$",
        text,
        re.MULTILINE,
    ), text
    assert re.search(r"^\d+% +choosing tokens *\n(?:.*\n)*?\d+% +other work of steps *$", text, re.MULTILINE), text
    for width, height in ((80, 24), (60, 20)):
        lines = lines_of(snapshot, width, height)
        assert max(map(cell_len, lines)) <= width, lines
        assert len(lines) <= height, lines
        assert width < 80 or "waiting 1" in "\n".join(lines), lines
        for part in ("request (3)", "al[red]ice", "choosing tokens", "caller", "frontend (1)"):
            assert part in "\n".join(lines), lines
    [line] = top._greatest(snapshot)[1:]
    assert re.fullmatch(r"\d+% of what requests took for al\[red\]ice", line)


def test_where_not_all_requests_are_shown_those_that_wait_come_first_and_the_rest_is_counted() -> None:
    rows = [[f"request {number}", "waiting" if number >= 10 else "running"] for number in range(12)]
    table = top._Table(["request", "state"], rows, [False] * 12, long=0, urgent=(10, 11), count=40)
    first, second = ([line.split("  ")[0] for line in printed(table.drawn(60, height), 60)] for height in (5, 12))
    assert first[1:] == ["request 10", "request 11", "request 0", "request 1", "... 36 more: shmring inspect"]
    assert second[1:3] == ["request 0", "request 1"]


# -- what fits a terminal -----------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def crowded(serve: Any, connect: Any) -> AsyncIterator[shmring.Ring[Any]]:
    """A ring with all that a snapshot shows, and names that are as long as they may be."""
    ring = await serve(slab_nbytes="64MiB")
    clients = [await connect(description=f"frontend {number} " + "x" * 100) for number in range(14)]
    answers = [
        asyncio.create_task(client.request({"x": torch.zeros(300_000)}, request_id=f"{number}-{again}-" + "漢" * 80))
        for again in range(2)
        for number, client in enumerate(clients)
    ]
    claims = [await ring.claim() for _ in range(4)]
    kept = []
    for claim in claims[:2]:
        with claim:
            kept.append(claim.payload["x"])
            await claim.reply(1)
    ring.add_to_snapshots(lambda: {"steps_s": [0.001], "step": {"what": "a step", "age_s": 61.0}})
    try:
        yield ring
    finally:
        for answer in answers:
            answer.cancel()
        await asyncio.gather(*answers, return_exceptions=True)
        del claims, claim, kept


async def test_all_rows_fit_the_terminal_and_nothing_wraps(serve: Any, connect: Any) -> None:
    async with crowded(serve, connect) as ring:
        errors = [shmring.snapshot.ErrorSnapshot(1.0, "x" * 200)] * 9
        snapshot = msgspec.structs.replace(ring.inspect(), errors=errors)
    for width, height in ((80, 24), (60, 20), (120, 50), (40, 12), (20, 5)):
        lines = lines_of(snapshot, width, height, snapshot)
        assert max(map(cell_len, lines)) <= width, lines
        assert len(lines) <= height, lines
        if width >= 60:
            requests = f"request ({snapshot.request_count})"
            for part in (requests, "frontend (14)", "left and still viewed (2)", "error", "d left, still viewed", "-0-漢"):
                assert part in "\n".join(lines), lines


async def test_what_is_asked_for_once_is_not_cut(serve: Any, connect: Any, socket_dir: Path) -> None:
    async with crowded(serve, connect) as ring:
        result = await run("inspect", ring.name, "--socket-dir", str(socket_dir))
        words = result.stdout.replace("\n", "").replace(" ", "")
        assert "漢" * 20 in words
        assert words.count("漢") >= 12 * 80
        assert "…" not in result.stdout


def top_command(name: str, socket_dir: Path) -> list[str]:
    return [sys.executable, "-P", "-m", "shmring.frontend.cli", "top", name, f"--socket-dir={socket_dir}"]


async def top_into_a_pipe(name: str, socket_dir: Path) -> tuple[asyncio.subprocess.Process, list[str]]:
    """``shmring top`` without a terminal, and the first four lines that it says."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = await asyncio.create_subprocess_exec(*top_command(name, socket_dir), stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    return process, [(await asyncio.wait_for(process.stdout.readline(), 60)).decode() for _ in range(4)]


async def frames_of(name: str, socket_dir: Path, width: int, height: int, twice: bytes) -> list[list[str]]:
    """The lines of what ``shmring top`` draws in a terminal, until it has drawn something twice."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"}
    environment = {name: value for name, value in environment.items() if name not in ("COLUMNS", "LINES")}
    with subprocess.Popen(
        top_command(name, socket_dir), stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        said = b""
        while said.count(twice) < 2:
            data = await asyncio.to_thread(os.read, ours, 65536)
            assert data
            said += data
        process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(process.wait, 60) == 0
        os.close(ours)
    frames = said.decode(errors="replace").split("\x1b[H")[1:-1]  # each begins at the upper left
    assert frames
    return [ESCAPE.sub("", frame).split("\r\n") for frame in frames]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 20)])
async def test_a_terminal_shows_it_in_place(serve: Any, connect: Any, socket_dir: Path, width: int, height: int) -> None:
    async with crowded(serve, connect) as ring:
        frames = await frames_of(ring.name, socket_dir, width, height, b"frontend (14)")
    for lines in frames:
        assert len(lines) <= height
        assert max(cell_len(line) for line in lines) <= width


async def test_a_terminal_shows_all_engines_of_a_server(serve: Any, socket_dir: Path) -> None:
    for number in range(2):
        await serve(name=f"two-{number}")
    lines = (await frames_of("two", socket_dir, 80, 24, b"two-1 (pid"))[-1]
    assert [line.split()[0] for line in lines if "(pid" in line] == ["two-0", "two-1"], lines
    assert len(lines) <= 24


async def test_without_a_terminal_there_is_a_line_for_each_engine_and_second(serve: Any, socket_dir: Path) -> None:
    await serve(name="two-0")
    await serve(name="two-1")
    process, lines = await top_into_a_pipe("two", socket_dir)
    for line, name in zip(lines, ["two-0", "two-1"] * 2, strict=True):
        assert re.match(rf"\d{{4}}-\d\d-\d\dT\S+ {name} \(pid {os.getpid()}\), 0 running, 0 not yet taken up, ", line), line
        assert " MiB: " in line
        assert " MiB free, " in line
    assert ["requests/s" in line for line in lines] == [False, False, True, True]
    process.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(process.wait(), 60) == 0


async def test_without_a_terminal_and_an_engine_it_goes_on_until_nobody_reads(socket_dir: Path) -> None:
    process, lines = await top_into_a_pipe("nobody", socket_dir)
    assert all(" nobody: no engine listens at " in line for line in lines)
    process._transport.get_pipe_transport(1).close()  # type: ignore[attr-defined]  # as `| head -2` does
    assert await asyncio.wait_for(process.wait(), 60) == 0
