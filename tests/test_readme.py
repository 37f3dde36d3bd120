"""The README's example runs as printed, in two processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def block(containing: str) -> str:
    [found] = [code for code in BLOCKS if containing in code]
    return found


def test_the_example_runs_in_two_processes(tmp_path: Path, socket_dir: Path) -> None:
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(socket_dir), "PYTHONPATH": str(ROOT)}
    (tmp_path / "engine.py").write_text(block("shmring.serve("))
    (tmp_path / "frontend.py").write_text(block("shmring.connect("))
    engine = subprocess.Popen([sys.executable, "engine.py"], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        frontend = subprocess.run(
            [sys.executable, "frontend.py"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        engine.send_signal(signal.SIGINT)
        try:
            _, errors = engine.communicate(timeout=20)
        finally:
            engine.kill()
    assert frontend.returncode == 0, frontend.stderr + errors
    first, second, statistics = frontend.stdout.splitlines()
    assert first == "{'mean': 0.5}"
    assert second == "{'mean': 1.0}"
    assert "copies=1" in statistics
    assert "in_place=1" in statistics


def test_the_transport_example_is_about_twenty_lines() -> None:
    code = [line for name in ("shmring.serve(", "shmring.connect(") for line in block(name).splitlines() if line.strip()]
    assert len(code) <= 24
