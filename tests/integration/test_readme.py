"""The README's example runs as printed, in two processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shmring.frontend.commands.serve_process import ServerProcess

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def block(containing: str) -> str:
    [example] = [code for code in BLOCKS if containing in code]
    return example


async def test_the_example_runs_in_two_processes(launch: Callable[..., Any], tmp_path: Path, socket_dir: Path) -> None:
    (tmp_path / "engine.py").write_text(block("slab_nbytes="))
    (tmp_path / "frontend.py").write_text(block("client.slot("))
    launch(str(tmp_path / "engine"), XDG_RUNTIME_DIR=str(socket_dir))
    frontend = launch(str(tmp_path / "frontend"), XDG_RUNTIME_DIR=str(socket_dir))
    await frontend.died()
    first, second, statistics = frontend.lines
    assert first == "{'mean': 0.5}"
    assert second == "{'mean': 1.0}"
    assert "copies=1" in statistics
    assert "in_place=1" in statistics


def test_the_first_screen_has_a_program_of_ten_lines_that_runs(socket_dir: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    assert readme.index("```python") < readme.index("![")
    code = [line for line in BLOCKS[0].splitlines() if line.strip()]
    assert len(code) <= 10
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(socket_dir)}
    ended = subprocess.run(
        [sys.executable, "-c", BLOCKS[0]], capture_output=True, text=True, timeout=100, env=environment, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "1.0\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/workers.md"])
def test_programs_end_quietly_by_ctrl_c(page: str, socket_dir: Path) -> None:
    """Those that wait for others: an engine, and a client or a worker without an engine."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    programs = [code for code in blocks if "KeyboardInterrupt" in code]
    assert len(programs) == 2
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(socket_dir)}
    for number, code in enumerate(reversed(programs)):  # the one that waits for the engine first
        starts = "import shmring.threads, signal, threading, torch; shmring.serve, shmring.connect, shmring.threads.join\n"
        starts += "threading.Timer(3.0, signal.raise_signal, [signal.SIGINT]).start()\n"
        ended = subprocess.run(
            [sys.executable, "-c", starts + code, "0"],
            capture_output=True,
            text=True,
            timeout=100,
            env=environment,
            check=False,
        )
        said = [line for line in ended.stderr.splitlines() if not line.startswith("waiting for ")]
        assert (ended.returncode, said) == (0, []), number


def test_the_transport_example_is_about_twenty_lines() -> None:
    code = [line for name in ("slab_nbytes=", "client.slot(") for line in block(name).splitlines() if line.strip()]
    assert len(code) <= 26


@pytest.mark.slow
def test_the_servers_examples_run(tmp_path: Path) -> None:
    embed, chat = block("client.embeddings.create("), block("client.chat.completions.create(")
    assert run_against("fingerprints", embed, tmp_path) == "1 512\n"
    preparation = embed[: embed.index("answer = ")]
    answer = run_against("synthetic", preparation + chat, tmp_path)
    assert answer.startswith("[synthetic] token2 ")
    assert answer.endswith(" token20")


def run_against(executor: str, code: str, tmp_path: Path) -> str:
    """Runs an example against a server with this executor; returns what it printed."""
    arguments = ["--port=0", f"--executor={executor}", f"--name=readme-{os.getpid()}", "--slab-nbytes=64MiB"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(tmp_path)}
    with ServerProcess.start(arguments, environment=environment, cwd=tmp_path, stop_limit_s=20) as server:
        server.wait_until_ready()
        code = code.replace("http://127.0.0.1:8000", server.url)
        example = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )
        assert example.returncode == 0, example.stderr
        server.process.send(signal.SIGINT)
        assert server.process.wait(20) == 0
    return example.stdout
