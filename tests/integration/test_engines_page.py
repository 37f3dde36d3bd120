"""The examples of docs/engines.md run as printed, each in processes of its own."""

from __future__ import annotations

import ast
import asyncio
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shmring

PAGE = Path(__file__).resolve().parents[2] / "docs" / "engines.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)

SLOW_ANSWER = """
import asyncio, signal, shmring

async def answer(claim):
    await asyncio.sleep(1)
    await claim.reply("answered")

"""


async def test_the_example_runs_in_three_processes(
    launch: Callable[..., Any], tmp_path: Path, socket_dir: Path, eventually: Any
) -> None:
    engine, frontend, *_ = EXAMPLES
    (tmp_path / "engine.py").write_text(engine)
    (tmp_path / "frontend.py").write_text(frontend)
    names = ["vision-0", "vision-1"]
    for name in names:
        launch(str(tmp_path / "engine"), name, XDG_RUNTIME_DIR=str(socket_dir))
    await eventually(lambda: all((socket_dir / "shmring" / f"{name}.sock").exists() for name in names), 30)
    process = launch(str(tmp_path / "frontend"), XDG_RUNTIME_DIR=str(socket_dir))
    await process.died()
    spread, named, owners, slot = process.output.read_text().splitlines()
    engines = ast.literal_eval(spread)
    assert len(engines) == 8
    assert set(engines) == set(names)  # how many from each depends on how soon they answer
    assert named == "{'engine': 'vision-1', 'mean': 1.0}"
    assert owners == "1"
    assert slot.startswith("True {'vision-0': EngineLoad(in_flight=")


async def test_an_engine_stops_in_good_order(launch: Callable[..., Any], tmp_path: Path, socket_dir: Path) -> None:
    [example] = [example for example in EXAMPLES if "ring.drain" in example]
    (tmp_path / "stopping.py").write_text(SLOW_ANSWER + example + "\nasyncio.run(main())\n")
    engine = launch(str(tmp_path / "stopping"), XDG_RUNTIME_DIR=str(socket_dir))
    directory = str(socket_dir / "shmring")
    async with shmring.connect("vision-0", socket_dir=directory, connect_timeout_s=30) as client:
        submitted = [await client.submit("first"), await client.submit("second")]
        await asyncio.sleep(0.3)  # they are claimed
        engine.signal(signal.SIGTERM)
        await asyncio.sleep(0.2)
        late = await client.submit("late")
        assert [await submission.result() for submission in submitted] == ["answered"] * 2
        with pytest.raises(shmring.EngineDeadError, match="the engine is restarted"):
            await late.result()
    await engine.died()
    assert engine.output.read_text() == ""
