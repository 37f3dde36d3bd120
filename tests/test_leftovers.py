"""A run is blamed for what it has left behind, and for nothing that others have."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

from tests.leftovers import RUN, processes_of

ROOT = Path(__file__).resolve().parents[1]
WAITING = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]


def start(run: str) -> subprocess.Popen[bytes]:
    """Starts a process of a run, in the directory of the tests."""
    process = subprocess.Popen(
        WAITING, env={**os.environ, RUN: run}, cwd=ROOT / "tests", stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_a_process_of_the_run_is_found_and_no_other() -> None:
    run, other = secrets.token_hex(8), secrets.token_hex(8)
    processes = [start(run), start(other)]
    assert [line.split(":")[0] for line in processes_of(run)] == [f"process {processes[0].pid}"]
    for process in processes:
        process.communicate()
    assert processes_of(run) == []


def test_the_program_says_what_is_left() -> None:
    run = secrets.token_hex(8)
    process = start(run)
    program = "import tests.leftovers as leftovers; leftovers._GRACE_S = 0; leftovers.main()"
    environment = {**os.environ, RUN: run, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"process {process.pid}: {sys.executable} -c" in done.stdout
    process.communicate()
