"""The example of docs/engines.md runs as printed, in three processes."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "engines.md"


async def test_the_example_runs_in_three_processes(
    launch: Callable[..., Any], tmp_path: Path, socket_dir: Path, eventually: Any
) -> None:
    engine, frontend = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
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
