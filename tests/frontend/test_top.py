"""``shmring inspect`` and ``shmring top``: an engine in a terminal."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import msgspec
import torch
from click.testing import CliRunner
from rich.console import Console

import shmring
from shmring.frontend import top
from shmring.frontend.cli import main


def shown(snapshot: shmring.RingSnapshot, before: shmring.RingSnapshot | None = None) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(top.view(snapshot, before))
    return console.file.getvalue()  # type: ignore[attr-defined]  # it is a StringIO


async def run(*arguments: str) -> Any:
    return await asyncio.to_thread(CliRunner().invoke, main, list(arguments))


async def test_json_is_the_snapshot(serve: Any, connect: Any, socket_dir: Path) -> None:
    ring = await serve()
    await connect()
    result = await run("inspect", ring.name, "--socket-dir", str(socket_dir), "--json")
    assert result.exit_code == 0, result.output
    assert msgspec.convert(json.loads(result.stdout), shmring.RingSnapshot).runs == ring.inspect().runs


async def test_a_stuck_slot_and_its_request_are_shown(serve: Any, connect: Any, socket_dir: Path, eventually: Any) -> None:
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
    for part in ("1 running", "request-1", "left and still viewed (1)", "request-0", "1 the [red]frontend", "0.4 MiB"):
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
    ring.add_to_snapshots(lambda: {"waiting": 3, "steps_s": [0.001, 0.002, 0.5], "step": {"what": "a step", "age_s": 61.0}})
    text = shown(ring.inspect())
    assert "3 wait for a step" in text
    assert "steps p50 2.0 ms" in text
    assert "in a step for 61 s" in text


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
