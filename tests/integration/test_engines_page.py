"""The examples of docs/engines.md run as printed, each in processes of its own."""

from __future__ import annotations

import ast
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shmring
from tests.waiting import eventually

PAGE = Path(__file__).resolve().parents[2] / "docs" / "engines.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)

WATCHED = """
import asyncio, os, signal, sys, shmring

async def answer(claim):
    print("claimed", flush=True)
    while not os.path.exists(sys.argv[1]):
        await asyncio.sleep(0.01)
    await claim.reply("answered")

async def drain(ring, timeout, ours=shmring.Ring.drain):
    draining = asyncio.ensure_future(ours(ring, timeout))
    await asyncio.sleep(0)
    print("draining", flush=True)
    return await draining

shmring.Ring.drain = drain

"""


async def test_the_example_runs_in_three_processes(launch: Callable[..., Any], tmp_path: Path, socket_dir: Path) -> None:
    engine, frontend, *_ = EXAMPLES
    (tmp_path / "engine.py").write_text(engine)
    (tmp_path / "frontend.py").write_text(frontend)
    names = ["vision-0", "vision-1"]
    for name in names:
        launch(str(tmp_path / "engine"), name, XDG_RUNTIME_DIR=str(socket_dir))
    await eventually(lambda: all((socket_dir / "shmring" / f"{name}.sock").exists() for name in names), 30)
    process = launch(str(tmp_path / "frontend"), XDG_RUNTIME_DIR=str(socket_dir))
    await process.died()
    spread, named, owners, slot = process.lines
    engines = ast.literal_eval(spread)
    assert len(engines) == 8
    assert set(engines) == set(names)  # how many from each depends on how soon they answer
    assert named == "{'engine': 'vision-1', 'mean': 1.0}"
    assert owners == "1"
    assert slot.startswith("True {'vision-0': EngineLoad(in_flight=")


async def test_an_engine_stops_in_good_order(launch: Callable[..., Any], tmp_path: Path, socket_dir: Path) -> None:
    [example] = [example for example in EXAMPLES if "ring.drain" in example]
    (tmp_path / "stopping.py").write_text(WATCHED + example + "\nasyncio.run(main())\n")
    go_on = tmp_path / "go on"
    engine = launch(str(tmp_path / "stopping"), str(go_on), XDG_RUNTIME_DIR=str(socket_dir))
    directory = str(socket_dir / "shmring")
    async with shmring.connect("vision-0", socket_dir=directory, connect_timeout_s=30) as client:
        submitted = [await client.submit("first"), await client.submit("second")]
        assert [await engine.said(), await engine.said()] == [["claimed"]] * 2
        engine.signal(signal.SIGTERM)
        assert await engine.said() == ["draining"]
        late = await client.submit("late")
        go_on.touch()
        assert [await submission.result() for submission in submitted] == ["answered"] * 2
        with pytest.raises(shmring.EngineDeadError, match="the engine is restarted"):
            await late.result()
    await engine.died()
    assert engine.output.read_text().splitlines() == ["claimed", "claimed", "draining"]
